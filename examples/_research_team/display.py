"""Live progress in a terminal; plain lines elsewhere."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from langchain_core.messages import AIMessage, AIMessageChunk
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .measure import Rows
from .roles import Role

Report = Callable[[str, int, int], None]  # phase, done, total


class Display(Protocol):
    def note(self, text: str) -> None: ...
    def progress(self) -> AbstractContextManager[Report]: ...
    def writing(self, names: list[str]) -> AbstractContextManager[None]: ...
    def token(self, name: str, chunk: AIMessageChunk) -> None: ...
    def answer(self, role: Role, message: AIMessage) -> None: ...
    def table(self, title: str, rows: Rows) -> None: ...


def open_display() -> Display:
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries would fill the screen
    for stream in (sys.stdout, sys.stderr):
        # an answer may hold characters that the terminal's encoding lacks
        stream.reconfigure(errors="replace")
    return RichDisplay() if sys.stdout.isatty() else PlainDisplay()


def task_of(phase: str) -> str:
    """The steps of a conversion ("convert: weights") count up to one total: they are one task."""
    return phase.partition(":")[0]


def printable(text: str) -> str:
    """Without control characters: a model may write anything."""
    return "".join(c for c in text if c.isprintable() or c == "\n").strip()


def answer_text(message: AIMessage) -> str:
    cut = message.response_metadata["finish_reason"] == "length"
    return printable(message.text) + (" …" if cut else "")


@dataclass
class Writer:
    """One agent's text as far as it has come."""

    text: str = ""
    tokens: int = 0
    done: bool = False

    def add(self, chunk: AIMessageChunk) -> None:
        self.text += chunk.text
        self.tokens += bool(chunk.text)
        if chunk.usage_metadata:  # the last chunk counts exactly
            self.tokens, self.done = chunk.usage_metadata["output_tokens"], True

    @property
    def state(self) -> str:
        return "done" if self.done else "writing" if self.tokens else "reading"


class PlainDisplay:
    """One line per event, nothing that overwrites."""

    def __init__(self) -> None:
        self._writers: dict[str, Writer] = {}

    def note(self, text: str) -> None:
        print(text, flush=True)

    @contextmanager
    def progress(self) -> Iterator[Report]:
        quarters: dict[str, int] = {}

        def report(phase: str, done: int, total: int) -> None:
            quarter = 4 * done // max(total, 1)
            if quarter > quarters.get(task_of(phase), 0):
                quarters[task_of(phase)] = quarter
                self.note(f"{phase}: {25 * quarter} %")

        yield report

    @contextmanager
    def writing(self, names: list[str]) -> Iterator[None]:
        self._writers = {name: Writer() for name in names}
        yield

    def token(self, name: str, chunk: AIMessageChunk) -> None:
        writer = self._writers[name]
        before = writer.state
        writer.add(chunk)
        if writer.state != before:
            self.note(f"{name}: {'first token' if not writer.done else f'done, {writer.tokens} tokens'}")

    def answer(self, role: Role, message: AIMessage) -> None:
        self.note(f"\n[{role.name}] {role.question}\n{answer_text(message)}")

    def table(self, title: str, rows: Rows) -> None:
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        self.note("\n" + "\n".join([title, *lines]) + "\n")


class RichDisplay:
    """Bars, a live table of the agents, panels."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._writers: dict[str, Writer] = {}

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    @contextmanager
    def progress(self) -> Iterator[Report]:
        label = TextColumn("{task.description}")
        columns = (label, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        tasks: dict[str, TaskID] = {}
        with Progress(*columns, console=self._console) as bars:

            def report(phase: str, done: int, total: int) -> None:
                task = task_of(phase)
                if task not in tasks:
                    tasks[task] = bars.add_task(phase, total=total)
                bars.update(tasks[task], description=phase, completed=done, total=total)

            yield report

    @contextmanager
    def writing(self, names: list[str]) -> Iterator[None]:
        self._writers = {name: Writer() for name in names}
        with Live(console=self._console, get_renderable=self._live_table, transient=True):
            yield

    def _live_table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("agent", style="bold", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("last words", style="dim", no_wrap=True)
        room = max(10, self._console.width - 45)
        for name, writer in self._writers.items():
            last = " ".join(printable(writer.text).split())[-room:]
            table.add_row(name, writer.state, str(writer.tokens), Text(last))
        return table

    def token(self, name: str, chunk: AIMessageChunk) -> None:
        self._writers[name].add(chunk)

    def answer(self, role: Role, message: AIMessage) -> None:
        body = Text.assemble((role.question, "italic dim"), "\n", answer_text(message))
        self._console.print(Panel(body, title=role.name, title_align="left"))

    def table(self, title: str, rows: Rows) -> None:
        table = Table(title=title, title_justify="left", show_header=False, box=SIMPLE)
        table.add_column(style="bold")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for row in rows:
            table.add_row(*row) if any(row) else table.add_section()
        self._console.print(table)
