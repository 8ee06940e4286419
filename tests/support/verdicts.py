"""Which outcomes of a request are flow control's own verdicts."""

from typing import Final

from ciuicflow.request import Outcome

REFUSALS: Final = frozenset(
    {
        Outcome.NO_ENDPOINT,
        Outcome.QUEUE_FULL,
        Outcome.QUEUE_BYTES,
        Outcome.DEADLINE_INFEASIBLE,
        Outcome.QUEUE_TIMEOUT,
        Outcome.DISPLACED,
    }
)
