"""What a caller asks of the engine, and what it gets back."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from polykv.codecs import Codec
from polykv.engine.sampling import Choice, SamplingParams
from polykv.errors import InvalidRequestError, RequestCancelledError
from polykv.models.identity import salt_digest
from polykv.pool.prefix import ANYWHERE_EXACT_TOKENS
from polykv.pool.segment import KVSegment, Span, checked_ids

serving = threading.local()
"""Its attribute ``engine`` is the id of the engine whose thread this is."""
WAITS_FOR_ITSELF = "this would wait for the engine in the engine's own thread (in a step callback), and so for ever; do it in another thread"

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        token_ids: the whole prompt, the shared context's tokens first.
        segment: the shared context, or None: a segment with what it was built on, or a span.
        sampling: how to generate.
        shared_tokens: the first so many tokens are a context to be found in the pool; if it is not there it is built, once for
            all requests that name it, and goes with its last reader. With a segment, what lies between the segment's end and
            here becomes a segment after it. 0 for none.
        codec: how such a context is stored; the pool's default if None.
        priority: requests of a higher one start earlier; equal ones in order of arrival. Running requests are never
            interrupted.
        timeout: seconds from submission after which the request fails, or None.
        visible_tokens: special tokens whose text the answer shows (marks of tool calls); others are left out.
        salt: whose request it is. It finds, and leaves, prompts of the same salt only; a context that it names must have it too.
        agent: who asks, for the pool's workflow (:meth:`SharedKVPool.attach_graph`).
        agent_step: its graph's superstep, if known; agents of one step run together.
        agent_run: which run of the graph it belongs to.
        reuse: ``"prefix"`` reads what the pool holds of the prompt's beginning, with the same result as computing it;
            ``"anywhere"`` also reads documents that were built with ``anywhere=True`` wherever the prompt has them, although
            they were computed without what comes before them there: an approximation.
        recompute: so many first tokens of each such document are computed in place (EPIC, arXiv 2410.15332), 0 to 32.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    token_ids: tuple[int, ...]
    segment: KVSegment | Span | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    shared_tokens: int = 0
    codec: str | Codec | None = None
    priority: int = 0
    timeout: float | None = None
    visible_tokens: frozenset[int] = frozenset()
    salt: str = ""
    agent: str | None = None
    agent_step: int | None = None
    agent_run: str = ""
    reuse: Literal["prefix", "anywhere"] = "prefix"
    recompute: int = ANYWHERE_EXACT_TOKENS

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", checked_ids(self.token_ids))
        visible = self.visible_tokens
        if not isinstance(visible, frozenset) or not all(isinstance(i, int) and i >= 0 for i in visible):
            raise InvalidRequestError(f"visible_tokens must be a frozenset of token ids, got {visible!r:.60}")
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequestError(f"sampling must be a SamplingParams, got {self.sampling!r:.60}")
        if self.segment is not None and not isinstance(self.segment, (KVSegment, Span)):
            raise InvalidRequestError(f"segment must be a KVSegment, got {self.segment!r:.60}")
        if not isinstance(self.salt, str) or not (self.agent is None or isinstance(self.agent, str)):
            raise InvalidRequestError(f"salt and agent must be strings, got {self.salt!r:.60} and {self.agent!r:.60}")
        if self.segment is not None and self.segment.salt != salt_digest(self.salt):
            raise InvalidRequestError(
                "the shared context belongs to another salt than the request; share its text under this one"
            )
        if self.reuse not in ("prefix", "anywhere"):
            raise InvalidRequestError(f"reuse must be 'prefix' or 'anywhere', got {self.reuse!r:.60}")
        numbers = {"priority": self.priority, "shared_tokens": self.shared_tokens, "recompute": self.recompute}
        for name, value in numbers.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidRequestError(f"{name} must be an integer, got {value!r}")
        if not 0 <= self.recompute <= ANYWHERE_EXACT_TOKENS:
            raise InvalidRequestError(f"recompute must lie in [0, {ANYWHERE_EXACT_TOKENS}], got {self.recompute}")
        context = self.segment.end if self.segment is not None else 0
        if self.shared_tokens and not context < self.shared_tokens < len(self.token_ids):
            raise InvalidRequestError(
                f"shared_tokens must lie between the segment's end ({context}) and the prompt's ({len(self.token_ids)} tokens), "
                f"got {self.shared_tokens}; the prompt needs tokens of its own after the shared ones"
            )
        seconds = self.timeout
        if seconds is not None and not (
            isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < math.inf
        ):
            raise InvalidRequestError(f"timeout must be a finite number of seconds > 0, or None, got {seconds!r}")


@dataclass(frozen=True)
class Timing:
    """Seconds of one request, on the wall clock.

    Attributes:
        queue_s: from submission to the first forward that carried it.
        ttft_s: from submission to the first token.
        total_s: from submission to the end.
    """

    queue_s: float
    ttft_s: float
    total_s: float


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        text: the answer, cut before a stop string.
        token_ids: every generated id, an end-of-sequence token included.
        finish_reason: ``"stop"`` (end-of-sequence or stop string) or ``"length"``.
        prompt_tokens: tokens of the prompt, the shared ones included.
        cached_tokens: tokens read from the pool.
        tail_bytes: bytes of the private tail at its largest.
        timing: seconds.
        logprobs: one :class:`Choice` a generated id, if log-probabilities were asked for.
        stop_string: the stop string that ended the answer, or None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    tail_bytes: int
    timing: Timing
    logprobs: tuple[Choice, ...] | None = None
    stop_string: str | None = None


class RequestHandle:
    """The caller's end of a request: iterate its text, wait for its completion, or cancel it.

    Iteration yields pieces of text as they become certain (a piece that may begin a stop string is held back). It can
    be consumed from a thread (``for``) or a coroutine (``async for``), once. A caller who is interrupted while waiting
    (Ctrl-C, a cancelled task) cancels the request; as a context manager it is cancelled at the end of the block.
    """

    def __init__(self, request: Request, *, engine: int | None = None) -> None:
        self.request = request
        self._engine = engine
        self.submitted_at = time.perf_counter()
        self._condition = threading.Condition()
        self._pieces: deque[str] = deque()
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._wakers: list[Callable[[], object]] = []

    # ------------------------------------------------------------------------------- the engine's side

    def push(self, piece: str) -> None:
        """Hands over a piece of text."""
        if piece:
            with self._condition:
                self._pieces.append(piece)
                self._wake()

    def finish(self, completion: Completion) -> None:
        """Ends the request well."""
        with self._condition:
            if not self.done:
                self._completion = completion
                self._wake()

    def fail(self, error: BaseException) -> None:
        """Ends the request with an error, which the caller will see raised."""
        with self._condition:
            if not self.done:
                self._error = error
                self._wake()

    def _wake(self) -> None:
        self._condition.notify_all()
        for waker in self._wakers:
            waker()

    # ------------------------------------------------------------------------------- the caller's side

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._completion is not None or self._error is not None

    @property
    def cancelled(self) -> bool:
        """Whether cancellation has been asked for."""
        return self._cancelled

    def cancel(self) -> None:
        """Asks the engine to drop the request at its next step. Safe to call at any time."""
        self._cancelled = True

    def _take(self) -> str | None:
        """Next piece, None when there is none yet; raises StopIteration at the end, or the request's error."""
        if self._pieces:
            return self._pieces.popleft()
        if self._error is not None:
            raise self._error
        if self._completion is not None:
            raise StopIteration
        return None

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a RequestHandle belongs to an engine of this process and cannot be pickled; keep its result(), or the request"
        )

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Nobody waits any more when Ctrl-C or a cancelled task ends the wait, so nobody needs the answer."""
        if not self.done and self._engine is not None and getattr(serving, "engine", None) == self._engine:
            raise InvalidRequestError(WAITS_FOR_ITSELF)
        try:
            yield
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            self.cancel()
            raise

    def __iter__(self) -> Iterator[str]:
        while True:
            with self._waiting(), self._condition:
                try:
                    while (piece := self._take()) is None:
                        self._condition.wait()
                except StopIteration:
                    return
            yield piece

    async def __aiter__(self) -> AsyncIterator[str]:
        with self._waker() as ready:
            while True:
                ready.clear()
                with self._condition:
                    try:
                        piece = self._take()
                    except StopIteration:
                        return
                if piece is None:
                    with self._waiting():
                        await ready.wait()
                else:
                    yield piece

    @contextlib.contextmanager
    def _waker(self) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set at every change."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(ready.set)

        with self._condition:
            self._wakers.append(wake)
        try:
            yield ready
        finally:
            with self._condition:
                self._wakers.remove(wake)

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: the time is over; the request goes on until it is cancelled.
            PolyKVError: the request failed.
        """
        with self._waiting(), self._condition:
            if not self._condition.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request did not finish within {timeout} s")
            return self._outcome()

    async def aresult(self) -> Completion:
        """As :meth:`result`, without blocking the event loop."""
        with self._waker() as ready:
            while not self.done:
                ready.clear()
                if not self.done:
                    with self._waiting():
                        await ready.wait()
        return self._outcome()

    def _outcome(self) -> Completion:
        if self._error is not None:
            raise self._error
        if self._completion is None:
            raise RequestCancelledError("the request has not finished")
        return self._completion
