"""wrk, the load generator: its script, its run, and what it says in the end."""

import asyncio
import math
import shutil
from pathlib import Path
from typing import Final

import msgspec

from ciuicflow.bench.loads import Load
from ciuicflow.errors import StartError

INSTALL: Final = "wrk is not installed: apt-get install wrk"
_TIMEOUT_S: Final = 30
# wrk looks at its clock each 100 ms and ends with connections that it does not wait for.
_GRACE_S: Final = 10.0
# A stream takes most of a second, and the shortest run must see some end.
_MIN_STREAM_S: Final = 2

_SCRIPT: Final = """\
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer sk-none"
{opt_in}
wrk.body = {body}
{extra}
function done(summary, latency, requests)
  local errors = summary.errors
  print(string.format(
    '{{"requests":%d,"duration_us":%d,"p50_us":%.1f,"p99_us":%.1f,' ..
    '"failures":{{"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d}}}}',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect, errors.read, errors.write, errors.status, errors.timeout))
end
"""

_NEW_HEADS: Final = """\
local sent = 0
function request()
  sent = sent + 1
  wrk.headers["X-Request-Id"] = string.format("%032x", sent)
  return wrk.format()
end
"""


class LoadFailed(RuntimeError):
    """The load did not run as it should: its figures would mean nothing."""


class WrkResult(msgspec.Struct, frozen=True):
    """One run, as wrk's script prints it."""

    requests: int
    """Whole answers."""
    duration_us: int
    p50_us: float
    p99_us: float
    failures: dict[str, int]
    """Counts by kind; `status` is 400 and above."""

    @property
    def per_s(self) -> float:
        """Whole answers per second."""
        return self.requests / (self.duration_us / 1e6)


def require_wrk() -> str:
    """Return the path of wrk. Raises StartError."""
    path = shutil.which("wrk")
    if path is None:
        raise StartError(INSTALL)
    return path


def script(load: Load, *, opts_in: bool = False) -> str:
    """Return the Lua script that drives this load, under flow control or beside it."""
    extra = ""
    if load.think_ms is not None:
        extra = "function delay() return math.random({}, {}) end".format(*load.think_ms)
    elif load.new_heads:
        extra = _NEW_HEADS
    opt_in = 'wrk.headers["X-Ciuic-Flow"] = "enabled"' if opts_in else ""
    return _SCRIPT.format(body=load.lua_body(), extra=extra, opt_in=opt_in)


def parse(output: str) -> WrkResult:
    """Find the script's line in what wrk printed. Raises LoadFailed: none, or failed requests."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    try:
        result = msgspec.json.decode(lines[-1], type=WrkResult)
    except (IndexError, msgspec.DecodeError):
        raise LoadFailed(f"wrk printed no result: {output.strip()!r}") from None
    failed = ", ".join(f"{count} {kind}" for kind, count in result.failures.items() if count)
    if failed:
        raise LoadFailed(f"of {result.requests} requests some failed: {failed}")
    if result.requests == 0:
        raise LoadFailed("no request was answered")
    return result


async def run(
    load: Load, port: int, seconds: float, directory: Path, *, opts_in: bool = False
) -> WrkResult:
    """Put the load on 127.0.0.1:port for some seconds, rounded up. Raises LoadFailed."""
    duration_s = math.ceil(max(seconds, _MIN_STREAM_S if load.path == "/stream" else 1))
    script_file = directory / f"{load.name}.lua"
    script_file.write_text(script(load, opts_in=opts_in))
    process = await asyncio.create_subprocess_exec(
        *(require_wrk(), "-t1", f"-c{load.connections}", f"-d{duration_s}s"),
        *(f"--timeout={_TIMEOUT_S}s", "-s", str(script_file)),
        f"http://127.0.0.1:{port}{load.path}",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(duration_s + _GRACE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise LoadFailed(f"wrk did not end {_GRACE_S:g} s after its time") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return parse(output.decode(errors="replace"))
