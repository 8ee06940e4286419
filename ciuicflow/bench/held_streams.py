"""A client that opens many streams, holds them, and sees that events keep coming on each."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, cast

from ciuicflow.bench.stub import SLOW_STEP_S
from ciuicflow.bench.wrk import LoadFailed
from ciuicflow.errors import StartError

_AT_ONCE: Final = 100
_OPEN_S: Final = 30.0
# Each stream must see an event in this time, even when a busy machine is late.
MIN_HOLD_S: Final = 3 * SLOW_STEP_S
_SPARE_FILES: Final = 200


class Stream(asyncio.Protocol):
    """One request for events; counts them."""

    transport: asyncio.Transport

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._started = asyncio.get_running_loop().create_future()
        self.events = 0
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.events += data.count(b"data: ")
        if not self._started.done():
            self._started.set_result(data.startswith(b"HTTP/1.1 200 "))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.is_lost = True
        if not self._started.done():
            self._started.set_result(False)

    async def started(self) -> None:
        """Wait for the head of the answer. Raises LoadFailed."""
        if not await self._started:
            raise LoadFailed("a stream was refused or cut before its first event")


def allow_files(count: int) -> None:
    """Raise the limit of open files, for the children too. Raises StartError."""
    wanted = count + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY, -1) and hard < wanted:
        raise StartError(
            f"{wanted} open files are needed but {hard} are allowed: raise the limit "
            f"(ulimit -Hn {wanted}), or leave the scenario `open` out"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@asynccontextmanager
async def open_streams(port: int, path: str, count: int) -> AsyncIterator[list[Stream]]:
    """Open ``count`` streams on 127.0.0.1:port; close them when the block ends.

    Raises LoadFailed where one is refused.
    """
    streams: list[Stream] = []
    try:
        try:
            async with asyncio.timeout(_OPEN_S):
                await _open(streams, port, path, count)
        except TimeoutError:
            raise LoadFailed(f"{count} streams were not open within {_OPEN_S:g} s") from None
        yield streams
    finally:
        for stream in streams:
            stream.transport.abort()


async def _open(streams: list[Stream], port: int, path: str, count: int) -> None:
    loop = asyncio.get_running_loop()
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    while len(streams) < count:
        first_fresh = len(streams)
        for _ in range(min(_AT_ONCE, count - len(streams))):
            _, stream = await loop.create_connection(lambda: Stream(request), "127.0.0.1", port)
            streams.append(stream)
        for stream in streams[first_fresh:]:
            await stream.started()


async def hold(streams: list[Stream], seconds: float) -> None:
    """Wait. Raises LoadFailed where a stream was cut or saw no event meanwhile."""
    before = [stream.events for stream in streams]
    await asyncio.sleep(max(seconds, MIN_HOLD_S))
    lost = sum(stream.is_lost for stream in streams)
    silent = sum(stream.events == seen for stream, seen in zip(streams, before, strict=True))
    if lost or silent:
        raise LoadFailed(f"of {len(streams)} streams {lost} were cut, {silent} saw no event")
