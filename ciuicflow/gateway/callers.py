"""Who calls, and which tier they get. Pure.

A tenant is what an API key belongs to, else whom the body names, else the client's address; the
three have name spaces of their own, so that nobody can call itself another's name.
"""

from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final

import msgspec

from ciuicflow.config import Flow
from ciuicflow.gateway.optin import FlowFields

_MAX_ADDRESS_CHARS: Final = 64


class Caller(msgspec.Struct, frozen=True, gc=False):
    """The tenant (or an empty name, where no key tells) and the tier of a request."""

    tenant: str
    tier: str


class Callers:
    """Knows tenants by the hashes of their keys, and what each may use."""

    def __init__(self, flow: Flow) -> None:
        ranked = [tier.name for tier in sorted(flow.tiers, key=lambda tier: tier.rank)]
        self._ranks = {name: rank for rank, name in enumerate(ranked)}
        self._default = flow.default_tier
        self._accepts_unknown = flow.unknown_keys.accept
        self._unknown_may = self._allowed(flow.unknown_keys.tiers)
        self._by_key = {
            key: (f"key:{tenant.name}", self._allowed(tenant.tiers))
            for tenant in flow.tenants
            for key in tenant.keys_sha256
        }

    def identify(self, fields: FlowFields) -> Caller | None:
        """Return who calls; None: a known key is required, and this is none."""
        known = self._by_key.get(fields.key_sha256)
        if known is None and not self._accepts_unknown:
            return None
        tenant, allowed = known or ("", self._unknown_may)
        return Caller(tenant, self._clamp(fields.tier, allowed))

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
            if not self._trusts(hop):
                return hop or peer
        return hops[0] or peer

    def _trusts(self, address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._networks)
