"""What a sender sends, in which order, when it commits and when it frees."""

from typing import Any

import pytest
from msgspec.structs import replace
from support.kv import SENDER, hello, kinds, messages, sender, ticket

from ciuicflow.congestion.base import CongestionState
from ciuicflow.congestion.fixed import FixedController
from ciuicflow.kvtransfer.actions import Action, Complete, Fail, SendQuantum
from ciuicflow.kvtransfer.checksum import combine
from ciuicflow.kvtransfer.layout import LayerRange, deepseek_v3
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.ranges import Area, Run
from ciuicflow.kvtransfer.sender import Sender
from ciuicflow.kvtransfer.settings import OrderConfig, SenderConfig
from ciuicflow.kvtransfer.ticket import Shard
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
    Message,
    Quantum,
)

ALL = LayerRange(0, 3)
ONE = LayerRange(0, 1)
PLAIN = replace(SENDER, order=OrderConfig(least_floor=0.0, promote_after_s=1e9))


def established(window: int = 600, rate: float | None = None, **other: Any) -> Sender:
    machine = sender(window, rate, **other)
    machine.on_connect(0.0)
    machine.on_frame(0.0, Frame(1, hello("d", window_bytes=10_000)))
    return machine


def say(machine: Sender, *said: Message, now: float = 0.0) -> list[Action]:
    return [action for message in said for action in machine.on_frame(now, Frame(1, message))]


def expect(id_: str, kv: int, index: int = 0, first: int = 50) -> Expect:
    runs = [(Run(first, count),) if count else () for count in (kv, index)]
    return Expect(id_, tuple(runs), 60_000.0)


def begin(machine: Sender, id_: str, kv: int, now: float = 0.0, **other: Any) -> list[Action]:
    """Start a transfer of some blocks in the first region, of which one layer is ready."""
    machine.submit(now, ticket(id_, **other), [list(range(kv)), []])
    say(machine, expect(id_, kv), now=now)
    return machine.ready(now, id_, ONE)


def sent(actions: list[Action]) -> list[str]:
    return [action.transfer for action in actions if isinstance(action, SendQuantum)]


def ack(machine: Sender, seq: int, size: int, now: float = 0.0) -> list[Action]:
    return say(machine, Ack(seq, size, 0, None), now=now)


# Starting.


def test_nothing_is_sent_before_the_receiver_has_reserved_its_blocks() -> None:
    machine = established()
    assert machine.submit(0.0, ticket(), [[0, 1], [5]]) == []
    assert machine.ready(0.0, "t", ALL) == []
    assert sent(say(machine, expect("t", 2, 1))) == ["t"] * 3


def test_a_reservation_may_come_before_the_blocks() -> None:
    machine = established()
    assert say(machine, expect("t", 2, 1)) == []
    assert machine.submit(0.0, ticket(), [[0, 1], [5]]) == []
    assert sent(machine.ready(0.0, "t", ALL)) == ["t"] * 3


def test_a_quantum_names_positions_on_the_wire_and_our_blocks_to_the_driver() -> None:
    machine = established()
    machine.submit(0.0, ticket(), [[7, 3], []])
    say(machine, expect("t", 2))
    (action,) = machine.ready(0.0, "t", LayerRange(1, 2))
    assert isinstance(action, SendQuantum)
    assert action.frame == Frame(1, Quantum("t", 0, Area(0, 1, 1, 0, 2), 200))
    assert action.piece.runs == (Run(7, 1), Run(3, 1))
    assert not action.piece.contiguous


def test_layers_may_become_ready_in_any_order_by_chunk_and_by_region() -> None:
    machine = established(10_000)
    machine.submit(0.0, ticket(), [[0, 1, 2], [5]])
    say(machine, expect("t", 3, 1))
    areas = [
        message.area
        for actions in (
            machine.ready(0.0, "t", LayerRange(2, 3), Run(1, 2), 0),
            machine.ready(0.0, "t", LayerRange(0, 2), Run(0, 3), 0),
            machine.ready(0.0, "t", ALL, None, 1),
            machine.ready(0.0, "t", LayerRange(2, 3), Run(0, 1), 0),
        )
        for message in messages(actions)
        if isinstance(message, Quantum)
    ]
    assert areas == [
        Area(0, 2, 1, 1, 2),
        Area(0, 0, 1, 0, 3),
        Area(0, 1, 1, 0, 3),
        Area(1, 0, 2, 0, 1),
        Area(0, 2, 1, 0, 1),
    ]


def test_what_was_ready_before_cannot_become_ready() -> None:
    machine = established()
    machine.submit(0.0, ticket(), [[0], []])
    machine.ready(0.0, "t", ONE)
    with pytest.raises(ValueError, match="ready before"):
        machine.ready(0.0, "t", ALL)
    assert machine.ready(0.0, "ended or never there", ALL) == []


def test_a_transfer_whose_layers_are_not_ready_does_not_block_others() -> None:
    machine = established()
    machine.submit(0.0, ticket("slow"), [[0, 1], []])
    say(machine, expect("slow", 2))
    assert sent(begin(machine, "quick", 2, rank=2)) == ["quick"]
    assert sent(machine.ready(0.0, "slow", ONE)) == ["slow"]


def test_only_layers_that_both_sides_hold_are_sent() -> None:
    machine = Sender(hello("p", geometry=deepseek_v3()), SenderConfig(), FixedController(1 << 40))
    machine.on_connect(0.0)
    stage = hello("d", geometry=deepseek_v3(first_layer=31, layers=30), window_bytes=1 << 40)
    machine.on_frame(0.0, Frame(1, stage))
    machine.submit(0.0, ticket(), [[0]])
    say(machine, Expect("t", ((Run(0, 1),),), 1.0))
    assert machine.ready(0.0, "t", LayerRange(0, 31)) == []
    machine.ready(0.0, "t", LayerRange(31, 61))
    assert machine.sent_bytes == {"gold": 30 * 64 * 1152}


# The window, the rate and the order.


def test_no_more_than_the_window_is_in_flight() -> None:
    machine = established(500)
    assert sent(begin(machine, "t", 9)) == ["t"]  # 300 of 900 bytes; 600 would be too much
    assert machine.snapshot(0.0).in_flight_bytes == 300
    assert sent(ack(machine, 0, 300)) == ["t"]


def test_a_quantum_is_no_larger_than_the_window_unless_a_block_is() -> None:
    machine = established(250)
    begin(machine, "t", 9)
    assert machine.snapshot(0.0).in_flight_bytes == 200
    machine = established(1)
    begin(machine, "t", 9)
    assert machine.snapshot(0.0).in_flight_bytes == 100


def test_the_peers_window_counts_too() -> None:
    machine = sender(10_000)
    machine.on_connect(0.0)
    machine.on_frame(0.0, Frame(1, hello("d", window_bytes=400)))
    assert sent(begin(machine, "t", 9)) == ["t"]


def test_a_higher_tier_waits_for_what_is_in_flight_only() -> None:
    machine = established(600, config=PLAIN)
    assert sent(begin(machine, "bronze", 9, rank=2)) == ["bronze", "bronze"]
    assert sent(begin(machine, "gold", 3)) == []
    assert sent(ack(machine, 0, 300)) == ["gold"]
    assert sent(ack(machine, 1, 300)) == ["bronze"]


def test_in_a_tier_the_earlier_deadline_goes_first() -> None:
    machine = established(300, config=PLAIN)
    begin(machine, "first", 9)
    begin(machine, "late", 3, remaining_ms=9000)
    begin(machine, "early", 3, remaining_ms=8000)
    assert sent(ack(machine, 0, 300)) == ["early"]
    assert sent(ack(machine, 1, 300)) == ["late"]
    assert sent(ack(machine, 2, 300)) == ["first"]


def test_a_floor_goes_through_to_the_wire() -> None:
    machine = established(300, config=PLAIN)
    begin(machine, "gold", 300)
    begin(machine, "bronze", 300, rank=2, floor=0.25)
    order = [sent(ack(machine, seq, 300))[0] for seq in range(40)]
    assert 9 <= order.count("bronze") <= 10


def test_a_rate_spaces_quanta_and_a_late_timer_does_not_lower_it() -> None:
    machine = established(100_000, 20_000.0)
    assert len(sent(begin(machine, "t", 90))) == 1
    assert machine.next_timeout(0.0) == pytest.approx(0.01)
    assert sent(machine.tick(0.009)) == []
    assert len(sent(machine.tick(0.0105))) == 1
    assert machine.next_timeout(0.0105) == pytest.approx(0.02)


def test_a_pause_earns_no_burst() -> None:
    machine = established(100_000, 20_000.0)
    begin(machine, "t", 90)
    assert len(sent(machine.tick(0.9))) == 1


def test_the_micro_batch_grows_with_the_rate_but_the_quantum_is_bounded() -> None:
    for rate, size in ((1e6, 14 * 18_432), (1e9, 54 * 18_432), (1e12, 56 * 18_432)):
        geometry = deepseek_v3(block_tokens=16)
        machine = Sender(
            hello("p", geometry=geometry), SenderConfig(), FixedController(1 << 40, rate)
        )
        machine.on_connect(0.0)
        peer = hello("d", geometry=geometry, window_bytes=1 << 40)
        machine.on_frame(0.0, Frame(1, peer))
        machine.submit(0.0, ticket(), [range(2048)])
        say(machine, Expect("t", ((Run(0, 2048),),), 1.0))
        (first, *_) = machine.ready(0.0, "t", ONE)
        assert isinstance(first, SendQuantum)
        assert first.piece.bytes == size


def test_send_wait_is_the_time_in_which_something_ready_may_not_go() -> None:
    machine = established(300)
    begin(machine, "t", 6, now=1.0)
    assert machine.snapshot(1.5).send_wait_s == pytest.approx(0.5)
    ack(machine, 0, 300, now=3.0)
    ack(machine, 1, 300, now=4.0)
    assert machine.snapshot(9.0).send_wait_s == pytest.approx(2.0)


# Acknowledgements.


class Recorder(FixedController):
    """Remembers what it is told."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.acks: list[tuple[object, ...]] = []

    def on_ack(self, *args: Any) -> None:
        super().on_ack(*args)
        self.acks.append(args)


def test_the_controller_gets_times_in_nanoseconds_without_the_hold_time() -> None:
    controller = Recorder(600)
    machine = Sender(hello("p"), SENDER, controller)
    machine.on_connect(0.0)
    machine.on_frame(0.0, Frame(1, hello("d")))
    begin(machine, "t", 5, now=1.0)
    say(machine, Ack(0, 300, 1_000_000, 150), now=1.003)
    say(machine, Ack(1, 200, 9_000_000, None), now=1.004)
    assert controller.acks == [
        (1_003_000_000, 1_000_000_000, 300, 2_000_000, 150, False),
        (1_004_000_000, 1_000_000_000, 200, 0, None, True),
    ]
    state = machine.snapshot(1.004)
    assert state.srtt_s == pytest.approx(0.00175)
    assert (state.acked_bytes, state.marked_bytes) == (500, 150)


@pytest.mark.parametrize("wrong", [Ack(5, 300, 0, None), Ack(0, 299, 0, None), Ack(0, 300, 0, 301)])
def test_an_acknowledgement_that_does_not_fit_breaks_the_protocol(wrong: Ack) -> None:
    machine = established()
    begin(machine, "t", 3)
    assert kinds(say(machine, wrong)) == ["Error", "Close", "Fail"]


def test_an_acknowledgement_counts_once() -> None:
    machine = established()
    begin(machine, "t", 3)
    assert kinds(say(machine, *[Ack(0, 300, 0, None)] * 2)) == ["Error", "Close", "Fail"]


def test_silence_of_acknowledgements_is_told_and_then_ends_the_session() -> None:
    machine = established()
    begin(machine, "t", 3)
    assert machine.next_timeout(0.0) == 1.0
    for second in range(1, 10):
        machine.heard(float(second))
        assert "Close" not in kinds(machine.tick(float(second)))
        assert machine.snapshot(0.0).congestion.timeouts == second
    machine.heard(10.0)
    actions = machine.tick(10.0)
    assert kinds(actions)[-2:] == ["Close", "Fail"]
    assert isinstance(actions[-1], Fail)
    assert actions[-1].reason is FailReason.STALLED


# The end.


def finish(machine: Sender, id_: str = "t") -> list[Action]:
    """Send a whole transfer of one block in the first region; return what its end makes due."""
    machine.submit(0.0, ticket(id_), [[0], []])
    say(machine, expect(id_, 1))
    machine.ready(0.0, id_, ALL)
    committed = machine.on_released(1.0, id_, 0, 11)
    return committed + ack(machine, 0, 300, now=1.0)


def test_a_commit_follows_the_last_quantum_without_its_acknowledgement() -> None:
    machine = established()
    assert messages(finish(machine)) == [Commit("t", 300, 1, combine(0, 0, 11))]
    actions = say(machine, Committed("t"), now=2.0)
    assert kinds(actions) == ["Complete", "FreeBlocks"]
    assert actions[0] == Complete("t", 300, 1, 2.0)
    assert machine.outcomes == {("gold", "completed"): 1}


def test_no_commit_while_the_transport_still_reads() -> None:
    machine = established()
    machine.submit(0.0, ticket(), [[0], []])
    say(machine, expect("t", 1))
    machine.ready(0.0, "t", ALL)
    assert ack(machine, 0, 300) == []
    assert messages(machine.on_released(0.0, "t", 0)) == [Commit("t", 300, 1, None)]


def test_no_commit_before_all_layers_were_ready() -> None:
    machine = established()
    begin(machine, "t", 1)
    machine.on_released(0.0, "t", 0)
    assert ack(machine, 0, 100) == []


def test_zero_blocks_are_committed_at_once() -> None:
    machine = established()
    machine.submit(0.0, ticket(), [[], []])
    assert messages(say(machine, expect("t", 0))) == [Commit("t", 0, 0, 0)]


def test_a_receiver_that_says_no_to_the_commit_fails_the_transfer() -> None:
    machine = established()
    finish(machine)
    actions = say(machine, Abort("t", FailReason.CHECKSUM))
    assert kinds(actions) == ["Drained", "Fail", "FreeBlocks"]
    assert actions[1] == Fail("t", FailReason.CHECKSUM, True, "")


def test_after_the_commit_only_the_receiver_decides() -> None:
    machine = established()
    finish(machine)
    assert machine.abort(1.0, "t") == []
    assert "Fail" not in kinds(machine.tick(1.5))


def test_a_commit_that_is_not_answered_ends_the_session() -> None:
    machine = established()
    finish(machine)  # at second 1
    machine.heard(10.9)
    assert kinds(machine.tick(10.9)) == ["Heartbeat"]
    actions = machine.tick(11.0)
    assert kinds(actions) == ["Error", "Close", "Fail", "FreeBlocks"]
    assert actions[2] == Fail(
        "t", FailReason.STALLED, False, "no answer to the commit of t in 10.0 s"
    )


def test_a_commit_that_was_not_ours_breaks_the_protocol() -> None:
    machine = established()
    begin(machine, "t", 1)
    assert kinds(say(machine, Committed("t"))) == ["Error", "Close", "Fail"]


def test_an_abort_stops_says_drained_and_frees_when_the_transport_has_let_go() -> None:
    machine = established()
    begin(machine, "t", 9)
    actions = machine.abort(0.0, "t")
    assert messages(actions) == [Abort("t", FailReason.ABORTED), Drained("t")]
    assert kinds(actions) == ["Abort", "Drained", "Fail"]
    assert ack(machine, 0, 300) == []
    assert machine.on_released(0.0, "t", 0) == []
    assert kinds(machine.on_released(0.0, "t", 1)) == ["FreeBlocks"]
    with pytest.raises(ValueError, match="with the transport"):
        machine.on_released(0.0, "t", 1)


def test_an_abort_lets_others_send() -> None:
    machine = established(300, config=PLAIN)
    begin(machine, "t", 9)
    begin(machine, "other", 3, rank=1)
    machine.abort(0.0, "t")
    assert sent(ack(machine, 0, 300)) == ["other"]


def test_every_abort_of_the_receiver_is_answered_known_or_not() -> None:
    machine = established()
    abort = Abort("t", FailReason.ABORTED)
    assert messages(say(machine, abort, abort)) == [Drained("t"), Drained("t")]
    actions = machine.submit(0.0, ticket(), [[0], []])
    assert kinds(actions) == ["Fail", "FreeBlocks"]
    assert isinstance(actions[0], Fail)
    assert actions[0].reason is FailReason.ABORTED


def test_a_transfer_given_up_before_it_was_submitted_is_turned_away() -> None:
    machine = established()
    assert machine.abort(0.0, "t") == []
    answer = [Abort("t", FailReason.ABORTED), Drained("t")]
    assert messages(say(machine, expect("t", 1))) == answer
    say(machine, expect("u", 1))
    assert messages(machine.abort(0.0, "u", FailReason.DEADLINE)) == [
        Abort("u", FailReason.DEADLINE),
        Drained("u"),
    ]


def test_an_id_is_used_once() -> None:
    machine = established()
    finish(machine)
    say(machine, Committed("t"))
    assert messages(say(machine, expect("t", 1))) == [Abort("t", FailReason.STALE), Drained("t")]
    assert kinds(machine.submit(2.0, ticket(), [[0], []])) == ["Fail", "FreeBlocks"]


@pytest.mark.parametrize(
    ("blocks", "detail"),
    [
        (((Run(0, 3),), ()), "kv: 2 blocks here, 3 are expected"),
        (((Run(0, 2),), (Run(0, 1),)), "index: 0 blocks here, 1 are expected"),
        (((Run(0, 2),),), "the peer expects 1 regions"),
        (((Run(0, 1 << 24),) * 4096, ()), "kv: 2 blocks here, 68719476736 are expected"),
    ],
)
def test_another_number_of_blocks_is_a_mismatch(
    blocks: tuple[tuple[Run, ...], ...], detail: str
) -> None:
    machine = established()
    machine.submit(0.0, ticket(), [[0, 1], []])
    actions = say(machine, Expect("t", blocks, 1.0))
    assert kinds(actions) == ["Abort", "Drained", "Fail", "FreeBlocks"]
    assert actions[2] == Fail("t", FailReason.MISMATCH, False, detail)


def test_a_reservation_that_comes_twice_breaks_the_protocol() -> None:
    for machine in (established(), established()):
        say(machine, expect("t", 1))
        assert kinds(say(machine, expect("t", 1))) == ["Error", "Close"]
    machine = established()
    begin(machine, "t", 1)
    assert kinds(say(machine, expect("t", 1))) == ["Error", "Close", "Fail"]


def test_a_transfer_that_is_refused_turns_its_early_reservation_away() -> None:
    machine = established()
    say(machine, expect("t", 1))
    stale = ticket(source=Shard(agent="p", incarnation=7))
    actions = machine.submit(0.0, stale, [[0], []])
    assert messages(actions) == [Abort("t", FailReason.STALE), Drained("t")]
    assert kinds(actions)[2:] == ["Fail", "FreeBlocks"]
    assert machine.next_timeout(0.0) == 1.0, "only heartbeats are due"


def test_a_reservation_may_come_in_parts_but_not_in_between_others() -> None:
    machine = established()
    machine.submit(0.0, ticket(), [[0, 1, 2], [7]])
    machine.ready(0.0, "t", ONE)
    assert say(machine, Expect("t", ((Run(5, 2),), ()), 1.0, more=True)) == []
    actions = say(machine, Expect("t", ((Run(9, 1),), (Run(3, 1),)), 1.0))
    assert sent(actions) == ["t"] * 3
    say(machine, Expect("u", ((Run(5, 2),), ()), 1.0, more=True))
    assert kinds(say(machine, expect("v", 1))) == ["Error", "Close", "Fail"]


def test_the_transport_holds_no_more_quanta_than_it_may() -> None:
    machine = established(100_000, config=replace(PLAIN, quanta=2))
    assert len(sent(begin(machine, "t", 90))) == 2
    assert ack(machine, 0, 300) == []
    assert len(sent(machine.on_released(0.0, "t", 1))) == 1


def test_the_number_of_early_reservations_is_bounded() -> None:
    machine = established(config=replace(SENDER, transfers=1))
    assert say(machine, expect("t", 1)) == []
    assert messages(say(machine, expect("u", 1))) == [
        Abort("u", FailReason.OVERLOADED),
        Drained("u"),
    ]


def test_a_deadline_aborts_whether_the_receiver_is_there_or_not() -> None:
    machine = established()
    machine.submit(0.0, ticket("alone", remaining_ms=500), [[0], []])
    begin(machine, "t", 1, remaining_ms=600)
    assert machine.next_timeout(0.0) == 0.5
    assert kinds(machine.tick(0.5)) == ["Fail", "FreeBlocks"]
    assert kinds(machine.tick(0.6)) == ["Abort", "Drained", "Fail"]
    assert machine.outcomes == {("gold", "deadline"): 2}


def test_an_early_reservation_is_forgotten_when_its_time_is_over() -> None:
    machine = established()
    say(machine, Expect("t", ((), ()), 500.0))
    assert machine.tick(0.5) == []
    assert kinds(machine.submit(0.6, ticket(), [[], []])) == ["Fail", "FreeBlocks"]


def test_a_lost_connection_fails_everything_and_frees_what_nothing_reads() -> None:
    machine = established()
    begin(machine, "t", 3)
    machine.submit(0.0, ticket("waiting"), [[0], []])
    say(machine, expect("early", 1))
    actions = machine.on_disconnect(1.0, "reset by peer")
    assert kinds(actions) == ["Fail", "Fail", "FreeBlocks"]
    assert actions[0] == Fail("t", FailReason.PEER_LOST, False, "reset by peer")
    assert kinds(machine.on_released(1.0, "t", 0)) == ["FreeBlocks"]
    assert machine.snapshot(1.0).congestion == CongestionState(
        controller="fixed",
        window_bytes=600,
        rate_bytes_per_s=None,
        in_flight_bytes=0,
        timeouts=0,
    )
    machine.on_connect(2.0)
    machine.on_frame(2.0, Frame(1, hello("d")))
    (quantum,) = messages(begin(machine, "next", 1, now=2.0))
    assert isinstance(quantum, Quantum)
    assert quantum.seq == 0


def test_what_is_submitted_without_a_session_waits_for_one() -> None:
    machine = sender()
    machine.submit(0.0, ticket(), [[0], []])
    machine.ready(0.0, "t", ALL)
    machine.on_connect(1.0)
    assert machine.on_disconnect(2.0) == []  # it never came to a greeting
    machine.on_connect(3.0)
    machine.on_frame(3.0, Frame(1, hello("d")))
    assert sent(say(machine, expect("t", 1), now=3.0)) == ["t"]


def test_grants_are_reserved_and_ignored_like_heartbeats() -> None:
    machine = established()
    assert say(machine, Grant(1e9, 4.0, 0), Heartbeat()) == []


@pytest.mark.parametrize("message", [Drained("t"), Commit("t", 0, 0, 0)])
def test_what_only_a_sender_says_breaks_the_protocol(message: Message) -> None:
    assert kinds(say(established(), message)) == ["Error", "Close"]


def test_bytes_are_counted_by_tier() -> None:
    machine = established(10_000)
    begin(machine, "t", 3)
    begin(machine, "u", 2, tier="bronze", rank=2)
    assert machine.sent_bytes == {"gold": 300, "bronze": 200}
