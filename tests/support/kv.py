"""A sender and a receiver of KV cache, joined by a simulated link, with books of their own.

The link delivers in order, and only when told. A cell is one block of one layer; what a cell should
hold is (transfer, region, layer, position), so a wrong or missing one is seen at once.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final
from zlib import crc32

from ciuicflow.congestion.fixed import FixedController
from ciuicflow.kvtransfer.actions import (
    Action,
    Close,
    Complete,
    Discard,
    Established,
    Fail,
    FreeBlocks,
    PostReceive,
    SendControl,
    SendQuantum,
)
from ciuicflow.kvtransfer.layout import Geometry, Region, RegionKind
from ciuicflow.kvtransfer.receiver import Receiver
from ciuicflow.kvtransfer.sender import Sender
from ciuicflow.kvtransfer.session import make_hello
from ciuicflow.kvtransfer.settings import BatchSizes, OrderConfig, SenderConfig, SessionConfig
from ciuicflow.kvtransfer.ticket import Shard, TransferTicket
from ciuicflow.kvtransfer.wire import Hello, Message, decode, encode

GEOMETRY: Final = Geometry(
    model="tiny",
    regions=(
        Region(
            name="kv", kind=RegionKind.MLA, layers=3, block_tokens=4, block_bytes=100, dtype="bf16"
        ),
        Region(
            name="index",
            kind=RegionKind.INDEXER,
            layers=2,
            block_tokens=4,
            block_bytes=40,
            dtype="fp8",
        ),
    ),
)
WINDOW: Final = 600
SETTINGS: Final = {"checksum": "crc32"}
SESSION: Final = SessionConfig()
SENDER: Final = SenderConfig(
    quantum_bytes=300,
    batch=BatchSizes(least=200, most=800),
    order=OrderConfig(promote_after_s=1e9),
)


def hello(agent: str, incarnation: int = 1, geometry: Geometry = GEOMETRY, **other: Any) -> Hello:
    """Make the greeting of an agent."""
    settings = other.pop("settings", SETTINGS)
    return make_hello(agent, incarnation, geometry, other.pop("window_bytes", WINDOW), settings)


def ticket(id_: str = "t", **other: Any) -> TransferTicket:
    """Make a ticket from agent p to agent d."""
    values: dict[str, Any] = {
        "tier": "gold",
        "rank": 0,
        "remaining_ms": 60_000.0,
        "source": Shard(agent="p"),
        "destination": Shard(agent="d"),
    }
    return TransferTicket(id=id_, **values | other)


def sender(window: int = WINDOW, rate: float | None = None, **other: Any) -> Sender:
    """Make one whose controller is fixed."""
    greeting = other.pop("hello", hello("p"))
    return Sender(greeting, other.pop("config", SENDER), FixedController(window, rate))


def receiver(**other: Any) -> Receiver:
    """Make one."""
    return Receiver(other.pop("hello", hello("d")), other.pop("config", SESSION))


def messages(actions: Iterable[Action]) -> list[Message]:
    """Return what is said, headers of quanta included."""
    return [
        action.frame.message for action in actions if isinstance(action, SendControl | SendQuantum)
    ]


def kinds(actions: Iterable[Action]) -> list[str]:
    """Return the names of messages and other actions, in order."""
    return [
        type(action.frame.message if isinstance(action, SendControl) else action).__name__
        for action in actions
    ]


class Item:
    """Something on its way to the receiver."""

    def __init__(self, control: bytes, payload: list[Any] | None = None) -> None:
        self.control = control
        self.payload = payload


class Side:
    """The books of one side: who holds which block, how each transfer ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner: dict[tuple[int, int], str] = {}  # (region, block) -> transfer
        self.lists: dict[str, list[list[int]]] = {}
        self.outcome: dict[str, Action] = {}
        self.freed: set[str] = set()
        self.connected = False
        self.closed = False
        """Whether this side has given the connection up; it may not have been told so yet."""

    def take(self, id_: str, lists: list[list[int]]) -> None:
        for region, blocks in enumerate(lists):
            for block in blocks:
                assert (region, block) not in self.owner
                self.owner[region, block] = id_
        self.lists[id_] = lists

    def free_blocks(self, region: int, limit: int) -> list[int]:
        return [block for block in range(limit) if (region, block) not in self.owner]

    def release(self, id_: str) -> None:
        for region, blocks in enumerate(self.lists[id_]):
            for block in blocks:
                assert self.owner.pop((region, block)) == id_
        self.freed.add(id_)

    def end(self, action: Complete | Fail) -> None:
        assert action.transfer not in self.outcome, "two outcomes"
        self.outcome[action.transfer] = action


class Link:
    """Does what both machines say, one delivery at a time."""

    def __init__(self, send: Sender, receive: Receiver) -> None:
        self.now = 0.0
        self.sender = send
        self.receiver = receive
        self.source = Side("source")
        self.target = Side("target")
        self.to_receiver: deque[Item] = deque()
        self.to_sender: deque[bytes] = deque()
        self.sending: dict[tuple[str, int], int] = {}  # -> checksum
        self.receiving: dict[tuple[str, int], tuple[list[Any], list[Any] | None]] = {}
        self.memory: dict[tuple[int, int, int], Any] = {}
        self.sent_bytes = 0
        self.received_bytes = 0
        self.log: list[Action] = []
        self.closes: list[Close] = []
        self.damages = False
        """Whether the next payload arrives with a wrong cell."""
        self.damaged: set[str] = set()

    # The link.

    def connect(self) -> None:
        for side in (self.source, self.target):
            side.connected, side.closed = True, False
        self.to_receiver.clear()
        self.to_sender.clear()
        self.at_sender(self.sender.on_connect(self.now))
        self.at_receiver(self.receiver.on_connect(self.now))

    def deliver_to_receiver(self) -> bool:
        if not self.to_receiver or self.target.closed:
            return False
        item = self.to_receiver.popleft()
        if self.damages and item.payload:
            self.damages = False
            self.damaged.add(item.payload[0][0])
            item.payload[0] = (*item.payload[0][:3], "damaged")
        actions = self.receiver.on_frame(self.now, decode(item.control))
        self.at_receiver(actions, item.payload)
        return True

    def deliver_to_sender(self) -> bool:
        if not self.to_sender or self.source.closed:
            return False
        self.at_sender(self.sender.on_frame(self.now, decode(self.to_sender.popleft())))
        return True

    def finish_send(self) -> bool:
        """The transport lets go of the oldest quantum."""
        if not self.sending:
            return False
        (id_, seq), checksum = next(iter(self.sending.items()))
        del self.sending[id_, seq]
        self.at_sender(self.sender.on_released(self.now, id_, seq, checksum))
        return True

    def finish_receive(self, index: int = 0, *, ok: bool = True) -> bool:
        """The payload of one posted receive is there, or fails after some of it was written."""
        if not self.receiving:
            return False
        id_, seq = list(self.receiving)[index % len(self.receiving)]
        payload, cells = self.receiving.pop((id_, seq))
        if cells is not None:
            for cell, value in list(zip(cells, payload, strict=True))[: None if ok else 1]:
                assert self.target.owner.get((cell[0], cell[2])) == id_, (
                    "written after it was freed"
                )
                self.memory[cell] = value
        if ok:
            checksum = crc32(repr(payload).encode())
            self.at_receiver(self.receiver.on_payload(self.now, id_, seq, checksum=checksum))
        else:
            self.at_receiver(self.receiver.on_receive_failed(self.now, id_, seq, "reset"))
        return True

    def settle(self) -> None:
        """Deliver and finish until nothing is left to do."""
        steps: list[Callable[[], bool]] = [
            self.deliver_to_receiver,
            self.deliver_to_sender,
            self.finish_send,
            self.finish_receive,
        ]
        while any(step() for step in steps):
            pass

    def lose(self) -> None:
        """The connection breaks, and both sides notice."""
        for side in (self.source, self.target):
            self.notice(side)

    def notice(self, side: Side) -> None:
        side.connected, side.closed = False, True
        if side is self.source:
            self.at_sender(self.sender.on_disconnect(self.now))
        else:
            self.at_receiver(self.receiver.on_disconnect(self.now))

    def restart_sender(self, send: Sender) -> None:
        """Its process is another one now: what it held and did is gone."""
        self.sender, self.source = send, Side("source")
        self.sending.clear()

    def restart_receiver(self, receive: Receiver) -> None:
        self.receiver, self.target = receive, Side("target")
        self.receiving.clear()
        self.memory.clear()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.at_sender(self.sender.tick(self.now))
        self.at_receiver(self.receiver.tick(self.now))

    # Transfers.

    def submit(self, ticket: TransferTicket, lists: list[list[int]]) -> None:
        self.source.take(ticket.id, lists)
        self.at_sender(self.sender.submit(self.now, ticket, lists))

    def reserve(self, ticket: TransferTicket, lists: list[list[int]]) -> None:
        self.target.take(ticket.id, lists)
        self.at_receiver(self.receiver.reserve(self.now, ticket, lists))

    # What the machines say.

    def at_sender(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendControl():
                    self.to_receiver.append(Item(encode(action.frame)))
                case SendQuantum():
                    self._send(action)
                case Close():
                    self.source.closed = True
                    self.closes.append(action)
                case _:
                    self._note(self.source, action)

    def at_receiver(self, actions: list[Action], payload: list[Any] | None = None) -> None:
        for action in actions:
            match action:
                case SendControl():
                    self.to_sender.append(encode(action.frame))
                case PostReceive():
                    assert payload is not None
                    slabs = list(action.piece.slabs())
                    cells = [
                        (slab.region, slab.layer, block)
                        for slab in slabs
                        for block in range(slab.first, slab.first + slab.count)
                    ]
                    self._post(action.transfer, action.seq, payload, cells)
                case Discard():
                    assert payload is not None
                    self._post(action.transfer, action.seq, payload, None)
                case Close():
                    self.target.closed = True
                    self.closes.append(action)
                case Complete():
                    self._check_whole(action)
                    self._note(self.target, action)
                case _:
                    self._note(self.target, action)

    def _send(self, action: SendQuantum) -> None:
        id_, message = action.transfer, action.frame.message
        payload = []
        for slab in action.piece.slabs():
            for block in range(slab.first, slab.first + slab.count):
                assert self.source.owner[slab.region, block] == id_, "read after it was freed"
                position = self.source.lists[id_][slab.region].index(block)
                payload.append((id_, slab.region, slab.layer, position))
        assert message.bytes == action.piece.bytes  # type: ignore[union-attr]  # a Quantum
        self.sent_bytes += action.piece.bytes
        self.sending[id_, action.seq] = crc32(repr(payload).encode())
        self.to_receiver.append(Item(encode(action.frame), payload))

    def _post(self, id_: str, seq: int, payload: list[Any], cells: list[Any] | None) -> None:
        assert cells is None or len(cells) == len(payload)
        self.receiving[id_, seq] = payload, cells

    def _check_whole(self, action: Complete) -> None:
        lists = self.target.lists[action.transfer]
        assert self.receiver.peer is not None
        shared = self.receiver.hello.geometry.shared_layers(self.receiver.peer.geometry)
        size = 0
        for region, (blocks, layers) in enumerate(zip(lists, shared, strict=True)):
            for layer in range(layers.first, layers.end):
                size += len(blocks) * GEOMETRY.regions[region].block_bytes
                for position, block in enumerate(blocks):
                    expected = (action.transfer, region, layer, position)
                    assert self.memory.get((region, layer, block)) == expected, "partial commit"
        assert action.bytes == size

    def _note(self, side: Side, action: Action) -> None:
        self.log.append(action)
        match action:
            case Complete() | Fail():
                side.end(action)
            case FreeBlocks():
                assert action.transfer in side.outcome, "freed before its end"
                blocks = [list(part) for part in action.blocks]
                assert blocks == side.lists[action.transfer]
                if side is self.source:
                    assert not any(id_ == action.transfer for id_, _ in self.sending)
                side.release(action.transfer)
            case Established():
                pass
            case _:
                raise AssertionError(f"unexpected {action}")
