"""`ciuicflow bench http` as a process, and its upstream and clients on real sockets."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ciuicflow.bench import held_streams, procfs, proxies, wrk
from ciuicflow.bench.loads import Load
from ciuicflow.bench.nginx import find_nginx
from ciuicflow.bench.proxies import Target
from ciuicflow.bench.stub import SMALL, STREAM_EVENTS
from ciuicflow.bench.wrk import LoadFailed
from ciuicflow.errors import StartError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")


def _has_wrk() -> bool:
    try:
        wrk.require_wrk()
    except StartError:
        return False
    return True


needs_wrk = pytest.mark.skipif(not _has_wrk(), reason=wrk.INSTALL)

# -- the whole command ---------------------------------------------------------------------------


async def start(*flags: str, env: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ciuicflow", "bench", "http", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )


@needs_wrk
@pytest.mark.timeout(180)
async def test_a_short_run_compares_the_gateway_and_saves_everything(tmp_path: Path) -> None:
    out = tmp_path / "results" / "bench.json"
    process = await start(
        *("--rounds", "1", "--seconds", "0.5", "--scenario", "json", "--scenario", "stream"),
        *("--out", str(out)),
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), 160)
    assert process.returncode == 0, stderr.decode()
    saved = json.loads(out.read_bytes())
    nginx = ["nginx"] if find_nginx() is not None else []
    own = ["gateway, opted in"]
    expected = {
        *(("json", name) for name in ["direct", *nginx, "gateway", *own, "gateway, log on"]),
        *(("stream", name) for name in ["direct", *nginx, "gateway", *own]),
    }
    rows = {(row["load"], row["target"]): row for row in saved["rows"]}
    assert rows.keys() == expected
    for (_, target), row in rows.items():
        assert row["per_s"]["median"] > 0
        assert 0 < row["p50_us"]["median"] <= row["p99_us"]["median"]
        assert (row["cpu_us"] is None) == (target == "direct")
    assert {bar["target"] for bar in saved["bars"]} == {*own, *(["gateway"] if nginx else [])}
    assert saved["about"]["gateways"]["gateway"]["build"] in ("python", "compiled")
    assert "gateway, log on" in stdout.decode()


@needs_wrk
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_nothing_outlives_a_run_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    process = await start("--scenario", "json", "--out", str(tmp_path / "bench.json"))
    family: set[int] = set()  # the proxies, and wrk before them while they warm up
    for _ in range(600):
        await asyncio.sleep(0.05)
        family = descendants(process.pid)
        if _has_load(family):
            break
    assert _has_load(family)
    process.send_signal(number)
    await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    for _ in range(200):  # after SIGKILL wrk runs to its end by itself
        if not any(_is_alive(pid) for pid in family):
            break
        await asyncio.sleep(0.05)
    assert [_command(pid) for pid in family if _is_alive(pid)] == []
    assert not (tmp_path / "bench.json").exists()


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for child in procfs.children(pid):
        found |= {child, *descendants(child)}
    return found


def _has_load(pids: set[int]) -> bool:
    return any(_command(pid).startswith(wrk.require_wrk()) for pid in pids) and len(pids) >= 4


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    return _command(pid) != ""  # a zombie has none


async def test_without_wrk_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    process = await start(env={"PATH": str(tmp_path)})
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert stderr.decode() == "ciuicflow: wrk is not installed: apt-get install wrk\n"


@needs_wrk
async def test_an_interpreter_without_the_gateway_ends_the_run(tmp_path: Path) -> None:
    missing = str(tmp_path / "venv" / "bin" / "python")
    process = await start("--gateway-python", missing, "--out", str(tmp_path / "bench.json"))
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert f"cannot run {missing}" in stderr.decode()


# -- the upstream --------------------------------------------------------------------------------


@pytest.fixture
async def stub() -> AsyncIterator[Target]:
    async with proxies.running_stub() as running:
        yield running


async def talk(target: Target, *pieces: bytes, until: bytes) -> bytes:
    """Send the pieces with pauses and read up to this end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        return await asyncio.wait_for(reader.readuntil(until), 10)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_the_upstream_answers_a_request_in_pieces_with_200_bytes(stub: Target) -> None:
    pieces = (b"POST /small HTTP/1.1\r\nContent-", b"Length: 4\r\n\r\n{}", b"  ")
    head, _, body = (await talk(stub, *pieces, until=SMALL)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert len(body) == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == "hello"


async def test_the_upstream_streams_200_events_of_about_120_bytes(stub: Target) -> None:
    answer = await talk(stub, b"GET /stream HTTP/1.1\r\n\r\n", until=b"\r\n0\r\n\r\n")
    events = [part for part in answer.split(b"\r\n") if part.startswith(b"data: ")]
    assert len(events) == STREAM_EVENTS
    assert {len(event) for event in events} <= set(range(100, 140))


async def test_the_upstream_keeps_the_connection_for_the_next_request(stub: Target) -> None:
    request = b"GET /small HTTP/1.1\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", stub.port)
    for _ in range(2):
        writer.write(request)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 200 ")
        await asyncio.wait_for(reader.readexactly(200), 10)
    writer.close()
    await writer.wait_closed()


async def test_a_body_in_chunks_is_refused_as_it_would_be_other_work(stub: Target) -> None:
    request = b"POST /upload HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert b" 400 " in await talk(stub, request, until=b"{}")


# -- the clients ---------------------------------------------------------------------------------


@needs_wrk
async def test_wrk_ends_with_an_error_where_answers_are_errors(
    stub: Target, tmp_path: Path
) -> None:
    load = Load(name="lost", title="", path="/lost", connections=2)
    with pytest.raises(LoadFailed, match=r"some failed: \d+ status"):
        await wrk.run(load, stub.port, 1, tmp_path)


async def test_held_streams_see_events_until_they_are_closed(
    stub: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held_streams.open_streams(stub.port, "/slow", 150) as streams:
        await held_streams.hold(streams, 0.1)
        assert sum(stream.events for stream in streams) >= 300
    await asyncio.sleep(0)  # the transports are told
    assert all(stream.is_lost for stream in streams)


async def test_streams_that_end_meanwhile_are_an_error(stub: Target) -> None:
    async with held_streams.open_streams(stub.port, "/slow", 3) as streams:
        streams[1].transport.abort()
        with pytest.raises(LoadFailed, match="of 3 streams 1 were cut, 1 saw no event"):
            await held_streams.hold(streams, 0.1)


async def test_a_refused_stream_is_an_error(stub: Target) -> None:
    with pytest.raises(LoadFailed, match="refused or cut"):
        async with held_streams.open_streams(stub.port, "/lost", 3):
            pass
