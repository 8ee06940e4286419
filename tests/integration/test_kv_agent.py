"""Two agents in one process, as threads and as processes: whole transfers, ownership, errors."""

import asyncio
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.kv_agents import BLOCKS, CONFIG, LAYOUT, SOON_S, Pair, Side, pair
from support.wait import until

from ciuicflow.kvtransfer.errors import AgentGone, KvUsageError, TransferFailed
from ciuicflow.kvtransfer.layout import deepseek_v3
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.settings import BatchSizes
from ciuicflow.runtime import kv_link
from ciuicflow.runtime.kv_agent import KvTransfer
from ciuicflow.runtime.memory import HostMemory, SharedMemory
from ciuicflow.transport import ucx_context
from ciuicflow.transport.base import TransportUnavailable

# Until they have run on more machines.
pytestmark = pytest.mark.soak

ALL = list(range(BLOCKS))


def need(scheme: str) -> None:
    if scheme == "ucx":
        try:
            ucx_context.load_ucxx()
        except TransportUnavailable as missing:
            pytest.skip(str(missing))


@pytest.fixture(params=["thread", "process"])
def both(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair(place=request.param) as agents:
        yield agents


def reason_of(transfer: KvTransfer) -> FailReason:
    with pytest.raises(TransferFailed) as caught:
        transfer.result(SOON_S)
    return caught.value.reason


# -- whole transfers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "place"),
    [("tcp", "thread"), ("tcp", "process"), ("inproc", "thread"), ("ucx", "process")],
)
def test_blocks_arrive_as_they_were_sent(scheme: str, place: str) -> None:
    need(scheme)
    with pair(scheme, place=place) as agents:
        agents.send(ALL[:40], ALL[20:60])
        agents.send([5, 3, 60, 61, 0], [1, 2, 9, 8, 40])  # scattered on both sides
        agents.send([], [])  # zero blocks are a commit too
        agents.send(ALL, list(reversed(ALL)))


def test_staged_pieces_arrive_as_well(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "direct", lambda *_: None)
    both.send([5, 3, 60, 61, 0], [1, 2, 9, 8, 40])
    both.send(ALL, list(reversed(ALL)))


def test_without_checksum_and_with_a_window_of_one_quantum() -> None:
    sender = msgspec.structs.replace(CONFIG.sender, batch=BatchSizes(least=1, most=40_000))
    config = msgspec.structs.replace(CONFIG, sender=sender, checksum="none", window_bytes=1)
    with pair(config=config) as agents:
        agents.send(ALL, ALL)


def test_layers_go_as_they_become_ready_and_not_before(both: Pair) -> None:
    ticket = both.ticket()
    expected, push = both.expect(ticket, ALL), both.push(ticket, ALL, ready=False)
    push.ready(0, 2, blocks=range(10))
    push.ready(0, 2, blocks=range(10, BLOCKS))
    array = both.target.memory.arrays["kv"]
    until(lambda: array[:2].all(), SOON_S)
    assert not array[2:].any()
    assert not expected.done
    push.ready(2, 4)
    assert push.result(SOON_S).bytes == expected.result(SOON_S).bytes
    assert (array == both.source.memory.arrays["kv"]).all()


@pytest.mark.parametrize("place", ["thread", "process"])
async def test_the_same_calls_can_be_awaited(place: str) -> None:
    source, target = Side("p", "tcp", place=place), Side("d", "tcp", place=place)
    async with target.agent, source.agent:
        source.agent.register("d", target.agent.uri)
        agents = Pair(source, target)
        ticket = agents.ticket()
        expected, push = agents.expect(ticket, ALL), agents.push(ticket, ALL)
        async with asyncio.timeout(SOON_S):
            await push
            await expected
            state = await source.agent.statistics()
        assert state.outcomes == {"send completed": 1}
    assert target.blocks(ALL) == source.blocks(ALL)


def test_thousands_of_small_transfers(both: Pair) -> None:
    count = 2000
    for start in range(0, count, 500):
        tickets = [both.ticket() for _ in range(500)]
        slots = range(500)
        expected = [both.expect(tickets[i], [i]) for i in slots[:BLOCKS]]
        pushed = [both.push(tickets[i], [i % BLOCKS]) for i in slots[:BLOCKS]]
        nothing = [both.expect(tickets[i], []) for i in slots[BLOCKS:]]
        pushed += [both.push(tickets[i], []) for i in slots[BLOCKS:]]
        for transfer in (*expected, *nothing, *pushed):
            transfer.result(SOON_S)
        assert start < count
    assert both.source.agent.statistics().result(SOON_S).outcomes == {"send completed": count}
    assert both.target.blocks(ALL) == both.source.blocks(ALL)


# -- ownership and failures ----------------------------------------------------------------------


@pytest.mark.parametrize("by", ["source", "target"])
def test_abort_in_mid_transfer_ends_both_sides_and_frees_the_blocks(both: Pair, by: str) -> None:
    ticket = both.ticket()
    expected, push = both.expect(ticket, ALL), both.push(ticket, ALL, ready=False)
    push.ready(0, 2)
    until(lambda: both.target.memory.arrays["kv"][:2].all(), SOON_S)
    (push if by == "source" else expected).abort("the caller has left")
    assert reason_of(push) is reason_of(expected) is FailReason.ABORTED
    push.ready(2, 4)  # too late, and harmless
    both.send(ALL, ALL)


def test_what_will_never_be_pushed_is_told_to_whoever_expects_it(both: Pair) -> None:
    ticket = both.ticket()
    expected = both.expect(ticket, ALL)
    both.send([], [])  # the greeting is over
    both.source.agent.abort(ticket.id)
    assert reason_of(expected) is FailReason.ABORTED


def test_deadline_ends_what_nobody_answers(both: Pair) -> None:
    early = both.ticket(remaining_ms=200.0)
    assert reason_of(both.expect(early, ALL)) is FailReason.DEADLINE
    late = both.ticket(remaining_ms=200.0)
    assert reason_of(both.push(late, ALL)) is FailReason.DEADLINE
    both.send(ALL, ALL)


def test_other_numbers_of_blocks_on_the_two_sides_are_a_mismatch(both: Pair) -> None:
    ticket = both.ticket()
    expected, push = both.expect(ticket, ALL[:5]), both.push(ticket, ALL[:6])
    assert reason_of(push) is reason_of(expected) is FailReason.MISMATCH
    both.send(ALL, ALL)


def test_a_ticket_for_another_incarnation_is_stale(both: Pair) -> None:
    shard = msgspec.structs.replace(both.ticket().destination, incarnation=1)
    ticket = both.ticket(destination=shard)
    assert reason_of(both.expect(ticket, ALL)) is FailReason.STALE
    shard = msgspec.structs.replace(shard, incarnation=both.target.agent.incarnation)
    both.send(ALL, ALL, destination=shard)


def test_other_geometry_is_refused_on_both_sides_with_the_reason() -> None:
    other = msgspec.structs.replace(LAYOUT, model="another")
    with pair(target={"layout": other}) as agents:
        push = agents.push(agents.ticket(), ALL)
        with pytest.raises(TransferFailed, match=r"model: .*another") as caught:
            push.result(SOON_S)
        assert caught.value.reason in (FailReason.REFUSED, FailReason.PEER_ERROR)


def test_other_checksum_is_refused() -> None:
    config = msgspec.structs.replace(CONFIG, checksum="none")
    with pair(target={"config": config}) as agents:
        push = agents.push(agents.ticket(), ALL)
        with pytest.raises(TransferFailed, match="setting checksum differs"):
            push.result(SOON_S)


def test_a_changed_byte_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as agents:
        arrived = kv_link.Link._arrived

        def spoil(link: kv_link.Link, channel: Any, action: Any, claim: Any, *rest: Any) -> None:
            rest[0][0][0] ^= 1
            arrived(link, channel, action, claim, *rest)

        monkeypatch.setattr(kv_link.Link, "_arrived", spoil)
        ticket = agents.ticket()
        expected, push = agents.expect(ticket, ALL), agents.push(ticket, ALL)
        assert reason_of(expected) is reason_of(push) is FailReason.CHECKSUM
        monkeypatch.undo()
        agents.send(ALL, ALL)


def test_nobody_there_fails_with_the_address_before_the_deadline() -> None:
    with pair(config=msgspec.structs.replace(CONFIG, connect_s=0.5)) as agents:
        agents.send([], [])
        agents.target.agent.stop().result(SOON_S)
        push = agents.push(agents.ticket(), ALL)
        with pytest.raises(TransferFailed, match=r"cannot be reached|gone|lost|closed") as caught:
            push.result(SOON_S)
        assert caught.value.reason is FailReason.PEER_LOST


def test_an_agent_that_starts_again_on_the_same_port_is_found_again(both: Pair) -> None:
    both.send(ALL, ALL)
    uri = both.target.agent.uri
    both.target.agent.stop().result(SOON_S)
    again = Side("d", "tcp", listen=uri)
    with again.agent:
        agents = Pair(both.source, again)
        agents.send(ALL, ALL)
        old = msgspec.structs.replace(
            agents.ticket().destination, incarnation=both.target.agent.incarnation
        )
        assert reason_of(agents.push(agents.ticket(destination=old), ALL)) is FailReason.STALE


def test_stopping_fails_what_is_under_way(both: Pair) -> None:
    ticket = both.ticket()
    expected, push = both.expect(ticket, ALL), both.push(ticket, ALL, ready=False)
    push.ready(0, 1)
    until(lambda: both.target.memory.arrays["kv"][0].all(), SOON_S)
    both.source.agent.stop().result(SOON_S)
    with pytest.raises((AgentGone, TransferFailed)):
        push.result(SOON_S)
    assert reason_of(expected) in (FailReason.ABORTED, FailReason.PEER_LOST)
    with pytest.raises(AgentGone, match="it was stopped"):
        both.push(both.ticket(), ALL)


# -- calls that cannot be right ------------------------------------------------------------------


def test_misuse_is_told_and_changes_nothing(both: Pair) -> None:
    ticket = both.ticket()
    first = both.expect(ticket, ALL[:10])
    with pytest.raises(KvUsageError, match="under way already"):
        both.expect(ticket, ALL[20:30])
    with pytest.raises(KvUsageError, match="held for another"):
        both.expect(both.ticket(), ALL[5:15]).result(SOON_S)
    with pytest.raises(KvUsageError, match=f"block {BLOCKS}; the memory has {BLOCKS}"):
        both.expect(both.ticket(), [BLOCKS]).result(SOON_S)
    with pytest.raises(KvUsageError, match="blocks of 1 regions"):
        both.source.agent.push(both.ticket(), [ALL])
    elsewhere = msgspec.structs.replace(ticket.destination, agent="x")
    with pytest.raises(KvUsageError, match="register it first"):
        both.push(both.ticket(destination=elsewhere), ALL)
    push = both.push(ticket, ALL[:10])
    push.result(SOON_S)
    first.result(SOON_S)


def test_saying_a_layer_twice_fails_the_transfer_clearly(both: Pair) -> None:
    ticket = both.ticket()
    both.expect(ticket, ALL)
    push = both.push(ticket, ALL, ready=False)
    push.ready(0, 2)
    push.ready(1, 3)
    with pytest.raises(TransferFailed, match="ready before"):
        push.result(SOON_S)


@pytest.mark.parametrize("place", ["thread", "process"])
def test_an_address_in_use_is_told_at_start(place: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        side = Side("p", "tcp", place=place, listen=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(AgentGone, match="cannot listen"):
            side.agent.start().result(SOON_S)
        with pytest.raises(AgentGone):
            side.agent.register("d", "tcp://127.0.0.1:1")


def test_a_process_needs_shared_memory() -> None:
    layout = deepseek_v3(layers=1)
    arrays = SharedMemory(layout, [1]).arrays
    side = Side("p", "tcp")
    memory = HostMemory(layout, {name: list(array) for name, array in arrays.items()})
    with pytest.raises(KvUsageError, match="SharedMemory"):
        type(side.agent)("p", layout, memory, place="process")


# -- beside the engine ---------------------------------------------------------------------------


def test_metrics_and_state_are_served() -> None:
    config = msgspec.structs.replace(CONFIG, metrics="127.0.0.1:0")
    with pair(config=config) as agents:
        agents.send(ALL, ALL, tier="silver")
        page = urllib.request.urlopen(f"http://{agents.source.agent.metrics}/metrics").read()
        assert b'ciuicflow_kv_bytes_total{dst="d",src="p",tier="silver"}' in page
        assert b'ciuicflow_kv_transfers_total{outcome="completed",role="send"} 1.0' in page
        assert b'ciuicflow_kv_transfer_seconds_count{role="send",tier="silver"} 1.0' in page
        for name in ("send_wait_seconds_total", "rtt_seconds", "in_flight_bytes"):
            assert f'ciuicflow_kv_{name}{{dst="d",src="p"}}'.encode() in page
        state = urllib.request.urlopen(f"http://{agents.target.agent.metrics}/kv/state").read()
        assert msgspec.json.decode(state)["sources"][0]["src"] == "p"


def test_the_engines_event_loop_is_not_held_up() -> None:
    """Loosely, since the machine may be busy; `ciuicflow bench kv` measures it."""

    async def worst_gap_s(stop: threading.Event) -> float:
        worst_s = 0.0
        while not stop.is_set():
            before_s = time.perf_counter()
            await asyncio.sleep(0.001)
            worst_s = max(worst_s, time.perf_counter() - before_s)
        return worst_s

    with pair() as agents:
        stop, worst = threading.Event(), [0.0]
        watch = threading.Thread(target=lambda: worst.append(asyncio.run(worst_gap_s(stop))))
        watch.start()
        for _ in range(10):
            agents.send(ALL, ALL)
        stop.set()
        watch.join()
    assert worst[-1] < 0.5
