"""Requests that two parsers could read in two ways: refused, the connection closed, never sent on.

Every vector is followed by, or hides, a request for /smuggled: it must never reach the upstream.
"""

from collections.abc import Iterator

import pytest
from support.gateway import Gateway
from support.raw import Client
from support.upstream import Upstream
from support.wire import LAST_CHUNK, EndedError, Message, request_bytes

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
CL = b"Content-Length: 4\r\n"
TE = b"Transfer-Encoding: chunked\r\n"


def post(*lines: bytes, body: bytes = LAST_CHUNK) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: a\r\n" + b"".join(lines) + b"\r\n" + body


def length(value: bytes, body: bytes = b"abcd") -> bytes:
    return post(b"Content-Length:" + value + b"\r\n", body=body)


def coding(value: bytes, name: bytes = b"Transfer-Encoding") -> bytes:
    return post(name + b":" + value + b"\r\n")


LENGTH_AND_CODING = {
    "CL.TE": post(CL, TE),
    "TE.CL": post(TE, CL),
    "CL.TE with CL 0": post(b"Content-Length: 0\r\n", TE),
    "TE.CL.CL": post(TE, CL, CL),
    "CL and TE identity": post(CL, b"Transfer-Encoding: identity\r\n", body=b"abcd"),
    "CL and TE of HTTP/1.0": b"POST / HTTP/1.0\r\n" + CL + TE + b"\r\n" + LAST_CHUNK,
    "CL twice, different": post(CL, b"Content-Length: 5\r\n", body=b"abcde"),
    "CL twice, equal": post(CL, CL, body=b"abcd"),
    "CL twice, case": post(CL, b"content-length: 0\r\n", body=b"abcd"),
}

LENGTHS = {
    name: length(value)
    for name, value in {
        "plus": b" +4",
        "minus": b" -4",
        "minus zero": b" -0",
        "hexadecimal": b" 0x4",
        "octal letter": b" 0o4",
        "underscore": b" 0_4",
        "inner space": b" 4 4",
        "list": b" 4, 4",
        "list, different": b" 4, 5",
        "list with blanks": b" 4 ,",
        "decimal point": b" 4.0",
        "exponent": b" 4e0",
        "quoted": b' "4"',
        "letters": b" four",
        "letters behind": b" 4a",
        "empty": b"",
        "blank": b" ",
        "vertical tab": b" \x0b4",
        "form feed": b" 4\x0c",
        "NUL": b" 4\x00",
        "arabic digit": " \u0664".encode(),
        "fullwidth digit": " \uff14".encode(),
        "superscript": b" \xb2",
        "2**64 + 4": b" 18446744073709551620",
        "2**63": b" 9223372036854775808",
        "1000 digits": b" " + b"1" * 1000,
        "folded": b" 4\r\n 5",
        "semicolon": b" 4;a",
        "bare CR": b" 4\r",
        "bare LF": b" 4\nX: 1",
    }.items()
}

CODINGS = {
    "identity": coding(b" identity"),
    "gzip": coding(b" gzip"),
    "gzip, chunked": coding(b" gzip, chunked"),
    "chunked, gzip": coding(b" chunked, gzip"),
    "chunked twice in a list": coding(b" chunked, chunked"),
    "chunked twice": post(TE, TE),
    "chunked and identity": post(TE, b"Transfer-Encoding: identity\r\n"),
    "identity and chunked": post(b"Transfer-Encoding: identity\r\n", TE),
    "xchunked": coding(b" xchunked"),
    "chunkedx": coding(b" chunkedx"),
    "quoted": coding(b' "chunked"'),
    "single quotes": coding(b" 'chunked'"),
    "leading comma": coding(b" ,chunked"),
    "trailing comma": coding(b" chunked,"),
    "parameter": coding(b" chunked;a=b"),
    "empty": coding(b""),
    "cow": coding(b" cow"),
    "vertical tab before": coding(b" \x0bchunked"),
    "vertical tab after": coding(b" chunked\x0b"),
    "form feed": coding(b" \x0cchunked"),
    "NUL after": coding(b" chunked\x00"),
    "NUL before": coding(b"\x00chunked"),
    "no-break space": coding(b"\xa0chunked"),
    "bare CR after": coding(b" chunked\r"),
    "bare CR before": coding(b"\r chunked"),
    "bare LF before": coding(b"\n chunked"),
    "inner bare CR": coding(b" chun\rked"),
    "folded": coding(b"\r\n chunked"),
    "folded with a tab": coding(b"\r\n\tchunked"),
    "folded afterwards": coding(b" chunked\r\n ,identity"),
    "kelvin sign": coding(" chun\u212aed".encode()),
    "space before the colon": coding(b" chunked", b"Transfer-Encoding "),
    "tab before the colon": coding(b" chunked", b"Transfer-Encoding\t"),
    "vertical tab before the colon": coding(b" chunked", b"Transfer-Encoding\x0b"),
    "NUL in the name": coding(b" chunked", b"Transfer-Encoding\x00"),
    "CR before the name": coding(b" chunked", b"\rTransfer-Encoding"),
    "space before the name": coding(b" chunked", b" Transfer-Encoding"),
    "hidden behind a bare LF": post(b"X: 1\nTransfer-Encoding: chunked\r\n"),
    "hidden behind a bare CR": post(b"X: 1\rTransfer-Encoding: chunked\r\n"),
}

FIELDS = {
    name: b"GET / HTTP/1.1\r\nHost: a\r\n" + raw + b"\r\n\r\n"
    for name, raw in {
        "space before the colon": b"X-A : 1",
        "tab before the colon": b"X-A\t: 1",
        "space inside the name": b"X A: 1",
        "leading space": b" X-A: 1",
        "leading tab": b"\tX-A: 1",
        "folded": b"X-A: 1\r\n 2",
        "folded with a tab": b"X-A: 1\r\n\t2",
        "folded with nothing": b"X-A: 1\r\n ",
        "no colon": b"X-A",
        "no name": b": 1",
        "bare LF": b"X-A: 1\nX-B: 2",
        "bare LF, then CRLF": b"X-A: 1\n",
        "bare CR": b"X-A: 1\rX-B: 2",
        "CR CR LF": b"X-A: 1\r",
        "NUL in the value": b"X-A: 1\x002",
        "NUL in the name": b"X-\x00A: 1",
        "bell in the value": b"X-A: \x07",
        "vertical tab in the value": b"X-A: 1\x0b2",
        "form feed in the value": b"X-A: 1\x0c2",
        "DEL in the value": b"X-A: \x7f",
        "8 bits in the name": b"X-\xe9: 1",
        "parenthesis in the name": b"X(A): 1",
        "slash in the name": b"X/A: 1",
        "at in the name": b"X@A: 1",
        "quote in the name": b'"X": 1',
    }.items()
}

HOSTS = {
    name: b"GET / HTTP/1.1\r\n" + raw + b"\r\n\r\n"
    for name, raw in {
        "none": b"X-A: 1",
        "two": b"Host: a\r\nHost: b",
        "two, equal": b"Host: a\r\nHost: a",
        "two, case": b"Host: a\r\nhost: a",
        "with a path": b"Host: a/b",
        "with a user": b"Host: user@a",
        "with a space": b"Host: a b",
        "with a comma": b"Host: a, b",
        "folded": b"Host: a\r\n b",
    }.items()
}
HOSTS["two in HTTP/1.0"] = b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n"

END = b"\r\nHost: a\r\n\r\n"
REQUEST_LINES = {
    name: raw + END
    for name, raw in {
        "no version": b"GET /",
        "no target": b"GET HTTP/1.1",
        "empty target": b"GET  HTTP/1.1",
        "only a method": b"GET",
        "no method": b"/ HTTP/1.1",
        "leading space": b" GET / HTTP/1.1",
        "space in the target": b"GET /a b HTTP/1.1",
        "tabs": b"GET\t/\tHTTP/1.1",
        "vertical tab": b"GET\x0b/ HTTP/1.1",
        "bare CR": b"GET /\rX HTTP/1.1",
        "bare LF": b"GET / HTTP/1.1\nX: 1",
        "NUL in the target": b"GET /\x00 HTTP/1.1",
        "control character in the target": b"GET /\x01 HTTP/1.1",
        "DEL in the target": b"GET /\x7f HTTP/1.1",
        "relative target": b"GET a HTTP/1.1",
        "query alone": b"GET ?a HTTP/1.1",
        "backslash first": b"GET \\a HTTP/1.1",
        "asterisk for GET": b"GET * HTTP/1.1",
        "file scheme": b"GET file:///etc/passwd HTTP/1.1",
        "absolute without authority": b"GET http:///x HTTP/1.1",
        "absolute with a user": b"GET http://u:p@a/x HTTP/1.1",
        "space in the method": b"GE T / HTTP/1.1",
        "method with a colon": b"GET: / HTTP/1.1",
        "8 bits in the method": b"G\xc9T / HTTP/1.1",
        "version 1.2": b"GET / HTTP/1.2",
        "version 2.0": b"GET / HTTP/2.0",
        "version 0.9": b"GET / HTTP/0.9",
        "version 1": b"GET / HTTP/1",
        "version 1.10": b"GET / HTTP/1.10",
        "version 01.1": b"GET / HTTP/01.1",
        "version with letters": b"GET / HTTP/1.x",
        "version in small letters": b"GET / http/1.1",
        "other protocol": b"GET / ICY/1.1",
        "RTSP": b"DESCRIBE / RTSP/1.0",
        "space behind the version": b"GET / HTTP/1.1 ",
        "word behind the version": b"GET / HTTP/1.1 X",
        "field before the request line": b"X-A: 1\r\nGET / HTTP/1.1",
    }.items()
}
REQUEST_LINES |= {
    "HTTP/0.9": b"GET /\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(range(100)) + b"\r\n\r\n",
    "bare LF everywhere": b"GET / HTTP/1.1\nHost: a\n\n",
    "bare LF at the end": b"GET / HTTP/1.1\r\nHost: a\r\n\n",
    "bare CR everywhere": b"GET / HTTP/1.1\rHost: a\r\r" + END,
    "proxy protocol": b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\n",
}

CHUNKS = {
    name: post(TE, body=raw)
    for name, raw in {
        "0x": b"0x4\r\nabcd\r\n0\r\n\r\n",
        "plus": b"+4\r\nabcd\r\n0\r\n\r\n",
        "minus": b"-4\r\nabcd\r\n0\r\n\r\n",
        "minus zero": b"-0\r\n\r\n",
        "underscore": b"0_4\r\nabcd\r\n0\r\n\r\n",
        "letter g": b"g\r\nabcd\r\n0\r\n\r\n",
        "empty size": b"\r\nabcd\r\n0\r\n\r\n",
        "leading space": b" 4\r\nabcd\r\n0\r\n\r\n",
        "leading tab": b"\t4\r\nabcd\r\n0\r\n\r\n",
        "leading CRLF": b"\r\n4\r\nabcd\r\n0\r\n\r\n",
        "trailing space": b"4 \r\nabcd\r\n0\r\n\r\n",
        "trailing tab": b"4\t\r\nabcd\r\n0\r\n\r\n",
        "inner space": b"0 4\r\nabcd\r\n0\r\n\r\n",
        "comma": b"4,4\r\nabcd\r\n0\r\n\r\n",
        "NUL": b"4\x00\r\nabcd\r\n0\r\n\r\n",
        "vertical tab": b"4\x0b\r\nabcd\r\n0\r\n\r\n",
        "17 digits": b"10000000000000004\r\nabcd\r\n0\r\n\r\n",
        "2**64": b"10000000000000000\r\nabcd\r\n0\r\n\r\n",
        "1000 zeros": b"0" * 1000 + b"4\r\nabcd\r\n0\r\n\r\n",
        "fullwidth digit": "\uff14\r\nabcd\r\n0\r\n\r\n".encode(),
        "bare LF after the size": b"4\nabcd\r\n0\r\n\r\n",
        "bare CR after the size": b"4\rabcd\r\n0\r\n\r\n",
        "CR CR LF after the size": b"4\r\r\nabcd\r\n0\r\n\r\n",
        "bare LF after the data": b"4\r\nabcd\n0\r\n\r\n",
        "bare CR after the data": b"4\r\nabcd\r0\r\n\r\n",
        "no CRLF after the data": b"4\r\nabcd0\r\n\r\n",
        "data too long": b"4\r\nabcde\r\n0\r\n\r\n",
        "data too short": b"4\r\nabc\r\n0\r\n\r\n",
        "bare LF in an extension": b"4;a\nb\r\nabcd\r\n0\r\n\r\n",
        "bare LF ends an extension": b"4;\nabcd\r\n0\r\n\r\n",
        "bare CR in an extension": b"4;a\rb\r\nabcd\r\n0\r\n\r\n",
        "NUL in an extension": b"4;a\x00\r\nabcd\r\n0\r\n\r\n",
        "bare LF after the last size": b"4\r\nabcd\r\n0\n\r\n",
        "bare LF at the end": b"4\r\nabcd\r\n0\r\n\n",
        "bare CR at the end": b"4\r\nabcd\r\n0\r\n\r" + b"X",
        "trailer with a space before the colon": b"0\r\nX-A : 1\r\n\r\n",
        "trailer folded": b"0\r\nX-A: 1\r\n 2\r\n\r\n",
        "trailer without a colon": b"0\r\nX-A\r\n\r\n",
        "trailer with a bare LF": b"0\r\nX-A: 1\nX-B: 2\r\n\r\n",
        "trailer with NUL": b"0\r\nX-A: \x00\r\n\r\n",
    }.items()
}

REFUSED = {
    f"{family}: {name}": raw
    for family, table in {
        "both": LENGTH_AND_CODING,
        "length": LENGTHS,
        "coding": CODINGS,
        "field": FIELDS,
        "host": HOSTS,
        "line": REQUEST_LINES,
        "chunk": CHUNKS,
    }.items()
    for name, raw in table.items()
}
STATUSES = {400, 405, 408, 413, 414, 431, 501, 505}


def answers(client: Client) -> Iterator[Message]:
    """Every answer until the connection ends."""
    while True:
        try:
            yield client.response()
        except (EndedError, ValueError):
            return


@pytest.mark.line(15)
@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED)
def test_what_could_be_read_in_two_ways_is_refused(
    gateway: Gateway, upstream: Upstream, raw: bytes
) -> None:
    with gateway.connect(timeout_s=5) as client:
        client.send(raw + SMUGGLED)
        seen = [answer.status for answer in answers(client)]
    assert client.end is not None, "the connection stays open"
    assert upstream.requests == []
    assert b"/smuggled" not in upstream.received
    assert len(seen) == 1
    assert seen[0] in STATUSES


@pytest.mark.line(15)
@pytest.mark.parametrize("family", ["both", "chunk", "coding"])
def test_it_is_refused_behind_a_good_request_and_byte_by_byte(
    gateway: Gateway, upstream: Upstream, family: str
) -> None:
    for name, raw in REFUSED.items():
        if not name.startswith(family):
            continue
        upstream.reset()
        with gateway.connect(timeout_s=5) as client:
            client.send(request_bytes("GET", "/good"))
            assert client.response().status == 200
            for position in range(len(raw)):
                client.send_ignoring_close(raw[position : position + 1])
            client.send_ignoring_close(SMUGGLED)
            seen = [answer.status for answer in answers(client)]
        assert [request.target for request in upstream.requests] == [b"/good"], name
        assert b"/smuggled" not in upstream.received, name
        assert len(seen) <= 1, name  # what is sent to a closed connection may cost the answer
        assert set(seen) <= STATUSES, name


# Odd but readable in one way only: refused, or sent on once with exactly this body.
EITHER_WAY: dict[str, tuple[bytes, bytes]] = {
    "small letters in the method": (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", b""),
    "unknown method": (b"FROBNICATE / HTTP/1.1\r\nHost: a\r\n\r\n", b""),
    "method of one letter": (b"X / HTTP/1.1\r\nHost: a\r\n\r\n", b""),
    "underscore in a name": (post(b"Content_Length: 9\r\n", CL, body=b"abcd"), b"abcd"),
    "underscore in a coding": (post(b"Transfer_Encoding: chunked\r\n", CL, body=b"abcd"), b"abcd"),
    "length with blanks around": (length(b" \t 4 \t "), b"abcd"),
    "length with zeros": (length(b" 000004"), b"abcd"),
    "coding in capitals": (coding(b" CHUNKED"), b""),
    "coding with tabs": (coding(b"\tchunked\t"), b""),
    "empty host": (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", b""),
    "8 bits in the target": (b"GET /\xe9 HTTP/1.1\r\nHost: a\r\n\r\n", b""),
    "fragment in the target": (b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", b""),
    "quotes in the target": (b'GET /"<>^`{|}\\ HTTP/1.1\r\nHost: a\r\n\r\n', b""),
    "length of a GET": (b"GET / HTTP/1.1\r\nHost: a\r\n" + CL + b"\r\nabcd", b"abcd"),
    "chunk size with zeros": (post(TE, body=b"00000004\r\nabcd\r\n0\r\n\r\n"), b"abcd"),
    "last chunk of many zeros": (post(TE, body=b"0000000\r\n\r\n"), b""),
    "blank before an extension": (post(TE, body=b"4 ;a\r\nabcd\r\n0\r\n\r\n"), b"abcd"),
    "quoted CRLF-free extension": (post(TE, body=b'4;a="\\""\r\nabcd\r\n0\r\n\r\n'), b"abcd"),
    "forbidden trailers": (
        post(TE, body=b"0\r\nContent-Length: 9\r\nTransfer-Encoding: x\r\nHost: b\r\n\r\n"),
        b"",
    ),
    "empty line first": (b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", b""),
    "several spaces": (b"GET   /   HTTP/1.1\r\nHost: a\r\n\r\n", b""),
}


@pytest.mark.line(15)
@pytest.mark.parametrize("case", EITHER_WAY)
def test_what_is_odd_but_clear_is_refused_or_sent_on_once(
    gateway: Gateway, upstream: Upstream, case: str
) -> None:
    raw, body = EITHER_WAY[case]
    with gateway.connect(timeout_s=5) as client:
        client.send(raw + request_bytes("GET", "/next", [(b"Connection", b"close")]))
        seen = [answer.status for answer in answers(client)]
    targets = [request.target for request in upstream.requests]
    if seen == [200, 200]:
        assert upstream.requests[0].body == body
        assert targets[1:] == [b"/next"]
    else:
        assert len(seen) == 1
        assert seen[0] in STATUSES
        assert targets == []


@pytest.mark.line(15)
def test_an_unfinished_trailer_does_not_swallow_or_leak_the_next_request(
    gateway: Gateway, upstream: Upstream
) -> None:
    with gateway.connect(timeout_s=2) as client:
        client.send(post(TE, body=b"4\r\nabcd\r\n0\r\n") + b"X: GET /smuggled HTTP/1.1\r\n\r\n")
        assert client.response("POST").status == 200
    assert [request.target for request in upstream.requests] == [b"/"]
