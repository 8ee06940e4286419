"""Looks at the compared systems while they work, and changes their engines' speed."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import msgspec

from ciuicflow.bench import procfs
from ciuicflow.testing.processes import ChildFailed
from loadtest import samples
from loadtest.samples import EngineSample, LimitSample, Sample
from loadtest.systems import Engine, Running, style_of

_WARM_S: Final = 15.0
_PAUSE_S: Final = 0.3
_TRIES: Final = 5


class Watcher:
    """Asks the engines and gateways of one run."""

    def __init__(self, http: aiohttp.ClientSession, targets: Sequence[Running]) -> None:
        self.samples: dict[str, list[Sample]] = {target.system.name: [] for target in targets}
        self._http = http
        self._targets = targets
        self._loop = asyncio.get_running_loop()

    async def warm(self, engine: Engine) -> None:
        """See that each system answers; first requests may come before it knows its engine.

        Raises ChildFailed where one does not.
        """
        for target in self._targets:
            body = {
                "model": style_of(target.system, engine).model,
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 4,
            }
            await self._wait_for_answer(target, body)

    async def _wait_for_answer(self, target: Running, body: dict[str, object]) -> None:
        url = f"http://127.0.0.1:{target.port}/v1/chat/completions"
        status, text = 0, ""
        try:
            async with asyncio.timeout(_WARM_S):
                while True:
                    async with self._http.post(url, json=body) as answer:
                        status, text = answer.status, await answer.text()
                    if status == 200:
                        return
                    await asyncio.sleep(_PAUSE_S)
        except (aiohttp.ClientError, TimeoutError) as error:
            name = target.system.name
            raise ChildFailed(f"{name} gave no answer: {error!r}, {status} {text[:300]}") from None

    async def spent_tokens(self) -> dict[str, float]:
        """Return the tokens that each engine has computed so far."""
        return {target.system.name: await self._spent(target) for target in self._targets}

    async def _spent(self, target: Running) -> float:
        """Ask a few times: an engine that many clients have just left may be slow to answer."""
        for _ in range(_TRIES):
            try:
                return (await self._ask_engine(target)).spent_tokens
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(_PAUSE_S)
        return (await self._ask_engine(target)).spent_tokens

    def cpu_s(self) -> dict[str, dict[str, float]]:
        """Return the CPU time so far of each system's processes."""
        return {
            target.system.name: {name: _with_children(pid) for name, pid in target.pids.items()}
            for target in self._targets
        }

    @asynccontextmanager
    async def watching(
        self, start_s: float, interval_s: float, speeds: Sequence[tuple[float, float]]
    ) -> AsyncIterator[None]:
        """Sample meanwhile, and change the engines' speed; times count from ``start_s``."""
        tasks = [
            asyncio.create_task(self._sample(start_s, interval_s)),
            asyncio.create_task(self._change_speeds(start_s, speeds)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _change_speeds(self, start_s: float, speeds: Sequence[tuple[float, float]]) -> None:
        for at_s, speed in speeds:
            await asyncio.sleep(max(0.0, start_s + at_s - self._loop.time()))
            for target in self._targets:
                url = f"http://127.0.0.1:{target.engine_port}/control/speed"
                async with self._http.post(url, json={"speed": speed}) as answer:
                    answer.raise_for_status()

    async def _sample(self, start_s: float, interval_s: float) -> None:
        next_s = start_s
        while True:
            await asyncio.sleep(max(0.0, next_s - self._loop.time()))
            for target in self._targets:
                at_s = self._loop.time() - start_s
                try:
                    engine, limit = await self._ask_engine(target), await self._ask_limit(target)
                except (aiohttp.ClientError, TimeoutError):
                    continue  # too busy to tell; the next sample comes
                self.samples[target.system.name].append(Sample(at_s, engine, limit))
            next_s = max(next_s + interval_s, self._loop.time())

    async def _ask_engine(self, target: Running) -> EngineSample:
        async with self._http.get(f"http://127.0.0.1:{target.engine_port}/metrics") as answer:
            return samples.read_engine(await answer.text())

    async def _ask_limit(self, target: Running) -> LimitSample | None:
        if target.admin_port is None:
            return None
        async with self._http.get(f"http://127.0.0.1:{target.admin_port}/flow/state") as answer:
            return samples.read_limit(msgspec.json.decode(await answer.read()))


def _with_children(pid: int) -> float:
    """Return the CPU time of a process and its children: nginx works in one."""
    return sum(procfs.usage(each).cpu_s for each in (pid, *procfs.children(pid)))
