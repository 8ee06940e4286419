"""A scriptable upstream on raw sockets: records every byte, sends any bytes, breaks in any way.

Health probes, model listings and scrapes of the gateway are answered apart and not recorded; a
test that asks for those paths itself marks its request with the header `X-Test`.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from support import wait, wire
from support.wire import EndedError, Message, Wire

PROBE_PATHS = ("/health", "/v1/models")


class Connection(Wire):
    """One accepted connection, the requests on it and the times of its two ends."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, timeout_s=30.0)
        self.opened_at = time.monotonic()
        self.closed_at: float | None = None
        self.requests: list[Message] = []
        self.probes = 0

    @property
    def only_probes(self) -> bool:
        return self.probes > 0 and not self.requests


class Exchange:
    """One request and the means to answer it."""

    def __init__(self, request: Message, connection: Connection) -> None:
        self.request = request
        self.connection = connection

    def send(self, data: bytes | memoryview) -> None:
        self.connection.send(data)

    def read_body(self) -> bytes:
        """Read the body, when the script was started on the head alone."""
        wire.read_request_body(self.connection, self.request)
        return self.request.body

    def peer_closed_after(self, within_s: float = 5.0) -> float | None:
        """Seconds until the gateway closed this connection; None if it did not."""
        return self.connection.wait_end(within_s)

    def close(self) -> None:
        """Close with a FIN and serve this connection no longer."""
        self.connection.shut()
        raise EndedError

    def reset(self) -> None:
        """Close with a reset."""
        self.connection.abort()
        raise EndedError


Script = Callable[[Exchange], None]
Stubs = Callable[..., "Upstream"]
"""A fixture: make a stub with these options; closed at the test's end."""


class Upstream:
    """A listening stub. Scripts run in one thread for each connection, once for each request."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, models: tuple[str, ...] = ()) -> None:
        self.models = models
        self.model_list: bytes | None = None
        self.healthy = True
        self.page = b""
        """What an engine tells on /metrics; empty: it has no such page."""
        self.scrapes: list[float] = []
        """When it was asked for."""
        self.hang_probes_s = self.hang_scrapes_s = 0.0
        self.hanging = 0
        self.accepted = 0
        self._tls = tls
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._requests: list[Message] = []
        self._script: Script = _answer(wire.response_bytes())
        self._head_only = False
        self._port = 0
        self._listener: socket.socket | None = None
        self.listen()

    # -- what the stub does --------------------------------------------------------------

    def respond(self, raw: bytes) -> None:
        """Answer every request with these bytes."""
        self.script(_answer(raw))

    def script(self, script: Script, *, head_only: bool = False) -> None:
        """Run this for every request; with `head_only` before the body was read."""
        self._script, self._head_only = script, head_only

    def stop_listening(self) -> None:
        """Refuse new connections; open ones stay."""
        if self._listener is not None:
            # shutdown wakes the thread that is blocked in accept; close alone does not
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
            self._acceptor.join(5)

    def listen(self) -> None:
        """Listen (again, on the same port)."""
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=4096)
        self._port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, args=[self._listener], daemon=True)
        self._acceptor.start()

    def drop_connections(self) -> None:
        """Close every open connection."""
        for connection in list(self._connections):
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        wait.until(lambda: all(c.closed_at for c in self._connections), what="upstream threads end")

    def reset(self) -> None:
        """Forget scripts, records and connections: a clean stub for the next test."""
        self.respond(wire.response_bytes())
        self.healthy, self.model_list, self.page = True, None, b""
        self.hang_probes_s = self.hang_scrapes_s = 0.0
        if self._listener is None:
            self.listen()
        self.drop_connections()
        with self._lock:
            self._connections.clear()
            self._requests.clear()
            self.accepted = 0

    def close(self) -> None:
        self.stop_listening()
        self.drop_connections()

    # -- what the stub saw ---------------------------------------------------------------

    @property
    def port(self) -> int:
        return self._port

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.name}"

    @property
    def requests(self) -> list[Message]:
        """Every request whose head and body (with `head_only`: whose head) arrived."""
        with self._lock:
            return list(self._requests)

    @property
    def request(self) -> Message:
        """The only request."""
        requests = self.requests
        assert len(requests) == 1, [request.start for request in requests]
        return requests[0]

    @property
    def connections(self) -> list[Connection]:
        """Connections that carried anything but probes."""
        with self._lock:
            return [c for c in self._connections if c.arrivals and not c.only_probes]

    @property
    def received(self) -> bytes:
        """Every byte of those connections."""
        return b"".join(connection.received for connection in self.connections)

    def open_connections(self) -> int:
        return sum(connection.closed_at is None for connection in self.connections)

    def wait_requests(self, count: int, within_s: float = 5.0) -> None:
        wait.until(lambda: len(self.requests) >= count, within_s, f"{count} upstream requests")

    # -- inside --------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[sock], daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        if self._tls is not None:
            try:
                sock.settimeout(10)
                sock = self._tls.wrap_socket(sock, server_side=True, suppress_ragged_eofs=False)
            except OSError:
                sock.close()
                return
        connection = Connection(sock)
        with self._lock:
            self._connections.append(connection)
            self.accepted += 1
        try:
            while True:
                self._serve_one(connection)
        except (EndedError, OSError, ValueError):
            pass  # the peer left, the script closed, or what came was no HTTP: it is recorded
        finally:
            connection.close()
            connection.closed_at = time.monotonic()

    def _serve_one(self, connection: Connection) -> None:
        request = wire.read_head(connection)
        if self._is_probe(request):
            connection.probes += 1
            scrape = request.target.endswith(b"/metrics")
            if scrape:
                self.scrapes.append(time.monotonic())
            if hang_s := self.hang_scrapes_s if scrape else self.hang_probes_s:
                self.hanging += 1
                connection.wait_end(hang_s)
            connection.send(self._probe_answer(request))
            return
        script, head_only = self._script, self._head_only
        if not head_only:
            wire.read_request_body(connection, request)
            if not request.complete:
                raise EndedError
        with self._lock:
            connection.requests.append(request)
            self._requests.append(request)
        script(Exchange(request, connection))

    def _is_probe(self, request: Message) -> bool:
        path = request.target.decode("latin-1")
        if path.endswith("/metrics"):
            return b"aiohttp" in (request.get("user-agent") or b"")
        return path.endswith(PROBE_PATHS) and request.get("x-test") is None

    def _probe_answer(self, request: Message) -> bytes:
        if request.target.endswith(b"/health"):
            return wire.response_bytes(status="200 OK" if self.healthy else "503 Unhealthy")
        if request.target.endswith(b"/metrics"):
            return wire.response_bytes(self.page, "200 OK" if self.page else "404 Not Found")
        entries = [{"id": model, "object": "model"} for model in self.models]
        listing = self.model_list or json.dumps({"object": "list", "data": entries}).encode()
        return wire.response_bytes(listing, headers=[(b"Content-Type", b"application/json")])

    def __enter__(self) -> Upstream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def hold(exchange: Exchange) -> None:
    """A script that never answers; it ends when the gateway closes the connection."""
    exchange.peer_closed_after(20)


def _answer(raw: bytes) -> Script:
    return lambda exchange: exchange.send(raw)


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port that nobody listens on and nobody else can take."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@contextmanager
def silent_port() -> Iterator[int]:
    """A port on which connecting hangs: the listener's backlog is full (Linux drops the SYN)."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        time.sleep(0.05)
        try:
            yield listener.getsockname()[1]
        finally:
            for filler in fillers:
                filler.close()
