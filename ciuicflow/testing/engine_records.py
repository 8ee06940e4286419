"""What goes into an engine model and what comes out."""

import msgspec

from ciuicflow.testing.kv_blocks import BlockHash


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation; it yields exactly ``output_tokens`` tokens unless it is cancelled."""

    request_id: str
    prompt_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1."""
    priority: int = 0
    """Lower is sooner; read only with priority scheduling."""
    block_hashes: tuple[BlockHash, ...] = ()
    """One per full block of the prompt, each covering the prompt up to the block's end."""


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """One output token."""

    request_id: str
    position: int
    """0 is the first token."""
    finished: bool
    """This is the last token."""
    cached_tokens: int
    """Prompt tokens that the prefix cache spared when the request was admitted first."""


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state and the totals of an engine, as its metrics show them."""

    running: int
    waiting: int
    kv_usage: float
    """0.0 to 1.0."""
    prompt_tokens: int
    """Prompt tokens of requests whose first token is out, cached ones included."""
    generation_tokens: int
    finished: int
    cancelled: int
    preemptions: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
