"""What a request costs, in tokens, and what an engine says that it has cost."""

import msgspec


class Cost(msgspec.Struct, frozen=True, gc=False):
    """The three sides of a request's cost."""

    work: float
    """Uncached prompt tokens + weight x output tokens: what tenants and tiers are charged."""
    prefill_tokens: int
    """Uncached prompt tokens: what stands between it and its first token."""
    held_tokens: int
    """Prompt and output tokens: what it holds of the engine's KV cache at its end."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What an engine reported at the end of a request; any integers will do."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
