"""Wires the gateway together: the only place where its parts are made."""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import aiohttp
import msgspec

from ciuicflow import __version__
from ciuicflow.config import Address, Config
from ciuicflow.endpoint import EndpointState
from ciuicflow.errors import ConfigError, StartError
from ciuicflow.gateway.admin import AdminServer
from ciuicflow.gateway.deadlines import Deadlines
from ciuicflow.gateway.endpoints import Endpoint, EndpointTable
from ciuicflow.gateway.flow_pick import FlowPick
from ciuicflow.gateway.handler import Handler
from ciuicflow.gateway.inbox import Inbox
from ciuicflow.gateway.listener import ClientServer
from ciuicflow.gateway.models import ModelLister
from ciuicflow.observability.logs import LogWriter
from ciuicflow.observability.metrics import EndpointSample, Metrics
from ciuicflow.routing.base import RoutingPolicy
from ciuicflow.routing.table import POLICIES
from ciuicflow.runtime import lag
from ciuicflow.runtime.dispatcher import Dispatcher
from ciuicflow.runtime.probe import Prober, ProbeTarget
from ciuicflow.runtime.report import Reporter, ReportTarget

log = logging.getLogger("ciuicflow")

_DRAIN_POLL_S: Final = 0.02


class App:
    """The gateway: a Service for runtime/lifecycle.py."""

    def __init__(self, load: Callable[[], Config], log_writer: LogWriter) -> None:
        """Take how to get the configuration; a running event loop is needed. Raises StartError."""
        self._load = load
        self._config = config = load()
        self._log_writer = log_writer
        self._deadlines = Deadlines(config.timeouts)
        inbox = Inbox()
        self._endpoints = EndpointTable(config, self._deadlines, inbox)
        self._pick = FlowPick(_flow_policy(config), lambda id_: self._endpoints[id_].state)
        self._dispatcher = Dispatcher(config.flow, self._endpoints.for_flow, self._pick)
        self._dispatcher.watch(self._endpoints.states)
        self._metrics = Metrics(
            endpoints=self._samples,
            client_connections=lambda: self._server.connections,
            log_lines_dropped=lambda: log_writer.dropped,
            queue_depths=self._queue_depths,
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._prober = Prober(
            self._session,
            lambda: _probe_targets(list(self._endpoints)),
            config.health,
            lambda state: self._metrics.upstream_failure(state.id, "probe"),
            self._dispatcher.endpoints_changed,
        )
        self._reporter = Reporter(
            self._session,
            lambda: _report_targets(list(self._endpoints)),
            lambda: self._handler.flow_enabled and self._dispatcher.active,
            lambda endpoint, report: self._dispatcher.report(endpoint, report.waiting),
        )
        self._models = ModelLister(self._session, config.timeouts.connect_s)
        self._handler = Handler(
            config,
            self._endpoints,
            POLICIES[config.routing](random.Random()),
            self._dispatcher,
            self._models,
            self._metrics,
            log_writer,
            f"{random.SystemRandom().getrandbits(32):08x}",
        )
        self._server = ClientServer(config, self._handler, self._deadlines, inbox)
        self._admin = AdminServer(
            self._metrics, self._not_ready, self._state, self._handler.set_flow
        )
        self._background: list[asyncio.Task[None]] = []
        self._reloading = asyncio.Lock()

    # Service.

    async def start(self) -> str:
        """See Service."""
        admin = await self._admin.listen(Address.parse(self._config.admin))
        if len(self._endpoints) > 1:
            # Which of several takes a request depends on their models: learn them first.
            await self._prober.probe_all()
        listen = await self._server.listen(self._config)
        loop = asyncio.get_running_loop()
        self._background += [
            loop.create_task(self._prober.run()),
            loop.create_task(self._reporter.run()),
            loop.create_task(lag.measure(self._set_lag)),
        ]
        return f"ready listen={listen} admin={admin}"

    def reload(self) -> None:
        """See Service. A bad configuration changes nothing."""
        task = asyncio.get_running_loop().create_task(self._reload())
        self._background.append(task)
        task.add_done_callback(self._background.remove)

    async def _reload(self) -> None:
        async with self._reloading:
            try:
                config = self._load()
                self._check_unchanged(config)
                if config.tls is not None:
                    config.tls.context()
                endpoints = self._endpoints.prepare(config)
            except (ConfigError, StartError) as error:
                self._metrics.reload("failure")
                log.error(
                    "configuration not reloaded, the old one stays", extra={"reason": str(error)}
                )
                return
            # Which of several takes a request depends on their models: learn them first.
            await asyncio.gather(
                *(
                    self._prober.read_models(target)
                    for target in _probe_targets(endpoints.values())
                    if target.reads_models and target.state.models is None
                )
            )
            self._endpoints.adopt(endpoints, config)
            self._adopt(config)

    def _adopt(self, config: Config) -> None:
        self._server.configure(config)
        if config.routing != self._config.routing:
            self._handler.policy = POLICIES[config.routing](random.Random())
            self._pick.policy = _flow_policy(config)
        self._config = config
        self._handler.configure(config)
        self._dispatcher.configure(config.flow)
        self._dispatcher.watch(self._endpoints.states)
        self._deadlines.configure(config.timeouts)
        self._log_writer.configure(config.log)
        self._prober.policy = config.health
        self._models.timeout_s = config.timeouts.connect_s
        self._metrics.reload("success")
        log.info("configuration reloaded", extra={"upstreams": len(config.upstreams)})

    async def drain(self) -> None:
        """See Service."""
        timeouts = self._config.timeouts
        self._server.draining = self._handler.draining = True
        await asyncio.sleep(timeouts.settle_s)
        self._server.stop_listening()
        loop = asyncio.get_running_loop()
        end = loop.time() + timeouts.drain_s
        while self._server.connections and loop.time() < end:
            await asyncio.sleep(_DRAIN_POLL_S)
            self._server.close_idle()
        if self._server.connections:
            log.warning(
                "drain time is over: cutting what is left",
                extra={"connections": self._server.connections},
            )

    async def stop(self) -> None:
        """See Service."""
        self._server.stop_listening()
        self._handler.refuse_queued()
        self._server.shut_down()
        for task in self._background:
            task.cancel()
        self._dispatcher.close()
        self._endpoints.close()
        self._deadlines.close()
        await self._admin.close()
        await self._session.close()

    # What the parts ask each other.

    def _check_unchanged(self, config: Config) -> None:
        for name in ("listen", "admin"):
            old, new = getattr(self._config, name), getattr(config, name)
            if old != new:
                raise ConfigError(f"$.{name}: {old} cannot become {new} without a restart")
        if (self._config.tls is None) != (config.tls is None):
            raise ConfigError("$.tls cannot be switched on or off without a restart")

    def _samples(self) -> Iterator[EndpointSample]:
        ledgers = {ledger.id: ledger for ledger in self._dispatcher.snapshot().endpoints}
        for endpoint in self._endpoints:
            state, pool = endpoint.state, endpoint.pool
            ledger = ledgers[state.id]
            yield EndpointSample(
                state.id,
                state.up,
                state.in_flight,
                pool.idle,
                pool.busy,
                ledger.tokens_in_flight,
                ledger.limit_tokens,
                ledger.limit_requests,
            )

    def _queue_depths(self) -> dict[str, int]:
        return {tier.name: tier.queued for tier in self._dispatcher.snapshot().tiers}

    def _not_ready(self) -> list[str]:
        reasons = []
        if self._server.draining:
            reasons.append("draining")
        if not any(state.up for state in self._endpoints.states):
            reasons.append("no endpoint is up")
        return reasons

    def _set_lag(self, lag_s: float) -> None:
        self._metrics.event_loop_lag_s = lag_s

    def _state(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "ready": not self._not_ready(),
            "draining": self._server.draining,
            "routing": self._config.routing,
            "client_connections": self._server.connections,
            "flow": {
                "enabled": self._handler.flow_enabled,
                **msgspec.to_builtins(self._dispatcher.snapshot()),
            },
            "endpoints": [
                _describe(endpoint.state)
                | {
                    "url": str(endpoint.address),
                    "idle_connections": endpoint.pool.idle,
                    "busy_connections": endpoint.pool.busy,
                }
                for endpoint in self._endpoints
            ],
        }


def _flow_policy(config: Config) -> RoutingPolicy | None:
    if config.routing == "least_load":
        return None  # by the limits that flow control has learnt
    return POLICIES[config.routing](random.Random())


def _probe_targets(endpoints: Collection[Endpoint]) -> Iterator[ProbeTarget]:
    several = len(endpoints) > 1
    for endpoint in endpoints:
        upstream = endpoint.upstream
        yield ProbeTarget(
            endpoint.state,
            str(endpoint.address),
            upstream.probe_headers,
            endpoint.tls,
            upstream.models is None and several,
        )


def _report_targets(endpoints: Collection[Endpoint]) -> Iterator[ReportTarget]:
    for endpoint in endpoints:
        upstream = endpoint.upstream
        yield ReportTarget(
            endpoint.state.id,
            str(endpoint.address),
            upstream.engine,
            upstream.probe_headers,
            endpoint.tls,
        )


def _describe(state: EndpointState) -> dict[str, Any]:
    return {
        "name": state.id,
        "up": state.up,
        "models": None if state.models is None else sorted(state.models),
        "in_flight": state.in_flight,
        "failures": state.failures,
    }
