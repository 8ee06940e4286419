"""Outcomes, tiers and settings: closed sets and strict records."""

from typing import Any

import msgspec
import pytest
from support.verdicts import REFUSALS

from ciuicflow.flowcontrol.tiers import DEFAULT_TIERS, FlowConfig, TierConfig
from ciuicflow.gateway.responses import ANSWERS

GOLD, SILVER, BRONZE = DEFAULT_TIERS


def test_every_refusal_is_429_503_or_504() -> None:
    answers = [ANSWERS[outcome] for outcome in REFUSALS]
    assert {answer.status for answer in answers if answer} == {429, 503, 504}
    assert None not in answers


def test_the_default_tiers_are_gold_silver_and_bronze_in_this_order() -> None:
    ranked = sorted(FlowConfig().tiers, key=lambda tier: tier.rank)
    assert [tier.name for tier in ranked] == ["gold", "silver", "bronze"]


def test_the_default_tiers_serve_what_they_serve_within_their_targets() -> None:
    for tier in DEFAULT_TIERS:
        assert tier.max_wait_s < tier.ttft_target_s


def change(tier: TierConfig, **values: Any) -> TierConfig:
    return msgspec.structs.replace(tier, **values)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ((), "at least one"),
        ((GOLD, change(SILVER, rank=0)), "the same rank"),
        ((GOLD, change(SILVER, name="gold")), "the same name"),
        ((change(GOLD, floor=0.6), change(SILVER, floor=0.5)), r"add up to 1\.10"),
        ((GOLD, change(SILVER, floor=0.6, ageing_share=0.5)), r"add up to 1\.10"),
    ],
)
def test_tiers_that_do_not_fit_together_are_refused(
    tiers: tuple[TierConfig, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FlowConfig(tiers=tiers, default_tier="silver")


def test_a_default_tier_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'copper' is not one of the tiers"):
        FlowConfig(default_tier="copper")


def test_floors_may_promise_everything() -> None:
    FlowConfig(tiers=(change(GOLD, floor=0.5), change(SILVER, floor=0.5)))


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"queue_bytes": 10}, "$.queue_bytes"),
        ({"headroom": 0.95}, "$.headroom"),
        ({"headroom": -0.1}, "$.headroom"),
        ({"opted_in_share": 1.0}, "$.opted_in_share"),
        ({"colour": "red"}, "colour"),
        ({"tiers": [{"name": "gold", "rank": 0}]}, "$.tiers[0]"),
        ({"tiers": [{**msgspec.structs.asdict(GOLD), "floor": 1.5}]}, "$.tiers[0].floor"),
        ({"tiers": [{**msgspec.structs.asdict(GOLD), "max_wait_s": 0}]}, "$.tiers[0].max_wait_s"),
        ({"tiers": [{**msgspec.structs.asdict(GOLD), "name": "Gold!"}]}, "$.tiers[0].name"),
        ({"tiers": [{**msgspec.structs.asdict(GOLD), "queue_entries": 0}]}, "queue_entries"),
    ],
)
def test_a_setting_out_of_range_or_unknown_is_an_error_that_names_it(
    data: dict[str, Any], path: str
) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(data, FlowConfig)
    assert path in str(caught.value)
