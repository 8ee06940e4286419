"""The connections to one upstream."""

import asyncio
import ssl
import time
from typing import Final, cast

from ciuicflow.config import Config, UpstreamUrl
from ciuicflow.gateway.deadlines import Deadlines
from ciuicflow.gateway.inbox import Inbox
from ciuicflow.gateway.upstream import UpstreamConnection

MAX_IDLE: Final = 512  # connections kept for further requests


class Pool:
    """Busy connections, and idle ones for the next request."""

    def __init__(
        self,
        address: UpstreamUrl,
        tls: ssl.SSLContext | None,
        config: Config,
        deadlines: Deadlines,
        inbox: Inbox,
    ) -> None:
        self.inbox = inbox
        self._address = address
        self._tls = tls
        self._deadlines = deadlines
        self._open: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []  # last in, first out: the rest may age and close
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over reloaded settings."""
        self.header_bytes = config.limits.header_bytes
        self._connect_s = config.timeouts.connect_s
        self.response_s = config.timeouts.response_s
        self.stall_s = config.timeouts.stall_s

    @property
    def idle(self) -> int:
        """How many connections wait for a request."""
        return len(self._idle)

    @property
    def busy(self) -> int:
        """How many connections serve one."""
        return len(self._open) - len(self._idle)

    def checkout(self) -> UpstreamConnection | None:
        """Take an idle connection that may still be open, or None."""
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.deadline > now and not connection.transport.is_closing():
                return connection
            connection.close()
        return None

    async def connect(self) -> UpstreamConnection:
        """Open a connection. Raises OSError (TimeoutError, ssl.SSLError among them).

        Asked for although some are idle (by a request that can't be sent twice), it takes the
        place of the oldest of them: else uploads would pile connections up.
        """
        if self._idle:
            self._idle.pop(0).close()
        async with asyncio.timeout(self._connect_s):
            _, protocol = await self._loop.create_connection(
                lambda: cast("asyncio.Protocol", UpstreamConnection(self)),
                self._address.host,
                self._address.port,
                ssl=self._tls,
                server_hostname=self._address.host if self._tls else None,
            )
        connection = cast("UpstreamConnection", protocol)
        if connection.transport.is_closing():
            raise ConnectionResetError("closed as soon as it was open")
        # Not in connection_made: uvloop can call that and never connection_lost, where the
        # waiting for the connection is cancelled.
        self._open.add(connection)
        self._deadlines.add(connection)
        return connection

    def release(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request."""
        if self._closed or len(self._idle) >= MAX_IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    def closed(self, connection: UpstreamConnection) -> None:
        """Forget a connection that is gone."""
        self._open.discard(connection)
        self._deadlines.discard(connection)
        if connection.exchange is None and connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close what is idle; what is busy ends its exchange first."""
        self._closed = True
        while (connection := self.checkout()) is not None:
            connection.close()
