"""What Linux tells of a process: CPU time, memory, children; and on which core it runs."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ciuicflow.errors import StartError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Usage(msgspec.Struct, frozen=True):
    """What a process has used, all its threads together."""

    parent: int
    cpu_s: float
    """User and system time since its start; the kernel counts it in steps of 10 ms."""
    rss_bytes: int


class Cores(msgspec.Struct, frozen=True):
    """Where the two sides run; None: wherever the kernel likes."""

    load: int | None
    proxy: int | None


def parse_stat(text: str) -> Usage:
    """Read the text of /proc/PID/stat (proc(5)). Raises ValueError."""
    # The command, in brackets, may hold blanks and brackets: fields count from its end.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 22:
        raise ValueError(f"not a line of /proc/PID/stat: {text!r}")
    ticks = int(fields[11]) + int(fields[12])
    return Usage(int(fields[1]), ticks / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES)


def usage(pid: int) -> Usage:
    """Return what a process has used. Raises OSError where it is gone."""
    return parse_stat(Path(f"/proc/{pid}/stat").read_text())


def parse_core_stat(text: str, core: int) -> float:
    """Return for how many seconds a core was at work, by the text of /proc/stat.

    User, nice, system and stolen time (proc(5)); interrupts are left out, as what the network
    does for a proxy is among them. Raises ValueError.
    """
    for line in text.splitlines():
        name, *fields = line.split()
        if name == f"cpu{core}":
            return sum(int(fields[index]) for index in (0, 1, 2, 7)) / _TICKS_PER_S
    raise ValueError(f"/proc/stat does not know core {core}")


def core_busy_s(core: int) -> float:
    """Return for how many seconds a core was at work since the machine started."""
    return parse_core_stat(Path("/proc/stat").read_text(), core)


def children(pid: int) -> list[int]:
    """Return the direct children of a process, in order of their ids."""
    return sorted(child for child in _pids() if _parent(child) == pid)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        return usage(pid).parent
    except OSError:  # it has ended meanwhile
        return None


def split_cores(allowed: set[int]) -> Cores:
    """Give the first core to the load and the last to the proxies; with one core, neither."""
    if len(allowed) < 2:
        return Cores(None, None)
    return Cores(min(allowed), max(allowed))


def pin(pid: int, core: int | None) -> None:
    """Keep a process, with the threads that it has and will have, on one core."""
    if core is None:
        return
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


@contextmanager
def own_core() -> Iterator[Cores]:
    """Put this process and the children that it will have on the core of the load."""
    if platform.system() != "Linux":
        raise StartError("the benchmark reads /proc: run it on Linux")
    allowed = os.sched_getaffinity(0)
    cores = split_cores(allowed)
    pin(os.getpid(), cores.load)
    try:
        yield cores
    finally:
        os.sched_setaffinity(0, allowed)


def cpu_model() -> str:
    """Return the processor's name, or the architecture where there is none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
