"""What is counted for every request of one flow and tier. Pure."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from ciuicflow.observability.quantiles import SlidingSketch

DURATION_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
"""Upper bounds of durations: from a cached answer to a long reasoning stream."""
WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of queue waits and times to the first token."""
INTER_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 1.0, 5.0)

OTHER_CODE = 0  # whatever is not an HTTP status: the number of series stays bounded


class Histogram:
    """Counts of values by upper bound, as Prometheus wants them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one is +Inf
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Traffic:
    """Counters of one flow and tier: plain numbers, read when Prometheus scrapes."""

    __slots__ = ("answers", "durations", "window")

    def __init__(self) -> None:
        self.answers: defaultdict[tuple[str, int], int] = defaultdict(int)  # outcome, code
        self.durations = Histogram(DURATION_BUCKETS_S)
        self.window = SlidingSketch()

    def observe(self, outcome: str, code: int, duration_s: float, now: float) -> None:
        """Count one ended request, of any HTTP status `code` (0: none was sent).

        `now` in monotonic seconds. Measured: 0.5 us, 0.2 of it the sliding sketch.
        """
        self.answers[outcome, code if 100 <= code <= 599 else OTHER_CODE] += 1
        self.durations.observe(duration_s)
        self.window.observe(duration_s, now)


class TierTraffic:
    """Counters of one tier's opted-in requests beyond those of Traffic."""

    __slots__ = ("inter_token", "queue_wait", "tokens", "ttft", "ttft_window")

    def __init__(self) -> None:
        self.queue_wait = Histogram(WAIT_BUCKETS_S)
        self.ttft = Histogram(WAIT_BUCKETS_S)
        self.inter_token = Histogram(INTER_TOKEN_BUCKETS_S)
        self.ttft_window = SlidingSketch()
        self.tokens = {"prompt": 0, "cached": 0, "completion": 0}

    def first_token(self, ttft_s: float, now: float) -> None:
        """Count a first token, so long after its request's arrival."""
        self.ttft.observe(ttft_s)
        self.ttft_window.observe(ttft_s, now)
