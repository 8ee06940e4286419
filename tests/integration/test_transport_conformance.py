"""Every transport, in both event loops, against the suite that ships."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from ciuicflow.testing.transport_suite import CHECKS, Check, Harness
from ciuicflow.transport import ucx_context
from ciuicflow.transport.base import TransportUnavailable

HARNESSES = {
    "inproc": Harness("inproc://", on_network=False),
    "tcp": Harness("tcp://127.0.0.1:0"),
    "ucx": Harness("ucx://127.0.0.1:0", cycles=40),
}
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheme", HARNESSES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_transport(check: Check, scheme: str, loop: str) -> None:
    if scheme == "ucx":
        _need_ucxx()
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(_checked(check, HARNESSES[scheme]))


async def _checked(check: Callable[[Harness], Awaitable[None]], harness: Harness) -> None:
    await check(harness)
    async with asyncio.timeout(10):
        while ucx_context.in_use():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


def _need_ucxx() -> None:
    try:
        ucx_context.load_ucxx()
    except TransportUnavailable as missing:
        pytest.skip(str(missing))
