"""Errors of the KV plane, a branch of `ciuicflow.errors`.

KvError
└── WireError    bytes that are no control message of this protocol version
"""

from ciuicflow.errors import CiuicFlowError


class KvError(CiuicFlowError):
    """Root of the branch."""


class WireError(KvError):
    """Control bytes that cannot be used; the connection cannot be used further."""
