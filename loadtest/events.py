"""Reads an OpenAI event stream: how many tokens came, the usage, the end mark. Pure.

Written apart from the gateway's own reader on purpose: a test must not share the faults of what it
tests.
"""

from typing import Final

import msgspec

_DONE: Final = b"[DONE]"


class Usage(msgspec.Struct, frozen=True):
    """What the engine counted."""

    prompt_tokens: int
    completion_tokens: int


class _Delta(msgspec.Struct, frozen=True, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: Usage | None = None


_DECODE: Final = msgspec.json.Decoder(_Chunk).decode


class EventReader:
    """Takes the bytes of one stream in any cuts."""

    def __init__(self) -> None:
        self.is_done = False
        """The end mark has come."""
        self.is_broken = False
        """An event was no chunk: an error that came in the stream, or nonsense."""
        self.usage: Usage | None = None
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """Take some bytes and return how many events with text were completed."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return sum(map(self._read, events))

    def _read(self, event: bytes) -> int:
        if not event.startswith(b"data: "):
            return 0  # a comment
        payload = event[6:]
        if payload == _DONE:
            self.is_done = True
            return 0
        try:
            chunk = _DECODE(payload)
        except msgspec.DecodeError:
            self.is_broken = True
            return 0
        if chunk.usage is not None:
            self.usage = chunk.usage
        if payload.startswith(b'{"error"'):
            self.is_broken = True
        return any(choice.delta.content or choice.delta.reasoning_content
                   for choice in chunk.choices)  # fmt: skip
