"""The limits, round by round, with literal signals."""

from math import inf
from typing import Any

import pytest

from ciuicflow.flowcontrol.limit import AdaptiveLimit
from ciuicflow.flowcontrol.signals import Bound, Signals

REQUESTS, TOKENS = frozenset({Bound.REQUESTS}), frozenset({Bound.TOKENS})
PREFILL, HEADROOM = frozenset({Bound.PREFILL}), frozenset({Bound.HEADROOM})


def seen(**values: Any) -> Signals:
    """A second in which 8 requests were served and nothing happened."""
    calm: dict[str, Any] = {
        "seconds": 1.0, "answers": 4, "bounds": frozenset(), "requests": 8.0, "tokens": 8000.0,
        "serving": 8, "serving_tokens": 8000, "blocked": 0.0, "line_s": 0.0, "line_max_s": 0.1,
        "stalls": 0, "late": 0.0, "hidden": 0, "itl_s": 0.01, "itl_target_s": 0.2,
        "lifetime_s": 2.0, "usual_prefill": 500.0, "foreign": False,
    }  # fmt: skip
    return Signals(**{**calm, **values})


def full(requests: int = 8) -> AdaptiveLimit:
    """A limit that has just found out that the engine serves so many requests."""
    limit = AdaptiveLimit()
    held = {"requests": float(requests), "serving": requests, "tokens": 1000.0 * requests,
            "serving_tokens": 1000 * requests}  # fmt: skip
    for _ in range(6):
        limit.update(seen(bounds=REQUESTS, **held))
    limit.update(seen(blocked=1.0, **held))
    assert requests <= limit.requests <= requests + 1
    assert not limit.starting
    return limit


def test_it_starts_with_a_few_requests_and_no_idea_of_tokens() -> None:
    limit = AdaptiveLimit()
    assert limit.requests == 8
    assert limit.tokens == inf


def test_it_doubles_each_round_until_the_engine_is_first_seen_full() -> None:
    limit = AdaptiveLimit()
    for expected in (16, 32, 64):
        limit.update(seen(bounds=REQUESTS))
        assert limit.requests == expected


def test_it_does_not_double_before_an_answer_has_shown_anything() -> None:
    limit = AdaptiveLimit()
    limit.update(seen(bounds=REQUESTS, answers=0))
    assert limit.requests == 8


def test_it_does_not_grow_while_it_is_not_in_the_way() -> None:
    limit = AdaptiveLimit()
    limit.update(seen())
    assert limit.requests == 8


def test_a_full_engine_brings_it_down_to_what_is_served() -> None:
    limit = AdaptiveLimit()
    for _ in range(5):
        limit.update(seen(bounds=REQUESTS))
    limit.update(seen(requests=20.0, serving=18, blocked=0.9))
    assert 18 <= limit.requests <= 21
    assert limit.tokens < inf


def test_a_little_blocking_at_the_start_does_not_end_the_doubling() -> None:
    limit = AdaptiveLimit()
    limit.update(seen(bounds=REQUESTS, blocked=0.3))
    assert limit.requests == 16


def test_below_the_limit_a_little_blocking_proves_nothing() -> None:
    limit = full()
    before = limit.requests, limit.tokens
    for _ in range(20):
        limit.update(seen(requests=3.0, tokens=3000.0, serving=3, blocked=0.3))
    assert (limit.requests, limit.tokens) == before


def test_it_never_falls_below_what_was_just_served_at_once() -> None:
    limit = full()
    for _ in range(100):
        limit.update(seen(bounds=REQUESTS, blocked=1.0))
    assert limit.requests >= 8


def test_it_follows_an_engine_that_serves_fewer_than_before() -> None:
    limit = full(16)
    for _ in range(60):
        held = min(16.0, limit.requests)
        limit.update(seen(bounds=REQUESTS, blocked=1.0, serving=4, requests=held))
    assert limit.requests < 9


def test_nothing_is_lowered_again_before_the_last_decrease_took_effect() -> None:
    limit = full()
    before = limit.requests
    for _ in range(20):
        limit.update(seen(bounds=REQUESTS, blocked=1.0, requests=12.0, serving=2))
    assert limit.requests == before


def test_after_a_decrease_it_grows_slowly_and_then_ever_faster() -> None:
    limit = full()
    sizes = [limit.requests]
    for _ in range(16):
        held = sizes[-1]
        limit.update(seen(bounds=REQUESTS, requests=held, serving=int(held)))
        sizes.append(limit.requests)
    early, late = sizes[2] - sizes[0], sizes[-1] - sizes[-3]
    assert early < 2
    assert late > 4 * early
    assert sizes[-1] > 2 * sizes[0]


def test_the_limit_that_was_in_the_way_is_the_one_that_grows() -> None:
    limit = full()
    requests, tokens = limit.requests, limit.tokens
    limit.update(seen(bounds=TOKENS))
    assert limit.requests == requests
    assert tokens < limit.tokens < 1.2 * tokens


def test_requests_set_aside_while_they_run_lower_the_limit_on_tokens() -> None:
    limit = full()
    limit.update(seen(stalls=2, tokens=7000.0))
    assert limit.tokens == pytest.approx(0.95 * 7000)
    assert limit.requests >= 8


def test_requests_set_aside_in_the_next_round_do_not_lower_it_again() -> None:
    limit = full()
    limit.update(seen(stalls=2, lifetime_s=60.0))
    before = limit.tokens
    limit.update(seen(stalls=2, lifetime_s=60.0))
    assert limit.tokens == before


def test_a_queue_that_the_engine_reports_lowers_it_though_nothing_was_seen() -> None:
    limit = full()
    for _ in range(30):
        held = limit.requests
        limit.update(
            seen(bounds=REQUESTS, hidden=max(0, round(held) - 4), requests=held, serving=9)
        )
    assert limit.requests < 6


def test_answers_in_one_piece_that_take_too_long_lower_it() -> None:
    limit = full(64)
    for _ in range(12):
        held = limit.requests
        late = held / 20
        limit.update(seen(bounds=REQUESTS, late=late, requests=held, serving=int(held)))
    assert 10 < limit.requests < 24


def test_a_line_of_prompts_lowers_only_the_limit_on_prompts() -> None:
    limit = full()
    requests, tokens, prefill = limit.requests, limit.tokens, limit.prefill_tokens
    limit.update(seen(line_s=0.3))
    assert limit.prefill_tokens < prefill
    assert (limit.requests, limit.tokens) == (requests, tokens)


def test_the_limit_on_prompts_doubles_at_the_start_and_creeps_later() -> None:
    limit = AdaptiveLimit()
    limit.update(seen(bounds=PREFILL))
    assert limit.prefill_tokens == 4096
    limit.update(seen(line_s=0.2))
    assert limit.prefill_tokens == 2048  # at the start it is cut to what the line may be
    limit.update(seen(bounds=PREFILL))
    assert limit.prefill_tokens == pytest.approx(2048 * 1.1)


def test_while_the_engine_leaves_requests_alone_more_prompts_would_not_help() -> None:
    limit = AdaptiveLimit()
    limit.update(seen(bounds=PREFILL, blocked=0.4))
    assert limit.prefill_tokens == 2048


def test_the_limit_on_prompts_comes_back_from_the_bottom_in_one_step() -> None:
    limit = AdaptiveLimit()
    for _ in range(60):
        limit.update(seen(line_s=1.0))
    assert limit.prefill_tokens == 1
    limit.update(seen(bounds=PREFILL))
    assert limit.prefill_tokens > 500


# The target between tokens.


def steady(limit: AdaptiveLimit, per_request_s: float, target_s: float, rounds: int = 80) -> None:
    """An engine whose step takes 5 ms, and more for each request."""
    for _ in range(rounds):
        held = limit.requests
        itl_s = 0.005 + per_request_s * held
        limit.update(
            seen(bounds=REQUESTS, requests=held, serving=int(held), tokens=1000 * held,
                 itl_s=itl_s, itl_target_s=target_s)
        )  # fmt: skip


def test_the_time_between_tokens_settles_just_below_its_target() -> None:
    limit = AdaptiveLimit()
    steady(limit, per_request_s=0.0005, target_s=0.04)
    itl_s = 0.005 + 0.0005 * limit.requests
    assert 0.034 < itl_s < 0.042


def test_a_target_that_a_few_requests_miss_is_not_pursued() -> None:
    limit = AdaptiveLimit()
    limit.update(seen(requests=1.0, serving=1, itl_s=0.0055, itl_target_s=0.004))
    steady(limit, per_request_s=0.0005, target_s=0.004, rounds=10)
    assert limit.requests > 100


def test_no_target_takes_more_than_three_quarters_of_the_requests() -> None:
    limit = full(100)
    limit.update(seen(requests=1.0, serving=1, itl_s=0.001))
    for _ in range(50):
        held = limit.requests
        limit.update(
            seen(bounds=REQUESTS, requests=held, serving=int(held), itl_s=0.05, itl_target_s=0.01)
        )
    assert 24 < limit.requests < 27


def test_the_limit_recovers_when_the_strict_tier_has_gone() -> None:
    limit = full(100)
    steady(limit, per_request_s=0.0005, target_s=0.02, rounds=40)
    assert limit.requests < 60
    steady(limit, per_request_s=0.0005, target_s=1.0, rounds=60)
    assert limit.requests > 90


# Bypass, headroom, ceilings.


def test_nothing_is_concluded_while_bypass_takes_more_than_its_part() -> None:
    limit = full()
    before = limit.requests, limit.tokens
    limit.update(seen(blocked=1.0, stalls=5, bounds=REQUESTS, foreign=True))
    assert (limit.requests, limit.tokens) == before


def test_what_only_headroom_holds_back_grows_no_further_than_was_served() -> None:
    limit = full()
    before = limit.requests
    for _ in range(50):
        limit.update(seen(bounds=HEADROOM, requests=6.0, serving=6))
    assert limit.requests == before
    for _ in range(50):
        limit.update(seen(bounds=HEADROOM, requests=12.0, serving=12))
    assert 12 <= limit.requests <= 14


def test_a_ceiling_holds_and_can_be_lifted() -> None:
    limit = AdaptiveLimit()
    limit.set_ceilings(4, 5000)
    limit.update(seen(bounds=REQUESTS))
    assert (limit.requests, limit.tokens) == (4, 5000)
    limit.set_ceilings(None, None)
    assert (limit.requests, limit.tokens) == (16, inf)


def test_one_request_may_always_go() -> None:
    limit = AdaptiveLimit()
    for _ in range(300):
        limit.update(seen(bounds=REQUESTS, requests=0.5, serving=0, hidden=1))
    assert limit.requests >= 1
