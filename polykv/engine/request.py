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
from typing import Literal

from polykv.errors import InvalidRequestError, RequestCancelledError
from polykv.pool.segment import KVSegment

FinishReason = Literal["stop", "length"]


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Attributes:
        temperature: 0 takes the most likely token; above, tokens are drawn.
        top_p: draw from the smallest set of tokens with at least this probability (nucleus sampling, Holtzman 2020).
        max_tokens: tokens to generate at most.
        stop: the answer ends before the first of these strings.
        seed: seed of this request's own generator; None draws a fresh one.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or self.temperature < 0:
            raise InvalidRequestError(f"temperature must be a finite number >= 0, got {self.temperature!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p must lie in (0, 1], got {self.top_p!r}")
        if not isinstance(self.max_tokens, int) or isinstance(self.max_tokens, bool) or self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be an integer >= 1, got {self.max_tokens!r}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidRequestError(f"stop must be a sequence of non-empty strings, got {self.stop!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise InvalidRequestError(f"seed must be an integer or None, got {self.seed!r}")


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        token_ids: the whole prompt, the shared context's tokens first.
        segment: the shared context, or None.
        sampling: how to generate.
    """

    token_ids: tuple[int, ...]
    segment: KVSegment | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)


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
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    tail_bytes: int
    timing: Timing


class RequestHandle:
    """The caller's end of a request: iterate its text, wait for its completion, or cancel it.

    Iteration yields pieces of text as they become certain (a piece that may begin a stop string is held back). It can
    be consumed from a thread (``for``) or a coroutine (``async for``), once.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
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

    def __iter__(self) -> Iterator[str]:
        while True:
            with self._condition:
                try:
                    while (piece := self._take()) is None:
                        self._condition.wait()
                except StopIteration:
                    return
            yield piece

    async def __aiter__(self) -> AsyncIterator[str]:
        ready = self._waker()
        while True:
            ready.clear()
            with self._condition:
                try:
                    piece = self._take()
                except StopIteration:
                    return
            if piece is None:
                await ready.wait()
            else:
                yield piece

    def _waker(self) -> asyncio.Event:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(ready.set)

        with self._condition:
            self._wakers.append(wake)
        return ready

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: the time is over; the request goes on until it is cancelled.
            PolyKVError: the request failed.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request did not finish within {timeout} s")
            return self._outcome()

    async def aresult(self) -> Completion:
        """As :meth:`result`, without blocking the event loop."""
        ready = self._waker()
        while not self.done:
            ready.clear()
            if not self.done:
                await ready.wait()
        return self._outcome()

    def _outcome(self) -> Completion:
        if self._error is not None:
            raise self._error
        if self._completion is None:
            raise RequestCancelledError("the request has not finished")
        return self._completion
