"""The HTTP request of a planned request, for each kind of system. Pure."""

from functools import lru_cache
from random import Random
from typing import Any, Final

import msgspec

from loadtest.trace import BLOCK_TOKENS
from loadtest.workload import Planned

PRIORITY: Final = {"gold": 0, "silver": 1, "bronze": 2}
"""What the engine's own scheduler is told; lower is sooner, as in vLLM."""
_WORDS: Final = (
    "the gateway holds what the engine cannot yet take and sends it when a place is free so that "
    "nobody waits behind work of a lower rank than his own "
)


class Style(msgspec.Struct, frozen=True):
    """How the requests to one system are written."""

    model: str
    chars_per_token: float = 4.0
    """Prompt characters that the engine counts as a token."""
    is_real: bool = False
    """A real engine takes max_tokens and ignore_eos; an emulated one is told the length apart,
    so that no gateway can read it."""
    with_priority: bool = False
    block_scale: float = 1.0
    """Length of a trace's block against the 512 tokens it stands for."""


def request_bytes(planned: Planned, style: Style) -> bytes:
    """Return head and body."""
    body = msgspec.json.encode(_body(planned, style))
    flow = f"X-Ciuic-Flow: enabled\r\nX-Ciuic-Tier: {planned.tier}\r\n" if planned.opted_in else ""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: loadtest\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"X-Request-Id: r{planned.id}\r\n{flow}\r\n"
    )
    return head.encode() + body


def _body(planned: Planned, style: Style) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": style.model,
        "user": planned.tenant,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": _prompt(planned, style)}],
    }
    if style.is_real:
        body |= {"max_tokens": planned.output_tokens, "ignore_eos": True}
    else:
        body["answer_tokens"] = planned.output_tokens
    if style.with_priority:
        body["priority"] = PRIORITY[planned.tier]
    return body


def _prompt(planned: Planned, style: Style) -> str:
    """Return text of the wanted length that no other request shares, but for a trace's blocks."""
    chars = max(1, round(planned.prompt_tokens * style.chars_per_token) - len("<|user|>"))
    block_chars = round(BLOCK_TOKENS * style.block_scale * style.chars_per_token)
    text = "".join(_block(id_, block_chars) for id_ in planned.blocks)
    text = text or f"request {planned.id} "
    return (text + _WORDS * (1 + chars // len(_WORDS)))[:chars]


@lru_cache(4096)
def _block(id_: int, chars: int) -> str:
    """Return the text of a trace's block: the same for the same id."""
    rng = Random(id_)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=chars))
