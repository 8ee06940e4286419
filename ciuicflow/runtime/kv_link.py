"""Joins a sender or a receiver to its connections, one after another, with one timer."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, Protocol

from ciuicflow.kvtransfer.actions import (
    Action,
    Close,
    Complete,
    Discard,
    Established,
    Fail,
    FreeBlocks,
    PostReceive,
    SendControl,
    SendQuantum,
)
from ciuicflow.kvtransfer.errors import WireError
from ciuicflow.kvtransfer.ranges import Piece
from ciuicflow.kvtransfer.receiver import Receiver
from ciuicflow.kvtransfer.sender import Sender
from ciuicflow.kvtransfer.wire import Commit, Quantum, decode, encode
from ciuicflow.runtime.kv_channel import Channel, Item
from ciuicflow.runtime.kv_checksum import Checksummer
from ciuicflow.runtime.memory import Memory
from ciuicflow.transport.base import Buffer, Connection, Message, Transfer, TransportError

log = logging.getLogger(__name__)

_SHORTEST_WAIT_S: Final = 0.001
_STALL_S: Final = 0.1
"""A timer that is later than this found the loop held up: what has come in is read first."""
_GRACE_S: Final = 0.02
_SPARE: Final = 16
"""Staging buffers that are kept: fresh ones cost a page fault per 4 KiB."""


class Books(Protocol):
    """Whoever wants to know what becomes of transfers."""

    def ended(self, link: "Link", action: Complete | Fail) -> None:
        """A transfer has its outcome."""

    def freed(self, link: "Link", action: FreeBlocks) -> None:
        """Its blocks are free."""


class Tools:
    """What all links of an agent share."""

    def __init__(
        self, memory: Memory, checksummer: Checksummer, workers: Executor, books: Books
    ) -> None:
        self.memory = memory
        self.checksummer = checksummer
        self.workers = workers
        self.books = books
        self.loop = asyncio.get_running_loop()
        self._spare: deque[tuple[int, Buffer]] = deque(maxlen=_SPARE)

    def staging(self, size_bytes: int) -> Buffer:
        """Return staging memory, used before if there is some of that size."""
        for index, (size, buffer) in enumerate(self._spare):
            if size == size_bytes:
                del self._spare[index]
                return buffer
        return self.memory.staging(size_bytes)

    def give_back(self, size_bytes: int, staging: Buffer) -> None:
        """Nothing uses this staging memory any more."""
        self._spare.append((size_bytes, staging))


class _Quantum:
    """A quantum on its way: released when it has been sent and its checksum is known."""

    __slots__ = ("_left", "_then", "checksum", "staging")

    def __init__(self, then: "Callable[[_Quantum], None]") -> None:
        self.checksum: int | None = None
        self.staging: tuple[int, Buffer] | None = None
        self._then = then
        self._left = 2

    def summed(self, checksum: int | None) -> None:
        self.checksum = checksum
        self.over()

    def over(self) -> None:
        self._left -= 1
        if not self._left:
            self._then(self)


class Link:
    """One machine and its connection. `do` carries out what the machine says."""

    def __init__(self, machine: Sender | Receiver, peer: str, tools: Tools, scheme: str) -> None:
        """`scheme`: of the transport; ucx sends a message per buffer, so pieces are staged."""
        self.machine = machine
        self.peer = peer
        """Name of the other agent."""
        self.channel: Channel | None = None
        self._tools = tools
        self._gathers = scheme != "ucx"
        self._todo: deque[tuple[Channel | None, Action]] = deque()
        self._doing = False
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("inf")
        self._graced = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def now(self) -> float:
        """Monotonic seconds; the clock of uvloop has steps of a millisecond."""
        return time.monotonic()

    # Connections.

    def attach(self, connection: Connection, first: Message | None = None) -> None:
        """Go on over another connection, whose first message may have been read."""
        if self.channel is not None:
            self.channel.abort("the peer has connected anew")
            self._detach(self.channel, "the peer has connected anew")
        channel: Channel = Channel(
            connection,
            lambda message: self._on_message(channel, message),
            lambda detail: self._detach(channel, detail),
        )
        self.channel = channel
        self.do(self.machine.on_connect(self.now))
        if first is not None:
            self._on_message(channel, first)

    def _detach(self, channel: Channel, detail: str) -> None:
        if channel is self.channel:
            self.channel = None
            self.do(self.machine.on_disconnect(self.now, detail))
            self.on_detached()

    def on_detached(self) -> None:
        """The connection is gone."""

    def _on_message(self, channel: Channel, message: Message) -> None:
        if channel is not self.channel:
            return
        try:
            frame = decode(message.control)
            said = frame.message.bytes if isinstance(frame.message, Quantum) else 0
            if said != message.payload_bytes:
                raise WireError(f"{message.payload_bytes} bytes of payload; expected {said}")
        except WireError as error:
            self.do(self.machine.on_wire_error(self.now, str(error)))
        else:
            self.do(self.machine.on_frame(self.now, frame))

    async def close(self) -> None:
        """End the connection and wait until the transport holds nothing."""
        if self._timer is not None:
            self._timer.cancel()
        channel = self.channel
        if channel is not None:
            channel.close()
            await channel.wait()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    # Actions.

    def do(self, actions: Sequence[Action]) -> None:
        """Carry actions out, in order, also where one of them leads to further ones."""
        channel = self.channel
        self._todo.extend((channel, action) for action in actions)
        if self._doing:
            return
        self._doing = True
        try:
            while self._todo:
                self._carry_out(*self._todo.popleft())
        finally:
            self._doing = False
        self._set_timer()

    def _carry_out(self, channel: Channel | None, action: Action) -> None:
        match action:
            case SendQuantum():
                self._send(channel, action)
            case SendControl():
                if channel is not None:
                    urgent = isinstance(action.frame.message, Commit)  # its quanta have gone
                    channel.send(encode(action.frame), urgent=urgent)
            case PostReceive() | Discard():
                self._receive(channel, action)
            case Complete() | Fail():
                self._tools.books.ended(self, action)
            case FreeBlocks():
                self._tools.books.freed(self, action)
            case Established():
                log.info("KV peer", extra={"peer": action.peer.agent})
            case Close():
                facts = {"peer": self.peer, "reason": action.reason, "detail": action.detail}
                log.warning("KV session given up", extra=facts)
                if channel is not None:
                    channel.close()

    # Payloads out.

    def _send(self, channel: Channel | None, action: SendQuantum) -> None:
        quantum = _Quantum(partial(self._released, action))
        control = encode(action.frame)
        buffers = self._direct(action.piece)
        if channel is None:
            self._tools.loop.call_soon(self._released, action, None)
        elif buffers is not None:
            channel.send(control, buffers, quantum.over)
            self._tools.checksummer.of(buffers, quantum.summed)
        else:
            item = channel.send(control, None, quantum.over)
            self._start(self._gather(channel, item, action, quantum))

    async def _gather(
        self, channel: Channel, item: Item, action: SendQuantum, quantum: _Quantum
    ) -> None:
        memory, piece = self._tools.memory, action.piece
        staging = self._tools.staging(piece.bytes)
        quantum.staging = piece.bytes, staging
        if await self._copied(memory.gather, piece, staging):
            item.buffers = [staging]
            self._tools.checksummer.of([staging], quantum.summed)
        else:
            item.buffers = []
            channel.abort("a payload could not be gathered")
            quantum.summed(None)
        channel.go_on()

    def _released(self, action: SendQuantum, quantum: _Quantum | None) -> None:
        checksum = quantum.checksum if quantum is not None else None
        if quantum is not None and quantum.staging is not None:
            self._tools.give_back(*quantum.staging)
        assert isinstance(self.machine, Sender)
        self.do(self.machine.on_released(self.now, action.transfer, action.seq, checksum))

    def _direct(self, piece: Piece) -> Sequence[Buffer] | None:
        if self._gathers or piece.contiguous:
            return self._tools.memory.direct(piece)
        return None

    # Payloads in.

    def _receive(self, channel: Channel | None, action: PostReceive | Discard) -> None:
        staging: Buffer | None = None
        buffers: Sequence[Buffer] | None = None
        if isinstance(action, PostReceive):
            buffers = self._direct(action.piece)
            if buffers is None:
                staging = self._tools.staging(action.piece.bytes)
                buffers = [staging]
        try:
            if channel is None:
                raise TransportError("the connection is gone")
            claim = (
                channel.connection.discard()
                if buffers is None
                else channel.connection.receive_into(buffers)
            )
        except TransportError as error:
            self._tools.loop.call_soon(self._not_arrived, action, str(error))
            return
        channel.claims += 1
        claim.when_done(partial(self._arrived, channel, action, claim, buffers, staging))

    def _arrived(
        self,
        channel: Channel,
        action: PostReceive | Discard,
        claim: Transfer,
        buffers: Sequence[Buffer] | None,
        staging: Buffer | None,
    ) -> None:
        channel.claims -= 1
        if claim.error is not None:
            self._not_arrived(action, str(claim.error))
        elif staging is not None and isinstance(action, PostReceive):
            self._start(self._scatter(action, staging))
        elif buffers is None:
            self._in_place(action, self.now, None)
        else:
            self._tools.checksummer.of(buffers, partial(self._in_place, action, self.now))

    async def _scatter(self, action: PostReceive, staging: Buffer) -> None:
        arrived_s = self.now
        if await self._copied(self._tools.memory.scatter, staging, action.piece):
            self._tools.checksummer.of(
                [staging], partial(self._in_place, action, arrived_s, staging=staging)
            )
        else:
            self._not_arrived(action, "it could not be scattered")

    def _in_place(
        self,
        action: PostReceive | Discard,
        arrived_s: float,
        checksum: int | None,
        *,
        staging: Buffer | None = None,
    ) -> None:
        if staging is not None and isinstance(action, PostReceive):
            self._tools.give_back(action.piece.bytes, staging)
        assert isinstance(self.machine, Receiver)
        now = self.now
        hold_ns = max(round((now - arrived_s) * 1e9), 0)
        id_, seq = action.transfer, action.seq
        self.do(self.machine.on_payload(now, id_, seq, hold_ns=hold_ns, checksum=checksum))

    def _not_arrived(self, action: PostReceive | Discard, detail: str) -> None:
        assert isinstance(self.machine, Receiver)
        id_, seq = action.transfer, action.seq
        self.do(self.machine.on_receive_failed(self.now, id_, seq, detail))

    async def _copied(self, copy: Callable[..., None], *arguments: Any) -> bool:  # noqa: ANN401
        """Run a copy in a worker thread; False, and logged, if it failed."""
        try:
            await self._tools.loop.run_in_executor(self._tools.workers, copy, *arguments)
        except Exception:
            log.exception("a KV payload was not copied", extra={"peer": self.peer})
            return False
        return True

    def _start(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        task = self._tools.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Time.

    def _set_timer(self) -> None:
        now = self.now
        due_s = self.machine.next_timeout(now)
        if due_s is None or (self._timer is not None and self._due_s <= due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._arm(now, due_s)

    def _arm(self, now: float, due_s: float) -> None:
        self._due_s = max(due_s, now + _SHORTEST_WAIT_S)
        self._timer = self._tools.loop.call_later(self._due_s - now, self._tick)

    def _tick(self) -> None:
        now = self.now
        if now - self._due_s > _STALL_S and not self._graced:
            self._graced = True
            self._arm(now, now + _GRACE_S)
            return
        self._graced = False
        self._timer = None
        if self.channel is not None and self.channel.claims:
            self.machine.heard(now)  # the transport has its own deadline for a payload
        self.do(self.machine.tick(now))
