"""A lane: the requests that compete for the same endpoints, and the order among them."""

from collections.abc import Sequence
from typing import Final

from ciuicflow.flowcontrol.actions import Role
from ciuicflow.flowcontrol.cost import Cost
from ciuicflow.flowcontrol.entry import Entry
from ciuicflow.flowcontrol.ledger import EndpointLedger
from ciuicflow.flowcontrol.queue import TierQueue
from ciuicflow.flowcontrol.shares import DrainMeter, TierShares
from ciuicflow.flowcontrol.tiers import TierConfig

_WHOLE: Final = ((Role.ANY,),)
_SPLIT: Final = ((Role.PREFILL, Role.DECODE),)


class Lane:
    """Queues by tier in front of one set of endpoints. Fairness and floors hold within it."""

    def __init__(self, model: str | None, tiers: Sequence[TierConfig]) -> None:
        self.model = model
        """One of the models that it is for."""
        self.queues = [TierQueue() for _ in tiers]
        self.waiting = 0
        """Entries in all queues."""
        self.blocked = False
        """The first in order found no room, and nothing has changed since."""
        self.plans: tuple[tuple[Role, ...], ...] = ()
        """The roles that a request needs, one endpoint each; the first that has room is taken."""
        self.up = False
        """Whether some endpoint is up."""
        self._ledgers: tuple[EndpointLedger, ...] = ()
        self._shares = TierShares(tiers)
        self._meters = [DrainMeter() for _ in tiers]

    @property
    def ledgers(self) -> tuple[EndpointLedger, ...]:
        """The endpoints."""
        return self._ledgers

    @ledgers.setter
    def ledgers(self, ledgers: tuple[EndpointLedger, ...]) -> None:
        self._ledgers = ledgers
        roles = {ledger.endpoint.role for ledger in ledgers}
        self.plans = (_WHOLE if Role.ANY in roles else ()) + (
            _SPLIT if roles >= {Role.PREFILL, Role.DECODE} else ()
        )
        self.up = any(ledger.endpoint.up for ledger in ledgers)
        self.blocked = False

    def serves(self, entry: Entry) -> bool:
        """Whether an endpoint is up that has not failed the entry."""
        return any(
            ledger.endpoint.up and ledger.endpoint.id not in entry.excluded
            for ledger in self._ledgers
        )

    def best_prefill_s(self, cost: Cost) -> float:
        """Predict the least time from dispatch to the first token; 0.0 while nothing is known."""
        times = [ledger.observer.prefill.predict_s(cost.prefill_tokens) for ledger in self._ledgers]
        return min(times, default=0.0)

    def urgency(self) -> tuple[int, float]:
        """Return a sort key: the highest tier that waits, and since when. Some tier must wait."""
        tier = next(tier for tier, queue in enumerate(self.queues) if queue)
        return tier, self.queues[tier].oldest().enqueued_s

    def order(self) -> list[int]:
        """Return the tiers that have work, the one that is to go next first."""
        return self._shares.order(self.queues)

    def push(self, now: float, entry: Entry) -> None:
        """Let an entry wait."""
        self.waiting += 1
        self.queues[entry.tier].push(entry)
        self._meters[entry.tier].busy(now)

    def take(self, now: float, tier: int) -> Entry:
        """Remove the first entry of a tier for dispatch, and account for it."""
        queue = self.queues[tier]
        entry = queue.first()
        assert entry is not None
        self._shares.dispatched(now, tier, entry.cost.work, self.queues)
        queue.take()
        self.waiting -= 1
        if entry.enqueued_s < now:
            self._meters[tier].dispatched(now, entry.cost.work)
        if not queue:
            self._meters[tier].idle()
        return entry

    def pass_through(self, now: float, entry: Entry) -> None:
        """Account for an entry that is dispatched without having waited: nothing else waits."""
        self._shares.dispatched(now, entry.tier, entry.cost.work, self.queues)
        self.queues[entry.tier].pass_through(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry that is not dispatched."""
        self.waiting -= 1
        self.queues[entry.tier].remove(entry)
        if not self.queues[entry.tier]:
            self._meters[entry.tier].idle()

    def drain_rate(self, now: float, tier: int) -> float | None:
        """Return the tokens per second that the tier gets while it waits; None: not known."""
        return self._meters[tier].rate(now)

    def predict_wait_s(self, now: float, tier: int, tenant: str) -> float | None:
        """Estimate how long a new request would wait; None: not known."""
        work = self.queues[tier].work_before(tenant)
        if not work:
            return 0.0
        rate = self.drain_rate(now, tier)
        return work / rate if rate else None
