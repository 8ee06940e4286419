"""The files and tables of a result: JSON, every request, a text table, plots."""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from loadtest.result import Figure, Result, SystemResult
from loadtest.run import Run
from loadtest.statistics import GroupStats

_HEAD: Final = (
    "system", "group", "offered", "served", "in target", "goodput/s", "tok share",
    "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99", "refused", "Jain",
)  # fmt: skip
_SYSTEM_HEAD: Final = (
    "system", "useful tok/s", "of capacity", "of bare", "wasted",
    "waiting in engine", "CPU engine", "CPU front",
)  # fmt: skip


def save(result: Result, runs: Sequence[Run], directory: Path) -> list[Path]:
    """Write NAME.json, NAME.txt, NAME.requests.jsonl.gz and NAME.png; return their paths."""
    name = f"{result.case.name}-{result.case.engine.name}"
    files = [directory / f"{name}{end}" for end in (".json", ".txt", ".requests.jsonl.gz", ".png")]
    files[0].write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    files[1].write_text("\n".join(text(result)) + "\n")
    with gzip.open(files[2], "wb") as requests:
        for run in runs:
            for system, done in run.systems.items():
                for record in done.records:
                    line = {"seed": run.seed, "system": system, **msgspec.structs.asdict(record)}
                    requests.write(msgspec.json.encode(line) + b"\n")
    try:
        from loadtest.plot import draw
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed (pip install 'ciuicflow[bench]')")
        return files[:3]
    draw(result, runs, files[3])
    return files


def text(result: Result) -> Iterator[str]:
    """Yield the lines of the tables."""
    case = result.case
    seeds = ", ".join(str(run.seed) for run in result.runs)
    yield f"{case.name} on {case.engine.name}: {_load(result)}, seeds {seeds}"
    yield from _validity(result)
    yield ""
    rows = [
        _row(name, group, stats)
        for name, system in result.systems.items()
        for group, stats in system.groups.items()
    ]
    yield from table(_HEAD, rows, labels=2)
    yield ""
    yield from table(_SYSTEM_HEAD, [_system(*item) for item in result.systems.items()], labels=1)
    yield ""
    yield from table(
        ("figure", "median", "min", "max", "runs without"), _figures(result.figures), labels=1
    )


def _load(result: Result) -> str:
    case = result.case
    if case.from_trace:
        return f"a trace, {case.window.length_s:g} s"
    stages = ", then ".join(f"{load:g}x" for _, load in case.workload.load)
    return f"{stages} of {result.capacity_rps:.2f} requests/s, {case.window.length_s:g} s"


def _validity(result: Result) -> Iterator[str]:
    cpu = max(run.generator_cpu for run in result.runs)
    lag_s = max(run.lag_p99_s for run in result.runs)
    yield f"generator: {cpu:.0%} of a core, requests sent {lag_s * 1000:.1f} ms late at P99"
    for run in result.runs:
        for reason in run.invalid:
            yield f"INVALID, seed {run.seed}: {reason}"


def _row(system: str, group: str, stats: GroupStats) -> tuple[str, ...]:
    times = []
    for part in (stats.ttft_s, stats.itl_s, stats.e2e_s):
        times += ["-", "-"] if part is None else [_number(part.p50), _number(part.p99)]
    return (
        system, group, str(stats.offered), f"{stats.served:.1%}", f"{stats.good:.1%}",
        f"{stats.goodput_per_s:.2f}", f"{stats.token_share:.1%}", *times,
        str(stats.outcomes.get("refused", 0)), _number(stats.jain),
    )  # fmt: skip


def _system(name: str, system: SystemResult) -> tuple[str, ...]:
    return (
        name, f"{system.useful_tokens_per_s:.0f}", _part(system.capacity_share),
        _part(system.bare_share), f"{system.wasted_share:.1%}",
        _number(system.engine_waiting),
        *(f"{system.cpu[p]:.0%}" if p in system.cpu else "-" for p in ("engine", "front")),
    )  # fmt: skip


def _figures(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    return [
        (f.name, _number(f.median), _number(f.min), _number(f.max), str(f.missing or ""))
        for f in figures
    ]


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], labels: int) -> list[str]:
    """Return the lines of a table: the first columns to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < labels else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
