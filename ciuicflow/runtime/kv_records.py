"""What an engine and its KV agent tell each other: plain records, the same in both places."""

from typing import Annotated, Literal

import msgspec

from ciuicflow.congestion.base import CongestionState
from ciuicflow.kvtransfer.layout import Geometry, Name
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.settings import Seconds, SenderConfig, Size
from ciuicflow.kvtransfer.ticket import TransferId, TransferTicket
from ciuicflow.runtime.memory import SharedHandle

Blocks = tuple[tuple[int, ...], ...]
"""Block ids by region, in the order of their tokens."""
Checksum = Literal["xxh3", "none"]


class KvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an agent."""

    sender: SenderConfig = SenderConfig()
    """Sizes, order and deadlines; the deadlines hold for receiving as well."""
    window_bytes: Size = 8 << 20
    """In flight on a path at once: what a higher tier waits behind."""
    rate_bytes_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Cap of each path; None: no cap."""
    receive_bytes: Size = 64 << 20
    """What each peer may have in flight to us."""
    checksum: Checksum = "xxh3"
    """Of every payload; must be the same on both sides."""
    connect_s: Seconds = 5.0
    """How long a peer may take to be reachable before its transfers fail."""
    metrics: str | None = "127.0.0.1:0"
    """HOST:PORT of /metrics and /kv/state; port 0: a free one, None: no such port."""


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that makes an agent but its memory."""

    name: Name
    layout: Geometry
    listen: str
    config: KvConfig


# From the engine.


class Register(msgspec.Struct, frozen=True, tag=True):
    """Where an agent listens."""

    agent: str
    uri: str


class Push(msgspec.Struct, frozen=True, tag=True):
    """Send these blocks; `Ready` says which layers have been computed."""

    ticket: TransferTicket
    blocks: Blocks


class Ready(msgspec.Struct, frozen=True, tag=True):
    """These layers have been computed, of all blocks or of `count` from position `first` on."""

    transfer: TransferId
    first_layer: int
    end_layer: int
    first: int | None
    count: int
    region: int | None


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Receive into these blocks."""

    ticket: TransferTicket
    blocks: Blocks


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Give a transfer up."""

    transfer: TransferId
    detail: str


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Tell the state; the answer has the same number."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Fail what is under way, say goodbye to the peers, and end."""


Command = Register | Push | Ready | Reserve | Abort | Ask | Stop

# From the agent.


class Started(msgspec.Struct, frozen=True, tag=True):
    """It listens."""

    uri: str
    metrics: str | None
    incarnation: int


class Completed(msgspec.Struct, frozen=True, tag=True):
    """A transfer is whole at its destination."""

    transfer: TransferId
    bytes: int
    quanta: int
    duration_s: float
    """From the call that began it, as the agent saw it."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A transfer has failed; its blocks are still in use."""

    transfer: TransferId
    reason: FailReason
    by_peer: bool
    detail: str


class Freed(msgspec.Struct, frozen=True, tag=True):
    """A transfer that has ended uses its blocks no more."""

    transfer: TransferId


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A call about a transfer could not be right; a transfer that it would begin has not begun."""

    transfer: TransferId
    detail: str


class PathReport(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two agents, as the sender of the pair sees it."""

    src: str
    dst: str
    uri: str
    established: bool
    transfers: int
    in_flight_bytes: int
    sent_bytes: dict[str, int]
    """By tier."""
    acked_bytes: int
    send_wait_s: float
    """How long something was ready but might not be sent, in sum."""
    rtt_s: float | None
    ce_fraction: float | None
    """Of segments that the kernel sent; None: not known."""
    lanes: tuple[str, ...]
    congestion: CongestionState


class SourceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One peer that sends to us."""

    src: str
    dst: str
    established: bool
    reserved: int
    draining: int
    in_flight_bytes: int
    received_bytes: int


class AgentState(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may see of an agent."""

    agent: str
    incarnation: int
    uri: str
    paths: tuple[PathReport, ...]
    sources: tuple[SourceReport, ...]
    outcomes: dict[str, int]
    """How many transfers ended how, sent and received ones: `send completed`."""


class State(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ask`."""

    number: int
    state: AgentState


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The last record: why it has ended; empty: as asked."""

    detail: str = ""


Event = Started | Completed | Failed | Freed | Rejected | State | Stopped


class Setup(msgspec.Struct, frozen=True):
    """The first record to an agent's process."""

    spec: AgentSpec
    memory: SharedHandle
