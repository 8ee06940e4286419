"""Streams: every byte as it was, as soon as it was sent, at the reader's pace."""

import gzip
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from support import wait, wire
from support.gateway import Gateway, now, outcome_delta
from support.streams import EVENT_STREAMS
from support.upstream import Exchange, Upstream
from support.wire import LAST_CHUNK, SSE_HEAD, chunk, message_bytes, request_bytes

# None of the client's timeouts may cut a silent answer: they are shorter than the silences here.
SETTINGS: dict[str, Any] = {"timeouts": {"header_s": 0.4, "idle_s": 0.4, "body_s": 0.4}}

REQUEST = request_bytes("POST", "/v1/chat/completions", body=b'{"stream":true}')
JSON = [(b"Content-Type", b"application/json")]


@pytest.mark.line(5)
def test_each_event_arrives_when_it_is_sent(gateway: Gateway, upstream: Upstream) -> None:
    events = [b"data: event %06d\n\n" % number for number in range(20)]
    sent_at = []

    def stream(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        for event in events:
            time.sleep(0.05)
            sent_at.append(now())
            exchange.send(chunk(event))
        exchange.send(LAST_CHUNK)

    upstream.script(stream)
    with gateway.connect() as client:
        client.send(REQUEST)
        answer = client.response("POST")
        delays = [client.arrival_of(e) - at for e, at in zip(events, sent_at, strict=True)]
    assert answer.body == b"".join(events)
    assert statistics.median(delays) < 0.01, delays
    assert max(delays) < 1, delays


@pytest.mark.line(5)
def test_the_head_arrives_before_the_first_event(gateway: Gateway, upstream: Upstream) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        wait.until(lambda: client.arrivals, what="the head at the client")
        exchange.send(LAST_CHUNK)

    upstream.script(stream)
    with gateway.connect() as client:
        client.send(REQUEST)
        assert client.response("POST").complete


@pytest.mark.line(6)
@pytest.mark.parametrize("whole", EVENT_STREAMS.values(), ids=EVENT_STREAMS)
def test_events_cut_anywhere_are_the_same_bytes(
    gateway: Gateway, upstream: Upstream, whole: bytes
) -> None:
    """One byte per chunk and segment: multi-byte characters are cut, too."""

    def stream(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        for position in range(len(whole)):
            exchange.send(chunk(whole[position : position + 1]))
        exchange.send(LAST_CHUNK)

    upstream.script(stream)
    with gateway.connect() as client:
        client.send(REQUEST)
        answer = client.response("POST")
    assert answer.complete
    assert answer.body == whole


@pytest.mark.line(6)
def test_an_answer_that_drips_byte_by_byte_is_the_same_answer(
    gateway: Gateway, upstream: Upstream
) -> None:
    """Head, chunk sizes and data in segments of one byte each."""
    body = "data: 深度求索 😀\n\n".encode()
    whole = SSE_HEAD + chunk(body[:9]) + chunk(body[9:]) + LAST_CHUNK

    def drip(exchange: Exchange) -> None:
        for position in range(len(whole)):
            exchange.send(whole[position : position + 1])
            time.sleep(0.0005)

    upstream.script(drip)
    with gateway.connect() as client:
        client.send(REQUEST)
        answer = client.response("POST")
    assert (answer.complete, answer.body) == (True, body)


@pytest.mark.line(7)
def test_comments_pass_at_once(gateway: Gateway, upstream: Upstream) -> None:
    passed_before_more_came: list[int] = []

    def stream(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        for number in range(5):
            comment = b": keep-alive %d\n\n" % number
            exchange.send(chunk(comment))
            wait.until(lambda wanted=comment: wanted in client.received)  # type: ignore[misc]  # loop
            passed_before_more_came.append(number)
        exchange.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    upstream.script(stream)
    with gateway.connect() as client:
        client.send(REQUEST)
        answer = client.response("POST")
    assert passed_before_more_came == [0, 1, 2, 3, 4]
    assert answer.body.startswith(b": keep-alive 0\n\n: keep-alive 1\n\n")


@pytest.mark.line(7)
@pytest.mark.parametrize("framing", ["chunked", "length", "until close"])
def test_blank_lines_before_a_json_answer_pass_at_once(
    gateway: Gateway, upstream: Upstream, framing: str
) -> None:
    final = b'{"id":"1","choices":[]}'
    fields = {
        "chunked": [*JSON, (b"Transfer-Encoding", b"chunked")],
        "length": [*JSON, (b"Content-Length", b"%d" % (3 + len(final)))],
        "until close": JSON,
    }[framing]
    frame = chunk if framing == "chunked" else bytes

    def answer_late(exchange: Exchange) -> None:
        exchange.send(message_bytes(b"HTTP/1.1 200 OK", fields))
        for count in (1, 2, 3):
            exchange.send(frame(b"\n"))
            wait.until(lambda count=count: blanks() >= count)  # type: ignore[misc]  # loop
        exchange.send(frame(final) + (LAST_CHUNK if framing == "chunked" else b""))
        if framing == "until close":
            exchange.close()

    def blanks() -> int:
        body = client.received.partition(b"\r\n\r\n")[2]
        return body.replace(b"\r\n", b"").count(b"\n")

    upstream.script(answer_late)
    with gateway.connect() as client:
        client.send(REQUEST)
        answer = client.response("POST")
    assert (answer.complete, answer.body) == (True, b"\n\n\n" + final)


@pytest.mark.line(8)
@pytest.mark.parametrize("whole", EVENT_STREAMS.values(), ids=EVENT_STREAMS)
def test_no_event_is_changed_added_or_lost(
    gateway: Gateway, upstream: Upstream, whole: bytes
) -> None:
    upstream.respond(SSE_HEAD + wire.chunked(*whole.splitlines(keepends=True)))
    answer = gateway.fetch("POST", "/v1/chat/completions", body=b'{"stream":true}')
    assert answer.body == whole
    assert answer.get("content-type") == b"text/event-stream"


@pytest.mark.line(9)
@pytest.mark.parametrize("silent_at", ["before the head", "after the head", "between events"])
def test_silence_is_legal(gateway: Gateway, upstream: Upstream, silent_at: str) -> None:
    def think(exchange: Exchange) -> None:
        for stage, part in (
            ("before the head", SSE_HEAD),
            ("after the head", chunk(b"data: 1\n\n")),
            ("between events", chunk(b"data: 2\n\n") + LAST_CHUNK),
        ):
            time.sleep(1.5 if stage == silent_at else 0)
            exchange.send(part)

    upstream.script(think)
    with gateway.connect() as client:
        client.send(REQUEST)
        answer = client.response("POST")
    assert (answer.complete, answer.body) == (True, b"data: 1\n\ndata: 2\n\n")


@pytest.mark.line(11)
def test_compressed_answers_stay_compressed(gateway: Gateway, upstream: Upstream) -> None:
    packed = gzip.compress(b"data: 1\n\n" * 1000)
    fields = [(b"Content-Encoding", b"gzip"), (b"Content-Length", b"%d" % len(packed))]
    upstream.respond(message_bytes(b"HTTP/1.1 200 OK", fields, packed))
    answer = gateway.fetch("GET", "/", ((b"Accept-Encoding", b"gzip, br"),))
    assert answer.body == packed
    assert answer.get("content-encoding") == b"gzip"
    assert upstream.request.all("accept-encoding") == [b"gzip, br"]


def _empty_chunked(exchange: Exchange) -> None:
    exchange.send(SSE_HEAD + LAST_CHUNK)


def _empty_length(exchange: Exchange) -> None:
    fields = [(b"Content-Type", b"text/event-stream"), (b"Content-Length", b"0")]
    exchange.send(message_bytes(b"HTTP/1.1 200 OK", fields))


def _empty_until_close(exchange: Exchange) -> None:
    exchange.send(message_bytes(b"HTTP/1.1 200 OK", [(b"Content-Type", b"text/event-stream")]))
    exchange.close()


@pytest.mark.line(12)
@pytest.mark.parametrize("empty", [_empty_chunked, _empty_length, _empty_until_close])
def test_an_empty_event_stream_passes_and_counts_as_an_error(
    gateway: Gateway, upstream: Upstream, empty: Callable[[Exchange], None]
) -> None:
    upstream.script(empty)
    before = gateway.metrics()
    answer = gateway.fetch("POST", "/v1/chat/completions", body=b"{}")
    assert (answer.status, answer.complete, answer.body) == (200, True, b"")
    assert outcome_delta(before, gateway.metrics()) == {"empty_stream": 1}


@pytest.mark.line(12)
def test_an_empty_answer_that_is_no_event_stream_is_no_error(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.respond(wire.response_bytes(b""))
    before = gateway.metrics()
    assert gateway.fetch().body == b""
    assert outcome_delta(before, gateway.metrics()) == {"completed": 1}


@pytest.mark.line(14)
def test_an_answer_that_ends_with_the_connection_ends_the_same_way_for_the_client(
    gateway: Gateway, upstream: Upstream
) -> None:
    def until_close(exchange: Exchange) -> None:
        exchange.send(message_bytes(b"HTTP/1.1 200 OK", [], b"a" * 100_000))
        exchange.send(b"the end")
        exchange.close()

    upstream.script(until_close)
    answer = gateway.fetch()
    assert answer.complete
    assert answer.body == b"a" * 100_000 + b"the end"
