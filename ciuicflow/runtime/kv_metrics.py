"""The agent's own port: /metrics for Prometheus, /kv/state for the gateway and for people."""

from collections.abc import Callable, Iterator

import msgspec
from aiohttp import web

from ciuicflow.observability.kv_metrics import KvMetrics, PathSample
from ciuicflow.observability.metrics import CONTENT_TYPE
from ciuicflow.runtime.kv_records import AgentState
from ciuicflow.transport.address import join_host_port, split_host_port


class MetricsPort:
    """Serves one agent's state. Give it a loopback address."""

    def __init__(self, state: Callable[[], AgentState]) -> None:
        self._state = state
        self._metrics = KvMetrics(self._paths, self._outcomes)
        self._runner: web.AppRunner | None = None

    def observe(self, role: str, tier: str, duration_s: float) -> None:
        """Count a transfer that has completed."""
        self._metrics.observe(role, tier, duration_s)

    async def listen(self, address: str) -> str:
        """Start serving; return HOST:PORT. Raises TransportError, OSError."""
        host, port = split_host_port(address)
        app = web.Application()
        app.add_routes(
            [web.get("/metrics", self._get_metrics), web.get("/kv/state", self._get_state)]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return join_host_port(self._runner.addresses[0])

    async def close(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _get_state(self, _request: web.Request) -> web.Response:
        body = msgspec.json.format(msgspec.json.encode(self._state()))
        return web.Response(body=body, content_type="application/json")

    def _paths(self) -> Iterator[PathSample]:
        for path in self._state().paths:
            yield PathSample(
                src=path.src,
                dst=path.dst,
                sent_bytes=path.sent_bytes,
                send_wait_s=path.send_wait_s,
                in_flight_bytes=path.in_flight_bytes,
                rate_bytes_per_s=path.congestion.rate_bytes_per_s,
                rtt_s=path.rtt_s,
                ce_fraction=path.ce_fraction,
            )

    def _outcomes(self) -> dict[tuple[str, str], int]:
        counts = {}
        for name, count in self._state().outcomes.items():
            role, _, outcome = name.partition(" ")
            counts[role, outcome] = count
        return counts
