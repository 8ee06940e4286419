"""Figures of the load test, from records with literal times."""

import pytest

from ciuicflow.flowcontrol.tiers import DEFAULT_TIERS
from loadtest import statistics
from loadtest.changes import recovery_s, settle_s
from loadtest.records import Outcome, Record, blank, outcome_of
from loadtest.statistics import Percentiles, Window, jain, percentile
from loadtest.workload import Planned

TIERS = {tier.name: tier for tier in DEFAULT_TIERS}
GOLD = TIERS["gold"]


def record(
    id_: int = 0,
    *,
    tier: str = "gold",
    tenant: str = "t1",
    at_s: float = 0.0,
    ttft_s: float | None = 1.0,
    last_s: float | None = 2.0,
    outcome: Outcome = Outcome.COMPLETED,
    status: int = 200,
    tokens: int = 11,
    opted_in: bool = True,
    has_retry_after: bool = False,
) -> Record:
    return Record(
        id=id_, tier=tier, tenant=tenant, opted_in=opted_in, at_s=at_s, outcome=outcome,
        status=status, ttft_s=ttft_s, last_s=last_s, prompt_tokens=100, tokens=tokens,
        end_s=last_s if outcome is Outcome.COMPLETED else None, has_retry_after=has_retry_after,
    )  # fmt: skip


def refused(id_: int = 0, *, status: int = 429, at_s: float = 0.0) -> Record:
    return record(id_, outcome=Outcome.REFUSED, status=status, at_s=at_s, ttft_s=None, last_s=None,
                  tokens=0)  # fmt: skip


# One request.


@pytest.mark.parametrize(
    ("status", "is_whole", "outcome"),
    [
        (200, True, Outcome.COMPLETED),
        (200, False, Outcome.FAILED),
        (429, False, Outcome.REFUSED),
        (503, True, Outcome.REFUSED),
        (504, False, Outcome.REFUSED),
        (502, False, Outcome.FAILED),
        (0, False, Outcome.FAILED),
    ],
)
def test_an_answer_is_judged_by_its_status_and_its_end(
    status: int, is_whole: bool, outcome: Outcome
) -> None:
    assert outcome_of(status, is_whole=is_whole) is outcome


def test_the_mean_time_between_tokens_needs_two_of_them() -> None:
    assert record().itl_s == pytest.approx(0.1)
    assert record(tokens=1).itl_s is None
    assert blank(Planned(0, 0.0, "gold", "t1", 5, 5), Outcome.FAILED).itl_s is None


@pytest.mark.parametrize(
    ("start_s", "end_s", "tokens"),
    [
        (0.0, 10.0, 111.0),  # all: 100 of the prompt and 11
        (0.0, 1.5, 106.0),  # the prompt, the first token, half of the other ten
        (1.5, 10.0, 5.0),  # the other half
        (3.0, 10.0, 0.0),
    ],
)
def test_tokens_count_when_they_come(start_s: float, end_s: float, tokens: float) -> None:
    assert record().tokens_between(start_s, end_s) == pytest.approx(tokens)


def test_a_request_without_a_token_counts_none() -> None:
    assert refused().tokens_between(0.0, 10.0) == 0.0


# Many.


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0
    assert Percentiles.of([3.0, 1.0, 2.0]) == Percentiles(2.0, 3.0, 3.0)
    assert Percentiles.of([]) is None


def test_jains_index_is_one_for_equal_shares_and_one_nth_for_a_single_taker() -> None:
    assert jain([2.0, 2.0, 2.0, 2.0]) == 1.0
    assert jain([8.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([3.0, 1.0]) == pytest.approx(0.8)
    assert jain([0.0, 0.0]) == 1.0


def test_good_is_complete_and_within_both_targets() -> None:
    assert statistics.is_good(record(ttft_s=2.0, last_s=2.5), GOLD)
    assert not statistics.is_good(record(ttft_s=2.1, last_s=2.5), GOLD)
    assert not statistics.is_good(record(ttft_s=1.0, last_s=3.1), GOLD)  # 0.21 s between tokens
    assert not statistics.is_good(record(outcome=Outcome.UNFINISHED), GOLD)


def test_tokens_of_clients_who_left_are_not_useful() -> None:
    left = record(outcome=Outcome.LEFT)
    assert statistics.useful_tokens([record(), left], Window(0.0, 10.0)) == pytest.approx(111.0)


def test_token_shares_are_by_tenant() -> None:
    records = [record(), record(tenant="t2"), record(tenant="t2"), record(tenant="t2")]
    shares = statistics.token_shares(records, Window(0.0, 10.0))
    assert shares == pytest.approx({"t1": 0.25, "t2": 0.75})


def test_a_group_counts_each_request_that_arrived_in_the_window_once() -> None:
    run = [
        record(0, at_s=1.0),
        record(1, at_s=2.0, ttft_s=3.0, last_s=3.5),  # too late to be good
        refused(2, at_s=3.0),
        record(3, at_s=4.0, outcome=Outcome.LEFT),
        record(4, tier="bronze", at_s=5.0, ttft_s=20.0, last_s=20.1),
        record(5, at_s=50.0),  # after the window
        record(6, tier="gold", at_s=5.0, opted_in=False),
    ]
    groups = statistics.groups([run], Window(0.0, 10.0), TIERS)
    assert set(groups) == {"gold", "bronze", "opted_in", "bypass"}
    gold = groups["gold"]
    assert gold.offered == 4
    assert gold.outcomes == {"completed": 2, "refused": 1, "left": 1}
    assert gold.served == pytest.approx(2 / 3)  # who left is no failure of the system
    assert gold.good == pytest.approx(1 / 3)
    assert gold.goodput_per_s == pytest.approx(0.1)
    assert gold.ttft_s == Percentiles(1.0, 3.0, 3.0)
    assert gold.e2e_s == Percentiles(2.0, 3.5, 3.5)
    assert gold.refused_without_retry_after == 1
    assert groups["opted_in"].offered == 5
    assert groups["opted_in"].goodput_per_s == pytest.approx(0.2)
    assert groups["bypass"].offered == 1
    # Two gold answers of 111 tokens each, one beside them that bypassed.
    assert gold.token_share == pytest.approx(2 / 3)
    assert gold.tokens_per_s == pytest.approx(22.2)


def test_rates_are_over_all_runs() -> None:
    groups = statistics.groups([[record()], [record()]], Window(0.0, 10.0), TIERS)
    assert groups["gold"].goodput_per_s == pytest.approx(0.1)


def test_a_refusal_that_says_when_to_come_back_is_no_fault() -> None:
    run = [
        record(0, outcome=Outcome.REFUSED, status=429, has_retry_after=True),
        record(1, outcome=Outcome.REFUSED, status=504),
        record(2, outcome=Outcome.REFUSED, status=503),
    ]
    stats = statistics.groups([run], Window(0.0, 10.0), TIERS)["gold"]
    assert stats.refused_without_retry_after == 1


# Changes.


def _arrivals(late: set[int]) -> list[Record]:
    """One gold request a second."""
    return [
        record(second, at_s=float(second), ttft_s=5.0 if second in late else 0.5)
        for second in range(100)
    ]


def test_gold_is_back_when_hardly_a_request_is_late_from_then_on() -> None:
    assert recovery_s(_arrivals({40, 41, 42, 43}), GOLD, 40.0, 100.0) == pytest.approx(4.0)


def test_a_single_late_request_much_later_is_forgiven() -> None:
    assert recovery_s(_arrivals({40, 41, 70}), GOLD, 40.0, 100.0) == pytest.approx(2.0)


def test_gold_that_stays_late_is_not_back() -> None:
    assert recovery_s(_arrivals(set(range(40, 100))), GOLD, 40.0, 100.0) is None


def test_gold_that_was_never_late_is_back_with_its_first_arrival() -> None:
    assert recovery_s(_arrivals(set()), GOLD, 40.0, 100.0) == 0.0


def test_a_refused_request_is_a_late_one() -> None:
    records = [refused(0, at_s=41.0), record(1, at_s=42.0, ttft_s=0.5)]
    assert recovery_s(records, GOLD, 40.0, 100.0) == pytest.approx(2.0)


def test_a_value_has_settled_when_it_stays_near_where_it_ends_up() -> None:
    samples = [(float(second), 20.0 if second < 13 else 10.0) for second in range(40)]
    assert settle_s(samples, 10.0, 40.0) == pytest.approx(2.0)
    assert settle_s([(at_s, 10.0) for at_s, _ in samples], 10.0, 40.0) == 0.0


def test_a_value_that_swings_to_the_end_has_not_settled() -> None:
    samples = [(float(second), 5.0 if second % 2 else 15.0) for second in range(40)]
    assert settle_s(samples, 10.0, 40.0) is None
    assert settle_s([], 10.0, 40.0) is None
