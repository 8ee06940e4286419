"""What an operator may see of senders and receivers."""

import msgspec

from ciuicflow.congestion.base import CongestionState


class PathState(msgspec.Struct, frozen=True, kw_only=True):
    """A sender and its path."""

    established: bool
    transfers: int
    in_flight_bytes: int
    acked_bytes: int
    marked_bytes: int
    """Acknowledged with congestion experienced, as far as known."""
    srtt_s: float | None
    send_wait_s: float
    """How long something was ready but might not be sent, in sum."""
    congestion: CongestionState


class ReceiverState(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver."""

    established: bool
    reserved: int
    """Transfers that are under way."""
    draining: int
    """Failed ones whose blocks cannot be freed yet."""
    in_flight_bytes: int
    received_bytes: int
