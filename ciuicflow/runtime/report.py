"""Asks engines how many requests wait in them, as long as flow control has use for it.

Reports only correct the gateway's own ledger: an engine that hangs, fails or has no such page
costs nothing but the correction.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import aiohttp
import msgspec

from ciuicflow.endpoint import EndpointId
from ciuicflow.engines.base import UNKNOWN, EngineReport
from ciuicflow.engines.table import ADAPTERS, detect
from ciuicflow.runtime.fetch import get, read_whole

log = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
TIMEOUT_S: Final = 1.0
_AUTO_PATH: Final = "/metrics"  # of every engine that has a page


class ReportTarget(msgspec.Struct, frozen=True):
    """Whom to ask."""

    id: EndpointId
    base_url: str
    engine: str
    """Name of an adapter, or `auto`."""
    headers: Mapping[str, str]
    tls: ssl.SSLContext | bool


class Reporter:
    """Asks all targets in rounds."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        targets: Callable[[], Iterable[ReportTarget]],
        wanted: Callable[[], bool],
        on_report: Callable[[EndpointId, EngineReport], None],
    ) -> None:
        self._session = session
        self._targets = targets
        self._wanted = wanted
        self._on_report = on_report

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self._wanted():
                await asyncio.gather(*(self._ask(target) for target in self._targets()))

    async def _ask(self, target: ReportTarget) -> None:
        try:
            report = await self._report(target)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            report = UNKNOWN
        except Exception:
            log.exception("a report failed", extra={"endpoint": target.id})
            return
        self._on_report(target.id, report)

    async def _report(self, target: ReportTarget) -> EngineReport:
        known = ADAPTERS.get(target.engine)
        path = _AUTO_PATH if known is None else known.metrics_path
        if path is None:
            return UNKNOWN
        async with get(
            self._session,
            target.base_url + path,
            headers=target.headers,
            tls=target.tls,
            timeout_s=TIMEOUT_S,
        ) as response:
            if response.status != 200:
                return UNKNOWN
            page = await read_whole(response)
        return (known or detect(page)).parse(page)
