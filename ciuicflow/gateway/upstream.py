"""A connection to an upstream: sends a request, and finds the edges of its response."""

import asyncio
import ssl
import time
from typing import TYPE_CHECKING, Final, cast

import httptools

from ciuicflow.errors import BadResponse, ProtocolError
from ciuicflow.gateway import tcp
from ciuicflow.gateway.deadlines import NEVER
from ciuicflow.gateway.headers import ResponseHead, read_response_head
from ciuicflow.gateway.meter import is_only_comments

if TYPE_CHECKING:
    from ciuicflow.gateway.pool import Pool
    from ciuicflow.gateway.relay import Exchange

MAX_IDLE_S: Final = 60.0  # what an engine closes sooner, it is seen to close
# The upstream's own hint is a race lost by a round trip: leave this much before it.
IDLE_MARGIN_S: Final = 1.0
# A read of nothing but comments is short, one with a token longer: that is not looked into (1 us).
_COMMENT_BYTES: Final = 96

# How the end of the response is found (RFC 9112 section 6.3).
_HEAD: Final = 0
_LENGTH: Final = 1
_CHUNKED: Final = 2
_UNTIL_CLOSE: Final = 3
_TUNNEL: Final = 4


class UpstreamConnection:
    """One connection; serves one exchange at a time."""

    __slots__ = (
        "_complete",
        "_eof",
        "_event_stream",
        "_keep_alive",
        "_keep_alive_s",
        "_left",
        "_mode",
        "_overrun",
        "_parser",
        "_partial",
        "_pool",
        "_reading_paused",
        "_reused",
        "_touched",
        "deadline",
        "exchange",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self.exchange: Exchange | None = None
        self.deadline = NEVER
        self._reused = False
        self._touched = False  # a byte of the response has come
        self._reading_paused = False
        self._eof = False
        self._mode = _HEAD
        self._partial = b""  # of a head
        self._left = 0  # bytes of a body with a length
        self._parser: httptools.HttpResponseParser | None = None  # of a chunked body
        self._complete = self._overrun = False  # what it found
        self._event_stream = False
        self._keep_alive = False
        self._keep_alive_s = -1.0

    # From the exchange.

    def begin(self, exchange: "Exchange", data: bytes) -> None:
        """Send the first bytes of a request; the answer goes to `exchange`."""
        self.exchange = exchange
        self.deadline = time.monotonic() + self._pool.response_s
        self.transport.write(data)

    def write(self, data: bytes) -> None:
        """Send more of the request, or of a tunnel."""
        self.transport.write(data)
        if self._mode == _HEAD:  # the upstream is not late while the request is still coming
            self.deadline = time.monotonic() + self._pool.response_s
        elif self._mode == _TUNNEL:
            self.deadline = time.monotonic() + self._pool.stall_s

    def read(self, wanted: bool) -> None:
        """Stop or go on reading: back-pressure from the client."""
        if wanted is not self._reading_paused or self.transport.is_closing():
            return
        self._reading_paused = not wanted
        if wanted:
            wait_s = self._pool.response_s if self._mode == _HEAD else self._pool.stall_s
            self.deadline = time.monotonic() + wait_s
            self.transport.resume_reading()
        else:
            # A client that takes nothing has its own deadline; this silence is not the upstream's.
            self.deadline = NEVER
            self.transport.pause_reading()

    def abort(self) -> None:
        """Close at once: how an engine learns that nobody wants the answer any more."""
        self.exchange = None
        self.transport.abort()

    def close(self) -> None:
        """Close after what was written is sent."""
        self.exchange = None
        self.transport.close()

    def expire(self) -> None:
        """Nothing came in time."""
        self.deadline = NEVER
        exchange = self.exchange
        self.abort()
        if exchange is not None:
            exchange.upstream_timeout()

    # From the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transports have the interface without the base class.
        self.transport = transport = cast("asyncio.Transport", transport)
        tcp.send_at_once(transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._pool.inbox.put(self, data)

    def received(self, data: bytes) -> None:
        """See Reader."""
        exchange = self.exchange
        if exchange is None:  # bytes that nobody asked for must never meet the next request
            self.transport.abort()
            return
        try:
            if self._mode == _HEAD:
                self._touched = True
                self._head(exchange, data)
            else:
                self._body(exchange, data)
        except ProtocolError as error:
            self.abort()
            exchange.upstream_lost(untouched=False, reason=f"malformed response: {error}")

    def eof_received(self) -> None:
        """See asyncio.Protocol."""
        self._pool.inbox.handle()
        self._eof = not _is_ragged(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._pool.inbox.handle()
        self._pool.closed(self)
        self._parser = None  # it and this connection hold each other
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if self._mode == _TUNNEL or (self._mode == _UNTIL_CLOSE and self._eof and exc is None):
            exchange.response_body(b"", done=True)
        else:
            untouched = self._reused and not self._touched
            exchange.upstream_lost(untouched=untouched, reason=str(exc or "closed by the upstream"))

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        if self.exchange is not None:
            self.exchange.upstream_writable(False)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        if self.exchange is not None:
            self.exchange.upstream_writable(True)

    # Reading a response.

    def _head(self, exchange: "Exchange", data: bytes) -> None:
        if self._partial:
            data = self._partial + data
            self._partial = b""
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if max(end, 0 if end >= 4 else len(data)) > self._pool.header_bytes:
                raise BadResponse(f"header section over {self._pool.header_bytes} bytes")
            if end < 4:
                self._partial = data
                return
            raw, data = data[:end], data[end:]
            head = read_response_head(raw)
            if head.status >= 200 or head.status == 101:
                break
            exchange.response_interim(head)
        self._keep_alive, self._keep_alive_s = head.keep_alive, head.keep_alive_s
        self._event_stream = head.event_stream
        self._frame(exchange, head, raw)
        data, done = self._take(data)
        if not done:
            self.deadline = time.monotonic() + self._pool.stall_s
        exchange.response_head(head, data, done=done)
        if done:
            self._done(exchange)

    def _frame(self, exchange: "Exchange", head: ResponseHead, raw: bytes) -> None:
        """Decide how the end of the response is found (RFC 9112 section 6.3)."""
        if head.status == 101:
            self._mode = _TUNNEL
        elif exchange.head_request or head.status in (204, 304):
            self._mode, self._left = _LENGTH, 0
        elif head.chunked:
            self._mode = _CHUNKED
            self._complete = self._overrun = False
            self._parser = httptools.HttpResponseParser(self)
            self._parser.feed_data(raw)
        elif head.content_length >= 0:
            self._mode, self._left = _LENGTH, head.content_length
        else:
            self._mode = _UNTIL_CLOSE

    def _body(self, exchange: "Exchange", data: bytes) -> None:
        if not (self._event_stream and len(data) < _COMMENT_BYTES and is_only_comments(data)):
            self.deadline = time.monotonic() + self._pool.stall_s
        data, done = self._take(data)
        exchange.response_body(data, done=done)
        if done:
            self._done(exchange)

    def _take(self, data: bytes) -> tuple[bytes, bool]:
        """Return those bytes that belong to the response, and whether it ends with them."""
        if self._mode == _LENGTH:
            self._left -= len(data)
            if self._left > 0:
                return data, False
            if self._left < 0:
                self._overrun = True
                data = data[: self._left]
            return data, True
        if self._mode == _CHUNKED:
            return self._take_chunked(data)
        return data, False

    def _take_chunked(self, data: bytes) -> tuple[bytes, bool]:
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BadResponse(str(error)) from None
        if self._overrun:
            raise BadResponse("bytes after the end of a chunked response")
        if self._complete:
            # A stray CRLF after the end is swallowed by the parser; it is not part of the answer.
            while data.endswith(b"\r\n\r\n\r\n"):
                data = data[:-2]
        return data, self._complete

    def on_message_begin(self) -> None:
        """Called by httptools."""
        self._overrun = self._complete

    def on_message_complete(self) -> None:
        """Called by httptools."""
        self._complete = True

    def _done(self, exchange: "Exchange") -> None:
        """Hand the connection back for the next request, or close it where it can't serve one."""
        reusable = self._keep_alive and exchange.request_done and not self._overrun
        self.exchange = None
        if not reusable or self.transport.get_write_buffer_size():
            # What it has not taken of an answered request, it need not take any more.
            self.transport.abort()
            return
        if self._reading_paused:
            self.read(True)
        idle_s = MAX_IDLE_S
        if self._keep_alive_s >= 0:
            idle_s = min(MAX_IDLE_S, max(0.0, self._keep_alive_s - IDLE_MARGIN_S))
        self.deadline = time.monotonic() + idle_s
        self._mode = _HEAD
        self._touched = False
        self._reused = True
        self._parser = None
        self._pool.release(self)


def _is_ragged(transport: asyncio.Transport) -> bool:
    """Whether a TLS stream ended without close_notify, so that it may have been cut.

    uvloop does not call eof_received then; asyncio does, and only OpenSSL knows.
    """
    tls = transport.get_extra_info("ssl_object")
    if tls is None:
        return False
    try:
        return bool(tls.read(1))  # b"": close_notify has come
    except ssl.SSLError:
        return True
