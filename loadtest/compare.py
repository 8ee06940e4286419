"""The whole command: what each scenario needs first, then its runs, then its files."""

import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ciuicflow import __version__
from ciuicflow.bench import procfs
from ciuicflow.bench.nginx import find_nginx
from ciuicflow.testing.processes import ChildFailed
from loadtest import calibrate, output, result, trace, workload
from loadtest.calibrate import Speed, Tuning
from loadtest.capacity import Reference, replay_reference, replay_rps
from loadtest.haproxy import find_haproxy
from loadtest.progress import Progress, progress
from loadtest.run import Run, SystemRun, run_side_by_side
from loadtest.scenarios import Case, Options, cases
from loadtest.systems import Engine, Front, System
from loadtest.workload import Planned

_TRACE_SAMPLE: Final = 600


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The trace file and how it is scaled."""

    file: Path
    lengths: float
    speed: float | None
    """None: so that the wanted load is offered."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for."""

    pairs: tuple[tuple[str, str], ...]
    """Scenario and engine."""
    options: Options
    seeds: tuple[int, ...]
    out: Path
    systems: tuple[str, ...] | None
    """Names of those wanted; None: all of the scenario."""
    limits: tuple[int, ...]
    """Static limits to try; only one: no calibration."""
    tune_s: float
    trace: TraceOptions | None


class _Lab:
    """What is found out once and used by several cases."""

    def __init__(self, command: Command, directory: Path, shown: Progress) -> None:
        self.command = command
        self.shown = shown
        self._directory = directory
        self._runs = 0
        self._speeds: dict[Engine, Speed] = {}
        self._tunings: dict[Engine, Mapping[float, Tuning]] = {}

    def folder(self) -> Path:
        """Return a new one."""
        self._runs += 1
        return self._directory / str(self._runs)

    async def speed(self, engine: Engine) -> Speed:
        """Return what an engine can do."""
        if engine not in self._speeds:
            self.shown.begin(f"{engine.name}: what it can do")
            self._speeds[engine] = await calibrate.measure(engine, self.folder())
        return self._speeds[engine]

    async def tuning(self, case: Case) -> Mapping[float, Tuning]:
        """Return which static limits serve best under the plain overload."""
        limits, engine = self.command.limits, Engine(case.engine.name)
        if len(limits) == 1:
            return {wait_s: Tuning(wait_s, {limits[0]: 0.0}) for wait_s in calibrate.WAITS_S}
        if engine not in self._tunings:
            self.shown.begin(f"{engine.name}: static limits {limits}")
            load = workload.Workload(
                lengths=case.workload.lengths, load=((0.0, self.command.options.load),)
            )
            rps = (await self.speed(engine)).requests_per_s
            self._tunings[engine] = await calibrate.tune(
                engine, load, rps, self.command.tune_s, limits, self.folder()
            )
        return self._tunings[engine]


async def compare(command: Command) -> bool:
    """Run everything and write the files; False if any run was invalid. Raises ChildFailed."""
    todo = [
        _available(case, command.systems)
        for scenario, engine in command.pairs
        for case in cases(scenario, engine, command.options)
    ]
    _allow_files()
    all_valid = True
    with (
        tempfile.TemporaryDirectory(prefix="ciuicflow-loadtest-") as directory,
        progress(sum(_lasts_s(case) * len(command.seeds) for case in todo)) as shown,
    ):
        lab = _Lab(command, Path(directory), shown)
        for case in todo:
            done = await _compare_one(lab, case)
            all_valid = all_valid and done.is_valid
    return all_valid


def _allow_files() -> None:
    """Let this process and its children hold a connection for each waiting request."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _available(case: Case, wanted: tuple[str, ...] | None) -> Case:
    """Leave out what is not wanted or not installed, and say so."""
    missing = set()
    if find_nginx() is None:
        missing.add(Front.NGINX)
    if find_haproxy() is None:
        missing.add(Front.HAPROXY)
    for front in sorted(missing & {system.front for system in case.systems}):
        print(f"left out: {front} is not installed (apt-get install {front})", file=sys.stderr)
    systems = tuple(
        system
        for system in case.systems
        if system.front not in missing
        and (wanted is None or system.name in wanted or case.scenario == "headroom")
    )
    if not systems:
        raise ChildFailed(f"{case.name} compares none of the wanted systems")
    return replace(case, systems=systems)


def _lasts_s(case: Case) -> float:
    times = len(case.systems) if case.one_by_one else 1
    return times * (case.schedule.arrivals_s + case.schedule.drain_s)


async def _compare_one(lab: _Lab, case: Case) -> result.Result:
    command = lab.command
    can_do = await lab.speed(Engine(case.engine.name))
    tunings: Mapping[float, Tuning] = {}
    if any(system.front is Front.HAPROXY for system in case.systems):
        tunings = await lab.tuning(case)
        case = replace(case, systems=tuple(_tuned(s, tunings) for s in case.systems))
    lines, speed = _trace(command, case)
    runs: list[Run] = []
    for number, seed in enumerate(command.seeds, 1):
        lab.shown.begin(f"{case.name} on {case.engine.name}, run {number} of {len(command.seeds)}")
        plan = _plan(command, case, can_do.requests_per_s, lines, speed, seed)
        runs.append(await _run(lab, case, plan, seed))
    about = {**_about(), "static_limits_tried": msgspec.to_builtins(tunings, str_keys=True)}
    if command.trace is not None and lines:
        about["trace"] = {
            "file": command.trace.file.name, "lengths": command.trace.lengths, "speed": speed,
        }  # fmt: skip
    reference = _reference(case, can_do)
    done = result.build(case, can_do.requests_per_s, reference, runs, about)
    files = output.save(done, runs, command.out)
    print("\n".join(output.text(done)))
    print("saved " + ", ".join(str(file) for file in files) + "\n", flush=True)
    return done


def _reference(case: Case, can_do: Speed) -> Reference:
    """Return what useful tokens are compared with."""
    if case.from_trace or case.changes:  # cached prefixes cost nothing; loads and speeds change
        return lambda _: None
    if can_do.tokens_per_s is not None:
        return lambda _: can_do.tokens_per_s
    return replay_reference(calibrate.profile_of(case.engine))


def _tuned(system: System, tunings: Mapping[float, Tuning]) -> System:
    if system.front is not Front.HAPROXY:
        return system
    return replace(system, limit=tunings[system.wait_s].best)


def _trace(command: Command, case: Case) -> tuple[list[trace.Line], float]:
    """Read the trace and choose its speed: as many requests as the load is of the capacity."""
    if not case.from_trace:
        return [], 1.0
    assert command.trace is not None, "checked by the command line"
    with command.trace.file.open("rb") as file:
        lines = trace.read(file)
    if command.trace.speed is not None:
        return lines, command.trace.speed
    scale, step = command.trace.lengths, max(1, len(lines) // _TRACE_SAMPLE)
    lengths = [trace.scaled(line, scale) for line in lines[::step]]
    full_rps = replay_rps(calibrate.profile_of(case.engine), lengths)
    own_rps = len(lines) / max(1e-3, (lines[-1].timestamp - lines[0].timestamp) / 1000)
    return lines, command.options.load * full_rps / own_rps


def _plan(
    command: Command, case: Case, rps: float, lines: list[trace.Line], speed: float, seed: int
) -> list[Planned]:
    until_s = case.schedule.arrivals_s
    if command.trace is None or not case.from_trace:
        return workload.plan(case.workload, rps, until_s, seed)
    return trace.plan(
        lines, speed=speed, scale=command.trace.lengths, until_s=until_s, mix=case.workload.mix,
        seed=seed,
    )  # fmt: skip


async def _run(lab: _Lab, case: Case, plan: Sequence[Planned], seed: int) -> Run:
    groups = [[s] for s in case.systems] if case.one_by_one else [list(case.systems)]
    scale = lab.command.trace.lengths if lab.command.trace and case.from_trace else 1.0
    runs = []
    for group in groups:
        runs.append(
            await run_side_by_side(
                group, case.engine, plan, case.schedule, lab.folder(),
                seed=seed, block_scale=scale, tell=lab.shown.tell,
            )
        )  # fmt: skip
        lab.shown.end(case.schedule.arrivals_s + case.schedule.drain_s)
    return _joined(runs)


def _joined(runs: Sequence[Run]) -> Run:
    """Return runs of one plan that came one after the other as one."""
    systems: dict[str, SystemRun] = {}
    for run in runs:
        systems |= run.systems
    return replace(
        runs[0],
        lag_p99_s=max(run.lag_p99_s for run in runs),
        lag_max_s=max(run.lag_max_s for run in runs),
        generator_cpu=max(run.generator_cpu for run in runs),
        invalid=[reason for run in runs for reason in run.invalid],
        systems=systems,
    )


def _about() -> dict[str, Any]:
    """Return what a reader of the figures must know."""
    return {
        "began_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ciuicflow": __version__,
        "python": platform.python_version(),
        "cpu": procfs.cpu_model(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
        "capacity": "tokens per second of the engine kept just saturated: an emulated one's by "
        "replay of the very requests that the system served, a real one's measured before the runs",
    }
