"""One transfer as its sender sees it."""

from collections import deque
from collections.abc import Iterable
from enum import Enum

from ciuicflow.kvtransfer.layout import Geometry, LayerRange
from ciuicflow.kvtransfer.order import Entry
from ciuicflow.kvtransfer.planner import Plan
from ciuicflow.kvtransfer.ranges import Area, BlockList, Run
from ciuicflow.kvtransfer.settings import BatchSizes
from ciuicflow.kvtransfer.ticket import TransferTicket
from ciuicflow.kvtransfer.wire import Expect


class Phase(Enum):
    """How far a transfer is."""

    WAITING = "waiting"  # for the peer's reservation
    SENDING = "sending"
    COMMITTING = "committing"  # the peer decides
    ENDED = "ended"  # the transport may still read the blocks


class Outgoing:
    """A transfer from `submit` until its blocks are free. ValueError if regions are missing."""

    def __init__(
        self,
        now: float,
        ticket: TransferTicket,
        geometry: Geometry,
        blocks: tuple[BlockList, ...],
        sizes: BatchSizes,
    ) -> None:
        if len(blocks) != len(geometry.regions):
            raise ValueError(f"blocks of {len(blocks)} regions; expected {len(geometry.regions)}")
        deadline_s = now + ticket.remaining_ms / 1000
        self.ticket = ticket
        self.blocks = blocks
        self.submitted_s = now
        self.place = Entry(ticket.id, ticket.rank, ticket.floor, deadline_s)
        self.plan = Plan(geometry, blocks, sizes)
        self.parts: deque[Area] = deque()
        """The rest of the micro-batch that is being sent."""
        self.phase = Phase.WAITING
        self.quanta = 0
        self.sent_bytes = 0
        self.unreleased = 0
        """Quanta that the transport may still read."""
        self.checksum: int | None = 0
        self._geometry = geometry

    @property
    def sendable(self) -> bool:
        """Whether something is ready and may be sent as far as this transfer goes."""
        return self.phase is Phase.SENDING and (bool(self.parts) or self.plan.has_ready)

    @property
    def whole(self) -> bool:
        """Whether all has been sent, and is not read any more."""
        return (
            self.phase is Phase.SENDING
            and self.sent_bytes == self.plan.total_bytes
            and not self.unreleased
        )

    def ready(self, layers: LayerRange, positions: Run | None, region: int | None) -> None:
        """Mark what has been computed; what a region does not have of it is left out."""
        regions: Iterable[int] = range(len(self.blocks)) if region is None else (region,)
        for index in regions:
            held = self._geometry.regions[index]
            first = max(layers.first, held.first_layer)
            end = min(layers.end, held.first_layer + held.layers)
            count = self.blocks[index].count if positions is None else positions.count
            if count and first < end:
                start = 0 if positions is None else positions.first
                self.plan.ready(Area(index, first, end - first, start, count))

    def mismatch(self, expect: Expect, shared: tuple[LayerRange, ...]) -> str | None:
        """Say where the two sides count blocks differently."""
        if len(expect.blocks) != len(self.blocks):
            return f"the peer expects {len(expect.blocks)} regions"
        for region, ours, theirs, layers in zip(
            self._geometry.regions, self.blocks, expect.blocks, shared, strict=True
        ):
            count = sum(run.count for run in theirs)
            if count != ours.count and layers.first < layers.end:
                return f"{region.name}: {ours.count} blocks here, {count} are expected"
        return None
