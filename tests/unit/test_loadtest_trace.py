"""Traces in Mooncake's format, and the prompts that are made of them."""

import json

import pytest

from loadtest import trace
from loadtest.bodies import Style, request_bytes
from loadtest.trace import Line, read
from loadtest.workload import Planned

LINES = [
    b'{"timestamp": 2000, "input_length": 1024, "output_length": 100, "hash_ids": [0, 2]}\n',
    b"\n",
    b'{"timestamp": 0, "input_length": 700, "output_length": 7, "hash_ids": [0, 1]}\n',
]


def test_lines_are_read_in_the_order_of_their_times() -> None:
    assert read(LINES) == [Line(0, 700, 7, [0, 1]), Line(2000, 1024, 100, [0, 2])]


def test_a_line_that_is_no_request_is_named() -> None:
    with pytest.raises(ValueError, match="line 2 is not a request"):
        read([LINES[0], b'{"timestamp": 1}'])


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="no request"):
        read([b"\n"])


def test_time_and_lengths_are_scaled() -> None:
    mix = {"gold": 1.0}
    planned = trace.plan(read(LINES), speed=4.0, scale=0.1, until_s=10.0, mix=mix, seed=1)
    assert [(p.id, p.at_s, p.prompt_tokens, p.output_tokens, p.blocks) for p in planned] == [
        (0, 0.0, 70, 1, (0, 1)),
        (1, 0.5, 102, 10, (0, 2)),
    ]


def test_a_long_trace_is_cut_where_the_seed_says() -> None:
    lines = [Line(second * 1000, 100, 10) for second in range(1000)]
    one, other = (
        trace.plan(lines, speed=1.0, scale=1.0, until_s=50.0, mix={"gold": 1.0}, seed=seed)
        for seed in (1, 2)
    )
    assert len(one) == len(other) == 50
    assert one[0].at_s != other[0].at_s
    assert all(0 <= p.at_s < 50 for p in one + other)


def _body(planned: Planned, style: Style) -> dict[str, object]:
    body: dict[str, object] = json.loads(request_bytes(planned, style).partition(b"\r\n\r\n")[2])
    return body


def _prompt(planned: Planned, style: Style) -> str:
    content: str = json.loads(json.dumps(_body(planned, style)["messages"]))[0]["content"]
    return content


def test_equal_blocks_are_equal_text_and_nothing_else_is() -> None:
    style = Style("m", block_scale=0.1)  # a block is 51 tokens, 205 characters
    one = Planned(0, 0.0, "gold", "t1", 102, 5, blocks=(7, 8))
    other = Planned(1, 0.0, "gold", "t1", 102, 5, blocks=(7, 9))
    first, second = _prompt(one, style), _prompt(other, style)
    assert first[:205] == second[:205]
    assert first[205:215] != second[205:215]


def test_prompts_without_blocks_differ_from_the_start_and_have_the_wanted_length() -> None:
    style = Style("m")
    prompts = [_prompt(Planned(id_, 0.0, "gold", "t1", 100, 5), style) for id_ in (1, 2)]
    assert [len(prompt) for prompt in prompts] == [392, 392]  # and 8 for the role
    assert prompts[0][:10] != prompts[1][:10]


def test_only_who_opts_in_carries_flow_headers() -> None:
    gold = Planned(0, 0.0, "gold", "t1", 100, 5)
    outside = Planned(0, 0.0, "gold", "t1", 100, 5, opted_in=False)
    head = request_bytes(gold, Style("m")).partition(b"\r\n\r\n")[0]
    assert b"X-Ciuic-Flow: enabled\r\nX-Ciuic-Tier: gold" in head
    assert b"X-Ciuic" not in request_bytes(outside, Style("m"))


def test_an_emulated_engine_is_told_the_length_where_no_gateway_reads_it() -> None:
    planned = Planned(0, 0.0, "bronze", "t1", 100, 5)
    emulated = _body(planned, Style("m", with_priority=True))
    assert "max_tokens" not in emulated
    assert (emulated["answer_tokens"], emulated["priority"]) == (5, 2)
    real = _body(planned, Style("m", is_real=True))
    assert (real["max_tokens"], real["ignore_eos"]) == (5, True)
