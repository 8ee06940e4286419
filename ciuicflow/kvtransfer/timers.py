"""Deadlines of many things, with one look-up for the next."""

from heapq import heapify, heappop, heappush
from typing import Final

_GARBAGE: Final = 64  # dead heap items that are not worth a rebuild


class Timers:
    """One deadline per key. All operations take O(log n), amortised."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, key: str, due_s: float) -> None:
        """Give a key its deadline, instead of the one that it had."""
        self._due[key] = due_s
        heappush(self._heap, (due_s, key))
        if len(self._heap) > 2 * len(self._due) + _GARBAGE:
            self._heap = [(due_s, key) for key, due_s in self._due.items()]
            heapify(self._heap)

    def clear(self, key: str) -> None:
        """Forget a key, if it is there."""
        self._due.pop(key, None)

    def next(self) -> float | None:
        """Return the earliest deadline."""
        heap = self._heap
        while heap:
            due_s, key = heap[0]
            if self._due.get(key) == due_s:
                return due_s
            heappop(heap)
        return None

    def pop_due(self, now: float) -> str | None:
        """Forget one key that is due, and return it."""
        due_s = self.next()
        if due_s is None or due_s > now:
            return None
        key = heappop(self._heap)[1]
        del self._due[key]
        return key
