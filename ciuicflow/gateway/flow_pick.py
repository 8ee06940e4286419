"""Which of the endpoints that have room takes an opted-in request: as `routing` says."""

from collections.abc import Callable, Sequence

from ciuicflow.endpoint import EndpointId, EndpointState
from ciuicflow.flowcontrol.entry import Entry
from ciuicflow.flowcontrol.ledger import EndpointLedger
from ciuicflow.routing.base import RoutingPolicy


class FlowPick:
    """A Pick of flow control, by a routing policy.

    Without a policy the endpoint goes first that is least full by its own learnt limits: those of
    unlike engines differ. Ties are taken in turn.
    """

    def __init__(
        self, policy: RoutingPolicy | None, state: Callable[[EndpointId], EndpointState]
    ) -> None:
        self.policy = policy
        self._state = state
        self._turn = -1

    def __call__(self, entry: Entry, ledgers: Sequence[EndpointLedger], /) -> tuple[int, str]:
        """See Pick."""
        if len(ledgers) == 1:
            return 0, "only_room"
        if self.policy is None:
            return self._least_full(ledgers)
        states = [self._state(ledger.endpoint.id) for ledger in ledgers]
        choice = self.policy.pick(states)
        return states.index(choice.endpoint), choice.reason

    def _least_full(self, ledgers: Sequence[EndpointLedger]) -> tuple[int, str]:
        self._turn += 1
        count = len(ledgers)
        order = [(self._turn + step) % count for step in range(count)]
        best = min(order, key=lambda index: ledgers[index].load)
        return best, f"least_load={ledgers[best].load:.2f}"
