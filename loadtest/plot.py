"""The plots: bars for every case, a curve or a line over time where that answers the question."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures import TIERS
from loadtest.result import Result
from loadtest.run import Run
from loadtest.statistics import GroupStats, token_shares

_COLOURS: Final = {
    "gold": "#c9a227", "silver": "#8d99ae", "bronze": "#a0623a", "bypass": "#2a6f97",
}  # fmt: skip
_LINES: Final = ("#2a6f97", "#b23a48", "#6b7785", "#588157", "#9d4edd", "#e07a5f", "#222222")

_LEAST_S: Final = 0.1  # where logarithmic axes begin
_TTFT_TITLE: Final = "P99 time to first token (s)"


def draw(result: Result, runs: Sequence[Run], file: Path) -> None:
    """Write the PNG."""
    extra = _EXTRA.get(result.case.scenario)
    columns = 4 if extra is None else 5
    figure = Figure(figsize=(4.6 * columns, 4.4), layout="constrained")
    places = list(figure.subplots(1, columns))
    _bars(places[0], result, _TTFT_TITLE, _ttft, log=True)
    _bars(places[1], result, "P99 end to end of completed (s)", _e2e, log=True)
    _bars(places[2], result, "within the tier's targets (part of offered)", lambda g: g.good)
    _stacked(places[3], result)
    if extra is not None:
        extra(places[4], result, runs)
    case = result.case
    verdict = "" if result.is_valid else " - INVALID: the generator was late"
    seeds = ", ".join(str(run.seed) for run in runs)
    figure.suptitle(f"{case.name} on {case.engine.name}, seeds {seeds}{verdict}")
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside upper right", ncols=4)
    figure.savefig(file, dpi=110)


def _ttft(stats: GroupStats) -> float | None:
    return stats.ttft_s.p99 if stats.ttft_s else None


def _e2e(stats: GroupStats) -> float | None:
    return stats.e2e_s.p99 if stats.e2e_s else None


def _bars(
    place: Axes, result: Result, title: str,
    value: Callable[[GroupStats], float | None], *, log: bool = False,
) -> None:  # fmt: skip
    names = list(result.systems)
    groups = [g for g in _COLOURS if any(g in s.groups for s in result.systems.values())]
    width = 0.8 / max(1, len(groups))
    for index, group in enumerate(groups):
        stats = [result.systems[name].groups.get(group) for name in names]
        heights = [(value(s) or 0.0) if s else 0.0 for s in stats]
        at = [x + (index - (len(groups) - 1) / 2) * width for x in range(len(names))]
        place.bar(at, heights, width, color=_COLOURS[group], label=group)
        if title == _TTFT_TITLE and group in TIERS:
            place.axhline(TIERS[group].ttft_target_s, color=_COLOURS[group], lw=0.8, ls="--")
    if log:
        place.set_yscale("log")
        place.set_ylim(bottom=_LEAST_S)
    _finish(place, title, names)


def _stacked(place: Axes, result: Result) -> None:
    """Useful tokens per second by group, and the bare engine's as a line."""
    names = list(result.systems)
    bottoms = [0.0] * len(names)
    for group, colour in _COLOURS.items():
        stats = [result.systems[name].groups.get(group) for name in names]
        heights = [s.tokens_per_s if s else 0.0 for s in stats]
        place.bar(range(len(names)), heights, 0.6, bottoms, color=colour)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    if "bare" in result.systems:
        place.axhline(result.systems["bare"].useful_tokens_per_s, color="#222222", lw=0.8, ls="--")
    _finish(place, "useful tokens per second", names)


def _finish(place: Axes, title: str, names: Sequence[str]) -> None:
    place.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    place.set_title(title, loc="left", fontsize=9)
    place.spines[["top", "right"]].set_visible(False)


def _gold_over_time(place: Axes, result: Result, runs: Sequence[Run]) -> None:
    for name, colour in zip(result.systems, _LINES, strict=False):
        points = sorted(
            (r.at_s, r.ttft_s)
            for run in runs
            for r in run.systems[name].records
            if r.tier == "gold" and r.opted_in and r.ttft_s is not None
        )
        if points:
            place.plot(*zip(*points, strict=True), ".", ms=3, color=colour, label=name)
    place.set_yscale("log")
    _mark(place, result)
    place.axhline(TIERS["gold"].ttft_target_s, color=_COLOURS["gold"], lw=0.8, ls="--")
    place.set_title("gold: time to first token (s) by arrival", loc="left", fontsize=9)
    place.legend(fontsize=7)


def _limit_over_time(place: Axes, result: Result, runs: Sequence[Run]) -> None:
    for run, colour in zip(runs, _LINES, strict=False):
        for limit, style in (("requests", "-"), ("tokens", ":"), ("prefill_tokens", "--")):
            points = [
                (sample.at_s, value)
                for sample in (run.systems["flow"].samples if "flow" in run.systems else ())
                if (value := getattr(sample.limit, limit, None)) is not None
            ]
            if points:
                mean = fmean(value for _, value in points)
                times = [at_s for at_s, _ in points]
                values = [value / mean for _, value in points]
                label = limit if run is runs[0] else None
                place.plot(times, values, style, color=colour, lw=1, label=label)
    _mark(place, result)
    place.set_title("limits over their means, a colour for each seed", loc="left", fontsize=9)
    place.set_xlabel("s")
    place.legend(fontsize=7)


def _mark(place: Axes, result: Result) -> None:
    for at_s in result.case.changes:
        place.axvline(at_s, color="#b23a48", lw=0.8, ls=":")


def _headroom_curve(place: Axes, result: Result, _: Sequence[Run]) -> None:
    base = result.systems["headroom_0"].useful_tokens_per_s
    points = [
        (1 - system.useful_tokens_per_s / base, _ttft(system.groups["gold"]) or 0.0, name)
        for name, system in result.systems.items()
        if base and "gold" in system.groups
    ]
    place.plot([p[0] for p in points], [p[1] for p in points], "o-", color=_LINES[0])
    for given_up, ttft_s, name in points:
        place.annotate(name.removeprefix("headroom_"), (given_up, ttft_s), fontsize=7)
    place.set_xlabel("throughput given up")
    place.set_title("gold: P99 time to first token (s), by headroom", loc="left", fontsize=9)


def _tenants(place: Axes, result: Result, runs: Sequence[Run]) -> None:
    names, window = list(result.systems), result.case.window
    bottoms = [0.0] * len(names)
    for tenant, colour in zip(sorted(result.case.workload.tenants), _LINES, strict=False):
        shares = [
            fmean(token_shares(run.systems[name].records, window).get(tenant, 0.0) for run in runs)
            for name in names
        ]
        place.bar(range(len(names)), shares, 0.6, bottoms, color=colour, label=tenant)
        bottoms = [low + share for low, share in zip(bottoms, shares, strict=True)]
    place.axhline(1 / len(result.case.workload.tenants), color="#222222", lw=0.8, ls="--")
    _finish(place, "part of the tokens, by tenant", names)
    place.legend(fontsize=7)


_EXTRA: Final[dict[str, Callable[[Axes, Result, Sequence[Run]], None]]] = {
    "spike": _gold_over_time,
    "speed": _limit_over_time,
    "headroom": _headroom_curve,
    "tenants": _tenants,
}
