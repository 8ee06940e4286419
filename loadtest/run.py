"""One run: all systems of a case side by side under the same plan, watched while they work."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from msgspec.structs import replace

from loadtest.generator import Drive
from loadtest.records import Record
from loadtest.samples import Sample
from loadtest.statistics import percentile
from loadtest.systems import Engine, Running, System, running, style_of
from loadtest.watching import Watcher
from loadtest.workload import Planned

LATE_S: Final = 0.05
"""A run is invalid if more than one in a hundred requests was sent later than this."""
BUSY: Final = 0.8
"""Or if the generator took more than this part of a core: its times would be its own."""
_HEAD_START_S: Final = 0.5
_ANSWER_S: Final = 5.0
_SETTLE_S: Final = 0.3


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """When things happen in a run, in seconds from its start."""

    arrivals_s: float
    """Arrivals end."""
    drain_s: float
    """Then so long is waited for answers."""
    sample_s: float = 1.0
    speeds: tuple[tuple[float, float], ...] = ()
    """From when on an emulated engine has which speed."""


class SystemRun(msgspec.Struct, frozen=True):
    """What one system did."""

    records: list[Record]
    samples: list[Sample]
    spent_tokens: float
    """Tokens that the engine computed, prompts and answers."""
    cpu: dict[str, float]
    """Part of a core that each of its processes took."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What all did."""

    seed: int
    planned: int
    lag_p99_s: float
    lag_max_s: float
    generator_cpu: float
    """Part of a core."""
    invalid: list[str]
    """Why its figures do not count; empty: they do."""
    systems: dict[str, SystemRun]


Tell = Callable[[float], None]
"""Is told how many seconds of the run have passed."""


async def run_side_by_side(
    systems: Sequence[System],
    engine: Engine,
    plan: Sequence[Planned],
    schedule: Schedule,
    directory: Path,
    *,
    seed: int,
    block_scale: float = 1.0,
    tell: Tell = lambda _: None,
) -> Run:
    """Start the systems, put the plan on each, stop them. Raises ChildFailed."""
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with (
        _all_running(systems, engine, directory) as targets,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        watcher = Watcher(http, targets)
        await watcher.warm(engine)
        start_s = asyncio.get_running_loop().time() + _HEAD_START_S
        drives = {
            target.system.name: Drive(
                plan,
                target.port,
                replace(style_of(target.system, engine), block_scale=block_scale),
                start_s,
            )
            for target in targets
        }
        meter = await _Meter.begin(watcher)
        async with watcher.watching(start_s, schedule.sample_s, schedule.speeds):
            await _wait(list(drives.values()), schedule, start_s, tell)
        records = {name: await drive.finish() for name, drive in drives.items()}
        own_cpu, done = await meter.end(records)
    return _judged(seed, len(plan), done, own_cpu)


class _Meter:
    """What processes and engines spent between two moments."""

    def __init__(self, watcher: Watcher, spent_tokens: dict[str, float]) -> None:
        self._watcher = watcher
        self._spent_tokens = spent_tokens
        self._cpu_s = watcher.cpu_s()
        self._own_s = time.process_time()
        self._began_s = time.monotonic()

    @classmethod
    async def begin(cls, watcher: Watcher) -> "_Meter":
        return cls(watcher, await watcher.spent_tokens())

    async def end(self, records: dict[str, list[Record]]) -> tuple[float, dict[str, SystemRun]]:
        """Return the part of a core that this process took, and what each system did."""
        wall_s = time.monotonic() - self._began_s
        own_cpu = (time.process_time() - self._own_s) / wall_s
        cpu_s = self._watcher.cpu_s()
        await asyncio.sleep(_SETTLE_S)
        spent = await self._watcher.spent_tokens()
        systems = {
            name: SystemRun(
                records=records[name],
                samples=self._watcher.samples[name],
                spent_tokens=spent[name] - self._spent_tokens[name],
                cpu={
                    process: (now_s - self._cpu_s[name][process]) / wall_s
                    for process, now_s in cpu_s[name].items()
                },
            )
            for name in records
        }
        return own_cpu, systems


def _judged(seed: int, planned: int, systems: dict[str, SystemRun], own_cpu: float) -> Run:
    late = sorted(record.late_s for system in systems.values() for record in system.records)
    lag_s = percentile(late, 0.99) if late else 0.0
    invalid = []
    if lag_s > LATE_S:
        invalid.append(f"requests were sent late: {lag_s:.3f} s at P99")
    if own_cpu > BUSY:
        invalid.append(f"the generator took {own_cpu:.0%} of a core")
    return Run(
        seed=seed, planned=planned, lag_p99_s=lag_s, lag_max_s=max(late, default=0.0),
        generator_cpu=own_cpu, invalid=invalid, systems=systems,
    )  # fmt: skip


@asynccontextmanager
async def _all_running(
    systems: Sequence[System], engine: Engine, directory: Path
) -> AsyncIterator[list[Running]]:
    """Start all at the same time, as each takes about a second."""
    async with AsyncExitStack() as stack:
        starts = [
            stack.enter_async_context(running(system, engine, directory / system.name))
            for system in systems
        ]
        targets = await asyncio.gather(*starts, return_exceptions=True)
        for target in targets:
            if isinstance(target, BaseException):
                raise target
        yield [target for target in targets if not isinstance(target, BaseException)]


async def _wait(drives: Sequence[Drive], schedule: Schedule, start_s: float, tell: Tell) -> None:
    loop = asyncio.get_running_loop()
    end_s = start_s + schedule.arrivals_s + schedule.drain_s
    while loop.time() < end_s and not all(drive.done.is_set() for drive in drives):
        tell(max(0.0, loop.time() - start_s))
        await asyncio.sleep(min(0.25, max(0.0, end_s - loop.time())))
