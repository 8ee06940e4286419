"""What the sender and the receiver tell their driver to do: small immutable records."""

import msgspec

from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.ranges import BlockList, Piece
from ciuicflow.kvtransfer.ticket import TransferId
from ciuicflow.kvtransfer.wire import Frame, Hello


class SendControl(msgspec.Struct, frozen=True, gc=False):
    """Send this message; all messages go out in the order of the actions."""

    frame: Frame


class SendQuantum(msgspec.Struct, frozen=True, gc=False):
    """Send this header, and after it the payload; then call `Sender.on_released`."""

    frame: Frame
    transfer: TransferId
    seq: int
    piece: Piece


class PostReceive(msgspec.Struct, frozen=True, gc=False):
    """Receive the payload into these blocks; then call `on_payload` or `on_receive_failed`."""

    transfer: TransferId
    seq: int
    piece: Piece


class Discard(msgspec.Struct, frozen=True, gc=False):
    """Receive the payload and throw it away; then call `on_payload` or `on_receive_failed`."""

    transfer: TransferId
    seq: int
    bytes: int


class Established(msgspec.Struct, frozen=True, gc=False):
    """The peer's greeting fits ours: transfers run from now on."""

    peer: Hello


class Complete(msgspec.Struct, frozen=True, gc=False):
    """The transfer is whole. At the receiver its blocks are the engine's from now on."""

    transfer: TransferId
    bytes: int
    quanta: int
    duration_s: float
    """Since it was submitted or reserved."""


class Fail(msgspec.Struct, frozen=True, gc=False):
    """The transfer has failed; its blocks are still held, `FreeBlocks` follows."""

    transfer: TransferId
    reason: FailReason
    by_peer: bool
    """Whether the other side found the reason."""
    detail: str = ""


class FreeBlocks(msgspec.Struct, frozen=True, gc=False):
    """Nothing reads or writes these blocks for this transfer any more; said once."""

    transfer: TransferId
    blocks: tuple[BlockList, ...]
    """By region."""


class Close(msgspec.Struct, frozen=True, gc=False):
    """Close the connection after what was to be sent; then call `on_disconnect`."""

    reason: FailReason
    detail: str


Action = (
    SendControl
    | SendQuantum
    | PostReceive
    | Discard
    | Established
    | Complete
    | Fail
    | FreeBlocks
    | Close
)
