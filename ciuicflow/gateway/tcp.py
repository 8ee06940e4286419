"""What is asked of, and told to, the kernel about a connection (Linux)."""

import asyncio
import socket
import sys
from typing import Final

# include/net/tcp_states.h: the connection is gone; the peer has closed its side.
_CLOSE: Final = 7
_CLOSE_WAIT: Final = 8


def send_at_once(transport: asyncio.BaseTransport) -> None:
    """Let no byte wait for an acknowledgement (TCP_NODELAY): a token is a small segment."""
    transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def reset_on_close(transport: asyncio.BaseTransport) -> None:
    """Make close send RST: struct linger {on, 0 s}."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def peer_has_left(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer has closed, also behind bytes that nobody has read yet.

    tcpi_state, the first byte of struct tcp_info (include/uapi/linux/tcp.h).
    """
    return _info(transport, 1)[0] in (_CLOSE, _CLOSE_WAIT)


def bytes_acked(transport: asyncio.BaseTransport) -> int:
    """How many bytes the peer has taken: tcpi_bytes_acked, at offset 120 (Linux >= 4.1)."""
    return int.from_bytes(_info(transport, 128)[120:128], sys.byteorder)


def _info(transport: asyncio.BaseTransport, length: int) -> bytes:
    sock = transport.get_extra_info("socket")
    # Closed already, though nobody has been told yet: asyncio's TLS then has no socket.
    closed = bytes((_CLOSE,)) + bytes(length - 1)
    if sock is None:
        return closed
    try:
        return bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, length))
    except OSError:
        return closed
