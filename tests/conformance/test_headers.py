"""Header fields: what belongs to one hop stays there, everything else travels byte for byte."""

import pytest
from support.gateway import Gateway
from support.upstream import Exchange, Upstream
from support.wire import Headers, message_bytes, request_bytes, response_bytes

HOP_BY_HOP = [
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
]
# Fields that the gateway may set for its own hop, or by which a proxy may make itself known.
OWN = {b"connection", b"keep-alive", b"via", b"date", b"forwarded", b"x-forwarded-for"}

END_TO_END: Headers = [
    (b"AUTHORIZATION", b"Bearer sk-123=="),
    (b"X-Request-Id", b"r-1"),
    (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    (b"x-ciuic-tier", b"gold"),
    (b"X-MiXeD-cAsE", b'Value, With; odd="chars"  and  inner   spaces'),
    (b"X-Twice", b"one"),
    (b"X-Between", b"1"),
    (b"x-twice", b"two"),
    (b"X-Empty", b""),
    (b"X-Obs-Text", b"caf\xe9 \xff\x80"),
    (b"X-UTF8", "深度求索".encode()),
    (b"X-Tab", b"a\tb"),
    (b"!#$%&'*+-.^_`|~0aZ", b"every token character"),
    (b"Cookie", b"a=1; b=2"),
    (b"X-Forwarded-For", b"10.0.0.1, 10.0.0.2"),
    (b"Accept", b"text/event-stream"),
]


def travelled(headers: Headers) -> Headers:
    """Without the gateway's own fields, unless the test sent one of that name itself."""
    sent = {name for name, _ in END_TO_END}
    return [(name, value) for name, value in headers if name in sent or name.lower() not in OWN]


@pytest.mark.line(13, 19)
def test_request_fields_keep_case_order_duplicates_and_bytes(
    gateway: Gateway, upstream: Upstream
) -> None:
    gateway.fetch("GET", "/", tuple(END_TO_END))
    assert travelled(upstream.request.headers) == [(b"Host", b"test.example"), *END_TO_END]


@pytest.mark.line(13, 19)
def test_response_fields_keep_case_order_duplicates_and_bytes(
    gateway: Gateway, upstream: Upstream
) -> None:
    fields = [
        *END_TO_END,
        (b"Server", b"uvicorn"),
        (b"Date", b"Thu, 01 Jan 1970 00:00:00 GMT"),
        (b"Set-Cookie", b"a=1; Path=/"),
        (b"set-cookie", b"b=2"),
        (b"Set-Cookie", b"a=3"),
        (b"WWW-Authenticate", b'Basic realm="a"'),
    ]
    upstream.respond(response_bytes(b"ok", headers=fields))
    answer = gateway.fetch()
    seen = [field for field in answer.headers if field[0] != b"Connection"]
    assert seen == [*fields, (b"Content-Length", b"2")]


@pytest.mark.line(13)
@pytest.mark.parametrize("value", [b"\t padded \t ", b"", b"   "])
def test_the_value_survives_whatever_white_space_surrounds_it(
    gateway: Gateway, upstream: Upstream, value: bytes
) -> None:
    with gateway.connect() as client:
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nX-Padded:" + value + b"\r\n\r\n")
        assert client.response().status == 200
    assert upstream.request.all("x-padded") == [value.strip()]


def hop_value(name: bytes) -> bytes:
    """A value under which the message stays well-formed."""
    values = {b"connection": b"keep-alive", b"transfer-encoding": b"chunked", b"te": b"trailers"}
    return values.get(name, b"anything")


@pytest.mark.line(13)
@pytest.mark.parametrize("name", HOP_BY_HOP)
def test_hop_by_hop_request_fields_are_not_forwarded(
    gateway: Gateway, upstream: Upstream, name: bytes
) -> None:
    fields = [(name.title(), hop_value(name)), (b"X-After", b"1")]
    with gateway.connect() as client:
        body = b"0\r\n\r\n" if name == b"transfer-encoding" else b""
        client.send(request_bytes("POST", "/", fields) + body)
        assert client.response("POST").status == 200
    assert (name.title(), hop_value(name)) not in upstream.request.headers or (
        name == b"transfer-encoding"  # the gateway's own framing of its own hop
    )
    assert upstream.request.all("x-after") == [b"1"]


@pytest.mark.line(13)
@pytest.mark.parametrize("name", [n for n in HOP_BY_HOP if n != b"transfer-encoding"])
def test_hop_by_hop_response_fields_are_not_forwarded(
    gateway: Gateway, upstream: Upstream, name: bytes
) -> None:
    value = b"close, x-foo" if name == b"connection" else b"max=99, odd"
    upstream.respond(response_bytes(headers=[(name.title(), value), (b"X-After", b"1")]))
    answer = gateway.fetch()
    assert value not in answer.all(name.decode())
    assert answer.all("x-after") == [b"1"]
    assert answer.body == b"ok"


@pytest.mark.line(13)
@pytest.mark.parametrize(
    "connection",
    [b"X-Private", b"close, x-private", b"X-PRIVATE , keep-alive", b",,x-private,", b"x-Private\t"],
)
def test_fields_that_connection_names_are_not_forwarded(
    gateway: Gateway, upstream: Upstream, connection: bytes
) -> None:
    private = [(b"X-Private", b"1"), (b"X-Public", b"2"), (b"x-private", b"3")]
    upstream.respond(response_bytes(headers=[(b"Connection", connection), *private]))
    answer = gateway.fetch("GET", "/", ((b"Connection", connection), *private))
    assert upstream.request.all("x-private") == []
    assert upstream.request.all("x-public") == [b"2"]
    assert answer.all("x-private") == []
    assert answer.all("x-public") == [b"2"]


@pytest.mark.line(13)
def test_connection_may_stand_twice(gateway: Gateway, upstream: Upstream) -> None:
    fields = ((b"Connection", b"x-a"), (b"X-A", b"1"), (b"Connection", b"x-b"), (b"X-B", b"2"))
    gateway.fetch("GET", "/", fields)
    assert upstream.request.all("x-a") + upstream.request.all("x-b") == []


@pytest.mark.line(13, 15)
@pytest.mark.parametrize("named", [b"content-length", b"host", b"transfer-encoding"])
def test_connection_cannot_take_the_framing_or_the_host_away(
    gateway: Gateway, upstream: Upstream, named: bytes
) -> None:
    body = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    answer = gateway.fetch("POST", "/", ((b"Connection", named),), body)
    assert answer.status in (200, 400)
    if answer.status == 200:
        assert upstream.request.body == body
        assert upstream.request.all("host") == [b"test.example"]


@pytest.mark.line(13, 19)
def test_very_many_fields_pass(gateway: Gateway, upstream: Upstream) -> None:
    fields = [(b"X-Number-%d" % number, b"%d" % number) for number in range(1000)]
    upstream.respond(response_bytes(headers=fields))
    answer = gateway.fetch("GET", "/", tuple(fields))
    assert [f for f in upstream.request.headers if f[0].startswith(b"X-Number")] == fields
    assert [f for f in answer.headers if f[0].startswith(b"X-Number")] == fields


@pytest.mark.line(13, 19)
def test_long_values_pass(gateway: Gateway, upstream: Upstream) -> None:
    value = b"v" * 30_000
    upstream.respond(response_bytes(headers=[(b"X-Long", value)]))
    answer = gateway.fetch("GET", "/", ((b"X-Long", value),))
    assert upstream.request.all("x-long") == [value]
    assert answer.all("x-long") == [value]


@pytest.mark.line(19)
@pytest.mark.parametrize(
    "line", ["200 OK", "200 ", "200", "299 Odd  reason", "418 I'm a teapot", "599 caf\xe9"]
)
def test_status_and_reason_pass(gateway: Gateway, upstream: Upstream, line: str) -> None:
    start = b"HTTP/1.1 " + line.encode("latin-1")
    upstream.respond(message_bytes(start, [(b"Content-Length", b"0")]))
    answer = gateway.fetch()
    assert answer.status == int(line[:3])
    assert answer.start.removeprefix(b"HTTP/1.1 ").strip() == line.encode("latin-1").strip()


@pytest.mark.line(35)
@pytest.mark.parametrize("status", [400, 401, 402, 404, 422, 429, 500, 502, 503, 504])
def test_upstream_errors_pass_verbatim_and_are_not_retried(
    gateway: Gateway, upstream: Upstream, status: int
) -> None:
    """Also bodies that are no OpenAI error: vLLM answers 401 with {"error":"Unauthorized"}."""
    body = b'{"error":"Unauthorized"}\n'
    fields = [(b"Content-Type", b"application/json"), (b"Retry-After", b"7")]
    upstream.respond(response_bytes(body, f"{status} Upstream Says", fields))
    answer = gateway.fetch("POST", "/v1/chat/completions", body=b"{}")
    assert answer.start == b"HTTP/1.1 %d Upstream Says" % status
    assert answer.body == body
    assert answer.get("retry-after") == b"7"
    assert len(upstream.requests) == 1


@pytest.mark.line(13)
def test_the_gateway_keeps_the_hop_to_the_upstream_open_although_the_client_closes(
    gateway: Gateway, upstream: Upstream
) -> None:
    for _ in range(5):
        gateway.fetch("GET", "/", ((b"Connection", b"close"),))
    assert len(upstream.connections) == 1


@pytest.mark.line(13)
def test_upstream_close_does_not_close_the_hop_to_the_client(
    gateway: Gateway, upstream: Upstream
) -> None:
    def answer_and_close(exchange: Exchange) -> None:
        exchange.send(response_bytes(headers=[(b"Connection", b"close")]))
        exchange.close()

    upstream.script(answer_and_close)
    with gateway.connect() as client:
        for _ in range(5):
            assert client.exchange().body == b"ok"
    assert len(upstream.connections) == 5
