"""The life of the process: start, reload, drain, stop, in this order, driven by signals."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

log = logging.getLogger(__name__)

WATCH_INTERVAL_S: Final = 1.0


class Service(Protocol):
    """What can be run."""

    async def start(self) -> str:
        """Start, and return the line that says so. Raises StartError."""

    def reload(self) -> None:
        """Take over a changed configuration; report and survive a bad one."""

    async def drain(self) -> None:
        """Become unready, then stop accepting, then let running work end, all bounded in time."""

    async def stop(self) -> None:
        """Give everything back."""


class FileWatch:
    """Notices that a file has changed since this was made: make it before the file is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _signature(path)

    async def run(self, changed: Callable[[], None]) -> None:
        """Call `changed` when the file's identity, size or time is another, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            seen = _signature(self._path)
            if seen is not None and seen != self._known:
                self._known = seen
                try:
                    changed()
                except Exception:
                    log.exception("reload failed")


async def run(service: Service, *, ready: Callable[[str], None], watch: FileWatch | None) -> None:
    """Run until SIGTERM or SIGINT, then drain; a second one skips the draining.

    SIGHUP, or a change of the watched file, reloads. Raises StartError.
    """
    loop = asyncio.get_running_loop()
    stopping, hurrying = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (hurrying if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, service.reload)
    watcher: asyncio.Task[None] | None = None
    try:
        ready(await service.start())
        if watch is not None:
            watcher = loop.create_task(watch.run(service.reload))
        await stopping.wait()
        log.info("draining")
        await _first(service.drain(), hurrying.wait())
    finally:
        if watcher is not None:
            watcher.cancel()
        await service.stop()


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when the first of these is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


def _signature(path: Path) -> tuple[int, int, int] | None:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None
