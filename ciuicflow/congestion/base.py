"""The interface of congestion controllers: one per path, fed by acknowledgements.

Times are integer nanoseconds of a monotonic clock, sizes are bytes. The shape is that of QUIC
stacks (aioquic, quinn): events in, a rate and a window out.
"""

from typing import Protocol

import msgspec


class CongestionState(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may see of a controller."""

    controller: str
    window_bytes: int
    rate_bytes_per_s: float | None
    """None: not paced."""
    in_flight_bytes: int
    timeouts: int


class Controller(Protocol):
    """Decides how much may be in flight on one path, and how fast it may be sent."""

    @property
    def window(self) -> int:
        """Bytes that may be in flight; at least one."""

    @property
    def rate(self) -> float | None:
        """Bytes per second that may be sent; None: as fast as the window lets."""

    def on_sent(self, now: int, size: int) -> None:
        """A quantum of `size` bytes is sent."""

    def on_ack(
        self, now: int, sent_at: int, size: int, rtt: int, ce_bytes: int | None, app_limited: bool
    ) -> None:
        """A quantum has arrived.

        `rtt` excludes the time for which the receiver held it; `ce_bytes` of it were marked, None:
        nobody knows; `app_limited`: there was too little to send to fill the window.
        """

    def on_timeout(self, now: int) -> None:
        """Nothing was acknowledged for a while although something is in flight."""

    def on_lost(self, size: int) -> None:
        """Bytes in flight that will never be acknowledged: their connection is gone."""

    def snapshot(self) -> CongestionState:
        """Return the state for metrics and logs."""
