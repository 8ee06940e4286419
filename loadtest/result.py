"""The result of a case over its seeds, as it is saved. Pure."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from loadtest import figures, statistics
from loadtest.capacity import Reference
from loadtest.run import Run
from loadtest.scenarios import Case
from loadtest.statistics import GroupStats


class Figure(msgspec.Struct, frozen=True):
    """One figure over the seeds; None: no run had it. ``missing`` counts the runs without it."""

    name: str
    median: float | None
    min: float | None
    max: float | None
    missing: int = 0


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one run can be trusted, and that no request is lost in the count."""

    seed: int
    planned: int
    outcomes: dict[str, dict[str, int]]
    """By system: all planned requests by how they ended."""
    lag_p99_s: float
    lag_max_s: float
    generator_cpu: float
    invalid: list[str]


class SystemResult(msgspec.Struct, frozen=True, kw_only=True):
    """One system over all runs."""

    groups: dict[str, GroupStats]
    """By tier, ``opted_in`` and ``bypass``; percentiles over the requests of all runs."""
    useful_tokens_per_s: float
    capacity_share: float | None
    """Useful tokens against those of the engine kept just saturated; None: that is not known."""
    bare_share: float | None
    """Against the bare engine's under the same load in the same runs; None: it was not there."""
    wasted_share: float
    """Part of the engine's tokens that went to nobody who stayed."""
    engine_waiting: float | None
    """Mean number of requests that waited inside the engine."""
    cpu: dict[str, float]
    """Part of a core that each process took."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    about: dict[str, Any]
    case: Case
    capacity_rps: float
    """The offered load is given in multiples of this."""
    runs: list[RunSummary]
    systems: dict[str, SystemResult]
    figures: list[Figure]

    @property
    def is_valid(self) -> bool:
        """Whether the generator kept up in all runs."""
        return not any(run.invalid for run in self.runs)


def build(
    case: Case,
    capacity_rps: float,
    reference: Reference,
    runs: Sequence[Run],
    about: dict[str, Any],
) -> Result:
    """Sum up the runs of a case."""
    names = [system.name for system in case.systems]
    useful = {
        name: fmean(figures.tokens_per_s(run.systems[name], case.window) for run in runs)
        for name in names
    }
    return Result(
        about=about,
        case=case,
        capacity_rps=capacity_rps,
        runs=[_run(run) for run in runs],
        systems={name: _system(case, name, runs, useful, reference) for name in names},
        figures=_figures([figures.of_run(case, run, reference) for run in runs]),
    )


def _run(run: Run) -> RunSummary:
    outcomes = {
        name: dict(Counter(record.outcome.value for record in system.records))
        for name, system in run.systems.items()
    }
    return RunSummary(
        seed=run.seed, planned=run.planned, outcomes=outcomes, lag_p99_s=run.lag_p99_s,
        lag_max_s=run.lag_max_s, generator_cpu=run.generator_cpu, invalid=run.invalid,
    )  # fmt: skip


def _system(
    case: Case, name: str, runs: Sequence[Run], useful: dict[str, float], reference: Reference
) -> SystemResult:
    mine = [run.systems[name] for run in runs]
    waiting = [
        sample.engine.waiting
        for system in mine
        for sample in system.samples
        if case.window.start_s <= sample.at_s < case.window.end_s
    ]
    bare = useful.get("bare")
    shares = [figures.capacity_share(system, case.window, reference) for system in mine]
    known = [share for share in shares if share is not None]
    return SystemResult(
        groups=statistics.groups([s.records for s in mine], case.window, figures.TIERS),
        useful_tokens_per_s=useful[name],
        capacity_share=fmean(known) if known else None,
        bare_share=useful[name] / bare if bare else None,
        wasted_share=fmean(map(figures.wasted_share, mine)),
        engine_waiting=fmean(waiting) if waiting else None,
        cpu={process: fmean(s.cpu[process] for s in mine) for process in mine[0].cpu},
    )


def _figures(by_run: Sequence[dict[str, float | None]]) -> list[Figure]:
    names = dict.fromkeys(name for run in by_run for name in run)
    answer = []
    for name in names:
        values = [value for run in by_run if (value := run.get(name)) is not None]
        missing = len(by_run) - len(values)
        if values:
            answer.append(Figure(name, median(values), min(values), max(values), missing))
        else:
            answer.append(Figure(name, None, None, None, missing))
    return answer
