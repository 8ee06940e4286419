"""llama.cpp's server, started with --metrics."""

from ciuicflow.engines.base import EngineReport, PriorityOrder
from ciuicflow.engines.exposition import has_prefix, highest_part, total


class LlamaCppAdapter:
    """Reads `llamacpp:` gauges; it has slots, and requests beyond them are deferred."""

    name = "llamacpp"
    metrics_path: str | None = "/metrics"
    priority_order: PriorityOrder | None = None

    def recognises(self, page: bytes) -> bool:
        """See EngineAdapter."""
        return has_prefix(page, b"llamacpp:")

    def parse(self, page: bytes) -> EngineReport:
        """See EngineAdapter."""
        return EngineReport(
            running=total(page, b"llamacpp:requests_processing"),
            waiting=total(page, b"llamacpp:requests_deferred"),
            kv_usage=highest_part(page, b"llamacpp:kv_cache_usage_ratio"),
        )
