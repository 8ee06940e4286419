"""One load on one target: what it answered, and what that cost it."""

import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from ciuicflow.bench import held_streams, procfs, proxies, wrk
from ciuicflow.bench.loads import Load
from ciuicflow.bench.procfs import Cores
from ciuicflow.bench.proxies import Recipe, Target
from ciuicflow.bench.report import Sample
from ciuicflow.bench.wrk import LoadFailed


class Lab(msgspec.Struct, frozen=True):
    """What all measurements of a run share."""

    seconds: float
    cores: Cores
    directory: Path
    stub: Target
    http: aiohttp.ClientSession


class Moment(msgspec.Struct, frozen=True):
    """The meters at the beginning or the end of a measurement."""

    at_s: float
    used: procfs.Usage | None
    core_busy_s: float | None


def _moment(lab: Lab, target: Target) -> Moment:
    core = lab.cores.proxy
    return Moment(
        time.monotonic(),
        procfs.usage(target.pid) if target.pid is not None else None,
        procfs.core_busy_s(core) if core is not None else None,
    )


async def drive(lab: Lab, load: Load, target: Target, number: int) -> Sample:
    """Let wrk put the load on a target. Raises LoadFailed."""
    counts_before = await proxies.settled_counts(lab.http, lab.stub)
    before = _moment(lab, target)
    opts_in = target.label == proxies.OPTED_IN
    result = await wrk.run(load, target.port, lab.seconds, lab.directory, opts_in=opts_in)
    after = _moment(lab, target)
    units = load.units(counts_before, await proxies.settled_counts(lab.http, lab.stub))
    # wrk leaves at most one request per connection unfinished.
    if not result.requests <= units <= result.requests + load.connections:
        raise LoadFailed(
            f"{load.name} on {target.label}: the upstream sent {units:.2f} answers, "
            f"wrk got {result.requests}"
        )
    return Sample(
        load=load.name,
        target=target.label,
        round=number,
        per_s=result.per_s,
        p50_us=result.p50_us,
        p99_us=result.p99_us,
        **_cost(before, after, units),
    )


def _cost(before: Moment, after: Moment, units: float) -> dict[str, Any]:
    """Return what a sample says of the process between two moments."""
    if before.used is None or after.used is None:
        return {}
    cpu_s = after.used.cpu_s - before.used.cpu_s
    cost = {"cpu_us": cpu_s / units * 1e6, "rss_bytes": after.used.rss_bytes}
    if before.core_busy_s is None or after.core_busy_s is None:
        return cost
    others_s = after.core_busy_s - before.core_busy_s - cpu_s
    return {**cost, "others": max(0.0, others_s / (after.at_s - before.at_s))}


async def hold(lab: Lab, load: Load, recipe: Recipe, number: int, folder: Path) -> Sample:
    """Hold streams open on a proxy of its own: memory that a load before took would hide theirs."""
    async with proxies.running(recipe, lab.stub, folder, lab.cores.proxy) as target:
        assert target.pid is not None
        await proxies.check_answers(lab.http, lab.stub, target)
        idle = procfs.usage(target.pid)
        async with held_streams.open_streams(target.port, load.path, load.connections) as streams:
            counts_before = await proxies.counts(lab.http, lab.stub)
            before = _moment(lab, target)
            await held_streams.hold(streams, lab.seconds)
            after = _moment(lab, target)
            units = load.units(counts_before, await proxies.counts(lab.http, lab.stub))
    cost = _cost(before, after, units)
    return Sample(
        load=load.name,
        target=recipe.label,
        round=number,
        per_s=units / (after.at_s - before.at_s),
        stream_bytes=(cost["rss_bytes"] - idle.rss_bytes) / load.connections,
        **cost,
    )
