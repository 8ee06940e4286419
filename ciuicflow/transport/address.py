"""Transport addresses: SCHEME://HOST:PORT."""

import socket
from typing import TypeAlias

from ciuicflow.transport.base import TransportUnavailable

Name: TypeAlias = tuple[str, int] | tuple[str, int, int, int]
"""A socket's name, IPv4 or IPv6."""


def split_uri(uri: str) -> tuple[str, str]:
    """Split SCHEME://ADDRESS; raises TransportUnavailable where it is none."""
    scheme, separator, address = uri.partition("://")
    if not separator:
        raise TransportUnavailable(f"{uri!r} is not SCHEME://ADDRESS, such as tcp://127.0.0.1:7000")
    return scheme, address


def split_host_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT or [HOST]:PORT; raises TransportUnavailable where it is none."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise TransportUnavailable(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def join_host_port(name: Name) -> str:
    """Write a socket's name as HOST:PORT."""
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_and_peer(sock: socket.socket) -> tuple[str, str]:
    """Return both ends of a connected socket as HOST:PORT; raises OSError where it is not."""
    return join_host_port(sock.getsockname()), join_host_port(sock.getpeername())
