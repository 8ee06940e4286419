"""Wait for a condition with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], within_s: float = 5.0, what: str = "") -> None:
    """Poll until the condition is true. Raises AssertionError after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what or condition}")
        time.sleep(0.005)


def holds(condition: Callable[[], object], for_s: float) -> bool:
    """True if the condition stays true for `for_s` seconds."""
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        if not condition():
            return False
        time.sleep(0.01)
    return True
