"""Heads: what the gateway must know of them, and what of them goes on. Pure.

httptools (llhttp, strict) is the judge of every head; after it has accepted one, the few fields
that matter here are found by one regular expression, and the header lines travel on as the very
bytes that came in: name case, order, duplicates and values cannot change.
"""

import re
from collections.abc import Iterable
from typing import Final

import httptools
import msgspec

from ciuicflow.errors import BadRequest, BadResponse, Unsupported

# Hop-by-hop fields (RFC 9110 section 7.6.1) and those that frame or steer a message. Matched in a
# lower-cased copy, which has the same offsets.
_REQUEST_FIELDS = re.compile(
    rb"\n(connection|keep-alive|proxy-[a-z-]+|te|trailer|transfer-encoding|upgrade"
    rb"|content-length|expect|host):[ \t]*([^\r]*)\r"
)
_RESPONSE_FIELDS = re.compile(
    rb"\n(connection|keep-alive|proxy-[a-z-]+|te|trailer|transfer-encoding|upgrade"
    rb"|content-length|content-type):[ \t]*([^\r]*)\r"
)
_HOST = re.compile(rb"[0-9a-z.\-_~!$&'()*+;=%:\[\]]*")  # RFC 3986 section 3.2.2, and a port
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |\r)")
_KEEP_ALIVE_TIMEOUT = re.compile(rb"timeout\s*=\s*(\d{1,6})")

# Never removed because a Connection field names them: a client could make the gateway drop what
# frames, addresses or authorises the request (hop-by-hop header abuse).
_NOT_NOMINABLE: Final = frozenset(
    {b"close", b"keep-alive", b"upgrade", b"content-length", b"host", b"authorization"}
)

_HTTP_10, _HTTP_11 = b"HTTP/1.0", b"HTTP/1.1"


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """A request's head, ready to be sent on."""

    method: bytes
    target: bytes  # origin-form or `*` (RFC 9112 section 3.2)
    http11: bool
    lines: bytes  # end-to-end header lines as received, each ending in CRLF
    content_length: int  # 0 where the request has no body or is chunked
    chunked: bool
    keep_alive: bool
    expects_continue: bool
    upgrade: bytes  # the protocols asked for; empty: none


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """A response's head, ready to be sent on."""

    status: int
    reason: bytes  # reason phrase with its leading space, as received
    lines: bytes  # end-to-end header lines as received, each ending in CRLF
    content_length: int | None
    chunked: bool
    keep_alive: bool
    keep_alive_s: float | None  # how long the upstream says that it keeps an idle connection
    event_stream: bool
    upgrade: bytes


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

    line_end = raw.index(b"\r\n")
    method, _, rest = raw[:line_end].partition(b" ")
    target, _, version = rest.strip(b" ").rpartition(b" ")
    if version not in (_HTTP_11, _HTTP_10) or not target:
        raise Unsupported(Unsupported.What.VERSION, rest[-16:].decode("latin-1"))

    cut: list[re.Match[bytes]] = []
    options: set[bytes] = set()
    upgrade = host = b""
    hosts = length = 0
    chunked = expects = False
    for field in _REQUEST_FIELDS.finditer(raw.lower(), line_end):
        name, value = field.groups()
        if name == b"host":
            hosts += 1
            host = value.strip()
        elif name == b"content-length":
            length = int(value)  # llhttp: digits only, once, never beside Transfer-Encoding
        elif name == b"expect":
            expects = value.strip() == b"100-continue"
        else:
            cut.append(field)
            if name == b"connection":
                options.update(map(bytes.strip, value.split(b",")))
            elif name == b"transfer-encoding":
                if value.strip() != b"chunked":
                    raise Unsupported(Unsupported.What.CODING, value.decode("latin-1"))
                chunked = True
            elif name == b"upgrade":
                upgrade = raw[field.start(2) : field.end(2)].strip()

    http11 = version == _HTTP_11
    if hosts != 1 and (http11 or hosts):
        raise BadRequest("a request must have exactly one Host field")
    if _HOST.fullmatch(host) is None:
        raise BadRequest("malformed Host field")
    if chunked and not http11:
        raise BadRequest("HTTP/1.0 has no chunked coding")

    lines = _without(raw, line_end + 2, cut)
    nominated = options - _NOT_NOMINABLE
    if nominated:
        lines = drop_fields(lines, nominated)
    if not target.startswith((b"/", b"*")) and method != b"CONNECT":
        target, lines = _origin_form(method, target, lines)
    return RequestHead(
        method=method,
        target=target,
        http11=http11,
        lines=lines,
        content_length=length,
        chunked=chunked,
        keep_alive=b"close" not in options if http11 else b"keep-alive" in options,
        expects_continue=expects and http11,
        # h2c would open a tunnel that is not looked into (request smuggling): not offered.
        upgrade=upgrade
        if http11 and b"upgrade" in options and b"h2c" not in upgrade.lower()
        else b"",
    )


def parse_response_head(raw: bytes) -> ResponseHead:
    """Read a whole head, `raw` ending in its empty line. Raises BadResponse."""
    try:
        httptools.HttpResponseParser(_SILENT).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BadResponse(str(error)) from None

    status_line = _STATUS_LINE.match(raw)
    if status_line is None:
        raise BadResponse(f"malformed status line: {raw[:32]!r}")
    line_end = raw.index(b"\r\n")
    http11 = raw.startswith(_HTTP_11)

    cut: list[re.Match[bytes]] = []
    options: set[bytes] = set()
    length: int | None = None
    keep_alive_s: float | None = None
    chunked = event_stream = False
    upgrade = b""
    for field in _RESPONSE_FIELDS.finditer(raw.lower(), line_end):
        name, value = field.groups()
        if name == b"content-type":
            event_stream = value.startswith(b"text/event-stream")
        elif name == b"content-length":
            length = int(value)
        else:
            cut.append(field)
            if name == b"connection":
                options.update(map(bytes.strip, value.split(b",")))
            elif name == b"transfer-encoding":
                if value.strip() != b"chunked":
                    raise BadResponse(f"transfer coding {value.decode('latin-1')!r}")
                chunked = True
            elif name == b"upgrade":
                upgrade = raw[field.start(2) : field.end(2)].strip()
            elif name == b"keep-alive":
                hint = _KEEP_ALIVE_TIMEOUT.search(value)
                keep_alive_s = float(hint[1]) if hint else None

    lines = _without(raw, line_end + 2, cut)
    nominated = options - _NOT_NOMINABLE
    if nominated:
        lines = drop_fields(lines, nominated)
    return ResponseHead(
        status=int(status_line[1]),
        reason=raw[12:line_end],
        lines=lines,
        content_length=length,
        chunked=chunked,
        keep_alive=b"close" not in options if http11 else b"keep-alive" in options,
        keep_alive_s=keep_alive_s,
        event_stream=event_stream,
        upgrade=upgrade if b"upgrade" in options else b"",
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


def _without(raw: bytes, start: int, cut: list[re.Match[bytes]]) -> bytes:
    """Return the header lines from `start` on, without the final empty line and the cut fields."""
    if not cut:
        return raw[start:-2]
    kept = []
    for field in cut:
        kept.append(raw[start : field.start() + 1])
        start = field.end() + 1
    kept.append(raw[start:-2])
    return b"".join(kept)


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
