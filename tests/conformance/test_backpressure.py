"""A side that is slow holds the other side back; memory does not take the difference."""

import hashlib
import random
import time
from typing import Any

import pytest
from support import wait
from support.gateway import Gateway
from support.raw import Client
from support.upstream import Exchange, Upstream
from support.wire import SSE_HEAD, chunk, message_bytes, read_head, request_bytes

# Timeouts for a reader that takes nothing must not fire here.
SETTINGS: dict[str, Any] = {"timeouts": {"body_s": 30}}

MIB = 1 << 20
STREAM_BYTES = 64 * MIB  # the kernel's own buffers on the way may take 40
EXTRA_BYTES = 10 * MIB
BLOCK = random.Random(7).randbytes(MIB)
WANTED = hashlib.sha256(BLOCK * (STREAM_BYTES // MIB)).digest()


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
        assert progress.count < STREAM_BYTES - 4 * MIB
        assert gateway.rss_bytes() - before < EXTRA_BYTES

    # The same again, now to the last byte: slow at first, then fast.
    with gateway.connect(receive_buffer=65536, timeout_s=30) as client:
        client.send(request_bytes())
        time.sleep(0.5)
        read_head(client)
        seen = client.digest(STREAM_BYTES) if framing == "length" else chunked_digest(client)
    assert seen == WANTED
    assert gateway.rss_bytes() - before < EXTRA_BYTES


def chunked_digest(client: Client) -> bytes:
    digest = hashlib.sha256()
    while size := int(client.line(), 16):
        digest.update(client.exactly(size))
        assert client.line() == b""
    assert client.line() == b""
    return digest.digest()


@pytest.mark.line(10, 18)
def test_slow_upstream_holds_back_an_upload(gateway: Gateway, upstream: Upstream) -> None:
    """Memory stays below the body's size plus little, even if it is held for the model's name."""
    body = BLOCK * 32
    taken: list[bytes] = []

    def take_slowly(exchange: Exchange) -> None:
        wait.until(lambda: released, 20)
        taken.append(exchange.connection.digest(len(body)))
        exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    released: list[bool] = []
    upstream.script(take_slowly, head_only=True)
    before = gateway.rss_bytes()
    with gateway.connect(timeout_s=30) as client:
        client.send(request_bytes("POST", "/", [(b"Content-Length", b"%d" % len(body))]))
        sent = client.push(body)
        grown = gateway.rss_bytes() - before
        assert grown < (EXTRA_BYTES if sent < len(body) else len(body) + EXTRA_BYTES)
        released.append(True)
        client.send(memoryview(body)[sent:])
        assert client.response("POST").status == 200
    assert taken == [hashlib.sha256(body).digest()]


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


@pytest.mark.line(10, 22)
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_slow_reader_leaves_no_deaf_connection_in_the_pool(
    gateway: Gateway, upstream: Upstream, framing: str
) -> None:
    """Where its last bytes fill the buffer, the upstream connection is free and must be read.

    At which size that happens, the kernel's buffers decide: many are tried.
    """
    size = 0

    def answer_at_once(exchange: Exchange) -> None:
        body = BLOCK * 9
        if exchange.request.target == b"/small":
            exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        elif framing == "length":
            fields = [(b"Content-Length", b"%d" % size)]
            exchange.send(message_bytes(b"HTTP/1.1 200 OK", fields, body[:size]))
        else:
            exchange.send(SSE_HEAD + chunk(body[:size]) + b"0\r\n\r\n")

    upstream.script(answer_at_once)
    for size in range(MIB, 5 * MIB, 48_000):
        with gateway.connect(receive_buffer=4096) as slow, gateway.connect(timeout_s=5) as other:
            asked = len(upstream.requests)
            slow.send(request_bytes("GET", "/large"))
            upstream.wait_requests(asked + 1)
            time.sleep(0.01)
            for _ in range(2):
                assert other.exchange("GET", "/small").body == b"ok", size


@pytest.mark.line(10, 16)
def test_a_held_back_upload_leaves_no_deaf_client_connection(
    gateway: Gateway, upstream: Upstream
) -> None:
    def take_slowly(exchange: Exchange) -> None:
        if exchange.request.method == b"POST":
            time.sleep(0.3)
            exchange.connection.digest(16 * MIB)
        exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    upstream.script(take_slowly, head_only=True)
    with gateway.connect(timeout_s=10) as client:
        for _ in range(3):
            client.send(request_bytes("POST", "/", [(b"Content-Length", b"%d" % (16 * MIB))]))
            client.send(BLOCK * 16)
            assert client.response("POST").body == b"ok"
            assert client.exchange().body == b"ok"
