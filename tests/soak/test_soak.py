"""Full-length runs, outside the normal suite: `pytest -m soak tests/soak`.

SOAK_SILENCE_S shortens the silence, SOAK_REQUESTS the accounting run. Run it alone: it needs most
of a host's ephemeral ports.
"""

import asyncio
import os
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from support import wait
from support.accounting import Attempt, EngineProcess, Load, audit, plan, streams
from support.gateway import LOOPS, Gateway, Start, config
from support.upstream import Exchange, Stubs
from support.wire import LAST_CHUNK, SSE_HEAD, chunk, request_bytes, response_bytes

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]

SILENCE_S = float(os.environ.get("SOAK_SILENCE_S", "900"))
REQUESTS = int(os.environ.get("SOAK_REQUESTS", "10000"))
STREAMS = 2000


@pytest.mark.line(1, 4, 22, 23, 25)
@pytest.mark.parametrize("loop", LOOPS)
def test_every_request_is_accounted_for(start: Start, tmp_path: Path, loop: str) -> None:
    """The normal suite runs 600 of them."""
    rng = random.Random(REQUESTS)
    attempts = plan(REQUESTS, abort_share=0.3, rng=rng)
    with EngineProcess(tmp_path) as engine:
        gateway = start(config(engine.url, health={"interval_s": 0.2}), loop=loop)
        restarts = {REQUESTS // 3: engine.restart, REQUESTS * 2 // 3: engine.restart}
        asyncio.run(Load(gateway.listen, attempts, rng, 64, at=dict(restarts)).run())
        gateway.wait_idle()
        outcomes = audit(attempts, engine)
        print(loop, outcomes)
        assert len(engine.outages) == 2
        assert outcomes["status 200"] > REQUESTS * 0.6, outcomes
        early = sum(attempt.abort_at == "sending" for attempt in attempts)
        counted = sum(gateway.metrics().outcomes().values())
        assert REQUESTS - early <= counted <= REQUESTS


def run_streams(gateway: Gateway, attempts: list[Attempt]) -> None:
    load = Load(gateway.listen, attempts, random.Random(1), len(attempts))
    asyncio.run(load.run())


@pytest.mark.line(10)
@pytest.mark.parametrize("loop", LOOPS)
def test_memory_of_a_slow_stream(start: Start, tmp_path: Path, loop: str) -> None:
    attempts = streams(STREAMS, abort_share=0, pause_s=3, rng=random.Random(2))
    with EngineProcess(tmp_path) as engine:
        gateway = start(config(engine.url), loop=loop)
        before = gateway.rss_bytes()
        thread = threading.Thread(target=run_streams, args=[gateway, attempts])
        thread.start()
        wait.until(lambda: gateway.in_flight() == STREAMS, 60, "all streams in flight")
        time.sleep(1)
        per_stream = (gateway.rss_bytes() - before) / STREAMS
        thread.join()
        print(loop, f"{per_stream / 1024:.1f} KiB for each stream")
        assert {attempt.outcome for attempt in attempts} == {"status 200"}
        assert all(attempt.answer == attempt.expected for attempt in attempts)
        assert per_stream < 40 * 1024


@pytest.mark.line(25)
@pytest.mark.parametrize("loop", LOOPS)
def test_concurrent_streams_with_aborts_leave_nothing(
    start: Start, tmp_path: Path, loop: str
) -> None:
    with EngineProcess(tmp_path) as engine:
        gateway = start(config(engine.url), loop=loop)
        levels = []
        for number in range(5):
            attempts = streams(STREAMS, abort_share=0.3, pause_s=0.3, rng=random.Random(number))
            run_streams(gateway, attempts)
            gateway.wait_idle()
            whole = [attempt for attempt in attempts if attempt.outcome == "status 200"]
            assert all(attempt.answer == attempt.expected for attempt in whole)
            wanted = sum(attempt.abort_at is None for attempt in attempts)
            assert len(whole) == wanted, Counter(attempt.outcome for attempt in attempts)
            wait.until(lambda: gateway.metrics().total("ciuicflow_client_connections") == 0)
            levels.append((gateway.rss_bytes() >> 10, gateway.own_fd_count()))
        print(loop, "RSS in KiB and descriptors after each round:", levels)
        assert levels[-1][0] - levels[1][0] < 10 * 1024
        assert levels[-1][1] <= levels[0][1] + 2  # the reading itself takes a connection or two


@pytest.mark.line(9, 30)
def test_a_long_silence(start: Start, stubs: Stubs) -> None:
    """With the default timeouts."""

    def think(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        time.sleep(SILENCE_S)
        exchange.send(chunk(b"data: 2\n\n") + LAST_CHUNK)

    stub = stubs()
    stub.script(think)
    gateway = start(config(stub))
    with gateway.connect(timeout_s=SILENCE_S + 60) as client:
        client.send(request_bytes())
        client.until(b"data: 1\n\n")
        time.sleep(SILENCE_S - 1)
        assert gateway.in_flight() == 1
        assert b"data: 2\n\n" in client.until(LAST_CHUNK)


@pytest.mark.line(22)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_thousand_requests_to_an_upstream_that_closes_after_a_second(
    start: Start, stubs: Stubs, loop: str
) -> None:
    """20 clients, 50 requests each, with gaps just as long as the upstream's patience."""

    def answer(exchange: Exchange) -> None:
        exchange.send(response_bytes())
        exchange.connection.sock.settimeout(1.0)

    def use() -> None:
        with gateway.connect(timeout_s=20) as client:
            for _ in range(50):
                statuses.append(client.exchange("POST", "/", body=b"{}").status)
                time.sleep(1.0)

    stub = stubs()
    stub.script(answer)
    gateway = start(config(stub), loop=loop)
    statuses: list[int] = []
    threads = [threading.Thread(target=use) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 1000
    assert len(stub.requests) == 1000


@pytest.mark.line(21)
@pytest.mark.parametrize("loop", LOOPS)
def test_ten_thousand_idle_connections(start: Start, stubs: Stubs, loop: str) -> None:
    gateway = start(config(stubs()), loop=loop)
    gateway.fetch()
    before = gateway.rss_bytes()
    idle = [socket.create_connection(gateway.listen) for _ in range(10_000)]
    wait.until(lambda: gateway.metrics().total("ciuicflow_client_connections") >= len(idle), 30)
    started, cpu = time.monotonic(), gateway.cpu_s()
    for _ in range(50):
        assert gateway.fetch().status == 200
    assert time.monotonic() - started < 5
    each = (gateway.rss_bytes() - before) / len(idle)
    print(loop, f"{each / 1024:.1f} KiB for each connection, {gateway.cpu_s() - cpu:.2f} s CPU")
    for sock in idle:
        sock.close()
    assert each < 20 * 1024
