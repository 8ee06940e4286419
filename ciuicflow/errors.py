"""Every exception that CiuicFlow raises, as one tree.

CiuicFlowError
├── ConfigError        the configuration is wrong: where, and what was expected (exit 2)
├── StartError         the process cannot start: port in use, unreadable certificate (exit 1)
└── ProtocolError      bytes that break HTTP
    ├── BadRequest     from a client
    │   └── Unsupported    well-formed, but not spoken here: another version or transfer coding
    └── BadResponse    from an upstream
"""

from enum import Enum


class CiuicFlowError(Exception):
    """Root of the tree."""


class ConfigError(CiuicFlowError):
    """A configuration that cannot be used; the message names the path and what was expected."""


class StartError(CiuicFlowError):
    """The process cannot start; the message says what to do."""


class ProtocolError(CiuicFlowError):
    """Bytes that break HTTP."""


class BadRequest(ProtocolError):
    """A client's bytes break HTTP; the connection cannot be used further."""


class Unsupported(BadRequest):
    """A well-formed request that needs something which is not spoken here."""

    class What(Enum):
        """What is not spoken."""

        VERSION = "HTTP version"
        CODING = "transfer coding"

    def __init__(self, what: What, detail: str) -> None:
        super().__init__(f"{what.value} not supported: {detail}")
        self.what = what


class BadResponse(ProtocolError):
    """An upstream's bytes break HTTP; its connection cannot be used further."""
