"""Who waits, who runs, and which rows each contributes to the next forward."""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessor, PreTrainedModel

from polykv.engine.detokenizer import Detokenizer
from polykv.engine.grammar import GrammarMatcher
from polykv.engine.pacing import share_rows
from polykv.engine.request import Completion, FinishReason, RequestHandle, Timing
from polykv.engine.sampling import Choice, Sampler
from polykv.engine.stops import StopMatcher
from polykv.models.step import Piece
from polykv.models.tails import Tail
from polykv.pool.build import SegmentBuild
from polykv.pool.index import as_tokens, common_prefix
from polykv.pool.lease import Lease
from polykv.pool.segment import Span
from polykv.pool.table import Entry

_arrivals = itertools.count()


@dataclass(frozen=True)
class Jump:
    """A stored document in a prompt, which is read where the prompt has it.

    Attributes:
        start: position of its first token.
        skip: so many of its tokens are computed anew.
        document: the pool's entry.
        lease: keeps it until the request is there.
    """

    start: int
    skip: int
    document: Entry
    lease: Lease

    @property
    def position(self) -> int:
        """Position of the first token that is read and not computed."""
        return self.start + self.skip


class Sequence:
    """A request inside the engine: what has been computed, and its private tail.

    Args:
        handle: the caller's end.
        lease: claim on the shared context, or None.
        model: decides the tail's shape.
        tokenizer: turns ids into text.
        eos_ids: ids that end the answer.
        matcher: of the request's grammar, or None.
        processors: further logits processors of the request.
        fast_forward: take the tokens that the grammar forces at once.

    Attributes:
        handle: the caller's end.
        lease: claim on the shared context; None for none, and while it is being built.
        base: the context that the request named, without what was found by its tokens.
        tail: private keys and values; their storage is allocated by the first forward.
        pending: ids whose keys and values are still to be computed: the prompt up to its end or the next jump, or the last token.
        position: absolute position of ``pending[0]``.
        jumps: stored documents in the rest of the prompt, in order.
        cached_tokens: tokens of the prompt that are read and were not computed.
        computed_cells: tokens that are read from the pool and were computed for this very request.
        generated: ids chosen so far.
    """

    def __init__(
        self,
        handle: RequestHandle,
        lease: Lease | None,
        model: PreTrainedModel,
        tokenizer: Any,
        eos_ids: frozenset[int],
        matcher: GrammarMatcher | None = None,
        processors: Seq[LogitsProcessor] = (),
        *,
        fast_forward: bool = True,
    ) -> None:
        request = handle.request
        self.handle = handle
        self._model = model
        self.generated: list[int] = []
        self.sampler = Sampler(request.sampling, request.token_ids, processors, matcher)
        self._fast_forward = fast_forward
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._detokenizer = Detokenizer(tokenizer, request.visible_tokens)
        self._stops = StopMatcher(request.sampling.stop)
        self._text: list[str] = []
        self._choices: list[Choice] = []
        self.arrival = next(_arrivals)
        self.tokens = as_tokens(request.token_ids)
        self._shared: dict[int, int] = {}  # by the other's arrival: it is asked for in every step while this one waits
        self._chain: tuple[Span, ...] | None = None
        self._tail_bytes = 0
        self.started_at: float | None = None
        self.left_at = 0.0  # when it last left its tail in the pool
        self._first_token_at: float | None = None
        self._start_from(lease)

    def _start_from(self, lease: Lease | None) -> None:
        self.lease: Lease | None = None
        self.base = lease.span if lease is not None else None
        self.jumps: deque[Jump] = deque()
        self.position = self.cached_tokens = self.computed_cells = 0
        self.go_on(lease)

    def found(self, lease: Lease) -> None:
        """Takes the context that it waited for, instead of the shorter one it had."""
        before, self.lease = self.lease, None
        if before is not None:
            before.release()
        self._start_from(lease)

    def charge(self, tokens: int) -> None:
        """Does not count tokens as found that were computed for this request, although they are read from the pool."""
        self.cached_tokens += self.computed_cells - tokens
        self.computed_cells = tokens

    def go_on(self, lease: Lease | None) -> None:
        """Reads a context from now on, with a new tail behind it; what it holds beyond the old tail is not computed."""
        before, self.lease = self.lease, lease
        if before is not None and before is not lease:
            before.release()
        end = lease.span.end if lease is not None else 0
        self.cached_tokens += max(0, end - self.position)
        self.position = max(self.position, end)
        if not self.generated:
            self.plan_run()
        request = self.handle.request
        # the last token's keys and values are never needed
        limit = len(request.token_ids) + request.sampling.max_tokens - 1 - self.position
        self.tail = Tail(self._model, limit=limit)

    def plan_run(self) -> None:
        """Sets what is computed next: the prompt up to the next jump, or up to its end."""
        goal = self.jumps[0].position if self.jumps else len(self.handle.request.token_ids)
        self.pending = list(self.handle.request.token_ids[self.position : goal])

    @property
    def computed(self) -> tuple[int, ...]:
        """All tokens up to the position: read and computed."""
        ids = self.handle.request.token_ids
        return (
            ids[: self.position] if self.position <= len(ids) else (*ids, *self.generated[: self.position - len(ids)])
        )

    @property
    def tail_bytes(self) -> int:
        """Bytes of the private tail at its largest."""
        self._tail_bytes = max(self._tail_bytes, self.tail.nbytes)
        return self._tail_bytes

    def shared_with(self, other: Sequence) -> int:
        """Tokens that this prompt could read of another: what both begin with, without this one's last."""
        if other.arrival not in self._shared:
            self._shared[other.arrival] = min(common_prefix(self.tokens, other.tokens), len(self.tokens) - 1)
        return self._shared[other.arrival]

    @property
    def order(self) -> tuple[int, int]:
        """Sort key in the queue: higher priority first, then first come, first served."""
        return (-self.handle.request.priority, self.arrival)

    @property
    def expired(self) -> bool:
        """Whether the request's timeout is over."""
        timeout = self.handle.request.timeout
        return timeout is not None and time.perf_counter() - self.handle.submitted_at >= timeout

    def piece(self, rows: int) -> Piece:
        """The next ``rows`` pending ids, for a forward."""
        return Piece(self.pending[:rows], self.position, self.tail, self._spans(), wants_logits=self.wants_token(rows))

    def _spans(self) -> tuple[Span, ...]:
        if self.lease is None:
            return ()
        if self._chain is None or self._chain[-1] is not self.lease.span:
            self._chain = self.lease.span.chain
        return self._chain

    def wants_token(self, rows: int) -> bool:
        """Whether a forward of ``rows`` reaches the end of what is pending, so that a token can be chosen."""
        return rows == len(self.pending) and not self.jumps

    def advance(self, rows: int) -> None:
        """Marks the first ``rows`` pending ids as computed."""
        del self.pending[:rows]
        self.position += rows

    def accept(self, choice: Choice) -> Completion | None:
        """Takes a chosen token, and those that its grammar forces after it; returns the completion if one was the last."""
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
        completion = self._take(choice)
        self.pending = [choice.token_id]
        if completion is not None or not self._fast_forward:
            return completion
        for token_id in self.sampler.forced():
            self.sampler.take(token_id)
            completion = self._take(Choice(token_id))
            if completion is not None:
                return completion
            self.pending.append(token_id)
        return None

    def _take(self, choice: Choice) -> Completion | None:
        token_id = choice.token_id
        self.generated.append(token_id)
        if self.handle.request.sampling.logprobs:
            self._choices.append(choice)
        if token_id in self._eos_ids:
            return self._complete("stop")
        self._emit(self._stops.feed(self._detokenizer.feed(token_id)))
        if self._stops.stopped or self.sampler.finished:
            return self._complete("stop")
        if len(self.generated) >= self.handle.request.sampling.max_tokens:
            return self._complete("length")
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
            logprobs=tuple(self._choices) if self.handle.request.sampling.logprobs else None,
            stop_string=self._stops.found,
        )

    def release(self) -> None:
        """Frees the tail and gives the leases back. Idempotent."""
        self._tail_bytes = self.tail_bytes
        self.tail.release()
        leases = [lease for lease in (self.lease, *(jump.lease for jump in self.jumps)) if lease is not None]
        # whoever still has this sequence must not keep segments alive that the pool has let go of
        self.lease = self.base = self._chain = None
        self.jumps.clear()
        for lease in leases:
            lease.release()


@dataclass(frozen=True)
class Work:
    """A sequence's part in one forward: its next ``rows`` pending ids."""

    sequence: Sequence
    rows: int

    @property
    def wants_token(self) -> bool:
        """Whether the forward reaches the end of what is pending, so that a token can be chosen."""
        return self.sequence.wants_token(self.rows)

    @property
    def decodes(self) -> bool:
        """Whether it is a token of the answer and not a part of the prompt."""
        return bool(self.sequence.generated)

    def piece(self) -> Piece:
        """Its form for a forward."""
        return self.sequence.piece(self.rows)


@dataclass(frozen=True)
class Batch:
    """What one forward computes.

    Attributes:
        work: sequences' parts.
        build: a segment in the making that takes part, or None.
        build_rows: its rows.
    """

    work: Seq[Work]
    build: SegmentBuild | None = None
    build_rows: int = 0

    @property
    def decoding(self) -> int:
        """Rows that are tokens of answers."""
        return sum(work.rows for work in self.work if work.decodes)

    @property
    def prompt_rows(self) -> int:
        """Rows of prompts and of the segment."""
        return sum(work.rows for work in self.work if not work.decodes) + self.build_rows

    @property
    def prompt_context(self) -> int:
        """The most tokens that come before a row of a prompt or of the segment."""
        positions = [work.sequence.position for work in self.work if not work.decodes]
        return max([*positions, self.build.position if self.build is not None else 0])

    def pieces(self) -> list[Piece]:
        """Its parts for a forward, the segment's last."""
        pieces = [work.piece() for work in self.work]
        if self.build is not None:
            pieces.append(self.build.piece(self.build_rows))
        return pieces


class Scheduler:
    """Starts requests by priority and arrival. Every running one takes part in every forward.

    Decoding requests contribute a row each (and one for each token that a grammar has forced). Prompts, and a segment that is being built, share a number of further rows evenly:
    a long one neither stalls the answers in progress nor keeps a short one behind it from starting.

    Args:
        max_batch: sequences running at once.
    """

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def queue(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue at its place."""
        insort(self.waiting, sequence, key=lambda s: s.order)

    @property
    def room(self) -> int:
        """Requests that can start now."""
        return self.max_batch - len(self.running)

    @property
    def decoding(self) -> int:
        """Running requests that have begun their answers."""
        return sum(bool(s.generated) for s in self.running)

    def prompt_context(self, build: SegmentBuild | None) -> int:
        """The most tokens that come before the next row of a prompt or of a segment in the making."""
        positions = [s.position for s in self.running if not s.generated]
        return max([*positions, build.position if build is not None else 0])

    def next_batch(self, prompt_rows: int, build: SegmentBuild | None = None, chunk: int | None = None) -> Batch:
        """The next forward; its ``work`` and ``build`` are empty when nothing runs.

        Args:
            prompt_rows: rows that prompts and the segment may have together.
            build: a segment in the making, or None.
            chunk: give each prompt and the segment exactly this many rows of what they have left, whatever else runs.
        """
        decoding = [Work(s, len(s.pending)) for s in self.running if s.generated]
        prompts = [s for s in self.running if not s.generated]
        wanted = [len(s.pending) for s in prompts] + ([build.remaining] if build is not None else [])
        shares = share_rows(wanted, prompt_rows) if chunk is None else [min(rows, chunk) for rows in wanted]
        work = decoding + [Work(s, rows) for s, rows in zip(prompts, shares, strict=False) if rows]
        if build is not None and shares[-1]:
            return Batch(work, build, shares[-1])
        return Batch(work)
