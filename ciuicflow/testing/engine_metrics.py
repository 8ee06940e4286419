"""/metrics of a fake engine, under vLLM's names."""

from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ciuicflow.testing.engine_model import EngineSnapshot

_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip


class Durations:
    """A histogram of seconds. Plain counts: it is fed once per token."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        """The histogram in exposition form."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*_BOUNDS_S, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([model], buckets, self._sum_s)
        return family


class EngineMetrics(Collector):
    """What one engine server has counted, read from the model when a scrape asks."""

    def __init__(self, model: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self.time_to_first_token = Durations()
        self.inter_token_latency = Durations()
        self.e2e_latency = Durations()
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self._model = model
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def expose(self) -> bytes:
        """The page in Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All families, for the registry."""
        state = self._snapshot()
        yield self._gauge("num_requests_running", "Sequences in the batch.", state.running)
        yield self._gauge("num_requests_waiting", "Sequences in the queue.", state.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV cache in use, 1 is full.", state.kv_usage)
        yield self._counter("prompt_tokens", "Prompt tokens.", state.prompt_tokens)
        yield self._counter("generation_tokens", "Output tokens.", state.generation_tokens)
        yield self._counter("num_preemptions", "Preempted sequences.", state.preemptions)
        yield self._counter(
            "prefix_cache_queries", "Tokens looked up.", state.prefix_queries_tokens
        )
        yield self._counter("prefix_cache_hits", "Tokens found.", state.prefix_hits_tokens)
        yield self._successes()
        for name, durations in (
            ("time_to_first_token_seconds", self.time_to_first_token),
            ("inter_token_latency_seconds", self.inter_token_latency),
            ("e2e_request_latency_seconds", self.e2e_latency),
        ):
            yield durations.family(f"vllm:{name}", "As vLLM measures it.", self._model)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _successes(self) -> Metric:
        labels = ["model_name", "finished_reason"]
        family = CounterMetricFamily("vllm:request_success", "Requests ended.", labels=labels)
        for reason, count in self.finished.items():
            family.add_metric([self._model, reason], count)
        return family
