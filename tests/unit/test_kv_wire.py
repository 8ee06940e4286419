"""Control messages: both ways, and everything that is none."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.kv import GEOMETRY, hello

from ciuicflow.errors import CiuicFlowError
from ciuicflow.kvtransfer.errors import WireError
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.ranges import Area, Run
from ciuicflow.kvtransfer.rendezvous import Rendezvous
from ciuicflow.kvtransfer.wire import (
    MAX_FRAME_BYTES,
    MAX_RUNS,
    VERSION,
    Abort,
    Ack,
    Commit,
    Committed,
    Drained,
    Error,
    Expect,
    Frame,
    Grant,
    Heartbeat,
    Message,
    Quantum,
    decode,
    divide_runs,
    encode,
)

MESSAGES: list[Message] = [
    hello("agent"),
    Expect("t", ((Run(0, 3), Run(9, 1)), ()), 1500.0),
    Quantum("t", 7, Area(1, 60, 1, 4, 2), 2048),
    Ack(7, 2048, 31_000, None),
    Ack(7, 2048, 31_000, 512),
    Commit("t", 70_272, 3, None),
    Commit("t", 0, 0, (1 << 63) - 1),
    Committed("t"),
    Abort("t", FailReason.DEADLINE),
    Drained("t"),
    Heartbeat(),
    Grant(1e9, 4.0, 0),
    Error(FailReason.REFUSED, "geometry differs"),
]
BODY = msgspec.msgpack.encode
VALID = [encode(Frame(5, message)) for message in MESSAGES]


def raw(*message: object, incarnation: object = 1) -> bytes:
    return bytes([VERSION]) + BODY([incarnation, list(message)])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    frame = Frame((1 << 63) - 1, message)
    assert decode(encode(frame)) == frame
    assert decode(memoryview(bytearray(encode(frame)))) == frame


def test_a_quantum_header_is_small() -> None:
    header = Quantum("0123456789abcdef" * 2, 1 << 40, Area(0, 60, 1, 2047, 512), 8 << 20)
    assert len(encode(Frame(1 << 62, header))) < 80


def test_a_message_is_never_larger_than_transports_take() -> None:
    runs = tuple(Run((1 << 40) - 2 * index, 1 << 24) for index in range(1, MAX_RUNS + 1))
    frame = Frame((1 << 63) - 1, Expect("\U0001f600" * 128, (runs,), 1.0, more=True))
    assert decode(encode(frame)) == frame
    name = "\U0001f600" * 64
    region = structs.replace(GEOMETRY.regions[0], dtype=name, block_bytes=1 << 30)
    regions = [structs.replace(region, name=name[:-2] + f"{index:2}") for index in range(64)]
    geometry = structs.replace(GEOMETRY, model=name, regions=tuple(regions))
    settings = {name[:-2] + f"{index:2}": name for index in range(32)}
    largest = Frame((1 << 63) - 1, hello(name, (1 << 63) - 1, geometry, settings=settings))
    assert decode(encode(largest)) == largest


@given(st.lists(st.integers(0, 3 * MAX_RUNS), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_blocks_are_divided_over_messages_and_none_is_lost(counts: list[int]) -> None:
    blocks = tuple(tuple(Run(2 * index, 1) for index in range(count)) for count in counts)
    parts = list(divide_runs(blocks))
    assert all(sum(map(len, part)) <= MAX_RUNS for part in parts)
    assert len(parts) == max(-(-sum(counts) // MAX_RUNS), 1)
    rendezvous = Rendezvous()
    joined = [rendezvous.join(Expect("t", part, 1.0, more=part is not parts[-1])) for part in parts]
    assert joined == [None] * (len(parts) - 1) + [Expect("t", blocks, 1.0)]


def test_another_version_is_told_from_garbage() -> None:
    with pytest.raises(WireError, match="version 2; this agent speaks 1"):
        decode(b"\x02" + VALID[0][1:])


@pytest.mark.parametrize("size", [0, 1, MAX_FRAME_BYTES + 1])
def test_too_short_and_too_long_messages_are_refused_unread(size: int) -> None:
    with pytest.raises(WireError, match=f"of {size} bytes; expected 2 to 65536"):
        decode(bytes([VERSION]) * size)


@pytest.mark.parametrize(
    "data",
    [
        raw(7, -1, 1, 1, None),
        raw(3, 0, -1, 1, None),
        raw(3, 0, 1, -1, None),
        raw(3, 0, 1, 1, -1),
        raw(3, 0, 1, 1, 0.5),
        raw(3, 1 << 63, 1, 1, None),
        raw(3, 0, 1 << 60, 1, None),
        raw(3, 0, 1, 1),
        raw(3, 0, 1, 1, None, "more"),
        raw(2, "t", 0, [0, 0, 0, 0, 1], 1),
        raw(2, "t", 0, [0, 0, 1, 0, 0], 1),
        raw(2, "t", 0, [64, 0, 1, 0, 1], 1),
        raw(2, "t", 0, [0, -1, 1, 0, 1], 1),
        raw(2, "t", 0, [0, 0, 1, 0, 1 << 40], 1),
        raw(2, "", 0, [0, 0, 1, 0, 1], 1),
        raw(2, "t" * 129, 0, [0, 0, 1, 0, 1], 1),
        raw(1, "t", [], 1.0),
        raw(1, "t", [[[0, 0]]], 1.0),
        raw(1, "t", [[]] * 65, 1.0),
        raw(1, "t", [[]], -1.0),
        raw(1, "t", [[]], float("nan")),
        raw(1, "t", [[]], float("inf")),
        raw(6, "t", "no such reason"),
        raw(9, float("nan"), 1.0, 0),
        raw(10, "aborted", "x" * 1025),
        raw(11),
        raw(8, incarnation=-1),
        raw(8, incarnation=1 << 63),
        raw(8, incarnation="1"),
        raw("Heartbeat"),
        raw(),
        bytes([VERSION]) + b"\xc1",
        bytes([VERSION]) + BODY({"incarnation": 1}),
        bytes([VERSION]) + BODY([[[[[[]]]]]]),
        VALID[-1] + b"\x00",
    ],
)
def test_absurd_values_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="not understood"):
        decode(data)


def test_a_geometry_that_cannot_be_is_refused() -> None:
    message = msgspec.to_builtins(hello("agent"))
    message[4]["regions"] *= 2
    with pytest.raises(WireError, match="same name"):
        decode(raw(*message))
    message[4]["regions"] = []
    with pytest.raises(WireError):
        decode(raw(*message))


def test_the_error_is_one_of_ours() -> None:
    assert issubclass(WireError, CiuicFlowError)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_decoded_or_refused_and_nothing_else(data: bytes) -> None:
    for body in (data, bytes([VERSION]) + data):
        survives(body)


@settings(max_examples=1000, deadline=None)
@given(
    st.sampled_from(VALID),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 400),
)
def test_damaged_messages_are_decoded_or_refused(
    valid: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(valid)
    for place, value in changes:
        data[place % len(data)] = value
    survives(bytes(data))
    survives(bytes(data[: cut % len(data)]))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 12), st.lists(VALUES, max_size=6))
def test_any_values_in_any_message_are_decoded_or_refused(tag: int, values: list[object]) -> None:
    survives(raw(tag, *values))


def survives(data: bytes) -> None:
    try:
        frame = decode(data)
    except WireError:
        return
    assert decode(encode(frame)) == frame
    assert isinstance(frame.incarnation, int)
