"""Where a body ends (RFC 9112 section 6). Pure: bytes in, byte counts out.

httptools reports *that* a message ended, not *where*. A request may be followed by the next one
in the same read, so its end must be known to the byte: that is what these readers are for.
"""

import re
from typing import Protocol

from ciuicflow.errors import ProtocolError

# chunk-size [ chunk-ext ] CRLF. 16 hex digits hold any size; a control character in an extension
# is what smuggling through chunk extensions needs, so none is let through.
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")

MAX_CHUNK_LINE_BYTES = 4096  # a size and its extensions
MAX_TRAILER_BYTES = 16384


class BadFraming(ProtocolError):
    """A body that does not follow its declared framing."""


class BodyReader(Protocol):
    """Counts the bytes of one body."""

    done: bool

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """Return how many leading bytes of `data` belong to this body.

        The content, without framing, is appended to `payload` where one is given.
        Raises BadFraming; bytes already counted stay valid.
        """


class LengthBody:
    """A body of `Content-Length` bytes (RFC 9112 section 6.2)."""

    __slots__ = ("_left", "done")

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """See BodyReader."""
        taken = min(self._left, len(data))
        self._left -= taken
        self.done = self._left == 0
        if payload is not None and taken:
            payload.append(data[:taken])
        return taken


class ChunkedBody:
    """A chunked body with extensions and trailers (RFC 9112 section 7.1), read strictly.

    Refuses what parsers are known to disagree on: bare LF or CR, signs, `0x`, over-long sizes,
    control characters in extensions, missing CRLF after a chunk.
    """

    __slots__ = ("_after_data", "_in_trailer", "_left", "_partial", "_trailer_bytes", "done")

    def __init__(self) -> None:
        self.done = False
        self._left = 0  # bytes of the current chunk still to come
        self._partial = bytearray()  # a line whose end has not come yet
        self._after_data = False
        self._in_trailer = False
        self._trailer_bytes = 0

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """See BodyReader."""
        position, end = 0, len(data)
        while position < end and not self.done:
            if self._left:
                taken = min(self._left, end - position)
                if payload is not None:
                    payload.append(data[position : position + taken])
                self._left -= taken
                position += taken
                continue
            newline = data.find(b"\n", position) + 1
            self._partial += data[position : newline or end]
            position = newline or end
            if len(self._partial) > MAX_CHUNK_LINE_BYTES:
                raise BadFraming("chunk line too long")
            if newline:
                line = bytes(self._partial)
                self._partial.clear()
                self._line(line)
            elif self._after_data and self._partial != b"\r":
                raise BadFraming("chunk data is longer than its size")
        return position

    def _line(self, line: bytes) -> None:
        if self._in_trailer:
            self._trailer(line)
        elif self._after_data:
            if line != b"\r\n":
                raise BadFraming("chunk data is longer than its size")
            self._after_data = False
        else:
            match = _CHUNK_LINE.fullmatch(line)
            if match is None:
                raise BadFraming("malformed chunk size")
            self._left = int(match[1], 16)
            self._in_trailer = self._left == 0
            self._after_data = not self._in_trailer

    def _trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        if line == b"\r\n":
            self.done = True
        elif self._trailer_bytes > MAX_TRAILER_BYTES:
            raise BadFraming("trailers too large")
        elif _TRAILER_LINE.fullmatch(line) is None:
            raise BadFraming("malformed trailer")
