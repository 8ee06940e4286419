"""What an emulated engine can do, computed in virtual time: the unit of all offered loads. Pure."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from ciuicflow.testing.engine_model import EngineModel, EngineProfile, EngineRequest
from loadtest.records import Record
from loadtest.workload import Lengths

_REQUESTS: Final = 600
_WARM: Final = 20
_SEED: Final = 99
_DEEPEST: Final = 300
_FEWEST: Final = 60

Reference = Callable[[Sequence[Record]], float | None]
"""Tokens per second that the engine reaches with the requests of some records when it is kept just
saturated; None: unknown."""


def capacity_rps(profile: EngineProfile, lengths: Lengths) -> float:
    """Return the requests per second that an engine completes when it never lacks work."""
    rng = Random(_SEED)
    return replay_rps(profile, [lengths.draw(rng) for _ in range(_REQUESTS)])


def replay_reference(profile: EngineProfile) -> Reference:
    """Return what replays the very requests that a system served: no luck with lengths counts."""

    def reference(records: Sequence[Record]) -> float | None:
        lengths = [(r.prompt_tokens, r.tokens) for r in records if r.end_s is not None]
        if len(lengths) < _FEWEST:
            return None
        mean = sum(prompt + output for prompt, output in lengths) / len(lengths)
        return replay_rps(profile, lengths) * mean

    return reference


def replay_rps(profile: EngineProfile, requests: list[tuple[int, int]]) -> float:
    """Return the same for given lengths of prompts and answers, at least 60 of them."""
    model = EngineModel(profile, _SEED)
    depth = min(_DEEPEST, 2 * profile.max_num_seqs, len(requests) // 3)
    todo = list(enumerate(requests))[::-1]

    def feed(now: float) -> None:
        if todo:
            id_, (prompt, output) = todo.pop()
            model.submit(
                EngineRequest(request_id=str(id_), prompt_tokens=prompt, output_tokens=output), now
            )

    for _ in range(depth):
        feed(0.0)
    now, start_s, done, done_warm = 0.0, 0.0, 0, 0
    while done < len(requests) - depth:
        now = model.next_step_at() or now
        for event in model.step(now):
            if event.finished:
                done += 1
                feed(now)
        if not done_warm and done >= _WARM:
            start_s, done_warm = now, done
    return (done - done_warm) / (now - start_s)
