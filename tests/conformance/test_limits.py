"""Bounds on what a client may cost: size, number and time."""

import itertools
import time
from typing import Any

import pytest
from support import wait
from support.errors import assert_openai_error
from support.gateway import Gateway, outcome_delta
from support.raw import Client, cut
from support.upstream import Exchange, Upstream
from support.wire import EndedError, Message, chunk, request_bytes, response_bytes

SETTINGS: dict[str, Any] = {
    "limits": {
        "header_bytes": 8192,
        "uri_bytes": 2048,
        "body_bytes": 100_000,
        "connections": 300,
    },
    "timeouts": {"header_s": 0.5, "idle_s": 0.7, "body_s": 0.5},
}


# Bodies are made of requests: none of them may be taken for one.
INNER = request_bytes("GET", "/smuggled")


def assert_refused(client: Client, answer: Message, status: int) -> None:
    assert_openai_error(answer, status)
    assert (answer.get("connection") or b"").lower() == b"close"
    assert client.wait_end(5) is not None


@pytest.mark.line(18)
@pytest.mark.parametrize("method", ["POST", "PUT", "GET"])
def test_a_body_at_the_limit_passes(gateway: Gateway, upstream: Upstream, method: str) -> None:
    body = b"x" * 100_000
    assert gateway.fetch(method, "/", body=body).status == 200
    assert upstream.request.body == body


@pytest.mark.line(18, 35)
@pytest.mark.parametrize("method", ["POST", "PUT", "GET"])
@pytest.mark.parametrize("sent", ["head only", "whole body", "far more"])
def test_a_body_that_says_it_is_over_the_limit_is_a_readable_413(
    gateway: Gateway, upstream: Upstream, method: str, sent: str
) -> None:
    """A client that sends everything before it reads must not lose the answer to a reset."""
    size = {"head only": 100_001, "whole body": 100_001, "far more": 5_000_000}[sent]
    with gateway.connect() as client:
        client.send(request_bytes(method, "/", [(b"Content-Length", b"%d" % size)]))
        if sent != "head only":
            client.send_ignoring_close((INNER * (size // len(INNER) + 1))[:size])
        assert_refused(client, client.response(method), 413)
    assert upstream.received == b""


@pytest.mark.line(18, 35)
@pytest.mark.parametrize("step", [1000, 99_000])
def test_a_chunked_body_over_the_limit_is_a_readable_413(
    gateway: Gateway, upstream: Upstream, step: int
) -> None:
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/", [(b"Transfer-Encoding", b"chunked")]))
        for _ in range(300_000 // step):
            client.send_ignoring_close(chunk(b"x" * step))
        assert_refused(client, client.response("POST"), 413)
    assert upstream.requests == []
    wait.until(lambda: upstream.open_connections() == 0)


@pytest.mark.line(18)
def test_an_endless_body_ends_and_costs_no_memory(gateway: Gateway, upstream: Upstream) -> None:
    before = gateway.rss_bytes()
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/", [(b"Transfer-Encoding", b"chunked")]))
        started = time.monotonic()
        try:
            while time.monotonic() - started < 15:
                client.send(chunk(b"x" * 65536))
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert time.monotonic() - started < 15
    assert gateway.rss_bytes() - before < 20_000_000
    assert upstream.requests == []


@pytest.mark.line(21)
def test_a_uri_at_the_limit_passes(gateway: Gateway, upstream: Upstream) -> None:
    target = "/" + "x" * (2048 - len("GET / HTTP/1.1"))
    assert gateway.fetch("GET", target).status == 200
    assert upstream.request.target == target.encode()


@pytest.mark.line(21, 35)
@pytest.mark.parametrize("length", [2049, 4000, 100_000])
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_a_uri_over_the_limit_is_a_414(
    gateway: Gateway, upstream: Upstream, length: int, finished: bool
) -> None:
    raw = request_bytes("GET", "/" + "x" * length)
    with gateway.connect() as client:
        client.send_ignoring_close(raw if finished else raw.split(b" HTTP")[0])
        assert_refused(client, client.response(), 414)
    assert upstream.requests == []


@pytest.mark.line(21)
def test_a_header_section_near_the_limit_passes(gateway: Gateway, upstream: Upstream) -> None:
    fields = tuple((b"X-%02d" % number, b"v" * 400) for number in range(19))
    assert gateway.fetch("GET", "/", fields).status == 200
    assert upstream.request.all("x-18") == [b"v" * 400]


HEADERS = {
    "many": b"X-A: 1\r\n" * 2000,
    "long value": b"X-A: " + b"v" * 9000 + b"\r\n",
    "long name": b"X" * 9000 + b": 1\r\n",
    "huge": b"X-A: " + b"v" * 3_000_000 + b"\r\n",
}


@pytest.mark.line(21, 35)
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("case", HEADERS)
def test_a_header_section_over_the_limit_is_a_431(
    gateway: Gateway, upstream: Upstream, case: str, finished: bool
) -> None:
    with gateway.connect() as client:
        raw = b"GET / HTTP/1.1\r\nHost: a\r\n" + HEADERS[case] + (b"\r\n" if finished else b"")
        client.send_ignoring_close(raw)
        assert_refused(client, client.response(), 431)
    assert upstream.requests == []


@pytest.mark.line(21)
@pytest.mark.parametrize("case", ["stops", "drips"])
def test_a_slow_header_sender_is_cut(gateway: Gateway, upstream: Upstream, case: str) -> None:
    """Each byte must not buy new time."""
    with gateway.connect() as client:
        started = time.monotonic()
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        while case == "drips" and time.monotonic() - started < 5:
            client.send_ignoring_close(b"x")
            if client.wait_end(0.05) is not None:
                break
        assert client.wait_end(5) is not None
        assert time.monotonic() - started < 3
    assert client.received == b"" or client.received.startswith(b"HTTP/1.1 408 ")
    assert upstream.requests == []


@pytest.mark.line(21, 35)
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_that_stops_coming_is_a_408(
    gateway: Gateway, upstream: Upstream, framing: str
) -> None:
    fields = {"length": (b"Content-Length", b"9"), "chunked": (b"Transfer-Encoding", b"chunked")}
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/", [fields[framing]]))
        client.send(b"half" if framing == "length" else chunk(b"half"))
        assert_refused(client, client.response("POST"), 408)
    wait.until(lambda: upstream.open_connections() == 0, what="the half request is cut")
    assert upstream.requests == []


@pytest.mark.line(21)
def test_a_body_that_drips_is_slow_and_not_late(gateway: Gateway, upstream: Upstream) -> None:
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/", [(b"Content-Length", b"10")]))
        client.drip(cut(b"0123456789", itertools.repeat(1)), gap_s=0.1)
        assert client.response("POST").status == 200
    assert upstream.request.body == b"0123456789"


@pytest.mark.line(21)
def test_an_idle_connection_is_closed_without_a_word(gateway: Gateway, upstream: Upstream) -> None:
    with gateway.connect() as fresh, gateway.connect() as used:
        used.exchange()
        used.arrivals.clear()
        for client in (fresh, used):
            assert client.wait_end(5) is not None
            assert client.end == "fin"
            assert client.received == b""


@pytest.mark.line(9, 21)
def test_a_request_in_work_is_not_idle(gateway: Gateway, upstream: Upstream) -> None:
    def late(exchange: Exchange) -> None:
        time.sleep(1.5)
        exchange.send(response_bytes())

    upstream.script(late)
    assert gateway.fetch().status == 200


@pytest.mark.line(21)
def test_idle_connections_cost_little_and_block_nobody(
    gateway: Gateway, upstream: Upstream
) -> None:
    gateway.fetch()
    before_rss, before_cpu = gateway.rss_bytes(), gateway.cpu_s()
    idle = [gateway.connect() for _ in range(250)]
    started = time.monotonic()
    assert gateway.fetch().status == 200
    assert time.monotonic() - started < 1
    assert gateway.rss_bytes() - before_rss < 250 * 40_000
    for client in idle:
        client.close()
    assert gateway.cpu_s() - before_cpu < 2
    gateway.wait_idle()


@pytest.mark.line(21)
def test_connections_over_the_limit_are_turned_away(gateway: Gateway, upstream: Upstream) -> None:
    held = [gateway.connect() for _ in range(300)]
    for client in held:
        client.send(b"GET / HTTP/1.1\r\n")  # an unfinished head: not idle, not closed yet
    with gateway.connect() as one_more:
        one_more.send_ignoring_close(request_bytes())
        try:
            assert_openai_error(one_more.response(), 503)
        except EndedError:
            pass  # turned away without a word is fine, too
        assert upstream.requests == []
    for client in held:
        client.close()

    def served() -> bool:
        try:
            answer = gateway.fetch()
        except (EndedError, OSError):
            return False
        return answer.status == 200

    wait.until(served, what="room for new connections")


@pytest.mark.line(21)
def test_refusals_are_counted(gateway: Gateway, upstream: Upstream) -> None:
    before = gateway.metrics()
    gateway.fetch("GET", "/" + "x" * 3000)
    gateway.fetch("GET", "/", ((b"X-A", b"v" * 9000),))
    with gateway.connect() as client:
        client.send(b"nonsense\r\n\r\n")
        assert_refused(client, client.response(), 400)
    assert outcome_delta(before, gateway.metrics()) == {
        "uri_too_long": 1,
        "headers_too_large": 1,
        "bad_request": 1,
    }
