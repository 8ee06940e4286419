"""Pairs of agents in this process, with memory that shows what has arrived."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, Final

import msgspec
import numpy as np

from ciuicflow.kvtransfer.layout import Geometry, Region, RegionKind
from ciuicflow.kvtransfer.settings import SenderConfig
from ciuicflow.kvtransfer.ticket import Shard, TransferTicket
from ciuicflow.runtime.kv_agent import KvAgent, KvPush, KvTransfer
from ciuicflow.runtime.kv_records import KvConfig
from ciuicflow.runtime.memory import SharedMemory

LAYOUT: Final = Geometry(
    model="small",
    regions=(
        Region(
            name="kv",
            kind=RegionKind.MLA,
            layers=4,
            block_tokens=16,
            block_bytes=18432,
            dtype="bf16",
        ),
        Region(
            name="index",
            kind=RegionKind.INDEXER,
            layers=2,
            block_tokens=16,
            block_bytes=512,
            dtype="fp8",
        ),
    ),
)
BLOCKS: Final = 64
QUICK: Final = SenderConfig(heartbeat_s=0.1, dead_after_s=1.0, answer_s=1.0, stall_s=1.5)
CONFIG: Final = KvConfig(sender=QUICK, metrics=None, connect_s=5.0)
SOON_S: Final = 15.0
"""Ample for whatever takes about a second."""
_IDS: Final = count()


class Side:
    """An agent and its memory; side 'p' holds random bytes, others zeros."""

    def __init__(self, name: str, scheme: str, **given: Any) -> None:
        layout: Geometry = given.pop("layout", LAYOUT)
        self.memory = SharedMemory(layout, [BLOCKS] * len(layout.regions))
        if name == "p":
            rng = np.random.default_rng(7)
            for array in self.memory.arrays.values():
                array[:] = rng.integers(1, 256, array.shape, dtype=np.uint8)
        listen = (
            f"inproc://{name}-{next(_IDS)}" if scheme == "inproc" else f"{scheme}://127.0.0.1:0"
        )
        options: dict[str, Any] = {"listen": listen, "config": CONFIG} | given
        self.agent = KvAgent(name, layout, self.memory, **options)

    def blocks(self, blocks: list[int]) -> bytes:
        return b"".join(array[:, blocks].tobytes() for array in self.memory.arrays.values())


class Pair:
    """Agents p and d, which know each other."""

    def __init__(self, source: Side, target: Side) -> None:
        self.source, self.target = source, target

    def ticket(self, id_: str = "", **other: Any) -> TransferTicket:
        ticket = TransferTicket(
            id=id_ or f"t{next(_IDS)}",
            tier="gold",
            rank=0,
            remaining_ms=20_000.0,
            source=Shard(agent="p"),
            destination=Shard(agent="d"),
        )
        return msgspec.structs.replace(ticket, **other)

    def expect(self, ticket: TransferTicket, blocks: list[int]) -> KvTransfer:
        return self.target.agent.expect(ticket, [blocks] * regions(self.target))

    def push(self, ticket: TransferTicket, blocks: list[int], *, ready: bool = True) -> KvPush:
        push = self.source.agent.push(ticket, [blocks] * regions(self.source))
        if ready:
            push.ready(0, 100)
        return push

    def send(self, source: list[int], target: list[int], **other: Any) -> None:
        """Move blocks, wait, and see that they are the same."""
        ticket = self.ticket(**other)
        expected, pushed = self.expect(ticket, target), self.push(ticket, source)
        sent, got = pushed.result(SOON_S), expected.result(SOON_S)
        assert sent.bytes == got.bytes
        assert self.target.blocks(target) == self.source.blocks(source)


def regions(side: Side) -> int:
    return len(side.memory.layout.regions)


@contextmanager
def pair(scheme: str = "tcp", **options: Any) -> Iterator[Pair]:
    """Start both; `source` and `target` are options of one of them."""
    one, other = options.pop("source", {}), options.pop("target", {})
    with ExitStack() as stack:
        source, target = Side("p", scheme, **options | one), Side("d", scheme, **options | other)
        for side in (target, source):
            stack.callback(side.memory.close)
            stack.enter_context(side.agent)
        source.agent.register("d", target.agent.uri)
        yield Pair(source, target)
