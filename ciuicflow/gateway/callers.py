"""Who calls, and which tier they get. Pure.

A tenant is what an API key belongs to, else whom the body names, else the client's address; the
three have name spaces of their own, so that nobody can call itself another's name.
"""

from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

import msgspec

from ciuicflow.config import Flow
from ciuicflow.gateway.optin import FlowFields

_MAX_ADDRESS_CHARS: Final = 64
_REMEMBERED: Final = 4096  # callers: to find out each time costs 3 us


class Caller(msgspec.Struct, frozen=True, gc=False):
    """The tenant (or an empty name, where no key tells) and the tier of a request."""

    tenant: str
    tier: str
    accepted: bool = True
    """False: a known key is required, and this is none."""


class Callers:
    """Knows tenants by the hashes of their keys, and what each may use."""

    def __init__(self, flow: Flow) -> None:
        self._ranks = {tier.name: rank for rank, tier in enumerate(flow.ranked)}
        self._default = flow.default_tier
        self._accepts_unknown = flow.unknown_keys.accept
        self._unknown_may = self._allowed(flow.unknown_keys.tiers)
        self._by_key = {
            key: (f"key:{tenant.name}", self._allowed(tenant.tiers))
            for tenant in flow.tenants
            for key in tenant.keys_sha256
        }
        self._remembered = lru_cache(_REMEMBERED)(self._identify)

    def identify(self, fields: FlowFields) -> Caller:
        """Return who calls."""
        return self._remembered(fields.key_sha256, fields.tier)

    def _identify(self, key_sha256: str, tier: str) -> Caller:
        known = self._by_key.get(key_sha256)
        tenant, allowed = known or ("", self._unknown_may)
        accepted = known is not None or self._accepts_unknown
        return Caller(tenant, self._clamp(tier, allowed), accepted)

    def _allowed(self, tiers: list[str] | None) -> tuple[str, ...]:
        """Return tiers in rank order."""
        return tuple(sorted(self._ranks if tiers is None else tiers, key=self._ranks.__getitem__))

    def _clamp(self, wanted: str, allowed: tuple[str, ...]) -> str:
        """Return the tier asked for, else the best allowed one that is no higher, else the lowest.

        A tier that does not exist counts as the default.
        """
        rank = self._ranks.get(wanted, self._ranks[self._default])
        return next((name for name in allowed if self._ranks[name] >= rank), allowed[-1])


class TrustedPeers:
    """Tells clients' addresses where proxies stand between."""

    def __init__(self, networks: list[str]) -> None:
        self._networks: list[IPv4Network | IPv6Network] = [ip_network(each) for each in networks]

    def client(self, peer: str, forwarded_for: str) -> str:
        """Return the last address in the chain that is not a trusted peer's."""
        if not self._networks or not forwarded_for:
            return peer
        hops = [hop.strip()[:_MAX_ADDRESS_CHARS] for hop in forwarded_for.split(",")]
        for hop in [peer, *reversed(hops)]:
            address = _address(hop)
            if address is None or not any(address in network for network in self._networks):
                return str(address or hop or peer)
        return str(_address(hops[0]))


def _address(hop: str) -> IPv4Address | IPv6Address | None:
    """Return the address of a hop, which some proxies give a port; None: it is none."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        address = ip_address(hop)
    except ValueError:
        return None
    # As a socket for both IP versions shows IPv4 clients.
    return getattr(address, "ipv4_mapped", None) or address
