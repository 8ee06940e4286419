"""SLA tiers and the settings of flow control: strict immutable records, defaults included."""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Entries = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9_-]+$")]


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one class of callers is promised."""

    name: Name
    rank: Annotated[int, msgspec.Meta(ge=0, le=1000)]
    """0 is served first."""
    ttft_target_s: Seconds
    """Time to first token, from arrival; also the order of requests without a deadline."""
    itl_target_s: Seconds
    """Mean time between tokens that an endpoint's load is held to while the tier is on it."""
    max_wait_s: Seconds
    """Longest time in the queue; what would wait longer is refused at once.

    Somewhat below `ttft_target_s`, so that what is served is served within the target.
    """
    floor: Share = 0.0
    """Part of the dispatched tokens that it gets while it has work, whatever waits above it."""
    ageing_share: Share = 0.0
    """Further part while its oldest request has waited for half of `max_wait_s`."""
    queue_entries: Entries = 10_000


DEFAULT_TIERS: Final = (
    TierConfig(name="gold", rank=0, ttft_target_s=2.0, itl_target_s=0.2, max_wait_s=1.8),
    TierConfig(
        name="silver", rank=1, ttft_target_s=6.0, itl_target_s=0.4, max_wait_s=5.0, floor=0.15
    ),
    TierConfig(
        name="bronze", rank=2, ttft_target_s=30.0, itl_target_s=1.0, max_wait_s=25.0,
        floor=0.1, ageing_share=0.05,
    ),
)  # fmt: skip


class FlowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of flow control. ValueError for values that do not fit together."""

    tiers: tuple[TierConfig, ...] = DEFAULT_TIERS
    default_tier: str = "silver"
    queue_entries: Entries = 50_000
    """Bound over all tiers; when it is reached a higher tier displaces a lower one."""
    queue_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 40)] = 512 << 20
    """Bound on the bodies of all queued requests; one tenant may hold half of it."""
    headroom: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.0
    """Part of every limit that only the first tier may use: lower TTFT, lower throughput."""
    opted_in_share: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.3
    """Part of what is in flight that requests which did not opt in cannot take away."""
    output_weight: Annotated[float, msgspec.Meta(ge=0, le=100)] = 2.0
    """How much an output token costs, in uncached prompt tokens (2: VTC, arXiv 2401.00588)."""

    def __post_init__(self) -> None:
        check_tiers(self.tiers)
        if self.default_tier not in {tier.name for tier in self.tiers}:
            raise ValueError(f"default_tier: {self.default_tier!r} is not one of the tiers")

    @property
    def ranked(self) -> list[TierConfig]:
        """The tiers, the first served first."""
        return sorted(self.tiers, key=lambda tier: tier.rank)


def check_tiers(tiers: Sequence[TierConfig]) -> None:
    """Check what types cannot say. Raises ValueError."""
    if not tiers:
        raise ValueError("tiers: at least one is needed")
    for field in ("name", "rank"):
        values = [getattr(tier, field) for tier in tiers]
        if len(set(values)) != len(values):
            raise ValueError(f"tiers: two have the same {field}")
    promised = sum(tier.floor + tier.ageing_share for tier in tiers)
    if promised > 1:
        raise ValueError(
            f"tiers: floors and ageing shares add up to {promised:.2f}; expected at most 1"
        )
