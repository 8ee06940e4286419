"""Several upstreams: which one a request goes to, and what an upstream must do to be avoided."""

import json
from collections.abc import Callable, Iterator

import pytest
from support import wait
from support.errors import assert_openai_error
from support.gateway import Gateway, Start, config, now
from support.upstream import Exchange, Stubs, Upstream, hold, refusing_port, silent_port
from support.wire import SSE_HEAD, Message, chunk, chunked, request_bytes, response_bytes

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


# -- models ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _model_pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Gateway, Upstream, Upstream]]:
    with Upstream() as alpha, Upstream() as beta:
        entries = [{"url": alpha.url, "models": ["alpha"]}, {"url": beta.url, "models": ["beta"]}]
        with Gateway(config(*entries), tmp_path_factory.mktemp("gateway")) as gateway:
            yield gateway, alpha, beta


@pytest.fixture
def model_pair(
    _model_pair: tuple[Gateway, Upstream, Upstream],
) -> tuple[Gateway, Upstream, Upstream]:
    """A gateway with an upstream for the model alpha and one for beta."""
    for stub in _model_pair[1:]:
        stub.reset()
    return _model_pair


def completion(gateway: Gateway, body: bytes, *, in_chunks: bool = False) -> Message:
    with gateway.connect() as client:
        if in_chunks:
            client.send(
                request_bytes("POST", "/v1/chat/completions", [(b"Transfer-Encoding", b"chunked")])
            )
            client.drip([chunk(body[:9]), chunked(body[9:])], gap_s=0.02)
        else:
            client.send(request_bytes("POST", "/v1/chat/completions", body=body))
        return client.response("POST")


BODIES = {
    "compact": b'{"model":"beta","stream":true}',
    "spread": b'\n{ "stream" : true,\r\n\t"model"  :  "beta"\n}\n',
    "last of a long body": b'{"messages":[{"content":"' + b"x" * 500_000 + b'"}],"model":"beta"}',
    "nested first": b'{"metadata":{"model":"alpha"},"tools":[{"model":"alpha"}],"model":"beta"}',
    "escaped": b'{"m\\u006fdel":"b\\u0065ta"}',
    "beside strings that look like it": b'{"prompt":"\\"model\\":\\"alpha\\"","model":"beta"}',
}


@pytest.mark.parametrize("in_chunks", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("case", BODIES)
def test_a_request_goes_where_its_model_is_with_its_body_untouched(
    model_pair: tuple[Gateway, Upstream, Upstream], case: str, in_chunks: bool
) -> None:
    gateway, alpha, beta = model_pair
    assert completion(gateway, BODIES[case], in_chunks=in_chunks).status == 200
    assert beta.request.body == BODIES[case]
    assert alpha.requests == []


@pytest.mark.line(35)
@pytest.mark.parametrize("model", ["gamma", "", "ALPHA", "alpha ", 'é"\\\n', "x" * 5000])
def test_an_unknown_model_is_a_404(
    model_pair: tuple[Gateway, Upstream, Upstream], model: str
) -> None:
    gateway, alpha, beta = model_pair
    answer = completion(gateway, json.dumps({"model": model}).encode())
    assert assert_openai_error(answer, 404)["code"] == "model_not_found"
    assert alpha.requests + beta.requests == []


def test_the_connection_goes_on_after_a_404(
    model_pair: tuple[Gateway, Upstream, Upstream],
) -> None:
    gateway, _, beta = model_pair
    with gateway.connect() as client:
        for _ in range(3):
            assert client.exchange("POST", "/", body=b'{"model":"gamma"}').status == 404
            assert client.exchange("POST", "/", body=b'{"model":"beta"}').status == 200
    assert len(beta.requests) == 3


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b'"alpha"', b"{}", b'{"model":null}', b'{"model":7}', b"\xff"]
)
def test_a_body_without_a_model_is_for_an_upstream_to_judge(
    model_pair: tuple[Gateway, Upstream, Upstream], body: bytes
) -> None:
    gateway, alpha, beta = model_pair
    assert completion(gateway, body).status == 200
    assert [request.body for request in alpha.requests + beta.requests] == [body]


def test_a_model_in_the_path_is_found(model_pair: tuple[Gateway, Upstream, Upstream]) -> None:
    gateway, alpha, beta = model_pair
    for _ in range(4):
        assert gateway.fetch("GET", "/v1/models/beta", ((b"X-Test", b"1"),)).status == 200
    assert (len(alpha.requests), len(beta.requests)) == (0, 4)


def test_the_model_list_is_the_union_with_every_field_kept(start: Start, stubs: Stubs) -> None:
    alpha, beta = stubs(), stubs()
    one = {"id": "alpha", "object": "model", "max_model_len": 4096, "permission": [{"x": None}]}
    both = {"id": "shared", "object": "model", "owned_by": "vllm"}
    two = {"id": "深度/beta:v1", "created": 1.5, "meta": {"n_params": 12345678901234567890}}
    alpha.model_list = json.dumps({"object": "list", "data": [one, both]}).encode()
    beta.model_list = json.dumps({"object": "list", "data": [both, two]}).encode()
    gateway = start(config(alpha, beta, health=QUICK_PROBES))
    answer = gateway.fetch("GET", "/v1/models", ((b"Authorization", b"Bearer k"),))
    assert answer.status == 200
    assert (answer.get("content-type") or b"").startswith(b"application/json")
    listing = json.loads(answer.body)
    assert listing["object"] == "list"
    assert sorted(listing["data"], key=lambda m: str(m["id"])) == [one, both, two]
    beta.stop_listening()
    beta.drop_connections()
    assert json.loads(gateway.fetch("GET", "/v1/models").body)["data"] == [one, both]


def test_the_model_list_of_a_single_upstream_is_untouched(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    odd = b' {"data" : [ {"id":"a"} ,{"id":"a"}], "x": 1e400}\n'
    stub.respond(response_bytes(odd, headers=[(b"Content-Type", b"application/json; odd")]))
    answer = start(config(stub)).fetch("GET", "/v1/models", ((b"X-Test", b"1"),))
    assert answer.body == odd
    assert answer.get("content-type") == b"application/json; odd"


def test_models_are_read_from_the_upstreams_and_followed(start: Start, stubs: Stubs) -> None:
    alpha, beta = stubs(models=("alpha",)), stubs(models=("beta",))
    gateway = start(config(alpha, beta, health=QUICK_PROBES))
    assert completion(gateway, b'{"model":"beta"}').status == 200
    assert len(beta.requests) == 1
    assert completion(gateway, b'{"model":"gamma"}').status == 404
    alpha.models = ("alpha", "gamma")
    wait.until(lambda: completion(gateway, b'{"model":"gamma"}').status == 200)
    assert len(alpha.requests) == 1


def test_a_known_model_whose_endpoint_is_gone_is_a_503_and_no_404(
    start: Start, stubs: Stubs
) -> None:
    alpha, beta = stubs(models=("alpha",)), stubs(models=("beta",))
    gateway = start(config(alpha, beta, health=QUICK_PROBES))
    beta.stop_listening()
    beta.drop_connections()
    assert_openai_error(completion(gateway, b'{"model":"beta"}'), 503)
    wait.until(lambda: not is_up(gateway, beta))
    assert_openai_error(completion(gateway, b'{"model":"beta"}'), 503)
    assert alpha.requests == []


@pytest.mark.line(3, 22)
def test_a_second_try_goes_only_where_the_model_is(start: Start, stubs: Stubs) -> None:
    """The pooled connection is dead, and the endpoint, too, when it is tried again."""

    def die_when_reused(exchange: Exchange) -> None:
        if len(exchange.connection.requests) > 1:
            beta.stop_listening()
            exchange.close()
        exchange.send(response_bytes())

    alpha, beta = stubs(), stubs()
    entries = [{"url": alpha.url, "models": ["alpha"]}, {"url": beta.url, "models": ["beta"]}]
    gateway = start(config(*entries, health=SLOW_PROBES))
    beta.script(die_when_reused)
    assert completion(gateway, b'{"model":"beta"}').status == 200
    assert completion(gateway, b'{"model":"beta"}').status in (502, 503)
    assert alpha.requests == []


@pytest.mark.line(18)
def test_bodies_held_for_their_model_are_bounded(start: Start, stubs: Stubs) -> None:
    """Halves of bodies wait here; what does not fit is refused, and what fits is served after."""
    alpha, beta = stubs(models=("alpha",)), stubs(models=("beta",))
    gateway = start(config(alpha, beta, limits={"buffered_bytes": 4_000_000}))
    before = gateway.rss_bytes()
    clients = [gateway.connect() for _ in range(10)]
    for client in clients:
        head = request_bytes("POST", "/v1/embeddings", [(b"Content-Length", b"2000000")])
        client.send_ignoring_close(head + b" " * 1_900_000)
    statuses = []
    for client in clients:
        client.sock.settimeout(0.3)
        try:
            statuses.append(client.response("POST").status)
        except TimeoutError:
            pass  # one that fits waits for its rest
    assert statuses == [503] * 8
    for client in clients:
        client.close()
    gateway.wait_idle()
    assert gateway.rss_bytes() - before < 20_000_000
    assert completion(gateway, b'{"model":"beta"}' + b" " * 3_000_000).status == 200
