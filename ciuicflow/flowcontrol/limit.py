"""How much an endpoint may have in flight: requests, tokens, and prompt tokens not yet computed.

All three are learnt from what the gateway sees itself. The rule asks, in each round: was the
engine seen to leave our oldest request alone (`blocked`), to stand in line behind its own
prompts (`line_s`), or to drop running requests for want of memory (`stalls`)? Then it holds more
than it serves, and the limit to blame goes down towards what it was seen serving; otherwise the
limit that was in the way goes up, ever faster, until one of them happens.

Reasons for this and not something simpler, from tests/simulation at 2x overload:
- One limit on requests is enough for engines bound by slots, but where prompts are the
  bottleneck the number that decodes varies so much that a fixed number of requests either idles
  the engine (12: 0.95 of its capacity) or puts 1.5 prompts in line before a gold one. A bound on
  the prompt tokens not yet computed gives 0.985 with 0.45 in line.
- A decrease by a factor (0.9 of 8 slots) empties slots. What is being served is known, so the
  decrease stops there: requests that put out tokens at the same time are proof of capacity.
- Time to first token over its prediction, as a ratio, punishes engines whose steps grow with the
  batch, and an error in the prediction starves them. Time left alone, as a part of all time, is
  0 in such an engine, and an error costs no more than a request waiting in the engine.
- Without a limit on tokens, an engine bound by memory set aside 4 to 5 times as many requests.
- Decreases once per round, before the last one took effect, made the limit on tokens swing by a
  half where answers take minutes (0.92 of the capacity instead of 0.95).
"""

from math import exp, inf
from typing import Final

from ciuicflow.flowcontrol.signals import Bound, Signals

BLOCKED_MAX: Final = 0.1
"""Part of the time that the engine may leave our oldest request alone: it shows that the limit
is not too low. 0.05 to 0.4 all give 0.99 of the capacity; more is more waiting."""
BLOCKED_START: Final = 0.5  # ends the doubling at the start
LINE_STEPS: Final = 1.0
"""Steps of the engine that prompts may stand in line; 2 give 0.99 of the capacity, not 0.985, and
twice the line."""

START_REQUESTS: Final = 8
_START_PREFILL: Final = 2048.0
_ITL_FLOOR: Final = 0.25  # part of the limit that no inter-token target takes away
_ITL_MARGIN: Final = 1.1
_FEW: Final = 2.0  # requests
_SERVED_MEMORY_S: Final = 10.0
_LEAST_STEP: Final = 0.02
_SHORTEST_CLOCK_S: Final = 1.0  # bounds of the time after which an increase doubles
_LONGEST_CLOCK_S: Final = 20.0


_HARD: Final = frozenset({Bound.REQUESTS, Bound.TOKENS})


class AdaptiveLimit:
    """The three limits of one endpoint."""

    def __init__(self) -> None:
        self.prefill_tokens = _START_PREFILL
        """Prompt tokens that may stand in line."""
        self._requests = float(START_REQUESTS)
        self._tokens = inf  # until the engine was first seen full
        self._paced = inf  # requests, for the sake of the inter-token target
        self._least_itl_s = inf
        self._max_requests = self._max_tokens = inf
        self.requests = float(START_REQUESTS)
        """Requests that may be in flight, at least 1."""
        self.tokens = inf
        """Prompt and output tokens that they may hold; inf: not known yet."""
        self.starting = True
        """Whether the engine was never seen full."""
        self._prefill_starting = True
        self._clean_s = 0.0
        self._served = self._served_tokens = 0.0
        self._stalled_s = inf  # since the last decrease for stalls

    def set_ceilings(self, requests: float | None, tokens: float | None) -> None:
        """Set configured bounds that the learnt limits never exceed; None: no bound."""
        self._max_requests = inf if requests is None else requests
        self._max_tokens = inf if tokens is None else tokens
        self._settle()

    def update(self, seen: Signals) -> None:
        """Adapt to one round."""
        self._remember(seen)
        self._adapt_prefill(seen)
        if not seen.foreign:
            self._adapt_pace(seen)
            self._adapt(seen)
            self._settle()

    def _settle(self) -> None:
        self.requests = max(1.0, min(self._requests, self._paced, self._max_requests))
        self.tokens = min(self._tokens, self._max_tokens)

    def _adapt(self, seen: Signals) -> None:
        if seen.stalls and self._stalled_s > seen.lifetime_s / 4:
            self._stalled_s = 0.0
            self._end_start()
            self._tokens = max(1.0, min(self._tokens, seen.tokens) * 0.95)
        blocked = max(seen.blocked, min(seen.hidden, 1.0), 1.0 if seen.late > 1 else 0.0)
        if blocked > (BLOCKED_START if self.starting else BLOCKED_MAX):
            self._decrease(seen, blocked)
        elif not seen.stalls and seen.bounds & _HARD:
            self._increase(seen)
        elif not seen.stalls and Bound.HEADROOM in seen.bounds:
            self._recover(seen)

    def _remember(self, seen: Signals) -> None:
        kept = exp(-seen.seconds / _SERVED_MEMORY_S)
        self._served = max(float(seen.serving), self._served * kept)
        self._served_tokens = max(seen.serving_tokens, self._served_tokens * kept)
        self._stalled_s += seen.seconds

    def _decrease(self, seen: Signals, blocked: float) -> None:
        """Lower what is nearer to its limit, not below what was just being served."""
        if not seen.bounds & _HARD:
            if blocked <= BLOCKED_START:
                return  # below the limits, a little of it proves nothing
            # The engine is the bound, not we: the limits come down to what it holds.
            self._requests = min(self._requests, max(self._served, seen.requests) + 1)
            self._tokens = min(self._tokens, max(self._served_tokens, seen.tokens))
        self._end_start()
        less = 0.5 * (blocked + max(0.0, seen.hidden - 1)) / max(seen.requests, 1.0)
        if seen.late > 1:
            less = max(less, min(0.5, 1 - 1 / seen.late))
        if seen.requests > self._requests or seen.tokens > self._tokens:
            return  # the last decrease has yet to come into effect: nothing running is stopped
        # Of answers in one piece nobody knows whether they are served.
        proven = not seen.hidden and seen.late <= 1
        if self._requests / max(seen.requests, 0.1) <= self._tokens / max(seen.tokens, 1.0):
            floor = min(self._requests, self._served) if proven else 1.0
            self._requests = max(floor, self._requests * (1 - less))
        else:
            floor = min(self._tokens, self._served_tokens) if proven else 1.0
            self._tokens = max(floor, self._tokens * (1 - less))

    def _end_start(self) -> None:
        self.starting = False
        self._clean_s = 0.0

    def _increase(self, seen: Signals) -> None:
        if self.starting:
            self._requests *= 2 if seen.answers else 1
            return
        clock_s = min(max(seen.lifetime_s, _SHORTEST_CLOCK_S), _LONGEST_CLOCK_S)
        self._clean_s += seen.seconds
        step = max(1.0 / max(seen.requests, 1.0), _LEAST_STEP)
        share = min(0.5, step * 2 ** min(self._clean_s / clock_s, 20) * seen.seconds / clock_s)
        if Bound.REQUESTS in seen.bounds and self._paced == inf:
            self._requests *= 1 + share
        if Bound.TOKENS in seen.bounds:
            self._tokens *= 1 + share

    def _recover(self, seen: Signals) -> None:
        """Go back to what was served lately: with headroom the limits are rarely in the way."""
        share = 0.1 * seen.seconds
        if self._requests < self._served:
            self._requests *= 1 + share
        if self._tokens < self._served_tokens:
            self._tokens *= 1 + share

    def _adapt_prefill(self, seen: Signals) -> None:
        if seen.line_s > seen.line_max_s:
            # At the start it is known to be far too high; later one long prompt may be the cause.
            less = seen.line_max_s / seen.line_s
            less = less if self._prefill_starting else max(0.7, (1 + less) / 2)
            self._prefill_starting = False
            self.prefill_tokens = max(1.0, self.prefill_tokens * less)
        elif Bound.PREFILL in seen.bounds and seen.answers and seen.blocked <= BLOCKED_MAX:
            grown = max(self.prefill_tokens, seen.usual_prefill)
            self.prefill_tokens = grown * (2.0 if self._prefill_starting else 1.1)

    def _adapt_pace(self, seen: Signals) -> None:
        """Hold the inter-token time to the target, at most down to a quarter of the limit.

        A further quarter of the requests would still not reach a target that the engine misses
        with a quarter of them, and cost most of its throughput.
        """
        if seen.requests <= _FEW:
            self._least_itl_s = seen.itl_s
        elif seen.itl_s:
            self._least_itl_s = min(self._least_itl_s, seen.itl_s)
        if self._least_itl_s * _ITL_MARGIN > seen.itl_target_s:
            self._paced = inf  # it is missed with hardly a request in flight: less does not help
        elif seen.itl_s > seen.itl_target_s:
            if self._paced == inf:
                self._end_start()
                self._requests = min(self._requests, max(self._served, seen.requests) + 1)
            if seen.requests <= self._paced * 1.05:  # the last decrease has come into effect
                to = max(0.8, seen.itl_target_s / seen.itl_s) * seen.requests
                self._paced = max(to, _ITL_FLOOR * self._requests)
        elif (
            seen.itl_s < 0.9 * seen.itl_target_s
            and self._paced < inf
            and Bound.REQUESTS in seen.bounds
        ):
            self._paced *= 1.05
            if self._paced > self._requests:
                self._paced = inf
