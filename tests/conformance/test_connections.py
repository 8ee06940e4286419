"""Pooled upstream connections that die, and when a request may be sent a second time."""

import time
from collections.abc import Callable

import pytest
from support import wait
from support.gateway import Gateway
from support.upstream import Exchange, Upstream
from support.wire import (
    LAST_CHUNK,
    SSE_HEAD,
    chunk,
    message_bytes,
    request_bytes,
    response_bytes,
)

BODIES = {"GET": None, "POST": b'{"model":"m","stream":true}', "PUT": b"x" * 100_000, "DELETE": b""}


def close_when_idle(idle_s: float) -> Callable[[Exchange], None]:
    """Answer, and close unless another request comes within that time."""

    def answer(exchange: Exchange) -> None:
        exchange.send(response_bytes())
        exchange.connection.sock.settimeout(idle_s)

    return answer


@pytest.mark.line(22)
def test_an_upstream_that_closes_idle_connections_costs_no_request(
    gateway: Gateway, upstream: Upstream
) -> None:
    """The gaps are as long as the upstream's patience: both sides act at the same moment."""
    upstream.script(close_when_idle(0.05))
    with gateway.connect() as client:
        for number in range(40):
            method = list(BODIES)[number % 4]
            assert client.exchange(method, "/", body=BODIES[method]).status == 200
            time.sleep(0.05)
    assert len(upstream.requests) == 40


@pytest.mark.line(22)
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "plain"])
def test_an_upstream_that_closes_after_each_answer_without_saying_so(
    gateway: Gateway, upstream: Upstream, streamed: bool
) -> None:
    """llama.cpp's server does so after each stream, and promises `Keep-Alive: timeout=5`."""
    fields = [(b"Keep-Alive", b"timeout=5, max=100")]
    plain = response_bytes(b"plain", headers=fields)
    stream = SSE_HEAD[:-2] + b"Keep-Alive: timeout=5, max=100\r\n\r\n" + chunk(b"data: 1\n\n")

    def answer_and_close(exchange: Exchange) -> None:
        exchange.send(stream + LAST_CHUNK if streamed else plain)
        exchange.close()

    upstream.script(answer_and_close)
    with gateway.connect() as client:
        for _ in range(50):
            answer = client.exchange("POST", "/v1/chat/completions", body=b'{"stream":true}')
            assert (answer.status, answer.complete) == (200, True)
    assert len(upstream.requests) == 50


@pytest.mark.line(22)
@pytest.mark.parametrize("method", BODIES)
@pytest.mark.parametrize("end", [Exchange.close, Exchange.reset], ids=["fin", "reset"])
def test_a_reused_connection_that_dies_without_a_byte_is_replaced_once(
    gateway: Gateway, upstream: Upstream, method: str, end: Callable[[Exchange], None]
) -> None:
    def die_when_reused(exchange: Exchange) -> None:
        if len(exchange.connection.requests) > 1:
            end(exchange)
        exchange.send(response_bytes())

    upstream.script(die_when_reused)
    with gateway.connect() as client:
        assert client.exchange("GET", "/warm").status == 200
        assert client.exchange(method, "/again", body=BODIES[method]).status == 200
    again = [request for request in upstream.requests if request.target == b"/again"]
    assert len(again) == 2
    assert [request.body for request in again] == [BODIES[method] or b""] * 2
    assert again[0].headers == again[1].headers


@pytest.mark.line(22, 23)
@pytest.mark.parametrize("method", BODIES)
def test_it_is_replaced_once_and_not_twice(
    gateway: Gateway, upstream: Upstream, method: str
) -> None:
    def die(exchange: Exchange) -> None:
        if exchange.request.target == b"/again":
            exchange.close()
        exchange.send(response_bytes())

    upstream.script(die)
    with gateway.connect() as client:
        assert client.exchange("GET", "/warm").status == 200
        assert client.exchange(method, "/again", body=BODIES[method]).status == 502
    assert [request.target for request in upstream.requests].count(b"/again") == 2


@pytest.mark.line(22, 23)
@pytest.mark.parametrize("method", BODIES)
@pytest.mark.parametrize("end", [Exchange.close, Exchange.reset], ids=["fin", "reset"])
def test_a_fresh_connection_that_dies_is_not_replaced(
    gateway: Gateway, upstream: Upstream, method: str, end: Callable[[Exchange], None]
) -> None:
    upstream.script(end)
    assert gateway.fetch(method, "/", body=BODIES[method]).status == 502
    assert len(upstream.requests) == 1


@pytest.mark.line(22, 23)
@pytest.mark.parametrize(
    "begun", [b"H", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n"]
)
def test_a_reused_connection_that_dies_after_a_byte_is_not_replaced(
    gateway: Gateway, upstream: Upstream, begun: bytes
) -> None:
    def die_when_reused(exchange: Exchange) -> None:
        exchange.send(response_bytes() if len(exchange.connection.requests) < 2 else begun)
        if len(exchange.connection.requests) > 1:
            exchange.close()

    upstream.script(die_when_reused)
    with gateway.connect() as client:
        assert client.exchange("GET", "/warm").status == 200
        assert client.exchange("POST", "/again", body=b"x").status == 502
    assert len(upstream.requests) == 2


@pytest.mark.line(23)
@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
def test_nothing_is_sent_again_after_the_answer_began(
    gateway: Gateway, upstream: Upstream, reused: bool
) -> None:
    def break_off(exchange: Exchange) -> None:
        if exchange.request.target == b"/warm":
            exchange.send(response_bytes())
        else:
            exchange.send(message_bytes(b"HTTP/1.1 200 OK", [(b"Content-Length", b"9")], b"half"))
            exchange.close()

    upstream.script(break_off)
    with gateway.connect() as client:
        if reused:
            client.exchange("GET", "/warm")
        assert not client.exchange("POST", "/once", body=b"x").complete
    assert [request.target for request in upstream.requests].count(b"/once") == 1


@pytest.mark.line(1, 22)
def test_a_client_that_leaves_during_the_second_try_ends_it(
    gateway: Gateway, upstream: Upstream
) -> None:
    def die_then_hold(exchange: Exchange) -> None:
        if exchange.request.target == b"/warm":
            exchange.send(response_bytes())
        elif len(exchange.connection.requests) > 1:
            exchange.close()
        else:
            exchange.peer_closed_after()

    upstream.script(die_then_hold)
    client = gateway.connect()
    client.exchange("GET", "/warm")
    client.send(request_bytes("POST", "/again", body=b"x"))
    upstream.wait_requests(3)
    client.abort()
    gateway.wait_idle()
    wait.until(lambda: upstream.open_connections() == 0)
    assert len(upstream.requests) == 3


@pytest.mark.line(22)
def test_a_large_upload_on_a_reused_connection_fails_cleanly_or_comes_whole(
    gateway: Gateway, upstream: Upstream
) -> None:
    """It may be too large to be kept for a second try: then a 502, never a shortened body."""
    body = bytes(range(250)) * 40_000

    def die_when_reused(exchange: Exchange) -> None:
        if len(exchange.connection.requests) > 1:
            exchange.reset()
        exchange.read_body()
        exchange.send(response_bytes())

    upstream.script(die_when_reused, head_only=True)
    with gateway.connect(timeout_s=20) as client:
        assert client.exchange("GET", "/warm").status == 200
        client.send_ignoring_close(request_bytes("POST", "/big", body=body))
        answer = client.response("POST")
    assert answer.status in (200, 502)
    whole = [request for request in upstream.requests if request.body == body]
    assert len(whole) == (answer.status == 200)


@pytest.mark.line(22, 25)
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_uploads_do_not_pile_up_connections(
    gateway: Gateway, upstream: Upstream, framing: str
) -> None:
    """One at a time needs few connections, even where a fresh one is preferred for safety."""
    body = b"x" * 500_000
    with gateway.connect() as client:
        for _ in range(40):
            if framing == "length":
                client.send(request_bytes("POST", "/", body=body))
            else:
                client.send(request_bytes("POST", "/", [(b"Transfer-Encoding", b"chunked")]))
                client.send(chunk(body) + LAST_CHUNK)
            assert client.response("POST").status == 200
    assert upstream.open_connections() <= 10


@pytest.mark.line(22)
def test_concurrent_requests_use_connections_of_their_own(
    gateway: Gateway, upstream: Upstream
) -> None:
    def echo_late(exchange: Exchange) -> None:
        time.sleep(0.1)
        exchange.send(response_bytes(exchange.request.target))

    upstream.script(echo_late)
    clients = [gateway.connect() for _ in range(20)]
    for round_number in range(2):
        for number, client in enumerate(clients):
            client.send(request_bytes("GET", f"/{round_number}-{number}"))
        for number, client in enumerate(clients):
            assert client.response().body == b"/%d-%d" % (round_number, number)
    for client in clients:
        client.close()
    assert len(upstream.connections) <= 21
