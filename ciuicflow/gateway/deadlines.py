"""One timer for the deadlines of all connections.

A timer per wait would be set and cancelled several times in every request (about 1 us each time,
measured); here a wait costs one attribute, and one pass looks at all of them now and then.
"""

import asyncio
import math
import time
from typing import Final, Protocol

from ciuicflow.config import Timeouts

NEVER: Final = math.inf

# A deadline may be overrun by one period: a tenth of the shortest timeout, but no more than a
# second (what an operator notices) and no less than what the passes may cost.
_LONGEST_PERIOD_S: Final = 1.0
_SHORTEST_PERIOD_S: Final = 0.02


class Expiring(Protocol):
    """Something that waits."""

    deadline: float

    def expire(self) -> None:
        """The deadline has passed."""


class Deadlines:
    """Expires what has waited too long."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._waiting: set[Expiring] = set()
        self._loop = asyncio.get_running_loop()
        self.configure(timeouts)
        self._timer = self._loop.call_later(self._period_s, self._pass)

    def configure(self, timeouts: Timeouts) -> None:
        """Take over reloaded settings."""
        shortest_s = min(
            timeouts.header_s,
            timeouts.idle_s,
            timeouts.body_s,
            timeouts.response_s,
            timeouts.stall_s,
        )
        self._period_s = min(max(shortest_s / 10, _SHORTEST_PERIOD_S), _LONGEST_PERIOD_S)

    def add(self, waiting: Expiring) -> None:
        """Watch over it until it is discarded."""
        self._waiting.add(waiting)

    def discard(self, waiting: Expiring) -> None:
        """Watch no longer."""
        self._waiting.discard(waiting)

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _pass(self) -> None:
        now = time.monotonic()
        self._timer = self._loop.call_later(self._period_s, self._pass)
        for waiting in [waiting for waiting in self._waiting if waiting.deadline <= now]:
            try:
                waiting.expire()
            except Exception as error:  # noqa: BLE001 - the others have waited too long as well
                context = {"message": "a deadline failed", "exception": error}
                self._loop.call_exception_handler(context)
