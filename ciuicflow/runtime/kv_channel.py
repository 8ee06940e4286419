"""One connection between two agents: what is sent keeps its order and its bound."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from ciuicflow.transport.base import (
    Buffer,
    Connection,
    ConnectionEnded,
    Limits,
    LocallyClosed,
    Message,
    TransportError,
)

OUTSTANDING: Final = 64
"""Messages with the transport."""
_PAYLOADS: Final = {"tcp": 2}
"""Payloads among them, where they go in the stream: whatever is urgent waits behind them."""
_MOST_PAYLOADS: Final = 16
CLOSE_S: Final = 2.0
"""How long a peer may take to take our last words."""


def limits(dead_after_s: float, stall_s: float) -> Limits:
    """Return the bounds of connections: the transport sees to a payload's signs of life."""
    return Limits(
        outstanding=4 * OUTSTANDING,
        heartbeat_s=min(1.0, dead_after_s / 4),
        silence_s=dead_after_s,
        stall_s=stall_s,
    )


class Item:
    """A message to be sent; `buffers` is None as long as its payload is being gathered."""

    __slots__ = ("buffers", "control", "over")

    def __init__(
        self, control: bytes, buffers: Sequence[Buffer] | None, over: Callable[[], None] | None
    ) -> None:
        self.control = control
        self.buffers = buffers
        self.over = over


class Channel:
    """Sends in order, reads, and says once that it has ended. Runs in the agent's event loop."""

    def __init__(
        self,
        connection: Connection,
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.connection = connection
        self.claims = 0
        """Payloads that are coming in."""
        self._on_message = on_message
        self._on_end = on_end
        self._queue: deque[Item] = deque()
        self._outstanding = 0
        self._payloads = 0
        self._most_payloads = _PAYLOADS.get(connection.statistics().scheme, _MOST_PAYLOADS)
        self._closing: asyncio.Task[None] | None = None
        self._reader = asyncio.get_running_loop().create_task(self._read())

    # Sending.

    def send(
        self,
        control: bytes,
        buffers: Sequence[Buffer] | None = (),
        over: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
    ) -> Item:
        """Send after what was sent before; `over` is called when the buffers are free.

        `urgent`: before what still waits here. With `buffers` None its place is kept: set
        `buffers` of what this returns, then `go_on`.
        """
        item = Item(control, buffers, over)
        if urgent:
            self._queue.appendleft(item)
        else:
            self._queue.append(item)  # bounded by the window and by the number of transfers
        self.go_on()
        return item

    def go_on(self, bound: int = OUTSTANDING) -> None:
        """Hand over to the transport what may go."""
        while self._queue and self._outstanding < bound:
            item = self._queue[0]
            if item.buffers is None:
                return  # also after the end: it is being gathered
            if item.buffers and self._payloads >= self._most_payloads:
                return
            self._queue.popleft()
            try:
                transfer = self.connection.send(item.control, item.buffers or ())
            except TransportError:  # it has ended, or is being closed: the reader says so
                self._over(item)
            else:
                self._outstanding += 1
                self._payloads += bool(item.buffers)
                transfer.when_done(partial(self._sent, item))

    def _sent(self, item: Item) -> None:
        self._outstanding -= 1
        self._payloads -= bool(item.buffers)
        self._over(item)
        self.go_on()

    def _over(self, item: Item) -> None:
        if item.over is not None:
            asyncio.get_running_loop().call_soon(item.over)
            item.over = None

    # Receiving.

    async def _read(self) -> None:
        try:
            while True:
                self._on_message(await self.connection.receive())
        except LocallyClosed as reason:
            if self._closing is not None:
                await asyncio.wait({self._closing})
            self._ended(str(reason))
        except ConnectionEnded as reason:
            self._ended(str(reason))
        except Exception as error:  # noqa: BLE001 - the transfers must fail, not hang
            loop = asyncio.get_running_loop()
            loop.call_exception_handler(
                {"message": "a KV message was not handled", "exception": error}
            )
            self.connection.abort("internal error")
            self._ended(f"internal error: {error!r}")

    def _ended(self, detail: str) -> None:
        self.go_on()  # nothing can be sent any more: all is over
        self._on_end(detail)

    # The end.

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Say what is left to say, then goodbye; `on_end` follows within the deadline."""
        if self._closing is None:
            self.go_on(bound=3 * OUTSTANDING)
            self._closing = asyncio.get_running_loop().create_task(self._close(deadline_s))

    async def _close(self, deadline_s: float) -> None:
        try:
            await self.connection.close(deadline_s)
        except TransportError:
            pass  # the peer did not take it in time; the connection has been aborted

    def abort(self, why: str) -> None:
        """End at once."""
        self.connection.abort(why)

    async def wait(self) -> None:
        """Return when all is over and the transport holds no buffer."""
        await asyncio.wait({self._reader})
        await self.connection.wait_closed()
