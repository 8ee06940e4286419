"""Counts the KV blocks of an engine model: who holds how many, and which prompt prefixes are kept.

Blocks have no identity here except through the hash of the prompt prefix that they end.
"""

from collections import OrderedDict
from collections.abc import Sequence

BlockHash = bytes


class KvBlocks:
    """A fixed number of blocks: private to one sequence, shared by prefix, or idle but remembered.

    Idle blocks are free space: the least recently used one is forgotten when space is needed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._private = 0
        self._shared: dict[BlockHash, int] = {}  # prefix -> sequences that hold it
        self._idle: OrderedDict[BlockHash, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<KvBlocks used={self.used} of {self.capacity} idle={len(self._idle)}>"

    @property
    def used(self) -> int:
        """Blocks that some sequence holds."""
        return self._private + len(self._shared)

    def cached_prefix(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks that need no prefill."""
        for index, block in enumerate(hashes):
            if block not in self._shared and block not in self._idle:
                return index
        return len(hashes)

    def reserve(self, cached: Sequence[BlockHash], private: int) -> bool:
        """Hold the given cached blocks and take private ones; False and no change if too few."""
        revived = sum(block in self._idle for block in cached)
        if self.used + revived + private > self.capacity:
            return False
        for block in cached:
            self._idle.pop(block, None)
            self._shared[block] = self._shared.get(block, 0) + 1
        self._private += private
        self._forget_beyond_capacity()
        return True

    def share(self, block: BlockHash) -> bool:
        """Turn one private block into a shared one; False if this prefix is known already."""
        if block in self._shared or block in self._idle:
            return False
        self._private -= 1
        self._shared[block] = 1
        return True

    def release(self, shared: Sequence[BlockHash], private: int) -> None:
        """Give back what one sequence holds; the end of a prefix is forgotten before its start."""
        self._private -= private
        for block in reversed(shared):
            self._shared[block] -= 1
            if not self._shared[block]:
                del self._shared[block]
                self._idle[block] = None

    def _forget_beyond_capacity(self) -> None:
        while self.used + len(self._idle) > self.capacity:
            self._idle.popitem(last=False)
