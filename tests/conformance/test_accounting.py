"""Mixed load with aborts and a restarting upstream: every request is accounted for.

The full length is in tests/soak.
"""

import asyncio
import random
from pathlib import Path

import pytest
from support import wait
from support.accounting import EngineProcess, Load, audit, plan
from support.gateway import LOOPS, Start, config


@pytest.mark.line(1, 4, 22, 23, 25)
@pytest.mark.parametrize("loop", LOOPS)
def test_every_one_of_600_requests_is_accounted_for(
    start: Start, tmp_path: Path, loop: str
) -> None:
    rng = random.Random(600)
    attempts = plan(600, abort_share=0.3, rng=rng)
    with EngineProcess(tmp_path) as engine:
        health = {"interval_s": 0.2, "fail_threshold": 3}
        gateway = start(config(engine.url, health=health), loop=loop)
        descriptors = gateway.fd_count()
        restarts = {200: engine.restart, 400: engine.restart}
        asyncio.run(Load(gateway.listen, attempts, rng, at=dict(restarts)).run())
        gateway.wait_idle()
        outcomes = audit(attempts, engine)
        assert outcomes["status 200"] > 150, outcomes
        wait.until(lambda: gateway.own_fd_count() <= descriptors + 2, what="descriptors come back")
        metrics = gateway.metrics()
        assert metrics.total("ciuicflow_upstream_connections", state="busy") == 0
        counted = metrics.outcomes()
        early = sum(attempt.abort_at == "sending" for attempt in attempts)
        assert 600 - early <= sum(counted.values()) <= 600, counted
        assert counted["completed"] >= outcomes["status 200"]
