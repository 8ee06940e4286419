"""What a log line holds and how it is spelt: records in, one line of bytes out. Pure.

A line is always one line. Whatever a client sent, control characters, line separators and bytes
that are not UTF-8 come out escaped.
"""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache

import msgspec


class FlowLine(msgspec.Struct, frozen=True, gc=False):
    """What flow control did with an opted-in request, and what it cost."""

    request_id: str
    tier: str
    tenant: str
    queue_ms: float
    ttft_ms: float | None  # None, here and below: not known
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None


class RequestLine(msgspec.Struct, frozen=True, gc=False):
    """One ended request."""

    time_s: float  # Unix time at which it ended
    method: bytes
    target: bytes  # as received; its query is never written, for it may hold secrets
    status: int  # 0: no answer was sent
    outcome: str
    endpoint: str  # empty: none was chosen
    why: str  # the routing policy's reason
    duration_ms: float
    bytes_in: int  # body bytes from the client
    bytes_out: int  # body bytes to the client
    client: str  # address
    flow: FlowLine | None = None  # of an opted-in request


class EventLine(msgspec.Struct, frozen=True):
    """One message of the gateway itself."""

    time_s: float  # Unix time
    level: str  # DEBUG, INFO, WARNING, ERROR, CRITICAL
    message: str
    fields: Mapping[str, str | int | float | bool | None]


Line = RequestLine | EventLine
Renderer = Callable[[Line], bytes]

_RED, _GREEN, _YELLOW, _CYAN, _DIM, _RESET = (f"\x1b[{n}m" for n in (31, 32, 33, 36, 2, 0))
_STATUS_COLOURS = {0: _YELLOW, 2: _GREEN, 3: _CYAN, 4: _YELLOW, 5: _RED}
_LEVEL_COLOURS = {"WARNING": _YELLOW, "ERROR": _RED, "CRITICAL": _RED}

MAX_TARGET_BYTES = 512
"""Longer targets are cut, so that a queue of lines is bounded in bytes too."""


def render_json(line: Line) -> bytes:
    """Return one JSON object in ASCII and a line feed. Measured: 1.3 us."""
    text = _request_json(line) if isinstance(line, RequestLine) else _event_json(line)
    return text.encode("ascii") + b"\n"


def render_text(line: Line) -> bytes:
    """Return one aligned line for people."""
    return _render_text(line, colours=False)


def render_coloured(line: Line) -> bytes:
    """Return one aligned line for people at a terminal."""
    return _render_text(line, colours=True)


def _request_json(line: RequestLine) -> str:
    # Put together here, from quoted parts that repeat: encoding a record costs 4 times as much.
    return (
        f'{{"time":"{_timestamp(line.time_s)}","level":"INFO","kind":"request"'
        f',"method":{_quoted(line.method)},"path":{_quoted(line.target[:MAX_TARGET_BYTES])}'
        f',"status":{line.status},"outcome":"{line.outcome}","endpoint":{_quoted_text(line.endpoint)}'
        f',"why":{_quoted_text(line.why)},"duration_ms":{line.duration_ms:.3f}'
        f',"bytes_in":{line.bytes_in},"bytes_out":{line.bytes_out}'
        f',"client":{_quoted_text(line.client)}{_flow_json(line.flow)}}}'
    )


def _flow_json(flow: FlowLine | None) -> str:
    if flow is None:
        return ""
    fields = msgspec.structs.asdict(flow)
    return f",{_ascii_json(fields)[1:-1]}"


def _event_json(line: EventLine) -> str:
    head = {"time": _timestamp(line.time_s), "level": line.level, "kind": "event"}
    return _ascii_json({**head, "message": line.message, **line.fields})


def _render_text(line: Line, *, colours: bool) -> bytes:
    if isinstance(line, RequestLine):
        colour, text = _STATUS_COLOURS.get(line.status // 100, ""), _request_text(line)
    else:
        colour, text = _LEVEL_COLOURS.get(line.level, ""), _event_text(line)
    head, _, rest = _one_line(text).partition("  ")
    time = _timestamp(line.time_s)
    if colours:
        time, head = f"{_DIM}{time}{_RESET}", f"{colour}{head}{_RESET}"
    return f"{time}  {head}  {rest}\n".encode()


def _request_text(line: RequestLine) -> str:
    endpoint = f" -> {line.endpoint} ({line.why})" if line.endpoint else ""
    flow = line.flow
    opted_in = ""
    if flow is not None:
        ttft = "" if flow.ttft_ms is None else f" ttft {flow.ttft_ms:.0f} ms"
        opted_in = f" [{flow.tier} {flow.tenant} queue {flow.queue_ms:.0f} ms{ttft}]"
    return (
        f"{line.status or '---'} {line.outcome:<19}  {line.duration_ms:>10.1f} ms"
        f"  in {line.bytes_in:<9} out {line.bytes_out:<9} {line.client:<15} "
        f"{_decoded(line.method)} {_path(line.target)}{endpoint}{opted_in}"
    )


def _event_text(line: EventLine) -> str:
    fields = "".join(f"  {name}={value}" for name, value in line.fields.items())
    return f"{line.level:<8}  {line.message}{fields}"


def _path(target: bytes) -> str:
    return _decoded(target[:MAX_TARGET_BYTES].partition(b"?")[0].partition(b"#")[0])


@lru_cache(maxsize=256)  # callers use few methods and paths: 0.2 us less a line
def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


@lru_cache(maxsize=256)
def _quoted(raw: bytes) -> str:
    """Return a method, or a target without its query, as a JSON string."""
    return _ascii_json(_path(raw))


@lru_cache(maxsize=4096)  # the addresses of clients among them
def _quoted_text(text: str) -> str:
    return _ascii_json(text)


def _ascii_json(value: object) -> str:
    """Return JSON that is one line for every reader: all but ASCII, and DEL, is escaped."""
    return json.dumps(value, separators=(",", ":")).replace("\x7f", "\\u007f")


def _timestamp(unix_s: float) -> str:
    """Return RFC 3339 in UTC with milliseconds."""
    unix_ms = int(unix_s * 1000)
    return f"{_second(unix_ms // 1000)}.{unix_ms % 1000:03d}Z"


@lru_cache(maxsize=4)  # lines come in order
def _second(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
