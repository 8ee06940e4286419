"""The few fields of a body, and the priority that it may get."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ciuicflow.gateway.body import BodyFields, read_fields, with_priority


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"model":"m","stream":true,"max_tokens":5}', BodyFields("m", True, 5)),
        (b' {"stream":false}\n', BodyFields()),
        (b'{"stream":1}', BodyFields()),
        (b'{"max_tokens":5,"max_completion_tokens":7}', BodyFields(max_tokens=7)),
        (b'{"max_output_tokens":9}', BodyFields(max_tokens=9)),
        (b'{"max_tokens":0}', BodyFields()),
        (b'{"max_tokens":-5}', BodyFields()),
        (b'{"max_tokens":true}', BodyFields()),
        (b'{"max_tokens":1.5}', BodyFields()),
        (b'{"max_tokens":"5"}', BodyFields()),
        (b'{"max_tokens":-1,"max_output_tokens":3}', BodyFields(max_tokens=3)),
        (b'{"user":"u"}', BodyFields(user="u")),
        (b'{"user":"u","user_id":"v"}', BodyFields(user="v")),
        (b'{"user":"u","user_id":""}', BodyFields(user="u")),
        (b'{"user":"u","user_id":7}', BodyFields(user="u")),
        (b'{"model":null,"user":null}', BodyFields()),
        (b'{"model":["m"]}', BodyFields()),
        (b"[]", BodyFields()),
        (b"", BodyFields()),
        (b"\x00", BodyFields()),
        (b"[" * 200_000, BodyFields()),
        (b'{"a":' * 200_000, BodyFields()),
        (b'{"model":"\xff"}', BodyFields()),
    ],
)
def test_only_fields_that_make_sense_count(body: bytes, wanted: BodyFields) -> None:
    assert read_fields(body) == wanted


@pytest.mark.parametrize("digits", [19, 20, 400, 5000])
def test_a_number_of_any_size_does_no_harm(digits: int) -> None:
    fields = read_fields(b'{"max_tokens":' + b"9" * digits + b',"user":"u"}')
    assert fields.max_tokens is None or fields.max_tokens > 0


def test_a_user_is_bounded() -> None:
    assert len(read_fields(b'{"user":"' + b"u" * 100_000 + b'"}').user) == 256


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(body: bytes) -> None:
    read_fields(body)
    with_priority(body, 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=9,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.text(max_size=9), JSON, max_size=5),
    st.sampled_from([None, 1]),
    st.sampled_from([b"", b" ", b"\r\n\t"]),
    st.integers(0, 9),
)
def test_an_object_gets_the_field_and_keeps_its_bytes(
    document: dict[str, object], indent: int | None, space: bytes, priority: int
) -> None:
    body = space + json.dumps(document, indent=indent).encode() + space
    told = with_priority(body, priority)
    assert json.loads(told) == {**document, "priority": priority}
    assert told.startswith(body.rstrip()[:-1])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"}", b"[1]", b'"{}"', b"null", b"{}]", b'\xef\xbb\xbf{"a":1}', b"--x\r\n"]
)
def test_other_bodies_stay_as_they_are(body: bytes) -> None:
    assert with_priority(body, 1) == body


@pytest.mark.parametrize("body", [b'{"a":1,}', b'{"a"}', b"{hello}", b'{"a":{}', b'{"a":1}}'])
def test_what_is_no_json_stays_none(body: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(with_priority(body, 1))
