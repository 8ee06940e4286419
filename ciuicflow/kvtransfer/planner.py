"""Turns what is ready of one transfer into micro-batches, and these into quanta, on demand.

Nothing is planned before it can be sent: a transfer of any size costs one step per micro-batch.
A micro-batch is contiguous on both sides where that gives it at least the least size; otherwise
further blocks, then further layers, are gathered into it.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator

import msgspec

from ciuicflow.kvtransfer.layout import Geometry, LayerRange
from ciuicflow.kvtransfer.ranges import Area, BlockList, Coverage, Piece
from ciuicflow.kvtransfer.settings import BatchSizes


class Plan:
    """What is ready of one transfer and not yet planned."""

    def __init__(self, geometry: Geometry, ours: tuple[BlockList, ...], sizes: BatchSizes) -> None:
        """`ours`: our blocks by region."""
        self.total_bytes = 0
        """Of the whole transfer; known once it is bound."""
        self.bound = False
        self._geometry = geometry
        self._ours = ours
        self._sizes = sizes
        self._layers: tuple[LayerRange, ...] = ()
        self._breaks: list[list[int]] = []  # where a run ends on one of the two sides
        self._ready: deque[Area] = deque()
        self._covered = Coverage()

    def bind(self, layers: tuple[LayerRange, ...], theirs: tuple[BlockList, ...]) -> None:
        """Take in what both sides hold and where the other side puts it.

        By region; where layers are shared both lists have the same number of blocks.
        """
        self._layers = layers
        self._breaks = [
            sorted({*mine.starts, *other.starts})
            for mine, other in zip(self._ours, theirs, strict=True)
        ]
        self.total_bytes = transfer_bytes(self._geometry, layers, self._ours)
        self.bound = True
        early, self._ready = self._ready, deque()
        for area in early:
            self._enqueue(area)

    @property
    def has_ready(self) -> bool:
        """Whether something waits to be taken."""
        return self.bound and bool(self._ready)

    def ready(self, area: Area) -> None:
        """An area has been computed. ValueError if it is not in our part, or was ready before."""
        region = self._geometry.regions[area.region]
        if (
            area.first + area.count > self._ours[area.region].count
            or area.first_layer < region.first_layer
            or area.first_layer + area.layers > region.first_layer + region.layers
        ):
            raise ValueError(f"ready: {area} lies outside of the transfer")
        if not self._covered.add(area):
            raise ValueError(f"ready: a part of {area} was ready before")
        self._enqueue(area)

    def _enqueue(self, area: Area) -> None:
        if self.bound:  # leave out what the peer does not hold
            shared = self._layers[area.region]
            first = max(area.first_layer, shared.first)
            layers = min(area.first_layer + area.layers, shared.end) - first
            if layers < 1:
                return
            area = Area(area.region, first, layers, area.first, area.count)
        joined = _join(self._ready[-1], area) if self._ready else None
        if joined is not None:
            self._ready[-1] = joined
        else:
            self._ready.append(area)

    def take(self, target_bytes: float) -> Area:
        """Return the next micro-batch of about that size. Something must be ready."""
        area = self._ready.popleft()
        block_bytes = self._geometry.regions[area.region].block_bytes
        target = min(max(target_bytes, self._sizes.least), self._sizes.most)
        layer_bytes = area.count * block_bytes
        if layer_bytes < self._sizes.least and area.layers > 1:
            layers = min(int(target // layer_bytes), area.layers)
            batch, rest = _split_layers(area, layers)
            if rest is not None:
                self._ready.appendleft(rest)
            return batch
        row, below = _split_layers(area, 1)
        if below is not None:
            self._ready.appendleft(below)
        batch, rest = _split_blocks(row, self._row_end(row, block_bytes, target) - row.first)
        if rest is not None:
            self._ready.appendleft(rest)
        return batch

    def _row_end(self, row: Area, block_bytes: int, target: float) -> int:
        """Return the position where a micro-batch that starts at the row's begin should end."""
        start, row_end = row.first, row.first + row.count
        least = -(-self._sizes.least // block_bytes)  # blocks, rounded up
        end = min(start + max(int(target // block_bytes), 1), row_end)
        if row_end - end < least and (row_end - start) * block_bytes <= self._sizes.most:
            end = row_end  # a tail is not worth a micro-batch of its own
        breaks = self._breaks[row.region]
        index = bisect_right(breaks, start)
        if index == len(breaks) or breaks[index] >= end:
            return end
        if breaks[index] - start >= least:
            return breaks[index]
        last = breaks[bisect_right(breaks, end) - 1]
        return last if last - start >= least else end

    def quanta(self, batch: Area, quantum_bytes: int) -> Iterator[Area]:
        """Divide a micro-batch; no part is larger than `quantum_bytes` unless a block is."""
        block_bytes = self._geometry.regions[batch.region].block_bytes
        layers = max(quantum_bytes // (batch.count * block_bytes), 1)
        blocks = max(quantum_bytes // block_bytes, 1) if layers == 1 else batch.count
        rest: Area | None = batch
        while rest is not None:
            row: Area | None
            row, rest = _split_layers(rest, layers)
            while row is not None:
                part, row = _split_blocks(row, blocks)
                yield part

    def bytes_of(self, area: Area) -> int:
        """Return the size of an area."""
        return self._geometry.bytes_of(area)

    def piece(self, area: Area) -> Piece:
        """Return the address of an area in our own blocks."""
        return Piece(
            area.region,
            area.first_layer,
            area.layers,
            self._ours[area.region].pick(area.first, area.count),
            self._geometry.bytes_of(area),
        )


def transfer_bytes(
    geometry: Geometry, layers: tuple[LayerRange, ...], blocks: tuple[BlockList, ...]
) -> int:
    """Return the size of a transfer of these blocks in these layers, both by region."""
    return sum(
        (shared.end - shared.first) * part.count * region.block_bytes
        for region, shared, part in zip(geometry.regions, layers, blocks, strict=True)
    )


def _join(one: Area, two: Area) -> Area | None:
    """Return both as one area, if they are one."""
    region, layer, layers, first, count = msgspec.structs.astuple(one)
    if region != two.region:
        return None
    if (first, count, layer + layers) == (two.first, two.count, two.first_layer):
        return Area(region, layer, layers + two.layers, first, count)
    if (layer, layers, first + count) == (two.first_layer, two.layers, two.first):
        return Area(region, layer, layers, first, count + two.count)
    return None


def _split_layers(area: Area, layers: int) -> tuple[Area, Area | None]:
    if layers >= area.layers:
        return area, None
    return (
        Area(area.region, area.first_layer, layers, area.first, area.count),
        Area(area.region, area.first_layer + layers, area.layers - layers, area.first, area.count),
    )


def _split_blocks(area: Area, count: int) -> tuple[Area, Area | None]:
    if count >= area.count:
        return area, None
    return (
        Area(area.region, area.first_layer, area.layers, area.first, count),
        Area(area.region, area.first_layer, area.layers, area.first + count, area.count - count),
    )
