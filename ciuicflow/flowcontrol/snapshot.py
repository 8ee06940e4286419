"""The state of flow control at a moment, for /flow/state and the gauges."""

from collections.abc import Mapping, Sequence
from math import isfinite

import msgspec

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.bounds import QueueBounds
from ciuicflow.flowcontrol.lanes import Lane
from ciuicflow.flowcontrol.ledger import EndpointLedger
from ciuicflow.flowcontrol.tiers import TierConfig
from ciuicflow.request import Outcome


class TierState(msgspec.Struct, frozen=True):
    """One tier's queue, over all lanes."""

    name: str
    queued: int
    queued_bytes: int
    oldest_wait_s: float
    drain_tokens_per_s: float | None
    """What it gets while it waits; None: it was never seen waiting."""
    dispatched: int
    """Requests that were sent on, since the start."""
    outcomes: dict[str, int]
    """Requests by how they left the queue otherwise, since the start."""


class LedgerState(msgspec.Struct, frozen=True):
    """One endpoint."""

    id: EndpointId
    up: bool
    in_flight: int
    tokens_in_flight: int
    bypass_in_flight: int
    limit_requests: float
    limit_tokens: float | None
    """None: the engine was never seen full."""
    limit_prefill_tokens: float
    ttft_s: float
    itl_s: float


class FlowState(msgspec.Struct, frozen=True):
    """All of it."""

    tiers: tuple[TierState, ...]
    endpoints: tuple[LedgerState, ...]


def tier_state(
    now: float,
    index: int,
    tier: TierConfig,
    lanes: Sequence[Lane],
    bounds: QueueBounds,
    dispatched: int,
    outcomes: Mapping[tuple[str, Outcome], int],
) -> TierState:
    """Read one tier's queues."""
    waiting = [lane.queues[index] for lane in lanes if lane.queues[index]]
    since_s = min((queue.oldest().enqueued_s for queue in waiting), default=now)
    rates = [lane.drain_rate(now, index) for lane in lanes]
    known = [rate for rate in rates if rate is not None]
    return TierState(
        name=tier.name,
        queued=bounds.entries[index],
        queued_bytes=bounds.bytes[index],
        oldest_wait_s=now - since_s,
        drain_tokens_per_s=sum(known) if known else None,
        dispatched=dispatched,
        outcomes={
            outcome.value: count for (of, outcome), count in outcomes.items() if of == tier.name
        },
    )


def ledger_state(ledger: EndpointLedger) -> LedgerState:
    """Read one endpoint's ledger."""
    limit, observer = ledger.limit, ledger.observer
    return LedgerState(
        id=ledger.endpoint.id,
        up=ledger.endpoint.up,
        in_flight=ledger.requests,
        tokens_in_flight=ledger.tokens,
        bypass_in_flight=ledger.bypass_requests,
        limit_requests=limit.requests,
        limit_tokens=limit.tokens if isfinite(limit.tokens) else None,
        limit_prefill_tokens=limit.prefill_tokens,
        ttft_s=observer.ttft_s,
        itl_s=observer.itl_s,
    )
