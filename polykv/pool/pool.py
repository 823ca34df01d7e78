"""The pool: compressed segments that many readers share."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from polykv.codecs import DEFAULT_CODEC, Codec, get_codec
from polykv.errors import ContextReleasedError, IncompatiblePoolError, InvalidRequestError, PromptTooLongError
from polykv.models.attention import attach
from polykv.models.cache import PooledCache
from polykv.models.identity import ModelIdentity, identity_of, segment_identity
from polykv.models.loading import ProgressCallback
from polykv.models.step import run_step
from polykv.models.support import embedding_weight, max_positions
from polykv.pool.build import PREFILL_CHUNK_TOKENS, SegmentBuild
from polykv.pool.lease import Lease
from polykv.pool.segment import KVSegment, check_context, checked_ids

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.02
"""Between two looks at a build that another thread is at."""

# (identity, codec) of the segment and of its parents: a segment depends on how its parents are stored
_Key = tuple[tuple[str, str], ...]


def _key(segment: KVSegment) -> _Key:
    return tuple((link.identity, link.codec) for link in segment.chain)


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment.

    Attributes:
        num_bytes: bytes allocated by all segments.
        dense_bytes: bytes of one private float16 cache of the same tokens, what transformers would hold for each reader.
        compression_ratio: ``dense_bytes / num_bytes``; 0 for an empty pool.
        num_segments: segments held.
        num_leases: readers at this moment.
        hits: look-ups that a stored segment answered: a text shared again, or a request that read it.
        misses: look-ups that had to build.
        builds: segments built.
    """

    num_bytes: int
    dense_bytes: int
    compression_ratio: float
    num_segments: int
    num_leases: int
    hits: int
    misses: int
    builds: int


def format_bytes(count: float) -> str:
    """``12.3 MB`` and the like, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


class SharedKVPool:
    """Immutable compressed segments, content-addressed, leased to readers.

    All methods may be called from any thread. A text shared twice is built once.

    Args:
        model: the model whose keys and values are stored; its attention is attached.
        tokenizer: its tokenizer; needed for :meth:`inputs` only.
        codec: default codec of :meth:`build`.

    Raises:
        UnsupportedModelError: the model's attention cannot read a pool.
        UnknownCodecError: no such codec.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any | None = None, codec: str | Codec = DEFAULT_CODEC
    ) -> None:
        self.codec = get_codec(codec)
        attach(model)
        self.model = model
        self.tokenizer = tokenizer
        self.identity: ModelIdentity = identity_of(model, tokenizer)
        self._lock = threading.RLock()
        self._segments: dict[_Key, KVSegment] = {}
        self._handles: dict[_Key, int] = {}
        self._leases: dict[_Key, list[Lease]] = {}
        self._parents: dict[_Key, Lease] = {}  # a segment's hold on the one before it
        self._building: dict[_Key, tuple[threading.Event, int]] = {}  # and the thread that builds
        self._forgotten: queue.SimpleQueue[KVSegment] = queue.SimpleQueue()
        self._hits = self._misses = self._builds = 0

    @classmethod
    def from_token_ids(
        cls,
        model: PreTrainedModel,
        token_ids: Sequence[int],
        codec: str | Codec = DEFAULT_CODEC,
        *,
        tokenizer: Any | None = None,
        progress: ProgressCallback | None = None,
    ) -> SharedKVPool:
        """A pool with one segment, built from token ids.

        Args:
            model: a causal language model.
            token_ids: the context, ``[T]``; begin it as the model expects (with BOS, from a template, ...).
            codec: how to store it.
            tokenizer: the tokenizer, for :meth:`inputs`.
            progress: called with a phase, units done and units in all.

        Raises:
            InvalidRequestError: no tokens, or ids outside the vocabulary.
            PromptTooLongError: more tokens than the model has positions.
            UnsupportedModelError: the model or its head_dim cannot be served.
        """
        pool = cls(model, tokenizer, codec)
        pool.build([int(token) for token in token_ids], progress=progress)
        return pool

    # ------------------------------------------------------------------------------------------ building

    def build(
        self,
        token_ids: Sequence[int],
        codec: str | Codec | None = None,
        *,
        parent: KVSegment | None = None,
        progress: ProgressCallback | None = None,
    ) -> KVSegment:
        """Returns the segment of these tokens, building it if it is not there. Each call counts as a handle.

        Args:
            token_ids: the context; with a parent, what follows it.
            codec: how to store it; the pool's default if None.
            parent: a segment of this pool that comes before the tokens; readers of the new segment read both.
            progress: called with a phase, units done and units in all.

        Raises:
            InvalidRequestError, PromptTooLongError, UnsupportedModelError: see :func:`check_context`.
            ContextReleasedError: the parent is no longer in the pool.
            PolyKVError: the model gave keys or values that cannot be stored.
        """
        # closed at once when progress() raises: a traceback that is kept would keep the build's place in the line too
        with closing(self.build_steps(token_ids, codec, parent)) as steps:
            while True:
                try:
                    report = next(steps)
                except StopIteration as stop:
                    segment: KVSegment = stop.value
                    return segment
                if progress is not None:
                    progress(*report)

    def build_steps(
        self, token_ids: Sequence[int], codec: str | Codec | None = None, parent: KVSegment | None = None
    ) -> Generator[tuple[str, int, int], None, KVSegment]:
        """As :meth:`build`, but as a generator that pauses after every chunk. Concurrent builders of one text wait.

        Yields:
            ``(phase, units done, units in all)``; phase ``"wait"`` while another builder is at the same text.
        """
        with closing(self.plan_build(token_ids, codec, parent)) as plan:
            while True:
                try:
                    event = next(plan)
                except StopIteration as stop:
                    segment: KVSegment = stop.value
                    return segment
                if isinstance(event, SegmentBuild):
                    run_step(self.model, [event.piece(PREFILL_CHUNK_TOKENS)])
                    event = "prefill", event.num_tokens - event.remaining, event.num_tokens
                elif event[0] == "wait":
                    time.sleep(WAIT_SECONDS)
                yield event

    def plan_build(
        self, token_ids: Sequence[int], codec: str | Codec | None = None, parent: KVSegment | None = None
    ) -> Generator[SegmentBuild | tuple[str, int, int], None, KVSegment]:
        """As :meth:`build_steps`, but the forwards are left to the caller, who may mix them with other rows.

        Yields:
            A :class:`SegmentBuild`: run some of it before resuming. Or ``("encode", layers done, layers)``, or
            ``("wait", 0, 1)`` while another builder is at the same text.

        Returns:
            The segment; it counts as a handle.
        """
        chosen = get_codec(codec) if codec is not None else self.codec
        token_ids = checked_ids(token_ids)
        check_context(self.model, token_ids, chosen, parent)
        self.sweep()
        key = self._key_of(token_ids, chosen, parent)
        hold = self.lease(parent) if parent is not None else None
        try:
            while True:
                with self._lock:
                    segment = self._segments.get(key)
                    if segment is not None:
                        self._hits += 1
                        self._handles[key] += 1
                        return segment
                    pending = self._building.get(key)
                    if pending is None:
                        self._building[key] = threading.Event(), threading.get_ident()
                        self._misses += 1
                        break
                done, builder = pending
                if builder == threading.get_ident():
                    raise InvalidRequestError(
                        "this thread is in the middle of building the very same context, and would wait for itself; finish that "
                        "build, or ask in another thread"
                    )
                while not done.is_set():
                    yield "wait", 0, 1  # the caller decides how to spend the time
            try:
                build = SegmentBuild(self.model, self.identity, token_ids, chosen, parent)
                try:
                    while build.remaining:
                        yield build
                    for _ in range(build.num_layers):
                        yield "encode", build.encode_layer(), build.num_layers
                    built = build.finish()
                finally:
                    build.release()
                with self._lock:
                    self._segments[key] = built
                    self._handles[key] = 1
                    self._builds += 1
                    if hold is not None:
                        self._parents[key], hold = hold, None
            finally:
                with self._lock:
                    self._building.pop(key)[0].set()
        finally:
            if hold is not None:
                hold.release()
        logger.info(
            "built segment %s: %d tokens, %s with codec %s (%.2fx)",
            built.identity[:12],
            built.num_tokens,
            format_bytes(built.num_bytes),
            built.codec,
            built.compression_ratio,
        )
        return built

    def _key_of(self, token_ids: Sequence[int], codec: Codec, parent: KVSegment | None) -> _Key:
        before = parent.context_ids.tolist() if parent is not None else []
        link = (segment_identity(self.identity, [*before, *token_ids]), codec.name)
        return (*(_key(parent) if parent is not None else ()), link)

    # ------------------------------------------------------------------------------------------- reading

    @property
    def segments(self) -> tuple[KVSegment, ...]:
        """The segments held at this moment."""
        with self._lock:
            return tuple(self._segments.values())

    @property
    def segment(self) -> KVSegment:
        """The only segment.

        Raises:
            InvalidRequestError: the pool holds none or several.
        """
        segments = self.segments
        if len(segments) != 1:
            raise InvalidRequestError(f"the pool holds {len(segments)} segments; say which one")
        return segments[0]

    def lease(self, segment: KVSegment, owner: Any | None = None) -> Lease:
        """Claims a segment for a reader.

        Raises:
            ContextReleasedError: the segment is no longer in the pool.
        """
        key = _key(segment)
        with self._lock:
            if self._segments.get(key) is not segment:
                raise ContextReleasedError(
                    f"the shared context {segment.identity[:12]} has been released; share the text again"
                )
            lease = Lease(self, segment, owner)
            self._leases.setdefault(key, []).append(lease)
            self._hits += 1
            return lease

    def lease_of(
        self,
        token_ids: Sequence[int],
        codec: str | Codec | None = None,
        parent: KVSegment | None = None,
        owner: Any | None = None,
    ) -> Lease | None:
        """Claims the segment of these tokens for a reader, or returns None if the pool does not hold it."""
        key = self._key_of(token_ids, get_codec(codec) if codec is not None else self.codec, parent)
        with self._lock:
            segment = self._segments.get(key)
            return self.lease(segment, owner) if segment is not None else None

    def _end_lease(self, lease: Lease) -> None:
        with self._lock:
            if lease._released:
                return
            lease._released = True
            key = _key(lease.segment)
            leases = self._leases[key]
            leases.remove(lease)
            if not leases:
                del self._leases[key]
            self._drop_if_unused(key)

    def release(self, segment: KVSegment) -> None:
        """Gives one handle of :meth:`build` back. The segment goes when its last handle and its last lease have gone."""
        self.sweep()
        with self._lock:
            self._give_handle_back(segment)

    def _give_handle_back(self, segment: KVSegment) -> None:
        key = _key(segment)
        if self._segments.get(key) is not segment:
            return  # one release too many; another segment of the same text is its own holders'
        if self._handles.get(key, 0) > 0:
            self._handles[key] -= 1
        self._drop_if_unused(key)

    def forget(self, segment: KVSegment) -> None:
        """As :meth:`release`, for finalizers: takes no lock, and takes effect at the next :meth:`sweep`."""
        self._forgotten.put(segment)

    def _drop_if_unused(self, key: _Key) -> None:
        if self._handles.get(key) == 0 and key not in self._leases:
            self._segments.pop(key, None)
            self._handles.pop(key, None)
            hold = self._parents.pop(key, None)
            if hold is not None:
                hold.release()

    def sweep(self) -> int:
        """Takes back forgotten handles, and the leases whose owners are gone; returns how many leases there were."""
        with self._lock:
            while not self._forgotten.empty():
                self._give_handle_back(self._forgotten.get())
            orphans = [lease for leases in self._leases.values() for lease in leases if lease.orphaned]
            for lease in orphans:
                lease.release()
            return len(orphans)

    def new_cache(self, segment: KVSegment | None = None) -> PooledCache:
        """A cache for ``model(input_ids, cache=...)`` or ``model.generate(**pool.inputs(...), cache=...)``.

        It holds a lease until it is released or collected. Make a new one for every call.
        """
        chosen = segment or self.segment
        return PooledCache(chosen, lambda cache: self.lease(chosen, owner=cache))

    def inputs(self, question: str | Sequence[str], segment: KVSegment | None = None) -> dict[str, torch.Tensor]:
        """Ids and mask that continue the context with one question or a batch of them.

        The question is raw text and gets no special tokens: it continues the document mid-stream.

        Args:
            question: one text or several.
            segment: which context; the only one by default.

        Returns:
            ``input_ids`` ``[B, n]``, left-padded, of the questions alone, and ``attention_mask`` ``[B, T + n]`` over
            context and questions.

        Raises:
            InvalidRequestError: the pool has no tokenizer, or a question is empty.
            PromptTooLongError: context and question exceed the model's positions.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("this pool has no tokenizer; pass tokenizer= when you make it")
        chosen = segment or self.segment
        questions = [question] if isinstance(question, str) else list(question)
        if not questions:
            raise InvalidRequestError("no question was given; give at least one")
        rows = [question_ids(self.tokenizer, text) for text in questions]
        longest = max(len(row) for row in rows)
        context = chosen.end
        check_length(self.model, context, longest, 0)
        pad = self.tokenizer.pad_token_id
        pad = pad if pad is not None else 0
        device = embedding_weight(self.model).device
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
        mask = torch.ones((len(rows), context + longest), dtype=torch.long, device=device)
        for index, row in enumerate(rows):
            mask[index, context : context + longest - len(row)] = 0
        return {"input_ids": ids, "attention_mask": mask}

    # ----------------------------------------------------------------------------------------- reporting

    @property
    def num_leases(self) -> int:
        """Readers at this moment."""
        self.sweep()
        with self._lock:
            return sum(len(leases) for leases in self._leases.values())

    def stats(self) -> PoolStats:
        """Bytes and counters; see :class:`PoolStats`."""
        self.sweep()
        with self._lock:
            num_bytes = sum(segment.num_bytes for segment in self._segments.values())
            dense = sum(segment.dense_bytes for segment in self._segments.values())
            return PoolStats(
                num_bytes=num_bytes,
                dense_bytes=dense,
                compression_ratio=dense / num_bytes if num_bytes else 0.0,
                num_segments=len(self._segments),
                num_leases=self.num_leases,
                hits=self._hits,
                misses=self._misses,
                builds=self._builds,
            )

    def memory_summary(self, n_agents: int = 1) -> str:
        """What ``n_agents`` readers take, shared and not, in allocated bytes. Private tails come on top of either.

        Raises:
            InvalidRequestError: n_agents is below 1.
        """
        if n_agents < 1:
            raise InvalidRequestError(f"n_agents must be at least 1, got {n_agents}")
        stats = self.stats()
        private = n_agents * stats.dense_bytes
        saved = private - stats.num_bytes
        share = 100 * saved / private if private else 0.0
        tokens = sum(segment.num_tokens for segment in self.segments)
        rows = [
            ("one private float16 cache", stats.dense_bytes, ""),
            (f"{n_agents} x that", private, "what private caches would take"),
            ("the pool, allocated", stats.num_bytes, f"{stats.compression_ratio:.2f}x smaller than one"),
            (f"saved with {n_agents} reader(s)", saved, f"{share:.1f} %"),
        ]
        head = f"Shared KV pool: {tokens} tokens in {stats.num_segments} segment(s), model in {self.model.dtype}"
        return "\n".join([head, *(f"  {label:<26}{format_bytes(n):>10}  {note}".rstrip() for label, n, note in rows)])

    def check_model(self, model: PreTrainedModel, tokenizer: Any | None = None) -> None:
        """Refuses a model or tokenizer other than the pool's.

        Raises:
            IncompatiblePoolError: names what differs.
        """
        other = identity_of(model, tokenizer)
        reason = self.identity.mismatch(other)
        if reason is not None:
            raise IncompatiblePoolError(
                f"the pool was built with {self.identity.name!r}; {other.name!r} differs in its {reason}. Build a pool "
                "with this model and tokenizer, or use the pool's own."
            )


def question_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that continues a context: no BOS or other special token is added mid-stream.

    Raises:
        InvalidRequestError: not a string, or no tokens.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(f"a question must be a string, got {type(text).__name__}")
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise InvalidRequestError(f"the question {text!r} has no tokens; ask something")
    return ids


def check_length(model: PreTrainedModel, context: int, prompt: int, answer: int) -> None:
    """Refuses a request that would run over the model's positions; nothing is ever truncated.

    Raises:
        PromptTooLongError: names the counts, the limit and the remedy.
    """
    limit, total = max_positions(model.config), context + prompt + answer
    if total > limit:
        raise PromptTooLongError(
            f"context {context} + prompt {prompt} + max_tokens {answer} = {total} tokens, but the model has {limit} "
            f"positions; shorten the context or prompt, or lower max_tokens, by {total - limit}"
        )
