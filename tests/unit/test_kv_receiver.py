"""What a receiver takes in, what it refuses, when it commits and when it frees."""

from collections.abc import Iterable
from typing import Any

import pytest
from support.kv import hello, kinds, messages, receiver, ticket

from ciuicflow.kvtransfer.actions import (
    Close,
    Complete,
    Discard,
    Fail,
    FreeBlocks,
    PostReceive,
)
from ciuicflow.kvtransfer.checksum import combine
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.ranges import Area, Piece, Run
from ciuicflow.kvtransfer.receiver import Receiver
from ciuicflow.kvtransfer.wire import (
    Abort,
    Ack,
    Commit,
    Drained,
    Expect,
    Frame,
    Message,
    Quantum,
)

WHOLE = (Area(0, 0, 3, 0, 1), Area(1, 0, 2, 0, 1))  # of one block in both regions
SIZES = (300, 80)


def established(**other: Any) -> Receiver:
    machine = receiver(**other)
    machine.on_connect(0.0)
    machine.on_frame(0.0, Frame(1, hello("p")))
    return machine


def say(machine: Receiver, *said: Message, now: float = 0.0) -> list[Any]:
    return [action for message in said for action in machine.on_frame(now, Frame(1, message))]


def reserved(blocks: Iterable[list[int]] = ([4], [6]), **other: Any) -> Receiver:
    machine = established(**other)
    machine.reserve(0.0, ticket(), list(blocks))
    return machine


def send_all(machine: Receiver, checksums: tuple[int | None, int | None] = (1, 2)) -> None:
    for seq, (area, size, checksum) in enumerate(zip(WHOLE, SIZES, checksums, strict=True)):
        say(machine, Quantum("t", seq, area, size))
        machine.on_payload(0.0, "t", seq, checksum=checksum)


TOTAL = combine(combine(0, 0, 1), 1, 2)


def test_a_reservation_is_announced_with_its_blocks_and_the_time_left() -> None:
    machine = established()
    actions = machine.reserve(1.0, ticket(remaining_ms=2500), [[4, 5, 9], []])
    assert messages(actions) == [Expect("t", ((Run(4, 2), Run(9, 1)), ()), 2500.0)]


def test_without_a_session_a_reservation_waits_for_one() -> None:
    machine = receiver()
    assert machine.reserve(0.0, ticket(remaining_ms=2500), [[4], [6]]) == []
    machine.on_connect(1.0)
    actions = machine.on_frame(1.5, Frame(1, hello("p")))
    assert messages(actions) == [Expect("t", ((Run(4, 1),), (Run(6, 1),)), 1000.0)]


def test_a_payload_is_received_into_the_reserved_blocks_and_acknowledged() -> None:
    machine = reserved([[4, 5, 9], []])
    (action,) = say(machine, Quantum("t", 0, Area(0, 1, 1, 1, 2), 200))
    assert action == PostReceive("t", 0, Piece(0, 1, 1, (Run(5, 1), Run(9, 1)), 200))
    assert machine.snapshot().in_flight_bytes == 200
    actions = machine.on_payload(0.1, "t", 0, hold_ns=7, ce_bytes=50)
    assert messages(actions) == [Ack(0, 200, 7, 50)]
    assert machine.snapshot().in_flight_bytes == 0


def test_unknown_marks_are_said_to_be_unknown() -> None:
    machine = reserved()
    say(machine, Quantum("t", 0, WHOLE[0], 300))
    assert messages(machine.on_payload(0.1, "t", 0)) == [Ack(0, 300, 0, None)]


def test_payloads_may_finish_in_any_order() -> None:
    machine = reserved()
    say(machine, *(Quantum("t", seq, WHOLE[seq], SIZES[seq]) for seq in (0, 1)))
    machine.on_payload(0.0, "t", 1, checksum=2)
    machine.on_payload(0.0, "t", 0, checksum=1)
    actions = say(machine, Commit("t", 380, 2, TOTAL), now=2.0)
    assert kinds(actions) == ["Committed", "Complete"]
    assert actions[1] == Complete("t", 380, 2, 2.0)
    assert machine.outcomes == {("gold", "completed"): 1}


def test_after_a_commit_the_blocks_are_the_engines_and_can_be_reserved_again() -> None:
    machine = reserved()
    send_all(machine)
    say(machine, Commit("t", 380, 2, TOTAL))
    assert machine.abort(0.0, "t") == []
    assert kinds(machine.on_disconnect(0.0)) == []
    assert machine.reserve(0.0, ticket("next"), [[4], [6]]) == []


def test_zero_blocks_is_a_commit_too() -> None:
    machine = reserved([[], []])
    actions = say(machine, Commit("t", 0, 0, 0))
    assert kinds(actions) == ["Committed", "Complete"]


def test_checksums_that_neither_side_computes_are_equal() -> None:
    machine = reserved()
    send_all(machine, (None, None))
    assert kinds(say(machine, Commit("t", 380, 2, None))) == ["Committed", "Complete"]


def test_exchanged_payloads_are_noticed() -> None:
    machine = reserved()
    send_all(machine, (2, 1))
    actions = say(machine, Commit("t", 380, 2, TOTAL))
    assert actions[1].reason is FailReason.CHECKSUM


@pytest.mark.parametrize("seq", [0, 1, (1 << 31) - 1, 1 << 31, (1 << 62) - 1])
@pytest.mark.parametrize("wrong", [0, 1, (1 << 32) - 1])
def test_a_single_wrong_checksum_is_always_noticed(seq: int, wrong: int) -> None:
    assert combine(12345, seq, wrong) != combine(12345, seq, 1 << 31)


@pytest.mark.parametrize(
    ("commit", "reason"),
    [
        (Commit("t", 380, 2, 0), FailReason.CHECKSUM),
        (Commit("t", 380, 2, None), FailReason.CHECKSUM),
        (Commit("t", 380, 3, TOTAL), FailReason.INCOMPLETE),
        (Commit("t", 300, 2, TOTAL), FailReason.INCOMPLETE),
        (Commit("t", 0, 0, 0), FailReason.INCOMPLETE),
    ],
)
def test_a_commit_that_does_not_fit_fails_and_waits_for_the_drain(
    commit: Commit, reason: FailReason
) -> None:
    machine = reserved()
    send_all(machine)
    actions = say(machine, commit)
    assert kinds(actions) == ["Abort", "Fail"]
    assert messages(actions) == [Abort("t", reason)]
    assert actions[1].reason is reason
    assert kinds(say(machine, Drained("t"))) == ["FreeBlocks"]


def test_a_commit_before_all_bytes_is_never_a_partial_cache() -> None:
    machine = reserved()
    say(machine, Quantum("t", 0, WHOLE[0], 300))
    machine.on_payload(0.0, "t", 0, checksum=1)
    actions = say(machine, Commit("t", 300, 1, 1))
    assert actions[1] == Fail(
        "t",
        FailReason.INCOMPLETE,
        False,
        "300 of 380 bytes came in 1 quanta, the sender counts 300 in 1",
    )


def test_a_commit_waits_for_the_payloads_that_are_still_coming() -> None:
    machine = reserved()
    say(machine, *(Quantum("t", seq, WHOLE[seq], SIZES[seq]) for seq in (0, 1)))
    machine.on_payload(0.0, "t", 0, checksum=1)
    assert say(machine, Commit("t", 380, 2, TOTAL)) == []
    actions = machine.on_payload(0.0, "t", 1, checksum=2)
    assert kinds(actions) == ["Ack", "Committed", "Complete"]


def test_a_commit_that_waits_is_not_too_late_to_be_refused() -> None:
    machine = reserved()
    say(machine, Quantum("t", 0, WHOLE[0], 300))
    assert say(machine, Commit("t", 300, 1, 1)) == []
    actions = machine.on_payload(0.0, "t", 0, checksum=1)
    assert kinds(actions) == ["Ack", "Abort", "Fail"]


@pytest.mark.parametrize("second", [Commit("t", 380, 2, 1), Quantum("t", 1, WHOLE[1], 80)])
def test_nothing_comes_after_a_commit(second: Message) -> None:
    machine = reserved()
    say(machine, Quantum("t", 0, WHOLE[0], 300), Commit("t", 380, 2, 1))
    assert kinds(say(machine, second)) == ["Error", "Close", "Fail"]


@pytest.mark.parametrize(
    ("quantum", "fault"),
    [
        (Quantum("x", 0, WHOLE[0], 300), "not expected"),
        (Quantum("t", 1, WHOLE[0], 300), "expected number 0"),
        (Quantum("t", 0, WHOLE[0], 299), "expected 300"),
        (Quantum("t", 0, Area(0, 0, 3, 1, 1), 300), "outside"),
        (Quantum("t", 0, Area(0, 0, 3, 0, 2), 600), "outside"),
        (Quantum("t", 0, Area(0, 1, 3, 0, 1), 300), "outside"),
        (Quantum("t", 0, Area(1, 1, 2, 0, 1), 80), "outside"),
        (Quantum("t", 0, Area(2, 0, 1, 0, 1), 100), "outside"),
    ],
)
def test_a_quantum_that_was_not_reserved_breaks_the_protocol(quantum: Quantum, fault: str) -> None:
    machine = reserved()
    actions = say(machine, quantum)
    assert kinds(actions) == ["Error", "Close", "Fail"]
    assert fault in actions[1].detail
    assert kinds(machine.on_disconnect(0.0)) == ["FreeBlocks"]


@pytest.mark.parametrize("area", [WHOLE[0], Area(0, 2, 1, 0, 1)])
def test_a_range_that_came_before_breaks_the_protocol(area: Area) -> None:
    machine = reserved()
    say(machine, Quantum("t", 0, WHOLE[0], 300))
    machine.on_payload(0.0, "t", 0)
    actions = say(machine, Quantum("t", 1, area, 100 * area.layers))
    assert "came before" in actions[1].detail


def test_more_in_flight_than_the_window_breaks_the_protocol() -> None:
    machine = reserved([list(range(9)), []])
    assert kinds(say(machine, Quantum("t", 0, Area(0, 0, 1, 0, 3), 300))) == ["PostReceive"]
    assert kinds(say(machine, Quantum("t", 1, Area(0, 0, 1, 3, 3), 300))) == ["PostReceive"]
    actions = say(machine, Quantum("t", 2, Area(0, 0, 1, 6, 1), 100))
    assert "600 bytes in flight" in actions[1].detail


def test_one_quantum_may_be_larger_than_the_window() -> None:
    machine = reserved([list(range(9)), []])
    assert kinds(say(machine, Quantum("t", 0, Area(0, 0, 1, 0, 9), 900))) == ["PostReceive"]


@pytest.mark.parametrize("message", [Ack(0, 1, 0, None), Expect("t", ((),), 1.0)])
def test_what_only_a_receiver_says_breaks_the_protocol(message: Message) -> None:
    assert kinds(say(established(), message)) == ["Error", "Close"]


def test_an_abort_fails_at_once_and_frees_when_the_sender_has_drained() -> None:
    machine = reserved()
    actions = machine.abort(1.0, "t")
    assert messages(actions) == [Abort("t", FailReason.ABORTED)]
    assert kinds(actions) == ["Abort", "Fail"]
    assert machine.abort(1.0, "t") == []
    (freed,) = say(machine, Drained("t"))
    assert isinstance(freed, FreeBlocks)
    assert [list(part) for part in freed.blocks] == [[4], [6]]
    assert say(machine, Drained("t")) == []


def test_late_quanta_of_an_aborted_transfer_are_counted_thrown_away_and_acknowledged() -> None:
    machine = reserved()
    machine.abort(1.0, "t")
    assert say(machine, Quantum("t", 0, WHOLE[0], 300)) == [Discard("t", 0, 300)]
    assert say(machine, Drained("t")) == []
    actions = machine.on_payload(1.0, "t", 0)
    assert kinds(actions) == ["Ack", "FreeBlocks"]


def test_blocks_are_held_while_a_posted_receive_may_write() -> None:
    machine = reserved()
    say(machine, Quantum("t", 0, WHOLE[0], 300))
    assert kinds(machine.abort(1.0, "t")) == ["Abort", "Fail"]
    assert say(machine, Drained("t")) == []
    with pytest.raises(ValueError, match="held for another"):
        machine.reserve(1.0, ticket("other"), [[4], []])
    assert kinds(machine.on_payload(1.0, "t", 0)) == ["Ack", "FreeBlocks"]
    machine.reserve(1.0, ticket("other"), [[4], []])


def test_a_quantum_after_the_drain_breaks_the_protocol() -> None:
    machine = reserved()
    say(machine, Quantum("t", 0, WHOLE[0], 300))
    machine.abort(1.0, "t")
    say(machine, Drained("t"))
    assert "not expected" in say(machine, Quantum("t", 1, WHOLE[1], 80))[1].detail


def test_a_commit_that_crosses_an_abort_changes_nothing() -> None:
    machine = reserved()
    send_all(machine)
    machine.abort(1.0, "t")
    assert say(machine, Commit("t", 380, 2, TOTAL)) == []
    assert kinds(say(machine, Drained("t"))) == ["FreeBlocks"]


def test_the_senders_abort_carries_its_reason_and_is_not_answered() -> None:
    machine = reserved()
    actions = say(machine, Abort("t", FailReason.DEADLINE), Drained("t"))
    assert kinds(actions) == ["Fail", "FreeBlocks"]
    assert actions[0] == Fail("t", FailReason.DEADLINE, True, "")


def test_an_abort_of_something_unknown_is_ignored() -> None:
    assert say(established(), Abort("x", FailReason.ABORTED), Drained("x")) == []


def test_a_drain_without_an_abort_breaks_the_protocol() -> None:
    assert kinds(say(reserved(), Drained("t"))) == ["Error", "Close", "Fail"]


def test_a_commit_of_something_unknown_breaks_the_protocol() -> None:
    assert kinds(say(established(), Commit("x", 0, 0, None))) == ["Error", "Close"]


def test_a_deadline_aborts() -> None:
    machine = established()
    machine.reserve(0.0, ticket(remaining_ms=500), [[4], [6]])
    assert machine.next_timeout(0.0) == 0.5
    assert machine.tick(0.4) == []
    actions = machine.tick(0.5)
    assert messages(actions) == [Abort("t", FailReason.DEADLINE)]
    assert machine.outcomes == {("gold", "deadline"): 1}


def test_a_deadline_without_a_session_frees_at_once() -> None:
    machine = receiver()
    machine.reserve(0.0, ticket(remaining_ms=500), [[4], [6]])
    assert kinds(machine.tick(0.5)) == ["Fail", "FreeBlocks"]
    assert machine.next_timeout(0.5) is None


def test_a_peer_that_lives_but_does_not_drain_is_given_up_and_only_then_blocks_are_free() -> None:
    machine = reserved()
    machine.abort(1.0, "t")
    for second in range(1, 11):
        machine.heard(float(second))
        assert "Close" not in kinds(machine.tick(float(second)))
    actions = machine.tick(11.0)
    assert Close(FailReason.STALLED, "no answer to the abort of t in 10.0 s") in actions
    assert kinds(machine.on_disconnect(11.5)) == ["FreeBlocks"]


def test_a_lost_connection_fails_and_frees_what_nothing_writes() -> None:
    machine = reserved()
    machine.reserve(0.0, ticket("other"), [[0], [0]])
    say(machine, Quantum("t", 0, WHOLE[0], 300))
    actions = machine.on_disconnect(1.0, "reset by peer")
    assert [action for action in actions if isinstance(action, Fail)] == [
        Fail("t", FailReason.PEER_LOST, False, "reset by peer"),
        Fail("other", FailReason.PEER_LOST, False, "reset by peer"),
    ]
    assert [a.transfer for a in actions if isinstance(a, FreeBlocks)] == ["other"]
    assert kinds(machine.on_receive_failed(2.0, "t", 0)) == ["FreeBlocks"]


def test_a_receive_of_the_last_session_does_not_disturb_the_next() -> None:
    machine = reserved()
    say(machine, Quantum("t", 0, WHOLE[0], 300))
    machine.on_disconnect(1.0)
    machine.on_connect(2.0)
    machine.on_frame(2.0, Frame(1, hello("p")))
    machine.reserve(2.0, ticket("next"), [[0], [0]])
    assert kinds(machine.on_payload(3.0, "t", 0)) == ["FreeBlocks"]
    assert machine.snapshot().in_flight_bytes == 0
    assert kinds(say(machine, Quantum("next", 0, WHOLE[0], 300))) == ["PostReceive"]


def test_a_failed_receive_ends_the_session() -> None:
    machine = reserved()
    machine.reserve(0.0, ticket("other"), [[0], [0]])
    say(machine, Quantum("t", 0, WHOLE[0], 300))
    actions = machine.on_receive_failed(1.0, "t", 0, "truncated")
    assert kinds(actions) == ["Error", "Close", "Fail", "Fail"]
    assert kinds(machine.on_disconnect(1.0)) == ["FreeBlocks", "FreeBlocks"]


def test_a_reservation_made_after_closing_waits_for_the_next_session() -> None:
    machine = established()
    machine.on_wire_error(0.0, "garbage")
    assert machine.reserve(0.0, ticket(), [[4], [6]]) == []
    assert machine.on_disconnect(0.0) == []
    machine.on_connect(1.0)
    assert "Expect" in kinds(machine.on_frame(1.0, Frame(1, hello("p"))))


def test_a_receive_that_was_not_posted_cannot_end() -> None:
    machine = reserved()
    with pytest.raises(ValueError, match="not posted"):
        machine.on_payload(0.0, "t", 0)
    with pytest.raises(ValueError, match="not posted"):
        machine.on_receive_failed(0.0, "x", 0)
