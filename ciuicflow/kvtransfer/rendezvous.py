"""Where a receiver's reservation and a sender's transfer wait for each other, by transfer id."""

from collections import OrderedDict
from typing import Final

from msgspec.structs import replace

from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.ticket import TransferId
from ciuicflow.kvtransfer.wire import Expect

_REMEMBERED: Final = 4096  # ended transfers, to answer what comes late
_MOST_RUNS: Final = 1 << 20  # of one transfer: 16 million tokens, no two blocks adjacent


class Rendezvous:
    """Reservations that came before their transfer, and ids of transfers that have ended."""

    def __init__(self) -> None:
        self._part: Expect | None = None
        self._early: dict[TransferId, Expect] = {}
        self._ended: OrderedDict[TransferId, FailReason] = OrderedDict()

    def __len__(self) -> int:
        return len(self._early)

    def join(self, expect: Expect) -> Expect | None:
        """Put the parts of a reservation together; None: more are to come.

        ValueError if a part is not of the same transfer, or they are too many.
        """
        if self._part is not None:
            expect = _joined(self._part, expect)
        self._part = expect if expect.more else None
        return None if expect.more else expect

    def keep(self, expect: Expect) -> None:
        """A reservation has come first."""
        self._early[expect.transfer] = expect

    def take(self, id_: TransferId) -> Expect | None:
        """Return and forget the reservation of a transfer, if it came first."""
        return self._early.pop(id_, None)

    def holds(self, id_: TransferId) -> bool:
        """Whether its reservation waits here."""
        return id_ in self._early

    def end(self, id_: TransferId, reason: FailReason) -> None:
        """Nothing of this id may start any more."""
        self._ended[id_] = reason
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def ended(self, id_: TransferId) -> FailReason | None:
        """Why nothing of this id may start; None: it may."""
        return self._ended.get(id_)

    def clear(self, reason: FailReason) -> list[TransferId]:
        """The session is over: end what waits here, and return it."""
        ids = list(self._early)
        for id_ in ids:
            self.end(id_, reason)
        self._early.clear()
        self._part = None
        return ids


def _joined(one: Expect, two: Expect) -> Expect:
    if one.transfer != two.transfer or len(one.blocks) != len(two.blocks):
        raise ValueError(f"{two.transfer} is expected before all parts of {one.transfer}")
    blocks = tuple(map(tuple.__add__, one.blocks, two.blocks))
    if sum(map(len, blocks)) > _MOST_RUNS:
        raise ValueError(f"{one.transfer}: more than {_MOST_RUNS} runs of blocks")
    return replace(two, blocks=blocks)
