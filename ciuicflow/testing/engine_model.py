"""A continuous-batching inference engine in virtual time: which tokens come out when.

Modelled on vLLM's scheduler: decoding sequences go first, the rest of a step's token budget goes
to prompts in chunks, a full KV cache holds the waiting queue or preempts the newest sequence.
Nothing here reads a clock; texts and HTTP are elsewhere.
"""

from bisect import bisect_left, insort
from random import Random

from ciuicflow.testing.engine_profile import PROFILES, EngineProfile
from ciuicflow.testing.engine_records import EngineRequest, EngineSnapshot, TokenEvent
from ciuicflow.testing.kv_blocks import BlockHash, KvBlocks

__all__ = [
    "PROFILES",
    "EngineModel",
    "EngineProfile",
    "EngineRequest",
    "EngineSnapshot",
    "TokenEvent",
]

CATCH_UP_S = 0.05
"""A step called late starts when it was due, but at most this long ago: timers that fire some
milliseconds late must not slow the engine, and a process that stood still must not burst."""


class _Sequence:
    """A request on its way: what is computed and which blocks it holds."""

    __slots__ = (
        "cached_tokens",
        "computed",
        "emitted",
        "gone",
        "hashes",
        "private",
        "published",
        "rank",
        "request",
        "shared",
    )

    def __init__(
        self, request: EngineRequest, rank: tuple[int, int], hashes: tuple[BlockHash, ...]
    ) -> None:
        self.request = request
        self.rank = rank
        self.hashes = hashes
        self.emitted = 0
        self.cached_tokens = 0
        self.gone = False  # cancelled: a step in flight drops its token
        self.clear_kv()

    def clear_kv(self) -> None:
        self.computed = 0
        self.private = 0
        self.published = 0  # prompt blocks offered to the prefix cache so far
        self.shared: list[BlockHash] = []

    @property
    def target(self) -> int:
        """Tokens whose KV the next output token needs."""
        return self.request.prompt_tokens + self.emitted


class EngineModel:
    """The engine: give it requests, call ``step`` at ``next_step_at``. Times are in seconds.

    The same calls with the same seed give the same events. The seed only moves the jitter.
    """

    def __init__(self, profile: EngineProfile, seed: int = 0) -> None:
        self.profile = profile
        self._rng = Random(seed)
        self._speed = profile.speed
        self._kv = KvBlocks(profile.kv_capacity_tokens // profile.block_tokens)
        self._live: dict[str, _Sequence] = {}
        self._waiting: list[_Sequence] = []  # by rank
        self._prefilling: dict[str, _Sequence] = {}
        self._decoding: dict[str, _Sequence] = {}
        self._next_at: float | None = None
        self._step_decodes: list[_Sequence] = []
        self._step_chunks: list[tuple[_Sequence, int]] = []
        self._submitted = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._finished = self._cancelled = self._preemptions = 0
        self._prefix_queries = self._prefix_hits = 0

    def __repr__(self) -> str:
        running = len(self._prefilling) + len(self._decoding)
        return f"<EngineModel running={running} waiting={len(self._waiting)} {self._kv}>"

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue a request; an idle engine starts at ``now``.

        ValueError if the id is in use or the request can never fit.
        """
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("prompt_tokens and output_tokens must be at least 1")
        if self._blocks(request.prompt_tokens + request.output_tokens) > self._kv.capacity:
            raise ValueError(
                f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens"
                f" do not fit into {self._kv.capacity * self.profile.block_tokens} tokens of KV"
            )
        priority = request.priority if self.profile.scheduling == "priority" else 0
        hashes = request.block_hashes if self.profile.prefix_cache else ()
        sequence = _Sequence(request, (priority, self._submitted), hashes)
        self._submitted += 1
        self._live[request.request_id] = sequence
        insort(self._waiting, sequence, key=_rank)
        if self._next_at is None:
            self._next_at = now

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free its blocks at once; False if it is not there any more."""
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        sequence.gone = True
        if not self._stop_running(sequence):
            del self._waiting[bisect_left(self._waiting, sequence.rank, key=_rank)]
        self._cancelled += 1
        return True

    def set_speed(self, speed: float, now: float) -> None:
        """Change the speed factor; a step in flight goes on at the new speed."""
        if speed <= 0:
            raise ValueError("speed must be more than 0")
        if self._next_at is not None and self._next_at > now:
            self._next_at = now + (self._next_at - now) * self._speed / speed
        self._speed = speed

    def next_step_at(self) -> float | None:
        """When to call ``step``; None while there is nothing to do."""
        return self._next_at

    def step(self, now: float) -> list[TokenEvent]:
        """End the step that is due by ``now``, if any, and begin the next."""
        if self._next_at is None or now < self._next_at:
            return []
        events = self._end_step()
        started_at = max(self._next_at, now - CATCH_UP_S)
        self._next_at = started_at + self._begin_step() if self._live else None
        return events

    def snapshot(self) -> EngineSnapshot:
        """State and totals at this moment."""
        return EngineSnapshot(
            running=len(self._prefilling) + len(self._decoding),
            waiting=len(self._waiting),
            kv_usage=self._kv.used / self._kv.capacity,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished=self._finished,
            cancelled=self._cancelled,
            preemptions=self._preemptions,
            prefix_queries_tokens=self._prefix_queries,
            prefix_hits_tokens=self._prefix_hits,
        )

    # Beginning a step: which tokens it computes.

    def _begin_step(self) -> float:
        """Choose the work of a step and return its seconds."""
        has_preempted = self._make_room_for_decodes()
        self._step_decodes = list(self._decoding.values())
        budget = self.profile.max_num_batched_tokens - len(self._step_decodes)
        self._step_chunks = []
        for sequence in self._prefilling.values():
            budget -= self._add_chunk(sequence, budget)
        while budget > 0 and not has_preempted and self._admit_next():
            newest = next(reversed(self._prefilling.values()))
            budget -= self._add_chunk(newest, budget)
        return self._duration_s()

    def _make_room_for_decodes(self) -> bool:
        """Give each decoding sequence space for its last token; True if others had to go."""
        before = self._preemptions
        for sequence in list(self._decoding.values()):
            while sequence.request.request_id in self._decoding and not self._grow(sequence):
                running = (*self._decoding.values(), *self._prefilling.values())
                self._preempt(max(running, key=_rank))
        return self._preemptions > before

    def _grow(self, sequence: _Sequence) -> bool:
        missing = self._blocks(sequence.target) - len(sequence.shared) - sequence.private
        if missing > 0:
            if not self._kv.reserve((), missing):
                return False
            sequence.private += missing
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        """Send a sequence back to the queue; its prompt and its answer so far are computed anew."""
        self._stop_running(sequence)
        insort(self._waiting, sequence, key=_rank)
        self._preemptions += 1

    def _add_chunk(self, sequence: _Sequence, budget: int) -> int:
        tokens = min(sequence.target - sequence.computed, budget)
        if tokens > 0:
            self._step_chunks.append((sequence, tokens))
        return tokens

    def _admit_next(self) -> bool:
        """Start the head of the queue if a slot and blocks for its whole prompt are free.

        The whole prompt, not only its first chunk: prompts that start and cannot end would
        preempt each other (vLLM's scheduler_reserve_full_isl).
        """
        running = len(self._prefilling) + len(self._decoding)
        if not self._waiting or running >= self.profile.max_num_seqs:
            return False
        sequence = self._waiting[0]
        # At least one token is computed, or nothing would yield the next one.
        usable = (sequence.target - 1) // self.profile.block_tokens
        hits = min(self._kv.cached_prefix(sequence.hashes), usable)
        private = self._blocks(sequence.target) - hits
        if not self._kv.reserve(sequence.hashes[:hits], private):
            return False
        del self._waiting[0]
        sequence.shared = list(sequence.hashes[:hits])
        sequence.private = private
        sequence.published = hits
        sequence.computed = hits * self.profile.block_tokens
        self._prefilling[sequence.request.request_id] = sequence
        if sequence.emitted == 0:
            self._count_prefix(sequence)
        return True

    def _count_prefix(self, sequence: _Sequence) -> None:
        sequence.cached_tokens = sequence.computed
        self._prefix_queries += sequence.request.prompt_tokens
        self._prefix_hits += sequence.computed

    def _duration_s(self) -> float:
        prefill_tokens = sum(tokens for _, tokens in self._step_chunks)
        seconds = (
            self.profile.step_base_s
            + prefill_tokens / self.profile.prefill_tokens_per_s
            + len(self._step_decodes) * self.profile.decode_s_per_seq
        )
        if self.profile.jitter:
            seconds *= 1 + self.profile.jitter * self._rng.uniform(-1, 1)
        return seconds / self._speed

    # Ending a step: which tokens came out.

    def _end_step(self) -> list[TokenEvent]:
        events = [self._emit(sequence) for sequence in self._step_decodes if not sequence.gone]
        for sequence, tokens in self._step_chunks:
            if sequence.gone:
                continue
            sequence.computed += tokens
            self._publish(sequence)
            if sequence.computed == sequence.target:
                self._decoding[sequence.request.request_id] = sequence
                del self._prefilling[sequence.request.request_id]
                events.append(self._emit(sequence))
        self._step_decodes, self._step_chunks = [], []
        return events

    def _publish(self, sequence: _Sequence) -> None:
        """Let other requests use the prompt blocks that are complete."""
        complete = min(sequence.computed // self.profile.block_tokens, len(sequence.hashes))
        for block in sequence.hashes[sequence.published : complete]:
            if self._kv.share(block):
                sequence.private -= 1
                sequence.shared.append(block)
        sequence.published = max(sequence.published, complete)

    def _emit(self, sequence: _Sequence) -> TokenEvent:
        request, position = sequence.request, sequence.emitted
        sequence.emitted += 1
        self._generation_tokens += 1
        if position == 0:
            self._prompt_tokens += request.prompt_tokens
        is_last = sequence.emitted == request.output_tokens
        if is_last:
            del self._live[request.request_id]
            self._stop_running(sequence)
            self._finished += 1
        return TokenEvent(request.request_id, position, is_last, sequence.cached_tokens)

    def _stop_running(self, sequence: _Sequence) -> bool:
        """Take a sequence out of the batch and free its blocks; False if it was not running."""
        request_id = sequence.request.request_id
        was_running = (
            self._decoding.pop(request_id, None) or self._prefilling.pop(request_id, None)
        ) is not None
        self._kv.release(sequence.shared, sequence.private)
        sequence.clear_kv()
        return was_running

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_tokens)


def _rank(sequence: _Sequence) -> tuple[int, int]:
    return sequence.rank
