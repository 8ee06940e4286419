"""What an answer tells while it passes: the same, however it is cut."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.raw import cut
from support.streams import DEEPSEEK, EVENT_STREAMS, VLLM
from support.wire import LAST_CHUNK, chunk

from ciuicflow.flowcontrol.cost import Usage
from ciuicflow.gateway.headers import ResponseHead
from ciuicflow.gateway.meter import (
    MAX_ANSWER_BYTES,
    MAX_LINE_BYTES,
    AnswerMeter,
    BodyMeter,
    StreamMeter,
    is_only_comments,
)
from ciuicflow.gateway.sse import read_answer, read_event

EVENT_STREAM = b"Content-Type: text/event-stream\r\n"
JSON = b"Content-Type: application/json\r\n"


def meter(*lines: bytes) -> BodyMeter:
    return BodyMeter(ResponseHead(b"HTTP/1.1 200 OK\r\n" + b"".join(lines) + b"\r\n"))


def data(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode()


def tokens(body: bytes) -> int:
    return StreamMeter().feed(body)


DELTAS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"content": "a"},
        {"content": "\u2028深\x85"},
        {"reasoning_content": "hm"},
        {"content": ""},
        {"role": "assistant"},
        {"tool_calls": [{"index": 0}]},
        {"content": None, "reasoning_content": None},
    ]
)
LINES = st.one_of(
    DELTAS.map(lambda delta: data(**delta)),
    st.sampled_from(
        [
            b": keep-alive",
            b"event: message",
            b"id: 1",
            b"data",
            b"data:",
            b"data: [DONE]",
            b'data:{"choices":[]}',
            b'data: {"choices":[],"usage":null}',
            b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}',
            b'data: {"error":{"message":"x"}}',
            b"data: not json \xff\xfe",
            b"datax: 1",
            b"",
        ]
    ),
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
STREAMS = st.lists(st.tuples(LINES, ENDS), max_size=25).map(
    lambda parts: b"".join(line + end + end for line, end in parts)
)
SIZES = st.lists(st.integers(1, 60), max_size=200)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STREAMS, SIZES, st.lists(st.integers(1, 60), max_size=60))
def test_any_cut_of_any_stream_gives_the_same_tokens_and_usage(
    stream: bytes, sizes: list[int], chunk_sizes: list[int]
) -> None:
    whole = StreamMeter()
    count = whole.feed(stream)
    plain = meter(EVENT_STREAM)
    assert sum(map(plain.feed, cut(stream, sizes))) == count
    assert plain.meter.usage == whole.usage
    coded = b"".join(map(chunk, cut(stream, chunk_sizes))) + LAST_CHUNK
    chunked = meter(EVENT_STREAM, b"Transfer-Encoding: chunked\r\n")
    assert sum(map(chunked.feed, cut(coded, sizes))) == count
    assert chunked.meter.usage == whole.usage


@pytest.mark.parametrize("name", EVENT_STREAMS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_real_streams_cut_small_are_metered_alike(name: str, size: int) -> None:
    stream = EVENT_STREAMS[name]
    whole, small = StreamMeter(), StreamMeter()
    count = whole.feed(stream)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert sum(map(small.feed, pieces)) == count
    assert small.usage == whole.usage


def test_what_real_streams_tell() -> None:
    deepseek, vllm = StreamMeter(), StreamMeter()
    assert deepseek.feed(DEEPSEEK.encode()) == 2
    assert deepseek.usage == Usage(9, 0, 2)
    assert vllm.feed(VLLM.encode()) == 1
    assert vllm.usage == Usage(4, 0, 2)


@pytest.mark.parametrize(
    ("delta", "count"),
    [
        ({"content": "a"}, 1),
        ({"reasoning_content": "a"}, 1),
        ({"reasoning": "a"}, 1),
        ({"tool_calls": [{}]}, 1),
        ({"content": ""}, 0),
        ({"role": "assistant", "content": None, "reasoning_content": ""}, 0),
        ({}, 0),
    ],
)
def test_the_first_token_is_the_first_of_any_kind(delta: dict[str, Any], count: int) -> None:
    assert tokens(data(**delta) + b"\n\n") == count


def test_old_completions_bring_text() -> None:
    assert tokens(b'data: {"choices":[{"text":""}]}\n\n') == 0
    assert tokens(b'data: {"choices":[{"text":"a"}]}\n\n') == 1


def test_comments_and_done_are_no_tokens() -> None:
    first = data(content="a") + b"\n\n"
    assert tokens(first + b": keep-alive\n\nevent: x\nid: 5\ndata: [DONE]\n\n") == 1


def test_a_byte_order_mark_hides_no_token() -> None:
    """WHATWG HTML, section 9.2.5: one may stand at the start."""
    stream = b"\xef\xbb\xbf" + data(content="a") + b"\n\n"
    assert tokens(stream) == 1
    bytewise = StreamMeter()
    assert sum(bytewise.feed(stream[at : at + 1]) for at in range(len(stream))) == 1


@pytest.mark.parametrize("size", [1000, 65_536, 1 << 22])
def test_a_line_that_is_too_long_is_skipped_and_the_next_is_read(size: int) -> None:
    first = data(content="a") + b"\n\n"
    long = b"data: " + b"x" * (3 * MAX_LINE_BYTES) + b"\n\n"
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\n'
    stream = first + long + data(content="b") + b"\n\n" + usage
    read = StreamMeter()
    count = sum(read.feed(stream[at : at + size]) for at in range(0, len(stream), size))
    assert count in (2, 3)
    assert read.usage == Usage(9, 0, 4)


def test_a_line_without_an_end_takes_bounded_memory() -> None:
    read = StreamMeter()
    for _ in range(100):
        read.feed(b"x" * 100_000)
        assert len(read._line) <= MAX_LINE_BYTES


USAGE = {"prompt_tokens": 5, "completion_tokens": 7}


@given(st.lists(st.integers(1, 40), max_size=20), st.sampled_from([b"", b"\n\n\n", b" "]))
def test_any_cut_of_an_answer_gives_its_usage(sizes: list[int], before: bytes) -> None:
    body = before + json.dumps({"choices": [{"message": {}}], "usage": USAGE}).encode()
    read = meter(JSON)
    assert sum(map(read.feed, cut(body, sizes))) == 0
    assert read.meter.usage == Usage(5, 0, 7)


def test_a_large_answer_is_not_kept() -> None:
    read = AnswerMeter()
    for _ in range(5):
        read.feed(b"x" * (MAX_ANSWER_BYTES // 2))
    assert read.usage is None
    assert sum(map(len, read._parts)) <= MAX_ANSWER_BYTES


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"identity, gzip"])
def test_compressed_bodies_tell_nothing(coding: bytes) -> None:
    read = meter(EVENT_STREAM, b"Content-Encoding: " + coding + b"\r\n")
    assert read.feed(data(content="a") + b"\n\n") == 0
    assert read.meter.usage is None


def test_identity_is_no_compression() -> None:
    read = meter(EVENT_STREAM, b"Content-Encoding: identity\r\n")
    assert read.feed(data(content="a") + b"\n\n") == 1


@pytest.mark.parametrize(
    ("usage", "wanted"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 7}, Usage(5, 0, 7)),
        ({"input_tokens": 5, "output_tokens": 7}, Usage(5, 0, 7)),
        ({**USAGE, "prompt_cache_hit_tokens": 3}, Usage(5, 3, 7)),
        ({**USAGE, "prompt_tokens_details": {"cached_tokens": 3}}, Usage(5, 3, 7)),
        ({**USAGE, "prompt_tokens_details": None}, Usage(5, 0, 7)),
        ({**USAGE, "prompt_tokens_details": {"cached_tokens": "3"}}, Usage(5, 0, 7)),
        ({**USAGE, "prompt_cache_hit_tokens": -3}, Usage(5, 0, 7)),
        ({"prompt_tokens": 5, "total_tokens": 5}, Usage(5, 0, 0)),
        ({"prompt_tokens": 5, "completion_tokens": None}, Usage(5, 0, 0)),
        ({"prompt_tokens": -5, "completion_tokens": 7}, None),
        ({"prompt_tokens": 5, "completion_tokens": 10**30}, None),
        ({"prompt_tokens": "5", "completion_tokens": 7}, None),
        ({"prompt_tokens": 5.5, "completion_tokens": 7}, None),
        ({"prompt_tokens": True, "completion_tokens": 7}, None),
        ({}, None),
        (None, None),
        ([], None),
    ],
)
def test_usage_is_read_in_every_spelling_and_garbage_is_none(
    usage: Any, wanted: Usage | None
) -> None:
    document = json.dumps({"choices": [], "usage": usage}).encode()
    assert read_answer(document) == wanted
    assert read_event(document).usage == wanted


@given(st.binary(max_size=300), st.lists(st.integers(1, 50), max_size=20))
def test_no_bytes_make_it_fail(body: bytes, sizes: list[int]) -> None:
    for kind in (EVENT_STREAM, JSON, b""):
        read = meter(kind)
        for piece in cut(b"data: " + body, sizes):
            read.feed(piece)
        assert read.meter.usage is None
    read_event(body)
    read_answer(body)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"choices":' * 100_000, b'{"usage":{"a":' * 9999]
)
def test_nesting_makes_nothing_fail(body: bytes) -> None:
    read_event(body)
    read_answer(body)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b": keep-alive\n\n", True),
        (b"\r\n", True),
        (b"e\r\n: keep-alive\n\n\r\n", True),
        (b"data: 1\n\n", False),
        (b": a\n\ndata: 1\n\n", False),
        (b":", False),
    ],
)
def test_comments_are_told_from_events(body: bytes, wanted: bool) -> None:
    assert is_only_comments(body) is wanted
