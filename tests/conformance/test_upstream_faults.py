"""Answers that break HTTP: a 502, or an unclean end; nothing of them may reach a later request."""

from collections.abc import Callable
from typing import Any

import pytest
from support import wait
from support.errors import assert_openai_error
from support.gateway import Gateway
from support.upstream import Exchange, Upstream
from support.wire import (
    LAST_CHUNK,
    SSE_HEAD,
    EndedError,
    chunk,
    request_bytes,
    response_bytes,
)

SETTINGS: dict[str, Any] = {"timeouts": {"response_s": 0.6, "stall_s": 0.6}}

EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
OK = b"HTTP/1.1 200 OK\r\n"
CL = b"Content-Length: 4\r\n"
TE = b"Transfer-Encoding: chunked\r\n"

BAD_HEADS = {
    "no HTTP": b"hello\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "TLS alert": b"\x15\x03\x01\x00\x02\x02\x46\r\n\r\n",
    "HTTP/2 settings": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\r\n\r\n",
    "version 2.0": b"HTTP/2.0 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 \r\n\r\n",
    "two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "length and coding": OK + CL + TE + b"\r\n" + LAST_CHUNK,
    "two lengths": OK + CL + b"Content-Length: 5\r\n\r\nabcde",
    "length in a list": OK + b"Content-Length: 4, 5\r\n\r\nabcde",
    "negative length": OK + b"Content-Length: -1\r\n\r\n",
    "length in letters": OK + b"Content-Length: four\r\n\r\n",
    "huge length": OK + b"Content-Length: 99999999999999999999\r\n\r\n",
    "unknown coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + LAST_CHUNK,
    "space before the colon": OK + b"X-A : 1\r\nContent-Length: 0\r\n\r\n",
    "no colon": OK + b"X-A\r\nContent-Length: 0\r\n\r\n",
    "folded": OK + b"X-A: 1\r\n Content-Length: 5\r\nContent-Length: 0\r\n\r\n",
    "NUL": OK + b"X-A: \x00\r\nContent-Length: 0\r\n\r\n",
    "endless": OK + b"X-A: " + b"x" * 2_000_000,
    "101 that nobody asked for": (
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
    ),
}


@pytest.mark.line(4, 15)
@pytest.mark.parametrize("raw", BAD_HEADS.values(), ids=BAD_HEADS)
def test_a_head_that_breaks_http_is_a_502(gateway: Gateway, upstream: Upstream, raw: bytes) -> None:
    upstream.script(lambda exchange: send_and_wait(exchange, raw + EVIL))
    with gateway.connect() as client:
        answer = client.exchange("POST", "/", body=b"x")
        assert_openai_error(answer, 502)
        assert b"evil" not in client.received
        upstream.respond(response_bytes(b"next"))
        assert client.exchange().body == b"next"
    wait.until(lambda: upstream.open_connections() == 1, what="the bad connection is closed")
    assert len(upstream.requests) == 2


def send_and_wait(exchange: Exchange, raw: bytes) -> None:
    """Send, then keep the connection as a server does that thinks all is well."""
    exchange.send(raw)
    exchange.peer_closed_after(3)


BAD_CHUNKS = {
    "letters": b"xyz\r\n",
    "0x": b"0x4\r\nabcd\r\n",
    "minus": b"-4\r\nabcd\r\n",
    "17 digits": b"10000000000000004\r\nabcd\r\n",
    "bare LF": b"4\nabcd\r\n",
    "no CRLF after the data": b"4\r\nabcdX\r\n0\r\n\r\n",
    "bare LF after the data": b"4\r\nabcd\n0\r\n\r\n",
    "CR CR LF": b"4\r\r\nabcd\r\n0\r\n\r\n",
    "endless size line": b"4;" + b"x" * 1_000_000,
    "trailer without a colon": b"0\r\nX-A\r\n\r\n",
    "endless trailers": b"0\r\n" + b"X-A: 1\r\n" * 500_000,
}


@pytest.mark.line(4, 15)
@pytest.mark.parametrize("raw", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
def test_a_body_that_breaks_http_ends_uncleanly(
    gateway: Gateway, upstream: Upstream, raw: bytes
) -> None:
    upstream.script(
        lambda exchange: send_and_wait(exchange, SSE_HEAD + chunk(b"good") + raw + EVIL)
    )
    with gateway.connect() as client:
        client.send(request_bytes())
        try:
            answer = client.response()
        except (EndedError, ValueError):
            return  # no whole head even: that is an unclean end, too
        assert answer.status == 502 or not answer.complete
    assert b"evil" not in client.received
    wait.until(lambda: upstream.open_connections() == 0, what="the bad connection is closed")


SURPLUS = {
    "length": response_bytes(b"fine"),
    "length 0": response_bytes(b""),
    "chunked": SSE_HEAD + chunk(b"fine") + LAST_CHUNK,
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 4\r\n\r\n",
    "HEAD": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n",
}


@pytest.mark.line(15, 22)
@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize("case", SURPLUS)
def test_bytes_behind_an_answer_never_reach_the_next_request(
    gateway: Gateway, upstream: Upstream, case: str, when: str
) -> None:
    """A wrong body of HEAD, a second answer: the connection is not used again."""

    def answer_twice(exchange: Exchange) -> None:
        if when == "at once":
            exchange.send(SURPLUS[case] + EVIL)
        else:
            exchange.send(SURPLUS[case])
            wait.until(lambda: client.arrivals, what="the answer at the client")
            exchange.send(EVIL)

    method = "HEAD" if case == "HEAD" else "GET"
    upstream.script(answer_twice)
    with gateway.connect() as client:
        client.send(request_bytes(method))
        assert client.response(method).complete
        upstream.respond(response_bytes(b"next"))
        if when == "later":
            wait.until(lambda: upstream.open_connections() == 0, what="the connection is dropped")
        for _ in range(3):
            assert client.exchange().body == b"next"
        assert b"evil" not in client.received
    assert gateway.fetch().body == b"next"


@pytest.mark.line(9, 23, 35)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_upstream_that_never_answers_is_a_504_and_no_second_try(
    gateway: Gateway, upstream: Upstream, method: str
) -> None:
    upstream.script(lambda exchange: send_and_wait(exchange, b""))
    with gateway.connect() as client:
        client.send(request_bytes(method, "/", body=b"x"))
        answer = client.response(method)
    assert_openai_error(answer, 504)
    wait.until(lambda: upstream.open_connections() == 0, what="the hung connection is closed")
    assert len(upstream.requests) == 1


@pytest.mark.line(23)
def test_half_a_head_in_time_is_a_504_too(gateway: Gateway, upstream: Upstream) -> None:
    upstream.script(lambda exchange: send_and_wait(exchange, OK + b"X-A: "))
    assert gateway.fetch().status in (502, 504)
    assert len(upstream.requests) == 1


STALLS: dict[str, Callable[[Exchange], None]] = {
    "silence": lambda exchange: send_and_wait(exchange, SSE_HEAD + chunk(b"data: 1\n\n")),
    "silence after the head": lambda exchange: send_and_wait(exchange, SSE_HEAD),
}


@pytest.mark.line(9, 23)
@pytest.mark.parametrize("case", STALLS)
def test_a_stalled_stream_is_cut_where_a_limit_is_set(
    gateway: Gateway, upstream: Upstream, case: str
) -> None:
    upstream.script(STALLS[case])
    before = gateway.metrics().outcomes().get("completed", 0)
    with gateway.connect(timeout_s=5) as client:
        client.send(request_bytes())
        answer = client.response()
    assert not answer.complete
    assert len(upstream.requests) == 1
    assert gateway.metrics().outcomes().get("completed", 0) == before


@pytest.mark.line(9)
@pytest.mark.parametrize(("event", "cut"), [(b": keep-alive\n\n", True), (b"data: 1\n\n", False)])
def test_comments_do_not_hide_a_stall_but_events_do(
    gateway: Gateway, upstream: Upstream, event: bytes, cut: bool
) -> None:
    def send_on(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        for _ in range(20):
            if exchange.peer_closed_after(0.1) is not None:
                return
            exchange.send(chunk(event))
        exchange.send(LAST_CHUNK)

    upstream.script(send_on)
    with gateway.connect(timeout_s=5) as client:
        client.send(request_bytes())
        answer = client.response()
    assert answer.complete is not cut
    assert answer.body.startswith(event)
