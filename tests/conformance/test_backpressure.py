"""A side that is slow holds the other side back; memory does not take the difference."""

import hashlib
import random
import time
from typing import Any

import pytest
from support import wait
from support.gateway import Gateway
from support.upstream import Exchange, Upstream
from support.wire import SSE_HEAD, chunk, message_bytes, read_head, request_bytes

# Timeouts for a reader that takes nothing must not fire here.
SETTINGS: dict[str, Any] = {"timeouts": {"body_s": 30}}

MIB = 1 << 20
STREAM_BYTES = 64 * MIB
EXTRA_BYTES = 10 * MIB
BLOCK = random.Random(7).randbytes(MIB)


class Progress:
    """How many body bytes the upstream got rid of, or took."""

    def __init__(self) -> None:
        self.count = 0


def stalled(progress: Progress) -> bool:
    """No byte moves any more."""
    before = progress.count
    time.sleep(0.3)
    return progress.count == before > 0


@pytest.mark.line(10)
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_slow_reader_costs_little_memory_and_loses_no_byte(
    gateway: Gateway, upstream: Upstream, framing: str
) -> None:
    progress = Progress()

    def flood(exchange: Exchange) -> None:
        if framing == "chunked":
            exchange.send(SSE_HEAD)
        else:
            fields = [(b"Content-Length", b"%d" % STREAM_BYTES)]
            exchange.send(message_bytes(b"HTTP/1.1 200 OK", fields))
        for _ in range(STREAM_BYTES // MIB):
            for start in range(0, MIB, 65536):
                piece = BLOCK[start : start + 65536]
                exchange.send(chunk(piece) if framing == "chunked" else piece)
                progress.count += len(piece)
        if framing == "chunked":
            exchange.send(b"0\r\n\r\n")

    upstream.script(flood)
    with gateway.connect(receive_buffer=65536, timeout_s=30) as client:
        before = gateway.rss_bytes()
        client.send(request_bytes())
        for _ in range(10):
            client.sock.recv(1024)
            time.sleep(0.05)
        wait.until(lambda: stalled(progress), 10, "the upstream feels back-pressure")
        assert progress.count < STREAM_BYTES / 2
        assert gateway.rss_bytes() - before < EXTRA_BYTES
        client.arrivals.clear()
        client.close()

    # The same again, now to the last byte: slow at first, then fast.
    with gateway.connect(receive_buffer=65536, timeout_s=30) as client:
        client.send(request_bytes())
        time.sleep(0.5)
        answer = client.response()
    assert answer.complete
    wanted = hashlib.sha256(BLOCK * (STREAM_BYTES // MIB))
    assert hashlib.sha256(answer.body).digest() == wanted.digest()
    assert gateway.rss_bytes() - before < EXTRA_BYTES


@pytest.mark.line(10, 18)
def test_slow_upstream_holds_back_an_upload(gateway: Gateway, upstream: Upstream) -> None:
    """Memory stays below the body's size plus little, even if it is held for the model's name."""
    body = BLOCK * 32
    taken = Progress()

    def take_slowly(exchange: Exchange) -> None:
        wait.until(lambda: released)
        taken.count = len(exchange.read_body())
        exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    released: list[bool] = []
    upstream.script(take_slowly, head_only=True)
    before = gateway.rss_bytes()
    with gateway.connect(timeout_s=30) as client:
        client.send(request_bytes("POST", "/", [(b"Content-Length", b"%d" % len(body))]))
        client.sock.settimeout(1)
        sent = 0
        try:
            while sent < len(body):
                sent += client.sock.send(body[sent : sent + 65536])
        except TimeoutError:
            pass  # held back: what a single upstream needs no model for
        grown = gateway.rss_bytes() - before
        assert grown < (EXTRA_BYTES if sent < len(body) else len(body) + EXTRA_BYTES)
        client.sock.settimeout(30)
        released.append(True)
        client.send(body[sent:])
        assert client.response("POST").status == 200
    assert taken.count == len(body)


@pytest.mark.line(10, 21)
def test_a_client_that_does_not_read_does_not_block_others(
    gateway: Gateway, upstream: Upstream
) -> None:
    def flood_first(exchange: Exchange) -> None:
        if exchange.request.target != b"/flood":
            exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            return
        exchange.send(message_bytes(b"HTTP/1.1 200 OK", [(b"Content-Length", b"99999999")]))
        while True:
            exchange.send(BLOCK)

    upstream.script(flood_first)
    with gateway.connect(receive_buffer=4096) as deaf:
        deaf.send(request_bytes("GET", "/flood"))
        read_head(deaf)
        started = time.monotonic()
        for _ in range(20):
            assert gateway.fetch().body == b"ok"
        assert time.monotonic() - started < 5
