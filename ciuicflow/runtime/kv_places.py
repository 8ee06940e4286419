"""Where an agent runs: in a thread of the engine's process, or in a process of its own.

Both take the same commands and give the same events. A thread is simplest; a process goes on while
the engine holds its GIL.
"""

import asyncio
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final, Protocol

import uvloop

from ciuicflow.errors import CiuicFlowError
from ciuicflow.kvtransfer.errors import AgentGone
from ciuicflow.runtime.kv_driver import KvDriver
from ciuicflow.runtime.kv_pipe import HEAD, events, pack
from ciuicflow.runtime.kv_records import AgentSpec, Command, Event, Setup, Stopped
from ciuicflow.runtime.memory import Memory, SharedMemory

_EXIT_S: Final = 5.0
_PIPE_BYTES: Final = 4 << 20
_QUEUE: Final = 100_000
"""Records that may wait for an agent's process that does not read: more, and it is given up."""

Emit = Callable[[Event], None]


class Place(Protocol):
    """Runs one agent. The last event is `Stopped`, however it ends."""

    def start(self) -> None:
        """Start it; `Started` or `Stopped` follows."""

    def send(self, command: Command) -> None:
        """Hand a command over, from any thread, without waiting. AgentGone if it has ended."""

    def kill(self) -> None:
        """End it at once, where that can be done."""


async def serve(
    spec: AgentSpec, memory: Memory, emit: Emit, begun: Callable[[KvDriver], None]
) -> None:
    """Run an agent on this event loop; `begun` gets the driver before it listens."""
    try:
        driver = KvDriver(spec, memory, emit)
        begun(driver)
        await driver.run()
    except (CiuicFlowError, OSError) as error:
        emit(Stopped(f"it could not start: {error}"))


class ThreadPlace:
    """A thread with an event loop of its own."""

    def __init__(self, spec: AgentSpec, memory: Memory, emit: Emit) -> None:
        self._spec, self._memory, self._emit = spec, memory, emit
        self._lock = threading.Lock()
        self._early: list[Command] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: KvDriver | None = None

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name=f"kv-{self._spec.name}", daemon=True).start()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(self._spec, self._memory, self._emit, self._begun))
        except Exception as error:  # noqa: BLE001 - whoever waits must be told
            self._emit(Stopped(f"internal error: {error!r}"))

    def _begun(self, driver: KvDriver) -> None:
        with self._lock:
            self._driver, self._loop = driver, asyncio.get_running_loop()
            early, self._early = self._early, []
        for command in early:
            driver.handle(command)

    def send(self, command: Command) -> None:
        """Hand a command over; see Place."""
        with self._lock:
            if self._loop is None or self._driver is None:
                self._early.append(command)
                return
        try:
            self._loop.call_soon_threadsafe(self._driver.handle, command)
        except RuntimeError:
            raise AgentGone("the agent has ended") from None

    def kill(self) -> None:
        """A thread cannot be killed."""


class ProcessPlace:
    """A process that maps the engine's shared memory; records travel over a socket pair."""

    def __init__(self, spec: AgentSpec, memory: SharedMemory, emit: Emit) -> None:
        self._spec, self._memory, self._emit = spec, memory, emit
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUE)
        self._queued = False

    @property
    def pid(self) -> int:
        """Of the process; 0: it has not been started."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process, and the threads that read and write."""
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIPE_BYTES)
        handle = self._memory.handle
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ciuicflow.runtime.kv_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), handle.descriptor),
            )
        self._sock = ours
        self._put(pack(Setup(self._spec, handle)))
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"kv-{self._spec.name}", daemon=True).start()

    def send(self, command: Command) -> None:
        """Hand a command over; see Place."""
        self._put(pack(command))

    def _put(self, data: bytes) -> None:
        """Send at once where that does not wait: another thread would need the GIL first."""
        with self._lock:
            if self._sock is None:
                raise AgentGone("the agent has ended")
            if not self._queued:
                try:
                    sent = self._sock.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    raise AgentGone("the agent's process has ended") from None
                data = data[sent:]
            if data:
                self._queued = True
                try:
                    self._queue.put_nowait(data)
                except queue.Full:
                    self.kill()
                    raise AgentGone("the agent's process does not read") from None

    def _write(self) -> None:
        """Write what the socket had no room for."""
        sock = self._sock
        assert sock is not None
        while (data := self._queue.get()) is not None:
            try:
                sock.sendall(data)
            except OSError:
                return
            with self._lock:
                self._queued = not self._queue.empty()

    def _read(self) -> None:
        sock = self._sock
        assert sock is not None
        stopped = False
        with sock.makefile("rb") as stream:
            while head := _exactly(stream.read, HEAD.size):
                event = events.decode(stream.read(HEAD.unpack(head)[0]))
                stopped = stopped or isinstance(event, Stopped)
                self._emit(event)
        self._end(sock)
        if not stopped:
            self._emit(Stopped(f"its process has ended: exit status {self._reap()}"))
        else:
            self._reap()

    def _end(self, sock: socket.socket) -> None:
        with self._lock:
            self._sock = None
        self._queue.put(None)
        sock.close()

    def _reap(self) -> int:
        assert self._process is not None
        try:
            return self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """Read so many bytes; nothing at the end, or where it came within them."""
    try:
        data = read(size)
    except OSError:
        return b""
    return data if len(data) == size else b""
