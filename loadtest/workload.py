"""Which requests come when: arrivals, lengths, tiers, tenants, aborts. Pure; a seed says it all.

Arrivals and properties have random streams of their own: another tier mix leaves the times alone.
"""

import math
from collections.abc import Iterator, Mapping
from random import Random
from typing import Final

import msgspec

MIX: Final = {"gold": 0.2, "silver": 0.3, "bronze": 0.5}
TENANTS: Final = {"t1": 1.0, "t2": 1.0, "t3": 1.0, "t4": 1.0}
SHORTEST_PROMPT: Final = 8
ABORT_MEAN_S: Final = 2.0
"""Clients that leave do so after an exponential time with this mean."""


class Planned(msgspec.Struct, frozen=True):
    """One request as every compared system gets it."""

    id: int
    at_s: float
    """From the start of the run; latencies count from here, however late it is sent."""
    tier: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    opted_in: bool = True
    leaves_after_s: float | None = None
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks in a trace; equal ids are equal text."""


class Lengths(msgspec.Struct, frozen=True):
    """Log-normal lengths in tokens: median and sigma of prompts and of answers."""

    prompt: float
    prompt_sigma: float
    output: float
    output_sigma: float
    longest: int = 4000

    def draw(self, rng: Random) -> tuple[int, int]:
        """Return the length of a prompt and of its answer."""
        prompt = rng.lognormvariate(math.log(self.prompt), self.prompt_sigma)
        output = rng.lognormvariate(math.log(self.output), self.output_sigma)
        return (
            max(SHORTEST_PROMPT, min(int(prompt), self.longest)),
            max(1, min(int(output), self.longest)),
        )


LENGTHS: Final = {
    "slot_bound": Lengths(400, 0.6, 100, 0.6),
    "kv_bound": Lengths(500, 0.5, 200, 0.5),
    "prefill_bound": Lengths(600, 0.6, 40, 0.6),
    "llama": Lengths(200, 0.5, 60, 0.5, longest=1000),
}
"""Per engine; the first three are those of tests/simulation."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is offered."""

    lengths: Lengths
    load: tuple[tuple[float, float], ...] = ((0.0, 2.0),)
    """From which second on, how many times the capacity is offered; the first is second 0."""
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts (CV 1/sqrt)."""
    mix: Mapping[str, float] = msgspec.field(default_factory=lambda: MIX)
    tenants: Mapping[str, float] = msgspec.field(default_factory=lambda: TENANTS)
    """Their parts of the arrivals."""
    bypass: float = 0.0
    """Part of the requests that do not opt in."""
    aborts: float = 0.0
    """Part of the clients that leave before the end."""


def plan(workload: Workload, capacity_rps: float, until_s: float, seed: int) -> list[Planned]:
    """Return the requests of a run, in order; the same arguments give the same list."""
    properties = Random(f"{seed}:properties")
    times = _arrivals(workload, capacity_rps, until_s, Random(f"{seed}:arrivals"))
    return [_request(workload, id_, at_s, properties) for id_, at_s in enumerate(times)]


def _arrivals(
    workload: Workload, capacity_rps: float, until_s: float, rng: Random
) -> Iterator[float]:
    """Yield times. A gap is drawn in units of work, so that a change of load acts at once."""
    shape = workload.burstiness
    ends = [start_s for start_s, _ in workload.load[1:]] + [math.inf]
    stage, now = 0, 0.0
    while True:
        gap = rng.gammavariate(shape, 1 / shape)
        while True:
            rate = capacity_rps * workload.load[stage][1]
            if rate > 0 and now + gap / rate <= ends[stage]:
                now += gap / rate
                break
            if ends[stage] >= until_s:
                return
            gap -= (ends[stage] - now) * rate
            now, stage = ends[stage], stage + 1
        if now >= until_s:
            return
        yield now


def _request(workload: Workload, id_: int, at_s: float, rng: Random) -> Planned:
    prompt, output = workload.lengths.draw(rng)
    tier, tenant = draw(rng, workload.mix), draw(rng, workload.tenants)
    opted_in = rng.random() >= workload.bypass
    leaves, after_s = rng.random() < workload.aborts, rng.expovariate(1 / ABORT_MEAN_S)
    return Planned(
        id_, at_s, tier, tenant, prompt, output, opted_in, after_s if leaves else None
    )  # fmt: skip


def draw(rng: Random, parts: Mapping[str, float]) -> str:
    """Choose a name by the parts, which need not add up to 1."""
    return rng.choices(list(parts), weights=list(parts.values()))[0]
