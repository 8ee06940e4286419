"""How a payload is cut into UCX messages, and where each lands in the receiver's buffers. Pure.

The sender cuts at its buffers' borders and every MAX_SEGMENT_BYTES; runs of small buffers become
one segment (copied), because a message of its own costs more, and because UCX would send small ones
eagerly, into the receiver's memory, whether it wants them or not. The sizes travel before the
control bytes. A segment that lies within one of the receiver's buffers lands there directly; one
that crosses a border is received into memory of its own and copied.
"""

import struct
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Final

import msgspec

from ciuicflow.transport.base import MAX_BUFFERS, MAX_PAYLOAD_BYTES, PeerViolation
from ciuicflow.transport.buffers import copy, cut, size_of

MAX_SEGMENT_BYTES: Final = 8 * 1024 * 1024
SMALL_BYTES: Final = 16 * 1024
MAX_SEGMENTS: Final = MAX_BUFFERS + MAX_PAYLOAD_BYTES // MAX_SEGMENT_BYTES
_COUNT: Final = struct.Struct("!I")


class Landing(msgspec.Struct, frozen=True):
    """Where one segment is received, and where its bytes belong if that is elsewhere."""

    target: memoryview
    places: tuple[memoryview, ...] = ()

    def settle(self) -> None:
        """Copy what was received to where it belongs."""
        if self.places:
            copy((self.target,), deque(self.places))


def segments_of(views: Sequence[memoryview]) -> list[memoryview]:
    """Cut a payload (no empty views) into segments."""
    segments = []
    for small, run in groupby(views, lambda view: view.nbytes < SMALL_BYTES):
        parts = list(run)
        for view in [memoryview(b"".join(parts))] if small else parts:
            cuts = range(0, view.nbytes, MAX_SEGMENT_BYTES)
            segments += [view[start : start + MAX_SEGMENT_BYTES] for start in cuts]
    return segments


def encode_layout(segments: Sequence[memoryview]) -> bytes:
    """Write the sizes of the segments: what goes before the control bytes."""
    sizes = [segment.nbytes for segment in segments]
    return struct.pack(f"!I{len(sizes)}I", len(sizes), *sizes)


def decode_layout(control: bytes, payload_bytes: int) -> tuple[tuple[int, ...], bytes]:
    """Split what a peer sent into segment sizes and control bytes; raises PeerViolation."""
    try:
        (count,) = _COUNT.unpack_from(control)
        if count > MAX_SEGMENTS:
            raise PeerViolation(f"a payload in {count} segments")
        sizes = struct.unpack_from(f"!{count}I", control, _COUNT.size)
    except struct.error:
        raise PeerViolation("a payload outside the stream without a layout") from None
    if sum(sizes) != payload_bytes or not all(0 < size <= MAX_SEGMENT_BYTES for size in sizes):
        raise PeerViolation(f"segments that do not add up to {payload_bytes} bytes")
    return sizes, control[_COUNT.size + _COUNT.size * count :]


def landings(sizes: Sequence[int], views: Sequence[memoryview] | None) -> list[Landing]:
    """Say where segments of these sizes land in `views`, which hold as much; None: nowhere."""
    if views is None:
        scratch = memoryview(bytearray(max(sizes)))
        return [Landing(scratch[:size_bytes]) for size_bytes in sizes]
    return [_landing(places) for places in cut(views, sizes)]


def _landing(places: list[memoryview]) -> Landing:
    if len(places) == 1:
        return Landing(places[0])
    return Landing(memoryview(bytearray(size_of(places))), tuple(places))
