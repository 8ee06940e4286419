"""The upstream of the benchmark: answers with ready-made bytes, far faster than any proxy.

``python -m ciuicflow.bench.stub`` prints ``ready port=PORT``. Its paths: ``/small`` (JSON),
``/upload`` (reads a body, then small JSON), ``/stream`` (200 events), ``/slow`` (events without
end), ``/counts`` (what it has done so far), anything else: 404.
"""

import asyncio
import re
import signal
from typing import Final, cast

import msgspec
import uvloop

STREAM_EVENTS: Final = 200
# A step is longer than any proxy needs to relay one event of each of 64 streams, so an event is
# on its way before the next one comes and each is a read of its own, as with a real engine.
STREAM_STEP_S: Final = 0.004
SLOW_STEP_S: Final = 1.0

_BACKLOG: Final = 4096
_MAX_HEAD_BYTES: Final = 16384
_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length: *(\d{1,9})\r")
_CHUNKED: Final = re.compile(rb"(?i)\r\ntransfer-encoding:")
_LAST_CHUNK: Final = b"0\r\n\r\n"


class Counts(msgspec.Struct):
    """What the stub has done since it started."""

    answers: int = 0
    """Whole answers of /small and /upload."""
    events: int = 0
    """Events of /stream and /slow."""
    body_bytes: int = 0
    """Body bytes that /upload has read."""
    open_streams: int = 0


def _answer(status: bytes, body: bytes) -> bytes:
    return b"".join(
        (
            b"HTTP/1.1 %b\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: stub\r\n" % status,
            b"content-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(body),
            body,
        )
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_COMPLETION: Final = (
    b'{"id":"1","object":"chat.completion","created":1,"model":"stub","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"hello"}}],"usage":{"prompt_tokens":9,'
    b'"completion_tokens":2}}'
)
_DELTA: Final = (
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","choices":'
    b'[{"index":0,"delta":{"content":" word"}}]}'
)
SMALL: Final = _answer(b"200 OK", _COMPLETION.ljust(200))
EVENT: Final = _chunk(b"data: %b\n\n" % _DELTA)
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: stub\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_NOT_FOUND: Final = _answer(b"404 Not Found", b"{}")
_REFUSED: Final = _answer(b"400 Bad Request", b"{}")


class Steps:
    """Writes one event to every open stream per step, as an engine with batching does.

    The head goes out when the request comes, the first event with the next step, each event as
    a write of its own. With ``events`` the last one carries the end of the body. Steps keep to
    a fixed beat, so that streams last equally long whatever the stub has to do; a step that comes
    more than a whole step late starts a new beat instead of a burst.
    """

    def __init__(self, counts: Counts, step_s: float, events: int | None) -> None:
        self._counts = counts
        self._step_s = step_s
        self._events = events
        self._open: dict[StubConnection, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: "StubConnection") -> None:
        """Start a stream."""
        connection.transport.write(STREAM_HEAD)
        self._open[connection] = 0
        if self._timer is None:
            self._next(asyncio.get_running_loop().time())
        self._counts.open_streams += 1

    def drop(self, connection: "StubConnection") -> None:
        """Forget a stream, if there is one: it has ended or its peer is gone."""
        if self._open.pop(connection, None) is not None:
            self._counts.open_streams -= 1

    def _next(self, last_due_at: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        due_at = last_due_at + self._step_s
        if due_at < now:
            due_at = now + self._step_s
        self._timer = loop.call_at(due_at, self._step, due_at)

    def _step(self, due_at: float) -> None:
        streams = self._open
        self._counts.events += len(streams)
        for connection, sent in list(streams.items()):
            if sent + 1 == self._events:
                connection.transport.write(EVENT + _LAST_CHUNK)
                self.drop(connection)
            else:
                connection.transport.write(EVENT)
                streams[connection] = sent + 1
        if streams:
            self._next(due_at)
        else:
            self._timer = None


class Stub:
    """What all connections share."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.stream = Steps(self.counts, STREAM_STEP_S, STREAM_EVENTS)
        self.slow = Steps(self.counts, SLOW_STEP_S, None)


class StubConnection(asyncio.Protocol):
    """One client; requests with a length or without a body, not pipelined."""

    transport: asyncio.Transport

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._head = b""
        self._target = b""
        self._body_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stub.stream.drop(self)
        self._stub.slow.drop(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._body_left:
            self._body(len(data))
            return
        if self._head:
            data = self._head + data
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._head = data
            if len(data) > _MAX_HEAD_BYTES:
                self._refuse()
            return
        self._head = b""
        self._request(data, end)

    def _request(self, data: bytes, end: int) -> None:
        self._target = data[: data.index(b"\r")].split(b" ")[1]
        length = _LENGTH.search(data, 0, end)
        self._body_left = int(length[1]) if length is not None else 0
        if length is None and _CHUNKED.search(data, 0, end):
            self._refuse()  # the load sends lengths; who turns them into chunks does other work
        elif self._body_left:
            self._body(len(data) - end)
        else:
            self._respond()

    def _body(self, size_bytes: int) -> None:
        self._body_left -= size_bytes
        if self._target == b"/upload":
            self._stub.counts.body_bytes += size_bytes
        if self._body_left < 0:
            self._refuse()
        elif self._body_left == 0:
            self._respond()

    def _respond(self) -> None:
        stub = self._stub
        match self._target:
            case b"/small" | b"/upload":
                stub.counts.answers += 1
                self.transport.write(SMALL)
            case b"/stream":
                stub.stream.add(self)
            case b"/slow":
                stub.slow.add(self)
            case b"/counts":
                self.transport.write(_answer(b"200 OK", msgspec.json.encode(stub.counts)))
            case _:
                self.transport.write(_NOT_FOUND)

    def _refuse(self) -> None:
        self.transport.write(_REFUSED)
        self.transport.close()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    stub = Stub()
    server = await loop.create_server(
        lambda: StubConnection(stub), "127.0.0.1", 0, backlog=_BACKLOG
    )
    print(f"ready port={server.sockets[0].getsockname()[1]}", flush=True)
    await stopped.wait()
    server.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
