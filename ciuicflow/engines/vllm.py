"""vLLM, and servers that use its metric names."""

from ciuicflow.engines.base import EngineReport, PriorityOrder
from ciuicflow.engines.exposition import find_series, has_prefix, highest_part, total


class VllmAdapter:
    """Reads `vllm:` gauges; one series per engine core and model."""

    name = "vllm"
    metrics_path: str | None = "/metrics"
    priority_order: PriorityOrder | None = PriorityOrder.LOWER_FIRST

    def recognises(self, page: bytes) -> bool:
        """See EngineAdapter."""
        return has_prefix(page, b"vllm:")

    def parse(self, page: bytes) -> EngineReport:
        """See EngineAdapter."""
        return EngineReport(
            running=total(page, b"vllm:num_requests_running"),
            waiting=_waiting(page),
            kv_usage=highest_part(page, b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        )


def _waiting(page: bytes) -> int | None:
    """Return who waits for room: requests deferred for other reasons would wait in any engine."""
    reasons = [
        series
        for series in find_series(page, b"vllm:num_requests_waiting_by_reason")
        if series.labels.get(b"reason") == b"capacity"
    ]
    if reasons:
        return round(sum(series.value for series in reasons))
    return total(page, b"vllm:num_requests_waiting")
