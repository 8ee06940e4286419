"""Bodies in every framing and both directions (RFC 9112 section 6), trailers, interim answers."""

import itertools

import pytest
from support import wait, wire
from support.gateway import Gateway
from support.raw import cut
from support.upstream import Exchange, Upstream
from support.wire import (
    LAST_CHUNK,
    Headers,
    chunk,
    chunked,
    message_bytes,
    request_bytes,
    response_bytes,
)

CHUNKED: Headers = [(b"Transfer-Encoding", b"chunked")]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "REPORT")
BODY = bytes(range(256)) * 3

REQUEST_FRAMINGS: dict[str, tuple[Headers, bytes, bytes]] = {
    "none": ([], b"", b""),
    "length": ([(b"Content-Length", b"768")], BODY, BODY),
    "length 0": ([(b"Content-Length", b"0")], b"", b""),
    "length with zeros": ([(b"Content-Length", b"0000768")], BODY, BODY),
    "chunked": (CHUNKED, chunked(BODY[:5], BODY[5:6], BODY[6:]), BODY),
    "chunked 0": (CHUNKED, LAST_CHUNK, b""),
    "chunked in capitals": ([(b"transfer-encoding", b"Chunked")], chunked(BODY), BODY),
    "chunked with zeros": (CHUNKED, b"00000300\r\n" + BODY + b"\r\n000\r\n\r\n", BODY),
    "chunked with capital digits": (
        CHUNKED,
        b"2FF\r\n" + BODY[:767] + b"\r\n0\r\n\r\n",
        BODY[:767],
    ),
    "chunk extensions": (
        CHUNKED,
        b'300;a;b=c;d="e;f"\r\n' + BODY + b"\r\n0;last\r\n\r\n",
        BODY,
    ),
}


@pytest.mark.line(14, 20)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("framing", REQUEST_FRAMINGS)
def test_every_method_passes_with_every_body(
    gateway: Gateway, upstream: Upstream, method: str, framing: str
) -> None:
    fields, encoded, body = REQUEST_FRAMINGS[framing]
    with gateway.connect() as client:
        client.send(request_bytes(method, "/v1/files?x=1", fields) + encoded)
        assert client.response(method).status == 200
        client.send(request_bytes("GET", "/next"))
        assert client.response().body == b"ok"
    first, following = upstream.requests
    assert first.start == f"{method} /v1/files?x=1 HTTP/1.1".encode()
    assert (first.complete, first.body) == (True, body)
    assert following.target == b"/next"


@pytest.mark.line(6, 14)
@pytest.mark.parametrize("framing", ["length", "chunked", "chunk extensions", "none"])
def test_a_request_that_drips_byte_by_byte_is_the_same_request(
    gateway: Gateway, upstream: Upstream, framing: str
) -> None:
    fields, encoded, body = REQUEST_FRAMINGS[framing]
    whole = request_bytes("POST", "/drip", [*fields, (b"X-Last", b"1")]) + encoded
    with gateway.connect() as client:
        client.drip(cut(whole, itertools.repeat(1)), gap_s=0.0002)
        assert client.response("POST").status == 200
    assert upstream.request.body == body
    assert upstream.request.all("x-last") == [b"1"]


RESPONSE_FRAMINGS: dict[str, tuple[Headers, bytes, bytes]] = {
    "length": ([(b"Content-Length", b"768")], BODY, BODY),
    "length 0": ([(b"Content-Length", b"0")], b"", b""),
    "chunked": (CHUNKED, chunked(BODY[:1], BODY[1:]), BODY),
    "chunked 0": (CHUNKED, LAST_CHUNK, b""),
    "chunk extensions": (CHUNKED, b'300;a="b"\r\n' + BODY + b"\r\n0;x\r\n\r\n", BODY),
    "until close": ([], BODY, BODY),
    "until close, empty": ([], b"", b""),
}


@pytest.mark.line(14)
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
@pytest.mark.parametrize("framing", RESPONSE_FRAMINGS)
def test_an_answer_passes_in_every_framing(
    gateway: Gateway, upstream: Upstream, framing: str, version: bytes
) -> None:
    fields, encoded, body = RESPONSE_FRAMINGS[framing]
    if version == b"HTTP/1.0" and fields == CHUNKED:
        pytest.skip("HTTP/1.0 knows no chunks")

    def answer_it(exchange: Exchange) -> None:
        exchange.send(message_bytes(version + b" 200 OK", fields, encoded))
        if "close" in framing:
            exchange.close()

    upstream.script(answer_it)
    with gateway.connect() as client:
        for _ in range(2):  # the client's connection survives where the framing allows it
            answer = client.exchange()
            assert answer.start.startswith(b"HTTP/1.1 200")
            assert (answer.complete, answer.body) == (True, body)
            if client.end is not None:
                break


BODILESS: dict[str, tuple[str, bytes]] = {
    "204": ("GET", message_bytes(b"HTTP/1.1 204 No Content", [(b"X-A", b"1")])),
    "304": ("GET", message_bytes(b"HTTP/1.1 304 Not Modified", [(b"ETag", b'"1"')])),
    "304 with length": (
        "GET",
        message_bytes(b"HTTP/1.1 304 Not Modified", [(b"Content-Length", b"1234")]),
    ),
    "HEAD with length": ("HEAD", message_bytes(b"HTTP/1.1 200 OK", [(b"Content-Length", b"9")])),
    "HEAD chunked": ("HEAD", message_bytes(b"HTTP/1.1 200 OK", CHUNKED)),
    "HEAD unframed": ("HEAD", message_bytes(b"HTTP/1.1 200 OK", [(b"X-A", b"1")])),
    "HEAD 404": ("HEAD", message_bytes(b"HTTP/1.1 404 Not", [(b"Content-Length", b"9")])),
}


@pytest.mark.line(14)
@pytest.mark.parametrize("case", BODILESS)
def test_an_answer_without_a_body_ends_at_its_head(
    gateway: Gateway, upstream: Upstream, case: str
) -> None:
    method, raw = BODILESS[case]
    with gateway.connect() as client:
        upstream.respond(raw)
        answer = client.exchange(method)
        assert answer.start == raw.split(b"\r\n")[0]
        wanted = [line.split(b": ")[1] for line in raw.split(b"\r\n") if b"Content-Length" in line]
        assert answer.all("content-length") == wanted
        upstream.respond(response_bytes(b"next"))
        assert client.exchange().body == b"next"


@pytest.mark.line(14)
def test_request_trailers_reach_the_upstream(gateway: Gateway, upstream: Upstream) -> None:
    body = chunk(b"data") + b"0\r\nX-Checksum: abc\r\nx-second:  caf\xe9 \r\n\r\n"
    with gateway.connect() as client:
        fields = [*CHUNKED, (b"Trailer", b"X-Checksum"), (b"TE", b"trailers")]
        client.send(request_bytes("POST", "/", fields) + body)
        assert client.response("POST").status == 200
        assert client.exchange().status == 200
    first = upstream.requests[0]
    assert first.body == b"data"
    assert first.trailers == [(b"X-Checksum", b"abc"), (b"x-second", b"caf\xe9")]


@pytest.mark.line(14)
def test_response_trailers_reach_the_client(gateway: Gateway, upstream: Upstream) -> None:
    body = chunk(b"data") + b"0\r\nX-Usage: 17\r\nX-Empty:\r\n\r\n"
    upstream.respond(message_bytes(b"HTTP/1.1 200 OK", [*CHUNKED, (b"Trailer", b"X-Usage")], body))
    with gateway.connect() as client:
        for _ in range(2):
            answer = client.exchange("GET", "/", [(b"TE", b"trailers")])
            assert answer.body == b"data"
            assert answer.trailers == [(b"X-Usage", b"17"), (b"X-Empty", b"")]


INTERIM = {
    "100": b"HTTP/1.1 100 Continue\r\n\r\n",
    "102": b"HTTP/1.1 102 Processing\r\nX-Progress: 1\r\n\r\n",
    "103": b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\nlink: </b>\r\n\r\n",
    "many": b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n" * 5,
}


@pytest.mark.line(14)
@pytest.mark.parametrize("case", [case for case in INTERIM if case != "100"])
@pytest.mark.parametrize("split", [False, True], ids=["at once", "apart"])
def test_interim_answers_reach_the_client(
    gateway: Gateway, upstream: Upstream, case: str, split: bool
) -> None:
    def answer_it(exchange: Exchange) -> None:
        exchange.send(INTERIM[case])
        if split:
            wait.until(lambda: client.arrivals, what="the interim answer at the client")
        exchange.send(response_bytes(b"final"))

    upstream.script(answer_it)
    with gateway.connect() as client:
        answer = client.exchange()
        assert client.received.startswith(INTERIM[case])
        assert (answer.status, answer.body) == (200, b"final")
        upstream.respond(response_bytes(b"next"))
        assert client.exchange().body == b"next"


@pytest.mark.line(14, 17)
def test_a_continue_that_nobody_asked_for_does_no_harm(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.respond(INTERIM["100"] + response_bytes(b"final"))
    with gateway.connect() as client:
        for _ in range(3):
            assert client.exchange("POST", "/", body=b"x").body == b"final"


@pytest.mark.line(14)
@pytest.mark.parametrize("case", INTERIM)
def test_interim_answers_do_not_reach_a_client_of_http_1_0(
    gateway: Gateway, upstream: Upstream, case: str
) -> None:
    """RFC 9110 section 15.2."""
    upstream.respond(INTERIM[case] + response_bytes(b"final"))
    with gateway.connect() as client:
        client.send(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n")
        answer = client.response()
    assert (answer.informational, answer.status, answer.body) == ([], 200, b"final")


@pytest.mark.line(18)
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_of_40_mb_passes_unchanged(
    gateway: Gateway, upstream: Upstream, framing: str
) -> None:
    body = bytes(range(251)) * 160_000  # 251 is prime: no period that buffers share
    with gateway.connect(timeout_s=30) as client:
        if framing == "length":
            client.send(request_bytes("POST", "/v1/chat/completions", body=body))
        else:
            client.send(request_bytes("POST", "/v1/chat/completions", CHUNKED))
            for start in range(0, len(body), 1_000_000):
                client.send(chunk(body[start : start + 1_000_000]))
            client.send(LAST_CHUNK)
        assert client.response("POST").status == 200
    assert upstream.request.complete
    assert upstream.request.body == body


EARLY = response_bytes(b'{"error":"too large for me"}', "413 Content Too Large")


@pytest.mark.line(4, 18)
@pytest.mark.parametrize("client_reads", ["in mid upload", "after the upload"])
@pytest.mark.parametrize("upstream_then", ["goes on reading", "closes"])
def test_an_answer_before_the_upload_is_over_reaches_the_client(
    gateway: Gateway, upstream: Upstream, client_reads: str, upstream_then: str
) -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.send(EARLY)
        if upstream_then == "closes":
            exchange.connection.shut()
        exchange.read_body()  # draining keeps the answer from being lost in a reset
        if upstream_then == "closes":
            exchange.close()

    upstream.script(refuse, head_only=True)
    body = b"x" * 4_000_000
    with gateway.connect() as client:
        head = request_bytes("POST", "/", [(b"Content-Length", b"%d" % len(body))])
        client.send(head + body[:100_000])
        if client_reads == "after the upload":
            client.send_ignoring_close(body[100_000:])
        answer = client.response("POST")
    assert answer.status == 413
    assert answer.body == b'{"error":"too large for me"}'


@pytest.mark.line(15, 16)
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_the_rest_of_an_upload_that_was_answered_early_is_no_request(
    gateway: Gateway, upstream: Upstream, framing: str
) -> None:
    def answer_early(exchange: Exchange) -> None:
        exchange.send(response_bytes(b"early"))
        exchange.read_body()

    inner = request_bytes("GET", "/smuggled")
    upstream.script(answer_early, head_only=True)
    with gateway.connect() as client:
        if framing == "length":
            head = request_bytes("POST", "/", [(b"Content-Length", b"%d" % (4 + len(inner)))])
            client.send(head + b"half")
        else:
            client.send(request_bytes("POST", "/", CHUNKED) + chunk(b"half"))
        assert client.response("POST").body == b"early"
        client.send_ignoring_close(inner if framing == "length" else chunk(inner) + LAST_CHUNK)
        client.send_ignoring_close(request_bytes("GET", "/next", [(b"Connection", b"close")]))
        client.wait_end(3)
    targets = [request.target for request in upstream.requests]
    assert targets in ([b"/"], [b"/", b"/next"])  # the connection ended, or went on in step


@pytest.mark.line(14)
def test_the_body_is_read_by_the_upstreams_framing_and_not_by_its_type(
    gateway: Gateway, upstream: Upstream
) -> None:
    """An event stream with a length is legal, and `[DONE]` is no end."""
    body = b"data: [DONE]\n\ndata: more\n\n"
    upstream.respond(response_bytes(body, headers=[(b"Content-Type", b"text/event-stream")]))
    with gateway.connect() as client:
        for _ in range(2):
            assert client.exchange().body == body


@pytest.mark.line(14)
def test_chunks_are_not_joined_across_time(gateway: Gateway, upstream: Upstream) -> None:
    def two_halves(exchange: Exchange) -> None:
        exchange.send(message_bytes(b"HTTP/1.1 200 OK", CHUNKED) + chunk(b"first"))
        wait.until(lambda: b"first" in client.received, what="the first half at the client")
        exchange.send(chunk(b"second") + LAST_CHUNK)

    upstream.script(two_halves)
    with gateway.connect() as client:
        client.send(request_bytes())
        assert wire.read_response(client).body == b"firstsecond"
