"""Frames in any chunking, payloads at their place, and what a broken peer may send."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.transport.base import MAX_CONTROL_BYTES, MAX_PAYLOAD_BYTES, PeerViolation
from ciuicflow.transport.wire import READ_AHEAD_BYTES, Decoder, Frame, Kind, head

MESSAGE = st.tuples(st.binary(max_size=9000), st.binary(max_size=20_000))


def feed(decoder: Decoder, data: bytes, chunk_bytes: int) -> tuple[list[Frame], int]:
    """Read at most `chunk_bytes` at a time until the decoder wants nothing; how much was read."""
    frames = []
    position = 0
    while position < len(data):
        room = decoder.wanted()
        if not room:
            break
        size_bytes = 0
        for view in room:
            part = data[position : position + min(view.nbytes, chunk_bytes - size_bytes)]
            view[: len(part)] = part
            position += len(part)
            size_bytes += len(part)
        frames += decoder.received(size_bytes)
    return frames, position


@given(
    messages=st.lists(MESSAGE, max_size=6), chunk_bytes=st.integers(1, 70_000), odd=st.booleans()
)
def test_messages_survive_any_chunking(
    messages: list[tuple[bytes, bytes]], chunk_bytes: int, odd: bool
) -> None:
    stream = b"".join(
        head(Kind.MESSAGE, len(control), len(payload)) + control + payload
        for control, payload in messages
    )
    decoder = Decoder()
    seen: list[tuple[int, bytes]] = []
    frames: list[Frame] = []
    while True:
        more, position = feed(decoder, stream, chunk_bytes)
        stream, frames = stream[position:], frames + more
        if not decoder.payload_left:
            break
        target = bytearray(decoder.payload_left)
        middle = len(target) // 3 if odd else 0
        views = [memoryview(target)[:middle], memoryview(target)[middle:]]
        pending = len(frames) - 1
        frames += decoder.claim([view for view in views if view.nbytes])
        more, position = feed(decoder, stream, chunk_bytes) if decoder.claimed else ([], 0)
        stream, frames = stream[position:], frames + more
        seen.append((pending, bytes(target)))
    payloads = dict(seen)
    got = [(frame.control, payloads.get(index, b"")) for index, frame in enumerate(frames)]
    assert got == messages
    assert decoder.between_frames


def test_payload_stops_the_decoder_until_it_is_claimed() -> None:
    decoder = Decoder()
    frames, _ = feed(decoder, head(Kind.MESSAGE, 1, 10) + b"c" + b"01234", 1 << 20)
    assert frames == [Frame(Kind.MESSAGE, b"c", 10)]
    assert decoder.wanted() == []
    assert not decoder.between_frames
    target = bytearray(10)
    assert decoder.claim([memoryview(target)]) == []
    assert target == b"01234\0\0\0\0\0"
    (rest,) = decoder.wanted()
    rest[:5] = b"56789"
    assert decoder.received(5) == []
    assert target == b"0123456789"
    assert not decoder.claimed
    assert decoder.between_frames


def test_claim_of_an_early_payload_brings_the_frames_behind_it() -> None:
    decoder = Decoder()
    follower = head(Kind.MESSAGE, 1, 5) + b"2"
    feed(decoder, head(Kind.MESSAGE, 1, 3) + b"1abc" + follower, 1 << 20)
    target = bytearray(3)
    assert decoder.claim([memoryview(target)]) == [Frame(Kind.MESSAGE, b"2", 5)]
    assert target == b"abc"
    assert not decoder.claimed
    assert decoder.payload_left == 5


def test_payload_is_read_straight_into_its_place() -> None:
    decoder = Decoder()
    feed(decoder, head(Kind.MESSAGE, 0, 100), 1 << 20)
    target = bytearray(100)
    decoder.claim([memoryview(target)])
    (wanted,) = decoder.wanted()
    wanted[:] = b"x" * 100
    assert target == b"x" * 100


def test_skipped_payload_leaves_the_next_frame() -> None:
    decoder = Decoder()
    stream = head(Kind.MESSAGE, 0, 600_000) + bytes(600_000) + head(Kind.HEARTBEAT)
    _, position = feed(decoder, stream, 1 << 20)
    assert position <= 16 + READ_AHEAD_BYTES
    decoder.skip()
    frames, _ = feed(decoder, stream[position:], 1 << 20)
    assert frames == [Frame(Kind.HEARTBEAT, b"", 0)]


@pytest.mark.parametrize(
    "garbage",
    [
        head(Kind.MESSAGE, MAX_CONTROL_BYTES + 1),
        head(Kind.MESSAGE, 0, MAX_PAYLOAD_BYTES + 1),
        head(Kind.HEARTBEAT, 1),
        head(Kind.CLOSE, 0, 1),
        struct.pack("!B3xIQ", 99, 0, 0),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_broken_peer_is_found_out(garbage: bytes) -> None:
    with pytest.raises(PeerViolation):
        feed(Decoder(), garbage, 1 << 20)
