"""The compared systems: an engine each, and what stands in front of it, as child processes."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from ciuicflow.bench import procfs
from ciuicflow.bench.proxies import Child, listening
from loadtest.bodies import Style

_HERE: Final = Path(__file__).parent
_TESTS: Final = _HERE.parent / "tests"
_PYTHON: Final = (sys.executable, "-P")
"""The installed package is wanted, not the sources in the current directory."""
FAKE_MODEL: Final = "deepseek-fake"
LLAMA: Final = "llama"


class Front(StrEnum):
    """What stands in front of the engine."""

    NOTHING = "nothing"
    GATEWAY = "gateway"
    NGINX = "nginx"
    HAPROXY = "haproxy"


class Engine(msgspec.Struct, frozen=True):
    """One engine: a named profile of the emulated one with changes, or the real llama.cpp."""

    name: str
    changes: tuple[str, ...] = ()
    """NAME=VALUE, as ``--set`` of the emulated engine takes them."""

    @property
    def is_real(self) -> bool:
        """Whether it computes."""
        return self.name == LLAMA


class System(msgspec.Struct, frozen=True, kw_only=True):
    """One of those that are compared."""

    name: str
    front: Front = Front.NOTHING
    flow: dict[str, Any] = {}
    """The gateway's `flow` settings."""
    limit: int = 0
    """Requests that haproxy lets into the engine."""
    wait_s: float = 60.0
    """How long haproxy lets a request wait: then it is 503."""
    by_engine: bool = False
    """The engine orders by priority, and requests carry one."""


class Running(msgspec.Struct, frozen=True):
    """A system that listens."""

    system: System
    port: int
    """Where requests go."""
    engine_port: int
    admin_port: int | None
    """Of a gateway."""
    pids: dict[str, int]


def style_of(system: System, engine: Engine) -> Style:
    """Return how requests to a system are written."""
    if engine.is_real:
        return Style("deepseek-tiny", chars_per_token=1.0, is_real=True)
    return Style(FAKE_MODEL, with_priority=system.by_engine)


@asynccontextmanager
async def running(system: System, engine: Engine, directory: Path) -> AsyncIterator[Running]:
    """Start a system. Raises ChildFailed."""
    command = _engine_command(system, engine, directory)
    async with Child(f"{system.name}'s engine", *command) as one:
        engine_port = int(one.ready["port"])
        pids = {"engine": one.pid}
        cores = procfs.split_cores(os.sched_getaffinity(0))
        if engine.is_real:  # one that computes gets a core of its own
            procfs.pin(one.pid, cores.proxy)
        if system.front is Front.NOTHING:
            yield Running(system, engine_port, engine_port, None, pids)
            return
        async with Child(system.name, *_front_command(system, engine_port, directory)) as front:
            address = front.ready.get("listen") or f"127.0.0.1:{front.ready['port']}"
            port = int(address.rpartition(":")[2])
            await listening(front, port)
            if engine.is_real:
                procfs.pin(front.pid, cores.load)
            admin = front.ready.get("admin")
            admin_port = int(admin.rpartition(":")[2]) if admin else None
            yield Running(system, port, engine_port, admin_port, {**pids, "front": front.pid})


def _engine_command(system: System, engine: Engine, directory: Path) -> tuple[str, ...]:
    directory.mkdir(parents=True)
    if engine.is_real:
        path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
        script = str(_HERE / "llama_server.py")
        return ("env", f"PYTHONPATH={path}", *_PYTHON, script, str(directory))
    changes = [*engine.changes, *(["scheduling=priority"] if system.by_engine else [])]
    flags = [part for change in changes for part in ("--set", change)]
    module = ("-m", "ciuicflow.testing.fake_engine", "--port", "0", "--profile", engine.name)
    return (*_PYTHON, *module, "--model", FAKE_MODEL, *flags)


def _front_command(system: System, engine_port: int, directory: Path) -> tuple[str, ...]:
    if system.front is Front.NGINX:
        module = "ciuicflow.bench.nginx"
        return (*_PYTHON, "-m", module, str(engine_port), str(directory))
    if system.front is Front.HAPROXY:
        limits = (str(system.limit), str(system.wait_s))
        script = str(_HERE / "haproxy.py")
        return (*_PYTHON, script, str(engine_port), *limits, str(directory))
    file = directory / "gateway.yaml"
    config = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "upstreams": [{"url": f"http://127.0.0.1:{engine_port}", "name": "engine"}],
        "flow": system.flow,
        "log": {"requests": False},
    }
    file.write_text(yaml.safe_dump(config))
    return (*_PYTHON, "-m", "ciuicflow", "serve", "--config", str(file))
