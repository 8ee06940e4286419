"""The data port: accepts clients, and holds what all their connections share."""

import asyncio
import errno
import ssl
import time
from typing import Final, cast

from ciuicflow.config import Address, Config
from ciuicflow.errors import StartError
from ciuicflow.gateway.deadlines import Deadlines
from ciuicflow.gateway.handler import Handler
from ciuicflow.gateway.inbox import Inbox
from ciuicflow.gateway.server import ClientConnection

_BACKLOG: Final = 4096  # connections that the kernel holds for us in a burst


class ClientServer:
    """Listens, and holds what all client connections share."""

    def __init__(
        self, config: Config, handler: Handler, deadlines: Deadlines, inbox: Inbox
    ) -> None:
        self.inbox = inbox
        self.handler = handler
        self._adopt(config)
        self.draining = False  # each connection is closed after its current answer
        self._deadlines = deadlines
        self._connections: set[ClientConnection] = set()
        self._listener: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        loop = asyncio.get_running_loop()
        self.call_soon = loop.call_soon
        self.call_later = loop.call_later

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    async def listen(self, config: Config) -> str:
        """Start accepting; return HOST:PORT. Raises StartError."""
        address = Address.parse(config.listen)
        if config.tls is not None:
            self._tls = config.tls.context()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: cast("asyncio.Protocol", ClientConnection(self)),
                address.host,
                address.port,
                ssl=self._tls,
                backlog=_BACKLOG,
                ssl_handshake_timeout=config.timeouts.header_s if self._tls else None,
            )
        except OSError as error:
            raise cannot_listen("listen", address, error) from None
        return str(Address(address.host, self._listener.sockets[0].getsockname()[1]))

    def configure(self, config: Config) -> None:
        """Take over reloaded settings, a renewed certificate among them. Raises StartError."""
        if self._tls is not None and config.tls is not None:
            config.tls.context()  # a bad file must not half-change the context in use
            self._tls.load_cert_chain(config.tls.cert_file, config.tls.key_file)
        self._adopt(config)

    def _adopt(self, config: Config) -> None:
        """Keep settings where the connections find them in one step."""
        self.header_bytes = config.limits.header_bytes
        self.uri_bytes = config.limits.uri_bytes
        self.body_bytes = config.limits.body_bytes
        self.idle_s = config.timeouts.idle_s
        self.header_s = config.timeouts.header_s
        self.body_s = config.timeouts.body_s
        self._max_connections = config.limits.connections

    def body_deadline(self) -> float:
        """When a client that sends or takes nothing from now on is late."""
        return time.monotonic() + self.body_s

    def opened(self, connection: ClientConnection) -> bool:
        """Note a new connection. False: there are too many."""
        self._connections.add(connection)
        self._deadlines.add(connection)
        return len(self._connections) <= self._max_connections

    def closed(self, connection: ClientConnection) -> None:
        """Forget a connection that is gone."""
        self._connections.discard(connection)
        self._deadlines.discard(connection)

    def stop_listening(self) -> None:
        """Accept no more, and close what is idle."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that serve no request."""
        for connection in list(self._connections):
            connection.close_idle()

    def shut_down(self) -> None:
        """Close what is left."""
        for connection in list(self._connections):
            connection.shut_down()


def cannot_listen(what: str, address: Address, error: OSError) -> StartError:
    """Say why an address cannot be listened on and what to do."""
    hint = ""
    if error.errno == errno.EADDRINUSE:
        hint = f": something else listens there; stop it or choose another with --{what}"
    elif error.errno in (errno.EACCES, errno.EADDRNOTAVAIL) or error.errno is None:
        hint = f"; choose another with --{what}"
    return StartError(f"cannot listen on {address} ({what}): {error.strerror or error}{hint}")
