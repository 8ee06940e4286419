"""Sockets of tcp and ucx: dial within a deadline, listen, and take peers in after a handshake."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from ciuicflow.transport.address import join_host_port, split_host_port
from ciuicflow.transport.arrivals import Arrivals
from ciuicflow.transport.base import (
    ConnectFailed,
    Connection,
    Limits,
    ListenFailed,
    TransportError,
)

log = logging.getLogger(__name__)

_BACKLOG: Final = 128
_HALF_OPEN: Final = 64
"""Peers in their handshake, and peers that nobody has accepted yet; more are cut off."""
_NO_DESCRIPTORS_S: Final = 0.1

Admit = Callable[[socket.socket], Awaitable[Connection]]
"""Does the handshake on a socket and makes a connection of it; raises ConnectFailed, OSError."""


async def dial(address: str, admit: Admit, deadline_s: float) -> Connection:
    """Connect to HOST:PORT, trying each of the host's addresses; raises ConnectFailed."""
    host, port = split_host_port(address)
    try:
        async with asyncio.timeout(deadline_s):
            sock = await _connected(host, port)
            return await _admitted(sock, admit)
    except TimeoutError:
        raise ConnectFailed(f"{address} gave no answer within {deadline_s:g} s") from None
    except OSError as error:
        raise ConnectFailed(f"{address}: {error.strerror or error}") from None


async def _connected(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure: OSError = OSError("no address")
    for family, kind, protocol, _, name in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, name)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


async def _admitted(sock: socket.socket, admit: Admit) -> Connection:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return await admit(sock)
    except BaseException:
        sock.close()
        raise


class SocketListener:
    """Accepts sockets and makes connections of those that complete their handshake in time."""

    def __init__(self, scheme: str, sock: socket.socket, admit: Admit, limits: Limits) -> None:
        self._uri = f"{scheme}://{join_host_port(sock.getsockname())}"
        self._sock = sock
        self._admit = admit
        self._limits = limits
        self._arrivals = Arrivals(_HALF_OPEN)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept_sockets())

    @property
    def uri(self) -> str:
        """What peers connect to."""
        return self._uri

    async def accept(self) -> Connection:
        """Wait for the next peer; see Listener."""
        return await self._arrivals.next()

    async def close(self) -> None:
        """Stop listening; see Listener."""
        if self._arrivals.closed:
            return
        tasks = {self._accepting, *self._handshakes}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._sock.close()
        await self._arrivals.close()

    async def _accept_sockets(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                log.warning("cannot accept KV peers", extra={"reason": str(error)})
                await asyncio.sleep(_NO_DESCRIPTORS_S)
                continue
            if not self._arrivals.room_beside(len(self._handshakes)):
                sock.close()
                continue
            sock.setblocking(False)
            task = asyncio.create_task(self._take_in(sock))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _take_in(self, sock: socket.socket) -> None:
        peer = "unknown"
        try:
            peer = join_host_port(sock.getpeername())
            async with asyncio.timeout(self._limits.handshake_s):
                connection = await _admitted(sock, self._admit)
        except (TransportError, OSError) as error:  # TimeoutError is an OSError
            sock.close()
            reason = str(error) or "no handshake in time"
            log.warning("refused a KV peer", extra={"peer": peer, "reason": reason})
        else:
            self._arrivals.put(connection)


async def listen(scheme: str, address: str, admit: Admit, limits: Limits) -> SocketListener:
    """Listen on HOST:PORT, port 0 for a free one; raises ListenFailed."""
    host, port = split_host_port(address)
    try:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, name = found[0]
        sock = socket.create_server(name[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ListenFailed(f"cannot listen on {address}: {error.strerror or error}") from None
    sock.setblocking(False)
    return SocketListener(scheme, sock, admit, limits)
