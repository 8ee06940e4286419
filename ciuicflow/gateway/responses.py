"""What the gateway itself answers: one row per outcome. Pure."""

import math
from http import HTTPStatus
from typing import Final

import msgspec

from ciuicflow.request import Outcome


class Answer(msgspec.Struct, frozen=True):
    """The status and the constant fields of OpenAI's error object that belong to an outcome."""

    status: int
    type: str
    code: str
    message: str


_INVALID = "invalid_request_error"
_LIMIT = "rate_limit_error"

# None: the client has the upstream's answer already, or is not there to be answered.
ANSWERS: Final[dict[Outcome, Answer | None]] = {
    Outcome.COMPLETED: None,
    Outcome.EMPTY_STREAM: None,
    Outcome.CLIENT_GONE: None,
    Outcome.UPSTREAM_BROKEN: None,
    Outcome.BAD_REQUEST: Answer(400, _INVALID, "bad_request", "Malformed request"),
    Outcome.UNKNOWN_MODEL: Answer(
        404, _INVALID, "model_not_found", "The model does not exist here"
    ),
    Outcome.METHOD_REFUSED: Answer(405, _INVALID, "method_not_allowed", "This is no forward proxy"),
    Outcome.REQUEST_TIMEOUT: Answer(
        408, _INVALID, "request_timeout", "The request did not arrive in time"
    ),
    Outcome.BODY_TOO_LARGE: Answer(
        413, _INVALID, "body_too_large", "The request body is too large"
    ),
    Outcome.URI_TOO_LONG: Answer(414, _INVALID, "uri_too_long", "The request target is too long"),
    Outcome.HEADERS_TOO_LARGE: Answer(
        431,
        _INVALID,
        "headers_too_large",
        "The request's header section is too large",
    ),
    Outcome.CODING_UNKNOWN: Answer(
        501, _INVALID, "transfer_coding_unknown", "Only chunked is known"
    ),
    Outcome.VERSION_UNKNOWN: Answer(
        505,
        _INVALID,
        "http_version_unknown",
        "HTTP/1.0 and HTTP/1.1 are known here",
    ),
    Outcome.UPSTREAM_FAILED: Answer(
        502, "api_error", "upstream_failed", "The upstream broke off unanswered"
    ),
    Outcome.NO_ENDPOINT: Answer(503, "api_error", "no_endpoint", "No endpoint can be reached"),
    Outcome.OVERLOADED: Answer(503, "api_error", "overloaded", "The gateway is full"),
    Outcome.SHUT_DOWN: Answer(503, "api_error", "shutting_down", "The gateway is shutting down"),
    Outcome.UPSTREAM_TIMEOUT: Answer(
        504, "api_error", "upstream_timeout", "The upstream did not answer"
    ),
    Outcome.UNKNOWN_KEY: Answer(401, _INVALID, "invalid_api_key", "The API key is not known here"),
    Outcome.QUEUE_FULL: Answer(429, _LIMIT, "queue_full", "Too many requests wait"),
    Outcome.QUEUE_BYTES: Answer(429, _LIMIT, "queue_full", "Too many bytes wait"),
    Outcome.DEADLINE_INFEASIBLE: Answer(
        429, _LIMIT, "deadline_infeasible", "It would have to wait longer than it may"
    ),
    Outcome.QUEUE_TIMEOUT: Answer(504, "api_error", "queue_timeout", "It has waited too long"),
    Outcome.DISPLACED: Answer(429, _LIMIT, "displaced", "Others needed its place in the queue"),
}


def error_body(answer: Answer, *, detail: str = "", param: str | None = None) -> bytes:
    """Build OpenAI's error object; `detail` is added to the message."""
    message = f"{answer.message}: {detail}" if detail else f"{answer.message}."
    return msgspec.json.encode(
        {"error": {"message": message, "type": answer.type, "param": param, "code": answer.code}}
    )


HEARTBEAT: Final = b"c\r\n: waiting\n\n\r\n"
"""A comment of an event stream, as one chunk (WHATWG HTML, section 9.2.6: readers ignore it)."""


def stream_head(extra: bytes) -> bytes:
    """Build the head of an event stream that the gateway begins itself."""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n" + extra + b"\r\n"
    )


def chunk(data: bytes) -> bytes:
    """Frame bytes as one chunk; there must be some."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def error_event(body: bytes) -> bytes:
    """Build an event, as one chunk, that carries an error's JSON: all a begun stream can say."""
    return chunk(b"data: %b\n\n" % body.replace(b"\r", b" ").replace(b"\n", b" "))


def build(
    status: int,
    body: bytes,
    *,
    connection: str = "",
    retry_after_s: float | None = None,
    head_only: bool = False,
    extra: str = "",
) -> bytes:
    """Build a whole response with a JSON body.

    `connection` is its Connection field, or empty; `extra` are further lines, each with its CRLF.
    Retry-After is rounded up to whole seconds (RFC 9110 section 10.2.3). `head_only`: the answer
    to HEAD, of which the body is left out.
    """
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if retry_after_s is not None:
        lines.append(f"Retry-After: {max(1, math.ceil(retry_after_s))}")
    if connection:
        lines.append(f"Connection: {connection}")
    head = "\r\n".join([*lines, extra + "\r\n"])
    return head.encode() + (b"" if head_only else body)
