"""Least load: the endpoint with the fewest requests in flight; ties in turn."""

from collections.abc import Sequence

from ciuicflow.endpoint import EndpointState
from ciuicflow.routing.base import Choice


class LeastLoad:
    """Takes the endpoint with the fewest requests in flight by the gateway's own ledger."""

    def __init__(self) -> None:
        self._turn = -1

    def pick(self, endpoints: Sequence[EndpointState]) -> Choice:
        """See RoutingPolicy."""
        # Ties in turn: always the first would send all of a quiet gateway's work to one endpoint.
        self._turn += 1
        start = self._turn % len(endpoints)
        best = endpoints[start]
        for endpoint in (*endpoints[start + 1 :], *endpoints[:start]):
            if endpoint.in_flight < best.in_flight:
                best = endpoint
        return Choice(best, f"least_load={best.in_flight}")
