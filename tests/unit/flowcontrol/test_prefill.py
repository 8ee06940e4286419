"""The model of the time to first token: the fast end of what is seen."""

from random import Random

import pytest

from ciuicflow.flowcontrol.prefill import PrefillModel


def seconds(tokens: int, speed: float = 1.0) -> float:
    return (0.05 + tokens / 10_000) / speed


def taught(count: int = 300, waiting: float = 0.0, speed: float = 1.0) -> PrefillModel:
    model, rng = PrefillModel(), Random(1)
    teach(model, rng, count, waiting, speed)
    return model


def teach(model: PrefillModel, rng: Random, count: int, waiting: float, speed: float) -> None:
    """A part of the samples waited for something else, for up to a second."""
    for _ in range(count):
        tokens = rng.randrange(100, 4000)
        waited = rng.random() if rng.random() < waiting else 0.0
        model.learn(tokens, seconds(tokens, speed) + waited, alone=True)


def test_it_judges_only_after_some_samples() -> None:
    model = PrefillModel()
    assert not model.known
    for _ in range(3):
        model.learn(1000, 0.1, alone=True)
    assert model.known


@pytest.mark.parametrize("tokens", [500, 1500, 3500])
@pytest.mark.parametrize("waiting", [0.0, 0.6])
def test_it_finds_the_line_though_more_than_half_of_the_samples_waited(
    tokens: int, waiting: float
) -> None:
    assert taught(waiting=waiting).predict_s(tokens) == pytest.approx(seconds(tokens), rel=0.25)


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_it_follows_an_engine_that_changes_its_speed(speed: float) -> None:
    model = taught()
    teach(model, Random(2), 150, 0.0, speed)
    assert model.predict_s(2000) == pytest.approx(seconds(2000, speed), rel=0.3)


def test_samples_that_all_waited_do_not_raise_it_at_once() -> None:
    """For a window's length: a burst is no change of speed."""
    model = taught()
    before = model.predict_s(2000)
    teach(model, Random(3), 20, 1.0, 1.0)
    assert model.predict_s(2000) <= before * 1.05


def test_a_prompt_that_had_a_head_start_teaches_nothing() -> None:
    model = taught()
    before = model.predict_s(2000)
    model.learn(2000, 0.001, alone=False)
    assert model.predict_s(2000) == before


def test_no_sample_makes_it_negative() -> None:
    model = taught()
    for tokens, took_s in ((1, 0.0), (4000, -1.0), (1, 1e9), (10_000_000, 1e-9)):
        model.learn(tokens, took_s, alone=True)
        assert model.base_s >= 0
        assert model.per_token_s > 0
