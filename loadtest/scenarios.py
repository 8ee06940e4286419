"""The closed set of scenarios: what each offers to which systems, and what changes meanwhile."""

from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

from loadtest.run import Schedule
from loadtest.statistics import Window
from loadtest.systems import LLAMA, Engine, Front, System
from loadtest.workload import LENGTHS, Workload

BARE: Final = System(name="bare")
FLOW: Final = System(name="flow", front=Front.GATEWAY, flow={"enabled": True})
FLOW_OFF: Final = System(name="flow_off", front=Front.GATEWAY, flow={"enabled": False})
NGINX: Final = System(name="nginx", front=Front.NGINX)
PRIORITY: Final = System(name="priority", by_engine=True)
STATIC: Final = System(name="static", front=Front.HAPROXY)
STATIC_SHORT: Final = System(name="static_short", front=Front.HAPROXY, wait_s=1.8)
"""A queue that gives up after gold's longest wait: the best that a queue without tiers can do."""
ALL: Final = (BARE, FLOW, FLOW_OFF, NGINX, STATIC, STATIC_SHORT, PRIORITY)

EMULATED: Final = ("slot_bound", "kv_bound", "prefill_bound")
HEADROOMS: Final = (0.0, 0.1, 0.2, 0.3, 0.4)
SPIKE_AT: Final = 0.4
"""Part of the run after which the load jumps."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for."""

    seconds: float = 120.0
    warm_s: float = 10.0
    drain_s: float = 30.0
    load: float = 2.0
    aborts: float | None = None
    burstiness: float | None = None

    @property
    def window(self) -> Window:
        """The part of a run that counts."""
        return Window(self.warm_s, self.warm_s + self.seconds)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison: a plan per seed, put on all its systems at once."""

    scenario: str
    name: str
    engine: Engine
    workload: Workload
    systems: tuple[System, ...]
    schedule: Schedule
    window: Window
    changes: tuple[float, ...] = ()
    """Seconds at which load or speed change."""
    from_trace: bool = False

    @property
    def one_by_one(self) -> bool:
        """Engines that compute would take the cores from each other."""
        return self.engine.is_real


Build = Callable[[Case, Options], Iterator[Case]]


def overload(base: Case, _: Options) -> Iterator[Case]:
    """2x the capacity, 20/30/50 % gold/silver/bronze: every system in one run."""
    yield base


def aborts(base: Case, options: Options) -> Iterator[Case]:
    """Overload, and three clients in ten leave early: tokens spent on nobody."""
    part = 0.3 if options.aborts is None else options.aborts
    systems = (BARE, FLOW, FLOW_OFF, NGINX, STATIC)
    yield replace(base, workload=replace(base.workload, aborts=part), systems=systems)


def bursts(base: Case, options: Options) -> Iterator[Case]:
    """As much as the engine can do on average, in bursts (gamma gaps, shape 0.2)."""
    shape = 0.2 if options.burstiness is None else options.burstiness
    workload = replace(base.workload, load=((0.0, options.load / 2),), burstiness=shape)
    yield replace(base, workload=workload)


def bypass(base: Case, _: Options) -> Iterator[Case]:
    """30 % and 70 % of the load without the header: who pays for it."""
    for part in (0.3, 0.7):
        workload = replace(base.workload, bypass=part)
        name = f"bypass{part * 100:.0f}"
        yield replace(base, name=name, workload=workload, systems=(BARE, FLOW, FLOW_OFF))


def spike(base: Case, options: Options) -> Iterator[Case]:
    """0.5x, then 2x: how long until gold is back within its targets."""
    at_s = options.warm_s + SPIKE_AT * options.seconds
    workload = replace(base.workload, load=((0.0, 0.5), (at_s, options.load)))
    systems = (FLOW, FLOW_OFF, STATIC, STATIC_SHORT, PRIORITY)
    schedule = replace(base.schedule, sample_s=0.5)
    yield replace(base, workload=workload, systems=systems, schedule=schedule, changes=(at_s,))


def speed(base: Case, options: Options) -> Iterator[Case]:
    """The engine's speed halves, later doubles, under overload: when the limit settles."""
    changes = tuple(options.warm_s + part * options.seconds for part in (1 / 3, 2 / 3))
    speeds = ((changes[0], 0.5), (changes[1], 1.0))
    schedule = replace(base.schedule, sample_s=0.25, speeds=speeds)
    yield replace(base, systems=(BARE, FLOW), schedule=schedule, changes=changes)


def tenants(base: Case, options: Options) -> Iterator[Case]:
    """Two tenants of one tier, one sends ten times more: who gets the tokens."""
    workload = replace(
        base.workload,
        load=((0.0, 4 * options.load),),
        mix={"silver": 1.0},
        tenants={"modest": 1.0, "greedy": 10.0},
    )
    yield replace(base, workload=workload, systems=(FLOW, FLOW_OFF))


def headroom(base: Case, _: Options) -> Iterator[Case]:
    """What gold's latency costs in throughput, over values of headroom."""
    systems = tuple(
        replace(FLOW, name=f"headroom_{kept:g}", flow={"enabled": True, "headroom": kept})
        for kept in HEADROOMS
    )
    yield replace(base, systems=systems)


def trace(base: Case, _: Options) -> Iterator[Case]:
    """A trace file in Mooncake's format, its shared prefixes included."""
    engine = replace(base.engine, changes=("prefix_cache=true",))
    yield replace(base, from_trace=True, engine=engine)


def llama(base: Case, _: Options) -> Iterator[Case]:
    """Overload against the real llama.cpp server, one system after the other."""
    yield replace(base, systems=(BARE, FLOW, FLOW_OFF, NGINX, STATIC, STATIC_SHORT))


SCENARIOS: Final[dict[str, Build]] = {
    build.__name__: build
    for build in (
        overload, bypass, spike, speed, tenants, headroom, trace, llama, aborts, bursts,
    )
}  # fmt: skip


def cases(scenario: str, engine: str, options: Options) -> list[Case]:
    """Return what a scenario runs on an engine."""
    workload = Workload(lengths=LENGTHS[engine], load=((0.0, options.load),))
    workload = replace(workload, aborts=options.aborts or 0.0, burstiness=options.burstiness or 1.0)
    base = Case(
        scenario=scenario, name=scenario, engine=Engine(engine), workload=workload, systems=ALL,
        window=options.window,
        schedule=Schedule(arrivals_s=options.window.end_s, drain_s=options.drain_s),
    )  # fmt: skip
    return list(SCENARIOS[scenario](base, options))


def engines_of(scenario: str, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the engines that a scenario runs on."""
    return (LLAMA,) if scenario == LLAMA else wanted
