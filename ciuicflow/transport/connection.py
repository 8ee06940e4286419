"""What all transports share: the order of messages, claims, bounds, counts, and the one end."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from ciuicflow.transport.base import (
    MAX_CONTROL_BYTES,
    Buffer,
    ConnectionEnded,
    InvalidMessage,
    Limits,
    LocallyClosed,
    Message,
    PeerTimeout,
    TooManySends,
    Transfer,
)
from ciuicflow.transport.buffers import size_of, views_of


class MessageConnection(ABC):
    """The rules of base.py; a transport fills in how bytes move.

    All methods run in the event loop that made the connection.
    """

    def __init__(self, limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._inbox: deque[Message] = deque()
        self._unclaimed_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._outstanding = 0
        self._closing = False
        self._reason: ConnectionEnded | None = None
        self._released: asyncio.Future[None] = self._loop.create_future()
        self._sends_done: asyncio.Future[None] | None = None
        self._messages_sent = 0
        self._messages_received = 0
        self._bytes_sent = 0
        self._bytes_received = 0

    # Sending.

    def send(self, control: Buffer, payload: Sequence[Buffer] = ()) -> Transfer:
        """Send a message after all that were sent before; see Connection."""
        control = bytes(control)
        if len(control) > MAX_CONTROL_BYTES:
            raise InvalidMessage(f"{len(control)} control bytes; at most {MAX_CONTROL_BYTES}")
        views = views_of(payload, writable=False)
        self._check_open()
        if self._outstanding >= self._limits.outstanding:
            raise TooManySends(f"{self._outstanding} sends are on their way; await the oldest")
        self._outstanding += 1
        transfer = Transfer(self._loop)
        self._start_send(control, views, transfer)
        return transfer

    @abstractmethod
    def _start_send(self, control: bytes, views: list[memoryview], transfer: Transfer) -> None:
        """Put a message on its way; `_sent` or `_unsent` is called once for it."""

    def _sent(self, transfer: Transfer, size_bytes: int) -> None:
        self._messages_sent += 1
        self._bytes_sent += size_bytes
        self._send_over()
        transfer.succeed()

    def _unsent(self, transfer: Transfer) -> None:
        assert self._reason is not None
        self._send_over()
        transfer.fail(self._reason)

    def _send_over(self) -> None:
        self._outstanding -= 1
        if not self._outstanding and self._sends_done is not None and not self._sends_done.done():
            self._sends_done.set_result(None)

    # Receiving.

    async def receive(self) -> Message:
        """Wait for the next message; see Connection."""
        if self._unclaimed_bytes:
            raise InvalidMessage("claim the payload before the next message: receive_into, discard")
        if self._waiter is not None:
            raise InvalidMessage("another task waits in receive")
        while not self._inbox:
            self._check_open()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._inbox.popleft()
        self._messages_received += 1
        self._bytes_received += len(message.control)
        self._unclaimed_bytes = message.payload_bytes
        self._taken(message)
        return message

    @abstractmethod
    def _taken(self, message: Message) -> None:
        """Go on after a message left the inbox."""

    def _put(self, message: Message) -> None:
        """Add an arrived message to the inbox."""
        self._inbox.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def receive_into(self, buffers: Sequence[Buffer]) -> Transfer:
        """Take the payload of the last message; see Connection."""
        views = views_of(buffers, writable=True)
        if size_of(views) != self._unclaimed_bytes:
            raise InvalidMessage(
                f"the buffers hold {size_of(views)} bytes, the payload has {self._unclaimed_bytes}"
            )
        return self._claim(views)

    def discard(self) -> Transfer:
        """Drop the payload of the last message; see Connection."""
        return self._claim(None)

    def _claim(self, views: list[memoryview] | None) -> Transfer:
        size_bytes, self._unclaimed_bytes = self._unclaimed_bytes, 0
        transfer = Transfer(self._loop)
        if not size_bytes:
            transfer.succeed()
        elif self._reason is not None:
            transfer.fail(self._reason)
        else:
            self._start_claim(views, size_bytes, transfer)
        return transfer

    @abstractmethod
    def _start_claim(
        self, views: list[memoryview] | None, size_bytes: int, transfer: Transfer
    ) -> None:
        """Have the payload put into `views`, or dropped; `_got` or `_not_got` is called for it."""

    def _got(self, transfer: Transfer, size_bytes: int) -> None:
        self._bytes_received += size_bytes
        transfer.succeed()

    def _not_got(self, transfer: Transfer) -> None:
        assert self._reason is not None
        transfer.fail(self._reason)

    # The end.

    async def close(self, deadline_s: float = 5.0) -> None:
        """End after everything was taken; see Connection."""
        if self._reason is not None or self._closing:
            await self.wait_closed()
            return
        self._closing = True
        self._inbox.clear()
        self._wake()
        try:
            async with asyncio.timeout(deadline_s):
                if self._outstanding:
                    self._sends_done = self._loop.create_future()
                    await self._sends_done
                if self._reason is None:
                    self._say_goodbye()
                await self.wait_closed()
        except TimeoutError:
            self.abort(f"not closed within {deadline_s:g} s")
            raise PeerTimeout(f"the peer did not take everything in {deadline_s:g} s") from None
        except asyncio.CancelledError:
            self.abort("close was cancelled")
            raise

    @abstractmethod
    def _say_goodbye(self) -> None:
        """Tell the peer that nothing follows; `_end` is called once it knows."""

    def abort(self, why: str = "aborted") -> None:
        """End at once; see Connection."""
        self._end(LocallyClosed(why))

    def _end(self, reason: ConnectionEnded) -> None:
        """End with a reason; the first one counts."""
        if self._reason is not None:
            return
        self._reason = reason
        if isinstance(reason, LocallyClosed):
            self._inbox.clear()
        self._tear_down(reason)
        if self._sends_done is not None and not self._sends_done.done():
            self._sends_done.set_result(None)
        self._wake()

    @abstractmethod
    def _tear_down(self, reason: ConnectionEnded) -> None:
        """Free everything, fail all transfers, and call `_release` when no buffer is held."""

    def _release(self) -> None:
        if not self._released.done():
            self._released.set_result(None)

    @property
    def closed(self) -> bool:
        """Whether the connection is over."""
        return self._reason is not None

    async def wait_closed(self) -> ConnectionEnded:
        """Wait until the connection is over and holds no buffer, and return the reason."""
        await asyncio.shield(self._released)
        assert self._reason is not None
        return self._reason

    def _check_open(self) -> None:
        if self._reason is not None:
            raise self._reason.again()
        if self._closing:
            raise LocallyClosed("the connection is being closed")
