"""What is in flight on one path: the window, the gaps between quanta, and the controller's feed.

Here seconds become the nanoseconds of congestion controllers.
"""

from typing import Final

import msgspec

from ciuicflow.congestion.base import Controller

_SLACK_S: Final = 0.001
"""How late a timer may be without lowering the rate: what event loops overshoot by."""


class _Sent(msgspec.Struct, frozen=True, gc=False):
    """A quantum that is not acknowledged."""

    transfer: str
    size: int
    sent_s: float


class Flight:
    """The quanta of one session that are not acknowledged, under one controller."""

    def __init__(self, controller: Controller, ack_timeout_s: float) -> None:
        self.controller = controller
        self.bytes = 0
        self.peer_window_bytes = 0
        """What the peer takes in at once."""
        self.next_seq = 0
        self.srtt_s: float | None = None
        """Smoothed round-trip time of quanta (1/8 of each new one), without the hold time."""
        self.marked_bytes = 0
        """Acknowledged with congestion experienced, as far as known."""
        self.acked_bytes = 0
        self.progress_s = 0.0
        """When the last was acknowledged, or the first of those in flight was sent."""
        self._ack_timeout_s = ack_timeout_s
        self._timeout_s = 0.0
        self._sent: dict[int, _Sent] = {}
        self._gap_from_s = 0.0
        self._gap_bytes = 0

    @property
    def window(self) -> int:
        """Bytes that may be in flight now."""
        return min(self.controller.window, self.peer_window_bytes)

    @property
    def rate(self) -> float | None:
        """Bytes per second that the path carries, as far as known."""
        if self.controller.rate is not None or not self.srtt_s:
            return self.controller.rate
        return self.window / self.srtt_s

    def reset(self, peer_window_bytes: int) -> None:
        """A new session has begun: what was in flight is gone."""
        if self.bytes:
            self.controller.on_lost(self.bytes)
        self.bytes = 0
        self.next_seq = 0
        self._sent.clear()
        self.peer_window_bytes = peer_window_bytes

    @property
    def is_full(self) -> bool:
        """Whether nothing of any size may go."""
        return self.bytes >= self.window

    def has_room(self, size: int) -> bool:
        """Whether the window lets so many bytes go; one quantum always may."""
        return not self.bytes or self.bytes + size <= self.window

    def paced_until(self) -> float:
        """Return when the rate lets the next quantum go."""
        rate = self.controller.rate
        return self._gap_from_s + self._gap_bytes / rate if rate is not None else 0.0

    def send(self, now: float, transfer: str, size: int) -> int:
        """Count a quantum in; return its sequence number."""
        seq = self.next_seq
        self.next_seq += 1
        if not self.bytes:
            self._progress(now)
        self._gap_from_s = max(self.paced_until(), now - _SLACK_S)
        self._gap_bytes = size
        self.bytes += size
        self._sent[seq] = _Sent(transfer, size, now)
        self.controller.on_sent(_ns(now), size)
        return seq

    def ack(
        self, now: float, seq: int, size: int, hold_ns: int, ce_bytes: int | None, idle: bool
    ) -> str | None:
        """Count a quantum out; return its transfer, or None if the acknowledgement is wrong.

        `idle`: nothing more waits to be sent.
        """
        sent = self._sent.pop(seq, None)
        if sent is None or sent.size != size or (ce_bytes or 0) > size:
            return None
        app_limited = idle and 2 * self.bytes < self.window
        self.bytes -= size
        self.acked_bytes += size
        self.marked_bytes += ce_bytes or 0
        rtt_ns = max(_ns(now - sent.sent_s) - hold_ns, 0)
        rtt_s = rtt_ns / 1e9
        self.srtt_s = rtt_s if self.srtt_s is None else self.srtt_s + (rtt_s - self.srtt_s) / 8
        self._progress(now)
        self.controller.on_ack(_ns(now), _ns(sent.sent_s), size, rtt_ns, ce_bytes, app_limited)
        return sent.transfer

    def tick(self, now: float) -> None:
        """Tell the controller that nothing was acknowledged for too long."""
        if self.bytes and now >= self._timeout_s:
            self._timeout_s = now + self._ack_timeout_s
            self.controller.on_timeout(_ns(now))

    def next_timeout(self) -> float | None:
        """Return when `tick` is due."""
        return self._timeout_s if self.bytes else None

    def _progress(self, now: float) -> None:
        self.progress_s = now
        self._timeout_s = now + self._ack_timeout_s


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
