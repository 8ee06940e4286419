"""What became of one request, as its client saw it. Pure."""

from enum import StrEnum

import msgspec

from loadtest.workload import Planned

REFUSALS = (429, 503, 504)


class Outcome(StrEnum):
    """How a request ended; each planned request has exactly one per compared system."""

    COMPLETED = "completed"
    REFUSED = "refused"  # 429, 503 or 504
    FAILED = "failed"  # any other status, a broken stream, no connection
    LEFT = "left"  # the client left, as planned
    UNFINISHED = "unfinished"  # still waiting when the run was over


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its times in seconds, all from the planned arrival."""

    id: int
    tier: str
    tenant: str
    opted_in: bool
    at_s: float
    outcome: Outcome
    status: int = 0
    """0: no answer."""
    late_s: float = 0.0
    """How late it was sent."""
    ttft_s: float | None = None
    last_s: float | None = None
    """The last token so far."""
    end_s: float | None = None
    """The end of a completed answer."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Output tokens that arrived."""
    has_retry_after: bool = False
    queue_ms: float | None = None
    """What the gateway says that it held the request."""

    @property
    def itl_s(self) -> float | None:
        """Mean time between tokens; None: fewer than two came."""
        if self.ttft_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.ttft_s) / (self.tokens - 1)

    def tokens_between(self, start_s: float, end_s: float) -> float:
        """Return its tokens in a span of the run: the prompt counts where the first token came.

        Output tokens are taken as evenly spread from the first to the last.
        """
        if self.ttft_s is None or self.last_s is None:
            return 0.0
        first, last = self.at_s + self.ttft_s, self.at_s + self.last_s
        prompt = self.prompt_tokens + 1 if start_s <= first < end_s else 0
        inside_s = max(0.0, min(last, end_s) - max(first, start_s))
        rest = (self.tokens - 1) * inside_s / (last - first) if last > first else 0.0
        return prompt + rest


def outcome_of(status: int, *, is_whole: bool) -> Outcome:
    """Judge an answer that has ended."""
    if status in REFUSALS:
        return Outcome.REFUSED
    return Outcome.COMPLETED if status == 200 and is_whole else Outcome.FAILED


def blank(planned: Planned, outcome: Outcome, late_s: float = 0.0) -> Record:
    """Return the record of a request to which nothing was answered."""
    return Record(
        id=planned.id, tier=planned.tier, tenant=planned.tenant, opted_in=planned.opted_in,
        at_s=planned.at_s, outcome=outcome, late_s=late_s, prompt_tokens=planned.prompt_tokens,
    )  # fmt: skip
