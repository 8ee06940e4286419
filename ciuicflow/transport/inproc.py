"""`inproc://NAME`: two ends in one process, in one event loop or in two threads' loops.

A payload is copied once, from the sender's buffers to the receiver's, when it is claimed. A send is
done when the receiver has taken it, so a receiver that does not read holds the sender back.
"""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from ciuicflow.transport.arrivals import Arrivals
from ciuicflow.transport.base import (
    ConnectFailed,
    Connection,
    ConnectionEnded,
    Limits,
    Listener,
    ListenFailed,
    LocallyClosed,
    Message,
    PathStatistics,
    PeerClosed,
    PeerReset,
    Transfer,
)
from ciuicflow.transport.buffers import copy, size_of
from ciuicflow.transport.connection import MessageConnection

_BACKLOG: Final = 64
_LISTENERS: Final[dict[str, "InprocListener"]] = {}
_LOCK: Final = threading.Lock()
_NAMES: Final = itertools.count(1)


class _Parcel:
    """A message on its way; the lock keeps its buffers from being reused while they are copied."""

    __slots__ = ("control", "lock", "sender", "settled", "transfer", "views")

    def __init__(
        self,
        sender: "InprocConnection",
        control: bytes,
        views: list[memoryview],
        transfer: Transfer,
    ) -> None:
        self.sender = sender
        self.control = control
        self.views = views
        self.transfer = transfer
        self.lock = threading.Lock()
        self.settled = False
        """Taken by the receiver, or withdrawn by the sender."""


class InprocConnection(MessageConnection):
    """One end; `join` ties two together."""

    def __init__(self, limits: Limits, name: str, side: str) -> None:
        super().__init__(limits)
        self._name, self._side = name, side
        self._other: InprocConnection | None = None
        self._sending: deque[_Parcel] = deque()
        self._arrived: deque[_Parcel] = deque()
        self._current: _Parcel | None = None

    @staticmethod
    def join(one: "InprocConnection", other: "InprocConnection") -> None:
        """Make each the peer of the other."""
        one._other, other._other = other, one

    def _start_send(self, control: bytes, views: list[memoryview], transfer: Transfer) -> None:
        parcel = _Parcel(self, control, views, transfer)
        self._sending.append(parcel)
        self._tell(lambda other: other._arrive(parcel))

    def _tell(self, what: "Callable[[InprocConnection], None]") -> None:
        """Have the other end do something, in its own event loop, in order."""
        other = self._other
        if other is None:
            return  # not joined yet
        try:
            if other._loop is self._loop:
                self._loop.call_soon(what, other)
            else:
                other._loop.call_soon_threadsafe(what, other)
        except RuntimeError:  # its event loop is closed
            self._loop.call_soon(self._end, PeerReset("the peer's event loop is closed"))

    def _arrive(self, parcel: _Parcel) -> None:
        if self._reason is None and not self._closing:
            self._arrived.append(parcel)
            self._put(Message(parcel.control, size_of(parcel.views)))

    def _taken(self, message: Message) -> None:
        self._current = self._arrived.popleft()
        if not message.payload_bytes:
            self._settle(self._current, None)

    def _start_claim(
        self, views: list[memoryview] | None, size_bytes: int, transfer: Transfer
    ) -> None:
        parcel, self._current = self._current, None
        assert parcel is not None
        if self._settle(parcel, views):
            self._got(transfer, size_bytes)
        else:
            transfer.fail(PeerReset("the peer withdrew the message"))

    def _settle(self, parcel: _Parcel, views: list[memoryview] | None) -> bool:
        """Take a parcel, copying it to `views` if given; False: the sender withdrew it before."""
        with parcel.lock:
            if parcel.settled:
                return False
            if views is not None:
                copy(parcel.views, deque(views))
            parcel.settled = True
        self._tell(lambda other: other._delivered(parcel))
        return True

    def _delivered(self, parcel: _Parcel) -> None:
        if parcel in self._sending:  # else the connection ended meanwhile
            self._sending.remove(parcel)
            self._sent(parcel.transfer, len(parcel.control) + size_of(parcel.views))

    def _say_goodbye(self) -> None:
        self._tell(lambda other: other._end(PeerClosed("the peer closed the connection")))
        self._end(LocallyClosed("closed"))

    def _tear_down(self, reason: ConnectionEnded) -> None:
        # Where the goodbye has been said, this comes second and says nothing new.
        self._tell(lambda other: other._end(PeerReset("the peer aborted the connection")))
        sending, self._sending = self._sending, deque()
        for parcel in sending:
            with parcel.lock:
                parcel.settled = True
            self._unsent(parcel.transfer)
        if isinstance(reason, LocallyClosed):
            self._arrived.clear()
        self._release()

    def statistics(self) -> PathStatistics:
        """Return counts; a path within one process has no round trip to speak of."""
        return PathStatistics(
            scheme="inproc",
            local=f"{self._name}#{self._side}",
            peer=f"{self._name}#{'listener' if self._side == 'caller' else 'caller'}",
            lanes=("memory/copy",),
            messages_sent=self._messages_sent,
            messages_received=self._messages_received,
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            outstanding=self._outstanding,
        )


class InprocListener:
    """Accepts connections of this process."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._name = name
        self._limits = limits
        self.loop = asyncio.get_running_loop()
        self._arrivals = Arrivals(_BACKLOG)

    @property
    def uri(self) -> str:
        """What peers connect to."""
        return f"inproc://{self._name}"

    async def accept(self) -> Connection:
        """Wait for the next peer; see Listener."""
        return await self._arrivals.next()

    async def close(self) -> None:
        """Stop listening; see Listener."""
        if not self._arrivals.closed:
            with _LOCK:
                _LISTENERS.pop(self._name, None)
            await self._arrivals.close()

    async def take_in(self, caller: InprocConnection) -> None:
        """Join a caller to a new end of this listener's event loop; raises ConnectFailed."""
        if not self._arrivals.room_beside(0):
            raise ConnectFailed(f"{self.uri} takes nobody in")
        connection = InprocConnection(self._limits, self._name, "listener")
        InprocConnection.join(caller, connection)
        self._arrivals.put(connection)


async def connect(address: str, limits: Limits, deadline_s: float) -> Connection:
    """Connect to a listener of this process; raises ConnectFailed."""
    with _LOCK:
        listener = _LISTENERS.get(address)
    if listener is None or listener.loop.is_closed():
        raise ConnectFailed(f"nobody listens on inproc://{address} in this process")
    caller = InprocConnection(limits, address, "caller")
    try:
        async with asyncio.timeout(deadline_s):
            if listener.loop is asyncio.get_running_loop():
                await listener.take_in(caller)
            else:
                joining = asyncio.run_coroutine_threadsafe(listener.take_in(caller), listener.loop)
                await asyncio.wrap_future(joining)
    except TimeoutError:
        caller.abort("joined too late")
        raise ConnectFailed(f"inproc://{address} gave no answer in {deadline_s:g} s") from None
    return caller


async def listen(address: str, limits: Limits) -> Listener:
    """Listen under a name, or a new one where it is empty; raises ListenFailed."""
    name = address or f"anonymous-{next(_NAMES)}"
    listener = InprocListener(name, limits)
    with _LOCK:
        if name in _LISTENERS:
            raise ListenFailed(f"inproc://{name} is taken")
        _LISTENERS[name] = listener
    return listener
