"""The two kinds of links: to an agent that we send to, and from one that sends to us."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from ciuicflow.kvtransfer.layout import LayerRange
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.ranges import Run
from ciuicflow.kvtransfer.receiver import Receiver
from ciuicflow.kvtransfer.sender import Sender
from ciuicflow.kvtransfer.ticket import TransferId
from ciuicflow.runtime.kv_link import Link, Tools
from ciuicflow.runtime.kv_records import Abort, PathReport, Push, Ready, Reserve, SourceReport
from ciuicflow.transport.base import (
    ConnectFailed,
    Connection,
    Limits,
    PathStatistics,
    TransportUnavailable,
)
from ciuicflow.transport.table import connect

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5


class Destination(Link):
    """Sends to one agent; connects when there is something to send, and at once to be warm."""

    def __init__(
        self,
        machine: Sender,
        peer: str,
        uri: str,
        tools: Tools,
        *,
        limits: Limits,
        connect_s: float,
    ) -> None:
        super().__init__(machine, peer, tools, uri.partition(":")[0])
        self.uri = uri
        self._sender = machine
        self._limits = limits
        self._connect_s = connect_s
        self._waiting: set[TransferId] = set()
        """Pushed and not freed: they need a connection."""
        self._dialling: asyncio.Task[None] | None = None
        self._closed = False

    def push(self, push: Push) -> None:
        """Begin a transfer. ValueError as `Sender.submit`."""
        actions = self._sender.submit(self.now, push.ticket, push.blocks)
        self._waiting.add(push.ticket.id)
        self.do(actions)
        self.dial()

    def ready(self, ready: Ready) -> None:
        """Layers have been computed. ValueError as `Sender.ready`."""
        layers = LayerRange(ready.first_layer, ready.end_layer)
        positions = None if ready.first is None else Run(ready.first, ready.count)
        self.do(self._sender.ready(self.now, ready.transfer, layers, positions, ready.region))

    def abort(self, abort: Abort, reason: FailReason = FailReason.ABORTED) -> None:
        """Give a transfer up."""
        self.do(self._sender.abort(self.now, abort.transfer, reason, abort.detail))

    def forget(self, id_: TransferId) -> None:
        """A transfer has ended and its blocks are free."""
        self._waiting.discard(id_)

    def on_detached(self) -> None:
        """Connect again if something waits: what was under way has failed already."""
        if self._waiting:
            self.dial()

    def dial(self) -> None:
        """Connect, unless that is done or under way."""
        if self.channel is None and self._dialling is None and not self._closed:
            self._dialling = self._tools.loop.create_task(self._dial())

    async def _dial(self) -> None:
        try:
            connection = await self._connection()
        except (ConnectFailed, TransportUnavailable) as error:
            log.warning("no KV peer", extra={"peer": self.peer, "reason": str(error)})
            self._dialling = None
            self._fail_waiting(f"{self.peer} cannot be reached: {error}")
        else:
            self._dialling = None
            self.attach(connection)

    async def _connection(self) -> Connection:
        """Try until `connect_s` is over: a peer that starts again takes a while."""
        pause_s, until_s = _FIRST_PAUSE_S, self.now + self._connect_s
        while True:
            try:
                left_s = max(until_s - self.now, _FIRST_PAUSE_S)
                return await connect(self.uri, left_s, self._limits)
            except ConnectFailed:
                if self.now + pause_s >= until_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _fail_waiting(self, detail: str) -> None:
        for id_ in list(self._waiting):
            self.abort(Abort(id_, detail), FailReason.PEER_LOST)

    async def close(self) -> None:
        """Stop dialling and end the connection."""
        self._closed = True
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait({self._dialling})
        await super().close()
        for id_ in list(self._waiting):
            self.abort(Abort(id_, "the agent stops"))

    def report(self, agent: str) -> PathReport:
        """Return the state for metrics."""
        state = self._sender.snapshot(self.now)
        path = self.channel.connection.statistics() if self.channel is not None else None
        return PathReport(
            src=agent,
            dst=self.peer,
            uri=self.uri,
            established=state.established,
            transfers=state.transfers,
            in_flight_bytes=state.in_flight_bytes,
            sent_bytes=dict(self._sender.sent_bytes),
            acked_bytes=state.acked_bytes,
            send_wait_s=state.send_wait_s,
            rtt_s=state.srtt_s,
            ce_fraction=_ce_fraction(path),
            lanes=path.lanes if path is not None else (),
            congestion=state.congestion,
        )


def _ce_fraction(path: PathStatistics | None) -> float | None:
    if path is None or not path.delivered_segments or path.delivered_ce_segments is None:
        return None
    return path.delivered_ce_segments / path.delivered_segments


class Source(Link):
    """Receives from one agent, which connects to us."""

    def __init__(
        self,
        machine: Receiver,
        peer: str,
        tools: Tools,
        scheme: str,
        idle: Callable[["Source"], None],
    ) -> None:
        super().__init__(machine, peer, tools, scheme)
        self._receiver = machine
        self._reserved: set[TransferId] = set()
        self._idle = idle

    def reserve(self, reserve: Reserve) -> None:
        """Hold blocks for a transfer. ValueError as `Receiver.reserve`."""
        actions = self._receiver.reserve(self.now, reserve.ticket, reserve.blocks)
        self._reserved.add(reserve.ticket.id)
        self.do(actions)

    def abort(self, abort: Abort) -> None:
        """Give a transfer up."""
        self.do(self._receiver.abort(self.now, abort.transfer, detail=abort.detail))

    def forget(self, id_: TransferId) -> None:
        """Its blocks are the engine's again, or free."""
        self._reserved.discard(id_)

    def on_detached(self) -> None:
        """Be forgotten if nobody waits for this peer."""
        if not self._reserved:
            self._idle(self)

    async def close(self) -> None:
        """End the connection; what it had not failed, fails."""
        await super().close()
        for id_ in list(self._reserved):
            self.abort(Abort(id_, "the agent stops"))

    def report(self, agent: str) -> SourceReport:
        """Return the state for metrics."""
        state = self._receiver.snapshot()
        return SourceReport(
            src=self.peer,
            dst=agent,
            established=state.established,
            reserved=state.reserved,
            draining=state.draining,
            in_flight_bytes=state.in_flight_bytes,
            received_bytes=state.received_bytes,
        )
