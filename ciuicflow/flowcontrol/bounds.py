"""How much may be queued, and who goes when it is too much."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ciuicflow.flowcontrol.entry import Entry
from ciuicflow.flowcontrol.lanes import Lane
from ciuicflow.flowcontrol.tiers import FlowConfig, TierConfig
from ciuicflow.request import Outcome

Verdict = tuple[Entry, Outcome]


class QueueBounds:
    """Counts queued entries and bytes, by tier and by tenant, over all lanes."""

    def __init__(self, config: FlowConfig, tiers: Sequence[TierConfig]) -> None:
        self.entries = [0] * len(tiers)
        """Queued entries by tier."""
        self.bytes = [0] * len(tiers)
        """Bytes of their bodies."""
        self._config = config
        self._tiers = tiers
        self._tenant_bytes: Counter[str] = Counter()

    def add(self, entry: Entry) -> None:
        """Count an entry in."""
        self.entries[entry.tier] += 1
        self.bytes[entry.tier] += entry.body_bytes
        self._tenant_bytes[entry.tenant] += entry.body_bytes

    def remove(self, entry: Entry) -> None:
        """Count an entry out."""
        self.entries[entry.tier] -= 1
        self.bytes[entry.tier] -= entry.body_bytes
        left = self._tenant_bytes[entry.tenant] - entry.body_bytes
        if left:
            self._tenant_bytes[entry.tenant] = left
        else:
            del self._tenant_bytes[entry.tenant]

    def check(self, entry: Entry, lanes: Iterable[Lane]) -> Verdict | None:
        """Return who must go for this entry, which came last, to stay; None: no one.

        The newest of the lowest tier goes for a higher one; within a tier, the newest of the
        tenant that has most queued goes for one that has less.
        """
        tier, config = entry.tier, self._config
        excess = sum(self.bytes) - config.queue_bytes
        if excess > 0 or self._tenant_bytes[entry.tenant] > config.queue_bytes / 2:
            if excess <= 0 or sum(self.bytes[tier + 1 :]) < excess:
                return entry, Outcome.QUEUE_BYTES
            return self._lowest(tier, lanes) or (entry, Outcome.QUEUE_BYTES)
        if self.entries[tier] > self._tiers[tier].queue_entries:
            return self._heaviest(entry, lanes)
        if sum(self.entries) > config.queue_entries:
            return self._lowest(tier, lanes) or self._heaviest(entry, lanes)
        return None

    def _lowest(self, above: int, lanes: Iterable[Lane]) -> Verdict | None:
        for tier in range(len(self._tiers) - 1, above, -1):
            if self.entries[tier]:
                newest = [lane.queues[tier].newest() for lane in lanes if lane.queues[tier]]
                victim = max(newest, key=lambda entry: entry.seq)
                return victim, Outcome.DISPLACED
        return None

    def _heaviest(self, entry: Entry, lanes: Iterable[Lane]) -> Verdict:
        queues = [lane.queues[entry.tier] for lane in lanes]
        victim, length = max(queues, key=len).newest_of_longest()
        own = max(queue.length_of(entry.tenant) for queue in queues)
        if victim.tenant == entry.tenant or length <= own:
            return entry, Outcome.QUEUE_FULL
        return victim, Outcome.DISPLACED
