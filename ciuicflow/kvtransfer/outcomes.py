"""How a transfer can fail: one closed set, used on the wire, in metrics and in log lines."""

from enum import StrEnum


class FailReason(StrEnum):
    """Why a transfer failed, or why a connection is closed. The value is the metric label."""

    ABORTED = "aborted"  # an engine or the gateway gave it up
    DEADLINE = "deadline"  # its time is over
    OVERLOADED = "overloaded"  # too many transfers are under way
    STALE = "stale"  # its ticket names another agent or incarnation, or its id was used before
    MISMATCH = "mismatch"  # the two sides disagree on the number of blocks
    INCOMPLETE = "incomplete"  # a commit came before all bytes, or counts otherwise
    CHECKSUM = "checksum"  # the bytes that arrived are not the bytes that were sent
    REFUSED = "refused"  # the handshake failed: geometry or settings differ
    PROTOCOL = "protocol"  # the peer broke the protocol, or sent garbage
    PEER_ERROR = "peer_error"  # the peer says that we broke it
    PEER_DEAD = "peer_dead"  # nothing was heard from the peer
    STALLED = "stalled"  # the peer is heard, but acknowledges or answers nothing
    PEER_LOST = "peer_lost"  # the connection broke
