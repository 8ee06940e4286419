"""Any cut of a valid message is the same message; any damage is refused or stays unambiguous.

FUZZ_EXAMPLES=2000 searches longer, with fresh random seeds. That no exception reaches the log is
checked when the gateway stops.
"""

import itertools
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.gateway import Gateway
from support.raw import Client, cut
from support.upstream import Upstream
from support.wire import (
    EndedError,
    Headers,
    chunked,
    message_bytes,
    request_bytes,
    response_bytes,
)

SETTINGS: dict[str, Any] = {"timeouts": {"header_s": 0.25, "idle_s": 1.0, "body_s": 0.25}}

LONGER = os.environ.get("FUZZ_EXAMPLES")
fuzzed = settings(
    max_examples=int(LONGER or 40),
    derandomize=LONGER is None,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

TCHAR = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
names = st.text(TCHAR, min_size=1, max_size=20).map(lambda name: b"X-" + name.encode())
values = st.binary(max_size=40).map(
    lambda raw: bytes(byte for byte in raw if byte == 9 or 32 <= byte != 127).strip(b" \t")
)
fields = st.lists(st.tuples(names, values), max_size=8)
bodies = st.binary(max_size=300)
sizes = st.lists(st.integers(1, 60), max_size=40)
pieces = st.lists(st.integers(1, 50), min_size=1, max_size=10)
numbers = itertools.count()


def encode(body: bytes, chunk_sizes: list[int] | None) -> tuple[Headers, bytes]:
    if chunk_sizes is None:
        return [(b"Content-Length", b"%d" % len(body))], body
    return [(b"Transfer-Encoding", b"chunked")], chunked(*cut(body, chunk_sizes))


@fuzzed
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
    extra=fields,
    body=bodies,
    chunk_sizes=st.none() | pieces,
    segments=sizes,
)
def test_any_cut_of_a_request_is_the_same_request(
    module_gateway: Gateway,
    module_stub: Upstream,
    method: str,
    extra: Headers,
    body: bytes,
    chunk_sizes: list[int] | None,
    segments: list[int],
) -> None:
    target = f"/same/{next(numbers)}"
    framing, encoded = encode(body, chunk_sizes)
    raw = request_bytes(method, target, [*extra, *framing]) + encoded
    with module_gateway.connect() as client:
        client.drip(cut(raw, segments))
        assert client.response(method).body == b"ok"
        client.send(request_bytes("GET", "/after"))
        assert client.response().body == b"ok"
    request, after = module_stub.requests[-2:]
    assert request.start == f"{method} {target} HTTP/1.1".encode()
    assert request.body == body
    assert [field for field in request.headers if field[0][:2] == b"X-"] == extra
    assert after.target == b"/after"


@fuzzed
@given(extra=fields, body=bodies, chunk_sizes=st.none() | pieces, segments=sizes)
def test_any_cut_of_an_answer_is_the_same_answer(
    module_gateway: Gateway,
    module_stub: Upstream,
    extra: Headers,
    body: bytes,
    chunk_sizes: list[int] | None,
    segments: list[int],
) -> None:
    framing, encoded = encode(body, chunk_sizes)
    raw = message_bytes(b"HTTP/1.1 200 OK", [*extra, *framing], encoded)

    def answer_in_pieces(exchange: Any) -> None:
        for piece in cut(raw, segments):
            exchange.send(piece)

    try:
        module_stub.script(answer_in_pieces)
        with module_gateway.connect() as client:
            for _ in range(2):
                answer = client.exchange()
                assert (answer.complete, answer.body) == (True, body)
                seen = [field for field in answer.headers if field[0][:2] == b"X-"]
                assert seen == extra
    finally:
        module_stub.respond(response_bytes())


def count_answers(client: Client) -> list[int]:
    """The status of every answer until the connection ends or stays silent."""
    seen = []
    while True:
        try:
            seen.append(client.response().status)
        except (EndedError, OSError, ValueError):
            return seen


FAMILY = {400, 405, 408, 413, 414, 417, 431, 501, 505}


def assert_unambiguous(gateway: Gateway, stub: Upstream, raw: bytes) -> None:
    """What the gateway answered with 200 is what the upstream saw; all else it refused."""
    before = len(stub.requests)
    with gateway.connect(timeout_s=5) as client:
        client.send_ignoring_close(raw)
        seen = count_answers(client)
        assert client.end is not None, "neither answered nor closed"
    passed = [status for status in seen if status == 200]
    assert set(seen) - {200} <= FAMILY
    assert len(seen) - len(passed) <= 1  # one refusal, and it closes
    assert len(stub.requests) - before == len(passed)


@fuzzed
@given(raw=st.binary(max_size=200))
@example(raw=b"\x00")
@example(raw=b"\r\n" * 50)
@example(raw=b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nab")
def test_garbage_is_refused(module_gateway: Gateway, module_stub: Upstream, raw: bytes) -> None:
    before = len(module_stub.requests)
    assert_unambiguous(module_gateway, module_stub, raw + b"\r\n\r\n")
    if raw[:3] != b"GET":
        assert len(module_stub.requests) == before


VALID = [
    request_bytes("POST", "/v1/chat/completions", [(b"X-A", b"1")], b'{"model":"m"}'),
    request_bytes("POST", "/a", [(b"Transfer-Encoding", b"chunked")]) + chunked(b"abc", b"defg"),
    request_bytes("PUT", "/b", [(b"Content-Length", b"4"), (b"Connection", b"close")]) + b"abcd",
    request_bytes("GET", "/c") + request_bytes("GET", "/d"),
    request_bytes("POST", "/e", [(b"Transfer-Encoding", b"chunked")])
    + b"3;x=y\r\nabc\r\n0\r\nX-T: 1\r\n\r\n",
]
TOKENS = [
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b"\x00",
    b":",
    b",",
    b";",
    b"0",
    b"1",
    b"f",
    b"\r\n\r\n",
    b"\r\n ",
    b"Content-Length: 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Host: b\r\n",
    b"Connection: close\r\n",
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n",
]
edits = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "replace", "double"]),
        st.integers(0, 400),
        st.sampled_from(TOKENS) | st.binary(min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def damage(raw: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for how, where, token in changes:
        at = where % (len(raw) + 1)
        head, tail = raw[:at], raw[at:]
        raw = {
            "insert": head + token + tail,
            "delete": head + tail[len(token) :],
            "replace": head + token + tail[len(token) :],
            "double": head + tail[:10] + tail,
        }[how]
    return raw


@pytest.mark.line(15)
@fuzzed
@given(valid=st.sampled_from(VALID), changes=edits)
def test_a_damaged_request_is_refused_or_stays_unambiguous(
    module_gateway: Gateway,
    module_stub: Upstream,
    valid: bytes,
    changes: list[tuple[str, int, bytes]],
) -> None:
    assert_unambiguous(module_gateway, module_stub, damage(valid, changes))
