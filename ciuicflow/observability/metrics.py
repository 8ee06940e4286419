"""Every metric of the gateway: plain counters on the request path, rendered at scrape time.

prometheus_client objects cost about 1 us per touch, so none is touched per request. What others
already know (endpoints, connections, dropped lines) is asked for when Prometheus scrapes.
The meaning of each metric, and what to do when it moves, is in docs/metrics.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import isnan
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ciuicflow import __version__
from ciuicflow.observability.traffic import OTHER_CODE, Histogram, TierTraffic, Traffic

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The classic text format, which every Prometheus reads."""

_BYPASS = ("bypass", "none")
ReloadResult = Literal["success", "failure"]


class EndpointSample(msgspec.Struct, frozen=True):
    """What an endpoint looks like at this moment; `idle` and `busy` count its connections."""

    name: str
    up: bool
    in_flight: int
    idle: int
    busy: int
    tokens_in_flight: int = 0
    """Of opted-in requests."""
    limit_tokens: float | None = None
    """What the endpoint may hold of them; None: no limit was learnt yet."""
    limit_requests: float | None = None


class Metrics(Collector):
    """Counts on the event loop, renders when scraped. All calls come from one thread.

    The number of series is bounded: flow, tier, outcome and reason are words of the gateway's own
    closed sets, codes outside 100..599 count as "other", and endpoints that `endpoints` no longer
    names take their counters with them.
    """

    def __init__(
        self,
        *,
        endpoints: Callable[[], Iterable[EndpointSample]],
        client_connections: Callable[[], int],
        log_lines_dropped: Callable[[], int],
        queue_depths: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.event_loop_lag_s = 0.0
        """How late the event loop runs its timers; whoever measures it writes it here."""
        self._endpoints = endpoints
        self._client_connections = client_connections
        self._log_lines_dropped = log_lines_dropped
        self._queue_depths = queue_depths
        self._tiers: dict[str, TierTraffic] = {}
        # Series that exist from the start read 0 instead of "no data", and rate() sees their
        # first step.
        self._traffic = {_BYPASS: Traffic()}
        self._reloads: dict[ReloadResult, int] = {"success": 0, "failure": 0}
        self._failures: Counter[tuple[str, str]] = Counter()  # endpoint, reason
        self._retries: Counter[str] = Counter()
        self._now = 0.0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def traffic(self, flow: str, tier: str) -> Traffic:
        """Return the counters of a flow and tier, for the request path to write to."""
        if (flow, tier) not in self._traffic:
            self._traffic[flow, tier] = Traffic()
        return self._traffic[flow, tier]

    def tier(self, name: str) -> TierTraffic:
        """Return the further counters of a tier, for the request path to write to."""
        if name not in self._tiers:
            self._tiers[name] = TierTraffic()
        return self._tiers[name]

    def upstream_failure(self, endpoint: str, reason: str) -> None:
        """Count a failed attempt; `reason` is a word of the caller's closed set."""
        self._failures[endpoint, reason] += 1

    def retry(self, endpoint: str) -> None:
        """Count a request that `endpoint` failed and that was sent again."""
        self._retries[endpoint] += 1

    def reload(self, result: ReloadResult) -> None:
        """Count an attempt to load the configuration again."""
        self._reloads[result] += 1

    def render(self, now: float) -> bytes:
        """Return the page for Prometheus, to be served as CONTENT_TYPE."""
        self._now = now
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not run the callables."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family; called by prometheus_client within `render`."""
        yield from self._collect_requests()
        yield from self._collect_windows()
        yield from self._collect_tiers()
        yield from self._collect_endpoints()
        yield from self._collect_gateway()

    def _collect_requests(self) -> Iterator[Metric]:
        total = CounterMetricFamily(
            "ciuicflow_requests_total",
            "Requests that ended, by outcome and HTTP status.",
            labels=("flow", "tier", "outcome", "code"),
        )
        duration = HistogramMetricFamily(
            "ciuicflow_request_duration_seconds",
            "Seconds from a request's first byte to the end of its answer.",
            labels=("flow", "tier"),
        )
        for labels, traffic in self._traffic.items():
            for (outcome, code), count in traffic.answers.items():
                total.add_metric(
                    (*labels, outcome, "other" if code == OTHER_CODE else str(code)), count
                )
            _add_histogram(duration, labels, traffic.durations)
        yield total
        yield duration

    def _collect_windows(self) -> Iterator[Metric]:
        qps = GaugeMetricFamily(
            "ciuicflow_qps",
            "Requests that ended per second, over the last minute.",
            labels=("flow", "tier"),
        )
        p99 = GaugeMetricFamily(
            "ciuicflow_latency_p99_seconds",
            "99th percentile of the request duration over the last minute, within 1 %.",
            labels=("flow", "tier"),
        )
        for labels, traffic in self._traffic.items():
            qps.add_metric(labels, traffic.window.rate_per_s(self._now))
            value = traffic.window.quantile(0.99, self._now)
            # A tier that nobody uses has none: its NaN would spoil every sum and maximum.
            if labels == _BYPASS or not isnan(value):
                p99.add_metric(labels, value)
        yield qps
        yield p99

    def _collect_tiers(self) -> Iterator[Metric]:
        wait = HistogramMetricFamily(
            "ciuicflow_queue_wait_seconds",
            "Seconds that opted-in requests waited before they were sent on.",
            labels=("tier",),
        )
        ttft = HistogramMetricFamily(
            "ciuicflow_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token, streams only.",
            labels=("tier",),
        )
        inter_token = HistogramMetricFamily(
            "ciuicflow_inter_token_latency_seconds",
            "Seconds between two tokens of a stream.",
            labels=("tier",),
        )
        p99 = GaugeMetricFamily(
            "ciuicflow_ttft_p99_seconds",
            "99th percentile of the time to the first token over the last minute, within 1 %.",
            labels=("tier",),
        )
        tokens = CounterMetricFamily(
            "ciuicflow_tokens_total",
            "Tokens that engines reported for opted-in requests.",
            labels=("tier", "kind"),
        )
        depth = GaugeMetricFamily(
            "ciuicflow_queue_depth", "Opted-in requests that wait now.", labels=("tier",)
        )
        for name, tier in self._tiers.items():
            _add_histogram(wait, (name,), tier.queue_wait)
            _add_histogram(ttft, (name,), tier.ttft)
            _add_histogram(inter_token, (name,), tier.inter_token)
            value = tier.ttft_window.quantile(0.99, self._now)
            if not isnan(value):
                p99.add_metric((name,), value)
            for kind, count in tier.tokens.items():
                tokens.add_metric((name, kind), count)
        for name, queued in self._queue_depths().items():
            depth.add_metric((name,), queued)
        yield from (wait, ttft, inter_token, p99, tokens, depth)

    def _collect_endpoints(self) -> Iterator[Metric]:
        samples = {sample.name: sample for sample in self._endpoints()}
        in_flight = GaugeMetricFamily(
            "ciuicflow_in_flight", "Requests at the endpoint now.", labels=("endpoint",)
        )
        up = GaugeMetricFamily(
            "ciuicflow_endpoint_up", "1: the endpoint takes requests.", labels=("endpoint",)
        )
        tokens = GaugeMetricFamily(
            "ciuicflow_tokens_in_flight",
            "Tokens that opted-in requests hold at the endpoint now, by the gateway's ledger.",
            labels=("endpoint",),
        )
        limit_tokens = GaugeMetricFamily(
            "ciuicflow_limit_tokens",
            "Tokens that the endpoint may hold, as learnt; none: it was never seen full.",
            labels=("endpoint",),
        )
        limit_requests = GaugeMetricFamily(
            "ciuicflow_limit_requests",
            "Requests that the endpoint may have in flight, as learnt.",
            labels=("endpoint",),
        )
        connections = GaugeMetricFamily(
            "ciuicflow_upstream_connections",
            "Open connections to the endpoint.",
            labels=("endpoint", "state"),
        )
        for name, sample in samples.items():
            in_flight.add_metric((name,), sample.in_flight)
            up.add_metric((name,), sample.up)
            tokens.add_metric((name,), sample.tokens_in_flight)
            if sample.limit_tokens is not None:
                limit_tokens.add_metric((name,), sample.limit_tokens)
            if sample.limit_requests is not None:
                limit_requests.add_metric((name,), sample.limit_requests)
            connections.add_metric((name, "idle"), sample.idle)
            connections.add_metric((name, "busy"), sample.busy)
        yield from (in_flight, up, tokens, limit_tokens, limit_requests)
        yield connections
        yield from self._collect_attempts(samples)

    def _collect_attempts(self, known: Iterable[str]) -> Iterator[Metric]:
        names = set(known)
        self._failures = Counter({k: n for k, n in self._failures.items() if k[0] in names})
        self._retries = Counter({name: self._retries[name] for name in names})
        failures = CounterMetricFamily(
            "ciuicflow_upstream_failures_total",
            "Attempts that an endpoint failed, by reason.",
            labels=("endpoint", "reason"),
        )
        for labels, count in self._failures.items():
            failures.add_metric(labels, count)
        retries = CounterMetricFamily(
            "ciuicflow_retries_total",
            "Requests sent again after this endpoint failed them.",
            labels=("endpoint",),
        )
        for name, count in self._retries.items():
            retries.add_metric((name,), count)
        yield failures
        yield retries

    def _collect_gateway(self) -> Iterator[Metric]:
        reloads = CounterMetricFamily(
            "ciuicflow_config_reloads_total",
            "Attempts to load the configuration again.",
            labels=("result",),
        )
        for result, count in self._reloads.items():
            reloads.add_metric((result,), count)
        yield reloads
        yield GaugeMetricFamily(
            "ciuicflow_client_connections",
            "Open connections of clients.",
            value=self._client_connections(),
        )
        yield CounterMetricFamily(
            "ciuicflow_log_lines_dropped_total",
            "Log lines given up because their reader was too slow.",
            value=self._log_lines_dropped(),
        )
        yield GaugeMetricFamily(
            "ciuicflow_event_loop_lag_seconds",
            "How late the event loop ran its timers, at worst in the last 15 s.",
            value=self.event_loop_lag_s,
        )
        build = GaugeMetricFamily(
            "ciuicflow_build_info", "1, with the version of the gateway.", labels=("version",)
        )
        build.add_metric((__version__,), 1)
        yield build


def _add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram
) -> None:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    cumulative = list(zip(bounds, accumulate(histogram.counts), strict=True))
    family.add_metric(labels, cumulative, histogram.total)
