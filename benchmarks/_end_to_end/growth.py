"""Our decode step against the number of agents and the length of the context, and the shared part's share of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _end_to_end.measuring import say
from _end_to_end.ours import Recorder, chat_model, without_eos
from _end_to_end.workload import Workload, eos_ids, make_workload
from polykv_agents import ChatPolyKV
from polykv_kernels import ops

AGENTS = (1, 2, 4, 8, 15, 32, 64)
TOKENS = (1024, 2048, 4096, 7680)
"""The last one leaves room for answers in SmolLM2's 8,192 positions."""
STEPS = 12
"""Steps at least; as many more are run as there are agents."""


@dataclass(frozen=True)
class Point:
    """One configuration.

    Attributes:
        context_tokens: tokens of the shared context.
        agents: how many decode together.
        step_s: median time of a decode step, in which each of them gets a token.
        shared_share: share of those steps spent in attention over the shared context.
    """

    context_tokens: int
    agents: int
    step_s: float
    shared_share: float


class SharedPart:
    """Times the calls of `ops.shared_attention`."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []
        self._inner: Any = None

    def __enter__(self) -> SharedPart:
        self._inner = ops.shared_attention

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = self._inner(*args, **kwargs)
            self.calls.append((started, time.perf_counter()))
            return result

        ops.shared_attention = timed
        return self

    def __exit__(self, *exc: object) -> None:
        ops.shared_attention = self._inner

    def within(self, begin: float, end: float) -> float:
        return sum(stop - start for start, stop in self.calls if start >= begin and stop <= end)


def measure_growth(model: str, system: str, threads: int, agents: Sequence[int], tokens: Sequence[int]) -> list[Point]:
    """Every combination, decoding through the engine."""
    llm = chat_model(system, model=model, max_tokens=STEPS, threads=threads, max_batch=max(agents))
    points = []
    try:
        llm.load()
        loaded, tokenizer = llm.engine.model, llm.engine.tokenizer
        for length in tokens:
            workload = make_workload(tokenizer, eos_ids(loaded, tokenizer), length, max(agents), STEPS)
            call = without_eos(llm, workload)
            say(f"growth: {workload.context_tokens} tokens")
            with llm.share(workload.document) as context:
                for count in agents:
                    points.append(_point(llm.with_context(context), workload, count, call))
                    say(f"growth: {count} agents, {1e3 * points[-1].step_s:.0f} ms")
    finally:
        llm.close()
    return points


def _point(reader: ChatPolyKV, workload: Workload, agents: int, call: dict[str, Any]) -> Point:
    recorder = Recorder(workload)

    def ask(index: int) -> None:
        recorder.times.ask(index)
        # prompts are paced beside decoding, so the last of many agents starts many steps after the first
        reader.invoke(workload.agents[index].messages, max_tokens=STEPS + agents, **call)

    with recorder.recording(), SharedPart() as shared:
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(agents)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    step = recorder.times.step()
    if step is None:
        raise RuntimeError(f"{agents} agents never decoded together")
    begin, end = recorder.times.together()
    return Point(workload.context_tokens, agents, step, shared.within(begin, end) / (end - begin))


def growth_table(points: Sequence[Point]) -> str:
    """A row for each number of agents, a column for each context."""
    lengths = sorted({point.context_tokens for point in points})
    lines = ["| agents | " + " | ".join(f"{length:,} tokens" for length in lengths) + " |"]
    lines.append("|---" * (len(lengths) + 1) + "|")
    for agents in sorted({point.agents for point in points}):
        cells = []
        for length in lengths:
            found = next((p for p in points if (p.agents, p.context_tokens) == (agents, length)), None)
            cells.append("-" if found is None else f"{1e3 * found.step_s:.0f} ms, {100 * found.shared_share:.0f} %")
        lines.append(f"| {agents} | " + " | ".join(cells) + " |")
    return "\n".join(["decode step, and the share of it spent in attention over the shared context", "", *lines])


def plot_growth(points: Sequence[Point], path: Path, title: str) -> None:
    """Step against agents, step against context, and the shared part's share."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    lengths, counts = sorted({p.context_tokens for p in points}), sorted({p.agents for p in points})
    colours = plt.get_cmap("viridis")
    for number, length in enumerate(lengths):
        line = sorted((p for p in points if p.context_tokens == length), key=lambda p: p.agents)
        style: dict[str, Any] = {
            "marker": "o",
            "color": colours(0.9 * number / max(len(lengths) - 1, 1)),
            "label": f"{length:,} tokens",
        }
        axes[0].plot([p.agents for p in line], [1e3 * p.step_s for p in line], **style)
        axes[2].plot([p.agents for p in line], [100 * p.shared_share for p in line], **style)
    for number, count in enumerate(counts):
        line = sorted((p for p in points if p.agents == count), key=lambda p: p.context_tokens)
        axes[1].plot(
            [p.context_tokens for p in line],
            [1e3 * p.step_s for p in line],
            marker="o",
            color=colours(0.9 * number / max(len(counts) - 1, 1)),
            label=f"{count} agent{'s' if count > 1 else ''}",
        )
    labels = (
        ("agents", "decode step (ms)", "Step against agents"),
        ("tokens of the shared context", "decode step (ms)", "Step against context"),
        ("agents", "share of the step (%)", "Attention over the shared context"),
    )
    for axis, (x, y, heading) in zip(axes, labels, strict=True):
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.set_title(heading)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def as_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [asdict(point) for point in points]
