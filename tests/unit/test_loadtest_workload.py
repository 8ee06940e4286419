"""Plans of the load test: seeded, at the wanted rate, in the wanted mix."""

from collections import Counter
from itertools import pairwise
from statistics import fmean, median, pstdev

import pytest
from msgspec.structs import replace

from loadtest.workload import LENGTHS, Lengths, Planned, Workload, plan

PLAIN = Workload(lengths=LENGTHS["slot_bound"])


def test_a_plan_is_the_same_whenever_it_is_made() -> None:
    workload = replace(PLAIN, bypass=0.5, aborts=0.5)
    requests = plan(workload, 1.0, 1.5, seed=1)
    assert [planned.at_s for planned in requests[:2]] == pytest.approx([0.0156010, 0.2040179])
    assert [replace(planned, at_s=0.0) for planned in requests[:2]] == [
        Planned(0, 0.0, "gold", "t4", 433, 106),
        Planned(1, 0.0, "bronze", "t4", 149, 111),
    ]


def test_another_seed_makes_another_plan() -> None:
    assert plan(PLAIN, 1.0, 10.0, seed=1) != plan(PLAIN, 1.0, 10.0, seed=2)


def test_who_opts_in_leaves_or_pays_more_changes_neither_times_nor_lengths() -> None:
    changed = replace(PLAIN, bypass=0.7, aborts=0.3, mix={"gold": 1.0})
    one, other = plan(PLAIN, 5.0, 20.0, seed=3), plan(changed, 5.0, 20.0, seed=3)
    assert [(p.at_s, p.prompt_tokens, p.output_tokens) for p in one] == [
        (p.at_s, p.prompt_tokens, p.output_tokens) for p in other
    ]


def test_requests_come_in_order_and_before_the_end() -> None:
    times = [planned.at_s for planned in plan(PLAIN, 10.0, 30.0, seed=1)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 30.0


def test_the_load_is_a_multiple_of_the_capacity_and_may_jump() -> None:
    """5 and 20 requests per second for 100 s each; 5 standard deviations either side."""
    jump = replace(PLAIN, load=((0.0, 0.5), (100.0, 2.0)))
    times = [planned.at_s for planned in plan(jump, 10.0, 200.0, seed=1)]
    before = sum(at_s < 100 for at_s in times)
    assert before == pytest.approx(500, abs=112)
    assert len(times) - before == pytest.approx(2000, abs=224)


def test_a_load_of_nothing_waits_for_the_next_stage() -> None:
    pause = replace(PLAIN, load=((0.0, 0.0), (5.0, 1.0)))
    assert plan(pause, 10.0, 10.0, seed=1)[0].at_s > 5.0


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.2, 5**0.5)])
def test_gaps_vary_as_the_shape_says(burstiness: float, variation: float) -> None:
    """The coefficient of variation of a gamma distribution is 1 / sqrt(shape)."""
    times = [p.at_s for p in plan(replace(PLAIN, burstiness=burstiness), 10.0, 200.0, seed=1)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(0.05, rel=0.15)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.1)


def test_parts_of_tiers_tenants_bypass_and_aborts_are_as_wanted() -> None:
    workload = replace(
        PLAIN, bypass=0.3, aborts=0.1, tenants={"modest": 1.0, "greedy": 10.0}, burstiness=1.0
    )
    requests = plan(workload, 10.0, 200.0, seed=1)
    tiers = Counter(p.tier for p in requests)
    assert tiers["gold"] / len(requests) == pytest.approx(0.2, abs=0.03)
    assert tiers["bronze"] / len(requests) == pytest.approx(0.5, abs=0.03)
    assert fmean(p.tenant == "modest" for p in requests) == pytest.approx(1 / 11, abs=0.02)
    assert fmean(p.opted_in for p in requests) == pytest.approx(0.7, abs=0.03)
    leaving = [p.leaves_after_s for p in requests if p.leaves_after_s is not None]
    assert len(leaving) / len(requests) == pytest.approx(0.1, abs=0.02)
    assert fmean(leaving) == pytest.approx(2.0, rel=0.2)


def test_lengths_are_log_normal_within_bounds() -> None:
    workload = replace(PLAIN, lengths=Lengths(400, 0.6, 100, 0.6, longest=1000))
    requests = plan(workload, 10.0, 200.0, seed=1)
    assert median(p.prompt_tokens for p in requests) == pytest.approx(400, rel=0.05)
    assert median(p.output_tokens for p in requests) == pytest.approx(100, rel=0.05)
    assert max(p.prompt_tokens for p in requests) == 1000
    assert min(p.output_tokens for p in requests) >= 1
