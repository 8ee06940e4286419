"""The decode side of one peer: reserves blocks, takes in quanta, and commits what is whole.

A reservation ends in exactly one of `Complete` (its blocks are the engine's) and `Fail`. After a
failure its blocks are freed when no quantum for them can come any more, which `Drained` or the end
of the connection says, and no posted receive is left: one that is posted may write.
"""

from collections.abc import Iterable, Sequence

import msgspec

from ciuicflow.kvtransfer.actions import (
    Action,
    Complete,
    Discard,
    Fail,
    FreeBlocks,
    PostReceive,
)
from ciuicflow.kvtransfer.checksum import combine
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.planner import transfer_bytes
from ciuicflow.kvtransfer.ranges import Area, BlockList, Coverage, Piece
from ciuicflow.kvtransfer.session import COMPLETED, Session
from ciuicflow.kvtransfer.settings import SessionConfig
from ciuicflow.kvtransfer.snapshot import ReceiverState
from ciuicflow.kvtransfer.ticket import TransferId, TransferTicket
from ciuicflow.kvtransfer.wire import (
    Abort,
    Ack,
    Commit,
    Committed,
    Drained,
    Expect,
    Heartbeat,
    Hello,
    Message,
    Quantum,
    divide_runs,
)


class _Reservation(msgspec.Struct, eq=False, kw_only=True):
    """Blocks that wait for a transfer."""

    ticket: TransferTicket
    blocks: tuple[BlockList, ...]
    reserved_s: float
    deadline_s: float
    seen: Coverage
    announced: bool = False
    """Whether the sender was told, so that quanta may come."""
    failed: bool = False
    drained: bool = False
    """Whether no more quanta can come."""
    total_bytes: int = 0
    received_bytes: int = 0
    quanta: int = 0
    checksum: int | None = 0
    commit: Commit | None = None
    """What the sender says of the whole; decided on when no receive is posted any more."""
    posted: dict[int, int] = {}
    """Bytes of the receives that may write now, by sequence."""


class Receiver(Session):
    """Takes transfers in from one peer."""

    def __init__(self, hello: Hello, config: SessionConfig) -> None:
        """`hello.window_bytes` bounds what the peer may have in flight."""
        super().__init__(hello, config)
        self._reservations: dict[TransferId, _Reservation] = {}
        self._held: list[set[int]] = [set() for _ in hello.geometry.regions]
        self._next_seq = 0
        self._in_flight = 0
        self._received = 0

    # 1. Transfers.

    def reserve(
        self, now: float, ticket: TransferTicket, blocks: Sequence[Iterable[int]]
    ) -> list[Action]:
        """Hold blocks, by region and in the order of their tokens, for a transfer that will come.

        Without a session it waits for one. ValueError if the id or a block is in use already, or
        not every region has its blocks; empty ones count.
        """
        lists = tuple(map(BlockList.of, blocks))
        self._check_free(ticket.id, lists)
        reservation = _Reservation(
            ticket=ticket,
            blocks=lists,
            reserved_s=now,
            deadline_s=now + ticket.remaining_ms / 1000,
            seen=Coverage(),
        )
        actions: list[Action] = []
        full = len(self._reservations) >= self._config.transfers
        self._reservations[ticket.id] = reservation
        for held, part in zip(self._held, lists, strict=True):
            held.update(part)
        if full:
            detail = f"{self._config.transfers} transfers are under way"
            self._fail(now, reservation, FailReason.OVERLOADED, detail, actions)
            return actions
        self._timers.set(ticket.id, reservation.deadline_s)
        stale = self._stale(ticket.destination, ticket.source)
        if stale is not None:
            self._fail(now, reservation, FailReason.STALE, stale, actions)
        elif self._open:
            self._announce(now, reservation, actions)
        return actions

    def abort(
        self, now: float, id_: TransferId, reason: FailReason = FailReason.ABORTED, detail: str = ""
    ) -> list[Action]:
        """Give a transfer up, unless it has ended."""
        actions: list[Action] = []
        reservation = self._reservations.get(id_)
        if reservation is not None and not reservation.failed:
            self._fail(now, reservation, reason, detail, actions)
        return actions

    def _check_free(self, id_: TransferId, blocks: tuple[BlockList, ...]) -> None:
        if len(blocks) != len(self._held):
            raise ValueError(f"blocks of {len(blocks)} regions; expected {len(self._held)}")
        if id_ in self._reservations:
            raise ValueError(f"transfer {id_} is reserved already")
        if any(not held.isdisjoint(part) for held, part in zip(self._held, blocks, strict=True)):
            raise ValueError(f"transfer {id_}: a block is held for another transfer")

    def _announce(self, now: float, reservation: _Reservation, actions: list[Action]) -> None:
        reservation.announced = True
        reservation.total_bytes = transfer_bytes(
            self.hello.geometry, self._layers, reservation.blocks
        )
        remaining_ms = max(reservation.deadline_s - now, 0.0) * 1000
        parts = list(divide_runs(tuple(part.runs for part in reservation.blocks)))
        for part in parts:
            more = part is not parts[-1]
            self._say(now, Expect(reservation.ticket.id, part, remaining_ms, more), actions)

    # 2. What the sender says.

    def _handle(self, now: float, message: Message, actions: list[Action]) -> None:
        match message:
            case Quantum():
                self._on_quantum(now, message, actions)
            case Commit():
                self._on_commit(now, message, actions)
            case Abort():
                reservation = self._reservations.get(message.transfer)
                if reservation is not None and not reservation.failed:
                    self._fail(now, reservation, message.reason, "", actions, by_peer=True)
            case Drained():
                self._on_drained(now, message, actions)
            case Heartbeat():
                pass
            case _:
                self._break(now, f"a sender does not say {type(message).__name__}", actions)

    def _on_quantum(self, now: float, quantum: Quantum, actions: list[Action]) -> None:
        reservation = self._reservations.get(quantum.transfer)
        if reservation is None or not reservation.announced or reservation.drained:
            self._break(now, f"a quantum for {quantum.transfer}, not expected", actions)
            return
        fault = self._fault(reservation, quantum)
        if fault is not None:
            self._break(now, f"quantum {quantum.seq} of {quantum.transfer}: {fault}", actions)
            return
        self._next_seq += 1
        self._in_flight += quantum.bytes
        reservation.posted[quantum.seq] = quantum.bytes
        if reservation.failed:
            actions.append(Discard(quantum.transfer, quantum.seq, quantum.bytes))
        else:
            piece = _piece(reservation, quantum)
            actions.append(PostReceive(quantum.transfer, quantum.seq, piece))

    def _fault(self, reservation: _Reservation, quantum: Quantum) -> str | None:
        """Say what is wrong with a quantum; mark its area if it is good."""
        area = quantum.area
        if reservation.commit is not None:
            return "it comes after its commit"
        if quantum.seq != self._next_seq:
            return f"expected number {self._next_seq}"
        if self._in_flight and self._in_flight + quantum.bytes > self.hello.window_bytes:
            return f"more than {self.hello.window_bytes} bytes in flight"
        if not self._is_inside(reservation, area):
            return f"{area} lies outside of the transfer"
        if quantum.bytes != self.hello.geometry.bytes_of(area):
            return f"{quantum.bytes} bytes; expected {self.hello.geometry.bytes_of(area)}"
        if not reservation.seen.add(area):
            return f"a part of {area} came before"
        return None

    def _is_inside(self, reservation: _Reservation, area: Area) -> bool:
        if area.region >= len(self._layers):
            return False
        shared = self._layers[area.region]
        return (
            shared.first <= area.first_layer
            and area.first_layer + area.layers <= shared.end
            and area.first + area.count <= reservation.blocks[area.region].count
        )

    def _on_commit(self, now: float, commit: Commit, actions: list[Action]) -> None:
        reservation = self._reservations.get(commit.transfer)
        if reservation is None or not reservation.announced or reservation.drained:
            self._break(now, f"a commit of {commit.transfer}, not expected", actions)
            return
        if reservation.commit is not None:
            self._break(now, f"{commit.transfer} is committed twice", actions)
            return
        reservation.commit = commit
        self._decide(now, reservation, actions)

    def _decide(self, now: float, reservation: _Reservation, actions: list[Action]) -> None:
        """Complete or fail what is committed, once all its payloads are in place."""
        commit = reservation.commit
        if commit is None or reservation.posted or reservation.failed:
            return  # failed: our abort is on its way
        expected = (reservation.total_bytes, reservation.received_bytes, reservation.quanta)
        if expected != (commit.bytes, commit.bytes, commit.quanta):
            detail = (
                f"{reservation.received_bytes} of {reservation.total_bytes} bytes came in "
                f"{reservation.quanta} quanta, the sender counts {commit.bytes} in {commit.quanta}"
            )
            self._fail(now, reservation, FailReason.INCOMPLETE, detail, actions)
        elif commit.checksum != reservation.checksum:
            detail = f"{reservation.checksum} came, {commit.checksum} was sent"
            self._fail(now, reservation, FailReason.CHECKSUM, detail, actions)
        else:
            self._complete(now, reservation, actions)

    def _complete(self, now: float, reservation: _Reservation, actions: list[Action]) -> None:
        id_ = reservation.ticket.id
        self._forget(reservation)
        self._say(now, Committed(id_), actions)
        self.outcomes[reservation.ticket.tier, COMPLETED] += 1
        duration_s = now - reservation.reserved_s
        actions.append(Complete(id_, reservation.received_bytes, reservation.quanta, duration_s))

    def _on_drained(self, now: float, message: Drained, actions: list[Action]) -> None:
        reservation = self._reservations.get(message.transfer)
        if reservation is None:
            return
        if not reservation.failed:
            self._break(now, f"{message.transfer} drained, but not aborted", actions)
            return
        reservation.drained = True
        self._timers.clear(message.transfer)
        self._release(reservation, actions)

    # 3. What becomes of posted receives.

    def on_payload(
        self,
        now: float,
        id_: TransferId,
        seq: int,
        *,
        hold_ns: int = 0,
        ce_bytes: int | None = None,
        checksum: int | None = None,
    ) -> list[Action]:
        """All bytes of a receive are in place, or thrown away, and nothing writes them any more.

        `hold_ns`: how long ago that was. `checksum`: 32 bits. ValueError if it was not posted.
        """
        actions: list[Action] = []
        reservation, size = self._end_receive(id_, seq)
        self._received += size
        if not reservation.failed:
            reservation.received_bytes += size
            reservation.quanta += 1
            reservation.checksum = combine(reservation.checksum, seq, checksum)
        if self._open and reservation.announced:
            self._heard_s = now
            self._say(now, Ack(seq, size, hold_ns, ce_bytes), actions)
            self._decide(now, reservation, actions)
        self._release(reservation, actions)
        return actions

    def on_receive_failed(
        self, now: float, id_: TransferId, seq: int, detail: str = ""
    ) -> list[Action]:
        """A receive has ended without all its bytes, and nothing writes them any more.

        The session ends, since its next message cannot be found. ValueError if it was not posted.
        """
        actions: list[Action] = []
        reservation, _ = self._end_receive(id_, seq)
        if self._open and reservation.announced:
            detail = f"receive {seq} of {id_} failed: {detail}"
            self._close(now, FailReason.PEER_LOST, detail, actions)
        self._release(reservation, actions)
        return actions

    def _end_receive(self, id_: TransferId, seq: int) -> tuple[_Reservation, int]:
        reservation = self._reservations.get(id_)
        if reservation is None or seq not in reservation.posted:
            raise ValueError(f"receive {seq} of transfer {id_} is not posted")
        size = reservation.posted.pop(seq)
        if reservation.announced:
            self._in_flight -= size
        return reservation, size

    # 4. Failure.

    def _fail(
        self,
        now: float,
        reservation: _Reservation,
        reason: FailReason,
        detail: str,
        actions: list[Action],
        *,
        by_peer: bool = False,
    ) -> None:
        id_ = reservation.ticket.id
        reservation.failed = True
        self._timers.clear(id_)
        if reservation.announced and self._open:
            self._timers.set(id_, now + self._config.answer_s)
            if not by_peer:
                self._say(now, Abort(id_, reason), actions)
        self.outcomes[reservation.ticket.tier, reason.value] += 1
        actions.append(Fail(id_, reason, by_peer, detail))
        self._release(reservation, actions)

    def _release(self, reservation: _Reservation, actions: list[Action]) -> None:
        """Free the blocks of a failed transfer as soon as nothing can write them."""
        if not reservation.failed or reservation.posted:
            return
        if reservation.drained or not reservation.announced:
            self._forget(reservation)
            actions.append(FreeBlocks(reservation.ticket.id, reservation.blocks))

    def _forget(self, reservation: _Reservation) -> None:
        id_ = reservation.ticket.id
        del self._reservations[id_]
        self._timers.clear(id_)
        for held, part in zip(self._held, reservation.blocks, strict=True):
            held.difference_update(part)

    def _expire(self, now: float, key: str, actions: list[Action]) -> None:
        reservation = self._reservations[key]
        if not reservation.failed:
            self._fail(now, reservation, FailReason.DEADLINE, "", actions)
        elif self._open:
            detail = f"no answer to the abort of {key} in {self._config.answer_s} s"
            self._close(now, FailReason.STALLED, detail, actions)

    # 5. Sessions.

    def _established(self, now: float, actions: list[Action]) -> None:
        self._next_seq = 0
        self._in_flight = 0
        for reservation in list(self._reservations.values()):
            if reservation.failed:  # of an earlier session
                continue
            stale = self._stale(reservation.ticket.destination, reservation.ticket.source)
            if stale is not None:
                self._fail(now, reservation, FailReason.STALE, stale, actions)
            else:
                self._announce(now, reservation, actions)

    def _fail_all(self, now: float, reason: FailReason, detail: str, actions: list[Action]) -> None:
        for reservation in list(self._reservations.values()):
            if not reservation.failed:
                self._fail(now, reservation, reason, detail, actions)

    def _gone(self, now: float, actions: list[Action]) -> None:
        for reservation in list(self._reservations.values()):
            if reservation.announced:
                reservation.announced = False  # posted receives of it may still write
                self._timers.clear(reservation.ticket.id)
                self._release(reservation, actions)

    def snapshot(self) -> ReceiverState:
        """Return the state for metrics."""
        draining = sum(reservation.failed for reservation in self._reservations.values())
        return ReceiverState(
            established=self._open,
            reserved=len(self._reservations) - draining,
            draining=draining,
            in_flight_bytes=self._in_flight,
            received_bytes=self._received,
        )


def _piece(reservation: _Reservation, quantum: Quantum) -> Piece:
    area = quantum.area
    runs = reservation.blocks[area.region].pick(area.first, area.count)
    return Piece(area.region, area.first_layer, area.layers, runs, quantum.bytes)
