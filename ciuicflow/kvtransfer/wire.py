"""The control messages of the KV plane: one version byte, then msgpack arrays.

A connection carries one direction: the agent that sends cache has dialled it. Only `Quantum` is
followed by a payload, of exactly the bytes of its area. All sizes are checked here against absurd
values; whether they fit the transfer is the receiver's to check.
"""

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from ciuicflow.kvtransfer.errors import WireError
from ciuicflow.kvtransfer.layout import Geometry, Name
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.ranges import Area, Run
from ciuicflow.kvtransfer.ticket import Id, Incarnation

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 64 << 10
"""What transports take as control bytes."""
MAX_RUNS: Final = 4096
"""Runs of blocks in one message: at most 15 bytes each."""

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Sequence = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=86_400_000_000_000)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=86_400_000)]
Checksum = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Setting = Annotated[str, msgspec.Meta(max_length=64)]
Runs = Annotated[tuple[Run, ...], msgspec.Meta(max_length=MAX_RUNS)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all messages have in common."""


class Hello(_Message, frozen=True, tag=0):
    """The first message of both sides."""

    agent: Name
    incarnation: Incarnation
    """Differs after every start of the agent's process."""
    fingerprint: Name
    geometry: Geometry
    window_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    """What it takes in at once: headers seen whose payload is not there yet."""
    settings: Annotated[dict[Setting, Setting], msgspec.Meta(max_length=32)]
    """What must be the same on both sides, such as segment sizes and the kind of checksum."""


class Expect(_Message, frozen=True, tag=1):
    """Receiver: all blocks of this transfer are reserved, send."""

    transfer: Id
    blocks: Annotated[tuple[Runs, ...], msgspec.Meta(min_length=1, max_length=64)]
    """By region, in order of position."""
    remaining_ms: Milliseconds
    more: bool = False
    """Whether the next message goes on with further blocks of this transfer."""


class Quantum(_Message, frozen=True, tag=2):
    """Sender: the payload of this area follows."""

    transfer: Id
    seq: Sequence
    """Counts all quanta of a connection from 0, without gaps."""
    area: Area
    bytes: Bytes


class Ack(_Message, frozen=True, tag=3):
    """Receiver: the payload of this quantum is in place."""

    seq: Sequence
    bytes: Bytes
    hold_ns: Nanoseconds
    """Time between the arrival and this message."""
    ce_bytes: Bytes | None
    """How much of it was marked with congestion experienced; None: not known."""


class Commit(_Message, frozen=True, tag=4):
    """Sender: that was all; it comes after the last quantum of the transfer."""

    transfer: Id
    bytes: Bytes
    quanta: Sequence
    checksum: Checksum | None


class Committed(_Message, frozen=True, tag=5):
    """Receiver: the transfer is whole and has been handed over."""

    transfer: Id


class Abort(_Message, frozen=True, tag=6):
    """Either side: the transfer has failed. The sender answers, or goes on, with `Drained`."""

    transfer: Id
    reason: FailReason


class Drained(_Message, frozen=True, tag=7):
    """Sender: no quantum of this transfer follows."""

    transfer: Id


class Heartbeat(_Message, frozen=True, tag=8):
    """Either side: nothing to say, but alive."""


class Grant(_Message, frozen=True, tag=9):
    """Receiver: how fast the sender may send. Reserved: it is accepted and ignored."""

    rate_bytes_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    valid_ms: Milliseconds
    offset_ns: Nanoseconds


class Error(_Message, frozen=True, tag=10):
    """Either side, its last message: why it closes the connection."""

    reason: FailReason
    detail: Text


Message = (
    Hello
    | Expect
    | Quantum
    | Ack
    | Commit
    | Committed
    | Abort
    | Drained
    | Heartbeat
    | Grant
    | Error
)


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message and who sent it."""

    incarnation: Incarnation
    message: Message


def divide_runs(blocks: tuple[tuple[Run, ...], ...]) -> Iterator[tuple[tuple[Run, ...], ...]]:
    """Divide lists of runs, by region, into parts that fit one message each."""
    empty: list[tuple[Run, ...]] = [()] * len(blocks)
    part, room = empty.copy(), MAX_RUNS
    for region, runs in enumerate(blocks):
        start = 0
        while start < len(runs):
            if not room:
                yield tuple(part)
                part, room = empty.copy(), MAX_RUNS
            part[region] = runs[start : start + room]
            start += len(part[region])
            room -= len(part[region])
    yield tuple(part)


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Frame)
_version: Final = bytes([VERSION])


def encode(frame: Frame) -> bytes:
    """Return the control bytes of a frame."""
    return _version + _encoder.encode(frame)


def decode(data: bytes | bytearray | memoryview) -> Frame:
    """Return the frame that control bytes stand for. Raises WireError."""
    view = memoryview(data)
    if not 1 < len(view) <= MAX_FRAME_BYTES:
        raise WireError(f"control message of {len(view)} bytes; expected 2 to {MAX_FRAME_BYTES}")
    if view[0] != VERSION:
        raise WireError(
            f"protocol version {view[0]}; this agent speaks {VERSION}: update the older"
        )
    try:
        return _decoder.decode(view[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"control message not understood: {error}") from error
