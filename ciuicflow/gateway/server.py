"""The client side: connections, heads, bodies, limits and timeouts."""

import asyncio
import time
from typing import TYPE_CHECKING, Final, cast

import httptools

from ciuicflow.errors import BadRequest, ProtocolError, Unsupported
from ciuicflow.gateway import responses, tcp
from ciuicflow.gateway.deadlines import NEVER
from ciuicflow.gateway.framing import BodyReader, ChunkedBody, LengthBody
from ciuicflow.gateway.headers import SILENT, read_request_head
from ciuicflow.gateway.relay import Exchange
from ciuicflow.request import Outcome

if TYPE_CHECKING:
    from ciuicflow.gateway.listener import ClientServer

# Bytes of further pipelined requests that may wait behind the one being served.
PIPELINED_BYTES: Final = 65536
# After an answer that came before the whole request: how long its rest is read and thrown away.
# Closing at once would reset the connection and could destroy the answer (RFC 9112 section 9.6).
LINGER_S: Final = 2.0
# A client that is not being read may leave unseen; how often the kernel is asked.
_GONE_CHECK_S: Final = 0.05
# What TLS has written already gets this long to leave before an unclean end.
_TLS_FLUSH_S: Final = 0.05
_UNSUPPORTED: Final = {
    Unsupported.What.VERSION: Outcome.VERSION_UNKNOWN,
    Unsupported.What.CODING: Outcome.CODING_UNKNOWN,
}


class ClientConnection:
    """One client connection: requests one after the other, answered in order."""

    __slots__ = (
        "_acked_bytes",
        "_body",
        "_ending",
        "_exchange",
        "_gone_timer",
        "_paused_reading",
        "_pending",
        "_precheck",
        "_prechecked_bytes",
        "_server",
        "_tunnel",
        "deadline",
        "peer",
        "transport",
        "writable",
    )

    transport: asyncio.Transport

    def __init__(self, server: "ClientServer") -> None:
        self._server = server
        self._exchange: Exchange | None = None
        self._body: BodyReader | None = None  # of the current request, while not all of it is here
        self._pending = bytearray()  # an unfinished head, or requests that wait for their turn
        self._precheck: httptools.HttpRequestParser | None = None  # has seen the unfinished head
        self._ending = False  # whatever still comes is thrown away
        self._tunnel = False
        self._paused_reading = False
        self._gone_timer: asyncio.TimerHandle | None = None
        self._prechecked_bytes = 0
        self._acked_bytes = 0
        self.writable = True
        self.deadline = NEVER
        self.peer = ""

    # From the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transports have the interface without the base class.
        self.transport = transport = cast("asyncio.Transport", transport)
        tcp.send_at_once(transport)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if peer else ""
        self.deadline = time.monotonic() + self._server.idle_s
        if not self._server.opened(self):
            self._refuse(Outcome.OVERLOADED, "too many connections")

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._server.inbox.put(self, data)

    def received(self, data: bytes) -> None:
        """See Reader."""
        if self._ending:
            return
        if self._body is not None and self._exchange is not None:
            self._read_body(self._exchange, data)
        elif self._tunnel and self._exchange is not None:
            self._exchange.request_body(data, done=True)
        elif self._exchange is not None or self._pending:
            self._pending += data
            if self._exchange is None:
                self._read_head()
            elif len(self._pending) > PIPELINED_BYTES:
                self.read(False)
        else:
            self._start(data)

    def eof_received(self) -> None:
        """See asyncio.Protocol. A client that sends FIN is gone, as for nginx."""
        self._server.inbox.handle()
        if self._exchange is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._server.inbox.handle()
        self._server.closed(self)
        if self._gone_timer is not None:
            self._gone_timer.cancel()
        self._body = None
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_lost()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self.writable = False
        self._acked_bytes = tcp.bytes_acked(self.transport)
        self._rearm()
        if self._exchange is not None:
            self._exchange.client_writable(False)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.writable = True
        self._rearm()
        if self._exchange is not None:
            self._exchange.client_writable(True)

    def expire(self) -> None:
        """Nothing came, or nothing was taken, in time."""
        if self.transport.is_closing() or not self.writable:
            if not self._still_taking():
                self.transport.abort()
        elif self._exchange is not None:
            self._exchange.refuse(Outcome.REQUEST_TIMEOUT)
        elif self._pending:
            self._refuse(Outcome.REQUEST_TIMEOUT)
        else:
            self.transport.abort()

    def _rearm(self) -> None:
        """Set the deadline of what is waited for now, unless an end has set its own."""
        if self._ending:
            return
        if not self.writable:
            self.deadline = self._server.body_deadline()
        elif self._exchange is None:
            self.deadline = time.monotonic() + self._server.idle_s
        elif self._body is not None and not self._paused_reading:
            self.deadline = self._server.body_deadline()
        else:  # the upstream is waited for, and has a deadline of its own
            self.deadline = NEVER

    def _still_taking(self) -> bool:
        """Whether a slow reader has taken anything; if so it gets as much time again."""
        acked_bytes, self._acked_bytes = self._acked_bytes, tcp.bytes_acked(self.transport)
        if self._acked_bytes == acked_bytes:
            return False
        self.deadline = self._server.body_deadline()
        return True

    # From the exchange.

    def write(self, data: bytes) -> None:
        """Send bytes of the answer."""
        self.transport.write(data)

    def read(self, wanted: bool) -> None:
        """Stop or go on reading: back-pressure from the upstream."""
        if wanted is not self._paused_reading or self.transport.is_closing():
            return
        self._paused_reading = not wanted
        if self._body is not None:  # a client that is not being read is not late
            self._rearm()
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()
            self._watch()

    def tunnel(self) -> None:
        """From here on bytes are passed as they are."""
        self._tunnel = True
        if self._pending and self._exchange is not None:
            data = bytes(self._pending)
            self._pending.clear()
            self._exchange.request_body(data, done=True)

    def exchange_done(self, *, keep: bool) -> None:
        """The answer is written: go on with the next request, or close."""
        unread = self._body is not None
        self._exchange = self._body = None
        if not keep or self._server.draining:
            if unread:
                self._linger()
            else:
                self._close()
            return
        self._rearm()
        if self._paused_reading:
            self.read(True)
        if self._pending:
            # Not from here: a thousand pipelined requests would nest a thousand calls deep.
            self._server.call_soon(self._next)

    def cut(self, *, reset: bool) -> None:
        """End in the middle of an answer; `reset` where a plain close would look complete."""
        self._exchange = self._body = None
        if reset:
            tcp.reset_on_close(self.transport)
            if self.transport.get_extra_info("ssl_object") is not None:
                # close would send close_notify, which says that all is well.
                self._end(_TLS_FLUSH_S)
                self._server.call_later(_TLS_FLUSH_S, self.transport.abort)
                return
        self._close()

    def close_idle(self) -> None:
        """Close unless a request is being served or arriving, or an answer is being taken."""
        if self._exchange is None and not self._pending and not self._ending:
            self._close()

    def shut_down(self) -> None:
        """Close whatever goes on: the drain time is over."""
        if self._exchange is not None:
            self._exchange.refuse(Outcome.SHUT_DOWN)
        else:
            self.transport.abort()

    # Reading requests.

    def _next(self) -> None:
        if self._exchange is None and not self.transport.is_closing():
            self._read_head()

    def _read_head(self) -> None:
        """Go on with what is pending."""
        data = bytes(self._pending)
        self._pending.clear()
        self._start(data)

    def _start(self, data: bytes) -> None:
        """Begin a request if its head is complete."""
        if data.startswith((b"\r", b"\n")):
            data = data.lstrip(b"\r\n")  # RFC 9112 section 2.2
        server = self._server
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._await_head(data)
            return
        if end > server.header_bytes or (
            end > server.uri_bytes and data.find(b"\r\n") > server.uri_bytes
        ):
            self._refuse_large(data)
            return
        self._precheck = None
        try:
            head = read_request_head(data[:end])
        except BadRequest as error:
            self._refuse_bad(error)
            return
        self._exchange = exchange = Exchange(self._server.handler, self, head, time.monotonic())
        if self.writable:
            self.deadline = NEVER
        if head.content_length > server.body_bytes:
            self._body = LengthBody(head.content_length)
            exchange.refuse(Outcome.BODY_TOO_LARGE, detail=f"over {server.body_bytes} bytes")
        elif head.content_length and head.content_length == len(data) - end:
            exchange.whole_body(data[end:])
            self._server.handler.handle(exchange)
        elif head.content_length or head.chunked:
            self._body = ChunkedBody() if head.chunked else LengthBody(head.content_length)
            if self._read_body(exchange, data[end:]):
                self._server.handler.handle(exchange)
        else:
            exchange.request_done = True
            if len(data) > end:
                self._pending += data[end:]
            self._server.handler.handle(exchange)

    def _read_body(self, exchange: Exchange, data: bytes) -> bool:
        """Pass body bytes on; what lies behind the end waits. False: the request was refused."""
        body = self._body
        assert body is not None
        try:
            taken = body.feed(data)
        except ProtocolError as error:
            exchange.refuse(Outcome.BAD_REQUEST, detail=str(error))
            return False
        limit = self._server.body_bytes
        if exchange.bytes_in + taken > limit:
            exchange.refuse(Outcome.BODY_TOO_LARGE, detail=f"over {limit} bytes")
            return False
        if body.done:
            self._body = None
            self._rearm()
            self._pending += data[taken:]
            data = data[:taken] if taken < len(data) else data
        else:
            self._rearm()
        exchange.request_body(data, done=body.done)
        return self._exchange is exchange

    def _await_head(self, data: bytes) -> None:
        """Wait for the rest of a head, unless it is wrong or too large already."""
        server = self._server
        if len(data) > server.header_bytes or (b"\n" not in data and len(data) > server.uri_bytes):
            self._refuse_large(data)
            return
        if self._precheck is None:
            if not data:
                return
            self._precheck = httptools.HttpRequestParser(SILENT)
            self._prechecked_bytes = 0
            self.deadline = time.monotonic() + self._server.header_s
        try:
            self._precheck.feed_data(data[self._prechecked_bytes :])
        except httptools.HttpParserError as error:
            self._refuse_bad(BadRequest(str(error)))
            return
        self._prechecked_bytes = len(data)
        self._pending += data

    # Refusing what never became an exchange.

    def _refuse_bad(self, error: BadRequest) -> None:
        outcome = Outcome.BAD_REQUEST
        if isinstance(error, Unsupported):
            outcome = _UNSUPPORTED[error.what]
        self._refuse(outcome, str(error))

    def _refuse_large(self, data: bytes) -> None:
        server = self._server
        line_end = data.find(b"\r\n")
        if (line_end if line_end >= 0 else len(data)) > server.uri_bytes:
            self._refuse(Outcome.URI_TOO_LONG, f"over {server.uri_bytes} bytes")
        else:
            self._refuse(Outcome.HEADERS_TOO_LARGE, f"over {server.header_bytes} bytes")

    def _refuse(self, outcome: Outcome, detail: str = "") -> None:
        """Answer and close."""
        answer = responses.ANSWERS[outcome]
        assert answer is not None
        handler = self._server.handler
        handler.refused(self.peer, outcome)
        retry_after_s = handler.retry_after_s if answer.status == 503 else None
        body = responses.error_body(answer, detail=detail)
        self.write(
            responses.build(answer.status, body, connection="close", retry_after_s=retry_after_s)
        )
        self._linger()

    def _linger(self) -> None:
        """Close once the client has read the answer, or the time is over."""
        self.read(True)
        self._end(LINGER_S)
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:  # the client has reset the connection: asyncio says so here
            self.transport.abort()

    def _close(self) -> None:
        """Close once the client has taken everything; one that takes nothing is cut."""
        self._acked_bytes = tcp.bytes_acked(self.transport)
        self._end(self._server.body_s)
        self.transport.close()

    def _end(self, wait_s: float) -> None:
        """Take no more from the client, and wait so long for it."""
        self._ending = True
        self._pending.clear()
        self.deadline = time.monotonic() + wait_s

    # Watching a client that is not being read.

    def _watch(self) -> None:
        if self._gone_timer is None:
            self._gone_timer = self._server.call_later(_GONE_CHECK_S, self._check_gone)

    def _check_gone(self) -> None:
        self._gone_timer = None
        if not self._paused_reading or self.transport.is_closing():
            return
        if tcp.peer_has_left(self.transport):
            self.transport.abort()
        else:
            self._watch()
