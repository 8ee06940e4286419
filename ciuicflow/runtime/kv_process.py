"""The agent's process: `python -m ciuicflow.runtime.kv_process DESCRIPTOR`, started by its engine.

It ends with `Stop`, and when the engine does: the socket pair then ends.
"""

import asyncio
import os
import signal
import socket
import sys
from typing import Final, TypeVar

import msgspec
import uvloop

from ciuicflow.runtime.kv_driver import KvDriver
from ciuicflow.runtime.kv_pipe import HEAD, commands, pack, setups
from ciuicflow.runtime.kv_places import serve
from ciuicflow.runtime.kv_records import Event, Stop
from ciuicflow.runtime.memory import SharedMemory

_LAST_WORDS_S: Final = 1.0
T = TypeVar("T")


async def _run(descriptor: int) -> None:
    sock = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=sock)
    setup = await _next(reader, setups)
    if setup is None:
        return
    layout = setup.spec.layout
    memory = SharedMemory(layout, setup.memory.blocks, setup.memory.descriptor)
    os.close(setup.memory.descriptor)
    listening: list[asyncio.Task[None]] = []

    def emit(event: Event) -> None:
        writer.write(pack(event))

    def begun(driver: KvDriver) -> None:
        listening.append(asyncio.create_task(_obey(reader, driver)))

    await serve(setup.spec, memory, emit, begun)
    for task in listening:
        task.cancel()
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    except (OSError, TimeoutError):
        pass  # the engine has gone


async def _obey(reader: asyncio.StreamReader, driver: KvDriver) -> None:
    while (command := await _next(reader, commands)) is not None:
        driver.handle(command)
    driver.handle(Stop())


async def _next(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Return the next record; None: the engine has gone."""
    try:
        (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
        return decoder.decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError):
        return None


def main() -> None:
    """Run until told to stop; Ctrl-C is for the engine, which then stops us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(int(sys.argv[1])))


if __name__ == "__main__":
    main()
