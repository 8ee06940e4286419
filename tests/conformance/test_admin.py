"""The admin port: what it tells, and that hostile traffic cannot blow it up."""

import json
import random
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import wait
from support.gateway import Gateway, Start, config
from support.raw import Client
from support.upstream import Exchange, Upstream, hold, refusing_port
from support.wire import SSE_HEAD, chunk, request_bytes, response_bytes

SETTINGS: dict[str, Any] = {"timeouts": {"response_s": 5}}


def test_metrics_are_well_formed_prometheus_text(gateway: Gateway, upstream: Upstream) -> None:
    gateway.fetch()
    page = gateway.admin_get("/metrics")
    assert page.status == 200
    assert (page.get("content-type") or b"").startswith(b"text/plain; version=0.0.4")
    families = {f.name: f for f in text_string_to_metric_families(page.body.decode())}
    for name in ("ciuicflow_requests", "ciuicflow_request_duration_seconds", "ciuicflow_in_flight"):
        assert families[name].documentation
    assert {f"ciuicflow_{n}" for n in ("endpoint_up", "qps", "latency_p99_seconds")} <= set(
        families
    )


def test_every_request_is_counted_once(gateway: Gateway, upstream: Upstream) -> None:
    before = gateway.metrics()
    for status in ("200 OK", "404 Not", "500 Oops"):
        upstream.respond(response_bytes(b"", status))
        for _ in range(3):
            gateway.fetch()
    after = gateway.metrics()
    for code in ("200", "404", "500"):
        labels = {"flow": "bypass", "outcome": "completed", "code": code}
        counted = after.total("ciuicflow_requests_total", **labels)
        assert counted - before.total("ciuicflow_requests_total", **labels) == 3
    name = "ciuicflow_request_duration_seconds_count"
    assert after.total(name) - before.total(name) == 9
    assert after.total("ciuicflow_qps") > 0
    assert after.total("ciuicflow_latency_p99_seconds") > 0


@pytest.mark.line(30)
def test_a_stream_is_in_flight_for_as_long_as_it_runs(gateway: Gateway, upstream: Upstream) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        exchange.peer_closed_after(10)

    upstream.script(stream)
    clients = [gateway.connect() for _ in range(3)]
    for count, client in enumerate(clients, start=1):
        client.send(request_bytes())
        client.until(b"data: 1\n\n")
        assert gateway.in_flight() == count
    time.sleep(1)
    assert gateway.in_flight() == 3
    state = gateway.state()
    assert [endpoint["in_flight"] for endpoint in state["endpoints"]] == [3]
    for client in clients:
        client.close()
    gateway.wait_idle()


def test_health_and_readiness(gateway: Gateway, upstream: Upstream) -> None:
    assert gateway.admin_get("/healthz").status == 200
    assert gateway.admin_get("/readyz").status == 200


def test_not_ready_without_any_endpoint_but_healthy(start: Start) -> None:
    with refusing_port() as port:
        health = {"interval_s": 0.1, "fail_threshold": 1}
        gateway = start(config(f"http://127.0.0.1:{port}", health=health))
        wait.until(lambda: gateway.admin_get("/readyz").status == 503)
        assert gateway.admin_get("/healthz").status == 200


def test_state_is_json_and_names_the_endpoints(gateway: Gateway, upstream: Upstream) -> None:
    page = gateway.admin_get("/flow/state")
    assert (page.get("content-type") or b"").startswith(b"application/json")
    assert upstream.name in json.dumps(json.loads(page.body))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1/models", 404), ("POST", "/metrics", 405), ("PUT", "/x", 404)],
)
def test_nothing_else_is_there(
    gateway: Gateway, upstream: Upstream, method: str, path: str, status: int
) -> None:
    with Client(gateway.admin) as client:
        assert client.exchange(method, path, [(b"Connection", b"close")]).status == status
    assert upstream.requests == []


def test_hostile_traffic_cannot_grow_the_metrics(gateway: Gateway, upstream: Upstream) -> None:
    """Methods, paths, hosts, fields, models and tiers come from clients: none becomes a label."""
    rng = random.Random(5)
    methods = ["GET", "POST", "PROPFIND", "SEARCH", "PURGE", "LINK", "XYZZY", "get", "M-SEARCH"]
    gateway.fetch()
    before = len(gateway.metrics().samples)
    words = [f"{rng.getrandbits(64):x}" for _ in range(200)]
    for word in words:
        fields = [
            (b"X-Request-Id", word.encode()),
            (b"User-Agent", word.encode()),
            (b"X-Ciuic-Tier", word.encode()),
            (b"X-Ciuic-Tenant", word.encode()),
            (b"Authorization", word.encode()),
            (word.encode(), b"1"),
        ]
        body = json.dumps({"model": word, "user": word}).encode()
        with gateway.connect() as client:
            raw = request_bytes(rng.choice(methods), f"/{word}", fields, body)
            client.send(raw.replace(b"test.example", word.encode()))
            client.response("POST")
        with gateway.connect() as client:
            client.send_ignoring_close(rng.randbytes(40) + b"\r\n\r\n")
            client.wait_end(0.02)
    page = gateway.metrics()
    assert len(page.samples) - before < 40
    assert len(page.text) < 100_000
    assert not any(word in page.text for word in words)


def test_a_hung_upstream_does_not_hang_the_admin_port(gateway: Gateway, upstream: Upstream) -> None:
    upstream.script(hold)
    clients = [gateway.connect() for _ in range(20)]
    for client in clients:
        client.send(request_bytes())
    upstream.wait_requests(20)
    started = time.monotonic()
    assert gateway.in_flight() == 20
    assert gateway.admin_get("/healthz").status == 200
    assert time.monotonic() - started < 2
    for client in clients:
        client.close()
