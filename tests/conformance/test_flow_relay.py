"""Opted-in requests are relayed as faithfully as all others, and metered on the way."""

import gzip
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import flow, wait
from support.flow import ANSWER_BODY, OPT_IN, PATH, limited
from support.gateway import LOOPS, Gateway, Start, config, now, outcome_delta
from support.raw import cut
from support.streams import DEEPSEEK, EVENT_STREAMS, SGLANG, VLLM
from support.upstream import Exchange, Stubs, Upstream, hold
from support.wire import (
    LAST_CHUNK,
    SSE_HEAD,
    chunk,
    chunked,
    message_bytes,
    request_bytes,
    response_bytes,
)

CHUNKED = (b"Transfer-Encoding", b"chunked")


def record_of(gateway: Gateway, request_id: bytes | None) -> dict[str, Any]:
    """The log line of a request."""
    wanted = (request_id or b"").decode()

    def found() -> list[dict[str, Any]]:
        return [each for each in gateway.log_records() if each.get("request_id") == wanted]

    wait.until(found, what="the log line")
    (record,) = found()
    return record


# The request.


@pytest.mark.line(14, 16)
@pytest.mark.parametrize("size", [None, 1, 7, 64], ids=["whole", "by 1", "by 7", "by 64"])
def test_pipelined_requests_of_both_kinds_are_answered_in_order(
    gateway: Gateway, upstream: Upstream, size: int | None
) -> None:
    inner = flow.chat("gold")  # a body that looks like a request

    def echo(exchange: Exchange) -> None:
        time.sleep(0.01 if exchange.request.target.endswith((b"0", b"3")) else 0)
        exchange.send(response_bytes(exchange.request.target))

    upstream.script(echo)
    requests = [
        request_bytes("POST", "/0", flow.headers("bronze"), inner),
        request_bytes("POST", "/1", body=inner),
        request_bytes("POST", "/2", flow.headers("gold", CHUNKED)) + chunked(inner, b"\r\n0\r\n"),
        request_bytes("GET", "/3", flow.headers("gold")),
        request_bytes("POST", "/4", flow.headers(), b""),
        request_bytes("PUT", "/5", flow.headers(None, CHUNKED)) + chunked(inner),
        request_bytes("POST", "/6", flow.headers(None, CHUNKED)) + LAST_CHUNK,
        request_bytes("POST", "/7", flow.headers("silver"), inner),
    ]
    whole = b"".join(requests)
    with gateway.connect() as client:
        client.drip([whole] if size is None else cut(whole, itertools.repeat(size)))
        for number in range(len(requests)):
            answer = client.response("POST")
            assert (answer.complete, answer.body) == (True, b"/%d" % number)
            assert (answer.get("x-ciuic-flow") is None) == (number == 1)
    bodies = [request.body for request in upstream.requests]
    assert bodies == [inner, inner, inner + b"\r\n0\r\n", b"", b"", inner, b"", inner]
    flow.wait_empty(gateway)


@pytest.mark.line(14)
def test_a_chunked_body_keeps_its_chunks_extensions_and_trailers(
    gateway: Gateway, upstream: Upstream
) -> None:
    coded = b'4;x="y"\r\n{"a"\r\n3\r\n: 1\r\n01\r\n}\r\n0\r\nX-Check: 5\r\n\r\n'
    head = request_bytes("POST", PATH, flow.headers("gold", CHUNKED))
    with gateway.connect() as client:
        client.drip([head, coded[:10], coded[10:]], gap_s=0.02)
        assert client.response("POST").status == 200
    assert upstream.received.endswith(b"\r\n\r\n" + coded)
    assert upstream.request.all("transfer-encoding") == [b"chunked"]


@pytest.mark.line(14)
@pytest.mark.parametrize("framing", ["length", "chunked", "until close"])
def test_http_10_clients_get_an_answer_that_they_understand(
    gateway: Gateway, upstream: Upstream, framing: str
) -> None:
    body = b"data: " + flow.delta(content="a") + b"\n\n"
    kind = (b"Content-Type", b"text/event-stream")
    if framing == "chunked":
        upstream.respond(SSE_HEAD + chunk(body) + LAST_CHUNK)
    elif framing == "length":
        upstream.respond(response_bytes(body, headers=[kind]))
    else:

        def until_close(exchange: Exchange) -> None:
            exchange.send(message_bytes(b"HTTP/1.0 200 OK", [kind], body))
            exchange.close()

        upstream.script(until_close)
    asked = flow.body()
    with gateway.connect() as client:
        fields = [(b"Content-Length", b"%d" % len(asked)), *flow.headers("gold")]
        client.send(message_bytes(b"POST " + PATH.encode() + b" HTTP/1.0", fields, asked))
        answer = client.response("POST")
    assert (answer.complete, answer.body) == (True, body)
    assert answer.get("x-ciuic-tier") == b"gold"
    assert answer.get("transfer-encoding") is None
    assert upstream.request.body == asked
    assert record_of(gateway, answer.get("x-ciuic-request-id"))["ttft_ms"] > 0


@pytest.mark.line(17)
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_expect_costs_no_second(gateway: Gateway, upstream: Upstream, framing: str) -> None:
    asked = flow.body()
    size = (b"Content-Length", b"%d" % len(asked)) if framing == "length" else CHUNKED
    began = now()
    with gateway.connect() as client:
        fields = flow.headers("gold", (b"Expect", b"100-continue"), size)
        client.send(request_bytes("POST", PATH, fields))
        assert client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(asked if framing == "length" else chunked(asked))
        answer = client.response("POST")
    assert (answer.status, answer.informational) == (200, [])
    assert now() - began < 0.9
    assert upstream.request.body == asked


@pytest.mark.line(15)
@pytest.mark.parametrize(
    "bad",
    [
        request_bytes("POST", "/", flow.headers(None, CHUNKED)) + b"zz\r\n",
        request_bytes("POST", "/", flow.headers(None, CHUNKED)) + b"5\r\nhello0\r\n\r\n",
        request_bytes("POST", "/", flow.headers(None, CHUNKED, (b"Content-Length", b"5"))),
        request_bytes("POST", "/", flow.headers(None, (b"Content-Length", b"1")), b"ab"),
        b"POST / HTTP/1.1\r\nHost: a\r\nX-Ciuic-Flow: enabled\r\n X-Ciuic-Tier: gold\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nX-Ciuic-Flow : enabled\r\nContent-Length: 0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nX-Ciuic-Flow: enabled\nContent-Length: 0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nX-Ciuic-Tier: go\x00ld\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=range(8),
)
def test_what_could_be_read_in_two_ways_is_refused(
    gateway: Gateway, upstream: Upstream, bad: bytes
) -> None:
    with gateway.connect() as client:
        client.send_ignoring_close(bad)
        assert client.response("POST").status == 400
    assert upstream.requests == []
    flow.wait_empty(gateway)


@pytest.mark.line(13)
def test_hop_by_hop_fields_stay_on_their_hop(gateway: Gateway, upstream: Upstream) -> None:
    fields = flow.headers(
        "gold",
        (b"Connection", b"keep-alive, X-Mine, Authorization, X-Ciuic-Tier"),
        (b"X-Mine", b"1"),
        (b"Keep-Alive", b"timeout=5"),
        (b"TE", b"trailers"),
        (b"Authorization", b"Bearer a"),
        (b"X-End", b"2"),
    )
    answer = gateway.fetch("POST", PATH, tuple(fields), flow.body())
    assert answer.status == 200
    names = [name for name, _ in upstream.request.headers]
    assert names == [b"Host", b"Authorization", b"X-End", b"Content-Length"]


@pytest.mark.line(18)
def test_a_large_body_passes(gateway: Gateway, upstream: Upstream) -> None:
    asked = flow.body(image="i" * 5_000_000)
    assert gateway.fetch("POST", PATH, tuple(flow.headers()), asked).status == 200
    assert upstream.request.body == asked
    flow.wait_empty(gateway)


@pytest.mark.line(18)
def test_a_body_over_the_limit_is_a_413(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(stub, limits={"body_bytes": 10_000}))
    for fields in (
        flow.headers("gold", (b"Content-Length", b"20000")),
        flow.headers("gold", CHUNKED),
    ):
        with gateway.connect() as client:
            client.send(request_bytes("POST", PATH, fields))
            client.send_ignoring_close(chunk(b"x" * 20_000))
            assert client.response("POST").status == 413
    assert stub.requests == []
    flow.wait_empty(gateway)
    assert gateway.metrics().outcomes() == {"body_too_large": 2}


# The answer.


@pytest.mark.line(5)
def test_each_event_arrives_when_it_is_sent(gateway: Gateway, upstream: Upstream) -> None:
    events = [b"data: " + flow.delta(content=f"{n:06}") + b"\n\n" for n in range(20)]
    sent_at = []

    def stream(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        for event in events:
            time.sleep(0.05)
            sent_at.append(now())
            exchange.send(chunk(event))
        exchange.send(LAST_CHUNK)

    upstream.script(stream)
    with gateway.connect() as client:
        client.send(flow.chat("gold", stream=True))
        answer = client.response("POST")
        delays = [client.arrival_of(e) - at for e, at in zip(events, sent_at, strict=True)]
    assert answer.body == b"".join(events)
    assert statistics.median(delays) < 0.01, delays


@pytest.mark.line(6, 8)
@pytest.mark.parametrize("whole", EVENT_STREAMS.values(), ids=EVENT_STREAMS)
@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_events_cut_anywhere_are_the_same_bytes(
    gateway: Gateway, upstream: Upstream, whole: bytes, size: int
) -> None:
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    upstream.respond(SSE_HEAD + chunked(*pieces))
    answer = gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body())
    assert (answer.complete, answer.body, answer.chunks) == (True, whole, pieces)


METERED = {
    "deepseek": (DEEPSEEK, (9, 0, 2)),
    "vllm": (VLLM, (4, 0, 2)),
    "sglang": (SGLANG, None),
}


@pytest.mark.line(36)
@pytest.mark.parametrize("name", METERED)
@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
def test_a_stream_is_metered_alike_however_it_is_cut(
    gateway: Gateway, upstream: Upstream, name: str, size: int
) -> None:
    text, usage = METERED[name]
    whole = text.encode()
    upstream.respond(SSE_HEAD + chunked(*(whole[n : n + size] for n in range(0, len(whole), size))))
    before = gateway.metrics()
    answer = gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body())
    record = record_of(gateway, answer.get("x-ciuic-request-id"))
    told = (record["prompt_tokens"], record["cached_tokens"], record["completion_tokens"])
    assert told == (usage or (None, None, 1))
    assert record["ttft_ms"] > 0
    after = gateway.metrics()
    for kind, count in zip(("prompt", "cached", "completion"), usage or (0, 0, 0), strict=True):
        labels = {"tier": "gold", "kind": kind}
        counted = after.total("ciuicflow_tokens_total", **labels)
        assert counted - before.total("ciuicflow_tokens_total", **labels) == count


@pytest.mark.line(36)
@pytest.mark.parametrize(
    "first",
    [
        {"reasoning_content": "hm"},
        {"content": "a"},
        {"content": None, "reasoning_content": "深"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
    ids=range(5),
)
def test_ttft_counts_the_first_token_of_either_kind(
    gateway: Gateway, upstream: Upstream, first: dict[str, Any]
) -> None:
    """Neither the comments, the role nor an empty text before it is one."""

    def think(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD + chunk(b": keep-alive\n\n"))
        for nothing in ({"role": "assistant"}, {"content": "", "reasoning_content": None}):
            exchange.send(chunk(b"data: " + flow.delta(**nothing) + b"\n\n"))
        time.sleep(0.2)
        exchange.send(chunk(b"data: " + flow.delta(**first) + b"\n\n"))
        time.sleep(0.3)
        exchange.send(chunk(b"data: " + flow.delta(content="b") + b"\n\n"))
        exchange.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    upstream.script(think)
    answer = gateway.fetch("POST", PATH, tuple(flow.headers("silver")), flow.body())
    record = record_of(gateway, answer.get("x-ciuic-request-id"))
    assert 200 <= record["ttft_ms"] < 490
    assert record["completion_tokens"] == 2


def test_the_log_line_tells_tier_tenant_wait_and_tokens(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.respond(flow.ANSWER)
    before = gateway.metrics()
    answer = gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body(user="u\n\x1b7"))
    record = record_of(gateway, answer.get("x-ciuic-request-id"))
    assert record["tier"] == "gold"
    assert record["tenant"] == "user:u\n\x1b7"
    assert record["outcome"] == "completed"
    assert record["queue_ms"] >= 0
    assert record["ttft_ms"] is None
    assert [record[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion")] == [11, 4, 3]
    after = gateway.metrics()
    labels = {"flow": "enabled", "tier": "gold", "outcome": "completed", "code": "200"}
    name = "ciuicflow_requests_total"
    assert after.total(name, **labels) - before.total(name, **labels) == 1
    for name in (
        "ciuicflow_queue_wait_seconds_count",
        "ciuicflow_request_duration_seconds_count",
    ):
        assert after.total(name, tier="gold") - before.total(name, tier="gold") == 1


@pytest.mark.line(11)
@pytest.mark.parametrize("streamed", [True, False])
def test_compressed_answers_stay_compressed(
    gateway: Gateway, upstream: Upstream, streamed: bool
) -> None:
    packed = gzip.compress(DEEPSEEK.encode())
    kind = b"text/event-stream" if streamed else b"application/json"
    fields = [(b"Content-Type", kind), (b"Content-Encoding", b"gzip")]
    upstream.respond(response_bytes(packed, headers=fields))
    accept = (b"Accept-Encoding", b"gzip, br")
    answer = gateway.fetch("POST", PATH, tuple(flow.headers("gold", accept)), flow.body())
    assert (answer.body, answer.get("content-encoding")) == (packed, b"gzip")
    assert upstream.request.all("accept-encoding") == [b"gzip, br"]
    record = record_of(gateway, answer.get("x-ciuic-request-id"))
    assert (record["ttft_ms"], record["completion_tokens"]) == (None, None)


@pytest.mark.line(7)
def test_blank_lines_before_a_json_answer_pass_and_its_usage_is_read(
    gateway: Gateway, upstream: Upstream
) -> None:
    fields = [(b"Content-Type", b"application/json"), CHUNKED]

    def late(exchange: Exchange) -> None:
        exchange.send(message_bytes(b"HTTP/1.1 200 OK", fields))
        for count in (1, 2, 3):
            exchange.send(chunk(b"\n"))
            wait.until(lambda count=count: client.received.count(b"1\r\n\n\r\n") >= count)  # type: ignore[misc]  # loop
        exchange.send(chunk(ANSWER_BODY) + LAST_CHUNK)

    upstream.script(late)
    with gateway.connect() as client:
        client.send(flow.chat("gold"))
        answer = client.response("POST")
    assert answer.body == b"\n\n\n" + ANSWER_BODY
    assert record_of(gateway, answer.get("x-ciuic-request-id"))["completion_tokens"] == 3


@pytest.mark.line(12)
def test_an_empty_event_stream_counts_as_an_error(gateway: Gateway, upstream: Upstream) -> None:
    upstream.respond(SSE_HEAD + LAST_CHUNK)
    before = gateway.metrics()
    answer = gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body())
    assert (answer.status, answer.complete, answer.body) == (200, True, b"")
    assert outcome_delta(before, gateway.metrics()) == {"empty_stream": 1}
    flow.wait_empty(gateway)


def test_a_204_and_interim_answers_pass(gateway: Gateway, upstream: Upstream) -> None:
    upstream.respond(
        b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + b"HTTP/1.1 204 No Content\r\n\r\n"
    )
    answer = gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body())
    assert (answer.status, answer.get("x-ciuic-tier")) == (204, b"gold")
    assert [interim.status for interim in answer.informational] == [103]
    assert answer.informational[0].get("x-ciuic-tier") is None
    flow.wait_empty(gateway)


# Ends.


def _before_the_head(exchange: Exchange) -> None:
    hold(exchange)


def _after_the_head(exchange: Exchange) -> None:
    exchange.send(SSE_HEAD)
    hold(exchange)


def _mid_stream(exchange: Exchange) -> None:
    exchange.send(SSE_HEAD + chunk(b"data: " + flow.delta(content="a") + b"\n\n"))
    hold(exchange)


def _mid_answer(exchange: Exchange) -> None:
    exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
    hold(exchange)


@pytest.mark.line(1)
@pytest.mark.parametrize("stage", [_before_the_head, _after_the_head, _mid_stream, _mid_answer])
@pytest.mark.parametrize("how", ["fin", "reset"])
def test_a_client_that_leaves_takes_the_upstream_along(
    gateway: Gateway, upstream: Upstream, stage: Callable[[Exchange], None], how: str
) -> None:
    upstream.script(stage)
    before = gateway.metrics()
    client = gateway.connect()
    client.send(flow.chat("gold", stream=True))
    upstream.wait_requests(1)
    if stage is not _before_the_head:
        client.until(b"\r\n\r\n")
    left_at = now()
    (client.close if how == "fin" else client.abort)()
    (connection,) = upstream.connections
    wait.until(lambda: connection.closed_at, 2, "the upstream is aborted")
    assert connection.closed_at is not None
    assert connection.closed_at - left_at < 0.5
    flow.wait_empty(gateway)
    assert outcome_delta(before, gateway.metrics()) == {"client_gone": 1}


@pytest.mark.line(1)
def test_a_client_that_leaves_in_mid_upload_was_never_queued(
    gateway: Gateway, upstream: Upstream
) -> None:
    before = gateway.metrics()
    with gateway.connect() as client:
        client.send(request_bytes("POST", PATH, flow.headers(None, CHUNKED)) + chunk(b"x" * 99_999))
    wait.until(lambda: outcome_delta(before, gateway.metrics()) == {"client_gone": 1})
    flow.wait_empty(gateway)
    assert upstream.requests == []


@pytest.mark.line(4, 23)
@pytest.mark.parametrize("stage", ["before the head", "in the stream"])
def test_an_upstream_that_breaks_off_is_not_asked_again(
    gateway: Gateway, upstream: Upstream, stage: str
) -> None:
    def break_off(exchange: Exchange) -> None:
        if stage == "in the stream":
            exchange.send(SSE_HEAD + chunk(b"data: " + flow.delta(content="a") + b"\n\n"))
            time.sleep(0.05)
        exchange.reset()

    upstream.script(break_off)
    before = gateway.metrics()
    with gateway.connect() as client:
        client.send(flow.chat("gold"))
        if stage == "in the stream":
            answer = client.response("POST")
            assert not answer.complete
            assert answer.body == b"data: " + flow.delta(content="a") + b"\n\n"
            expected = "upstream_broken"
        else:
            assert client.response("POST").status == 502
            expected = "upstream_failed"
    flow.wait_empty(gateway)
    assert outcome_delta(before, gateway.metrics()) == {expected: 1}
    assert len(upstream.requests) == 1


@pytest.mark.line(22)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_dead_pooled_connection_costs_no_request(start: Start, stubs: Stubs, loop: str) -> None:
    stub = stubs()

    def one_then_close(exchange: Exchange) -> None:
        exchange.send(flow.ANSWER)
        time.sleep(0.01)
        exchange.reset()

    stub.script(one_then_close)
    gateway = start(config(limited(stub, 1)), loop=loop)
    with gateway.connect() as client:
        for number in range(30):
            client.send(flow.chat("gold", (b"X-N", b"%d" % number)))
            assert client.response("POST").status == 200
            time.sleep(0.003 * (number % 7))
    flow.wait_empty(gateway)
    assert [request.get("x-n") for request in stub.requests] == [b"%d" % n for n in range(30)]


@pytest.mark.line(23)
def test_a_timeout_is_a_504_and_not_retried(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    stub.script(hold)
    gateway = start(config(stub, timeouts={"response_s": 0.3}))
    answer = gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body())
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (504, "upstream_timeout")
    flow.wait_empty(gateway)
    assert len(stub.requests) == 1


@pytest.mark.line(21)
def test_a_body_that_does_not_come_is_a_408(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(stub, timeouts={"body_s": 0.3}))
    with gateway.connect() as client:
        fields = flow.headers("gold", (b"Content-Length", b"50"))
        client.send(request_bytes("POST", PATH, fields) + b"{")
        assert client.response("POST").status == 408
    assert stub.requests == []
    flow.wait_empty(gateway)
    assert gateway.metrics().outcomes() == {"request_timeout": 1}


@pytest.mark.line(9)
def test_a_client_that_waits_in_the_queue_is_not_late(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    timeouts = {"header_s": 0.3, "idle_s": 0.3, "body_s": 0.3, "response_s": 5}
    gateway = start(config(limited(stub, 1), timeouts=timeouts))
    with flow.full(gateway, stub) as engine, gateway.connect() as client:
        client.send(flow.chat("bronze"))
        flow.wait_queued(gateway, 1)
        time.sleep(1)
        engine.let_all()
        answer = client.response("POST")
        assert answer.status == 200
        assert int(answer.get("x-ciuic-queue-ms") or 0) >= 950
        assert client.exchange("POST", PATH, flow.headers(), flow.body()).status == 200


def test_an_upgrade_does_not_queue(gateway: Gateway, upstream: Upstream) -> None:
    def switch(exchange: Exchange) -> None:
        exchange.send(b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
        exchange.send(exchange.connection.exactly(4))
        exchange.close()

    upstream.script(switch)
    with gateway.connect() as client:
        fields = flow.headers(None, (b"Connection", b"Upgrade"), (b"Upgrade", b"echo"))
        client.send(request_bytes("GET", "/ws", fields))
        assert client.response().status == 101
        client.send(b"ping")
        assert client.rest() == b"ping"
    flow.wait_empty(gateway)
    assert upstream.request.get("x-ciuic-flow") is None


def test_lists_of_models_are_joined(start: Start, stubs: Stubs) -> None:
    one, two = stubs(models=("a",)), stubs(models=("b",))
    gateway = start(config(one, two))
    answer = gateway.fetch("GET", "/v1/models", (OPT_IN,))
    assert sorted(each["id"] for each in json.loads(answer.body)["data"]) == ["a", "b"]
    assert answer.get("x-ciuic-tier") == b"silver"
    for model, stub in (("a", one), ("b", two)):
        stub.respond(response_bytes(model.encode()))
        sent = gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body(model=model))
        assert sent.body == model.encode()


def test_every_series_that_is_documented_is_there(gateway: Gateway, upstream: Upstream) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        for _ in range(3):
            exchange.send(chunk(b"data: " + flow.delta(content="a") + b"\n\n"))
            time.sleep(0.02)
        exchange.send(LAST_CHUNK)

    upstream.script(stream)
    for tier in flow.TIERS:
        gateway.fetch("POST", PATH, tuple(flow.headers(tier)), flow.body())
    metrics = gateway.metrics()
    for tier in flow.TIERS:
        for name in ("qps", "latency_p99_seconds"):
            assert metrics.total(f"ciuicflow_{name}", flow="enabled", tier=tier) > 0, name
        for name in (
            "ttft_p99_seconds",
            "time_to_first_token_seconds_count",
            "inter_token_latency_seconds_count",
            "queue_wait_seconds_count",
        ):
            assert metrics.total(f"ciuicflow_{name}", tier=tier) > 0, name
        assert metrics.find("ciuicflow_queue_depth", tier=tier) == [0]
    for name in ("in_flight", "tokens_in_flight"):
        assert metrics.find(f"ciuicflow_{name}", endpoint=upstream.name) == [0]


STREAM = b"".join(EVENT_STREAMS.values())


@pytest.mark.line(6, 8)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 300), max_size=40),
    cuts=st.lists(st.integers(1, 500), max_size=12),
    framing=st.sampled_from(["chunked", "length"]),
)
def test_any_cut_of_a_stream_is_relayed_as_the_same_bytes(
    module_gateway: Gateway,
    module_stub: Upstream,
    sizes: list[int],
    cuts: list[int],
    framing: str,
) -> None:
    kind = (b"Content-Type", b"text/event-stream")
    whole = response_bytes(STREAM, headers=[kind])
    if framing == "chunked":
        whole = SSE_HEAD + chunked(*cut(STREAM, sizes))

    def answer_in_pieces(exchange: Exchange) -> None:
        for piece in cut(whole, cuts):
            exchange.send(piece)

    module_stub.script(answer_in_pieces)
    answer = module_gateway.fetch("POST", PATH, tuple(flow.headers("gold")), flow.body())
    assert (answer.complete, answer.body) == (True, STREAM)
    record = record_of(module_gateway, answer.get("x-ciuic-request-id"))
    assert (record["prompt_tokens"], record["completion_tokens"]) == (4, 2)
