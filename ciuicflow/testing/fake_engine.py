"""An OpenAI-compatible HTTP server around an engine model, for the demo, tests and load tests.

As a process: ``python -m ciuicflow.testing.fake_engine --port 0 --profile fast`` prints
``ready port=PORT``. In a test: ``async with FakeEngine(profile=PROFILES["fast"]) as engine``.
"""

import argparse
import asyncio
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import msgspec
import uvloop
from aiohttp import web

import ciuicflow
from ciuicflow.testing import engine_api
from ciuicflow.testing.engine_api import ApiError, ChatWire, CompletionWire, Job, Wire
from ciuicflow.testing.engine_driver import EngineDriver, Generation
from ciuicflow.testing.engine_metrics import EngineMetrics
from ciuicflow.testing.engine_model import PROFILES, EngineModel, EngineProfile, EngineRequest
from ciuicflow.testing.engine_text import hash_blocks
from ciuicflow.testing.kv_blocks import BlockHash

LOG_ENTRIES = 10_000
BODY_BYTES = 128 * 1024 * 1024
STOP_S = 0.2
"""How long streams may run on at the end; a test engine is in no hurry to be polite."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LogEntry(msgspec.Struct):
    """One generation request that arrived."""

    request_id: str
    path: str
    state: str = "rejected"
    """rejected, running, finished or aborted."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class FakeEngine:
    """One engine server on 127.0.0.1. Use as an asynchronous context manager."""

    def __init__(
        self,
        *,
        profile: EngineProfile = PROFILES["fast"],
        models: tuple[str, ...] = ("deepseek-fake",),
        seed: int = 0,
        port: int = 0,
        reasoning: bool = False,
    ) -> None:
        self.models = models
        self.port = port
        self.log: deque[LogEntry] = deque(maxlen=LOG_ENTRIES)
        self.received = 0
        self.aborted = 0
        self._seed = seed
        self._reasoning = reasoning
        self._profile = profile
        # One time for all answers, so that equal requests with equal ids get equal bytes.
        self._created = int(time.time())
        self._model = EngineModel(profile, seed)
        self._metrics = EngineMetrics(models[0], self._model.snapshot)

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> EngineModel:
        """The engine itself, for snapshots."""
        return self._model

    async def __aenter__(self) -> Self:
        self._driver = EngineDriver(self._model, self._metrics)
        # Without handler_cancellation aiohttp lets the handler of a vanished client run on.
        self._runner = web.AppRunner(
            self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=STOP_S
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        self._driver.close()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[_openai_errors])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._list_models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._expose_metrics),
                web.get("/control/log", self._show_log),
                web.post("/control/speed", self._set_speed),
            ]
        )
        return app

    # The request path: read, submit, answer.

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        entry = self._note(request)
        job = engine_api.parse_chat(await request.read(), self._seed, self._reasoning)
        return await self._serve(request, entry, ChatWire(job, entry.request_id, self._created))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        entry = self._note(request)
        job = engine_api.parse_completion(await request.read(), self._seed)
        wire = CompletionWire(job, entry.request_id, self._created)
        return await self._serve(request, entry, wire)

    def _note(self, request: web.Request) -> LogEntry:
        self.received += 1
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        entry = LogEntry(request_id, request.path)
        self.log.append(entry)
        return entry

    async def _serve(self, request: web.Request, entry: LogEntry, wire: Wire) -> web.StreamResponse:
        engine_id = f"{entry.request_id}-{self.received}"  # clients may repeat their ids
        generation = self._submit(engine_id, wire.job)
        entry.state, entry.prompt_tokens = "running", wire.job.prompt_tokens
        answer = _stream if wire.job.is_stream else _whole
        try:
            return await answer(request, generation, wire)
        finally:
            entry.completion_tokens = generation.tokens
            entry.state = "finished" if generation.is_finished else "aborted"
            self._count_end(engine_id, wire.job, generation)

    def _submit(self, engine_id: str, job: Job) -> Generation:
        if job.model not in self.models:
            message = f"The model `{job.model}` does not exist."
            raise ApiError(404, "NotFoundError", message, "model")
        if job.priority and self._profile.scheduling != "priority":
            message = "priority needs an engine with priority scheduling"
            raise ApiError(400, "BadRequestError", message, "priority")
        hashes: tuple[BlockHash, ...] = ()
        if self._profile.prefix_cache:
            hashes = hash_blocks(job.prompt, self._profile.block_tokens)
        request = EngineRequest(
            request_id=engine_id,
            prompt_tokens=job.prompt_tokens,
            output_tokens=len(job.pieces),
            priority=job.priority,
            block_hashes=hashes,
        )
        try:
            return self._driver.submit(request)
        except ValueError as error:
            raise ApiError(400, "BadRequestError", f"{error}") from None

    def _count_end(self, engine_id: str, job: Job, generation: Generation) -> None:
        if generation.is_finished:
            self._metrics.finished[job.finish_reason] += 1
        else:
            self._driver.cancel(engine_id)
            self._metrics.finished["abort"] += 1
            self.aborted += 1

    # What operators and tests ask.

    async def _list_models(self, _: web.Request) -> web.Response:
        models = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "ciuicflow",
                "max_model_len": self._profile.kv_capacity_tokens,
            }
            for name in self.models
        ]
        return _json({"object": "list", "data": models})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": f"{ciuicflow.__version__}+fake"})

    async def _expose_metrics(self, _: web.Request) -> web.Response:
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._metrics.expose(), headers={"Content-Type": content_type})

    async def _show_log(self, _: web.Request) -> web.Response:
        """The last requests, oldest first, and how many there were in all."""
        entries = list(self.log)
        return _json({"received": self.received, "aborted": self.aborted, "entries": entries})

    async def _set_speed(self, request: web.Request) -> web.Response:
        try:
            speed = msgspec.json.decode(await request.read(), type=dict[str, float])["speed"]
            self._driver.set_speed(speed)
        except (KeyError, ValueError) as error:
            message = f'expected {{"speed": NUMBER above 0}}: {error}'
            raise ApiError(400, "BadRequestError", message, "speed") from None
        return _json({"speed": speed})


async def _whole(request: web.Request, generation: Generation, wire: Wire) -> web.Response:
    await generation.whole()
    body = wire.whole(generation.cached_tokens)
    return web.Response(body=body, content_type="application/json")


async def _stream(request: web.Request, generation: Generation, wire: Wire) -> web.StreamResponse:
    """Headers at once, then one event per token; tokens that came together are sent together."""
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    sent = 0
    pending = wire.opening()
    while not (generation.is_finished and sent == generation.tokens):
        ready = await generation.more_than(sent)
        await response.write(pending + b"".join(map(wire.token, range(sent, ready))))
        pending, sent = b"", ready
    await response.write(wire.closing(generation.cached_tokens))
    await response.write_eof()
    return response


def _json(value: Mapping[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in OpenAI's shape, also aiohttp's own (404, 405, 413)."""
    try:
        return await handler(request)
    except ApiError as error:
        body, status = error.body, error.status
    except web.HTTPException as error:
        status = error.status
        body = ApiError(
            status, "HTTPError", f"{request.method} {request.path}: {error.reason}"
        ).body
    return web.Response(body=body, status=status, content_type="application/json")


# The process.


def main(argv: list[str] | None = None) -> int:
    """Run one engine until SIGTERM or SIGINT; the exit code is 1 if the port is taken."""
    arguments = _parse(argv)
    try:
        uvloop.run(_run(arguments))
    except OSError as error:
        print(f"fake engine: cannot listen: {error}", file=sys.stderr)  # noqa: T201 - the command's answer
        return 1
    return 0


async def _run(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = FakeEngine(
        profile=arguments.profile,
        models=tuple(arguments.model),
        seed=arguments.seed,
        port=arguments.port,
        reasoning=arguments.reasoning,
    )
    async with engine:
        print(f"ready port={engine.port}", flush=True)  # noqa: T201 - read by whoever started us
        await stop.wait()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ciuicflow.testing.fake_engine")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--profile", choices=PROFILES, default="fast")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="change one value of the profile, such as max_num_seqs=8; repeatable",
    )  # fmt: skip
    parser.add_argument("--model", action="append", help="served model name; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="changes all texts")
    parser.add_argument("--reasoning", action="store_true", help="all models reason first")
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model or ["deepseek-fake"]
    try:
        arguments.profile = change_profile(PROFILES[arguments.profile], arguments.set)
    except ValueError as error:
        parser.error(f"--set: {error}")
    return arguments


def change_profile(profile: EngineProfile, changes: list[str]) -> EngineProfile:
    """Apply ``NAME=VALUE`` texts to a profile; ValueError names what is wrong."""
    values = msgspec.structs.asdict(profile)
    for change in changes:
        name, _, value = change.partition("=")
        if name not in values:
            raise ValueError(f"unknown name {name!r}, expected one of {', '.join(values)}")
        values[name] = value
    return msgspec.convert(values, EngineProfile, strict=False)


if __name__ == "__main__":
    sys.exit(main())
