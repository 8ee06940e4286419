"""What an engine relies on beside the bytes: order of tiers, blocks freed once, nothing left."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from support.kv_agents import BLOCKS, CONFIG, SOON_S, Pair, pair
from support.wait import until

from ciuicflow.kvtransfer.errors import AgentGone, KvUsageError, TransferFailed
from ciuicflow.runtime.kv_agent import KvAgent, KvTransfer
from ciuicflow.runtime.kv_records import Completed, Event, Failed, Freed, Stopped

# Until they have run on more machines.
pytestmark = pytest.mark.soak

ALL = list(range(BLOCKS))
SCHEMES = ["inproc", "tcp"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Event]]:
    """Collect what every agent of this process tells its engine, with the agent's name."""
    heard: list[tuple[str, Event]] = []
    take = KvAgent._on_event

    def listen(agent: KvAgent, event: Event) -> None:
        heard.append((agent.name, event))
        take(agent, event)

    monkeypatch.setattr(KvAgent, "_on_event", listen)
    return heard


def ends(events: list[tuple[str, Event]], name: str, transfer: str) -> list[type[Event]]:
    """The kinds of events of one transfer at one agent."""
    return [
        type(event)
        for agent, event in events
        if agent == name
        and isinstance(event, Completed | Failed | Freed)
        and event.transfer == transfer
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gold_overtakes_bronze_that_came_first(scheme: str) -> None:
    # 5 MB/s: the bronze cache takes most of a second, the gold one an eighth.
    config = msgspec.structs.replace(CONFIG, rate_bytes_per_s=5e6, window_bytes=256 << 10)
    order: list[str] = []

    def begin(agents: Pair, name: str, blocks: list[int], rank: int) -> KvTransfer:
        ticket = agents.ticket(name, tier=name.rstrip("12"), rank=rank)
        expected = agents.expect(ticket, blocks)
        expected.when_done(lambda: order.append(name))
        agents.push(ticket, blocks)
        return expected

    with pair(scheme, config=config) as agents:
        agents.send([], [])  # connected
        transfers = [
            begin(agents, "bronze1", ALL[:30], 2),
            begin(agents, "bronze2", ALL[30:56], 2),
            begin(agents, "gold", ALL[56:], 0),
        ]
        for transfer in transfers:
            transfer.result(SOON_S)
        assert agents.target.blocks(ALL) == agents.source.blocks(ALL)
    assert order[0] == "gold"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("by", ["source", "target"])
def test_an_abort_frees_the_blocks_once_on_each_side(
    scheme: str, by: str, events: list[tuple[str, Event]]
) -> None:
    with pair(scheme) as agents:
        ticket = agents.ticket()
        expected, push = agents.expect(ticket, ALL), agents.push(ticket, ALL, ready=False)
        push.ready(0, 2)
        until(lambda: agents.target.memory.arrays["kv"][:2].all(), SOON_S)
        for _ in range(2):  # the second is too late, and harmless
            (push if by == "source" else expected).abort("the caller has left")
        for transfer in (push, expected):
            with pytest.raises(TransferFailed, match=r"the caller has left|aborted"):
                transfer.result(SOON_S)
        agents.send(ALL, list(reversed(ALL)))  # the same blocks
    for name in ("p", "d"):
        assert ends(events, name, ticket.id) == [Failed, Freed]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_success_frees_the_blocks_once_on_each_side(
    scheme: str, events: list[tuple[str, Event]]
) -> None:
    with pair(scheme) as agents:
        ticket = agents.ticket("t")
        expected, push = agents.expect(ticket, ALL), agents.push(ticket, ALL)
        push.result(SOON_S)
        expected.result(SOON_S)
    assert ends(events, "p", "t") == ends(events, "d", "t") == [Completed, Freed]


@contextmanager
def nothing_left() -> Iterator[None]:
    """See that no more threads and descriptors are there than before."""

    def there() -> tuple[int, int]:
        gc.collect()  # an agent and its thread know each other; the memory's map goes with them
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = there()
    yield
    until(lambda: all(now <= then for now, then in zip(there(), before, strict=True)), SOON_S)


def use(scheme: str, place: str) -> None:
    """Send something, and stop in the middle of something else."""
    with pair(scheme, place=place) as agents:
        agents.send(ALL[:20], ALL[20:40])
        ticket = agents.ticket()
        expected, push = agents.expect(ticket, ALL), agents.push(ticket, ALL, ready=False)
        push.ready(0, 2)
    for transfer in (expected, push):
        with pytest.raises((TransferFailed, AgentGone)):
            transfer.result(SOON_S)


@pytest.mark.parametrize(
    ("scheme", "place"), [("inproc", "thread"), ("tcp", "thread"), ("tcp", "process")]
)
def test_stopping_leaves_no_thread_and_no_descriptor(scheme: str, place: str) -> None:
    use(scheme, place)  # what is made once for all, is made now
    with nothing_left():
        use(scheme, place)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_told_after_the_stop(scheme: str, events: list[tuple[str, Event]]) -> None:
    """Stopped with quanta at every stage: when it is done, no worker reads the blocks."""
    for _ in range(15):
        events.clear()
        with pair(scheme) as agents:
            agents.send([], [])
            ticket = agents.ticket()
            expected, push = agents.expect(ticket, ALL), agents.push(ticket, ALL)
        assert expected.done
        assert push.done
        for name in ("p", "d"):
            mine = [event for agent, event in events if agent == name]
            assert isinstance(mine[-1], Stopped)
            assert ends(events, name, ticket.id)[1:] == [Freed]


def test_a_refused_call_leaves_its_blocks_free() -> None:
    with pair("inproc") as agents:
        with pytest.raises(KvUsageError, match="the memory has"):
            agents.expect(agents.ticket(), [*ALL, BLOCKS]).result(SOON_S)
        agents.send(ALL, ALL)
