"""The queue of one tier: fair between tenants in tokens, earliest deadline first inside a tenant.

Fairness is that of virtual token counters (VTC, Sheng et al., arXiv 2401.00588): the tenant that
was served least goes next, and one that comes back is lifted to the least of those that wait, so
that silence earns nothing. Heaps delete lazily and are rebuilt before garbage outweighs them.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Final

from ciuicflow.flowcontrol.actions import RequestId
from ciuicflow.flowcontrol.entry import Entry

MAX_IDLE_TENANTS: Final = 10_000
"""Counters kept of tenants that have nothing queued; the least recent are forgotten."""

_GARBAGE: Final = 16  # dead heap items that are not worth a rebuild


class _Flow:
    """One tenant's part of the queue."""

    __slots__ = ("by_arrival", "by_deadline", "counter", "length", "pushes", "tenant", "work")

    def __init__(self, tenant: str, counter: float) -> None:
        self.tenant = tenant
        self.counter = counter
        self.work = 0.0
        self.length = 0
        self.pushes = 0
        self.by_deadline: list[tuple[float, int, Entry]] = []
        self.by_arrival: list[Entry] = []

    def push(self, entry: Entry) -> None:
        entry.holder = self
        self.pushes += 1
        heappush(self.by_deadline, (entry.due_s, self.pushes, entry))
        self.by_arrival.append(entry)
        self.length += 1
        self.work += entry.cost.work

    def drop(self, entry: Entry) -> None:
        """Count an entry out; it stays in the heap as garbage."""
        entry.holder = None
        self.length -= 1
        self.work -= entry.cost.work
        if len(self.by_deadline) > 2 * self.length + _GARBAGE:
            self.by_deadline = [item for item in self.by_deadline if item[2].holder is self]
            heapify(self.by_deadline)
        if len(self.by_arrival) > 2 * self.length + _GARBAGE:
            self.by_arrival = [entry for entry in self.by_arrival if entry.holder is self]

    def first(self) -> Entry:
        while self.by_deadline[0][2].holder is not self:
            heappop(self.by_deadline)
        return self.by_deadline[0][2]

    def newest(self) -> Entry:
        while self.by_arrival[-1].holder is not self:
            self.by_arrival.pop()
        return self.by_arrival[-1]


class TierQueue:
    """Entries of one tier. All operations take O(log n), amortised."""

    def __init__(self) -> None:
        self.work = 0.0
        """Of all that is queued."""
        self._flows: dict[str, _Flow] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()  # tenant -> counter
        self._turns: list[tuple[float, int, _Flow]] = []  # by counter; stale ones differ from it
        self._turn = 0
        self._first: Entry | None = None  # None: to be looked for
        self._served = 0.0  # counter of the tenant that was served last
        self._entries: OrderedDict[RequestId, Entry] = OrderedDict()  # by arrival
        self._lengths: dict[int, dict[_Flow, None]] = {}  # flows by length
        self._longest = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tenants(self) -> int:
        """Number of tenants that have something queued."""
        return len(self._flows)

    def push(self, entry: Entry) -> None:
        """Add an entry."""
        flow = self._flows.get(entry.tenant)
        if flow is None:
            flow = self._activate(entry.tenant)
        flow.push(entry)
        self._first = None
        self._relist(flow, flow.length - 1)
        self._entries[entry.id] = entry
        self.work += entry.cost.work

    def first(self) -> Entry | None:
        """Return the entry that is to go next, without removing it."""
        if self._first is None:
            flow = self._next_flow()
            self._first = flow.first() if flow is not None else None
        return self._first

    def take(self) -> Entry:
        """Remove that entry, and charge its tenant for it. There must be one."""
        entry = self.first()
        assert entry is not None
        flow = self._flows[entry.tenant]
        self._served = flow.counter
        flow.counter += entry.cost.work
        self.remove(entry)
        if flow.length:
            self._list_turn(flow)
        return entry

    def pass_through(self, entry: Entry) -> None:
        """Charge a tenant for an entry that need not wait. The queue must be empty."""
        counter = self._lifted(entry.tenant, self._served)
        self._served = counter
        self._keep_idle(entry.tenant, counter + entry.cost.work)

    def remove(self, entry: Entry) -> None:
        """Remove any entry of this queue; its tenant is not charged."""
        self._first = None
        del self._entries[entry.id]
        self.work -= entry.cost.work
        flow = self._flows[entry.tenant]
        flow.drop(entry)
        self._relist(flow, flow.length + 1)
        if not flow.length:
            self._retire(flow)

    def charge(self, tenant: str, work: float) -> None:
        """Correct what a tenant was charged; negative gives back."""
        flow = self._flows.get(tenant)
        if flow is not None:
            flow.counter += work
            self._first = None
            self._list_turn(flow)
        elif tenant in self._idle:
            self._idle[tenant] += work

    def oldest(self) -> Entry:
        """Return the entry that has waited longest. There must be one."""
        return next(iter(self._entries.values()))

    def newest(self) -> Entry:
        """Return the entry that came last. There must be one."""
        return next(reversed(self._entries.values()))

    def newest_of_longest(self) -> tuple[Entry, int]:
        """Return the newest entry of the tenant that has most queued, and how many it has.

        Dropping there, and not at the tail, keeps room for the others (as FQ-CoDel does,
        RFC 8290 section 4.1.2). There must be an entry.
        """
        flow = next(iter(self._lengths[self._longest]))
        return flow.newest(), flow.length

    def length_of(self, tenant: str) -> int:
        """Return how many entries a tenant has queued."""
        flow = self._flows.get(tenant)
        return flow.length if flow is not None else 0

    def work_before(self, tenant: str) -> float:
        """Estimate the work that will be served before what this tenant would add now."""
        if not self._entries:
            return 0.0
        flow = self._flows.get(tenant)
        own = flow.work if flow is not None else 0.0
        one = self.work / len(self._entries)
        return min(self.work, (own + one) * len(self._flows))

    def entries(self) -> list[Entry]:
        """Return all entries, oldest first."""
        return list(self._entries.values())

    def _activate(self, tenant: str) -> _Flow:
        nearest = self._next_flow()
        least = self._served if nearest is None else nearest.counter
        flow = _Flow(tenant, self._lifted(tenant, least))
        self._flows[tenant] = flow
        self._list_turn(flow)
        return flow

    def _retire(self, flow: _Flow) -> None:
        del self._flows[flow.tenant]
        self._keep_idle(flow.tenant, flow.counter)

    def _lifted(self, tenant: str, least: float) -> float:
        """Return the counter of a tenant that comes back."""
        return max(least, self._idle.pop(tenant, least))

    def _keep_idle(self, tenant: str, counter: float) -> None:
        self._idle[tenant] = counter
        if len(self._idle) > MAX_IDLE_TENANTS:
            self._idle.popitem(last=False)

    def _list_turn(self, flow: _Flow) -> None:
        self._turn += 1
        heappush(self._turns, (flow.counter, self._turn, flow))
        if len(self._turns) > 2 * len(self._flows) + _GARBAGE:
            self._turns = [
                (flow.counter, turn, flow)
                for turn, flow in enumerate(self._flows.values(), self._turn)
            ]
            self._turn += len(self._turns)
            heapify(self._turns)

    def _next_flow(self) -> _Flow | None:
        turns = self._turns
        while turns:
            counter, _, flow = turns[0]
            if flow.length and counter == flow.counter:
                return flow
            heappop(turns)
        return None

    def _relist(self, flow: _Flow, before: int) -> None:
        """Keep flows listed by length, which changes by one at a time."""
        lengths = self._lengths
        if before:
            peers = lengths[before]
            del peers[flow]
            if not peers:
                del lengths[before]
        if flow.length:
            lengths.setdefault(flow.length, {})[flow] = None
        if flow.length > self._longest:
            self._longest = flow.length
        elif self._longest not in lengths:
            self._longest -= 1
