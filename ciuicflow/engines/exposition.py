"""Finds single series in a page of the Prometheus text format, without reading all of it.

Pages of engines are mostly histograms; a search for the few names that matter costs microseconds
and cannot be made to cost more by what else is there.
"""

import re
from collections.abc import Iterator
from math import isfinite
from typing import Final

import msgspec

MAX_PAGE_BYTES: Final = 4 << 20
"""What comes after is not looked at."""
MAX_SERIES: Final = 1024
"""Of one name; an engine has one per rank, model and priority."""

_LABEL: Final = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_MAX_LINE_BYTES: Final = 4096
_MAX_VALUE: Final = 1e9


class Series(msgspec.Struct, frozen=True):
    """One sample line."""

    labels: dict[bytes, bytes]
    """Values as they were written, escapes included."""
    value: float


def find_series(page: bytes, name: bytes) -> Iterator[Series]:
    """Yield the series of exactly this name with a sensible value: 0 to 1e9."""
    at, found = 0, 0
    if page.startswith(name):
        page = b"\n" + page
    while found < MAX_SERIES and (at := page.find(b"\n" + name, at, MAX_PAGE_BYTES)) >= 0:
        found += 1
        start = at + 1 + len(name)
        end = page.find(b"\n", start, start + _MAX_LINE_BYTES)
        if end < 0:
            end = min(len(page), start + _MAX_LINE_BYTES)
        series = _parse(page[start:end])
        if series is not None:
            yield series
        at = start


def _parse(rest: bytes) -> Series | None:
    """Read what follows a name on its line."""
    labels: dict[bytes, bytes] = {}
    if rest.startswith(b"{"):
        inside, brace, rest = rest.rpartition(b"}")
        if not brace:
            return None
        labels = dict(_LABEL.findall(inside))
    elif not rest[:1].isspace():
        return None  # a longer name
    words = rest.split()
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        return None
    return Series(labels, value) if isfinite(value) and 0 <= value <= _MAX_VALUE else None


def total(page: bytes, *names: bytes) -> int | None:
    """Return the sum of the series of the first of these names that is there."""
    for name in names:
        values = [series.value for series in find_series(page, name)]
        if values:
            return round(sum(values))
    return None


def highest_part(page: bytes, *names: bytes) -> float | None:
    """Return the highest of the series of the first of these names, at most 1.0."""
    for name in names:
        values = [series.value for series in find_series(page, name)]
        if values:
            return min(1.0, max(values))
    return None


def has_prefix(page: bytes, prefix: bytes) -> bool:
    """Whether a series' name begins so."""
    return page.startswith(prefix) or page.find(b"\n" + prefix, 0, MAX_PAGE_BYTES) >= 0
