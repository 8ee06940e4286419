"""What the load test reads: event streams, metrics pages, states; and engines in virtual time."""

import pytest

from ciuicflow.testing.engine_api import parse_chat
from ciuicflow.testing.engine_profile import PROFILES
from loadtest.calibrate import Tuning
from loadtest.capacity import capacity_rps, replay_reference, replay_rps
from loadtest.events import EventReader, Usage
from loadtest.records import Outcome, Record
from loadtest.samples import EngineSample, LimitSample, read_engine, read_limit
from loadtest.workload import LENGTHS

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
THOUGHT = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm"}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def test_only_events_with_text_are_tokens() -> None:
    reader = EventReader()
    assert reader.feed(ROLE + b": keep-alive\n\n" + TOKEN + THOUGHT + TOKEN) == 3
    assert reader.feed(USAGE + DONE) == 0
    assert (reader.is_done, reader.is_broken) == (True, False)
    assert reader.usage == Usage(prompt_tokens=7, completion_tokens=3)


def test_cuts_anywhere_change_nothing() -> None:
    reader = EventReader()
    stream = ROLE + TOKEN * 3 + USAGE + DONE
    assert sum(reader.feed(stream[at : at + 1]) for at in range(len(stream))) == 3
    assert reader.is_done


def test_a_stream_that_ends_early_is_not_done() -> None:
    reader = EventReader()
    reader.feed(TOKEN)
    assert not reader.is_done


@pytest.mark.parametrize(
    "event", [b'data: {"error":{"message":"gone"}}\n\n', b"data: nonsense\n\n"]
)
def test_an_error_in_the_stream_breaks_it(event: bytes) -> None:
    reader = EventReader()
    reader.feed(TOKEN + event + DONE)
    assert reader.is_broken


def test_an_engines_metrics_are_read_with_labels_added_up() -> None:
    page = (
        "# HELP vllm:num_requests_waiting Waiting.\n"
        'vllm:num_requests_waiting{model_name="a",priority="0"} 2.0\n'
        'vllm:num_requests_waiting{model_name="a",priority="1"} 3.0\n'
        'vllm:num_requests_running{model_name="a"} 8.0\n'
        'vllm:prompt_tokens_total{model_name="a"} 1e3\n'
        'vllm:generation_tokens_total{model_name="a"} 500.0\n'
    )
    assert read_engine(page) == EngineSample(waiting=5.0, running=8.0, spent_tokens=1500.0)


def test_llama_cpps_metrics_are_read_too() -> None:
    page = (
        "llamacpp:prompt_tokens_total 40\nllamacpp:tokens_predicted_total 2\n"
        "llamacpp:requests_processing 1\nllamacpp:requests_deferred 6\n"
    )
    assert read_engine(page) == EngineSample(waiting=6.0, running=1.0, spent_tokens=42.0)


def test_a_page_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no token counts"):
        read_engine("up 1\n")


def test_the_limit_is_that_of_the_first_endpoint() -> None:
    endpoint = {"limit_requests": 8.5, "limit_tokens": None, "limit_prefill_tokens": 900.0}
    assert read_limit({"flow": {"endpoints": [endpoint]}}) == LimitSample(8.5, None, 900.0)
    assert read_limit({"flow": {"endpoints": []}}) is None
    assert read_limit({"endpoints": [1]}) is None


def test_the_best_static_limit_has_the_highest_goodput_and_is_the_lower_of_equals() -> None:
    assert Tuning(60.0, {4: 1.0, 8: 2.0, 16: 2.0, 32: 0.5}).best == 8


def test_the_capacity_of_an_emulated_engine_is_a_number_and_not_a_matter_of_luck() -> None:
    rps = capacity_rps(PROFILES["slot_bound"], LENGTHS["slot_bound"])
    assert rps == capacity_rps(PROFILES["slot_bound"], LENGTHS["slot_bound"])
    assert rps == pytest.approx(5.45, rel=0.03)  # as tests/simulation has it


def test_a_replay_is_bound_by_the_arithmetic_of_the_engine() -> None:
    """8 slots, 100 tokens each: a step of 6 ms + 8 x 0.35 ms makes 8 tokens; prompts cost 5 ms."""
    rps = replay_rps(PROFILES["slot_bound"], [(40, 100)] * 300)
    assert rps == pytest.approx(1 / (100 * 0.0088 / 8 + 0.005), rel=0.05)


def _served(count: int) -> list[Record]:
    return [
        Record(id=i, tier="gold", tenant="t", opted_in=True, at_s=0.0, outcome=Outcome.COMPLETED,
               end_s=1.0, prompt_tokens=40, tokens=100)
        for i in range(count)
    ]  # fmt: skip


def test_the_reference_is_what_the_engine_does_with_the_served_requests() -> None:
    reference = replay_reference(PROFILES["slot_bound"])
    assert reference(_served(300)) == pytest.approx(140 / (100 * 0.0088 / 8 + 0.005), rel=0.05)


def test_a_handful_of_requests_is_no_reference() -> None:
    assert replay_reference(PROFILES["slot_bound"])(_served(10)) is None


def test_an_emulated_engine_answers_as_long_as_it_is_told_without_a_cap() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"answer_tokens":123}'
    job = parse_chat(body, seed=0, reasoning=False)
    assert (len(job.pieces), job.finish_reason) == (123, "stop")
