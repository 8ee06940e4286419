"""`tcp://HOST:PORT`: plain sockets. Works everywhere; the payload is never copied in between."""

import socket
from functools import partial

from ciuicflow.transport import sockets
from ciuicflow.transport.address import local_and_peer
from ciuicflow.transport.base import Connection, Limits, Listener
from ciuicflow.transport.handshake import Hello, answer, hear, introduce
from ciuicflow.transport.stream import StreamConnection

_HELLO = Hello("tcp")


async def connect(address: str, limits: Limits, deadline_s: float) -> Connection:
    """Connect to a listener; raises ConnectFailed."""
    return await sockets.dial(address, partial(_introduced, limits=limits), deadline_s)


async def listen(address: str, limits: Limits) -> Listener:
    """Listen; raises ListenFailed."""
    return await sockets.listen("tcp", address, partial(_heard, limits=limits), limits)


async def _introduced(sock: socket.socket, limits: Limits) -> Connection:
    await introduce(sock, _HELLO)
    return _connection(sock, limits)


async def _heard(sock: socket.socket, limits: Limits) -> Connection:
    await hear(sock, _HELLO.scheme)
    await answer(sock, _HELLO)
    return _connection(sock, limits)


def _connection(sock: socket.socket, limits: Limits) -> Connection:
    local, peer = local_and_peer(sock)
    return StreamConnection(sock, limits, local=local, peer=peer)
