"""The prefill side of one path: which quantum goes next, and when a transfer is whole.

A transfer starts when two things are known, in either order: our blocks (`submit`) and that the
peer has reserved its own (`Expect`). Its layers may become ready at any time, before or after. Each
transfer ends in exactly one of `Complete` and `Fail`; its blocks are freed after that, when the
transport has let go of every quantum of it.
"""

from collections.abc import Iterable, Sequence

from ciuicflow.congestion.base import Controller
from ciuicflow.kvtransfer.actions import Action, Complete, Fail, FreeBlocks, SendQuantum
from ciuicflow.kvtransfer.checksum import combine
from ciuicflow.kvtransfer.flight import Flight
from ciuicflow.kvtransfer.layout import LayerRange
from ciuicflow.kvtransfer.order import SendOrder
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.outgoing import Outgoing, Phase
from ciuicflow.kvtransfer.ranges import BlockList, Run
from ciuicflow.kvtransfer.rendezvous import Rendezvous
from ciuicflow.kvtransfer.session import COMPLETED, Session
from ciuicflow.kvtransfer.settings import SenderConfig
from ciuicflow.kvtransfer.snapshot import PathState
from ciuicflow.kvtransfer.ticket import TransferId, TransferTicket
from ciuicflow.kvtransfer.wire import (
    Abort,
    Ack,
    Commit,
    Committed,
    Drained,
    Expect,
    Frame,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Quantum,
)


class Sender(Session):
    """Sends transfers to one peer."""

    def __init__(self, hello: Hello, config: SenderConfig, controller: Controller) -> None:
        super().__init__(hello, config)
        self.sent_bytes: dict[str, int] = {}
        """By tier."""
        self._settings = config
        self._flight = Flight(controller, config.ack_timeout_s)
        self._order = SendOrder(config.order, config.quantum_bytes)
        self._transfers: dict[TransferId, Outgoing] = {}
        self._rendezvous = Rendezvous()
        self._unreleased = 0  # quanta that the transport may still read
        self._send_wait_s = 0.0
        self._held_since_s: float | None = None

    # 1. Transfers.

    def submit(
        self, now: float, ticket: TransferTicket, blocks: Sequence[Iterable[int]]
    ) -> list[Action]:
        """Take a transfer over, with our blocks by region, in the order of their tokens.

        ValueError if its id is under way already or not every region has its blocks; empty ones
        count.
        """
        if ticket.id in self._transfers:
            raise ValueError(f"transfer {ticket.id} is under way already")
        lists = tuple(map(BlockList.of, blocks))
        transfer = Outgoing(now, ticket, self.hello.geometry, lists, self._settings.batch)
        actions: list[Action] = []
        refusal = self._refuse_transfer(ticket)
        self._transfers[ticket.id] = transfer
        if refusal is not None:
            if self._rendezvous.take(ticket.id) is not None:
                self._turn_away(now, ticket.id, refusal[0], actions)
            self._fail(now, transfer, *refusal, actions)
            return actions
        self._timers.set(ticket.id, transfer.place.deadline_s)
        expect = self._rendezvous.take(ticket.id)
        if expect is not None:
            self._bind(now, transfer, expect, actions)
        return actions

    def ready(
        self,
        now: float,
        id_: TransferId,
        layers: LayerRange,
        positions: Run | None = None,
        region: int | None = None,
    ) -> list[Action]:
        """These layers have been computed, of all blocks or of those at some positions.

        Of all regions, or of one; what a region does not have of these layers is left out. For a
        transfer that has ended it changes nothing. ValueError if it was said before.
        """
        actions: list[Action] = []
        transfer = self._transfers.get(id_)
        if transfer is None or transfer.phase is Phase.ENDED:
            return actions
        transfer.ready(layers, positions, region)
        self._list(now, transfer)
        self._pump(now, actions)
        return actions

    def abort(
        self, now: float, id_: TransferId, reason: FailReason = FailReason.ABORTED, detail: str = ""
    ) -> list[Action]:
        """Give a transfer up, also one that will never be submitted.

        Too late once its commit is sent: the peer's answer, which may take `answer_s`, decides.
        """
        actions: list[Action] = []
        transfer = self._transfers.get(id_)
        if transfer is None:
            if self._rendezvous.take(id_) is not None:
                self._timers.clear(id_)
                self._turn_away(now, id_, reason, actions)
            self._rendezvous.end(id_, reason)
        elif transfer.phase in (Phase.WAITING, Phase.SENDING):
            self._fail(now, transfer, reason, detail, actions)
            self._pump(now, actions)
        return actions

    def _refuse_transfer(self, ticket: TransferTicket) -> tuple[FailReason, str] | None:
        ended = self._rendezvous.ended(ticket.id)
        if ended is not None:
            return ended, "it had ended before it was submitted"
        if len(self._transfers) >= self._config.transfers:
            return FailReason.OVERLOADED, f"{self._config.transfers} transfers are under way"
        stale = self._stale(ticket.source, ticket.destination)
        return (FailReason.STALE, stale) if stale is not None else None

    # 2. What the receiver says.

    def _handle(self, now: float, message: Message, actions: list[Action]) -> None:
        match message:
            case Ack():
                self._on_ack(now, message, actions)
            case Expect():
                self._on_expect(now, message, actions)
            case Committed():
                self._on_committed(now, message, actions)
            case Abort():
                self._on_abort(now, message, actions)
            case Heartbeat() | Grant():
                pass
            case _:
                self._break(now, f"a receiver does not say {type(message).__name__}", actions)

    def _on_ack(self, now: float, ack: Ack, actions: list[Action]) -> None:
        idle = self._held_since_s is None
        id_ = self._flight.ack(now, ack.seq, ack.bytes, ack.hold_ns, ack.ce_bytes, idle)
        if id_ is None:
            self._break(now, f"an acknowledgement of {ack.seq} that does not fit", actions)
            return
        transfer = self._transfers.get(id_)
        if transfer is not None and transfer.phase is Phase.COMMITTING:
            self._timers.set(id_, now + self._config.answer_s)
        self._pump(now, actions)

    def _on_expect(self, now: float, part: Expect, actions: list[Action]) -> None:
        try:
            expect = self._rendezvous.join(part)
        except ValueError as error:
            self._break(now, str(error), actions)
            return
        if expect is None:
            return
        id_ = expect.transfer
        transfer = self._transfers.get(id_)
        ended = self._rendezvous.ended(id_)
        if ended is not None:
            self._turn_away(now, id_, ended, actions)
        elif transfer is not None and transfer.phase is Phase.WAITING:
            self._bind(now, transfer, expect, actions)
        elif transfer is not None or self._rendezvous.holds(id_):
            self._break(now, f"{id_} is expected twice", actions)
        elif len(self._rendezvous) >= self._config.transfers:
            self._rendezvous.end(id_, FailReason.OVERLOADED)
            self._turn_away(now, id_, FailReason.OVERLOADED, actions)
        else:
            self._rendezvous.keep(expect)
            self._timers.set(id_, now + expect.remaining_ms / 1000)

    def _on_committed(self, now: float, message: Committed, actions: list[Action]) -> None:
        transfer = self._transfers.get(message.transfer)
        if transfer is None or transfer.phase is not Phase.COMMITTING:
            self._break(now, f"{message.transfer} committed, but not by us", actions)
            return
        self._end(transfer, FailReason.STALE)  # what its id would be if it were used again
        self.outcomes[transfer.ticket.tier, COMPLETED] += 1
        duration_s = now - transfer.submitted_s
        actions.append(Complete(message.transfer, transfer.sent_bytes, transfer.quanta, duration_s))
        self._release(transfer, actions)

    def _on_abort(self, now: float, abort: Abort, actions: list[Action]) -> None:
        transfer = self._transfers.get(abort.transfer)
        if transfer is not None and transfer.phase is not Phase.ENDED:
            self._fail(now, transfer, abort.reason, "", actions, by_peer=True)
            self._pump(now, actions)
            return
        if self._rendezvous.take(abort.transfer) is not None:
            self._timers.clear(abort.transfer)
        if self._rendezvous.ended(abort.transfer) is None:
            self._rendezvous.end(abort.transfer, abort.reason)
        self._say(now, Drained(abort.transfer), actions)

    def _bind(self, now: float, transfer: Outgoing, expect: Expect, actions: list[Action]) -> None:
        """Both sides are there: start."""
        transfer.phase = Phase.SENDING
        detail = transfer.mismatch(expect, self._layers)
        if detail is not None:
            self._fail(now, transfer, FailReason.MISMATCH, detail, actions)
            return
        transfer.plan.bind(self._layers, tuple(map(BlockList, expect.blocks)))
        self._list(now, transfer)
        self._commit_if_done(now, transfer, actions)
        self._pump(now, actions)

    # 3. Sending.

    def _list(self, now: float, transfer: Outgoing) -> None:
        """Put a transfer into the order, or take it out, as it has something to send or not."""
        if transfer.sendable:
            self._order.push(now, transfer.place)
        else:
            self._order.drop(transfer.place)

    def _pump(self, now: float, actions: list[Action]) -> None:
        """Send as long as something is ready and may go."""
        if self._held_since_s is not None:
            self._send_wait_s += now - self._held_since_s
            self._held_since_s = None
        while self._open and (place := self._order.next(now)) is not None:
            if not self._send_next(now, self._transfers[place.id], actions):
                self._held_since_s = now
                return

    def _send_next(self, now: float, transfer: Outgoing, actions: list[Action]) -> bool:
        """Send the next quantum of a transfer; False if it may not go now."""
        flight, plan = self._flight, transfer.plan
        is_full = flight.is_full or self._unreleased >= self._settings.quanta
        if is_full or now < flight.paced_until():
            return False
        if not transfer.parts:
            self._take_batch(transfer)
        area = transfer.parts[0]
        size = plan.bytes_of(area)
        if not flight.has_room(size):
            return False
        transfer.parts.popleft()
        id_, tier = transfer.ticket.id, transfer.ticket.tier
        seq = flight.send(now, id_, size)
        transfer.quanta += 1
        transfer.sent_bytes += size
        transfer.unreleased += 1
        self._unreleased += 1
        self.sent_bytes[tier] = self.sent_bytes.get(tier, 0) + size
        self._said_s = now
        frame = Frame(self.hello.incarnation, Quantum(id_, seq, area, size))
        actions.append(SendQuantum(frame, id_, seq, plan.piece(area)))
        self._order.charge(now, size)
        if not transfer.sendable:
            self._order.drop(transfer.place)
        return True

    def _take_batch(self, transfer: Outgoing) -> None:
        """Plan the next micro-batch: as much as the path carries in `service_s`."""
        quantum = self._settings.quantum_bytes
        rate = self._flight.rate
        target = quantum if rate is None else rate * self._settings.service_s
        batch = transfer.plan.take(target)
        transfer.parts.extend(transfer.plan.quanta(batch, min(quantum, self._flight.window)))

    def on_released(
        self, now: float, id_: TransferId, seq: int, checksum: int | None = None
    ) -> list[Action]:
        """The transport will not read the blocks of this quantum any more, sent or not.

        Once for every `SendQuantum`, also after the connection is gone. `checksum`: 32 bits, of the
        payload. ValueError if nothing of the transfer is with the transport.
        """
        actions: list[Action] = []
        transfer = self._transfers.get(id_)
        if transfer is None or not transfer.unreleased:
            raise ValueError(f"no quantum of transfer {id_} is with the transport")
        transfer.unreleased -= 1
        self._unreleased -= 1
        transfer.checksum = combine(transfer.checksum, seq, checksum)
        self._commit_if_done(now, transfer, actions)
        self._release(transfer, actions)
        if self._held_since_s is not None:
            self._pump(now, actions)
        return actions

    def _commit_if_done(self, now: float, transfer: Outgoing, actions: list[Action]) -> None:
        """Commit behind the last quantum, without waiting for acknowledgements.

        By then a window of lower tiers would be on its way, and the commit would queue behind it.
        """
        if not transfer.whole:
            return
        transfer.phase = Phase.COMMITTING
        self._timers.set(transfer.ticket.id, now + self._config.answer_s)
        message = Commit(
            transfer.ticket.id, transfer.sent_bytes, transfer.quanta, transfer.checksum
        )
        self._say(now, message, actions)

    # 4. The end.

    def _fail(
        self,
        now: float,
        transfer: Outgoing,
        reason: FailReason,
        detail: str,
        actions: list[Action],
        *,
        by_peer: bool = False,
    ) -> None:
        id_ = transfer.ticket.id
        if transfer.phase is not Phase.WAITING and self._open and not by_peer:
            self._say(now, Abort(id_, reason), actions)
        if self._open and (by_peer or transfer.phase is not Phase.WAITING):
            self._say(now, Drained(id_), actions)
        self._end(transfer, reason)
        self.outcomes[transfer.ticket.tier, reason.value] += 1
        actions.append(Fail(id_, reason, by_peer, detail))
        self._release(transfer, actions)

    def _end(self, transfer: Outgoing, reason: FailReason) -> None:
        transfer.phase = Phase.ENDED
        transfer.parts.clear()
        self._order.drop(transfer.place)
        self._timers.clear(transfer.ticket.id)
        self._rendezvous.end(transfer.ticket.id, reason)

    def _release(self, transfer: Outgoing, actions: list[Action]) -> None:
        """Free the blocks of an ended transfer as soon as nothing reads them."""
        if transfer.phase is Phase.ENDED and not transfer.unreleased:
            del self._transfers[transfer.ticket.id]
            actions.append(FreeBlocks(transfer.ticket.id, transfer.blocks))

    def _turn_away(
        self, now: float, id_: TransferId, reason: FailReason, actions: list[Action]
    ) -> None:
        """Tell the receiver that what it expects will not come."""
        self._say(now, Abort(id_, reason), actions)
        self._say(now, Drained(id_), actions)

    # 5. Time and sessions.

    def tick(self, now: float) -> list[Action]:
        """Do what is due."""
        actions = super().tick(now)
        if self._open:
            self._flight.tick(now)
        if self._open and self._flight.bytes and now >= self._stalls_s():
            detail = f"no acknowledgement for {now - self._flight.progress_s:.3f} s"
            self._close(now, FailReason.STALLED, detail, actions)
        self._pump(now, actions)
        return actions

    def next_timeout(self, now: float) -> float | None:
        """Return when `tick` is due; None: not before something happens."""
        dues = [super().next_timeout(now)]
        if self._open:
            dues.append(self._flight.next_timeout())
            if self._flight.bytes:
                dues.append(self._stalls_s())
            if self._held_since_s is not None and self._flight.paced_until() > now:
                dues.append(self._flight.paced_until())
        return min((due_s for due_s in dues if due_s is not None), default=None)

    def _stalls_s(self) -> float:
        return self._flight.progress_s + self._settings.stall_s

    def _expire(self, now: float, key: str, actions: list[Action]) -> None:
        transfer = self._transfers.get(key)
        if transfer is None:  # expected only; the receiver's own deadline ends it there
            self._rendezvous.take(key)
            self._rendezvous.end(key, FailReason.DEADLINE)
        elif transfer.phase is Phase.COMMITTING:
            detail = f"no answer to the commit of {key} in {self._config.answer_s} s"
            self._close(now, FailReason.STALLED, detail, actions)
        else:
            self._fail(now, transfer, FailReason.DEADLINE, "", actions)

    def _established(self, now: float, actions: list[Action]) -> None:
        assert self.peer is not None
        self._flight.reset(self.peer.window_bytes)
        for transfer in list(self._transfers.values()):
            stale = self._stale(transfer.ticket.source, transfer.ticket.destination)
            if stale is not None and transfer.phase is Phase.WAITING:
                self._fail(now, transfer, FailReason.STALE, stale, actions)

    def _fail_all(self, now: float, reason: FailReason, detail: str, actions: list[Action]) -> None:
        for id_ in self._rendezvous.clear(reason):
            self._timers.clear(id_)
        for transfer in list(self._transfers.values()):
            if transfer.phase is not Phase.ENDED:
                self._fail(now, transfer, reason, detail, actions)
        self._pump(now, actions)

    def _gone(self, now: float, actions: list[Action]) -> None:
        self._flight.reset(0)

    def snapshot(self, now: float) -> PathState:
        """Return the state for metrics."""
        held_s = now - self._held_since_s if self._held_since_s is not None else 0.0
        return PathState(
            established=self._open,
            transfers=len(self._transfers),
            in_flight_bytes=self._flight.bytes,
            acked_bytes=self._flight.acked_bytes,
            marked_bytes=self._flight.marked_bytes,
            srtt_s=self._flight.srtt_s,
            send_wait_s=self._send_wait_s + held_s,
            congestion=self._flight.controller.snapshot(),
        )
