"""A picture of what a pool holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polykv.pool.table import Entry, Table

_COLOURS = {"context": "#4c72b0", "cached": "#55a868", "in the store": "#c0c0c0"}
_ROWS = 60


def _kind(entry: Entry) -> str:
    if not entry.resident:
        return "in the store"
    return "cached" if entry.cached and not entry.handles else "context"


def _order(table: Table) -> list[tuple[Entry, int]]:
    """Entries with where their tokens begin, each after what it builds on."""
    starts: dict[Entry, int] = {}
    ordered: list[tuple[Entry, int]] = []
    children: dict[Entry | None, list[Entry]] = {}
    for entry in table:
        children.setdefault(entry.requires[-1] if entry.requires else None, []).append(entry)
    stack = [(entry, 0) for entry in reversed(children.get(None, []))]
    while stack:
        entry, start = stack.pop()
        if entry.segment is not None:
            start = entry.segment.start
        starts[entry] = start
        ordered.append((entry, start))
        stack += [(child, start + len(entry.tokens)) for child in reversed(children.get(entry, []))]
    return ordered


def draw(table: Table, path: str | Path | None = None) -> Any:
    """Draws a table's entries: where their tokens stand, what they take, how often and by how many they are read.

    Args:
        table: of a pool; the caller holds its lock.
        path: where to save the picture, or None.

    Returns:
        The matplotlib figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    everything = _order(table)
    rows = everything[:_ROWS]
    figure = Figure(figsize=(10, 1.4 + 0.32 * max(len(rows), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    number = {entry: row for row, (entry, _) in enumerate(rows)}
    widest = max((start + len(entry.tokens) for entry, start in rows), default=1)
    for row, (entry, start) in enumerate(rows):
        colour = _COLOURS[_kind(entry)]
        axes.barh(row, len(entry.tokens), left=start, height=0.6, color=colour, edgecolor="black", linewidth=0.5)
        label = f"{entry.num_bytes / 1e6:.1f} MB, {entry.hits} hit(s)"
        if entry.leases:
            label += f", {entry.leases} reader(s)"
        if entry.agents:
            label += f" by {', '.join(sorted(entry.agents))[:40]}"
        axes.text(start + len(entry.tokens) + widest * 0.01, row, label, va="center", fontsize=7)
        above = number.get(entry.requires[-1]) if entry.requires else None
        if above is not None:
            axes.plot([start, start], [above, row], color="black", linewidth=0.7, zorder=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, widest * 1.35)
    axes.set_yticks(range(len(rows)), [f"{entry.key[1][:8]} {entry.key[2]}" for entry, _ in rows], fontsize=7)
    axes.set_xlabel("position in the prompt (tokens)")
    budget = f" of {table.max_bytes / 1e6:,.0f} MB" if table.max_bytes is not None else ""
    hidden = f", {len(everything) - len(rows)} more not drawn" if len(everything) > len(rows) else ""
    axes.set_title(f"pool: {len(everything)} segments, {table.num_bytes / 1e6:,.1f} MB{budget}{hidden}", fontsize=10)
    axes.legend(handles=[Patch(color=c, label=k) for k, c in _COLOURS.items()], fontsize=7, loc="lower right")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
