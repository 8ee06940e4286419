"""Errors of the KV plane, a branch of `ciuicflow.errors`.

KvError
├── WireError         bytes that are no control message of this protocol version
├── KvUsageError      a call that cannot be right: nothing happened (also a ValueError)
├── TransferFailed    one transfer, with its reason
└── AgentGone         the agent has stopped, could not start, or its process has ended
"""

from ciuicflow.errors import CiuicFlowError
from ciuicflow.kvtransfer.outcomes import FailReason


class KvError(CiuicFlowError):
    """Root of the branch."""


class WireError(KvError):
    """Control bytes that cannot be used; the connection cannot be used further."""


class KvUsageError(KvError, ValueError):
    """A call that cannot be right, such as a block that is in use; nothing happened."""


class TransferFailed(KvError):
    """A transfer has failed; the cache at the destination is not to be used."""

    def __init__(self, transfer: str, reason: FailReason, detail: str, *, by_peer: bool) -> None:
        found = " (found by the peer)" if by_peer else ""
        super().__init__(f"transfer {transfer} failed: {reason}{found}: {detail or reason.name}")
        self.transfer = transfer
        self.reason = reason
        self.by_peer = by_peer
        self.detail = detail


class AgentGone(KvError):
    """The agent is not there: not started, stopped, or its process has ended; says which."""
