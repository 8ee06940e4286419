"""A request while it waits, where it can go, and while it runs.

Plain classes: they are made and written to for every request.
"""

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.actions import Leg, RequestId
from ciuicflow.flowcontrol.cost import Cost


class Entry:
    """A queued request."""

    __slots__ = (
        *("id", "seq", "tenant", "tier", "model", "body_bytes", "cost", "enqueued_s", "due_s"),
        *("expires_s", "streams", "excluded", "holder"),
    )

    def __init__(
        self,
        *,
        id: RequestId,
        seq: int,
        tenant: str,
        tier: int,
        model: str | None,
        body_bytes: int,
        cost: Cost,
        enqueued_s: float,
        due_s: float,
        expires_s: float,
        streams: bool,
    ) -> None:
        """Take `seq`, unique in order of arrival, and `tier`, an index by rank (0 goes first).

        `due_s` is its place among its tenant's requests; it leaves the queue at `expires_s`.
        """
        self.id = id
        self.seq = seq
        self.tenant = tenant
        self.tier = tier
        self.model = model
        self.body_bytes = body_bytes
        self.cost = cost
        self.enqueued_s = enqueued_s
        self.due_s = due_s
        self.expires_s = expires_s
        self.streams = streams
        self.excluded: tuple[EndpointId, ...] = ()
        """Endpoints that it could not be delivered to."""
        self.holder: object | None = None
        """The tenant's queue that holds it."""

    @property
    def queued(self) -> bool:
        """Whether it waits."""
        return self.holder is not None


class Placed:
    """An entry that can go now, and where."""

    __slots__ = ("entry", "legs", "reason")

    def __init__(self, entry: Entry, legs: tuple[Leg, ...], reason: str) -> None:
        self.entry = entry
        self.legs = legs
        self.reason = reason


class Running:
    """A request that was dispatched."""

    __slots__ = ("entry", "legs")

    def __init__(self, entry: Entry, legs: dict[EndpointId, Cost]) -> None:
        self.entry = entry
        self.legs = legs
