"""Heads: what the gateway must know of them, and what of them goes on. Pure.

httptools (llhttp, strict) is the judge of every head; after it has accepted one, the few fields
that matter here are found by one regular expression, and the header lines travel on as the very
bytes that came in: name case, order, duplicates and values cannot change.
"""

import re
from collections.abc import Iterable
from typing import Final

import httptools

from ciuicflow.errors import BadRequest, BadResponse, Unsupported
from ciuicflow.gateway.heads import RequestHead, ResponseHead

# Hop-by-hop fields (RFC 9110 section 7.6.1), and those that frame or steer a message. They are
# looked for in a lower-cased copy, which has the same offsets.
_HOP = rb"connection|keep-alive|proxy-[a-z-]+|te|trailer|transfer-encoding|upgrade"
_REQUEST_FIELDS = re.compile(rb"\n(%b|content-length|expect|host):[ \t]*([^\r]*)\r" % _HOP)
_RESPONSE_FIELDS = re.compile(rb"\n(%b|content-length|content-type):[ \t]*([^\r]*)\r" % _HOP)
_HOP_BY_HOP = re.compile(rb"\n(?:%b):[^\r]*\r" % _HOP)
_HOST_BYTES: Final = b"0123456789abcdefghijklmnopqrstuvwxyz.-_~!$&'()*+;=%:[]"  # RFC 3986, 3.2.2
_KEEP_ALIVE_TIMEOUT = re.compile(rb"timeout\s*=\s*(\d{1,6})")

# Never removed because a Connection field names them: a client could make the gateway drop what
# frames, addresses or authorises the request (hop-by-hop header abuse).
_NOT_NOMINABLE: Final = frozenset(
    {b"close", b"keep-alive", b"upgrade", b"content-length", b"host", b"authorization"}
)

_HTTP_10, _HTTP_11 = b"HTTP/1.0", b"HTTP/1.1"


class _Silent:
    """Wants no callbacks: httptools then only validates."""


_SILENT: Final = _Silent()


def parse_request_head(raw: bytes) -> RequestHead:
    """Read a whole head, `raw` ending in its empty line (RFC 9112 sections 3 to 6).

    Raises BadRequest for anything that two parsers could read in two ways, Unsupported for other
    versions than HTTP/1.0 and 1.1 and other transfer codings than chunked.
    """
    try:
        httptools.HttpRequestParser(_SILENT).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BadRequest(str(error)) from None

    line_end = raw.find(b"\r\n")
    words = raw[:line_end].split()
    if len(words) != 3 or words[2] not in (_HTTP_11, _HTTP_10):
        raise Unsupported(Unsupported.What.VERSION, words[-1][:16].decode("latin-1"))
    method, target, version = words
    http11 = version == _HTTP_11

    options: set[bytes] = set()
    upgrade = host = b""
    hosts = length = 0
    hop_by_hop = chunked = expects = False
    lowered = raw.lower()
    for name, value in _REQUEST_FIELDS.findall(lowered, line_end):
        if name == b"host":
            hosts += 1
            host = value.strip()
        elif name == b"content-length":
            length = int(value)  # llhttp: digits only, once, never beside Transfer-Encoding
        elif name == b"expect":
            expects = http11 and value.strip() == b"100-continue"
        else:
            hop_by_hop = True
            if name == b"connection":
                options.update(map(bytes.strip, value.split(b",")))
            elif name == b"transfer-encoding":
                if value.strip() != b"chunked":
                    raise Unsupported(Unsupported.What.CODING, value.decode("latin-1"))
                chunked = True
            elif name == b"upgrade":
                upgrade = value.strip()

    if hosts != 1 and (http11 or hosts):
        raise BadRequest("a request must have exactly one Host field")
    if host.translate(None, _HOST_BYTES):
        raise BadRequest("malformed Host field")
    if chunked and not http11:
        raise BadRequest("HTTP/1.0 has no chunked coding")

    lines = raw[line_end + 2 : -2]
    if hop_by_hop:
        lines = _end_to_end(raw, lowered, line_end, options)
    if target.startswith(b"*"):
        if method != b"OPTIONS" or target != b"*":
            raise BadRequest("malformed request target")
    elif not target.startswith(b"/") and method != b"CONNECT":
        hosts = 1
        target, lines = _origin_form(method, target, lines)
    # h2c would open a tunnel that is not looked into (request smuggling): not offered.
    if upgrade and http11 and b"upgrade" in options and b"h2c" not in upgrade:
        upgrade = _spelt(raw, b"upgrade")
    else:
        upgrade = b""
    keep_alive = b"close" not in options if http11 else b"keep-alive" in options
    return RequestHead(
        method,
        target,
        http11,
        lines,
        length,
        chunked,
        keep_alive,
        expects,
        upgrade,
        hosts == 1,
    )


def parse_response_head(raw: bytes) -> ResponseHead:
    """Read a whole head, `raw` ending in its empty line. Raises BadResponse."""
    try:
        httptools.HttpResponseParser(_SILENT).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BadResponse(str(error)) from None

    version = raw[:9]
    http11 = version == b"HTTP/1.1 "
    if not (http11 or version == b"HTTP/1.0 ") or raw[12] not in b" \r":
        raise BadResponse(f"malformed status line: {raw[:32]!r}")
    line_end = raw.find(b"\r\n")

    options: set[bytes] = set()
    length: int | None = None
    keep_alive_s: float | None = None
    hop_by_hop = chunked = event_stream = False
    upgrade = b""
    lowered = raw.lower()
    for name, value in _RESPONSE_FIELDS.findall(lowered, line_end):
        if name == b"content-type":
            event_stream = value.startswith(b"text/event-stream")
        elif name == b"content-length":
            length = int(value)
        else:
            hop_by_hop = True
            if name == b"connection":
                options.update(map(bytes.strip, value.split(b",")))
            elif name == b"transfer-encoding":
                if value.strip() != b"chunked":
                    raise BadResponse(f"transfer coding {value.decode('latin-1')!r}")
                chunked = True
            elif name == b"upgrade":
                upgrade = value.strip()
            elif name == b"keep-alive":
                hint = _KEEP_ALIVE_TIMEOUT.search(value)
                keep_alive_s = float(hint[1]) if hint else None

    lines = raw[line_end + 2 : -2]
    if hop_by_hop:
        lines = _end_to_end(raw, lowered, line_end, options)
    if upgrade:
        upgrade = _spelt(raw, b"upgrade") if b"upgrade" in options else b""
    keep_alive = b"close" not in options if http11 else b"keep-alive" in options
    return ResponseHead(
        int(raw[9:12]),
        raw[12:line_end],
        lines,
        length,
        chunked,
        keep_alive,
        keep_alive_s,
        event_stream,
        upgrade,
    )


def upstream_head(head: RequestHead, prefix: bytes, host: bytes | None) -> bytes:
    """Build the head that goes upstream.

    `prefix` is the path under which the upstream lives, without a trailing slash; `host` replaces
    the Host field where the upstream must be called by its own name.
    """
    lines = head.lines
    if host is not None:
        lines = b"Host: " + host + b"\r\n" + drop_fields(lines, (b"host",))
    if head.chunked:
        lines += b"Transfer-Encoding: chunked\r\n"
    if head.upgrade:
        lines += b"Connection: Upgrade\r\nUpgrade: " + head.upgrade + b"\r\n"
    if prefix and head.target != b"*":
        return b"%b %b%b HTTP/1.1\r\n%b\r\n" % (head.method, prefix, head.target, lines)
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (head.method, head.target, lines)


def client_head(head: ResponseHead, *, chunked: bool, connection: bytes) -> bytes:
    """Build the head that goes to the client; `connection` is its Connection field, or empty."""
    lines = head.lines
    if chunked:
        lines += b"Transfer-Encoding: chunked\r\n"
    if connection:
        lines += b"Connection: " + connection + b"\r\n"
    return b"HTTP/1.1 %d%b\r\n%b\r\n" % (head.status, head.reason, lines)


def drop_fields(lines: bytes, names: Iterable[bytes]) -> bytes:
    """Return header `lines` without the fields of these lower-case names."""
    doomed = frozenset(names)
    kept = [
        line for line in lines.split(b"\r\n")[:-1] if line.partition(b":")[0].lower() not in doomed
    ]
    return b"".join(line + b"\r\n" for line in kept)


def field_value(lines: bytes, name: bytes) -> bytes | None:
    """Return the first value of the field with this lower-case name, or None."""
    for line in lines.split(b"\r\n")[:-1]:
        found, _, value = line.partition(b":")
        if found.lower() == name:
            return value.strip()
    return None


def _end_to_end(raw: bytes, lowered: bytes, line_end: int, options: set[bytes]) -> bytes:
    """Return the header lines without hop-by-hop fields and those that Connection names."""
    kept = []
    start = line_end + 2
    for field in _HOP_BY_HOP.finditer(lowered, line_end):
        kept.append(raw[start : field.start() + 1])
        start = field.end() + 1
    kept.append(raw[start:-2])
    lines = b"".join(kept)
    nominated = options - _NOT_NOMINABLE
    return drop_fields(lines, nominated) if nominated else lines


def _spelt(raw: bytes, name: bytes) -> bytes:
    """Return a field's value as it was sent: matching was done in lower case."""
    return field_value(raw[:-2], name) or b""


def _origin_form(method: bytes, target: bytes, lines: bytes) -> tuple[bytes, bytes]:
    """Turn an absolute-form target into origin-form and its Host (RFC 9112 section 3.2.2).

    The request still goes to a configured upstream: this is no forward proxy.
    """
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        raise BadRequest("malformed request target")
    cuts = [position for mark in b"/?#" if (position := rest.find(mark)) >= 0]
    split = min(cuts, default=len(rest))
    authority, path = rest[:split], rest[split:]
    if not authority or b"@" in authority:
        raise BadRequest("malformed request target")
    if not path:
        path = b"*" if method == b"OPTIONS" else b"/"
    elif not path.startswith(b"/"):
        path = b"/" + path
    return path, b"Host: " + authority + b"\r\n" + drop_fields(lines, (b"host",))
