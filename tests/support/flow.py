"""Opted-in requests, and an engine that answers when the test says so."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support import wait, wire
from support.gateway import Config, Gateway, Metrics
from support.raw import Address
from support.upstream import Exchange, Upstream
from support.wire import LAST_CHUNK, SSE_HEAD, Headers, chunk, request_bytes

PATH = "/v1/chat/completions"
OPT_IN = (b"X-Ciuic-Flow", b"enabled")
TIERS = ("gold", "silver", "bronze")
USAGE = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_cache_hit_tokens": 4}
ANSWER_BODY = json.dumps({"id": "1", "choices": [], "usage": USAGE}).encode()
ANSWER = wire.response_bytes(ANSWER_BODY, headers=[(b"Content-Type", b"application/json")])


def headers(tier: str | None = None, *more: tuple[bytes, bytes]) -> Headers:
    """The fields of an opted-in request."""
    asked = [] if tier is None else [(b"X-Ciuic-Tier", tier.encode("latin-1"))]
    return [OPT_IN, *asked, *more]


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()


def chat(tier: str | None = None, *more: tuple[bytes, bytes], **fields: Any) -> bytes:
    """The bytes of an opted-in chat request; `fields` go into its body."""
    return request_bytes("POST", PATH, headers(tier, *more), body(**fields))


def ledger(gateway: Gateway) -> tuple[int, int, int]:
    """Requests, their tokens and bypass requests in flight, as flow control counts them."""
    endpoints = gateway.state()["flow"]["endpoints"]
    names = ("in_flight", "tokens_in_flight", "bypass_in_flight")
    requests, tokens, bypass = (sum(each[name] for each in endpoints) for name in names)
    return requests, tokens, bypass


def queued(gateway: Gateway) -> dict[str, int]:
    """Depth by tier, as the gauge tells."""
    return depths(gateway.metrics())


def depths(metrics: Metrics) -> dict[str, int]:
    return {
        labels["tier"]: int(value)
        for name, labels, value in metrics.samples
        if name == "ciuicflow_queue_depth"
    }


def wait_queued(gateway: Gateway, count: int, within_s: float = 5.0) -> None:
    wait.until(
        lambda: sum(queued(gateway).values()) == count, within_s, f"{count} requests are queued"
    )


def wait_empty(gateway: Gateway, within_s: float = 5.0) -> None:
    """Wait until nothing is queued or in flight, by every count there is."""
    gateway.wait_idle(within_s)
    wait_queued(gateway, 0, within_s)
    wait.until(lambda: ledger(gateway) == (0, 0, 0), within_s, "the ledger is empty")


def limited(stub: Upstream, requests: int, **more: Any) -> Config:
    """A config entry of an upstream with this ceiling."""
    return {"url": stub.url, "max_requests": requests, **more}


class Engine:
    """A script: counts what runs at once; answers at once, or when let go."""

    def __init__(self, answer: bytes = ANSWER, pause_s: float = 0.0) -> None:
        self.answer = answer
        self.pause_s = pause_s
        self.most = 0
        self.order: list[bytes] = []
        """Values of X-Name, in the order of arrival."""
        self.running = 0
        self._lock = threading.Lock()
        self._tickets = threading.Semaphore(0)
        self._free = threading.Event()

    def __call__(self, exchange: Exchange) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.order.append(exchange.request.get("x-name") or b"")
        time.sleep(self.pause_s)
        try:
            while not self._free.is_set() and not self._tickets.acquire(timeout=0.01):
                if exchange.connection.wait_end(0.001) is not None:
                    return
        finally:
            with self._lock:  # before the answer is out: the next one may come with it
                self.running -= 1
        exchange.send(self.answer)

    def let(self, count: int = 1) -> None:
        """Answer so many more."""
        self._tickets.release(count)

    def let_all(self) -> None:
        """Answer all, from now on."""
        self._free.set()


@contextmanager
def full(gateway: Gateway, stub: Upstream, count: int = 1) -> Iterator[Engine]:
    """Fill an upstream that has a ceiling of `count`: what opts in now has to wait."""
    engine = Engine()
    stub.script(engine)
    clients = [gateway.connect() for _ in range(count)]
    try:
        for client in clients:
            client.send(chat("gold", (b"X-Name", b"filler")))
        wait.until(lambda: engine.running == count, what="the upstream is full")
        yield engine
    finally:
        engine.let_all()
        for client in clients:
            client.close()


def stream(*events: bytes) -> bytes:
    """A whole streamed answer, one chunk for each event."""
    return SSE_HEAD + b"".join(chunk(b"data: " + event + b"\n\n") for event in events) + LAST_CHUNK


def delta(**fields: Any) -> bytes:
    """The data of an event with this delta."""
    return json.dumps({"choices": [{"index": 0, "delta": fields}]}).encode()


async def ask(address: Address, raw: bytes) -> tuple[int, bytes]:
    """Send one request on a connection of its own; return the status and all bytes."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(raw)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
        return int(head[9:12]), head + await reader.readexactly(length)
    finally:
        writer.close()
