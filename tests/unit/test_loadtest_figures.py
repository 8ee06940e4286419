"""Scenarios, and the figures that answer their questions, from runs written by hand."""

import pytest
from msgspec.structs import replace

from loadtest import figures, output, result
from loadtest.records import Outcome, Record
from loadtest.run import Run, SystemRun
from loadtest.samples import EngineSample, LimitSample, Sample
from loadtest.scenarios import SCENARIOS, Case, Options, cases, engines_of
from loadtest.statistics import Window

WINDOW = Options().window
END_S = WINDOW.end_s


def record(
    id_: int, at_s: float, *, tier: str = "gold", tenant: str = "t1", ttft_s: float = 1.0,
    took_s: float = 2.0,
) -> Record:  # fmt: skip
    """A completed request of 100 prompt tokens and 11 of output."""
    return Record(
        id=id_, tier=tier, tenant=tenant, opted_in=True, at_s=at_s, outcome=Outcome.COMPLETED,
        status=200, ttft_s=ttft_s, last_s=took_s, end_s=took_s, prompt_tokens=100, tokens=11,
    )  # fmt: skip


def system(records: list[Record], samples: list[Sample] | None = None) -> SystemRun:
    return SystemRun(records, samples or [], 1000.0, {"engine": 0.1})


def run(**systems: SystemRun) -> Run:
    return Run(
        seed=1, planned=2, lag_p99_s=0.001, lag_max_s=0.002, generator_cpu=0.1, invalid=[],
        systems=systems,
    )  # fmt: skip


def case(scenario: str) -> Case:
    return cases(scenario, "slot_bound", Options())[0]


def test_every_scenario_builds_its_cases_on_its_engines() -> None:
    assert set(SCENARIOS) >= {
        "overload", "bypass", "spike", "speed", "tenants", "headroom", "trace", "llama",
    }  # fmt: skip
    for scenario in SCENARIOS:
        for engine in engines_of(scenario, ("slot_bound", "kv_bound", "prefill_bound")):
            for built in cases(scenario, engine, Options()):
                names = [one.name for one in built.systems]
                assert len(set(names)) == len(names) > 1
                assert all(0 < at_s < built.window.end_s for at_s in built.changes)


def test_overload_offers_twice_the_capacity_to_everyone_and_real_engines_take_turns() -> None:
    overload = case("overload")
    assert overload.workload.load == ((0.0, 2.0),)
    assert overload.workload.mix == {"gold": 0.2, "silver": 0.3, "bronze": 0.5}
    assert {one.name for one in overload.systems} == {
        "bare", "flow", "flow_off", "nginx", "static", "static_short", "priority",
    }  # fmt: skip
    assert not overload.one_by_one
    assert cases("llama", "llama", Options())[0].one_by_one


def test_overload_compares_goodput_and_latency_with_each_rival() -> None:
    fast = [record(0, 20.0), record(1, 30.0)]
    slow = [record(0, 20.0), record(1, 30.0, ttft_s=4.0, took_s=8.0)]
    done = run(flow=system(fast), flow_off=system(slow), bare=system(slow))
    found = figures.of_run(case("overload"), done, lambda _: 111 / WINDOW.length_s)
    assert found["goodput, times flow_off's"] == pytest.approx(2.0)
    assert found["P99 E2E of completed, part of flow_off's"] == pytest.approx(0.25)
    assert found["gold: P99 TTFT, part of flow_off's"] == pytest.approx(0.25)
    assert found["flow: gold: served within its targets"] == 1.0
    # 222 useful tokens against a capacity of 111 in the window, and 1000 that the engine made.
    assert found["flow: useful tokens, share of the engine's capacity"] == pytest.approx(2.0)
    assert found["flow: wasted tokens, share of the engine's work"] == pytest.approx(0.778)
    assert "goodput, times nginx's" not in found  # it was left out


def test_a_spike_tells_when_gold_is_back() -> None:
    spike = case("spike")
    (at_s,) = spike.changes
    records = [record(n, at_s + n, ttft_s=5.0 if n < 3 else 0.5) for n in range(50)]
    found = figures.of_run(spike, run(flow=system(records)), lambda _: None)
    assert found["flow: gold back within its target after (s)"] == pytest.approx(3.0)


def test_speed_tells_when_the_limit_has_settled() -> None:
    speed = case("speed")
    halved_s = speed.changes[0]
    samples = [
        Sample(
            float(second),
            EngineSample(waiting=1.0, running=8.0, spent_tokens=0.0),
            LimitSample(16.0 if second < halved_s + 5 else 8.0, None, 900.0),
        )
        for second in range(int(END_S))
    ]
    records = [record(n, float(n)) for n in range(int(END_S))]
    done = run(flow=system(records, samples), bare=system(records))
    found = figures.of_run(speed, done, lambda _: None)
    settled_s = found["speed halved: limit in requests settled after (s)"]
    assert settled_s == pytest.approx(5.0, abs=1.0)
    assert found["speed halved: limit in prompt tokens settled after (s)"] == 0.0
    assert found["speed halved: limit in tokens settled after (s)"] is None
    assert found["speed doubled: limit in requests settled after (s)"] == 0.0
    assert found["speed doubled: useful tokens after 10 s, share of the bare engine's"] == 1.0
    assert found["speed halved: mean requests waiting in the engine after 10 s"] == 1.0


def test_tenants_tells_who_got_the_tokens() -> None:
    records = [record(n, 20.0 + n, tier="silver", tenant="modest") for n in range(3)]
    records += [record(3, 30.0, tier="silver", tenant="greedy")]
    found = figures.of_run(case("tenants"), run(flow=system(records)), lambda _: None)
    assert found["flow: modest: token share"] == pytest.approx(0.75)
    assert found["flow: Jain's index"] == pytest.approx(0.8)


def test_headroom_tells_what_was_given_up() -> None:
    full = [record(n, 20.0 + n) for n in range(10)]
    done = run(headroom_0=system(full), **{"headroom_0.4": system(full[:8])})
    found = figures.of_run(case("headroom"), done, lambda _: None)
    assert found["headroom_0.4: throughput given up"] == pytest.approx(0.2)
    assert found["headroom_0.4: gold: P99 TTFT (s)"] == 1.0


def test_a_result_pools_its_runs_and_counts_every_request() -> None:
    overload = case("overload")
    chosen = tuple(one for one in overload.systems if one.name in ("bare", "flow"))
    overload = replace(overload, systems=chosen)
    refused = replace(
        record(1, 30.0), outcome=Outcome.REFUSED, ttft_s=None, last_s=None, end_s=None
    )
    first = run(bare=system([record(0, 20.0), refused]), flow=system([record(0, 20.0), refused]))
    second = replace(first, seed=2, invalid=["requests were sent late"])
    done = result.build(overload, 5.4, lambda _: 10.0, [first, second], {})
    assert not done.is_valid
    assert done.runs[0].outcomes["flow"] == {"completed": 1, "refused": 1}
    assert done.systems["flow"].groups["gold"].offered == 4
    assert done.systems["flow"].useful_tokens_per_s == pytest.approx(111 / WINDOW.length_s)
    assert done.systems["flow"].bare_share == pytest.approx(1.0)
    by_name = {figure.name: figure for figure in done.figures}
    assert by_name["flow: gold: served within its targets"].median == 0.5
    lines = list(output.text(done))
    assert "overload on slot_bound: 2x of 5.40 requests/s, 120 s, seeds 1, 2" in lines[0]
    assert "INVALID, seed 2: requests were sent late" in lines
    assert any(line.startswith("flow    gold") for line in lines)


def test_figures_that_no_run_had_are_shown_as_missing() -> None:
    spike = replace(case("spike"), systems=(case("overload").systems[1],))
    late = run(flow=system([record(n, 60.0 + n, ttft_s=9.0, took_s=9.5) for n in range(20)]))
    done = result.build(spike, 5.4, lambda _: None, [late], {})
    back = next(figure for figure in done.figures if "gold back" in figure.name)
    assert (back.median, back.missing) == (None, 1)


def test_the_window_is_what_follows_the_warm_up() -> None:
    assert Options(seconds=60.0, warm_s=5.0).window == Window(5.0, 65.0)
