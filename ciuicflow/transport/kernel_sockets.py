"""TCP sockets that a library of this process opened: which there are, and what is known of them.

A library's descriptor is never closed and never duplicated here: a duplicate would keep the peer
from seeing the end of the stream.
"""

import contextlib
import os
import socket
from collections.abc import Iterator

import msgspec

from ciuicflow.transport.tcp_info import TcpInfo, read_bytes_acked, read_tcp_info


class KernelSocket(msgspec.Struct, frozen=True):
    """A descriptor and the inode behind it, which tells when the descriptor is used anew."""

    descriptor: int
    inode: int

    def info(self) -> TcpInfo:
        """Return what the kernel tells (10 us); nothing of a socket that has gone."""
        with self._borrowed() as sock:
            return TcpInfo() if sock is None else read_tcp_info(sock)

    def bytes_acked(self) -> int:
        """Return how many bytes the peer's kernel has taken; 0 of a socket that has gone."""
        with self._borrowed() as sock:
            return 0 if sock is None else read_bytes_acked(sock)

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[socket.socket | None]:
        try:
            if os.fstat(self.descriptor).st_ino != self.inode:
                raise OSError("another file by now")
            sock = socket.socket(fileno=self.descriptor)
        except OSError:
            yield None
            return
        try:
            yield sock
        finally:
            sock.detach()


def connected() -> frozenset[KernelSocket]:
    """Return the connected TCP sockets of this process (1.4 ms with 90 descriptors, measured)."""
    with os.scandir("/proc/self/fd") as entries:
        found = [_socket_of(entry) for entry in entries]
    return frozenset(each for each in found if each is not None and _is_connected_tcp(each))


def _socket_of(entry: "os.DirEntry[str]") -> KernelSocket | None:
    try:
        kind, _, inode = os.readlink(entry.path).partition(":")
    except OSError:
        return None  # closed meanwhile
    return KernelSocket(int(entry.name), int(inode.strip("[]"))) if kind == "socket" else None


def _is_connected_tcp(kernel_socket: KernelSocket) -> bool:
    with kernel_socket._borrowed() as sock:
        try:
            internet = sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6)
            return internet and sock is not None and sock.getpeername() is not None
        except OSError:
            return False  # a listener
