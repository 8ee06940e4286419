"""The routing policy interface, and which endpoints a policy may choose from. Pure."""

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from ciuicflow.endpoint import EndpointId, EndpointState


class Choice(msgspec.Struct, frozen=True, gc=False):
    """An endpoint and why it was chosen; the reason is in the request's log line."""

    endpoint: EndpointState
    reason: str


class RoutingPolicy(Protocol):
    """Chooses among endpoints that can all take the request."""

    def pick(self, endpoints: Sequence[EndpointState]) -> Choice:
        """Choose one of `endpoints`, of which there is at least one."""


class UnknownModel(LookupError):
    """No endpoint serves the model, and all are known."""


def eligible(
    endpoints: Sequence[EndpointState],
    model: str | None = None,
    excluded: Collection[EndpointId] = (),
) -> list[EndpointState]:
    """Return the endpoints that may take a request for `model`; empty: none is left.

    Endpoints that are known to serve the model come before those of which nothing is known, and
    those that are up before those that are down: the last ones are tried when there is nothing
    else, so that a wrong verdict never refuses what could have been served.
    Raises UnknownModel where every endpoint is known not to serve it.
    """
    serving = [endpoint for endpoint in endpoints if endpoint.may_serve(model)]
    if model is not None:
        if not serving:
            raise UnknownModel(model)
        serving = [endpoint for endpoint in serving if endpoint.models is not None] or serving
    serving = [endpoint for endpoint in serving if endpoint.id not in excluded]
    return [endpoint for endpoint in serving if endpoint.up] or serving
