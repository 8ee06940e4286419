"""Any sequence of events at both ends of a link: what is freed, committed and counted, and when."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.kv import GEOMETRY, SENDER, Link, Side, hello, receiver, sender, ticket

from ciuicflow.congestion.base import CongestionState
from ciuicflow.kvtransfer.actions import Complete
from ciuicflow.kvtransfer.layout import Geometry, LayerRange, Region
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.ranges import Run
from ciuicflow.kvtransfer.ticket import Shard, TransferTicket

BLOCK_BYTES = max(region.block_bytes for region in GEOMETRY.regions)
BLOCKS = 12
TIERS = ("gold", "silver", "bronze")
sizes = st.tuples(st.sampled_from([4, 3, 1, 0]), st.sampled_from([2, 1, 0]))
Ready = tuple[LayerRange, Run, int]


def stage(first: int, layers: int) -> Geometry:
    """Cut a pipeline stage out of the geometry's first region."""
    region = GEOMETRY.regions[0]
    cut = Region(
        name=region.name,
        kind=region.kind,
        first_layer=first,
        layers=layers,
        block_tokens=region.block_tokens,
        block_bytes=region.block_bytes,
        dtype=region.dtype,
    )
    return Geometry(model=GEOMETRY.model, regions=(cut, *GEOMETRY.regions[1:]))


STAGES = {"all": GEOMETRY, "lower": stage(0, 2), "upper": stage(1, 2)}


def parts(lists: list[list[int]], geometry: Geometry, half: int) -> list[Ready]:
    """Divide a transfer into what becomes ready at different times."""
    found: list[Ready] = []
    for index, (region, blocks) in enumerate(zip(geometry.regions, lists, strict=True)):
        cuts = [Run(0, min(half, len(blocks)))] if min(half, len(blocks)) else []
        if len(blocks) > half:
            cuts.append(Run(half, len(blocks) - half))
        for layer in range(region.first_layer, region.first_layer + region.layers):
            found += [(LayerRange(layer, layer + 1), cut, index) for cut in cuts]
    return found


def run(link: Link, rng: Random, count: int) -> None:
    """Let the link and the two transports do some of what they could do."""
    steps: list[Callable[[], bool]] = [
        link.deliver_to_receiver,
        link.deliver_to_sender,
        link.finish_send,
        lambda: link.finish_receive(rng.randrange(5)),
    ]
    while count and any(step() for step in rng.sample(steps, len(steps))):
        count -= 1


class KvMachine(RuleBasedStateMachine):
    """Two agents, a link that breaks, engines that give up, processes that restart."""

    @initialize(
        window=st.sampled_from([1, 250, 600, 5000]),
        rate=st.sampled_from([None, 10_000.0]),
        peer_window=st.sampled_from([1, 400, 5000]),
        stages=st.tuples(st.sampled_from(sorted(STAGES)), st.sampled_from(sorted(STAGES))),
    )
    def start(
        self, window: int, rate: float | None, peer_window: int, stages: tuple[str, str]
    ) -> None:
        self.window, self.rate, self.peer_window = window, rate, peer_window
        self.geometries = STAGES[stages[0]], STAGES[stages[1]]
        self.incarnations = [1, 1]
        self.link = Link(self.make_sender(), self.make_receiver())
        self.tickets: dict[str, tuple[TransferTicket, tuple[int, int]]] = {}
        self.not_submitted: list[str] = []
        self.not_reserved: list[str] = []
        self.ready: dict[str, list[Ready]] = {}
        self.last_id = 0
        self.link.connect()

    def make_sender(self) -> Any:
        greeting = hello("p", self.incarnations[0], self.geometries[0])
        return sender(self.window, self.rate, hello=greeting)

    def make_receiver(self) -> Any:
        greeting = hello(
            "d", self.incarnations[1], self.geometries[1], window_bytes=self.peer_window
        )
        return receiver(hello=greeting)

    # What the gateway and the engines do.

    @rule(
        data=st.data(),
        size=sizes,
        rank=st.integers(0, 2),
        remaining_s=st.sampled_from([0.5, 60.0, 60.0]),
        knows=st.booleans(),
        now=st.sampled_from(["all", "all", "all", "both", "submit", "reserve"]),
    )
    def begin(
        self,
        data: st.DataObject,
        size: tuple[int, int],
        rank: int,
        remaining_s: float,
        knows: bool,
        now: str,
    ) -> None:
        self.last_id += 1
        known = self.incarnations if knows else [0, 0]
        made = ticket(
            f"t{self.last_id}",
            tier=TIERS[rank],
            rank=rank,
            floor=0.1,
            remaining_ms=remaining_s * 1000,
            source=Shard(agent="p", incarnation=known[0]),
            destination=Shard(agent="d", incarnation=known[1]),
        )
        self.tickets[made.id] = made, size
        self.not_submitted.append(made.id)
        self.not_reserved.append(made.id)
        if now != "reserve":
            self.submit_one(data, made.id)
        if now != "submit":
            self.reserve_one(data, made.id)
        while now == "all" and self.ready.get(made.id):
            self.compute_next(made.id)

    def allocate(
        self, side: Side, size: tuple[int, int], data: st.DataObject
    ) -> list[list[int]] | None:
        lists = []
        for region, count in enumerate(size):
            free = side.free_blocks(region, BLOCKS)
            if len(free) < count:
                return None
            if data.draw(st.booleans()):
                Random(data.draw(st.integers(0, 99))).shuffle(free)
            lists.append(free[:count])
        return lists

    @precondition(lambda self: self.not_submitted or self.not_reserved or any(self.ready.values()))
    @rule(data=st.data(), share=st.sampled_from([1, 100]))
    def catch_up(self, data: st.DataObject, share: int) -> None:
        for id_ in list(self.not_submitted):
            self.submit_one(data, id_)
        for id_ in list(self.not_reserved):
            self.reserve_one(data, id_)
        for id_, areas in self.ready.items():
            for _ in range(min(share, len(areas))):
                self.compute_next(id_)

    def submit_one(self, data: st.DataObject, id_: str) -> None:
        made, size = self.tickets[id_]
        extra = data.draw(st.sampled_from([0] * 9 + [1]))
        lists = self.allocate(self.link.source, (size[0] + extra, size[1]), data)
        if lists is not None:
            self.not_submitted.remove(id_)
            self.ready[id_] = parts(lists, self.geometries[0], data.draw(st.integers(1, 3)))
            self.link.submit(made, lists)

    def reserve_one(self, data: st.DataObject, id_: str) -> None:
        made, size = self.tickets[id_]
        self.end_decodes()
        lists = self.allocate(self.link.target, size, data)
        if lists is not None:
            self.not_reserved.remove(id_)
            self.link.reserve(made, lists)

    def compute_next(self, id_: str) -> None:
        layers, positions, region = self.ready[id_].pop(0)
        link = self.link
        link.at_sender(link.sender.ready(link.now, id_, layers, positions, region))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), at_sender=st.booleans())
    def abort(self, data: st.DataObject, at_sender: bool) -> None:
        link = self.link
        side = link.source if at_sender else link.target
        live = self.tickets.keys() - side.outcome.keys()
        moving = live & {id_ for id_, _ in (*link.sending, *link.receiving)}
        id_ = data.draw(st.sampled_from(sorted(moving or live or self.tickets.keys())))
        if at_sender:
            link.at_sender(link.sender.abort(link.now, id_))
        else:
            link.at_receiver(link.receiver.abort(link.now, id_))

    def end_decodes(self) -> None:
        """What is committed is soon used up, and its blocks are used again."""
        side = self.link.target
        for id_, end in side.outcome.items():
            if isinstance(end, Complete) and id_ not in side.freed:
                side.release(id_)

    # What the link does.

    @rule(
        seed=st.integers(0, 1000),
        count=st.sampled_from([8, 3, 20, 60]),
        damages=st.sampled_from([False, False, True]),
    )
    def run(self, seed: int, count: int, damages: bool) -> None:
        self.link.damages = self.link.damages or damages
        run(self.link, Random(seed), count)

    @rule(seed=st.integers(0, 1000), count=st.integers(1, 12))
    def run_on(self, seed: int, count: int) -> None:
        run(self.link, Random(seed), count)

    @rule(
        at_source=st.booleans(),
        receive_fails=st.booleans(),
        restarts=st.sampled_from([None, None, 0, 1]),
        at_once=st.booleans(),
    )
    def break_connection(
        self, at_source: bool, receive_fails: bool, restarts: int | None, at_once: bool
    ) -> None:
        """One side notices, the other does later or now; then they may connect again."""
        link = self.link
        first, second = link.source, link.target
        if not at_source:
            first, second = second, first
        link.notice(first)
        if receive_fails:
            link.finish_receive(ok=False)
        if restarts is not None:
            self.restart(restarts)
        if at_once:
            self.reconnect()

    @precondition(lambda self: self.link.source.closed or self.link.target.closed)
    @rule()
    def reconnect(self) -> None:
        for side in (self.link.source, self.link.target):
            if side.connected:
                self.link.notice(side)
        self.link.connect()

    def restart(self, index: int) -> None:
        self.incarnations[index] += 1
        if index:
            self.link.restart_receiver(self.make_receiver())
        else:
            self.link.restart_sender(self.make_sender())
            self.ready.clear()

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.02, 0.3, 0.9, 6.0]))
    def advance(self, seconds: float) -> None:
        self.link.advance(seconds)

    # What always holds. The link's books check the rest as it happens.

    def in_flight(self) -> int:
        return self.congestion().in_flight_bytes

    def congestion(self) -> CongestionState:
        return self.link.sender.snapshot(self.link.now).congestion

    @invariant()
    def the_window_is_kept(self) -> None:
        most = max(min(self.window, self.peer_window), BLOCK_BYTES)
        assert 0 <= self.link.sender.snapshot(self.link.now).in_flight_bytes <= most
        assert 0 <= self.link.receiver.snapshot().in_flight_bytes <= most

    @invariant()
    def the_controller_counts_the_same_bytes(self) -> None:
        state = self.link.sender.snapshot(self.link.now)
        assert state.in_flight_bytes == state.congestion.in_flight_bytes

    @invariant()
    def what_was_damaged_is_not_committed(self) -> None:
        for id_ in self.link.damaged:
            assert not isinstance(self.link.target.outcome.get(id_), Complete)

    @invariant()
    def no_peer_breaks_the_protocol(self) -> None:
        for close in self.link.closes:
            assert close.reason not in (FailReason.PROTOCOL, FailReason.REFUSED)
            assert "no answer" not in close.detail, "commits and aborts are answered at once"

    @invariant()
    def a_commit_is_at_the_receiver_first(self) -> None:
        for id_, end in self.link.source.outcome.items():
            if isinstance(end, Complete) and id_ in self.link.target.outcome:
                assert isinstance(self.link.target.outcome[id_], Complete)

    def teardown(self) -> None:
        """Without further events everything ends, and is freed."""
        if not hasattr(self, "link"):
            return
        link = self.link
        for _ in range(200):
            link.settle()
            link.advance(0.9)
        link.lose()
        link.settle()
        for side in (link.source, link.target):
            assert side.outcome.keys() == side.lists.keys()
            for id_, end in side.outcome.items():
                kept = side is link.target and isinstance(end, Complete)
                assert kept or id_ in side.freed
        assert link.sender.snapshot(link.now).transfers == 0
        state = link.receiver.snapshot()
        assert (state.reserved, state.draining) == (0, 0)
        assert sum(link.sender.sent_bytes.values()) >= self.acked()

    def acked(self) -> int:
        return self.link.sender.snapshot(self.link.now).acked_bytes


KvMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestKv = KvMachine.TestCase


def submit_and_compute(link: Link, made: TransferTicket, lists: list[list[int]], half: int) -> None:
    link.submit(made, lists)
    for layers, positions, region in parts(lists, GEOMETRY, half):
        link.at_sender(link.sender.ready(link.now, made.id, layers, positions, region))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    window=st.sampled_from([1, 300, 10_000]),
    count=st.integers(1, 4),
)
def test_without_faults_everything_completes_in_any_order(
    seed: int, window: int, count: int
) -> None:
    rng = Random(seed)
    link = Link(sender(window), receiver(hello=hello("d", window_bytes=10_000)))
    events: list[Callable[[], object]] = [link.connect]
    for number in range(count):
        made = ticket(f"t{number}", rank=rng.randrange(3), tier="any")
        size = rng.randrange(5), rng.randrange(4)
        spread = [rng.sample(range(number * 10, number * 10 + 10), part) for part in size]
        target = [list(range(number * 10, number * 10 + part)) for part in size]
        half = rng.randrange(1, 4)
        events.append(partial(link.reserve, made, target))
        events.append(partial(submit_and_compute, link, made, spread, half))
    rng.shuffle(events)
    for event in events:
        event()
        run(link, rng, rng.randrange(30))
    link.settle()
    for side in (link.source, link.target):
        assert len(side.outcome) == count
        assert all(isinstance(end, Complete) for end in side.outcome.values())
    assert link.source.freed == set(link.source.lists)
    assert link.sender.snapshot(0.0).acked_bytes == link.sent_bytes
    assert link.receiver.snapshot().received_bytes == link.sent_bytes
    assert sum(link.sender.sent_bytes.values()) == link.sent_bytes
    assert SENDER.quantum_bytes < 400  # several quanta per transfer, or this shows little
