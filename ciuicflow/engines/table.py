"""The engine adapters by name, and which one a page belongs to."""

from typing import Final

from ciuicflow.engines.base import EngineAdapter
from ciuicflow.engines.llamacpp import LlamaCppAdapter
from ciuicflow.engines.openai import OpenAiAdapter
from ciuicflow.engines.sglang import SglangAdapter
from ciuicflow.engines.vllm import VllmAdapter

ADAPTERS: Final[dict[str, EngineAdapter]] = {
    "vllm": VllmAdapter(),
    "sglang": SglangAdapter(),
    "llamacpp": LlamaCppAdapter(),
    "openai": OpenAiAdapter(),  # the last: it recognises everything
}


def detect(page: bytes) -> EngineAdapter:
    """Return the adapter of the engine whose metrics page this is; openai where none fits."""
    return next(adapter for adapter in ADAPTERS.values() if adapter.recognises(page))
