"""Opting in: what it takes, what it changes, who is who, and every refusal's shape."""

import asyncio
import hashlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import flow, wait
from support.errors import assert_openai_error
from support.flow import OPT_IN, PATH, Engine, limited
from support.gateway import Gateway, Start, config
from support.upstream import Stubs, Upstream
from support.wire import Headers, Message, message_bytes, request_bytes, response_bytes

OURS = {b"x-ciuic-flow", b"x-ciuic-tier", b"x-ciuic-request-id", b"x-ciuic-queue-ms"}


def ours(answer: Message) -> set[bytes]:
    return {name.lower() for name, _ in answer.headers if name.lower().startswith(b"x-ciuic-")}


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


BYPASS: dict[str, Headers] = {
    "no field": [(b"X-Ciuic-Tier", b"gold"), (b"X-Ciuic-Deadline-Ms", b"5")],
    "disabled": [(b"X-Ciuic-Flow", b"disabled"), (b"X-Ciuic-Tier", b"gold")],
    "empty": [(b"X-Ciuic-Flow", b"")],
    "true": [(b"x-ciuic-flow", b"true")],
    "more than the word": [(b"X-Ciuic-Flow", b"enabled, enabled")],
    "quoted": [(b"X-Ciuic-Flow", b'"enabled"')],
    "with a parameter": [(b"X-Ciuic-Flow", b"enabled;q=1")],
    "a longer word": [(b"X-Ciuic-Flow", b"enabledx")],
    "one of two": [OPT_IN, (b"X-Ciuic-Flow", b"disabled")],
    "the other of two": [(b"X-Ciuic-Flow", b"no"), OPT_IN],
    "a longer name": [(b"X-Ciuic-Flow-", b"enabled")],
    "a name with a prefix": [(b"X-X-Ciuic-Flow", b"enabled")],
    "in a value": [(b"X-Note", b"X-Ciuic-Flow: enabled")],
}


@pytest.mark.parametrize("fields", BYPASS.values(), ids=BYPASS)
def test_anything_else_is_bypass_and_travels_unchanged(
    gateway: Gateway, upstream: Upstream, fields: Headers
) -> None:
    raw = request_bytes("POST", PATH, [*fields, (b"x-CIUIC-other", b" a  b ")], flow.body())
    with gateway.connect() as client:
        client.send(raw)
        answer = client.response("POST")
    assert upstream.received == raw
    assert ours(answer) == set()
    assert answer.status == 200


OPTING = {
    "as documented": [OPT_IN],
    "other case": [(b"x-ciuic-flow", b"ENABLED")],
    "odd case": [(b"X-CIUIC-FLOW", b"eNaBlEd")],
    "spaces around": [(b"X-Ciuic-Flow", b"  enabled \t")],
    "twice": [OPT_IN, (b"x-ciuic-flow", b"Enabled")],
}


@pytest.mark.parametrize("fields", OPTING.values(), ids=OPTING)
@pytest.mark.parametrize("method", ["POST", "GET", "HEAD", "OPTIONS", "DELETE", "PUT"])
def test_the_value_opts_in_in_any_case_of_letters(
    gateway: Gateway, upstream: Upstream, fields: Headers, method: str
) -> None:
    if method in ("HEAD",):
        upstream.respond(message_bytes(b"HTTP/1.1 200 OK", [(b"Content-Length", b"2")]))
    body = flow.body() if method in ("POST", "PUT") else None
    with gateway.connect() as client:
        answer = client.exchange(method, PATH, fields, body)
    assert ours(answer) == OURS
    assert answer.get("x-ciuic-tier") == b"silver"
    assert answer.get("x-ciuic-flow") == b"enabled"
    assert (answer.get("x-ciuic-queue-ms") or b"").isdigit()
    assert upstream.request.body == (body or b"")
    assert not [name for name, _ in upstream.request.headers if name.lower().startswith(b"x-ciuic")]


def test_only_the_gateways_own_fields_are_taken_out(gateway: Gateway, upstream: Upstream) -> None:
    around = [
        (b"aCCept", b"  text/event-stream "),
        (b"X-Dup", b"1"),
        (b"Authorization", b"Bearer sk-1"),
        (b"x-dup", b"2"),
        (b"X-Ciui", b"not ours"),
        (b"XX-Ciuic-Tier", b"not ours"),
        (b"traceparent", b"00-1-2-3"),
        (b"X-Request-Id", b"\xe4\xb8\xad"),
    ]
    mixed: Headers = []
    for number, field in enumerate(around):
        mixed += [(b"X-Ciuic-%d" % number, b"x"), field]
    mixed += [OPT_IN, (b"x-ciuic-tier", b"gold"), (b"X-CIUIC-DEADLINE-MS", b"9000")]
    body = b' {"model" : "\xe6\xb7\xb1",\r\n"stream":false }\n'
    with gateway.connect() as client:
        client.send(request_bytes("POST", PATH, mixed, body))
        assert client.response("POST").status == 200
    assert upstream.received == request_bytes("POST", PATH, around, body)


def test_the_answers_bytes_are_the_upstreams_with_four_fields_more(
    gateway: Gateway, upstream: Upstream
) -> None:
    fields = [(b"x-ODD", b"1"), (b"Set-Cookie", b"a"), (b"X-Odd", b"2"), (b"set-cookie", b"b")]
    upstream.respond(response_bytes(b'{"a": 1}', "200 Very Fine", fields))
    with gateway.connect() as client:
        answer = client.exchange("POST", PATH, flow.headers("gold"), flow.body())
    assert answer.start == b"HTTP/1.1 200 Very Fine"
    assert answer.body == b'{"a": 1}'
    theirs = [field for field in answer.headers if field[0].lower() not in OURS]
    assert theirs == [*fields, (b"Content-Length", b"8")]


def test_request_ids_differ_and_are_in_the_log(gateway: Gateway, upstream: Upstream) -> None:
    with gateway.connect() as client:
        ids = {
            (client.exchange("POST", PATH, flow.headers(), flow.body()).get("x-ciuic-request-id"))
            for _ in range(20)
        }
    assert len(ids) == 20
    wanted = {str(id_, "ascii") for id_ in ids if id_ is not None}
    wait.until(lambda: wanted <= {r.get("request_id") for r in gateway.log_records()})


GARBAGE_TIERS = [
    b"",
    b"platinum",
    b"gold,silver",
    b"0",
    b"-1",
    b"\xff\xfe",
    b"gold\x00"[:4] + b"\xa0",
    b"x" * 5000,
    b"{}",
    b"../gold",
    "gold\u3000".encode(),
]


@pytest.mark.parametrize("tier", GARBAGE_TIERS, ids=range(len(GARBAGE_TIERS)))
def test_a_tier_that_is_none_counts_as_the_default(
    gateway: Gateway, upstream: Upstream, tier: bytes
) -> None:
    fields = [OPT_IN, (b"X-Ciuic-Tier", tier)]
    answer = gateway.fetch("POST", PATH, tuple(fields), flow.body())
    assert (answer.status, answer.get("x-ciuic-tier")) == (200, b"silver")


@pytest.mark.parametrize("tier", [b"gold", b"GOLD", b" Gold ", b"bronze", b"silver"])
def test_a_tier_is_found_in_any_case_of_letters(
    gateway: Gateway, upstream: Upstream, tier: bytes
) -> None:
    answer = gateway.fetch("POST", PATH, (OPT_IN, (b"X-Ciuic-Tier", tier)), flow.body())
    assert answer.get("x-ciuic-tier") == tier.strip().lower()


DEADLINES = [
    *(b"", b"0", b"-1", b"+5", b"1.5", b"1e3", b"0x10", b"abc", b"86400001", b"9" * 400, b"NaN"),
    *(b"1 000", b"\xb2", b"\xd9\xa1", b"5ms", b"-0", b"inf"),
]


@pytest.mark.parametrize("deadline", DEADLINES, ids=range(len(DEADLINES)))
def test_a_deadline_that_is_none_is_ignored(
    gateway: Gateway, upstream: Upstream, deadline: bytes
) -> None:
    fields = (OPT_IN, (b"X-Ciuic-Deadline-Ms", deadline))
    assert gateway.fetch("POST", PATH, fields, flow.body()).status == 200


BODIES: dict[str, bytes] = {
    "no JSON": b"hello",
    "cut off": b'{"model":"a"',
    "a list": b"[1,2]",
    "null": b"null",
    "a number": b"1e999",
    "nested": b"[" * 100_000,
    "deep object": b'{"model":' * 20_000,
    "not UTF-8": b'{"model":"\xff\xfe"}',
    "a lone surrogate": b'{"model":"\\ud800","user":"\\udfff"}',
    "a NUL": b'{"model":"\\u0000","user":"\\u0000\\u2028\\n"}',
    "model of a wrong type": b'{"model":{"a":[]},"user":7,"user_id":[],"max_tokens":"9"}',
    "huge max_tokens": b'{"max_tokens":' + b"9" * 5000 + b"}",
    "larger max_tokens": b'{"max_tokens":' + b"9" * 400 + b"}",
    "large max_tokens": b'{"max_tokens":18446744073709551616,"max_completion_tokens":1e308}',
    "negative max_tokens": b'{"max_tokens":-9223372036854775808,"stream":true}',
    "float max_tokens": b'{"max_tokens":1e400}',
    "zero max_tokens": b'{"max_tokens":0}',
    "no number": b'{"max_tokens":NaN}',
    "repeated keys": b'{"model":"a","model":5,"user":"x","user":null}',
    "huge user": b'{"user":"' + b"u" * 500_000 + b'"}',
    "a byte order mark": b'\xef\xbb\xbf{"model":"a"}',
    "UTF-16": '{"model":"a"}'.encode("utf-16"),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("answer", [flow.ANSWER, flow.stream(flow.delta(content="a"))])
def test_no_body_makes_the_gateway_fail(
    gateway: Gateway, upstream: Upstream, body: bytes, answer: bytes
) -> None:
    upstream.respond(answer)
    assert gateway.fetch("POST", PATH, tuple(flow.headers("gold")), body).status == 200
    assert upstream.request.body == body
    flow.wait_empty(gateway)


USAGES = [
    {"prompt_tokens": -5, "completion_tokens": -7},
    {"prompt_tokens": 10**300, "completion_tokens": 10**400},
    {"prompt_tokens": 1, "completion_tokens": 2, "prompt_cache_hit_tokens": 10**25},
    {"prompt_tokens": 1e300, "completion_tokens": 5},
    {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": -9}},
    {"prompt_tokens": True, "completion_tokens": []},
]


@pytest.mark.parametrize("usage", USAGES, ids=range(len(USAGES)))
@pytest.mark.parametrize("streamed", [True, False])
def test_no_usage_makes_a_counter_fall_or_the_gateway_fail(
    gateway: Gateway, upstream: Upstream, usage: dict[str, Any], streamed: bool
) -> None:
    body = json.dumps({"choices": [], "usage": usage}).encode()
    json_type = [(b"Content-Type", b"application/json")]
    upstream.respond(flow.stream(body) if streamed else response_bytes(body, headers=json_type))
    before = gateway.metrics().total("ciuicflow_tokens_total")
    assert gateway.fetch("POST", PATH, tuple(flow.headers()), flow.body()).status == 200
    flow.wait_empty(gateway)
    assert gateway.admin_get("/metrics").status == 200
    after = gateway.metrics().total("ciuicflow_tokens_total")
    assert before <= after < 1e15


@pytest.mark.line(35)
@pytest.mark.parametrize("status", [400, 401, 402, 422, 429, 500, 503])
@pytest.mark.parametrize("streamed", [True, False])
def test_an_upstreams_errors_pass_verbatim_and_are_not_retried(
    gateway: Gateway, upstream: Upstream, status: int, streamed: bool
) -> None:
    body = b'{"error":{"message":"\xe6\xb7\xb1 %d"}}\n' % status
    fields = [(b"Content-Type", b"application/json"), (b"Retry-After", b"7"), (b"X-Own", b"1")]
    upstream.respond(response_bytes(body, f"{status} Because", fields))
    answer = gateway.fetch("POST", PATH, tuple(flow.headers()), flow.body(stream=streamed))
    assert (answer.status, answer.body) == (status, body)
    assert answer.start.endswith(b" Because")
    assert answer.all("retry-after") == [b"7"]
    assert len(upstream.requests) == 1
    flow.wait_empty(gateway)


# Who is who.

KEYS = {
    "tenants": [
        {"name": "acme", "keys_sha256": [sha256("sk-acme"), sha256("sk-acme-2")]},
        {"name": "small", "keys_sha256": [sha256("sk-small")], "tiers": ["bronze", "silver"]},
        {"name": "slow", "keys_sha256": [sha256("sk-slow")], "tiers": ["bronze"]},
    ],
    "unknown_keys": {"accept": True, "tiers": ["silver", "bronze"]},
}


def bearer(key: str) -> tuple[bytes, bytes]:
    return (b"Authorization", b"Bearer " + key.encode())


@pytest.mark.parametrize(
    ("key", "asked", "got"),
    [
        (bearer("sk-acme"), "gold", b"gold"),
        (bearer("sk-acme-2"), "bronze", b"bronze"),
        (bearer("sk-acme"), None, b"silver"),
        ((b"x-api-key", b"sk-acme"), "gold", b"gold"),
        ((b"authorization", b"bearer  sk-acme "), "gold", b"gold"),
        (bearer("sk-small"), "gold", b"silver"),
        (bearer("sk-small"), "bronze", b"bronze"),
        (bearer("sk-slow"), "gold", b"bronze"),
        (bearer("sk-slow"), "nonsense", b"bronze"),
        (bearer("sk-other"), "gold", b"silver"),
        (bearer("sk-acm"), "gold", b"silver"),
        (bearer("sk-acmee"), "gold", b"silver"),
        ((b"Authorization", b"Basic sk-acme"), "gold", b"silver"),
        ((b"Authorization", b"sk-acme"), "gold", b"silver"),
        (bearer(sha256("sk-acme")), "gold", b"silver"),
        ((b"X-None", b""), "gold", b"silver"),
    ],
)
def test_a_tier_is_clamped_to_what_the_key_may_use(
    keyed: Gateway, key: tuple[bytes, bytes], asked: str | None, got: bytes
) -> None:
    answer = keyed.fetch("POST", PATH, tuple(flow.headers(asked, key)), flow.body())
    assert (answer.status, answer.get("x-ciuic-tier")) == (200, got)


@pytest.fixture(scope="module")
def keyed(module_stub: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = config(module_stub, flow=KEYS, trusted_peers=["127.0.0.1/32", "10.0.0.0/8"])
    with Gateway(settings, tmp_path_factory.mktemp("keyed")) as gateway:
        yield gateway


def forwarded(*values: bytes) -> Headers:
    return [(b"X-Forwarded-For", value) for value in values]


TENANTS: dict[str, tuple[Headers, dict[str, Any], str]] = {
    "the key": ([bearer("sk-acme")], {"user": "x"}, "key:acme"),
    "user_id before user": ([], {"user_id": "u", "user": "v"}, "user:u"),
    "user": ([bearer("sk-unknown")], {"user": "v"}, "user:v"),
    "a user who calls itself a key": ([], {"user": "key:acme"}, "user:key:acme"),
    "no text": ([], {"user_id": 7}, "address:127.0.0.1"),
    "the address": ([], {}, "address:127.0.0.1"),
    "forwarded": (forwarded(b"192.0.2.7"), {}, "address:192.0.2.7"),
    "the last that is not trusted": (
        forwarded(b"192.0.2.1, 192.0.2.2,10.0.0.9"),
        {},
        "address:192.0.2.2",
    ),
    "in two fields": (forwarded(b"192.0.2.1", b"192.0.2.3, 10.1.1.1"), {}, "address:192.0.2.3"),
    "all trusted": (forwarded(b"10.0.0.1, 10.0.0.2"), {}, "address:10.0.0.1"),
}


@pytest.mark.parametrize(("fields", "body", "tenant"), TENANTS.values(), ids=TENANTS)
def test_the_tenant_is_the_key_else_the_bodys_user_else_the_address(
    keyed: Gateway, fields: Headers, body: dict[str, Any], tenant: str
) -> None:
    answer = keyed.fetch("POST", PATH, tuple(flow.headers(None, *fields)), flow.body(**body))
    id_ = (answer.get("x-ciuic-request-id") or b"").decode()
    records = [r for r in keyed.log_records() if r.get("request_id") == id_]
    wait.until(lambda: any(r.get("request_id") == id_ for r in keyed.log_records()))
    records = [r for r in keyed.log_records() if r.get("request_id") == id_]
    assert [record["tenant"] for record in records] == [tenant]


def test_forwarded_addresses_of_strangers_are_not_believed(
    gateway: Gateway, upstream: Upstream
) -> None:
    fields = flow.headers(None, *forwarded(b"192.0.2.7"))
    answer = gateway.fetch("POST", PATH, tuple(fields), flow.body())
    id_ = (answer.get("x-ciuic-request-id") or b"").decode()
    wait.until(lambda: any(r.get("request_id") == id_ for r in gateway.log_records()))
    found = [r["tenant"] for r in gateway.log_records() if r.get("request_id") == id_]
    assert found == ["address:127.0.0.1"]


@pytest.mark.line(35)
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_unknown_keys_are_refused_where_that_is_configured(
    start: Start, stubs: Stubs, method: str
) -> None:
    stub = stubs()
    tenants = [{"name": "acme", "keys_sha256": [sha256("sk-acme")]}]
    settings = {"tenants": tenants, "unknown_keys": {"accept": False}}
    gateway = start(config(stub, flow=settings))
    body = flow.body() if method == "POST" else None
    for key in (bearer("sk-no"), (b"X-Api-Key", b""), (b"X-None", b"1")):
        refused = gateway.fetch(method, PATH, tuple(flow.headers("gold", key)), body)
        assert assert_openai_error(refused, 401)["code"] == "invalid_api_key"
    assert stub.requests == []
    known = gateway.fetch(method, PATH, tuple(flow.headers("gold", bearer("sk-acme"))), body)
    assert known.status == 200
    assert gateway.fetch(method, PATH, (bearer("sk-no"),), body).status == 200  # bypass
    counted = gateway.metrics()
    refused_count = counted.total(
        "ciuicflow_requests_total", flow="enabled", outcome="unknown_key", code="401"
    )
    assert refused_count == 3, "opted-in requests are counted as such"
    assert counted.total("ciuicflow_requests_total", flow="bypass") == 1


@pytest.mark.line(17, 35)
def test_an_unknown_key_is_refused_before_100_continue(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(stub, flow={"unknown_keys": {"accept": False}}))
    with gateway.connect() as client:
        fields = flow.headers(None, (b"Expect", b"100-continue"), (b"Content-Length", b"900000"))
        client.send(request_bytes("POST", PATH, fields))
        answer = client.response("POST")
    assert (answer.status, answer.informational) == (401, [])


@pytest.mark.line(35)
def test_an_unknown_model_is_refused_before_it_queues(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config({"url": stub.url, "models": ["known"]}))
    refused = gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body(model="other"))
    error = assert_openai_error(refused, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert ours(refused) == OURS
    assert refused.get("retry-after") is None
    assert (
        gateway.fetch("POST", PATH, tuple(flow.headers()), flow.body(model="known")).status == 200
    )
    flow.wait_empty(gateway)


@pytest.mark.line(35)
def test_no_endpoint_is_a_503_that_says_when_to_come_back(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(stub))
    stub.close()
    refused = gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body())
    assert assert_openai_error(refused, 503)["code"] == "no_endpoint"
    assert int(refused.get("retry-after") or b"0") >= 1
    assert ours(refused) == OURS
    flow.wait_empty(gateway)
    stub.listen()


@pytest.mark.line(35)
def test_a_full_queue_is_a_429_that_says_when_to_come_back(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 1), flow={"queue_entries": 2}))
    with flow.full(gateway, stub) as engine, gateway.connect() as a, gateway.connect() as b:
        a.send(flow.chat("bronze"))
        b.send(flow.chat("bronze"))
        flow.wait_queued(gateway, 2)
        refused = gateway.fetch("POST", PATH, tuple(flow.headers("bronze")), flow.body())
        assert assert_openai_error(refused, 429)["code"] == "queue_full"
        assert 1 <= int(refused.get("retry-after") or b"0") <= 60
        with gateway.connect() as gold:
            gold.send(flow.chat("gold", user="another"))
            displaced = b.response("POST")  # the newest of the lowest tier
            assert assert_openai_error(displaced, 429)["code"] == "displaced"
            assert int(displaced.get("retry-after") or b"0") >= 1
            engine.let_all()
            assert gold.response("POST").status == 200
        assert a.response("POST").status == 200
    flow.wait_empty(gateway)
    counted = gateway.metrics().outcomes()
    assert counted == {"completed": 3, "queue_full": 1, "displaced": 1}


@pytest.mark.line(35)
def test_a_deadline_that_passes_in_the_queue_is_a_504(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(limited(stub, 1)))
    with flow.full(gateway, stub) as engine:
        late = flow.headers("gold", (b"X-Ciuic-Deadline-Ms", b"300"))
        missed = gateway.fetch("POST", PATH, tuple(late), flow.body())
        assert assert_openai_error(missed, 504)["code"] == "queue_timeout"
        assert int(missed.get("x-ciuic-queue-ms") or b"0") >= 200
        with gateway.connect() as waits:
            waits.send(flow.chat("silver"))
            flow.wait_queued(gateway, 1)
            engine.let_all()
            assert waits.response("POST").status == 200
    flow.wait_empty(gateway)
    assert len(stub.requests) == 2


@pytest.mark.line(35)
def test_an_infeasible_deadline_is_refused_at_once(start: Start, stubs: Stubs) -> None:
    """Once it is known how fast the queue drains."""
    stub = stubs()
    engine = Engine(pause_s=0.03)
    engine.let_all()
    stub.script(engine)
    gateway = start(config(limited(stub, 1)))

    async def load() -> tuple[int, bytes]:
        async with asyncio.TaskGroup() as group:
            for _ in range(60):
                group.create_task(flow.ask(gateway.listen, flow.chat("bronze")))
            await asyncio.sleep(0.6)
            deadline = (b"X-Ciuic-Deadline-Ms", b"100")
            return await flow.ask(gateway.listen, flow.chat("bronze", deadline))

    status, raw = asyncio.run(load())
    assert status == 429
    assert b'"deadline_infeasible"' in raw
    fields = raw.lower().split(b"\r\n")
    assert b"x-ciuic-queue-ms: 0" in fields
    (retry_after,) = [line for line in fields if line.startswith(b"retry-after: ")]
    assert 1 <= int(retry_after[13:]) <= 60
    flow.wait_empty(gateway)


FIELD_VALUES = st.binary(max_size=40).filter(lambda value: not set(value) & set(b"\r\n\x00"))


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tiers=st.lists(FIELD_VALUES, max_size=2),
    deadlines=st.lists(st.integers().map(lambda n: b"%d" % n) | FIELD_VALUES, max_size=2),
    keys=st.lists(FIELD_VALUES, max_size=2),
    body=st.binary(max_size=60) | st.sampled_from(list(BODIES.values())),
)
def test_no_field_and_no_body_makes_the_gateway_fail(
    module_gateway: Gateway,
    module_stub: Upstream,
    tiers: list[bytes],
    deadlines: list[bytes],
    keys: list[bytes],
    body: bytes,
) -> None:
    module_stub.respond(flow.ANSWER)
    fields = [
        OPT_IN,
        *((b"X-Ciuic-Tier", value) for value in tiers),
        *((b"X-Ciuic-Deadline-Ms", value) for value in deadlines),
        *((b"Authorization", b"Bearer " + value) for value in keys),
        *((b"X-Forwarded-For", value) for value in keys),
        *((b"X-Ciuic-" + b"x" * n, value) for n, value in enumerate(keys)),
    ]
    answer = module_gateway.fetch("POST", PATH, tuple(fields), body)
    # 400: bytes that no field may hold; 429, 504: a deadline of a millisecond.
    assert answer.status in (200, 400, 429, 504)
    if answer.status == 200:
        assert answer.get("x-ciuic-tier") in (b"gold", b"silver", b"bronze")


def test_what_callers_send_never_becomes_a_label(gateway: Gateway, upstream: Upstream) -> None:
    for tier in GARBAGE_TIERS:
        gateway.fetch("POST", PATH, (OPT_IN, (b"X-Ciuic-Tier", tier)), flow.body(user="mallory"))
    samples = gateway.metrics().samples
    tiers = {labels["tier"] for _, labels, _ in samples if "tier" in labels}
    assert tiers <= {"gold", "silver", "bronze", "none"}
    assert "mallory" not in gateway.metrics().text
