"""Mixed load on a queue that is always full, with everything happening: all is accounted for."""

import asyncio
import random
from pathlib import Path

import pytest
from support import flow, wait
from support.accounting import Attempt, EngineProcess, Load, audit, plan
from support.flow import TIERS
from support.gateway import LOOPS, Gateway, Start, config
from support.raw import Client

COUNT = 700


def mix(rng: random.Random) -> list[Attempt]:
    """Three in four opt in, some with a deadline that the queue makes impossible."""
    attempts = plan(COUNT, abort_share=0.35, rng=rng)
    for attempt in attempts:
        if rng.random() < 0.75:
            lines = [b"X-Ciuic-Flow: enabled"]
            lines += [b"X-Ciuic-Tier: " + rng.choice([*TIERS, "junk"]).encode()]
            if rng.random() < 0.3:
                lines += [b"X-Ciuic-Deadline-Ms: %d" % rng.choice([1, 30, 200, 5000])]
            attempt.fields = b"".join(line + b"\r\n" for line in lines)
    return attempts


def switch(gateway: Gateway, word: str) -> None:
    with Client(gateway.admin) as client:
        assert client.exchange("POST", f"/flow/{word}", body=b"").status == 200


@pytest.mark.line(1, 2, 4, 22, 23, 25, 30)
@pytest.mark.parametrize("loop", LOOPS)
def test_every_request_has_one_outcome_and_leaves_nothing_behind(
    start: Start, tmp_path: Path, loop: str
) -> None:
    rng = random.Random(701)
    attempts = mix(rng)
    with EngineProcess(tmp_path) as engine:
        settings = config(
            {"url": engine.url, "max_requests": 4},
            health={"interval_s": 0.2, "fail_threshold": 3},
            flow={"queue_entries": 24},
        )
        gateway = start(settings, loop=loop)
        descriptors = gateway.fd_count()
        events = {
            150: engine.restart,
            250: lambda: switch(gateway, "disable"),
            280: lambda: switch(gateway, "enable"),
            330: lambda: gateway.reload({**settings, "flow": {"queue_entries": 20}}),
            450: engine.restart,
            550: lambda: switch(gateway, "disable"),
            560: lambda: gateway.reload(settings),
        }
        asyncio.run(Load(gateway.listen, attempts, rng, at=dict(events)).run())
        flow.wait_empty(gateway)
        outcomes = audit(attempts, engine)
        assert outcomes["status 200"] > 150, outcomes
        wait.until(lambda: gateway.own_fd_count() <= descriptors + 2, what="descriptors come back")
        metrics = gateway.metrics()
        assert metrics.total("ciuicflow_upstream_connections", state="busy") == 0
        assert metrics.total("ciuicflow_tokens_in_flight") == 0
        counted = metrics.outcomes()
        early = sum(attempt.abort_at == "sending" for attempt in attempts)
        assert COUNT - early <= sum(counted.values()) <= COUNT, counted
        assert counted["completed"] >= outcomes["status 200"]
        durations = metrics.total("ciuicflow_request_duration_seconds_count")
        assert durations == sum(counted.values())
        state = gateway.state()["flow"]
        decided = sum(t["dispatched"] + sum(t["outcomes"].values()) for t in state["tiers"])
        assert decided <= metrics.total("ciuicflow_requests_total") + counted["completed"]
        refused = sum(outcomes[f"status {status}"] for status in (429, 504))
        assert refused <= sum(
            counted.get(name, 0)
            for name in ("queue_full", "displaced", "deadline_infeasible", "queue_timeout")
        )


@pytest.mark.line(3, 22, 23, 24)
@pytest.mark.parametrize("loop", LOOPS)
def test_an_engine_that_restarts_beside_another_costs_only_what_it_had(
    start: Start, tmp_path: Path, loop: str
) -> None:
    rng = random.Random(31)
    attempts = plan(400, abort_share=0.2, rng=rng)
    for attempt in attempts:
        attempt.fields = b"X-Ciuic-Flow: enabled\r\nX-Ciuic-Tier: bronze\r\n"
    (tmp_path / "b").mkdir()
    with EngineProcess(tmp_path) as one, EngineProcess(tmp_path / "b") as two:
        upstreams = [{"url": engine.url, "max_requests": 3} for engine in (one, two)]
        health = {"interval_s": 0.2, "fail_threshold": 3}
        gateway = start(config(*upstreams, health=health), loop=loop)
        events = dict.fromkeys((60, 150, 240, 330), one.restart)
        asyncio.run(Load(gateway.listen, attempts, rng, at=dict(events)).run())
        flow.wait_empty(gateway)
        one.ledger.write_bytes(one.ledger.read_bytes() + two.ledger.read_bytes())
        outcomes = audit(attempts, one)
        assert outcomes["status 503"] == outcomes["status 504"] == 0, outcomes
        assert outcomes["status 502"] + outcomes["broken"] <= 4 * 3, outcomes
        counted = gateway.metrics().outcomes()
        assert counted["completed"] >= outcomes["status 200"] > 200
