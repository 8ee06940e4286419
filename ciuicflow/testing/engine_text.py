"""What a fake engine reads and says: prompts to tokens and block hashes, answers by seed. Pure."""

from hashlib import blake2b

from ciuicflow.testing.kv_blocks import BlockHash

CHARS_PER_TOKEN = 4
"""Close to what BPE tokenizers make of English text."""

_SYLLABLES = (
    "ba",
    "de",
    "fi",
    "go",
    "ku",
    "la",
    "me",
    "ni",
    "po",
    "ru",
    "sa",
    "te",
    "vi",
    "wo",
    "xu",
    "ze",
)
# Multi-byte pieces, so that a relay that splits characters is noticed. 256 + 7 = 263 is prime:
# every stride walks through the whole vocabulary.
_VOCABULARY = [f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES] + [
    " café",
    " naïve",
    " 推理",
    " 网关",
    " 🙂",
    "\n",
    ' "',
]

_SHORTEST_ANSWER, _LONGEST_ANSWER = 16, 64


def count_tokens(prompt: str) -> int:
    """Tokens of a prompt, at least 1."""
    return max(1, -(-len(prompt) // CHARS_PER_TOKEN))


def hash_blocks(prompt: str, block_tokens: int) -> tuple[BlockHash, ...]:
    """One hash per full block of the prompt, each over the prompt from its start."""
    size = block_tokens * CHARS_PER_TOKEN
    hashes: list[BlockHash] = []
    previous = b""
    for start in range(0, len(prompt) - size + 1, size):
        block = prompt[start : start + size].encode("utf-8", "surrogatepass")
        previous = blake2b(previous + block, digest_size=8).digest()
        hashes.append(previous)
    return tuple(hashes)


class Speech:
    """The answer to one prompt under one seed: a length of its own and a piece per position."""

    def __init__(self, prompt: str, seed: int) -> None:
        text = f"{seed}:{prompt}".encode("utf-8", "surrogatepass")
        digest = blake2b(text, digest_size=12).digest()
        numbers = [int.from_bytes(digest[at : at + 4]) for at in (0, 4, 8)]
        self.natural_tokens = _SHORTEST_ANSWER + numbers[0] % (
            _LONGEST_ANSWER - _SHORTEST_ANSWER + 1
        )
        self._start = numbers[1] % len(_VOCABULARY)
        self._stride = 1 + numbers[2] % (len(_VOCABULARY) - 1)

    def pieces(self, count: int) -> list[str]:
        """The text of the first ``count`` tokens."""
        start, stride, size = self._start, self._stride, len(_VOCABULARY)
        return [_VOCABULARY[(start + position * stride) % size] for position in range(count)]


def cut_at_stop(pieces: list[str], stops: list[str]) -> list[str] | None:
    """The pieces up to the stop string that is complete first, without it; None if there is none.

    The last pieces may be shortened, even to nothing: their tokens are generated all the same.
    """
    text = "".join(pieces)
    found = [(text.find(stop) + len(stop), len(stop)) for stop in stops if stop in text]
    if not found:
        return None
    stop_end, stop_length = min(found)
    cut = stop_end - stop_length
    kept: list[str] = []
    start = 0
    for piece in pieces:
        if start >= stop_end:
            break
        kept.append(piece[: max(0, cut - start)])
        start += len(piece)
    return kept
