"""How two ends introduce themselves, before the first frame, within a deadline.

Each side sends the magic, a length, and a Hello as JSON. The connecting side speaks first; the
listener answers with its own Hello, or with one that says why it refuses. Whoever sends anything
else is no peer of ours and is cut off.
"""

import asyncio
import socket
import struct
from typing import Final

import msgspec

from ciuicflow.transport.base import ConnectFailed

VERSION: Final = 1
_START: Final = struct.Struct("!8sI")
_MAGIC: Final = b"CIUIC-KV"
_MAX_HELLO_BYTES: Final = 64 * 1024


class Hello(msgspec.Struct, frozen=True):
    """Who speaks: the protocol's version, the scheme, and what the scheme wants known."""

    scheme: str
    version: int = VERSION
    details: bytes = b""
    refused: str = ""
    """Why the listener does not want this peer; empty: it does."""


async def introduce(sock: socket.socket, hello: Hello) -> Hello:
    """Say hello as the connecting side and return the listener's; raises ConnectFailed."""
    await _write(sock, hello)
    answer = await _read(sock)
    if answer.refused:
        raise ConnectFailed(f"the listener refused: {answer.refused}")
    problem = _mismatch(hello, answer)
    if problem:
        raise ConnectFailed(problem)
    return answer


async def hear(sock: socket.socket, scheme: str) -> Hello:
    """Hear the connecting side's hello as the listener; raises ConnectFailed, having refused."""
    hello = await _read(sock)
    problem = _mismatch(Hello(scheme), hello)
    if problem:
        await refuse(sock, scheme, problem)
        raise ConnectFailed(problem)
    return hello


async def answer(sock: socket.socket, hello: Hello) -> None:
    """Accept the peer."""
    await _write(sock, hello)


async def refuse(sock: socket.socket, scheme: str, why: str) -> None:
    """Tell the peer why it is not accepted."""
    await _write(sock, Hello(scheme, refused=why))


def _mismatch(ours: Hello, theirs: Hello) -> str:
    if theirs.version != ours.version:
        return f"one side speaks version {theirs.version} of the KV protocol, one {ours.version}"
    if theirs.scheme != ours.scheme:
        return f"one side speaks {theirs.scheme}://, one {ours.scheme}://"
    return ""


async def _write(sock: socket.socket, hello: Hello) -> None:
    body = msgspec.json.encode(hello)
    try:
        await asyncio.get_running_loop().sock_sendall(sock, _START.pack(_MAGIC, len(body)) + body)
    except OSError as error:
        raise ConnectFailed(f"the peer left in the handshake: {error}") from None


async def _read(sock: socket.socket) -> Hello:
    magic, size_bytes = _START.unpack(await _read_exactly(sock, _START.size))
    if magic != _MAGIC or size_bytes > _MAX_HELLO_BYTES:
        raise ConnectFailed("the other end is no KV agent")
    try:
        return msgspec.json.decode(await _read_exactly(sock, size_bytes), type=Hello)
    except msgspec.MsgspecError as error:
        raise ConnectFailed(f"the other end's hello makes no sense: {error}") from None


async def _read_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size_bytes:
        try:
            part = await loop.sock_recv(sock, size_bytes - len(data))
        except OSError as error:
            raise ConnectFailed(f"the peer left in the handshake: {error}") from None
        if not part:
            raise ConnectFailed("the peer left in the handshake")
        data += part
    return data
