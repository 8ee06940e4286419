"""A request trace in Mooncake's format as a plan: time and lengths scaled, tiers by a seeded rule.

One JSON object a line: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and
``hash_ids``, one per 512 prompt tokens; equal ids mean equal text (kvcache-ai/Mooncake, FAST'25).
"""

from collections.abc import Iterable, Mapping
from random import Random
from typing import Final

import msgspec

from loadtest.workload import SHORTEST_PROMPT, Planned, draw

BLOCK_TOKENS: Final = 512


class Line(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read(lines: Iterable[bytes]) -> list[Line]:
    """Read a trace, ordered by time. Raises ValueError that names the line."""
    found: list[Line] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line, type=Line))
            except msgspec.DecodeError as error:
                raise ValueError(f"line {number} is not a request of a trace: {error}") from None
    if not found:
        raise ValueError("the trace holds no request")
    return sorted(found, key=lambda line: line.timestamp)


def plan(
    lines: list[Line],
    *,
    speed: float,
    scale: float,
    until_s: float,
    mix: Mapping[str, float],
    seed: int,
) -> list[Planned]:
    """Return the part of a trace that fits; the seed chooses where it starts, tiers, tenants.

    Times are divided by ``speed``, lengths multiplied by ``scale``.
    """
    rng = Random(f"{seed}:trace")
    start_ms = _start_ms(lines, until_s * speed * 1000, rng)
    planned: list[Planned] = []
    for line in lines:
        at_s = (line.timestamp - start_ms) / 1000 / speed
        if not 0 <= at_s < until_s:
            continue
        prompt, output = scaled(line, scale)
        tier, tenant = draw(rng, mix), f"t{rng.randrange(4) + 1}"
        planned.append(
            Planned(len(planned), at_s, tier, tenant, prompt, output, blocks=tuple(line.hash_ids))
        )
    return planned


def _start_ms(lines: list[Line], length_ms: float, rng: Random) -> float:
    first, last = lines[0].timestamp, lines[-1].timestamp
    return first + rng.random() * max(0.0, last - first - length_ms)


def scaled(line: Line, scale: float) -> tuple[int, int]:
    """Return the scaled lengths of a prompt and its answer, at least 8 and 1."""
    prompt = max(SHORTEST_PROMPT, round(line.input_length * scale))
    return prompt, max(1, round(line.output_length * scale))
