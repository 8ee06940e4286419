"""Which transfer of a path may send its next quantum.

Higher tiers go first, in a tier the earliest deadline. A lower tier that has something to send gets
its floor, a part of all bytes sent, by a deficit counter; and it is promoted for one quantum when
it has waited for too long, as long as promotions stay below a part of the bytes. What a tier does
not use is lent out.
"""

from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from ciuicflow.kvtransfer.settings import OrderConfig

_GARBAGE: Final = 16  # dead heap items that are not worth a rebuild


class Entry(msgspec.Struct, eq=False):
    """A transfer's place in the order."""

    id: str
    rank: int
    floor: float
    deadline_s: float
    listed: bool = False
    """Whether it has something to send."""


class _Tier:
    """The transfers of one rank."""

    __slots__ = ("_heap", "_length", "_pushes", "credit", "floor", "rank", "since_s")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.floor = 0.0
        self.credit = 0.0
        self.since_s = 0.0  # when it last was served, or began to wait
        self._heap: list[tuple[float, int, Entry]] = []
        self._pushes = 0
        self._length = 0

    @property
    def waits(self) -> bool:
        return self._length > 0

    def push(self, entry: Entry) -> None:
        entry.listed = True
        self._length += 1
        self._pushes += 1
        heappush(self._heap, (entry.deadline_s, self._pushes, entry))
        if len(self._heap) > 2 * self._length + _GARBAGE:
            self._heap = list({item[2].id: item for item in self._heap if item[2].listed}.values())
            heapify(self._heap)

    def drop(self, entry: Entry) -> None:
        """Count an entry out; it stays in the heap as garbage."""
        entry.listed = False
        self._length -= 1

    def first(self) -> Entry:
        while not self._heap[0][2].listed:
            heappop(self._heap)
        return self._heap[0][2]


class SendOrder:
    """Orders the transfers that have something to send."""

    def __init__(self, config: OrderConfig, quantum_bytes: int) -> None:
        self._config = config
        self._quantum_bytes = quantum_bytes
        self._tiers: list[_Tier] = []  # by rank
        self._promotion: float = quantum_bytes  # bytes that promotions may take now
        self._turn: tuple[_Tier, bool, bool] | None = None  # tier, by promotion, by floor

    def push(self, now: float, entry: Entry) -> None:
        """A transfer has something to send."""
        if entry.listed:
            return
        tier = self._tier(entry.rank)
        if not tier.waits:
            tier.since_s = now
        tier.floor = max(entry.floor, self._config.least_floor)
        tier.push(entry)

    def drop(self, entry: Entry) -> None:
        """A transfer has nothing to send any more."""
        if entry.listed:
            self._tier(entry.rank).drop(entry)

    def next(self, now: float) -> Entry | None:
        """Return whose turn it is."""
        waiting = [tier for tier in self._tiers if tier.waits]
        if not waiting:
            return None
        tier, promoted, floor = waiting[0], False, False
        if len(waiting) > 1:
            tier, promoted, floor = self._choose(now, waiting)
        self._turn = tier, promoted, floor
        return tier.first()

    def _choose(self, now: float, waiting: list[_Tier]) -> tuple[_Tier, bool, bool]:
        lower = waiting[1:]
        longest = min(lower, key=_since)
        late = now - longest.since_s >= self._config.promote_after_s
        if late and self._promotion >= self._quantum_bytes:
            return longest, True, False
        richest = max(lower, key=_credit)
        if richest.credit >= self._quantum_bytes:
            return richest, False, True
        return waiting[0], False, False

    def charge(self, now: float, size: int) -> None:
        """Whose turn `next` said it was has sent so many bytes."""
        assert self._turn is not None
        served, promoted, floor = self._turn
        most = 2.0 * self._quantum_bytes  # what a tier can save up
        for tier in self._tiers:
            if tier.waits:
                tier.credit = min(tier.credit + tier.floor * size, most)
        if promoted:
            self._promotion -= size
        elif floor:
            served.credit -= size
        else:  # what it gets anyway counts against its floor
            served.credit = min(served.credit, max(served.credit - size, 0.0))
        earned = self._config.promoted_share * size
        self._promotion = min(self._promotion + earned, self._quantum_bytes)
        served.since_s = now

    def _tier(self, rank: int) -> _Tier:
        for tier in self._tiers:
            if tier.rank == rank:
                return tier
        tier = _Tier(rank)
        self._tiers = [tier for tier in self._tiers if tier.waits]  # no more than are in use
        self._tiers.append(tier)
        self._tiers.sort(key=_rank)
        return tier


def _since(tier: _Tier) -> float:
    return tier.since_s


def _credit(tier: _Tier) -> float:
    return tier.credit


def _rank(tier: _Tier) -> int:
    return tier.rank
