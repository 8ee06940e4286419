"""What enqueueing, dispatching and cancelling cost with many entries queued, and their memory.

Run: ``python tests/simulation/bench_queue.py [ENTRIES]``. Prints microseconds of CPU per call, with
and without Python's garbage collector, which looks at every queued entry now and then.
"""

import gc
import sys
import time
import tracemalloc
from collections import deque
from random import Random

import msgspec

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.actions import Action, Dispatch, Endpoint, Item
from ciuicflow.flowcontrol.controller import FlowController
from ciuicflow.flowcontrol.cost import Usage
from ciuicflow.flowcontrol.tiers import DEFAULT_TIERS, FlowConfig

CALLS = 5000
TENANTS = 500
USAGE = Usage(1000, 0, 200)


def main(entries: int) -> None:
    flow = _controller(entries)
    tracemalloc.start()
    _fill(flow, Random(1), entries)
    print(
        f"{entries} queued entries, {tracemalloc.get_traced_memory()[0] / entries:.0f} bytes each"
    )
    tracemalloc.stop()
    for collector in (True, False):
        (gc.enable if collector else gc.disable)()
        print(f"garbage collector {'on' if collector else 'off'}")
        _time_all(entries)


def _time_all(entries: int) -> None:
    rng, flow = Random(1), _controller(entries)
    running = _dispatched(_fill(flow, rng, entries))
    _time_enqueue(flow, rng, entries)
    cycle_us = _time_cycle(flow, running)
    _time_progress(flow, running)
    _time_cancel(flow, rng, entries)
    bare_us = _time_cycle_without_queue()
    print(
        f"  first token and completion: {bare_us:.1f} us, a dispatch: {cycle_us - bare_us:.1f} us"
    )


def _controller(entries: int) -> FlowController:
    """Make one with four endpoints, where all but a few requests wait."""
    tiers = tuple(
        msgspec.structs.replace(tier, max_wait_s=86400.0, queue_entries=4 * entries)
        for tier in DEFAULT_TIERS
    )
    flow = FlowController(FlowConfig(tiers=tiers, queue_entries=4 * entries, queue_bytes=1 << 40))
    flow.set_endpoints(0.0, [Endpoint(id=EndpointId(f"e{index}")) for index in range(4)])
    return flow


def _fill(flow: FlowController, rng: Random, entries: int) -> list[Action]:
    actions: list[Action] = []
    for id_ in range(entries):
        actions += flow.enqueue(id_ * 1e-6, _item(id_, rng))
    return actions


def _dispatched(actions: list[Action]) -> deque[int]:
    return deque(action.id for action in actions if isinstance(action, Dispatch))


def _item(id_: int, rng: Random) -> Item:
    return Item(
        id=id_,
        tenant=f"tenant-{rng.randrange(TENANTS)}",
        tier=rng.choice(("gold", "silver", "bronze")),
        model="deepseek-chat",
        body_bytes=rng.randrange(200, 20_000),
        max_tokens=rng.choice((None, 256, 1024)),
    )


def _time_enqueue(flow: FlowController, rng: Random, entries: int) -> None:
    items = [_item(entries + index, rng) for index in range(CALLS)]
    start = time.process_time()
    for item in items:
        flow.enqueue(1.0, item)
    print(f"  enqueue: {_us(start):.1f} us")


def _time_cycle(flow: FlowController, running: deque[int]) -> float:
    """Each completion dispatches another request."""
    start = time.process_time()
    for index in range(CALLS):
        now = 1.0 + index * 0.001
        done = running.popleft()
        running += _dispatched(flow.first_token(now, done) + flow.complete(now, done, USAGE))
    return _us(start)


def _time_cycle_without_queue() -> float:
    flow, total_s = _controller(CALLS), 0.0
    for index in range(CALLS):
        now = 1.0 + index * 0.001
        flow.enqueue(now, _item(index, Random(index)))
        start = time.process_time()
        flow.first_token(now, index)
        flow.complete(now, index, USAGE)
        total_s += time.process_time() - start
    return total_s / CALLS * 1e6


def _time_progress(flow: FlowController, running: deque[int]) -> None:
    flow.first_token(8.0, running[0])
    start = time.process_time()
    for index in range(CALLS):
        flow.progress(8.0 + index * 1e-6, running[0])
    print(f"  progress of a stream: {_us(start):.1f} us")


def _time_cancel(flow: FlowController, rng: Random, entries: int) -> None:
    ids = rng.sample(range(entries, entries + CALLS), CALLS // 2)
    ids += rng.sample(range(entries), CALLS // 2)
    start = time.process_time()
    for id_ in ids:
        flow.cancel(9.0, id_)
    print(f"  cancel: {_us(start):.1f} us")


def _us(start_s: float) -> float:
    return (time.process_time() - start_s) / CALLS * 1e6


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
