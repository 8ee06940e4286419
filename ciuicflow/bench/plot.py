"""The plot: CPU per unit of work, one panel for each load."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ciuicflow.bench.loads import BY_NAME
from ciuicflow.bench.proxies import NGINX
from ciuicflow.bench.report import Report, Row, Spread

_GATEWAY_COLOUR = "#2a6f97"
_NGINX_COLOUR = "#6b7785"
_PANEL_INCHES = (3.4, 3.6)


def draw(report: Report, file: Path) -> bool:
    """Write the PNG; return False where nothing was measured that it could show."""
    panels: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.cpu_us is not None:
            panels.setdefault(row.load, []).append(row)
    if not panels:
        return False
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * lines)
    figure = Figure(figsize=size, layout="constrained")
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    for place, (name, rows) in zip(places, panels.items(), strict=False):
        _panel(place, name, rows)
    for place in places[len(panels) :]:
        place.set_axis_off()
    figure.suptitle("CPU time of the proxy (median of the rounds; lines: lowest to highest)")
    figure.savefig(file, dpi=120)
    return True


def _panel(place: Axes, name: str, rows: list[Row]) -> None:
    spreads = [row.cpu_us for row in rows if row.cpu_us is not None]
    heights = [spread.median for spread in spreads]
    reach = (
        [spread.median - spread.min for spread in spreads],
        [spread.max - spread.median for spread in spreads],
    )
    colours = [_NGINX_COLOUR if row.target == NGINX else _GATEWAY_COLOUR for row in rows]
    bars = place.bar(range(len(rows)), heights, yerr=reach, color=colours, capsize=3, width=0.6)
    labels = [_label(row, spread) for row, spread in zip(rows, spreads, strict=True)]
    place.bar_label(bars, labels, label_type="center", color="white", weight="bold")
    place.set_xticks(range(len(rows)), [row.target.replace(" ", "\n", 1) for row in rows])
    place.set_title(name, loc="left", weight="bold")
    place.set_ylabel(f"us per {BY_NAME[name].unit}")
    place.set_ylim(bottom=0)
    place.spines[["top", "right"]].set_visible(False)


def _label(row: Row, cpu_us: Spread) -> str:
    figure = f"{cpu_us.median:.1f}"
    return figure if row.cpu_ratio is None else f"{figure}\n{row.cpu_ratio.median:.2f} x"
