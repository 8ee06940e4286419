"""Asks endpoints whether they are well and which models they serve, and writes the ledger."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import aiohttp
import msgspec

from ciuicflow.endpoint import EndpointState
from ciuicflow.routing.health import HealthPolicy, record_failure, record_probe_success
from ciuicflow.runtime.fetch import get, read_whole

log = logging.getLogger(__name__)

# Models change when an engine restarts, which its health shows, or by hot loading: rarely.
MODELS_EVERY_ROUNDS: Final = 10


class ProbeTarget(msgspec.Struct, frozen=True):
    """What to ask, and where the answer goes."""

    state: EndpointState
    base_url: str
    headers: Mapping[str, str]
    tls: ssl.SSLContext | bool
    reads_models: bool  # they are not configured, and there is a choice to be made


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class Prober:
    """Probes all targets in rounds, at the policy's interval."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        targets: Callable[[], Iterable[ProbeTarget]],
        policy: HealthPolicy,
        on_failure: Callable[[EndpointState], None],
        on_round: Callable[[], None],
    ) -> None:
        """Take whom to probe and whom to tell: of each failure, and of the end of each round."""
        self.policy = policy
        self._session = session
        self._targets = targets
        self._on_failure = on_failure
        self._on_round = on_round
        self._round = 0

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await asyncio.sleep(self.policy.interval_s)
            try:
                await self.probe_all()
            except Exception:
                log.exception("a round of probes failed")

    async def probe_all(self) -> None:
        """Probe every target once, all at the same time; takes at most twice the timeout."""
        due = self._round % MODELS_EVERY_ROUNDS == 0
        self._round += 1
        await asyncio.gather(*(self._probe(target, models_due=due) for target in self._targets()))
        self._on_round()

    async def _probe(self, target: ProbeTarget, *, models_due: bool) -> None:
        state = target.state
        well, reason = await self._is_well(target)
        if not well:
            self._on_failure(state)
            if record_failure(state, self.policy):
                log.warning("endpoint is down", extra={"endpoint": state.id, "reason": reason})
            return
        came_up = record_probe_success(state, self.policy)
        if came_up:
            log.info("endpoint is up again", extra={"endpoint": state.id})
        if target.reads_models and (models_due or came_up or state.models is None):
            await self.read_models(target)

    async def _is_well(self, target: ProbeTarget) -> tuple[bool, str]:
        """Any answer below 500 will do: not every server has a health path."""
        try:
            async with self._get(target, self.policy.path) as response:
                return response.status < 500, f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return False, str(error) or type(error).__name__

    async def read_models(self, target: ProbeTarget) -> None:
        """Replace what is known of the endpoint's models, if it says."""
        try:
            async with self._get(target, "/v1/models") as response:
                body = await read_whole(response)
                if response.status == 200:
                    models = msgspec.json.decode(body, type=_ModelList).data
                    target.state.models = frozenset(model.id for model in models)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            log.info(
                "endpoint does not list its models: it may get requests for any",
                extra={"endpoint": target.state.id, "reason": str(error)},
            )

    def _get(self, target: ProbeTarget, path: str) -> "aiohttp.client._RequestContextManager":
        return get(
            self._session,
            target.base_url + path,
            headers=target.headers,
            tls=target.tls,
            timeout_s=self.policy.timeout_s,
        )
