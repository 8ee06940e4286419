"""Child processes that print ``ready NAME=VALUE ...``, and are gone when their block ends."""

import asyncio
import ctypes
import signal
import sys
from collections import deque
from typing import Self

READY_S = 20.0
"""Ample for a Python process on a busy machine; it takes about one second on a quiet one."""
STOP_S = 10.0
TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


class ChildFailed(RuntimeError):
    """A child did not become ready, or ended by itself; the message has its last stderr lines."""


class ChildProcess:
    """One child process. Use as an asynchronous context manager.

    Entering waits for the ready line and raises ChildFailed; leaving sends SIGTERM, and SIGKILL
    after ``STOP_S``. The child has its own session, so Ctrl-C reaches only its parent, which then
    stops its children in order. On Linux it dies with its parent, however that ends.
    """

    def __init__(self, name: str, *command: str, ready_s: float = READY_S) -> None:
        self.name = name
        self.ready: dict[str, str] = {}
        """The NAME=VALUE pairs of the ready line."""
        self._command = command
        self._ready_s = ready_s
        self._stderr: deque[str] = deque(maxlen=TAIL_LINES)

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._reader = asyncio.create_task(self._keep_tail(self._process.stderr))
        try:
            self.ready = await self._wait_ready(self._process.stdout)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def failure(self) -> ChildFailed:
        """Wait until the child ends by itself and say how."""
        code = await self._process.wait()
        await asyncio.wait({self._reader}, timeout=1)
        return self.failed(f"ended with exit code {code}")

    def failed(self, what: str) -> ChildFailed:
        """An error to raise: what the child did wrong, and its last stderr lines."""
        tail = "".join(f"\n  {line}" for line in self._stderr)
        return ChildFailed(f"{self.name} {what}{tail or ' and wrote nothing to stderr'}")

    async def _wait_ready(self, stdout: asyncio.StreamReader) -> dict[str, str]:
        try:
            line = (await asyncio.wait_for(stdout.readline(), self._ready_s)).decode()
        except TimeoutError:
            raise self.failed(f"was not ready within {self._ready_s:g} s") from None
        word, *pairs = line.split() or [""]
        if word != "ready":
            raise await self.failure() if not line else self.failed(f"said {line!r}, not ready")
        return dict(pair.split("=", 1) for pair in pairs)

    async def _keep_tail(self, stderr: asyncio.StreamReader) -> None:
        async for line in stderr:
            self._stderr.append(line.decode(errors="replace").rstrip())

    async def _stop(self) -> None:
        try:
            if self._process.returncode is None:
                self._process.terminate()
                await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            pass  # it gets SIGKILL
        finally:
            if self._process.returncode is None:
                self._process.kill()
            self._reader.cancel()
        await self._process.wait()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
