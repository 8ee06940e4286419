"""The queue as clients see it: limits that hold, leaving, floors, bounds, the kill switch."""

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from support import flow, wait
from support.errors import assert_openai_error
from support.flow import PATH, TIERS, Engine, limited
from support.gateway import LOOPS, Gateway, Start, config, outcome_delta
from support.raw import Client
from support.upstream import Exchange, Stubs, refusing_port, silent_port
from support.wire import (
    LAST_CHUNK,
    SSE_HEAD,
    chunk,
    chunked,
    message_bytes,
    request_bytes,
    response_bytes,
)


@pytest.mark.line(2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("how", ["fin", "reset"])
def test_who_leaves_while_queued_is_gone_at_once_and_never_sent(
    start: Start, stubs: Stubs, loop: str, how: str
) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 1)), loop=loop)
    with flow.full(gateway, stub) as engine:
        clients = {tier: gateway.connect() for tier in TIERS}
        for tier, client in clients.items():
            client.send(flow.chat(tier, (b"X-Name", tier.encode())))
        flow.wait_queued(gateway, 3)
        assert flow.queued(gateway) == {"gold": 1, "silver": 1, "bronze": 1}
        left_at = time.monotonic()
        (clients["silver"].close if how == "fin" else clients["silver"].abort)()
        wait.until(lambda: flow.queued(gateway)["silver"] == 0, 2)
        assert time.monotonic() - left_at < 1
        engine.let_all()
        for tier in ("gold", "bronze"):
            assert clients[tier].response("POST").status == 200
            clients[tier].close()
    flow.wait_empty(gateway)
    assert engine.order == [b"filler", b"gold", b"bronze"]
    assert gateway.metrics().outcomes() == {"completed": 3, "client_gone": 1}


@pytest.mark.line(2, 25)
def test_two_thousand_who_leave_the_queue_leave_nothing_behind(start: Start, stubs: Stubs) -> None:
    """In four crowds: so descriptors suffice on any machine."""
    stub = stubs()
    gateway = start(config(limited(stub, 1)))
    descriptors = gateway.fd_count()

    async def crowd() -> None:
        for _ in range(4):
            connections = [await asyncio.open_connection(*gateway.listen) for _ in range(500)]
            for number, (_, writer) in enumerate(connections):
                writer.write(flow.chat(TIERS[number % 3], user=f"u{number % 7}"))
            await asyncio.to_thread(flow.wait_queued, gateway, 500, 10)
            for _, writer in connections:
                writer.close()
            await asyncio.to_thread(flow.wait_queued, gateway, 0, 5)

    with flow.full(gateway, stub):
        asyncio.run(crowd())
        assert flow.ledger(gateway)[0] == 1
    flow.wait_empty(gateway)
    assert len(stub.requests) == 1
    assert gateway.metrics().outcomes()["client_gone"] >= 2000
    wait.until(lambda: gateway.own_fd_count() <= descriptors + 2, what="descriptors come back")


@pytest.mark.line(31)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_burst_never_exceeds_the_limit(start: Start, stubs: Stubs, loop: str) -> None:
    stub = stubs()
    engine = Engine(pause_s=0.002)
    engine.let_all()
    stub.script(engine)
    gateway = start(config(limited(stub, 4)), loop=loop)

    async def burst() -> tuple[Counter[int], float]:
        async def one(writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> int:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            return int(head[9:12])

        connections = [await asyncio.open_connection(*gateway.listen) for _ in range(1000)]
        began = time.monotonic()
        for number, (_, writer) in enumerate(connections):
            writer.write(flow.chat("bronze", user=f"u{number % 3}"))
        took_s = time.monotonic() - began
        async with asyncio.timeout(40):
            statuses = await asyncio.gather(*(one(w, r) for r, w in connections))
        return Counter(statuses), took_s

    statuses, took_s = asyncio.run(burst())
    assert took_s < 1, "no burst"
    assert engine.most <= 4
    assert engine.most >= 2, "nothing ran beside another: the test shows nothing"
    assert set(statuses) <= {200, 429}, statuses
    assert statuses[200] == len(engine.order) > 300, statuses
    flow.wait_empty(gateway)
    assert sum(gateway.metrics().outcomes().values()) == 1000


@pytest.mark.line(28)
def test_bronze_gets_its_floor_of_twice_the_capacity_offered_as_gold(
    start: Start, stubs: Stubs
) -> None:
    """Gold alone could fill the engine twice; the floor of bronze is 0.1 of the tokens."""
    stub = stubs()

    engine = Engine(pause_s=0.02)
    engine.let_all()
    stub.script(engine)
    gateway = start(config(limited(stub, 2)))
    until = time.monotonic() + 4
    got: Counter[tuple[str, int]] = Counter()

    async def caller(tier: str, number: int) -> None:
        raw = flow.chat(tier, (b"X-Name", tier.encode()), user=f"{tier}{number}")
        while time.monotonic() < until:
            status, _ = await flow.ask(gateway.listen, raw)
            got[tier, status] += 1

    async def load() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(caller("gold", number))
            for number in range(3):
                group.create_task(caller("bronze", number))

    asyncio.run(load())
    assert got["gold", 200] > 100, got
    share = got["bronze", 200] / (got["bronze", 200] + got["gold", 200])
    assert 0.05 < share < 0.3, got
    flow.wait_empty(gateway)


def test_higher_tiers_go_first_and_garbage_never_gets_ahead(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    no_floors = [
        {"name": name, "rank": rank, "ttft_target_s": 20, "itl_target_s": 1, "max_wait_s": 20}
        for rank, name in enumerate(TIERS)
    ]
    gateway = start(config(limited(stub, 1), flow={"tiers": no_floors}))
    asked = ["bronze", "", "gold\u00a0", "platinum", "gold", "silver", "GOLD"]
    clients: list[Client] = []
    with flow.full(gateway, stub) as engine:
        for number, tier in enumerate(asked):
            client = gateway.connect()
            client.send(flow.chat(tier, (b"X-Name", tier.strip().encode() or b"none")))
            clients.append(client)
            flow.wait_queued(gateway, number + 1)
        engine.let_all()
        answers = [client.response("POST") for client in clients]
    for client in clients:
        client.close()
    assert [answer.status for answer in answers] == [200] * len(asked)
    assert engine.order[1:3] == [b"gold", b"GOLD"]
    assert engine.order[-1] == b"bronze"


def test_deadlines_set_the_order_within_a_tenant(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 1)))
    clients: list[Client] = []
    with flow.full(gateway, stub) as engine:
        for number, deadline in enumerate((b"9" * 99, b"4000", b"-1", b"3000")):
            client = gateway.connect()
            fields = ((b"X-Ciuic-Deadline-Ms", deadline), (b"X-Name", deadline[:5]))
            client.send(flow.chat("silver", *fields))
            clients.append(client)
            flow.wait_queued(gateway, number + 1)
        engine.let_all()
        assert {client.response("POST").status for client in clients} == {200}
    for client in clients:
        client.close()
    assert engine.order[1:] == [b"3000", b"4000", b"99999", b"-1"]


def test_a_tenant_with_much_queued_does_not_hold_up_another(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 1)))
    with flow.full(gateway, stub) as engine, contextlib.ExitStack() as stack:
        clients = []
        for number in range(21):
            client = stack.enter_context(gateway.connect())
            name = b"light" if number == 20 else b"heavy"
            client.send(flow.chat("silver", (b"X-Name", name), user=name.decode()))
            clients.append(client)
            flow.wait_queued(gateway, number + 1)
        engine.let_all()
        assert {client.response("POST").status for client in clients} == {200}
    assert engine.order[1:].index(b"light") <= 2


def test_a_ceiling_that_a_reload_lowers_holds_for_what_comes_next(
    start: Start, stubs: Stubs
) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 3)))
    with flow.full(gateway, stub, 3) as engine, contextlib.ExitStack() as stack:
        gateway.reload(config(limited(stub, 1)))
        wait.until(lambda: gateway.state()["flow"]["endpoints"][0]["limit_requests"] == 1)
        clients = [stack.enter_context(gateway.connect()) for _ in range(4)]
        for client in clients:
            client.send(flow.chat("bronze"))
        flow.wait_queued(gateway, 4)
        engine.let(2)
        wait.until(lambda: gateway.in_flight() == 1)
        assert wait.holds(lambda: len(engine.order) == 3, 0.3)
        engine.let(1)
        wait.until(lambda: len(engine.order) == 4)
        assert wait.holds(lambda: len(engine.order) == 4, 0.2)
        engine.let_all()
        assert {client.response("POST").status for client in clients} == {200}


@pytest.mark.line(20)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
def test_what_has_no_body_does_not_queue(start: Start, stubs: Stubs, method: str) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 1)))
    with flow.full(gateway, stub):
        stub.script(lambda exchange: exchange.send(message_bytes(b"HTTP/1.1 204 OK", [])))
        with gateway.connect() as client:
            answer = client.exchange(method, "/v1/things", flow.headers("bronze"))
        assert answer.status == 204
        assert answer.get("x-ciuic-queue-ms") == b"0"
        with gateway.connect() as client:
            assert client.exchange("POST", "/abort", flow.headers("bronze"), b"").status == 204


@pytest.mark.line(30)
def test_a_long_stream_is_in_flight_until_it_ends(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 1)))
    go_on = threading.Event()

    def endless(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        while not go_on.wait(0.05):
            exchange.send(chunk(b"data: " + flow.delta(content="x") + b"\n\n"))
        exchange.send(LAST_CHUNK)

    stub.script(endless)
    with gateway.connect() as long, gateway.connect() as next_one:
        long.send(flow.chat("gold", stream=True, max_tokens=2))
        long.until(b"data: ")
        next_one.send(flow.chat("bronze"))
        flow.wait_queued(gateway, 1)
        tokens = set()
        for _ in range(10):
            requests, held, _ = flow.ledger(gateway)
            assert (requests, gateway.in_flight()) == (1, 1)
            tokens.add(held)
            time.sleep(0.15)
        assert 0 not in tokens
        assert max(tokens) > min(tokens), "an answer that outgrows its estimate holds more"
        assert len(stub.requests) == 1
        go_on.set()
        stub.respond(flow.ANSWER)
        assert next_one.response("POST").status == 200
    flow.wait_empty(gateway)


@pytest.mark.line(18)
def test_queued_bodies_are_bounded_in_bytes(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 1), flow={"queue_bytes": 300_000}))
    big = flow.body(padding="x" * 100_000)
    clients = []
    with flow.full(gateway, stub) as engine:
        for number in range(2):
            client = gateway.connect()
            client.send(
                request_bytes(
                    "POST",
                    PATH,
                    flow.headers("bronze", (b"Authorization", b"Bearer %d" % number)),
                    flow.body(padding="x" * 100_000, user=f"u{number}"),
                )
            )
            clients.append(client)
        flow.wait_queued(gateway, 2)
        refused = gateway.fetch("POST", PATH, tuple(flow.headers("bronze")), big)
        assert assert_openai_error(refused, 429)["code"] == "queue_full"
        assert int(refused.get("retry-after") or b"0") >= 1
        greedy = [gateway.connect(), gateway.connect()]
        greedy[0].send(request_bytes("POST", PATH, flow.headers("gold"), flow.body(user="g")))
        flow.wait_queued(gateway, 3)
        engine.let_all()
        assert greedy[0].response("POST").status == 200
        assert [client.response("POST").status for client in clients] == [200, 200]
    for client in clients + greedy:
        client.close()
    flow.wait_empty(gateway)
    assert gateway.metrics().outcomes() == {"completed": 4, "queue_bytes": 1}


def test_bodies_that_arrive_slowly_are_bounded_in_sum(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(stub, limits={"buffered_bytes": 200_000}))
    with gateway.connect() as one, gateway.connect() as two:
        head = flow.headers("gold", (b"Content-Length", b"190000"))
        one.send(request_bytes("POST", PATH, head) + b"x" * 150_000)
        two.send(request_bytes("POST", PATH, head))
        two.send_ignoring_close(b"x" * 150_000)
        assert assert_openai_error(two.response("POST"), 503)["code"] == "overloaded"
        one.send(b"x" * 40_000)
        assert one.response("POST").status == 200
    flow.wait_empty(gateway)
    assert gateway.fetch("POST", PATH, tuple(flow.headers()), b"x" * 190_000).status == 200


def test_queued_bodies_take_nothing_from_bypass(start: Start, stubs: Stubs) -> None:
    """Where models decide, bodies of bypass are held for a moment too: that must not fail."""
    one, two = stubs(models=("a",)), stubs(models=("b",))
    upstreams = [limited(one, 1), limited(two, 1)]
    gateway = start(config(*upstreams, limits={"buffered_bytes": 400_000}))
    engine = Engine()
    one.script(engine)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(gateway.connect()) for _ in range(4)]
        for number, client in enumerate(clients):
            client.send(flow.chat("bronze", model="a", padding="x" * 90_000, user=f"u{number}"))
        flow.wait_queued(gateway, 3)
        body = flow.body(model="b", padding="x" * 90_000)
        assert gateway.fetch("POST", PATH, (), body).status == 200
        engine.let_all()
        assert {client.response("POST").status for client in clients} == {200}
    flow.wait_empty(gateway)


# The kill switch.


def kill(gateway: Gateway, how: str, settings: dict[str, object]) -> None:
    if how == "admin":
        with Client(gateway.admin) as client:
            assert client.exchange("POST", "/flow/disable", body=b"").status == 200
    else:
        gateway.reload({**settings, "flow": {"enabled": False}})
    wait.until(lambda: gateway.state()["flow"]["enabled"] is False)


@pytest.mark.parametrize("how", ["admin", "reload"])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_kill_switch_lets_all_that_is_queued_bypass(
    start: Start, stubs: Stubs, how: str, loop: str
) -> None:
    stub = stubs()
    settings = config(limited(stub, 1))
    gateway = start(settings, loop=loop)
    raw = [
        request_bytes(
            "POST",
            PATH,
            flow.headers(tier, (b"X-Name", tier.encode()), (b"Cookie", b" a")),
            flow.body(user=tier),
        )
        for tier in ("bronze", "gold", "silver")
    ]
    slow = request_bytes("POST", PATH, flow.headers("gold", (b"Content-Length", b"10")))
    with flow.full(gateway, stub) as engine:
        clients = [gateway.connect() for _ in raw]
        late = gateway.connect()
        late.send(slow + b"12345")  # its body is on the way when the switch is thrown
        for number, (client, bytes_) in enumerate(zip(clients, raw, strict=True)):
            client.send(bytes_)
            flow.wait_queued(gateway, number + 1)
        kill(gateway, how, settings)
        wait.until(lambda: engine.running == 4, what="all are sent, over the limit")
        late.send(b"67890")
        wait.until(lambda: engine.running == 5)
        assert sum(flow.queued(gateway).values()) == 0
        engine.let_all()
        answers = [client.response("POST") for client in [*clients, late]]
        for client in [*clients, late]:
            client.close()
    for answer in answers:
        assert answer.status == 200
        assert answer.get("x-ciuic-flow") is None
    sent = b"".join(
        connection.received
        for connection in stub.connections
        if b"filler" not in connection.received
    )
    for bytes_ in [*raw, slow + b"1234567890"]:
        assert bytes_ in sent, "they pass byte for byte"
    flow.wait_empty(gateway)
    assert gateway.metrics().total("ciuicflow_requests_total", flow="bypass") == 4
    assert gateway.metrics().total("ciuicflow_requests_total") == 5
    with Client(gateway.admin) as client:
        client.exchange("POST", "/flow/enable", body=b"")
    answer = gateway.fetch("POST", PATH, tuple(flow.headers()), flow.body())
    assert answer.get("x-ciuic-flow") == b"enabled"


def test_while_it_is_switched_off_nobody_is_held_or_checked(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    settings = {"enabled": False, "unknown_keys": {"accept": False}, "bypass_tier": "bronze"}
    gateway = start(config(limited(stub, 1), flow=settings))
    raw = flow.chat("gold", (b"Authorization", b"Bearer no"))
    with gateway.connect() as client:
        client.send(raw)
        answer = client.response("POST")
    assert (answer.status, answer.get("x-ciuic-flow")) == (200, None)
    assert stub.received == raw


@pytest.mark.parametrize("send_priority", [False, True])
def test_a_request_that_could_not_be_delivered_does_not_wait_when_switched_off(
    start: Start, stubs: Stubs, send_priority: bool
) -> None:
    """Its endpoint is being connected to when the switch is thrown; the other one is full."""
    busy = stubs()
    with silent_port() as port:
        settings = config(
            limited(busy, 1, name="busy"),
            {
                "url": f"http://127.0.0.1:{port}",
                "name": "silent",
                "max_requests": 1,
                "engine": "vllm",
                "send_priority": send_priority,
            },
            timeouts={"connect_s": 0.7},
        )
        gateway = start(settings)
        with flow.full(gateway, busy, 1) as engine, gateway.connect() as client:
            raw = flow.chat("bronze")
            client.send(raw)
            wait.until(lambda: gateway.in_flight() == 2, what="it is on its way")
            kill(gateway, "admin", settings)
            wait.until(lambda: engine.running == 2, what="it goes to the one that is there")
            engine.let_all()
            answer = client.response("POST")
        assert (answer.status, answer.get("x-ciuic-flow")) == (200, None)
        assert any(raw in connection.received for connection in busy.connections)
        flow.wait_empty(gateway)


# Enrolment.


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_enrolled_requests_wait_and_keep_every_byte(
    start: Start, stubs: Stubs, framing: str
) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 1), flow={"bypass_tier": "bronze"}))
    fields = [(b"X-Ciuic-Tier", b"gold"), (b"x-ciuic-flow", b"off"), (b"X-Name", b"enrolled")]
    if framing == "length":
        raw = request_bytes("POST", PATH, fields, flow.body())
    else:
        raw = request_bytes("POST", PATH, [*fields, (b"Transfer-Encoding", b"chunked")])
        raw += chunked(flow.body()[:9], flow.body()[9:])
    with flow.full(gateway, stub) as engine, gateway.connect() as client:
        client.send(raw)
        flow.wait_queued(gateway, 1)
        assert flow.queued(gateway)["bronze"] == 1
        engine.let_all()
        answer = client.response("POST")
    assert (answer.status, answer.body) == (200, flow.ANSWER_BODY)
    assert not [name for name, _ in answer.headers if name.lower().startswith(b"x-ciuic")]
    assert any(raw in connection.received for connection in stub.connections)
    flow.wait_empty(gateway)
    counted = gateway.metrics()
    assert counted.total("ciuicflow_requests_total", flow="bypass", tier="bronze") == 1
    assert counted.total("ciuicflow_requests_total") == 2


def test_enrolled_requests_need_no_key(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    settings = {"bypass_tier": "bronze", "unknown_keys": {"accept": False}}
    gateway = start(config(stub, flow=settings))
    assert gateway.fetch("POST", PATH, (), flow.body()).status == 200
    assert gateway.fetch("GET", "/").status == 200


# Endpoints.


@pytest.mark.line(3)
@pytest.mark.parametrize("loop", LOOPS)
def test_an_endpoint_that_vanishes_between_grant_and_connect_costs_no_request(
    start: Start, stubs: Stubs, loop: str
) -> None:
    """The one that is there is full at first: so the other one is chosen."""
    there = stubs()
    with refusing_port() as port, contextlib.ExitStack() as stack:
        gateway = start(config(f"http://127.0.0.1:{port}", limited(there, 1)), loop=loop)
        clients = [stack.enter_context(gateway.connect()) for _ in range(9)]
        with flow.full(gateway, there) as engine:
            for number, client in enumerate(clients):
                fields = flow.headers(TIERS[number % 3], (b"X-Name", b"%d" % number))
                client.send(request_bytes("POST", PATH, fields, flow.body(n=number)))
                flow.wait_queued(gateway, number + 1)
            engine.let_all()
            assert {client.response("POST").status for client in clients} == {200}
        flow.wait_empty(gateway)
    assert sorted(engine.order[1:]) == [b"%d" % number for number in range(9)]
    counted = gateway.metrics()
    failures = counted.total("ciuicflow_upstream_failures_total", reason="connect")
    assert failures >= 1, "the other one was tried"
    waits = counted.total("ciuicflow_queue_wait_seconds_count")
    assert waits == sum(counted.outcomes().values()) == 10, "each counts once"


@pytest.mark.line(3)
def test_where_all_endpoints_vanish_it_is_a_503(start: Start) -> None:
    with refusing_port() as one, refusing_port() as two:
        gateway = start(config(f"http://127.0.0.1:{one}", f"http://127.0.0.1:{two}"))
        for tier in TIERS:
            answer = gateway.fetch("POST", PATH, tuple(flow.headers(tier)), flow.body())
            assert assert_openai_error(answer, 503)["code"] == "no_endpoint"
        flow.wait_empty(gateway)


@pytest.mark.line(24, 35)
def test_a_sole_endpoint_that_fails_requests_still_gets_the_next(
    start: Start, stubs: Stubs
) -> None:
    """As for bypass: a wrong verdict never refuses what could have been served."""
    stub = stubs()
    stub.respond(response_bytes(b"crash", "500 Internal Server Error"))
    gateway = start(config(stub, health={"fail_threshold": 3, "interval_s": 60}))
    answers = [
        gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body()) for _ in range(6)
    ]
    assert [(answer.status, answer.body) for answer in answers] == [(500, b"crash")] * 6


@pytest.mark.line(26)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_hundred_reloads_with_a_full_queue_cost_no_request(
    start: Start, stubs: Stubs, loop: str
) -> None:
    both = [stubs(), stubs(), stubs()]

    engine = Engine(pause_s=0.01)
    engine.let_all()
    for stub in both:
        stub.script(engine)
    settings = [
        config(
            limited(both[number], 1),
            limited(both[(number + 1) % 3], 1),
            flow={"queue_entries": 1000 + number, "default_tier": TIERS[number]},
        )
        for number in range(3)
    ]
    gateway = start(settings[0], loop=loop)
    statuses: Counter[int] = Counter()
    stop = threading.Event()

    def reload() -> None:
        for number in range(1, 101):
            before = gateway.metrics().total("ciuicflow_config_reloads_total", result="success")
            gateway.reload(settings[number % 3])
            wait.until(
                lambda before=before: (
                    gateway.metrics().total(  # type: ignore[misc]  # loop
                        "ciuicflow_config_reloads_total", result="success"
                    )
                    > before
                )
            )
        stop.set()

    async def caller(number: int) -> None:
        raw = flow.chat("bronze", user=f"u{number % 5}")
        while not stop.is_set():
            statuses[(await flow.ask(gateway.listen, raw))[0]] += 1

    async def load() -> None:
        async with asyncio.timeout(50), asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(reload))
            for number in range(12):
                group.create_task(caller(number))

    asyncio.run(load())
    assert set(statuses) == {200}, statuses
    assert statuses[200] > 100
    flow.wait_empty(gateway)
    assert gateway.metrics().outcomes()["completed"] == statuses[200]


@pytest.mark.line(26)
def test_a_reload_that_removes_a_tier_keeps_its_requests(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 1, engine="vllm", send_priority=True)))
    only = {"name": "silver", "rank": 0, "ttft_target_s": 20, "itl_target_s": 1, "max_wait_s": 20}
    with flow.full(gateway, stub) as engine:
        clients = [gateway.connect() for _ in TIERS]
        for client, tier in zip(clients, TIERS, strict=True):
            client.send(flow.chat(tier))
        flow.wait_queued(gateway, 3)
        gateway.reload(
            config(
                limited(stub, 1, engine="vllm", send_priority=True),
                flow={"tiers": [only], "default_tier": "silver"},
            )
        )
        wait.until(lambda: len(gateway.state()["flow"]["tiers"]) == 1)
        assert flow.queued(gateway)["silver"] == 3
        engine.let_all()
        assert [client.response("POST").status for client in clients] == [200] * 3
    for client in clients:
        client.close()
    flow.wait_empty(gateway)


# The drain.


@pytest.mark.line(27)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("in_time", [True, False])
def test_a_drain_serves_what_is_queued_or_says_503(
    stubs: Stubs, tmp_path: Path, loop: str, in_time: bool
) -> None:
    stub = stubs()
    settings = config(limited(stub, 1), timeouts={"drain_s": 10 if in_time else 0.5, "settle_s": 0})
    with Gateway(settings, tmp_path, loop=loop) as gateway:
        with flow.full(gateway, stub) as engine:
            clients = [gateway.connect() for _ in range(6)]
            for client in clients:
                client.send(flow.chat("bronze"))
            flow.wait_queued(gateway, 6)
            gateway.terminate()
            if in_time:
                time.sleep(0.2)
                engine.let_all()
            answers = [client.response("POST") for client in clients]
            for client in clients:
                client.close()
        if in_time:
            assert [answer.status for answer in answers] == [200] * 6
        else:
            for answer in answers:
                assert assert_openai_error(answer, 503)["code"] == "shutting_down"
                assert int(answer.get("retry-after") or b"0") >= 1
            assert len(engine.order) == 1, "what is told that it failed was never sent"
        assert gateway.wait() == 0


@pytest.mark.line(2, 27)
@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_drain_refuses_was_never_sent(stubs: Stubs, tmp_path: Path, loop: str) -> None:
    """Idle connections are at hand, and what is cut makes room: still nothing more is sent."""
    stub = stubs()
    settings = config(limited(stub, 1), timeouts={"drain_s": 0.5, "settle_s": 0})
    with Gateway(settings, tmp_path, loop=loop) as gateway, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(gateway.connect()) for _ in range(8)]
        before = Engine()
        stub.script(before)
        for client in clients:
            client.send(request_bytes("POST", PATH, [], flow.body()))
        wait.until(lambda: before.running == 8)
        before.let_all()
        for client in clients:
            client.response("POST")
        with flow.full(gateway, stub) as engine:
            for client in clients:
                client.send(flow.chat("bronze"))
            flow.wait_queued(gateway, 8)
            gateway.terminate()
            codes = {
                json.loads(client.response("POST").body)["error"]["code"] for client in clients
            }
        assert codes == {"shutting_down"}
        assert gateway.wait() == 0
        assert engine.order == [b"filler"]


@pytest.mark.line(1, 2)
def test_who_leaves_with_much_pipelined_behind_is_noticed(start: Start, stubs: Stubs) -> None:
    """So much that the client is not read any more."""
    stub = stubs()
    gateway = start(config(limited(stub, 1)))
    with flow.full(gateway, stub):
        client = gateway.connect()
        client.send(flow.chat("bronze"))
        client.push(flow.chat("bronze", padding="x" * 9000) * 900, blocked_s=0.3)
        flow.wait_queued(gateway, 1)
        client.abort()
        flow.wait_queued(gateway, 0, 2)
    flow.wait_empty(gateway)
    assert len(stub.requests) == 1


@pytest.mark.line(3, 22)
def test_an_endpoint_that_dies_with_pooled_connections_costs_no_request(
    start: Start, stubs: Stubs
) -> None:
    """The reused connection proves dead, and then nobody listens: another endpoint takes it."""
    dying, there = stubs(), stubs()
    there.respond(flow.ANSWER)

    def die(exchange: Exchange) -> None:
        if len(dying.requests) == 1:
            exchange.send(flow.ANSWER)
            return
        dying.stop_listening()
        exchange.reset()

    dying.script(die)
    gateway = start(config({"url": dying.url, "name": "a"}, {"url": there.url, "name": "b"}))
    with gateway.connect() as client:
        for number in range(4):
            client.send(flow.chat("gold", (b"X-N", b"%d" % number)))
            assert client.response("POST").status == 200
    flow.wait_empty(gateway)
    assert len(dying.requests) == 2, "the pooled connection was used"
    assert [request.get("x-n") for request in there.requests] == [b"1", b"2", b"3"]
    dying.listen()


@pytest.mark.line(32)
def test_gold_does_not_stand_behind_500_bronze(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    engine = Engine(pause_s=0.02)
    engine.let_all()
    stub.script(engine)
    gateway = start(config(limited(stub, 2)))

    async def load() -> list[int]:
        bronze = [await asyncio.open_connection(*gateway.listen) for _ in range(500)]
        for _, writer in bronze:
            writer.write(flow.chat("bronze"))
        await asyncio.sleep(0.3)
        waits = []
        for _ in range(10):
            status, raw = await flow.ask(gateway.listen, flow.chat("gold", user="g"))
            assert status == 200
            waits.append(int(raw.lower().partition(b"x-ciuic-queue-ms: ")[2].split(b"\r")[0]))
        assert (await asyncio.to_thread(flow.queued, gateway))["bronze"] > 100
        for _, writer in bronze:
            writer.close()
        return waits

    waits = sorted(asyncio.run(load()))
    assert waits[5] < 200, waits
    flow.wait_empty(gateway)


def test_a_ceiling_of_tokens_holds_and_what_is_larger_goes_alone(
    start: Start, stubs: Stubs
) -> None:
    stub = stubs()
    engine = Engine(pause_s=0.005)
    engine.let_all()
    stub.script(engine)
    gateway = start(config({"url": stub.url, "max_tokens": 50}))

    async def load() -> set[int]:
        asked = [flow.ask(gateway.listen, flow.chat("bronze", n=n)) for n in range(30)]
        return {status for status, _ in await asyncio.gather(*asked)}

    assert asyncio.run(load()) == {200}
    assert engine.most == 1
    flow.wait_empty(gateway)


def test_bypass_is_never_held_and_takes_nobodys_share(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    engine = Engine()
    stub.script(engine)
    gateway = start(config(limited(stub, 2)))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(gateway.connect()) for _ in range(9)]
        for client in clients[:8]:
            client.send(request_bytes("POST", PATH, [], flow.body()))
        wait.until(lambda: engine.running == 8, what="bypass exceeds the limit")
        clients[8].send(flow.chat("bronze"))
        wait.until(lambda: engine.running == 9, what="who opts in gets a part all the same")
        engine.let_all()
        assert {client.response("POST").status for client in clients} == {200}
    flow.wait_empty(gateway)


def test_one_queued_request_costs_one_outcome_whatever_happens(start: Start, stubs: Stubs) -> None:
    """Its endpoint goes away by a reload while it waits, and another one serves it."""
    old, new = stubs(), stubs()
    gateway = start(config(limited(old, 1)))
    new.respond(flow.ANSWER)
    before = gateway.metrics()
    with flow.full(gateway, old), gateway.connect() as client:
        client.send(flow.chat("gold"))
        flow.wait_queued(gateway, 1)
        gateway.reload(config(limited(new, 1)))
        assert client.response("POST").status == 200
        assert len(new.requests) == 1
    flow.wait_empty(gateway)
    assert sum(outcome_delta(before, gateway.metrics()).values()) == 2


def test_a_deadline_counts_from_the_arrival_and_not_from_the_end_of_the_upload(
    start: Start, stubs: Stubs
) -> None:
    stub = stubs()
    gateway = start(config(stub))
    raw = flow.chat("gold", (b"X-Ciuic-Deadline-Ms", b"300"))
    with gateway.connect() as client:
        client.send(raw[:-5])
        time.sleep(0.6)
        client.send(raw[-5:])
        refused = client.response("POST")
    assert assert_openai_error(refused, 429)["code"] == "deadline_infeasible"
    assert stub.requests == []


@pytest.mark.parametrize(("status", "grows"), [("200 OK", True), ("400 Bad Request", False)])
async def test_only_good_answers_teach_the_limit(
    start: Start, stubs: Stubs, status: str, grows: bool
) -> None:
    """Errors come at once: a limit that learnt from them would open the gates."""
    stub = stubs()
    engine = Engine(response_bytes(flow.ANSWER_BODY, status), pause_s=0.02)
    engine.let_all()
    stub.script(engine)
    gateway = start(config(stub))

    async def client() -> None:
        for _ in range(10):
            await flow.ask(gateway.listen, flow.chat("gold"))

    await asyncio.gather(*(client() for _ in range(24)))
    limit = gateway.state()["flow"]["endpoints"][0]["limit_requests"]
    assert (limit > 8) == grows
