"""One request's part at an endpoint, as the ledger follows it."""

import msgspec

from ciuicflow.flowcontrol.cost import Cost


class Flight(msgspec.Struct, eq=False):
    """One request's part at an endpoint."""

    cost: Cost
    itl_target_s: float
    placed_s: float
    share: float
    """The part of the limits that it might fill."""
    streams: bool
    """Its tokens will be seen."""
    lines_up: bool
    """It stands in line until its first token."""
    expected_tokens: int
    """Of its answer, by its cost."""
    alone: bool = False
    """Nothing was in line when it came."""
    front_s: float | None = None
    """Since when nothing stands before it."""
    serving: bool = False
    last_s: float = 0.0
    """When its last token came."""
    step: int = 0
    """The engine's, when its last token came."""
    tokens: int = 0
    """Put out so far."""
