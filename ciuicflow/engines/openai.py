"""Any server that speaks the OpenAI API: nothing is known of its inside."""

from ciuicflow.engines.base import UNKNOWN, EngineReport, PriorityOrder


class OpenAiAdapter:
    """Asks nothing and sends nothing: the gateway's own ledger is enough."""

    name = "openai"
    metrics_path: str | None = None
    priority_order: PriorityOrder | None = None

    def recognises(self, page: bytes) -> bool:
        """See EngineAdapter."""
        return True

    def parse(self, page: bytes) -> EngineReport:
        """See EngineAdapter."""
        return UNKNOWN
