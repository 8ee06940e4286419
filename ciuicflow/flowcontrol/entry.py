"""A request while it waits, and where it can go."""

import msgspec

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.actions import Leg, RequestId
from ciuicflow.flowcontrol.cost import Cost


class Entry(msgspec.Struct, eq=False):
    """A queued request."""

    id: RequestId
    seq: int
    """Unique, in order of arrival."""
    tenant: str
    tier: int
    """Index by rank: 0 is served first."""
    model: str | None
    body_bytes: int
    cost: Cost
    enqueued_s: float
    due_s: float
    """Its place among its tenant's requests."""
    expires_s: float
    """When it leaves the queue, served or not."""
    streams: bool
    excluded: tuple[EndpointId, ...] = ()
    """Endpoints that it could not be delivered to."""
    holder: object | None = None
    """The tenant's queue that holds it."""

    @property
    def queued(self) -> bool:
        """Whether it waits."""
        return self.holder is not None


class Placed(msgspec.Struct, frozen=True):
    """An entry that can go now, and where."""

    entry: Entry
    legs: tuple[Leg, ...]
    reason: str


class Running(msgspec.Struct, eq=False):
    """A request that was dispatched."""

    entry: Entry
    legs: dict[EndpointId, Cost]
