"""Body readers: every byte of a message counted, nothing behind its end, nothing ambiguous."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.gateway.framing import (
    MAX_CHUNK_LINE_BYTES,
    MAX_TRAILER_BYTES,
    BadFraming,
    BodyReader,
    ChunkedBody,
    LengthBody,
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut data at these places, taken modulo its length."""
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def read(reader: BodyReader, parts: list[bytes]) -> tuple[bytes, bytes, bytes]:
    """Return what the reader took, the content in it, and what it left."""
    taken, content, left = b"", [b""], b""
    for part in parts:
        count = 0 if reader.done else reader.feed(part, content)
        taken, left = taken + part[:count], left + part[count:]
    return taken, b"".join(content), left


def chunked(content: list[bytes], extension: bytes, trailer: bytes) -> bytes:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in content if c)
    return body + b"0" + extension + b"\r\n" + trailer + b"\r\n"


@given(st.binary(max_size=300), st.binary(max_size=50), st.lists(st.integers(0, 999), max_size=9))
def test_a_body_with_a_length_ends_at_its_last_byte_however_it_is_cut(
    body: bytes, behind: bytes, cuts: list[int]
) -> None:
    reader = LengthBody(len(body))
    assert read(reader, pieces(body + behind, cuts)) == (body, body, behind)
    assert reader.done


@given(
    st.lists(st.binary(max_size=80), max_size=8),
    st.sampled_from([b"", b";a", b";a=b", b' ; a="x y"', b";\xff"]),
    st.sampled_from([b"", b"X: 1\r\n", b"X: 1\r\nY:\r\n"]),
    st.binary(max_size=50),
    st.lists(st.integers(0, 999), max_size=12),
)
def test_a_chunked_body_ends_at_its_last_byte_however_it_is_cut(
    content: list[bytes], extension: bytes, trailer: bytes, behind: bytes, cuts: list[int]
) -> None:
    body = chunked(content, extension, trailer)
    reader = ChunkedBody()
    assert read(reader, pieces(body + behind, cuts)) == (body, b"".join(content), behind)
    assert reader.done


BAD = {
    "bare LF after size": b"1\na\r\n0\r\n\r\n",
    "bare CR in line": b"1\ra\r\n",
    "hex prefix": b"0x1\r\na\r\n0\r\n\r\n",
    "sign": b"+1\r\na\r\n0\r\n\r\n",
    "negative": b"-1\r\n",
    "leading space": b" 1\r\na\r\n0\r\n\r\n",
    "trailing space": b"1 \r\na\r\n0\r\n\r\n",
    "underscore": b"1_0\r\n",
    "empty size": b"\r\na\r\n",
    "seventeen digits": b"1" * 17 + b"\r\n",
    "data longer than size": b"1\r\nab\r\n0\r\n\r\n",
    "LF after data": b"1\r\na\n0\r\n\r\n",
    "control in extension": b"1;a\x00b\r\na\r\n0\r\n\r\n",
    "LF in extension": b"1;a\nb\r\na\r\n0\r\n\r\n",
    "trailer without colon": b"0\r\nX\r\n\r\n",
    "trailer with space before colon": b"0\r\nX : 1\r\n\r\n",
    "folded trailer": b"0\r\nX: 1\r\n y\r\n\r\n",
    "NUL in trailer": b"0\r\nX: \x00\r\n\r\n",
    "endless size line": b"1;" + b"a" * MAX_CHUNK_LINE_BYTES,
    "endless trailers": b"0\r\n" + b"X: y\r\n" * (MAX_TRAILER_BYTES // 6 + 1),
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD)
@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_what_parsers_disagree_on_is_refused_however_it_is_cut(raw: bytes, size: int) -> None:
    reader = ChunkedBody()
    parts = [raw[start : start + size] for start in range(0, len(raw), size)]
    with pytest.raises(BadFraming):
        read(reader, parts)
    assert not reader.done


@given(st.binary(max_size=200), st.lists(st.integers(0, 999), max_size=9))
def test_garbage_is_refused_or_counted_but_raises_nothing_else(raw: bytes, cuts: list[int]) -> None:
    reader = ChunkedBody()
    for part in pieces(raw, cuts):
        try:
            assert 0 <= (0 if reader.done else reader.feed(part)) <= len(part)
        except BadFraming:
            return


def test_an_empty_body_with_a_length_is_done_before_any_byte() -> None:
    assert LengthBody(0).done
