"""One exchange: a request's bytes up, its response's bytes down, and every way this can end."""

import asyncio
from typing import TYPE_CHECKING, Final

from ciuicflow.errors import BadResponse
from ciuicflow.gateway import responses
from ciuicflow.gateway.framing import ChunkedBody
from ciuicflow.gateway.headers import (
    RequestHead,
    ResponseHead,
    client_head,
    drop_fields,
    with_length,
)
from ciuicflow.gateway.upstream import UpstreamConnection
from ciuicflow.request import Outcome

if TYPE_CHECKING:
    from ciuicflow.gateway.admission import Admission
    from ciuicflow.gateway.endpoints import Endpoint
    from ciuicflow.gateway.handler import Handler
    from ciuicflow.gateway.server import ClientConnection

# A request is kept whole until its first response byte, to be sent again if the pooled connection
# turns out to be dead. Larger ones take a fresh connection, so that they need not be kept.
REPLAY_BYTES: Final = 256 * 1024
# How much of a body may arrive before there is a connection to send it on.
HELD_BYTES: Final = 256 * 1024
# An upstream that knows nothing of Expect must not cost curl its 1 s wait; one that refuses has
# this long to do so before the body comes.
CONTINUE_GRACE_S: Final = 0.25
# A chunked body of no content: `0`, CRLF, CRLF.
_LAST_CHUNK_BYTES: Final = 5


class Exchange:
    """Joins a client connection and an upstream connection for one request and its response."""

    # Defaults stand on the class: an exchange is made for every request, and most of it never
    # changes (25 assignments cost 1 us, measured).
    endpoint: "Endpoint | None" = None
    upstream: UpstreamConnection | None = None
    connecting: asyncio.Task[None] | None = None
    admission: "Admission | None" = None  # of an opted-in request
    model: str | None = None  # that it asks for, where that decides the endpoint
    why = ""  # the endpoint was chosen
    detail = ""  # of a failure
    status = 0
    bytes_in = 0  # body bytes on the wire
    bytes_out = 0
    request_done = False
    response_started = False
    retried = False
    collecting = False  # the whole body is wanted before an endpoint is chosen
    _held_bytes = 0
    committed = False  # the gateway has begun an event stream itself, to show that it waits
    other_body: bytes | None = None  # to be sent instead of the client's
    _counted_bytes = 0  # of the bound on all bodies that are held
    _keeping = True  # the request, to be sent again
    _keep = False  # the client connection, for its next request
    _continued = False
    _continue_timer: asyncio.TimerHandle | None = None
    _event_stream = False
    _close_delimited = False
    _dechunk: ChunkedBody | None = None
    _enchunk = False
    _finished = False

    def __init__(
        self, handler: "Handler", client: "ClientConnection", head: RequestHead, started_s: float
    ) -> None:
        self._handler = handler
        self.client = client
        self.head = head
        self.started_s = started_s
        self.head_request = head.method == b"HEAD"  # the response has no body
        self._held: list[bytes] = []  # body bytes: not sent yet, or kept to be sent again

    @property
    def has_body(self) -> bool:
        """Whether the request has a body, or may have one."""
        return self.head.chunked or self.head.content_length > 0

    @property
    def replayable(self) -> bool:
        """Whether the request is small enough to be kept until the first response byte."""
        return self.head.content_length <= REPLAY_BYTES and not self.head.chunked

    # The request, from the client.

    def whole_body(self, data: bytes) -> None:
        """Take a body that came in one piece with its head."""
        self.bytes_in = self._held_bytes = len(data)
        self._held.append(data)
        self.request_done = True

    def request_body(self, data: bytes, *, done: bool) -> None:
        """Take body bytes in their framing; `done` with the last."""
        self.bytes_in += len(data)
        self.request_done = done
        if data and self._keeping:
            self._held.append(data)
            self._held_bytes += len(data)
        if self.upstream is not None:
            self.upstream.write(data)
        elif self.collecting:
            self._collect(len(data), done=done)
        elif self._held_bytes > HELD_BYTES:
            self.client.read(False)

    def collect(self) -> None:
        """Gather the whole body before an endpoint is chosen; Handler.collected goes on."""
        self.collecting = True
        self.client.read(True)
        self.send_continue()
        self._collect(self._held_bytes, done=self.request_done)

    def payload(self) -> bytes:
        """Return the content of the collected body."""
        body = b"".join(self._held)
        if not self.head.chunked:
            return body
        pieces: list[bytes] = []
        ChunkedBody().feed(body, pieces)
        return b"".join(pieces)

    def _collect(self, size_bytes: int, *, done: bool) -> None:
        self._counted_bytes += size_bytes
        if not self._handler.buffer(size_bytes):
            self.refuse(Outcome.OVERLOADED, detail="too many bodies are held")
        elif done:
            self.collecting = False
            self._handler.collected(self)

    def release_buffer(self) -> None:
        """Give back what the body took of the bound on all that are held."""
        self._handler.buffer(-self._counted_bytes)
        self._counted_bytes = 0

    def client_writable(self, writable: bool) -> None:
        """Pass back-pressure on: a client that takes no more stops the upstream."""
        if self.upstream is not None:
            self.upstream.read(writable)

    def client_lost(self) -> None:
        """Abort the upstream at once: nobody wants the answer any more."""
        self._detach()
        self.finish(Outcome.CLIENT_GONE)

    # The upstream.

    def attach(self, upstream: UpstreamConnection) -> None:
        """Send the request on this connection, as far as it is here."""
        endpoint = self.endpoint
        assert endpoint is not None
        self.connecting = None
        self.upstream = upstream
        body = self._held if self.other_body is None else [self.other_body]
        data = b"".join([self._request_head(endpoint), *body])
        self.client.read(True)
        if not self.replayable:
            self._let_go()
        upstream.begin(self, data)
        if not self.client.writable:
            upstream.read(False)
        if self.head.expects_continue and not self._continued:
            loop = asyncio.get_running_loop()
            self._continue_timer = loop.call_later(CONTINUE_GRACE_S, self.send_continue)

    def _request_head(self, endpoint: "Endpoint") -> bytes:
        lines = self.admission.lines if self.admission is not None else None
        if self.committed and lines is not None:
            lines = drop_fields(lines, (b"accept-encoding",))  # its head says nothing of a coding
        if self.other_body is None:
            return endpoint.request_head(self.head, lines)
        lines = with_length(self.head.lines if lines is None else lines, len(self.other_body))
        return endpoint.request_head(self.head, lines, chunked=False)

    def _let_go(self) -> None:
        """Keep no byte of the request any longer: it cannot be sent again."""
        self._keeping = False
        self.other_body = None
        self._held.clear()
        self._held_bytes = 0

    def send_continue(self) -> None:
        """Ask for the body (RFC 9110 section 10.1.1), once, where the client waits for that."""
        waiting = self.head.expects_continue and not self.bytes_in and not self.request_done
        if waiting and not self.response_started and not self._continued:
            self._continued = True
            self.client.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def upstream_writable(self, writable: bool) -> None:
        """Pass back-pressure on: an upstream that takes no more stops the client."""
        self.client.read(writable)

    def upstream_lost(self, *, untouched: bool, reason: str) -> None:
        """Send again where a reused connection proved dead, else end (conformance 22, 23)."""
        self.upstream = None
        self.detail = reason
        if untouched and self._keeping and not self.retried:
            self.retried = True
            self._handler.retry(self)
        elif self.response_started:
            self._break_off(Outcome.UPSTREAM_BROKEN)
        else:
            self.refuse(Outcome.UPSTREAM_FAILED)

    def upstream_timeout(self) -> None:
        """End: what was sent is never sent again after a timeout."""
        self.upstream = None
        if self.response_started:
            self._break_off(Outcome.UPSTREAM_TIMEOUT)
        else:
            self.refuse(Outcome.UPSTREAM_TIMEOUT)

    # The response, from the upstream.

    def response_interim(self, head: ResponseHead) -> None:
        """Pass a 1xx on (RFC 9110 section 15.2), 100 only to a client that waits for it."""
        self._let_go()
        if head.status == 100:
            self.send_continue()
        elif self.head.http11 and not self.committed:
            self.client.write(client_head(head, chunked=False, connection=b""))

    def beat(self) -> bool:
        """Show the client of a stream that it still waits. False: it does not, or it can't."""
        if self._finished or self.response_started or not self.head.http11:
            return False
        start = b""
        if not self.committed:
            self.committed = True
            self.status = 200
            start = responses.stream_head(self._own_lines())
        self.client.write(start + responses.HEARTBEAT)
        return True

    def _go_on(self, head: ResponseHead, body: bytes, *, done: bool) -> None:
        """Send a stream on whose head the client has from us."""
        if head.status != 200 or not head.event_stream or head.encoded:
            whole = done and body.startswith(b"{") and head.content_length == len(body)
            detail = f"status {head.status}, after the stream had begun"
            self.refuse(Outcome.UPSTREAM_FAILED, detail=detail, body=body if whole else b"")
            return
        self.response_started = True
        self._enchunk = not head.chunked
        self._keep = self.head.keep_alive and self.request_done and not self._handler.draining
        self.response_body(body, done=done)

    def response_head(self, head: ResponseHead, body: bytes, *, done: bool) -> None:
        """Send the head on, with the framing that this client understands."""
        if head.status == 101 and not (self.head.upgrade and self.request_done):
            raise BadResponse("101 that nobody asked for, or too early")
        if self._keeping:
            self._let_go()
        if self._counted_bytes:
            self.release_buffer()
        if self.committed:
            if self.admission is not None:
                self.admission.answered(head)
            self._go_on(head, body, done=done)
            return
        self.response_started = True
        self.status = head.status
        self._event_stream = head.event_stream
        if head.status == 101:
            self._tunnel(head, body)
            return
        bodiless = self.head_request or head.status in (204, 304)
        # RFC 9112 section 6.1: no transfer coding in a 204.
        chunked = head.chunked and self.head.http11 and head.status != 204
        if head.chunked and not chunked and not bodiless:
            self._dechunk = ChunkedBody()
        self._close_delimited = not (bodiless or chunked or head.content_length >= 0)
        self._keep = (
            self.head.keep_alive
            and self.request_done
            and not self._close_delimited
            and not self._handler.draining
        )
        connection = b"close" if not self._keep else b"" if self.head.http11 else b"keep-alive"
        if self.admission is not None:
            self.admission.answered(head)
            self.admission.body(body)
        extra = self._own_lines()
        start = client_head(head, chunked=chunked, connection=connection, extra=extra)
        if self._dechunk is not None:
            self.client.write(start)
            self._relay_body(body, done=done)
            return
        self.bytes_out = len(body)
        self.client.write(start + body if body else start)
        if done:
            self._response_done()

    def _own_lines(self) -> bytes:
        """Return the header fields that the gateway adds to the answer."""
        return self.admission.response_lines() if self.admission is not None else b""

    def response_body(self, data: bytes, *, done: bool) -> None:
        """Send body bytes on as they came."""
        if self.admission is not None:
            self.admission.body(data)
        self._relay_body(data, done=done)

    def _relay_body(self, data: bytes, *, done: bool) -> None:
        self.bytes_out += len(data)
        if self._dechunk is not None:
            payload: list[bytes] = []
            self._dechunk.feed(data, payload)
            data = b"".join(payload)
        if self._enchunk:
            data = (responses.chunk(data) if data else b"") + (b"0\r\n\r\n" if done else b"")
        if data:
            self.client.write(data)
        if done:
            self._response_done()

    def _tunnel(self, head: ResponseHead, data: bytes) -> None:
        """Become a pipe in both directions (RFC 9110 section 7.8)."""
        assert self.upstream is not None
        upgrade = b"Upgrade\r\nUpgrade: " + head.upgrade
        self.client.write(client_head(head, chunked=False, connection=upgrade) + data)
        self._close_delimited = True
        self.client.tunnel()

    def _response_done(self) -> None:
        self.upstream = None
        self.finish(Outcome.EMPTY_STREAM if self._is_empty_stream() else Outcome.COMPLETED)
        self.client.exchange_done(keep=self._keep)

    def _is_empty_stream(self) -> bool:
        if not self._event_stream or self.status != 200 or self.head_request:
            return False
        return self.bytes_out <= _LAST_CHUNK_BYTES

    # Endings.

    def refuse(
        self,
        outcome: Outcome,
        *,
        detail: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        body: bytes = b"",
    ) -> None:
        """Answer in the gateway's own words and end; after the first response byte, break off.

        A 503 says when to come back in any case, a 429 where `retry_after_s` is given. `body` is
        said instead of those words in a stream that the gateway has begun itself.
        """
        if self._finished:
            return
        self._detach()
        if self.response_started:
            self._break_off(outcome)
            return
        self.detail = self.detail or detail
        answer = responses.ANSWERS[outcome]
        assert answer is not None
        body = body or responses.error_body(answer, detail=detail, param=param)
        if self.committed:
            self.client.write(responses.error_event(body))
            self._break_off(outcome)
            return
        if answer.status == 503 and retry_after_s is None:
            retry_after_s = self._handler.retry_after_s
        elif answer.status not in (429, 503):
            retry_after_s = None
        self.answer(answer.status, body, outcome=outcome, retry_after_s=retry_after_s)

    def answer(
        self,
        status: int,
        body: bytes,
        *,
        outcome: Outcome = Outcome.COMPLETED,
        retry_after_s: float | None = None,
    ) -> None:
        """Send a JSON body of the gateway's own and end."""
        self.connecting = None
        self.status = status
        self.response_started = True
        keep = self.head.keep_alive and self.request_done and not self._handler.draining
        self.client.write(
            responses.build(
                status,
                body,
                retry_after_s=retry_after_s,
                connection="close" if not keep else "" if self.head.http11 else "keep-alive",
                head_only=self.head_request,
                extra=self._own_lines().decode(),
            )
        )
        self.finish(outcome)
        self.client.exchange_done(keep=keep)

    def finish(self, outcome: Outcome) -> None:
        """Account for the request, exactly once."""
        if self._finished:
            return
        self._finished = True
        if self._continue_timer is not None:
            self._continue_timer.cancel()
        if self._counted_bytes:
            self.release_buffer()
        self._handler.finished(self, outcome)

    def _break_off(self, outcome: Outcome) -> None:
        """End uncleanly: the client must not take a part for the whole."""
        self.finish(outcome)
        # Without framing only a reset tells a broken end from a clean one.
        self.client.cut(reset=self._close_delimited or self._dechunk is not None)

    def _detach(self) -> None:
        """Leave the upstream, whether connected or not."""
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None
        if self.upstream is not None:
            self.upstream.abort()
            self.upstream = None
