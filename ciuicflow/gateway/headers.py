"""Heads: what the gateway must know of them, and what of them goes on. Pure.

httptools (llhttp, strict) is the judge of every head. The header lines then travel on as the very
bytes that came in: name case, order, duplicates and values cannot change; only hop-by-hop fields
are cut out.
"""

import re
from collections.abc import Iterable
from typing import Final

import httptools

from ciuicflow.errors import BadRequest, BadResponse, Unsupported

# Hop-by-hop fields (RFC 9110 section 7.6.1), looked for in a lower-cased copy, which has the same
# offsets as the original.
_HOP_BY_HOP: Final = re.compile(
    rb"\n(?:connection|keep-alive|proxy-[a-z-]+|te|trailer|transfer-encoding|upgrade):[^\r]*\r"
)
# RFC 3986 section 3.2.2, and a port.
_HOST_BYTES: Final = (
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-._~!$&'()*+;=%:[]"
)
_KEEP_ALIVE_TIMEOUT: Final = re.compile(rb"timeout\s*=\s*(\d{1,6})", re.IGNORECASE)

# Never removed because a Connection field names them: a client could make the gateway drop what
# frames, addresses or authorises the request (hop-by-hop header abuse).
_NOT_NOMINABLE: Final = frozenset(
    {b"close", b"keep-alive", b"upgrade", b"content-length", b"host", b"authorization"}
)

# The fields that matter here, as small numbers: most fields of a head are none of them.
_HOP: Final = 0  # hop-by-hop, of no further interest
_CONNECTION: Final = 1
_KEEP_ALIVE: Final = 2
_TRANSFER_ENCODING: Final = 3
_UPGRADE: Final = 4
_CONTENT_LENGTH: Final = 5
_HOST: Final = 6
_EXPECT: Final = 7
_CONTENT_TYPE: Final = 8
_HOP_BY_HOP_FIELDS: Final = {
    b"connection": _CONNECTION,
    b"keep-alive": _KEEP_ALIVE,
    b"transfer-encoding": _TRANSFER_ENCODING,
    b"upgrade": _UPGRADE,
    b"te": _HOP,
    b"trailer": _HOP,
}
_REQUEST_FIELDS: Final = {
    **_HOP_BY_HOP_FIELDS,
    b"content-length": _CONTENT_LENGTH,
    b"host": _HOST,
    b"expect": _EXPECT,
}
_RESPONSE_FIELDS: Final = {
    **_HOP_BY_HOP_FIELDS,
    b"content-length": _CONTENT_LENGTH,
    b"content-type": _CONTENT_TYPE,
}
_HTTP_10: Final = b"HTTP/1.0"
_HTTP_11: Final = b"HTTP/1.1"


class RequestHead:
    """A request's head, ready to be sent on (RFC 9112 sections 3 to 6). Read-only once made."""

    __slots__ = (
        "_hop_by_hop",
        "_hosts",
        "_options",
        "chunked",
        "content_length",
        "expects_continue",
        "has_host",
        "http11",
        "keep_alive",
        "lines",
        "method",
        "target",
        "upgrade",
    )

    def __init__(self, raw: bytes) -> None:
        """Read a whole head, `raw` ending in its empty line.

        Raises BadRequest for anything that two parsers could read in two ways, Unsupported for
        other versions than HTTP/1.0 and 1.1 and other transfer codings than chunked.
        """
        self.content_length = 0  # also where the request has no body or is chunked
        self.chunked = False
        self.expects_continue = False
        self.upgrade = b""  # the protocols asked for
        self._hop_by_hop = False
        self._hosts = 0
        self._options: set[bytes] | None = None  # of Connection
        try:
            httptools.HttpRequestParser(self).feed_data(raw)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise BadRequest(str(error)) from None

        line_end = raw.find(b"\r\n")
        words = raw[:line_end].split()
        if len(words) != 3 or words[2] not in (_HTTP_11, _HTTP_10):
            raise Unsupported(Unsupported.What.VERSION, raw[:line_end][-16:].decode("latin-1"))
        self.method = words[0]
        self.target = words[1]  # origin-form or `*` (RFC 9112 section 3.2)
        self.http11 = words[2] == _HTTP_11
        self.keep_alive = self.http11
        self.lines = raw[line_end + 2 : -2]  # end-to-end fields, each ending in CRLF
        if self._hop_by_hop:
            self._read_hop_by_hop()
        if self._hosts != 1 and (self.http11 or self._hosts):
            raise BadRequest("a request must have exactly one Host field")
        self.has_host = self._hosts == 1
        if not self.target.startswith(b"/"):
            self._read_special_target()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools."""
        name = name.lower()
        field = _REQUEST_FIELDS.get(name, -1)
        if field < 0 and not name.startswith(b"proxy-"):
            return
        if field == _HOST:
            self._hosts += 1
            if value.rstrip(b" \t").translate(None, _HOST_BYTES):
                raise BadRequest("malformed Host field")
        elif field == _CONTENT_LENGTH:
            self.content_length = int(value)  # llhttp: digits, once, never with Transfer-Encoding
        elif field == _EXPECT:
            self.expects_continue = value.strip().lower() == b"100-continue"
        else:
            self._hop_by_hop = True
            if field == _CONNECTION:
                self._options = _options(value, self._options)
            elif field == _TRANSFER_ENCODING:
                if value.strip().lower() != b"chunked":
                    raise Unsupported(Unsupported.What.CODING, value.decode("latin-1"))
                self.chunked = True
            elif field == _UPGRADE:
                self.upgrade = value.strip()

    def _read_hop_by_hop(self) -> None:
        options: set[bytes] = self._options or set()
        self.lines = _end_to_end(self.lines, options)
        self.keep_alive = b"close" not in options if self.http11 else b"keep-alive" in options
        # h2c would open a tunnel that is not looked into (request smuggling): not offered.
        if b"upgrade" not in options or b"h2c" in self.upgrade.lower() or not self.http11:
            self.upgrade = b""
        if self.chunked and not self.http11:
            raise BadRequest("HTTP/1.0 has no chunked coding")

    def _read_special_target(self) -> None:
        if self.target == b"*" and self.method == b"OPTIONS":
            return
        if self.target.startswith(b"*"):
            raise BadRequest("malformed request target")
        if self.method != b"CONNECT":
            self.has_host = True
            self.target, self.lines = _origin_form(self.method, self.target, self.lines)


class ResponseHead:
    """A response's head, ready to be sent on. Read-only once made."""

    __slots__ = (
        "_hop_by_hop",
        "_options",
        "chunked",
        "content_length",
        "event_stream",
        "keep_alive",
        "keep_alive_s",
        "lines",
        "reason",
        "status",
        "upgrade",
    )

    def __init__(self, raw: bytes) -> None:
        """Read a whole head, `raw` ending in its empty line. Raises BadResponse."""
        self.content_length = -1  # none given
        self.chunked = False
        self.event_stream = False
        self.keep_alive_s = -1.0  # how long the upstream says that it keeps an idle connection
        self.upgrade = b""
        self._hop_by_hop = False
        self._options: set[bytes] | None = None
        try:
            httptools.HttpResponseParser(self).feed_data(raw)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise BadResponse(str(error)) from None

        http11 = raw.startswith(b"HTTP/1.1 ")
        if not (http11 or raw.startswith(b"HTTP/1.0 ")) or raw[12:13] not in (b" ", b"\r"):
            raise BadResponse(f"malformed status line: {raw[:32]!r}")
        line_end = raw.find(b"\r\n")
        self.status = int(raw[9:12])
        self.reason = raw[12:line_end]  # with its leading space, as received
        self.keep_alive = http11
        self.lines = raw[line_end + 2 : -2]  # end-to-end fields, each ending in CRLF
        if self._hop_by_hop:
            self._read_hop_by_hop(http11)

    def _read_hop_by_hop(self, http11: bool) -> None:
        options: set[bytes] = self._options or set()
        self.lines = _end_to_end(self.lines, options)
        self.keep_alive = b"close" not in options if http11 else b"keep-alive" in options
        if b"upgrade" not in options:
            self.upgrade = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools."""
        name = name.lower()
        field = _RESPONSE_FIELDS.get(name, -1)
        if field < 0 and not name.startswith(b"proxy-"):
            return
        if field == _CONTENT_TYPE:
            self.event_stream = value.lower().startswith(b"text/event-stream")
        elif field == _CONTENT_LENGTH:
            self.content_length = int(value)
        else:
            self._hop_by_hop = True
            if field == _CONNECTION:
                self._options = _options(value, self._options)
            elif field == _TRANSFER_ENCODING:
                if value.strip().lower() != b"chunked":
                    raise BadResponse(f"transfer coding {value.decode('latin-1')!r}")
                self.chunked = True
            elif field == _UPGRADE:
                self.upgrade = value.strip()
            elif field == _KEEP_ALIVE:
                hint = _KEEP_ALIVE_TIMEOUT.search(value)
                self.keep_alive_s = float(hint[1]) if hint else -1.0


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


def _options(value: bytes, before: set[bytes] | None) -> set[bytes]:
    """Return the options of a Connection field, with those of the ones before it."""
    return {option.strip() for option in value.lower().split(b",")} | (before or set())


def _end_to_end(lines: bytes, options: set[bytes]) -> bytes:
    """Return header lines without hop-by-hop fields and those that Connection names."""
    raw = b"\n" + lines
    kept = []
    start = 1
    for field in _HOP_BY_HOP.finditer(raw.lower()):
        kept.append(raw[start : field.start() + 1])
        start = field.end() + 1
    kept.append(raw[start:])
    nominated = options - _NOT_NOMINABLE
    return drop_fields(b"".join(kept), nominated) if nominated else b"".join(kept)


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
