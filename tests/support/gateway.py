"""The real `ciuicflow serve` process: start it, watch it from outside, stop it."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from support import raw, wait
from support.raw import Address
from support.upstream import Upstream
from support.wire import Message

# Another proxy behind the same command line can be tried: so the tests were seen to fail.
EXECUTABLE = os.environ.get("GATEWAY_UNDER_TEST", str(Path(sys.executable).parent / "ciuicflow"))
# Every request of the suite can be enrolled in a tier: nothing may change for its callers.
BYPASS_TIER = os.environ.get("BYPASS_TIER")
LOOPS = ("uvloop", "asyncio")
READY = re.compile(r"ready listen=(\S+):(\d+) admin=(\S+):(\d+)\n")
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Config = dict[str, Any]
Start = Callable[..., "Gateway"]
"""A fixture: start a gateway with this config and these options; stopped at the test's end."""


def config(*upstreams: Upstream | str | Config, **sections: Any) -> Config:
    """A config of these upstreams that ends fast; sections are laid over the test defaults."""
    base: Config = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "upstreams": [_upstream(entry) for entry in upstreams],
        "timeouts": {"drain_s": 2, "settle_s": 0},
        # Scripts break connections on purpose; only tests of health want that counted.
        "health": {"interval_s": 0.5, "fail_threshold": 1000},
    }
    if BYPASS_TIER:
        base["flow"] = {"bypass_tier": BYPASS_TIER}
    for name, value in sections.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return base


def _upstream(entry: Upstream | str | Config) -> Config:
    if isinstance(entry, Upstream):
        return {"url": entry.url}
    return {"url": entry} if isinstance(entry, str) else entry


class Gateway:
    """One gateway process. Use as a context manager: leaving it stops the process."""

    def __init__(
        self,
        settings: Config,
        directory: Path,
        *,
        loop: str = "uvloop",
        flags: tuple[str, ...] = (),
        stderr_fd: int | None = None,
    ) -> None:
        self.config_file = directory / "gateway.yaml"
        self.write_config(settings)
        command = [EXECUTABLE, "serve", "--config", str(self.config_file), "--loop", loop, *flags]
        self._stderr_file = directory / "stderr.log"
        with self._stderr_file.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr if stderr_fd is None else stderr_fd,
            )
        self.listen, self.admin = self._ready()

    def _ready(self) -> tuple[Address, Address]:
        line = self._ready_line(within_s=20)
        match = READY.fullmatch(line)
        if match is None:
            self.kill()
            raise AssertionError(f"no ready line but {line!r}\n{self.log()}")
        host, port, admin_host, admin_port = match.groups()
        return (host, int(port)), (admin_host, int(admin_port))

    def _ready_line(self, within_s: float) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            return self.process.stdout.readline().decode() if selector.select(within_s) else ""

    # -- traffic -------------------------------------------------------------------------

    def connect(self, **options: Any) -> raw.Client:
        return raw.Client(self.listen, **options)

    def fetch(
        self,
        method: str = "GET",
        target: str = "/",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        body: bytes | None = None,
    ) -> Message:
        return raw.fetch(self.listen, method, target, headers, body)

    # -- what an operator sees -----------------------------------------------------------

    def admin_get(self, path: str) -> Message:
        return raw.fetch(self.admin, "GET", path, [(b"Connection", b"close")])

    def metrics(self) -> Metrics:
        return Metrics(self.admin_get("/metrics").body.decode())

    def state(self) -> Any:
        return json.loads(self.admin_get("/flow/state").body)

    def in_flight(self) -> float:
        return self.metrics().total("ciuicflow_in_flight")

    def wait_idle(self, within_s: float = 5.0) -> None:
        wait.until(lambda: self.in_flight() == 0, within_s, "no request in flight")

    def log(self) -> str:
        return self._stderr_file.read_text(errors="replace")

    def log_records(self) -> list[dict[str, Any]]:
        """The log lines that are JSON objects; one that is being written is not there yet."""
        whole = self.log().rpartition("\n")[0]
        return [json.loads(line) for line in whole.split("\n") if line.startswith("{")]

    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def fd_count(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def own_fd_count(self) -> int:
        """Descriptors without the pooled upstream connections, which may stay for a while."""
        idle = self.metrics().total("ciuicflow_upstream_connections", state="idle")
        return self.fd_count() - int(idle)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    # -- life ----------------------------------------------------------------------------

    def write_config(self, settings: Config | str) -> None:
        """Replace the file at once, as a careful operator does."""
        text = settings if isinstance(settings, str) else yaml.safe_dump(settings)
        fresh = self.config_file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.config_file)

    def reload(self, settings: Config | str | None = None) -> None:
        """Write the config, if given, and send SIGHUP."""
        if settings is not None:
            self.write_config(settings)
        self.process.send_signal(signal.SIGHUP)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, within_s: float = 10.0) -> int:
        return self.process.wait(within_s)

    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stop(self) -> None:
        """Stop it and insist: it ends by itself and its log holds no traceback."""
        try:
            if self.running():
                self.terminate()
            self.wait()
        finally:
            self.kill()
        log = self.log()
        found = log.find("Traceback")
        assert found < 0, log[max(0, found - 1000) : found + 3000]

    def __enter__(self) -> Gateway:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()


class Metrics:
    """One scrape: samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            if (match := SAMPLE.match(line)) and not line.startswith("#"):
                labels = dict(LABEL.findall(match[2] or ""))
                self.samples.append((match[1], labels, float(match[3])))

    def find(self, name: str, **labels: str) -> list[float]:
        return [
            value
            for sample, has, value in self.samples
            if sample == name and labels.items() <= has.items()
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all label sets that carry these labels; 0 if there is none."""
        return sum(self.find(name, **labels))

    def outcomes(self) -> dict[str, float]:
        """Requests by outcome."""
        totals: dict[str, float] = {}
        for name, labels, value in self.samples:
            if name == "ciuicflow_requests_total":
                totals[labels["outcome"]] = totals.get(labels["outcome"], 0) + value
        return totals


def run(*arguments: str, within_s: float = 20.0) -> subprocess.CompletedProcess[str]:
    """Run a `ciuicflow` command that is expected to end by itself."""
    return subprocess.run(
        [EXECUTABLE, *arguments], capture_output=True, text=True, timeout=within_s, check=False
    )


def outcome_delta(before: Metrics, after: Metrics) -> dict[str, float]:
    """Requests by outcome between two scrapes, without the zeros."""
    old = before.outcomes()
    delta = {name: count - old.get(name, 0) for name, count in after.outcomes().items()}
    return {name: count for name, count in delta.items() if count}


def now() -> float:
    """The monotonic clock that all recorded times use, in seconds."""
    return time.monotonic()
