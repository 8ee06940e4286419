"""What the gateway knows of a request's and a response's head."""

import msgspec


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """A request's head, ready to be sent on."""

    method: bytes
    target: bytes  # origin-form or `*` (RFC 9112 section 3.2)
    http11: bool
    lines: bytes  # end-to-end header lines as received, each ending in CRLF
    content_length: int  # 0 where the request has no body or is chunked
    chunked: bool
    keep_alive: bool
    expects_continue: bool
    upgrade: bytes  # the protocols asked for; empty: none
    has_host: bool  # an HTTP/1.0 client need not send one


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """A response's head, ready to be sent on."""

    status: int
    reason: bytes  # reason phrase with its leading space, as received
    lines: bytes  # end-to-end header lines as received, each ending in CRLF
    content_length: int | None
    chunked: bool
    keep_alive: bool
    keep_alive_s: float | None  # how long the upstream says that it keeps an idle connection
    event_stream: bool
    upgrade: bytes
