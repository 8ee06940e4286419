"""Heartbeats: comments on opted-in streams that wait, where they are switched on."""

import json
import time

import pytest
from support import flow, wait
from support.gateway import Gateway, Start, config
from support.upstream import Stubs, Upstream
from support.wire import SSE_HEAD, response_bytes

BEAT_S = 0.1
TOKENS = flow.stream(flow.delta(content="a"), flow.delta(content="b"), b"[DONE]")


def started(start: Start, stub: Upstream, **settings: object) -> Gateway:
    return start(config(flow.limited(stub, 1), flow={"heartbeat_s": BEAT_S, **settings}))


def test_a_waiting_stream_shows_life_and_then_brings_its_events(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = started(start, stub)
    with flow.full(gateway, stub) as engine, gateway.connect() as client:
        client.send(flow.chat("silver", stream=True))
        seen = client.until(b": waiting\n\n\r\nc\r\n: waiting")
        assert seen.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"X-Ciuic-Tier: silver\r\n" in seen
        engine.answer = TOKENS
        engine.let_all()
        rest = client.until(b"\r\n0\r\n\r\n")
        assert rest[rest.index(b"data:") :].count(b"data:") == 3
        assert b"HTTP/1.1" not in rest
        engine.answer = flow.ANSWER
        client.send(flow.chat("silver"))  # the connection goes on
        assert client.response("POST").status == 200
    flow.wait_empty(gateway)
    assert gateway.metrics().outcomes() == {"completed": 3}


@pytest.mark.parametrize("opted_in", [True, False], ids=["whole", "bypass"])
def test_nothing_else_gets_them(start: Start, stubs: Stubs, opted_in: bool) -> None:
    """Neither an answer in one piece, nor a stream that did not opt in and is only slow."""
    stub = stubs()
    gateway = started(start, stub)
    with flow.full(gateway, stub) as engine, gateway.connect() as client:
        raw = flow.chat("silver", stream=not opted_in)
        client.send(raw if opted_in else raw.replace(b"X-Ciuic-Flow: enabled\r\n", b""))
        time.sleep(3 * BEAT_S)
        engine.let_all()
        assert b": waiting" not in client.until(b"}")


def test_an_enrolled_stream_waits_in_silence(start: Start, stubs: Stubs) -> None:
    """It did not opt in: its bytes are the engine's own."""
    stub = stubs()
    gateway = started(start, stub, bypass_tier="silver")
    with flow.full(gateway, stub) as engine, gateway.connect() as client:
        client.send(flow.chat(stream=True).replace(b"X-Ciuic-Flow: enabled\r\n", b""))
        flow.wait_queued(gateway, 1)
        time.sleep(3 * BEAT_S)
        engine.answer = TOKENS
        engine.let_all()
        assert client.until(b"\r\n0\r\n\r\n") == TOKENS


def test_a_stream_without_chunks_is_framed_for_a_client_that_has_our_head(
    start: Start, stubs: Stubs
) -> None:
    stub = stubs()
    gateway = started(start, stub)
    events = b"data: " + flow.delta(content="a") + b"\n\n"
    with flow.full(gateway, stub) as engine, gateway.connect() as client:
        client.send(flow.chat("silver", stream=True))
        client.until(b": waiting")
        engine.answer = response_bytes(events, headers=[(b"Content-Type", b"text/event-stream")])
        engine.let_all()
        seen = client.until(b"0\r\n\r\n")
        assert b"%x\r\n%b\r\n" % (len(events), events) in seen


@pytest.mark.parametrize("status", [400, 429, 500])
def test_an_error_after_them_is_one_event_and_an_unclean_end(
    start: Start, stubs: Stubs, status: int
) -> None:
    stub = stubs()
    gateway = started(start, stub)
    body = json.dumps({"error": {"message": "no\nsuch", "code": status}}).encode()
    with flow.full(gateway, stub) as engine, gateway.connect() as client:
        client.send(flow.chat("silver", stream=True))
        client.until(b": waiting")
        engine.answer = response_bytes(
            body, f"{status} X", headers=[(b"Content-Type", b"application/json")]
        )
        engine.let_all()
        seen = client.rest()
        event = seen[seen.index(b"data: ") + 6 :]
        assert json.loads(event.partition(b"\n")[0])["error"]["code"] == status
        assert not seen.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in seen


def test_a_refusal_after_them_is_one_event_and_an_unclean_end(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    tier = {"name": "gold", "rank": 0, "ttft_target_s": 1, "itl_target_s": 1, "max_wait_s": 0.5}
    gateway = started(start, stub, tiers=[tier], default_tier="gold")
    with flow.full(gateway, stub), gateway.connect() as client:
        client.send(flow.chat("gold", stream=True))
        seen = client.rest()
        event = seen[seen.index(b"data: ") + 6 :]
        assert json.loads(event.partition(b"\n")[0])["error"]["code"] == "queue_timeout"
        assert not seen.endswith(b"0\r\n\r\n")
        wait.until(lambda: gateway.metrics().outcomes().get("queue_timeout") == 1)


def test_what_reaches_the_engine_asks_for_no_coding(start: Start, stubs: Stubs) -> None:
    """The head that the client has says nothing of one."""
    stub = stubs()
    gateway = started(start, stub)
    with flow.full(gateway, stub) as engine, gateway.connect() as client:
        client.send(flow.chat("silver", (b"Accept-Encoding", b"gzip"), stream=True))
        client.until(b": waiting")
        engine.answer = SSE_HEAD + b"0\r\n\r\n"
        engine.let_all()
        client.until(b"\r\n0\r\n\r\n")
    assert stub.requests[-1].get("accept-encoding") is None


def test_an_interim_answer_does_not_get_into_the_stream(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = started(start, stub)
    with flow.full(gateway, stub) as engine, gateway.connect() as client:
        client.send(flow.chat("silver", stream=True))
        client.until(b": waiting")
        engine.answer = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + TOKENS
        engine.let_all()
        assert b"HTTP/1.1" not in client.until(b"\r\n0\r\n\r\n")
