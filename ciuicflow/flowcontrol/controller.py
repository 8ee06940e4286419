"""Flow control as a whole: requests and events in, dispatches and refusals out. Start here.

A driver calls a method for everything that happens, with the time in seconds, and does what the
returned actions say. Nothing waits in here for a tick: what an event makes possible is returned
from that very call. `next_timeout` says when `tick` is due if nothing else happens.
"""

from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import isfinite
from typing import Final

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.actions import (
    Action,
    Dispatch,
    Endpoint,
    Item,
    Refuse,
    RequestId,
)
from ciuicflow.flowcontrol.bounds import QueueBounds
from ciuicflow.flowcontrol.cost import Cost, Usage
from ciuicflow.flowcontrol.cost_model import CostModel
from ciuicflow.flowcontrol.entry import Entry, Placed, Running
from ciuicflow.flowcontrol.lanes import Lane
from ciuicflow.flowcontrol.ledger import EndpointLedger
from ciuicflow.flowcontrol.placement import Pick, Placement, least_load
from ciuicflow.flowcontrol.snapshot import FlowState, ledger_state, tier_state
from ciuicflow.flowcontrol.tiers import FlowConfig
from ciuicflow.flowcontrol.topology import Topology
from ciuicflow.request import Outcome

_GARBAGE: Final = 64  # dead heap items that are not worth a rebuild
_LEAST_RETRY_S: Final = 1.0  # bounds of Retry-After
_MOST_RETRY_S: Final = 60.0


class FlowController:
    """Queues opted-in requests by tier and tenant in front of limits that adapt by endpoint."""

    def __init__(self, config: FlowConfig, pick: Pick = least_load) -> None:
        self.costs = CostModel(config.output_weight)
        self.dispatched: Counter[str] = Counter()
        """How many requests of each tier were sent on."""
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()
        """How many requests of each tier left the queue otherwise."""
        self.topology = Topology()
        self._pick = pick
        self._queued: dict[RequestId, Entry] = {}
        self._running: dict[RequestId, Running] = {}
        self._expiry: list[tuple[float, int, Entry]] = []
        self._pushes = 0
        self._configure(config)

    def _configure(self, config: FlowConfig) -> None:
        self.config = config
        self.tiers = config.ranked
        self.costs.output_weight = config.output_weight
        self.topology.configure(self.tiers, config.opted_in_share)
        self._placement = Placement(self._pick, config.headroom)
        self._bounds = QueueBounds(config, self.tiers)
        self._by_name = {tier.name: index for index, tier in enumerate(self.tiers)}
        self._default = self._by_name[config.default_tier]

    # 1. A request asks to be admitted.

    def enqueue(self, now: float, item: Item) -> list[Action]:
        """Take a request in, or refuse it; maybe others are dispatched or displaced."""
        tier = self._by_name.get(item.tier, self._default)
        lane = self.topology.lane(item.model)
        cost = self.costs.estimate(item.tenant, item.body_bytes, item.max_tokens)
        entry = self._entry(now, item, tier, cost, lane)
        if lane is None or not lane.up:
            return [self._refusal(now, entry, Outcome.NO_ENDPOINT)]
        wait_s = lane.predict_wait_s(now, tier, item.tenant)
        if entry.expires_s <= now or (wait_s is not None and now + wait_s > entry.expires_s):
            return [self._refusal(now, entry, Outcome.DEADLINE_INFEASIBLE)]
        if not lane.waiting:  # the common case: nothing to overtake, no queue to pass through
            placed = self._placement.place(now, lane, entry, lane.ledgers)
            if placed is not None:
                lane.pass_through(now, entry)
                return [self._dispatch(now, placed)]
        actions: list[Action] = []
        self._push(now, lane, entry)
        if not lane.blocked or self._is_first(lane, entry):
            self._run(now, lane, actions)
        if entry.queued:
            self._keep_bounds(now, entry, actions)
        return actions

    def _entry(self, now: float, item: Item, tier: int, cost: Cost, lane: Lane | None) -> Entry:
        config = self.tiers[tier]
        deadline_s = item.deadline_s
        if deadline_s is not None and not isfinite(deadline_s):
            deadline_s = None
        expires_s = now + config.max_wait_s
        if deadline_s is not None and lane is not None:
            expires_s = min(expires_s, deadline_s - lane.best_prefill_s(cost))
        return Entry(
            id=item.id,
            seq=self._pushes,
            tenant=item.tenant,
            tier=tier,
            model=item.model,
            body_bytes=item.body_bytes,
            cost=cost,
            enqueued_s=now,
            due_s=now + config.ttft_target_s if deadline_s is None else deadline_s,
            expires_s=expires_s,
            streams=item.streams,
        )

    def _push(self, now: float, lane: Lane, entry: Entry) -> None:
        self._queued[entry.id] = entry
        self._bounds.add(entry)
        lane.push(now, entry)
        self._pushes += 1
        heappush(self._expiry, (entry.expires_s, self._pushes, entry))
        if len(self._expiry) > 2 * len(self._queued) + _GARBAGE:
            self._expiry = [item for item in self._expiry if item[2].queued]
            heapify(self._expiry)

    def _keep_bounds(self, now: float, entry: Entry, actions: list[Action]) -> None:
        """Make room for an entry that has to wait, at the cost of others or of itself."""
        while entry.queued:
            verdict = self._bounds.check(entry, self.topology.lanes)
            if verdict is None:
                return
            victim, outcome = verdict
            self._drop(victim)
            actions.append(self._refusal(now, victim, outcome))

    # 2. Dispatch.

    def _run(
        self, now: float, lane: Lane, actions: list[Action], freed: EndpointLedger | None = None
    ) -> None:
        """Dispatch from a lane while there is room.

        `freed`: the only endpoint that can have gained room since the lane was blocked.
        """
        only = freed if lane.blocked else None
        ledgers = lane.ledgers if only is None else (only,)
        while lane.waiting:
            full = only is not None and only.is_full()
            placed = None if full else self._placement.next(now, lane, ledgers)
            lane.blocked = placed is None
            if placed is None:
                return
            self._forget(lane.take(now, placed.entry.tier))
            actions.append(self._dispatch(now, placed))

    def _dispatch(self, now: float, placed: Placed) -> Dispatch:
        entry, legs = placed.entry, placed.legs
        self._running[entry.id] = Running(entry, {leg.endpoint: leg.cost for leg in legs})
        tier = self.tiers[entry.tier]
        for leg in legs:
            self.topology.ledgers[leg.endpoint].place(
                now,
                entry.id,
                leg.cost,
                leg.role,
                tier.itl_target_s,
                streams=entry.streams,
                share=self._placement.share(entry),
            )
        self.dispatched[tier.name] += 1
        return Dispatch(entry.id, tier.name, legs, now - entry.enqueued_s, placed.reason)

    # 3. What happens to a request that was dispatched.

    def first_token(self, now: float, id_: RequestId) -> list[Action]:
        """Its first token has come."""
        actions: list[Action] = []
        running = self._running.get(id_)
        for endpoint in running.legs if running is not None else ():
            ledger = self.topology.ledgers[endpoint]
            ledger.first_token(now, id_)
            if ledger.waits_for_line:
                self._freed(now, ledger, actions)
        return actions

    def progress(self, now: float, id_: RequestId, tokens: int = 1) -> None:
        """More tokens have come; may be called for each chunk or for several at once."""
        running = self._running.get(id_)
        for endpoint in running.legs if running is not None else ():
            self.topology.ledgers[endpoint].progress(now, id_, tokens)

    def correct(self, now: float, id_: RequestId, endpoint: EndpointId, cost: Cost) -> list[Action]:
        """A leg costs something else than estimated, such as where its prefix is cached."""
        running = self._running.get(id_)
        if running is None or endpoint not in running.legs:
            return []
        running.legs[endpoint] = cost
        ledger = self.topology.ledgers[endpoint]
        ledger.correct(now, id_, cost)
        actions: list[Action] = []
        self._freed(now, ledger, actions)
        return actions

    def release(self, now: float, id_: RequestId, endpoint: EndpointId) -> list[Action]:
        """One leg has ended, as that of a prefill endpoint does before the request does."""
        actions: list[Action] = []
        running = self._running.get(id_)
        if running is not None and running.legs.pop(endpoint, None) is not None:
            ledger = self.topology.ledgers[endpoint]
            ledger.release(now, id_, None)
            self._freed(now, ledger, actions)
        return actions

    def complete(
        self, now: float, id_: RequestId, usage: Usage | None = None, *, answered: bool = True
    ) -> list[Action]:
        """It has ended; `usage` is what the engine reported, if it did.

        `answered`: by the engine, whole and well; errors and answers cut short are not.
        """
        running = self._running.pop(id_, None)
        if running is None:
            return []
        entry = running.entry
        ledgers = [self.topology.ledgers[endpoint] for endpoint in running.legs]
        reported = usage.completion_tokens if usage is not None else None
        produced = max(
            (ledger.release(now, id_, reported, answered=answered) for ledger in ledgers),
            default=0,
        )
        if usage is not None:
            self.costs.learn(entry.tenant, entry.body_bytes, usage)
            work = self.costs.actual(usage).work
        elif entry.streams:
            work = entry.cost.prefill_tokens + self.costs.output_weight * produced
        else:
            work = entry.cost.work  # nothing better is known
        self._charge(entry, work - entry.cost.work)
        actions: list[Action] = []
        for ledger in ledgers:
            self._freed(now, ledger, actions)
        return actions

    def cancel(self, now: float, id_: RequestId) -> list[Action]:
        """Its client has left: out of the queue, or off the ledger."""
        entry = self._queued.get(id_)
        if entry is None:
            return self.complete(now, id_, answered=False)
        lane = self.topology.lane(entry.model)
        was_first = lane is not None and self._is_first(lane, entry)
        self._drop(entry)
        self.outcomes[self.tiers[entry.tier].name, Outcome.CLIENT_GONE] += 1
        actions: list[Action] = []
        if was_first and lane is not None:  # what waited behind it may fit where it did not
            self._run(now, lane, actions)
        return actions

    def requeue(self, now: float, id_: RequestId, failed: EndpointId) -> list[Action]:
        """It could not be delivered to that endpoint: another one takes it, or it is refused.

        Only before the endpoint has seen the request. It keeps its place in the order.
        """
        running = self._running.pop(id_, None)
        if running is None:
            return []
        entry = running.entry
        for endpoint in running.legs:
            self.topology.ledgers[endpoint].release(now, id_, None)
        self._charge(entry, -entry.cost.work)
        self.dispatched[self.tiers[entry.tier].name] -= 1
        entry.excluded = (*entry.excluded, failed)
        lane = self.topology.lane(entry.model)
        if lane is None or not lane.serves(entry):
            return [self._refusal(now, entry, Outcome.NO_ENDPOINT)]
        self._push(now, lane, entry)
        actions: list[Action] = []
        self._run(now, lane, actions)
        if entry.queued:
            self._keep_bounds(now, entry, actions)
        return actions

    # 4. What happens beside requests.

    def bypass(
        self, now: float, endpoint: EndpointId, requests: int, body_bytes: int, arrived: int
    ) -> list[Action]:
        """Say how many bypass requests an endpoint has now, and how many came since the last call.

        `body_bytes`: of all those that it has. They are never held, only counted.
        """
        actions: list[Action] = []
        ledger = self.topology.ledgers.get(endpoint)
        if ledger is None:
            return actions
        each = self.costs.estimate("", body_bytes // max(requests, 1), None).held_tokens
        fewer = requests < ledger.bypass_requests
        ledger.bypass(now, requests, requests * each, arrived * each)
        if fewer:
            self._freed(now, ledger, actions)
        return actions

    def report(self, now: float, endpoint: EndpointId, waiting: int | None) -> None:
        """Take in how many requests an engine says to have waiting; None: it does not say."""
        ledger = self.topology.ledgers.get(endpoint)
        if ledger is not None and waiting is not None:
            ledger.observer.reported(now, waiting)

    def set_endpoints(self, now: float, endpoints: Iterable[Endpoint]) -> list[Action]:
        """Replace what is known of all endpoints; requests follow the models that they ask for."""
        actions: list[Action] = []
        for entry in self.topology.update(now, endpoints):
            self._forget(entry)
            actions.append(self._refusal(now, entry, Outcome.NO_ENDPOINT))
        self._refuse_stranded(now, actions)
        for lane in self.topology.by_urgency():
            self._run(now, lane, actions)
        return actions

    def _refuse_stranded(self, now: float, actions: list[Action]) -> None:
        """Refuse what only endpoints could take that have failed it: it would block others."""
        for entry in [entry for entry in self._queued.values() if entry.excluded]:
            lane = self.topology.lane(entry.model)
            if lane is not None and lane.up and not lane.serves(entry):
                self._drop(entry)
                actions.append(self._refusal(now, entry, Outcome.NO_ENDPOINT))

    def reconfigure(self, now: float, config: FlowConfig) -> list[Action]:
        """Take over other settings; what was learnt of endpoints and tenants' costs stays.

        Requests keep their tier by its name; where that is gone they are in the default tier.
        """
        names = [tier.name for tier in self.tiers]
        self._configure(config)
        for running in self._running.values():
            running.entry.tier = self._by_name.get(names[running.entry.tier], self._default)
        for entry in self._queued.values():
            entry.tier = self._by_name.get(names[entry.tier], self._default)
            self._bounds.add(entry)
            lane = self.topology.lane(entry.model)
            assert lane is not None  # the endpoints are the same
            lane.push(now, entry)
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Evict what has waited too long, and dispatch what the limits have made room for."""
        actions: list[Action] = []
        while self._expiry and self._expiry[0][0] <= now:
            entry = heappop(self._expiry)[2]
            if entry.queued and entry.expires_s <= now:
                self._drop(entry)
                lane = self.topology.lane(entry.model)
                is_up = lane is not None and lane.up
                outcome = Outcome.QUEUE_TIMEOUT if is_up else Outcome.NO_ENDPOINT
                actions.append(self._refusal(now, entry, outcome))
        for ledger in self.topology.ledgers.values():
            ledger.advance(now)
        for lane in self.topology.by_urgency():
            self._run(now, lane, actions)
        return actions

    def next_timeout(self, now: float) -> float | None:
        """Return when `tick` is due; None while nothing is queued."""
        if not self._queued:
            return None
        while not self._expiry[0][2].queued:
            heappop(self._expiry)
        due_s = self._expiry[0][0]
        for ledger in self.topology.ledgers.values():
            if ledger.requests:
                due_s = min(due_s, ledger.changes_s(now))
        return due_s

    def snapshot(self, now: float) -> FlowState:
        """Return the state of all queues and endpoints."""
        lanes = list(self.topology.lanes)
        return FlowState(
            tiers=tuple(
                tier_state(
                    now,
                    index,
                    tier,
                    lanes,
                    self._bounds,
                    self.dispatched[tier.name],
                    self.outcomes,
                )
                for index, tier in enumerate(self.tiers)
            ),
            endpoints=tuple(map(ledger_state, self.topology.ledgers.values())),
        )

    # Parts.

    def _freed(self, now: float, ledger: EndpointLedger, actions: list[Action]) -> None:
        """Dispatch to an endpoint that may have gained room."""
        if self._queued:
            for lane in self.topology.by_urgency():
                if ledger in lane.ledgers:
                    self._run(now, lane, actions, ledger)

    def _is_first(self, lane: Lane, entry: Entry) -> bool:
        return lane.queues[entry.tier].first() is entry and (
            lane.order()[0] == entry.tier or not entry.tier
        )

    def _drop(self, entry: Entry) -> None:
        """Take an entry out of its queue."""
        lane = self.topology.lane(entry.model)
        if lane is not None:
            lane.remove(entry)
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        del self._queued[entry.id]
        self._bounds.remove(entry)

    def _charge(self, entry: Entry, work: float) -> None:
        lane = self.topology.lane(entry.model)
        if lane is not None and work:
            lane.queues[entry.tier].charge(entry.tenant, work)

    def _refusal(self, now: float, entry: Entry, outcome: Outcome) -> Refuse:
        lane = self.topology.lane(entry.model)
        wait_s = lane.predict_wait_s(now, entry.tier, entry.tenant) if lane is not None else None
        retry_s = min(max(wait_s or 0.0, _LEAST_RETRY_S), _MOST_RETRY_S)
        name = self.tiers[entry.tier].name
        self.outcomes[name, outcome] += 1
        return Refuse(entry.id, name, outcome, now - entry.enqueued_s, retry_s)
