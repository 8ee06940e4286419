"""Flow control in front of engine models in virtual time: one run, and what it showed.

The driver here does what the real one does, without sockets: every event goes into the controller
at its time, and what the controller returns is done at once.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Final

import msgspec

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.actions import Action, Dispatch, Endpoint, Item
from ciuicflow.flowcontrol.controller import FlowController
from ciuicflow.flowcontrol.cost import Usage
from ciuicflow.flowcontrol.tiers import FlowConfig
from ciuicflow.testing.engine_model import PROFILES, EngineModel, EngineProfile, EngineRequest
from loadtest.workload import LENGTHS, Lengths

BYTES_PER_TOKEN: Final = 4.3
REPLAY_DEPTH: Final = 300  # requests kept in an engine to see what it can do

MIX: Final = {"gold": 0.2, "silver": 0.3, "bronze": 0.5}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is offered to what, for how long."""

    engine: str
    load: tuple[tuple[float, float], ...] = ((0.0, 2.0),)
    """From which second on, how many times the capacity is offered."""
    mix: dict[str, float] = msgspec.field(default_factory=lambda: MIX)
    tenants: dict[str, float] = msgspec.field(default_factory=lambda: {"t": 1.0})
    """Their parts of the arrivals."""
    bypass: float = 0.0
    """Part of the requests that did not opt in."""
    aborts: float = 0.0
    """Part of the clients that leave after an exponential time of 2 s on average."""
    speeds: tuple[tuple[float, float], ...] = ()
    """From which second on, which speed the engine has."""
    scrape_s: float | None = None
    """The engine's queue is reported at this interval; None: never."""
    whole: float = 0.0
    """Part of the requests that do not stream."""
    config: FlowConfig = FlowConfig()
    engines: int = 1
    behind_one: bool = False
    """All engines are ranks behind one endpoint."""
    flow: bool = True
    """False: everything bypasses."""
    duration_s: float = 120.0
    warm_s: float = 20.0
    seed: int = 1
    profile: EngineProfile | None = None
    lengths: Lengths | None = None

    @property
    def engine_profile(self) -> EngineProfile:
        return self.profile or PROFILES[self.engine]

    @property
    def engine_lengths(self) -> Lengths:
        return self.lengths or LENGTHS[self.engine]


class Request(msgspec.Struct, eq=False):
    """One request and what became of it."""

    id: int
    tier: str
    tenant: str
    prompt: int
    output: int
    arrived_s: float
    opted_in: bool
    streams: bool
    leaves_s: float | None = None
    endpoint: str = ""
    rank: int = -1
    body_bytes: int = 0
    sent_s: float | None = None
    first_s: float | None = None
    done_s: float | None = None
    outcome: str = ""
    emitted: int = 0

    @property
    def ttft_s(self) -> float:
        """From arrival; inf: no token came."""
        return math.inf if self.first_s is None else self.first_s - self.arrived_s

    @property
    def itl_s(self) -> float:
        if self.first_s is None or self.done_s is None or self.output < 2:
            return 0.0
        return (self.done_s - self.first_s) / (self.output - 1)


def replay_rate(profile: EngineProfile, seed: int, requests: list[Request]) -> float:
    """Return the tokens per second at which one engine serves these when it never lacks work."""
    model, todo = EngineModel(profile, seed), iter(requests)
    prompts: dict[str, int] = {}

    def feed(now: float) -> None:
        request = next(todo, None)
        if request is not None:
            prompts[str(request.id)] = request.prompt
            model.submit(_engine_request(request), now)

    depth = min(REPLAY_DEPTH, 2 * profile.max_num_seqs, len(requests) // 3)
    for _ in range(depth):
        feed(0.0)
    now, start_s, tokens, left = 0.0, -1.0, 0, len(requests)
    while left > depth:
        now = model.next_step_at() or 0.0
        for event in model.step(now):
            if start_s >= 0:
                tokens += 1 + (prompts[event.request_id] if event.position == 0 else 0)
            if event.finished:
                left -= 1
                feed(now)
        if start_s < 0 and left <= len(requests) - 20:
            start_s = now
    return tokens / (now - start_s)


def capacity_rps(profile: EngineProfile, lengths: Lengths) -> float:
    """Return the requests per second that one engine completes when it never lacks work."""
    rng = Random(99)
    requests = []
    for index in range(600):
        prompt, output = lengths.draw(rng)
        requests.append(Request(index, "", "", prompt, output, 0.0, True, True))
    mean = sum(request.prompt + request.output for request in requests) / len(requests)
    return replay_rate(profile, 99, requests) / mean


def _engine_request(request: Request) -> EngineRequest:
    return EngineRequest(
        request_id=str(request.id), prompt_tokens=request.prompt, output_tokens=request.output
    )


class Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        count = scenario.engines
        self.models = [
            EngineModel(scenario.engine_profile, scenario.seed + i) for i in range(count)
        ]
        self.requests: list[Request] = []
        self.controller = FlowController(scenario.config)
        names = ["e0"] if scenario.behind_one else [f"e{index}" for index in range(count)]
        self.endpoints = [EndpointId(name) for name in names]
        self.controller.set_endpoints(0.0, [Endpoint(id=name) for name in self.endpoints])
        self.useful_tokens = 0
        self.queue_seconds = 0.0
        self.most_in_flight_over_limit = 0.0
        self.samples: list[tuple[float, float, float, float, int]] = []
        """time, limit on requests, on tokens, on prompt tokens, requests waiting in the engine"""
        self._by_id: dict[int, Request] = {}
        self._bypass: dict[EndpointId, tuple[int, int]] = {}  # requests and bytes at each
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._sequence = 0
        self._turn = 0

    def run(self, watch: Callable[["Simulation", float], None] | None = None) -> "Simulation":
        scenario = self.scenario
        arrivals = self._arrivals()
        self._at(next(arrivals), lambda now: self._arrive(now, arrivals))
        for start_s, speed in scenario.speeds:
            self._at(start_s, partial(self._set_speed, speed))
        if scenario.scrape_s:
            self._at(scenario.scrape_s, self._scrape)
        self._at(0.5, self._sample)
        last_s = 0.0
        while True:
            step_s = min((m.next_step_at() or math.inf for m in self.models), default=math.inf)
            tick_s = self.controller.next_timeout(last_s) or math.inf
            now = min(step_s, tick_s, self._events[0][0])
            if now >= scenario.duration_s:
                return self
            if now > scenario.warm_s:
                waiting = sum(model.snapshot().waiting for model in self.models)
                self.queue_seconds += waiting * (now - max(last_s, scenario.warm_s))
            last_s = now
            if now == self._events[0][0]:
                heappop(self._events)[2](now)
            elif now == step_s:
                self._step(now)
            else:
                self._do(now, self.controller.tick(now))
            if watch is not None:
                watch(self, now)

    # What happens.

    def _at(self, time_s: float, call: Callable[[float], None]) -> None:
        self._sequence += 1
        heappush(self._events, (time_s, self._sequence, call))

    def _arrivals(self) -> Iterator[float]:
        """Yield times; the request that arrives then is the last of `self.requests`."""
        scenario, rng = self.scenario, Random(self.scenario.seed * 7919)
        profile, lengths = scenario.engine_profile, scenario.engine_lengths
        full_rps = capacity_rps(profile, lengths) * scenario.engines
        now = 0.0
        while True:
            load = [load for start_s, load in scenario.load if start_s <= now][-1]
            now += rng.expovariate(full_rps * load)
            prompt, output = lengths.draw(rng)
            request = Request(
                id=len(self.requests),
                tier=_draw(rng, scenario.mix),
                tenant=_draw(rng, scenario.tenants),
                prompt=prompt,
                output=output,
                arrived_s=now,
                opted_in=rng.random() >= scenario.bypass and scenario.flow,
                streams=rng.random() >= scenario.whole,
            )
            if rng.random() < scenario.aborts:
                request.leaves_s = now + rng.expovariate(0.5)
            self._next = request
            yield now

    def _arrive(self, now: float, arrivals: Iterator[float]) -> None:
        request = self._next
        self.requests.append(request)
        self._by_id[request.id] = request
        if request.leaves_s is not None:
            self._at(request.leaves_s, lambda now: self._leave(now, request))
        self._at(next(arrivals), lambda now: self._arrive(now, arrivals))
        body_bytes = int(request.prompt * BYTES_PER_TOKEN)
        if not request.opted_in:
            endpoint = self.endpoints[request.id % len(self.endpoints)]
            request.body_bytes = body_bytes
            self._count_bypass(now, endpoint, 1, body_bytes)
            self._send(now, request, endpoint)
            return
        item = Item(
            id=request.id, tenant=request.tenant, tier=request.tier, model="m",
            body_bytes=body_bytes, streams=request.streams,
        )  # fmt: skip
        self._do(now, self.controller.enqueue(now, item))

    def _do(self, now: float, actions: list[Action]) -> None:
        for action in actions:
            request = self._by_id[action.id]
            if isinstance(action, Dispatch):
                self._send(now, request, action.legs[0].endpoint)
                ledger = self.controller.topology.ledgers[action.legs[0].endpoint]
                over = ledger.requests - max(1, ledger.limit.requests)
                if not ledger.bypass_requests:
                    self.most_in_flight_over_limit = max(self.most_in_flight_over_limit, over)
            else:
                request.outcome = action.outcome.value

    def _send(self, now: float, request: Request, endpoint: EndpointId) -> None:
        request.endpoint, request.sent_s = endpoint, now
        self._model(request).submit(_engine_request(request), now)

    def _model(self, request: Request) -> EngineModel:
        if request.rank < 0:
            request.rank = (
                self._least_loaded_rank()
                if self.scenario.behind_one
                else self.endpoints.index(EndpointId(request.endpoint))
            )
        return self.models[request.rank]

    def _least_loaded_rank(self) -> int:
        states = [model.snapshot() for model in self.models]
        loads = [(state.waiting, state.running) for state in states]
        return loads.index(min(loads))

    def _step(self, now: float) -> None:
        for model in self.models:
            if (model.next_step_at() or math.inf) > now:
                continue
            for event in model.step(now):
                request = self._by_id[int(event.request_id)]
                request.emitted += 1
                if now > self.scenario.warm_s:
                    first = event.position == 0
                    self.useful_tokens += 1 + (request.prompt if first else 0)
                self._token(now, request, event.finished)

    def _token(self, now: float, request: Request, finished: bool) -> None:
        if request.first_s is None:
            request.first_s = now
        if request.opted_in and request.streams:
            if request.emitted == 1:
                self._do(now, self.controller.first_token(now, request.id))
            else:
                self.controller.progress(now, request.id)
        if finished:
            request.done_s = now
            self._end(now, request, Usage(request.prompt, 0, request.output))

    def _end(self, now: float, request: Request, usage: Usage | None) -> None:
        if request.opted_in:
            self._do(now, self.controller.complete(now, request.id, usage))
        else:
            endpoint = EndpointId(request.endpoint)
            self._count_bypass(now, endpoint, -1, -request.body_bytes)

    def _count_bypass(self, now: float, endpoint: EndpointId, more: int, more_bytes: int) -> None:
        requests, total_bytes = self._bypass.get(endpoint, (0, 0))
        here = self._bypass[endpoint] = (requests + more, total_bytes + more_bytes)
        self._do(now, self.controller.bypass(now, endpoint, *here, max(0, more)))

    def _leave(self, now: float, request: Request) -> None:
        if request.done_s is not None or request.outcome:
            return
        request.outcome = "left"
        if request.sent_s is None:
            self._do(now, self.controller.cancel(now, request.id))
        else:
            self._model(request).cancel(str(request.id))
            self._end(now, request, None)

    def _set_speed(self, speed: float, now: float) -> None:
        for model in self.models:
            model.set_speed(speed, now)

    def _scrape(self, now: float) -> None:
        if not self.scenario.behind_one:
            for endpoint, model in zip(self.endpoints, self.models, strict=True):
                self.controller.report(now, endpoint, model.snapshot().waiting)
        self._at(now + (self.scenario.scrape_s or math.inf), self._scrape)

    def _sample(self, now: float) -> None:
        limit = self.controller.topology.ledgers[self.endpoints[0]].limit
        waiting = self.models[0].snapshot().waiting
        self.samples.append((now, limit.requests, limit.tokens, limit.prefill_tokens, waiting))
        self._at(now + 0.5, self._sample)

    # What it showed.

    def capacity_share(self) -> float:
        """Return useful tokens per second over what the engines do with the same requests."""
        scenario = self.scenario
        served = [r for r in self.requests if r.sent_s is not None and r.sent_s > scenario.warm_s]
        served.sort(key=lambda request: request.sent_s or 0.0)
        full = replay_rate(scenario.engine_profile, scenario.seed, served) * scenario.engines
        return self.useful_tokens / (scenario.duration_s - scenario.warm_s) / full

    def engine_queue(self) -> float:
        """Return the mean number of requests that waited inside the engines."""
        return self.queue_seconds / (self.scenario.duration_s - self.scenario.warm_s)

    def of(self, tier: str, *, after_s: float | None = None, opted_in: bool = True) -> "TierStats":
        """Return what a tier got, of the requests that arrived after the warm-up."""
        start_s = self.scenario.warm_s if after_s is None else after_s
        config = next(t for t in self.scenario.config.tiers if t.name == tier)
        # The last ones had no time to end.
        end_s = self.scenario.duration_s - config.max_wait_s - 5.0
        chosen = [
            request
            for request in self.requests
            if request.tier == tier
            and request.opted_in is opted_in
            and start_s < request.arrived_s < end_s
            and request.leaves_s is None
        ]
        times = sorted(r.ttft_s for r in chosen if r.first_s is not None)
        good = sum(
            r.ttft_s <= config.ttft_target_s and r.itl_s <= config.itl_target_s for r in chosen
        )
        return TierStats(
            offered=len(chosen),
            served=len(times) / max(1, len(chosen)),
            good=good / max(1, len(chosen)),
            p50_s=_quantile(times, 0.5),
            p99_s=_quantile(times, 0.99),
        )

    def token_share(self, choose: Callable[[Request], bool], after_s: float | None = None) -> float:
        """Return the part of all tokens put out and read since the warm-up."""
        start_s = self.scenario.warm_s if after_s is None else after_s
        tokens = {True: 0, False: 0}
        for request in self.requests:
            if request.first_s is not None and request.first_s > start_s:
                tokens[choose(request)] += request.prompt + request.emitted
        return tokens[True] / max(1, sum(tokens.values()))


class TierStats(msgspec.Struct, frozen=True):
    """What one tier got."""

    offered: int
    served: float
    """Part of the offered requests."""
    good: float
    """Part of the offered requests that met both targets."""
    p50_s: float
    """Time to first token of those served."""
    p99_s: float


def _quantile(ordered: list[float], q: float) -> float:
    return ordered[int(q * (len(ordered) - 1))] if ordered else math.nan


def _draw(rng: Random, parts: dict[str, float]) -> str:
    return rng.choices(list(parts), weights=list(parts.values()))[0]
