"""A request in flow control: who asks, what became of it there, and what its answer tells."""

import asyncio
import time
from typing import TYPE_CHECKING, Final

from ciuicflow.endpoint import EndpointId
from ciuicflow.errors import ProtocolError
from ciuicflow.flowcontrol.actions import Dispatch, Refuse
from ciuicflow.flowcontrol.cost import Usage
from ciuicflow.gateway.callers import Caller
from ciuicflow.gateway.headers import ResponseHead
from ciuicflow.gateway.meter import BodyMeter
from ciuicflow.observability.lines import FlowLine
from ciuicflow.observability.metrics import Metrics
from ciuicflow.request import Outcome
from ciuicflow.runtime.dispatcher import Dispatcher

if TYPE_CHECKING:
    from ciuicflow.gateway.handler import Handler
    from ciuicflow.gateway.relay import Exchange

_RESPONSE_LINES: Final = (
    b"X-Ciuic-Flow: enabled\r\nX-Ciuic-Tier: %b\r\n"
    b"X-Ciuic-Request-Id: %b\r\nX-Ciuic-Queue-Ms: %d\r\n"
)
UNKNOWN: Final = -1.0  # a time that has not come


class TierCounters:
    """Where the requests of one flow and tier are counted."""

    def __init__(self, metrics: Metrics, flow: str, tier: str) -> None:
        self.ended = metrics.traffic(flow, tier)
        self.further = metrics.tier(tier)


class Admission:
    """Made when an opted-in request arrives, read when it has ended."""

    def __init__(
        self,
        handler: "Handler",
        dispatcher: Dispatcher,
        exchange: "Exchange",
        caller: Caller,
        counters: TierCounters,
        lines: bytes | None,
    ) -> None:
        """Take `lines`, the header fields to send upstream; None: it is only enrolled.

        An enrolled request did not opt in: its bytes stay as they are, in both directions.
        """
        self._handler = handler
        self._dispatcher = dispatcher
        self._exchange = exchange
        self.id = dispatcher.next_id()
        self.tier: str = caller.tier
        self.tenant: str = caller.tenant
        self.counters = counters
        self.lines = lines
        self.request_id = f"{handler.instance}-{self.id}"
        """What the answer and the log line call it."""
        self.in_flow = False  # queued or on the ledger
        self.waited_s = 0.0
        self.ttft_s = UNKNOWN
        self.tokens = 0  # seen, as they came
        self._last_token_s = UNKNOWN
        self._granted = False
        self._meter: BodyMeter | None = None
        self._heartbeat: asyncio.TimerHandle | None = None

    @property
    def usage(self) -> Usage | None:
        """What the engine reported, if it did."""
        return self._meter.meter.usage if self._meter is not None else None

    def response_lines(self) -> bytes:
        """Return the header fields that its answer gets."""
        if self.lines is None:
            return b""
        return _RESPONSE_LINES % (
            self.tier.encode(),
            self.request_id.encode(),
            int(self.waited_s * 1e3),
        )

    # The verdict.

    def granted(self, grant: Dispatch) -> None:
        """See Waiter."""
        self.waited_s = grant.waited_s
        if not self._granted:  # it may be granted again, after an undeliverable try
            self._granted = True
            self.counters.further.queue_wait.observe(grant.waited_s)
        self._handler.granted(self._exchange, grant)

    def refused(self, refusal: Refuse) -> None:
        """See Waiter."""
        self.in_flow = False
        self.waited_s = refusal.waited_s
        outcome = refusal.outcome
        if self._exchange.retried and outcome is Outcome.NO_ENDPOINT:
            outcome = Outcome.UPSTREAM_FAILED  # sent once already, it may have been served
        self._exchange.refuse(outcome, retry_after_s=refusal.retry_after_s)

    def undeliverable(self, endpoint: EndpointId) -> None:
        """The endpoint can't be connected to: ask for another."""
        if self._handler.flow_enabled:
            self._dispatcher.undeliverable(self.id, endpoint, self)
        else:  # switched off in the meantime: nothing may wait
            self.leave_flow()

    def leave_flow(self) -> None:
        """Go on as a request that does not opt in, byte for byte."""
        self._withdraw()
        exchange = self._exchange
        exchange.admission = exchange.other_body = exchange.connecting = None
        self._handler.place(exchange)

    def shut_down(self) -> None:
        """Refuse it: the gateway ends."""
        self._withdraw()
        self._exchange.refuse(Outcome.SHUT_DOWN)

    def _withdraw(self, usage: Usage | None = None, *, answered: bool = False) -> None:
        """Leave queue and ledger."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self.in_flow:
            self.in_flow = False
            self._dispatcher.ended(self.id, usage, answered=answered)

    def start_heartbeats(self, interval_s: float) -> None:
        """Show the client of a stream that it waits, until an endpoint's first byte."""
        loop = asyncio.get_running_loop()

        def beat() -> None:
            if self._exchange.beat():
                self._heartbeat = loop.call_later(interval_s, beat)

        self._heartbeat = loop.call_later(interval_s, beat)

    # The answer.

    def answered(self, head: ResponseHead) -> None:
        """Its answer begins."""
        if head.status == 200:
            self._meter = BodyMeter(head)

    def body(self, data: bytes) -> None:
        """Bytes of the answer pass, in their framing."""
        if self._meter is None:
            return
        try:
            tokens = self._meter.feed(data)
        except ProtocolError:  # relayed all the same: its client may understand it
            self._meter = None
            return
        if tokens:
            self._count(tokens, time.monotonic())

    def _count(self, tokens: int, now: float) -> None:
        self.tokens += tokens
        if self.ttft_s < 0:
            self.ttft_s = now - self._exchange.started_s
            self.counters.further.first_token(self.ttft_s, now)
            self._dispatcher.first_token(self.id)
            more = tokens - 1
        else:
            self.counters.further.inter_token.observe((now - self._last_token_s) / tokens)
            more = tokens
        if more:
            self._dispatcher.progress(self.id, more)
        self._last_token_s = now

    def log_fields(self) -> FlowLine:
        """Return what its log line says of it."""
        usage = self.usage
        return FlowLine(
            self.request_id,
            self.tier,
            self.tenant,
            self.waited_s * 1e3,
            self.ttft_s * 1e3 if self.ttft_s >= 0 else None,
            usage.prompt_tokens if usage is not None else None,
            usage.cached_tokens if usage is not None else None,
            usage.completion_tokens if usage is not None else self.tokens or None,
        )

    def ended(self, outcome: Outcome) -> None:
        """It is over: off the ledger, or out of the queue."""
        usage = self.usage
        if usage is not None:
            counts = self.counters.further.tokens
            counts["prompt"] += usage.prompt_tokens
            counts["cached"] += usage.cached_tokens
            counts["completion"] += usage.completion_tokens
        answered = outcome is Outcome.COMPLETED and self._exchange.status == 200
        self._withdraw(usage, answered=answered)
