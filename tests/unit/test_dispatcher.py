"""The driver of flow control: who gets a verdict, once, and what the core is told."""

import asyncio
from collections.abc import Iterable

import pytest
from support.plain import needs_plain

from ciuicflow.endpoint import EndpointId, EndpointState
from ciuicflow.flowcontrol.actions import Dispatch, Endpoint, Item, Refuse
from ciuicflow.flowcontrol.cost import Usage
from ciuicflow.flowcontrol.tiers import FlowConfig, TierConfig
from ciuicflow.request import Outcome
from ciuicflow.runtime.dispatcher import Dispatcher

A, B = EndpointId("a"), EndpointId("b")


class Waiter:
    """Remembers its verdicts."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.grants: list[Dispatch] = []
        self.refusals: list[Refuse] = []
        self._log = log

    def granted(self, grant: Dispatch) -> None:
        self.grants.append(grant)
        if self._log is not None:
            self._log.append(f"granted {grant.id}")

    def refused(self, refusal: Refuse) -> None:
        self.refusals.append(refusal)

    @property
    def outcomes(self) -> list[Outcome]:
        return [refusal.outcome for refusal in self.refusals]


def end(rig: "Rig", id_: int, usage: Usage | None = None) -> None:
    rig.dispatcher.ended(id_, usage, answered=usage is not None)


class Rig:
    """A dispatcher in front of endpoints that take one request each."""

    def __init__(self, *ids: EndpointId, config: FlowConfig | None = None) -> None:
        self.endpoints = [Endpoint(id=id_, max_requests=1) for id_ in ids]
        self.states = tuple(EndpointState(id_) for id_ in ids)
        self.dispatcher = Dispatcher(config or FlowConfig(), self._known)
        self.dispatcher.watch(self.states)

    def _known(self) -> Iterable[Endpoint]:
        return self.endpoints

    def enqueue(self, waiter: Waiter, tier: str = "bronze", **fields: float) -> int:
        id_ = self.dispatcher.next_id()
        deadline_s = fields.get("deadline_s")
        item = Item(id=id_, tenant="t", tier=tier, body_bytes=100, deadline_s=deadline_s)
        self.dispatcher.enqueue(item, waiter)
        return id_

    def in_flight(self) -> int:
        return sum(each.in_flight for each in self.dispatcher.snapshot().endpoints)

    def bypass(self) -> list[int]:
        return [each.bypass_in_flight for each in self.dispatcher.snapshot().endpoints]


@pytest.fixture
async def rig() -> Rig:
    return Rig(A)


def test_a_dispatcher_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError):
        Dispatcher(FlowConfig(), list)


async def test_a_verdict_comes_before_enqueue_returns_where_there_is_room(rig: Rig) -> None:
    waiter = Waiter()
    id_ = rig.enqueue(waiter)
    assert [grant.id for grant in waiter.grants] == [id_]
    assert rig.dispatcher.waiting == 0
    assert rig.in_flight() == 1


async def test_an_end_grants_the_next_in_the_same_turn(rig: Rig) -> None:
    first, second = Waiter(), Waiter()
    id_ = rig.enqueue(first)
    rig.enqueue(second)
    assert (second.grants, rig.dispatcher.waiting) == ([], 1)
    end(rig, id_)
    assert len(second.grants) == 1
    assert rig.dispatcher.waiting == 0


async def test_what_ends_while_it_waits_never_gets_a_verdict(rig: Rig) -> None:
    first, second, third = Waiter(), Waiter(), Waiter()
    running = rig.enqueue(first)
    left = rig.enqueue(second)
    rig.enqueue(third)
    end(rig, left)
    end(rig, running, Usage(1, 0, 1))
    assert (second.grants, second.refusals) == ([], [])
    assert len(third.grants) == 1
    assert rig.in_flight() == 1


async def test_an_end_that_is_told_twice_counts_once(rig: Rig) -> None:
    first, second, third = Waiter(), Waiter(), Waiter()
    running = rig.enqueue(first)
    rig.enqueue(second)
    rig.enqueue(third)
    end(rig, running)
    end(rig, running)
    assert (len(second.grants), len(third.grants)) == (1, 0)
    end(rig, 12345)
    assert rig.in_flight() == 1


async def test_a_waiter_that_ends_within_its_verdict_lets_the_next_go() -> None:
    """As a client that is found gone when the request is sent: no recursion, no lost turn."""
    rig = Rig(A)
    log: list[str] = []

    class Ends(Waiter):
        def granted(self, grant: Dispatch) -> None:
            super().granted(grant)
            end(rig, grant.id)
            log.append(f"ended {grant.id}")

    waiters = [Ends(log) for _ in range(2000)]
    block = rig.enqueue(Waiter())
    ids = [rig.enqueue(waiter) for waiter in waiters]
    end(rig, block)
    assert all(len(waiter.grants) == 1 for waiter in waiters)
    assert log == [f"{what} {id_}" for id_ in ids for what in ("granted", "ended")]
    assert (rig.in_flight(), rig.dispatcher.waiting) == (0, 0)


async def test_a_granted_request_that_another_verdict_ends_is_not_sent() -> None:
    """Its grant was decided, but not carried out: its place must come free again."""
    rig = Rig(A, B)
    victim = Waiter()
    ids: list[int] = []

    class Kills(Waiter):
        def granted(self, grant: Dispatch) -> None:
            super().granted(grant)
            end(rig, ids[0])

    running = [rig.enqueue(Waiter()), rig.enqueue(Waiter())]
    killer = Kills()
    rig.enqueue(killer)
    ids.append(rig.enqueue(victim))
    rig.endpoints = [Endpoint(id=A, max_requests=2), Endpoint(id=B, max_requests=2)]
    rig.dispatcher.endpoints_changed()
    for id_ in running:
        end(rig, id_)
    assert len(killer.grants) == 1
    assert (victim.grants, victim.refusals) == ([], [])
    assert rig.in_flight() == 1


async def test_a_waiter_that_fails_takes_nobody_along(rig: Rig) -> None:
    class Fails(Waiter):
        def granted(self, grant: Dispatch) -> None:
            raise KeyError("no such endpoint")

    reported: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
    after = Waiter()
    block = rig.enqueue(Waiter())
    failing = Fails()
    rig.enqueue(failing)
    rig.enqueue(after)
    end(rig, block)
    assert len(reported) == 1
    assert failing.outcomes == [Outcome.UPSTREAM_FAILED], "it must not wait for ever"
    assert len(after.grants) == 1
    assert rig.in_flight() == 1


async def test_all_are_let_out_in_the_order_in_which_they_came(rig: Rig) -> None:
    running = rig.enqueue(Waiter())
    waiters = [Waiter() for _ in range(9)]
    tiers = ["bronze", "gold", "silver"] * 3
    for waiter, tier in zip(waiters, tiers, strict=True):
        rig.enqueue(waiter, tier)
    assert rig.dispatcher.release_all() == waiters
    assert rig.dispatcher.waiting == 0
    assert sum(tier.queued for tier in rig.dispatcher.snapshot().tiers) == 0
    end(rig, running)
    await asyncio.sleep(0.01)
    assert not any(waiter.grants or waiter.refusals for waiter in waiters)
    assert rig.in_flight() == 0
    after = Waiter()
    rig.enqueue(after)
    assert len(after.grants) == 1


async def test_a_deadline_passes_without_any_other_event(rig: Rig) -> None:
    rig.enqueue(Waiter())
    passed = asyncio.Event()

    class Says(Waiter):
        def refused(self, refusal: Refuse) -> None:
            super().refused(refusal)
            passed.set()

    late, later = Waiter(), Says()
    loop = asyncio.get_running_loop()
    rig.enqueue(later, deadline_s=loop.time() + 0.06)
    rig.enqueue(late, deadline_s=loop.time() + 0.03)
    async with asyncio.timeout(5):
        await passed.wait()
    assert late.outcomes == later.outcomes == [Outcome.QUEUE_TIMEOUT]


@needs_plain
async def test_no_timer_runs_while_nothing_waits(rig: Rig) -> None:
    rig.enqueue(Waiter())
    left = rig.enqueue(Waiter())
    end(rig, left)
    ticks = 0
    tick = rig.dispatcher._controller.tick

    def counting(now: float) -> list[Dispatch | Refuse]:
        nonlocal ticks
        ticks += 1
        return tick(now)

    rig.dispatcher._controller.tick = counting  # type: ignore[method-assign]
    await asyncio.sleep(0.3)
    assert ticks <= 1
    rig.dispatcher.close()


async def test_an_undeliverable_request_goes_to_another_endpoint_or_is_refused() -> None:
    rig = Rig(A, B)
    waiter = Waiter()
    id_ = rig.enqueue(waiter)
    first = waiter.grants[0].legs[0].endpoint
    rig.dispatcher.undeliverable(id_, first, waiter)
    second = waiter.grants[1].legs[0].endpoint
    assert {first, second} == {A, B}
    rig.dispatcher.undeliverable(id_, second, waiter)
    assert waiter.outcomes == [Outcome.NO_ENDPOINT]
    assert (rig.in_flight(), rig.dispatcher.waiting) == (0, 0)


async def test_a_client_that_leaves_while_its_request_is_placed_anew_is_forgotten() -> None:
    rig = Rig(A, B)
    waiters = [Waiter(), Waiter()]
    ids = [rig.enqueue(waiter) for waiter in waiters]
    place = waiters[0].grants[0].legs[0].endpoint
    rig.dispatcher.undeliverable(ids[0], place, waiters[0])
    assert rig.dispatcher.waiting == 1
    end(rig, ids[0])
    end(rig, ids[1])
    assert [len(waiter.grants) for waiter in waiters] == [1, 1]
    assert (rig.in_flight(), rig.dispatcher.waiting) == (0, 0)


async def test_a_request_that_can_go_nowhere_does_not_block_those_that_can() -> None:
    """It was not delivered to A and waits for B; then B goes down, while A has room."""
    rig = Rig(A, B)
    busy = {waiter.grants[0].legs[0].endpoint: id_ for id_, waiter in fill(rig, 2)}
    stuck = Waiter()
    id_ = rig.enqueue(stuck)
    end(rig, busy[A])
    rig.dispatcher.undeliverable(id_, stuck.grants[0].legs[0].endpoint, stuck)
    rig.endpoints = [Endpoint(id=A, max_requests=1), Endpoint(id=B, max_requests=1, up=False)]
    rig.dispatcher.endpoints_changed()
    other = Waiter()
    rig.enqueue(other)
    assert len(other.grants) == 1
    assert stuck.outcomes == [Outcome.NO_ENDPOINT]


def fill(rig: Rig, count: int) -> list[tuple[int, Waiter]]:
    waiters = [Waiter() for _ in range(count)]
    return [(rig.enqueue(waiter), waiter) for waiter in waiters]


# What the core is told of bypass.


async def test_bypass_is_told_when_it_matters(rig: Rig) -> None:
    rig.states[0].bypass_in_flight, rig.states[0].bypass_arrived = 3, 3
    assert rig.bypass() == [3]
    rig.states[0].bypass_in_flight = 0
    assert rig.bypass() == [0]


@needs_plain
async def test_a_reload_does_not_tell_old_arrivals_again(rig: Rig) -> None:
    told: list[tuple[int, int]] = []
    controller = rig.dispatcher._controller
    real = controller.bypass

    def spy(
        now: float, endpoint: EndpointId, requests: int, body_bytes: int, arrived: int
    ) -> list[Dispatch | Refuse]:
        told.append((requests, arrived))
        return real(now, endpoint, requests, body_bytes, arrived)

    controller.bypass = spy  # type: ignore[method-assign]
    rig.states[0].bypass_in_flight, rig.states[0].bypass_arrived = 1, 1000
    rig.bypass()
    rig.dispatcher.watch(rig.states)
    rig.bypass()
    assert sum(arrived for _, arrived in told) == 1000


async def test_an_endpoint_that_a_reload_replaced_has_none_of_the_old_ones_bypass() -> None:
    """The same name at another address: its requests are counted in a fresh record."""
    rig = Rig(A)
    rig.states[0].bypass_in_flight, rig.states[0].bypass_arrived = 5, 5
    assert rig.bypass() == [5]
    rig.states = (EndpointState(A),)
    rig.dispatcher.watch(rig.states)
    assert rig.bypass() == [0]


# Reloads.


async def test_a_reload_keeps_what_waits(rig: Rig) -> None:
    running = rig.enqueue(Waiter())
    waiters = [Waiter() for _ in range(4)]
    for waiter, tier in zip(waiters, ["gold", "silver", "bronze", "bronze"], strict=True):
        rig.enqueue(waiter, tier)
    rig.dispatcher.configure(FlowConfig())
    only = TierConfig(name="silver", rank=0, ttft_target_s=5, itl_target_s=1, max_wait_s=9)
    rig.dispatcher.configure(FlowConfig(tiers=(only,)))
    assert rig.dispatcher.waiting == 4
    end(rig, running)
    assert sum(len(waiter.grants) for waiter in waiters) == 1


async def test_an_endpoint_that_is_removed_is_left_by_those_who_wait() -> None:
    rig = Rig(A)
    rig.enqueue(Waiter())
    waiter = Waiter()
    rig.enqueue(waiter)
    rig.endpoints, rig.states = [Endpoint(id=B, max_requests=1)], (EndpointState(B),)
    rig.dispatcher.watch(rig.states)
    assert [grant.legs[0].endpoint for grant in waiter.grants] == [B]


async def test_it_is_active_only_while_requests_opt_in(rig: Rig) -> None:
    assert not rig.dispatcher.active
    rig.enqueue(Waiter())
    assert rig.dispatcher.active
