"""Start, refusal to start, and drain: what an operator meets."""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import bad_configs, wait
from support.gateway import EXECUTABLE, Gateway, Start, config, run
from support.raw import Client
from support.upstream import Exchange, Stubs, Upstream
from support.wire import LAST_CHUNK, SSE_HEAD, chunk, request_bytes, response_bytes

ANYWHERE = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]


# -- start ---------------------------------------------------------------------------------------


def test_flags_alone_are_enough_and_stdout_has_one_line(stubs: Stubs) -> None:
    with subprocess.Popen(
        [EXECUTABLE, "serve", "--upstream", stubs().url, *ANYWHERE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(
            r"ready listen=(127\.0\.0\.1):(\d+) admin=(127\.0\.0\.1):(\d+)\n", line
        )
        assert match is not None, line
        with Client((match[1], int(match[2]))) as client:
            assert client.exchange().body == b"ok"
        process.terminate()
        assert process.stdout.read() == ""
        assert process.wait(10) == 0


def test_flags_override_the_file(start: Start, stubs: Stubs) -> None:
    in_file, in_flag = stubs(), stubs()
    gateway = start(config(in_file), flags=("--upstream", in_flag.url))
    assert gateway.fetch().status == 200
    assert (len(in_file.requests), len(in_flag.requests)) == (0, 1)


@pytest.mark.parametrize("which", ["listen", "admin"])
def test_a_port_in_use_is_exit_1_and_says_which(which: str, stubs: Stubs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [*ANYWHERE, f"--{which}", address]
        result = run("serve", "--upstream", stubs().url, *flags)
    assert result.returncode == 1
    assert address in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


# A process for each case costs a second; test_reload.py shows the rest of the table.
@pytest.mark.parametrize("case", ["second url is none", "word for a number", "not YAML"])
@pytest.mark.parametrize("command", [["check"], ["serve", "--config"]], ids=["check", "serve"])
def test_a_bad_config_is_exit_2_with_the_path_of_what_is_wrong(
    tmp_path: Path, case: str, command: list[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(bad_configs.text(case))
    result = run(*command, str(file))
    assert result.returncode == 2, result.stderr
    assert bad_configs.BAD[case][1] in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_missing_config_file_is_exit_2() -> None:
    result = run("serve", "--config", "/nowhere/at-all.yaml")
    assert result.returncode == 2
    assert "/nowhere/at-all.yaml" in result.stderr


def test_no_upstream_at_all_is_exit_2() -> None:
    result = run("serve", *ANYWHERE)
    assert result.returncode == 2
    assert "upstream" in result.stderr


def test_check_accepts_a_good_file(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(yaml.safe_dump(config("http://127.0.0.1:8000")))
    result = run("check", str(file))
    assert result.returncode == 0
    assert "127.0.0.1:8000" in result.stdout


# -- drain ---------------------------------------------------------------------------------------


class Stream:
    """A stream that goes on until the test says so."""

    def __init__(self, stub: Upstream) -> None:
        self.finish = False
        stub.script(self._run)

    def _run(self, exchange: Exchange) -> None:
        exchange.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        wait.until(lambda: self.finish, 20)
        exchange.send(chunk(b"data: 2\n\n") + LAST_CHUNK)


def open_stream(gateway: Gateway) -> Client:
    client = gateway.connect()
    client.send(request_bytes("POST", "/v1/chat/completions", body=b'{"stream":true}'))
    client.until(b"data: 1\n\n")
    return client


def refused(gateway: Gateway) -> bool:
    try:
        gateway.connect().close()
    except OSError:
        return True
    return False


@pytest.mark.line(27)
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_drain_lets_the_stream_finish(start: Start, stubs: Stubs, loop: str) -> None:
    stub = stubs()
    stream = Stream(stub)
    timeouts = {"settle_s": 0.8, "drain_s": 20}
    gateway = start(config(stub, timeouts=timeouts), loop=loop)
    client = open_stream(gateway)
    idle = gateway.connect()
    gateway.terminate()
    wait.until(lambda: gateway.admin_get("/readyz").status == 503, 0.7, "readiness fails first")
    assert gateway.admin_get("/healthz").status == 200
    with gateway.connect() as late:  # within the settle time
        stream.finish = True
        assert late.exchange().complete
    stream.finish = False
    wait.until(lambda: refused(gateway), what="the port closes after the settle time")
    assert idle.wait_end(5) is not None
    assert gateway.running()
    stream.finish = True
    rest = client.until(LAST_CHUNK)
    assert b"data: 2\n\n" in rest
    assert client.wait_end(5) is not None
    assert gateway.wait() == 0
    client.close()
    idle.close()


@pytest.mark.line(27)
def test_connections_are_told_to_close_during_a_drain(start: Start, stubs: Stubs) -> None:
    gateway = start(config(stubs(), timeouts={"settle_s": 1}))
    with gateway.connect() as client:
        client.exchange()
        gateway.terminate()
        wait.until(lambda: gateway.admin_get("/readyz").status == 503)
        answer = client.exchange()
        assert answer.status == 200
        assert answer.get("connection") == b"close"
        assert client.wait_end(2) is not None
    assert gateway.wait() == 0


@pytest.mark.line(27)
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_without_traffic_it_ends_at_once(
    start: Start, stubs: Stubs, signal_number: signal.Signals
) -> None:
    gateway = start(config(stubs(), timeouts={"drain_s": 60}))
    idle = gateway.connect()
    gateway.fetch()
    gateway.process.send_signal(signal_number)
    assert gateway.wait(5) == 0
    idle.close()


@pytest.mark.line(27)
def test_a_drain_is_bounded_and_what_it_cuts_ends_uncleanly(start: Start, stubs: Stubs) -> None:
    def never_end(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        exchange.peer_closed_after(20)

    stub = stubs()
    stub.script(never_end)
    gateway = start(config(stub, timeouts={"drain_s": 0.5}))
    client = open_stream(gateway)
    gateway.terminate()
    assert LAST_CHUNK not in client.rest()
    assert gateway.wait(5) == 0
    client.close()


@pytest.mark.line(27)
def test_an_upload_in_progress_finishes_during_a_drain(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(stub, timeouts={"drain_s": 20}))
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/", [(b"Content-Length", b"8")]) + b"half")
        wait.until(lambda: gateway.state()["client_connections"] == 1)
        gateway.terminate()
        wait.until(lambda: refused(gateway))
        client.send(b"half")
        assert client.response("POST").status == 200
    assert gateway.wait(5) == 0
    assert stub.request.body == b"halfhalf"


# -- logs ----------------------------------------------------------------------------------------


def test_each_request_is_one_json_line_without_secrets(start: Start, stubs: Stubs) -> None:
    gateway = start(config(stubs()))
    secret = b"sk-very-secret"
    target = '/v1/chat/completions?q="quote"\\and\x7e'
    fields = ((b"Authorization", b"Bearer " + secret), (b"X-A", b"1"))
    assert gateway.fetch("POST", target, fields, b'{"prompt":"private words"}').status == 200
    with gateway.connect() as client:
        client.send(b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n")
        client.response()
    wait.until(lambda: len(requests(gateway)) == 2)
    assert requests(gateway)[0]["status"] == 200
    assert secret.decode() not in gateway.log()
    assert "private words" not in gateway.log()


def requests(gateway: Gateway) -> list[dict[str, Any]]:
    return [record for record in gateway.log_records() if "outcome" in record]


def test_request_lines_can_be_switched_off(start: Start, stubs: Stubs) -> None:
    gateway = start(config(stubs(), log={"requests": False}))
    gateway.fetch()
    time.sleep(0.3)
    assert requests(gateway) == []


def test_a_log_reader_that_stops_reading_stops_nothing_else(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    stub.respond(response_bytes())
    reader, writer = os.pipe()
    try:
        gateway = start(config(stub), stderr_fd=writer)
        with gateway.connect() as client:
            for number in range(1500):
                assert client.exchange("GET", f"/{number}{'x' * 200}").status == 200
        assert gateway.admin_get("/healthz").status == 200
        gateway.terminate()
        assert gateway.wait(10) == 0
    finally:
        os.close(reader)
        os.close(writer)
