"""The closed set of scenarios, by name, and a line of figures for each."""

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from ciuicflow.flowcontrol.tiers import FlowConfig
from ciuicflow.testing.engine_profile import PROFILES
from loadtest.workload import LENGTHS
from simulation.harness import Scenario, Simulation

ENGINES: Final = tuple(name for name in LENGTHS if name in PROFILES)
SEEDS: Final = (1, 2, 3)
SPIKE_S: Final = 45.0
CHANGE_S: Final = 40.0


def _named() -> Iterator[tuple[str, Scenario]]:
    for engine in ENGINES:
        base = Scenario(engine=engine, duration_s=100.0)
        # Few and long steps: there it takes longer to see enough, and costs less to simulate.
        long_s = 300.0 if engine == "prefill_bound" else 150.0
        yield f"overload-{engine}", replace(base, duration_s=long_s)
        yield f"no-flow-{engine}", replace(base, flow=False)
        yield f"half-load-{engine}", replace(base, load=((0.0, 0.5),))
        yield f"spike-{engine}", replace(base, load=((0.0, 0.5), (SPIKE_S, 2.0)), duration_s=75.0)
        for name, speed in (("slower", 0.5), ("faster", 2.0)):
            load = ((0.0, 2.0), (CHANGE_S, 2.0 * speed))
            changed = replace(base, speeds=((CHANGE_S, speed),), load=load, duration_s=90.0)
            yield f"{name}-{engine}", changed
        tenants = {"modest": 1.0, "greedy": 10.0}
        yield f"tenants-{engine}", replace(base, mix={"silver": 1.0}, tenants=tenants,
                                           load=((0.0, 6.0),), duration_s=150.0)  # fmt: skip
        yield f"gold-only-{engine}", replace(base, mix={"gold": 0.9, "bronze": 0.1})
        for part in (0.3, 0.7):
            yield f"bypass{part * 100:.0f}-{engine}", replace(base, bypass=part)
        for kept in (0.1, 0.2, 0.3, 0.4, 0.5):
            config = FlowConfig(headroom=kept)
            yield f"headroom{kept * 100:.0f}-{engine}", replace(base, config=config)
        yield f"reports-{engine}", replace(base, scrape_s=1.0, duration_s=80.0)
        yield f"whole-{engine}", replace(base, whole=1.0)
        yield f"whole-reports-{engine}", replace(base, whole=1.0, scrape_s=1.0, duration_s=80.0)
        yield f"ranks-{engine}", replace(base, engines=4, behind_one=True, duration_s=35.0)
        yield f"engines-{engine}", replace(base, engines=3, duration_s=35.0)
        yield f"aborts-{engine}", replace(base, aborts=0.3, duration_s=80.0)


SCENARIOS: Final = dict(_named())


def run(name: str, seed: int) -> Simulation:
    return Simulation(replace(SCENARIOS[name], seed=seed)).run()


def describe(name: str, done: Simulation) -> str:
    """Return one line of a table."""
    share = "" if done.scenario.speeds else f"{done.capacity_share():6.3f}"
    line = f"{name:24s} {done.scenario.seed:4d} {share:6s} {done.engine_queue():7.2f}"
    for tier in done.scenario.mix:
        stats = done.of(tier, opted_in=done.scenario.flow)
        line += (
            f" | {tier:6s} {stats.served:4.2f} {stats.good:4.2f}"
            f" {stats.p50_s:6.2f} {stats.p99_s:6.2f}"
        )
    return line


HEADER: Final = (
    "scenario                 seed  share  queued | tier, served, in target, TTFT p50 and p99 (s)"
)
