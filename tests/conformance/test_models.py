"""Several upstreams with models: a request goes where its model is, and nowhere else."""

import json
from collections.abc import Iterator

import pytest
from support import wait
from support.errors import assert_openai_error
from support.gateway import Gateway, Start, config
from support.upstream import Exchange, Stubs, Upstream
from support.wire import Message, chunk, chunked, request_bytes, response_bytes

SLOW_PROBES = {"interval_s": 60, "fail_threshold": 3}
QUICK_PROBES = {"interval_s": 0.1, "timeout_s": 0.5, "fail_threshold": 2, "recover_threshold": 2}


def is_up(gateway: Gateway, stub: Upstream) -> bool:
    return gateway.metrics().total("ciuicflow_endpoint_up", endpoint=stub.name) == 1


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
