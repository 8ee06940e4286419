"""`ciuicflow bench http`: rounds of loads on the stub, nginx and the gateway, in turn."""

import asyncio
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import uvloop

from ciuicflow.bench import held_streams, measure, output, procfs, proxies, report, wrk
from ciuicflow.bench.loads import BY_NAME, Load
from ciuicflow.bench.measure import Lab
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
    loads = [load for name, load in BY_NAME.items() if name in options.loads]
    steps = options.rounds * sum(len(_places(recipes, load)) for load in loads)
    output.announce(cores, steps, options.seconds, has_nginx=find_nginx() is not None)
    samples: list[Sample] = []

    def record(sample: Sample) -> None:
        samples.append(sample)
        step(f"round {sample.round + 1}: {sample.load}, {sample.target}")

    async with (
        proxies.running_stub() as stub,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
    ):
        lab = Lab(options.seconds, cores, directory, stub, http)
        with output.progress(steps) as step:
            for number in range(options.rounds):
                await _round(lab, recipes, loads, number, record)
    return report.build(about, samples)


def _recipes(options: Options) -> list[Recipe]:
    others = [proxies.other_gateway(python) for python in options.gateway_pythons]
    nginx = [Recipe(proxies.NGINX)] if find_nginx() is not None else []
    own = [Recipe(label) for label in (proxies.OPTED_IN, proxies.WITH_LOG)]
    recipes = [*nginx, Recipe(proxies.GATEWAY), *others, *own]
    if len({recipe.label for recipe in recipes}) < len(recipes):
        raise LoadFailed("two interpreters lie in folders of the same name: they need a name each")
    return recipes


def _places(recipes: Sequence[Recipe], load: Load) -> list[str]:
    """Return the labels of the targets that get this load."""
    labels = [recipe.label for recipe in recipes if recipe.is_for(load)]
    return labels if load.is_held else [proxies.DIRECT, *labels]


async def _round(
    lab: Lab,
    recipes: Sequence[Recipe],
    loads: Sequence[Load],
    number: int,
    record: Callable[[Sample], None],
) -> None:
    """Put every load on every target once; the order of the targets rotates with the round."""
    folder = lab.directory / f"round{number}"
    by_label = {recipe.label: recipe for recipe in recipes}
    driven = [load for load in loads if not load.is_held]
    wanted = [recipe for recipe in recipes if any(recipe.is_for(load) for load in driven)]
    async with _running_all(lab, wanted, folder) as targets:
        for load in loads:
            for label in rotated(_places(recipes, load), number):
                if load.is_held:
                    place = folder / load.name / label
                    record(await measure.hold(lab, load, by_label[label], number, place))
                else:
                    record(await measure.drive(lab, load, targets[label], number))


@asynccontextmanager
async def _running_all(
    lab: Lab, recipes: Sequence[Recipe], folder: Path
) -> AsyncIterator[dict[str, Target]]:
    """Start the proxies, see that they answer rightly, and warm them up."""
    targets = {lab.stub.label: lab.stub}
    async with AsyncExitStack() as stack:
        for recipe in recipes:
            context = proxies.running(recipe, lab.stub, folder / recipe.label, lab.cores.proxy)
            target = await stack.enter_async_context(context)
            await proxies.check_answers(lab.http, lab.stub, target)
            await wrk.run(BY_NAME["json"], target.port, _WARM_UP_S, lab.directory)
            targets[recipe.label] = target
        yield targets


def rotated(labels: Sequence[str], by: int) -> list[str]:
    """Return the labels in an order that begins with another one each round."""
    start = by % len(labels)
    return [*labels[start:], *labels[:start]]


async def _about(options: Options, cores: Cores, recipes: Sequence[Recipe]) -> dict[str, Any]:
    """Return what a reader of the figures must know."""
    gateways = {
        recipe.label: await proxies.describe(recipe)
        for recipe in recipes
        if recipe.label not in (proxies.NGINX, proxies.OPTED_IN, proxies.WITH_LOG)
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
