"""The fake engine over real sockets: OpenAI's shapes, vLLM's metrics, aborts, the process."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ciuicflow.testing.engine_model import PROFILES
from ciuicflow.testing.engine_text import Speech
from ciuicflow.testing.fake_engine import FakeEngine, change_profile

MODEL = "deepseek-fake"
CHAT = "/v1/chat/completions"
SLOW = change_profile(PROFILES["fast"], ["step_base_s=0.02"])


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(models=(MODEL, "deepseek-reasoner"), seed=7) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield session


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def expected(text: str, tokens: int, seed: int = 7) -> str:
    return "".join(Speech(f"<|user|>{text}", seed).pieces(tokens))


def events(body: bytes) -> list[Any]:
    """The JSON of each event; the end mark as text."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    data = [part.removeprefix("data: ") for part in parts]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


async def post(http: aiohttp.ClientSession, engine: FakeEngine, path: str, body: Any) -> Any:
    async with http.post(engine.url + path, json=body) as response:
        return response.status, await response.json()


async def metrics(http: aiohttp.ClientSession, engine: FakeEngine) -> dict[str, float]:
    async with http.get(engine.url + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples]
    return {
        "/".join([s.name, *(v for k, v in s.labels.items() if k != "model_name")]): s.value
        for s in samples
    }


async def log_entries(http: aiohttp.ClientSession, engine: FakeEngine) -> Any:
    async with http.get(engine.url + "/control/log") as response:
        return (await response.json())["entries"]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true within 5 s")


# -- answers ---------------------------------------------------------------------------------


async def test_a_plain_chat_answer_has_text_usage_and_finish_reason(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    status, answer = await post(http, engine, CHAT, chat(max_tokens=10))
    assert status == 200
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": expected("hello", 10)}
    assert choice["finish_reason"] == "length"
    # "<|user|>hello" has 13 characters.
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 10,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat_stream_is_role_tokens_finish_usage_done(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    body = chat(stream=True, stream_options={"include_usage": True}, max_completion_tokens=5)
    async with http.post(engine.url + CHAT, json=body) as response:
        assert response.content_type == "text/event-stream"
        role, *tokens, finish, usage, done = events(await response.read())
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(tokens) == 5
    text = "".join(token["choices"][0]["delta"]["content"] for token in tokens)
    assert text == expected("hello", 5)
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert done == "[DONE]"


async def test_without_include_usage_a_stream_has_no_usage(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    async with http.post(engine.url + CHAT, json=chat(stream=True)) as response:
        assert b'"usage"' not in await response.read()


async def test_a_reasoner_thinks_before_it_speaks(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    body = {**chat(max_tokens=9, stream=True), "model": "deepseek-reasoner"}
    async with http.post(engine.url + CHAT, json=body) as response:
        deltas = [event["choices"][0]["delta"] for event in events(await response.read())[1:-2]]
    assert [next(iter(delta)) for delta in deltas] == ["reasoning_content"] * 3 + ["content"] * 6

    _, answer = await post(http, engine, CHAT, {**body, "stream": False})
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] + message["content"] == expected("hello", 9)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_an_answer_ends_by_itself_unless_eos_is_ignored(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    _, ended = await post(http, engine, CHAT, chat(max_tokens=500))
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == Speech("<|user|>hello", 7).natural_tokens
    _, forced = await post(http, engine, CHAT, chat(max_tokens=100, ignore_eos=True))
    assert forced["usage"]["completion_tokens"] == 100


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_itself(
    engine: FakeEngine, http: aiohttp.ClientSession, stream: bool
) -> None:
    full = expected("hello", 10)
    stop = full[20:23]
    body = chat(max_tokens=10, stop=[stop], stream=stream)
    async with http.post(engine.url + CHAT, json=body) as response:
        raw = await response.read()
    if stream:
        choices = [event["choices"][0] for event in events(raw)[:-1]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        reason = choices[-1]["finish_reason"]
    else:
        choice = json.loads(raw)["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert text == full[: full.index(stop)]
    assert reason == "stop"


async def test_completions_answer_both_ways(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    body = {"model": MODEL, "prompt": "once", "max_tokens": 6}
    _, answer = await post(http, engine, "/v1/completions", body)
    text = "".join(Speech("once", 7).pieces(6))
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == text
    stream_body = {**body, "stream": True}
    async with http.post(engine.url + "/v1/completions", json=stream_body) as response:
        *chunks, done = events(await response.read())
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert done == "[DONE]"


async def test_a_prompt_of_token_ids_counts_one_token_each(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    body = {"model": MODEL, "prompt": list(range(50)), "max_tokens": 1}
    _, answer = await post(http, engine, "/v1/completions", body)
    assert answer["usage"]["prompt_tokens"] == 50


async def test_the_same_request_with_the_same_id_gets_the_same_bytes(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    bodies = []
    for _ in range(2):
        headers = {"X-Request-Id": "same"}
        body = chat(stream=True)
        async with http.post(engine.url + CHAT, json=body, headers=headers) as response:
            bodies.append(await response.read())
    assert bodies[0] == bodies[1]
    assert b"chatcmpl-same" in bodies[0]


async def test_a_prefix_hit_shows_in_usage(http: aiohttp.ClientSession) -> None:
    profile = change_profile(PROFILES["fast"], ["prefix_cache=true", "block_tokens=16"])
    async with FakeEngine(profile=profile) as engine:
        cached = []
        for question in ("first?", "second?"):
            _, answer = await post(http, engine, CHAT, chat("system " * 40 + question))
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 64]


async def test_the_openai_client_is_content(engine: FakeEngine) -> None:
    async with openai.AsyncOpenAI(base_url=engine.url + "/v1", api_key="none") as client:
        assert (await client.models.list()).data[0].id == MODEL
        plain = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=8
        )
        assert plain.choices[0].message.content == expected("hello", 8)
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == expected("hello", 8)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 8
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "other"}, 404, "`other` does not exist"),
        ({"model": None}, 400, "$.model"),
        ({"messages": []}, 400, "$.messages"),
        ({"max_tokens": 0}, 400, "$.max_tokens"),
        ({"max_tokens": "ten"}, 400, "$.max_tokens"),
        ({"stop": ""}, 400, "$.stop"),
        ({"n": 2}, 400, "n=1"),
        ({"priority": 3}, 400, "priority scheduling"),
        ({"max_tokens": 2_000_000, "ignore_eos": True}, 400, "do not fit"),
    ],
)
async def test_bad_requests_are_refused_in_openai_shape(
    engine: FakeEngine,
    http: aiohttp.ClientSession,
    change: dict[str, Any],
    status: int,
    message: str,
) -> None:
    got, answer = await post(http, engine, CHAT, {**chat(), **change})
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == status
    assert message in answer["error"]["message"]
    assert (await log_entries(http, engine))[-1]["state"] == "rejected"


async def test_bad_json_and_unknown_paths_are_refused_in_openai_shape(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    async with http.post(engine.url + CHAT, data=b"{") as response:
        assert response.status == 400
        assert "truncated" in (await response.json())["error"]["message"]
    async with http.get(engine.url + "/nothing") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == 404


async def test_priority_orders_the_queue_where_it_is_scheduled(
    http: aiohttp.ClientSession,
) -> None:
    profile = change_profile(SLOW, ["scheduling=priority", "max_num_seqs=1"])
    async with FakeEngine(profile=profile) as engine:
        ended: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await post(http, engine, CHAT, chat(name, max_tokens=5, priority=priority))
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(ask("running", 0))
            await until(lambda: engine.model.snapshot().running == 1)
            group.create_task(ask("late", 5))
            await until(lambda: engine.model.snapshot().waiting == 1)
            group.create_task(ask("soon", -5))
    assert ended == ["running", "soon", "late"]


# -- aborts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_sequence_at_once(
    http: aiohttp.ClientSession, stream: bool
) -> None:
    async with FakeEngine(profile=SLOW) as engine:
        body = chat(max_tokens=10_000, ignore_eos=True, stream=stream)
        task = asyncio.create_task(post(http, engine, CHAT, body))
        await until(lambda: engine.model.snapshot().generation_tokens >= 2)
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: engine.aborted == 1)
        snapshot = engine.model.snapshot()
        assert (snapshot.running, snapshot.kv_usage, snapshot.cancelled) == (0, 0.0, 1)
        entry = (await log_entries(http, engine))[0]
        assert entry["state"] == "aborted"
        assert 0 < entry["completion_tokens"] < 10_000
        page = await metrics(http, engine)
        assert page["vllm:request_success_total/abort"] == 1


async def test_a_client_that_leaves_the_queue_is_never_run(http: aiohttp.ClientSession) -> None:
    profile = change_profile(SLOW, ["max_num_seqs=1"])
    async with FakeEngine(profile=profile) as engine:
        body = chat(max_tokens=10_000, ignore_eos=True)
        tasks = [asyncio.create_task(post(http, engine, CHAT, body)) for _ in range(2)]
        await until(lambda: engine.model.snapshot().waiting == 1)
        for task in reversed(tasks):
            task.cancel()
        await asyncio.wait(tasks)
        await until(lambda: engine.aborted == 2)
        assert [entry["state"] for entry in await log_entries(http, engine)] == ["aborted"] * 2
        assert (await log_entries(http, engine))[1]["completion_tokens"] == 0


# -- what operators and tests ask ------------------------------------------------------------


async def test_metrics_carry_vllm_names_and_count(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    await post(http, engine, CHAT, chat(max_tokens=10))
    page = await metrics(http, engine)
    assert page["vllm:num_requests_running"] == 0
    assert page["vllm:num_requests_waiting"] == 0
    assert page["vllm:kv_cache_usage_perc"] == 0
    assert page["vllm:prompt_tokens_total"] == 4
    assert page["vllm:generation_tokens_total"] == 10
    assert page["vllm:request_success_total/length"] == 1
    assert page["vllm:time_to_first_token_seconds_count"] == 1
    assert page["vllm:inter_token_latency_seconds_count"] == 9
    assert page["vllm:e2e_request_latency_seconds_count"] == 1
    assert page["vllm:e2e_request_latency_seconds_bucket/+Inf"] == 1


async def test_models_health_and_version_answer(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    async with http.get(engine.url + "/v1/models") as response:
        names = [model["id"] for model in (await response.json())["data"]]
    assert names == [MODEL, "deepseek-reasoner"]
    async with http.get(engine.url + "/health") as response:
        assert response.status == 200
    async with http.get(engine.url + "/version") as response:
        assert "fake" in (await response.json())["version"]


async def test_speed_can_be_changed_while_it_runs(http: aiohttp.ClientSession) -> None:
    async with FakeEngine(profile=change_profile(SLOW, ["speed=0.001"])) as engine:
        task = asyncio.create_task(post(http, engine, CHAT, chat(max_tokens=10)))
        await until(lambda: engine.model.snapshot().running == 1)  # a token takes 20 s
        status, _ = await post(http, engine, "/control/speed", {"speed": 1.0})
        assert status == 200
        assert (await asyncio.wait_for(task, 10))[0] == 200
        for bad in ({"speed": 0}, {"speed": "x"}, {}):
            status, answer = await post(http, engine, "/control/speed", bad)
            assert (status, answer["error"]["param"]) == (400, "speed")


async def test_the_log_names_what_arrived(engine: FakeEngine, http: aiohttp.ClientSession) -> None:
    headers = {"X-Request-Id": "mine"}
    body = chat(max_tokens=3)
    async with http.post(engine.url + CHAT, json=body, headers=headers) as response:
        await response.read()
    assert await log_entries(http, engine) == [
        {
            "request_id": "mine",
            "path": CHAT,
            "state": "finished",
            "prompt_tokens": 4,
            "completion_tokens": 3,
        }
    ]


async def test_many_streams_at_once_all_say_the_right_thing(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    async def ask(number: int) -> None:
        text = f"question {number}"
        body = chat(text, max_tokens=20, ignore_eos=True, stream=True)
        async with http.post(engine.url + CHAT, json=body) as response:
            choices = [event["choices"][0] for event in events(await response.read())[:-1]]
        said = "".join(choice["delta"].get("content", "") for choice in choices)
        assert said == expected(text, 20)

    async with asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(ask(number))
    assert engine.model.snapshot().finished == 100


# -- the process -----------------------------------------------------------------------------


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ciuicflow.testing.fake_engine", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_the_process_says_its_port_serves_and_stops_on_sigterm(
    http: aiohttp.ClientSession,
) -> None:
    process = await start("--port", "0", "--profile", "slot_bound", "--model", "m", "--seed", "3")
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
        assert line.startswith("ready port=")
        url = f"http://127.0.0.1:{line.strip().removeprefix('ready port=')}"
        body = {**chat(max_tokens=4), "model": "m"}
        async with http.post(url + CHAT, json=body) as response:
            content = (await response.json())["choices"][0]["message"]["content"]
        assert content == expected("hello", 4, seed=3)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--set", "max_num_seqs=0"), 2, "max_num_seqs must be at least 1"),
        (("--set", "slots=3"), 2, "unknown name 'slots'"),
        (("--profile", "warp"), 2, "warp"),
    ],
)
async def test_bad_flags_are_refused(flags: tuple[str, ...], code: int, message: str) -> None:
    process = await start(*flags)
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == code
    assert message in stderr.decode()


async def test_a_taken_port_is_a_clear_error(engine: FakeEngine) -> None:
    process = await start("--port", str(engine.port))
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert "cannot listen" in stderr.decode()


def test_values_of_a_profile_can_be_set_by_name() -> None:
    profile = change_profile(PROFILES["fast"], ["max_num_seqs=8", "scheduling=priority"])
    expected_profile = msgspec.structs.replace(
        PROFILES["fast"], max_num_seqs=8, scheduling="priority"
    )
    assert profile == expected_profile
