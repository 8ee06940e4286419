"""The controller: who goes, who waits, who is refused. Literal times."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.actions import Action, Dispatch, Endpoint, Item, Refuse, Role
from ciuicflow.flowcontrol.controller import FlowController
from ciuicflow.flowcontrol.cost import Cost, Usage
from ciuicflow.flowcontrol.entry import Entry
from ciuicflow.flowcontrol.ledger import EndpointLedger
from ciuicflow.flowcontrol.tiers import DEFAULT_TIERS, FlowConfig
from ciuicflow.request import Outcome

ONE_TOKEN_ANSWER = Usage(1000, 0, 256)


def tiers(**values: Any) -> tuple[Any, ...]:
    return tuple(msgspec.structs.replace(tier, **values) for tier in DEFAULT_TIERS)


PATIENT = FlowConfig(tiers=tiers(max_wait_s=1000.0, floor=0.0, ageing_share=0.0))


class Flow:
    """A controller in front of endpoints that take a fixed number of requests each."""

    def __init__(
        self, config: FlowConfig = PATIENT, *, slots: int = 1, endpoints: Sequence[str] = ("a",)
    ) -> None:
        self.controller = FlowController(config)
        self.slots = slots
        self.set(0.0, *endpoints)
        self.refused: dict[int, Refuse] = {}
        self.sent: list[int] = []
        self.where: dict[int, str] = {}

    def set(self, now: float, *names: str, **values: Any) -> list[Action]:
        made = [Endpoint(id=EndpointId(n), max_requests=self.slots, **values) for n in names]
        return self.controller.set_endpoints(now, made)

    def note(self, actions: list[Action]) -> list[int]:
        """Record actions; return the requests that were dispatched."""
        sent = []
        for action in actions:
            if isinstance(action, Dispatch):
                sent.append(action.id)
                self.where[action.id] = action.legs[0].endpoint
            else:
                self.refused[action.id] = action
        self.sent += sent
        return sent

    def ask(self, now: float, id_: int, tier: str = "gold", **values: Any) -> list[int]:
        item = Item(
            id=id_, tier=tier,
            **{"tenant": "t", "model": "m", "body_bytes": 4000, **values},
        )  # fmt: skip
        return self.note(self.controller.enqueue(now, item))

    def done(self, now: float, id_: int, usage: Usage | None = None) -> list[int]:
        return self.note(self.controller.complete(now, id_, usage))

    def outcome(self, id_: int) -> Outcome:
        return self.refused[id_].outcome


# Dispatch.


def test_a_request_with_room_goes_at_once() -> None:
    flow = Flow()
    (action,) = flow.controller.enqueue(
        5.0, Item(id=1, tenant="t", tier="gold", model="m", body_bytes=4000)
    )
    assert isinstance(action, Dispatch)
    assert (action.id, action.tier, action.waited_s) == (1, "gold", 0.0)
    assert [(leg.endpoint, leg.role) for leg in action.legs] == [("a", Role.ANY)]


def test_a_completion_returns_the_next_dispatch_in_the_same_call() -> None:
    flow = Flow()
    flow.ask(0.0, 1)
    assert flow.ask(0.0, 2) == []
    (action,) = flow.controller.complete(3.0, 1)
    assert isinstance(action, Dispatch)
    assert (action.id, action.waited_s) == (2, 3.0)


def test_a_first_token_lets_the_next_prompt_in() -> None:
    flow = Flow(slots=100)
    flow.ask(0.0, 1, body_bytes=7000)
    assert flow.ask(0.0, 2, body_bytes=7000) == []  # 1750 tokens in line already
    assert flow.note(flow.controller.first_token(0.5, 1)) == [2]


def test_higher_tiers_go_first() -> None:
    flow = Flow()
    flow.ask(0.0, 0)
    for id_, tier in ((1, "bronze"), (2, "silver"), (3, "gold"), (4, "gold")):
        flow.ask(0.0, id_, tier)
    for id_ in (0, 3, 4, 2, 1):
        flow.done(1.0, id_)
    assert flow.sent == [0, 3, 4, 2, 1]


def test_tenants_of_a_tier_take_turns() -> None:
    flow = Flow()
    flow.ask(0.0, 0, tenant="first")
    for id_ in (1, 2, 3):
        flow.ask(0.0, id_, tenant="greedy")
    flow.ask(0.0, 4, tenant="modest")
    flow.done(1.0, 0)
    flow.done(2.0, flow.sent[-1])
    assert set(flow.sent[1:]) == {1, 4}


def test_the_actual_cost_decides_whose_turn_it_is_next() -> None:
    flow = Flow()
    flow.ask(0.0, 1, tenant="a")
    flow.ask(0.0, 2, tenant="b")
    flow.ask(0.0, 3, tenant="a")
    flow.ask(0.0, 4, tenant="b")
    flow.done(1.0, 1, Usage(1000, 0, 256))
    flow.done(2.0, 2, Usage(1000, 1000, 1))  # b cost far less than was thought
    assert flow.sent == [1, 2, 4]


def test_within_a_tenant_the_earliest_deadline_goes_first() -> None:
    flow = Flow()
    flow.ask(0.0, 0)
    flow.ask(0.0, 1, deadline_s=90.0)
    flow.ask(0.0, 2, deadline_s=50.0)
    assert flow.done(1.0, 0) == [2]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_room() -> None:
    flow = Flow(slots=10)
    ledger = flow.controller.topology.ledgers[EndpointId("a")]
    ledger.limit.set_ceilings(10, 3000)
    flow.ask(0.0, 1)  # holds 1256
    assert flow.ask(0.0, 2, body_bytes=20_000) == []
    assert flow.ask(0.0, 3, body_bytes=40) == []
    assert flow.done(1.0, 1) == [2]


@pytest.mark.parametrize("headroom", [0.0, 0.1])
def test_a_small_request_of_a_lower_tier_does_not_overtake_either(headroom: float) -> None:
    config = msgspec.structs.replace(PATIENT, headroom=headroom)
    flow = Flow(config, slots=10)
    flow.controller.topology.ledgers[EndpointId("a")].limit.set_ceilings(10, 3000)
    flow.ask(0.0, 1)
    flow.ask(0.0, 2, body_bytes=20_000)
    assert flow.ask(0.0, 3, "silver", body_bytes=40) == []
    assert flow.note(flow.controller.tick(1.0)) == []


def test_a_burst_of_a_thousand_never_exceeds_the_limit() -> None:
    flow = Flow(slots=16)
    ledger = flow.controller.topology.ledgers[EndpointId("a")]
    most = 0
    for id_ in range(1000):
        flow.ask(id_ * 1e-5, id_, body_bytes=40)
        most = max(most, ledger.requests - int(ledger.limit.requests))
    now = 0.1
    while len(flow.sent) < 1000:
        now += 0.01
        oldest = flow.sent[len(flow.sent) - ledger.requests]
        flow.note(flow.controller.first_token(now, oldest))
        flow.done(now + 0.005, oldest)
        most = max(most, ledger.requests - int(ledger.limit.requests))
    assert most <= 0
    assert sorted(flow.sent) == list(range(1000))


# Endpoints and models.


def test_the_least_loaded_endpoint_is_chosen() -> None:
    flow = Flow(slots=4, endpoints=("a", "b"))
    for id_ in range(4):
        flow.ask(0.0, id_)
    assert sorted(flow.where.values()) == ["a", "a", "b", "b"]


def test_a_routing_policy_can_be_passed_in() -> None:
    def last(_: Entry, ledgers: Sequence[EndpointLedger], /) -> tuple[int, str]:
        return len(ledgers) - 1, "last"

    controller = FlowController(PATIENT, pick=last)
    controller.set_endpoints(0.0, [Endpoint(id=EndpointId(name)) for name in "ab"])
    (action,) = controller.enqueue(0.0, Item(id=1, tenant="t", tier="gold", body_bytes=1))
    assert isinstance(action, Dispatch)
    assert (action.legs[0].endpoint, action.reason) == ("b", "last")


def test_a_request_goes_only_where_its_model_is() -> None:
    flow = Flow()
    flow.controller.set_endpoints(
        0.0,
        [
            Endpoint(id=EndpointId("a"), models=frozenset({"m"}), max_requests=1),
            Endpoint(id=EndpointId("b"), models=frozenset({"n"}), max_requests=1),
        ],
    )
    flow.ask(0.0, 1, model="m")
    assert flow.ask(0.0, 2, model="m") == []  # b has room and does not serve it
    assert flow.ask(0.0, 3, model="n") == [3]
    assert flow.where == {1: "a", 3: "b"}


def test_endpoints_known_to_serve_a_model_come_before_those_that_may() -> None:
    flow = Flow()
    flow.controller.set_endpoints(
        0.0,
        [
            Endpoint(id=EndpointId("known"), models=frozenset({"m"}), max_requests=1),
            Endpoint(id=EndpointId("unknown"), max_requests=1),
        ],
    )
    flow.ask(0.0, 1)
    assert flow.ask(0.0, 2) == []
    assert flow.where == {1: "known"}


def test_where_two_models_share_an_endpoint_the_higher_tier_gets_it() -> None:
    flow = Flow()
    flow.controller.set_endpoints(
        0.0,
        [
            Endpoint(id=EndpointId("both"), models=frozenset({"m", "n"}), max_requests=1),
            Endpoint(id=EndpointId("n"), models=frozenset({"n"}), max_requests=1),
        ],
    )
    for id_, model in ((1, "m"), (2, "n")):
        flow.ask(0.0, id_, model=model)
    flow.ask(0.0, 3, "bronze", model="m")
    flow.ask(0.1, 4, "gold", model="n")
    assert flow.done(1.0, 1) == [4]


def test_a_model_that_nobody_serves_is_refused() -> None:
    flow = Flow()
    flow.set(0.0, "a", models=frozenset({"other"}))
    flow.ask(0.0, 1)
    assert flow.outcome(1) is Outcome.NO_ENDPOINT


def test_while_all_endpoints_are_down_new_requests_are_refused_and_queued_ones_wait() -> None:
    flow = Flow()
    flow.ask(0.0, 1)
    flow.ask(0.0, 2)
    flow.set(1.0, "a", up=False)
    flow.ask(1.0, 3)
    assert flow.outcome(3) is Outcome.NO_ENDPOINT
    assert flow.done(2.0, 1) == []
    assert flow.note(flow.set(3.0, "a")) == [2]


def test_requests_that_expire_while_all_endpoints_are_down_are_answered_so() -> None:
    flow = Flow(FlowConfig())
    flow.ask(0.0, 1)
    flow.ask(0.0, 2)
    flow.set(1.0, "a", up=False)
    flow.note(flow.controller.tick(2.0))
    assert flow.outcome(2) is Outcome.NO_ENDPOINT


def test_an_endpoint_that_comes_takes_what_waits() -> None:
    flow = Flow()
    for id_ in (1, 2, 3):
        flow.ask(0.0, id_)
    assert flow.note(flow.set(1.0, "a", "b")) == [2]


def test_an_endpoint_that_is_removed_gets_nothing_more_and_is_forgotten_when_it_is_empty() -> None:
    flow = Flow(endpoints=("a", "b"))
    for id_ in (1, 2, 3):
        flow.ask(0.0, id_)
    on_a = next(id_ for id_, name in flow.where.items() if name == "a")
    flow.set(1.0, "b")
    assert flow.done(2.0, on_a) == []
    flow.set(3.0, "b")
    assert set(flow.controller.topology.ledgers) == {"b"}


def test_requests_whose_model_goes_away_are_evicted() -> None:
    flow = Flow()
    flow.ask(0.0, 1)
    flow.ask(0.0, 2)
    flow.note(flow.set(1.0, "a", models=frozenset({"other"})))
    assert flow.outcome(2) is Outcome.NO_ENDPOINT


def test_requests_follow_their_model_to_other_endpoints() -> None:
    """And back: stale places in the queues they left do not count."""
    flow = Flow()
    flow.ask(0.0, 0, model="m")
    for id_ in (1, 2, 3):
        flow.ask(0.0, id_, model="m" if id_ % 2 else "n")
    both = Endpoint(id=EndpointId("a"), models=frozenset({"m", "n"}), max_requests=1)
    apart = [
        Endpoint(id=EndpointId("a"), models=frozenset({"m"}), max_requests=1),
        Endpoint(id=EndpointId("b"), models=frozenset({"n"}), max_requests=1, up=False),
    ]
    for now, endpoints in enumerate(([both], apart, [both], apart), start=1):
        flow.note(flow.controller.set_endpoints(float(now), endpoints))
    assert flow.done(5.0, 0) == [1]
    assert flow.done(6.0, 1) == [3]
    up = [apart[0], msgspec.structs.replace(apart[1], up=True)]
    assert flow.note(flow.controller.set_endpoints(7.0, up)) == [2]


# Prefill and decode.


def split(slots: int = 1) -> FlowController:
    controller = FlowController(PATIENT)
    controller.set_endpoints(
        0.0,
        [
            Endpoint(id=EndpointId("p"), role=Role.PREFILL, max_requests=slots),
            Endpoint(id=EndpointId("d"), role=Role.DECODE, max_requests=slots + 1),
        ],
    )
    return controller


def item(id_: int) -> Item:
    return Item(id=id_, tenant="t", tier="gold", body_bytes=4000)


def test_a_grant_has_a_leg_for_each_role_and_each_its_own_cost() -> None:
    (action,) = split().enqueue(0.0, item(1))
    assert isinstance(action, Dispatch)
    prefill, decode = action.legs
    assert (prefill.endpoint, prefill.role) == ("p", Role.PREFILL)
    assert (decode.endpoint, decode.role) == ("d", Role.DECODE)
    assert (prefill.cost.prefill_tokens, decode.cost.prefill_tokens) == (1000, 0)
    assert prefill.cost.work + decode.cost.work == 1000 + 2 * 256


def test_a_grant_is_all_or_none() -> None:
    controller = split()
    controller.enqueue(0.0, item(1))
    assert controller.enqueue(0.0, item(2)) == []  # decode has room, prefill has not
    ledgers = controller.topology.ledgers
    assert ledgers[EndpointId("d")].requests == 1


def test_each_leg_is_released_on_its_own() -> None:
    controller = split()
    controller.enqueue(0.0, item(1))
    controller.enqueue(0.0, item(2))
    (action,) = controller.release(1.0, 1, EndpointId("p"))
    assert isinstance(action, Dispatch)
    assert action.id == 2
    ledgers = controller.topology.ledgers
    assert (ledgers[EndpointId("p")].requests, ledgers[EndpointId("d")].requests) == (1, 2)
    controller.complete(2.0, 1)
    controller.complete(2.0, 2)
    assert all(ledger.requests == ledger.tokens == 0 for ledger in ledgers.values())


def test_a_leg_is_corrected_where_its_prefix_is_cached() -> None:
    flow = Flow(slots=100)
    flow.ask(0.0, 1, body_bytes=7000)
    flow.ask(0.0, 2, body_bytes=7000)
    actions = flow.controller.correct(0.1, 1, EndpointId("a"), Cost(100.0, 50, 2000))
    assert flow.note(actions) == [2]


# Refusals.


def test_a_request_that_waits_too_long_is_evicted_at_its_time() -> None:
    flow = Flow(FlowConfig())
    flow.ask(0.0, 1)
    flow.ask(0.5, 2, "silver")
    assert flow.controller.next_timeout(0.5) is not None
    flow.note(flow.controller.tick(5.49))
    assert 2 not in flow.refused
    flow.note(flow.controller.tick(5.5))
    assert flow.outcome(2) is Outcome.QUEUE_TIMEOUT
    assert flow.refused[2].waited_s == 5.0
    assert flow.controller.next_timeout(5.5) is None


def test_a_deadline_ends_the_wait_earlier() -> None:
    flow = Flow(FlowConfig())
    flow.ask(0.0, 1)
    flow.ask(0.0, 2, "silver", deadline_s=1.0)
    flow.note(flow.controller.tick(1.0))
    assert flow.outcome(2) is Outcome.QUEUE_TIMEOUT


def test_a_deadline_does_not_prolong_the_wait() -> None:
    flow = Flow(FlowConfig())
    flow.ask(0.0, 1)
    flow.ask(0.0, 2, "silver", deadline_s=500.0)
    flow.note(flow.controller.tick(5.0))
    assert flow.outcome(2) is Outcome.QUEUE_TIMEOUT


@pytest.mark.parametrize("deadline_s", [9.0, -5.0, -1e300])
def test_a_deadline_that_has_passed_is_refused_at_once(deadline_s: float) -> None:
    flow = Flow()
    flow.ask(10.0, 1, deadline_s=deadline_s)
    assert flow.outcome(1) is Outcome.DEADLINE_INFEASIBLE


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan"), float("-inf"), 1e300])
def test_a_deadline_that_makes_no_sense_orders_and_refuses_nothing(deadline_s: float) -> None:
    flow = Flow()
    flow.ask(0.0, 0)
    flow.ask(0.0, 1)
    flow.ask(0.0, 2, deadline_s=deadline_s)
    assert flow.done(1.0, 0) == [1]
    assert flow.done(1.0, 1) == [2]


def drained(config: FlowConfig = PATIENT) -> Flow:
    """One request a second has left a queue that always held some."""
    flow = Flow(config)
    for id_ in range(1, 25):
        flow.ask(0.0, id_, tenant="greedy")
    for second in range(1, 15):
        flow.done(float(second), flow.sent[-1], ONE_TOKEN_ANSWER)
    return flow


def test_a_wait_that_would_exceed_the_deadline_is_refused_at_once_with_a_time_to_come_back() -> (
    None
):
    flow = drained()  # 9 wait, at one a second
    flow.ask(14.0, 100, tenant="greedy", deadline_s=18.0)
    assert flow.outcome(100) is Outcome.DEADLINE_INFEASIBLE
    assert flow.refused[100].retry_after_s == pytest.approx(9.0, rel=0.15)


def test_a_wait_within_the_deadline_is_granted() -> None:
    flow = drained()
    flow.ask(14.0, 100, tenant="greedy", deadline_s=30.0)
    assert 100 not in flow.refused


def test_another_tenants_queue_is_no_reason_to_refuse() -> None:
    flow = drained()
    flow.ask(14.0, 100, tenant="modest", deadline_s=18.0)
    assert 100 not in flow.refused
    flow.done(15.0, flow.sent[-1])
    flow.done(16.0, flow.sent[-1])
    assert 100 in flow.sent[-2:]


def test_a_retry_time_is_bounded_and_at_least_a_second() -> None:
    flow = Flow(FlowConfig(tiers=tiers(queue_entries=1, max_wait_s=1000.0)))
    for id_ in (1, 2, 3):
        flow.ask(0.0, id_)
    assert flow.refused[3].retry_after_s == 1.0  # nothing is known of the drain rate yet
    flow.note(flow.controller.tick(900.0))
    flow.done(900.0, 1)
    flow.ask(900.0, 4)
    flow.ask(900.0, 5)
    assert flow.refused[5].retry_after_s == 60.0


def test_a_full_tier_refuses_a_further_request_of_its_only_tenant() -> None:
    flow = Flow(FlowConfig(tiers=tiers(queue_entries=2, max_wait_s=1000.0)))
    for id_ in range(4):
        flow.ask(0.0, id_)
    assert flow.outcome(3) is Outcome.QUEUE_FULL
    assert 0 not in flow.refused


def test_a_full_tier_gives_up_the_newest_of_its_heaviest_tenant_for_a_lighter_one() -> None:
    flow = Flow(FlowConfig(tiers=tiers(queue_entries=3, max_wait_s=1000.0)))
    for id_ in range(4):
        flow.ask(0.0, id_, tenant="greedy")
    flow.ask(0.0, 10, tenant="modest")
    assert flow.outcome(3) is Outcome.DISPLACED
    flow.ask(0.0, 11, tenant="modest")  # would have as many as greedy
    assert flow.outcome(11) is Outcome.QUEUE_FULL


def test_a_full_queue_gives_up_the_newest_of_the_lowest_tier_for_a_higher_one() -> None:
    flow = Flow(FlowConfig(tiers=tiers(max_wait_s=1000.0), queue_entries=3))
    flow.ask(0.0, 0)
    for id_, tier in ((1, "silver"), (2, "bronze"), (3, "bronze")):
        flow.ask(0.0, id_, tier)
    flow.ask(0.0, 4, "gold")
    assert flow.outcome(3) is Outcome.DISPLACED
    flow.ask(0.0, 5, "silver")
    assert flow.outcome(2) is Outcome.DISPLACED
    flow.ask(0.0, 6, "bronze")
    assert flow.outcome(6) is Outcome.QUEUE_FULL


def test_a_full_queue_still_takes_what_can_go_at_once() -> None:
    flow = Flow(FlowConfig(tiers=tiers(max_wait_s=1000.0), queue_entries=1))
    flow.controller.set_endpoints(
        0.0,
        [
            Endpoint(id=EndpointId("a"), models=frozenset({"m"}), max_requests=1),
            Endpoint(id=EndpointId("b"), models=frozenset({"n"}), max_requests=1),
        ],
    )
    flow.ask(0.0, 1)
    flow.ask(0.0, 2)
    assert flow.ask(0.0, 3, "bronze", model="n") == [3]


BYTES = FlowConfig(tiers=tiers(max_wait_s=1000.0), queue_bytes=10_000)


def test_queued_bodies_are_bounded_in_bytes() -> None:
    flow = Flow(BYTES)
    flow.ask(0.0, 0)
    for id_, tenant in ((1, "a"), (2, "b"), (3, "c")):
        flow.ask(0.0, id_, tenant=tenant, body_bytes=4000)
    assert flow.outcome(3) is Outcome.QUEUE_BYTES
    assert flow.controller.snapshot(0.0).tiers[0].queued_bytes == 8000


def test_one_tenant_may_hold_half_of_the_bytes() -> None:
    flow = Flow(BYTES)
    flow.ask(0.0, 0)
    flow.ask(0.0, 1, body_bytes=4000)
    flow.ask(0.0, 2, body_bytes=4000)
    assert flow.outcome(2) is Outcome.QUEUE_BYTES
    flow.ask(0.0, 3, tenant="other", body_bytes=4000)
    assert 3 not in flow.refused


def test_bytes_of_lower_tiers_make_room_for_a_higher_one_if_they_are_enough() -> None:
    flow = Flow(BYTES)
    flow.ask(0.0, 0)
    for id_, tenant in ((1, "a"), (2, "b"), (3, "c")):
        flow.ask(0.0, id_, "bronze", tenant=tenant, body_bytes=3000)
    flow.ask(0.0, 4, "gold", tenant="d", body_bytes=4500)
    assert {id_: refusal.outcome for id_, refusal in flow.refused.items()} == {
        3: Outcome.DISPLACED,
        2: Outcome.DISPLACED,
    }
    flow.ask(0.0, 5, "gold", tenant="e", body_bytes=9000)
    assert flow.outcome(5) is Outcome.QUEUE_BYTES
    assert 1 not in flow.refused  # in vain it would have gone too


# Leaving.


def test_a_request_cancelled_in_the_queue_is_gone_at_once() -> None:
    flow = Flow()
    for id_ in (1, 2, 3):
        flow.ask(0.0, id_)
    assert flow.note(flow.controller.cancel(0.5, 2)) == []
    assert flow.controller.snapshot(0.5).tiers[0].queued == 1
    assert flow.done(1.0, 1) == [3]
    assert flow.controller.outcomes["gold", Outcome.CLIENT_GONE] == 1


def test_a_cancelled_large_request_lets_the_small_one_behind_it_go() -> None:
    flow = Flow(slots=10)
    flow.controller.topology.ledgers[EndpointId("a")].limit.set_ceilings(10, 3000)
    flow.ask(0.0, 1)
    flow.ask(0.0, 2, body_bytes=20_000)
    flow.ask(0.0, 3, body_bytes=40)
    assert flow.note(flow.controller.cancel(0.5, 2)) == [3]


def test_a_request_cancelled_in_flight_frees_its_place() -> None:
    flow = Flow()
    flow.ask(0.0, 1)
    flow.ask(0.0, 2)
    assert flow.note(flow.controller.cancel(0.5, 1)) == [2]


def test_whatever_is_told_of_an_unknown_request_changes_nothing() -> None:
    flow = Flow()
    controller, a = flow.controller, EndpointId("a")
    assert controller.cancel(0.0, 9) == controller.complete(0.0, 9) == []
    assert controller.first_token(0.0, 9) == controller.release(0.0, 9, a) == []
    assert controller.correct(0.0, 9, a, Cost(1.0, 1, 1)) == controller.requeue(0.0, 9, a) == []
    controller.progress(0.0, 9)
    assert not controller.outcomes


def test_a_request_that_could_not_be_delivered_goes_elsewhere() -> None:
    flow = Flow(slots=2, endpoints=("a", "b"))
    flow.ask(0.0, 1)
    first = EndpointId(flow.where[1])
    assert flow.note(flow.controller.requeue(0.1, 1, first)) == [1]
    assert flow.where[1] != first
    assert flow.controller.topology.ledgers[first].requests == 0
    flow.note(flow.controller.requeue(0.2, 1, EndpointId(flow.where[1])))
    assert flow.outcome(1) is Outcome.NO_ENDPOINT
    assert flow.controller.dispatched == {"gold": 0}
    assert flow.controller.outcomes == {("gold", Outcome.NO_ENDPOINT): 1}


def test_a_request_that_could_not_be_delivered_is_before_those_that_came_later() -> None:
    flow = Flow(endpoints=("a", "b"))
    for id_ in (1, 2, 3):
        flow.ask(float(id_), id_)
    flow.note(flow.controller.requeue(4.0, 1, EndpointId(flow.where[1])))
    other = next(id_ for id_ in (2, 3) if flow.where.get(id_) != flow.where[1])
    assert flow.done(5.0, other)[0] == 1


def test_a_tenant_is_not_charged_for_what_could_not_be_delivered() -> None:
    flow = Flow(endpoints=("a", "b"))
    flow.ask(0.0, 1, tenant="x")
    flow.ask(0.0, 2, tenant="y")
    flow.ask(0.0, 3, tenant="y")
    flow.ask(0.0, 4, tenant="x")
    flow.note(flow.controller.requeue(1.0, 1, EndpointId(flow.where[1])))
    flow.note(flow.controller.cancel(1.0, 1))
    flow.done(2.0, 2)
    assert flow.sent[-2:] == [4, 3]  # x was served nothing yet, y was


# Beside requests.


def test_bypass_counts_and_its_end_lets_others_go() -> None:
    flow = Flow()
    flow.note(flow.controller.bypass(0.0, EndpointId("a"), 1, 4000, 1))
    flow.ask(0.0, 1)
    assert flow.ask(0.0, 2) == []
    flow.done(1.0, 1)
    assert flow.sent == [1, 2]
    flow.ask(1.0, 3)
    flow.note(flow.controller.bypass(2.0, EndpointId("a"), 0, 0, 0))
    state = flow.controller.snapshot(2.0).endpoints[0]
    assert (state.bypass_in_flight, state.in_flight) == (0, 1)


def test_bypass_at_an_endpoint_that_is_not_known_counts_nowhere() -> None:
    flow = Flow()
    assert flow.controller.bypass(0.0, EndpointId("x"), 1, 4000, 1) == []
    assert [state.id for state in flow.controller.snapshot(0.0).endpoints] == ["a"]


def test_reports_may_be_missing_or_of_nobody() -> None:
    flow = Flow()
    flow.controller.report(0.0, EndpointId("a"), None)
    flow.controller.report(0.0, EndpointId("x"), 5)
    assert flow.ask(0.0, 1) == [1]


def test_headroom_keeps_a_place_for_the_first_tier() -> None:
    config = FlowConfig(tiers=tiers(max_wait_s=1000.0), headroom=0.5)
    flow = Flow(config, slots=4)
    ledger = flow.controller.topology.ledgers[EndpointId("a")]
    ledger.limit.starting = False
    for id_ in range(6):
        flow.ask(0.0, id_, "bronze", body_bytes=40)
    assert flow.sent == [0, 1]
    assert flow.ask(0.1, 10, "gold", body_bytes=40) == [10]
    assert flow.ask(0.1, 11, "gold", body_bytes=40) == [11]
    assert flow.ask(0.1, 12, "gold", body_bytes=40) == []


def test_an_unknown_tier_is_the_default_one() -> None:
    flow = Flow()
    flow.ask(0.0, 1, "platinum")
    assert flow.controller.dispatched == {"silver": 1}


def test_a_tick_is_due_when_the_limit_may_change() -> None:
    flow = Flow()
    assert flow.controller.next_timeout(0.0) is None
    flow.ask(0.0, 1)
    assert flow.controller.next_timeout(0.0) is None  # nothing waits
    flow.ask(0.0, 2)
    due_s = flow.controller.next_timeout(0.0)
    assert due_s is not None
    assert 0 < due_s < 1000


def test_a_request_that_has_left_is_no_reason_to_tick() -> None:
    flow = Flow()
    flow.set(0.0, "a", up=True)
    flow.ask(0.0, 1)
    flow.ask(0.0, 2, deadline_s=0.01)
    flow.ask(0.0, 3)
    flow.controller.cancel(0.0, 2)
    due_s = flow.controller.next_timeout(0.0)
    assert due_s is not None
    assert due_s > 0.01


def test_other_settings_keep_requests_limits_and_costs() -> None:
    flow = Flow()
    flow.ask(0.0, 1, "gold", tenant="t")
    flow.ask(0.0, 2, "bronze")
    flow.ask(0.0, 3, "silver")
    flow.controller.topology.ledgers[EndpointId("a")].limit.prefill_tokens = 777
    renamed = (
        msgspec.structs.replace(DEFAULT_TIERS[0], name="bronze", rank=0, max_wait_s=1000.0),
        msgspec.structs.replace(DEFAULT_TIERS[1], name="rest", rank=1, max_wait_s=1000.0),
    )
    config = FlowConfig(tiers=renamed, default_tier="rest", headroom=0.1)
    flow.note(flow.controller.reconfigure(1.0, config))
    state = flow.controller.snapshot(1.0)
    assert [(tier.name, tier.queued) for tier in state.tiers] == [("bronze", 1), ("rest", 1)]
    assert state.endpoints[0].limit_prefill_tokens == 777
    assert flow.done(2.0, 1) == [2]
    assert flow.done(3.0, 2) == [3]


def test_the_snapshot_tells_what_waits_and_what_became_of_the_rest() -> None:
    flow = Flow(FlowConfig())
    flow.ask(0.0, 1)
    flow.ask(1.0, 2, "silver")
    flow.note(flow.controller.tick(7.0))
    flow.ask(8.0, 3, "silver")
    state = flow.controller.snapshot(10.0)
    silver = state.tiers[1]
    assert (silver.name, silver.queued, silver.queued_bytes) == ("silver", 1, 4000)
    assert silver.oldest_wait_s == 2.0
    assert silver.outcomes == {"queue_timeout": 1}
    (endpoint,) = state.endpoints
    assert (endpoint.id, endpoint.up, endpoint.in_flight) == ("a", True, 1)
    assert endpoint.tokens_in_flight == 1256
    assert (endpoint.limit_requests, endpoint.limit_tokens) == (1, None)
    assert msgspec.json.decode(msgspec.json.encode(state))
