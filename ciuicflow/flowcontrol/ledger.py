"""What is in flight at one endpoint, and whether more may come.

The ledger is the truth: it counts from grant to release, whatever the engine reports or fails to
report, and however long a request takes.
"""

from math import exp, inf
from typing import Final

from ciuicflow.flowcontrol.actions import Endpoint, RequestId, Role
from ciuicflow.flowcontrol.cost import Cost
from ciuicflow.flowcontrol.flight import Flight
from ciuicflow.flowcontrol.limit import AdaptiveLimit
from ciuicflow.flowcontrol.measure import Observer
from ciuicflow.flowcontrol.signals import Bound

_SENT_MEMORY_S: Final = 10.0
# More tokens that an answer may take which is longer than expected.
_OUTGROWN_TOKENS: Final = 16
_OUTGROWN_PART: Final = 0.25


class EndpointLedger:
    """Counts what is in flight, and lets the limit adapt once per round."""

    def __init__(self, endpoint: Endpoint, opted_in_share: float, now: float) -> None:
        self.endpoint = endpoint
        self.limit = AdaptiveLimit()
        self.limit.set_ceilings(endpoint.max_requests, endpoint.max_tokens)
        self.observer = Observer(now)
        self.tokens = 0
        """Held by opted-in requests in flight."""
        self.bypass_requests = self.bypass_tokens = 0
        self._flights: dict[RequestId, Flight] = {}
        self.set_opted_in_share(opted_in_share)
        self._sent_s = now
        self._ours_sent = self._theirs_sent = 0.0  # tokens, of the last seconds
        self._last_bound = Bound.PREFILL
        self._resumes_s = -inf  # when headroom lets the next lower prompt come

    def set_opted_in_share(self, share: float) -> None:
        """Set the part of what is in flight that bypass cannot take away, below 1."""
        self._guard = share / (1 - share)  # of bypass, what may always be beside it

    @property
    def requests(self) -> int:
        """Opted-in requests in flight."""
        return len(self._flights)

    @property
    def load(self) -> float:
        """How full it is by its own limits; 1.0 is full."""
        requests = (len(self._flights) + self.bypass_requests) / self.limit.requests
        return max(requests, (self.tokens + self.bypass_tokens) / self.limit.tokens)

    # May another one come?

    def is_full(self) -> bool:
        """Whether not even the smallest request of the first tier has room."""
        more = len(self._flights) + 1
        if more == 1 or more <= self._allowed(self.limit.requests, self.bypass_requests):
            return False
        self.observer.bounds.add(Bound.REQUESTS)
        return True

    @property
    def waits_for_line(self) -> bool:
        """Whether prompts in line were the last thing that held a request back."""
        return self._last_bound is Bound.PREFILL

    def has_room(self, now: float, cost: Cost, role: Role, share: float = 1.0) -> bool:
        """Whether a request may be placed; `share`: the part of the limits that it may fill.

        One that is larger than any limit goes alone.
        """
        self.advance(now)
        if not self._flights:
            return True
        if share < 1.0 and now < self._resumes_s:
            return False
        limit = self.limit
        if len(self._flights) + 1 > self._allowed(limit.requests * share, self.bypass_requests):
            return self._held(Bound.REQUESTS, share)
        if self.tokens + cost.held_tokens > self._allowed(limit.tokens * share, self.bypass_tokens):
            return self._held(Bound.TOKENS, share)
        line = self.observer.line
        if role is Role.DECODE or not line:
            return True
        if self.observer.line_tokens + cost.prefill_tokens > limit.prefill_tokens * share:
            self._held(Bound.PREFILL, share)
            return self._deprived and self.observer.blocked_s(now) > 0 and self._below_guard
        return True

    def _held(self, bound: Bound, share: float) -> bool:
        """Note what is in the way; what only headroom holds back does not show a low limit."""
        self._last_bound = bound
        binds = share == 1.0 or self.limit.starting
        self.observer.bounds.add(bound if binds else Bound.HEADROOM)
        return False

    def _allowed(self, limit: float, bypass: float) -> float:
        """Return what opted-in requests may have in flight beside bypass requests.

        An engine serves in order of arrival, so who has half of what is in flight gets half of
        its service. Opted-in requests that got less than their part lately may hold that part of
        what is in flight, also where bypass alone exceeds the limit.
        """
        if not bypass:
            return limit
        return max(limit - bypass, bypass * self._guard if self._deprived else 0.0)

    @property
    def _deprived(self) -> bool:
        """Whether opted-in requests were sent less than their part of the tokens lately."""
        return self._theirs_sent * self._guard > self._ours_sent

    @property
    def _below_guard(self) -> bool:
        return len(self._flights) < self.bypass_requests * self._guard

    # What happens to a request.

    def place(
        self,
        now: float,
        id_: RequestId,
        cost: Cost,
        role: Role,
        itl_target_s: float,
        *,
        streams: bool,
        share: float = 1.0,
    ) -> None:
        """A request goes to this endpoint; `share` as it was given to `has_room`."""
        self._count(now)
        self._note_sent(now, cost.held_tokens, 0)
        flight = Flight(
            cost,
            itl_target_s,
            now,
            share,
            streams=streams,
            lines_up=streams and role is not Role.DECODE,
            expected_tokens=cost.held_tokens - cost.prefill_tokens,
        )
        self._flights[id_] = flight
        self.tokens += cost.held_tokens
        self.observer.placed(now, id_, flight)

    def first_token(self, now: float, id_: RequestId) -> None:
        """Its first token is out."""
        flight = self._flights.get(id_)
        if flight is not None and flight.streams and not flight.tokens:
            self.observer.first_token(now, id_, flight)
            self._pause_lower(now, flight)

    def progress(self, now: float, id_: RequestId, tokens: int) -> None:
        """More of its tokens are out."""
        flight = self._flights.get(id_)
        if flight is None or not flight.tokens:
            return
        self.observer.progress(now, flight, tokens)
        if flight.tokens > flight.expected_tokens:
            self._outgrow(now, id_, flight)

    def correct(self, now: float, id_: RequestId, cost: Cost) -> None:
        """Its cost turned out to be another."""
        flight = self._flights.get(id_)
        if flight is not None:
            self._count(now)
            self.tokens += cost.held_tokens - flight.cost.held_tokens
            self.observer.changed_cost(flight, cost)

    def release(
        self, now: float, id_: RequestId, tokens: int | None, *, answered: bool = False
    ) -> int:
        """It has ended here; return the tokens that it put out, `tokens` if that is known.

        `answered`: by the engine, whole and well.
        """
        flight = self._flights.pop(id_, None)
        if flight is None:
            return 0
        self.observer.count(now, *self._in_flight(1))
        self.tokens -= flight.cost.held_tokens
        if not flight.serving:
            self._pause_lower(now, flight)
        self.observer.released(now, id_, flight, tokens, answered=answered)
        return flight.tokens if tokens is None else tokens

    def bypass(self, now: float, requests: int, tokens: int, arrived_tokens: int) -> None:
        """So many bypass requests are here now, of which some came since the last call."""
        self._count(now)
        self._note_sent(now, 0, arrived_tokens)
        self.bypass_requests = requests
        self.bypass_tokens = tokens

    def reconfigure(self, endpoint: Endpoint) -> None:
        """Take over what is known of the endpoint now; what was learnt stays."""
        self.endpoint = endpoint
        self.limit.set_ceilings(endpoint.max_requests, endpoint.max_tokens)

    def _outgrow(self, now: float, id_: RequestId, flight: Flight) -> None:
        """An answer is longer than expected: it holds more, and more may come."""
        more = max(_OUTGROWN_TOKENS, int(flight.expected_tokens * _OUTGROWN_PART))
        flight.expected_tokens += more
        cost = flight.cost
        self.correct(now, id_, Cost(cost.work, cost.prefill_tokens, cost.held_tokens + more))

    def _pause_lower(self, now: float, flight: Flight) -> None:
        """Where prompts are the bottleneck, headroom is time in which no lower one is computed."""
        if flight.share < 1.0:
            prompt_s = self.observer.prefill.predict_s(flight.cost.prefill_tokens)
            self._resumes_s = now + prompt_s * (1.0 - flight.share) / flight.share

    def _note_sent(self, now: float, ours: int, theirs: int) -> None:
        kept = exp(-(now - self._sent_s) / _SENT_MEMORY_S)
        self._sent_s = now
        self._ours_sent = self._ours_sent * kept + ours
        self._theirs_sent = self._theirs_sent * kept + theirs

    def _count(self, now: float) -> None:
        self.observer.count(now, *self._in_flight())

    def _in_flight(self, more: int = 0) -> tuple[int, int]:
        requests = len(self._flights) + more + self.bypass_requests
        return requests, self.tokens + self.bypass_tokens

    # Rounds.

    def changes_s(self, now: float) -> float:
        """Return when there may be room next without any event."""
        ends_s = self.observer.round_ends_s
        return min(ends_s, self._resumes_s) if now < self._resumes_s else ends_s

    def advance(self, now: float) -> None:
        """End the round if it is due, and let the limit adapt."""
        if now < self.observer.round_ends_s:
            return
        self._count(now)
        targets = (flight.itl_target_s for flight in self._flights.values())
        signals = self.observer.end_round(
            now,
            itl_target_s=min(targets, default=inf),
            bypass_requests=self.bypass_requests,
            bypass_tokens=self.bypass_tokens,
            foreign=self.bypass_requests * (1 + self._guard) > self.limit.requests,
        )
        self.limit.update(signals)
