"""The sketch against exact quantiles, and the window against literal times."""

from math import floor, inf, isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.observability.quantiles import (
    MAX_VALUE,
    MIN_VALUE,
    RELATIVE_ERROR,
    LogSketch,
    SlidingSketch,
)

IN_RANGE = st.floats(MIN_VALUE, MAX_VALUE)
QUANTILES = st.floats(0, 1)
FLOAT_SLACK = 1e-9  # a value on a bucket's edge may round into its neighbour


def sketch_of(values: list[float]) -> LogSketch:
    sketch = LogSketch()
    for value in values:
        sketch.observe(value)
    return sketch


def exact(values: list[float], q: float) -> float:
    return sorted(values)[floor(q * (len(values) - 1))]


@given(st.lists(IN_RANGE, min_size=1, max_size=200), QUANTILES)
def test_every_quantile_is_within_one_percent_of_the_exact_one(
    values: list[float], q: float
) -> None:
    truth = exact(values, q)
    error = abs(sketch_of(values).quantile(q) - truth)
    assert error <= truth * (RELATIVE_ERROR + FLOAT_SLACK)


@given(st.lists(st.lists(IN_RANGE, max_size=50), max_size=6), QUANTILES)
def test_merging_equals_the_sketch_of_the_union(parts: list[list[float]], q: float) -> None:
    merged = LogSketch.merged(map(sketch_of, parts))
    union = sketch_of([value for part in parts for value in part])
    assert merged.count() == union.count()
    assert merged.quantile(q) == pytest.approx(union.quantile(q), nan_ok=True)


@given(st.lists(IN_RANGE, min_size=1, max_size=100), QUANTILES, QUANTILES)
def test_a_higher_quantile_is_never_a_smaller_value(
    values: list[float], one: float, other: float
) -> None:
    sketch = sketch_of(values)
    low, high = sorted((one, other))
    assert sketch.quantile(low) <= sketch.quantile(high)


@pytest.mark.parametrize(
    ("value", "counted_as"),
    [
        (0.0, MIN_VALUE),
        (-1.0, MIN_VALUE),
        (nan, MIN_VALUE),
        (-inf, MIN_VALUE),
        (inf, MAX_VALUE),
        (MAX_VALUE * 2, MAX_VALUE),
        (MIN_VALUE, MIN_VALUE),
        (MAX_VALUE, MAX_VALUE),
    ],
)
def test_values_outside_the_range_count_as_its_ends(value: float, counted_as: float) -> None:
    sketch = sketch_of([value])
    assert sketch.count() == 1
    assert sketch.quantile(0.5) == pytest.approx(counted_as, rel=RELATIVE_ERROR + FLOAT_SLACK)


def test_an_empty_sketch_has_no_quantile() -> None:
    assert isnan(LogSketch().quantile(0.99))
    assert isnan(SlidingSketch().quantile(0.99, now=3.0))


@pytest.mark.parametrize("q", [-0.01, 1.01, nan])
def test_a_quantile_outside_0_to_1_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        sketch_of([1.0]).quantile(q)


def test_a_cleared_sketch_is_empty() -> None:
    sketch = sketch_of([1.0, 2.0])
    sketch.clear()
    assert sketch.count() == 0
    assert isnan(sketch.quantile(0.5))


def test_the_p99_of_a_thousand_requests_shows_the_slow_ones() -> None:
    sketch = SlidingSketch()
    for number in range(1000):
        sketch.observe(0.020 if number % 50 else 5.0, now=100.0)
    assert sketch.quantile(0.50, now=100.0) == pytest.approx(0.020, rel=RELATIVE_ERROR)
    assert sketch.quantile(0.99, now=100.0) == pytest.approx(5.0, rel=RELATIVE_ERROR)


def test_values_expire_with_their_slice() -> None:
    sketch = SlidingSketch(window_s=60, slices=12)
    sketch.observe(1.0, now=102.0)  # slice 100..105
    sketch.observe(2.0, now=107.0)  # slice 105..110
    assert sketch.count(now=159.9) == 2
    assert sketch.count(now=160.0) == 1
    assert sketch.quantile(0.5, now=160.0) == pytest.approx(2.0, rel=RELATIVE_ERROR)
    assert sketch.count(now=165.0) == 0


@pytest.mark.parametrize("gap_s", [60.0, 61.0, 3600.0, 1e9])
def test_a_long_silence_expires_everything(gap_s: float) -> None:
    sketch = SlidingSketch(window_s=60, slices=12)
    for second in range(60):
        sketch.observe(1.0, now=float(second))
    sketch.observe(3.0, now=60.0 + gap_s)
    assert sketch.count(now=60.0 + gap_s) == 1


@given(st.lists(st.floats(0, 300), max_size=100))
def test_the_window_holds_the_running_slice_and_the_eleven_before(times: list[float]) -> None:
    sketch = SlidingSketch(window_s=60, slices=12)
    for now in sorted(times):
        sketch.observe(1.0, now)
    kept = [now for now in times if now // 5 > 300 // 5 - 12]
    assert sketch.count(now=300.0) == len(kept)


def test_a_clock_that_stands_still_loses_nothing() -> None:
    sketch = SlidingSketch()
    for _ in range(100):
        sketch.observe(1.0, now=7.0)
    assert sketch.count(now=7.0) == 100


def test_a_clock_that_goes_back_counts_in_the_running_slice() -> None:
    sketch = SlidingSketch(window_s=60, slices=12)
    sketch.observe(1.0, now=100.0)
    sketch.observe(1.0, now=20.0)
    assert sketch.count(now=20.0) == 2
    assert sketch.rate_per_s(now=20.0) > 0
    assert sketch.count(now=159.9) == 2
    assert sketch.count(now=160.0) == 0


def test_the_rate_of_a_steady_flow_is_its_rate_at_any_age() -> None:
    sketch = SlidingSketch(window_s=60, slices=12)
    for number in range(10 * 200):  # 10 per second from 1000 s on
        now = 1000.0 + number / 10
        sketch.observe(1.0, now)
        if now >= 1005.0:
            assert sketch.rate_per_s(now) == pytest.approx(10, rel=0.03)


def test_the_first_value_is_no_spike_of_the_rate() -> None:
    sketch = SlidingSketch(window_s=60, slices=12)
    sketch.observe(1.0, now=50.0)
    assert sketch.rate_per_s(now=50.0) == pytest.approx(1 / 5)


def test_the_rate_falls_to_zero_when_the_flow_stops() -> None:
    sketch = SlidingSketch(window_s=60, slices=12)
    for second in range(60):
        sketch.observe(1.0, now=float(second))
    assert sketch.rate_per_s(now=59.0) == pytest.approx(1.0, rel=0.02)
    assert 0.4 < sketch.rate_per_s(now=90.0) < 0.6
    assert sketch.rate_per_s(now=120.0) == 0


@pytest.mark.parametrize(("window_s", "slices"), [(0, 12), (-1, 12), (60, 1), (60, 0)])
def test_a_window_without_room_is_refused(window_s: float, slices: int) -> None:
    with pytest.raises(ValueError, match="window_s > 0"):
        SlidingSketch(window_s, slices)


def test_memory_does_not_grow_with_what_is_observed() -> None:
    sketch = LogSketch()
    before = len(sketch._counts)
    for exponent in range(-300, 300):
        sketch.observe(10.0**exponent)
    assert len(sketch._counts) == before < 2000
