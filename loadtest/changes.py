"""How long it takes until things are well again after a change. Pure."""

from collections.abc import Sequence

from ciuicflow.flowcontrol.tiers import TierConfig
from loadtest.records import Outcome, Record

IN_TARGET: float = 0.95
"""Back within targets: from then on at least this part of the requests is."""
BAND: float = 0.2
"""Settled: from then on within this part of the later mean."""


def recovery_s(
    records: Sequence[Record], tier: TierConfig, change_s: float, end_s: float
) -> float | None:
    """Return the seconds from a change until a tier is back within its target for first tokens.

    The earliest arrival from which on IN_TARGET of the tier's requests are within the target,
    those that got no token counting as late; None: that never happens before ``end_s``.
    """
    later = sorted(
        (r.at_s, r.ttft_s is not None and r.ttft_s <= tier.ttft_target_s)
        for r in records
        if r.tier == tier.name
        and r.opted_in
        and change_s <= r.at_s < end_s
        and r.outcome is not Outcome.LEFT
    )
    good, answer = 0, None
    for count, (at_s, is_good) in enumerate(reversed(later), 1):
        good += is_good
        if is_good and good >= IN_TARGET * count:
            answer = at_s - change_s
    return answer


def settle_s(samples: Sequence[tuple[float, float]], change_s: float, end_s: float) -> float | None:
    """Return the seconds from a change until a sampled value stays near where it ends up.

    That is the mean over the last third before ``end_s``, give or take BAND; None: too few samples,
    or it does not stay there.
    """
    late_s = end_s - (end_s - change_s) / 3
    late = [value for at_s, value in samples if late_s <= at_s < end_s]
    if not late:
        return None
    goal = sum(late) / len(late)
    outside = [
        at_s
        for at_s, value in samples
        if change_s <= at_s < end_s and abs(value - goal) > BAND * abs(goal)
    ]
    if not outside:
        return 0.0
    return outside[-1] - change_s if outside[-1] < late_s else None
