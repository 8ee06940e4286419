"""The record that ties the request plane to the KV plane."""

from typing import Annotated

import msgspec

from ciuicflow.kvtransfer.layout import Name, RankIndex

TransferId = str
"""Chosen by the gateway, unique for ever: another try has another one."""

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Shard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One holder of KV cache, as the gateway knows it."""

    agent: Name
    """Name of its KV agent."""
    dp: RankIndex = 0
    pp: RankIndex = 0
    tp: RankIndex = 0
    incarnation: Incarnation = 0
    """Of that agent's process; 0: not known, so not checked."""


class TransferTicket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One transfer between two shards: made by the gateway, passed through engines untouched."""

    id: Id
    tier: Name
    rank: Annotated[int, msgspec.Meta(ge=0, le=1000)]
    """Of the tier; 0 goes first."""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    """Of the tier, between senders that share a link."""
    floor: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Part of a path's bytes that the tier gets while it has some ready, whatever is above it."""
    remaining_ms: Annotated[float, msgspec.Meta(gt=0, le=86_400_000)]
    """Time left when it is handed over; a clock does not travel."""
    source: Shard
    destination: Shard
