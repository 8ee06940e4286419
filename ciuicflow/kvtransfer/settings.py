"""Settings of KV transfers: strict immutable records, defaults included."""

from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class BatchSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of a micro-batch in bytes. ValueError if they are crossed."""

    least: Size = 256 << 10
    """Smaller ones only when nothing more is ready in the same place."""
    most: Size = 8 << 20
    """Larger ones only when a single block is."""

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least: {self.least}; expected at most {self.most}")


class OrderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tiers of a path share it."""

    least_floor: Share = 0.02
    """Floor of tiers whose tickets name a smaller one: without any, one can starve."""
    promote_after_s: Seconds = 0.01
    promoted_share: Share = 0.05


class SessionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What senders and receivers both need."""

    heartbeat_s: Seconds = 1.0
    """Longest silence of our own."""
    dead_after_s: Seconds = 5.0
    """Silence after which the peer is taken for dead."""
    answer_s: Seconds = 10.0
    """How long the peer may take to answer a commit or an abort."""
    transfers: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    """Bound on the transfers under way."""


class SenderConfig(SessionConfig, frozen=True, kw_only=True):
    """What senders need besides."""

    quantum_bytes: Size = 1 << 20
    """Largest unit on the wire, unless a block is larger: what a higher tier waits behind."""
    quanta: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 48
    """How many the transport may hold at once, whatever their size; it has a bound as well."""
    batch: BatchSizes = BatchSizes()
    service_s: Seconds = 0.001
    """How long a micro-batch should take at the path's rate."""
    order: OrderConfig = OrderConfig()
    ack_timeout_s: Seconds = 1.0
    """Silence of acknowledgements that the congestion controller is told of."""
    stall_s: Seconds = 10.0
    """Silence of acknowledgements after which the session is given up."""
