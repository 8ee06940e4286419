"""How far the whole command is: a bar on a terminal, else a line for each run. On stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """Counts seconds of runs."""

    def __init__(self, show: Callable[[str, float], None]) -> None:
        self._show = show
        self._before_s = 0.0
        self._label = ""

    def begin(self, label: str) -> None:
        """A run begins."""
        self._label = label
        self._show(label, self._before_s)

    def tell(self, seconds: float) -> None:
        """So many of its seconds have passed."""
        self._show(self._label, self._before_s + seconds)

    def end(self, planned_s: float) -> None:
        """It is over, and was to last so long."""
        self._before_s += planned_s


@contextmanager
def progress(total_s: float) -> Iterator[Progress]:
    """Show it."""
    if not sys.stderr.isatty():
        yield Progress(_line_for_each(total_s))
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total_s)
        yield Progress(lambda text, done_s: bar.update(task, completed=done_s, description=text))


def _line_for_each(total_s: float) -> Callable[[str, float], None]:
    last = ""

    def show(text: str, done_s: float) -> None:
        nonlocal last
        if text != last:
            last = text
            print(f"[{done_s:.0f} of {total_s:.0f} s] {text}", file=sys.stderr, flush=True)

    return show
