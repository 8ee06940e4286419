"""Metrics of a KV agent, rendered when scraped. Their meaning is in docs/kv.md."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ciuicflow.observability.metrics import _add_histogram
from ciuicflow.observability.traffic import Histogram

TRANSFER_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class PathSample(msgspec.Struct, frozen=True, kw_only=True):
    """A path to another agent at this moment; None: not known."""

    src: str
    dst: str
    sent_bytes: Mapping[str, int]
    """By tier."""
    send_wait_s: float
    in_flight_bytes: int
    rate_bytes_per_s: float | None
    rtt_s: float | None
    ce_fraction: float | None


class KvMetrics(Collector):
    """Durations are counted here; everything else is asked for when Prometheus scrapes.

    `outcomes` counts transfers by role (`send`, `receive`) and outcome.
    """

    def __init__(
        self,
        paths: Callable[[], Iterable[PathSample]],
        outcomes: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        self._paths = paths
        self._outcomes = outcomes
        self._durations: dict[tuple[str, str], Histogram] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe(self, role: str, tier: str, duration_s: float) -> None:
        """Count a transfer that has completed."""
        if (role, tier) not in self._durations:
            self._durations[role, tier] = Histogram(TRANSFER_BUCKETS_S)
        self._durations[role, tier].observe(duration_s)

    def render(self) -> bytes:
        """Return the page for Prometheus."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not run the callables."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family; called by prometheus_client within `render`."""
        yield from self._collect_paths()
        duration = HistogramMetricFamily(
            "ciuicflow_kv_transfer_seconds",
            "Seconds from the engine's call to the commit, of completed transfers.",
            labels=("role", "tier"),
        )
        for labels, histogram in self._durations.items():
            _add_histogram(duration, labels, histogram)
        yield duration
        outcomes = CounterMetricFamily(
            "ciuicflow_kv_transfers_total",
            "Transfers that ended, sent and received ones.",
            labels=("role", "outcome"),
        )
        for labels, count in self._outcomes().items():
            outcomes.add_metric(labels, count)
        yield outcomes

    def _collect_paths(self) -> Iterator[Metric]:
        ends = ("src", "dst")
        sent = CounterMetricFamily(
            "ciuicflow_kv_bytes_total", "Bytes of cache sent.", labels=(*ends, "tier")
        )
        wait = CounterMetricFamily(
            "ciuicflow_kv_send_wait_seconds_total",
            "Seconds for which something was ready but might not be sent yet.",
            labels=ends,
        )
        gauges = {
            "in_flight_bytes": _gauge("in_flight_bytes", "Bytes sent and not acknowledged."),
            "rate_bytes_per_s": _gauge("rate_bytes_per_second", "What the path carries."),
            "rtt_s": _gauge("rtt_seconds", "Smoothed round-trip time of quanta."),
            "ce_fraction": _gauge("ce_fraction", "Part of the segments marked with congestion."),
        }
        for path in self._paths():
            labels = (path.src, path.dst)
            wait.add_metric(labels, path.send_wait_s)
            for tier, size in path.sent_bytes.items():
                sent.add_metric((*labels, tier), size)
            for field, family in gauges.items():
                value = getattr(path, field)
                if value is not None:
                    family.add_metric(labels, value)
        yield from (sent, wait, *gauges.values())


def _gauge(name: str, what: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"ciuicflow_kv_{name}", what, labels=("src", "dst"))
