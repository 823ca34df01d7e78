"""The engine: one thread owns the model and runs every request in one forward a step."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from polykv.codecs import Codec
from polykv.engine.request import Request, RequestHandle, SamplingParams
from polykv.engine.runner import ModelRunner
from polykv.engine.scheduler import Scheduler, Sequence, Work
from polykv.errors import EngineClosedError, IncompatiblePoolError, InvalidRequestError, RequestCancelledError
from polykv.models.attention import attach
from polykv.models.loading import ProgressCallback
from polykv.models.support import embedding_weight
from polykv.pool.pool import SharedKVPool, check_length
from polykv.pool.segment import KVSegment

logger = logging.getLogger(__name__)

DEFAULT_MAX_BATCH = 32
DEFAULT_TOKEN_BUDGET = 512
GATHER_SECONDS = 0.005
"""An idle engine waits this long after the first request, so that a fan-out starts in one forward together."""
IDLE_SECONDS = 2.0
"""An idle engine gives its thread up, so that one nobody uses any more can be collected."""


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment; the counters run from its start.

    Attributes:
        running: requests that have started.
        waiting: requests in the queue.
        finished: requests that ended well.
        failed: requests that ended with an error.
        cancelled: requests that were cancelled.
        steps: forwards of the running requests.
        prefill_tokens: prompt rows computed.
        generated_tokens: tokens chosen.
        peak_running: most requests that ran at once.
        tail_bytes: bytes of the private tails at this moment.
        peak_tail_bytes: their largest sum.
    """

    running: int = 0
    waiting: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    peak_running: int = 0
    tail_bytes: int = 0
    peak_tail_bytes: int = 0


@dataclass(eq=False)
class _BuildJob:
    """A segment being built between the steps of other requests; its caller waits on ``events``."""

    token_ids: Seq[int]
    codec: str | Codec | None
    events: queue.SimpleQueue[tuple[str, Any]] = field(default_factory=queue.SimpleQueue)
    cancelled: bool = False


def check_at_least_one(**values: int | None) -> None:
    """Refuses counts below one; None stands for a default.

    Raises:
        InvalidRequestError: names the first that is too small.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise InvalidRequestError(f"{name} must be at least 1, got {value}")


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Runs requests over one model. Thread-safe; its thread starts with the first request.

    Args:
        model: a causal language model of a supported family.
        tokenizer: its tokenizer.
        pool: where shared contexts live; a new one by default.
        max_batch: requests that run at once; further ones wait.
        token_budget: rows of one forward.
        num_threads: torch threads of the engine's thread; torch's default if None.

    Raises:
        UnsupportedModelError: the model's attention cannot read a pool.
        IncompatiblePoolError: the pool belongs to another model or tokenizer.
        InvalidRequestError: max_batch or token_budget is below 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        pool: SharedKVPool | None = None,
        max_batch: int = DEFAULT_MAX_BATCH,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        num_threads: int | None = None,
    ) -> None:
        check_at_least_one(max_batch=max_batch, token_budget=token_budget, num_threads=num_threads)
        attach(model)
        self.model = model
        self.tokenizer = tokenizer
        self.pool = pool if pool is not None else SharedKVPool(model, tokenizer)
        self.pool.check_model(model, tokenizer)
        self._runner = ModelRunner(model)
        self._scheduler = Scheduler(max_batch, token_budget)
        self._eos_ids = _eos_ids(model, tokenizer)
        self._num_threads = num_threads
        self._num_layers = model.config.num_hidden_layers
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._builds: list[_BuildJob] = []
        self._building: Generator[tuple[str, int, int], None, KVSegment] | None = None
        self._ended: list[Sequence] = []
        self._thread: threading.Thread | None = None
        self._closed: BaseException | None = None
        self._pid = os.getpid()
        self._counters: dict[str, int] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        _engines.add(self)

    # ------------------------------------------------------------------------------------ the callers' side

    def submit(self, request: Request) -> RequestHandle:
        """Queues a request and returns at once.

        Raises:
            PromptTooLongError: prompt and max_tokens exceed the model's positions.
            IncompatiblePoolError: the prompt does not start with the segment's tokens.
            InvalidRequestError: an empty prompt, or nothing after the shared context.
            ContextReleasedError: the segment is no longer in the pool.
            EngineClosedError: the engine is closed, has died, or was made before a fork.
        """
        self._check_process()
        self._check_request(request)
        handle = RequestHandle(request)
        # leased from now on: a context released while the request waits must still be there when its turn comes
        lease = self.pool.lease(request.segment, owner=handle) if request.segment is not None else None
        sequence = Sequence(handle, lease, self._num_layers, self.tokenizer, self._eos_ids)
        try:
            with self._changed:
                self._check_open()
                self._ensure_thread()
                self._scheduler.waiting.append(sequence)
                self._changed.notify()
        except BaseException:
            sequence.release()
            raise
        return handle

    def generate(
        self, token_ids: Seq[int], sampling: SamplingParams | None = None, segment: KVSegment | None = None
    ) -> RequestHandle:
        """As :meth:`submit`, from the request's parts."""
        return self.submit(Request(tuple(token_ids), segment, sampling or SamplingParams()))

    def _check_request(self, request: Request) -> None:
        context = request.segment.num_tokens if request.segment is not None else 0
        own = len(request.token_ids) - context
        vocabulary = embedding_weight(self.model).shape[0]
        outside = [token for token in request.token_ids[context:] if not 0 <= token < vocabulary]
        if outside:
            raise InvalidRequestError(
                f"token ids must lie in [0, {vocabulary}), got {outside[0]}; was another tokenizer used?"
            )
        if request.segment is not None:
            head = torch.tensor(request.token_ids[:context], dtype=torch.int32)
            if head.shape != request.segment.token_ids.shape or not torch.equal(head, request.segment.token_ids):
                raise IncompatiblePoolError(
                    f"the prompt ({len(request.token_ids)} tokens) does not start with the {context} tokens of the shared context"
                )
            reason = self.pool.identity.mismatch(request.segment.model)
            if reason is not None:
                raise IncompatiblePoolError(
                    f"the shared context was built with {request.segment.model.name!r}, which differs from this engine's "
                    f"{self.pool.identity.name!r} in its {reason}; share the text with this model"
                )
        if own < 1:
            raise InvalidRequestError("the prompt has no tokens of its own after the shared context; ask something")
        check_length(self.model, context, own, request.sampling.max_tokens)

    def share(
        self, token_ids: Seq[int], codec: str | Codec | None = None, progress: ProgressCallback | None = None
    ) -> KVSegment:
        """Builds a segment, or finds it, while other requests go on. Blocks until it is there.

        Args:
            token_ids: the context.
            codec: how to store it; the pool's default if None.
            progress: called in this thread with a phase, units done and units in all.

        Raises:
            InvalidRequestError, PromptTooLongError, UnknownCodecError: see :meth:`SharedKVPool.build`.
            EngineClosedError: the engine is closed.
        """
        self._check_process()
        job = _BuildJob(token_ids, codec)
        with self._changed:
            self._check_open()
            self._ensure_thread()
            self._builds.append(job)
            self._changed.notify()
        try:
            while True:
                kind, value = job.events.get()
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
            while not job.events.empty():
                kind, value = job.events.get()
                if kind == "done":
                    self.pool.release(value)
            raise

    def stats(self) -> EngineStats:
        """Counters and present sizes."""
        with self._lock:
            counters = dict(self._counters)
            counters["running"] = len(self._scheduler.running)
            counters["waiting"] = len(self._scheduler.waiting)
            counters["tail_bytes"] = sum(s.tail_bytes for s in self._scheduler.running)
        return EngineStats(**counters)

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
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            while self._wait_for_work():
                self._drop_cancelled()
                self._advance_build()
                self._admit()
                batch = self._scheduler.next_batch()
                if batch:
                    self._step(batch)
        except BaseException as error:
            logger.exception("the engine's thread died")
            self._die(EngineClosedError(f"the engine died: {type(error).__name__}: {error}"))
            raise
        finally:
            if self._building is not None:  # only this thread may close what it runs
                self._building.close()
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
            sequences = [*self._scheduler.waiting, *self._scheduler.running]
            jobs = list(self._builds)
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
            job.events.put(("error", EngineClosedError(str(error))))

    def _release_ended(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for sequence in ended:
            sequence.release()

    def _drop_cancelled(self) -> None:
        with self._lock:
            waiting = [s for s in self._scheduler.waiting if s.handle.cancelled]
            running = [s for s in self._scheduler.running if s.handle.cancelled]
            for sequence in waiting:
                self._scheduler.waiting.remove(sequence)
        for sequence in waiting:
            self._end(sequence, RequestCancelledError("the request was cancelled before it started"))
        for sequence in running:
            self._end(sequence, RequestCancelledError("the request was cancelled"))

    def _advance_build(self) -> None:
        """One chunk of the first build in line; each is built alone, in order."""
        with self._lock:
            job = self._builds[0] if self._builds else None
        if job is None:
            return
        event: tuple[str, Any]
        try:
            if job.cancelled:
                raise RequestCancelledError("nobody waits for this build any more")
            if self._building is None:
                self._building = self.pool.build_steps(job.token_ids, job.codec)
            event = ("progress", next(self._building))
        except StopIteration as stop:
            event = ("done", stop.value)
        except Exception as error:
            event = ("error", error)
        if event[0] != "progress":
            if self._building is not None:
                self._building.close()
                self._building = None
            with self._lock:
                if job in self._builds:
                    self._builds.remove(job)
        with self._lock:
            left = job.cancelled
            if not left:
                job.events.put(event)
        if left and isinstance(event[1], KVSegment):
            self.pool.release(event[1])

    def _admit(self) -> None:
        with self._lock:
            while self._scheduler.admissible():
                sequence = self._scheduler.waiting.popleft()
                sequence.started_at = time.perf_counter()
                self._scheduler.running.append(sequence)
            peak = self._counters["peak_running"]
            self._counters["peak_running"] = max(peak, len(self._scheduler.running))

    def _step(self, batch: list[Work]) -> None:
        lengths = [work.sequence.tails[0].length for work in batch]
        try:
            logits = self._runner.forward(batch)
        except Exception as error:
            self._recover(batch, lengths, error)
            return
        self._count(steps=1, prefill_tokens=sum(w.rows for w in batch if not w.sequence.generated))
        for work, row in zip(batch, logits, strict=True):
            wants_token = work.wants_token
            work.sequence.advance(work.rows)
            if wants_token:
                self._choose(work.sequence, row)
        with self._lock:
            tail_bytes = sum(s.tail_bytes for s in self._scheduler.running)
            self._counters["peak_tail_bytes"] = max(self._counters["peak_tail_bytes"], tail_bytes)

    def _choose(self, sequence: Sequence, logits: torch.Tensor) -> None:
        try:
            completion = sequence.accept(sequence.sampler.sample(logits))
        except Exception as error:
            self._end(sequence, error)
            return
        self._count(generated_tokens=1)
        if completion is not None:
            self._end(sequence, None)
            sequence.handle.finish(completion)

    def _recover(self, batch: list[Work], lengths: list[int], error: Exception) -> None:
        """A forward that failed for a batch is repeated for each request alone, so that only the culprit fails."""
        for work, length in zip(batch, lengths, strict=True):
            for tail in work.sequence.tails:
                tail.crop(length - tail.length)
        if len(batch) == 1:
            self._end(batch[0].sequence, error)
            return
        logger.warning("a forward of %d requests failed (%s); repeating them one by one", len(batch), error)
        for work in batch:
            self._step([work])

    def _end(self, sequence: Sequence, error: Exception | None) -> None:
        """Frees everything a sequence holds; with an error, its caller sees it raised."""
        with self._lock:
            self._counters["peak_tail_bytes"] = max(
                self._counters["peak_tail_bytes"], sum(s.tail_bytes for s in self._scheduler.running)
            )
            if sequence in self._scheduler.running:
                self._scheduler.running.remove(sequence)
        sequence.release()
        if error is None:
            self._count(finished=1)
        else:
            self._count(**{"cancelled" if isinstance(error, RequestCancelledError) else "failed": 1})
            sequence.handle.fail(error)

    def _count(self, **increments: int) -> None:
        with self._lock:
            for name, amount in increments.items():
                self._counters[name] += amount


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: those of the generation config and the tokenizer's own."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, getattr(tokenizer, "eos_token_id", None)] if i is not None)


@atexit.register
def _close_all() -> None:
    # daemon threads are killed mid-forward at interpreter exit; ending them first makes the exit clean
    for engine in list(_engines):
        if engine._pid == os.getpid():
            engine.close()
