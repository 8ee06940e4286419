"""Heads: read strictly, sent on as they came."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.errors import BadRequest, BadResponse, ProtocolError, Unsupported
from ciuicflow.gateway.headers import (
    RequestHead,
    ResponseHead,
    client_head,
    drop_fields,
    field_value,
    read_request_head,
    upstream_head,
)

TOKEN = st.text("abcXYZ019!#$%&'*+-.^_`|~", min_size=1, max_size=12).map(str.encode)
VALUE = st.binary(max_size=30).map(
    lambda raw: bytes(b for b in raw if b == 9 or 32 <= b != 127).strip(b" \t")
)
SPECIAL = {
    *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    *(b"content-length", b"host", b"expect", b"content-type"),
}
FIELDS = st.lists(
    st.tuples(
        TOKEN.filter(
            lambda name: name.lower() not in SPECIAL and not name.lower().startswith(b"proxy-")
        ),
        VALUE,
    ),
    max_size=12,
)


def request(*lines: bytes, start: bytes = b"POST /v1/x HTTP/1.1", host: bool = True) -> bytes:
    fields = [b"Host: a", *lines] if host else [*lines]
    return b"\r\n".join([start, *fields, b"", b""])


def response(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([start, *lines, b"", b""])


@given(FIELDS)
def test_end_to_end_fields_of_a_request_keep_case_order_duplicates_and_bytes(
    fields: list[tuple[bytes, bytes]],
) -> None:
    lines = [name + b": " + value for name, value in fields]
    head = RequestHead(request(*lines))
    expected = b"POST /v1/x HTTP/1.1\r\n" + b"\r\n".join([b"Host: a", *lines, b"", b""])
    assert upstream_head(head, b"", None) == expected


@given(FIELDS)
def test_end_to_end_fields_of_a_response_keep_case_order_duplicates_and_bytes(
    fields: list[tuple[bytes, bytes]],
) -> None:
    raw = response(*[name + b": " + value for name, value in fields])
    assert client_head(ResponseHead(raw), chunked=False, connection=b"") == raw


@given(FIELDS, st.randoms())
def test_hop_by_hop_fields_vanish_wherever_they_stand(
    fields: list[tuple[bytes, bytes]], rng: random.Random
) -> None:
    hop = [b"Connection: x-a, TE", b"KEEP-ALIVE: 5", b"te: trailers", b"Trailer: X"]
    hop += [b"Proxy-Authorization: secret", b"proxy-anything: 1", b"X-A: named by Connection"]
    kept = [name + b": " + value for name, value in fields if name.lower() not in (b"x-a", b"te")]
    mixed = [*kept]
    for line in hop:
        mixed.insert(rng.randint(0, len(mixed)), line)
    head = RequestHead(request(*mixed))
    assert head.lines == b"".join(line + b"\r\n" for line in [b"Host: a", *kept])


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_raises_nothing_else(raw: bytes) -> None:
    for reader in (RequestHead, ResponseHead):
        try:
            reader(raw.replace(b"\r\n\r\n", b"") + b"\r\n\r\n")
        except ProtocolError:
            continue


@given(st.integers(0, 60), st.binary(min_size=1, max_size=3))
def test_a_mutated_head_is_refused_or_sent_on_unambiguously(place: int, noise: bytes) -> None:
    raw = request(b"Content-Length: 5", b"X: y")
    mutated = raw[:place] + noise + raw[place:-4].replace(b"\r\n\r\n", b"") + b"\r\n\r\n"
    if mutated.find(b"\r\n\r\n") != len(mutated) - 4:
        return
    try:
        head = RequestHead(mutated)
    except ProtocolError:
        return
    again = RequestHead(upstream_head(head, b"", None))
    assert (again.content_length, again.chunked) == (head.content_length, head.chunked)
    assert (again.method, again.target) == (head.method, head.target)


REFUSED = {
    "no Host": request(host=False),
    "two Hosts": request(b"Host: b"),
    "Host list": request(b"Host: a, b", host=False),
    "Host with user": request(b"Host: u@a", host=False),
    "Host with path": request(b"Host: a/b", host=False),
    "two lengths": request(b"Content-Length: 1", b"Content-Length: 1"),
    "length and chunked": request(b"Content-Length: 1", b"Transfer-Encoding: chunked"),
    "folded": request(b"X: a", b" b"),
    "bare LF": request(b"X: a\nY: b"),
    "NUL": request(b"X: a\0"),
    "space before colon": request(b"X : a"),
    "asterisk for GET": request(start=b"GET * HTTP/1.1"),
    "asterisk and more": request(start=b"OPTIONS *x HTTP/1.1"),
    "absolute without host": request(start=b"GET http:///x HTTP/1.1"),
    "absolute with user": request(start=b"GET http://u@h/ HTTP/1.1"),
    "unknown scheme": request(start=b"GET ftp://h/ HTTP/1.1"),
    "chunked in 1.0": request(b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.0"),
}


@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED)
def test_an_ambiguous_request_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        RequestHead(raw)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (request(start=b"GET / HTTP/2.0"), Unsupported.What.VERSION),
        (request(start=b"GET / HTTP/0.9"), Unsupported.What.VERSION),
        (request(b"Transfer-Encoding: gzip, chunked"), Unsupported.What.CODING),
    ],
)
def test_what_is_not_spoken_here_is_told_apart(raw: bytes, what: Unsupported.What) -> None:
    with pytest.raises(Unsupported) as caught:
        RequestHead(raw)
    assert caught.value.what is what


@pytest.mark.parametrize(
    ("start", "lines", "keep_alive"),
    [
        (b"GET / HTTP/1.1", [], True),
        (b"GET / HTTP/1.1", [b"Connection: close"], False),
        (b"GET / HTTP/1.1", [b"Connection: x", b"connection: CLOSE"], False),
        (b"GET / HTTP/1.0", [], False),
        (b"GET / HTTP/1.0", [b"Connection: Keep-Alive"], True),
    ],
)
def test_whether_the_connection_is_kept_follows_version_and_options(
    start: bytes, lines: list[bytes], keep_alive: bool
) -> None:
    assert RequestHead(request(*lines, start=start)).keep_alive is keep_alive


def test_connection_cannot_name_away_what_frames_or_authorises() -> None:
    lines = [b"Connection: host, content-length, authorization", b"Content-Length: 3"]
    head = RequestHead(request(*lines, b"Authorization: k"))
    assert head.lines == b"Host: a\r\nContent-Length: 3\r\nAuthorization: k\r\n"


def test_an_absolute_target_becomes_origin_form_and_its_authority_the_host() -> None:
    head = RequestHead(request(b"X: y", start=b"GET http://other:81/p?q HTTP/1.1"))
    assert upstream_head(head, b"", None) == (
        b"GET /p?q HTTP/1.1\r\nHost: other:81\r\nX: y\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("start", "target"),
    [
        (b"OPTIONS http://h HTTP/1.1", b"*"),
        (b"GET http://h HTTP/1.1", b"/"),
        (b"GET http://h?q HTTP/1.1", b"/?q"),
        (b"OPTIONS * HTTP/1.1", b"*"),
    ],
)
def test_absolute_targets_without_a_path(start: bytes, target: bytes) -> None:
    assert RequestHead(request(start=start)).target == target


def test_the_upstream_gets_its_prefix_and_its_own_name_where_configured() -> None:
    head = RequestHead(request(b"X: y"))
    assert upstream_head(head, b"/beta", b"api.example") == (
        b"POST /beta/v1/x HTTP/1.1\r\nHost: api.example\r\nX: y\r\n\r\n"
    )


def test_websocket_upgrades_are_passed_and_h2c_is_not() -> None:
    head = RequestHead(request(b"Connection: Upgrade", b"Upgrade: WebSocket"))
    assert upstream_head(head, b"", None).endswith(
        b"Connection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n"
    )
    assert not RequestHead(request(b"Connection: Upgrade", b"Upgrade: h2c")).upgrade
    assert not RequestHead(request(b"Upgrade: websocket")).upgrade


def test_a_response_says_how_it_is_framed() -> None:
    head = ResponseHead(
        response(
            b"content-type: Text/Event-Stream; charset=utf-8",
            b"transfer-encoding: Chunked",
            b"Keep-Alive: timeout=5, max=100",
        )
    )
    assert (head.status, head.event_stream, head.chunked) == (200, True, True)
    assert (head.content_length, head.keep_alive, head.keep_alive_s) == (-1, True, 5.0)


@pytest.mark.parametrize(
    "raw",
    [
        response(b"Content-Length: 1", b"Content-Length: 2"),
        response(b"Content-Length: 1", b"Transfer-Encoding: chunked"),
        response(b"Transfer-Encoding: gzip"),
        response(start=b"HTTP/1.1 20 OK"),
        response(start=b"HTTP/2.0 200 OK"),
        response(start=b"HTTP/1.1 2000 OK"),
        response(b"X: a", b" b"),
        response(b"X a"),
    ],
)
def test_a_response_that_breaks_http_is_refused(raw: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseHead(raw)


def test_fields_are_found_and_dropped_in_any_case() -> None:
    lines = b"A: 1\r\na: 2\r\nB:3\r\n"
    assert field_value(lines, b"a") == b"1"
    assert field_value(lines, b"c") == b""
    assert drop_fields(lines, (b"a",)) == b"B:3\r\n"


def test_heads_are_remembered_up_to_a_size() -> None:
    small = request(b"X-A: " + b"a" * 100)
    large = request(b"X-A: " + b"a" * 4000)
    assert read_request_head(small) is read_request_head(small)
    assert read_request_head(large) is not read_request_head(large)
    assert read_request_head(large).lines == RequestHead(large).lines
