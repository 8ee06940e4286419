"""The routing policies by name."""

import random
from collections.abc import Callable
from typing import Final

from ciuicflow.routing.base import RoutingPolicy
from ciuicflow.routing.least_load import LeastLoad
from ciuicflow.routing.power_of_two import PowerOfTwo
from ciuicflow.routing.round_robin import RoundRobin

POLICIES: Final[dict[str, Callable[[random.Random], RoutingPolicy]]] = {
    "round_robin": lambda _rng: RoundRobin(),
    "least_load": lambda _rng: LeastLoad(),
    "power_of_two": PowerOfTwo,
}
