"""What is measured: one record for each scenario, with the bars that it must hold."""

from typing import Final

import msgspec

from ciuicflow.bench.stub import STREAM_EVENTS, Counts

_CHAT: Final = '{"model":"stub","messages":[{"role":"user","content":"hello"}],"stream":%s}'
UPLOAD_BYTES: Final = 1 << 20


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One load that is put on each proxy in turn."""

    name: str
    title: str
    path: str
    connections: int
    unit: str = "request"
    """What CPU time is divided by."""
    think_ms: tuple[int, int] | None = None
    """Pause of a connection between two requests, evenly spread; None: none."""
    cpu_bar: float | None = None
    """CPU per unit, at most so many times nginx's."""
    p99_bar: bool = False
    """P99 no higher than nginx's."""
    new_heads: bool = False
    """No two requests have the same head: nothing that a proxy remembers of one helps."""
    memory_bar_bytes: int | None = None
    """Memory of each open stream, at most."""
    flow_bar: float | None = None
    """CPU per unit of opted-in requests, at most so many times that of others."""
    priced_log: bool = False
    """Measure the gateway with its request log as well."""

    @property
    def is_held(self) -> bool:
        """Whether its streams are held open by the benchmark's own client instead of wrk."""
        return self.memory_bar_bytes is not None

    @property
    def body_bytes(self) -> int:
        """Size of a request's body."""
        return UPLOAD_BYTES if self.path == "/upload" else len(self._chat)

    def lua_body(self) -> str:
        """Return the request's body as an expression of Lua."""
        return f'string.rep("x", {UPLOAD_BYTES})' if self.path == "/upload" else f"'{self._chat}'"

    @property
    def _chat(self) -> str:
        return _CHAT % ("true" if self.path in ("/stream", "/slow") else "false")

    def units(self, before: Counts, after: Counts) -> float:
        """Return how much of this load the upstream has done between two counts, parts too."""
        if self.path == "/upload":
            return (after.body_bytes - before.body_bytes) / UPLOAD_BYTES
        if self.path == "/stream":
            return (after.events - before.events) / STREAM_EVENTS
        if self.path == "/slow":
            return after.events - before.events
        return after.answers - before.answers


LOADS: Final = (
    Load(
        name="json",
        title="200-byte JSON, 64 connections, as fast as they can",
        path="/small",
        connections=64,
        cpu_bar=1.15,
        flow_bar=1.6,
        priced_log=True,
    ),
    Load(
        name="json-new",
        title="200-byte JSON, 64 connections, no request head comes twice",
        path="/small",
        connections=64,
        cpu_bar=1.15,
        new_heads=True,
    ),
    Load(
        name="json-1",
        title="200-byte JSON, 1 connection",
        path="/small",
        connections=1,
        p99_bar=True,
    ),
    Load(
        name="json-8",
        title="200-byte JSON, 8 connections",
        path="/small",
        connections=8,
        p99_bar=True,
    ),
    Load(
        name="json-paced",
        title="200-byte JSON, 64 connections that pause: about 3000 requests/s",
        path="/small",
        connections=64,
        think_ms=(10, 30),
        p99_bar=True,
        flow_bar=1.6,
    ),
    Load(
        name="stream",
        title=f"streams of {STREAM_EVENTS} events, 64 at a time, paced by the upstream",
        path="/stream",
        connections=64,
        unit="stream",
        cpu_bar=1.25,
        flow_bar=1.6,
    ),
    Load(
        name="upload",
        title="1 MiB request body, 8 connections",
        path="/upload",
        connections=8,
    ),
    Load(
        name="open",
        title="2000 open streams, an event per second each",
        path="/slow",
        connections=2000,
        unit="event",
        memory_bar_bytes=40 * 1024,
    ),
)
BY_NAME: Final = {load.name: load for load in LOADS}
