"""What the requests in flight at one endpoint show of it, round by round.

A round is about two times to first token long. Its signals say which of our requests the engine
did not serve, and why: they stood in line behind prompts, they were left alone though nothing
stood before them, or they were set aside while they ran.
"""

from collections import OrderedDict
from math import inf
from typing import Final

from ciuicflow.flowcontrol.actions import RequestId
from ciuicflow.flowcontrol.cost import Cost
from ciuicflow.flowcontrol.flight import Flight
from ciuicflow.flowcontrol.limit import LINE_STEPS, START_REQUESTS
from ciuicflow.flowcontrol.prefill import PrefillModel
from ciuicflow.flowcontrol.signals import Bound, Signals

_SHORTEST_ROUND_S: Final = 0.05
_LONGEST_ROUND_S: Final = 2.0
_ALONE_FACTOR: Final = 1.5  # what stands in front of the line may take this times the prediction
_MISSED_STEPS: Final = 8  # of the engine: then a running request was set aside
_JOIN_STEPS: Final = 1.5  # a request waits for the step that runs, and is computed in the next
_WHOLE_FACTOR: Final = 3.0  # an answer in one piece may take this times what it takes alone
_REPORT_MAX_AGE_S: Final = 5.0
_PEAK_KEPT: Final = 0.9  # from round to round
_SMOOTH: Final = 0.1
_SMOOTH_ROUND: Final = 0.3


class Observer:
    """Watches one endpoint's requests. Times are seconds; a call's `now` never goes back."""

    def __init__(self, now: float) -> None:
        self.prefill = PrefillModel()
        self.itl_s = 0.0
        """Mean time between tokens of a stream, lately; 0.0: not known."""
        self.ttft_s = 0.0
        """Time from placement to first token, lately; 0.0: not known."""
        self.line: OrderedDict[RequestId, Flight] = OrderedDict()
        """Requests without a token, in order of placement."""
        self.line_tokens = 0
        """Their uncached prompt tokens."""
        self.bounds: set[Bound] = set()
        """What held requests back in this round."""
        # Answers in one piece: what one takes by its work, with few of them in flight.
        self._whole = PrefillModel()
        self._lifetime_s = 0.0
        self._step = 0  # of the engine, as far as its streams show
        self._serving = self._serving_tokens = 0
        # How long prompts may keep an engine, or one rank of it, from putting out tokens.
        self._prompts_pause_s = inf
        self._line_peak = 0.0
        self._reported: int | None = None  # waiting in the engine, if not yet accounted for
        self._reported_s = -inf
        self._counted_s = now
        self._start_round(now)

    def _start_round(self, now: float) -> None:
        self._round_s = now
        self._request_seconds = self._token_seconds = 0.0
        self._blocked_s = self._lined_s = self._gaps_s = self._late = 0.0
        self._firsts = self._wholes = self._stalls = self._gaps = 0
        self._most_serving, self._most_serving_tokens = self._serving, self._serving_tokens
        self.bounds.clear()
        response_s = self.ttft_s or self._lifetime_s
        self.round_ends_s = now + min(max(2 * response_s, _SHORTEST_ROUND_S), _LONGEST_ROUND_S)
        """After twice the time that an answer needs to begin."""

    # What happens to requests.

    def count(self, now: float, requests: int, tokens: int) -> None:
        """So many were in flight since the last call; to be called before that changes."""
        passed_s = now - self._counted_s
        self._counted_s = now
        self._request_seconds += requests * passed_s
        self._token_seconds += tokens * passed_s

    def placed(self, now: float, id_: RequestId, flight: Flight) -> None:
        """A request went to the endpoint."""
        if not flight.lines_up:
            self._serve(now, flight)
            return
        flight.alone = not self.line
        if flight.alone:
            flight.front_s = now
        self.line[id_] = flight
        self.line_tokens += flight.cost.prefill_tokens
        self._line_peak = max(self._line_peak, self.line_tokens)

    def first_token(self, now: float, id_: RequestId, flight: Flight) -> None:
        """Its first token came."""
        if flight.serving:  # where others compute prompts
            flight.tokens, flight.step, flight.last_s = 1, self._step, now
            return
        self._firsts += 1
        self._lined_s += self._lost_in_line_s(now, flight)
        if flight.front_s is not None:
            self._blocked_s += self.blocked_s(now)
            seconds = now - flight.front_s - _JOIN_STEPS * self.itl_s
            self.prefill.learn(flight.cost.prefill_tokens, seconds, alone=flight.alone)
        self.ttft_s = _towards(self.ttft_s, now - flight.placed_s)
        self._leave_line(now, id_, flight)
        flight.tokens = 1
        flight.step = self._step
        self._serve(now, flight)

    def progress(self, now: float, flight: Flight, tokens: int) -> None:
        """More of its tokens came, after its first."""
        # A stream that emits again is a step further than those that have not since.
        if flight.step == self._step:
            self._step += 1
        gap_s = now - flight.last_s
        if self._step - flight.step > _MISSED_STEPS and gap_s > self._prompts_pause_s:
            self._stalls += 1
        else:
            self._gaps_s += gap_s
            self._gaps += tokens
        flight.step = self._step
        flight.last_s = now
        flight.tokens += tokens

    def changed_cost(self, flight: Flight, cost: Cost) -> None:
        """Its cost turned out to be another."""
        if flight.serving:
            self._serving_tokens += cost.held_tokens - flight.cost.held_tokens
        else:
            self.line_tokens += cost.prefill_tokens - flight.cost.prefill_tokens
        flight.cost = cost

    def released(
        self, now: float, id_: RequestId, flight: Flight, tokens: int | None, *, answered: bool
    ) -> None:
        """It has ended; `tokens` is the length of its answer where the engine told it.

        `answered`: by the engine, whole and well. Others tell nothing of what an answer takes.
        """
        if answered and not flight.tokens:
            work = flight.cost.prefill_tokens + 2 * (tokens or flight.expected_tokens)
            self._judge_whole(now - flight.placed_s, work)
        self._lifetime_s = _towards(self._lifetime_s, now - flight.placed_s)
        if not flight.serving:
            if flight.front_s is not None:
                self._blocked_s += self.blocked_s(now)
            self._leave_line(now, id_, flight)
            return
        self._serving -= 1
        self._serving_tokens -= flight.cost.held_tokens

    def reported(self, now: float, waiting: int) -> None:
        """The engine says how many requests wait in it."""
        self._reported, self._reported_s = waiting, now

    def _serve(self, now: float, flight: Flight) -> None:
        flight.serving = True
        flight.last_s = now
        self._serving += 1
        self._serving_tokens += flight.cost.held_tokens
        self._most_serving = max(self._most_serving, self._serving)
        self._most_serving_tokens = max(self._most_serving_tokens, self._serving_tokens)

    def _leave_line(self, now: float, id_: RequestId, flight: Flight) -> None:
        del self.line[id_]
        self.line_tokens -= flight.cost.prefill_tokens
        if flight.front_s is not None and self.line:
            next(iter(self.line.values())).front_s = now

    def _judge_whole(self, seconds: float, work: int) -> None:
        self._wholes += 1
        if self._whole.known:
            self._late += seconds / (_WHOLE_FACTOR * self._whole.predict_s(work))
        self._whole.learn(work, seconds, alone=self._serving < START_REQUESTS)

    # What that means.

    def blocked_s(self, now: float) -> float:
        """Return for how long of this round the front of the line was left alone until now."""
        if not self.line or not self.prefill.known:
            return 0.0
        front = next(iter(self.line.values()))
        assert front.front_s is not None
        due_s = front.front_s + _ALONE_FACTOR * self._expected_s(front)
        return max(0.0, now - max(self._round_s, due_s))

    def _expected_s(self, flight: Flight) -> float:
        """Return the time from the front of the line to the first token in an idle engine."""
        prompt_s = self.prefill.predict_s(flight.cost.prefill_tokens)
        return prompt_s + _JOIN_STEPS * self.itl_s

    def _lost_in_line_s(self, now: float, flight: Flight) -> float:
        """Return for how long others' prompts kept a request waiting, now that it is served.

        Engines of several ranks compute several prompts at once: then it stood there, but lost
        no time.
        """
        stood_s = (now if flight.front_s is None else flight.front_s) - flight.placed_s
        if not self.prefill.known:
            return stood_s
        return min(stood_s, max(0.0, now - flight.placed_s - self._expected_s(flight)))

    def _line_max_s(self) -> float:
        """Return how long a request may stand in line on average.

        LINE_STEPS keep a serial engine at work. One usual prompt is what two prompts that meet at
        the same of several ranks cost, which must not end the search for more.
        """
        prompt_s = self.prefill.per_token_s * self.prefill.usual_tokens
        return max(LINE_STEPS * self.itl_s, prompt_s) + self.prefill.base_s + 1e-3

    # Rounds.

    def end_round(
        self,
        now: float,
        *,
        itl_target_s: float,
        bypass_requests: int,
        bypass_tokens: int,
        foreign: bool,
    ) -> Signals:
        """Return what the round showed, and start the next. `count` must be up to date."""
        self._blocked_s += self.blocked_s(now)
        if self._gaps:
            self.itl_s = _towards(self.itl_s, self._gaps_s / self._gaps, _SMOOTH_ROUND)
        if self.prefill.known:
            prompts_s = self.prefill.predict_s(int(self._line_peak)) + _JOIN_STEPS * self.itl_s
            self._prompts_pause_s = _ALONE_FACTOR * prompts_s
            self._line_peak *= _PEAK_KEPT
        seconds = now - self._round_s
        signals = Signals(
            seconds=seconds,
            answers=self._firsts + self._wholes,
            bounds=frozenset(self.bounds),
            requests=self._request_seconds / seconds,
            tokens=self._token_seconds / seconds,
            serving=self._most_serving + bypass_requests,
            serving_tokens=self._most_serving_tokens + bypass_tokens,
            blocked=min(1.0, self._blocked_s / seconds),
            line_s=self._lined_s / max(1, self._firsts),
            line_max_s=self._line_max_s(),
            stalls=self._stalls,
            late=self._lateness(now),
            hidden=self._hidden(now, bypass_requests),
            itl_s=self.itl_s,
            itl_target_s=itl_target_s,
            lifetime_s=self._lifetime_s,
            usual_prefill=self.prefill.usual_tokens,
            foreign=foreign,
        )
        self._start_round(now)
        return signals

    def _lateness(self, now: float) -> float:
        """Judge by answers in one piece only where nothing better is known."""
        better = self._firsts or now - self._reported_s < _REPORT_MAX_AGE_S
        return 0.0 if better or not self._wholes else self._late / self._wholes

    def _hidden(self, now: float, bypass_requests: int) -> int:
        """Return how many of ours wait in the engine by its last report, but not by ours.

        Each report counts once: by the next round it is old.
        """
        waiting, self._reported = self._reported, None
        if waiting is None or now - self._reported_s > _REPORT_MAX_AGE_S:
            return 0
        return min(max(0, waiting - len(self.line) - bypass_requests), self._serving)


def _towards(mean: float, value: float, part: float = _SMOOTH) -> float:
    """Move a mean towards a value; 0.0 is a mean of nothing."""
    return mean + part * (value - mean) if mean else value
