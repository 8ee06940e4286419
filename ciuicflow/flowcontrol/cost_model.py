"""Estimates what a request costs from its bytes and its tenant's past. Pure."""

from collections import OrderedDict

from ciuicflow.flowcontrol.cost import Cost, Usage

MAX_TENANTS = 10_000
"""The least recently seen ones are forgotten: 300 bytes each."""
MAX_TOKENS = 10_000_000
"""Whatever an engine claims counts as at most this."""

_TOKENS_PER_BYTE = 0.25  # before anything is known: English text with a BPE vocabulary
_LONGEST_PROMPT = 32_768
_OUTPUT_TOKENS = 256.0
_GAIN = 0.1  # of one observation: about the last ten count


class _History:
    """What a tenant's requests have been like."""

    __slots__ = ("cached_share", "output_tokens", "tokens_per_byte")

    def __init__(self, tokens_per_byte: float, cached_share: float, output_tokens: float) -> None:
        # Tokens per byte, not its inverse: one body full of base64 must not spoil the mean.
        self.tokens_per_byte = tokens_per_byte
        self.cached_share = cached_share
        self.output_tokens = output_tokens

    def copy(self) -> "_History":
        return _History(self.tokens_per_byte, self.cached_share, self.output_tokens)

    def follow(self, body_bytes: int, usage: Usage) -> None:
        """Move towards what one request turned out to be."""
        if usage.prompt_tokens > 0:
            ratio = min(1.0, usage.prompt_tokens / max(body_bytes, 1))
            self.tokens_per_byte += _GAIN * (ratio - self.tokens_per_byte)
            cached = usage.cached_tokens / usage.prompt_tokens
            self.cached_share += _GAIN * (cached - self.cached_share)
        self.output_tokens += _GAIN * (usage.completion_tokens - self.output_tokens)


class CostModel:
    """Estimates costs, and learns from what engines report."""

    def __init__(self, output_weight: float, max_tenants: int = MAX_TENANTS) -> None:
        self.output_weight = output_weight
        self._max_tenants = max_tenants
        self._all = _History(_TOKENS_PER_BYTE, 0.0, _OUTPUT_TOKENS)
        # Bytes say little about images: no estimate is far above what engines have reported.
        self._longest_prompt = _LONGEST_PROMPT
        self._tenants: OrderedDict[str, _History] = OrderedDict()

    def estimate(self, tenant: str, body_bytes: int, max_tokens: int | None) -> Cost:
        """Return what a request will probably cost; any integers will do."""
        past = self._tenants.get(tenant, self._all)
        prompt = min(self._longest_prompt, max(1, int(body_bytes * past.tokens_per_byte)))
        output = past.output_tokens
        if max_tokens is not None:
            output = min(output, float(min(max(max_tokens, 0), MAX_TOKENS)))
        return self._cost(prompt, prompt * past.cached_share, max(1.0, output))

    def actual(self, usage: Usage) -> Cost:
        """Return what a request has cost."""
        usage = _bounded(usage)
        return self._cost(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def learn(self, tenant: str, body_bytes: int, usage: Usage) -> None:
        """Correct the estimates of a tenant, and of tenants not seen before."""
        usage = _bounded(usage)
        past = self._tenants.get(tenant)
        if past is None:
            past = self._tenants[tenant] = self._all.copy()
            if len(self._tenants) > self._max_tenants:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        past.follow(body_bytes, usage)
        self._all.follow(body_bytes, usage)
        self._longest_prompt = max(self._longest_prompt, usage.prompt_tokens)

    def _cost(self, prompt: float, cached: float, output: float) -> Cost:
        uncached = max(1, int(prompt - cached))
        return Cost(uncached + self.output_weight * output, uncached, int(prompt + output))


def _bounded(usage: Usage) -> Usage:
    prompt = min(max(0, usage.prompt_tokens), MAX_TOKENS)
    cached = min(max(0, usage.cached_tokens), prompt)
    return Usage(prompt, cached, min(max(0, usage.completion_tokens), MAX_TOKENS))
