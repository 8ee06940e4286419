"""Sends one plan to one system: every request at its time, whatever became of the others."""

import asyncio
from collections.abc import Sequence

import msgspec

from loadtest.bodies import Style, request_bytes
from loadtest.client import Exchange
from loadtest.records import Outcome, Record, blank
from loadtest.workload import Planned


class Drive:
    """One plan on its way to one system. Make it, wait for ``done``, and call ``finish``."""

    def __init__(self, plan: Sequence[Planned], port: int, style: Style, start_s: float) -> None:
        self.done = asyncio.Event()
        """Every request has ended."""
        self._records: list[Record] = []
        self._plan = plan
        self._port = port
        self._style = style
        self._start_s = start_s
        self._running: dict[int, Exchange] = {}
        self._connects: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._timers = {
            planned.id: self._loop.call_at(start_s + planned.at_s, self._send, planned)
            for planned in plan
        }
        self._note_done()

    @property
    def ended(self) -> int:
        """How many requests have ended."""
        return len(self._records)

    def _send(self, planned: Planned) -> None:
        del self._timers[planned.id]
        due_s = self._start_s + planned.at_s
        exchange = Exchange(planned, due_s, request_bytes(planned, self._style), self._take)
        self._running[planned.id] = exchange
        connect = self._loop.create_task(self._connect(exchange))
        self._connects.add(connect)
        connect.add_done_callback(self._connects.discard)

    async def _connect(self, exchange: Exchange) -> None:
        try:
            await self._loop.create_connection(lambda: exchange, "127.0.0.1", self._port)
        except OSError:
            exchange.end(Outcome.FAILED)

    def _take(self, record: Record) -> None:
        del self._running[record.id]
        self._records.append(record)
        self._note_done()

    def _note_done(self) -> None:
        if self.ended == len(self._plan):
            self.done.set()

    async def finish(self) -> list[Record]:
        """Leave what still runs, and return one record for each planned request, in order."""
        for timer in self._timers.values():
            timer.cancel()
        unsent = [blank(p, Outcome.UNFINISHED) for p in self._plan if p.id in self._timers]
        for exchange in list(self._running.values()):
            exchange.end(Outcome.UNFINISHED)
        if self._connects:
            await asyncio.wait(self._connects, timeout=1)
        return sorted([*self._records, *unsent], key=lambda record: record.id)


async def keep_busy(
    plan: Sequence[Planned], port: int, style: Style, depth: int, seconds: float
) -> list[Record]:
    """Keep ``depth`` requests in a system for some seconds, whatever their planned times."""
    loop = asyncio.get_running_loop()
    start_s, todo = loop.time(), iter(plan)
    records: list[Record] = []

    async def work() -> None:
        for planned in todo:
            ended, now_s = asyncio.Event(), loop.time()
            sent = msgspec.structs.replace(planned, at_s=now_s - start_s)

            def take(record: Record, ended: asyncio.Event = ended) -> None:
                records.append(record)
                ended.set()

            exchange = Exchange(sent, now_s, request_bytes(sent, style), take)
            try:
                await loop.create_connection(lambda e=exchange: e, "127.0.0.1", port)  # type: ignore[misc]  # mypy infers no default
                await ended.wait()
            finally:
                exchange.end(Outcome.UNFINISHED)

    workers = [asyncio.create_task(work()) for _ in range(depth)]
    await asyncio.wait(workers, timeout=seconds)
    for worker in workers:
        worker.cancel()
    await asyncio.wait(workers)
    return records
