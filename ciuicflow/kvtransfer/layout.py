"""What the KV cache of a shard looks like, and whether two shards can exchange it."""

from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Final

import msgspec

from ciuicflow.kvtransfer.ranges import Area, Layer

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=65536)]
RankIndex = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class RegionKind(StrEnum):
    """What a region holds, which decides how tensor parallelism divides it."""

    MLA = "mla"  # latent vectors: the same on every tensor-parallel rank
    MHA = "mha"  # keys and values by head: each rank has its own heads
    INDEXER = "indexer"  # keys of sparse attention: the same on every rank


class Region(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cache of the model: the same kind of block in each of its layers."""

    name: Name
    kind: RegionKind
    first_layer: Layer = 0
    """The first that this shard holds, counted over the whole model."""
    layers: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    """How many it holds; none is possible in a pipeline stage."""
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    """Of one block in one layer, on this rank."""
    dtype: Name


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a shard on one axis of parallelism. ValueError if rank is not below size."""

    rank: RankIndex = 0
    size: Ranks = 1

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise ValueError(f"rank {self.rank} of {self.size}; expected a rank below the size")


ALONE: Final = Parallel()


class LayerRange(msgspec.Struct, frozen=True, gc=False):
    """Layers from `first` to before `end`; none if they are equal."""

    first: int
    end: int


class Geometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The cache of one shard. ValueError if two regions have the same name."""

    model: Name
    regions: Annotated[tuple[Region, ...], msgspec.Meta(min_length=1, max_length=64)]
    dp: Parallel = ALONE
    pp: Parallel = ALONE
    tp: Parallel = ALONE

    def __post_init__(self) -> None:
        names = {region.name for region in self.regions}
        if len(names) != len(self.regions):
            raise ValueError("regions: two have the same name")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that must be the same on both sides of a transfer.

        Layers, data- and pipeline-parallel ranks are not: only common layers are exchanged.
        """
        facts = msgspec.json.encode(list(self._facts().items()))
        return blake2b(facts, digest_size=16).hexdigest()

    def bytes_of(self, area: Area) -> int:
        """Return the size of an area."""
        return area.layers * area.count * self.regions[area.region].block_bytes

    def shared_layers(self, peer: "Geometry") -> tuple[LayerRange, ...]:
        """Return the layers of each region that both hold; the fingerprints must be equal."""
        return tuple(map(_intersect, self.regions, peer.regions))

    def difference(self, peer: "Geometry") -> str | None:
        """Say why these two cannot exchange their caches; None: they can."""
        ours, theirs = self._facts(), peer._facts()
        for name in ours | theirs:
            if ours.get(name) != theirs.get(name):
                return f"{name}: ours is {ours.get(name)!r}, the peer's is {theirs.get(name)!r}"
        if not any(layers.first < layers.end for layers in self.shared_layers(peer)):
            return "layers: none is held by both"
        return None

    def _facts(self) -> dict[str, str | int | list[str]]:
        facts: dict[str, str | int | list[str]] = {
            "model": self.model,
            "regions": [region.name for region in self.regions],
        }
        for region in self.regions:
            for field in ("kind", "block_tokens", "block_bytes", "dtype"):
                facts[f"{region.name}.{field}"] = getattr(region, field)
        if any(region.kind is RegionKind.MHA for region in self.regions):
            facts["tp"] = f"{self.tp.rank} of {self.tp.size}"  # heads differ from rank to rank
        return facts


def _intersect(ours: Region, theirs: Region) -> LayerRange:
    first = max(ours.first_layer, theirs.first_layer)
    end = min(ours.first_layer + ours.layers, theirs.first_layer + theirs.layers)
    return LayerRange(first, max(first, end))


def deepseek_v3(*, block_tokens: int = 64, layers: int = 61, first_layer: int = 0) -> Geometry:
    """Return the geometry of DeepSeek-V3 and R1 in BF16: (512 + 64) x 2 B per token per layer."""
    region = Region(
        name="kv",
        kind=RegionKind.MLA,
        first_layer=first_layer,
        layers=layers,
        block_tokens=block_tokens,
        block_bytes=1152 * block_tokens,
        dtype="bfloat16",
    )
    return Geometry(model="deepseek-v3", regions=(region,))
