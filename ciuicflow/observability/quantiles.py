"""Quantiles and rates of the last minute, with 1 % relative error and bounded memory.

The log-bucket idea is DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile
sketch with relative-error guarantees", VLDB 2019), here with a fixed range of values, so that a
sketch is one list of counts and merging is adding.
"""

from collections.abc import Iterable
from math import floor, inf, log, nan

RELATIVE_ERROR = 0.01
MIN_VALUE = 1e-6
"""Smaller values (and NaN) count as this: one microsecond."""
MAX_VALUE = 1e5
"""Larger values count as this: more than a day."""

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_SCALE = 1 / log(_GAMMA)
_OFFSET = log(MIN_VALUE) * _SCALE
_BUCKETS = int(log(MAX_VALUE) * _SCALE - _OFFSET) + 1  # 1267


def _bucket(value: float) -> int:
    """Return the bucket of `value`: bucket i holds MIN_VALUE * [gamma^i, gamma^(i+1))."""
    if not MIN_VALUE <= value <= MAX_VALUE:
        value = MAX_VALUE if value > MAX_VALUE else MIN_VALUE
    return int(log(value) * _SCALE - _OFFSET)


class LogSketch:
    """Counts of values in buckets whose width is proportional to the value."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS

    def observe(self, value: float) -> None:
        """Count one value, clamped to MIN_VALUE..MAX_VALUE."""
        self._counts[_bucket(value)] += 1

    @classmethod
    def merged(cls, sketches: Iterable["LogSketch"]) -> "LogSketch":
        """Return the sketch of the union of all values."""
        union = cls()
        columns = zip(union._counts, *(sketch._counts for sketch in sketches), strict=True)
        union._counts = list(map(sum, columns))
        return union

    def clear(self) -> None:
        """Forget every value."""
        self._counts = [0] * _BUCKETS

    def count(self) -> int:
        """Return the number of values."""
        return sum(self._counts)

    def quantile(self, q: float) -> float:
        """Return the value of rank floor(q * (n - 1)), within RELATIVE_ERROR; NaN without values.

        NaN is what Prometheus shows as "no data": it compares false with every threshold.
        Raises ValueError unless 0 <= q <= 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"quantile {q} is not between 0 and 1")
        rank = floor(q * (self.count() - 1))
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if seen > rank and count:
                return MIN_VALUE * _GAMMA**index * (1 + RELATIVE_ERROR)
        return nan


class SlidingSketch:
    """The values of the last `window_s` seconds, kept in `slices` sketches that expire in turn.

    What is read covers the running slice and the `slices - 1` whole ones before it: between
    window_s * (1 - 1 / slices) and window_s seconds. A clock that stands still or goes back
    adds to the running slice and expires nothing. Memory is bounded: about 10 KB per slice.
    """

    __slots__ = ("_current", "_first_now", "_ring", "_slice", "_slice_end", "_slice_s")

    def __init__(self, window_s: float = 60.0, slices: int = 12) -> None:
        if window_s <= 0 or slices < 2:
            raise ValueError("a sliding window needs window_s > 0 and at least 2 slices")
        self._slice_s = window_s / slices
        self._ring = [LogSketch() for _ in range(slices)]
        self._current = self._ring[0]
        self._slice = -1  # number of the running slice, counted from now = 0
        self._slice_end = -inf
        self._first_now = inf

    def observe(self, value: float, now: float) -> None:
        """Count `value` at `now`, in seconds of a monotonic clock. Measured: 0.37 us."""
        if now >= self._slice_end:
            self._advance(now)
        self._current.observe(value)

    def quantile(self, q: float, now: float) -> float:
        """Return the quantile `q` of the window; NaN when it is empty."""
        return self.merged(now).quantile(q)

    def count(self, now: float) -> int:
        """Return the number of values in the window."""
        self._advance(now)
        return sum(sketch.count() for sketch in self._ring)

    def rate_per_s(self, now: float) -> float:
        """Return values per second over the window, or over the time since the first call if less.

        At least one slice is assumed to have passed, so that the first value is no spike.
        """
        count = self.count(now)
        covered_s = now - (self._slice - len(self._ring) + 1) * self._slice_s
        return count / max(self._slice_s, min(covered_s, now - self._first_now))

    def merged(self, now: float) -> LogSketch:
        """Return one sketch of the whole window, to be merged with others or read."""
        self._advance(now)
        return LogSketch.merged(self._ring)

    def _advance(self, now: float) -> None:
        """Make the slice of `now` the running one; clear the slices that were skipped."""
        number = floor(now / self._slice_s)
        if number <= self._slice:
            return
        size = len(self._ring)
        for skipped in range(max(self._slice + 1, number - size + 1), number + 1):
            self._ring[skipped % size].clear()
        self._slice = number
        self._slice_end = (number + 1) * self._slice_s
        self._current = self._ring[number % size]
        self._first_now = min(self._first_now, now)
