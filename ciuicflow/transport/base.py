"""The transport interface: ordered messages between two KV agents, and how a connection ends.

A message is control bytes (at most 64 KiB) and a payload of any number of host memory buffers.

Sending. `send` fixes the order when it is called and returns a Transfer; call it several times and
await the transfers later. Its buffers belong to the connection until the transfer is done. There
is no queue without a bound: the call that would exceed `Limits.outstanding` raises TooManySends.

Receiving. `receive` returns the control bytes of the next message and the size of its payload. If
there is a payload, claim it before the next `receive`: `receive_into` scatters exactly this
payload over the given buffers, `discard` drops it. A claim is made at the call, not at the await,
so several may be outstanding; they complete in order on tcp, and in any order on ucx.

Release. When a Transfer is done, with or without an error, nothing touches its buffers any more.
Cancelling a task that awaits a transfer stops the waiting only: bytes on their way cannot be
called back (on ucx: measured, a cancelled receive is filled to its end), so the transfer goes on,
the connection stays usable, and the transfer can be awaited again. Cancelling `receive` loses
nothing. Cancelling `close` aborts.

End. A connection ends once, with one reason, a ConnectionEnded: everything that is outstanding or
called later raises it. Messages that had arrived when the peer ended it can still be received.
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from ciuicflow.errors import CiuicFlowError

MAX_CONTROL_BYTES: Final = 64 * 1024
MAX_PAYLOAD_BYTES: Final = 1 << 30
"""More than any micro-batch; a size above it is taken for a broken peer."""
MAX_BUFFERS: Final = 1024
"""Buffers of one payload (IOV_MAX of Linux)."""

Buffer: TypeAlias = Any
"""An object with the buffer protocol, C-contiguous: memoryview, bytearray, numpy array."""


class TransportError(CiuicFlowError):
    """Root of the errors of this package.

    TransportError
    ├── TransportUnavailable   unknown scheme or missing library: what to install
    ├── ListenFailed           the address cannot be listened on
    ├── ConnectFailed          nobody there, no answer in time, or refused in the handshake
    ├── InvalidMessage         a buffer or size that cannot be sent or received; nothing happened
    ├── TooManySends           the bound of outstanding sends is reached; nothing happened
    └── ConnectionEnded        why a connection is over
        ├── LocallyClosed          by close or abort on this side
        ├── PeerClosed             the peer closed after all that it had to send
        ├── PeerReset              the peer aborted, crashed or was killed
        ├── PeerTimeout            the peer is silent or takes nothing
        ├── Truncated              the bytes ended within a message
        └── PeerViolation          the peer broke the protocol
    """


class TransportUnavailable(TransportError):
    """The scheme is unknown, or its library is missing or unfit; says what to do."""


class ListenFailed(TransportError):
    """The address cannot be listened on."""


class ConnectFailed(TransportError):
    """No connection: nobody there, no answer before the deadline, or refused, with the reason."""


class InvalidMessage(TransportError):
    """A message that cannot be sent, or buffers that do not fit the payload; nothing happened."""


class TooManySends(TransportError):
    """`Limits.outstanding` sends are on their way: await the oldest first."""


class ConnectionEnded(TransportError):
    """Why a connection is over."""

    def again(self) -> "ConnectionEnded":
        """Return a fresh copy to raise, so that tracebacks do not pile up."""
        return type(self)(*self.args)


class LocallyClosed(ConnectionEnded):
    """Closed or aborted on this side."""


class PeerClosed(ConnectionEnded):
    """The peer closed after everything that it had to send."""


class PeerReset(ConnectionEnded):
    """The peer aborted, crashed or was killed, or the path to it broke."""


class PeerTimeout(ConnectionEnded):
    """The peer was silent, or took nothing, for longer than the limits allow."""


class Truncated(ConnectionEnded):
    """The peer's bytes ended within a message."""


class PeerViolation(ConnectionEnded):
    """The peer sent bytes that break the protocol."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a connection."""

    outstanding: int = 64
    """Sends on their way at once; also received messages that wait for `receive`."""
    heartbeat_s: float = 1.0
    """An idle side says this often that it lives; deadlines are checked as often."""
    silence_s: float = 10.0
    """A peer that says nothing for so long, while this side reads, is taken for dead."""
    stall_s: float = 30.0
    """A peer that takes none of the bytes that are on their way for so long is taken for hung."""
    handshake_s: float = 5.0
    """How long a listener waits for a new peer to introduce itself."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """The control bytes of a message and the size of the payload that is still to be claimed."""

    control: bytes
    payload_bytes: int


class PathStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a connection and its path; None is unknown, never zero.

    Bytes are control and payload bytes of messages, without framing: sent ones counted when the
    transfer is done, received ones when the control is taken and when the payload is complete.
    """

    scheme: str
    local: str
    peer: str
    lanes: tuple[str, ...]
    """TRANSPORT/DEVICE of the payload's way: `tcp/lo`, `rc_mlx5/mlx5_0:1`."""
    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    outstanding: int
    """Sends on their way."""
    smoothed_rtt_s: float | None = None
    """Kernel's estimate for the socket that carries the payload (tcpi_rtt)."""
    min_rtt_s: float | None = None
    delivered_segments: int | None = None
    delivered_ce_segments: int | None = None
    """Of these, those acknowledged with an ECN congestion mark."""


class Transfer:
    """Bytes on their way. Await it: it returns when its buffers may be used again.

    Raises ConnectionEnded where the connection ended first; the buffers are free then, too.
    """

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self._future).__await__()

    @property
    def done(self) -> bool:
        """Whether the buffers are free."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None: it succeeded. Only when it is done."""
        return self._future.exception()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have `callback` called from the event loop once the buffers are free."""
        self._future.add_done_callback(lambda _future: callback())

    def succeed(self) -> None:
        """For transports: all bytes have gone."""
        self._future.set_result(None)

    def fail(self, reason: ConnectionEnded) -> None:
        """For transports: the connection ended, and nothing touches the buffers any more."""
        self._future.set_exception(reason.again())
        self._future.exception()  # nobody has to await it: the connection reports the reason, too


class Connection(Protocol):
    """An ordered stream of messages both ways; see the module's text for the rules."""

    def send(self, control: Buffer, payload: Sequence[Buffer] = ()) -> Transfer:
        """Send a message after all that were sent before.

        Raises InvalidMessage, TooManySends, ConnectionEnded.
        """

    async def receive(self) -> Message:
        """Wait for the next message. There is no deadline but the caller's: cancel it freely.

        Raises InvalidMessage where a payload is unclaimed or another task waits; ConnectionEnded.
        """

    def receive_into(self, buffers: Sequence[Buffer]) -> Transfer:
        """Take the payload of the message that `receive` returned last; sizes must add up to it.

        Raises InvalidMessage, ConnectionEnded.
        """

    def discard(self) -> Transfer:
        """Drop the payload of the message that `receive` returned last."""

    async def close(self, deadline_s: float = 5.0) -> None:
        """Send what is outstanding, tell the peer, and wait until it has taken everything.

        What the peer still sends is dropped. Raises PeerTimeout after `deadline_s`; the
        connection is then aborted. Does nothing on a connection that is over.
        """

    def abort(self, why: str = "aborted") -> None:
        """End at once; the peer gets PeerReset. Buffers are free when their transfers are done."""

    @property
    def closed(self) -> bool:
        """Whether the connection is over."""

    async def wait_closed(self) -> ConnectionEnded:
        """Wait until the connection is over and holds no buffer, and return the reason."""

    def statistics(self) -> PathStatistics:
        """Return counts and what the kernel or UCX tells of the path (tcp: 6 us)."""


class Listener(Protocol):
    """Accepts connections."""

    @property
    def uri(self) -> str:
        """What peers connect to; has the real port where 0 was asked for."""

    async def accept(self) -> Connection:
        """Wait for the next peer that completed the handshake. Raises LocallyClosed."""

    async def close(self) -> None:
        """Stop listening; accepted connections stay, those that nobody accepted are aborted."""
