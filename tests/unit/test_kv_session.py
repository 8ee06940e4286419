"""Greeting, signs of life, closing: the same at both ends."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from support.kv import GEOMETRY, hello, kinds, messages, receiver, sender, ticket

from ciuicflow.kvtransfer.actions import Close, Established, Fail
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.receiver import Receiver
from ciuicflow.kvtransfer.sender import Sender
from ciuicflow.kvtransfer.ticket import Shard
from ciuicflow.kvtransfer.wire import Error, Frame, Heartbeat, Hello, Message

Machine = Sender | Receiver
both = pytest.mark.parametrize(
    ("make", "peer"), [(sender, hello("d")), (receiver, hello("p"))], ids=["sender", "receiver"]
)
Make = Callable[..., Any]


def connected(machine: Machine, peer: Hello, now: float = 0.0) -> Machine:
    machine.on_connect(now)
    machine.on_frame(now, Frame(peer.incarnation, peer))
    return machine


def closes(actions: list[Any]) -> Close:
    (close,) = [action for action in actions if isinstance(action, Close)]
    return close


@both
def test_both_sides_greet_at_once_and_are_established_by_the_others_greeting(
    make: Make, peer: Hello
) -> None:
    machine = make()
    assert messages(machine.on_connect(0.0)) == [machine.hello]
    assert machine.on_frame(0.1, Frame(1, peer)) == [Established(peer)]


@both
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"geometry": replace(GEOMETRY, model="other")}, "model: ours is 'tiny'"),
        ({"settings": {"checksum": "none"}}, "setting checksum differs: ours is 'crc32'"),
        ({"settings": {}}, "setting checksum differs"),
        ({"settings": {"checksum": "crc32", "segment": "8k"}}, "setting segment differs"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_with_the_difference(
    make: Make, peer: Hello, changes: dict[str, Any], names: str
) -> None:
    machine = make()
    machine.on_connect(0.0)
    other = hello(peer.agent, **changes)
    actions = machine.on_frame(0.0, Frame(1, other))
    assert closes(actions).reason is FailReason.REFUSED
    assert names in closes(actions).detail
    (error,) = messages(actions)
    assert isinstance(error, Error)
    assert names in error.detail


@both
def test_a_fingerprint_that_is_not_of_its_geometry_is_refused(make: Make, peer: Hello) -> None:
    machine = make()
    machine.on_connect(0.0)
    actions = machine.on_frame(0.0, Frame(1, replace(peer, fingerprint="f00")))
    assert "versions of the agent" in closes(actions).detail


@both
@pytest.mark.parametrize("message", [Heartbeat(), None])
def test_the_first_message_must_be_the_greeting(
    make: Make, peer: Hello, message: Message | None
) -> None:
    machine = make()
    machine.on_connect(0.0)
    frame = Frame(1, message) if message is not None else Frame(2, peer)  # of whom?
    assert closes(machine.on_frame(0.0, frame)).reason is FailReason.PROTOCOL


@both
def test_a_second_greeting_breaks_the_protocol(make: Make, peer: Hello) -> None:
    machine = connected(make(), peer)
    assert closes(machine.on_frame(0.0, Frame(1, peer))).reason is FailReason.PROTOCOL


@both
def test_a_message_of_another_incarnation_is_refused(make: Make, peer: Hello) -> None:
    machine = connected(make(), peer)
    assert closes(machine.on_frame(0.0, Frame(2, Heartbeat()))).reason is FailReason.STALE


@both
def test_garbage_closes_the_connection_and_says_so(make: Make, peer: Hello) -> None:
    machine = connected(make(), peer)
    actions = machine.on_wire_error(0.0, "control message not understood")
    assert kinds(actions) == ["Error", "Close"]
    assert machine.on_wire_error(0.0, "more") == []


@both
def test_the_peers_complaint_closes_the_connection_without_an_answer(
    make: Make, peer: Hello
) -> None:
    machine = connected(make(), peer)
    actions = machine.on_frame(0.0, Frame(1, Error(FailReason.PROTOCOL, "bad quantum")))
    assert actions == [Close(FailReason.PEER_ERROR, "the peer says: protocol: bad quantum")]


@both
def test_silence_of_our_own_is_filled_with_heartbeats(make: Make, peer: Hello) -> None:
    machine = connected(make(), peer)
    assert machine.next_timeout(0.5) == 1.0
    assert machine.tick(0.9) == []
    assert kinds(machine.tick(1.0)) == ["Heartbeat"]
    assert machine.next_timeout(1.0) == 2.0


@both
def test_silence_of_the_peer_means_that_it_is_dead(make: Make, peer: Hello) -> None:
    machine = connected(make(), peer)
    for second in range(1, 4):
        machine.on_frame(second / 1, Frame(1, Heartbeat()))
        machine.tick(float(second))
    machine.tick(7.5)
    assert machine.next_timeout(7.5) == 8.0
    actions = machine.tick(8.0)
    assert closes(actions) == Close(FailReason.PEER_DEAD, "nothing heard for 5.000 s")
    assert machine.next_timeout(8.0) is None


@both
def test_a_peer_that_never_greets_is_given_up(make: Make, peer: Hello) -> None:
    machine = make()
    machine.on_connect(3.0)
    machine.tick(7.9)
    assert closes(machine.tick(8.0)).reason is FailReason.PEER_DEAD


@both
def test_bytes_of_a_long_payload_are_a_sign_of_life(make: Make, peer: Hello) -> None:
    machine = connected(make(), peer)
    machine.heard(4.0)
    assert kinds(machine.tick(8.9)) == ["Heartbeat"]


@both
def test_after_closing_nothing_is_heard_and_nothing_said(make: Make, peer: Hello) -> None:
    machine = connected(make(), peer)
    machine.on_frame(0.0, Frame(2, Heartbeat()))
    assert machine.on_frame(0.0, Frame(1, Heartbeat())) == []
    assert machine.tick(100.0) == []
    assert machine.next_timeout(0.0) is None
    assert machine.on_disconnect(100.0) == []


@both
def test_one_connection_at_a_time(make: Make, peer: Hello) -> None:
    machine = connected(make(), peer)
    with pytest.raises(ValueError, match="was not said to be gone"):
        machine.on_connect(1.0)
    assert machine.on_disconnect(1.0) == []
    assert machine.on_frame(1.0, Frame(1, Heartbeat())) == []
    assert kinds(machine.on_connect(2.0)) == ["Hello"]


@both
def test_a_peer_that_was_restarted_is_another_one(make: Make, peer: Hello) -> None:
    machine = connected(make(), peer)
    machine.on_disconnect(1.0)
    machine.on_connect(2.0)
    again = replace(peer, incarnation=2)
    assert machine.on_frame(2.0, Frame(2, again)) == [Established(again)]
    assert machine.on_frame(2.0, Frame(2, Heartbeat())) == []


@both
@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"source": Shard(agent="p", incarnation=9)}, "p was restarted: incarnation 1 now"),
        ({"destination": Shard(agent="d", incarnation=9)}, "d was restarted: incarnation 1 now"),
        (
            {"source": Shard(agent="p", tp=1)},
            "p holds the shard (dp, pp, tp) = (0, 0, 0), not that of the ticket",
        ),
        ({"source": Shard(agent="x")}, "the ticket names agent x, this is p"),
        ({"destination": Shard(agent="x")}, "the ticket names agent x, this is d"),
    ],
)
def test_a_ticket_of_another_incarnation_or_agent_fails_and_frees(
    make: Make, peer: Hello, changes: dict[str, Any], detail: str
) -> None:
    stale = ticket(**changes)
    machine = connected(make(), peer)
    take = machine.submit if isinstance(machine, Sender) else machine.reserve
    actions = take(0.0, stale, [[0], []])
    assert kinds(actions) == ["Fail", "FreeBlocks"]
    assert actions[0] == Fail("t", FailReason.STALE, False, detail)
    waits = make()
    take = waits.submit if isinstance(waits, Sender) else waits.reserve
    early = take(0.0, stale, [[0], []])
    waits.on_connect(0.0)
    late = waits.on_frame(0.0, Frame(1, peer))
    assert [action for action in (*early, *late) if isinstance(action, Fail)] == [actions[0]]


@both
def test_the_number_of_transfers_is_bounded(make: Make, peer: Hello) -> None:
    config = replace(make()._config, transfers=2)
    machine = connected(make(config=config), peer)
    take = machine.submit if isinstance(machine, Sender) else machine.reserve
    for number in range(2):
        assert "Fail" not in kinds(take(0.0, ticket(f"t{number}"), [[number], []]))
    actions = take(0.0, ticket("t2"), [[2], []])
    assert kinds(actions) == ["Fail", "FreeBlocks"]
    assert isinstance(actions[0], Fail)
    assert actions[0].reason is FailReason.OVERLOADED
    assert machine.outcomes["gold", "overloaded"] == 1


@both
def test_what_no_driver_may_ask_for_is_refused(make: Make, peer: Hello) -> None:
    machine = connected(make(), peer)
    take = machine.submit if isinstance(machine, Sender) else machine.reserve
    with pytest.raises(ValueError, match="regions"):
        take(0.0, ticket(), [[0]])
    with pytest.raises(ValueError, match="blocks"):
        take(0.0, ticket(), [[0, 0], []])
    take(0.0, ticket(), [[0], []])
    with pytest.raises(ValueError, match="already"):
        take(0.0, ticket(), [[1], []])
