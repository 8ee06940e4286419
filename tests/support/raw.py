"""A raw HTTP client: any bytes in any chunking, answers read by their framing."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from types import TracebackType

from support import wire
from support.wire import Message, Wire

Address = tuple[str, int]


class Client(Wire):
    """One client connection. A context manager; `close` is a FIN, `abort` a reset."""

    def __init__(
        self,
        address: Address,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str = "localhost",
        timeout_s: float = 10.0,
        receive_buffer: int | None = None,
    ) -> None:
        sock = socket.socket()
        try:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.settimeout(timeout_s)
            sock.connect(address)
            if tls is not None:
                sock = tls.wrap_socket(
                    sock, server_hostname=server_name, suppress_ragged_eofs=False
                )
        except BaseException:
            sock.close()
            raise
        super().__init__(sock, timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def drip(self, pieces: Iterable[bytes], gap_s: float = 0.0) -> None:
        """Send each piece as a segment of its own."""
        for piece in pieces:
            self.send(piece)
            time.sleep(gap_s)

    def response(self, method: str = "GET") -> Message:
        return wire.read_response(self, method.encode())

    def exchange(
        self,
        method: str = "GET",
        target: str = "/",
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes | None = None,
    ) -> Message:
        """One request with Host (and Content-Length) and its whole answer."""
        self.send(wire.request_bytes(method, target, headers, body))
        return self.response(method)

    def push(self, data: bytes, blocked_s: float = 0.5) -> int:
        """Send as much as the other side takes; return how much when it takes no more."""
        before, sent = self.sock.gettimeout(), 0
        self.sock.settimeout(blocked_s)
        view = memoryview(data)
        try:
            while sent < len(data):
                sent += self.sock.send(view[sent : sent + 65536])
        except TimeoutError:
            pass
        finally:
            self.sock.settimeout(before)
        return sent

    def send_ignoring_close(self, data: bytes) -> None:
        """Send although the peer may have closed already: the answer is what counts."""
        try:
            self.send(data)
        except (BrokenPipeError, ConnectionResetError):
            pass


def cut(data: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    """Split bytes into pieces of these sizes; what is left comes last."""
    start = 0
    for size in sizes:
        if start >= len(data):
            return
        yield data[start : start + size]
        start += size
    if start < len(data):
        yield data[start:]


def fetch(
    address: Address,
    method: str = "GET",
    target: str = "/",
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes | None = None,
    *,
    tls: ssl.SSLContext | None = None,
) -> Message:
    """One request on a connection of its own."""
    with Client(address, tls=tls) as client:
        return client.exchange(method, target, headers, body)
