"""Clocks, resident memory, rows, and the LangGraph graph that every system is put into."""

from __future__ import annotations

import ctypes
import gc
import itertools
import operator
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

import psutil
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

KEYS = (
    "cold_s",
    "first_ttft_s",
    "next_ttft_s",
    "slowest_ttft_s",
    "decode_tokens_per_s",
    "peak_extra_bytes",
    "live_bytes",
    "wall_s",
)
"""The measured numbers of a row."""


@dataclass(frozen=True)
class Task:
    """What a worker process measures.

    Attributes:
        system: a name in ``SYSTEMS``.
        model: for ``load_model``.
        agents: numbers of agents, ascending.
        tokens: tokens of the shared context.
        new_tokens: tokens of each answer.
        threads: threads to compute with.
        llama_batched_bench: llama.cpp's own benchmark, built natively, or None.
    """

    system: str
    model: str
    agents: tuple[int, ...]
    tokens: int
    new_tokens: int
    threads: int
    llama_batched_bench: Path | None = None


@dataclass
class Row:
    """One system with a number of agents; None where something was not measured.

    Attributes:
        system: its name.
        agents: how many.
        context_tokens: tokens they share.
        cold_s: prefill of the shared context, encoding included.
        first_ttft_s: from handing over the document to the first agent's first token.
        next_ttft_s: from a later agent's question to its first token, alone, the context being there.
        slowest_ttft_s: the same for the slowest of all agents asking at once.
        decode_tokens_per_s: of all agents together, while all of them decode.
        peak_extra_bytes: peak of the resident set over what it was after loading and a first small forward.
        live_bytes: tensors alive beyond the weights while all agents decode (torch only).
        wall_s: the graph, from the document to the last answer.
        extrapolated: which of these were computed from fewer agents or steps.
        note: how, or why not.
        answers: each agent's tokens, not written out.
        texts: the same as text, of systems that give no ids; not written out.
        margins: the reference's distance between its best two logits at each token, not written out.
        agreement: share of the answers' tokens before the first that differs from the reference.
        correct: for systems that must agree: whether every first difference is at a near tie.
    """

    system: str
    agents: int
    context_tokens: int = 0
    cold_s: float | None = None
    first_ttft_s: float | None = None
    next_ttft_s: float | None = None
    slowest_ttft_s: float | None = None
    decode_tokens_per_s: float | None = None
    peak_extra_bytes: float | None = None
    live_bytes: float | None = None
    wall_s: float | None = None
    extrapolated: list[str] = field(default_factory=list)
    note: str = ""
    answers: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    margins: list[list[float]] = field(default_factory=list)
    agreement: float | None = None
    correct: bool | None = None

    @property
    def measured(self) -> bool:
        return any(getattr(self, key) is not None for key in KEYS)


def not_run(task: Task, reason: str) -> list[Row]:
    """Rows that say why a system is missing: a peer that is not there never fails the run."""
    return [Row(task.system, agents, note=f"not run: {reason}") for agents in task.agents]


def say(text: str) -> None:
    """A sign of life."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def merge_passes(passes: Sequence[Row]) -> Row:
    """Medians of one row's numbers over several passes."""
    merged = passes[0]
    for key in KEYS:
        values = [value for row in passes if (value := getattr(row, key)) is not None]
        setattr(merged, key, statistics.median(values) if values else None)
    return merged


class TokenTimes:
    """When each agent got each of its tokens."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {}
        self.started: dict[int, float] = {}

    def ask(self, agent: int) -> None:
        self.started[agent] = time.perf_counter()
        self.times[agent] = []

    def token(self, agent: int) -> None:
        self.times[agent].append(time.perf_counter())

    def ttft(self, agent: int) -> float:
        return self.times[agent][0] - self.started[agent]

    @property
    def first(self) -> float:
        """When the first of all tokens came."""
        return min(times[0] for times in self.times.values())

    @property
    def slowest_ttft(self) -> float:
        """From the fan-out's start to the last agent's first token."""
        return max(times[0] for times in self.times.values()) - min(self.started.values())

    def decode_rate(self) -> float | None:
        """Tokens a second of all agents: one each in a median step."""
        step = self.step()
        return len(self.times) / step if step else None

    def together(self) -> tuple[float, float]:
        """When all agents have begun to decode, and when the first of them is done."""
        return max(times[0] for times in self.times.values()), min(times[-1] for times in self.times.values())

    def step(self) -> float | None:
        """Median time from one token to the next, while all agents decode."""
        begin, end = self.together()
        gaps = [
            later - earlier
            for times in self.times.values()
            for earlier, later in itertools.pairwise(times)
            if begin <= earlier and later <= end
        ]
        return statistics.median(gaps) if gaps else None


def _trim() -> None:
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc only: gives freed heap pages back, so that the next peak is its own
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class PeakMemory:
    """Resident bytes of this process over what they are when this object is made."""

    INTERVAL = 0.01

    def __init__(self) -> None:
        self._process = psutil.Process()
        _trim()
        self._base = self._process.memory_info().rss
        self.extra = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Sets :attr:`extra` to the peak during the block, sampled every hundredth of a second."""
        _trim()
        peak, done = self._base, threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.wait(self.INTERVAL):
                peak = max(peak, self._process.memory_info().rss)

        thread = threading.Thread(target=sample, name="peak-memory")
        thread.start()
        try:
            yield
        finally:
            peak = max(peak, self._process.memory_info().rss)
            done.set()
            thread.join()
            self.extra = peak - self._base


class Team(TypedDict):
    """The graph's state."""

    agents: int
    answers: Annotated[list[int], operator.add]


def run_graph(
    read: Callable[[], None], ask: Callable[[int], None], agents: int, *, max_concurrency: int | None = None
) -> float:
    """START -> read the document -> one node for each agent (`Send`), all at once -> END. Returns its seconds."""

    def read_node(team: Team) -> dict[str, Any]:
        read()
        return {"answers": []}

    def ask_node(task: dict[str, int]) -> dict[str, Any]:
        ask(task["agent"])
        return {"answers": [task["agent"]]}

    graph = StateGraph(Team)
    graph.add_node("read", read_node)
    graph.add_node("ask", ask_node)
    graph.add_edge(START, "read")
    graph.add_conditional_edges(
        "read", lambda team: [Send("ask", {"agent": i}) for i in range(team["agents"])], ["ask"]
    )
    graph.add_edge("ask", END)
    compiled = graph.compile()
    started = time.perf_counter()
    done = compiled.invoke(
        {"agents": agents, "answers": []}, {"max_concurrency": max_concurrency} if max_concurrency else {}
    )
    seconds = time.perf_counter() - started
    if sorted(done["answers"]) != list(range(agents)):
        raise RuntimeError(f"the graph answered {done['answers']} of {agents}")
    return seconds
