"""A controller that learns nothing: a fixed window and, if wanted, a fixed rate."""

from math import isfinite

from ciuicflow.congestion.base import CongestionState


class FixedController:
    """Keeps its window and rate whatever happens. ValueError if one of them is not positive."""

    def __init__(self, window_bytes: int, rate_bytes_per_s: float | None = None) -> None:
        if window_bytes < 1:
            raise ValueError(f"window_bytes: {window_bytes}; expected at least 1")
        if rate_bytes_per_s is not None and not (
            isfinite(rate_bytes_per_s) and rate_bytes_per_s > 0
        ):
            raise ValueError(f"rate_bytes_per_s: {rate_bytes_per_s}; expected more than 0, or None")
        self.window = window_bytes
        self.rate = rate_bytes_per_s
        self._in_flight = 0
        self._timeouts = 0

    def on_sent(self, now: int, size: int) -> None:
        """Count it."""
        self._in_flight += size

    def on_ack(
        self, now: int, sent_at: int, size: int, rtt: int, ce_bytes: int | None, app_limited: bool
    ) -> None:
        """Count it; delay and marks change nothing."""
        self._in_flight -= size

    def on_timeout(self, now: int) -> None:
        """Count it."""
        self._timeouts += 1

    def on_lost(self, size: int) -> None:
        """Count it."""
        self._in_flight -= size

    def snapshot(self) -> CongestionState:
        """Return the state for metrics and logs."""
        return CongestionState(
            controller="fixed",
            window_bytes=self.window,
            rate_bytes_per_s=self.rate,
            in_flight_bytes=self._in_flight,
            timeouts=self._timeouts,
        )
