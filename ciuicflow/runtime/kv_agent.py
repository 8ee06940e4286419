"""`KvAgent`: what an engine embeds to send and receive KV cache. Start with docs/kv.md.

Every call returns at once and may be made from any thread; what takes time returns an `Answer`,
which a thread waits for with `result(timeout_s)` and a coroutine with `await`.
"""

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import count
from typing import Any, Final, Generic, Literal, Self, TypeVar

from ciuicflow.kvtransfer.errors import AgentGone, KvUsageError, TransferFailed
from ciuicflow.kvtransfer.layout import Geometry
from ciuicflow.kvtransfer.ticket import TransferTicket
from ciuicflow.runtime.kv_places import Place, ProcessPlace, ThreadPlace
from ciuicflow.runtime.kv_records import (
    Abort,
    AgentSpec,
    AgentState,
    Ask,
    Blocks,
    Command,
    Completed,
    Event,
    Failed,
    Freed,
    KvConfig,
    Push,
    Ready,
    Register,
    Rejected,
    Reserve,
    Started,
    State,
    Stop,
    Stopped,
)
from ciuicflow.runtime.memory import Memory, SharedMemory

START_S: Final = 30.0
"""How long an agent may take to start; a process on a busy machine takes one or two seconds."""
STOP_S: Final = 15.0

T = TypeVar("T")


class Answer(Generic[T]):
    """Something that comes later: `answer.result(timeout_s)` in a thread, or `await answer`."""

    def __init__(self) -> None:
        self._future: Future[T] = Future()

    @property
    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._future.done()

    def result(self, timeout_s: float) -> T:
        """Wait, and return or raise what came. TimeoutError after `timeout_s`."""
        try:
            return self._future.result(timeout_s)
        except FutureTimeout:
            raise TimeoutError(f"no answer in {timeout_s:g} s") from None

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once it is done, in the agent's thread: it must be quick."""
        self._future.add_done_callback(lambda _: callback())

    def _set(self, value: T) -> None:
        if not self._future.done():
            self._future.set_result(value)

    def _fail(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class KvTransfer(Answer[Completed]):
    """A transfer under way. Until it is done its blocks are the agent's, afterwards yours.

    Done well: at the destination the cache is whole. Done badly: it raises TransferFailed (or
    AgentGone), and what the blocks at the destination hold is worthless. A failure is known before
    the blocks are free: see `outcome`.
    """

    def __init__(self, agent: "KvAgent", ticket: TransferTicket) -> None:
        super().__init__()
        self.ticket = ticket
        self.outcome: Answer[Completed] = Answer()
        """The outcome, without the wait for the blocks: to tell others early, not to reuse them."""
        self._agent = agent

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ticket.id} {'done' if self.done else 'under way'}>"

    def abort(self, detail: str = "") -> None:
        """Give it up, unless it has ended."""
        if not self.done:
            self._agent._tell(Abort(self.ticket.id, detail))

    def _ended(self, outcome: Completed | Exception) -> None:
        if isinstance(outcome, Exception):
            self.outcome._fail(outcome)
        else:
            self.outcome._set(outcome)

    def _freed(self) -> None:
        error = self.outcome._future.exception(0)
        if error is None:
            self._set(self.outcome.result(0))
        else:
            assert isinstance(error, Exception)
            self._fail(error)

    def _never(self, error: Exception) -> None:
        self._ended(error)
        self._fail(error)


class KvPush(KvTransfer):
    """A transfer that this engine sends."""

    def ready(
        self,
        first_layer: int,
        end_layer: int,
        *,
        blocks: range | None = None,
        region: int | None = None,
    ) -> None:
        """Layers from `first_layer` to before `end_layer` have been computed, and may be sent.

        `blocks`: positions in the list that was pushed, for a prefill chunk; None: all of them.
        `region`: only that one. The agent reads them from now on; say each once.
        """
        if blocks is not None and (blocks.step != 1 or not blocks):
            raise KvUsageError(f"blocks: {blocks}; expected one or more consecutive positions")
        first, length = (None, 0) if blocks is None else (blocks.start, len(blocks))
        id_ = self.ticket.id
        self._agent._tell(Ready(id_, first_layer, end_layer, first, length, region))


class KvAgent:
    """Sends and receives the cache of one shard. Use as a context manager, `async` or not.

    place="thread": in a thread of this process. place="process": in a process of its own, which
    this process's GIL does not hold up; `memory` must be SharedMemory. KvUsageError if it is not.
    """

    def __init__(
        self,
        name: str,
        layout: Geometry,
        memory: Memory,
        *,
        listen: str = "tcp://127.0.0.1:0",
        place: Literal["thread", "process"] = "thread",
        config: KvConfig = KvConfig(),  # noqa: B008 - immutable
    ) -> None:
        self.name = name
        self.layout = layout
        self.uri = ""
        """What peers connect to; known when it has started."""
        self.metrics: str | None = None
        """HOST:PORT of /metrics."""
        self.incarnation = 0
        """For tickets; another after each start."""
        spec = AgentSpec(name=name, layout=layout, listen=listen, config=config)
        self._place: Place
        if place == "thread":
            self._place = ThreadPlace(spec, memory, self._on_event)
        elif isinstance(memory, SharedMemory):
            self._place = ProcessPlace(spec, memory, self._on_event)
        else:
            raise KvUsageError("an agent in a process of its own needs SharedMemory")
        self._lock = threading.Lock()
        self._gone = "it was not started"
        self._peers: set[str] = set()
        self._transfers: dict[str, KvTransfer] = {}
        self._questions: dict[int, Answer[AgentState]] = {}
        self._numbers = count(1)
        self._started: Answer[None] = Answer()
        self._stopped: Answer[None] = Answer()

    # Life.

    def start(self) -> Answer[None]:
        """Start it. The answer raises AgentGone where it cannot: address taken, no library."""
        self._gone = ""
        self._place.start()
        return self._started

    def stop(self) -> Answer[None]:
        """Fail what is under way and end; when it is done, nothing touches the memory."""
        if not self._gone:
            try:
                self._place.send(Stop())
            except AgentGone:
                pass
        return self._stopped

    def __enter__(self) -> Self:
        self.start().result(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop().result(STOP_S)

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(START_S):
            await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.timeout(STOP_S):
            await self.stop()

    # Transfers.

    def register(self, agent: str, uri: str) -> None:
        """Say where the agent of another shard listens; it is connected to at once."""
        self._tell(Register(agent, uri))
        self._peers.add(agent)

    def push(self, ticket: TransferTicket, blocks: Sequence[Iterable[int]]) -> KvPush:
        """Begin to send these blocks, by region and in the order of their tokens.

        Nothing is read before `ready` says which layers have been computed. KvUsageError if the
        call cannot be right.
        """
        if ticket.destination.agent not in self._peers:
            where = ticket.destination.agent
            raise KvUsageError(f"nobody knows where {where} listens: register it first")
        transfer = KvPush(self, ticket)
        self._begin(transfer, Push(ticket, self._lists(blocks)))
        return transfer

    def expect(self, ticket: TransferTicket, blocks: Sequence[Iterable[int]]) -> KvTransfer:
        """Reserve these blocks for a transfer that the ticket's source will push.

        KvUsageError if the call cannot be right.
        """
        transfer = KvTransfer(self, ticket)
        self._begin(transfer, Reserve(ticket, self._lists(blocks)))
        return transfer

    def abort(self, transfer: str, detail: str = "") -> None:
        """Give a transfer up by its id; also one that was never pushed but is expected."""
        self._tell(Abort(transfer, detail))

    def statistics(self) -> Answer[AgentState]:
        """Ask for the state: paths with bytes, waits, round trips; outcomes."""
        number, answer = next(self._numbers), Answer[AgentState]()
        self._questions[number] = answer
        self._tell(Ask(number))
        return answer

    # Parts.

    def _lists(self, blocks: Sequence[Iterable[int]]) -> Blocks:
        if len(blocks) != len(self.layout.regions):
            expected = len(self.layout.regions)
            raise KvUsageError(f"blocks of {len(blocks)} regions; expected {expected}")
        return tuple(tuple(map(int, part)) for part in blocks)  # numpy's integers as well

    def _begin(self, transfer: KvTransfer, command: Push | Reserve) -> None:
        id_ = transfer.ticket.id
        with self._lock:
            if id_ in self._transfers:
                raise KvUsageError(f"transfer {id_} is under way already")
            self._transfers[id_] = transfer
        try:
            self._tell(command)
        except AgentGone:
            self._transfers.pop(id_, None)
            raise

    def _tell(self, command: Command) -> None:
        if self._gone:
            raise AgentGone(f"agent {self.name}: {self._gone}")
        self._place.send(command)

    def _on_event(self, event: Event) -> None:
        """Called in the place's thread, one at a time."""
        match event:
            case Completed():
                self._transfers[event.transfer]._ended(event)
            case Failed(transfer, reason, by_peer, detail):
                failure = TransferFailed(transfer, reason, detail, by_peer=by_peer)
                self._transfers[transfer]._ended(failure)
            case Freed():
                self._transfers.pop(event.transfer)._freed()
            case Rejected():
                misuse = KvUsageError(f"transfer {event.transfer}: {event.detail}")
                self._transfers.pop(event.transfer)._never(misuse)
            case State():
                self._questions.pop(event.number)._set(event.state)
            case Started():
                self.uri, self.metrics = event.uri, event.metrics
                self.incarnation = event.incarnation
                self._started._set(None)
            case Stopped():
                self._end(event.detail)

    def _end(self, detail: str) -> None:
        with self._lock:
            self._gone = detail or "it was stopped"
            transfers, self._transfers = self._transfers, {}
            questions, self._questions = self._questions, {}
        error = AgentGone(f"agent {self.name}: {self._gone}")
        for transfer in transfers.values():
            transfer._never(error)
        for question in questions.values():
            question._fail(error)
        self._started._fail(error)
        self._stopped._set(None)
