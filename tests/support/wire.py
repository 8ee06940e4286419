"""HTTP/1.1 as bytes on a socket: build messages and read them by their framing.

Written apart from the gateway's parser on purpose: the tests must not share its opinions.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

CRLF = b"\r\n"
RECORD_BYTES = 8 << 20  # of one connection; long transfers must not fill the test's memory
LAST_CHUNK = b"0\r\n\r\n"

Headers = list[tuple[bytes, bytes]]
End = Literal["fin", "reset"]


class EndedError(Exception):
    """The peer ended the connection inside a message, or between messages."""


@dataclass(slots=True)
class Message:
    """One request or response: the start line, the fields in order, the body and how it ended."""

    start: bytes
    headers: Headers
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    trailers: Headers = field(default_factory=list)
    complete: bool = False
    informational: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.start.split(b" ", 2)[1])

    @property
    def method(self) -> bytes:
        return self.start.split(b" ", 1)[0]

    @property
    def target(self) -> bytes:
        return self.start.split(b" ")[1]

    def all(self, name: str) -> list[bytes]:
        """Every value of a field, in order, whatever the case of its name."""
        wanted = name.lower().encode()
        return [value for key, value in self.headers if key.lower() == wanted]

    def get(self, name: str) -> bytes | None:
        """The first value of a field, or None."""
        return next(iter(self.all(name)), None)


class Wire:
    """A socket with a receive buffer and a record of what came when; no wait exceeds a timeout."""

    def __init__(self, sock: socket.socket, timeout_s: float = 10.0) -> None:
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.end: End | None = None
        self.arrivals: list[tuple[float, bytes]] = []
        self._recorded = 0
        self._pending = bytearray()

    @property
    def received(self) -> bytes:
        """Everything that ever arrived, up to the bound of the record."""
        return b"".join(data for _, data in self.arrivals)

    def send(self, data: bytes | memoryview) -> None:
        self.sock.sendall(data)

    def fill(self) -> bool:
        """Receive once; False when the peer has ended. Raises TimeoutError."""
        if self.end is not None:
            return False
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            raise
        except OSError:  # a reset, or a broken TLS stream
            self.end = "reset"
            return False
        if not data:
            self.end = "fin"
            return False
        if self._recorded < RECORD_BYTES:
            self.arrivals.append((time.monotonic(), data))
            self._recorded += len(data)
        self._pending += data
        return True

    def line(self) -> bytes:
        """One line without its CRLF."""
        while CRLF not in self._pending:
            if not self.fill():
                raise EndedError(f"{self.end} inside a line: {bytes(self._pending)!r}")
        end = self._pending.index(CRLF)
        line = bytes(self._pending[:end])
        del self._pending[: end + 2]
        return line

    def exactly(self, count: int) -> bytes:
        """That many bytes."""
        while len(self._pending) < count:
            if not self.fill():
                raise EndedError(f"{self.end} with {count - len(self._pending)} bytes to come")
        data = bytes(self._pending[:count])
        del self._pending[:count]
        return data

    def digest(self, count: int) -> bytes:
        """SHA-256 of that many bytes, of which none is kept."""
        digest = hashlib.sha256()
        while count:
            if not self._pending and not self.fill():
                raise EndedError(f"{self.end} with {count} bytes to come")
            piece = self._pending[:count]
            digest.update(piece)
            count -= len(piece)
            del self._pending[: len(piece)]
        return digest.digest()

    def until(self, marker: bytes) -> bytes:
        """Everything up to and including these bytes."""
        while marker not in self._pending:
            if not self.fill():
                raise EndedError(f"{self.end} before {marker!r}: {bytes(self._pending)!r}")
        return self.exactly(self._pending.index(marker) + len(marker))

    def arrival_of(self, marker: bytes) -> float:
        """When the last of these bytes arrived, on the monotonic clock."""
        seen = bytearray()
        for at, data in self.arrivals:
            seen += data
            if marker in seen:
                return at
        raise AssertionError(f"{marker!r} never arrived")

    def rest(self) -> bytes:
        """Everything until the peer ends; `end` then says how."""
        while self.fill():
            pass
        data = bytes(self._pending)
        self._pending.clear()
        return data

    def wait_end(self, within_s: float) -> float | None:
        """Seconds until the peer ended, bytes ignored; None if it did not within that time."""
        started = time.monotonic()
        before = self.sock.gettimeout()
        try:
            while (left := started + within_s - time.monotonic()) > 0:
                self.sock.settimeout(left)
                if not self.fill():
                    return time.monotonic() - started
        except TimeoutError:
            return None
        finally:
            self.sock.settimeout(before)
        return None

    def shut(self) -> None:
        """Say that nothing more will be sent (FIN)."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()

    def abort(self) -> None:
        """Close with a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def read_head(wire: Wire) -> Message:
    """A start line and header fields. Raises EndedError when the peer ends first."""
    start = wire.line()
    return Message(start, _fields(wire))


def _fields(wire: Wire) -> Headers:
    headers: Headers = []
    while line := wire.line():
        name, _, value = line.partition(b":")
        headers.append((name, value.strip(b" \t")))
    return headers


def read_request_body(wire: Wire, message: Message) -> None:
    """The body of a request by RFC 9112 section 6.3; fills what came even when it breaks off."""
    _read_body(wire, message, until_end=False)


def read_response(wire: Wire, method: bytes = b"GET") -> Message:
    """A final response with the interim ones before it; `complete` tells a clean end."""
    interim = []
    while (message := read_head(wire)).status < 200 and message.status != 101:
        interim.append(message)
    message.informational = interim
    if method == b"HEAD" or message.status in (101, 204, 304):
        message.complete = True
    else:
        _read_body(wire, message, until_end=True)
    return message


def _read_body(wire: Wire, message: Message, *, until_end: bool) -> None:
    coding, length = message.get("transfer-encoding"), message.get("content-length")
    try:
        if coding is not None:
            _read_chunks(wire, message)
        elif length is not None:
            message.body = wire.exactly(int(length))
        elif until_end:
            message.body = wire.rest()
            if wire.end == "reset":
                return
    except EndedError:
        message.body = message.body or wire.rest()
        return
    message.complete = True


def _read_chunks(wire: Wire, message: Message) -> None:
    try:
        while size := int(wire.line().partition(b";")[0], 16):
            message.chunks.append(wire.exactly(size))
            if wire.exactly(2) != CRLF:
                raise ValueError("no CRLF after the chunk data")
        message.trailers = _fields(wire)
    finally:
        message.body = b"".join(message.chunks)


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunked(*parts: bytes) -> bytes:
    """A whole chunked body, one chunk for each part."""
    return b"".join(map(chunk, parts)) + LAST_CHUNK


def message_bytes(start: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes = b"") -> bytes:
    """A message as it goes over the wire; framing fields are the caller's business."""
    fields = b"".join(b"%s: %s\r\n" % field for field in headers)
    return start + CRLF + fields + CRLF + body


def request_bytes(
    method: str = "GET",
    target: str = "/",
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes | None = None,
) -> bytes:
    """A request with Host, and with Content-Length if it has a body."""
    extra = [] if body is None else [(b"Content-Length", b"%d" % len(body))]
    start = f"{method} {target} HTTP/1.1".encode("latin-1")
    return message_bytes(start, [(b"Host", b"test.example"), *headers, *extra], body or b"")


def response_bytes(
    body: bytes = b"ok",
    status: str = "200 OK",
    headers: Iterable[tuple[bytes, bytes]] = ((b"Content-Type", b"text/plain"),),
) -> bytes:
    """A response with Content-Length."""
    fields = [*headers, (b"Content-Length", b"%d" % len(body))]
    return message_bytes(b"HTTP/1.1 " + status.encode(), fields, body)


SSE_HEAD = message_bytes(
    b"HTTP/1.1 200 OK",
    [(b"Content-Type", b"text/event-stream"), (b"Transfer-Encoding", b"chunked")],
)
