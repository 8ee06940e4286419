"""The agent on its event loop: commands of the engine in, events out, links to all peers."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ciuicflow.congestion.fixed import FixedController
from ciuicflow.kvtransfer.actions import Complete, Fail, FreeBlocks
from ciuicflow.kvtransfer.errors import KvUsageError, WireError
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.receiver import Receiver
from ciuicflow.kvtransfer.sender import Sender
from ciuicflow.kvtransfer.session import COMPLETED, make_hello
from ciuicflow.kvtransfer.wire import Error, Frame, Hello, decode, encode
from ciuicflow.runtime.kv_channel import CLOSE_S, limits
from ciuicflow.runtime.kv_checksum import Checksummer
from ciuicflow.runtime.kv_link import Link, Tools
from ciuicflow.runtime.kv_metrics import MetricsPort
from ciuicflow.runtime.kv_peers import Destination, Source
from ciuicflow.runtime.kv_records import (
    Abort,
    AgentSpec,
    AgentState,
    Ask,
    Command,
    Completed,
    Event,
    Failed,
    Freed,
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
from ciuicflow.runtime.memory import Memory
from ciuicflow.transport.base import Connection, Listener, LocallyClosed, TransportError
from ciuicflow.transport.table import listen

log = logging.getLogger(__name__)

_WORKERS: Final = 2
_MOST_PEERS: Final = 4096
_FREE_S: Final = 5.0
"""How long worker threads may take to end with the blocks of what a stop has failed."""
_Transfer = tuple[Destination | Source, str]
"""Where it is under way, and its tier."""


class KvDriver:
    """Drives the senders and receivers of one agent. All calls come from its event loop."""

    def __init__(self, spec: AgentSpec, memory: Memory, emit: Callable[[Event], None]) -> None:
        """`emit` takes each event. KvUsageError where a library is missing."""
        self._spec = spec
        self._emit = emit
        self._config = spec.config
        self._incarnation = secrets.randbits(62)
        self._workers = ThreadPoolExecutor(_WORKERS, f"kv-{spec.name}")
        checksummer = Checksummer(spec.config.checksum, self._workers)
        self._tools = Tools(memory, checksummer, self._workers, self)
        sender = spec.config.sender
        self._limits = limits(sender.dead_after_s, sender.stall_s)
        self._destinations: dict[str, Destination] = {}
        self._sources: dict[str, Source] = {}
        self._transfers: dict[str, _Transfer] = {}
        self._outcomes: Counter[str] = Counter()
        self._listener: Listener | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._greeting: set[asyncio.Task[None]] = set()
        self._metrics = MetricsPort(self.state)
        self._stopped = asyncio.Event()
        self._all_freed = asyncio.Event()

    # Life.

    async def run(self) -> None:
        """Listen, tell so, and serve until `Stop`. Raises TransportError, OSError."""
        try:
            self._listener = await listen(self._spec.listen, self._limits)
            metrics = None
            if self._config.metrics is not None:
                metrics = await self._metrics.listen(self._config.metrics)
            self._accepting = asyncio.create_task(self._accept(self._listener))
            self._emit(Started(self._listener.uri, metrics, self._incarnation))
            await self._stopped.wait()
        finally:
            await self._close()
        self._emit(Stopped())

    async def _close(self) -> None:
        tasks = {*self._greeting} | ({self._accepting} if self._accepting is not None else set())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        links: list[Link] = [*self._destinations.values(), *self._sources.values()]
        for id_, (link, _) in list(self._transfers.items()):
            link.abort(Abort(id_, "the agent stops"))
        await asyncio.gather(*(link.close() for link in links))
        await self._wait_freed()
        if self._listener is not None:
            await self._listener.close()
        await self._metrics.close()
        self._workers.shutdown(wait=False)

    async def _wait_freed(self) -> None:
        """Wait for checksums under way: they read blocks after the transport has let go of them."""
        if not self._transfers:
            return
        try:
            async with asyncio.timeout(_FREE_S):
                await self._all_freed.wait()
        except TimeoutError:
            log.error("blocks still in use at the stop", extra={"transfers": len(self._transfers)})

    # What the engine says.

    def handle(self, command: Command) -> None:
        """Do what a command says; after `Stop` nothing, what it began is failed by `Stopped`."""
        if self._stopped.is_set():
            return
        match command:
            case Register():
                self._register(command)
            case Push() | Reserve():
                self._begin(command)
            case Ready():
                self._ready(command)
            case Abort():
                self._abort(command)
            case Ask():
                self._emit(State(command.number, self.state()))
            case Stop():
                self._stopped.set()

    def _register(self, command: Register) -> None:
        link = self._destinations.get(command.agent)
        if link is None:
            controller = FixedController(self._config.window_bytes, self._config.rate_bytes_per_s)
            sender = Sender(self._hello(), self._config.sender, controller)
            link = self._destinations[command.agent] = Destination(
                sender,
                command.agent,
                command.uri,
                self._tools,
                limits=self._limits,
                connect_s=self._config.connect_s,
            )
        link.uri = command.uri
        link.dial()

    def _begin(self, command: Push | Reserve) -> None:
        ticket = command.ticket
        try:
            self._check_blocks(command)
            if isinstance(command, Push):
                destination = self._destination(ticket.destination.agent)
                self._transfers[ticket.id] = (destination, ticket.tier)
                destination.push(command)
            else:
                source = self._source(ticket.source.agent)
                self._transfers[ticket.id] = (source, ticket.tier)
                source.reserve(command)
        except ValueError as error:
            self._transfers.pop(ticket.id, None)  # `KvAgent` sees to it that no id comes twice
            self._emit(Rejected(ticket.id, str(error)))

    def _check_blocks(self, command: Push | Reserve) -> None:
        """The core knows no memory: see that all blocks are within it."""
        for ids, count in zip(command.blocks, self._tools.memory.blocks, strict=False):
            if ids and max(ids) >= count:
                raise KvUsageError(f"block {max(ids)}; the memory has {count}")

    def _abort(self, abort: Abort) -> None:
        """Give up a transfer, or tell whoever expects it that it will never be pushed."""
        known = self._transfers.get(abort.transfer)
        links = [known[0]] if known is not None else list(self._destinations.values())
        for link in links:
            link.abort(abort)

    def _ready(self, ready: Ready) -> None:
        link = self._transfers.get(ready.transfer, (None, ""))[0]
        if isinstance(link, Destination):  # else it has ended
            try:
                link.ready(ready)
            except ValueError as error:
                link.abort(Abort(ready.transfer, f"misused: {error}"))

    def _destination(self, agent: str) -> Destination:
        if agent not in self._destinations:
            raise KvUsageError(f"nobody knows where {agent} listens: register it first")
        return self._destinations[agent]

    def _source(self, agent: str) -> Source:
        source = self._sources.get(agent)
        if source is None:
            if len(self._sources) >= _MOST_PEERS:
                raise KvUsageError(f"{_MOST_PEERS} agents send to this one already")
            receiver = Receiver(self._hello(), self._config.sender)
            scheme = self._spec.listen.partition(":")[0]
            source = self._sources[agent] = Source(
                receiver, agent, self._tools, scheme, self._forget
            )
        return source

    def _forget(self, source: Source) -> None:
        if self._sources.get(source.peer) is source:
            del self._sources[source.peer]

    def _hello(self) -> Hello:
        settings = {"checksum": self._config.checksum}
        return make_hello(
            self._spec.name,
            self._incarnation,
            self._spec.layout,
            self._config.receive_bytes,
            settings,
        )

    # Peers that connect.

    async def _accept(self, listener: Listener) -> None:
        try:
            while True:
                connection = await listener.accept()
                task = asyncio.create_task(self._greet(connection))
                self._greeting.add(task)
                task.add_done_callback(self._greeting.discard)
        except LocallyClosed:
            pass

    async def _greet(self, connection: Connection) -> None:
        """Hear who it is; the receiver for that agent goes on from there."""
        try:
            async with asyncio.timeout(self._limits.handshake_s):
                first = await connection.receive()
            hello = decode(first.control).message
            if not isinstance(hello, Hello):
                raise WireError("the first message was no greeting")
            self._source(hello.agent).attach(connection, first)
        except (WireError, KvUsageError) as error:
            log.warning("refused a KV peer", extra={"reason": str(error)})
            await self._refuse(connection, str(error))
        except (TransportError, TimeoutError) as error:
            log.warning("a KV peer did not introduce itself", extra={"reason": str(error)})
            connection.abort("no greeting")
        except asyncio.CancelledError:
            connection.abort("the agent stops")
            raise

    async def _refuse(self, connection: Connection, why: str) -> None:
        error = Error(FailReason.PROTOCOL, why[:1024])
        try:
            connection.send(encode(Frame(self._incarnation, error)))
            await connection.close(CLOSE_S)
        except TransportError:
            pass  # it has left by itself

    # What becomes of transfers.

    def ended(self, link: Link, action: Complete | Fail) -> None:
        """Tell the engine; a receiver's blocks are the engine's with that."""
        id_ = action.transfer
        tier = self._transfers[id_][1]
        role = "send" if isinstance(link, Destination) else "receive"
        if isinstance(action, Fail):
            self._outcomes[f"{role} {action.reason}"] += 1
            self._emit(Failed(id_, action.reason, action.by_peer, action.detail))
            return
        self._outcomes[f"{role} {COMPLETED}"] += 1
        self._metrics.observe(role, tier, action.duration_s)
        self._emit(Completed(id_, action.bytes, action.quanta, action.duration_s))
        if isinstance(link, Source):
            self._free(link, id_)

    def freed(self, link: Link, action: FreeBlocks) -> None:
        """Tell the engine."""
        self._free(link, action.transfer)

    def _free(self, link: Link, id_: str) -> None:
        assert isinstance(link, Destination | Source)
        link.forget(id_)
        del self._transfers[id_]
        self._emit(Freed(id_))
        if self._stopped.is_set() and not self._transfers:
            self._all_freed.set()

    def state(self) -> AgentState:
        """Return what an operator may see."""
        return AgentState(
            agent=self._spec.name,
            incarnation=self._incarnation,
            uri=self._listener.uri if self._listener is not None else self._spec.listen,
            paths=tuple(link.report(self._spec.name) for link in self._destinations.values()),
            sources=tuple(link.report(self._spec.name) for link in self._sources.values()),
            outcomes=dict(self._outcomes),
        )
