"""Two processes: peers that are killed, that hang, that have other settings.

The second process is this file, run as a script.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from ciuicflow.testing.processes import ChildProcess
from ciuicflow.testing.transport_suite import MIB, pattern, refused, take, within
from ciuicflow.transport import ucx_context
from ciuicflow.transport.base import (
    ConnectFailed,
    Connection,
    Limits,
    PeerReset,
    PeerTimeout,
    Transfer,
    TransportUnavailable,
    Truncated,
)
from ciuicflow.transport.handshake import Hello, answer, hear
from ciuicflow.transport.table import connect, listen
from ciuicflow.transport.ucx_path import UcxHello, read_hello

QUICK = Limits(heartbeat_s=0.1, silence_s=1.0, stall_s=1.0)
NOTICED_S = 8.0
"""Ample; the limits above are one second."""


@pytest.fixture(params=["tcp", "ucx"])
async def scheme(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    if request.param == "ucx":
        need_ucxx()
    yield request.param
    await ucx_given_back()


def need_ucxx() -> None:
    try:
        ucx_context.load_ucxx()
    except TransportUnavailable as missing:
        pytest.skip(str(missing))


def peer(scheme: str, role: str) -> ChildProcess:
    return ChildProcess("peer", sys.executable, __file__, f"{scheme}://127.0.0.1:0", role)


async def pid_of(connection: Connection) -> int:
    control, _ = await take(connection)
    return int(control)


async def test_payload_crosses_between_processes(scheme: str) -> None:
    async with peer(scheme, "echo") as child:
        connection = await connect(child.ready["uri"], 10.0)
        await pid_of(connection)
        for size_bytes in (0, 10, 70_000, 5 * MIB + 3):
            transfer = connection.send(b"there", [pattern(size_bytes)])
            assert await take(connection) == (b"there", pattern(size_bytes))
            await within(transfer)
        statistics = connection.statistics()
        assert statistics.lanes
        if any(lane.startswith("tcp/") for lane in statistics.lanes):
            assert statistics.smoothed_rtt_s is not None
            assert statistics.delivered_segments is not None
        await within(connection.close())


@pytest.mark.parametrize("way", ["idle", "sending", "receiving"])
async def test_killed_peer_is_noticed_at_once(scheme: str, way: str) -> None:
    async with peer(scheme, "flood" if way == "receiving" else "hold") as child:
        connection = await connect(child.ready["uri"], 10.0)
        pid = await pid_of(connection)
        waiting: list[asyncio.Future[object]] = []
        if way == "sending":
            waiting.append(asyncio.ensure_future(settled(connection.send(b"", [bytes(64 * MIB)]))))
        if way == "receiving":
            message = await within(connection.receive())
            claim = connection.receive_into([bytearray(message.payload_bytes)])
            waiting.append(asyncio.ensure_future(settled(claim)))
        waiting.append(asyncio.ensure_future(drain(connection)))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        for each in waiting:
            with refused(PeerReset, Truncated):
                await within(each, NOTICED_S)
        await within(connection.wait_closed(), NOTICED_S)


@pytest.mark.parametrize("way", ["idle", "sending", "receiving"])
async def test_hung_peer_is_noticed_within_the_limits(scheme: str, way: str) -> None:
    async with peer(scheme, "flood" if way == "receiving" else "hold") as child:
        connection = await connect(child.ready["uri"], 10.0, QUICK)
        pid = await pid_of(connection)
        message = await within(connection.receive()) if way == "receiving" else None
        os.kill(pid, signal.SIGSTOP)
        try:
            if message is not None:
                transfer = connection.receive_into([bytearray(message.payload_bytes)])
            elif way == "sending":
                transfer = connection.send(b"", [bytes(64 * MIB)])
            else:
                transfer = None
            with refused(PeerTimeout):
                if transfer is not None:
                    await within(settled(transfer), NOTICED_S)
                else:
                    await within(connection.receive(), NOTICED_S)
            reason = await within(connection.wait_closed(), NOTICED_S)
            assert isinstance(reason, PeerTimeout)
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_held_up_loop_does_not_blame_the_peer(scheme: str) -> None:
    async with peer(scheme, "echo") as child:
        connection = await connect(child.ready["uri"], 10.0, QUICK)
        await pid_of(connection)
        time.sleep(1.5)  # noqa: ASYNC251 - longer than the peer may be silent
        await asyncio.sleep(0.3)
        connection.send(b"alive")
        assert (await take(connection))[0] == b"alive"
        await within(connection.close())


async def test_process_that_forgets_to_close_still_ends(scheme: str) -> None:
    async with peer(scheme, "quit") as child:
        connection = await connect(child.ready["uri"], 10.0)
        with refused(PeerReset, Truncated):
            await within(drain(connection))
        await within(child.failure())
        await within(connection.wait_closed())


async def test_unlike_ucx_settings_are_refused_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_ucxx()
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "8K")
    async with peer("ucx", "hold") as child:
        monkeypatch.undo()
        with pytest.raises(ConnectFailed, match="UCX_TCP_TX_SEG_SIZE"):
            await connect(child.ready["uri"], 10.0)
    await ucx_given_back()


@pytest.mark.parametrize("fault", ["hung", "truncated", "empty"])
async def test_peer_that_says_hello_and_no_more_is_a_clear_failure(fault: str) -> None:
    need_ucxx()

    async def impostor() -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(server)
        with sock:
            ours = read_hello((await hear(sock, "ucx")).details)
            size = {"hung": None, "truncated": 20, "empty": 0}[fault]
            theirs = UcxHello(ours.report, ours.worker_address[:size], ours.tag + 1000)
            await answer(sock, Hello("ucx", details=msgspec.json.encode(theirs)))
            await asyncio.sleep(10)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        task = asyncio.ensure_future(impostor())
        with refused(ConnectFailed):
            await within(connect(f"ucx://127.0.0.1:{server.getsockname()[1]}", 1.0))
        task.cancel()
        await asyncio.wait({task})
    await ucx_given_back()


async def ucx_given_back() -> None:
    async with asyncio.timeout(10):
        while ucx_context.in_use():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


async def test_schemes_do_not_mix() -> None:
    need_ucxx()
    listener = await listen("tcp://127.0.0.1:0")
    with pytest.raises(ConnectFailed, match="one side speaks"):
        await connect(listener.uri.replace("tcp", "ucx"), 5.0)
    await listener.close()
    await ucx_given_back()


async def settled(transfer: Transfer) -> None:
    await transfer


async def drain(connection: Connection) -> None:
    while True:
        await connection.receive()
        await connection.discard()


async def main(uri: str, role: str) -> None:
    listener = await listen(uri, Limits(heartbeat_s=0.1))
    print(f"ready uri={listener.uri}", flush=True)
    connection = await listener.accept()
    connection.send(str(os.getpid()).encode())
    if role == "quit":
        await asyncio.sleep(0.1)
        return
    if role == "flood":
        connection.send(b"", [bytes(256 * MIB)])
    if role == "echo":
        while True:
            message = await connection.receive()
            target = bytearray(message.payload_bytes)
            await connection.receive_into([target])
            connection.send(message.control, [target])
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
