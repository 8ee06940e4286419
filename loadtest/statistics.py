"""From records to figures: percentiles, goodput, shares, Jain's index. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ciuicflow.flowcontrol.tiers import TierConfig
from loadtest.records import Outcome, Record

Tiers = Mapping[str, TierConfig]


class Percentiles(msgspec.Struct, frozen=True):
    """Of some times, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles | None":
        """Sum up; None: there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(*(percentile(ordered, part) for part in (0.5, 0.9, 0.99)))


class GroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """What some requests got: one tier's, those that opted in, or those that did not."""

    offered: int
    outcomes: dict[str, int]
    served: float
    """Part of the requests whose client stayed that was completed."""
    good: float
    """Part of them that was completed within its tier's targets."""
    goodput_per_s: float
    """Requests completed within their tier's targets, per second of arrivals."""
    tokens_per_s: float
    token_share: float
    """Part of the tokens of all requests, opted in or not."""
    ttft_s: Percentiles | None
    """Of those that got a first token, whatever came then."""
    itl_s: Percentiles | None
    """Of the mean of each completed request."""
    e2e_s: Percentiles | None
    """Of completed requests."""
    refused_without_retry_after: int
    """429 and 503 only."""
    jain: float | None
    """Jain's index of the tokens of its tenants; None: one tenant, or no token."""


class Window(msgspec.Struct, frozen=True):
    """The part of a run that counts: arrivals within it, tokens within it."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the smallest value that at least this part of the values does not exceed."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def jain(values: Sequence[float]) -> float:
    """Return Jain's index: 1 where all get the same, 1/n where one gets everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def is_good(record: Record, tier: TierConfig) -> bool:
    """Whether it was completed within its tier's targets."""
    return (
        record.outcome is Outcome.COMPLETED
        and record.ttft_s is not None
        and record.ttft_s <= tier.ttft_target_s
        and (record.itl_s or 0.0) <= tier.itl_target_s
    )


def useful_tokens(records: Iterable[Record], window: Window) -> float:
    """Return the tokens within a window that went to clients who stayed."""
    return sum(
        record.tokens_between(window.start_s, window.end_s)
        for record in records
        if record.outcome in (Outcome.COMPLETED, Outcome.UNFINISHED)
    )


def token_shares(records: Iterable[Record], window: Window) -> dict[str, float]:
    """Return each tenant's part of the useful tokens."""
    tokens: Counter[str] = Counter()
    for record in records:
        tokens[record.tenant] += useful_tokens((record,), window)  # type: ignore[assignment]  # a Counter takes floats
    total = sum(tokens.values()) or 1
    return {tenant: tokens[tenant] / total for tenant in sorted(tokens)}


def groups(runs: Sequence[Sequence[Record]], window: Window, tiers: Tiers) -> dict[str, GroupStats]:
    """Sum up the runs of one system by tier, and over all that opted in and that did not."""
    every = [record for run in runs for record in run]
    opted_in = [record for record in every if record.opted_in]
    parts = {name: [r for r in opted_in if r.tier == name] for name in tiers}
    parts["opted_in"] = opted_in
    parts["bypass"] = [record for record in every if not record.opted_in]
    total = useful_tokens(every, window)
    seconds = window.length_s * len(runs)
    return {
        name: _group(records, window, tiers, seconds, total)
        for name, records in parts.items()
        if records
    }


def _group(
    records: list[Record], window: Window, tiers: Tiers, seconds: float, total: float
) -> GroupStats:
    tokens = useful_tokens(records, window)
    shares = token_shares(records, window)
    arrived = [r for r in records if window.start_s <= r.at_s < window.end_s]
    stayed = [r for r in arrived if r.outcome is not Outcome.LEFT]
    completed = [r for r in stayed if r.outcome is Outcome.COMPLETED]
    good = sum(is_good(r, tiers[r.tier]) for r in completed)
    return GroupStats(
        offered=len(arrived),
        outcomes=dict(Counter(r.outcome.value for r in arrived)),
        served=len(completed) / max(1, len(stayed)),
        good=good / max(1, len(stayed)),
        goodput_per_s=good / seconds,
        tokens_per_s=tokens / seconds,
        token_share=tokens / total if total else 0.0,
        ttft_s=Percentiles.of(r.ttft_s for r in arrived if r.ttft_s is not None),
        itl_s=Percentiles.of(r.itl_s for r in completed if r.itl_s is not None),
        e2e_s=Percentiles.of(r.end_s for r in completed if r.end_s is not None),
        refused_without_retry_after=sum(
            r.status in (429, 503) and not r.has_retry_after for r in arrived
        ),
        jain=jain(list(shares.values())) if len(shares) > 1 and tokens else None,
    )
