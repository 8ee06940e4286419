"""Which endpoint takes a request, and when one counts as down."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.config import ROUTING_NAMES
from ciuicflow.endpoint import EndpointId, EndpointState
from ciuicflow.routing.base import RoutingPolicy, UnknownModel, eligible
from ciuicflow.routing.health import (
    HealthPolicy,
    record_failure,
    record_live_success,
    record_probe_success,
)
from ciuicflow.routing.table import POLICIES


def states(*in_flight: int) -> list[EndpointState]:
    return [EndpointState(EndpointId(f"e{i}"), in_flight=n) for i, n in enumerate(in_flight)]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> RoutingPolicy:
    return POLICIES[request.param](random.Random(7))


def test_every_policy_that_can_be_configured_exists() -> None:
    assert set(ROUTING_NAMES) == set(POLICIES)


def test_a_policy_chooses_one_of_those_offered_and_says_why(policy: RoutingPolicy) -> None:
    for count in (1, 2, 5, 1, 3):
        endpoints = states(*range(count))
        choice = policy.pick(endpoints)
        assert choice.endpoint in endpoints
        assert choice.reason


def test_equally_loaded_endpoints_get_equal_shares(policy: RoutingPolicy) -> None:
    endpoints = states(0, 0, 0, 0)
    shares = Counter(policy.pick(endpoints).endpoint.id for _ in range(4000))
    assert min(shares.values()) > 800


@pytest.mark.parametrize("name", ["least_load", "power_of_two"])
def test_the_busier_of_two_is_avoided(name: str) -> None:
    policy = POLICIES[name](random.Random(1))
    assert {policy.pick(states(3, 9)).endpoint.id for _ in range(50)} == {"e0"}


def test_round_robin_goes_through_all_in_turn() -> None:
    policy = POLICIES["round_robin"](random.Random(1))
    endpoints = states(5, 0, 9)
    assert [policy.pick(endpoints).endpoint.id for _ in range(6)] == ["e0", "e1", "e2"] * 2


def test_random_choices_repeat_with_their_seed() -> None:
    def choices() -> list[str]:
        policy = POLICIES["power_of_two"](random.Random(3))
        return [policy.pick(states(0, 0, 0, 0, 0)).endpoint.id for _ in range(50)]

    assert choices() == choices()


def test_a_model_goes_only_where_it_is() -> None:
    a, b, unknown = states(0, 0, 0)
    a.models, b.models = frozenset({"x"}), frozenset({"x", "y"})
    assert eligible([a, b, unknown], "y") == [b]
    assert eligible([a, b, unknown], "z") == [unknown]
    assert eligible([a, b, unknown]) == [a, b, unknown]
    with pytest.raises(UnknownModel):
        eligible([a, b], "z")


def test_endpoints_that_are_down_are_the_last_resort() -> None:
    a, b = states(0, 0)
    a.up = False
    assert eligible([a, b]) == [b]
    b.up = False
    assert eligible([a, b]) == [a, b]
    assert eligible([a, b], None, {a.id, b.id}) == []


def test_a_known_model_whose_only_endpoint_is_down_is_not_sent_elsewhere() -> None:
    a, b = states(0, 0)
    a.models, b.models, a.up = frozenset({"x"}), frozenset({"y"}), False
    assert eligible([a, b], "x") == [a]
    assert eligible([a, b], "x", {a.id}) == []


POLICY = HealthPolicy(fail_threshold=3, recover_threshold=2)


def test_it_goes_down_at_the_threshold_and_says_so_once() -> None:
    (state,) = states(0)
    assert [record_failure(state, POLICY) for _ in range(4)] == [False, False, True, False]
    assert not state.up


def test_live_success_heals_at_once_and_probes_at_their_threshold() -> None:
    (state,) = states(0)
    for _ in range(3):
        record_failure(state, POLICY)
    assert record_live_success(state)
    for _ in range(3):
        record_failure(state, POLICY)
    assert [record_probe_success(state, POLICY) for _ in range(3)] == [False, True, False]


def test_good_probes_do_not_hide_failing_traffic() -> None:
    (state,) = states(0)
    for _ in range(3):
        record_failure(state, POLICY)
        record_probe_success(state, POLICY) if state.up else None
    assert not state.up


@given(st.lists(st.sampled_from(["fail", "live", "probe"]), max_size=60))
def test_it_is_down_only_after_enough_failures_in_a_row(events: list[str]) -> None:
    (state,) = states(0)
    failures_in_a_row = 0
    for event in events:
        was_up = state.up
        if event == "fail":
            failures_in_a_row += 1
            record_failure(state, POLICY)
        elif event == "live":
            failures_in_a_row = 0
            record_live_success(state)
        else:
            record_probe_success(state, POLICY)
        if was_up and not state.up:
            assert failures_in_a_row >= POLICY.fail_threshold
