"""Which endpoint with room takes an opted-in request."""

import random

from ciuicflow.endpoint import EndpointId, EndpointState
from ciuicflow.flowcontrol.actions import Endpoint, Role
from ciuicflow.flowcontrol.cost import Cost
from ciuicflow.flowcontrol.entry import Entry
from ciuicflow.flowcontrol.ledger import EndpointLedger
from ciuicflow.gateway.flow_pick import FlowPick
from ciuicflow.routing.base import RoutingPolicy
from ciuicflow.routing.table import POLICIES

COST = Cost(10.0, 4, 10)
ENTRY = Entry(
    id=1, seq=1, tenant="t", tier=0, model=None, body_bytes=1, cost=COST, enqueued_s=0.0,
    due_s=1.0, expires_s=2.0, streams=True,
)  # fmt: skip


def ledgers(*names: str) -> list[EndpointLedger]:
    return [EndpointLedger(Endpoint(id=EndpointId(name)), 0.3, 0.0) for name in names]


def pick(policy: RoutingPolicy | None, **in_flight: int) -> FlowPick:
    states = {
        name: EndpointState(EndpointId(name), in_flight=count) for name, count in in_flight.items()
    }
    return FlowPick(policy, lambda id_: states[id_])


def test_the_only_one_with_room_is_taken_whatever_the_policy() -> None:
    assert pick(None, a=9)(ENTRY, ledgers("a")) == (0, "only_room")


def test_without_a_policy_the_least_full_by_its_own_limits_is_taken() -> None:
    choose = pick(None, a=0, b=0, c=0)
    many = ledgers("a", "b", "c")
    for ledger in (many[0], many[2]):
        ledger.place(0.0, 7, COST, Role.ANY, 0.2, streams=True)
    assert [choose(ENTRY, many)[0] for _ in range(4)] == [1, 1, 1, 1]


def test_ties_are_taken_in_turn() -> None:
    choose = pick(None, a=0, b=0, c=0)
    many = ledgers("a", "b", "c")
    assert [choose(ENTRY, many)[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_policy_chooses_among_those_with_room_only() -> None:
    choose = pick(POLICIES["round_robin"](random.Random(1)), a=0, b=5, c=9)
    some = ledgers("b", "c")  # a has no room
    taken = [some[choose(ENTRY, some)[0]].endpoint.id for _ in range(4)]
    assert sorted(taken) == ["b", "b", "c", "c"]
    assert choose(ENTRY, some)[1].startswith("round_robin")
