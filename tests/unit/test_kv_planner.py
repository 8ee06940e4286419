"""How what is ready is divided into micro-batches and quanta."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv import GEOMETRY

from ciuicflow.kvtransfer.layout import Geometry, LayerRange, deepseek_v3
from ciuicflow.kvtransfer.planner import Plan
from ciuicflow.kvtransfer.ranges import Area, BlockList, Coverage, Run
from ciuicflow.kvtransfer.settings import BatchSizes

V3 = deepseek_v3(block_tokens=16)  # 18 432 bytes per block and layer
BLOCK = 18_432
KIB, MIB = 1 << 10, 1 << 20


def plan(ours: list[int], theirs: list[int] | None = None, geometry: Geometry = V3) -> Plan:
    made = Plan(geometry, (BlockList.of(ours),), BatchSizes())
    made.bind(geometry.shared_layers(geometry), (BlockList.of(theirs or ours),))
    return made


def take_all(made: Plan, target_bytes: float) -> list[Area]:
    areas = []
    while made.has_ready:
        areas.append(made.take(target_bytes))
    return areas


def test_adjacent_blocks_of_one_layer_are_cut_to_the_target_size() -> None:
    made = plan(list(range(200)))
    made.ready(Area(0, 7, 1, 0, 200))
    areas = take_all(made, 1 * MIB)
    assert [area.count for area in areas] == [56, 56, 56, 32]
    assert all(made.piece(area).contiguous for area in areas)
    assert 56 * BLOCK <= MIB < 57 * BLOCK


@pytest.mark.parametrize(
    ("target_bytes", "blocks"), [(1.0, 14), (256 * KIB, 14), (4 * MIB, 227), (1e12, 455)]
)
def test_the_target_is_held_between_the_bounds(target_bytes: float, blocks: int) -> None:
    made = plan(list(range(2000)))
    made.ready(Area(0, 0, 1, 0, 2000))
    assert made.take(target_bytes).count == blocks
    assert 455 * BLOCK <= 8 * MIB < 456 * BLOCK


def test_a_small_tail_is_not_left_alone() -> None:
    made = plan(list(range(60)))
    made.ready(Area(0, 0, 1, 0, 60))
    assert made.take(1 * MIB) == Area(0, 0, 1, 0, 60)


def test_a_run_that_is_large_enough_ends_the_micro_batch_where_it_ends() -> None:
    ours = [*range(20), *range(100, 140)]
    made = plan(ours, list(range(60)))
    made.ready(Area(0, 0, 1, 0, 60))
    areas = take_all(made, 512 * KIB)
    assert [(area.first, area.count) for area in areas] == [(0, 20), (20, 40)]
    assert made.piece(areas[1]).runs == (Run(100, 40),)


def test_a_run_ends_where_it_ends_on_the_peer_too() -> None:
    made = plan(list(range(60)), [*range(20), *range(100, 140)])
    made.ready(Area(0, 0, 1, 0, 60))
    assert made.take(512 * KIB) == Area(0, 0, 1, 0, 20)


def test_a_contiguous_micro_batch_is_preferred_to_a_larger_one() -> None:
    made = plan([*range(20), *range(100, 120), *range(200, 260)])
    made.ready(Area(0, 0, 1, 0, 100))
    assert made.take(1 * MIB) == Area(0, 0, 1, 0, 20)


def test_scattered_blocks_are_gathered() -> None:
    made = plan(list(range(0, 400, 2)))
    made.ready(Area(0, 3, 1, 0, 200))
    piece = made.piece(made.take(1 * MIB))
    assert not piece.contiguous
    assert len(piece.runs) == 56
    assert piece.bytes == 56 * BLOCK


def test_a_gathered_micro_batch_ends_with_a_run() -> None:
    ours = [block for start in range(0, 400, 40) for block in range(start, start + 10)]
    made = plan(ours)
    made.ready(Area(0, 0, 1, 0, 100))
    assert made.take(640 * KIB).count == 30


def test_layers_of_a_short_transfer_are_gathered() -> None:
    made = plan(list(range(7)))  # about 100 tokens
    made.ready(Area(0, 0, 61, 0, 7))
    areas = take_all(made, 1 * MIB)
    assert [area.layers for area in areas] == [8] * 7 + [5]
    assert made.piece(areas[0]).bytes == 8 * 7 * BLOCK


def test_layers_that_became_ready_while_nothing_could_be_sent_go_together() -> None:
    made = plan(list(range(7)))
    for layer in range(5):
        made.ready(Area(0, layer, 1, 0, 7))
    assert take_all(made, 1 * MIB) == [Area(0, 0, 5, 0, 7)]


def test_chunks_of_a_layer_that_became_ready_go_together() -> None:
    made = plan(list(range(40)))
    made.ready(Area(0, 2, 1, 0, 20))
    made.ready(Area(0, 2, 1, 20, 20))
    assert take_all(made, 1 * MIB) == [Area(0, 2, 1, 0, 40)]


def test_what_is_ready_early_counts_once_the_plan_is_bound_and_only_in_shared_layers() -> None:
    made = Plan(V3, (BlockList.of(range(20)),), BatchSizes())
    made.ready(Area(0, 0, 61, 0, 20))
    assert not made.has_ready
    assert made.total_bytes == 0
    made.bind((LayerRange(31, 61),), (BlockList.of(range(20)),))
    assert made.total_bytes == 30 * 20 * BLOCK
    assert sum(area.layers * area.count for area in take_all(made, MIB)) == 30 * 20


@pytest.mark.parametrize(
    "area",
    [Area(0, 0, 1, 15, 6), Area(0, 60, 2, 0, 1), Area(0, 5, 1, 9, 1), Area(0, 4, 3, 0, 20)],
)
def test_what_cannot_be_ready_is_refused(area: Area) -> None:
    made = plan(list(range(20)))
    made.ready(Area(0, 5, 1, 0, 20))
    with pytest.raises(ValueError, match="ready"):
        made.ready(area)


@pytest.mark.parametrize(
    ("batch", "quantum_bytes", "parts"),
    [
        (Area(0, 4, 1, 10, 100), MIB, [Area(0, 4, 1, 10, 56), Area(0, 4, 1, 66, 44)]),
        (Area(0, 4, 1, 10, 2), 1, [Area(0, 4, 1, 10, 1), Area(0, 4, 1, 11, 1)]),
        (Area(0, 4, 5, 0, 7), 3 * 7 * BLOCK, [Area(0, 4, 3, 0, 7), Area(0, 7, 2, 0, 7)]),
        (
            Area(0, 4, 2, 0, 3),
            2 * BLOCK,
            [Area(0, 4, 1, 0, 2), Area(0, 4, 1, 2, 1), Area(0, 5, 1, 0, 2), Area(0, 5, 1, 2, 1)],
        ),
        (Area(0, 4, 2, 0, 3), MIB, [Area(0, 4, 2, 0, 3)]),
    ],
)
def test_a_micro_batch_is_one_or_more_quanta(
    batch: Area, quantum_bytes: int, parts: list[Area]
) -> None:
    assert list(plan(list(range(200))).quanta(batch, quantum_bytes)) == parts


def test_a_long_prompt_is_planned_one_step_at_a_time() -> None:
    made = plan(list(range(2048)))
    made.ready(Area(0, 0, 61, 0, 2048))
    assert made.total_bytes == 2_302_672_896
    first = made.take(4 * MIB)
    assert (first.first_layer, first.layers, first.count) == (0, 1, 227)
    areas = [first, *take_all(made, 4 * MIB)]
    assert sum(made.piece(area).bytes for area in areas) == made.total_bytes
    assert len(areas) == 61 * 9  # no layer ends with a small one


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_everything_ready_is_planned_exactly_once(data: st.DataObject) -> None:
    counts = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 5)))
    lists = [
        [tuple(data.draw(st.permutations(range(count)))) for count in counts] for _ in range(2)
    ]
    ours, theirs = (tuple(map(BlockList.of, side)) for side in lists)
    sizes = BatchSizes(least=data.draw(st.integers(1, 400)), most=900)
    made = Plan(GEOMETRY, ours, sizes)
    made.bind(GEOMETRY.shared_layers(GEOMETRY), theirs)
    ready = [
        Area(index, layer, 1, first, 1)
        for index, region in enumerate(GEOMETRY.regions)
        for layer in range(region.layers)
        for first in range(counts[index])
    ]
    seen, size = Coverage(), 0
    quantum_bytes = data.draw(st.integers(1, 900))
    for area in data.draw(st.permutations(ready)):
        made.ready(area)
        if data.draw(st.booleans()):
            for part in made.quanta(made.take(data.draw(st.floats(1, 2000))), quantum_bytes):
                assert seen.add(part)
                size += made.piece(part).bytes
    for batch in take_all(made, 500.0):
        assert GEOMETRY.bytes_of(batch) <= 900
        for part in made.quanta(batch, quantum_bytes):
            piece = made.piece(part)
            assert piece.bytes <= quantum_bytes or part.layers * part.count == 1
            assert seen.add(part)
            size += piece.bytes
    assert size == made.total_bytes
