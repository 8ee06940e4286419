"""`ciuicflow demo`: a fake engine and the real gateway as child processes, and what they do.

Each request goes to the engine directly and through the gateway; the answers must be equal.
"""

import asyncio
import io
import json
import signal
import sys
import time
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ciuicflow.testing.processes import ChildFailed, ChildProcess

MODEL = "deepseek-fake"
CHAT = "/v1/chat/completions"
REQUEST_S = 15.0
INTERRUPTED = 130  # 128 + SIGINT, as shells count
CASES = (
    ("plain", {"max_tokens": 24}),
    ("streamed", {"max_tokens": 24, "stream": True, "stream_options": {"include_usage": True}}),
)


class Answer(msgspec.Struct, frozen=True):
    """One HTTP answer and when it came."""

    status: int
    body: bytes
    first_byte_s: float
    whole_s: float


def run_demo(once: bool) -> int:
    """Show both kinds of request, then stay up until SIGINT or SIGTERM unless ``once``.

    Returns 0 if all went well, 1 if anything failed, 130 if interrupted before the end of the
    requests. Both children are gone when it returns.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # answers hold characters a terminal may lack
    try:
        return asyncio.run(_demo(once))
    except ChildFailed as error:
        print(f"ciuicflow demo: the {error}", file=sys.stderr)
        return 1


async def _demo(once: bool) -> int:
    interrupted = _cancel_on_signal()
    code = INTERRUPTED
    try:
        async with _engine() as engine:
            engine_url = f"http://127.0.0.1:{engine.ready['port']}"
            async with _gateway(engine_url) as gateway:
                code = 0 if await _show(engine_url, gateway) else 1
                if not once:
                    _print_commands(gateway)
                    raise await _first_failure(engine, gateway)
    except asyncio.CancelledError:
        if not interrupted.is_set():
            raise
    return code


def _cancel_on_signal() -> asyncio.Event:
    """Let the first SIGINT or SIGTERM cancel this task; later ones find it stopping already."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task(loop)
    assert task is not None

    def on_signal() -> None:
        if not interrupted.is_set():
            interrupted.set()
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return interrupted


def _engine() -> ChildProcess:
    module = "ciuicflow.testing.fake_engine"
    flags = ("--port", "0", "--profile", "fast", "--model", MODEL)
    return ChildProcess("engine", sys.executable, "-m", module, *flags)


def _gateway(upstream: str) -> ChildProcess:
    flags = ("--upstream", upstream, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
    return ChildProcess("gateway", sys.executable, "-m", "ciuicflow", "serve", *flags)


async def _first_failure(*children: ChildProcess) -> ChildFailed:
    waits = [asyncio.create_task(child.failure()) for child in children]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for wait in waits:
            wait.cancel()


# The requests.


async def _show(engine_url: str, gateway: ChildProcess) -> bool:
    """Run the cases and print them; False if an answer was not what it should be."""
    listen, admin = gateway.ready["listen"], gateway.ready["admin"]
    print(f"engine    {engine_url}  (emulated, model {MODEL})")
    print(f"gateway   http://{listen}")
    print(f"admin     http://{admin}")
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            verdicts = [await _show_case(http, engine_url, listen, *case) for case in CASES]
            verdicts.append(await _show_metrics(http, admin))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise gateway.failed(f"or the engine did not answer: {error!r}") from error
    return all(verdicts)


async def _show_case(
    http: aiohttp.ClientSession, engine_url: str, listen: str, name: str, fields: dict[str, Any]
) -> bool:
    question = {"role": "user", "content": "What does a gateway do?"}
    payload = {"model": MODEL, "messages": [question], **fields}
    request_id = f"demo-{name}"  # part of the answer, so both ways must use the same
    direct = await _ask(http, engine_url, payload, request_id)
    through = await _ask(http, f"http://{listen}", payload, request_id)
    is_same = through.status == 200 and through.body == direct.body
    print(f"\n{name} chat request")
    _print_answer(through, is_stream="stream" in fields)
    verdict = "the same bytes" if is_same else f"DIFFERENT: status {direct.status}, {direct.body!r}"
    print(f"  direct   {verdict}, {direct.whole_s * 1000:.1f} ms without the gateway")
    return is_same


async def _ask(
    http: aiohttp.ClientSession, base_url: str, payload: dict[str, Any], request_id: str
) -> Answer:
    started_at = time.perf_counter()
    headers = {"X-Request-Id": request_id}
    async with http.post(base_url + CHAT, json=payload, headers=headers) as response:
        first = await response.content.readany()
        first_byte_at = time.perf_counter()
        body = first + await response.content.read()
        ended_at = time.perf_counter()
        return Answer(response.status, body, first_byte_at - started_at, ended_at - started_at)


def _print_answer(answer: Answer, is_stream: bool) -> None:
    whole = f"{len(answer.body)} bytes in {answer.whole_s * 1000:.1f} ms"
    # The engine sends nothing before its first token, so the first byte is the first token.
    first = f", first token after {answer.first_byte_s * 1000:.1f} ms" if is_stream else ""
    print(f"  status   {answer.status}, {whole}{first}")
    if answer.status != 200:
        print(f"  body     {answer.body.decode(errors='replace')}")
        return
    text, usage = _read_stream(answer.body) if is_stream else _read_plain(answer.body)
    print(f"  tokens   {usage['prompt_tokens']} prompt, {usage['completion_tokens']} answer")
    print(f"  text     {json.dumps(text, ensure_ascii=False)}")


def _read_plain(body: bytes) -> tuple[str, dict[str, int]]:
    answer = json.loads(body)
    return answer["choices"][0]["message"]["content"], answer["usage"]


def _read_stream(body: bytes) -> tuple[str, dict[str, int]]:
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, chunks[-1]["usage"]


async def _show_metrics(http: aiohttp.ClientSession, admin: str) -> bool:
    async with http.get(f"http://{admin}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples]
    rates = [s.value for s in samples if s.name == "ciuicflow_qps"]
    p99s = [s.value for s in samples if s.name == "ciuicflow_latency_p99_seconds"]
    if not rates or not p99s:
        print("\nmetrics   MISSING: ciuicflow_qps or ciuicflow_latency_p99_seconds")
        return False
    print("\ngateway metrics over the last 60 s")
    print(f"  QPS      {sum(rates):.2f}")
    print(f"  P99      {max(p99s) * 1000:.1f} ms")
    return True


def _print_commands(gateway: ChildProcess) -> None:
    listen, admin = gateway.ready["listen"], gateway.ready["admin"]
    payload = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    post = "-H 'Content-Type: application/json' -d"
    print("\ntry it")
    print(f"  curl -s http://{listen}{CHAT} {post} '{json.dumps(payload)}'")
    print(f"  curl -sN http://{listen}{CHAT} {post} '{json.dumps({**payload, 'stream': True})}'")
    print(f"  curl -s http://{admin}/metrics")
    print(f"  curl -s http://{admin}/flow/state")
    print("\nCtrl-C stops it all", flush=True)
