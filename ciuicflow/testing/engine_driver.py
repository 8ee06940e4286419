"""Runs an engine model on the event loop's clock: one timer, and a hand-over to who waits."""

import asyncio
import math

from ciuicflow.testing.engine_metrics import EngineMetrics
from ciuicflow.testing.engine_model import EngineModel, EngineRequest, TokenEvent


class Generation:
    """One running request as its HTTP handler sees it."""

    def __init__(self, submitted_at: float) -> None:
        self.tokens = 0
        self.is_finished = False
        self.cached_tokens = 0
        self.submitted_at = submitted_at
        self.last_token_at = submitted_at
        self._changed = asyncio.Event()

    def on_token(self, event: TokenEvent, now: float) -> None:
        """Take one token and wake the handler."""
        self.tokens += 1
        self.is_finished = event.finished
        self.cached_tokens = event.cached_tokens
        self.last_token_at = now
        self._changed.set()

    async def more_than(self, tokens: int) -> int:
        """Wait for more tokens than given, or the end; return how many there are."""
        while self.tokens <= tokens and not self.is_finished:
            self._changed.clear()
            await self._changed.wait()
        return self.tokens

    async def whole(self) -> None:
        """Wait for the end."""
        while not self.is_finished:
            await self.more_than(self.tokens)


class EngineDriver:
    """Joins one model to the running loop."""

    def __init__(self, model: EngineModel, metrics: EngineMetrics) -> None:
        self.model = model
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_at: float | None = None
        self._generations: dict[str, Generation] = {}

    def submit(self, request: EngineRequest) -> Generation:
        """Start a request; ValueError as from the model."""
        now = self._loop.time()
        self.model.submit(request, now)
        generation = self._generations[request.request_id] = Generation(now)
        self._arm()
        return generation

    def cancel(self, request_id: str) -> bool:
        """Forget a request; False if it had ended."""
        self._generations.pop(request_id, None)
        is_cancelled = self.model.cancel(request_id)
        self._arm()
        return is_cancelled

    def set_speed(self, speed: float) -> None:
        """Change the speed factor from now on; ValueError unless more than 0."""
        self.model.set_speed(speed, self._loop.time())
        self._arm()

    def close(self) -> None:
        """Stop the timer."""
        self._armed_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        step_at = self.model.next_step_at()
        if step_at == self._armed_at:
            return
        self.close()
        if step_at is not None:
            # Up to the next millisecond, the loops' resolution: uvloop would round to the nearest
            # and spin until the step is due. The model makes up for the delay.
            delay_ms = math.ceil((step_at - self._loop.time()) * 1000)
            self._timer = self._loop.call_later(max(0, delay_ms) / 1000, self._turn)
            self._armed_at = step_at

    def _turn(self) -> None:
        self._timer = self._armed_at = None
        now = self._loop.time()
        for event in self.model.step(now):
            self._deliver(event, now)
        self._arm()

    def _deliver(self, event: TokenEvent, now: float) -> None:
        generation = self._generations[event.request_id]
        if event.position == 0:
            self._metrics.time_to_first_token.add(now - generation.submitted_at)
        else:
            self._metrics.inter_token_latency.add(now - generation.last_token_at)
        generation.on_token(event, now)
        if event.finished:
            self._metrics.e2e_latency.add(now - generation.submitted_at)
            del self._generations[event.request_id]
