"""Joins flow control to what waits for it: calls in, grants and refusals out, one timer."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from ciuicflow.endpoint import EndpointId, EndpointState
from ciuicflow.flowcontrol.actions import Action, Dispatch, Endpoint, Item, Refuse, RequestId
from ciuicflow.flowcontrol.controller import FlowController
from ciuicflow.flowcontrol.cost import Usage
from ciuicflow.flowcontrol.placement import Pick, least_load
from ciuicflow.flowcontrol.snapshot import FlowState
from ciuicflow.flowcontrol.tiers import FlowConfig
from ciuicflow.request import Outcome

# Nobody is asked for reports longer than this after the last opted-in request.
_ACTIVE_S: Final = 60.0
# What is due now is done in the next turn; what is due within a timer's precision, with it.
_SHORTEST_WAIT_S: Final = 0.001


class Waiter(Protocol):
    """Waits for the verdict on a request."""

    def granted(self, grant: Dispatch) -> None:
        """Send it, to the endpoints that the grant names."""

    def refused(self, refusal: Refuse) -> None:
        """Answer it with an error."""


class Dispatcher:
    """Drives one FlowController on the event loop."""

    def __init__(
        self,
        config: FlowConfig,
        endpoints: Callable[[], Iterable[Endpoint]],
        pick: Pick = least_load,
    ) -> None:
        """Take the settings, how to learn what the endpoints are at any time, and who chooses."""
        self._controller = FlowController(config, pick)
        self._endpoints = endpoints
        self._states: tuple[EndpointState, ...] = ()
        self._known: tuple[Endpoint, ...] = ()
        self._bypass_told: dict[EndpointId, tuple[int, int]] = {}
        self._waiters: dict[RequestId, Waiter] = {}
        self._last_id = 0
        self._last_s = float("-inf")
        self._todo: deque[Action] = deque()
        self._doing = False
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("inf")
        self._loop = asyncio.get_running_loop()

    @property
    def waiting(self) -> int:
        """How many requests are queued."""
        return len(self._waiters)

    @property
    def active(self) -> bool:
        """Whether a request opted in lately: only then is it worth asking engines for reports."""
        return time.monotonic() - self._last_s < _ACTIVE_S

    def next_id(self) -> RequestId:
        """Return a number for the next request."""
        self._last_id += 1
        return self._last_id

    # A request.

    def enqueue(self, item: Item, waiter: Waiter) -> None:
        """Ask for a request to be sent; the verdict may come before this returns."""
        now = self._last_s = time.monotonic()
        self._tell_bypass(now)
        self._waiters[item.id] = waiter
        self._do(self._controller.enqueue(now, item))

    def first_token(self, id_: RequestId) -> None:
        """Its first token has come."""
        self._do(self._controller.first_token(time.monotonic(), id_))

    def progress(self, id_: RequestId, tokens: int) -> None:
        """More tokens have come."""
        self._controller.progress(time.monotonic(), id_, tokens)

    def undeliverable(self, id_: RequestId, endpoint: EndpointId, waiter: Waiter) -> None:
        """That endpoint can't be reached, and has not seen the request: find another."""
        self._waiters[id_] = waiter
        self._do(self._controller.requeue(time.monotonic(), id_, endpoint))

    def ended(self, id_: RequestId, usage: Usage | None, *, answered: bool) -> None:
        """It is over, wherever it was; `usage` is what the engine reported, if it did.

        `answered`: by the engine, whole and well.
        """
        now = time.monotonic()
        self._tell_bypass(now)
        if self._waiters.pop(id_, None) is not None:
            self._do(self._controller.cancel(now, id_))
        else:
            self._do(self._controller.complete(now, id_, usage, answered=answered))

    def release_all(self) -> list[Waiter]:
        """Let everything out of the queue, unserved, in the order in which it came."""
        waiters = [self._waiters[id_] for id_ in sorted(self._waiters)]
        for id_ in sorted(self._waiters):
            del self._waiters[id_]
            # What this lets go is about to be let go itself.
            self._controller.cancel(time.monotonic(), id_)
        return waiters

    # What happens beside requests.

    def bypass_left(self) -> None:
        """A request that did not opt in has ended: what waits may have room now."""
        if self._waiters:
            self._tell_bypass(time.monotonic())

    def report(self, endpoint: EndpointId, waiting: int | None) -> None:
        """An engine has said how many requests wait in it."""
        self._controller.report(time.monotonic(), endpoint, waiting)

    def watch(self, states: tuple[EndpointState, ...]) -> None:
        """Take over another set of endpoints."""
        stay = {state.id for state in states if state in self._states}
        self._bypass_told = {id_: told for id_, told in self._bypass_told.items() if id_ in stay}
        self._states = states
        self.endpoints_changed()

    def endpoints_changed(self) -> None:
        """One may have come up, gone down, or told its models."""
        known = tuple(self._endpoints())
        if known != self._known:
            self._known = known
            self._do(self._controller.set_endpoints(time.monotonic(), known))

    def configure(self, config: FlowConfig) -> None:
        """Take over reloaded settings."""
        self._do(self._controller.reconfigure(time.monotonic(), config))

    def snapshot(self) -> FlowState:
        """Return the state of all queues and endpoints."""
        now = time.monotonic()
        self._tell_bypass(now)
        return self._controller.snapshot(now)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Parts.

    def _tell_bypass(self, now: float) -> None:
        for state in self._states:
            told = self._bypass_told.get(state.id)
            here = (state.bypass_in_flight, state.bypass_arrived)
            if here != told:
                self._bypass_told[state.id] = here
                arrived = here[1] - (told[1] if told is not None else 0)
                self._do(
                    self._controller.bypass(now, state.id, here[0], state.bypass_bytes, arrived)
                )

    def _do(self, actions: list[Action]) -> None:
        """Carry actions out, in order, also where one of them leads to the next call."""
        self._todo.extend(actions)
        if not self._doing:
            self._doing = True
            try:
                while self._todo:
                    self._carry_out(self._todo.popleft())
            finally:
                self._doing = False
            self._set_timer()

    def _carry_out(self, action: Action) -> None:
        waiter = self._waiters.pop(action.id, None)
        if waiter is None:
            return  # it ended in the meantime, and has left the ledger with that
        try:
            if isinstance(action, Dispatch):
                waiter.granted(action)
            else:
                waiter.refused(action)
        except Exception as error:  # noqa: BLE001 - the others must get their verdicts
            self._loop.call_exception_handler(
                {"message": "a request could not be sent on", "exception": error}
            )
            if isinstance(action, Dispatch):
                self._give_up(action, waiter)

    def _give_up(self, grant: Dispatch, waiter: Waiter) -> None:
        """Take a grant back that could not be carried out: nobody else would end the request."""
        self._do(self._controller.complete(time.monotonic(), grant.id, answered=False))
        self._waiters[grant.id] = waiter
        outcome = Outcome.UPSTREAM_FAILED
        self._todo.append(Refuse(grant.id, grant.tier, outcome, grant.waited_s, 0.0))

    def _set_timer(self) -> None:
        if not self._waiters:
            return  # a timer that is still set finds nothing to do
        now = time.monotonic()
        due_s = self._controller.next_timeout(now)
        if due_s is None or (self._timer is not None and self._due_s <= due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = self._loop.call_later(max(due_s - now, _SHORTEST_WAIT_S), self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        self._tell_bypass(now)
        self._do(self._controller.tick(now))
        self._set_timer()
