"""What an opted-in request says of itself in its head. Pure.

Opted in is `X-Ciuic-Flow: enabled`, in any case of letters; repeated, all must say so. A tier or
deadline that makes no sense counts as not given: it never fails a request, and never lifts one.
"""

import hashlib
from typing import Final

OPT_IN: Final = b"x-ciuic-flow"
MAX_DEADLINE_MS: Final = 86_400_000
"""Longer deadlines, and those that are not whole numbers from 1 up, are not taken for one."""
_MAX_TIER_BYTES: Final = 64


class FlowFields:
    """The fields of an opted-in head. Read-only once made."""

    __slots__ = ("deadline_ms", "forwarded_for", "key_sha256", "lines", "tier")

    def __init__(self, lines: bytes) -> None:
        """Read field lines, each ending in CRLF."""
        self.tier = ""  # as asked for; empty: it was not
        self.deadline_ms = 0  # until its first token; 0: none
        self.key_sha256 = ""  # of the API key, in hex; empty: there is none
        self.forwarded_for = ""
        kept: list[bytes] = []
        for line in lines.split(b"\r\n")[:-1]:
            name, _, value = line.partition(b":")
            name = name.lower()
            self._read(name, value.strip(b" \t"))
            if not name.startswith(b"x-ciuic-"):
                kept.append(line + b"\r\n")
        self.lines: bytes = b"".join(kept)  # without what is meant for the gateway

    def _read(self, name: bytes, value: bytes) -> None:
        if name == b"x-ciuic-tier":
            self.tier = value[:_MAX_TIER_BYTES].decode("latin-1").lower()
        elif name == b"x-ciuic-deadline-ms":
            self.deadline_ms = _deadline_ms(value)
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                self.key_sha256 = _sha256(key.strip()) or self.key_sha256
        elif name in (b"x-api-key", b"api-key") and not self.key_sha256:
            self.key_sha256 = _sha256(value)
        elif name == b"x-forwarded-for":
            self.forwarded_for += ("," if self.forwarded_for else "") + value.decode("latin-1")


def opts_in(values: list[bytes]) -> bool:
    """Whether these are the values of an opted-in head's X-Ciuic-Flow fields, in lower case."""
    return bool(values) and all(value.strip() == b"enabled" for value in values)


def _sha256(key: bytes) -> str:
    """Return the hash of a key in hex; an empty field holds none."""
    return hashlib.sha256(key).hexdigest() if key else ""


def _deadline_ms(value: bytes) -> int:
    if not value.isdigit() or len(value) > len(str(MAX_DEADLINE_MS)):
        return 0
    deadline_ms = int(value)
    return deadline_ms if deadline_ms <= MAX_DEADLINE_MS else 0
