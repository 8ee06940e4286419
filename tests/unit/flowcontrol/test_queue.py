"""The queue of one tier: fairness in tokens, deadlines, cancelling, and what garbage it keeps."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain import needs_plain

from ciuicflow.flowcontrol import queue as queue_module
from ciuicflow.flowcontrol.cost import Cost
from ciuicflow.flowcontrol.entry import Entry
from ciuicflow.flowcontrol.queue import TierQueue, _Flow


def entry(id_: int, tenant: str = "a", work: float = 100.0, due_s: float | None = None) -> Entry:
    return Entry(
        id=id_,
        seq=id_,
        tenant=tenant,
        tier=0,
        model=None,
        body_bytes=0,
        cost=Cost(work, 1, 1),
        enqueued_s=float(id_),
        due_s=float(id_) if due_s is None else due_s,
        expires_s=1e9,
        streams=True,
    )


def filled(*entries: Entry) -> TierQueue:
    queue = TierQueue()
    for item in entries:
        queue.push(item)
    return queue


def taken(queue: TierQueue, count: int) -> list[int]:
    return [queue.take().id for _ in range(count)]


def test_without_deadlines_a_tenants_requests_go_in_order_of_arrival() -> None:
    assert taken(filled(entry(1), entry(2), entry(3)), 3) == [1, 2, 3]


def test_the_earliest_deadline_of_a_tenant_goes_first() -> None:
    queue = filled(entry(1, due_s=9.0), entry(2, due_s=5.0), entry(3, due_s=7.0))
    assert taken(queue, 3) == [2, 3, 1]


def test_a_deadline_does_not_overtake_another_tenant() -> None:
    queue = filled(entry(1, "a"), entry(2, "b", due_s=-1.0))
    assert taken(queue, 2) == [1, 2]


def test_tenants_share_in_tokens_and_not_in_requests() -> None:
    large = [entry(id_, "large", work=300.0) for id_ in range(100)]
    small = [entry(1000 + id_, "small", work=100.0) for id_ in range(300)]
    queue = filled(*large, *small)
    work: Counter[str] = Counter()
    for _ in range(120):
        item = queue.take()
        work[item.tenant] += int(item.cost.work)
    assert abs(work["large"] - work["small"]) <= 300


def test_a_tenant_with_ten_times_the_requests_gets_no_more() -> None:
    many = [entry(id_, "many") for id_ in range(1000)]
    few = [entry(2000 + id_, "few") for id_ in range(100)]
    queue = filled(*many, *few)
    counts = Counter(queue.take().tenant for _ in range(200))
    assert counts == {"many": 100, "few": 100}


def test_a_tenant_that_comes_back_is_lifted_to_the_least_served() -> None:
    """Silence earns nothing: it does not get all that it could have had meanwhile."""
    queue = filled(*(entry(id_, "steady") for id_ in range(200)))
    taken(queue, 100)
    for id_ in range(100):
        queue.push(entry(1000 + id_, "returns"))
    counts = Counter(queue.take().tenant for _ in range(100))
    assert counts["steady"] == pytest.approx(50, abs=1)


def test_a_tenant_that_was_served_much_waits_when_it_comes_back() -> None:
    queue = filled(entry(1, "a", work=1000.0), entry(2, "b", work=100.0))
    assert taken(queue, 1) == [1]  # a owes 1000, b nothing yet
    queue.push(entry(3, "a", work=100.0))
    queue.push(entry(4, "b", work=100.0))
    assert taken(queue, 3) == [2, 4, 3]


def test_an_entry_that_passes_through_an_empty_queue_is_charged_like_any_other() -> None:
    queue = TierQueue()
    queue.pass_through(entry(1, "a", work=1000.0))
    for item in (entry(2, "b"), entry(3, "a"), entry(4, "b"), entry(5, "b")):
        queue.push(item)
    assert taken(queue, 4) == [2, 4, 5, 3]


def test_a_correction_of_the_charge_changes_whose_turn_it_is() -> None:
    queue = filled(entry(1, "a"), entry(2, "b"), entry(3, "a"), entry(4, "b"))
    assert taken(queue, 1) == [1]
    queue.charge("a", -50.0)  # cost half of what was thought
    queue.charge("b", 200.0)
    assert taken(queue, 3) == [3, 2, 4]


def test_a_correction_for_a_tenant_without_requests_is_kept_for_its_return() -> None:
    queue = filled(entry(1, "a"), entry(2, "b"), entry(3, "b"), entry(4, "b"))
    assert taken(queue, 1) == [1]
    queue.charge("a", 500.0)
    queue.push(entry(5, "a"))
    assert taken(queue, 4) == [2, 3, 4, 5]


def test_a_removed_entry_is_gone_and_its_tenant_not_charged() -> None:
    items = [entry(1, "a", work=900.0), entry(2, "a"), entry(3, "b")]
    queue = filled(*items)
    queue.remove(items[0])
    assert (len(queue), queue.work) == (2, 200.0)
    assert taken(queue, 2) == [2, 3]


def test_oldest_and_newest_skip_what_is_gone() -> None:
    items = [entry(id_) for id_ in range(5)]
    queue = filled(*items)
    for gone in (items[0], items[4]):
        queue.remove(gone)
    assert (queue.oldest().id, queue.newest().id) == (1, 3)


def test_the_longest_is_the_tenant_with_most_entries_and_gives_its_newest() -> None:
    queue = filled(*(entry(id_, "a") for id_ in range(3)), entry(10, "b"), entry(11, "c"))
    victim, length = queue.newest_of_longest()
    assert (victim.id, length) == (2, 3)
    for _ in range(2):
        queue.remove(queue.newest_of_longest()[0])
    assert queue.newest_of_longest()[1] == 1


def test_a_modest_tenants_predicted_work_is_its_turn_and_not_the_whole_queue() -> None:
    queue = filled(*(entry(id_, "greedy") for id_ in range(1000)))
    assert queue.work_before("greedy") == 100_000.0
    assert queue.work_before("modest") == pytest.approx(100.0)


@needs_plain
def test_counters_of_idle_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_IDLE_TENANTS", 3)
    queue = filled(*(entry(id_, f"t{id_}") for id_ in range(10)))
    taken(queue, 10)
    assert list(queue._idle) == ["t7", "t8", "t9"]


def test_garbage_does_not_outgrow_the_entries() -> None:
    queue = TierQueue()
    kept = entry(0)
    queue.push(kept)
    for id_ in range(1, 5000):
        item = entry(id_)
        queue.push(item)
        queue.charge("a", 1.0)
        queue.remove(item)
    flow = kept.holder
    assert isinstance(flow, _Flow)
    assert max(len(flow.by_deadline), len(flow.by_arrival), len(queue._turns)) < 50


class Model:
    """The same queue, naively: lists that are searched."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.counters: dict[str, float] = {}
        self.served = 0.0

    def push(self, item: Entry) -> None:
        if all(other.tenant != item.tenant for other in self.entries):
            waiting = [self.counters[other.tenant] for other in self.entries]
            least = min(waiting, default=self.served)
            self.counters[item.tenant] = max(least, self.counters.get(item.tenant, least))
        self.entries.append(item)

    def candidates(self) -> set[int]:
        """All that may go next: ties between tenants are free."""
        least = min(self.counters[item.tenant] for item in self.entries)
        tenants = {i.tenant for i in self.entries if self.counters[i.tenant] == least}
        return {
            min((i for i in self.entries if i.tenant == t), key=lambda i: (i.due_s, i.seq)).id
            for t in tenants
        }

    def take(self, id_: int) -> None:
        item = next(item for item in self.entries if item.id == id_)
        self.served = self.counters[item.tenant]
        self.counters[item.tenant] += item.cost.work
        self.entries.remove(item)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "take", "remove", "charge"]),
            st.sampled_from("abc"),
            st.integers(1, 4),
        ),
        max_size=60,
    )
)
def test_it_behaves_like_lists_that_are_searched(steps: list[tuple[str, str, int]]) -> None:
    queue, model = TierQueue(), Model()
    for number, (step, tenant, size) in enumerate(steps):
        if step == "push":
            item = entry(number, tenant, work=float(size), due_s=float(size))
            queue.push(item)
            model.push(item)
        elif step == "take" and model.entries:
            allowed = model.candidates()
            id_ = queue.take().id
            assert id_ in allowed
            model.take(id_)
        elif step == "remove" and model.entries:
            item = model.entries[size % len(model.entries)]
            queue.remove(item)
            model.entries.remove(item)
        elif step == "charge" and any(item.tenant == tenant for item in model.entries):
            queue.charge(tenant, float(size - 2))
            model.counters[tenant] += size - 2
        first = queue.first()
        assert (first.id if first else None) in (model.candidates() if model.entries else {None})
        assert len(queue) == len(model.entries)
        assert queue.work == sum(item.cost.work for item in model.entries)
        lengths = Counter(item.tenant for item in model.entries)
        assert queue.tenants == len(lengths)
        if model.entries:
            assert queue.newest_of_longest()[1] == max(lengths.values())
            assert queue.oldest() is model.entries[0]
            assert queue.newest() is model.entries[-1]
