"""What is measured during the run, and what is computed from it."""

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from langchain_core.messages import AIMessage, AIMessageChunk

from polykv_agents import ChatPolyKV, SharedContext

Rows = list[tuple[str, str, str]]  # label, value, remark


@dataclass
class Span:
    """One agent's work, in seconds since the stopwatch started."""

    started: float
    first_token: float | None = None
    finished: float | None = None

    @property
    def end(self) -> float:
        return self.started if self.finished is None else self.finished

    @property
    def ttft(self) -> float:
        """Time to first token; an agent that wrote nothing has waited until its end."""
        return (self.end if self.first_token is None else self.first_token) - self.started


@dataclass
class Stopwatch:
    """Times as a caller of the graph sees them: queueing, rendering and LangGraph's own work included."""

    origin: float = field(default_factory=time.perf_counter)
    built: float = 0.0
    spans: dict[str, Span] = field(default_factory=dict)

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def mark_built(self) -> None:
        self.built = self.now()

    def start(self, names: Iterable[str]) -> None:
        now = self.now()
        self.spans.update((name, Span(started=now)) for name in names)

    def token(self, name: str, chunk: AIMessageChunk) -> None:
        span = self.spans[name]
        span.finished = self.now()
        if chunk.text and span.first_token is None:
            span.first_token = span.finished


@dataclass(frozen=True)
class Alternative:
    """Another way to hold the same keys and values. It did not run: its bytes are computed."""

    label: str
    context_bytes: int
    tail_bytes: int

    @property
    def total(self) -> int:
        return self.context_bytes + self.tail_bytes


@dataclass(frozen=True)
class Measurements:
    """One run. Bytes are those really allocated; only `alternatives` are computed."""

    codec: str
    context_tokens: int
    pool_bytes: int
    float16_bytes: int  # of one uncompressed copy of the context
    dtype: str  # of the model, and so of the tails
    dtype_bytes: int
    tail_bytes: int
    peak_build_bytes: int
    built: float
    spans: dict[str, Span]
    analysts: list[str]
    cached_tokens: list[int]
    prompt_tokens: list[int]
    output_tokens: list[int]

    @classmethod
    def collect(
        cls, llm: ChatPolyKV, context: SharedContext, watch: Stopwatch, answers: dict[str, AIMessage]
    ) -> "Measurements":
        messages = list(answers.values())
        usage = [message.usage_metadata for message in messages]
        cached = [u["input_token_details"]["cache_read"] for u in usage]
        dtype = llm.engine.model.dtype
        return cls(
            codec=context.codec,
            context_tokens=context.num_tokens,
            pool_bytes=context.num_bytes,
            float16_bytes=context.dense_bytes,
            dtype=str(dtype).removeprefix("torch."),
            dtype_bytes=dtype.itemsize,
            tail_bytes=sum(message.response_metadata["tail_bytes"] for message in messages),
            peak_build_bytes=context.peak_build_bytes,
            built=watch.built,
            spans=watch.spans,
            analysts=list(answers),
            cached_tokens=cached,
            prompt_tokens=[u["input_tokens"] - read for u, read in zip(usage, cached, strict=True)],
            output_tokens=[u["output_tokens"] for u in usage],
        )

    @property
    def agents(self) -> int:
        return len(self.analysts)

    @property
    def kv_bytes(self) -> int:
        return self.pool_bytes + self.tail_bytes

    def alternatives(self) -> list[Alternative]:
        """The strongest first: one uncompressed copy for all; then a private cache for each."""
        n, half = self.agents, self.tail_bytes * 2 // self.dtype_bytes
        own = self.float16_bytes * self.dtype_bytes // 2
        private = "private cache" if n == 1 else "private caches"
        options = [
            Alternative("1 shared copy, float16", self.float16_bytes, half),
            Alternative(f"{n} {private}, float16", n * self.float16_bytes, half),
            Alternative(f"{n} {private}, {self.dtype}", n * own, self.tail_bytes),
        ]
        return options[:2] if self.dtype_bytes == 2 else options

    def rows(self) -> Rows:
        return [*self._memory_rows(), ("", "", ""), *self._time_rows()]

    def _memory_rows(self) -> Rows:
        ratio = self.float16_bytes / self.pool_bytes
        rows = [
            (
                "Shared pool",
                mb(self.pool_bytes),
                f"{self.context_tokens:,} tokens as {self.codec}, allocated",
            ),
            ("Compression", f"{ratio:.2f}x", f"against float16 ({mb(self.float16_bytes)})"),
            ("Private tails", mb(self.tail_bytes), "prompts and answers, allocated"),
            ("Pool + tails", mb(self.kv_bytes), "all keys and values in use"),
            ("Peak of the build", mb(self.peak_build_bytes), "dense cache and pool together"),
        ]
        for other in self.alternatives():
            remark = f"{other.total / self.kv_bytes:.1f}x pool + tails (computed)"
            rows.append((other.label, mb(other.total), remark))
        return rows

    def _time_rows(self) -> Rows:
        spans = [self.spans[name] for name in self.analysts]
        seconds = max(span.end for span in spans) - min(span.started for span in spans)
        first, *others = sorted(span.ttft for span in spans)
        rows = [
            ("Cached tokens per agent", spread(self.cached_tokens), "read from the pool"),
            ("Own tokens per agent", spread(self.prompt_tokens), "role and question, prefilled"),
            ("Shared build", f"{self.built:.2f} s", "prefill and encode, once"),
            ("First token, first agent", f"{self.built + first:.2f} s", "cold: the build included"),
        ]
        if others:
            remark = f"median; slowest {others[-1]:.2f} s"
            rows.append(("First token, other agents", f"{statistics.median(others):.2f} s", remark))
        tokens = sum(self.output_tokens)
        rows.append(("Throughput", f"{tokens / seconds:.1f} tokens/s", f"{tokens} tokens, own prefill included"))
        return rows


def mb(count: float) -> str:
    """Decimal megabytes."""
    return f"{count / 1e6:,.1f} MB"


def spread(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
