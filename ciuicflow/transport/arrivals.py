"""Connections that a listener has made and that nobody has accepted yet."""

import asyncio

from ciuicflow.transport.base import Connection, LocallyClosed


class Arrivals:
    """A bounded queue; closing it ends every wait and aborts what nobody took."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._queue: asyncio.Queue[Connection | None] = asyncio.Queue()
        self.closed = False

    def room_beside(self, coming: int) -> bool:
        """Whether one more fits in, beside those that are still coming."""
        return not self.closed and self._queue.qsize() + coming < self._room

    def put(self, connection: Connection) -> None:
        """Add a connection; the caller has asked for room."""
        self._queue.put_nowait(connection)

    async def next(self) -> Connection:
        """Wait for a connection; raises LocallyClosed."""
        connection = None if self.closed else await self._queue.get()
        if connection is None:
            if self._queue.empty():
                self._queue.put_nowait(None)  # for whoever waits as well
            raise LocallyClosed("the listener is closed")
        return connection

    async def close(self) -> None:
        """Take no more, and abort those that wait."""
        self.closed = True
        while not self._queue.empty():
            connection = self._queue.get_nowait()
            if connection is not None:
                connection.abort("nobody accepted")
                await connection.wait_closed()
        self._queue.put_nowait(None)
