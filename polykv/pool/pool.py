"""The pool: compressed segments that many readers share."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from polykv.codecs import DEFAULT_CODEC, Codec, get_codec
from polykv.errors import ContextReleasedError, IncompatiblePoolError, InvalidRequestError, PromptTooLongError
from polykv.models.attention import attach
from polykv.models.cache import PooledCache
from polykv.models.identity import ModelIdentity, identity_of, salt_digest, segment_identity
from polykv.models.loading import ProgressCallback
from polykv.models.step import run_step
from polykv.models.support import embedding_weight, max_positions
from polykv.pool.budget import checked_budget, segment_bytes
from polykv.pool.build import PREFILL_CHUNK_TOKENS, SegmentBuild
from polykv.pool.lease import Lease
from polykv.pool.persistence import DiskTier, LoadReport, SaveReport, save_entries
from polykv.pool.prefix import ANYWHERE_EXACT_TOKENS, PrefixCache
from polykv.pool.segment import KVSegment, SegmentKey, Span, as_span, check_context, checked_ids, segment_key
from polykv.pool.store import SegmentStore
from polykv.pool.table import Entry, Table
from polykv.pool.workflow import Workflow

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.02
"""Between two looks at a build that another thread is at."""


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment.

    Attributes:
        num_bytes: bytes allocated by everything in memory, contexts and cached segments.
        context_bytes: bytes of the contexts that callers have built.
        dense_bytes: bytes of one private float16 cache of the contexts' tokens, what transformers would hold for each reader.
        compression_ratio: ``dense_bytes / context_bytes``; 0 without contexts.
        num_segments: contexts that callers have built.
        num_leases: readers at this moment.
        hits: look-ups that a stored segment answered: a text shared again, or a request that read it.
        misses: look-ups that had to build.
        builds: segments built.
        max_bytes: the budget, or None.
        cached_segments: segments that requests have left, or cache marks asked for.
        cached_bytes: their bytes.
        evictable_bytes: of these, what nobody reads now, and goes when room is needed.
        hit_tokens: prompt tokens that were found by themselves and read instead of computed.
        published: segments that requests have left: their prompts and answers.
        evictions: segments that had to go to make room.
        demotions: of these, those that the store keeps.
        restores: segments brought back from the store.
        refused: segments that were not taken in because no room could be made.
        stored_segments: segments that are in the store alone.
        seconds_saved: what computing the tokens that were read instead had taken.
    """

    num_bytes: int
    context_bytes: int
    dense_bytes: int
    compression_ratio: float
    num_segments: int
    num_leases: int
    hits: int
    misses: int
    builds: int
    max_bytes: int | None = None
    cached_segments: int = 0
    cached_bytes: int = 0
    evictable_bytes: int = 0
    hit_tokens: int = 0
    published: int = 0
    evictions: int = 0
    demotions: int = 0
    restores: int = 0
    refused: int = 0
    stored_segments: int = 0
    seconds_saved: float = 0.0


def format_bytes(count: float) -> str:
    """``12.3 MB`` and the like, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


class SharedKVPool:
    """Immutable compressed segments, content-addressed, leased to readers.

    All methods may be called from any thread. A text shared twice is built once. What requests leave (:attr:`prefix`) stays until
    room is needed.

    Args:
        model: the model whose keys and values are stored; its attention is attached.
        tokenizer: its tokenizer; needed for :meth:`inputs` only.
        codec: default codec of :meth:`build`.
        max_bytes: budget of all segments together; half of the memory that is free now if None, ``math.inf`` for none.

    Raises:
        InvalidRequestError: max_bytes is no positive number.
        UnsupportedModelError: the model's attention cannot read a pool.
        UnknownCodecError: no such codec.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any | None = None,
        codec: str | Codec = DEFAULT_CODEC,
        *,
        max_bytes: float | None = None,
    ) -> None:
        self.codec = get_codec(codec)
        attach(model)
        self.model = model
        self.tokenizer = tokenizer
        self.identity: ModelIdentity = identity_of(model, tokenizer)
        self._lock = threading.RLock()
        self._table = Table(checked_budget(max_bytes, embedding_weight(model).device))
        self.prefix = PrefixCache(self, self._table, self._lock)
        self._live: set[Lease] = set()
        self._prefetching = threading.Lock()
        self._building: dict[SegmentKey, tuple[threading.Event, int]] = {}  # and the thread that builds
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
        parent: KVSegment | Span | None = None,
        salt: str = "",
        anywhere: bool = False,
        progress: ProgressCallback | None = None,
    ) -> KVSegment:
        """Returns the segment of these tokens, building it if it is not there. Each call counts as a handle.

        Args:
            token_ids: the context; with a parent, what follows it.
            codec: how to store it; the pool's default if None.
            parent: a context of this pool that comes before the tokens; readers of the new segment read both.
            salt: whose it is: requests of another salt never read it.
            anywhere: make it readable at any position, by requests with ``reuse="anywhere"``.
            progress: called with a phase, units done and units in all.

        Raises:
            InvalidRequestError, PromptTooLongError, UnsupportedModelError: see :func:`check_context`.
            ContextReleasedError: the parent is no longer in the pool.
            PoolFullError: the budget has no room for it.
            PolyKVError: the model gave keys or values that cannot be stored.
        """
        # closed at once when progress() raises: a traceback that is kept would keep the build's place in the line too
        with closing(self.build_steps(token_ids, codec, parent, salt=salt, anywhere=anywhere)) as steps:
            while True:
                try:
                    report = next(steps)
                except StopIteration as stop:
                    segment: KVSegment = stop.value
                    return segment
                if progress is not None:
                    progress(*report)

    def build_steps(
        self,
        token_ids: Sequence[int],
        codec: str | Codec | None = None,
        parent: KVSegment | Span | None = None,
        *,
        salt: str = "",
        anywhere: bool = False,
    ) -> Generator[tuple[str, int, int], None, KVSegment]:
        """As :meth:`build`, but as a generator that pauses after every chunk. Concurrent builders of one text wait.

        Yields:
            ``(phase, units done, units in all)``; phase ``"wait"`` while another builder is at the same text.
        """
        with closing(self.plan_build(token_ids, codec, parent, salt=salt, anywhere=anywhere)) as plan:
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
        self,
        token_ids: Sequence[int],
        codec: str | Codec | None = None,
        parent: KVSegment | Span | None = None,
        *,
        salt: str = "",
        anywhere: bool = False,
    ) -> Generator[SegmentBuild | tuple[str, int, int], None, KVSegment]:
        """As :meth:`build_steps`, but the forwards are left to the caller, who may mix them with other rows.

        Yields:
            A :class:`SegmentBuild`: run some of it before resuming. Or ``("encode", layers done, layers)``, or
            ``("wait", 0, 1)`` while another builder is at the same text.

        Returns:
            The segment; it counts as a handle.
        """
        chosen = get_codec(codec) if codec is not None else self.codec
        token_ids, salt = checked_ids(token_ids), salt_digest(salt)
        before = as_span(parent)
        check_context(self.model, token_ids, chosen, before)
        if anywhere:
            self.prefix.check_anywhere(before)
        self.sweep()
        exact = ANYWHERE_EXACT_TOKENS if anywhere else 0
        key = self._key_of(token_ids, chosen, before, salt, exact)
        hold = self.lease(before) if before is not None else None
        try:
            while True:
                with self._lock:
                    entry = self._table.get(key)
                    if entry is not None and self._table.bring(entry):
                        assert entry.segment is not None
                        self._hits += 1
                        entry.handles += 1
                        return entry.segment
                    pending = self._building.get(key)
                    if pending is None:
                        self._check_room(len(token_ids), chosen)
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
                build = SegmentBuild(
                    self.model, self.identity, token_ids, chosen, before, salt=salt, exact_tokens=exact
                )
                try:
                    while build.remaining:
                        yield build
                    for _ in range(build.num_layers):
                        yield "encode", build.encode_layer(), build.num_layers
                    built = build.finish()
                finally:
                    build.release()
                with self._lock:
                    entry = self.prefix.admit(built)
                    assert entry.segment is not None
                    built = entry.segment  # that of a request which left the same tokens meanwhile, perhaps
                    entry.handles += 1
                    self._builds += 1
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

    def _key_of(
        self, token_ids: Sequence[int], codec: Codec, parent: Span | None, salt: str, exact_tokens: int = 0
    ) -> SegmentKey:
        before = parent.context_ids.tolist() if parent is not None else []
        identity = segment_identity(self.identity, [*before, *token_ids], salt)
        return segment_key(identity, codec.name, parent, exact_tokens)

    def _check_room(self, tokens: int, codec: Codec) -> None:
        """Refuses a segment that cannot fit, before it is computed."""
        wanted = segment_bytes(self.model, codec, tokens)
        if not self._table.can_make_room(wanted):
            self._table.make_room(wanted)  # says what is wrong; evicts nothing

    # ------------------------------------------------------------------------------------------- reading

    @property
    def segments(self) -> tuple[KVSegment, ...]:
        """The contexts that callers have built, without what requests have left."""
        with self._lock:
            return tuple(
                entry.segment
                for entry in self._table
                if entry.segment is not None and (entry.handles or not entry.cached)
            )

    @property
    def segment(self) -> KVSegment:
        """The only context that callers have built.

        Raises:
            InvalidRequestError: the pool holds none or several.
        """
        segments = self.segments
        if len(segments) != 1:
            raise InvalidRequestError(f"the pool holds {len(segments)} segments; say which one")
        return segments[0]

    def lease(self, context: KVSegment | Span, owner: Any | None = None) -> Lease:
        """Claims a context for a reader.

        Raises:
            ContextReleasedError: a segment of it is no longer in the pool.
        """
        span = as_span(context)
        assert span is not None
        with self._lock:
            entries = []
            for link in span.chain:
                entry = self._table.get(link.segment.key)
                if entry is None or entry.segment is not link.segment:
                    raise ContextReleasedError(
                        f"the shared context {link.identity[:12]} has been released; share the text again"
                    )
                entries.append(entry)
            self._hits += 1
            return self.lease_entries(span, entries, owner)

    def lease_entries(self, span: Span, entries: Sequence[Entry], owner: Any | None = None) -> Lease:
        """As :meth:`lease`, where the context's entries are known; the caller holds the lock."""
        entries = list(dict.fromkeys(entries))
        self._table.lease(entries)
        self._table.touch(entries)
        lease = Lease(self, span, entries, owner)
        self._live.add(lease)
        return lease

    def lease_of(
        self,
        token_ids: Sequence[int],
        codec: str | Codec | None = None,
        parent: KVSegment | Span | None = None,
        owner: Any | None = None,
        *,
        salt: str = "",
    ) -> Lease | None:
        """Claims the segment of these tokens for a reader, or returns None if the pool does not hold it."""
        key = self._key_of(
            token_ids, get_codec(codec) if codec is not None else self.codec, as_span(parent), salt_digest(salt)
        )
        with self._lock:
            entry = self._table.get(key)
            if entry is None or not self._table.bring(entry):
                return None
            assert entry.segment is not None
            return self.lease(entry.segment, owner)

    def _end_lease(self, lease: Lease) -> None:
        with self._lock:
            if lease._released:
                return
            lease._released = True
            self._live.discard(lease)
            self._table.touch(lease.entries)
            self._table.end_lease(lease.entries)

    def release(self, segment: KVSegment) -> None:
        """Gives one handle of :meth:`build` back. The segment goes when its last handle and its last lease have gone."""
        self.sweep()
        with self._lock:
            self._give_handle_back(segment)

    def _give_handle_back(self, segment: KVSegment) -> None:
        entry = self._table.get(segment.key)
        if entry is None or entry.segment is not segment:
            return  # one release too many; another segment of the same text is its own holders'
        if entry.handles > 0:
            entry.handles -= 1
        self._table.drop_if_unused(entry)

    def keep(self, segment: KVSegment) -> KVSegment:
        """Gives a handle back like :meth:`release`, but leaves the segment in the pool until room is needed."""
        with self._lock:
            entry = self._table.get(segment.key)
            if entry is not None and entry.segment is segment:
                entry.cached = True
                self._give_handle_back(segment)
        return segment

    def clear(self) -> int:
        """Drops everything that nobody holds or reads: what requests have left and cache marks asked for. Returns the bytes freed."""
        with self._lock:
            return self._table.forget_cached()

    def forget(self, segment: KVSegment) -> None:
        """As :meth:`release`, for finalizers: takes no lock, and takes effect at the next :meth:`sweep`."""
        self._forgotten.put(segment)

    def sweep(self) -> int:
        """Takes back forgotten handles, and the leases whose owners are gone; returns how many leases there were."""
        with self._lock:
            while not self._forgotten.empty():
                self._give_handle_back(self._forgotten.get())
            orphans = [lease for lease in self._live if lease.orphaned]
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

    # ------------------------------------------------------------------------------------ disk and workflow

    def open_store(self, path: str | Path, *, max_bytes: int | None = None, read_only: bool = False) -> LoadReport:
        """Uses a folder as the pool's second tier: what it holds for this model is found, and what has to go goes there.

        Nothing but token ids is read now; a segment is mapped into memory and checked when a request needs it. Several processes may use
        one folder.

        Args:
            path: the folder; it is made if it is not there.
            max_bytes: budget of the folder; the least recently used segments are removed from it.
            read_only: never write into it.

        Returns:
            How much can be used, and why the rest cannot.

        Raises:
            StoreError: the folder cannot be used at all.
        """
        store = SegmentStore(path, max_bytes=max_bytes, read_only=read_only)
        with self._lock:
            tier = DiskTier(self, self._table, store)
            self._table.tier = tier
            return tier.load()

    def refresh_store(self) -> LoadReport:
        """Looks for what other processes have put into the store since.

        Raises:
            InvalidRequestError: no store is open.
        """
        with self._lock:
            if self._table.tier is None:
                raise InvalidRequestError("this pool has no store; call open_store(path) first")
            assert isinstance(self._table.tier, DiskTier)
            return self._table.tier.load()

    def save(self, path: str | Path | None = None) -> SaveReport:
        """Writes everything in memory into a folder, so that another pool can open it; nothing leaves the memory.

        Args:
            path: the folder; that of :meth:`open_store` if None.

        Raises:
            StoreError: the folder cannot be used at all.
            InvalidRequestError: no folder is given and no store is open.
        """
        with self._lock:
            tier = self._table.tier
            if path is not None and (
                not isinstance(tier, DiskTier) or Path(path).resolve() != tier.store.path.resolve()
            ):
                tier = DiskTier(self, self._table, SegmentStore(path))
            if not isinstance(tier, DiskTier):
                raise InvalidRequestError("say where to save: this pool has no store (open_store)")
            entries = self._table.with_requirements(entry for entry in self._table if entry.resident)
            if tier is self._table.tier:
                report = save_entries(tier, entries)
                for entry in entries:
                    entry.stored = entry.stored or entry.name in tier.store
                return report
        with self._table.holding(entries):
            return save_entries(tier, entries)

    def load(self, path: str | Path) -> LoadReport:
        """Finds again what :meth:`save` has written; see :meth:`open_store`, whose ``read_only`` this is."""
        return self.open_store(path, read_only=True)

    def attach_graph(self, graph: Any) -> Workflow:
        """Lets a LangGraph graph decide what is kept: first what its nodes will read soon (KVFlow, arXiv 2507.07400).

        Requests tell which node they come from (``ChatPolyKV`` does that by itself). What only nodes read that run late goes first when room is
        needed, and what nodes of the next step read is brought back from the store before they ask.

        Args:
            graph: a compiled graph; None takes the priorities away again.

        Raises:
            InvalidRequestError: it is no compiled graph.
        """
        workflow = Workflow(graph) if graph is not None else None
        with self._lock:
            self._table.workflow = workflow
        return workflow  # type: ignore[return-value]

    def observe(self, agent: str, step: int | None = None, run: str = "") -> None:
        """A node of the attached graph makes a call now."""
        workflow = self._table.workflow
        if workflow is None:
            return
        workflow.observe(agent, step, run)
        if self._table.tier is not None and self._prefetching.acquire(blocking=False):
            # no daemon: the interpreter must not end in the middle of a probe's forward
            threading.Thread(target=self._prefetch_once, name="polykv-prefetch").start()

    def _prefetch_once(self) -> None:
        try:
            self.prefetch()
        except Exception:
            logger.exception("bringing segments back ahead of time failed; they come when they are asked for")
        finally:
            self._prefetching.release()

    def call_ended(self, agent: str, run: str = "") -> None:
        """A call that was observed has ended."""
        workflow = self._table.workflow
        if workflow is not None:
            workflow.ended(agent, run)

    def prefetch(self) -> int:
        """Brings back from the store what agents of the next step read, as long as nothing they need sooner must go for it.

        Returns:
            Segments brought back.
        """
        with self._lock:
            wanted = sorted(
                (entry for entry in self._table if not entry.resident and self._table.steps_to_execution(entry) <= 1),
                key=lambda entry: (self._table.steps_to_execution(entry), -entry.last_used),
            )
        done = 0
        for entry in wanted if self._table.workflow is not None else ():
            with self._lock:  # for each anew: requests must not wait for all of them
                if self._table.get(entry.key) is not entry or entry.resident:
                    continue
                if not self._table.can_make_room(entry.num_bytes, later_than=self._table.steps_to_execution(entry)):
                    break
                done += self._table.bring(entry)
        return done

    # ----------------------------------------------------------------------------------------- reporting

    @property
    def num_leases(self) -> int:
        """Readers at this moment."""
        self.sweep()
        with self._lock:
            return len(self._live)

    def stats(self) -> PoolStats:
        """Bytes and counters; see :class:`PoolStats`."""
        self.sweep()
        with self._lock:
            table, segments = self._table, self.segments
            held = sum(segment.num_bytes for segment in segments)
            dense = sum(segment.dense_bytes for segment in segments)
            cached = [entry for entry in table if entry.cached and entry.resident and not entry.handles]
            return PoolStats(
                num_bytes=table.num_bytes,
                context_bytes=held,
                dense_bytes=dense,
                compression_ratio=dense / held if held else 0.0,
                num_segments=len(segments),
                num_leases=self.num_leases,
                hits=self._hits,
                misses=self._misses,
                builds=self._builds,
                max_bytes=table.max_bytes,
                cached_segments=len(cached),
                cached_bytes=sum(entry.num_bytes for entry in cached),
                evictable_bytes=table.evictable_bytes,
                hit_tokens=self.prefix.hit_tokens,
                published=self.prefix.published,
                evictions=table.evictions,
                demotions=table.demotions,
                restores=table.restores,
                refused=table.refused,
                stored_segments=sum(not entry.resident for entry in table),
                seconds_saved=self.prefix.seconds_saved,
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
        saved = private - stats.context_bytes
        share = 100 * saved / private if private else 0.0
        tokens = sum(segment.num_tokens for segment in self.segments)
        rows = [
            ("one private float16 cache", stats.dense_bytes, ""),
            (f"{n_agents} x that", private, "what private caches would take"),
            ("the pool, allocated", stats.context_bytes, f"{stats.compression_ratio:.2f}x smaller than one"),
            (f"saved with {n_agents} reader(s)", saved, f"{share:.1f} %"),
        ]
        if stats.cached_segments:
            rows.append(("left by requests", stats.cached_bytes, "goes when room is needed"))
        head = f"Shared KV pool: {tokens} tokens in {stats.num_segments} segment(s), model in {self.model.dtype}"
        return "\n".join([head, *(f"  {label:<26}{format_bytes(n):>10}  {note}".rstrip() for label, n, note in rows)])

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws what the pool holds: a row a segment, as long as its tokens, with bytes, hits and readers. Needs matplotlib.

        Args:
            path: where to save the picture; not saved if None.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed (``pip install polykv[eval]``).
        """
        from polykv.pool.plot import draw

        with self._lock:
            self.sweep()
            return draw(self._table, path)

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
