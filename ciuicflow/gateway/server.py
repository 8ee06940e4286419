"""The client side: connections, heads, bodies, limits and timeouts."""

import asyncio
import errno
import socket
import ssl
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

import httptools

from ciuicflow.config import Address, Config
from ciuicflow.errors import BadRequest, ProtocolError, StartError, Unsupported
from ciuicflow.gateway import responses
from ciuicflow.gateway.deadlines import NEVER, Deadlines
from ciuicflow.gateway.framing import BodyReader, ChunkedBody, LengthBody
from ciuicflow.gateway.headers import parse_request_head
from ciuicflow.gateway.relay import Exchange
from ciuicflow.request import Outcome

if TYPE_CHECKING:
    from ciuicflow.gateway.handler import Handler

# Bytes of further pipelined requests that may wait behind the one being served.
PIPELINED_BYTES: Final = 65536
# After an answer that came before the whole request: how long its rest is read and thrown away.
# Closing at once would reset the connection and could destroy the answer (RFC 9112 section 9.6).
LINGER_S: Final = 2.0
# A client that is not being read may leave unseen; how often the kernel is asked.
_GONE_CHECK_S: Final = 0.05
# What TLS has written already gets this long to leave before an unclean end.
_TLS_FLUSH_S: Final = 0.05
# include/net/tcp_states.h: the peer has closed (CLOSE_WAIT), or the connection is gone (CLOSE).
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8
_BACKLOG: Final = 4096  # connections that the kernel holds for us in a burst
_UNSUPPORTED: Final = {
    Unsupported.What.VERSION: Outcome.VERSION_UNKNOWN,
    Unsupported.What.CODING: Outcome.CODING_UNKNOWN,
}


class _Silent:
    """Wants no callbacks: httptools then only validates."""


class ClientConnection:
    """One client connection: requests one after the other, answered in order."""

    __slots__ = (
        "_acked_bytes",
        "_body",
        "_exchange",
        "_gone_timer",
        "_lingering",
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
        self._lingering = False
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
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if peer else ""
        self.deadline = self._server.now() + self._server.config.timeouts.idle_s
        if not self._server.opened(self):
            self._refuse(Outcome.OVERLOADED, "too many connections")

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
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
        elif not self._lingering:
            self._start(data)

    def eof_received(self) -> None:
        """See asyncio.Protocol. A client that sends FIN is gone, as for nginx."""
        if self._exchange is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
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
        self._acked_bytes = _tcp_bytes_acked(self.transport)
        self.deadline = self._server.body_deadline()
        if self._exchange is not None:
            self._exchange.client_writable(False)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.writable = True
        if self._exchange is not None:
            self.deadline = NEVER
            self._exchange.client_writable(True)

    def expire(self) -> None:
        """Nothing came, or nothing was taken, in time."""
        exchange = self._exchange
        if not self.writable and self._still_taking():
            return
        if exchange is not None and self._body is not None and self.writable:
            exchange.refuse(Outcome.REQUEST_TIMEOUT)
        elif exchange is None and self._pending and not self._lingering:
            self._refuse(Outcome.REQUEST_TIMEOUT)
        else:
            self.transport.abort()

    def _still_taking(self) -> bool:
        """Whether a slow reader has taken anything; if so it gets as much time again."""
        acked_bytes, self._acked_bytes = self._acked_bytes, _tcp_bytes_acked(self.transport)
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
            self.deadline = NEVER if not wanted else self._server.body_deadline()
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
                self.transport.close()
            return
        self.deadline = self._server.now() + self._server.config.timeouts.idle_s
        if self._paused_reading:
            self.read(True)
        if self._pending:
            # Not from here: a thousand pipelined requests would nest a thousand calls deep.
            self._server.call_soon(self._next)

    def cut(self, *, reset: bool) -> None:
        """End in the middle of an answer; `reset` where a plain close would look complete."""
        self._exchange = self._body = None
        if reset:
            sock = self.transport.get_extra_info("socket")
            # struct linger {on, 0 s}: close sends RST.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if self.transport.get_extra_info("ssl_object") is not None:
                # close would send close_notify, which says that all is well.
                self._server.call_later(_TLS_FLUSH_S, self.transport.abort)
                return
        self.transport.close()

    def close_idle(self) -> None:
        """Close unless a request is being served or arriving."""
        if self._exchange is None and not self._pending:
            self.transport.close()

    def shut_down(self) -> None:
        """Close whatever goes on: the drain time is over."""
        if self._exchange is not None:
            self._exchange.refuse(Outcome.SHUT_DOWN)
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
        limits = self._server.config.limits
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._await_head(data)
            return
        if end > limits.header_bytes or data.find(b"\r\n") > limits.uri_bytes:
            self._refuse_large(data)
            return
        self._precheck = None
        try:
            head = parse_request_head(data[:end])
        except BadRequest as error:
            self._refuse_bad(error)
            return
        self.deadline = NEVER
        self._exchange = exchange = Exchange(self._server.handler, self, head, time.monotonic())
        if head.content_length > limits.body_bytes:
            self._body = LengthBody(head.content_length)
            exchange.refuse(Outcome.BODY_TOO_LARGE, detail=f"over {limits.body_bytes} bytes")
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
        limit = self._server.config.limits.body_bytes
        if exchange.bytes_in + taken > limit:
            exchange.refuse(Outcome.BODY_TOO_LARGE, detail=f"over {limit} bytes")
            return False
        if body.done:
            self._body = None
            self.deadline = NEVER
            self._pending += data[taken:]
            data = data[:taken] if taken < len(data) else data
        else:
            self.deadline = self._server.body_deadline()
        exchange.request_body(data, done=body.done)
        return self._exchange is exchange

    def _await_head(self, data: bytes) -> None:
        """Wait for the rest of a head, unless it is wrong or too large already."""
        limits = self._server.config.limits
        if len(data) > limits.header_bytes or (b"\n" not in data and len(data) > limits.uri_bytes):
            self._refuse_large(data)
            return
        if self._precheck is None:
            if not data:
                return
            self._precheck = httptools.HttpRequestParser(_Silent())
            self._prechecked_bytes = 0
            self.deadline = self._server.now() + self._server.config.timeouts.header_s
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
        limits = self._server.config.limits
        line_end = data.find(b"\r\n")
        if (line_end if line_end >= 0 else len(data)) > limits.uri_bytes:
            self._refuse(Outcome.URI_TOO_LONG, f"over {limits.uri_bytes} bytes")
        else:
            self._refuse(Outcome.HEADERS_TOO_LARGE, f"over {limits.header_bytes} bytes")

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
        self._lingering = True
        self._pending.clear()
        self.read(True)
        self.deadline = self._server.now() + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # Watching a client that is not being read.

    def _watch(self) -> None:
        self._gone_timer = self._server.call_later(_GONE_CHECK_S, self._check_gone)

    def _check_gone(self) -> None:
        if not self._paused_reading or self.transport.is_closing():
            return
        if _tcp_state(self.transport) in (_TCP_CLOSE, _TCP_CLOSE_WAIT):
            self.transport.abort()
        else:
            self._watch()


def _tcp_info(transport: asyncio.Transport, length: int) -> bytes:
    sock = transport.get_extra_info("socket")
    return bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, length))


def _tcp_state(transport: asyncio.Transport) -> int:
    """tcpi_state, the first byte of struct tcp_info (Linux, include/uapi/linux/tcp.h)."""
    return _tcp_info(transport, 1)[0]


def _tcp_bytes_acked(transport: asyncio.Transport) -> int:
    """tcpi_bytes_acked, at offset 120 of struct tcp_info (Linux >= 4.1)."""
    return int.from_bytes(_tcp_info(transport, 128)[120:128], sys.byteorder)


class ClientServer:
    """Listens, and holds what all client connections share."""

    def __init__(self, config: Config, handler: "Handler", deadlines: Deadlines) -> None:
        self.config = config
        self.handler = handler
        self.draining = False  # each connection is closed after its current answer
        self._deadlines = deadlines
        self._connections: set[ClientConnection] = set()
        self._listener: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        loop = asyncio.get_running_loop()
        self.now: Callable[[], float] = loop.time
        self.call_soon = loop.call_soon
        self.call_later = loop.call_later

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    async def listen(self) -> str:
        """Start accepting; return HOST:PORT. Raises StartError."""
        address = Address.parse(self.config.listen)
        if self.config.tls is not None:
            self._tls = self.config.tls.context()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: cast("asyncio.Protocol", ClientConnection(self)),
                address.host,
                address.port,
                ssl=self._tls,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise cannot_listen("listen", address, error) from None
        return str(Address(address.host, self._listener.sockets[0].getsockname()[1]))

    def configure(self, config: Config) -> None:
        """Take over reloaded settings, a renewed certificate among them. Raises StartError."""
        if self._tls is not None and config.tls is not None:
            config.tls.context()  # a bad file must not half-change the context in use
            self._tls.load_cert_chain(config.tls.cert_file, config.tls.key_file)
        self.config = config

    def body_deadline(self) -> float:
        """When a client that sends or takes nothing from now on is late."""
        return self.now() + self.config.timeouts.body_s

    def opened(self, connection: ClientConnection) -> bool:
        """Note a new connection. False: there are too many."""
        self._connections.add(connection)
        self._deadlines.add(connection)
        return len(self._connections) <= self.config.limits.connections

    def closed(self, connection: ClientConnection) -> None:
        """Forget a connection that is gone."""
        self._connections.discard(connection)
        self._deadlines.discard(connection)

    def stop_listening(self) -> None:
        """Accept no more, and close what is idle."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that serve no request."""
        for connection in list(self._connections):
            connection.close_idle()

    def shut_down(self) -> None:
        """Close what is left."""
        for connection in list(self._connections):
            connection.shut_down()


def cannot_listen(what: str, address: Address, error: OSError) -> StartError:
    """Say why an address cannot be listened on and what to do."""
    hint = ""
    if error.errno == errno.EADDRINUSE:
        hint = f": something else listens there; stop it or choose another with --{what}"
    elif error.errno in (errno.EACCES, errno.EADDRNOTAVAIL) or error.errno is None:
        hint = f"; choose another with --{what}"
    return StartError(f"cannot listen on {address} ({what}): {error.strerror or error}{hint}")
