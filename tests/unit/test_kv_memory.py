"""Pieces of cache as views and through staging memory."""

import os

import numpy as np
import pytest
from support.kv import GEOMETRY

from ciuicflow.kvtransfer.errors import KvUsageError
from ciuicflow.kvtransfer.layout import Geometry, Region, RegionKind
from ciuicflow.kvtransfer.ranges import Piece, Run
from ciuicflow.runtime.memory import HostMemory, SharedMemory

BLOCKS = 8


def arrays() -> dict[str, list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]:
    rng = np.random.default_rng(1)
    return {
        region.name: [
            rng.integers(0, 256, (BLOCKS, region.block_bytes), dtype=np.uint8)
            for _ in range(region.layers)
        ]
        for region in GEOMETRY.regions
    }


def piece() -> Piece:
    """Two layers of blocks 5, 1, 2 of the first region."""
    return Piece(0, 1, 2, (Run(5, 1), Run(1, 2)), 600)


def test_views_are_in_payload_order_and_are_the_engines_own_memory() -> None:
    cache = arrays()
    memory = HostMemory(GEOMETRY, cache)
    assert memory.blocks == (BLOCKS, BLOCKS)
    views = memory.direct(piece())
    assert views is not None
    expected = b"".join(cache["kv"][layer][[5, 1, 2]].tobytes() for layer in (1, 2))
    assert b"".join(views) == expected
    views[0][0] ^= 0xFF
    assert cache["kv"][1][5, 0] == expected[0] ^ 0xFF


def test_gather_and_scatter_move_what_the_views_show() -> None:
    memory, other = HostMemory(GEOMETRY, arrays()), HostMemory(GEOMETRY, arrays())
    staging = memory.staging(600)
    memory.gather(piece(), staging)
    views = memory.direct(piece())
    assert views is not None
    assert bytes(staging) == b"".join(views)
    target = Piece(0, 0, 2, (Run(0, 2), Run(7, 1)), 600)
    other.scatter(staging, target)
    landed = other.direct(target)
    assert landed is not None
    assert b"".join(landed) == bytes(staging)


def test_more_slabs_than_a_transport_takes_are_staged() -> None:
    region = Region(
        name="kv", kind=RegionKind.MLA, layers=2, block_tokens=1, block_bytes=4, dtype="u8"
    )
    layout = Geometry(model="m", regions=(region,))
    memory = SharedMemory(layout, [2000])
    scattered = tuple(Run(block, 1) for block in range(0, 1026, 2))
    assert memory.direct(Piece(0, 0, 1, scattered, 4 * 513)) is not None
    assert memory.direct(Piece(0, 0, 2, scattered, 8 * 513)) is None


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda cache: cache.pop("index"), "no arrays of region index"),
        (lambda cache: cache["kv"].pop(), "kv has 3 layers, not 2"),
        (lambda cache: cache.update(kv=[layer[:, ::2] for layer in cache["kv"]]), "contiguous"),
        (
            lambda cache: cache.update(kv=[layer[:, :50].copy() for layer in cache["kv"]]),
            "50 bytes",
        ),
        (lambda cache: cache["kv"].__setitem__(0, cache["kv"][0][:4]), "unlike numbers"),
        (lambda cache: cache["kv"][0].setflags(write=False), "read-only"),
    ],
)
def test_arrays_that_do_not_fit_the_layout_are_refused(spoil: "object", says: str) -> None:
    cache = arrays()
    spoil(cache)  # type: ignore[operator]  # a lambda
    with pytest.raises(KvUsageError, match=says):
        HostMemory(GEOMETRY, cache)


def test_two_maps_of_shared_memory_are_the_same_bytes_and_its_descriptor_goes() -> None:
    before = len(os.listdir("/proc/self/fd"))
    one = SharedMemory(GEOMETRY, [3, 5])
    other = SharedMemory(GEOMETRY, one.blocks, one.handle.descriptor)
    one.arrays["index"][1, 4, 39] = 7
    assert other.arrays["index"][1, 4, 39] == 7
    one.close()
    other.close()
    del one, other
    assert len(os.listdir("/proc/self/fd")) == before


def test_counts_of_other_regions_are_refused() -> None:
    with pytest.raises(KvUsageError, match="blocks of 1 regions"):
        SharedMemory(GEOMETRY, [3])
