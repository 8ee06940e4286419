"""A tiny random model of the DeepSeek-V2 architecture (MLA and mixture of experts) as GGUF.

Made on the spot, a few megabytes, no downloads. Its words mean nothing; that they are the same
with and without the gateway is what counts.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

SPECIAL = ["<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<|Assistant|>{% else %}<|User|>{% endif %}{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
WIDTH, LAYERS, HEADS, CONTEXT = 64, 2, 4, 32768
FEED_FORWARD, EXPERTS, EXPERT_WIDTH = 128, 4, 32
KV_RANK, Q_RANK, ROPE, NOPE, VALUE = 32, 32, 16, 16, 16


def byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes in byte-level BPE (as GPT-2 defined them)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in symbols):
        symbols[byte] = chr(256 + offset)
    return [symbols[byte] for byte in range(256)]


def write_model(path: Path) -> None:
    """Write the file: metadata, a vocabulary of bytes and one merge, random weights."""
    space = byte_symbols()[32]
    tokens = [*SPECIAL, *byte_symbols(), f"{space}t"]
    writer = gguf.GGUFWriter(str(path), "deepseek2")
    _write_metadata(writer, tokens, merges=[f"{space} t"])
    _Weights(writer, len(tokens)).write()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, tokens: list[str], merges: list[str]) -> None:
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(0)
    writer.add_leading_dense_block_count(1)
    writer.add_q_lora_rank(Q_RANK)
    writer.add_kv_lora_rank(KV_RANK)
    writer.add_key_length(KV_RANK + ROPE)
    writer.add_value_length(KV_RANK)
    writer.add_key_length_mla(NOPE + ROPE)
    writer.add_value_length_mla(VALUE)
    writer.add_rope_dimension_count(ROPE)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


class _Weights:
    """Random tensors under the names that the architecture prescribes."""

    def __init__(self, writer: gguf.GGUFWriter, vocabulary: int) -> None:
        self._writer = writer
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(0)

    def write(self) -> None:
        self._random("token_embd.weight", self._vocabulary, WIDTH, spread=0.3)
        self._ones("output_norm.weight", WIDTH)
        self._write_output()
        for layer in range(LAYERS):
            self._write_attention(f"blk.{layer}.")
            if layer == 0:
                self._write_dense(f"blk.{layer}.")
            else:
                self._write_experts(f"blk.{layer}.")

    def _write_output(self) -> None:
        """Readable: only ASCII letters and the space stand a chance of being said."""
        weights = self._rng.normal(0, 0.05, (self._vocabulary, WIDTH)).astype(np.float32)
        said = [len(SPECIAL) + byte for byte in b" etaoinshrdlucmfwypvbgkjqxz"]
        weights[said] *= 12
        self._writer.add_tensor("output.weight", weights)

    def _write_attention(self, block: str) -> None:
        self._ones(block + "attn_norm.weight", WIDTH)
        self._ones(block + "ffn_norm.weight", WIDTH)
        self._random(block + "attn_q_a.weight", Q_RANK, WIDTH)
        self._ones(block + "attn_q_a_norm.weight", Q_RANK)
        self._random(block + "attn_q_b.weight", HEADS * (NOPE + ROPE), Q_RANK)
        self._random(block + "attn_kv_a_mqa.weight", KV_RANK + ROPE, WIDTH)
        self._ones(block + "attn_kv_a_norm.weight", KV_RANK)
        self._random(block + "attn_k_b.weight", HEADS, KV_RANK, NOPE)
        self._random(block + "attn_v_b.weight", HEADS, VALUE, KV_RANK)
        self._random(block + "attn_output.weight", WIDTH, HEADS * VALUE)

    def _write_dense(self, block: str) -> None:
        self._random(block + "ffn_gate.weight", FEED_FORWARD, WIDTH)
        self._random(block + "ffn_up.weight", FEED_FORWARD, WIDTH)
        self._random(block + "ffn_down.weight", WIDTH, FEED_FORWARD)

    def _write_experts(self, block: str) -> None:
        self._random(block + "ffn_gate_inp.weight", EXPERTS, WIDTH)
        self._writer.add_tensor(block + "exp_probs_b.bias", np.zeros(EXPERTS, np.float32))
        for part, shape in {
            "gate": (EXPERT_WIDTH, WIDTH),
            "up": (EXPERT_WIDTH, WIDTH),
            "down": (WIDTH, EXPERT_WIDTH),
        }.items():
            self._random(f"{block}ffn_{part}_exps.weight", EXPERTS, *shape)
            self._random(f"{block}ffn_{part}_shexp.weight", *shape)

    def _random(self, name: str, *shape: int, spread: float = 0.12) -> None:
        self._writer.add_tensor(name, self._rng.normal(0, spread, shape).astype(np.float32))

    def _ones(self, name: str, *shape: int) -> None:
        self._writer.add_tensor(name, np.ones(shape, np.float32))
