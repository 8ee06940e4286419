"""Ranges, geometry, its fingerprint, and whose caches fit together."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ciuicflow.kvtransfer.layout import (
    Geometry,
    LayerRange,
    Parallel,
    Region,
    RegionKind,
    deepseek_v3,
)
from ciuicflow.kvtransfer.ranges import Area, BlockList, Coverage, Piece, Run, Slab

HEADS = Region(
    name="heads", kind=RegionKind.MHA, layers=4, block_tokens=16, block_bytes=4096, dtype="float16"
)


def with_region(**changes: object) -> Geometry:
    geometry = deepseek_v3()
    return replace(geometry, regions=(replace(geometry.regions[0], **changes),))


def test_deepseek_v3_has_70272_bytes_per_token() -> None:
    geometry = deepseek_v3(block_tokens=64)
    token = geometry.bytes_of(Area(0, 0, 61, 0, 1)) / 64
    assert token == 70_272
    assert geometry.bytes_of(Area(0, 0, 61, 0, 32_768 // 64)) == 2_302_672_896


def test_fingerprint_is_the_same_in_every_process() -> None:
    assert deepseek_v3().fingerprint == "ce3b87473a31d7cafaefd90123ae3b42"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "other"),
        ("kind", RegionKind.INDEXER),
        ("block_tokens", 32),
        ("block_bytes", 656 * 64),
        ("dtype", "fp8_ds_mla"),
    ],
)
def test_a_difference_is_named_and_changes_the_fingerprint(field: str, value: object) -> None:
    ours, theirs = deepseek_v3(), with_region(**{field: value})
    assert ours.fingerprint != theirs.fingerprint
    difference = ours.difference(theirs)
    assert difference is not None
    assert repr(value) in difference or str(value) in difference
    assert (field if field != "name" else "regions") in difference


def test_another_model_with_the_same_shape_is_refused() -> None:
    theirs = replace(deepseek_v3(), model="deepseek-r1")
    difference = deepseek_v3().difference(theirs)
    assert difference == "model: ours is 'deepseek-v3', the peer's is 'deepseek-r1'"


def test_latent_cache_fits_any_tensor_parallel_rank() -> None:
    one = replace(deepseek_v3(), tp=Parallel(3, 8), dp=Parallel(1, 4))
    other = replace(deepseek_v3(), tp=Parallel(0, 1))
    assert one.fingerprint == other.fingerprint
    assert one.difference(other) is None


def test_heads_fit_the_same_tensor_parallel_rank_only() -> None:
    ours = Geometry(model="m", regions=(HEADS,), tp=Parallel(1, 4))
    assert ours.difference(replace(ours, dp=Parallel(1, 2))) is None
    assert ours.difference(replace(ours, tp=Parallel(2, 4))) == (
        "tp: ours is '1 of 4', the peer's is '2 of 4'"
    )
    assert ours.difference(replace(ours, tp=Parallel(1, 2))) is not None


def test_pipeline_stages_share_the_layers_that_both_hold() -> None:
    first = replace(deepseek_v3(layers=31), pp=Parallel(0, 2))
    second = replace(deepseek_v3(first_layer=31, layers=30), pp=Parallel(1, 2))
    whole = deepseek_v3()
    assert first.shared_layers(whole) == (LayerRange(0, 31),)
    assert whole.shared_layers(second) == (LayerRange(31, 61),)
    assert first.fingerprint == second.fingerprint == whole.fingerprint
    assert first.difference(whole) is None
    assert first.difference(second) == "layers: none is held by both"


def test_a_stage_without_one_of_the_caches_still_exchanges_the_other() -> None:
    indexer = Region(
        name="i", kind=RegionKind.INDEXER, layers=2, block_tokens=64, block_bytes=64, dtype="fp8"
    )
    both = Geometry(model="m", regions=(HEADS, indexer))
    only = Geometry(model="m", regions=(HEADS, replace(indexer, layers=0)))
    assert both.difference(only) is None
    assert both.shared_layers(only) == (LayerRange(0, 4), LayerRange(0, 0))


def test_impossible_geometries_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        Geometry(model="m", regions=(HEADS, HEADS))
    with pytest.raises(ValueError, match="below the size"):
        Parallel(4, 4)
    with pytest.raises(msgspec.ValidationError, match="same name"):
        msgspec.convert({"model": "m", "regions": [msgspec.to_builtins(HEADS)] * 2}, Geometry)


@given(st.lists(st.integers(0, 60), unique=True), st.data())
def test_picked_blocks_are_those_at_the_positions(ids: list[int], data: st.DataObject) -> None:
    blocks = BlockList.of(ids)
    assert list(blocks) == ids
    assert blocks.count == len(ids)
    if ids:
        first = data.draw(st.integers(0, len(ids) - 1))
        count = data.draw(st.integers(1, len(ids) - first))
        picked = blocks.pick(first, count)
        assert list(BlockList(picked)) == ids[first : first + count]
        for one, two in pairwise(picked):
            assert one.first + one.count != two.first, "adjacent blocks are one run"


@pytest.mark.parametrize("ids", [[1, 2, 1], [-1]])
def test_blocks_that_cannot_be_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="blocks"):
        BlockList.of(ids)


def test_each_place_is_covered_once_and_a_refused_area_leaves_no_trace() -> None:
    coverage = Coverage()
    assert coverage.add(Area(0, 1, 2, 3, 2))
    assert coverage.add(Area(1, 1, 2, 3, 2)), "another region"
    assert coverage.add(Area(0, 3, 1, 3, 2)), "another layer"
    assert coverage.add(Area(0, 1, 2, 5, 9)), "positions after it"
    assert not coverage.add(Area(0, 0, 2, 0, 4))
    assert coverage.add(Area(0, 0, 1, 0, 4))


def test_a_piece_is_walked_layer_by_layer_and_is_contiguous_only_alone() -> None:
    piece = Piece(2, 5, 2, (Run(7, 2), Run(1, 1)), 600)
    assert list(piece.slabs()) == [
        Slab(2, 5, 7, 2),
        Slab(2, 5, 1, 1),
        Slab(2, 6, 7, 2),
        Slab(2, 6, 1, 1),
    ]
    assert not piece.contiguous
    assert not Piece(0, 0, 2, (Run(0, 1),), 2).contiguous
    assert Piece(0, 0, 1, (Run(0, 5),), 5).contiguous
