"""What an engine model can do: its speeds, its sizes, and the named examples."""

from typing import Literal

import msgspec


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and speeds of one modelled engine; ValueError for values that cannot work.

    The names of the sizes are vLLM's. A step lasts
    ``step_base_s + prefill_tokens / prefill_tokens_per_s + decoding * decode_s_per_seq``,
    divided by ``speed``.
    """

    max_num_seqs: int = 256
    """Sequences that run at once, at least 1."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step, at least ``max_num_seqs``; longer prompts go in chunks."""
    kv_capacity_tokens: int = 524_288
    """KV cache in tokens; also the longest prompt plus answer."""
    block_tokens: int = 16
    """Tokens per KV block, 16 to 512; the prefix cache works in whole blocks."""
    step_base_s: float = 0.006
    """Seconds of a step whatever it holds, more than 0."""
    prefill_tokens_per_s: float = 8000.0
    """Prompt tokens computed per second, more than 0."""
    decode_s_per_seq: float = 0.00035
    """Seconds that each decoding sequence adds to a step, 0 or more."""
    jitter: float = 0.0
    """Each step is longer or shorter by up to this part, 0 to 0.5."""
    speed: float = 1.0
    """All speeds times this, more than 0."""
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    """Order of the waiting queue; with ``priority`` the lower value is sooner."""
    prefix_cache: bool = False
    """Keep prompt blocks of finished requests until the space is needed."""

    def __post_init__(self) -> None:
        _require(self.max_num_seqs >= 1, "max_num_seqs must be at least 1")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens must be at least max_num_seqs",
        )
        _require(16 <= self.block_tokens <= 512, "block_tokens must be 16 to 512")
        _require(
            self.kv_capacity_tokens >= self.block_tokens,
            "kv_capacity_tokens must be at least block_tokens",
        )
        for name in ("step_base_s", "prefill_tokens_per_s", "speed"):
            _require(getattr(self, name) > 0, f"{name} must be more than 0")
        _require(self.decode_s_per_seq >= 0, "decode_s_per_seq must be 0 or more")
        _require(0 <= self.jitter <= 0.5, "jitter must be 0 to 0.5")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


PROFILES = {
    # For functional tests: an answer of 32 tokens takes about 35 ms.
    "fast": EngineProfile(
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        step_base_s=0.001,
        prefill_tokens_per_s=500_000.0,
        decode_s_per_seq=0.000005,
    ),
    # Few sequences at once: about 900 output tokens/s however long the prompts are.
    "slot_bound": EngineProfile(max_num_seqs=8, jitter=0.05),
    # 16 requests of 1000 tokens fill the cache: beyond that they wait or are preempted.
    "kv_bound": EngineProfile(
        kv_capacity_tokens=16_384, prefill_tokens_per_s=16_000.0, jitter=0.05
    ),
    # A prompt of 4000 tokens costs one second in eight chunks that slow all decoding.
    "prefill_bound": EngineProfile(
        max_num_batched_tokens=512, prefill_tokens_per_s=4000.0, jitter=0.05
    ),
}
