"""The engine adapter interface, and what an engine's page tells."""

from enum import Enum
from typing import Final, Protocol

import msgspec


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one page said; None: it did not say."""

    running: int | None = None
    """Requests in the batch, summed over the engine's ranks."""
    waiting: int | None = None
    """Requests that wait for room in it."""
    kv_usage: float | None = None
    """Of the fullest rank, 0.0 to 1.0."""


UNKNOWN: Final = EngineReport()


class PriorityOrder(Enum):
    """Which end of an engine's `priority` field is served first."""

    LOWER_FIRST = "lower_first"
    HIGHER_FIRST = "higher_first"

    def value_of(self, rank: int, ranks: int) -> int:
        """Convert a tier's rank (0 is first, of `ranks`) to a value of 0 or more."""
        return rank if self is PriorityOrder.LOWER_FIRST else ranks - 1 - rank


class EngineAdapter(Protocol):
    """Knows one kind of engine."""

    name: str
    metrics_path: str | None
    """Where its page is; None: it has none."""
    priority_order: PriorityOrder | None
    """How its `priority` field is read; None: it has none.

    Whether to send the field is for the operator to say: vLLM refuses it unless it runs with
    priority scheduling, and SGLang can be told to refuse or to reverse it.
    """

    def recognises(self, page: bytes) -> bool:
        """Whether a page is this engine's."""

    def parse(self, page: bytes) -> EngineReport:
        """Read a page; what is missing or makes no sense is None. Never raises."""
