"""The engine: one thread owns the model and runs every request in one forward a step."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel

from polykv.codecs import Codec, get_codec
from polykv.engine.grammar import Grammar, GrammarMatcher, compiler_for
from polykv.engine.pacing import Pacer
from polykv.engine.request import WAITS_FOR_ITSELF, Request, RequestHandle, SamplingParams, serving
from polykv.engine.runner import ModelRunner
from polykv.engine.sampling import Choice, sample_batch
from polykv.engine.scheduler import Batch, Jump, Scheduler, Sequence, Work
from polykv.errors import (
    EngineClosedError,
    EngineOverloaded,
    IncompatiblePoolError,
    InvalidRequestError,
    PoolFullError,
    RequestCancelledError,
    RequestTimeoutError,
)
from polykv.models.attention import attach
from polykv.models.loading import ProgressCallback
from polykv.models.support import embedding_weight, head_dim
from polykv.pool.build import SegmentBuild
from polykv.pool.lease import Lease
from polykv.pool.pool import SharedKVPool, check_length
from polykv.pool.segment import EXACT, KVSegment, Span, as_span, check_context, checked_ids

logger = logging.getLogger(__name__)

DEFAULT_MAX_BATCH = 32
DEFAULT_MAX_WAITING = 4096
DEFAULT_TOKEN_BUDGET = 512
GATHER_SECONDS = 0.005
"""An idle engine waits this long after the first request, so that a fan-out starts in one forward together."""
CELL_TOKENS = 256
"""Tokens of a cell, the unit in which prompts are found that are left with another codec than ``exact``: a multiple of the 64 tokens
that share their scales, so that a cell does not depend on what comes after it."""
MIN_SHARED_TOKENS = 64
"""A request waits for one that is computing the same beginning if it saves at least so many tokens."""
LOOK_AHEAD = 64
"""So many requests behind those that could start are looked at: some of them may start while others wait."""
PREFIX_CACHE = True
"""Whether engines have a prefix cache where nothing is said."""
DETERMINISTIC_PREFIX_CACHE = (
    "deterministic=True and prefix_cache=True exclude each other: what is found decides where sums are cut, and so the last bits "
    "of a result; leave one out"
)
IDLE_SECONDS = 2.0
"""An idle engine gives its thread up, so that one nobody uses any more can be collected."""


WAIT_SECONDS = 0.002
EXIT_SECONDS = 10
"""How long the end of the interpreter waits for a step to end."""
RATE_STEPS = 64
"""Steps over which tokens per second are averaged."""


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment; the counters run from its start.

    Attributes:
        running: requests that have started.
        waiting: requests in the queue.
        building: requests whose shared context is being built, or waits for that.
        finished: requests that ended well.
        failed: requests that ended with an error, those that were too late among them.
        cancelled: requests that were cancelled.
        timed_out: requests whose timeout ended them.
        rejected: requests that found the queue full.
        steps: forwards of the running requests.
        prefill_tokens: prompt rows computed, without those of shared contexts.
        prefill_saved_tokens: prompt tokens that were read from the pool instead.
        build_tokens: rows of shared contexts computed.
        generated_tokens: tokens chosen.
        batch_size: requests in the last forward.
        peak_running: most requests that ran at once.
        tokens_per_s: tokens chosen a second of forwards, over the last steps.
        pool_bytes: bytes of the pool at this moment.
        tail_bytes: bytes of the private tails at this moment.
        peak_tail_bytes: their largest sum.
    """

    running: int = 0
    waiting: int = 0
    building: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    timed_out: int = 0
    rejected: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    prefill_saved_tokens: int = 0
    build_tokens: int = 0
    generated_tokens: int = 0
    batch_size: int = 0
    peak_running: int = 0
    tokens_per_s: float = 0.0
    pool_bytes: int = 0
    tail_bytes: int = 0
    peak_tail_bytes: int = 0


@dataclass(frozen=True)
class StepReport:
    """One forward, for :meth:`Engine.add_step_callback`.

    Attributes:
        seconds: wall time, choosing tokens included.
        decode_rows: tokens of answers computed.
        prompt_rows: tokens of prompts computed.
        build_rows: tokens of a shared context computed.
        stats: the engine after it.
    """

    seconds: float
    decode_rows: int
    prompt_rows: int
    build_rows: int
    stats: EngineStats


@dataclass(eq=False)
class _BuildJob:
    """A segment being built between and within the steps of other requests.

    Either one caller of :meth:`Engine.share` waits on ``events``, or the requests in ``sequences`` wait, which all name it.
    """

    token_ids: Seq[int]
    codec: str | Codec | None
    parent: KVSegment | Span | None = None
    salt: str = ""
    anywhere: bool = False
    events: queue.SimpleQueue[tuple[str, Any]] | None = None
    sequences: list[Sequence] = field(default_factory=list)
    cell: bool = False  # of prompts that nobody has marked
    cancelled: bool = False
    aside: bool = False  # another thread builds the same text: others go first

    @property
    def abandoned(self) -> bool:
        return self.cancelled if self.events is not None else not self.sequences

    @property
    def priority(self) -> int:
        return max((sequence.handle.request.priority for sequence in self.sequences), default=0)

    @property
    def key(self) -> tuple[object, ...]:
        """Requests that wait for equal ones wait for one build."""
        span = as_span(self.parent)
        codec = self.codec.name if isinstance(self.codec, Codec) else self.codec
        return (self.token_ids, codec, span.key if span is not None else (), self.salt, self.cell)


def _context_of(request: Request) -> tuple[int, ...]:
    """The tokens that the request wants to become a segment."""
    return request.token_ids[request.segment.end if request.segment is not None else 0 : request.shared_tokens]


def _base_key(sequence: Sequence) -> object:
    return sequence.base.key if sequence.base is not None else None


MAX_THREADS = 4096


def check_counts(*, num_threads: int | None = None, **counts: int) -> None:
    """Refuses what is no count, or too small.

    Raises:
        InvalidRequestError: names the first that is wrong.
    """
    if num_threads is not None:
        counts["num_threads"] = num_threads
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidRequestError(f"{name} must be an integer, got {value!r}")
        if value < 1:
            raise InvalidRequestError(f"{name} must be at least 1, got {value}")
    if num_threads is not None and num_threads > MAX_THREADS:
        raise InvalidRequestError(f"num_threads must be at most {MAX_THREADS}, got {num_threads}")


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Runs requests over one model. Thread-safe; its thread starts with the first request.

    Args:
        model: a causal language model of a supported family.
        tokenizer: its tokenizer.
        pool: where shared contexts live; a new one by default.
        max_batch: requests that run at once; further ones wait.
        max_waiting: requests that wait; further ones are refused.
        token_budget: rows of one forward. While answers are in progress it carries fewer prompt rows, so that no stream pauses
            for longer than three of its steps.
        num_threads: torch threads of the engine's thread; torch's default if None.
        deterministic: a request's tokens and log-probabilities are bitwise the same whatever else runs, on any number of
            threads of one machine and version. Costs little where the CPU kernels run; elsewhere requests no longer share
            forwards.
        fast_forward: tokens that a grammar leaves no choice about are computed together, not one a step.
        prefix_cache: requests read what the pool holds of their prompts' beginnings, and leave their prompts and answers there.
            On by default, but not with ``deterministic``: where a context is cut changes the order in which sums are rounded.
        prefix_codec: how prompts are left. ``"exact"`` finds them token for token. With another codec a prompt is cut into cells
            of 256 tokens, each computed over the stored form of those before it: smaller, with that codec's loss, and the same
            whoever came first; what is found ends with a cell. What comes after the last cell stays exact.
        max_pool_bytes: budget of the pool that is made if none is given; see :class:`SharedKVPool`.

    Attributes:
        request_processors: None, or a function that gives a request's further logits processors when it is submitted; they
            see the ids ``[1, T]`` of prompt and answer and the scores ``[1, V]``, before a grammar's mask.

    Raises:
        UnsupportedModelError: the model's attention cannot read a pool.
        IncompatiblePoolError: the pool belongs to another model or tokenizer.
        InvalidRequestError: max_batch, max_waiting, token_budget or num_threads is no integer, or out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        pool: SharedKVPool | None = None,
        max_batch: int = DEFAULT_MAX_BATCH,
        max_waiting: int = DEFAULT_MAX_WAITING,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        num_threads: int | None = None,
        deterministic: bool = False,
        fast_forward: bool = True,
        prefix_cache: bool | None = None,
        prefix_codec: str | Codec = EXACT,
        max_pool_bytes: float | None = None,
    ) -> None:
        check_counts(max_batch=max_batch, max_waiting=max_waiting, token_budget=token_budget, num_threads=num_threads)
        attach(model)
        self.model = model
        self.tokenizer = tokenizer
        if deterministic and prefix_cache:
            raise InvalidRequestError(DETERMINISTIC_PREFIX_CACHE)
        self.prefix_cache = PREFIX_CACHE and not deterministic if prefix_cache is None else prefix_cache
        self._cell_codec = None if prefix_codec == EXACT or not self.prefix_cache else get_codec(prefix_codec)
        if self._cell_codec is not None:
            self._cell_codec.check_head_dim(head_dim(model.config))
        self.pool = pool if pool is not None else SharedKVPool(model, tokenizer, max_bytes=max_pool_bytes)
        self.pool.check_model(model, tokenizer)
        self._runner = ModelRunner(model, deterministic=deterministic)
        self._scheduler = Scheduler(max_batch)
        self._pacer = Pacer(token_budget)
        self._chunk = token_budget if self._runner.one_by_one else None
        self.max_waiting = max_waiting
        self.request_processors: Callable[[Request], Seq[LogitsProcessor]] | None = None
        self._fast_forward = fast_forward
        self._eos_ids = _eos_ids(model, tokenizer)
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._builds: list[_BuildJob] = []
        self._plan: Generator[SegmentBuild | tuple[str, int, int], None, KVSegment] | None = None
        self._build: SegmentBuild | None = None  # of that plan, while it needs forwards
        self._job: _BuildJob | None = None  # which it is for
        self._ended: list[Sequence] = []
        self._thread: threading.Thread | None = None
        self._closed: BaseException | None = None
        self._pid = os.getpid()
        self._counters: dict[str, int] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        self._recent: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS)  # tokens and seconds of steps
        self._callbacks: list[Callable[[StepReport], object]] = []
        _engines.add(self)

    # ------------------------------------------------------------------------------------ the callers' side

    def submit(self, request: Request) -> RequestHandle:
        """Queues a request and returns at once.

        Raises:
            PromptTooLongError: prompt and max_tokens exceed the model's positions.
            IncompatiblePoolError: the prompt does not start with the segment's tokens.
            InvalidRequestError: an empty prompt, or nothing after the shared context.
            UnknownCodecError, UnsupportedModelError: the context cannot be stored with that codec, or the tokenizer is too slow a
                kind for grammars.
            ContextReleasedError: the segment is no longer in the pool.
            EngineOverloaded: max_waiting requests wait already.
            EngineClosedError: the engine is closed, has died, or was made before a fork.
        """
        self._check_process()
        self._check_request(request)
        matcher = self._matcher(request.sampling.grammar)
        processors = self.request_processors(request) if self.request_processors is not None else ()
        handle = RequestHandle(request, engine=id(self))
        # leased from now on: a context released while the request waits must still be there when its turn comes
        lease = None
        if request.shared_tokens:
            lease = self.pool.lease_of(
                _context_of(request), request.codec, request.segment, owner=handle, salt=request.salt
            )
        to_build = request.shared_tokens > 0 and lease is None
        if lease is None and request.segment is not None:
            lease = self.pool.lease(request.segment, owner=handle)
        if request.agent is not None:
            self.pool.observe(request.agent, request.agent_step, request.agent_run)
        try:
            sequence = Sequence(
                handle,
                lease,
                self.model,
                self.tokenizer,
                self._eos_ids,
                matcher,
                processors,
                fast_forward=self._fast_forward,
            )
            if not to_build:
                self._find_cells(sequence)
                lease = sequence.lease
            with self._changed:
                self._check_open()
                self._check_room()
                self._ensure_thread()
                if to_build:
                    self._await_context(sequence)
                else:
                    self._line_up(sequence)
                self._changed.notify()
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        return handle

    def prepare(self, grammar: Grammar) -> None:
        """Compiles a grammar, so that :meth:`submit` finds it ready: the first one of a process takes a quarter of a second.

        Raises:
            InvalidRequestError: it does not fit the tokenizer, or is too large.
            UnsupportedModelError: the tokenizer has no Rust backend.
        """
        self._matcher(grammar)

    def _matcher(self, grammar: Grammar | None) -> GrammarMatcher | None:
        """Compiled in the caller's thread: a large grammar must not hold up the steps of others."""
        if grammar is None:
            return None
        vocabulary = embedding_weight(self.model).shape[0]
        return compiler_for(self.tokenizer, vocabulary, self._eos_ids).matcher(grammar)

    def _check_room(self) -> None:
        waiting = len(self._scheduler.waiting) + sum(len(job.sequences) for job in self._builds)
        # requests that will start at once do not wait: the queue's bound is about those behind them
        free = max(0, self._scheduler.max_batch - len(self._scheduler.running))
        if waiting >= self.max_waiting + free:
            self._counters["rejected"] += 1
            raise EngineOverloaded(
                f"{waiting} requests wait already and {len(self._scheduler.running)} run; the queue takes "
                f"max_waiting={self.max_waiting}. Ask again later, send fewer at once, or raise max_waiting"
            )

    def _await_context(self, sequence: Sequence) -> None:
        request = sequence.handle.request
        self._await(_BuildJob(_context_of(request), request.codec, request.segment, request.salt), sequence)

    def _await(self, job: _BuildJob, sequence: Sequence) -> None:
        """Puts a sequence behind a build, the same for all that want the same; the caller holds the lock."""
        for other in self._builds:
            if other.events is None and other.key == job.key:
                other.sequences.append(sequence)
                return
        job.sequences.append(sequence)
        self._builds.append(job)

    def _line_up(self, sequence: Sequence) -> None:
        """Queues a sequence, or has the next cell of its prompt built if there is one; the caller holds the lock."""
        ids = sequence.handle.request.token_ids
        end = sequence.position + CELL_TOKENS
        if not self._has_cells(sequence):
            self._scheduler.queue(sequence)
            return
        parent = sequence.lease.span if sequence.lease is not None else None
        cell = ids[sequence.position : end]
        self._await(_BuildJob(cell, self._cell_codec, parent, sequence.handle.request.salt, cell=True), sequence)

    def _has_cells(self, sequence: Sequence) -> bool:
        """Whether another cell of a prompt begins where it stands. One that reads documents is not cut: cells would cover them."""
        request = sequence.handle.request
        fits = sequence.position + CELL_TOKENS <= len(request.token_ids) - 1
        return self._cell_codec is not None and request.reuse == "prefix" and fits

    def _find_cells(self, sequence: Sequence) -> None:
        """Lets a sequence read the cells of its prompt that the pool holds."""
        request = sequence.handle.request
        while self._has_cells(sequence):
            assert self._cell_codec is not None
            lease = self.pool.prefix.find_cell(
                request.token_ids[sequence.position : sequence.position + CELL_TOKENS],
                self._cell_codec,
                sequence.lease.span if sequence.lease is not None else None,
                salt=request.salt,
                owner=sequence.handle,
                agent=request.agent,
            )
            if lease is None:
                return
            sequence.found(lease)

    def generate(
        self, token_ids: Seq[int], sampling: SamplingParams | None = None, segment: KVSegment | None = None
    ) -> RequestHandle:
        """As :meth:`submit`, from the request's parts."""
        return self.submit(Request(checked_ids(token_ids), segment, sampling or SamplingParams()))

    def _check_request(self, request: Request) -> None:
        context = request.segment.end if request.segment is not None else 0
        own = len(request.token_ids) - context
        vocabulary = embedding_weight(self.model).shape[0]
        outside = [token for token in request.token_ids[context:] if not 0 <= token < vocabulary]
        if outside:
            raise InvalidRequestError(
                f"token ids must lie in [0, {vocabulary}), got {outside[0]}; was another tokenizer used?"
            )
        if request.segment is not None:
            head = torch.tensor(request.token_ids[:context], dtype=torch.int32)
            known = request.segment.context_ids
            if head.shape != known.shape or not torch.equal(head, known):
                raise IncompatiblePoolError(
                    f"the prompt ({len(request.token_ids)} tokens) does not start with the {context} tokens of the shared context"
                )
            reason = self.pool.identity.mismatch(request.segment.model)
            if reason is not None:
                raise IncompatiblePoolError(
                    f"the shared context was built with {request.segment.model.name!r}, which differs from this engine's "
                    f"{self.pool.identity.name!r} in its {reason}; share the text with this model"
                )
        if request.reuse == "anywhere" and not self.prefix_cache:
            raise InvalidRequestError(
                "reuse='anywhere' needs the prefix cache, which is off in this engine (prefix_cache=False or deterministic=True); "
                "use reuse='prefix', or another engine"
            )
        if own < 1:
            raise InvalidRequestError("the prompt has no tokens of its own after the shared context; ask something")
        request.sampling.check_vocabulary(vocabulary)
        if request.shared_tokens:
            codec = get_codec(request.codec) if request.codec is not None else self.pool.codec
            check_context(self.model, _context_of(request), codec, as_span(request.segment))
        check_length(self.model, context, own, request.sampling.max_tokens)

    def share(
        self,
        token_ids: Seq[int],
        codec: str | Codec | None = None,
        progress: ProgressCallback | None = None,
        *,
        parent: KVSegment | Span | None = None,
        salt: str = "",
        anywhere: bool = False,
    ) -> KVSegment:
        """Builds a segment, or finds it, while other requests go on. Blocks until it is there.

        Args:
            token_ids: the context; with a parent, what follows it.
            codec: how to store it; the pool's default if None.
            progress: called in this thread with a phase, units done and units in all.
            parent: a context that comes before the tokens; readers of the new one read both.
            salt: whose it is; requests of another salt never read it.
            anywhere: make it readable at any position, by requests with ``reuse="anywhere"``.

        Raises:
            InvalidRequestError, PromptTooLongError, UnknownCodecError, PoolFullError: see :meth:`SharedKVPool.build`.
            ContextReleasedError: the parent is no longer in the pool.
            EngineClosedError: the engine is closed.
        """
        self._check_process()
        token_ids = checked_ids(token_ids)
        if threading.current_thread() is self._thread:
            raise InvalidRequestError(WAITS_FOR_ITSELF)
        events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        job = _BuildJob(token_ids, codec, parent, salt, anywhere, events)
        with self._changed:
            self._check_open()
            self._ensure_thread()
            self._builds.append(job)
            self._changed.notify()
        try:
            while True:
                kind, value = events.get()
                if kind == "done":
                    segment: KVSegment = value
                    return segment
                if kind == "error":
                    raise value
                if progress is not None:
                    progress(*value)
        except BaseException:  # an interrupted caller must leave no build behind, and no finished segment either
            with self._lock:
                job.cancelled = True
            while not events.empty():
                kind, value = events.get()
                if kind == "done":
                    self.pool.release(value)
            raise

    def stats(self) -> EngineStats:
        """Counters and present sizes."""
        with self._lock:
            counters: dict[str, Any] = dict(self._counters)
            counters["running"] = len(self._scheduler.running)
            counters["waiting"] = len(self._scheduler.waiting)
            counters["building"] = sum(len(job.sequences) for job in self._builds)
            counters["tail_bytes"] = sum(s.tail.nbytes for s in self._scheduler.running)
            recent = list(self._recent)
        seconds = sum(seconds for _, seconds in recent)
        counters["tokens_per_s"] = sum(tokens for tokens, _ in recent) / seconds if seconds else 0.0
        counters["pool_bytes"] = sum(segment.num_bytes for segment in self.pool.segments)
        return EngineStats(**counters)

    def add_step_callback(self, callback: Callable[[StepReport], object]) -> Callable[[], None]:
        """Calls ``callback`` after every forward, in the engine's thread: keep it short. An error in it is logged, no more.

        Returns:
            A function that removes it again.
        """
        with self._lock:
            self._callbacks.append(callback)

        def remove() -> None:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return remove

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._closed is not None

    def close(self, *, wait: bool = True) -> None:
        """Ends every request with an error, and the thread with them. Idempotent.

        Args:
            wait: return only when the thread has ended, which takes at most one step.
        """
        self._die(EngineClosedError("the engine has been closed; make a new one"))
        thread = self._thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join()

    def __reduce__(self) -> Any:
        raise TypeError(
            "an Engine holds a model and a thread of this process and cannot be pickled or copied; make one where it is used, "
            "or pickle a ChatPolyKV, which finds or makes its engine by name"
        )

    def _check_process(self) -> None:
        """Before any lock is taken: in a forked child the parent's may be held for ever."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "this engine was made before a fork and its thread did not survive; make the chat model in the child process, "
                "or use threads, asyncio or the 'spawn' start method"
            )

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EngineClosedError(str(self._closed)) from self._closed

    # ------------------------------------------------------------------------------------ the engine's thread

    def _ensure_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="polykv-engine", daemon=True)
            thread.start()  # may fail: then there is no thread, and the next request tries again
            self._thread = thread

    def _run(self) -> None:
        try:
            serving.engine = id(self)
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            while self._wait_for_work():
                self._drop_ended()
                self._advance_build()
                self._admit()
                context = self._scheduler.prompt_context(self._build)
                rows = self._pacer.prompt_rows(self._scheduler.decoding, context)
                batch = self._scheduler.next_batch(rows, self._build, self._chunk)
                if batch.work or batch.build:
                    self._step(batch)
                elif self._plan is not None and self._build is None:
                    time.sleep(WAIT_SECONDS)  # another thread builds what is wanted here
        except BaseException as error:
            logger.exception("the engine's thread died")
            self._die(EngineClosedError(f"the engine died: {type(error).__name__}: {error}"))
            raise
        finally:
            with self._lock:
                last = self._thread is threading.current_thread()
            if last:  # else it was idle and has given up, and another may run a build by now
                self._end_build()
            self._release_ended()

    def _wait_for_work(self) -> bool:
        """False ends the thread: closed, or idle for a while."""
        with self._changed:
            deadline = time.monotonic() + IDLE_SECONDS
            while self._closed is None and not (self._builds or self._scheduler.waiting or self._scheduler.running):
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    self._thread = None
                    return False
            gather = self._closed is None and not self._builds and not self._scheduler.running
        if gather:
            time.sleep(GATHER_SECONDS)
        return self._closed is None

    def _die(self, error: EngineClosedError) -> None:
        with self._changed:
            if self._closed is None:
                self._closed = error
            jobs = list(self._builds)
            sequences = [
                *self._scheduler.waiting,
                *self._scheduler.running,
                *(s for job in jobs for s in job.sequences),
            ]
            self._scheduler.waiting.clear()
            self._scheduler.running.clear()
            self._builds.clear()
            self._ended.extend(sequences)
            # a forward may be under way: then its thread frees the tails, once it is out of it
            in_flight = self._thread is not None and self._thread is not threading.current_thread()
            self._changed.notify_all()
        if not in_flight:
            self._release_ended()
        for sequence in sequences:
            sequence.handle.fail(EngineClosedError(str(error)))
        for job in jobs:
            if job.events is not None:
                job.events.put(("error", EngineClosedError(str(error))))

    def _release_ended(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for sequence in ended:
            sequence.release()

    def _drop_ended(self) -> None:
        """Takes out what was cancelled or is too late, in whatever state it is."""
        with self._lock:
            states = [("before it started", s) for s in self._scheduler.waiting]
            states += [("while its shared context was built", s) for job in self._builds for s in job.sequences]
            states += [("", s) for s in self._scheduler.running]
            ended = [(state, s) for state, s in states if s.handle.cancelled or s.expired]
        for state, sequence in ended:
            when = f" {state}" if state else ""
            if sequence.handle.cancelled:
                self._end(sequence, RequestCancelledError(f"the request was cancelled{when}"))
            else:
                request = sequence.handle.request
                self._end(
                    sequence,
                    RequestTimeoutError(
                        f"the request's timeout of {request.timeout} s was over{when or f' after {len(sequence.generated)} tokens'}; "
                        "raise timeout, lower max_tokens, or send fewer requests at once"
                    ),
                )

    def _next_job(self) -> _BuildJob | None:
        """The build in progress, or the one to begin: of the highest priority, then first come."""
        with self._lock:
            # taken out under the lock that others join under: nobody joins a build that is being given up
            self._builds = [job for job in self._builds if not job.abandoned]
            if self._job in self._builds:
                return self._job
            if all(job.aside for job in self._builds):
                for waiting in self._builds:
                    waiting.aside = False
            job = min(self._builds, key=lambda job: (job.aside, -job.priority), default=None)
        self._end_build()
        self._job = job
        return job

    def _advance_build(self) -> None:
        """Goes on with a build up to where it needs a forward; one is built at a time."""
        job = self._next_job()
        if job is None or (self._build is not None and self._build.remaining):
            return
        event: tuple[str, Any]
        waits = False
        try:
            if self._plan is None:
                self._plan = self.pool.plan_build(
                    job.token_ids, job.codec, job.parent, salt=job.salt, anywhere=job.anywhere
                )
            step = next(self._plan)
            if isinstance(step, SegmentBuild):
                self._build = step
                return
            event, waits = ("progress", step), step[0] == "wait"
        except StopIteration as stop:
            event = ("done", stop.value)
        except Exception as error:
            event = ("error", error)
        if event[0] != "progress":
            self._end_job(job, event)
            return
        self._tell(job, event)
        if waits and len(self._builds) > 1:
            job.aside = True
            self._end_build()

    def _end_build(self) -> None:
        self._build = self._job = None
        if self._plan is not None:
            self._plan.close()
            self._plan = None

    def _tell(self, job: _BuildJob, event: tuple[str, Any]) -> bool:
        """Hands an event to the caller of share(); False if nobody waits for it any more."""
        with self._lock:
            if job.events is None or job.cancelled:
                return False
            job.events.put(event)
            return True

    def _end_job(self, job: _BuildJob, event: tuple[str, Any]) -> None:
        kind, value = event
        with self._lock:
            if job in self._builds:
                self._builds.remove(job)
            sequences, job.sequences = job.sequences, []
        self._end_build()
        if job.events is not None:
            if not self._tell(job, event) and kind == "done":
                self.pool.release(value)
            return
        if kind == "error" and not (job.cell and isinstance(value, PoolFullError)):
            for sequence in sequences:  # each its own: a traceback grows with every raise
                self._end(sequence, _copy_of(value))
            return
        if kind == "error":  # a cell that finds no room: the rest of the prompt is computed as it is
            with self._lock:
                open_ = self._closed is None
                for sequence in sequences if open_ else ():
                    self._scheduler.queue(sequence)
        else:
            for number, sequence in enumerate(sequences):
                computed = sequence.computed_cells + (CELL_TOKENS if job.cell and not number else 0)
                sequence.found(self.pool.lease(value, owner=sequence.handle))
                sequence.charge(computed)
                if job.cell:
                    self._find_cells(sequence)
                    sequence.charge(computed)
            if job.cell:
                self.pool.keep(value)
            with self._lock:
                open_ = self._closed is None
                for sequence in sequences if open_ else ():
                    self._line_up(sequence)
        for sequence in sequences if not open_ else ():  # closed meanwhile: _die has not seen these
            self._end(sequence, EngineClosedError(str(self._closed)))
        if kind == "done" and not job.cell:
            self.pool.release(value)  # from now on the readers' leases keep it

    def _admit(self) -> None:
        """Starts requests in their order; one whose beginning another is computing right now waits for it."""
        with self._lock:
            candidates = self._scheduler.waiting[: LOOK_AHEAD + self._scheduler.room]
        for sequence in candidates:
            if self._scheduler.room <= 0:
                break
            try:
                if self._follows(sequence):
                    continue
            except Exception:
                logger.exception("comparing prompts failed; each is computed by itself")
            self._seek(sequence, documents=True)
            with self._lock:
                waits = sequence in self._scheduler.waiting
                if waits:
                    self._scheduler.waiting.remove(sequence)
                    sequence.started_at = sequence.left_at = time.perf_counter()
                    self._scheduler.running.append(sequence)
                    self._counters["prefill_saved_tokens"] += sequence.cached_tokens
            if not waits:  # closed meanwhile, and its leases were given back before these were taken
                sequence.release()
        with self._lock:
            peak = self._counters["peak_running"]
            self._counters["peak_running"] = max(peak, len(self._scheduler.running))

    # ------------------------------------------------------------------------------ what the pool holds by itself

    def _follows(self, sequence: Sequence) -> bool:
        """Whether it should wait for a running request that is about to compute much of the same beginning.

        What such a request has computed already goes into the pool at once, so that both read it there.
        """
        if not self.prefix_cache or sequence.handle.request.reuse != "prefix":
            return False
        request, stored = sequence.handle.request, -1
        for other in self._scheduler.running:
            theirs = other.handle.request
            if theirs.salt != request.salt or other.jumps or _base_key(other) != _base_key(sequence):
                continue
            shared = sequence.shared_with(other)
            if shared - sequence.position < MIN_SHARED_TOKENS:
                continue
            if stored < 0:
                stored = self.pool.prefix.stored_tokens(request.token_ids, sequence.base, salt=request.salt)
            if shared - stored < MIN_SHARED_TOKENS:
                continue
            if other.position < shared:
                return True
            self._leave(other)
            stored = -1
        return False

    def _seek(self, sequence: Sequence, *, documents: bool = False) -> None:
        """Lets a sequence read what the pool holds of the rest of its prompt."""
        if not self.prefix_cache:
            return
        request, prefix = sequence.handle.request, self.pool.prefix
        try:
            if documents and request.reuse == "anywhere":
                self._find_documents(sequence)
            while not sequence.generated:
                end = sequence.jumps[0].position if sequence.jumps else len(request.token_ids) - 1
                lease = prefix.find(
                    request.token_ids[:end],
                    sequence.base,
                    salt=request.salt,
                    owner=sequence.handle,
                    agent=request.agent,
                )
                if lease is not None:
                    sequence.go_on(lease)
                if not sequence.jumps or sequence.position < end or not self._jump(sequence):
                    return
        except Exception:
            # the pool is there to save time: what cannot be found is computed
            logger.exception("looking a prompt up failed; it is computed")
            sequence.plan_run()

    def _find_documents(self, sequence: Sequence) -> None:
        request = sequence.handle.request
        for start, entry in self.pool.prefix.documents(request.token_ids, sequence.position, salt=request.salt):
            segment = self.pool.prefix.bring(entry)
            if segment is None:
                continue
            # a document at the very beginning was computed with the same nothing before it
            skip = min(request.recompute, len(entry.tokens) - 1) if start else 0
            lease = self.pool.lease(segment, owner=sequence.handle)
            sequence.jumps.append(Jump(start, skip, entry, lease))
        sequence.plan_run()

    def _jump(self, sequence: Sequence) -> bool:
        """Puts a sequence that has come to a stored document behind it; what it has computed becomes part of the context.

        Returns:
            Whether it is there; otherwise the document is computed like any other part of the prompt.
        """
        jump = sequence.jumps.popleft()
        request = sequence.handle.request
        lease = None
        try:
            if self._leave(sequence):
                lease = self.pool.prefix.place(
                    jump.document,
                    jump.skip,
                    sequence.lease,
                    jump.start,
                    owner=sequence.handle,
                    agent=request.agent,
                )
        except Exception:
            logger.exception("a stored document could not be read; it is computed")
        finally:
            jump.lease.release()
        if lease is None:
            logger.info("a stored document is computed again: the pool has no room for what comes before it")
            sequence.plan_run()
            return False
        sequence.go_on(lease)
        sequence.base = lease.span
        return True

    def _pass_document(self, sequence: Sequence) -> None:
        """A prompt has been computed up to a stored document: it goes on behind it."""
        before = sequence.cached_tokens
        try:
            if self._jump(sequence):
                self._seek(sequence)
        except Exception as error:
            self._end(sequence, error)
        self._count(prefill_saved_tokens=sequence.cached_tokens - before)

    def _leave(self, sequence: Sequence) -> bool:
        """Puts what a sequence has computed into the pool and lets it read it there; False if there is no room."""
        if not sequence.tail.length:
            return True
        now = time.perf_counter()
        tail_bytes = sequence.tail_bytes  # at its largest
        try:
            lease = self._publish(sequence, now)
        except Exception:  # no memory for a copy, say: the request goes on as it is
            logger.exception("what a request has computed could not be put into the pool")
            lease = None
        if lease is None:
            return False
        with self._lock:
            self._counters["peak_tail_bytes"] = max(self._counters["peak_tail_bytes"], tail_bytes)
        sequence.left_at = now
        sequence.go_on(lease)
        return True

    def _publish(self, sequence: Sequence, now: float) -> Lease | None:
        request = sequence.handle.request
        return self.pool.prefix.publish(
            sequence.computed,
            sequence.tail,
            sequence.lease,
            sequence.base,
            salt=request.salt,
            seconds=now - sequence.left_at,
            owner=sequence.handle,
            agent=request.agent,
        )

    def _reserve(self, batch: Batch) -> Batch:
        """Room for the batch's tokens; a request for which there is none fails alone."""
        kept: list[Work] = []
        for work in batch.work:
            try:
                work.sequence.tail.reserve(work.sequence.tail.length + work.rows)
                kept.append(work)
            except Exception as error:
                self._end(work.sequence, error)
        return Batch(kept, batch.build, batch.build_rows)

    def _step(self, batch: Batch) -> None:
        started = time.perf_counter()
        batch = self._reserve(batch)
        if not batch.work and batch.build is None:
            return
        decoding, prompt_rows, context = batch.decoding, batch.prompt_rows, batch.prompt_context
        held = [(piece.tail, piece.tail.length) for piece in batch.pieces()]
        try:
            logits = self._runner.forward(batch)
        except Exception as error:
            for tail, length in held:
                tail.rewind(length)
            self._recover(batch, error)
            return
        choosing = [work.sequence for work in batch.work if work.wants_token]
        before = sum(len(sequence.generated) for sequence in choosing)
        for work in batch.work:
            work.sequence.advance(work.rows)
            if not work.sequence.pending and work.sequence.jumps:
                self._pass_document(work.sequence)
        for sequence, choice in zip(choosing, sample_batch([s.sampler for s in choosing], logits), strict=True):
            self._deliver(sequence, choice)
        if batch.build is not None:
            done = batch.build.num_tokens - batch.build.remaining
            assert self._job is not None
            self._tell(self._job, ("progress", ("prefill", done, batch.build.num_tokens)))
        seconds = time.perf_counter() - started
        self._pacer.observe(decoding, prompt_rows, seconds, context)
        with self._lock:
            tail_bytes = sum(s.tail.nbytes for s in self._scheduler.running)
            self._counters["peak_tail_bytes"] = max(self._counters["peak_tail_bytes"], tail_bytes)
            self._counters["steps"] += 1
            self._counters["prefill_tokens"] += prompt_rows - batch.build_rows
            self._counters["build_tokens"] += batch.build_rows
            self._counters["batch_size"] = len(batch.work)
            self._recent.append((sum(len(s.generated) for s in choosing) - before, seconds))
            callbacks = list(self._callbacks)
        if callbacks:
            report = StepReport(seconds, decoding, prompt_rows - batch.build_rows, batch.build_rows, self.stats())
            for callback in callbacks:
                try:
                    callback(report)
                except BaseException:  # SystemExit too: it would end this thread and every request with it
                    logger.exception("a step callback failed")

    def _deliver(self, sequence: Sequence, choice: Choice | Exception) -> None:
        if isinstance(choice, Exception):
            self._end(sequence, choice)
            return
        before = len(sequence.generated)
        try:
            completion = sequence.accept(choice)
        except Exception as error:
            self._end(sequence, error)
            return
        self._count(generated_tokens=len(sequence.generated) - before)
        if completion is not None:
            if self.prefix_cache:
                self._leave(sequence)
            self._end(sequence, None)
            sequence.handle.finish(completion)

    def _recover(self, batch: Batch, error: Exception) -> None:
        """A forward that failed for a batch is repeated for each part alone, so that only the culprit fails."""
        parts = len(batch.work) + (batch.build is not None)
        if parts > 1:
            # the text alone: a record that is kept would keep the failed forward's tensors
            logger.warning("a forward of %d requests failed (%s); repeating them one by one", parts, f"{error}")
            for work in batch.work:
                self._step(Batch([work]))
            if batch.build is not None:
                self._step(Batch([], batch.build, batch.build_rows))
        elif batch.build is not None:
            assert self._job is not None
            self._end_job(self._job, ("error", error))
        else:
            self._end(batch.work[0].sequence, error)

    def _end(self, sequence: Sequence, error: Exception | None) -> None:
        """Frees everything a sequence holds; with an error, its caller sees it raised."""
        with self._lock:
            self._counters["peak_tail_bytes"] = max(
                self._counters["peak_tail_bytes"], sum(s.tail.nbytes for s in self._scheduler.running)
            )
            for line in (self._scheduler.running, self._scheduler.waiting, *(job.sequences for job in self._builds)):
                if sequence in line:
                    line.remove(sequence)
        sequence.release()
        request = sequence.handle.request
        if request.agent is not None:
            self.pool.call_ended(request.agent, request.agent_run)
        if error is None:
            self._count(finished=1)
        elif isinstance(error, RequestCancelledError):
            self._count(cancelled=1)
        else:
            self._count(failed=1, timed_out=int(isinstance(error, RequestTimeoutError)))
        if error is not None:
            sequence.handle.fail(error)

    def _count(self, **increments: int) -> None:
        with self._lock:
            for name, amount in increments.items():
                self._counters[name] += amount


def _copy_of(error: Exception) -> Exception:
    """A copy to raise in another thread, or the error itself if its class cannot be copied."""
    try:
        copied = copy.copy(error)
    except Exception:
        return error
    return copied if type(copied) is type(error) else error


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: those of the generation config and the tokenizer's own."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if isinstance(configured, torch.Tensor):
        configured = configured.reshape(-1).tolist()
    ids = list(configured) if isinstance(configured, (list, tuple, set)) else [configured]
    return frozenset(int(i) for i in [*ids, getattr(tokenizer, "eos_token_id", None)] if i is not None)


@atexit.register
def _close_all() -> None:
    # daemon threads are killed mid-forward at interpreter exit; ending them first makes the exit clean
    engines = [engine for engine in list(_engines) if engine._pid == os.getpid()]
    for engine in engines:
        engine.close(wait=False)
    for engine in engines:
        thread = engine._thread
        if thread is not None:
            thread.join(EXIT_SECONDS)
            if thread.is_alive():
                logger.warning(
                    "an engine's thread did not end within %d s; the interpreter exits all the same", EXIT_SECONDS
                )
