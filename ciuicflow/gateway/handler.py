"""The path of a request. Start reading here, from `Handler.handle` downwards.

server.py has read a head and made an Exchange of it. Here it gets an endpoint and a connection;
then relay.py moves its bytes, and `finished` accounts for it. Nothing on the common path waits:
where a pooled connection is idle, the request is on its way before `handle` returns.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine
from typing import Any, Final

from ciuicflow.config import Config
from ciuicflow.endpoint import EndpointId, EndpointState
from ciuicflow.flowcontrol.actions import Dispatch, Item
from ciuicflow.gateway.admission import Admission, TierCounters
from ciuicflow.gateway.body import BodyFields, read_fields, with_priority
from ciuicflow.gateway.callers import Caller, Callers, TrustedPeers
from ciuicflow.gateway.endpoints import Endpoint, EndpointTable
from ciuicflow.gateway.models import ModelLister, is_model_list, model_in_path
from ciuicflow.gateway.relay import Exchange
from ciuicflow.gateway.responses import ANSWERS
from ciuicflow.observability.lines import RequestLine
from ciuicflow.observability.logs import LogWriter
from ciuicflow.observability.metrics import Metrics
from ciuicflow.request import Outcome
from ciuicflow.routing.base import Choice, RoutingPolicy, UnknownModel, eligible
from ciuicflow.routing.health import record_failure, record_live_success
from ciuicflow.runtime.dispatcher import Dispatcher

log = logging.getLogger(__name__)

_COMPLETED: Final = Outcome.COMPLETED  # an enum's members are slow to look up

# Outcomes that say that the endpoint is at fault (conformance 24).
_ENDPOINT_FAULTS: Final = {
    Outcome.UPSTREAM_FAILED: "reset",
    Outcome.UPSTREAM_BROKEN: "broken",
    Outcome.UPSTREAM_TIMEOUT: "timeout",
}


class Handler:
    """Takes exchanges from the client side, finds each an endpoint, and accounts for them."""

    def __init__(
        self,
        config: Config,
        endpoints: EndpointTable,
        policy: RoutingPolicy,
        dispatcher: Dispatcher,
        models: ModelLister,
        metrics: Metrics,
        log_writer: LogWriter,
        instance: str,
    ) -> None:
        """Take the parts; `instance` begins the request ids of this process."""
        self.instance = instance
        self.endpoints = endpoints
        self.policy = policy
        self.draining = False
        self._dispatcher = dispatcher
        self._models = models
        self._metrics = metrics
        self._bypass = metrics.traffic("bypass", "none")
        self._log = log_writer
        self._buffered_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over reloaded settings."""
        self.config = config
        self._callers = Callers(config.flow)
        self._peers = TrustedPeers(config.trusted_peers)
        self._bypass_tier = config.flow.bypass_tier
        self._ranks = {tier.name: rank for rank, tier in enumerate(config.flow.ranked)}
        self._counters = {
            name: TierCounters(self._metrics, "enabled", name) for name in self._ranks
        }
        self.set_flow(config.flow.enabled)

    def set_flow(self, enabled: bool) -> None:
        """Throw the kill switch: without flow control every request bypasses, those queued too."""
        self.flow_enabled = enabled
        if not enabled:
            for waiter in self._dispatcher.release_all():
                assert isinstance(waiter, Admission)
                waiter.leave_flow()

    @property
    def retry_after_s(self) -> float:
        """When a refused client may try again: after the probes that can bring an endpoint up."""
        health = self.config.health
        return health.interval_s * health.recover_threshold

    # 1. A request has arrived.

    def handle(self, exchange: Exchange) -> None:
        """Start an exchange whose head, and maybe some of its body, is here."""
        head = exchange.head
        if head.method == b"CONNECT":
            exchange.refuse(Outcome.METHOD_REFUSED)
        elif self.flow_enabled and (head.flow is not None or self._bypass_tier):
            self._enter_flow(exchange)
        else:
            self._bypass_flow(exchange)

    def _bypass_flow(self, exchange: Exchange) -> None:
        """Send a request on without delay."""
        head = exchange.head
        if self.endpoints.sole is not None:
            self.place(exchange)  # whatever it asks for, it asks that one
        elif is_model_list(head):
            exchange.connecting = self._spawn(exchange, self._list_models(exchange))
        elif head.method == b"POST" and exchange.has_body and self.endpoints.models_known:
            exchange.collect()  # the model is in the body: `collected` goes on
        else:
            exchange.model = model_in_path(head.target)
            self.place(exchange)

    def collected(self, exchange: Exchange) -> None:
        """Go on with a request whose whole body is here."""
        body = exchange.payload()
        fields = read_fields(body)
        exchange.model = fields.model
        if exchange.admission is not None and self.flow_enabled:
            self._enqueue(exchange, exchange.admission, fields, len(body))
        else:
            exchange.admission = None  # switched off in the meantime
            self.place(exchange)

    # 1a. Opted in: who asks, and may it go now? Others go to 2 at once.

    def _enter_flow(self, exchange: Exchange) -> None:
        fields = exchange.head.flow
        if fields is None:
            assert self._bypass_tier is not None
            caller, lines = Caller("", self._bypass_tier), None
            counters = TierCounters(self._metrics, "bypass", caller.tier)
        else:
            caller, lines = self._callers.identify(fields), fields.lines
            counters = self._counters[caller.tier]
        exchange.admission = Admission(self, self._dispatcher, exchange, caller, counters, lines)
        if not caller.accepted:
            exchange.refuse(Outcome.UNKNOWN_KEY)
        elif exchange.head.method == b"POST" and exchange.has_body and not exchange.head.upgrade:
            exchange.collect()  # what it costs is in the body: `collected` goes on
        else:
            self._bypass_flow(exchange)

    def _enqueue(
        self, exchange: Exchange, admission: Admission, fields: BodyFields, body_bytes: int
    ) -> None:
        """Ask flow control; the verdict is `granted` or a refusal, maybe before this returns."""
        head = exchange.head.flow
        admission.in_flow = True
        if not admission.tenant:
            address = self._peers.client(exchange.client.peer, head.forwarded_for if head else "")
            admission.tenant = f"user:{fields.user}" if fields.user else f"address:{address}"
        exchange.release_buffer()  # flow control has bounds of its own
        if self.endpoints.models_known and not self._may_serve(fields.model):
            admission.in_flow = False
            self._refuse_model(exchange)
            return
        self._dispatcher.enqueue(
            Item(
                id=admission.id,
                tenant=admission.tenant,
                tier=admission.tier,
                model=fields.model,
                body_bytes=body_bytes,
                max_tokens=fields.max_tokens,
                deadline_s=(
                    exchange.started_s + head.deadline_ms / 1e3
                    if head is not None and head.deadline_ms
                    else None
                ),
                streams=fields.stream,
            ),
            admission,
        )
        heartbeat_s = self.config.flow.heartbeat_s
        if heartbeat_s is not None and fields.stream and admission.lines is not None:
            admission.start_heartbeats(heartbeat_s)

    def _may_serve(self, model: str | None) -> bool:
        return any(state.may_serve(model) for state in self.endpoints.states)

    def granted(self, exchange: Exchange, grant: Dispatch) -> None:
        """Send a request to where flow control has made room for it."""
        endpoint = self.endpoints[grant.legs[0].endpoint]
        self._assign(exchange, endpoint, grant.reason)
        self._give_priority(exchange, endpoint, grant.tier)
        self._send(exchange, endpoint)

    def _give_priority(self, exchange: Exchange, endpoint: Endpoint, tier: str) -> None:
        """Tell an engine that has priorities of its own, where the operator wants that."""
        order = endpoint.priority_order
        admission = exchange.admission
        exchange.other_body = None  # an endpoint before this one may have wanted it
        if order is not None and admission is not None and admission.lines is not None:
            value = order.value_of(self._ranks[tier], len(self._ranks))
            payload = exchange.payload()
            body = with_priority(payload, value)
            if body is not payload:
                exchange.other_body = body

    # 2. Which endpoint?

    def place(self, exchange: Exchange) -> None:
        """Choose an endpoint and send the request there, or refuse it."""
        endpoint = self.endpoints.sole
        if endpoint is not None:
            self._assign(exchange, endpoint, "only")
        else:
            endpoint = self._choose(exchange)
            if endpoint is None:
                return
        self._send(exchange, endpoint)

    def _send(self, exchange: Exchange, endpoint: Endpoint) -> None:
        upstream = endpoint.pool.checkout() if exchange.replayable else None
        if upstream is not None:
            exchange.attach(upstream)
        else:
            exchange.connecting = self._spawn(exchange, self._connect(exchange, endpoint))

    def _choose(self, exchange: Exchange, excluded: Collection[EndpointId] = ()) -> Endpoint | None:
        try:
            candidates = eligible(self.endpoints.states, exchange.model, excluded)
        except UnknownModel:
            self._refuse_model(exchange)
            return None
        if not candidates:
            self._unassign(exchange)
            # Sent once already, it may have been served: not to be said to be refused.
            outcome = Outcome.UPSTREAM_FAILED if exchange.retried else Outcome.NO_ENDPOINT
            exchange.refuse(outcome, detail=exchange.detail)
            return None
        only = len(candidates) == 1
        choice = Choice(candidates[0], "only") if only else self.policy.pick(candidates)
        endpoint = self.endpoints[choice.endpoint.id]
        self._assign(exchange, endpoint, choice.reason)
        return endpoint

    def _assign(self, exchange: Exchange, endpoint: Endpoint, why: str) -> None:
        """Put the exchange on the ledger of the endpoint, and off that of the one before."""
        self._unassign(exchange)
        exchange.endpoint = endpoint
        exchange.why = why
        state = endpoint.state
        state.in_flight += 1
        if exchange.admission is None:
            state.bypass_in_flight += 1
            state.bypass_arrived += 1
            state.bypass_bytes += exchange.head.content_length

    def _unassign(self, exchange: Exchange) -> None:
        if exchange.endpoint is not None:
            self._discount(exchange, exchange.endpoint.state)
            exchange.endpoint = None
            exchange.why = ""

    def _discount(self, exchange: Exchange, state: EndpointState) -> None:
        state.in_flight -= 1
        if exchange.admission is None:
            state.bypass_in_flight -= 1
            state.bypass_bytes -= exchange.head.content_length
            if self._dispatcher.waiting:
                self._dispatcher.bypass_left()

    def _refuse_model(self, exchange: Exchange) -> None:
        detail = f"`{exchange.model}`"[:200]
        exchange.refuse(Outcome.UNKNOWN_MODEL, detail=detail, param="model")

    # 3. Connect, where no connection is idle; go to another endpoint where that fails.

    async def _connect(self, exchange: Exchange, endpoint: Endpoint) -> None:
        tried: list[EndpointId] = []
        next_endpoint: Endpoint | None = endpoint
        while next_endpoint is not None:
            endpoint = next_endpoint
            try:
                upstream = await endpoint.pool.connect()
            except (OSError, UnicodeError) as error:  # UnicodeError: a host name that can't be one
                exchange.detail = f"{endpoint.state.id}: {_spell(error)}"
                self._failed(endpoint, "connect", exchange.detail)
                if exchange.admission is not None and exchange.admission.in_flow:
                    exchange.connecting = None
                    self._unassign(exchange)
                    exchange.admission.undeliverable(endpoint.state.id)
                    return
                tried.append(endpoint.state.id)
                next_endpoint = self._choose(exchange, tried)
            else:
                exchange.attach(upstream)
                return

    def retry(self, exchange: Exchange) -> None:
        """Send a request again whose pooled connection proved dead, on a fresh one (once)."""
        endpoint = exchange.endpoint
        assert endpoint is not None
        self._metrics.retry(endpoint.state.id)
        exchange.connecting = self._spawn(exchange, self._connect(exchange, endpoint))

    # 4. relay.py moves the bytes until the exchange ends.

    # 5. It has ended.

    def finished(self, exchange: Exchange, outcome: Outcome) -> None:
        """Account for an exchange; called exactly once for each."""
        now = time.monotonic()
        duration_s = now - exchange.started_s
        admission = exchange.admission
        traffic = self._bypass if admission is None else admission.counters.ended
        traffic.observe(outcome, exchange.status, duration_s, now)
        endpoint = exchange.endpoint
        if endpoint is not None:
            self._discount(exchange, endpoint.state)
            if outcome is not _COMPLETED or exchange.status >= 500 or endpoint.state.failures:
                self._judge(endpoint, exchange, outcome)
        if self._log.requests:
            head = exchange.head
            self._log.request(
                RequestLine(
                    time.time(),
                    head.method,
                    head.target,
                    exchange.status,
                    outcome,
                    endpoint.state.id if endpoint is not None else "",
                    exchange.why,
                    duration_s * 1e3,
                    exchange.bytes_in,
                    exchange.bytes_out,
                    exchange.client.peer,
                    admission.log_fields() if admission is not None else None,
                )
            )
        if admission is not None:
            admission.ended(outcome)

    def refused(self, peer: str, outcome: Outcome) -> None:
        """Account for bytes that never became a request."""
        answer = ANSWERS[outcome]
        status = answer.status if answer is not None else 0
        self._bypass.observe(outcome, status, 0.0, time.monotonic())
        if self._log.requests:
            self._log.request(
                RequestLine(time.time(), b"-", b"-", status, outcome, "", "", 0.0, 0, 0, peer)
            )

    def _judge(self, endpoint: Endpoint, exchange: Exchange, outcome: Outcome) -> None:
        """Let live traffic tell whether the endpoint is well."""
        fault = _ENDPOINT_FAULTS.get(outcome)
        if fault is None and outcome is Outcome.COMPLETED:
            if exchange.status < 500:
                if record_live_success(endpoint.state):
                    log.info("endpoint is up again", extra={"endpoint": endpoint.state.id})
                    self._dispatcher.endpoints_changed()
                return
            fault = "5xx"
        if fault is not None:
            self._failed(endpoint, fault, exchange.detail or f"status {exchange.status}")

    def _failed(self, endpoint: Endpoint, reason: str, detail: str) -> None:
        self._metrics.upstream_failure(endpoint.state.id, reason)
        if record_failure(endpoint.state, self.config.health):
            log.warning(
                "endpoint is down: the next requests go to others while there are any",
                extra={"endpoint": endpoint.state.id, "reason": detail},
            )
            self._dispatcher.endpoints_changed()

    # Beside the path.

    def refuse_queued(self) -> None:
        """Refuse what still waits: the gateway ends."""
        for waiter in self._dispatcher.release_all():
            assert isinstance(waiter, Admission)
            waiter.shut_down()

    def buffer(self, size_bytes: int) -> bool:
        """Count body bytes that are held, negative ones given back. False: there are too many."""
        self._buffered_bytes += size_bytes
        return self._buffered_bytes <= self.config.limits.buffered_bytes

    async def _list_models(self, exchange: Exchange) -> None:
        listing = await self._models.union(exchange.head, list(self.endpoints))
        if listing is None:
            exchange.refuse(Outcome.NO_ENDPOINT)
        else:
            exchange.answer(listing.status, listing.body)

    def _spawn(
        self, exchange: Exchange, coroutine: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        """Start what an exchange must wait for; it ends with the exchange, and the other way."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                log.error("a request failed in the gateway", exc_info=error)
                exchange.connecting = None
                exchange.refuse(Outcome.UPSTREAM_FAILED)

        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(done)
        return task


def _spell(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no connection in time"
    return str(error) or type(error).__name__
