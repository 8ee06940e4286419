"""Which tier goes next: the highest one, unless a lower one is due its floor. Pure.

Each tier with work earns its share of every dispatch and pays for its own. Service above the
floor is remembered for a while, so that a burst of a higher tier need not be interleaved with a
tier that was well served just before it: with floors of 0.3 in sum, that took a third off gold's
P99 time to first token at 2x overload.
"""

from collections.abc import Sequence
from math import exp
from typing import Final

from ciuicflow.flowcontrol.queue import TierQueue
from ciuicflow.flowcontrol.tiers import TierConfig

MEMORY_S: Final = 10.0
"""How long service above the floor is remembered, and the horizon of drain rates."""

AGED_AFTER: Final = 0.5
"""A tier is aged when its oldest entry has waited for this part of the tier's longest wait."""


class DrainMeter:
    """Tokens per second that a queue gets while it has work, over the last MEMORY_S or so."""

    def __init__(self) -> None:
        self._work = 0.0
        self._busy_s = 0.0
        self._since_s: float | None = None  # start of the open busy interval

    def busy(self, now: float) -> None:
        """The queue has work from now on, if it had none."""
        if self._since_s is None:
            self._since_s = now

    def idle(self) -> None:
        """The queue has become empty."""
        self._since_s = None

    def dispatched(self, now: float, work: float) -> None:
        """Work that had waited left the queue."""
        passed_s = now - self._since_s if self._since_s is not None else 0.0
        kept = exp(-passed_s / MEMORY_S)
        self._work = self._work * kept + work
        self._busy_s = self._busy_s * kept + passed_s
        self._since_s = now

    def rate(self, now: float) -> float | None:
        """Return tokens per second; None as long as the queue was never seen waiting."""
        open_s = now - self._since_s if self._since_s is not None else 0.0
        busy_s = self._busy_s + open_s
        return self._work / busy_s if busy_s > 0 else None


class TierShares:
    """Keeps the accounts of the tiers that compete for the same endpoints."""

    def __init__(self, tiers: Sequence[TierConfig]) -> None:
        self._tiers = tiers
        self._entitled = [i for i, tier in enumerate(tiers) if tier.floor or tier.ageing_share]
        self._credits = [0.0] * len(tiers)
        self._recent = 0.0  # work of the last MEMORY_S, or so
        self._recent_s = 0.0

    def order(self, queues: Sequence[TierQueue]) -> list[int]:
        """Return the tiers that have work, the one that is to go next first."""
        waiting = [tier for tier, queue in enumerate(queues) if queue]
        due, most = -1, 0.0
        for tier in waiting[1:]:
            credit = self._credits[tier]
            if credit > most and credit >= _next_work(queues[tier]):
                due, most = tier, credit
        if due >= 0:
            waiting.remove(due)
            waiting.insert(0, due)
        return waiting

    def dispatched(self, now: float, tier: int, work: float, queues: Sequence[TierQueue]) -> None:
        """Charge a dispatch to its tier; call before the entry leaves its queue."""
        self._recent = self._recent * exp((self._recent_s - now) / MEMORY_S) + work
        self._recent_s = now
        for index in self._entitled:
            queue = queues[index]
            if not queue:
                self._credits[index] = 0.0
                continue
            bank = self._tiers[index].floor * self._recent
            credit = self._credits[index] + self._share(now, index, queue) * work
            if index == tier:
                credit -= work
            if credit > bank:
                # Bounded above too: what headroom keeps from a tier is not owed to it later.
                credit = min(credit, bank + _next_work(queue))
            self._credits[index] = max(-bank, credit)

    def _share(self, now: float, tier: int, queue: TierQueue) -> float:
        config = self._tiers[tier]
        if not config.ageing_share:
            return config.floor
        waited_s = now - queue.oldest().enqueued_s
        aged = waited_s > AGED_AFTER * config.max_wait_s
        return config.floor + (config.ageing_share if aged else 0.0)


def _next_work(queue: TierQueue) -> float:
    first = queue.first()
    return first.cost.work if first is not None else 0.0
