"""Several upstreams: which one a request goes to, and what an upstream must do to be avoided."""

from collections.abc import Callable

import pytest
from support import wait
from support.errors import assert_openai_error
from support.gateway import Gateway, Start, config, now
from support.upstream import Exchange, Stubs, Upstream, hold, refusing_port, silent_port
from support.wire import SSE_HEAD, chunk, request_bytes, response_bytes

SLOW_PROBES = {"interval_s": 60, "fail_threshold": 3}
QUICK_PROBES = {"interval_s": 0.1, "timeout_s": 0.5, "fail_threshold": 2, "recover_threshold": 2}


def send(gateway: Gateway, count: int, path: str = "/") -> list[int]:
    return [gateway.fetch("POST", path, body=b"{}").status for _ in range(count)]


def is_up(gateway: Gateway, stub: Upstream) -> bool:
    return gateway.metrics().total("ciuicflow_endpoint_up", endpoint=stub.name) == 1


# -- failover ----------------------------------------------------------------------------------


@pytest.mark.line(3)
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("routing", ["round_robin", "least_load", "power_of_two"])
def test_an_endpoint_that_cannot_be_connected_to_costs_no_request(
    start: Start, stubs: Stubs, routing: str, loop: str
) -> None:
    stub = stubs()
    with refusing_port() as port:
        dead = f"http://127.0.0.1:{port}"
        gateway = start(config(dead, stub, routing=routing, health=SLOW_PROBES), loop=loop)
        for number in range(12):
            answer = gateway.fetch("POST", f"/{number}", body=b'{"n":%d}' % number)
            assert answer.status == 200
    assert [request.body for request in stub.requests] == [b'{"n":%d}' % n for n in range(12)]


@pytest.mark.line(3)
def test_an_endpoint_that_vanishes_between_two_requests_is_replaced(
    start: Start, stubs: Stubs
) -> None:
    first, second = stubs(), stubs()
    gateway = start(config(first, second, routing="round_robin", health=SLOW_PROBES))
    assert send(gateway, 4) == [200] * 4
    first.stop_listening()
    first.drop_connections()
    assert send(gateway, 8) == [200] * 8


@pytest.mark.line(3, 35)
def test_no_endpoint_at_all_is_a_503_with_retry_after(start: Start) -> None:
    with refusing_port() as one, refusing_port() as two:
        urls = [f"http://127.0.0.1:{port}" for port in (one, two)]
        for upstreams in (urls[:1], urls):
            gateway = start(config(*upstreams))
            answer = gateway.fetch("POST", "/v1/chat/completions", body=b"{}")
            assert_openai_error(answer, 503)
            assert int(answer.get("retry-after") or b"") >= 1


@pytest.mark.line(3)
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_connecting_that_hangs_is_bounded_by_the_connect_timeout(
    start: Start, stubs: Stubs, loop: str
) -> None:
    with silent_port() as port:
        silent, timeouts = f"http://127.0.0.1:{port}", {"connect_s": 0.3}
        health = {**SLOW_PROBES, "timeout_s": 0.3}
        gateway = start(config(silent, timeouts=timeouts, health=health), loop=loop)
        started = now()
        assert_openai_error(gateway.fetch(), 503)
        assert 0.2 < now() - started < 3
        timeouts = {"connect_s": 1.5}  # the one that answers may be slow on a busy machine
        both = config(silent, stubs(), timeouts=timeouts, health=health, routing="round_robin")
        assert send(start(both, loop=loop), 4) == [200] * 4


@pytest.mark.line(1, 3)
def test_a_client_that_leaves_during_connecting_is_not_connected(start: Start) -> None:
    with silent_port() as port:
        gateway = start(config(f"http://127.0.0.1:{port}", timeouts={"connect_s": 5}))
        client = gateway.connect()
        client.send(request_bytes())
        wait.until(lambda: gateway.in_flight() == 1)
        client.close()
        gateway.wait_idle(1)


@pytest.mark.line(22, 23)
def test_a_request_that_was_sent_is_not_sent_to_another_endpoint(
    start: Start, stubs: Stubs
) -> None:
    broken, good = stubs(), stubs()
    broken.script(Exchange.reset)
    gateway = start(config(broken, good, routing="round_robin", health=SLOW_PROBES))
    assert sorted(send(gateway, 4)) == [200, 200, 502, 502]
    assert len(broken.requests) == len(good.requests) == 2


# -- thresholds and healing --------------------------------------------------------------------

HARMLESS = ["400 Bad", "401 No", "402 Pay", "404 Not Found", "422 Odd", "429 Too Many"]
FAULTS: dict[str, Callable[[Exchange], None]] = {
    "500": lambda exchange: exchange.send(response_bytes(b"", "500 Oops")),
    "503": lambda exchange: exchange.send(response_bytes(b"", "503 Overloaded")),
    "reset": Exchange.reset,
    "end": Exchange.close,
}


@pytest.mark.line(24)
def test_what_callers_do_wrong_never_marks_an_endpoint(start: Start, stubs: Stubs) -> None:
    stub, other = stubs(), stubs()
    gateway = start(config(stub, other, health=SLOW_PROBES, routing="round_robin"))
    for status in HARMLESS:
        for each in (stub, other):
            each.respond(response_bytes(b"{}", status))
        assert send(gateway, 10) == [int(status[:3])] * 10
    for each in (stub, other):
        each.script(hold)
    for _ in range(10):
        seen = len(stub.requests) + len(other.requests)
        client = gateway.connect()
        client.send(request_bytes())
        wait.until(lambda: len(stub.requests) + len(other.requests) > seen)  # noqa: B023 (at once)
        client.abort()
    gateway.wait_idle()
    assert is_up(gateway, stub)
    assert is_up(gateway, other)


@pytest.mark.line(24)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_up_to_the_threshold_mark_an_endpoint(
    start: Start, stubs: Stubs, fault: str
) -> None:
    bad, good = stubs(), stubs()
    bad.script(FAULTS[fault])
    gateway = start(config(bad, good, health=SLOW_PROBES, routing="round_robin"))
    send(gateway, 4)
    assert is_up(gateway, bad)  # twice so far
    send(gateway, 2)
    assert not is_up(gateway, bad)
    assert is_up(gateway, good)
    assert send(gateway, 10) == [200] * 10
    assert len(bad.requests) == 3


@pytest.mark.line(24)
def test_refused_connections_mark_an_endpoint(start: Start, stubs: Stubs) -> None:
    bad, good = stubs(), stubs()
    gateway = start(config(bad, good, health=SLOW_PROBES, routing="round_robin"))
    bad.stop_listening()
    bad.drop_connections()
    assert send(gateway, 10) == [200] * 10
    assert not is_up(gateway, bad)


@pytest.mark.line(24)
def test_success_between_faults_starts_the_count_again(start: Start, stubs: Stubs) -> None:
    stub, other = stubs(), stubs()
    gateway = start(config(stub, other, health=SLOW_PROBES, routing="round_robin"))
    for _ in range(3):
        stub.respond(response_bytes(b"", "500 Oops"))
        send(gateway, 4)
        stub.respond(response_bytes())
        send(gateway, 2)
    assert is_up(gateway, stub)


@pytest.mark.line(24)
def test_success_of_live_traffic_heals(start: Start, stubs: Stubs) -> None:
    """The only endpoint is still tried when it is marked, and its first success unmarks it."""
    stub = stubs()
    stub.respond(response_bytes(b"", "500 Oops"))
    gateway = start(config(stub, health=SLOW_PROBES))
    assert send(gateway, 4) == [500] * 4
    assert not is_up(gateway, stub)
    stub.respond(response_bytes())
    assert send(gateway, 1) == [200]
    assert is_up(gateway, stub)


@pytest.mark.line(24)
def test_probes_mark_and_heal(start: Start, stubs: Stubs) -> None:
    stub, other = stubs(), stubs()
    gateway = start(config(stub, other, health=QUICK_PROBES, routing="round_robin"))
    stub.healthy = False
    wait.until(lambda: not is_up(gateway, stub), what="the probe marks it")
    assert send(gateway, 6) == [200] * 6
    assert stub.requests == []
    assert gateway.admin_get("/readyz").status == 200  # the other one is there
    stub.healthy = True
    wait.until(lambda: is_up(gateway, stub), what="the probe heals it")
    send(gateway, 4)
    assert len(stub.requests) == 2


@pytest.mark.line(29)
def test_probes_that_hang_hold_nothing_up(start: Start, stubs: Stubs) -> None:
    stub, other = stubs(), stubs()
    health = {"interval_s": 0.1, "timeout_s": 30}
    gateway = start(config(stub, other, health=health, routing="round_robin"))
    stub.hang_probes_s = other.hang_probes_s = 20
    wait.until(lambda: stub.hanging and other.hanging, what="probes hang")
    started = now()
    assert send(gateway, 40) == [200] * 40
    assert now() - started < 4
    assert is_up(gateway, stub)


@pytest.mark.line(24)
def test_an_engine_without_a_health_path_is_not_down(start: Start, stubs: Stubs) -> None:
    """A drop-in proxy cannot know the path; 404 is an answer. Only live traffic judges then."""
    stub = stubs()
    gateway = start(config(stub, health={**QUICK_PROBES, "path": "/no-such-path"}))
    stub.respond(response_bytes(b"", "404 Not Found"))
    wait.until(lambda: len(stub.requests) > 4, what="probes")
    assert gateway.admin_get("/readyz").status in (200, 503)
    stub.respond(response_bytes())
    assert send(gateway, 3) == [200] * 3


# -- choice ------------------------------------------------------------------------------------


def test_round_robin_takes_turns(start: Start, stubs: Stubs) -> None:
    all_stubs = [stubs() for _ in range(3)]
    gateway = start(config(*all_stubs, routing="round_robin"))
    send(gateway, 12)
    assert [len(stub.requests) for stub in all_stubs] == [4, 4, 4]


@pytest.mark.parametrize("routing", ["least_load", "power_of_two"])
def test_load_policies_avoid_the_busy_endpoint(start: Start, stubs: Stubs, routing: str) -> None:
    def hold(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        exchange.peer_closed_after(20)

    one, two = stubs(), stubs()
    gateway = start(config(one, two, routing=routing))
    for stub in (one, two):
        stub.script(hold)
    client = gateway.connect()
    client.send(request_bytes())
    client.until(b"data: 1\n\n")
    busy, free = (one, two) if one.requests else (two, one)
    free.respond(response_bytes())
    send(gateway, 6)
    assert len(busy.requests) == 1
    assert len(free.requests) == 6
    client.close()


@pytest.mark.line(13)
@pytest.mark.parametrize(
    ("host", "wanted"), [(None, "client"), ("preserve", "client"), ("upstream", "upstream")]
)
def test_host_is_the_clients_or_the_upstreams(
    start: Start, stubs: Stubs, host: str | None, wanted: str
) -> None:
    stub = stubs()
    entry = {"url": stub.url} if host is None else {"url": stub.url, "host": host}
    start(config(entry)).fetch()
    name = b"test.example" if wanted == "client" else stub.name.encode()
    assert stub.request.all("host") == [name]


def test_a_path_prefix_is_put_before_the_target(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config({"url": stub.url + "/team/a/"}))
    for target in ("/v1/chat/completions?x=1", "/", "//x", "/../up"):
        assert gateway.fetch("GET", target).status == 200
    paths = [request.target for request in stub.requests]
    assert paths == [
        b"/team/a/v1/chat/completions?x=1",
        b"/team/a/",
        b"/team/a//x",
        b"/team/a/../up",
    ]
