"""The command line: ``python -m loadtest --help``."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop
from msgspec.structs import replace

from ciuicflow.testing.processes import ChildFailed
from loadtest import calibrate
from loadtest.compare import Command, TraceOptions, compare
from loadtest.scenarios import ALL, EMULATED, SCENARIOS, Options, engines_of
from loadtest.systems import LLAMA

_INTERRUPTED = 130  # 128 + SIGINT, as shells count
_INVALID = 3


def main(argv: list[str] | None = None) -> int:
    """Run. Returns 0, 1 where a process failed, 3 where a run was invalid, 130 if interrupted."""
    command = _command(_parse(argv))
    try:
        command.out.mkdir(parents=True, exist_ok=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return 0 if runner.run(_until_told(command)) else _INVALID
    except (ChildFailed, OSError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _INTERRUPTED


async def _until_told(command: Command) -> bool:
    """SIGTERM ends it as Ctrl-C does, with everything that it started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await compare(command)


def _command(arguments: argparse.Namespace) -> Command:
    seconds, warm_s, drain_s = arguments.seconds, arguments.warm, arguments.drain
    options = Options(
        seconds=seconds, warm_s=warm_s, drain_s=drain_s, load=arguments.load,
        aborts=arguments.aborts, burstiness=arguments.burstiness,
    )  # fmt: skip
    seeds = tuple(range(arguments.first_seed, arguments.first_seed + arguments.seeds))
    limits = arguments.static_limits
    if arguments.quick:
        options = replace(options, seconds=4.0, warm_s=1.0, drain_s=2.0)
        seeds, limits = seeds[:1], limits[1:2]
    return Command(
        pairs=tuple(
            (scenario, engine)
            for scenario in arguments.scenarios
            for engine in engines_of(scenario, arguments.engine)
        ),
        options=options,
        seeds=seeds,
        out=arguments.out,
        systems=arguments.systems,
        limits=limits,
        tune_s=min(arguments.tune_seconds, options.seconds),
        trace=TraceOptions(
            file=arguments.trace, lengths=arguments.trace_lengths, speed=arguments.trace_speed
        )
        if arguments.trace
        else None,
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest",
        description="Offer the same requests at the same times to the gateway and its rivals,\n"
        "side by side, each before an engine of its own, and compare who is served how.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("scenarios", nargs="*", metavar="SCENARIO", help="default: overload")
    add("--engine", type=_names(EMULATED), default=EMULATED, metavar="NAME,...",
        help=f"emulated engines: {', '.join(EMULATED)} (default: all)")  # fmt: skip
    add("--systems", type=_names([s.name for s in ALL]), metavar="NAME,...",
        help=f"only these of {', '.join(s.name for s in ALL)} (not for headroom)")  # fmt: skip
    add("--seconds", type=_positive, default=120.0, help="that count, per run (default 120)")
    add("--seeds", type=_count, default=3, help="runs of each, a seed each (default 3)")
    add("--first-seed", type=_count, default=1, help="the others follow it (default 1)")
    add("--warm", type=_positive, default=10.0, help="seconds before that (default 10)")
    add("--drain", type=_positive, default=30.0, help="seconds that answers may take (default 30)")
    add("--load", type=_positive, default=2.0, help="times the engine's capacity (default 2)")
    add("--aborts", type=_part, help="part of the clients that leave (default 0; aborts: 0.3)")
    add("--burstiness", type=_positive,
        help="shape of gamma-distributed gaps; 1 is Poisson, 0.2 bursts (default 1; bursts: 0.2)",
        )  # fmt: skip
    add("--static-limits", type=_counts, default=calibrate.LIMITS, metavar="N,...",
        help="requests that the static limit is tuned over; one: no tuning (default 4 to 32)",
        )  # fmt: skip
    add("--tune-seconds", type=_positive, default=20.0, help="per tuning run (default 20)")
    add("--trace", type=Path, metavar="FILE", help="a trace in Mooncake's format, for `trace`")
    add("--trace-lengths", type=_positive, default=0.05, help="times its lengths (default 0.05)")
    add("--trace-speed", type=_positive, help="times faster (default: so that --load is offered)")
    add("--quick", action="store_true", help="one run of a few seconds: does it work at all?")
    add("--out", type=Path, default=Path("results/loadtest"), help="folder of the results")
    arguments = parser.parse_args(argv)
    arguments.scenarios = arguments.scenarios or ["overload"]
    for name in arguments.scenarios:
        if name not in SCENARIOS:
            parser.error(f"unknown scenario {name!r}, expected one of {', '.join(SCENARIOS)}")
    if "trace" in arguments.scenarios and not (arguments.trace and arguments.trace.is_file()):
        parser.error("the scenario `trace` needs --trace FILE with requests in Mooncake's format")
    return arguments


def _epilog() -> str:
    lines = [f"  {name:10s}{(build.__doc__ or '').strip()}" for name, build in SCENARIOS.items()]
    examples = (
        "  python -m loadtest --quick",
        "  python -m loadtest overload --engine slot_bound",
        "  python -m loadtest spike speed --engine prefill_bound --seconds 60 --seeds 1",
        "  python -m loadtest trace --trace conversation_trace.jsonl --engine prefill_bound",
    )
    return "\n".join(
        ("scenarios:", *lines, "", "examples:", *examples, "",
         f"`{LLAMA}` runs on the real llama.cpp server, whatever --engine says.",
         "loadtest/README.md says what the figures mean.")
    )  # fmt: skip


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _part(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be 0 to 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
