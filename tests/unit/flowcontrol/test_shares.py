"""Floors, ageing and drain rates, with literal times."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuicflow.flowcontrol.cost import Cost
from ciuicflow.flowcontrol.entry import Entry
from ciuicflow.flowcontrol.lanes import Lane
from ciuicflow.flowcontrol.shares import MEMORY_S, DrainMeter
from ciuicflow.flowcontrol.tiers import TierConfig


def tier(rank: int, floor: float = 0.0, ageing: float = 0.0, max_wait_s: float = 1e6) -> TierConfig:
    return TierConfig(
        name=f"t{rank}", rank=rank, ttft_target_s=1.0, itl_target_s=1.0,
        max_wait_s=max_wait_s, floor=floor, ageing_share=ageing,
    )  # fmt: skip


class Feed:
    """A lane in which chosen tiers always have work."""

    def __init__(self, *tiers: TierConfig) -> None:
        self.lane = Lane(None, tiers)
        self.seq = 0
        self.work = [0.0] * len(tiers)

    def fill(self, tier: int, now: float, count: int = 1, work: float = 100.0) -> None:
        for _ in range(count):
            self.seq += 1
            self.lane.push(
                now,
                Entry(
                    id=self.seq, seq=self.seq, tenant="t", tier=tier, model=None, body_bytes=0,
                    cost=Cost(work, 1, 1), enqueued_s=now, due_s=now, expires_s=1e9, streams=True,
                ),
            )  # fmt: skip

    def dispatch(self, now: float) -> int:
        entry = self.lane.take(now, self.lane.order()[0])
        self.work[entry.tier] += entry.cost.work
        return entry.tier

    def run(self, busy: tuple[int, ...], start: int, count: int, work: float = 100.0) -> None:
        """Dispatch ten times a second while these tiers have work."""
        for index in range(start, start + count):
            now = index * 0.1
            for number in busy:
                while len(self.lane.queues[number]) < 3:
                    self.fill(number, now, work=work)
            self.dispatch(now)


def test_the_highest_tier_goes_first() -> None:
    feed = Feed(tier(0), tier(1), tier(2))
    for number in (2, 1, 0):
        feed.fill(number, 0.0)
    assert [feed.dispatch(1.0) for _ in range(3)] == [0, 1, 2]


def test_without_a_floor_a_lower_tier_gets_nothing_while_a_higher_one_has_work() -> None:
    feed = Feed(tier(0), tier(1))
    feed.run((0, 1), 0, 500)
    assert feed.work[1] == 0


def test_floors_hold_while_everyone_has_work() -> None:
    feed = Feed(tier(0), tier(1, floor=0.2), tier(2, floor=0.1))
    feed.run((0, 1, 2), 0, 1000)
    assert feed.work[1] == pytest.approx(0.2 * 100_000, abs=200)
    assert feed.work[2] == pytest.approx(0.1 * 100_000, abs=200)


def test_floors_that_promise_everything_leave_the_first_tier_its_own() -> None:
    feed = Feed(tier(0, floor=0.5), tier(1, floor=0.3), tier(2, floor=0.2))
    feed.run((0, 1, 2), 0, 1000)
    assert feed.work == pytest.approx([50_000, 30_000, 20_000], abs=300)


def test_a_floor_counts_tokens_and_not_requests() -> None:
    feed = Feed(tier(0), tier(1, floor=0.2))
    for index in range(2000):
        for number, work in ((0, 100.0), (1, 1000.0)):
            if not feed.lane.queues[number]:
                feed.fill(number, index * 0.1, work=work)
        feed.dispatch(index * 0.1)
    assert feed.work[1] / sum(feed.work) == pytest.approx(0.2, abs=0.01)


def test_an_idle_floor_is_lent_out_and_not_saved_up() -> None:
    feed = Feed(tier(0), tier(1, floor=0.2))
    feed.run((0,), 0, 1000)
    assert feed.work == [100_000, 0]
    feed.run((0, 1), 1000, 100)
    assert feed.work[1] == pytest.approx(0.2 * 10_000, abs=200)


def test_a_tier_served_above_its_floor_lets_a_burst_of_a_higher_tier_pass() -> None:
    feed = Feed(tier(0), tier(1, floor=0.2))
    feed.run((1,), 0, 200)
    before = feed.work[1]
    feed.run((0, 1), 200, 50)  # 5 s: the floor of the last 10 s has been served long since
    assert feed.work[1] == before


def test_what_was_served_above_the_floor_is_forgotten_after_a_while() -> None:
    feed = Feed(tier(0), tier(1, floor=0.2))
    feed.run((1,), 0, 5000)
    before = feed.work[1]
    feed.run((0, 1), 5000, 1000)
    bank = 0.2 * 1000 * MEMORY_S  # tokens: the floor of MEMORY_S at 1000 tokens/s
    assert feed.work[1] - before == pytest.approx(0.2 * 100_000 - bank, abs=300)


def test_ageing_claims_its_share_and_no_more() -> None:
    feed = Feed(tier(0), tier(1, ageing=0.1, max_wait_s=20.0))
    feed.fill(1, 0.0, count=500)
    feed.run((0,), 0, 100)
    assert feed.work[1] == 0  # 10 s: nobody has waited for half of the longest wait
    feed.run((0,), 101, 1000)
    assert feed.work[1] == pytest.approx(0.1 * 100_000, abs=200)


def test_ageing_adds_to_the_floor() -> None:
    feed = Feed(tier(0), tier(1, floor=0.1, ageing=0.1, max_wait_s=0.1))
    feed.fill(1, 0.0, count=500)
    feed.run((0,), 10, 1000)
    assert feed.work[1] == pytest.approx(0.2 * 100_000, abs=300)


@settings(deadline=None)
@given(
    floors=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=8),
    count=st.integers(50, 300),
)
def test_no_floor_is_missed_by_more_than_a_request(
    floors: tuple[float, float], sizes: list[int], count: int
) -> None:
    feed = Feed(tier(0), tier(1, floor=floors[0]), tier(2, floor=floors[1]))
    for index in range(count):
        for number in range(3):
            if not feed.lane.queues[number]:
                feed.fill(number, index * 0.1, work=float(sizes[(index + number) % len(sizes)]))
        feed.dispatch(index * 0.1)
        total = sum(feed.work)
        for number in (1, 2):
            # Two tiers can be due at once: then one waits for the other's request too.
            assert feed.work[number] >= floors[number - 1] * total - 2 * max(sizes)


def test_a_drain_rate_is_unknown_until_the_queue_was_seen_waiting() -> None:
    meter = DrainMeter()
    assert meter.rate(5.0) is None
    meter.busy(5.0)
    assert meter.rate(5.0) is None
    meter.dispatched(6.0, 300.0)
    assert meter.rate(6.0) == 300.0


def test_a_drain_rate_counts_only_the_time_in_which_the_queue_waited() -> None:
    meter = DrainMeter()
    meter.busy(0.0)
    meter.dispatched(2.0, 600.0)
    meter.idle()
    meter.busy(100.0)
    meter.dispatched(102.0, 600.0)
    assert meter.rate(102.0) == pytest.approx(300.0)


def test_a_drain_rate_falls_while_nothing_leaves() -> None:
    meter = DrainMeter()
    meter.busy(0.0)
    meter.dispatched(1.0, 300.0)
    assert meter.rate(10.0) == pytest.approx(30.0)


def test_a_drain_rate_follows_a_change_within_its_memory() -> None:
    meter = DrainMeter()
    meter.busy(0.0)
    for second in range(1, 60):
        meter.dispatched(float(second), 100.0)
    for second in range(60, 60 + 2 * int(MEMORY_S)):
        meter.dispatched(float(second), 200.0)
    rate = meter.rate(60.0 + 2 * MEMORY_S - 1)
    assert rate == pytest.approx(200.0, rel=0.1)
