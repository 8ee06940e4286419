"""Short runs before the long ones: what an engine can do, and which static limit serves best."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
from msgspec.structs import replace

from ciuicflow.testing.engine_profile import PROFILES, EngineProfile
from ciuicflow.testing.fake_engine import change_profile
from loadtest import statistics
from loadtest.capacity import capacity_rps
from loadtest.figures import TIERS
from loadtest.generator import keep_busy
from loadtest.run import Schedule, run_side_by_side
from loadtest.scenarios import BARE, STATIC
from loadtest.statistics import Window
from loadtest.systems import Engine, running, style_of
from loadtest.workload import LENGTHS, Workload, plan

LIMITS: Final = (4, 8, 12, 16, 24, 32)
WAITS_S: Final = (60.0, 1.8)
"""Of `static` and of `static_short`: each gets the limit that is best for it."""
_SEED: Final = 1000
_SATURATED_S: Final = 8.0
_WARM_S: Final = 1.5
_DEPTH: Final = 8
"""Requests kept in a real engine: as many as it has slots. llama.cpp gets slower with each more."""


class Tuning(msgspec.Struct, frozen=True):
    """What was tried for one queue wait: goodput per second by limit."""

    wait_s: float
    goodput_per_s: dict[int, float]

    @property
    def best(self) -> int:
        """The limit with the highest goodput; the lower of two equal ones."""
        return max(self.goodput_per_s, key=lambda limit: (self.goodput_per_s[limit], -limit))


def profile_of(engine: Engine) -> EngineProfile:
    """Return the profile of an emulated engine."""
    return change_profile(PROFILES[engine.name], list(engine.changes))


class Speed(msgspec.Struct, frozen=True):
    """What an engine does when it is kept just saturated."""

    requests_per_s: float
    tokens_per_s: float | None
    """Measured; None: each system's own requests are replayed instead."""


async def measure(engine: Engine, directory: Path) -> Speed:
    """Return what an engine can do: computed for an emulated one, measured for a real one."""
    lengths = LENGTHS[engine.name]
    if not engine.is_real:
        return Speed(capacity_rps(profile_of(engine), lengths), None)
    requests = plan(Workload(lengths=lengths), 500.0, _SATURATED_S, _SEED)
    async with running(BARE, engine, directory) as target:
        style = style_of(BARE, engine)
        records = await keep_busy(requests, target.port, style, _DEPTH, _SATURATED_S)
    window = Window(_WARM_S, _SATURATED_S)
    tokens_per_s = statistics.useful_tokens(records, window) / window.length_s
    mean = fmean(request.prompt_tokens + request.output_tokens for request in requests)
    return Speed(tokens_per_s / mean, tokens_per_s)


async def tune(
    engine: Engine,
    workload: Workload,
    rps: float,
    seconds: float,
    limits: tuple[int, ...],
    directory: Path,
) -> Mapping[float, Tuning]:
    """Return, for each queue wait, the goodput under each limit: one short run side by side."""
    found: dict[float, Tuning] = {}
    warm_s = seconds / 4
    window = Window(warm_s, warm_s + seconds)
    requests = plan(workload, rps, window.end_s, _SEED)
    schedule = Schedule(arrivals_s=window.end_s, drain_s=5.0)
    for wait_s in WAITS_S:
        systems = [
            replace(STATIC, name=f"limit{limit}", limit=limit, wait_s=wait_s) for limit in limits
        ]
        groups = [systems] if not engine.is_real else [[system] for system in systems]
        goodput: dict[int, float] = {}
        for number, group in enumerate(groups):
            folder = directory / f"wait{wait_s:g}-{number}"
            run = await run_side_by_side(group, engine, requests, schedule, folder, seed=_SEED)
            for system in group:
                records = run.systems[system.name].records
                stats = statistics.groups([records], window, TIERS)["opted_in"]
                goodput[system.limit] = stats.goodput_per_s
        found[wait_s] = Tuning(wait_s, goodput)
    return found
