"""The OpenAI wire format of a fake engine: bodies to jobs, answers to JSON and SSE chunks. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from ciuicflow.testing.engine_text import Speech, count_tokens, cut_at_stop

JsonObject = Mapping[str, Any]
StopString = Annotated[str, msgspec.Meta(min_length=1)]
TokenCount = Annotated[int, msgspec.Meta(ge=1)]

DONE = b"data: [DONE]\n\n"
REASONING_PART = 3
"""A reasoner thinks for one in so many of its tokens."""


class ApiError(Exception):
    """A refusal with its status and OpenAI-shaped body."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = msgspec.json.encode(
            {"error": {"message": message, "type": kind, "param": param, "code": status}}
        )


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints read; other fields are ignored, as sampling has no effect."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: TokenCount | None = None
    stop: StopString | list[StopString] | None = None
    n: int | None = None
    priority: int | None = None
    ignore_eos: bool | None = None
    answer_tokens: TokenCount | None = None
    """How long the answer is by itself: no engine has this, load tests choose lengths with it."""

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class _ChatBody(_Body, frozen=True, kw_only=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: TokenCount | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def prompt_text(self) -> str:
        return "".join(f"<|{m.get('role')}|>{_content(m)}" for m in self.messages)


class _CompletionBody(_Body, frozen=True, kw_only=True):
    prompt: str | list[int]

    @property
    def prompt_text(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt
        # Four characters per token id, so that an id counts as one token.
        return "".join(f"{token & 0xFFFF:04x}" for token in self.prompt)


BodyT = TypeVar("BodyT", bound=_Body)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One request understood: what to run and what it will say."""

    model: str
    prompt: str
    prompt_tokens: int
    pieces: list[str]
    """Visible text per output token; some may be empty."""
    finish_reason: str
    reasoning_tokens: int
    """So many first pieces are reasoning."""
    priority: int
    is_stream: bool
    include_usage: bool


def parse_chat(body: bytes, seed: int, reasoning: bool) -> Job:
    """Read a chat request; ApiError 400 says which field is wrong.

    Models whose name ends in ``-reasoner`` reason, and with ``reasoning`` all of them do.
    """
    parsed = _decode(body, _ChatBody)
    return _job(parsed, parsed.prompt_text, seed, reasoning or parsed.model.endswith("-reasoner"))


def parse_completion(body: bytes, seed: int) -> Job:
    """Read a completion request; ApiError 400 says which field is wrong."""
    parsed = _decode(body, _CompletionBody)
    return _job(parsed, parsed.prompt_text, seed, reasoning=False)


def _decode(body: bytes, kind: type[BodyT]) -> BodyT:
    try:
        parsed = msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(400, "BadRequestError", f"{error}") from None
    if parsed.n not in (None, 1):
        raise ApiError(400, "BadRequestError", "only n=1 is supported", "n")
    return parsed


def _job(body: _Body, prompt: str, seed: int, reasoning: bool) -> Job:
    speech = Speech(prompt, seed)
    limit = body.token_limit
    natural = body.answer_tokens or speech.natural_tokens
    tokens = min(natural, limit or natural)
    if body.ignore_eos and limit:
        tokens = limit
    pieces = speech.pieces(tokens)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stopped = cut_at_stop(pieces, stops)
    return Job(
        model=body.model,
        prompt=prompt,
        prompt_tokens=count_tokens(prompt),
        pieces=pieces if stopped is None else stopped,
        finish_reason="length" if stopped is None and tokens == limit else "stop",
        reasoning_tokens=tokens // REASONING_PART if reasoning else 0,
        priority=body.priority or 0,
        is_stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text", "") for part in content if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def usage(job: Job, cached_tokens: int) -> JsonObject:
    """The usage object of a finished answer."""
    prompt, completion = job.prompt_tokens, len(job.pieces)
    fields: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if job.reasoning_tokens:
        fields["completion_tokens_details"] = {"reasoning_tokens": job.reasoning_tokens}
    return fields


class Wire(ABC):
    """How one endpoint writes an answer; its kinds say how a choice looks."""

    prefix: str
    stream_object: str
    whole_object: str

    def __init__(self, job: Job, request_id: str, created: int) -> None:
        self.job = job
        self._head = {"id": f"{self.prefix}-{request_id}", "created": created, "model": job.model}

    def opening(self) -> bytes:
        """What comes before the first token of a stream."""
        return b""

    def token(self, position: int) -> bytes:
        """The event of one token; empty if the token shows no text."""
        return self._event([self._token_choice(position)]) if self.job.pieces[position] else b""

    def closing(self, cached_tokens: int) -> bytes:
        """Finish reason, usage if asked for, and the end mark."""
        events = self._event([self._end_choice()])
        if self.job.include_usage:
            events += self._event([], usage(self.job, cached_tokens))
        return events + DONE

    def whole(self, cached_tokens: int) -> bytes:
        """The answer as one JSON object."""
        return self._object(
            self.whole_object, [self._whole_choice()], usage(self.job, cached_tokens)
        )

    @abstractmethod
    def _token_choice(self, position: int) -> JsonObject: ...

    @abstractmethod
    def _end_choice(self) -> JsonObject: ...

    @abstractmethod
    def _whole_choice(self) -> JsonObject: ...

    def _event(self, choices: list[JsonObject], counts: JsonObject | None = None) -> bytes:
        return b"data: %b\n\n" % self._object(self.stream_object, choices, counts)

    def _object(self, kind: str, choices: list[JsonObject], counts: JsonObject | None) -> bytes:
        fields = {**self._head, "object": kind, "choices": choices}
        if counts is not None:
            fields["usage"] = counts
        return msgspec.json.encode(fields)


class ChatWire(Wire):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self) -> bytes:
        """The chunk that names the role."""
        return self._event([_choice("delta", {"role": "assistant", "content": ""}, None)])

    def _token_choice(self, position: int) -> JsonObject:
        name = "reasoning_content" if position < self.job.reasoning_tokens else "content"
        return _choice("delta", {name: self.job.pieces[position]}, None)

    def _end_choice(self) -> JsonObject:
        return _choice("delta", {}, self.job.finish_reason)

    def _whole_choice(self) -> JsonObject:
        pieces, reasoning = self.job.pieces, self.job.reasoning_tokens
        message = {"role": "assistant", "content": "".join(pieces[reasoning:])}
        if reasoning:
            message["reasoning_content"] = "".join(pieces[:reasoning])
        return _choice("message", message, self.job.finish_reason)


class CompletionWire(Wire):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    stream_object = whole_object = "text_completion"

    def _token_choice(self, position: int) -> JsonObject:
        return _choice("text", self.job.pieces[position], None)

    def _end_choice(self) -> JsonObject:
        return _choice("text", "", self.job.finish_reason)

    def _whole_choice(self) -> JsonObject:
        return _choice("text", "".join(self.job.pieces), self.job.finish_reason)


def _choice(name: str, content: str | JsonObject, finish_reason: str | None) -> JsonObject:
    return {"index": 0, name: content, "logprobs": None, "finish_reason": finish_reason}
