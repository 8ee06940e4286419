"""Any sequence of events: conservation, order, bounds, floors, and an end for every request."""

from collections import Counter
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.verdicts import REFUSALS

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.actions import Action, Dispatch, Endpoint, Item, Role
from ciuicflow.flowcontrol.controller import FlowController
from ciuicflow.flowcontrol.cost import Usage
from ciuicflow.flowcontrol.tiers import DEFAULT_TIERS, FlowConfig

MODELS = ("m", "n")
NAMES = ("a", "b", "c")
TIERS = tuple(
    msgspec.structs.replace(tier, queue_entries=8, max_wait_s=wait_s)
    for tier, wait_s in zip(DEFAULT_TIERS, (20.0, 40.0, 80.0), strict=True)
)
RANKS = {tier.name: tier.rank for tier in TIERS}
seconds = st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 2.0])


class FlowMachine(RuleBasedStateMachine):
    """Drives a controller, and keeps its own books."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.waiting: dict[int, Item] = {}
        self.expires: dict[int, float] = {}
        self.running: dict[int, set[str]] = {}
        self.ended: Counter[int] = Counter()
        self.last_id = 0

    @initialize(
        headroom=st.sampled_from([0.0, 0.25]),
        entries=st.sampled_from([6, 20]),
        roles=st.sampled_from(["any", "split", "mixed"]),
    )
    def start(self, headroom: float, entries: int, roles: str) -> None:
        config = FlowConfig(
            tiers=TIERS, headroom=headroom, queue_entries=entries, queue_bytes=100_000
        )
        self.config = config
        self.roles = roles
        self.controller = FlowController(config)
        self.endpoints: dict[str, Endpoint] = {}
        self.set_endpoint("a", slots=2, models=None, up=True)
        self.set_endpoint("b", slots=1, models=frozenset({"m"}), up=True)

    # What happens.

    @rule(
        tier=st.sampled_from(["gold", "silver", "bronze"]),
        tenant=st.sampled_from("xyz"),
        model=st.sampled_from([*MODELS, None]),
        body_bytes=st.sampled_from([1, 4000, 60_000]),
        max_tokens=st.sampled_from([None, 1, 10_000]),
        deadline_s=st.sampled_from([None, -1.0, 1.0, 30.0, float("inf")]),
        streams=st.booleans(),
    )
    def ask(self, deadline_s: float | None, **values: Any) -> None:
        self.last_id += 1
        if deadline_s is not None:
            deadline_s += self.now
        item = Item(id=self.last_id, deadline_s=deadline_s, **values)
        limit_s = next(tier.max_wait_s for tier in TIERS if tier.name == item.tier)
        self.waiting[item.id] = item
        self.expires[item.id] = min(self.now + limit_s, deadline_s or 1e9)
        self.take(self.controller.enqueue(self.now, item))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 50))
    def stream(self, data: st.DataObject, tokens: int) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.running)))
        self.take(self.controller.first_token(self.now, id_))
        self.controller.progress(self.now, id_, tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reported=st.booleans())
    def complete(self, data: st.DataObject, reported: bool) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[id_]
        self.take(
            self.controller.complete(self.now, id_, Usage(500, 100, 50) if reported else None)
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_a_leg(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.running)))
        if len(self.running[id_]) > 1:
            leg = min(self.running[id_])
            self.running[id_].remove(leg)
            self.take(self.controller.release(self.now, id_, EndpointId(leg)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail_to_deliver(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.running)))
        legs = self.running.pop(id_)
        self.ended[id_] -= 1  # it was dispatched, and is not any more
        self.waiting[id_] = Item(id=id_, tenant="?", tier="?", body_bytes=0)
        self.take(self.controller.requeue(self.now, id_, EndpointId(min(legs))))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave_the_queue(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[id_]
        self.ended[id_] += 1
        self.take(self.controller.cancel(self.now, id_))

    @rule(
        name=st.sampled_from(NAMES),
        slots=st.integers(1, 3),
        models=st.sampled_from([None, frozenset({"m"}), frozenset({"m", "n"})]),
        up=st.booleans(),
    )
    def change_endpoint(
        self, name: str, slots: int, models: frozenset[str] | None, up: bool
    ) -> None:
        self.set_endpoint(name, slots=slots, models=models, up=up)

    @precondition(lambda self: len(self.endpoints) > 1)
    @rule(name=st.sampled_from(NAMES))
    def remove_endpoint(self, name: str) -> None:
        self.endpoints.pop(name, None)
        self.take(self.controller.set_endpoints(self.now, self.endpoints.values()))

    def set_endpoint(
        self, name: str, *, slots: int, models: frozenset[str] | None, up: bool
    ) -> None:
        split = {"a": Role.PREFILL, "b": Role.DECODE, "c": Role.DECODE}[name]
        role = {"any": Role.ANY, "split": split, "mixed": Role.ANY if name == "a" else split}
        self.endpoints[name] = Endpoint(
            id=EndpointId(name), models=models, up=up, role=role[self.roles], max_requests=slots
        )
        self.take(self.controller.set_endpoints(self.now, self.endpoints.values()))

    @rule(name=st.sampled_from(NAMES), waiting=st.sampled_from([None, 0, 5]))
    def report(self, name: str, waiting: int | None) -> None:
        self.controller.report(self.now, EndpointId(name), waiting)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 3))
    def bypass(self, name: str, count: int) -> None:
        self.take(self.controller.bypass(self.now, EndpointId(name), count, 4000 * count, count))
        for left in range(count - 1, -1, -1):
            self.take(self.controller.bypass(self.now, EndpointId(name), left, 4000 * left, 0))

    @rule(keep=st.booleans())
    def reload(self, keep: bool) -> None:
        config = self.config if keep else msgspec.structs.replace(self.config, output_weight=3.0)
        self.take(self.controller.reconfigure(self.now, config))

    @rule(passed_s=seconds)
    def wait(self, passed_s: float) -> None:
        """A driver ticks when it is told to, at the latest."""
        until_s = self.now + passed_s
        for _ in range(10_000):
            due_s = self.controller.next_timeout(self.now)
            if due_s is None or due_s > until_s:
                break
            self.now = max(self.now, due_s)
            self.take(self.controller.tick(self.now))
            again_s = self.controller.next_timeout(self.now)
            assert again_s is None or again_s > self.now  # it does not spin
        self.now = until_s

    # What must hold.

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            del self.waiting[action.id]  # it was waiting, and only once
            self.ended[action.id] += 1
            if isinstance(action, Dispatch):
                self.check_dispatch(action)
            else:
                assert action.outcome in REFUSALS
                assert 1 <= action.retry_after_s <= 60
                assert action.waited_s >= 0

    def check_dispatch(self, action: Dispatch) -> None:
        self.running[action.id] = {leg.endpoint for leg in action.legs}
        assert action.legs
        for leg in action.legs:
            endpoint = self.endpoints[leg.endpoint]
            assert endpoint.up
            assert endpoint.role is leg.role
            ledger = self.controller.topology.ledgers[leg.endpoint]
            assert ledger.requests <= max(1, ledger.limit.requests)

    @invariant()
    def every_request_has_one_outcome_or_waits(self) -> None:
        for id_ in range(1, self.last_id + 1):
            assert self.ended[id_] == (0 if id_ in self.waiting else 1)
        assert (
            self.controller.dispatched.total() + self.controller.outcomes.total()
            == self.ended.total()
        )

    @invariant()
    def queues_hold_what_waits_and_nothing_else(self) -> None:
        state = self.controller.snapshot(self.now)
        assert sum(tier.queued for tier in state.tiers) == len(self.waiting)
        known = [item for item in self.waiting.values() if item.tier != "?"]
        if len(known) == len(self.waiting):
            held = sum(item.body_bytes for item in known)
            assert sum(tier.queued_bytes for tier in state.tiers) == held
            assert held <= self.config.queue_bytes
        assert all(tier.queued <= 8 for tier in state.tiers)
        assert len(self.waiting) <= self.config.queue_entries

    @invariant()
    def ledgers_hold_what_runs_and_nothing_else(self) -> None:
        held = Counter(name for legs in self.running.values() for name in legs)
        for name, ledger in self.controller.topology.ledgers.items():
            assert ledger.requests == held[name]
            assert ledger.observer.line_tokens >= 0
            if not ledger.requests:
                assert (ledger.tokens, ledger.observer.line_tokens) == (0, 0)

    @invariant()
    def nothing_waits_beyond_its_time(self) -> None:
        due_s = self.controller.next_timeout(self.now)
        for id_ in self.waiting:
            assert due_s is not None
            if due_s > self.now:
                assert self.expires.get(id_, 1e9) >= self.now - 1e-9

    def teardown(self) -> None:
        """Nothing starves: where endpoints come up and requests end, every request gets an end."""
        if not hasattr(self, "controller"):
            return
        for name in NAMES:
            self.set_endpoint(name, slots=2, models=None, up=True)
        for _ in range(400):
            if not self.waiting:
                break
            for id_ in list(self.running):
                del self.running[id_]
                self.take(self.controller.complete(self.now, id_))
            self.wait(0.5)
        assert not self.waiting
        for id_ in list(self.running):
            del self.running[id_]
            self.take(self.controller.complete(self.now, id_))
        for ledger in self.controller.topology.ledgers.values():
            assert (ledger.requests, ledger.tokens) == (0, 0)


FlowMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestFlow = FlowMachine.TestCase
