"""The run as one picture: memory on the left, time on the right."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # needs no display
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from .measure import Measurements, mb

# Okabe-Ito colours: told apart with colour-blind eyes, too.
POOL, DENSE, TAIL, WAIT, WRITE = "#0072B2", "#999999", "#E69F00", "#CCCCCC", "#009E73"
BAR, SMALL = 0.62, 9


def save_figure(results: Measurements, path: Path) -> None:
    height = max(4.4, 2.0 + 0.33 * len(results.spans))
    figure = Figure(figsize=(13, height), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.2))
    _memory(left, results)
    _time(right, results)
    agents = "1 agent reads" if results.agents == 1 else f"{results.agents} agents read"
    figure.suptitle(f"{agents} one context of {results.context_tokens:,} tokens, codec {results.codec}")
    figure.savefig(path, dpi=130, format="png")


def _memory(figure: SubFigure, results: Measurements) -> None:
    axes = figure.subplots()
    labels = [f"PolyKV pool, {results.codec}\n(measured)"]
    bars = [(results.pool_bytes, results.tail_bytes, POOL)]
    for other in results.alternatives():
        labels.append(f"{other.label}\n(computed)")
        bars.append((other.context_bytes, other.tail_bytes, DENSE))
    for row, (context, tails, colour) in enumerate(bars):
        axes.barh(row, context / 1e6, BAR, color=colour)
        axes.barh(row, tails / 1e6, BAR, left=context / 1e6, color=TAIL)
        axes.text((context + tails) / 1e6, row, f" {mb(context + tails)}", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_title("Memory of keys and values", loc="left")
    axes.set_xlabel("MB (10⁶ bytes)")
    _finish(figure, axes, [(POOL, "compressed context"), (DENSE, "uncompressed context"), (TAIL, "private tails")])


def _time(figure: SubFigure, results: Measurements) -> None:
    axes = figure.subplots()
    axes.barh(0, results.built, BAR, color=POOL)
    axes.text(results.built, 0, f" built once: {results.built:.1f} s", va="center", fontsize=SMALL)
    for row, span in enumerate(results.spans.values(), start=1):
        first = span.started + span.ttft
        axes.barh(row, span.ttft, BAR, left=span.started, color=WAIT)
        axes.barh(row, span.end - first, BAR, left=first, color=WRITE)
        axes.text(span.end, row, f" first token: {span.ttft:.1f} s", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(results.spans) + 1), ["shared context", *results.spans])
    axes.set_title("Time", loc="left")
    axes.set_xlabel("seconds since the document was handed over")
    _finish(figure, axes, [(POOL, "prefill and encode"), (WAIT, "until the first token"), (WRITE, "writing")])


def _finish(figure: SubFigure, axes: Axes, colours: list[tuple[str, str]]) -> None:
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * axes.get_xlim()[1])  # room for the text after the longest bar
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=label) for colour, label in colours]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=SMALL)
