"""Which requests take part in the next forward, and with how many rows."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from polykv.engine.detokenizer import Detokenizer
from polykv.engine.request import Completion, FinishReason, RequestHandle, Timing
from polykv.engine.sampling import Sampler
from polykv.engine.stops import StopMatcher
from polykv.models.tail import TailLayer
from polykv.pool.lease import Lease


class Sequence:
    """A request inside the engine: what has been computed, and its private tail.

    Attributes:
        handle: the caller's end.
        lease: claim on the shared context, or None.
        tails: one tail a layer; their storage is allocated by the first forward.
        pending: ids whose keys and values are still to be computed: the rest of the prompt, or the last token.
        position: absolute position of ``pending[0]``.
        generated: ids chosen so far.
    """

    def __init__(
        self,
        handle: RequestHandle,
        lease: Lease | None,
        num_layers: int,
        tokenizer: object,
        eos_ids: frozenset[int],
    ) -> None:
        request = handle.request
        self.handle = handle
        self.lease = lease
        self.cached_tokens = lease.segment.num_tokens if lease is not None else 0
        self.tails = [TailLayer(self.cached_tokens) for _ in range(num_layers)]
        self.pending = list(request.token_ids[self.cached_tokens :])
        self.position = self.cached_tokens
        self.generated: list[int] = []
        self.sampler = Sampler(request.sampling)
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(request.sampling.stop)
        self._text: list[str] = []
        self.started_at: float | None = None
        self._first_token_at: float | None = None

    @property
    def tail_bytes(self) -> int:
        """Bytes allocated for the private tail."""
        return sum(tail.nbytes for tail in self.tails)

    def advance(self, rows: int) -> None:
        """Marks the first ``rows`` pending ids as computed."""
        del self.pending[:rows]
        self.position += rows

    def accept(self, token_id: int) -> Completion | None:
        """Takes a chosen token; returns the completion if it was the last."""
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
        self.generated.append(token_id)
        if token_id in self._eos_ids:
            return self._complete("stop")
        self._emit(self._stops.feed(self._detokenizer.feed(token_id)))
        if self._stops.stopped:
            return self._complete("stop")
        if len(self.generated) >= self.handle.request.sampling.max_tokens:
            return self._complete("length")
        self.pending = [token_id]
        return None

    def _emit(self, piece: str) -> None:
        self._text.append(piece)
        self.handle.push(piece)

    def _complete(self, reason: FinishReason) -> Completion:
        if not self._stops.stopped:
            self._emit(self._stops.feed(self._detokenizer.flush()))
            if self._stops.stopped:
                reason = "stop"
            else:
                self._emit(self._stops.flush())
        submitted, now = self.handle.submitted_at, time.perf_counter()
        started, first = self.started_at or now, self._first_token_at or now
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self.generated),
            finish_reason=reason,
            prompt_tokens=len(self.handle.request.token_ids),
            cached_tokens=self.cached_tokens,
            tail_bytes=self.tail_bytes,
            timing=Timing(started - submitted, first - submitted, now - submitted),
        )

    def release(self) -> None:
        """Frees the tail and gives the lease back. Idempotent."""
        for tail in self.tails:
            tail.reset()
        if self.lease is not None:
            self.lease.release()


@dataclass(frozen=True)
class Work:
    """A sequence's part in one forward: its next ``rows`` pending ids."""

    sequence: Sequence
    rows: int

    @property
    def wants_token(self) -> bool:
        """Whether the forward reaches the end of what is pending, so that a token can be chosen."""
        return self.rows == len(self.sequence.pending)


class Scheduler:
    """First come, first served. Decoding rows always take part; prompts share what is left of the token budget.

    Args:
        max_batch: sequences running at once.
        token_budget: rows of one forward; bounds both its time and its memory.
    """

    def __init__(self, max_batch: int, token_budget: int) -> None:
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def admissible(self) -> bool:
        """Whether a waiting request can start."""
        return bool(self.waiting) and len(self.running) < self.max_batch

    def next_batch(self) -> list[Work]:
        """The work of the next forward; empty when nothing runs."""
        budget = max(self.token_budget, len(self.running))
        decoding = [s for s in self.running if s.generated]
        batch = [Work(s, 1) for s in decoding]
        budget -= len(batch)
        for sequence in self.running:
            if not sequence.generated and budget > 0:
                rows = min(budget, len(sequence.pending))
                batch.append(Work(sequence, rows))
                budget -= rows
        return batch
