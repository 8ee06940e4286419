"""How late the event loop runs its timers: the first sign that it is blocked or overloaded."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 0.5
# Prometheus scrapes every 15 s by custom: a stall must still be there when it does.
_REMEMBERED: Final = 30


async def measure(report: Callable[[float], None]) -> None:
    """Report, twice a second until cancelled, the worst lag of the last 15 s in seconds."""
    loop = asyncio.get_running_loop()
    lags_s: deque[float] = deque(maxlen=_REMEMBERED)
    while True:
        due = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        lags_s.append(max(0.0, loop.time() - due))
        report(max(lags_s))
