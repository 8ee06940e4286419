"""The admin port: metrics, health, readiness, state. Never part of the data port."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from ciuicflow.config import Address
from ciuicflow.gateway.listener import cannot_listen
from ciuicflow.observability.metrics import CONTENT_TYPE, Metrics

State = dict[str, Any]


class AdminServer:
    """Serves /metrics, /healthz, /readyz and /flow/state, and takes the kill switch, by aiohttp."""

    def __init__(
        self,
        metrics: Metrics,
        ready: Callable[[], list[str]],
        state: Callable[[], State],
        set_flow: Callable[[bool], None],
    ) -> None:
        """Take what to serve; `ready` returns the reasons why not, none when ready."""
        self._set_flow = set_flow
        self._metrics = metrics
        self._ready = ready
        self._state = state
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/healthz", self._get_health),
                web.get("/readyz", self._get_ready),
                web.get("/flow/state", self._get_state),
                web.post("/flow/disable", self._disable_flow),
                web.post("/flow/enable", self._enable_flow),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)

    async def listen(self, address: Address) -> str:
        """Start serving; return HOST:PORT. Raises StartError."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, address.host, address.port).start()
        except OSError as error:
            raise cannot_listen("admin", address, error) from None
        return str(Address(address.host, self._runner.addresses[0][1]))

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        page = self._metrics.render(time.monotonic())
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})

    async def _get_health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _get_ready(self, _request: web.Request) -> web.Response:
        reasons = self._ready()
        if reasons:
            return web.Response(status=503, text="\n".join(reasons) + "\n")
        return web.Response(text="ready\n")

    async def _get_state(self, _request: web.Request) -> web.Response:
        body = msgspec.json.format(msgspec.json.encode(self._state()))
        return web.Response(body=body, content_type="application/json")

    async def _disable_flow(self, _request: web.Request) -> web.Response:
        self._set_flow(False)
        return web.Response(text="every request bypasses, until /flow/enable or a reload\n")

    async def _enable_flow(self, _request: web.Request) -> web.Response:
        self._set_flow(True)
        return web.Response(text="requests that opt in are under flow control\n")
