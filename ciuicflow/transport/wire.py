"""Frames on a byte stream: the head, and a decoder that says where the next bytes belong. Pure.

The head is 16 bytes, network order: kind (1), zero (3), control bytes (4), payload bytes (8).
Control bytes follow, then the payload. Payload bytes go from the socket straight to their place;
only up to READ_AHEAD_BYTES that came along with a head are copied.
"""

import enum
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec

from ciuicflow.transport.base import MAX_CONTROL_BYTES, MAX_PAYLOAD_BYTES, PeerViolation
from ciuicflow.transport.buffers import advance, copy

_HEAD: Final = struct.Struct("!B3xIQ")
READ_AHEAD_BYTES: Final = 4096
MAX_LAYOUT_BYTES: Final = 16 * 1024
"""What a transport may put before the control bytes of its own (ucx: segment sizes)."""
_MAX_FRAME_BYTES: Final = _HEAD.size + MAX_CONTROL_BYTES + MAX_LAYOUT_BYTES
_SCRATCH_BYTES: Final = 256 * 1024
_IOV: Final = 64


class Kind(enum.IntEnum):
    """What a frame is."""

    MESSAGE = 1
    """Control bytes, and the payload behind them."""
    ASIDE = 2
    """Control bytes; the payload travels outside the stream."""
    HEARTBEAT = 3
    CLOSE = 4
    """The last frame: the sender neither sends nor wants anything more."""


_KINDS: Final = {kind.value: kind for kind in Kind}


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A frame without its payload."""

    kind: Kind
    control: bytes
    payload_bytes: int


def head(kind: Kind, control_bytes: int = 0, payload_bytes: int = 0) -> bytes:
    """Return the head of a frame."""
    return _HEAD.pack(kind, control_bytes, payload_bytes)


class Decoder:
    """Turns the bytes of a stream into frames.

    The driver reads into `wanted()`, tells `received(size)`, and gets the frames that are complete.
    A frame with a payload stops the decoder until `claim` or `skip`.
    """

    def __init__(self) -> None:
        self._stage = memoryview(bytearray(_MAX_FRAME_BYTES + READ_AHEAD_BYTES))
        self._staged = 0
        self._targets: deque[memoryview] = deque()
        self._scratch: memoryview | None = None
        self.payload_left = 0
        """Bytes of the current payload that are not at their place yet."""
        self.claimed = False
        """Whether a payload is on its way to its place, or to nowhere."""

    @property
    def between_frames(self) -> bool:
        """Whether an end of the stream here cuts nothing."""
        return not self._staged and not self.payload_left

    def wanted(self) -> list[memoryview]:
        """Return where the next bytes go, in order; empty: a payload is to be claimed first."""
        if not self.payload_left:
            end = max(self._staged + READ_AHEAD_BYTES, self._frame_bytes())
            return [self._stage[self._staged : end]]
        if self._scratch is not None:
            return [self._scratch[: self.payload_left]]
        return list(islice(self._targets, _IOV))

    def received(self, size_bytes: int) -> list[Frame]:
        """Take note of `size_bytes` that were put where `wanted` said."""
        if not self.payload_left:
            self._staged += size_bytes
            return self._frames()
        if self._scratch is None:
            advance(self._targets, size_bytes)
        self._settled(size_bytes)
        return []

    def claim(self, views: Sequence[memoryview]) -> list[Frame]:
        """Have the current payload put into `views`, whose size is that of the payload."""
        self._targets = deque(views)
        self._scratch = None
        early_bytes = min(self._staged, self.payload_left)
        copy((self._stage[:early_bytes],), self._targets)
        return self._unstage_payload(early_bytes)

    def skip(self) -> list[Frame]:
        """Drop the current payload."""
        self._scratch = memoryview(bytearray(min(self.payload_left, _SCRATCH_BYTES)))
        return self._unstage_payload(min(self._staged, self.payload_left))

    def _unstage_payload(self, size_bytes: int) -> list[Frame]:
        self._drop(size_bytes)
        self.claimed = True
        self._settled(size_bytes)
        return self._frames()

    def _settled(self, size_bytes: int) -> None:
        self.payload_left -= size_bytes
        if not self.payload_left:
            self.claimed = False

    def _frames(self) -> list[Frame]:
        frames = []
        start = 0
        while not self.payload_left:
            size_bytes = self._frame_bytes(start)
            if not size_bytes or size_bytes > self._staged - start:
                break
            kind, _, payload_bytes = _HEAD.unpack_from(self._stage, start)
            control = bytes(self._stage[start + _HEAD.size : start + size_bytes])
            frames.append(Frame(_KINDS[kind], control, payload_bytes))
            # The payload of an ASIDE frame is not in this stream.
            self.payload_left = payload_bytes if kind == Kind.MESSAGE else 0
            start += size_bytes
        self._drop(start)
        return frames

    def _frame_bytes(self, start: int = 0) -> int:
        """Return the size of the staged frame without its payload; 0: its head is not here."""
        if self._staged - start < _HEAD.size:
            return 0
        kind, control_bytes, payload_bytes = _HEAD.unpack_from(self._stage, start)
        frame_bytes: int = _HEAD.size + control_bytes
        if kind not in _KINDS:
            raise PeerViolation(f"frame of unknown kind {kind}")
        layout_bytes = MAX_LAYOUT_BYTES if kind == Kind.ASIDE else 0
        if control_bytes > MAX_CONTROL_BYTES + layout_bytes or payload_bytes > MAX_PAYLOAD_BYTES:
            raise PeerViolation(f"{control_bytes} control and {payload_bytes} payload bytes")
        if kind in (Kind.HEARTBEAT, Kind.CLOSE) and (control_bytes or payload_bytes):
            raise PeerViolation(f"{Kind(kind).name} frame with content")
        return frame_bytes

    def _drop(self, size_bytes: int) -> None:
        if size_bytes:
            left = bytes(self._stage[size_bytes : self._staged])
            self._stage[: len(left)] = left
            self._staged = len(left)
