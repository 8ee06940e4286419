"""Load whose every request can be accounted for: by the client, by the upstream, by the metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from support import engine
from support.raw import Address


class EngineProcess:
    """The upstream of engine.py; `restart` kills it without warning."""

    def __init__(self, directory: Path) -> None:
        self.ledger = directory / "ledger"
        self.ledger.touch()
        self.port = 0
        self.outages: list[tuple[float, float]] = []
        self._one_restart = threading.Lock()
        self._start()

    def _start(self) -> None:
        command = [sys.executable, engine.__file__, str(self.port), str(self.ledger)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def restart(self) -> None:
        """Kill it, wait a moment, start it on the same port."""
        with self._one_restart:
            killed_at = time.monotonic()
            self.stop()
            time.sleep(0.1)
            self._start()
            self.outages.append((killed_at, time.monotonic()))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@dataclass
class Attempt:
    """One request as the client planned and saw it."""

    id: bytes
    shape: str
    body: bytes
    in_chunks: bool
    abort_at: str | None
    abort_fraction: float
    pause_s: float = 0.003
    fields: bytes = b""
    """Further header lines; one that opts in may be refused without having been sent on."""
    outcome: str = "unfinished"
    begun: bool = False
    answer: bytes = b""
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def expected(self) -> bytes:
        if self.shape == "stream":
            return b"".join(engine.stream_parts(self.id, self.body))
        return engine.plain_body(self.id, self.body)

    def raw(self) -> bytes:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
        head += b"X-Id: %s\r\nX-Shape: %s\r\n" % (self.id, self.shape.encode())
        head += b"X-Pause: %f\r\n" % self.pause_s + self.fields
        if not self.in_chunks:
            return head + b"Content-Length: %d\r\n\r\n" % len(self.body) + self.body
        parts = [self.body[at : at + 5000] for at in range(0, len(self.body), 5000)]
        coded = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"


def plan(count: int, abort_share: float, rng: random.Random) -> list[Attempt]:
    """Streamed, plain and upload requests, a share of them to be aborted at a random moment."""
    attempts = []
    for number in range(count):
        kind = rng.choices(["stream", "plain", "upload"], [5, 3, 2])[0]
        size = rng.randrange(20_000, 300_000) if kind == "upload" else rng.randrange(2000)
        aborted = rng.random() < abort_share
        attempts.append(
            Attempt(
                id=b"id-%06d" % number,
                shape="plain" if kind == "plain" else "stream",
                body=rng.randbytes(size),
                in_chunks=rng.random() < 0.5,
                abort_at=rng.choice(["sending", "waiting", "receiving"]) if aborted else None,
                abort_fraction=rng.random(),
            )
        )
    return attempts


def streams(count: int, abort_share: float, pause_s: float, rng: random.Random) -> list[Attempt]:
    """Small streamed requests with a pause after each of their nine events."""
    attempts = []
    for number in range(count):
        abort_at = "receiving" if rng.random() < abort_share else None
        attempt = Attempt(
            b"st-%06d" % number, "stream", b"{}", False, abort_at, rng.random(), pause_s
        )
        attempts.append(attempt)
    return attempts


class Aborted(Exception):
    """The client left, as planned."""


@dataclass
class Load:
    """Runs attempts over keep-alive connections, a number of them at a time."""

    address: Address
    attempts: list[Attempt]
    rng: random.Random
    concurrency: int = 32
    at: dict[int, Callable[[], None]] = field(default_factory=dict)
    done: int = 0

    async def run(self) -> None:
        """Run all; the actions of `at` are run, in a thread, after so many attempts."""
        queue = list(reversed(self.attempts))
        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(self._worker(queue))

    async def _worker(self, queue: list[Attempt]) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while queue:
            attempt = queue.pop()
            attempt.started_s = time.monotonic()
            if connection is None:
                connection = await asyncio.open_connection(*self.address)
            keep = await self._attempt(attempt, *connection)
            attempt.ended_s = time.monotonic()
            if not keep:
                connection[1].close()
                connection = None
            if attempt.outcome not in ("status 200", "aborted"):
                await asyncio.sleep(0.25)  # a refusal is quick: do not spend all on one outage
            self.done += 1
            if action := self.at.pop(self.done, None):
                await asyncio.to_thread(action)
        if connection is not None:
            connection[1].close()

    async def _attempt(
        self, attempt: Attempt, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """True: the connection may be used again."""
        try:
            async with asyncio.timeout(30):
                await self._send(attempt, writer)
                return await self._receive(attempt, reader)
        except Aborted:
            attempt.outcome = "aborted"
            if self.rng.random() < 0.5:
                _reset(writer)  # else the caller's close sends a FIN
        except TimeoutError:
            attempt.outcome = "hung"
        except (asyncio.IncompleteReadError, OSError):
            attempt.outcome = "broken" if attempt.begun else "closed"
        return False

    async def _send(self, attempt: Attempt, writer: asyncio.StreamWriter) -> None:
        raw = attempt.raw()
        if attempt.abort_at == "sending":
            writer.write(raw[: int(len(raw) * attempt.abort_fraction)])
            await writer.drain()
            raise Aborted
        writer.write(raw)
        await writer.drain()
        if attempt.abort_at == "waiting":
            await asyncio.sleep(0.01 * attempt.abort_fraction)
            raise Aborted

    async def _receive(self, attempt: Attempt, reader: asyncio.StreamReader) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        attempt.begun = True
        status = int(head[9:12])
        leave_after = None
        if attempt.abort_at == "receiving":
            leave_after = int(len(attempt.expected) * attempt.abort_fraction)
        lower = head.lower()
        if b"\r\ntransfer-encoding: chunked\r\n" in lower:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                attempt.answer += (await reader.readexactly(size + 2))[:-2]
                if leave_after is not None and len(attempt.answer) >= leave_after:
                    raise Aborted
            await reader.readexactly(2)
        else:
            length = int(lower.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
            if leave_after is not None:
                await reader.readexactly(min(leave_after, length))
                raise Aborted
            attempt.answer = await reader.readexactly(length)
        if status != 200:
            json.loads(attempt.answer)["error"]["message"]
        attempt.outcome = f"status {status}"
        return b"\r\nconnection: close\r\n" not in lower


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # the gateway closed it in the meantime
    writer.transport.abort()


def audit(attempts: list[Attempt], process: EngineProcess) -> Counter[str]:
    """Account for every attempt; return how many ended how. Raises AssertionError."""
    received: dict[bytes, list[bytes]] = {}
    answered: Counter[bytes] = Counter()
    for line in process.ledger.read_bytes().splitlines():
        mark, request_id, *rest = line.split(b" ")
        if mark == b"R":
            received.setdefault(request_id, []).append(rest[0])
        elif mark == b"A":
            answered[request_id] += 1
    known = {attempt.id: attempt for attempt in attempts}
    assert received.keys() <= known.keys(), "a request that nobody sent"
    for attempt in attempts:
        times = received.get(attempt.id, [])
        wanted = hashlib.sha256(attempt.body).hexdigest().encode()
        assert set(times) <= {wanted}, f"{attempt.id!r}: an altered body reached the upstream"
        # Sent twice only if the first try died without one byte of an answer.
        assert len(times) <= 2, f"{attempt.id!r}: sent {len(times)} times"
        assert answered[attempt.id] <= 1, f"{attempt.id!r}: answered twice"
        if len(times) == 2:
            assert _in_outage(attempt, process), f"{attempt.id!r}: sent twice without a reason"
        if attempt.outcome == "status 200":
            assert attempt.answer == attempt.expected, f"{attempt.id!r}: an altered answer"
            assert times, f"{attempt.id!r}: answered by nobody"
        elif attempt.fields and attempt.outcome in ("status 429", "status 503", "status 504"):
            assert not times, f"{attempt.id!r}: refused and sent on"
        elif attempt.outcome != "aborted":
            assert _in_outage(attempt, process), f"{attempt.id!r}: {attempt.outcome}"
            assert attempt.outcome in ("status 502", "status 503", "broken"), attempt.outcome
            assert attempt.expected.startswith(attempt.answer) or "status" in attempt.outcome
    return Counter(attempt.outcome for attempt in attempts)


def _in_outage(attempt: Attempt, process: EngineProcess) -> bool:
    """Whether the attempt met a restart, or the time until health probes saw its end."""
    healed_s = 3.0
    return any(
        attempt.started_s <= back_at + healed_s and attempt.ended_s >= killed_at
        for killed_at, back_at in process.outages
    )
