"""What Prometheus reads, after literal calls at literal times."""

from collections.abc import Callable, Iterable
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ciuicflow import __version__
from ciuicflow.observability.metrics import EndpointSample, Metrics
from ciuicflow.observability.traffic import DURATION_BUCKETS_S
from ciuicflow.request import Outcome

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def new_metrics(
    endpoints: Callable[[], Iterable[EndpointSample]] = tuple,
    client_connections: Callable[[], int] = int,
    log_lines_dropped: Callable[[], int] = int,
) -> Metrics:
    return Metrics(
        endpoints=endpoints,
        client_connections=client_connections,
        log_lines_dropped=log_lines_dropped,
    )


def endpoint(name: str, *, up: bool = True) -> EndpointSample:
    return EndpointSample(name=name, up=up, in_flight=3, idle=2, busy=1)


def scrape(metrics: Metrics, now: float = 0.0) -> Series:
    """Return every series of a page; a repeated series fails, as it does in Prometheus."""
    series: Series = {}
    for family in text_string_to_metric_families(metrics.render(now).decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in series
            series[key] = sample.value
    return series


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


def names_with(series: Series, label: str, wanted: str) -> set[str]:
    return {name for name, labels in series if (label, wanted) in labels}


def test_a_request_is_counted_by_flow_tier_outcome_and_code() -> None:
    metrics = new_metrics()
    for _ in range(3):
        metrics.traffic("bypass", "none").observe(Outcome.COMPLETED, 200, 0.2, now=1.0)
    metrics.traffic("bypass", "none").observe(Outcome.UPSTREAM_FAILED, 502, 0.1, now=1.0)
    series = scrape(metrics, now=2.0)
    labels = {"flow": "bypass", "tier": "none"}
    total = "ciuicflow_requests_total"
    assert value(series, total, **labels, outcome="completed", code="200") == 3
    assert value(series, total, **labels, outcome="upstream_failed", code="502") == 1


@pytest.mark.parametrize(
    ("code", "label"),
    [(100, "100"), (599, "599"), (99, "other"), (600, "other"), (0, "other"), (-1, "other")],
)
def test_a_code_outside_100_to_599_is_other(code: int, label: str) -> None:
    metrics = new_metrics()
    metrics.traffic("bypass", "none").observe(Outcome.CLIENT_GONE, code, 0.2, now=1.0)
    assert names_with(scrape(metrics), "code", label) == {"ciuicflow_requests_total"}


@given(st.lists(st.tuples(st.sampled_from(Outcome), st.integers()), max_size=200))
def test_series_stay_bounded_whatever_codes_upstreams_send(
    answers: list[tuple[Outcome, int]],
) -> None:
    metrics = new_metrics()
    for outcome, code in answers:
        metrics.traffic("bypass", "none").observe(outcome, code, 0.2, now=1.0)
    codes = {dict(labels).get("code", "200") for _, labels in scrape(metrics)}
    assert codes <= {"other", *map(str, range(100, 600))}


@given(st.lists(st.floats(0, 4000), max_size=50))
def test_each_bucket_counts_the_durations_up_to_its_bound(durations: list[float]) -> None:
    metrics = new_metrics()
    for duration_s in durations:
        metrics.traffic("bypass", "none").observe(Outcome.COMPLETED, 200, duration_s, now=1.0)
    series = scrape(metrics)
    name, labels = "ciuicflow_request_duration_seconds", {"flow": "bypass", "tier": "none"}
    for bound in DURATION_BUCKETS_S:
        expected = sum(duration_s <= bound for duration_s in durations)
        assert value(series, f"{name}_bucket", **labels, le=str(bound)) == expected
    assert value(series, f"{name}_bucket", **labels, le="+Inf") == len(durations)
    assert value(series, f"{name}_count", **labels) == len(durations)
    assert value(series, f"{name}_sum", **labels) == pytest.approx(sum(durations))


def test_qps_and_p99_cover_the_last_minute_only() -> None:
    metrics = new_metrics()
    for number in range(6000):  # 100 per second, 2 % of them slow
        metrics.traffic("bypass", "none").observe(
            Outcome.COMPLETED,
            200,
            3.0 if number % 50 == 0 else 0.1,
            now=100 + number / 100,
        )
    labels = {"flow": "bypass", "tier": "none"}
    busy, later = scrape(metrics, now=159.99), scrape(metrics, now=300.0)
    assert value(busy, "ciuicflow_qps", **labels) == pytest.approx(100, rel=0.02)
    assert value(busy, "ciuicflow_latency_p99_seconds", **labels) == pytest.approx(3.0, rel=0.01)
    assert value(later, "ciuicflow_qps", **labels) == 0
    assert isnan(value(later, "ciuicflow_latency_p99_seconds", **labels))


def test_flows_and_tiers_are_kept_apart() -> None:
    metrics = new_metrics()
    metrics.traffic("bypass", "none").observe(Outcome.COMPLETED, 200, 0.1, now=1.0)
    metrics.traffic("enabled", "gold").observe(Outcome.COMPLETED, 200, 9.0, now=1.0)
    series = scrape(metrics, now=1.0)
    p99 = "ciuicflow_latency_p99_seconds"
    assert value(series, p99, flow="bypass", tier="none") == pytest.approx(0.1, rel=0.01)
    assert value(series, p99, flow="enabled", tier="gold") == pytest.approx(9.0, rel=0.01)


def test_before_any_traffic_counters_read_zero_and_p99_no_data() -> None:
    series = scrape(new_metrics(lambda: [endpoint("a")]))
    labels = {"flow": "bypass", "tier": "none"}
    assert value(series, "ciuicflow_qps", **labels) == 0
    assert str(value(series, "ciuicflow_latency_p99_seconds", **labels)) == "nan"
    assert value(series, "ciuicflow_request_duration_seconds_count", **labels) == 0
    assert value(series, "ciuicflow_config_reloads_total", result="failure") == 0
    assert value(series, "ciuicflow_retries_total", endpoint="a") == 0


def test_endpoints_are_read_when_scraped() -> None:
    series = scrape(new_metrics(lambda: [endpoint("a"), endpoint("b", up=False)]))
    assert value(series, "ciuicflow_endpoint_up", endpoint="a") == 1
    assert value(series, "ciuicflow_endpoint_up", endpoint="b") == 0
    assert value(series, "ciuicflow_in_flight", endpoint="a") == 3
    assert value(series, "ciuicflow_upstream_connections", endpoint="a", state="idle") == 2
    assert value(series, "ciuicflow_upstream_connections", endpoint="a", state="busy") == 1


def test_a_removed_endpoint_vanishes_with_its_counters() -> None:
    endpoints = [endpoint("a"), endpoint("b")]
    metrics = new_metrics(lambda: endpoints)
    for name in ("a", "b"):
        metrics.upstream_failure(name, "connect")
        metrics.retry(name)
    before = scrape(metrics)
    assert value(before, "ciuicflow_upstream_failures_total", endpoint="b", reason="connect") == 1
    assert value(before, "ciuicflow_retries_total", endpoint="b") == 1
    del endpoints[1]
    metrics.upstream_failure("b", "reset")  # its last stream ends after it was removed
    assert names_with(scrape(metrics), "endpoint", "b") == set()
    endpoints.append(endpoint("b"))
    again = scrape(metrics)
    assert value(again, "ciuicflow_retries_total", endpoint="b") == 0
    assert value(again, "ciuicflow_upstream_failures_total", endpoint="a", reason="connect") == 1


def test_an_endpoint_named_twice_does_not_spoil_the_page() -> None:
    series = scrape(new_metrics(lambda: [endpoint("a", up=False), endpoint("a")]))
    assert value(series, "ciuicflow_endpoint_up", endpoint="a") == 1


def test_the_gateways_own_state_is_shown() -> None:
    metrics = new_metrics(client_connections=lambda: 17, log_lines_dropped=lambda: 5)
    metrics.event_loop_lag_s = 0.25
    metrics.reload("success")
    metrics.reload("failure")
    metrics.reload("failure")
    series = scrape(metrics)
    assert value(series, "ciuicflow_client_connections") == 17
    assert value(series, "ciuicflow_log_lines_dropped_total") == 5
    assert value(series, "ciuicflow_event_loop_lag_seconds") == 0.25
    assert value(series, "ciuicflow_config_reloads_total", result="success") == 1
    assert value(series, "ciuicflow_config_reloads_total", result="failure") == 2
    assert value(series, "ciuicflow_build_info", version=__version__) == 1


def test_odd_endpoint_names_are_escaped() -> None:
    name = 'a "quoted"\nline\\'
    series = scrape(new_metrics(lambda: [endpoint(name)]))
    assert value(series, "ciuicflow_endpoint_up", endpoint=name) == 1


def test_two_gateways_in_one_process_share_nothing() -> None:
    one, other = new_metrics(), new_metrics()
    one.traffic("bypass", "none").observe(Outcome.COMPLETED, 200, 0.1, now=1.0)
    assert names_with(scrape(one), "code", "200")
    assert not names_with(scrape(other), "code", "200")
