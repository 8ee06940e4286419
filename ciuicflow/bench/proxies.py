"""The processes that are compared: how each is started, watched and checked."""

import asyncio
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import yaml

from ciuicflow.bench import procfs
from ciuicflow.bench.loads import Load
from ciuicflow.bench.stub import Counts
from ciuicflow.bench.wrk import LoadFailed
from ciuicflow.testing.processes import ChildProcess

GATEWAY: Final = "gateway"
NGINX: Final = "nginx"
DIRECT: Final = "direct"
WITH_LOG: Final = "gateway, log on"
OPTED_IN: Final = "gateway, opted in"
_LISTENING_S: Final = 10.0
_ANSWER_S: Final = 20.0
_SETTLE_S: Final = 0.1
_SETTLE_TRIES: Final = 50

_DESCRIBE: Final = """
import json, platform, msgspec, uvloop, httptools, ciuicflow
from ciuicflow.gateway import relay
print(json.dumps({
    "ciuicflow": ciuicflow.__version__, "python": platform.python_version(),
    "build": "python" if relay.__file__.endswith(".py") else "compiled",
    "uvloop": uvloop.__version__, "httptools": httptools.__version__,
    "msgspec": msgspec.__version__}))
"""


class Child(ChildProcess):
    """A child whose use of CPU and memory is looked at."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid


class Recipe(msgspec.Struct, frozen=True):
    """How to start one proxy."""

    label: str
    python: tuple[str, ...] = (sys.executable,)
    """The interpreter, with flags, that runs the gateway."""

    def is_for(self, load: Load) -> bool:
        """Whether the load is put on this proxy."""
        if self.label == WITH_LOG:
            return load.priced_log
        return self.label != OPTED_IN or load.flow_bar is not None


class Target(msgspec.Struct, frozen=True):
    """Where a load goes."""

    label: str
    port: int
    pid: int | None = None
    """The process whose CPU and memory count; None: no proxy."""


def other_gateway(python: str) -> Recipe:
    """Return the recipe for another interpreter, named after its virtual environment."""
    # -P: the package installed there is wanted, not one in the current directory.
    folder = Path(python).absolute().parent.parent.name
    return Recipe(f"{GATEWAY} {folder}", (python, "-P"))


async def describe(recipe: Recipe) -> dict[str, str]:
    """Return the versions that the recipe's interpreter has. Raises LoadFailed."""
    command = (*recipe.python, "-c", _DESCRIBE)
    try:
        said = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, timeout=_ANSWER_S, check=True
        )
    except subprocess.CalledProcessError as error:
        errors = error.stderr.decode(errors="replace").strip()
        raise LoadFailed(f"{recipe.python[0]} cannot import the gateway:\n{errors}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoadFailed(f"cannot run {recipe.python[0]}: {error}") from None
    return msgspec.json.decode(said.stdout, type=dict[str, str])


@asynccontextmanager
async def running_stub() -> AsyncIterator[Target]:
    """Start the upstream of all."""
    async with Child("stub", sys.executable, "-m", "ciuicflow.bench.stub") as child:
        yield Target(DIRECT, int(child.ready["port"]))


@asynccontextmanager
async def running(
    recipe: Recipe, stub: Target, directory: Path, core: int | None
) -> AsyncIterator[Target]:
    """Start a proxy in front of the stub, on its core."""
    async with Child(recipe.label, *_command(recipe, stub.port, directory)) as child:
        address = child.ready.get("listen") or f"127.0.0.1:{child.ready['port']}"
        port = int(address.rpartition(":")[2])
        await listening(child, port)
        pid = child.pid
        if recipe.label == NGINX:
            procfs.pin(pid, core)
            pid = await _worker_of(pid)
        procfs.pin(pid, core)
        yield Target(recipe.label, port, pid)


async def _worker_of(pid: int) -> int:
    """Return nginx's one worker, which is forked after the port is open. Raises LoadFailed."""
    for _ in range(int(_ANSWER_S / 0.01)):
        workers = procfs.children(pid)
        if workers:
            return workers[0]
        await asyncio.sleep(0.01)
    raise LoadFailed(f"nginx (process {pid}) started no worker")


def _command(recipe: Recipe, upstream_port: int, directory: Path) -> tuple[str, ...]:
    directory.mkdir(parents=True)
    if recipe.label == NGINX:
        module = "ciuicflow.bench.nginx"
        return (sys.executable, "-m", module, str(upstream_port), str(directory))
    config_file = directory / "gateway.yaml"
    settings = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "upstreams": [{"url": f"http://127.0.0.1:{upstream_port}"}],
        "log": {"requests": recipe.label == WITH_LOG},  # nginx writes no log either
    }
    config_file.write_text(yaml.safe_dump(settings))
    command = (*recipe.python, "-m", "ciuicflow", "serve", "--config", str(config_file))
    if recipe.label != WITH_LOG:
        return command
    # A file takes the lines, as a pipe would make their reader part of the load.
    log_file = shlex.quote(str(directory / "requests.log"))
    return ("sh", "-c", f"exec {shlex.join(command)} 2>{log_file}")


async def listening(child: Child, port: int) -> None:
    """Return once something listens on a child's port. Raises ChildFailed."""
    try:
        async with asyncio.timeout(_LISTENING_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionRefusedError:
                    await asyncio.sleep(0.02)
                    continue
                writer.close()
                await writer.wait_closed()
                return
    except TimeoutError:
        raise child.failed(f"did not listen on port {port} within {_LISTENING_S:g} s") from None


async def counts(http: aiohttp.ClientSession, stub: Target) -> Counts:
    """Ask the stub what it has done."""
    async with http.get(f"http://127.0.0.1:{stub.port}/counts") as response:
        return msgspec.json.decode(await response.read(), type=Counts)


async def settled_counts(http: aiohttp.ClientSession, stub: Target) -> Counts:
    """Ask it once the end of a load has reached it: when nothing has changed for a moment.

    Raises LoadFailed where that does not come.
    """
    seen = await counts(http, stub)
    for _ in range(_SETTLE_TRIES):
        await asyncio.sleep(_SETTLE_S)
        last, seen = seen, await counts(http, stub)
        if seen == last:
            return seen
    raise LoadFailed("requests kept coming to the upstream after the end of the load")


async def check_answers(http: aiohttp.ClientSession, stub: Target, target: Target) -> None:
    """See that the proxy answers as the stub itself does, byte for byte. Raises LoadFailed."""
    for path, body in (("/small", b"{}"), ("/stream", b"{}"), ("/upload", b"x" * 300_000)):
        expected = await _ask(http, stub.port, path, body)
        got = await _ask(http, target.port, path, body)
        if got != expected:
            raise LoadFailed(f"{target.label} changes the answer of {path}: status {got[0]}")


async def _ask(
    http: aiohttp.ClientSession, port: int, path: str, body: bytes
) -> tuple[int, str, bytes]:
    async with http.post(f"http://127.0.0.1:{port}{path}", data=body) as response:
        return response.status, response.headers["Content-Type"], await response.read()
