"""Who a caller is and which tier it gets: never a higher one than it may use."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.config import Flow, Tenant, UnknownKeys
from ciuicflow.gateway.callers import Callers, TrustedPeers
from ciuicflow.gateway.optin import FlowFields

TIERS = ["gold", "silver", "bronze"]


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def asking(tier: str, key: str = "k") -> FlowFields:
    lines = f"X-Ciuic-Tier: {tier}\r\nX-Api-Key: {key}\r\n"
    return FlowFields(lines.encode("latin-1"))


def callers(tiers: list[str] | None, **settings: object) -> Callers:
    tenant = Tenant(name="acme", keys_sha256=[sha256("k")], tiers=tiers)
    return Callers(Flow(tenants=(tenant,), **settings))  # type: ignore[arg-type]  # any settings


@pytest.mark.parametrize(
    ("tiers", "asked", "got"),
    [
        (None, "gold", "gold"),
        (None, "", "silver"),
        (None, "nonsense", "silver"),
        (["gold"], "gold", "gold"),
        (["silver", "bronze"], "gold", "silver"),
        (["bronze", "silver"], "gold", "silver"),
        (["bronze"], "gold", "bronze"),
        (["bronze"], "", "bronze"),
        (["bronze", "gold"], "silver", "bronze"),
        (["bronze", "gold"], "", "bronze"),
        (["gold", "silver"], "bronze", "silver"),
        (["gold"], "bronze", "gold"),
    ],
)
def test_a_tier_is_clamped(tiers: list[str] | None, asked: str, got: str) -> None:
    caller = callers(tiers).identify(asking(asked))
    assert caller is not None
    assert (caller.tenant, caller.tier) == ("key:acme", got)


@given(
    st.lists(st.sampled_from(TIERS), min_size=1, unique=True), st.text("golda\xff,- ", max_size=9)
)
def test_no_word_lifts_a_caller_above_what_it_may_use(tiers: list[str], asked: str) -> None:
    caller = callers(tiers).identify(asking(asked))
    assert caller is not None
    assert caller.tier in tiers


def test_unknown_keys_get_the_tiers_of_unknown_keys() -> None:
    known = callers(None, unknown_keys=UnknownKeys(tiers=["bronze"]))
    stranger = known.identify(asking("gold", "other"))
    assert stranger is not None
    assert (stranger.tenant, stranger.tier) == ("", "bronze")


@pytest.mark.parametrize("key", ["", "other", sha256("k"), "K"])
def test_unknown_keys_are_nobody_where_they_are_not_accepted(key: str) -> None:
    known = callers(None, unknown_keys=UnknownKeys(accept=False))
    assert not known.identify(asking("gold", key)).accepted
    assert not known.identify(FlowFields(b"")).accepted
    assert known.identify(asking("gold")) is not None


# Addresses.

PEERS = TrustedPeers(["10.0.0.0/8", "2001:db8::/32", "127.0.0.1/32"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", "192.0.2.9", "192.0.2.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "192.0.2.9", "192.0.2.9"),
        ("10.0.0.1", "192.0.2.8, 192.0.2.9", "192.0.2.9"),
        ("10.0.0.1", "192.0.2.9, 10.2.2.2 ,10.3.3.3", "192.0.2.9"),
        ("10.0.0.1", "10.2.2.2, 10.3.3.3", "10.2.2.2"),
        ("10.0.0.1", "192.0.2.7, 2001:db8::5", "192.0.2.7"),
        ("2001:db8::1", "2001:db9::5", "2001:db9::5"),
        ("10.0.0.1", "192.0.2.9,", "10.0.0.1"),
        ("10.0.0.1", ",,,", "10.0.0.1"),
        ("10.0.0.1", "unknown", "unknown"),
        ("::ffff:10.0.0.1", "192.0.2.9", "192.0.2.9"),
        ("10.0.0.1", "192.0.2.9, ::ffff:10.0.0.2", "192.0.2.9"),
        ("", "192.0.2.9", ""),
    ],
)
def test_only_trusted_peers_are_believed(peer: str, forwarded: str, client: str) -> None:
    assert PEERS.client(peer, forwarded) == client


def test_nobody_is_believed_unless_configured() -> None:
    assert TrustedPeers([]).client("10.0.0.1", "192.0.2.9") == "10.0.0.1"


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [("192.0.2.9:4711", "192.0.2.9"), ("[2001:db9::5]:80", "2001:db9::5"), ("[::1]", "::1")],
)
def test_a_port_makes_no_other_client(forwarded: str, client: str) -> None:
    """Some balancers append it; each connection would be a tenant of its own."""
    assert PEERS.client("10.0.0.1", forwarded) == client


def test_a_long_address_is_cut() -> None:
    assert len(PEERS.client("10.0.0.1", "x" * 9999)) <= 64


@given(st.text(max_size=200))
def test_no_field_makes_it_fail(forwarded: str) -> None:
    assert PEERS.client("10.0.0.1", forwarded)
