"""Several requests on one connection, sent ahead or one after the other."""

import itertools
import time

import pytest
from support.gateway import Gateway
from support.raw import cut
from support.upstream import Exchange, Upstream
from support.wire import (
    LAST_CHUNK,
    SSE_HEAD,
    EndedError,
    chunk,
    chunked,
    request_bytes,
    response_bytes,
)

CHUNKED = [(b"Transfer-Encoding", b"chunked")]
# Bodies that look like requests: an error of one byte in the framing would show.
INNER = b"GET /inner HTTP/1.1\r\nHost: a\r\n\r\n"
MIXED = [
    ("GET", request_bytes("GET", "/0")),
    ("POST", request_bytes("POST", "/1", body=INNER)),
    ("HEAD", request_bytes("HEAD", "/2")),
    ("PUT", request_bytes("PUT", "/3", CHUNKED) + chunked(INNER, b"\r\n\r\n")),
    ("POST", request_bytes("POST", "/4", body=b"")),
    ("DELETE", request_bytes("DELETE", "/5")),
    ("POST", request_bytes("POST", "/6", CHUNKED) + LAST_CHUNK),
    ("GET", request_bytes("GET", "/7", body=INNER)),
]


def echo_target(exchange: Exchange) -> None:
    number = int(exchange.request.target[1:])
    time.sleep((7 - number) * 0.004)  # the first answers are the slowest
    body = b"answer %d" % number
    if exchange.request.method == b"HEAD":
        exchange.send(response_bytes(body)[: -len(body)])
    elif number % 2:
        exchange.send(SSE_HEAD + chunk(body) + LAST_CHUNK)
    else:
        exchange.send(response_bytes(body))


@pytest.mark.line(16)
@pytest.mark.parametrize("size", [None, 7, 64], ids=["one segment", "by 7 bytes", "by 64 bytes"])
def test_pipelined_requests_are_answered_in_order(
    gateway: Gateway, upstream: Upstream, size: int | None
) -> None:
    upstream.script(echo_target)
    whole = b"".join(raw for _, raw in MIXED)
    with gateway.connect() as client:
        client.drip([whole] if size is None else cut(whole, itertools.repeat(size)))
        for number, (method, _) in enumerate(MIXED):
            answer = client.response(method)
            assert answer.complete
            assert answer.body == (b"" if method == "HEAD" else b"answer %d" % number)
    assert [request.target for request in upstream.requests] == [b"/%d" % n for n in range(8)]
    assert [r.body for r in upstream.requests if r.target in (b"/1", b"/7")] == [INNER, INNER]


@pytest.mark.line(16)
def test_a_hundred_pipelined_requests(gateway: Gateway, upstream: Upstream) -> None:
    upstream.script(lambda exchange: exchange.send(response_bytes(exchange.request.target)))
    with gateway.connect() as client:
        client.send(b"".join(request_bytes("GET", f"/{number}") for number in range(100)))
        for number in range(100):
            assert client.response().body == b"/%d" % number


@pytest.mark.line(16)
def test_nothing_is_answered_after_connection_close(gateway: Gateway, upstream: Upstream) -> None:
    with gateway.connect() as client:
        first = request_bytes("GET", "/1", [(b"Connection", b"close")])
        client.send(first + request_bytes("GET", "/2"))
        answer = client.response()
        assert (answer.body, answer.get("connection")) == (b"ok", b"close")
        assert client.rest() == b""
    assert [request.target for request in upstream.requests] == [b"/1"]


@pytest.mark.line(15, 16)
def test_a_malformed_request_behind_a_good_one_gets_its_own_400(
    gateway: Gateway, upstream: Upstream
) -> None:
    def answer_late(exchange: Exchange) -> None:
        time.sleep(0.05)
        exchange.send(response_bytes())

    upstream.script(answer_late)
    with gateway.connect() as client:
        client.send(request_bytes("GET", "/1") + b"BAD REQUEST\r\n\r\n")
        assert client.response().body == b"ok"
        assert client.response().status == 400
        assert client.rest() == b""
    assert [request.target for request in upstream.requests] == [b"/1"]


@pytest.mark.line(16, 23)
def test_answers_after_a_broken_one_are_not_sent(gateway: Gateway, upstream: Upstream) -> None:
    def break_first(exchange: Exchange) -> None:
        if exchange.request.target == b"/1":
            exchange.send(SSE_HEAD + chunk(b"data: 1\n\n"))
            exchange.close()
        exchange.send(response_bytes(b"second"))

    upstream.script(break_first)
    with gateway.connect() as client:
        client.send(request_bytes("GET", "/1") + request_bytes("GET", "/2"))
        assert not client.response().complete
        assert b"second" not in client.received


@pytest.mark.line(16)
def test_one_connection_carries_many_requests(gateway: Gateway, upstream: Upstream) -> None:
    with gateway.connect() as client:
        for number in range(50):
            body = b"x" * number if number % 2 else None
            assert client.exchange("POST" if body else "GET", "/", body=body).body == b"ok"
    assert len(upstream.connections) == 1


@pytest.mark.line(16)
@pytest.mark.parametrize("blank", [b"\r\n", b"\r\n\r\n"])
def test_empty_lines_before_a_request_are_ignored_or_refused(
    gateway: Gateway, upstream: Upstream, blank: bytes
) -> None:
    """RFC 9112 section 2.2: a server should ignore at least one; some clients end POSTs so."""
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/1", body=b"x") + blank + request_bytes("GET", "/2"))
        assert client.response("POST").status == 200
        if blank == b"\r\n":
            assert client.response().status == 200
        else:
            try:
                assert client.response().status in (200, 400)
            except EndedError:
                pass
