"""When an endpoint counts as down and when it counts as up again. Pure.

Live traffic and probes feed the same counters. What tells nothing about the endpoint (4xx, 429,
a client that left) must not be reported here at all.
"""

from typing import Annotated

import msgspec

from ciuicflow.endpoint import EndpointState

PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Threshold = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class HealthPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How endpoints are probed, and how many results in a row change their state."""

    path: Annotated[str, msgspec.Meta(pattern=r"^/[!-~]*$")] = "/health"
    interval_s: PositiveSeconds = 2.0
    timeout_s: PositiveSeconds = 2.0
    fail_threshold: Threshold = 3
    recover_threshold: Threshold = 2


def record_failure(state: EndpointState, policy: HealthPolicy) -> bool:
    """Count a failure (no connection, a reset before the first byte, 5xx). True: it went down."""
    state.failures += 1
    state.successes = 0
    if state.up and state.failures >= policy.fail_threshold:
        state.up = False
        return True
    return False


def record_live_success(state: EndpointState) -> bool:
    """Count an answer to live traffic, which heals at once. True: it came up."""
    state.failures = 0
    came_up = not state.up
    state.up = True
    return came_up


def record_probe_success(state: EndpointState, policy: HealthPolicy) -> bool:
    """Count a good probe. True: it came up.

    While the endpoint is up, a good probe does not clear the failures of live traffic: an engine
    that answers /health and fails every request must still go down.
    """
    if state.up:
        return False
    state.successes += 1
    if state.successes < policy.recover_threshold:
        return False
    state.failures = 0
    state.up = True
    return True
