"""The command line of `ciuicflow bench`; what it runs is imported when it runs."""

import argparse
import math
from pathlib import Path
from typing import Final

_HTTP: Final = """\
Measure what the gateway costs, beside nginx on the same machine in the same run.

A stub answers with ready-made bytes, far faster than any proxy. In each round every load is put
on each in turn: the stub itself ("direct"), nginx with buffering off (if installed), the gateway.
The proxy that is measured has one core; load and stub have another."""

_READING: Final = """\
loads (--scenario; all of them unless given):
  json        64 connections as fast as they can: CPU per request, and the highest rate
  json-new    the same, but no request head comes twice: without what a proxy remembers
  json-1, json-8, json-paced
              1 connection, 8, 64 with pauses: what a proxy adds to the latency when it is
              not saturated
  stream      64 streams at a time, an event every few ms on each: CPU per stream
  upload      1 MiB bodies up
  open        2000 streams held open: memory of each

how to read it:
  Look at the ratios to nginx. Each is taken within one round, seconds apart; printed are the
  median over the rounds and the lowest and highest. Absolute times belong to this machine in
  this minute. Where lowest and highest are far apart, the machine was busy: run again with more
  rounds. With less than three rounds the bars say nothing.
  CPU is user and system time of the proxy by /proc, divided by the work that the stub has seen.
  "added" is beyond the direct way in the same round. Added times at 64 connections without
  pauses are queueing: compare them with the rate, not with a promise.
  If "direct" is hardly faster than a proxy, wrk and the stub were the bottleneck: then rates are
  too low, CPU per request still holds.
  Any failed request, lost answer or changed byte ends the run: exit status 1 and no result.

needs: Linux, wrk (apt-get install wrk). Better with: nginx (apt-get install nginx), two cores,
  pip install 'ciuicflow[bench]' (table, progress bar, plot).

examples:
  ciuicflow bench http
  ciuicflow bench http --rounds 3 --seconds 2 --scenario json --scenario stream
  ciuicflow bench http --gateway-python .venv-compiled/bin/python
      a second build of the gateway beside this one
"""

SCENARIOS: Final = (
    "json",
    "json-new",
    "json-1",
    "json-8",
    "json-paced",
    "stream",
    "upload",
    "open",
)


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench` to the commands."""
    bench = commands.add_parser(
        "bench",
        help="measure it beside other software",
        description="Benchmarks whose result is a comparison within one run.",
    )
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    http = kinds.add_parser(
        "http",
        help="CPU, latency and memory of passing HTTP through, against nginx",
        description=_HTTP,
        epilog=_READING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    http.add_argument("--rounds", type=_rounds, default=5, metavar="N", help="%(default)s")
    http.add_argument(
        "--seconds",
        type=_seconds,
        default=4.0,
        metavar="S",
        help="of each load on each target, rounded up to what the load needs (%(default)g)",
    )
    http.add_argument(
        "--scenario", action="append", choices=SCENARIOS, help="only this one; repeat for several"
    )
    http.add_argument(
        "--out",
        type=Path,
        default=Path("results/bench-http.json"),
        metavar="FILE",
        help="JSON with everything; the plot goes beside it as .png (%(default)s)",
    )
    http.add_argument(
        "--gateway-python",
        action="append",
        default=[],
        metavar="PATH",
        help="measure the gateway of this interpreter too; repeat for several",
    )
    http.set_defaults(run=_http)


def _rounds(text: str) -> int:
    rounds = int(text)
    if not 1 <= rounds <= 1000:
        raise argparse.ArgumentTypeError(f"expected 1 to 1000, got {text}")
    return rounds


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and 0 < seconds <= 600):
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 600, got {text}")
    return seconds


def _http(options: argparse.Namespace) -> int:
    from ciuicflow.bench import http  # serving does not need it

    return http.run(
        http.Options(
            rounds=options.rounds,
            seconds=options.seconds,
            loads=tuple(options.scenario or SCENARIOS),
            out=options.out,
            gateway_pythons=tuple(options.gateway_python),
        )
    )
