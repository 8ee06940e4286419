"""The few figures of each scenario that answer its question, from one run. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from ciuicflow.flowcontrol.tiers import DEFAULT_TIERS
from loadtest import changes, statistics
from loadtest.capacity import Reference
from loadtest.run import Run, SystemRun
from loadtest.scenarios import Case
from loadtest.statistics import GroupStats, Tiers, Window

TIERS: Final[Tiers] = {tier.name: tier for tier in DEFAULT_TIERS}
GOLD: Final = DEFAULT_TIERS[0]
_RIVALS: Final = ("flow_off", "nginx", "static", "static_short", "priority")

Figures = Iterator[tuple[str, float | None]]
Groups = Mapping[str, Mapping[str, GroupStats]]
"""By system, then by group."""


def of_run(case: Case, run: Run, reference: Reference) -> dict[str, float | None]:
    """Return the figures by name; None: there was nothing to compute one from."""
    groups = {
        name: statistics.groups([system.records], case.window, TIERS)
        for name, system in run.systems.items()
    }
    compute, needed = _BY_SCENARIO.get(case.scenario, (_overload, ()))
    if not run.systems.keys() >= set(needed):  # --systems left some out
        compute = _overload
    general = {
        f"{name}: useful tokens, share of the engine's capacity": capacity_share(
            system, case.window, reference
        )
        for name, system in run.systems.items()
    }
    return {**general, **dict(compute(case, run, groups))}


def tokens_per_s(system: SystemRun, window: Window) -> float:
    """Return the useful tokens of a system per second."""
    return statistics.useful_tokens(system.records, window) / window.length_s


def capacity_share(system: SystemRun, window: Window, reference: Reference) -> float | None:
    """Return its useful tokens against those of the engine kept just saturated."""
    served = [
        r for r in system.records if r.end_s is not None and r.at_s + r.end_s >= window.start_s
    ]
    return _ratio(tokens_per_s(system, window), reference(served))


def wasted_share(system: SystemRun) -> float:
    """Return the part of the engine's work, over the whole run, that no client stayed for."""
    useful = statistics.useful_tokens(system.records, Window(0.0, float("inf")))
    return max(0.0, 1 - useful / system.spent_tokens) if system.spent_tokens else 0.0


def _overload(case: Case, run: Run, groups: Groups) -> Figures:
    bare, flow = run.systems.get("bare"), groups.get("flow", {})
    for name, system in run.systems.items():
        if bare is not None and name != "bare":
            share = _ratio(tokens_per_s(system, case.window), tokens_per_s(bare, case.window))
            yield f"{name}: useful tokens, times the bare engine's under this load", share
        yield f"{name}: wasted tokens, share of the engine's work", wasted_share(system)
    for tier, stats in flow.items():
        if tier in TIERS:
            yield f"flow: {tier}: token share (floor {TIERS[tier].floor:g})", stats.token_share
            yield f"flow: {tier}: served within its targets", stats.good
    for rival in _RIVALS:
        mine, other = flow.get("opted_in"), groups.get(rival, {}).get("opted_in")
        if mine and other:
            good = _ratio(mine.goodput_per_s, other.goodput_per_s)
            yield f"goodput, times {rival}'s", good
            yield f"P99 E2E of completed, part of {rival}'s", _ratio(_e2e(mine), _e2e(other))
            gold = (groups["flow"].get("gold"), groups[rival].get("gold"))
            if gold[0] and gold[1]:
                yield f"gold: P99 TTFT, part of {rival}'s", _ratio(_ttft(gold[0]), _ttft(gold[1]))


def _bypass(case: Case, run: Run, groups: Groups) -> Figures:
    for name, of in groups.items():
        if stats := of.get("bypass"):
            yield f"{name}: bypass: P50 TTFT (s)", stats.ttft_s.p50 if stats.ttft_s else None
            yield f"{name}: bypass: P99 TTFT (s)", _ttft(stats)
            yield f"{name}: bypass: P99 E2E of completed (s)", _e2e(stats)
            yield f"{name}: bypass: served", stats.served
        if stats := of.get("opted_in"):
            yield f"{name}: opted-in share of the tokens", stats.token_share
        if stats := of.get("gold"):
            yield f"{name}: gold: served within its targets", stats.good
    with_flow, without = groups["flow"].get("bypass"), groups["flow_off"].get("bypass")
    if with_flow and without:
        yield "bypass: P99 TTFT, times flow_off's", _ratio(_ttft(with_flow), _ttft(without))
        yield "bypass: P99 E2E, times flow_off's", _ratio(_e2e(with_flow), _e2e(without))


def _spike(case: Case, run: Run, groups: Groups) -> Figures:
    at_s = case.changes[0]
    after = Window(at_s, case.window.end_s)
    for name, system in run.systems.items():
        yield (
            f"{name}: gold back within its target after (s)",
            changes.recovery_s(system.records, GOLD, at_s, after.end_s),
        )
        gold = statistics.groups([system.records], after, TIERS).get("gold")
        yield f"{name}: gold: P99 TTFT after the spike (s)", _ttft(gold) if gold else None
        yield (
            f"{name}: gold: served within its targets after the spike",
            gold.good if gold else None,
        )


def _speed(case: Case, run: Run, _: Groups) -> Figures:
    system, edges = run.systems["flow"], (*case.changes, case.window.end_s)
    limits = {
        "requests": [(s.at_s, s.limit.requests) for s in system.samples if s.limit],
        "tokens": [(s.at_s, s.limit.tokens) for s in system.samples if s.limit],
        "prompt tokens": [(s.at_s, s.limit.prefill_tokens) for s in system.samples if s.limit],
    }
    for index, what in enumerate(("halved", "doubled")):
        start_s, end_s = edges[index], edges[index + 1]
        for unit, samples in limits.items():
            known = [(at_s, value) for at_s, value in samples if value is not None]
            time_s = changes.settle_s(known, start_s, end_s)
            yield f"speed {what}: limit in {unit} settled after (s)", time_s
        window = Window(start_s + 10, end_s) if end_s - start_s > 20 else Window(start_s, end_s)
        full = tokens_per_s(run.systems["bare"], window)
        yield (
            f"speed {what}: useful tokens after 10 s, share of the bare engine's",
            _ratio(tokens_per_s(system, window), full),
        )
        waiting = [s.engine.waiting for s in system.samples if window.start_s <= s.at_s < end_s]
        mean = sum(waiting) / len(waiting) if waiting else None
        yield f"speed {what}: mean requests waiting in the engine after 10 s", mean


def _tenants(case: Case, run: Run, groups: Groups) -> Figures:
    for name, system in run.systems.items():
        for tenant, share in statistics.token_shares(system.records, case.window).items():
            yield f"{name}: {tenant}: token share", share
        yield f"{name}: Jain's index", groups[name]["opted_in"].jain


def _headroom(case: Case, run: Run, groups: Groups) -> Figures:
    full = tokens_per_s(run.systems["headroom_0"], case.window)
    for name, system in run.systems.items():
        gold = groups[name].get("gold")
        given = _ratio(tokens_per_s(system, case.window), full)
        yield f"{name}: gold: P50 TTFT (s)", gold.ttft_s.p50 if gold and gold.ttft_s else None
        yield f"{name}: gold: P99 TTFT (s)", _ttft(gold) if gold else None
        yield f"{name}: throughput given up", 1 - given if given is not None else None


_BY_SCENARIO: Final[dict[str, tuple[Callable[[Case, Run, Groups], Figures], tuple[str, ...]]]] = {
    "bypass": (_bypass, ("flow", "flow_off")),
    "spike": (_spike, ()),
    "speed": (_speed, ("flow", "bare")),
    "tenants": (_tenants, ()),
    "headroom": (_headroom, ("headroom_0",)),
}
"""How, and which systems must be there."""


def _ttft(stats: GroupStats) -> float | None:
    return stats.ttft_s.p99 if stats.ttft_s else None


def _e2e(stats: GroupStats) -> float | None:
    return stats.e2e_s.p99 if stats.e2e_s else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
