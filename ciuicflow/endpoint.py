"""One engine server as the gateway's ledger knows it."""

from typing import NewType

import msgspec

EndpointId = NewType("EndpointId", str)


class EndpointState(msgspec.Struct, eq=False):
    """The gateway's own ledger entry of an endpoint: the one mutable record, written by drivers.

    `models` is None as long as nobody said which models it serves: then it may serve any.
    """

    id: EndpointId
    models: frozenset[str] | None = None
    up: bool = True  # until proven otherwise
    in_flight: int = 0  # requests
    failures: int = 0  # in a row, of live traffic and probes alike
    successes: int = 0  # in a row, of probes, while down
    # Of `in_flight`, requests that did not opt in: counted here, told to flow control when it acts.
    bypass_in_flight: int = 0
    bypass_bytes: int = 0  # of their bodies
    bypass_arrived: int = 0  # since the start

    def may_serve(self, model: str | None) -> bool:
        """Whether a request for this model may go here; None: the request names no model."""
        return model is None or self.models is None or model in self.models
