"""Flow control in front of engine models: what an operator buys it for.

Bounds are those that are promised, or looser where a run of a minute or two has too few requests
for them. ``python -m simulation`` prints the figures.
"""

from functools import cache

import pytest
from msgspec.structs import replace

from ciuicflow.flowcontrol.tiers import DEFAULT_TIERS
from ciuicflow.testing.engine_model import EngineProfile
from loadtest.workload import LENGTHS
from simulation.harness import Request, Scenario, Simulation
from simulation.scenarios import CHANGE_S, ENGINES, SCENARIOS, SEEDS, SPIKE_S, run

GOLD, SILVER, BRONZE = DEFAULT_TIERS
each_engine = pytest.mark.parametrize("engine", ENGINES)


once = cache(run)


def overloads(engine: str) -> list[Simulation]:
    return [once(f"overload-{engine}", seed) for seed in SEEDS]


def _gold(done: Simulation, since_s: float, until_s: float) -> list[Request]:
    return [
        request
        for request in done.requests
        if request.tier == "gold" and since_s < request.arrived_s < until_s
    ]


# Twice the capacity is offered: 20 % gold, 30 % silver, 50 % bronze.


@each_engine
def test_at_twice_the_capacity_gold_is_served_within_its_target(engine: str) -> None:
    gold = [
        request
        for done in overloads(engine)
        for request in _gold(done, done.scenario.warm_s, done.scenario.duration_s - 10)
    ]
    times = sorted(request.ttft_s for request in gold if request.first_s is not None)
    assert len(times) > 0.98 * len(gold)
    assert times[int(0.99 * len(times))] < GOLD.ttft_target_s


@each_engine
def test_at_twice_the_capacity_the_engine_does_what_it_can(engine: str) -> None:
    shares = [done.capacity_share() for done in overloads(engine)]
    assert min(shares) > 0.97


@each_engine
def test_at_twice_the_capacity_hardly_a_request_waits_inside_the_engine(engine: str) -> None:
    assert max(done.engine_queue() for done in overloads(engine)) < 1.0


@each_engine
def test_at_twice_the_capacity_lower_tiers_keep_their_floors(engine: str) -> None:
    for done in overloads(engine):
        assert done.token_share(lambda request: request.tier == "bronze") > 0.95 * BRONZE.floor
        assert done.token_share(lambda request: request.tier == "silver") > 0.95 * SILVER.floor


@each_engine
def test_what_is_served_at_twice_the_capacity_is_served_within_its_target(engine: str) -> None:
    for done in overloads(engine):
        for tier in ("silver", "bronze"):
            stats = done.of(tier)
            assert stats.good > 0.95 * stats.served


@each_engine
def test_what_is_in_flight_never_exceeds_the_limit(engine: str) -> None:
    assert max(done.most_in_flight_over_limit for done in overloads(engine)) == 0


@each_engine
def test_gold_alone_at_twice_the_capacity_leaves_bronze_its_floor(engine: str) -> None:
    done = once(f"gold-only-{engine}", 1)
    assert done.token_share(lambda request: request.tier == "bronze") > 0.95 * BRONZE.floor
    assert done.capacity_share() > 0.96


# Load and speed change.


@each_engine
def test_gold_is_back_within_its_target_two_seconds_after_a_spike(engine: str) -> None:
    spikes = [once(f"spike-{engine}", seed) for seed in SEEDS]
    after = [request for done in spikes for request in _gold(done, SPIKE_S + 2, SPIKE_S + 22)]
    late = sum(request.ttft_s > GOLD.ttft_target_s for request in after)
    assert late <= 0.05 * len(after)


@each_engine
@pytest.mark.parametrize(("change", "speed"), [("slower", 0.5), ("faster", 2.0)])
def test_ten_seconds_after_a_change_of_speed_the_engine_is_full_again(
    engine: str, change: str, speed: float
) -> None:
    before = overloads(engine)[0]
    done = once(f"{change}-{engine}", 1)
    start_s, end_s = CHANGE_S + 10, done.scenario.duration_s
    full = tokens_per_s(before, 20.0, before.scenario.duration_s) * speed
    assert tokens_per_s(done, start_s, end_s) > 0.93 * full  # few requests: +- 4 %
    waiting = [sample[4] for sample in done.samples if sample[0] > start_s]
    assert sum(waiting) / len(waiting) < 1.5


def tokens_per_s(done: Simulation, start_s: float, end_s: float) -> float:
    tokens = 0.0
    for request in done.requests:
        if request.first_s is None:
            continue
        if start_s < request.first_s < end_s:
            tokens += request.prompt
        last_s = request.done_s or done.scenario.duration_s
        inside_s = min(last_s, end_s) - max(request.first_s, start_s)
        tokens += request.emitted * max(0.0, inside_s) / max(1e-9, last_s - request.first_s)
    return tokens / (end_s - start_s)


# Tenants and bypass.


@each_engine
def test_a_tenant_that_sends_ten_times_more_gets_no_more(engine: str) -> None:
    done = once(f"tenants-{engine}", 1)
    share = done.token_share(lambda request: request.tenant == "modest")
    assert share == pytest.approx(0.5, abs=0.025)  # 5 % of its share


@each_engine
def test_bypass_below_its_part_is_served_whole_and_opted_in_requests_get_the_rest(
    engine: str,
) -> None:
    """Three tenths of twice the capacity bypass: 0.6 of it."""
    done = once(f"bypass30-{engine}", 1)
    end_s = done.scenario.duration_s - 15
    bypass = [r for r in done.requests if not r.opted_in and 20 < r.arrived_s < end_s]
    served = sum(request.first_s is not None for request in bypass)
    assert served > 0.97 * len(bypass)
    assert done.token_share(lambda request: request.opted_in) > 0.38
    assert done.capacity_share() > 0.96


@each_engine
def test_bypass_beyond_the_capacity_leaves_opted_in_requests_their_part(engine: str) -> None:
    """Seven tenths of twice the capacity bypass, and are never held: 1.4 times the capacity."""
    done = once(f"bypass70-{engine}", 1)
    part = done.scenario.config.opted_in_share
    assert done.token_share(lambda request: request.opted_in) > 0.88 * part


# What else changes.


@pytest.mark.parametrize("engine", ["slot_bound", "kv_bound"])
def test_headroom_brings_gold_close_to_its_latency_at_half_load(engine: str) -> None:
    half = once(f"half-load-{engine}", 1).of("gold")
    kept = once(f"headroom40-{engine}", 1)
    assert kept.of("gold").p50_s < 1.3 * half.p50_s
    assert kept.of("gold").p99_s < overloads(engine)[0].of("gold").p99_s / 2
    assert kept.capacity_share() > 0.65


@each_engine
@pytest.mark.parametrize("what", ["reports", "whole-reports", "engines", "ranks", "aborts"])
def test_the_engine_is_kept_full_and_gold_served_however_little_is_seen_of_it(
    what: str, engine: str
) -> None:
    done = once(f"{what}-{engine}", 1)
    assert done.capacity_share() > 0.94
    gold = done.of("gold")
    assert gold.served > 0.97
    assert gold.good > 0.94


@each_engine
def test_answers_in_one_piece_without_reports_still_keep_the_engine_full(engine: str) -> None:
    """Neither first tokens nor queues are seen: gold's latency is then a matter of luck."""
    done = once(f"whole-{engine}", 1)
    assert done.capacity_share() > 0.9
    assert done.engine_queue() < once(f"no-flow-{engine}", 1).engine_queue() / 20


@pytest.mark.parametrize("target_s", [0.04, 0.06])
def test_the_time_between_tokens_is_held_to_the_target(target_s: float) -> None:
    """A batch of 256 would take 0.1 s per step."""
    tiers = tuple(replace(tier, itl_target_s=target_s) for tier in DEFAULT_TIERS)
    done = Simulation(_large(tiers)).run()
    times = sorted(r.itl_s for r in done.requests if r.done_s and (r.sent_s or 0) > 20)
    assert times[int(0.9 * len(times))] < target_s
    assert times[len(times) // 2] > 0.85 * target_s  # and not by starving the engine


def test_a_target_between_tokens_that_no_load_can_meet_is_not_pursued() -> None:
    tiers = tuple(replace(tier, itl_target_s=0.005) for tier in DEFAULT_TIERS)
    assert Simulation(_large(tiers)).run().capacity_share() > 0.97


def _large(tiers: tuple[object, ...]) -> Scenario:
    base = SCENARIOS["overload-slot_bound"]
    return replace(
        base,
        profile=EngineProfile(
            prefill_tokens_per_s=40_000.0, max_num_batched_tokens=8192, jitter=0.05
        ),
        lengths=replace(LENGTHS["slot_bound"], prompt=200, output=200, output_sigma=0.5),
        config=replace(base.config, tiers=tiers),
        duration_s=50.0,
    )
