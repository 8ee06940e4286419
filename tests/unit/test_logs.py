"""Log lines: their spelling, and a writer that no reader can block (real pipes and terminals)."""

import fcntl
import json
import logging
import os
import pty
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuicflow.observability.lines import (
    MAX_TARGET_BYTES,
    EventLine,
    Line,
    Renderer,
    RequestLine,
    render_coloured,
    render_json,
    render_text,
)
from ciuicflow.observability.logs import LogConfig, LogWriter
from ciuicflow.request import Outcome

REQUEST = RequestLine(
    time_s=1767225600.123,
    method=b"POST",
    target=b"/v1/chat/completions",
    status=200,
    outcome=Outcome.COMPLETED,
    endpoint="a",
    why="least_load: 3 in flight",
    duration_ms=1234.5678,
    bytes_in=512,
    bytes_out=20480,
    client="127.0.0.1",
)
RENDERERS = pytest.mark.parametrize("render", [render_json, render_text, render_coloured])
JSON = LogConfig(format="json")


def request(**changes: object) -> RequestLine:
    return msgspec.structs.replace(REQUEST, **changes)


class Pipe:
    """A real pipe whose reader reads only when told to."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 4096)

    def read_all(self) -> list[bytes]:
        """Close the writing end and return every line."""
        os.close(self.writer)
        self.writer = -1
        with os.fdopen(os.dup(self.reader), "rb") as file:
            return file.read().splitlines(keepends=True)

    def close(self) -> None:
        for fd in {self.reader, self.writer} - {-1}:
            os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.fixture
def logger(request: pytest.FixtureRequest) -> logging.Logger:
    return logging.getLogger(f"ciuicflow.test.{request.node.name}")


def drain(pipe: Pipe, lines: list[bytes]) -> threading.Thread:
    """Read the pipe in a thread until every writer has closed it."""

    def read() -> None:
        with os.fdopen(os.dup(pipe.reader), "rb") as file:
            lines.extend(file)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def written(pipe: Pipe, writer: LogWriter) -> list[bytes]:
    """Close the writer and return the lines that a reader then has."""
    lines: list[bytes] = []
    thread = drain(pipe, lines)
    assert writer.close(10)
    os.close(pipe.writer)
    pipe.writer = -1
    thread.join(10)
    return lines


# Spelling


def test_a_request_line_in_json_has_every_field() -> None:
    assert json.loads(render_json(REQUEST)) == {
        "time": "2026-01-01T00:00:00.123Z",
        "level": "INFO",
        "kind": "request",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "outcome": "completed",
        "endpoint": "a",
        "why": "least_load: 3 in flight",
        "duration_ms": 1234.568,
        "bytes_in": 512,
        "bytes_out": 20480,
        "client": "127.0.0.1",
    }


def test_an_event_line_in_json_has_its_fields_beside_the_message() -> None:
    line = EventLine(1767225600.0, "WARNING", "reload failed", {"path": "x.yaml", "tries": 2})
    assert json.loads(render_json(line)) == {
        "time": "2026-01-01T00:00:00.000Z",
        "level": "WARNING",
        "kind": "event",
        "message": "reload failed",
        "path": "x.yaml",
        "tries": 2,
    }


def test_text_says_what_happened_and_why() -> None:
    text = render_text(REQUEST).decode()
    for part in ("2026-01-01T00:00:00.123Z", "200 completed", "1234.6 ms", "127.0.0.1"):
        assert part in text
    assert text.endswith("POST /v1/chat/completions -> a (least_load: 3 in flight)\n")


def test_text_without_an_answer_or_endpoint_shows_neither() -> None:
    text = render_text(request(status=0, outcome="client_gone", endpoint="", why="")).decode()
    assert "--- client_gone" in text
    assert "->" not in text


def test_text_columns_are_aligned() -> None:
    lines = [
        request(outcome=outcome, duration_ms=duration_ms, bytes_out=size)
        for outcome in Outcome
        for duration_ms in (0.1, 3_600_000.0)
        for size in (0, 200_000_000)
    ]
    for render in (render_text, render_coloured):
        rendered = [render(line) for line in lines]
        assert len({line.index(b"POST") - line.index(b"200") for line in rendered}) == 1


def test_only_a_terminal_gets_colours() -> None:
    failed = request(status=502, outcome="upstream_failed")
    assert b"\x1b[31m502 upstream_failed" in render_coloured(failed)
    assert b"\x1b[33mWARNING" in render_coloured(EventLine(0.0, "WARNING", "careful", {}))
    for line in (REQUEST, failed):
        assert b"\x1b" not in render_text(line) + render_json(line)


@RENDERERS
@pytest.mark.parametrize("target", [b"/models?key=secret", b"/x#secret", b"/?secret"])
def test_a_query_is_never_written(render: Renderer, target: bytes) -> None:
    assert b"secret" not in render(request(target=target))


def assert_is_one_line(line: Line, render: Renderer) -> None:
    text = render(line).decode()  # valid UTF-8
    body = text.removesuffix("\n")
    assert text.endswith("\n")
    assert len(body.splitlines()) == 1
    for mark in ("\x1b[2m", "\x1b[0m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[36m", "\x1b[m"):
        body = body.replace(mark, "") if render is render_coloured else body
    assert body.isprintable()


@RENDERERS
@given(st.binary(max_size=40), st.binary(max_size=10), st.integers(0, 999))
def test_any_bytes_of_a_client_make_one_printable_line(
    render: Renderer, target: bytes, method: bytes, status: int
) -> None:
    assert_is_one_line(request(target=target, method=method, status=status), render)


@RENDERERS
@given(st.text(st.characters(), max_size=40), st.text(st.characters(), max_size=20))
def test_any_text_of_an_event_makes_one_printable_line(
    render: Renderer, message: str, value: str
) -> None:
    assert_is_one_line(EventLine(0.0, "INFO", message, {"peer": value}), render)


@RENDERERS
@pytest.mark.parametrize(
    "character",
    ["\n", "\r", "\0", "\x1b", "\x7f", "\x85", "\x9b", "\u2028", "\u2029", "\u202e", "\udc80"],
)
def test_a_character_that_forges_lines_or_steers_terminals_is_escaped(
    render: Renderer, character: str
) -> None:
    assert_is_one_line(EventLine(0.0, "INFO", f"a{character}b", {}), render)
    target = f"/a{character}b".encode("utf-8", "surrogateescape")
    assert_is_one_line(request(target=target), render)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_json_gives_back_the_message_that_went_in(message: str) -> None:
    assert json.loads(render_json(EventLine(0.0, "INFO", message, {})))["message"] == message


@RENDERERS
def test_a_long_target_is_cut(render: Renderer) -> None:
    assert len(render(request(target=b"/" + b"\xff" * 16_000))) < 10 * MAX_TARGET_BYTES


def test_a_path_that_is_not_utf8_shows_its_bytes() -> None:
    assert json.loads(render_json(request(target=b"/\xff\xe4")))["path"] == "/\\xff\\xe4"
    assert json.loads(render_json(request(target="/ä".encode())))["path"] == "/ä"


# Configuration


def test_the_configuration_is_strict() -> None:
    assert msgspec.convert({}, LogConfig) == LogConfig(format="auto", requests=True)
    for wrong in ({"format": "xml"}, {"requests": "yes"}, {"colour": True}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, LogConfig)


def test_auto_is_json_where_no_terminal_reads(pipe: Pipe) -> None:
    writer = LogWriter(LogConfig(), fd=pipe.writer)
    writer.request(REQUEST)
    assert written(pipe, writer) == [render_json(REQUEST)]


@pytest.mark.parametrize(
    ("format", "no_color", "render"),
    [
        ("auto", "", render_coloured),
        ("text", "", render_coloured),
        ("auto", "1", render_text),
        ("json", "", render_json),
    ],
)
def test_on_a_terminal_auto_is_coloured_text(
    format: str, no_color: str, render: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    master, slave = pty.openpty()
    try:
        writer = LogWriter(msgspec.convert({"format": format}, LogConfig), fd=slave)
        writer.request(REQUEST)
        assert writer.close(10)
        assert os.read(master, 4096) == render(REQUEST).replace(b"\n", b"\r\n")
    finally:
        os.close(master)
        os.close(slave)


def test_a_reload_changes_format_and_wish_for_requests(pipe: Pipe) -> None:
    writer = LogWriter(JSON, fd=pipe.writer)
    before = writer.requests
    writer.configure(LogConfig(format="text", requests=False))
    assert (before, writer.requests) == (True, False)
    writer.event(EventLine(0.0, "INFO", "hello", {}))
    assert written(pipe, writer) == [render_text(EventLine(0.0, "INFO", "hello", {}))]


# Writing


def test_lines_arrive_soon_in_order_and_whole(pipe: Pipe) -> None:
    writer = LogWriter(JSON, fd=pipe.writer)
    for number in range(3000):
        writer.request(request(bytes_in=number))
    lines = written(pipe, writer)
    assert [json.loads(line)["bytes_in"] for line in lines] == list(range(3000))
    assert writer.dropped == 0


def test_a_line_is_written_without_anybody_asking(pipe: Pipe) -> None:
    writer = LogWriter(JSON, fd=pipe.writer)
    writer.request(REQUEST)
    assert os.read(pipe.reader, 4096) == render_json(REQUEST)
    assert writer.close(10)


def test_a_pipe_that_nobody_reads_never_blocks_the_caller(pipe: Pipe) -> None:
    writer = LogWriter(JSON, fd=pipe.writer, max_lines=100)
    slowest_s = 0.0
    for number in range(20_000):
        start = time.perf_counter()
        writer.request(request(bytes_in=number))
        slowest_s = max(slowest_s, time.perf_counter() - start)
    assert slowest_s < 1.0
    assert writer.dropped > 19_000
    start = time.perf_counter()
    assert not writer.close(0.2)
    assert time.perf_counter() - start < 5.0

    writer.request(REQUEST)  # after close: dropped, no error
    lines: list[bytes] = []
    thread = drain(pipe, lines)
    assert writer.close(10)
    os.close(pipe.writer)
    pipe.writer = -1
    thread.join(10)
    numbers = [json.loads(line)["bytes_in"] for line in lines]
    assert numbers == sorted(numbers)
    assert len(numbers) + writer.dropped == 20_001


def test_a_line_after_close_is_dropped_and_counted(pipe: Pipe) -> None:
    writer = LogWriter(JSON, fd=pipe.writer)
    assert written(pipe, writer) == []
    writer.request(REQUEST)
    assert writer.dropped == 1


def test_a_reader_that_left_costs_lines_but_raises_nothing(pipe: Pipe) -> None:
    writer = LogWriter(JSON, fd=pipe.writer)
    os.close(pipe.reader)
    pipe.reader = -1
    for _ in range(100):
        writer.request(REQUEST)
    assert writer.close(10)
    assert writer.dropped == 100


def test_a_descriptor_that_somebody_made_non_blocking_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.writer, False)
    writer = LogWriter(JSON, fd=pipe.writer)
    for number in range(500):
        writer.request(request(bytes_in=number))
    time.sleep(0.3)  # the pipe is full by now
    lines = written(pipe, writer)
    assert [json.loads(line)["bytes_in"] for line in lines] == list(range(500))


def test_queueing_a_line_is_cheap(pipe: Pipe) -> None:
    os.close(pipe.reader)
    pipe.reader = -1
    writer = LogWriter(JSON, fd=pipe.writer)
    best_s = min(timeit.repeat(lambda: writer.request(REQUEST), number=500, repeat=5)) / 500
    assert writer.close(10)
    assert best_s < 50e-6  # 2 us measured; this only catches work that does not belong here


# The standard logging


def test_records_of_a_logger_become_event_lines(pipe: Pipe, logger: logging.Logger) -> None:
    writer = LogWriter(JSON, fd=pipe.writer)
    writer.attach(logger)
    logger.debug("not this")
    logger.info("reloaded %s", "x.yaml", extra={"upstreams": 3, "reason": None, "odd": {1}})
    logger.getChild("sub").warning("careful")
    first, second = map(json.loads, written(pipe, writer))
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "INFO",
        "kind": "event",
        "message": "reloaded x.yaml",
        "upstreams": 3,
        "reason": None,
        "odd": "{1}",
    }
    assert (second["level"], second["message"]) == ("WARNING", "careful")


@pytest.mark.parametrize("format", ["json", "text"])
def test_an_exception_is_one_line_with_its_traceback(
    format: str, pipe: Pipe, logger: logging.Logger
) -> None:
    writer = LogWriter(msgspec.convert({"format": format}, LogConfig), fd=pipe.writer)
    writer.attach(logger)
    try:
        raise KeyError("absent\nkey")
    except KeyError:
        logger.exception("failed")
    (line,) = written(pipe, writer)
    assert b"Traceback" in line
    assert b"KeyError" in line


def test_a_wrong_log_call_does_not_raise(
    pipe: Pipe, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = LogWriter(JSON, fd=pipe.writer)
    writer.attach(logger)
    logger.info("%d", "no number")
    assert written(pipe, writer) == []
    assert "no number" in capsys.readouterr().err


def test_close_gives_the_loggers_back(pipe: Pipe, logger: logging.Logger) -> None:
    writer = LogWriter(JSON, fd=pipe.writer)
    writer.attach(logger)
    assert writer.close(10)
    assert logger.handlers == []


def test_threads_may_log_at_once(pipe: Pipe, logger: logging.Logger) -> None:
    writer = LogWriter(JSON, fd=pipe.writer)
    writer.attach(logger)

    def talk(name: int) -> None:
        for number in range(100):
            logger.info("hello", extra={"speaker": name, "number": number})

    threads = [threading.Thread(target=talk, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    spoken = {(line["speaker"], line["number"]) for line in map(json.loads, written(pipe, writer))}
    assert spoken == {(name, number) for name in range(4) for number in range(100)}


def test_a_process_whose_stderr_is_stuck_still_exits(pipe: Pipe) -> None:
    script = (
        "from ciuicflow.observability.lines import EventLine\n"
        "from ciuicflow.observability.logs import LogConfig, LogWriter\n"
        "writer = LogWriter(LogConfig(), max_lines=1000)\n"
        "for _ in range(5000): writer.event(EventLine(0.0, 'INFO', 'x' * 100, {}))\n"
        "print(writer.close(0.2), writer.dropped > 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=pipe.writer,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"False True\n")
