"""Where KV cache lies. The agent moves pieces of it and never looks at an address.

A piece is either lent to the transport as it is, or gathered into and scattered from staging
memory. Device memory fits behind the same calls: `direct` returns buffers where the transport
takes them (GPUDirect), else None, and `gather` and `scatter` wait for a copy on a side stream.
"""

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ciuicflow.kvtransfer.errors import KvUsageError
from ciuicflow.kvtransfer.layout import Geometry, Region
from ciuicflow.kvtransfer.ranges import Piece
from ciuicflow.transport.base import MAX_BUFFERS, Buffer

Bytes: TypeAlias = NDArray[np.uint8]
Layers: TypeAlias = Sequence[Any]
"""One array per layer of a region, each (blocks, ...) and C-contiguous."""

_PAGE: Final = 4096


class Memory(Protocol):
    """The cache of one shard."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks each region has."""

    def direct(self, piece: Piece) -> Sequence[Buffer] | None:
        """Return the piece as buffers for the transport, in payload order; None: stage it."""

    def staging(self, size_bytes: int) -> Buffer:
        """Return memory that the transport takes and that can be gathered into."""

    def gather(self, piece: Piece, staging: Buffer) -> None:
        """Copy a piece to staging memory; returns when it is there. Runs in a worker thread."""

    def scatter(self, staging: Buffer, piece: Piece) -> None:
        """Copy staging memory to a piece; returns when it is there. Runs in a worker thread."""


class HostMemory:
    """Cache in host memory: the engine's own arrays, by region and layer, never copied.

    KvUsageError if a region is missing or an array does not fit the layout.
    """

    def __init__(self, layout: Geometry, arrays: Mapping[str, Layers]) -> None:
        missing = {region.name for region in layout.regions} - set(arrays)
        if missing:
            raise KvUsageError(f"memory: no arrays of region {', '.join(sorted(missing))}")
        self.layout = layout
        self._layers = [_flat(region, arrays[region.name]) for region in layout.regions]
        self._views = [[each.reshape(-1).data for each in part] for part in self._layers]

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks each region has."""
        return tuple(len(part[0]) if part else 0 for part in self._layers)

    def direct(self, piece: Piece) -> Sequence[Buffer] | None:
        """Return a view for each slab, unless these are more than a transport takes."""
        if piece.layers * len(piece.runs) > MAX_BUFFERS:
            return None
        region = self.layout.regions[piece.region]
        size, views = region.block_bytes, self._views[piece.region]
        return [
            views[slab.layer - region.first_layer][
                slab.first * size : (slab.first + slab.count) * size
            ]
            for slab in piece.slabs()
        ]

    def staging(self, size_bytes: int) -> Buffer:
        """Return fresh memory; it is not zeroed."""
        return np.empty(size_bytes, np.uint8)

    def gather(self, piece: Piece, staging: Buffer) -> None:
        """Copy a piece to staging memory."""
        for here, there in self._pairs(piece, staging):
            there[:] = here

    def scatter(self, staging: Buffer, piece: Piece) -> None:
        """Copy staging memory to a piece."""
        for here, there in self._pairs(piece, staging):
            here[:] = there

    def _pairs(self, piece: Piece, staging: Buffer) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield each slab of a piece and its part of the staging memory."""
        region = self.layout.regions[piece.region]
        flat: Bytes = np.frombuffer(staging, np.uint8)
        start = 0
        for slab in piece.slabs():
            layer = self._layers[piece.region][slab.layer - region.first_layer]
            here = layer[slab.first : slab.first + slab.count].reshape(-1)
            yield here, flat[start : start + len(here)]
            start += len(here)


def _flat(region: Region, layers: Layers) -> list[Bytes]:
    """View the arrays of a region as (blocks, bytes)."""
    if len(layers) != region.layers:
        raise KvUsageError(f"memory: {region.name} has {region.layers} layers, not {len(layers)}")
    flat = [_flat_layer(region, np.asarray(layer)) for layer in layers]
    if len({len(layer) for layer in flat}) > 1:
        raise KvUsageError(f"memory: {region.name}: layers with unlike numbers of blocks")
    return flat


def _flat_layer(region: Region, array: NDArray[Any]) -> Bytes:
    if not array.flags.c_contiguous:
        raise KvUsageError(f"memory: {region.name}: an array is not C-contiguous")
    if not array.flags.writeable:
        raise KvUsageError(f"memory: {region.name}: an array is read-only")
    if array.nbytes % region.block_bytes or array.nbytes // region.block_bytes != len(array):
        per_block = array.nbytes / max(len(array), 1)
        raise KvUsageError(
            f"memory: {region.name}: {per_block:g} bytes per block; "
            f"the layout has {region.block_bytes}"
        )
    return array.reshape(-1).view(np.uint8).reshape(len(array), region.block_bytes)


class SharedHandle(msgspec.Struct, frozen=True, tag="shared"):
    """How another process of this host finds host memory; the descriptor travels beside it.

    Device memory has a record of its own here: CUDA IPC handles by region and layer, and an IPC
    event that `Push` and `Ready` name, so that the agent's process waits for the layer's kernel.
    """

    descriptor: int
    blocks: tuple[int, ...]


class SharedMemory(HostMemory):
    """Cache in memory that the agent's process can map: anonymous, gone with its last user.

    Linux only. `arrays` has what the engine computes into: by region (layers, blocks, bytes).
    """

    def __init__(self, layout: Geometry, blocks: Sequence[int], descriptor: int = -1) -> None:
        """Make it, or map what `descriptor` stands for. KvUsageError if the counts do not fit."""
        if len(blocks) != len(layout.regions):
            raise KvUsageError(f"blocks of {len(blocks)} regions; expected {len(layout.regions)}")
        sizes = [_region_bytes(*each) for each in zip(layout.regions, blocks, strict=True)]
        total = max(sum(sizes), 1)
        self._descriptor = os.dup(descriptor) if descriptor >= 0 else _make(total)
        # All pages now: a page fault per 4 KiB in the first transfers cost 40 % of their speed.
        self._map = mmap.mmap(self._descriptor, total, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.arrays: dict[str, Bytes] = {}
        start = 0
        for region, count, size in zip(layout.regions, blocks, sizes, strict=True):
            shape = (region.layers, count, region.block_bytes)
            used = region.layers * count * region.block_bytes
            array = np.frombuffer(self._map, np.uint8, used, start)
            self.arrays[region.name] = array.reshape(shape)
            start += size
        super().__init__(layout, {name: list(array) for name, array in self.arrays.items()})

    @property
    def handle(self) -> SharedHandle:
        """How the agent's process finds it; give it the descriptor as well."""
        return SharedHandle(self._descriptor, self.blocks)

    def close(self) -> None:
        """Give the descriptor back; the memory goes when its last view does."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _make(size_bytes: int) -> int:
    descriptor = os.memfd_create("ciuicflow-kv", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _region_bytes(region: Region, blocks: int) -> int:
    size = region.layers * blocks * region.block_bytes
    return -(-size // _PAGE) * _PAGE
