"""Power of two choices: the less loaded of two random endpoints (Mitzenmacher 2001).

With many endpoints or several gateways it avoids the herd that least load sends to one endpoint.
"""

import random
from collections.abc import Sequence

from ciuicflow.endpoint import EndpointState
from ciuicflow.routing.base import Choice


class PowerOfTwo:
    """Draws two endpoints and takes the one with fewer requests in flight."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, endpoints: Sequence[EndpointState]) -> Choice:
        """See RoutingPolicy."""
        if len(endpoints) == 1:
            return Choice(endpoints[0], "only")
        first, second = self._rng.sample(endpoints, 2)
        best, other = (first, second) if first.in_flight <= second.in_flight else (second, first)
        return Choice(best, f"power_of_two={best.in_flight}<={other.in_flight}")
