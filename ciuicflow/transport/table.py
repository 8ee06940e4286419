"""The transports by scheme, and the two calls that a driver needs: `connect` and `listen`."""

from collections.abc import Awaitable
from typing import Final, Protocol

from ciuicflow.transport import inproc, tcp, ucx
from ciuicflow.transport.address import split_uri
from ciuicflow.transport.base import Connection, Limits, Listener, TransportUnavailable


class Transport(Protocol):
    """What a scheme's module offers; `address` is the URI without the scheme."""

    def connect(self, address: str, limits: Limits, deadline_s: float) -> Awaitable[Connection]:
        """Connect; raises ConnectFailed, TransportUnavailable."""

    def listen(self, address: str, limits: Limits) -> Awaitable[Listener]:
        """Listen; raises ListenFailed, TransportUnavailable."""


TRANSPORTS: Final[dict[str, Transport]] = {
    "inproc": inproc,
    "tcp": tcp,
    "ucx": ucx,
}

_DEFAULTS: Final = Limits()


async def connect(uri: str, deadline_s: float = 5.0, limits: Limits = _DEFAULTS) -> Connection:
    """Connect to a listener's URI within `deadline_s`, the handshake included.

    Raises ConnectFailed, TransportUnavailable.
    """
    transport, address = _find(uri)
    return await transport.connect(address, limits, deadline_s)


async def listen(uri: str, limits: Limits = _DEFAULTS) -> Listener:
    """Listen on a URI: `tcp://HOST:PORT` and `ucx://HOST:PORT` (port 0: a free one), or
    `inproc://NAME` (no name: a free one). Raises ListenFailed, TransportUnavailable.
    """
    transport, address = _find(uri)
    return await transport.listen(address, limits)


def _find(uri: str) -> tuple[Transport, str]:
    scheme, address = split_uri(uri)
    transport = TRANSPORTS.get(scheme)
    if transport is None:
        known = ", ".join(f"{name}://" for name in TRANSPORTS)
        raise TransportUnavailable(f"unknown transport {scheme}:// in {uri!r}; there are {known}")
    return transport, address
