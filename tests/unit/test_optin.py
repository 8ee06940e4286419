"""What heads say of themselves: opting in, tier, deadline, key, and what goes on."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.gateway.headers import RequestHead
from ciuicflow.gateway.optin import MAX_DEADLINE_MS, FlowFields, opts_in

HEAD = b"POST /v1 HTTP/1.1\r\nHost: a\r\n"


def fields(*lines: bytes) -> FlowFields:
    return FlowFields(b"".join(line + b"\r\n" for line in lines))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([b"enabled"], True),
        ([b" enabled\t"], True),
        ([b"enabled", b"enabled"], True),
        ([], False),
        ([b""], False),
        ([b"enabled", b"off"], False),
        ([b"enabled", b""], False),
        ([b"enable"], False),
        ([b"enabled,enabled"], False),
    ],
)
def test_all_values_must_say_enabled(values: list[bytes], wanted: bool) -> None:
    assert opts_in(values) is wanted


def test_a_head_that_does_not_opt_in_is_not_looked_into() -> None:
    head = RequestHead(HEAD + b"X-Ciuic-Flow: no\r\nX-Ciuic-Tier: gold\r\n\r\n")
    assert head.flow is None
    assert head.verbatim == HEAD + b"X-Ciuic-Flow: no\r\nX-Ciuic-Tier: gold\r\n\r\n"


@pytest.mark.parametrize(
    "target", [b"/v1", b"http://a.example/v1?x=1", b"*"], ids=["origin", "absolute", "star"]
)
def test_every_form_of_target_may_opt_in(target: bytes) -> None:
    method = b"OPTIONS" if target == b"*" else b"POST"
    raw = method + b" " + target + b" HTTP/1.1\r\nHost: a\r\nX-Ciuic-Flow: enabled\r\nA: 1\r\n\r\n"
    head = RequestHead(raw)
    assert head.flow is not None
    host = b"Host: a.example\r\n" if target.startswith(b"http") else b"Host: a\r\n"
    assert head.flow.lines == host + b"A: 1\r\n"


def test_hop_by_hop_fields_are_gone_from_the_lines_of_an_opted_in_head() -> None:
    head = RequestHead(
        HEAD + b"Connection: X-Gone, X-Ciuic-Flow\r\nX-Gone: 1\r\nTE: x\r\n"
        b"X-Ciuic-Flow: enabled\r\nX-Ciuic-Tier: gold\r\nKept:2\r\n\r\n"
    )
    assert head.flow is not None
    assert head.flow.lines == b"Host: a\r\nKept:2\r\n"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (b"1", 1),
        (b" 2500 ", 2500),
        (b"00000007", 7),
        (b"86400000", MAX_DEADLINE_MS),
        (b"86400001", 0),
        (b"99999999", 0),
        (b"0", 0),
        (b"", 0),
        (b"-1", 0),
        (b"+1", 0),
        (b"1.0", 0),
        (b"1e3", 0),
        (b"1_000", 0),
        (b"\xb2", 0),
        ("٣".encode(), 0),
        (b"9" * 10_000, 0),
        (b"1,2", 0),
    ],
)
def test_a_deadline_is_a_whole_number_of_milliseconds_up_to_a_day(
    value: bytes, wanted: int
) -> None:
    assert fields(b"X-CIUIC-Deadline-Ms:" + value).deadline_ms == wanted


def test_a_tier_is_bounded_and_in_lower_case() -> None:
    assert fields(b"x-ciuic-TIER:  GoLd ").tier == "gold"
    assert len(fields(b"X-Ciuic-Tier: " + b"g" * 10_000).tier) <= 64
    assert fields(b"X-Ciuic-Tier: \xff").tier == "ÿ"
    assert fields().tier == ""


def key(*lines: bytes) -> str:
    return fields(*lines).key_sha256


SHA = hashlib.sha256(b"sk-1").hexdigest()


@pytest.mark.parametrize(
    "lines",
    [
        (b"Authorization: Bearer sk-1",),
        (b"authorization:bearer   sk-1 ",),
        (b"X-Api-Key: sk-1",),
        (b"api-key:sk-1",),
        (b"X-Api-Key: other", b"Authorization: Bearer sk-1"),
        (b"Authorization: Bearer sk-1", b"X-Api-Key: other"),
        (b"Authorization: Basic other", b"X-Api-Key: sk-1"),
    ],
)
def test_a_key_is_found_where_callers_put_it(lines: tuple[bytes, ...]) -> None:
    assert key(*lines) == SHA


@pytest.mark.parametrize(
    "lines", [(), (b"Authorization: sk-1",), (b"Authorization: Basic sk-1",), (b"X-Key: sk-1",)]
)
def test_what_is_no_key_is_none(lines: tuple[bytes, ...]) -> None:
    assert key(*lines) == ""


@pytest.mark.parametrize(
    "line", [b"Authorization: Bearer ", b"Authorization: Bearer", b"X-Api-Key:", b"api-key:  "]
)
def test_an_empty_key_is_none(line: bytes) -> None:
    assert key(line) == ""


def test_an_empty_key_does_not_hide_another() -> None:
    assert key(b"Authorization: Bearer ", b"X-Api-Key: sk-1") == SHA
    assert key(b"X-Api-Key:", b"api-key: sk-1") == SHA


def test_forwarded_addresses_are_one_list_in_order() -> None:
    seen = fields(b"X-Forwarded-For: a, b", b"x-forwarded-for:c").forwarded_for
    assert [hop.strip() for hop in seen.split(",")] == ["a", "b", "c"]


NAMES = st.from_regex(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,20}", fullmatch=True)
VALUES = st.binary(max_size=30).map(
    lambda raw: raw.replace(b"\r", b"").replace(b"\n", b"").replace(b"\x00", b"")
)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=12))
def test_whatever_is_not_the_gateways_goes_on_byte_for_byte(
    pairs: list[tuple[bytes, bytes]],
) -> None:
    lines = [name + b":" + value for name, value in pairs]
    ours = [b"X-Ciuic-Flow: enabled", b"x-cIUic-", b"X-CIUIC-X:"]
    mixed = [line for pair in zip(lines, ours * 4, strict=False) for line in pair]
    kept = [line for line in lines if not line.lower().startswith(b"x-ciuic-")]
    assert fields(*mixed).lines == b"".join(line + b"\r\n" for line in kept)
