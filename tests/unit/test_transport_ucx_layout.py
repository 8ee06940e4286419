"""How payloads are cut for UCX, and where the pieces land."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.transport.base import PeerViolation
from ciuicflow.transport.ucx_layout import (
    MAX_SEGMENT_BYTES,
    MAX_SEGMENTS,
    SMALL_BYTES,
    decode_layout,
    encode_layout,
    landings,
    segments_of,
)

SIZES = st.lists(st.integers(1, 3 * SMALL_BYTES), min_size=1, max_size=12)


def views(data: bytearray, sizes: list[int]) -> list[memoryview]:
    whole, parts, at = memoryview(data), [], 0
    for size in sizes:
        parts.append(whole[at : at + size])
        at += size
    return parts


@given(sizes=SIZES, cuts=SIZES)
def test_bytes_land_where_they_belong_however_both_sides_cut(
    sizes: list[int], cuts: list[int]
) -> None:
    total = sum(sizes)
    source, target = bytearray(n % 251 for n in range(total)), bytearray(total)
    bounds = [cut for cut in cuts if sum(cuts) <= total] or [total]
    bounds = [*bounds, total - sum(bounds)] if sum(bounds) < total else bounds
    segments = segments_of(views(source, sizes))
    layout, control = decode_layout(encode_layout(segments) + b"control", total)
    assert control == b"control"
    places = landings(layout, views(target, bounds))
    for segment, place in zip(segments, places, strict=True):
        place.target[:] = segment
    for place in reversed(places):
        place.settle()
    assert target == source


def test_large_buffers_are_sent_from_where_they_are() -> None:
    buffer = memoryview(bytearray(2 * MAX_SEGMENT_BYTES + 5))
    segments = segments_of([buffer])
    assert [segment.nbytes for segment in segments] == [MAX_SEGMENT_BYTES, MAX_SEGMENT_BYTES, 5]
    assert all(segment.obj is buffer.obj for segment in segments)


def test_small_buffers_travel_together() -> None:
    small = [memoryview(bytes(1024))] * 100
    large = memoryview(bytes(SMALL_BYTES))
    assert [each.nbytes for each in segments_of([*small, large, *small])] == [
        102_400,
        SMALL_BYTES,
        102_400,
    ]


def test_segment_within_one_buffer_lands_there() -> None:
    target = memoryview(bytearray(300))
    first, second, third = landings([100, 50, 150], [target[:150], target[150:]])
    assert [place.places for place in (first, second, third)] == [(), (), ()]
    first.target[:] = b"x" * 100
    assert bytes(target[:101]) == b"x" * 100 + b"\0"


def test_discarded_segments_share_one_scratch() -> None:
    places = landings([10, 30, 20], None)
    assert [place.target.nbytes for place in places] == [10, 30, 20]
    assert len({id(place.target.obj) for place in places}) == 1


@pytest.mark.parametrize(
    "layout",
    [
        b"",
        b"\0\0\0",
        struct.pack("!I", 2) + bytes(4),
        struct.pack("!II", 1, 99),
        struct.pack("!III", 2, 0, 100),
        struct.pack("!II", 1, MAX_SEGMENT_BYTES + 1),
        struct.pack("!I", MAX_SEGMENTS + 1) + bytes(4 * (MAX_SEGMENTS + 1)),
    ],
)
def test_broken_layouts_are_found_out(layout: bytes) -> None:
    with pytest.raises(PeerViolation):
        decode_layout(layout, 100)
