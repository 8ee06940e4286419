"""What an answer tells while it passes: its first token, each further one, its usage. Pure.

Nothing is changed or held back. Whatever can't be read (compressed, too long, no JSON) is passed
all the same, and counts as bytes without tokens.
"""

import re
from typing import Final, Protocol

from ciuicflow.flowcontrol.cost import Usage
from ciuicflow.gateway.framing import ChunkedBody
from ciuicflow.gateway.headers import ResponseHead
from ciuicflow.gateway.sse import read_answer, read_event

# Longer lines and answers are not looked into: what counts in them is small.
MAX_LINE_BYTES: Final = 1 << 20
MAX_ANSWER_BYTES: Final = 1 << 20
_MARKED_DATA: Final = b"\xef\xbb\xbfdata:"  # a byte order mark may stand before the first line


class Meter(Protocol):
    """Reads the body of one answer."""

    @property
    def usage(self) -> Usage | None:
        """What the engine reported; known when the answer has ended, if at all."""

    def feed(self, data: bytes) -> int:
        """Read body bytes without framing; return how many tokens have come with them."""


class StreamMeter:
    """Reads server-sent events, cut anywhere (WHATWG HTML, section 9.2.6)."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self._line = b""  # begun, not ended
        self._skipping = False  # the rest of a line that is too long
        self._started = False  # the first token has come

    def feed(self, data: bytes) -> int:
        """See Meter."""
        if self._line:
            data = self._line + data
        # A line may end in CR, LF or both; JSON holds neither, so an empty line more does no harm.
        if data.find(b"\r") >= 0:
            data = data.replace(b"\r", b"\n")
        lines = data.split(b"\n")
        self._line = lines.pop()
        tokens = 0
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif line.startswith(b"data:"):
                tokens += self._event(line[5:])
            elif line.startswith(_MARKED_DATA):
                tokens += self._event(line[len(_MARKED_DATA) :])
        if len(self._line) > MAX_LINE_BYTES:
            self._line = b""
            self._skipping = True
        return tokens

    def _event(self, data: bytes) -> int:
        # Once tokens flow, an event is one, and only those with usage are read (measured: reading
        # all of them costs 1 us each).
        has_usage = data.find(b'"usage"') >= 0
        if self._started and not has_usage:
            return 0 if data.strip() == b"[DONE]" else 1
        event = read_event(data)
        if event.usage is not None:
            self.usage = event.usage
        self._started = self._started or event.has_token
        return 1 if event.has_token else 0


class AnswerMeter:
    """Keeps an answer that is one JSON object, to read its usage in the end."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._usage: Usage | None = None

    def feed(self, data: bytes) -> int:
        """See Meter."""
        self._size_bytes += len(data)
        if self._size_bytes <= MAX_ANSWER_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()
        return 0

    @property
    def usage(self) -> Usage | None:
        """See Meter."""
        if self._parts:
            self._usage = read_answer(b"".join(self._parts))
            self._parts.clear()
        return self._usage


class Unreadable:
    """A body that says nothing."""

    usage: Usage | None = None

    def feed(self, data: bytes) -> int:
        """See Meter."""
        return 0


class BodyMeter:
    """Takes a body in its framing."""

    def __init__(self, head: ResponseHead) -> None:
        self._dechunk = ChunkedBody() if head.chunked else None
        self.meter = _meter(head)

    def feed(self, data: bytes) -> int:
        """Read bytes as they came; return how many tokens have come with them."""
        if self._dechunk is None:
            return self.meter.feed(data)
        pieces: list[bytes] = []
        self._dechunk.feed(data, pieces)
        return self.meter.feed(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def _meter(head: ResponseHead) -> Meter:
    if head.encoded:
        return Unreadable()
    return StreamMeter() if head.event_stream else AnswerMeter()


# A chunk of nothing but comments and blank lines, with or without its chunked framing (WHATWG
# HTML, section 9.2.5). DeepSeek sends `: keep-alive` comments while a request waits.
_COMMENTS = re.compile(rb"(?:[0-9A-Fa-f]+\r\n)?(?::[^\n]*\n|\r?\n)*")


def is_only_comments(data: bytes) -> bool:
    """Whether these bytes of a stream say no more than that the connection is alive."""
    return _COMMENTS.fullmatch(data) is not None
