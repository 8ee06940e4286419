"""Blocks, layers and what has been seen of them, without any memory behind it.

A transfer moves a list of blocks per region. Both sides have their own block ids; what they have in
common is the position in that list, and that is what travels.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 40) - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Layer = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=65535)]
RegionIndex = Annotated[int, msgspec.Meta(ge=0, le=63)]


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Consecutive numbers, such as adjacent blocks."""

    first: Number
    count: Count


class Area(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Layers of one region x consecutive positions in the transfer's list of blocks.

    As a payload: layer after layer, in each the blocks in order of position.
    """

    region: RegionIndex
    first_layer: Layer
    """Counted over the whole model, not over the pipeline stage."""
    layers: Layers
    first: Number
    count: Count


class Slab(msgspec.Struct, frozen=True, gc=False):
    """Adjacent blocks of one layer: contiguous memory."""

    region: int
    layer: int
    first: int
    count: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """An area in terms of one side's own blocks: the address of a payload."""

    region: int
    first_layer: int
    layers: int
    runs: tuple[Run, ...]
    bytes: int

    @property
    def contiguous(self) -> bool:
        """Whether it is one slab; otherwise it is gathered or scattered through staging memory."""
        return self.layers == 1 and len(self.runs) == 1

    def slabs(self) -> Iterator[Slab]:
        """Return its slabs in the order of the payload."""
        for layer in range(self.first_layer, self.first_layer + self.layers):
            for run in self.runs:
                yield Slab(self.region, layer, run.first, run.count)


class BlockList:
    """One side's blocks of one region, in order of position, kept as runs."""

    __slots__ = ("count", "runs", "starts")

    def __init__(self, runs: tuple[Run, ...]) -> None:
        self.runs = runs
        ends = list(accumulate((run.count for run in runs), initial=0))
        self.count = ends.pop()
        self.starts = ends
        """Position of the first block of each run."""

    @classmethod
    def of(cls, blocks: Iterable[int]) -> "BlockList":
        """Make one of block ids. ValueError if one occurs twice or is negative."""
        ids = list(blocks)
        if len(set(ids)) != len(ids) or min(ids, default=0) < 0:
            raise ValueError("blocks: each must be there once and not be negative")
        return cls(tuple(_runs(ids)))

    def __repr__(self) -> str:
        return f"<BlockList {self.count} blocks in {len(self.runs)} runs>"

    def pick(self, first: int, count: int) -> tuple[Run, ...]:
        """Return the blocks at some positions, which must be in the list."""
        index = bisect_right(self.starts, first) - 1
        run = self.runs[index]
        offset = first - self.starts[index]
        if offset + count <= run.count:  # the common case
            return (Run(run.first + offset, count),)
        last = bisect_right(self.starts, first + count - 1) - 1
        tail = Run(self.runs[last].first, first + count - self.starts[last])
        head = Run(run.first + offset, run.count - offset)
        return (head, *self.runs[index + 1 : last], tail)

    def __iter__(self) -> Iterator[int]:
        for run in self.runs:
            yield from range(run.first, run.first + run.count)


def _runs(ids: list[int]) -> Iterator[Run]:
    start = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or ids[index] != ids[index - 1] + 1:
            yield Run(ids[start], index - start)
            start = index


class Coverage:
    """Which (region, layer, position) have been seen; each may be seen once."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], int] = {}  # (region, layer) -> bit per position

    def add(self, area: Area) -> bool:
        """Mark an area; False and no change if a part of it was marked before."""
        bits = ((1 << area.count) - 1) << area.first
        seen = self._seen
        keys = [
            (area.region, layer)
            for layer in range(area.first_layer, area.first_layer + area.layers)
        ]
        if any(seen.get(key, 0) & bits for key in keys):
            return False
        for key in keys:
            seen[key] = seen.get(key, 0) | bits
        return True
