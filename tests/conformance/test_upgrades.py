"""Protocol upgrades: a tunnel after 101, with both directions held to the slower side's pace."""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import wait
from support.gateway import Gateway, Start, config
from support.raw import Client
from support.upstream import Exchange, Stubs, Upstream
from support.wire import message_bytes, request_bytes, response_bytes
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

UPGRADE = [
    (b"Connection", b"keep-alive, Upgrade"),
    (b"Upgrade", b"websocket"),
    (b"Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ=="),
    (b"Sec-WebSocket-Version", b"13"),
]
FLOOD = bytes(range(250)) * 256_000  # 64 MB: the kernel's buffers on the way may take 40
SWITCH = message_bytes(
    b"HTTP/1.1 101 Switching Protocols",
    [
        (b"Upgrade", b"websocket"),
        (b"Connection", b"Upgrade"),
        (b"Sec-WebSocket-Accept", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
    ],
)


@contextmanager
def websocket_echo() -> Iterator[str]:
    """A real WebSocket server that echoes."""

    def echo(connection: ServerConnection) -> None:
        try:
            for message in connection:
                connection.send(message)
        except ConnectionClosed:
            pass

    with serve(echo, "127.0.0.1", 0, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_websockets_pass(start: Start, loop: str) -> None:
    with websocket_echo() as url:
        gateway = start(config(url), loop=loop)
        uri = f"ws://127.0.0.1:{gateway.listen[1]}/v1/realtime?model=a"
        with connect(uri, max_size=None, proxy=None) as socket:
            for message in ("hello", b"\x00\xff" * 70_000, "深度求索", b""):
                socket.send(message)
                assert socket.recv(timeout=10) == message
            socket.ping().wait(5)
            socket.close(4000, "done")
        assert socket.close_code == 4000
        gateway.wait_idle()


def echo_raw(exchange: Exchange, greeting: bytes = b"") -> None:
    """Switch, then send everything back until the end."""
    exchange.send(SWITCH + greeting)
    connection = exchange.connection
    while connection.fill():
        connection.send(connection.arrivals[-1][1])
    exchange.close()


def open_tunnel(gateway: Gateway, **options: object) -> Client:
    client = gateway.connect(**options)
    client.send(request_bytes("GET", "/v1/realtime", UPGRADE))
    return client


def test_the_handshake_is_passed_on_both_ways(gateway: Gateway, upstream: Upstream) -> None:
    upstream.script(echo_raw)
    with open_tunnel(gateway) as client:
        answer = client.response()
        assert answer.status == 101
        assert answer.get("sec-websocket-accept") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        assert (answer.get("upgrade"), answer.get("connection")) == (b"websocket", b"Upgrade")
        client.send(b"\x81\x00 any bytes \r\n\r\n")
        assert client.exactly(17) == b"\x81\x00 any bytes \r\n\r\n"
    request = upstream.request
    assert request.get("upgrade") == b"websocket"
    assert b"upgrade" in (request.get("connection") or b"").lower()
    assert request.get("sec-websocket-key") == b"dGhlIHNhbXBsZSBub25jZQ=="


def test_bytes_right_behind_the_handshake_are_not_lost(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.script(lambda exchange: echo_raw(exchange, b"greeting"))
    with gateway.connect() as client:
        client.send(request_bytes("GET", "/", UPGRADE) + b"early")
        assert client.response().status == 101
        assert client.exactly(8) == b"greeting"
        assert client.exactly(5) == b"early"


@pytest.mark.line(10)
def test_an_upstream_that_does_not_read_holds_the_client_back(
    gateway: Gateway, upstream: Upstream
) -> None:
    go_on: list[bool] = []

    def deaf(exchange: Exchange) -> None:
        exchange.send(SWITCH)
        wait.until(lambda: go_on, 20)
        exchange.send(exchange.connection.digest(len(FLOOD)))

    upstream.script(deaf)
    with open_tunnel(gateway, timeout_s=20) as client:
        client.response()
        before = gateway.rss_bytes()
        sent = client.push(FLOOD)
        assert sent < len(FLOOD), "nothing held the client back"
        assert gateway.rss_bytes() - before < 10_000_000
        go_on.append(True)
        client.send(memoryview(FLOOD)[sent:])
        assert client.exactly(32) == hashlib.sha256(FLOOD).digest()


@pytest.mark.line(10)
def test_a_client_that_does_not_read_holds_the_upstream_back(
    gateway: Gateway, upstream: Upstream
) -> None:
    moved = [0]

    def flood(exchange: Exchange) -> None:
        exchange.send(SWITCH)
        for start in range(0, len(FLOOD), 100_000):
            exchange.send(memoryview(FLOOD)[start : start + 100_000])
            moved[0] += 100_000

    upstream.script(flood)
    with open_tunnel(gateway, receive_buffer=65536, timeout_s=20) as client:
        client.response()
        before = gateway.rss_bytes()
        time.sleep(0.5)
        assert 0 < moved[0] < len(FLOOD) - 4_000_000
        assert gateway.rss_bytes() - before < 10_000_000
        assert client.digest(len(FLOOD)) == hashlib.sha256(FLOOD).digest()


@pytest.mark.line(1)
@pytest.mark.parametrize("leave", [Client.close, Client.abort], ids=["fin", "reset"])
def test_a_client_that_leaves_ends_the_tunnel(
    gateway: Gateway, upstream: Upstream, leave: object
) -> None:
    upstream.script(echo_raw)
    client = open_tunnel(gateway)
    client.response()
    assert callable(leave)
    leave(client)
    wait.until(lambda: upstream.open_connections() == 0)
    gateway.wait_idle()


@pytest.mark.line(4)
@pytest.mark.parametrize("end", [Exchange.close, Exchange.reset], ids=["fin", "reset"])
def test_an_upstream_that_leaves_ends_the_tunnel_after_its_last_byte(
    gateway: Gateway, upstream: Upstream, end: object
) -> None:
    def say_and_leave(exchange: Exchange) -> None:
        exchange.send(SWITCH + b"last words")
        wait.until(lambda: b"last words" in client.received)
        assert callable(end)
        end(exchange)

    upstream.script(say_and_leave)
    with gateway.connect() as client:
        client.send(request_bytes("GET", "/", UPGRADE))
        client.response()
        assert client.exactly(10) == b"last words"
        assert client.wait_end(2) is not None
    gateway.wait_idle()


@pytest.mark.line(9, 30)
def test_a_silent_tunnel_stays_and_is_in_flight(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    stub.script(echo_raw)
    timeouts = {"header_s": 0.3, "idle_s": 0.3, "body_s": 0.3}
    gateway = start(config(stub, timeouts=timeouts))
    with open_tunnel(gateway) as client:
        client.response()
        time.sleep(1)
        assert gateway.in_flight() == 1
        client.send(b"still here")
        assert client.exactly(10) == b"still here"


@pytest.mark.line(35)
@pytest.mark.parametrize("status", ["400 Bad Request", "426 Upgrade Required", "200 OK"])
def test_an_upstream_that_refuses_answers_as_usual(
    gateway: Gateway, upstream: Upstream, status: str
) -> None:
    upstream.respond(response_bytes(b"no", status))
    with open_tunnel(gateway) as client:
        answer = client.response()
        assert (answer.status, answer.body) == (int(status[:3]), b"no")
        assert client.exchange("GET", "/next").body == b"no"
    assert [request.target for request in upstream.requests] == [b"/v1/realtime", b"/next"]


@pytest.mark.line(15)
@pytest.mark.parametrize(
    "fields",
    [
        [
            (b"Connection", b"Upgrade, HTTP2-Settings"),
            (b"Upgrade", b"h2c"),
            (b"HTTP2-Settings", b"A"),
        ],
        [(b"Connection", b"Upgrade"), (b"Upgrade", b"H2C")],
        [(b"Connection", b"upgrade"), (b"Upgrade", b"websocket, h2c")],
        [(b"Upgrade", b"h2c")],
    ],
    ids=["whole", "capitals", "in a list", "without Connection"],
)
def test_h2c_is_not_tunnelled(
    gateway: Gateway, upstream: Upstream, fields: list[tuple[bytes, bytes]]
) -> None:
    """A tunnel to HTTP/2 would carry requests past every rule (h2c smuggling)."""
    with gateway.connect() as client:
        client.send(request_bytes("GET", "/", fields))
        assert client.response().status in (200, 400)
    for request in upstream.requests:
        assert b"h2c" not in b"".join(request.all("upgrade")).lower()
        assert request.all("http2-settings") == []


@pytest.mark.line(13, 15)
def test_upgrade_without_connection_is_no_upgrade(gateway: Gateway, upstream: Upstream) -> None:
    with gateway.connect() as client:
        client.send(request_bytes("GET", "/", [(b"Upgrade", b"websocket")]))
        assert client.response().status == 200
    assert upstream.request.all("upgrade") == []


@pytest.mark.line(15)
def test_an_upgrade_with_a_body_smuggles_nothing(gateway: Gateway, upstream: Upstream) -> None:
    inner = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/", UPGRADE, inner))
        assert client.response("POST").status in (200, 400, 501)
        client.wait_end(0.2)
    assert all(request.target == b"/" for request in upstream.requests)
    assert all(request.body == inner for request in upstream.requests)


@pytest.mark.line(27)
def test_a_drain_is_bounded_for_tunnels_too(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    stub.script(echo_raw)
    gateway = start(config(stub, timeouts={"drain_s": 0.5}))
    with open_tunnel(gateway) as client:
        client.response()
        gateway.terminate()
        client.send(b"x")
        assert client.exactly(1) == b"x"
        assert gateway.wait(5) == 0
