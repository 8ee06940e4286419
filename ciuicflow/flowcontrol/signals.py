"""What one round at an endpoint has shown: the input of the limit."""

from enum import Enum

import msgspec


class Bound(Enum):
    """What held a request back."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    PREFILL = "prefill"
    HEADROOM = "headroom"  # it alone: the limit itself was not in the way

    # Enum's own is Python code, and these are put into sets for every request that waits.
    __hash__ = object.__hash__


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint's requests have shown in one round."""

    seconds: float
    answers: int
    """First tokens, and answers in one piece, that came."""
    bounds: frozenset[Bound]
    requests: float
    """In flight, on average, bypass included."""
    tokens: float
    serving: int
    """Most requests that were served at the same time, bypass included."""
    serving_tokens: int
    """Most tokens that such requests hold."""
    blocked: float
    """Part of the time in which the front of the line was left alone."""
    line_s: float
    """Mean time that a request lost behind others' prompts."""
    line_max_s: float
    """How long that may be."""
    stalls: int
    """Running requests that were set aside."""
    late: float
    """Mean time that answers in one piece took, in parts of what they may take; above 1: too long,
    0.0: not known, or not needed."""
    hidden: int
    """Requests that the engine reports as waiting, beyond those known to wait."""
    itl_s: float
    itl_target_s: float
    """The strictest of the tiers in flight."""
    lifetime_s: float
    """Usual time from placement to the end."""
    usual_prefill: float
    """Uncached tokens of a usual prompt."""
    foreign: bool
    """Bypass takes more than its part: what the engine queues says nothing about us."""
