"""`Expect: 100-continue` (RFC 9110 section 10.1.1): no stall, no body sent for nothing."""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support import wait
from support.gateway import Gateway
from support.raw import Client
from support.upstream import Exchange, Upstream
from support.wire import EndedError, chunked, message_bytes, request_bytes, response_bytes

SETTINGS: dict[str, Any] = {"limits": {"body_bytes": 2_000_000}}

EXPECT = [(b"Expect", b"100-continue")]
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def head(length: int, method: str = "POST") -> bytes:
    return request_bytes(method, "/", [*EXPECT, (b"Content-Length", b"%d" % length)])


@pytest.mark.line(17)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_the_client_is_told_to_go_on(gateway: Gateway, upstream: Upstream, method: str) -> None:
    with gateway.connect() as client:
        client.send(head(4, method))
        started = time.monotonic()
        assert client.until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        assert time.monotonic() - started < 0.8  # curl gives up waiting after 1 s
        client.send(b"body")
        answer = client.response(method)
    assert (answer.informational, answer.status) == ([], 200)  # told once, not twice
    assert upstream.request.body == b"body"


@pytest.mark.line(17)
def test_a_chunked_body_may_wait_too(gateway: Gateway, upstream: Upstream) -> None:
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/", [*EXPECT, (b"Transfer-Encoding", b"chunked")]))
        assert client.until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        client.send(chunked(b"body"))
        assert client.response("POST").status == 200
    assert upstream.request.body == b"body"


@pytest.mark.line(17)
def test_a_client_that_does_not_wait_is_served(gateway: Gateway, upstream: Upstream) -> None:
    with gateway.connect() as client:
        for _ in range(3):
            client.send(head(4) + b"body")
            assert client.response("POST").status == 200
    assert [request.body for request in upstream.requests] == [b"body"] * 3


@pytest.mark.line(17)
def test_an_upstream_that_answers_continue_itself(gateway: Gateway, upstream: Upstream) -> None:
    def answer_it(exchange: Exchange) -> None:
        exchange.send(CONTINUE)
        exchange.read_body()
        exchange.send(response_bytes())

    upstream.script(answer_it, head_only=True)
    with gateway.connect() as client:
        client.send(head(4))
        assert client.until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        client.send(b"body")
        assert client.response("POST").status == 200
    assert upstream.request.body == b"body"


@pytest.mark.line(17, 18)
def test_the_gateways_own_refusal_comes_instead_of_continue(
    gateway: Gateway, upstream: Upstream
) -> None:
    with gateway.connect() as client:
        client.send(head(3_000_000))
        answer = client.response("POST")
    assert (answer.informational, answer.status) == ([], 413)
    assert upstream.requests == []


@pytest.mark.line(17)
@pytest.mark.parametrize("status", ["401 Unauthorized", "413 Content Too Large", "417 No"])
def test_an_upstreams_refusal_reaches_the_client_once(
    gateway: Gateway, upstream: Upstream, status: str
) -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.send(response_bytes(b"no", status))
        exchange.read_body()

    upstream.script(refuse, head_only=True)
    with gateway.connect() as client:
        client.send(head(4))
        told = read_until_final(client)
        answer = client.response("POST")
        assert answer.start == f"HTTP/1.1 {status}".encode()
        assert answer.body == b"no"
        # Either the connection ends here, or the body is still taken and it goes on in step.
        upstream.respond(response_bytes(b"next"))
        client.send_ignoring_close((b"" if told else b"body") + request_bytes("GET", "/next"))
        try:
            following = client.response().body
        except EndedError:
            following = b"next"
    assert following == b"next"


def read_until_final(client: Client) -> bool:
    """Whether a 100 came first; then the body is sent."""
    client.fill()
    told = client.received.startswith(CONTINUE)
    if told:
        client.until(CONTINUE)
        client.send_ignoring_close(b"body")
    return told


@pytest.mark.line(17)
def test_a_client_that_leaves_while_it_waits(gateway: Gateway, upstream: Upstream) -> None:
    client = gateway.connect()
    client.send(head(4))
    client.until(b"\r\n\r\n")
    client.close()
    gateway.wait_idle()
    wait.until(lambda: upstream.open_connections() == 0)
    assert upstream.requests == []


@pytest.mark.line(17)
@pytest.mark.parametrize("value", [b"100-Continue", b"200-ok", b"100-continue, more"])
def test_other_expectations_are_forwarded_or_refused(
    gateway: Gateway, upstream: Upstream, value: bytes
) -> None:
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/", [(b"Expect", value)], body=b"body"))
        assert client.response("POST").status in (200, 417)


@pytest.mark.line(17, 18)
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_does_not_stall(gateway: Gateway, upstream: Upstream, tmp_path: Path) -> None:
    body = tmp_path / "body"
    body.write_bytes(b"x" * 1_900_000)
    url = f"http://127.0.0.1:{gateway.listen[1]}/v1/chat/completions"
    command = ["curl", "-sS", "-m", "10", "-H", "Expect: 100-continue", "--data-binary"]
    out = subprocess.run(
        [*command, f"@{body}", "-w", "%{http_code} %{time_total}", "-o", "/dev/null", url],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stdout.split()
    assert out[0] == "200"
    assert float(out[1]) < 0.9
    assert upstream.request.body == body.read_bytes()


@pytest.mark.line(14)
def test_continue_of_the_upstream_does_not_end_the_answer(
    gateway: Gateway, upstream: Upstream
) -> None:
    raw = message_bytes(b"HTTP/1.1 200 OK", [(b"Content-Length", b"2")], b"ok")
    upstream.respond(CONTINUE + CONTINUE + raw)
    with gateway.connect() as client:
        client.send(head(4) + b"body")
        answer = client.response("POST")
        assert (answer.status, answer.body) == (200, b"ok")
        assert len(answer.informational) <= 1
