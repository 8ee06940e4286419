"""`ucx://HOST:PORT`: payloads over UCX (RDMA, TCP), control bytes over a plain socket beside it.

The socket does what UCX does not: it holds a sender back whose peer does not read (UCX would take
small messages into its own memory without end), shows at once that a peer died, answers a stranger,
and refuses unlike settings before they do harm. Payloads below ASIDE_BYTES go through it, too: a
rendezvous costs more than copying them.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from ciuicflow.transport import sockets, ucx_context
from ciuicflow.transport.address import local_and_peer
from ciuicflow.transport.base import (
    ConnectFailed,
    Connection,
    Limits,
    Listener,
    Message,
    PeerReset,
    PeerTimeout,
    Transfer,
)
from ciuicflow.transport.buffers import size_of
from ciuicflow.transport.handshake import Hello, answer, hear, introduce, refuse
from ciuicflow.transport.stream import StreamConnection
from ciuicflow.transport.tcp_info import TcpInfo
from ciuicflow.transport.ucx_context import UcxReport
from ciuicflow.transport.ucx_layout import decode_layout, encode_layout, landings, segments_of
from ciuicflow.transport.ucx_path import (
    UcxHello,
    UcxPath,
    mismatch,
    open_path,
    read_hello,
    say_hello,
)
from ciuicflow.transport.wire import Frame, Kind, head

ASIDE_BYTES: Final = 64 * 1024
_SCHEME: Final = "ucx"
_ENDING: Final[set[asyncio.Task[None]]] = set()
"""Connections that wait for UCX to let go of their buffers; the event loop does not keep them."""


class UcxConnection(StreamConnection):
    """A connection whose larger payloads travel over UCX."""

    def __init__(
        self, sock: socket.socket, limits: Limits, path: UcxPath, *, local: str, peer: str
    ) -> None:
        super().__init__(sock, limits, local=local, peer=peer, scheme=_SCHEME)
        self._path = path
        self._layouts: deque[tuple[int, ...]] = deque()
        """Segment sizes of each message in the inbox; empty: its payload is in the stream."""
        self._layout: tuple[int, ...] = ()
        self._owed = 0
        """Payloads that were announced and are not complete."""
        self._peer_parted = False
        self._moving = 0
        self._aside_moved_s = self._loop.time()

    def _start_send(self, control: bytes, views: list[memoryview], transfer: Transfer) -> None:
        payload_bytes = size_of(views)
        if payload_bytes < ASIDE_BYTES:
            super()._start_send(control, views, transfer)
            return
        segments = segments_of(views)
        layout = encode_layout(segments)
        start = head(Kind.ASIDE, len(layout) + len(control), payload_bytes)
        self._queue((memoryview(start + layout + control),))

        def finish() -> None:
            if self._reason is None:
                self._sent(transfer, len(control) + payload_bytes)
            else:
                self._unsent(transfer)

        if self._reason is not None:  # noticed by the write above
            finish()
        else:
            self._move([self._path.send(segment) for segment in segments], finish)

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is Kind.ASIDE:
            sizes, control = decode_layout(frame.control, frame.payload_bytes)
            self._layouts.append(sizes)
            self._owed += 1
            self._put(Message(control, frame.payload_bytes))
            return
        if frame.kind is Kind.CLOSE and self._owed:
            self._peer_parted = True  # UCX may be slower to tell us than it was to tell the peer
            self._pause()
            return
        if frame.kind is Kind.MESSAGE:
            self._layouts.append(())
        super()._on_frame(frame)

    def _taken(self, message: Message) -> None:
        self._layout = self._layouts.popleft()
        if self._peer_parted:
            return
        if self._layout:
            self._resume()  # the stream goes on whether the payload is claimed or not
        else:
            super()._taken(message)

    def _start_claim(
        self, views: list[memoryview] | None, size_bytes: int, transfer: Transfer
    ) -> None:
        if not self._layout:
            super()._start_claim(views, size_bytes, transfer)
            return
        places = landings(self._layout, views)

        def finish() -> None:
            if self._reason is not None:
                self._not_got(transfer)
                return
            for place in places:
                place.settle()
            self._got(transfer, size_bytes)
            self._owed -= 1
            if self._peer_parted and not self._owed:
                super(UcxConnection, self)._on_frame(Frame(Kind.CLOSE, b"", 0))

        self._move([self._path.receive(place.target) for place in places], finish)

    def _move(self, tasks: "Sequence[asyncio.Task[None]]", finish: Callable[[], None]) -> None:
        """Call `finish` when UCX has completed all tasks, well or not."""
        if not self._moving:
            self._aside_moved_s = self._loop.time()
        self._moving += 1
        left = len(tasks)

        def one_over(task: "asyncio.Task[None]") -> None:
            nonlocal left
            left -= 1
            self._aside_moved_s = self._loop.time()
            error = "cancelled" if task.cancelled() else task.exception()
            if error is not None:
                self._end(PeerReset(f"UCX: {error}"))
            if not left:
                self._moving -= 1
                finish()

        for task in tasks:
            task.add_done_callback(one_over)

    def _tick(self) -> None:
        super()._tick()
        stall_s = self._limits.stall_s
        if self._moving and self._loop.time() - self._aside_moved_s > stall_s:
            self._end(PeerTimeout(f"no payload moved over UCX for {stall_s:g} s"))

    def _release(self) -> None:
        """Say that the connection holds nothing, once UCX has let go of every buffer."""
        ending = self._loop.create_task(self._let_go())
        _ENDING.add(ending)
        ending.add_done_callback(_ENDING.discard)

    async def _let_go(self) -> None:
        await self._path.close()
        ucx_context.release()
        super()._release()

    def _lanes(self) -> tuple[str, ...]:
        return self._path.lanes

    def _path_info(self) -> TcpInfo:
        return self._path.tcp_info()  # not of the control socket: payloads go another way


async def connect(address: str, limits: Limits, deadline_s: float) -> Connection:
    """Connect to a listener; raises ConnectFailed, TransportUnavailable."""
    ucx_context.load_ucxx()
    return await sockets.dial(address, partial(_introduced, limits=limits), deadline_s)


async def listen(address: str, limits: Limits) -> Listener:
    """Listen; raises ListenFailed, TransportUnavailable."""
    report = await ucx_context.acquire()
    try:
        admit = partial(_heard, limits=limits, report=report)
        return UcxListener(await sockets.listen(_SCHEME, address, admit, limits))
    except BaseException:
        ucx_context.release()
        raise


class UcxListener:
    """A listener that keeps UCX running."""

    def __init__(self, listener: sockets.SocketListener) -> None:
        self._listener = listener
        self._closed = False

    @property
    def uri(self) -> str:
        """What peers connect to."""
        return self._listener.uri

    async def accept(self) -> Connection:
        """Wait for the next peer; see Listener."""
        return await self._listener.accept()

    async def close(self) -> None:
        """Stop listening; see Listener."""
        if not self._closed:
            self._closed = True
            await self._listener.close()
            ucx_context.release()


async def _introduced(sock: socket.socket, limits: Limits) -> Connection:
    ours = say_hello(await ucx_context.acquire())
    try:
        heard = await introduce(sock, Hello(_SCHEME, details=msgspec.json.encode(ours)))
        return await _joined(sock, limits, ours, read_hello(heard.details))
    except BaseException:
        ucx_context.release()
        raise


async def _heard(sock: socket.socket, limits: Limits, report: UcxReport) -> Connection:
    theirs = read_hello((await hear(sock, _SCHEME)).details)
    problem = mismatch(report, theirs.report)
    if problem:
        await refuse(sock, _SCHEME, problem)
        raise ConnectFailed(problem)
    ours = say_hello(await ucx_context.acquire())
    try:
        await answer(sock, Hello(_SCHEME, details=msgspec.json.encode(ours)))
        return await _joined(sock, limits, ours, theirs)
    except BaseException:
        ucx_context.release()
        raise


async def _joined(
    sock: socket.socket, limits: Limits, ours: UcxHello, theirs: UcxHello
) -> Connection:
    problem = mismatch(ours.report, theirs.report)
    if problem:
        raise ConnectFailed(problem)
    local, peer = local_and_peer(sock)
    path = await open_path(ours, theirs)
    try:
        await path.probe(peer)
        return UcxConnection(sock, limits, path, local=local, peer=peer)
    except BaseException:
        await path.close()
        raise
