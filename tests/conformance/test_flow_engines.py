"""What engines are told and asked: priorities on requests, reports between them."""

import json
import time

import pytest
from support import flow, wait
from support.flow import PATH, TIERS, limited
from support.gateway import Start, config
from support.upstream import Exchange, Stubs, Upstream, refusing_port
from support.wire import chunked, request_bytes

CHUNKED = (b"Transfer-Encoding", b"chunked")
LOWER = {"gold": 0, "silver": 1, "bronze": 2}
HIGHER = {"gold": 2, "silver": 1, "bronze": 0}


def with_engine(stub: Upstream, engine: str, **more: object) -> dict[str, object]:
    return {"url": stub.url, "engine": engine, "send_priority": True, **more}


@pytest.mark.parametrize("routing", ["round_robin", "least_load"])
def test_opted_in_requests_take_turns_where_all_have_room(
    start: Start, stubs: Stubs, routing: str
) -> None:
    first, second = stubs(), stubs()
    gateway = start(config(first, second, routing=routing))
    for _ in range(6):
        assert gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body()).status == 200
    assert (len(first.requests), len(second.requests)) == (3, 3)


def test_a_reload_of_the_routing_reaches_opted_in_requests(start: Start, stubs: Stubs) -> None:
    first, second = stubs(), stubs()
    gateway = start(config(first, second, routing="least_load"))
    gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body())
    gateway.reload(config(first, second, routing="round_robin"))
    wait.until(lambda: gateway.state()["routing"] == "round_robin")
    gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body())
    reasons = ["least_load=0.00", "round_robin"]
    wait.until(lambda: [line["why"] for line in gateway.log_records() if "why" in line] == reasons)


@pytest.mark.line(33)
@pytest.mark.parametrize(("engine", "wanted"), [("vllm", LOWER), ("sglang", HIGHER)])
def test_a_tier_becomes_the_engines_priority(
    start: Start, stubs: Stubs, engine: str, wanted: dict[str, int]
) -> None:
    stub = stubs()
    gateway = start(config(with_engine(stub, engine)))
    with gateway.connect() as client:
        for tier in TIERS:
            body = flow.body(model="深", n=[1, {"a": "}"}])
            answer = client.exchange("POST", PATH, flow.headers(tier), body)
            assert answer.status == 200
            request = stub.requests[-1]
            assert request.complete
            assert request.all("content-length") == [b"%d" % len(request.body)]
            sent = json.loads(request.body)
            assert sent.pop("priority") == wanted[tier]
            assert sent == json.loads(body)
            assert request.body.startswith(body[:-1]), "nothing else changes"


@pytest.mark.line(33)
def test_the_callers_own_priority_does_not_count(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(with_engine(stub, "vllm")))
    gateway.fetch("POST", PATH, tuple(flow.headers("bronze")), flow.body(priority=-1000))
    assert json.loads(stub.request.body)["priority"] == 2


@pytest.mark.line(33)
@pytest.mark.parametrize("extra", [b"", b"X-Trailer: 1\r\n"])
def test_a_chunked_body_gets_its_priority_in_one_framing(
    start: Start, stubs: Stubs, extra: bytes
) -> None:
    """Content-Length beside Transfer-Encoding would be request smuggling (RFC 9112, 6.3)."""
    stub = stubs()
    gateway = start(config(with_engine(stub, "vllm")))
    coded = chunked(flow.body()[:7], flow.body()[7:])
    if extra:
        coded = coded[:-2] + extra + b"\r\n"
    with gateway.connect() as client:
        client.send(request_bytes("POST", PATH, flow.headers("gold", CHUNKED)) + coded)
        assert client.response("POST").status == 200
        client.send(request_bytes("POST", PATH, flow.headers("gold"), flow.body(second=1)))
        assert client.response("POST").status == 200
    first, second = stub.requests
    framing = first.all("content-length"), first.all("transfer-encoding")
    assert framing == ([b"%d" % len(first.body)], [])
    assert json.loads(first.body) == {**json.loads(flow.body()), "priority": 0}
    assert json.loads(second.body)["second"] == 1


@pytest.mark.line(33)
@pytest.mark.parametrize("case", ["off", "bypass", "no JSON", "GET", "a list"])
def test_other_requests_are_sent_as_they_are(start: Start, stubs: Stubs, case: str) -> None:
    stub = stubs()
    upstream = {"url": stub.url, "engine": "vllm"} if case == "off" else with_engine(stub, "vllm")
    gateway = start(config(upstream))
    body = {"no JSON": b"hello", "a list": b'[{"a":1}]'}.get(case, flow.body())
    fields = () if case == "bypass" else tuple(flow.headers("gold"))
    method = "GET" if case == "GET" else "POST"
    assert gateway.fetch(method, PATH, fields, body).status == 200
    assert stub.request.body == body
    assert stub.request.all("content-length") == [b"%d" % len(body)]


@pytest.mark.line(33)
def test_enrolled_requests_get_no_priority(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(with_engine(stub, "vllm"), flow={"bypass_tier": "bronze"}))
    raw = request_bytes("POST", PATH, [], flow.body())
    with gateway.connect() as client:
        client.send(raw)
        assert client.response("POST").status == 200
    assert stub.received == raw


@pytest.mark.line(3, 33)
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("second", ["vllm", "sglang", "openai"])
def test_a_request_that_is_placed_anew_carries_what_its_second_endpoint_wants(
    start: Start, stubs: Stubs, framing: str, second: str
) -> None:
    """It was made ready for an endpoint that could not be connected to."""
    stub = stubs()
    there = limited(stub, 1, engine=second, send_priority=second != "openai")
    raw = request_bytes("POST", PATH, flow.headers("gold"), flow.body())
    if framing == "chunked":
        raw = request_bytes("POST", PATH, flow.headers("gold", CHUNKED)) + chunked(flow.body())
    with refusing_port() as port:
        dead = {"url": f"http://127.0.0.1:{port}", "engine": "vllm", "send_priority": True}
        gateway = start(config(dead, there))
        with flow.full(gateway, stub) as engine, gateway.connect(timeout_s=3) as client:
            client.send(raw)
            flow.wait_queued(gateway, 1)
            engine.let_all()
            assert client.response("POST").status == 200
        flow.wait_empty(gateway)
        assert gateway.metrics().total("ciuicflow_upstream_failures_total", reason="connect") > 0
    wanted = {"vllm": [0], "sglang": [2], "openai": []}[second]
    for request in stub.requests:
        pairs = json.loads(request.body, object_pairs_hook=list)
        assert [value for name, value in pairs if name == "priority"] == wanted
        has = (len(request.all("content-length")), len(request.all("transfer-encoding")))
        assert has in ((1, 0), (0, 1))


@pytest.mark.line(22, 33)
def test_a_retry_carries_the_same_priority(start: Start, stubs: Stubs) -> None:
    stub = stubs()

    def once(exchange: Exchange) -> None:
        exchange.send(flow.ANSWER)
        time.sleep(0.01)
        exchange.reset()

    stub.script(once)
    gateway = start(config(with_engine(stub, "vllm")))
    with gateway.connect() as client:
        for number in range(20):
            client.send(flow.chat("silver"))
            assert client.response("POST").status == 200
            time.sleep(0.003 * (number % 7))
    assert {request.body for request in stub.requests} == {flow.body()[:-1] + b',"priority":1}'}


# Reports.

VLLM_PAGE = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"


@pytest.mark.line(29)
def test_engines_are_asked_only_while_requests_opt_in(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    stub.page = VLLM_PAGE
    gateway = start(config(stub))
    for _ in range(5):
        gateway.fetch("POST", PATH, (), flow.body())
    time.sleep(1.5)
    assert stub.scrapes == []
    gateway.fetch("POST", PATH, tuple(flow.headers()), flow.body())
    wait.until(lambda: stub.scrapes, 5, "an engine is asked")


@pytest.mark.line(29)
@pytest.mark.parametrize("page", [b"\xff\x00", b"vllm:num_requests_waiting NaN\n" * 9, b"x 1e999"])
def test_no_page_makes_the_gateway_fail(start: Start, stubs: Stubs, page: bytes) -> None:
    stub = stubs()
    stub.page = page
    gateway = start(config({"url": stub.url, "engine": "vllm"}))
    gateway.fetch("POST", PATH, tuple(flow.headers()), flow.body())
    wait.until(lambda: len(stub.scrapes) > 1, 6)
    assert gateway.fetch("POST", PATH, tuple(flow.headers()), flow.body()).status == 200
    flow.wait_empty(gateway)


@pytest.mark.line(29)
def test_a_page_that_hangs_holds_nothing_up(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    stub.hang_scrapes_s = 30
    gateway = start(config(limited(stub, 2)))

    def rate(seconds: float) -> float:
        done, end = 0, time.monotonic() + seconds
        with gateway.connect() as client:
            while time.monotonic() < end:
                client.send(flow.chat("gold"))
                assert client.response("POST").status == 200
                done += 1
        return done / seconds

    before = rate(0.5)
    wait.until(lambda: stub.hanging, 6, "a page hangs")
    assert rate(1.0) > before / 3  # loose: the machine is shared
    wait.until(lambda: len(stub.scrapes) > 1, 6)
    assert len(stub.scrapes) <= 6
    flow.wait_empty(gateway)
