"""What events and answers of an OpenAI-like API hold that the gateway counts. Pure."""

from typing import Any, Final

import msgspec

from ciuicflow.flowcontrol.cost import Usage
from ciuicflow.gateway.body import UNREADABLE


class Event(msgspec.Struct, frozen=True, gc=False):
    """What one event of a stream tells."""

    has_token: bool = False
    """It brings a token, of the answer or of the reasoning before it."""
    usage: Usage | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    prompt_tokens_details: Any = None
    prompt_cache_hit_tokens: Any = None


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None  # DeepSeek's, and vLLM's and SGLang's after it
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: Any = None  # of /v1/completions


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_NOTHING: Final = Event()
_MOST_TOKENS: Final = 1_000_000_000  # of one request; what claims more is wrong
_decode_chunk: Final = msgspec.json.Decoder(_Chunk).decode
_decode_answer: Final = msgspec.json.Decoder(_Answer).decode


def read_event(data: bytes) -> Event:
    """Read the data of an event of a stream of completions; others tell nothing. Never raises."""
    try:
        chunk = _decode_chunk(data)
    except UNREADABLE:
        return _NOTHING
    return Event(any(map(_brings_token, chunk.choices or ())), _usage(chunk.usage))


def read_answer(body: bytes) -> Usage | None:
    """Return the usage that a whole JSON answer reports, if it does. Never raises."""
    try:
        return _usage(_decode_answer(body).usage)
    except UNREADABLE:
        return None


def _brings_token(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def _usage(wire: _Usage | None) -> Usage | None:
    if wire is None:
        return None
    prompt = wire.prompt_tokens if wire.prompt_tokens is not None else wire.input_tokens
    output = wire.completion_tokens if wire.completion_tokens is not None else wire.output_tokens
    cached = wire.prompt_cache_hit_tokens  # DeepSeek's API
    if cached is None and isinstance(wire.prompt_tokens_details, dict):
        cached = wire.prompt_tokens_details.get("cached_tokens")
    if output is None:
        output = 0  # an embedding has none
    if not _is_count(prompt) or not _is_count(output):
        return None
    return Usage(prompt, cached if _is_count(cached) else 0, output)


def _is_count(value: object) -> bool:
    """Whether it can be a number of tokens: counters must neither fall nor overflow."""
    return type(value) is int and 0 <= value <= _MOST_TOKENS
