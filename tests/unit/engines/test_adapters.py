"""The engine adapters against whole pages, and against what is no page at all."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuicflow.engines.base import UNKNOWN, EngineAdapter, EngineReport, PriorityOrder
from ciuicflow.engines.exposition import MAX_PAGE_BYTES, MAX_SERIES
from ciuicflow.engines.table import ADAPTERS, detect

DATA = Path(__file__).parent / "data"
GOLDEN = {
    "vllm": ("vllm", EngineReport(running=37, waiting=9, kv_usage=0.7312)),
    "vllm_data_parallel": ("vllm", EngineReport(running=28, waiting=3, kv_usage=0.9375)),
    "vllm_old_names": ("vllm", EngineReport(running=5, waiting=3, kv_usage=0.35)),
    "fake_engine": ("vllm", EngineReport(running=8, waiting=3, kv_usage=0.006591796875)),
    "sglang": ("sglang", EngineReport(running=42, waiting=6, kv_usage=0.28)),
    "sglang_priority": ("sglang", EngineReport(running=15, waiting=10, kv_usage=0.625)),
    "sglang_priority_and_sum": ("sglang", EngineReport(running=9, waiting=4)),
    "llamacpp": ("llamacpp", EngineReport(running=4, waiting=46)),
    "node_exporter": ("openai", UNKNOWN),
}


@pytest.mark.parametrize("page", GOLDEN)
def test_a_page_is_recognised_and_read(page: str) -> None:
    name, report = GOLDEN[page]
    content = (DATA / f"{page}.txt").read_bytes()
    adapter = detect(content)
    assert adapter.name == name
    assert adapter.parse(content) == report


@pytest.mark.parametrize("page", GOLDEN)
def test_windows_line_ends_change_nothing(page: str) -> None:
    content = (DATA / f"{page}.txt").read_bytes().replace(b"\n", b"\r\n")
    assert detect(content).parse(content) == GOLDEN[page][1]


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_table_knows_an_adapter_by_its_own_name(name: str) -> None:
    assert ADAPTERS[name].name == name


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@settings(deadline=None)
@given(page=st.binary(max_size=400))
def test_any_bytes_are_read_without_an_error(adapter: EngineAdapter, page: bytes) -> None:
    assert adapter.parse(page) == UNKNOWN
    assert detect(page).parse(page) == UNKNOWN


NAMES = ["vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(
    rest=st.one_of(
        st.sampled_from(
            ["", "{", "{}", '{a="', '{a="}"}', "} 1", "{} ", " ", " nan", " -1", " inf", " 1e999"]
        ),
        st.text(alphabet='{}="\\ ,ab1.-\x00é', max_size=30),
    )
)
def test_a_broken_line_is_no_number_or_a_sensible_one(name: str, rest: str) -> None:
    page = f"{name}{rest}\n".encode()
    waiting = detect(page).parse(page).waiting
    assert waiting is None or 0 <= waiting <= 1e9


@pytest.mark.parametrize("value", ["NaN", "-3.0", "+Inf", "1e300", "abc", ""])
def test_a_value_that_makes_no_sense_is_unknown(value: str) -> None:
    page = f'vllm:num_requests_waiting{{engine="0"}} {value}\n'.encode()
    assert ADAPTERS["vllm"].parse(page) == UNKNOWN


def test_a_good_series_counts_beside_a_broken_one() -> None:
    page = b'sglang:num_queue_reqs{a="0"} NaN\nsglang:num_queue_reqs{a="1"} 2\n'
    assert ADAPTERS["sglang"].parse(page).waiting == 2


def test_a_label_may_hold_braces_quotes_and_spaces() -> None:
    page = b'vllm:num_requests_running{model_name="a } \\" {b",engine="0"} 7\n'
    assert ADAPTERS["vllm"].parse(page).running == 7


def test_a_longer_name_is_another_metric() -> None:
    page = b"vllm:num_requests_running_total 5\nvllm:num_requests_runningx 6\n"
    assert ADAPTERS["vllm"].parse(page).running is None


def test_a_page_without_a_last_line_end_is_read_whole() -> None:
    assert ADAPTERS["llamacpp"].parse(b"llamacpp:requests_deferred 3").waiting == 3


def test_a_timestamp_after_the_value_is_ignored() -> None:
    page = b"vllm:num_requests_running 4 1712345678000\n"
    assert ADAPTERS["vllm"].parse(page).running == 4


def test_a_cache_usage_above_one_is_full() -> None:
    page = b"vllm:kv_cache_usage_perc 55.0\n"
    assert ADAPTERS["vllm"].parse(page).kv_usage == 1.0


def test_what_lies_beyond_the_size_bound_is_not_looked_at() -> None:
    page = b"#" * MAX_PAGE_BYTES + b"\nvllm:num_requests_waiting 4\n"
    assert detect(page).name == "openai"
    assert ADAPTERS["vllm"].parse(page) == UNKNOWN


def test_a_page_of_nothing_but_series_of_one_name_is_cut_off() -> None:
    page = b"sglang:num_queue_reqs 1\n" * (MAX_SERIES + 500)
    assert ADAPTERS["sglang"].parse(page).waiting == MAX_SERIES


@pytest.mark.parametrize(
    ("order", "values"),
    [(PriorityOrder.LOWER_FIRST, [0, 1, 2]), (PriorityOrder.HIGHER_FIRST, [2, 1, 0])],
)
def test_the_first_tier_gets_the_value_that_the_engine_serves_first(
    order: PriorityOrder, values: list[int]
) -> None:
    assert [order.value_of(rank, 3) for rank in range(3)] == values


def test_vllm_and_sglang_read_priorities_the_opposite_way_round() -> None:
    assert ADAPTERS["vllm"].priority_order is PriorityOrder.LOWER_FIRST
    assert ADAPTERS["sglang"].priority_order is PriorityOrder.HIGHER_FIRST
    assert ADAPTERS["llamacpp"].priority_order is None
    assert ADAPTERS["openai"].priority_order is None
