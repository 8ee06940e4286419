"""The cost model: estimates from bytes and the past, corrected by reports."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuicflow.flowcontrol.cost import Cost, Usage
from ciuicflow.flowcontrol.cost_model import MAX_TOKENS, CostModel


def taught(usage: Usage, body_bytes: int = 4000, times: int = 60) -> CostModel:
    model = CostModel(output_weight=2.0)
    for _ in range(times):
        model.learn("t", body_bytes, usage)
    return model


def test_before_anything_is_known_four_bytes_are_a_token() -> None:
    assert CostModel(2.0).estimate("t", 4000, None) == Cost(1000 + 2.0 * 256, 1000, 1256)


def test_a_small_bound_on_the_answer_is_believed_and_a_large_one_is_not() -> None:
    model = CostModel(2.0)
    assert model.estimate("t", 400, 10).held_tokens == 110
    assert model.estimate("t", 400, 100_000).held_tokens == 100 + 256


def test_bytes_per_token_and_answers_follow_what_engines_report() -> None:
    model = taught(Usage(prompt_tokens=2000, cached_tokens=0, completion_tokens=50))
    cost = model.estimate("t", 4000, None)
    assert cost.prefill_tokens == pytest.approx(2000, rel=0.01)
    assert cost.held_tokens == pytest.approx(2050, rel=0.01)


def test_cached_prompt_tokens_are_not_charged_but_still_held() -> None:
    model = taught(Usage(prompt_tokens=1000, cached_tokens=900, completion_tokens=100))
    cost = model.estimate("t", 4000, None)
    assert cost.prefill_tokens == pytest.approx(100, rel=0.05)
    assert cost.held_tokens == pytest.approx(1100, rel=0.01)
    assert cost.work == pytest.approx(300, rel=0.05)


def test_each_tenant_has_its_own_past() -> None:
    model = taught(Usage(1000, 0, 2000))
    for _ in range(60):
        model.learn("short", 4000, Usage(1000, 0, 10))
    assert model.estimate("short", 4000, None).held_tokens == pytest.approx(1010, rel=0.01)
    assert model.estimate("t", 4000, None).held_tokens == pytest.approx(3000, rel=0.01)


def test_a_tenant_not_seen_before_is_judged_by_all_others() -> None:
    model = taught(Usage(1000, 0, 2000))
    assert model.estimate("new", 4000, None).held_tokens == pytest.approx(3000, rel=0.01)


def test_the_actual_cost_is_that_of_the_report() -> None:
    assert CostModel(2.0).actual(Usage(1000, 400, 50)) == Cost(700.0, 600, 1050)


def test_one_body_full_of_images_does_not_spoil_the_estimates_of_text() -> None:
    model = taught(Usage(1000, 0, 100))
    model.learn("t", 40_000_000, Usage(1500, 0, 100))
    assert model.estimate("t", 4000, None).prefill_tokens > 850


def test_a_body_of_many_megabytes_is_not_taken_for_millions_of_tokens() -> None:
    model = CostModel(2.0)
    assert model.estimate("t", 40_000_000, None).prefill_tokens == 32_768
    model.learn("t", 400_000, Usage(120_000, 0, 10))
    assert model.estimate("t", 40_000_000, None).prefill_tokens == 120_000


def test_the_least_recently_seen_tenants_are_forgotten() -> None:
    model = CostModel(2.0, max_tenants=2)
    for tenant in ("a", "b", "a", "c"):
        model.learn(tenant, 4000, Usage(1000, 0, 10))
    assert set(model._tenants) == {"a", "c"}


@settings(deadline=None)
@given(
    body_bytes=st.integers(0, 1 << 40),
    max_tokens=st.none() | st.integers(-(1 << 62), 1 << 62),
    prompt=st.integers(-(1 << 62), 1 << 62),
    cached=st.integers(-(1 << 62), 1 << 62),
    output=st.integers(-(1 << 62), 1 << 62),
)
def test_no_claim_makes_an_estimate_nonsense(
    body_bytes: int, max_tokens: int | None, prompt: int, cached: int, output: int
) -> None:
    model = CostModel(2.0)
    model.learn("t", body_bytes, Usage(prompt, cached, output))
    cost = model.estimate("t", body_bytes, max_tokens)
    assert 1 <= cost.prefill_tokens <= cost.held_tokens <= 2 * MAX_TOKENS
    assert cost.prefill_tokens <= cost.work <= 10 * MAX_TOKENS
