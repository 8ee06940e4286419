"""curl through the gateway: what people type first."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.gateway import Gateway

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")

PROMPT = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 20,
    "temperature": 0,
    "cache_prompt": False,
}


def curl(gateway: Gateway, *arguments: str, path: str = "/v1/chat/completions") -> str:
    url = f"http://127.0.0.1:{gateway.listen[1]}{path}"
    result = subprocess.run(
        ["curl", "-sS", "-m", "20", "-H", "Content-Type: application/json", *arguments, url],
        capture_output=True,
        timeout=30,
        check=True,
    )
    return result.stdout.decode()


def said(body: str) -> str:
    return str(json.loads(body)["choices"][0]["message"]["content"])


def test_a_stream(gateway: Gateway) -> None:
    out = curl(gateway, "-N", "-i", "-d", json.dumps({**PROMPT, "stream": True}))
    head, _, body = out.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert "content-type: text/event-stream" in head.lower()
    assert body.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    words = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert words == said(curl(gateway, "-d", json.dumps(PROMPT)))


@pytest.mark.line(17)
def test_a_large_body_with_expect(gateway: Gateway, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({**PROMPT, "ignored": "x" * 1_500_000}))
    timed = ["-w", "\n%{time_total}", "-H", "Expect: 100-continue", "--data-binary", f"@{body}"]
    answer, _, seconds = curl(gateway, *timed).rpartition("\n")
    assert len(said(answer)) == 20
    assert float(seconds) < 1


@pytest.mark.line(14)
@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0(gateway: Gateway, stream: bool) -> None:
    out = curl(gateway, "--http1.0", "-i", "-d", json.dumps({**PROMPT, "stream": stream}))
    assert "transfer-encoding" not in out.lower()
    assert out.endswith("data: [DONE]\n\n") if stream else len(said(out.split("\r\n\r\n")[1])) == 20


@pytest.mark.line(20)
def test_head_and_options(gateway: Gateway) -> None:
    assert curl(gateway, "-I", path="/health").startswith("HTTP/1.1 ")
    assert curl(gateway, "-i", "-X", "OPTIONS").startswith("HTTP/1.1 ")


@pytest.mark.line(14)
def test_a_chunked_upload(gateway: Gateway) -> None:
    out = curl(gateway, "-H", "Transfer-Encoding: chunked", "-d", json.dumps(PROMPT))
    assert len(said(out)) == 20
