"""A side that leaves: the other side must notice at once, and nothing may stay behind."""

from collections.abc import Callable

import pytest
from support import wait
from support.errors import assert_openai_error
from support.gateway import Gateway, now, outcome_delta
from support.raw import Client
from support.upstream import Exchange, Upstream, hold
from support.wire import (
    CRLF,
    LAST_CHUNK,
    SSE_HEAD,
    chunk,
    message_bytes,
    request_bytes,
    response_bytes,
)

PROMPT_S = 0.1  # the upstream learns within this time that the client left ...
TRIES = 3  # ... in the best of so many tries: the machine is shared

REQUEST = request_bytes("POST", "/v1/chat/completions", body=b'{"stream":true}')
LEAVE: dict[str, Callable[[Client], None]] = {"fin": Client.close, "reset": Client.abort}


def hold_stream(exchange: Exchange) -> None:
    exchange.send(SSE_HEAD + chunk(b"data: 1\n\n"))
    exchange.peer_closed_after()


def hold_half_body(exchange: Exchange) -> None:
    exchange.send(message_bytes(b"HTTP/1.1 200 OK", [(b"Content-Length", b"99")], b"data: 1\n\n"))
    exchange.peer_closed_after()


def hold_until_close(exchange: Exchange) -> None:
    exchange.send(message_bytes(b"HTTP/1.1 200 OK", [], b"data: 1\n\n"))
    exchange.peer_closed_after()


def closing_delays(
    gateway: Gateway, upstream: Upstream, leave: Callable[[Client], None], *, started: bool
) -> list[float]:
    delays = []
    for attempt in range(TRIES):
        client = gateway.connect()
        client.send(REQUEST)
        upstream.wait_requests(attempt + 1)
        if started:
            client.until(b"data: 1\n\n")
        left_at = now()
        leave(client)
        wait.until(lambda: upstream.open_connections() == 0, what="upstream connections close")
        delays.append(max(c.closed_at or 0 for c in upstream.connections) - left_at)
    return delays


@pytest.mark.line(1)
@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
def test_client_leaves_before_the_first_byte(
    gateway: Gateway, upstream: Upstream, leave: Callable[[Client], None]
) -> None:
    upstream.script(hold)
    before = gateway.metrics()
    delays = closing_delays(gateway, upstream, leave, started=False)
    assert min(delays) < PROMPT_S, delays
    gateway.wait_idle()
    assert outcome_delta(before, gateway.metrics()) == {"client_gone": TRIES}


@pytest.mark.line(1)
@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
@pytest.mark.parametrize("begin", [hold_stream, hold_half_body, hold_until_close])
def test_client_leaves_in_mid_response(
    gateway: Gateway,
    upstream: Upstream,
    leave: Callable[[Client], None],
    begin: Callable[[Exchange], None],
) -> None:
    upstream.script(begin)
    before = gateway.metrics()
    delays = closing_delays(gateway, upstream, leave, started=True)
    assert min(delays) < PROMPT_S, delays
    gateway.wait_idle()
    assert outcome_delta(before, gateway.metrics()) == {"client_gone": TRIES}


UPLOADS = {
    "length": request_bytes("POST", "/", [(b"Content-Length", b"1000")]) + b"x" * 500,
    "chunked": request_bytes("POST", "/", [(b"Transfer-Encoding", b"chunked")])
    + chunk(b"x" * 500)
    + b"1f4\r\nxx",
}


@pytest.mark.line(1)
@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
@pytest.mark.parametrize("upload", UPLOADS.values(), ids=UPLOADS)
def test_client_leaves_in_mid_upload(
    gateway: Gateway, upstream: Upstream, leave: Callable[[Client], None], upload: bytes
) -> None:
    client = gateway.connect()
    client.send(upload)
    wait.holds(lambda: not upstream.connections, for_s=0.2)  # it may stream, or wait for the rest
    leave(client)
    wait.until(lambda: upstream.open_connections() == 0, what="the half request is cut")
    gateway.wait_idle()
    assert upstream.requests == []


@pytest.mark.line(1, 10)
@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
def test_client_that_does_not_read_leaves(
    gateway: Gateway, upstream: Upstream, leave: Callable[[Client], None]
) -> None:
    def flood(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        while True:  # until the gateway closes: then sending fails
            exchange.send(chunk(b"x" * 65536))

    upstream.script(flood)
    client = gateway.connect()
    client.send(REQUEST)
    client.until(b"xxx")
    assert wait.holds(lambda: upstream.open_connections() == 1, for_s=0.3)
    leave(client)
    wait.until(lambda: upstream.open_connections() == 0, what="the flood is cut")


@pytest.mark.line(1, 16)
def test_a_pipelined_request_is_not_started_for_a_client_that_left(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.script(hold)
    client = gateway.connect()
    client.send(REQUEST + request_bytes("GET", "/second"))
    upstream.wait_requests(1)
    client.abort()
    gateway.wait_idle()
    assert [request.target for request in upstream.requests] == [b"/v1/chat/completions"]


@pytest.mark.line(1)
def test_leaving_clients_leave_nothing_behind(gateway: Gateway, upstream: Upstream) -> None:
    upstream.script(hold_stream)
    gateway.wait_idle()
    before = gateway.fd_count()
    for _ in range(50):
        client = gateway.connect()
        client.send(REQUEST)
        client.until(b"data: 1\n\n")
        client.abort()
    gateway.wait_idle()
    wait.until(lambda: gateway.fd_count() <= before + 2, what="descriptors are given back")


END: dict[str, Callable[[Exchange], None]] = {"fin": Exchange.close, "reset": Exchange.reset}
HALF = {
    "chunked": SSE_HEAD + chunk(b"data: 1\n\n"),
    "inside a chunk": SSE_HEAD + b"20\r\ndata: 1\n\n",
    "length": message_bytes(b"HTTP/1.1 200 OK", [(b"Content-Length", b"99")], b"data: 1\n\n"),
}


@pytest.mark.line(4, 23)
@pytest.mark.parametrize("end", END.values(), ids=END)
@pytest.mark.parametrize("half", HALF.values(), ids=HALF)
def test_upstream_breaks_in_mid_response(
    gateway: Gateway, upstream: Upstream, end: Callable[[Exchange], None], half: bytes
) -> None:
    broke_at = []

    def break_off(exchange: Exchange) -> None:
        exchange.send(half)
        wait.until(lambda: client.arrivals)
        broke_at.append(now())
        end(exchange)

    upstream.script(break_off)
    before = gateway.metrics()
    with gateway.connect() as client:
        client.send(REQUEST)
        answer = client.response("POST")
        seen_after = now() - broke_at[0]
    assert not answer.complete
    assert answer.body.endswith(b"data: 1\n\n")  # nothing invented after it
    assert LAST_CHUNK not in client.received
    assert b"[DONE]" not in client.received
    assert seen_after < 1
    assert len(upstream.requests) == 1  # never sent again
    gateway.wait_idle()
    assert outcome_delta(before, gateway.metrics()) == {"upstream_broken": 1}


@pytest.mark.line(4)
def test_reset_of_an_answer_that_ends_with_the_connection_is_an_unclean_end(
    gateway: Gateway, upstream: Upstream
) -> None:
    def break_off(exchange: Exchange) -> None:
        exchange.send(message_bytes(b"HTTP/1.1 200 OK", [], b"data: 1\n\n"))
        wait.until(lambda: b"data: 1" in client.received)
        exchange.reset()

    upstream.script(break_off)
    with gateway.connect() as client:
        client.send(REQUEST)
        assert not client.response("POST").complete


@pytest.mark.line(4)
@pytest.mark.parametrize("end", END.values(), ids=END)
def test_break_reaches_a_client_that_knows_no_chunks_as_a_reset(
    gateway: Gateway, upstream: Upstream, end: Callable[[Exchange], None]
) -> None:
    """For HTTP/1.0 the connection's end is the body's end: only a reset says that it broke."""

    def break_off(exchange: Exchange) -> None:
        exchange.send(HALF["chunked"])
        wait.until(lambda: b"data: 1" in client.received)
        end(exchange)

    upstream.script(break_off)
    with gateway.connect() as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        client.rest()
        assert client.end == "reset"


@pytest.mark.line(4, 35)
@pytest.mark.parametrize("end", END.values(), ids=END)
def test_upstream_that_ends_before_any_byte_is_a_502(
    gateway: Gateway, upstream: Upstream, end: Callable[[Exchange], None]
) -> None:
    upstream.script(end)
    before = gateway.metrics()
    with gateway.connect() as client:
        client.send(REQUEST)
        assert_openai_error(client.response("POST"), 502)
        upstream.respond(response_bytes(b"fine"))
        assert client.exchange().body == b"fine"  # the client's connection is still good
    assert outcome_delta(before, gateway.metrics()) == {"upstream_failed": 1, "completed": 1}


@pytest.mark.line(4)
def test_upstream_that_ends_inside_its_head_is_a_502(gateway: Gateway, upstream: Upstream) -> None:
    def half_head(exchange: Exchange) -> None:
        exchange.send(b"HTTP/1.1 200 OK" + CRLF + b"Content-Le")
        exchange.close()

    upstream.script(half_head)
    assert gateway.fetch().status == 502
    assert len(upstream.requests) == 1


@pytest.mark.line(4)
def test_event_stream_stays_broken_even_if_the_client_reads_late(
    gateway: Gateway, upstream: Upstream
) -> None:
    """Bytes that came before the break are delivered before the unclean end."""
    events = b"".join(b"data: %d\n\n" % number for number in range(2000))

    def break_off(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD + chunk(events))
        exchange.close()

    upstream.script(break_off)
    with gateway.connect() as client:
        client.send(REQUEST)
        wait.until(lambda: upstream.requests and upstream.open_connections() == 0)
        answer = client.response("POST")
    assert not answer.complete
    assert answer.body == events
