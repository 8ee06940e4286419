"""What goes into flow control and what it tells its driver to do: small immutable records."""

from enum import StrEnum

import msgspec

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.cost import Cost
from ciuicflow.request import Outcome

RequestId = int
"""Chosen by the driver; in use once at a time."""


class Role(StrEnum):
    """What an endpoint does of a request."""

    ANY = "any"
    PREFILL = "prefill"
    DECODE = "decode"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What flow control must know of an endpoint."""

    id: EndpointId
    models: frozenset[str] | None = None
    """None: nobody said; it may serve any."""
    up: bool = True
    role: Role = Role.ANY
    max_requests: int | None = None
    """Optional ceiling of the learnt limit."""
    max_tokens: int | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that asks to be admitted."""

    id: RequestId
    tenant: str
    tier: str
    model: str | None = None
    body_bytes: int
    max_tokens: int | None = None
    """The client's bound on the answer."""
    deadline_s: float | None = None
    """When its first token is due at the latest, on the clock of `now`."""
    streams: bool = True


class Leg(msgspec.Struct, frozen=True, gc=False):
    """The part of a request that goes to one endpoint."""

    endpoint: EndpointId
    role: Role
    cost: Cost


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """Send it now: all legs of the grant are on the ledger."""

    id: RequestId
    tier: str
    legs: tuple[Leg, ...]
    waited_s: float
    reason: str
    """Why it goes there; for the log line."""


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """Answer it with the outcome's error: it never was in the queue, or it is out of it."""

    id: RequestId
    tier: str
    outcome: Outcome
    waited_s: float
    retry_after_s: float


Action = Dispatch | Refuse
