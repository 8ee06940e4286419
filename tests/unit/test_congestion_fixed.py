"""The controller that learns nothing."""

import pytest

from ciuicflow.congestion.base import CongestionState, Controller
from ciuicflow.congestion.fixed import FixedController


def test_window_and_rate_stay_whatever_happens() -> None:
    controller: Controller = FixedController(1000, 5e6)
    controller.on_sent(0, 600)
    controller.on_sent(10, 300)
    controller.on_ack(1_000_000, 0, 600, 900_000, 600, False)
    controller.on_timeout(2_000_000_000)
    assert (controller.window, controller.rate) == (1000, 5e6)
    assert controller.snapshot() == CongestionState(
        controller="fixed",
        window_bytes=1000,
        rate_bytes_per_s=5e6,
        in_flight_bytes=300,
        timeouts=1,
    )


def test_lost_bytes_are_not_in_flight_any_more() -> None:
    controller = FixedController(1000)
    controller.on_sent(0, 600)
    controller.on_lost(600)
    assert controller.snapshot().in_flight_bytes == 0
    assert controller.rate is None


@pytest.mark.parametrize(
    ("window", "rate"), [(0, None), (-1, None), (1, 0.0), (1, -1.0), (1, float("nan"))]
)
def test_values_that_are_not_positive_are_refused(window: int, rate: float | None) -> None:
    with pytest.raises(ValueError, match="expected"):
        FixedController(window, rate)
