"""How late the event loop runs its timers: the first sign that it is blocked or overloaded."""

import asyncio
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 0.5


async def measure(report: Callable[[float], None]) -> None:
    """Report the lag in seconds twice a second, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        report(max(0.0, loop.time() - due))
