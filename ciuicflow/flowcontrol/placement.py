"""What goes next from a lane, and to which of the endpoints that have room."""

from collections.abc import Sequence
from typing import Protocol

from ciuicflow.flowcontrol.actions import Leg, Role
from ciuicflow.flowcontrol.cost import Cost
from ciuicflow.flowcontrol.entry import Entry, Placed
from ciuicflow.flowcontrol.lanes import Lane
from ciuicflow.flowcontrol.ledger import EndpointLedger


class Pick(Protocol):
    """Chooses among endpoints that have room and serve the model; there is at least one."""

    def __call__(self, entry: Entry, ledgers: Sequence[EndpointLedger], /) -> tuple[int, str]:
        """Return the index of the choice, and the reason for the log line."""


def least_load(_: Entry, ledgers: Sequence[EndpointLedger], /) -> tuple[int, str]:
    """Choose the endpoint that is least full by its own limits."""
    if len(ledgers) == 1:
        return 0, "only_room"
    loads = [ledger.load for ledger in ledgers]
    index = loads.index(min(loads))
    return index, f"least_load={loads[index]:.2f}"


class Placement:
    """Finds room for the first in order, and for nothing behind it.

    A small request could go where a large one does not fit, but then the large one never would.
    """

    def __init__(self, pick: Pick, headroom: float) -> None:
        self._pick = pick
        self._headroom = headroom

    def share(self, entry: Entry) -> float:
        """Return the part of the limits that an entry may fill."""
        return 1.0 - self._headroom if entry.tier else 1.0

    def next(self, now: float, lane: Lane, ledgers: Sequence[EndpointLedger]) -> Placed | None:
        """Return what goes next; None: there is no room for it among `ledgers`."""
        for position, tier in enumerate(lane.order()):
            # Behind one that headroom holds back, only the first tier may go.
            if position and (tier or not self._headroom):
                continue
            entry = lane.queues[tier].first()
            assert entry is not None
            placed = self.place(now, lane, entry, ledgers)
            if placed is not None:
                return placed
        return None

    def place(
        self, now: float, lane: Lane, entry: Entry, ledgers: Sequence[EndpointLedger]
    ) -> Placed | None:
        """Find an endpoint with room for each role of a plan; all or none."""
        for roles in lane.plans:
            legs: list[Leg] = []
            reasons: list[str] = []
            for role in roles:
                cost = _part(entry.cost, role)
                among = ledgers if len(roles) == 1 else lane.ledgers
                free = self._free(now, entry, cost, role, among)
                if not free:
                    break
                index, reason = self._pick(entry, free)
                legs.append(Leg(free[index].endpoint.id, role, cost))
                reasons.append(reason)
            else:
                return Placed(entry, tuple(legs), " ".join(reasons))
        return None

    def _free(
        self, now: float, entry: Entry, cost: Cost, role: Role, ledgers: Sequence[EndpointLedger]
    ) -> list[EndpointLedger]:
        share = self.share(entry)
        return [
            ledger
            for ledger in ledgers
            if ledger.endpoint.role is role
            and ledger.endpoint.up
            and ledger.endpoint.id not in entry.excluded
            and ledger.has_room(now, cost, role, share)
        ]


def _part(cost: Cost, role: Role) -> Cost:
    """Return what of a request falls to an endpoint of this role."""
    if role is Role.ANY:
        return cost
    if role is Role.PREFILL:
        return Cost(cost.prefill_tokens, cost.prefill_tokens, cost.prefill_tokens)
    return Cost(cost.work - cost.prefill_tokens, 0, cost.held_tokens)
