"""The few fields of a JSON body that the gateway needs; the rest is skipped, not decoded. Pure."""

import re
from typing import Any, Final

import msgspec

_MAX_TENANT_CHARS: Final = 256


class BodyFields(msgspec.Struct, frozen=True):
    """What a request for a model says of itself; anything else is the engine's to judge."""

    model: str | None = None
    stream: bool = False
    max_tokens: int | None = None
    user: str = ""
    """Whom the caller asks for, as DeepSeek's API or OpenAI's calls it; empty: it does not say."""


class _Wire(msgspec.Struct):
    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    user_id: Any = None
    user: Any = None


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON that somebody else wrote may raise."""
_NOTHING: Final = BodyFields()
_OPENS: Final = re.compile(rb"[ \t\r\n]*\{")
_EMPTY: Final = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*\}")
_decode: Final = msgspec.json.Decoder(_Wire).decode


def read_fields(body: bytes) -> BodyFields:
    """Read a body; one that is no JSON object says nothing. Never raises."""
    try:
        wire = _decode(body)
    except UNREADABLE:
        return _NOTHING
    limits = (wire.max_completion_tokens, wire.max_tokens, wire.max_output_tokens)
    users = (wire.user_id, wire.user)
    return BodyFields(
        wire.model if isinstance(wire.model, str) else None,
        wire.stream is True,
        next((n for n in limits if type(n) is int and n > 0), None),
        next((u[:_MAX_TENANT_CHARS] for u in users if isinstance(u, str) and u), ""),
    )


def with_priority(body: bytes, priority: int) -> bytes:
    """Return a JSON object with the engine's `priority` field; other bodies come back unchanged.

    It stands last: where the caller gave one of its own, readers take the last.
    """
    text = body.rstrip(b" \t\r\n")
    if not _OPENS.match(text) or not text.endswith(b"}"):
        return body
    comma = b"" if _EMPTY.fullmatch(text) else b","
    return b'%b%b"priority":%d}' % (text[:-1], comma, priority)
