"""What can become of a request in flow control: one closed set, one table of HTTP answers."""

from enum import StrEnum
from typing import Final

import msgspec


class QueueOutcome(StrEnum):
    """How a request left flow control. Each has exactly one; the value is the metric label."""

    DISPATCHED = "dispatched"
    REJECTED_QUEUE_FULL = "rejected_queue_full"  # its tier, or the gateway, holds too many
    REJECTED_BYTES = "rejected_bytes"  # the bodies held are too large in sum
    REJECTED_DEADLINE = "rejected_deadline"  # it would wait longer than it may
    REJECTED_NO_ENDPOINT = "rejected_no_endpoint"  # none that serves its model is up
    EVICTED_TIMEOUT = "evicted_timeout"  # its deadline or the tier's longest wait has passed
    EVICTED_DISPLACED = "evicted_displaced"  # gave its place to a higher tier or a lighter tenant
    EVICTED_NO_ENDPOINT = "evicted_no_endpoint"  # no endpoint serves its model any more
    CANCELLED = "cancelled"  # the client left while it waited


class HttpHint(msgspec.Struct, frozen=True):
    """The HTTP answer that belongs to an outcome."""

    status: int
    retry_after: bool
    """Whether the answer carries Retry-After."""


# None: the client has another answer already, or is not there to be answered.
HTTP_HINTS: Final[dict[QueueOutcome, HttpHint | None]] = {
    QueueOutcome.DISPATCHED: None,
    QueueOutcome.REJECTED_QUEUE_FULL: HttpHint(429, retry_after=True),
    QueueOutcome.REJECTED_BYTES: HttpHint(429, retry_after=True),
    QueueOutcome.REJECTED_DEADLINE: HttpHint(429, retry_after=True),
    QueueOutcome.REJECTED_NO_ENDPOINT: HttpHint(503, retry_after=True),
    QueueOutcome.EVICTED_TIMEOUT: HttpHint(504, retry_after=False),
    QueueOutcome.EVICTED_DISPLACED: HttpHint(429, retry_after=True),
    QueueOutcome.EVICTED_NO_ENDPOINT: HttpHint(503, retry_after=True),
    QueueOutcome.CANCELLED: None,
}
