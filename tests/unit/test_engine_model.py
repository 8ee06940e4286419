"""The engine model with literal times: a step is 0.5 s + prefill/64 s + decoding * 0.125 s."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.testing.engine_model import (
    PROFILES,
    EngineModel,
    EngineProfile,
    EngineRequest,
    TokenEvent,
)
from ciuicflow.testing.engine_text import Speech, count_tokens, cut_at_stop, hash_blocks

PROFILE = EngineProfile(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    kv_capacity_tokens=1024,
    step_base_s=0.5,
    prefill_tokens_per_s=64.0,
    decode_s_per_seq=0.125,
)


def engine(**changes: object) -> EngineModel:
    return EngineModel(msgspec.structs.replace(PROFILE, **changes))


def request(
    name: str, prompt: int = 32, output: int = 1, priority: int = 0, text: str = ""
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_tokens=count_tokens(text) if text else prompt,
        output_tokens=output,
        priority=priority,
        block_hashes=hash_blocks(text, PROFILE.block_tokens) if text else (),
    )


def run(model: EngineModel, until: float = float("inf")) -> list[tuple[float, TokenEvent]]:
    """Step until nothing is left or the time is over: each token with the time it came out."""
    out: list[tuple[float, TokenEvent]] = []
    while (at := model.next_step_at()) is not None and at <= until:
        out += [(at, event) for event in model.step(at)]
    return out


def times(out: list[tuple[float, TokenEvent]], name: str) -> list[float]:
    return [at for at, event in out if event.request_id == name]


# -- steps -----------------------------------------------------------------------------------


def test_an_idle_engine_has_nothing_to_do() -> None:
    model = engine()
    assert model.next_step_at() is None
    assert model.step(1.0) == []


def test_one_request_is_prefilled_and_then_decoded_token_by_token() -> None:
    model = engine()
    model.submit(request("a", prompt=32, output=3), 10.0)
    out = run(model)
    # Prefill 0.5 + 32/64 = 1.0 s; each further token 0.5 + 0.125 s.
    assert times(out, "a") == [11.0, 11.625, 12.25]
    assert [event.position for _, event in out] == [0, 1, 2]
    assert [event.finished for _, event in out] == [False, False, True]


def test_requests_that_are_there_together_share_a_step() -> None:
    model = engine()
    model.submit(request("a", prompt=32), 0.0)
    model.submit(request("b", prompt=32), 0.0)
    out = run(model)
    assert times(out, "a") == times(out, "b") == [1.5]


def test_a_request_that_comes_during_a_step_joins_the_next_one() -> None:
    model = engine()
    model.submit(request("a", prompt=32, output=2), 0.0)
    assert model.step(0.0) == []
    model.submit(request("b", prompt=32), 0.5)
    out = run(model)
    # The second step decodes a and prefills b: 0.5 + 0.125 + 0.5.
    assert times(out, "a") == [1.0, 2.125]
    assert times(out, "b") == [2.125]


@pytest.mark.parametrize(("batch", "step_s"), [(1, 0.625), (4, 1.0), (8, 1.5)])
def test_decoding_slows_with_the_batch(batch: int, step_s: float) -> None:
    model = engine()
    for number in range(batch):
        model.submit(request(f"r{number}", prompt=8, output=3), 0.0)
    at = times(run(model), "r0")
    assert at[2] - at[1] == step_s


def test_a_long_prompt_is_prefilled_in_chunks_and_decoding_goes_on_beside_it() -> None:
    model = engine()
    model.submit(request("short", prompt=32, output=5), 0.0)
    model.step(0.0)
    model.submit(request("long", prompt=126), 0.0)
    out = run(model)
    # The budget of 64 is one decode and 63 prompt tokens: two steps of 0.5 + 0.125 + 63/64 s.
    step_s = 0.5 + 0.125 + 63 / 64
    assert times(out, "short")[:3] == [1.0, 1.0 + step_s, 1.0 + 2 * step_s]
    assert times(out, "long") == [1.0 + 2 * step_s]


def test_slots_bound_the_batch_and_the_rest_waits_in_order() -> None:
    model = engine(max_num_seqs=2)
    for name in "abcd":
        model.submit(request(name, prompt=16, output=2), 0.0)
    model.step(0.0)
    assert (model.snapshot().running, model.snapshot().waiting) == (2, 2)
    assert [event.request_id for _, event in run(model)] == list("ababcdcd")


def test_a_late_step_starts_when_it_was_due() -> None:
    model = engine(step_base_s=0.01, decode_s_per_seq=0.0)
    model.submit(request("a", prompt=64, output=3), 0.0)
    model.step(0.0)
    due = model.next_step_at()
    assert due == 1.01
    model.step(due + 0.03)
    assert model.next_step_at() == pytest.approx(due + 0.01)


def test_an_engine_that_stood_still_does_not_burst() -> None:
    model = engine(step_base_s=0.01, decode_s_per_seq=0.0)
    model.submit(request("a", prompt=64, output=3), 0.0)
    model.step(0.0)
    model.step(100.0)
    assert model.next_step_at() == pytest.approx(100.0 - 0.05 + 0.01)


# -- speed -----------------------------------------------------------------------------------


def test_speed_scales_every_step() -> None:
    model = engine(speed=2.0)
    model.submit(request("a", prompt=32, output=2), 0.0)
    assert times(run(model), "a") == [0.5, 0.8125]


def test_a_change_of_speed_holds_from_that_moment_on() -> None:
    model = engine()
    model.submit(request("a", prompt=32, output=2), 0.0)
    model.step(0.0)
    model.set_speed(0.5, 0.5)
    # Half of the first second is done; the other half takes a second.
    assert times(run(model), "a") == [1.5, 2.75]


def test_jitter_is_bounded_and_repeats_with_its_seed() -> None:
    def token_times(seed: int) -> list[float]:
        model = EngineModel(msgspec.structs.replace(PROFILE, jitter=0.1), seed)
        model.submit(request("a", prompt=32, output=5), 0.0)
        return times(run(model), "a")

    assert token_times(1) == token_times(1) != token_times(2)
    at = token_times(1)
    assert all(0.5625 <= later - earlier <= 0.6875 for earlier, later in pairwise(at))


# -- KV cache --------------------------------------------------------------------------------


def test_a_full_kv_cache_keeps_requests_waiting() -> None:
    model = engine(kv_capacity_tokens=64)
    model.submit(request("a", prompt=47, output=1), 0.0)
    model.submit(request("b", prompt=17, output=1), 0.0)
    model.step(0.0)
    assert (model.snapshot().running, model.snapshot().waiting) == (1, 1)
    assert model.snapshot().kv_usage == 0.75
    out = run(model)
    assert times(out, "a") < times(out, "b")
    assert model.snapshot().kv_usage == 0.0


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    model = engine(kv_capacity_tokens=64)
    model.submit(request("a", prompt=32, output=2), 0.0)
    model.submit(request("big", prompt=48), 0.0)
    model.submit(request("small", prompt=16), 0.0)
    out = run(model)
    assert times(out, "a")[-1] < times(out, "big")[0] <= times(out, "small")[0]


def test_decoding_without_room_preempts_the_newest_which_finishes_later() -> None:
    model = engine(kv_capacity_tokens=64)
    model.submit(request("old", prompt=30, output=10), 0.0)
    model.submit(request("new", prompt=30, output=10), 0.0)
    out = run(model)
    # Both hold 32 tokens; the third token of each needs a block more, which is not there.
    assert model.snapshot().preemptions >= 1
    assert times(out, "old")[-1] < times(out, "new")[-1]
    for name in ("old", "new"):
        positions = [event.position for _, event in out if event.request_id == name]
        assert positions == list(range(10))


def test_a_request_that_can_never_fit_is_refused() -> None:
    model = engine(kv_capacity_tokens=64)
    with pytest.raises(ValueError, match="do not fit into 64 tokens"):
        model.submit(request("a", prompt=60, output=5), 0.0)
    assert model.next_step_at() is None


# -- cancel ----------------------------------------------------------------------------------


def test_cancel_frees_blocks_and_slot_at_once_and_drops_the_token_in_flight() -> None:
    model = engine(max_num_seqs=1)
    model.submit(request("a", prompt=32, output=5), 0.0)
    model.submit(request("b", prompt=32), 0.0)
    model.step(0.0)
    assert model.cancel("a")
    assert model.snapshot().kv_usage == 0.0
    out = run(model)
    assert times(out, "a") == []
    # The step in flight runs to its end at 1.0, then b gets the slot.
    assert times(out, "b") == [2.0]


def test_cancel_of_a_waiting_request_lets_the_next_one_run() -> None:
    model = engine(max_num_seqs=1)
    for name in "abc":
        model.submit(request(name), 0.0)
    assert model.cancel("b")
    assert [event.request_id for _, event in run(model)] == ["a", "c"]


def test_cancel_of_an_unknown_or_finished_request_changes_nothing() -> None:
    model = engine()
    model.submit(request("a"), 0.0)
    run(model)
    assert not model.cancel("a")
    assert not model.cancel("b")
    assert model.snapshot().cancelled == 0


def test_an_id_may_come_again_after_its_cancel_in_the_same_step() -> None:
    model = engine()
    model.submit(request("a", prompt=32), 0.0)
    model.step(0.0)
    model.cancel("a")
    model.submit(request("a", prompt=32), 0.5)
    assert times(run(model), "a") == [2.0]


def test_an_id_in_use_is_refused() -> None:
    model = engine()
    model.submit(request("a"), 0.0)
    with pytest.raises(ValueError, match="'a' is in use"):
        model.submit(request("a"), 0.0)


# -- order -----------------------------------------------------------------------------------


def order(scheduling: str) -> list[str]:
    model = engine(max_num_seqs=1, scheduling=scheduling)
    for name, priority in [("low", 9), ("high", -1), ("mid", 5), ("mid2", 5)]:
        model.submit(request(name, priority=priority), 0.0)
    return [event.request_id for _, event in run(model)]


def test_lower_priority_values_go_first_and_equal_ones_in_order_of_arrival() -> None:
    assert order("priority") == ["high", "mid", "mid2", "low"]


def test_fcfs_ignores_priority() -> None:
    assert order("fcfs") == ["low", "high", "mid", "mid2"]


def test_with_priorities_the_least_urgent_is_preempted() -> None:
    model = engine(kv_capacity_tokens=64, scheduling="priority")
    model.submit(request("background", prompt=30, output=10, priority=5), 0.0)
    model.submit(request("urgent", prompt=30, output=10, priority=0), 0.0)
    out = run(model)
    assert times(out, "urgent")[-1] < times(out, "background")[-1]


# -- prefix cache ----------------------------------------------------------------------------

SHARED = "s" * 128  # 32 tokens, 2 blocks


def test_a_repeated_prefix_costs_no_prefill() -> None:
    model = engine(prefix_cache=True)
    model.submit(request("first", text=SHARED + "x" * 64), 0.0)
    run(model)
    model.submit(request("second", text=SHARED + "y" * 64), 10.0)
    out = run(model)
    # 16 of 48 prompt tokens are computed: 0.5 + 16/64.
    assert out == [(10.75, TokenEvent("second", 0, finished=True, cached_tokens=32))]
    snapshot = model.snapshot()
    assert (snapshot.prefix_hits_tokens, snapshot.prefix_queries_tokens) == (32, 96)


def test_an_equal_prompt_still_computes_its_last_block() -> None:
    model = engine(prefix_cache=True)
    model.submit(request("first", text=SHARED), 0.0)
    run(model)
    model.submit(request("second", text=SHARED), 10.0)
    assert run(model)[0][1].cached_tokens == 16


def test_without_a_prefix_cache_nothing_is_spared() -> None:
    model = engine()
    for at in (0.0, 10.0):
        model.submit(request("a", text=SHARED), at)
        assert run(model) == [(at + 1.0, TokenEvent("a", 0, finished=True, cached_tokens=0))]


def test_running_requests_hold_a_shared_prefix_once() -> None:
    model = engine(prefix_cache=True)
    model.submit(request("first", text=SHARED + "x" * 64, output=9), 0.0)
    run(model, until=1.5)
    one = model.snapshot().kv_usage
    model.submit(request("second", text=SHARED + "y" * 64, output=9), 1.5)
    run(model, until=2.75)
    assert model.snapshot().running == 2
    # Each holds three prompt blocks and one for its answer; two of them are common.
    assert (one, model.snapshot().kv_usage) == (4 / 64, 6 / 64)


def test_the_least_recently_used_prefix_gives_way() -> None:
    model = engine(prefix_cache=True, kv_capacity_tokens=128)
    # 3, 3 and 5 of 8 blocks.
    texts = {"a": "a" * 192, "b": "b" * 192, "c": "c" * 320}

    def cached(name: str, at: float) -> int:
        model.submit(request(name, text=texts[name]), at)
        return run(model)[0][1].cached_tokens

    assert [cached(name, 10.0) for name in "ab"] == [0, 0]
    assert cached("a", 20.0) == 32
    assert cached("c", 30.0) == 0  # takes space from the end of b
    assert cached("a", 40.0) == 32
    assert cached("b", 50.0) < 32


# -- conservation ----------------------------------------------------------------------------

PROFILES_FOR_PROPERTY = st.builds(
    EngineProfile,
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(4, 64),
    kv_capacity_tokens=st.integers(128, 512),
    scheduling=st.sampled_from(["fcfs", "priority"]),
    prefix_cache=st.booleans(),
    jitter=st.sampled_from([0.0, 0.3]),
)
ARRIVALS = st.lists(
    st.tuples(
        st.floats(0, 0.5),  # seconds after the one before
        st.integers(1, 80),  # prompt tokens
        st.integers(1, 40),  # output tokens
        st.integers(-2, 2),  # priority
        st.sampled_from("xy"),  # what the prompt is made of: prefixes repeat
        st.one_of(st.none(), st.floats(0, 2)),  # cancelled so many seconds after arrival
    ),
    max_size=20,
)


@given(PROFILES_FOR_PROPERTY, ARRIVALS)
def test_every_request_ends_exactly_once_and_no_token_or_block_is_lost(
    profile: EngineProfile,
    arrivals: list[tuple[float, int, int, int, str, float | None]],
) -> None:
    model = EngineModel(profile, seed=1)
    planned: list[tuple[float, int, str, EngineRequest | None]] = []
    now = 0.0
    for number, (gap, prompt, output, priority, letter, cancel_after) in enumerate(arrivals):
        now += gap
        new = request(f"r{number}", output=output, priority=priority, text=letter * 4 * prompt)
        planned.append((now, 0, new.request_id, new))
        if cancel_after is not None:
            planned.append((now + cancel_after, 1, new.request_id, None))

    out: list[TokenEvent] = []
    cancelled = set()
    for at, _, name, new_request in sorted(planned, key=lambda plan: plan[:3]):
        out += [event for _, event in run(model, until=at)]
        if new_request is not None:
            model.submit(new_request, at)
        elif model.cancel(name):
            cancelled.add(name)
    out += [event for _, event in run(model)]

    finished = [event.request_id for event in out if event.finished]
    everyone = {new.request_id: new for _, _, _, new in planned if new is not None}
    assert len(finished) == len(set(finished))
    assert set(finished) | cancelled == set(everyone)
    assert not set(finished) & cancelled
    for name, new in everyone.items():
        positions = [event.position for event in out if event.request_id == name]
        assert positions == list(range(len(positions)))
        assert len(positions) == new.output_tokens or name in cancelled
    snapshot = model.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.kv_usage) == (0, 0, 0.0)
    assert (snapshot.finished, snapshot.cancelled) == (len(finished), len(cancelled))
    assert snapshot.generation_tokens == len(out)


# -- profiles and texts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens must be at least max_num_seqs"),
        ({"block_tokens": 8}, "block_tokens"),
        ({"kv_capacity_tokens": 15}, "kv_capacity_tokens"),
        ({"speed": 0.0}, "speed must be more than 0"),
        ({"jitter": 1.0}, "jitter"),
    ],
)
def test_a_profile_that_cannot_work_is_refused(change: dict[str, object], message: str) -> None:
    values = {**msgspec.structs.asdict(PROFILE), **change}
    with pytest.raises(ValueError, match=message):
        EngineProfile(**values)


@pytest.mark.parametrize("name", PROFILES)
def test_each_named_profile_serves_a_request(name: str) -> None:
    model = EngineModel(PROFILES[name])
    model.submit(request("a", prompt=1000, output=10), 0.0)
    assert len(run(model)) == 10


def test_an_answer_depends_on_prompt_seed_and_position_alone() -> None:
    assert Speech("hello", 1).pieces(40) == Speech("hello", 1).pieces(50)[:40]
    assert Speech("hello", 1).pieces(40) != Speech("hello", 2).pieces(40)
    assert Speech("hello", 1).pieces(40) != Speech("hello!", 1).pieces(40)
    assert 16 <= Speech("hello", 1).natural_tokens <= 64


def test_a_block_hash_covers_the_prompt_up_to_its_end() -> None:
    blocks = hash_blocks("a" * 128 + "b", 16)
    assert len(blocks) == 2
    assert hash_blocks("a" * 127 + "b", 16)[0] == blocks[0]
    assert hash_blocks("b" + "a" * 127, 16)[1] != blocks[1]


@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        (["zz"], None),
        (["c"], ["ab", ""]),
        (["bc"], ["a", ""]),
        (["de", "cd"], ["ab", ""]),
        (["bcde"], ["a", "", ""]),
    ],
)
def test_text_ends_before_the_stop_string_that_is_complete_first(
    stops: list[str], kept: list[str] | None
) -> None:
    assert cut_at_stop(["ab", "cd", "ef", "gh"], stops) == kept
