"""Whose quantum goes next."""

from collections import Counter

from ciuicflow.kvtransfer.order import Entry, SendOrder
from ciuicflow.kvtransfer.settings import OrderConfig

Q = 1000
NO_PROMOTION = OrderConfig(least_floor=0.0, promote_after_s=1e9)


def entry(id_: str, rank: int = 0, deadline_s: float = 10.0, floor: float = 0.0) -> Entry:
    return Entry(id_, rank, floor, deadline_s)


def serve(order: SendOrder, now: float, size: int = Q) -> str:
    chosen = order.next(now)
    assert chosen is not None
    order.charge(now, size)
    return chosen.id


def test_nothing_to_send_is_nobodys_turn() -> None:
    order = SendOrder(NO_PROMOTION, Q)
    one = entry("one")
    assert order.next(0.0) is None
    order.push(0.0, one)
    order.drop(one)
    order.drop(one)
    assert order.next(0.0) is None


def test_higher_tiers_go_first_then_earlier_deadlines_then_arrival() -> None:
    order = SendOrder(NO_PROMOTION, Q)
    entries = [
        entry("bronze", rank=2, deadline_s=1.0),
        entry("late", deadline_s=9.0),
        entry("early", deadline_s=2.0),
        entry("early too", deadline_s=2.0),
        entry("silver", rank=1, deadline_s=1.0),
    ]
    for one in entries:
        order.push(0.0, one)
    served = []
    for _ in entries:
        chosen = order.next(0.0)
        assert chosen is not None
        order.charge(0.0, Q)
        order.drop(chosen)
        served.append(chosen.id)
    assert served == ["early", "early too", "late", "silver", "bronze"]


def test_a_transfer_that_has_something_again_takes_its_place_again() -> None:
    order = SendOrder(NO_PROMOTION, Q)
    first, second = entry("first", deadline_s=1.0), entry("second", deadline_s=2.0)
    for _ in range(100):
        order.push(0.0, first)
        order.push(0.0, first)
        order.push(0.0, second)
        assert serve(order, 0.0) == "first"
        order.drop(first)
        assert serve(order, 0.0) == "second"


def test_a_lower_tier_gets_its_floor_and_no_more() -> None:
    order = SendOrder(NO_PROMOTION, Q)
    order.push(0.0, entry("gold"))
    order.push(0.0, entry("silver", rank=1, floor=0.2))
    order.push(0.0, entry("bronze", rank=2, floor=0.05))
    served = Counter(serve(order, 0.0) for _ in range(1000))
    assert 198 <= served["silver"] <= 200
    assert 48 <= served["bronze"] <= 50


def test_a_tier_whose_tickets_name_no_floor_gets_the_least_one() -> None:
    order = SendOrder(OrderConfig(least_floor=0.02, promote_after_s=1e9), Q)
    order.push(0.0, entry("gold"))
    order.push(0.0, entry("bronze", rank=2))
    assert 19 <= Counter(serve(order, 0.0) for _ in range(1000))["bronze"] <= 20


def test_a_floor_counts_bytes_whatever_the_size_of_quanta() -> None:
    order = SendOrder(NO_PROMOTION, Q)
    gold, bronze = entry("gold"), entry("bronze", rank=1, floor=0.25)
    order.push(0.0, gold)
    order.push(0.0, bronze)
    sent: Counter[str] = Counter()
    for _ in range(4000):
        chosen = order.next(0.0)
        assert chosen is not None
        size = 100 if chosen is gold else 900
        order.charge(0.0, size)
        sent[chosen.id] += size
    assert 0.24 < sent["bronze"] / sent.total() < 0.26


def test_an_idle_floor_is_lent_out_and_not_saved_up() -> None:
    order = SendOrder(NO_PROMOTION, Q)
    order.push(0.0, entry("gold"))
    assert {serve(order, 0.0) for _ in range(1000)} == {"gold"}
    order.push(0.0, entry("silver", rank=1, floor=0.5))
    served = [serve(order, 0.0) for _ in range(12)]
    assert served.count("silver") <= 6


def test_what_a_tier_gets_in_quiet_times_earns_it_nothing_later() -> None:
    order = SendOrder(NO_PROMOTION, Q)
    order.push(0.0, entry("silver", rank=1, floor=0.5))
    for _ in range(1000):
        serve(order, 0.0)
    order.push(0.0, entry("gold"))
    assert [serve(order, 0.0) for _ in range(4)] == ["gold", "gold", "silver", "gold"]


def test_a_tier_that_has_waited_for_long_is_promoted_for_one_quantum() -> None:
    order = SendOrder(OrderConfig(least_floor=0.0, promote_after_s=0.01, promoted_share=0.1), Q)
    order.push(0.0, entry("gold"))
    order.push(0.0, entry("bronze", rank=2))
    assert serve(order, 0.009) == "gold"
    assert serve(order, 0.010) == "bronze"
    assert serve(order, 0.010) == "gold"


def test_promotions_stay_below_their_share() -> None:
    order = SendOrder(OrderConfig(least_floor=0.0, promote_after_s=0.01, promoted_share=0.1), Q)
    order.push(0.0, entry("gold"))
    for rank in range(1, 5):
        order.push(0.0, entry("lower", rank=rank))
    served = Counter(serve(order, step * 0.1) for step in range(1, 1001))
    assert served == {"gold": 900, "lower": 100}


def test_promotions_go_round() -> None:
    order = SendOrder(OrderConfig(least_floor=0.0, promote_after_s=0.01, promoted_share=0.5), Q)
    order.push(0.0, entry("gold"))
    for rank in (1, 2):
        order.push(0.0, entry(f"tier {rank}", rank=rank))
    served = Counter(serve(order, step * 0.1) for step in range(1, 401))
    assert served == {"gold": 200, "tier 1": 100, "tier 2": 100}


def test_ranks_that_are_not_in_use_are_forgotten() -> None:
    order = SendOrder(NO_PROMOTION, Q)
    for rank in range(1000):
        one = entry(str(rank), rank=rank)
        order.push(0.0, one)
        assert serve(order, 0.0) == str(rank)
        order.drop(one)
    assert len(order._tiers) <= 2
