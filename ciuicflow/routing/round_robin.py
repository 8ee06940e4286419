"""Round robin: each endpoint in turn. For endpoints of equal speed and requests of equal size."""

from collections.abc import Sequence

from ciuicflow.endpoint import EndpointState
from ciuicflow.routing.base import Choice


class RoundRobin:
    """Takes the endpoints in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def pick(self, endpoints: Sequence[EndpointState]) -> Choice:
        """See RoutingPolicy."""
        self._turn += 1
        return Choice(endpoints[self._turn % len(endpoints)], "round_robin")
