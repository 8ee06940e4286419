"""What the reader sees: notes and progress on stderr, the tables on stdout, JSON in a file."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from ciuicflow.bench.loads import BY_NAME
from ciuicflow.bench.procfs import Cores
from ciuicflow.bench.report import MIN_ROUNDS, Bar, Report, Row, Spread
from ciuicflow.errors import StartError

Cells = tuple[str, ...]

HEAD: Final[Cells] = (
    *("target", "per s", "p50 ms", "p99 ms", "+p50 ms", "+p99 ms"),
    *("CPU us", "CPU to nginx's", "memory"),
)
QUIET: Final = 0.05
"""Share of the proxies' core that others may take without a word."""
_MISSING: Final = "-"
_MAX_COLUMNS: Final = 1000
_AROUND_S: Final = 0.8  # of each measurement: processes start, warm up, settle


def note(text: str) -> None:
    """Tell the reader something beside the result."""
    print(text, file=sys.stderr, flush=True)


def announce(cores: Cores, steps: int, seconds: float, *, has_nginx: bool) -> None:
    """Say how long it takes, and what this machine lacks for the whole comparison."""
    minutes = steps * (seconds + _AROUND_S) / 60
    note(f"{steps} measurements, about {max(minutes, 1):.0f} min")
    if cores.proxy is None:
        note("only one core: nothing is pinned, the load takes CPU from what is measured")
    if not has_nginx:
        note("nginx is not installed (apt-get install nginx): there is nothing to compare with")


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Show how far the run is: a bar on a terminal with rich, else a line per step."""
    if not (sys.stderr.isatty() and _is_installed("rich")):
        numbers = iter(range(1, steps + 1))
        yield lambda text: note(f"[{next(numbers)}/{steps}] {text}")
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=steps)
        yield lambda text: bar.update(task, advance=1, description=text)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# The tables.


def show(report: Report) -> None:
    """Print the result."""
    draw = _draw_rich if _is_installed("rich") else _draw_plain
    for name in dict.fromkeys(row.load for row in report.rows):
        rows = [cells(row) for row in report.rows if row.load == name]
        draw(f"{name}: {BY_NAME[name].title}", rows)
    for bar in report.bars:
        print(bar_line(bar))
    if report.others is not None and report.others.median > QUIET:
        taken = _spread(report.others, ".0%")
        print(f"a busy machine: other processes took {taken} of the proxies' core")
    if report.about["rounds"] < MIN_ROUNDS:
        print(f"fewer than {MIN_ROUNDS} rounds: take this for a trial, not for a result")


def cells(row: Row) -> Cells:
    """Return a row of the table: medians, and the ratio with its lowest and highest."""
    return (
        row.target,
        _figure(row.per_s, 1, ".0f"),
        _figure(row.p50_us, 1e3, ".3f"),
        _figure(row.p99_us, 1e3, ".3f"),
        _figure(row.added_p50_us, 1e3, "+.3f"),
        _figure(row.added_p99_us, 1e3, "+.3f"),
        _figure(row.cpu_us, 1, ".1f"),
        _spread(row.cpu_ratio, ".2f"),
        _figure(row.rss_bytes, 2**20, ".1f", " MiB")
        if row.stream_bytes is None
        else _figure(row.stream_bytes, 1024, ".1f", " KiB each"),
    )


def bar_line(bar: Bar) -> str:
    """Return one line that says whether a bar holds."""
    verdict = "holds" if bar.holds else "MISSED"
    form = ".2f" if 0 < bar.limit < 10 else ".0f"  # ratios, and figures of many digits
    figure = _spread(bar.figure, form)
    return f"{verdict:6}  {bar.load}, {bar.target}: {bar.what}: {figure}, at most {bar.limit:g}"


def _figure(spread: Spread | None, unit: float, form: str, suffix: str = "") -> str:
    return _MISSING if spread is None else f"{spread.median / unit:{form}}{suffix}"


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return _MISSING
    return f"{spread.median:{form}} ({spread.min:{form}} to {spread.max:{form}})"


def _draw_plain(title: str, rows: Sequence[Cells]) -> None:
    for line in plain_table(title, rows):
        print(line)


def plain_table(title: str, rows: Sequence[Cells]) -> list[str]:
    """Return the lines of a table: labels to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [title]
    for label, *figures in (HEAD, *rows):
        right = (text.rjust(width) for text, width in zip(figures, widths[1:], strict=True))
        lines.append("  ".join((f"  {label.ljust(widths[0])}", *right)))
    return [*lines, ""]


def _draw_rich(title: str, rows: Sequence[Cells]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(HEAD):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Figures that are cut off are worse than long lines: as wide as the table, wherever it goes.
    width = Console(width=_MAX_COLUMNS).measure(table).maximum
    Console(width=width).print(table)


# The files.


def prepare(file: Path) -> None:
    """See that the result can be saved before minutes are spent on it. Raises StartError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"cannot make the folder of {file}: {error.strerror}") from None
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise StartError(f"cannot write {file}: give --out a file in a folder of your own")


def save(report: Report, file: Path) -> None:
    """Write the JSON, and the plot beside it where matplotlib is installed."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    note(f"saved {file}")
    if not _is_installed("matplotlib"):
        note("no plot: matplotlib is not installed (pip install 'ciuicflow[bench]')")
        return
    from ciuicflow.bench.plot import draw

    if draw(report, file.with_suffix(".png")):
        note(f"saved {file.with_suffix('.png')}")
