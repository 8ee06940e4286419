"""What can become of a request: one closed set, used in code, metrics and log lines alike."""

from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended. Every request ends in exactly one of these.

    The value is the metric label. `gateway/responses.py` maps each member to its HTTP answer.
    """

    COMPLETED = "completed"  # the upstream's answer reached the client whole, whatever its status
    EMPTY_STREAM = "empty_stream"  # 200 text/event-stream that ended without a byte
    CLIENT_GONE = "client_gone"  # the client left first
    BAD_REQUEST = "bad_request"
    METHOD_REFUSED = "method_refused"
    UNKNOWN_MODEL = "unknown_model"
    REQUEST_TIMEOUT = "request_timeout"  # the client stopped sending in mid-request
    BODY_TOO_LARGE = "body_too_large"
    URI_TOO_LONG = "uri_too_long"
    HEADERS_TOO_LARGE = "headers_too_large"
    CODING_UNKNOWN = "coding_unknown"  # a transfer coding other than chunked
    VERSION_UNKNOWN = "version_unknown"  # not HTTP/1.0 or HTTP/1.1
    UPSTREAM_FAILED = "upstream_failed"  # broke before the first response byte
    UPSTREAM_BROKEN = "upstream_broken"  # broke after it: the client saw an unclean end
    UPSTREAM_TIMEOUT = "upstream_timeout"
    NO_ENDPOINT = "no_endpoint"  # none could be connected to
    OVERLOADED = "overloaded"  # a bound of the gateway itself: buffered bytes, connections
    SHUT_DOWN = "shut_down"  # cut when the drain time was over
    # Of opted-in requests only.
    UNKNOWN_KEY = "unknown_key"  # a known API key is required
    QUEUE_FULL = "queue_full"  # its tier, or the gateway, holds too many
    QUEUE_BYTES = "queue_bytes"  # the bodies that wait are too large in sum
    DEADLINE_INFEASIBLE = "deadline_infeasible"  # it would wait longer than it may
    QUEUE_TIMEOUT = "queue_timeout"  # its deadline or its tier's longest wait has passed
    DISPLACED = "displaced"  # gave its place in the queue to a higher tier or a lighter tenant

    # Enum's own is Python code: 3 500 instructions more for every counted request (measured).
    __hash__ = str.__hash__
