"""SGLang, started with --enable-metrics."""

from ciuicflow.engines.base import EngineReport, PriorityOrder
from ciuicflow.engines.exposition import find_series, has_prefix, highest_part


class SglangAdapter:
    """Reads `sglang:` gauges; one series per rank, and per priority where that is on."""

    name = "sglang"
    metrics_path: str | None = "/metrics"
    priority_order: PriorityOrder | None = PriorityOrder.HIGHER_FIRST

    def recognises(self, page: bytes) -> bool:
        """See EngineAdapter."""
        return has_prefix(page, b"sglang:")

    def parse(self, page: bytes) -> EngineReport:
        """See EngineAdapter."""
        return EngineReport(
            running=_total(page, b"sglang:num_running_reqs"),
            waiting=_total(page, b"sglang:num_queue_reqs"),
            kv_usage=highest_part(page, b"sglang:token_usage"),
        )


def _total(page: bytes, name: bytes) -> int | None:
    """Sum over ranks and priorities.

    Where a series with an empty priority stands beside others, it is their sum already.
    """
    series = list(find_series(page, name))
    sums = [item for item in series if not item.labels.get(b"priority")]
    values = [item.value for item in sums or series]
    return round(sum(values)) if values else None
