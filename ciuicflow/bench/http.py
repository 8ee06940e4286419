"""`ciuicflow bench http`: rounds of loads on the stub, nginx and the gateway, in turn."""

import asyncio
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import uvloop

from ciuicflow.bench import held_streams, output, procfs, proxies, report, wrk
from ciuicflow.bench.loads import BY_NAME, Load
from ciuicflow.bench.nginx import find_nginx
from ciuicflow.bench.procfs import Cores
from ciuicflow.bench.proxies import Recipe, Target
from ciuicflow.bench.report import Report, Sample
from ciuicflow.bench.wrk import LoadFailed
from ciuicflow.testing.processes import ChildFailed

INTERRUPTED: Final = 130  # 128 + SIGINT, as shells count
_WARM_UP_S: Final = 1.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for."""

    rounds: int
    seconds: float
    loads: tuple[str, ...]
    out: Path
    gateway_pythons: tuple[str, ...]


class Bench(msgspec.Struct, frozen=True):
    """What all measurements of a run share."""

    options: Options
    cores: Cores
    recipes: tuple[Recipe, ...]
    directory: Path
    stub: Target
    http: aiohttp.ClientSession

    @property
    def loads(self) -> list[Load]:
        """What is measured, in the order of the list."""
        return [load for name, load in BY_NAME.items() if name in self.options.loads]


def run(options: Options) -> int:
    """Measure, print, save. Returns 0, 1 where a load or a process failed, 130 if interrupted.

    Raises StartError where something that it needs is missing. All children are gone at the end.
    """
    wrk.require_wrk()
    output.prepare(options.out)
    if "open" in options.loads:
        held_streams.allow_files(2 * BY_NAME["open"].connections)  # a proxy has two each
    try:
        with (
            procfs.own_core() as cores,
            tempfile.TemporaryDirectory() as directory,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            result = runner.run(_until_interrupted(_measure(options, cores, Path(directory))))
    except (ChildFailed, LoadFailed) as error:
        print(f"ciuicflow bench: {error}", file=sys.stderr)
        return 1
    if result is None:
        return INTERRUPTED
    output.show(result)
    output.save(result, options.out)
    return 0


async def _until_interrupted(work: Coroutine[Any, Any, Report]) -> Report | None:
    """Return the result of the work, or None where SIGINT or SIGTERM ended it."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def on_signal() -> None:
        if not task.cancelling():  # a second one must not disturb the first one's cleaning up
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _measure(options: Options, cores: Cores, directory: Path) -> Report:
    recipes = _recipes(options)
    about = await _about(options, cores, recipes)
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        proxies.running_stub() as stub,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        bench = Bench(options, cores, recipes, directory, stub, http)
        samples: list[Sample] = []
        steps = options.rounds * sum(len(_places(bench, load)) for load in bench.loads)
        output.announce(cores, steps, options.seconds, has_nginx=find_nginx() is not None)
        with output.progress(steps) as step:
            for number in range(options.rounds):
                async for sample in _round(bench, number):
                    samples.append(sample)
                    step(f"round {number + 1}: {sample.load}, {sample.target}")
    return report.build(about, samples)


def _recipes(options: Options) -> tuple[Recipe, ...]:
    others = [proxies.other_gateway(python) for python in options.gateway_pythons]
    recipes = [Recipe(proxies.GATEWAY), *others, Recipe(proxies.WITH_LOG)]
    if find_nginx() is not None:
        recipes.insert(0, Recipe(proxies.NGINX))
    if len({recipe.label for recipe in recipes}) < len(recipes):
        raise LoadFailed("two interpreters lie in folders of the same name: they need a name each")
    return tuple(recipes)


def _places(bench: Bench, load: Load) -> list[str]:
    """Return the labels of the targets that get this load."""
    labels = [recipe.label for recipe in bench.recipes if recipe.is_for(load)]
    return labels if load.is_held else [proxies.DIRECT, *labels]


async def _round(bench: Bench, number: int) -> AsyncIterator[Sample]:
    """Put every load on every target once; the order of the targets rotates with the round."""
    folder = bench.directory / f"round{number}"
    async with _all_running(bench, folder) as targets:
        for load in bench.loads:
            for label in rotated(_places(bench, load), number):
                if load.is_held:
                    yield await _hold(bench, load, label, number, folder / load.name)
                else:
                    yield await _drive(bench, load, targets[label], number)


@asynccontextmanager
async def _all_running(bench: Bench, folder: Path) -> AsyncIterator[dict[str, Target]]:
    """Start every proxy that any driven load needs, warm."""
    driven = [load for load in bench.loads if not load.is_held]
    targets = {bench.stub.label: bench.stub}
    async with AsyncExitStack() as stack:
        for index, recipe in enumerate(bench.recipes):
            if any(recipe.is_for(load) for load in driven):
                context = proxies.running(
                    recipe, bench.stub, folder / str(index), bench.cores.proxy
                )
                target = await stack.enter_async_context(context)
                await proxies.check_answers(bench.http, bench.stub, target)
                await wrk.run(BY_NAME["json"], target.port, _WARM_UP_S, bench.directory)
                targets[recipe.label] = target
        yield targets


def rotated(labels: Sequence[str], by: int) -> list[str]:
    """Return the labels in an order that begins with another one each round."""
    start = by % len(labels)
    return [*labels[start:], *labels[:start]]


async def _drive(bench: Bench, load: Load, target: Target, number: int) -> Sample:
    """Let wrk put the load on a target."""
    counts_before = await proxies.settled_counts(bench.http, bench.stub)
    used_before = _usage(target)
    result = await wrk.run(load, target.port, bench.options.seconds, bench.directory)
    units = load.units(counts_before, await proxies.settled_counts(bench.http, bench.stub))
    used = _usage(target)
    lost = result.requests - units
    # wrk leaves at most one request per connection unfinished.
    if not -load.connections <= lost <= 0:
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
        cpu_us=(used.cpu_s - used_before.cpu_s) / units * 1e6 if used and used_before else None,
        rss_bytes=used.rss_bytes if used else None,
    )


def _usage(target: Target) -> procfs.Usage | None:
    return procfs.usage(target.pid) if target.pid is not None else None


async def _hold(bench: Bench, load: Load, label: str, number: int, folder: Path) -> Sample:
    """Hold streams open on a proxy of its own: memory that a load before took would hide theirs."""
    recipe = next(recipe for recipe in bench.recipes if recipe.label == label)
    place = folder / str(bench.recipes.index(recipe))
    async with proxies.running(recipe, bench.stub, place, bench.cores.proxy) as target:
        assert target.pid is not None
        await proxies.check_answers(bench.http, bench.stub, target)
        idle = procfs.usage(target.pid)
        async with held_streams.open_streams(target.port, load.path, load.connections) as streams:
            began_s = time.monotonic()
            counts_before = await proxies.counts(bench.http, bench.stub)
            used_before = procfs.usage(target.pid)
            await held_streams.hold(streams, bench.options.seconds)
            used = procfs.usage(target.pid)
            units = load.units(counts_before, await proxies.counts(bench.http, bench.stub))
            held_s = time.monotonic() - began_s
    return Sample(
        load=load.name,
        target=label,
        round=number,
        per_s=units / held_s,
        cpu_us=(used.cpu_s - used_before.cpu_s) / units * 1e6,
        rss_bytes=used.rss_bytes,
        stream_bytes=(used.rss_bytes - idle.rss_bytes) / load.connections,
    )


async def _about(options: Options, cores: Cores, recipes: Sequence[Recipe]) -> dict[str, Any]:
    """Return what a reader of the figures must know."""
    gateways = {
        recipe.label: await proxies.describe(recipe)
        for recipe in recipes
        if recipe.label not in (proxies.NGINX, proxies.WITH_LOG)
    }
    return {
        "began_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "gateways": gateways,
        "loop": "uvloop",
        "nginx": _version(find_nginx(), "-v"),
        "wrk": _version(wrk.require_wrk(), "-v"),
        "cpu": procfs.cpu_model(),
        "cpus": os.cpu_count(),
        "cores": msgspec.to_builtins(cores),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
    }


def _version(executable: str | None, flag: str) -> str | None:
    """Return the first line of what a program says of itself."""
    if executable is None:
        return None
    said = subprocess.run(
        [executable, flag], capture_output=True, text=True, timeout=10, check=False
    )
    return (said.stdout + said.stderr).partition("\n")[0].strip()
