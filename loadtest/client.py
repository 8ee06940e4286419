"""One request on one connection: sends it, times what comes back, leaves when its time has come.

A connection for each request: none is reused just when its server closes it, so that no failure
needs a second try.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import cast

import httptools
import msgspec

from loadtest.events import EventReader
from loadtest.records import Outcome, Record, blank, outcome_of
from loadtest.workload import Planned


class Exchange(asyncio.Protocol):
    """Calls ``on_end`` with the record, once."""

    def __init__(
        self, planned: Planned, due_s: float, request: bytes, on_end: Callable[[Record], None]
    ) -> None:
        self._planned = planned
        self._due_s = due_s
        self._request = request
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._late_s = self._loop.time() - due_s
        self._parser = httptools.HttpResponseParser(self)
        self._events = EventReader()
        self._transport: asyncio.Transport | None = None
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._tokens = 0
        self._ttft_s: float | None = None
        self._last_s: float | None = None
        self._is_over = False
        self._leave: asyncio.TimerHandle | None = None
        if planned.leaves_after_s is not None:
            leaves_s = due_s + planned.leaves_after_s
            self._leave = self._loop.call_at(leaves_s, self.end, Outcome.LEFT)

    # From the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        if self._is_over:
            self._transport.abort()
        else:
            self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._is_over:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.end(Outcome.FAILED)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        if not self._is_over:
            with contextlib.suppress(httptools.HttpParserError):
                self._parser.feed_data(b"")  # an answer may end with its connection
        self.end(Outcome.FAILED)

    # From the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if self._status != 200:
            return
        tokens = self._events.feed(body)
        if tokens:
            now_s = self._loop.time() - self._due_s
            self._tokens += tokens
            self._last_s = now_s
            if self._ttft_s is None:
                self._ttft_s = now_s

    def on_message_complete(self) -> None:
        """See httptools."""
        is_whole = self._events.is_done and not self._events.is_broken
        self.end(outcome_of(self._status, is_whole=is_whole))

    # The end.

    def end(self, outcome: Outcome) -> None:
        """Close the connection and hand over the record, unless that was done before."""
        if self._is_over:
            return
        self._is_over = True
        if self._leave is not None:
            self._leave.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._on_end(self._record(outcome))

    def _record(self, outcome: Outcome) -> Record:
        usage = self._events.usage
        queued = self._headers.get(b"x-ciuic-queue-ms")
        return msgspec.structs.replace(
            blank(self._planned, outcome, self._late_s),
            status=self._status,
            ttft_s=self._ttft_s,
            last_s=self._last_s,
            end_s=self._loop.time() - self._due_s if outcome is Outcome.COMPLETED else None,
            prompt_tokens=usage.prompt_tokens if usage else self._planned.prompt_tokens,
            tokens=usage.completion_tokens if usage else self._tokens,
            has_retry_after=b"retry-after" in self._headers,
            queue_ms=float(queued) if queued else None,
        )
