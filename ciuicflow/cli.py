"""The commands: serve, check, demo, bench."""

import argparse
import asyncio
import gc
import logging
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from ciuicflow import __version__, config
from ciuicflow.bench.arguments import add_bench
from ciuicflow.config import ROUTING_NAMES, Config
from ciuicflow.errors import ConfigError, StartError
from ciuicflow.gateway import handler
from ciuicflow.gateway.app import App, log
from ciuicflow.observability.logs import LogConfig, LogWriter
from ciuicflow.runtime import lifecycle

_EPILOG: Final = """\
examples:
  ciuicflow serve --upstream http://127.0.0.1:8000
      one engine behind 127.0.0.1:8080, metrics on 127.0.0.1:9090
  ciuicflow serve --config ciuicflow.yaml
      everything else: several engines, models, TLS, limits, timeouts (see deploy/ciuicflow.yaml)
  ciuicflow check ciuicflow.yaml
      tell what is wrong with a file before it is used

signals:
  SIGHUP            read the configuration again; a bad one is reported and the old one stays
  SIGTERM, Ctrl-C   fail readiness, let running streams end, exit 0; a second one exits at once

exit status:
  0 stopped as asked   1 could not start (port, certificate)   2 the configuration is wrong
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return cast("int", options.run(options))
    except ConfigError as error:
        print(f"ciuicflow: configuration: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"ciuicflow: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ciuicflow",
        description="Communication gateway in front of DeepSeek inference servers "
        "(vLLM, SGLang, anything OpenAI-compatible).",
    )
    build = "plain Python" if handler.__file__.endswith(".py") else "compiled"
    parser.add_argument("--version", action="version", version=f"ciuicflow {__version__} ({build})")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands)
    check = commands.add_parser(
        "check", help="check a configuration file", description="Check a configuration file."
    )
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(run=_check)
    show = commands.add_parser(
        "demo",
        help="see it work, with an engine that it brings along",
        description="Start an emulated engine and the gateway before it, send requests through, "
        "print what happened, and stay up.",
    )
    show.add_argument("--once", action="store_true", help="exit after the requests")
    show.set_defaults(run=_demo)
    add_bench(commands)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="run the gateway",
        description="Run the gateway. Flags override the configuration file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument(
        "--upstream",
        action="append",
        metavar="URL",
        help="engine server, such as http://127.0.0.1:8000; repeat for several",
    )
    serve.add_argument(
        "--listen", metavar="HOST:PORT", help="where clients connect (127.0.0.1:8080)"
    )
    serve.add_argument(
        "--admin", metavar="HOST:PORT", help="metrics, health, state (127.0.0.1:9090)"
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="YAML; reloaded when it changes")
    serve.add_argument(
        "--routing", choices=ROUTING_NAMES, help="which of several upstreams (least_load)"
    )
    serve.add_argument(
        "--log-format",
        choices=("auto", "text", "json"),
        help="auto: text on a terminal, JSON elsewhere",
    )
    serve.add_argument(
        "--loop",
        choices=("uvloop", "asyncio"),
        default="uvloop",
        help="event loop; asyncio costs about twice the CPU per request (%(default)s)",
    )
    serve.set_defaults(run=_serve)


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Turn the flags that were given into configuration."""
    given: dict[str, Any] = {
        name: value
        for name in ("listen", "admin", "routing")
        if (value := getattr(options, name)) is not None
    }
    if options.upstream:
        given["upstreams"] = [{"url": url} for url in options.upstream]
    return given


def _load(options: argparse.Namespace) -> Config:
    if options.config is None and not options.upstream:
        raise ConfigError("$.upstreams: give --upstream URL or --config FILE")
    loaded = config.load(options.config, _overrides(options))
    if options.log_format is not None:
        log_config = LogConfig(format=options.log_format, requests=loaded.log.requests)
        loaded = msgspec.structs.replace(loaded, log=log_config)
    return loaded


def _serve(options: argparse.Namespace) -> int:
    writer = LogWriter(_load(options).log)
    # What asyncio and aiohttp have to say must not block on a full pipe either.
    writer.attach(log, logging.getLogger("asyncio"), logging.getLogger("aiohttp"))
    try:
        _run(_serve_until_stopped(options, writer), options.loop)
    finally:
        writer.close()
    return 0


async def _serve_until_stopped(options: argparse.Namespace, writer: LogWriter) -> None:
    watch = lifecycle.FileWatch(options.config) if options.config is not None else None
    app = App(lambda: _load(options), writer)
    # What exists now lives as long as the process: keep the collector from walking it. What comes
    # later is freed by reference counts, so the collector may look rarely.
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    await lifecycle.run(app, ready=lambda line: print(line, flush=True), watch=watch)


def _run(work: Coroutine[Any, Any, None], loop: str) -> None:
    if loop == "asyncio":
        asyncio.run(work)
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def _check(options: argparse.Namespace) -> int:
    checked = config.load(options.file, {})
    if checked.tls is not None:
        checked.tls.context()
    print(f"{options.file}: ok, {len(checked.upstreams)} upstream(s)")
    for upstream in checked.upstreams:
        upstream.tls_context()
        models = ", ".join(upstream.models) if upstream.models is not None else "read from it"
        print(f"  {upstream.id}: {upstream.address}, models: {models}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from ciuicflow.demo import run_demo  # it brings the emulated engine along: serve need not

    return run_demo(once=options.once)
