"""`ciuicflow demo` as a process, and that none of its children outlives it."""

import asyncio
import os
import re
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from ciuicflow.testing import processes
from ciuicflow.testing.processes import ChildFailed, ChildProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


class Demo:
    """One run of the command; its environment marks it and all its children."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._mark = f"CIUICFLOW_TEST={uuid.uuid4().hex}"

    async def __aenter__(self) -> "Demo":
        name, value = self._mark.split("=")
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ciuicflow", "demo", *self._flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, name: value},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        await self.process.wait()

    def alive(self, command: str = "") -> list[int]:
        """Processes of this run whose command line contains the word; zombies do not count."""
        return [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdigit()
            and self._mark.encode() in _read(folder / "environ")
            and command.encode() in _read(folder / "cmdline")
        ]

    async def wait_alive(self, count: int) -> None:
        for _ in range(500):
            if len(self.alive()) == count:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{self.alive()} are alive, not {count}")

    async def read_until(self, text: str) -> str:
        assert self.process.stdout is not None
        seen = b""
        async with asyncio.timeout(30):
            while text.encode() not in seen:
                line = await self.process.stdout.readline()
                assert line, await self.stderr()
                seen += line
        return seen.decode()

    async def stderr(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 30)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # gone, or another user's
        return b""


@pytest.fixture
async def demo() -> AsyncIterator[Demo]:
    async with Demo() as running:
        yield running


STAYS = "Ctrl-C stops it all"


async def test_once_shows_equal_answers_and_metrics_and_leaves_nothing_behind() -> None:
    async with Demo("--once") as demo:
        stdout, stderr = await asyncio.wait_for(demo.process.communicate(), 40)
        assert demo.process.returncode == 0, stderr.decode()
        assert demo.alive() == []
    shown = stdout.decode()
    assert shown.count("the same bytes") == 2
    assert re.search(r"streamed chat request\n  status   200, .* first token after", shown)
    assert re.search(r"QPS +[\d.]+\n +P99 +[\d.]+ ms\n", shown)
    assert "curl" not in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_stays_up_until_a_signal_and_stops_its_children(
    demo: Demo, number: signal.Signals
) -> None:
    shown = await demo.read_until(STAYS)
    urls = re.findall(r"curl -s (http://\S+)$", shown, re.MULTILINE)
    assert [url.rpartition(":")[2].partition("/")[2] for url in urls] == ["metrics", "flow/state"]
    async with aiohttp.ClientSession() as http:
        for url in urls:
            async with http.get(url) as response:
                assert response.status == 200
    assert len(demo.alive()) == 3
    demo.process.send_signal(number)
    assert await demo.exit_code() == 0
    assert demo.alive() == []


async def test_the_printed_curl_lines_are_requests_that_work(demo: Demo) -> None:
    shown = await demo.read_until(STAYS)
    commands = re.findall(r"^  (curl .*)$", shown, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        curl = await asyncio.create_subprocess_shell(
            f"{command} --fail --max-time 10", stdout=asyncio.subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(curl.communicate(), 20)
        assert curl.returncode == 0, command
        assert output


async def test_an_interrupt_while_it_starts_leaves_nothing_behind(demo: Demo) -> None:
    await demo.wait_alive(2)
    demo.process.send_signal(signal.SIGINT)
    assert await demo.exit_code() == 130
    assert demo.alive() == []


async def test_children_die_with_a_killed_demo(demo: Demo) -> None:
    await demo.read_until(STAYS)
    demo.process.kill()
    await demo.wait_alive(0)


@pytest.mark.parametrize(("name", "command"), [("gateway", "serve"), ("engine", "fake_engine")])
async def test_a_child_that_dies_ends_the_demo_with_a_clear_error(
    demo: Demo, name: str, command: str
) -> None:
    await demo.read_until(STAYS)
    (child,) = demo.alive(command)
    os.kill(child, signal.SIGKILL)
    assert await demo.exit_code() == 1
    assert f"the {name} ended with exit code -9" in await demo.stderr()
    assert demo.alive() == []


# -- child processes -------------------------------------------------------------------------


def child(script: str, ready_s: float = 20.0) -> ChildProcess:
    return ChildProcess("child", sys.executable, "-c", script, ready_s=ready_s)


async def test_a_child_tells_what_it_is_ready_with() -> None:
    script = "import time; print('ready a=1 b=x:2', flush=True); time.sleep(60)"
    async with child(script) as running:
        assert running.ready == {"a": "1", "b": "x:2"}


async def test_a_child_that_fails_to_start_is_an_error_with_its_last_words() -> None:
    with pytest.raises(ChildFailed, match=r"child ended with exit code 3\n  no luck"):
        await child("import sys; print('no luck', file=sys.stderr); sys.exit(3)").__aenter__()


async def test_a_child_that_is_not_ready_in_time_is_stopped() -> None:
    with pytest.raises(ChildFailed, match=r"child was not ready within 0\.2 s"):
        await child("import time; time.sleep(60)", ready_s=0.2).__aenter__()


async def test_a_child_that_says_something_else_is_an_error() -> None:
    with pytest.raises(ChildFailed, match="said 'hello"):
        await child("print('hello', flush=True)").__aenter__()


async def test_a_child_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_S", 0.2)
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('ready', flush=True); time.sleep(60)"
    )
    async with child(script) as running:
        pass
    assert "exit code -9" in str(await running.failure())
