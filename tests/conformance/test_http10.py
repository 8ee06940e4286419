"""HTTP/1.0 clients, among them health checkers and old load testers (RFC 9112 section 9.3)."""

import pytest
from support.gateway import Gateway
from support.upstream import Exchange, Upstream
from support.wire import SSE_HEAD, chunked, message_bytes, response_bytes


@pytest.mark.line(14)
def test_without_keep_alive_the_connection_ends_with_the_answer(
    gateway: Gateway, upstream: Upstream
) -> None:
    with gateway.connect() as client:
        client.send(b"GET /a HTTP/1.0\r\n\r\n")
        answer = client.response()
        assert (answer.status, answer.body) == (200, b"ok")
        assert client.rest() == b""
        assert client.end == "fin"
    assert upstream.request.target == b"/a"


@pytest.mark.line(14)
def test_with_keep_alive_the_connection_stays(gateway: Gateway, upstream: Upstream) -> None:
    with gateway.connect() as client:
        for _ in range(3):
            client.send(b"GET / HTTP/1.0\r\nHost: a\r\nConnection: Keep-Alive\r\n\r\n")
            answer = client.response()
            assert answer.body == b"ok"
            assert (answer.get("connection") or b"").lower() == b"keep-alive"


@pytest.mark.line(14)
@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
def test_a_chunked_answer_reaches_it_without_chunks(
    gateway: Gateway, upstream: Upstream, connection: bytes
) -> None:
    upstream.respond(SSE_HEAD + chunked(b"data: 1\n\n", b"data: 2\n\n"))
    with gateway.connect() as client:
        client.send(b"GET / HTTP/1.0\r\n" + connection + b"\r\n")
        answer = client.response()
    assert answer.get("transfer-encoding") is None
    assert answer.body == b"data: 1\n\ndata: 2\n\n"
    assert answer.complete


@pytest.mark.line(14)
def test_an_answer_that_ends_with_the_connection(gateway: Gateway, upstream: Upstream) -> None:
    def until_close(exchange: Exchange) -> None:
        exchange.send(message_bytes(b"HTTP/1.1 200 OK", [], b"all of it"))
        exchange.close()

    upstream.script(until_close)
    with gateway.connect() as client:
        client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = client.response()
    assert (answer.complete, answer.body) == (True, b"all of it")


@pytest.mark.line(14)
def test_it_may_send_a_body(gateway: Gateway, upstream: Upstream) -> None:
    with gateway.connect() as client:
        client.send(b"POST / HTTP/1.0\r\nContent-Length: 4\r\n\r\nbody")
        assert client.response("POST").status == 200
    assert upstream.request.body == b"body"


@pytest.mark.line(14, 15)
def test_it_must_not_send_chunks(gateway: Gateway, upstream: Upstream) -> None:
    """RFC 9112 section 6.1: Transfer-Encoding in HTTP/1.0 means faulty framing."""
    with gateway.connect() as client:
        client.send(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"body"))
        assert client.response("POST").status == 400
        assert client.rest() == b""
    assert upstream.requests == []


@pytest.mark.line(17)
def test_it_gets_no_continue(gateway: Gateway, upstream: Upstream) -> None:
    """RFC 9110 section 10.1.1: a server ignores the expectation of an HTTP/1.0 client."""
    with gateway.connect() as client:
        client.send(b"POST / HTTP/1.0\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\nbody")
        answer = client.response("POST")
    assert (answer.informational, answer.status) == ([], 200)


@pytest.mark.line(14)
def test_the_upstream_is_spoken_to_in_http_1_1_or_without_promises(
    gateway: Gateway, upstream: Upstream
) -> None:
    """Whatever version goes upstream, it comes with Host if it is HTTP/1.1."""
    with gateway.connect() as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        assert client.response().status == 200
    version = upstream.request.start.rsplit(b" ", 1)[1]
    assert version == b"HTTP/1.0" or upstream.request.get("host") is not None


@pytest.mark.line(14)
def test_head_has_no_body(gateway: Gateway, upstream: Upstream) -> None:
    upstream.respond(response_bytes(b"")[: -len(b"0\r\n\r\n")] + b"77\r\n\r\n")
    with gateway.connect() as client:
        client.send(b"HEAD / HTTP/1.0\r\n\r\n")
        answer = client.response("HEAD")
        assert answer.get("content-length") == b"77"
        assert client.rest() == b""
