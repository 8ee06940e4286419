"""What engines and gateways say of themselves now and then. Pure readers."""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

_LINE: Final = re.compile(r"^([a-z_:]+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_WAITING: Final = ("vllm:num_requests_waiting", "llamacpp:requests_deferred")
_RUNNING: Final = ("vllm:num_requests_running", "llamacpp:requests_processing")
_SPENT: Final = (
    ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"),
)


class EngineSample(msgspec.Struct, frozen=True):
    """One engine at a moment."""

    waiting: float
    running: float
    spent_tokens: float
    """Prompt and output tokens since its start."""


class LimitSample(msgspec.Struct, frozen=True):
    """The gateway's limit for its endpoint at a moment; None: it knows none."""

    requests: float | None
    tokens: float | None
    prefill_tokens: float | None


class Sample(msgspec.Struct, frozen=True):
    """One system at a moment of a run."""

    at_s: float
    engine: EngineSample
    limit: LimitSample | None = None


def read_engine(page: str) -> EngineSample:
    """Read an engine's /metrics, the labels of a name added up. Raises ValueError."""
    values: dict[str, float] = {}
    for name, value in _LINE.findall(page):
        values[name] = values.get(name, 0.0) + float(value)
    spent = next((pair for pair in _SPENT if pair[0] in values), None)
    if spent is None:
        raise ValueError("the engine's /metrics shows no token counts")
    return EngineSample(
        waiting=sum(values.get(name, 0.0) for name in _WAITING),
        running=sum(values.get(name, 0.0) for name in _RUNNING),
        spent_tokens=sum(values.get(name, 0.0) for name in spent),
    )


def read_limit(state: Mapping[str, Any]) -> LimitSample | None:
    """Read /flow/state; None: flow control is off or has no endpoint."""
    endpoints = (state.get("flow") or {}).get("endpoints") or []
    if not endpoints:
        return None
    first = endpoints[0]
    return LimitSample(
        first.get("limit_requests"), first.get("limit_tokens"), first.get("limit_prefill_tokens")
    )
