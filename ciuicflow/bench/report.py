"""From samples to a result: medians over the rounds, ratios within each round, bars. Pure."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec

from ciuicflow.bench.loads import BY_NAME, Load
from ciuicflow.bench.proxies import DIRECT, GATEWAY, NGINX, OPTED_IN, WITH_LOG

MIN_ROUNDS = 3


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one target in one round."""

    load: str
    target: str
    round: int
    per_s: float
    """Whole answers per second, or events where streams are held."""
    p50_us: float | None = None
    p99_us: float | None = None
    cpu_us: float | None = None
    """CPU time of the proxy per unit of the load."""
    rss_bytes: int | None = None
    """Memory of the proxy after the load, or while streams are held."""
    stream_bytes: float | None = None
    """Growth of that memory per held stream."""
    others: float | None = None
    """Share of the proxy's core that other processes took meanwhile, 0 to 1."""


class Spread(msgspec.Struct, frozen=True):
    """One figure over the rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Sum up the values of the rounds; None: there are none."""
        return cls(median(values), min(values), max(values)) if values else None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One target under one load, over all rounds."""

    load: str
    target: str
    per_s: Spread | None
    p50_us: Spread | None
    p99_us: Spread | None
    added_p50_us: Spread | None
    """Beyond the direct way in the same round."""
    added_p99_us: Spread | None
    cpu_us: Spread | None
    rss_bytes: Spread | None
    stream_bytes: Spread | None
    cpu_ratio: Spread | None
    """To nginx in the same round, as below."""
    flow_ratio: Spread | None
    """Of CPU to the gateway's own without flow control."""
    rate_ratio: Spread | None
    p99_beyond_us: Spread | None


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must hold, and whether it does."""

    load: str
    target: str
    what: str
    figure: Spread
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the median is within the limit."""
        return self.figure.median <= self.limit


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of one run, as it is saved."""

    about: dict[str, Any]
    others: Spread | None
    """Share of the proxies' core that other processes took, over all samples."""
    rows: list[Row]
    bars: list[Bar]
    samples: list[Sample]


def build(about: dict[str, Any], samples: list[Sample]) -> Report:
    """Sum up a run."""
    places = dict.fromkeys((sample.load, sample.target) for sample in samples)
    rows = [_row(samples, load, target) for load, target in places]
    bars = [bar for row in rows for bar in _bars(row)]
    others = Spread.of([sample.others for sample in samples if sample.others is not None])
    return Report(about=about, others=others, rows=rows, bars=bars, samples=samples)


def _row(samples: list[Sample], load: str, target: str) -> Row:
    mine = {s.round: s for s in samples if (s.load, s.target) == (load, target)}

    def over(figure: str) -> Spread | None:
        values = [getattr(sample, figure) for sample in mine.values()]
        return Spread.of([value for value in values if value is not None])

    def against(base: str, figure: str, compare: Callable[[float, float], float]) -> Spread | None:
        if base == target:
            return None
        pairs = [
            (getattr(mine[s.round], figure), getattr(s, figure))
            for s in samples
            if (s.load, s.target) == (load, base) and s.round in mine
        ]
        return Spread.of([compare(a, b) for a, b in pairs if a is not None and b])

    return Row(
        load=load,
        target=target,
        per_s=over("per_s"),
        p50_us=over("p50_us"),
        p99_us=over("p99_us"),
        added_p50_us=against(DIRECT, "p50_us", _minus),
        added_p99_us=against(DIRECT, "p99_us", _minus),
        cpu_us=over("cpu_us"),
        rss_bytes=over("rss_bytes"),
        stream_bytes=over("stream_bytes"),
        cpu_ratio=against(NGINX, "cpu_us", _over),
        flow_ratio=against(GATEWAY, "cpu_us", _over) if target == OPTED_IN else None,
        rate_ratio=against(NGINX, "per_s", _over),
        p99_beyond_us=against(NGINX, "p99_us", _minus),
    )


def _minus(figure: float, base: float) -> float:
    return figure - base


def _over(figure: float, base: float) -> float:
    return figure / base


def _bars(row: Row) -> list[Bar]:
    """Return the bars of one row; only gateways have any, and not for what the log costs."""
    if not row.target.startswith(GATEWAY) or row.target == WITH_LOG:
        return []
    if row.target == OPTED_IN:
        limit = BY_NAME[row.load].flow_bar
        what = f"CPU per {BY_NAME[row.load].unit}, times the same not opted in"
        if row.flow_ratio is None or limit is None:
            return []
        return [
            Bar(load=row.load, target=row.target, what=what, figure=row.flow_ratio, limit=limit)
        ]
    return [
        Bar(load=row.load, target=row.target, what=what, figure=figure, limit=limit)
        for what, figure, limit in _limits(BY_NAME[row.load], row)
        if figure is not None and limit is not None
    ]


def _limits(load: Load, row: Row) -> list[tuple[str, Spread | None, float | None]]:
    if row.target == OPTED_IN:
        what = f"CPU per {load.unit}, times the same not opted in"
        return [(what, row.flow_ratio, load.flow_bar)]
    return [
        (f"CPU per {load.unit}, times nginx's", row.cpu_ratio, load.cpu_bar),
        ("added P99 beyond nginx's, us", row.p99_beyond_us, 0.0 if load.p99_bar else None),
        ("memory of an open stream, bytes", row.stream_bytes, load.memory_bar_bytes),
    ]
