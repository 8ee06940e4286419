"""How the checksums of quanta make up that of a transfer."""

from typing import Final

_MASK: Final = (1 << 63) - 1  # the largest integer that the wire format can bound


def combine(total: int | None, seq: int, checksum: int | None) -> int | None:
    """Add one quantum, in any order; None if one of them has no checksum.

    `checksum` has 32 bits. Each is weighted by its place, so exchanged payloads are noticed, and a
    single wrong one always is: its weighted difference is below 2**63 and not 0.
    """
    if total is None or checksum is None:
        return None
    return (total + (seq % (1 << 31) + 1) * checksum) & _MASK
