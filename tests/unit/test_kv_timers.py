"""One look-up for the next of many deadlines."""

from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.kvtransfer.timers import Timers


def test_a_deadline_can_be_moved_and_cleared() -> None:
    timers = Timers()
    timers.set("a", 1.0)
    timers.set("b", 2.0)
    timers.set("a", 3.0)
    assert timers.next() == 2.0
    timers.clear("b")
    timers.clear("never there")
    assert timers.pop_due(2.9) is None
    assert timers.pop_due(3.0) == "a"
    assert (timers.next(), timers.pop_due(9.0)) == (None, None)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9) | st.none()), max_size=300))
def test_what_is_due_comes_once_and_in_order(events: list[tuple[str, int | None]]) -> None:
    timers, expected = Timers(), dict[str, int]()
    for key, due_s in events:
        if due_s is None:
            timers.clear(key)
            expected.pop(key, None)
        else:
            timers.set(key, due_s)
            expected[key] = due_s
    assert timers.next() == min(expected.values(), default=None)
    popped = list(iter(lambda: timers.pop_due(9.0), None))
    assert sorted(popped) == sorted(expected)
    assert [expected[key] for key in popped] == sorted(expected.values())
    assert len(timers._heap) <= 2 * len(expected) + 70
