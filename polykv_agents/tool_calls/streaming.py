"""Reading an answer as it arrives: the text that has come, thoughts, and the parser that all formats share.

A format reads a call with a generator that yields whenever it needs more text. So every decision depends on the text alone,
never on the pieces it came in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from polykv_agents.tool_calls.base import Event, OutputParser, Reasoning, Text, Thought

T = TypeVar("T")
Wait = Generator[None, None, T]
"""Yields to wait for more text, returns what was read."""

_SPACE = re.compile(r"[ \t\r\n]*")
SPACE = " \t\r\n"
"""White space between text and calls, and inside calls."""


def held_back(text: str, words: Sequence[str]) -> int:
    """How many characters at the end of ``text`` are the beginning of one of ``words``, but not all of it."""
    longest = max(map(len, words), default=1)
    for length in range(min(len(text), longest - 1), 0, -1):
        tail = text[-length:]
        if any(len(word) > length and word.startswith(tail) for word in words):
            return length
    return 0


@dataclass(frozen=True)
class Syntax:
    """Which parts of a text count, and which quotes hide them.

    Attributes:
        quotes: opening quote to (closing quote, whether a backslash escapes).
        tokens: what counts outside quotes: brackets and marks.
    """

    quotes: Mapping[str, tuple[str, bool]]
    tokens: tuple[str, ...]
    words: tuple[str, ...] = field(init=False)
    pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        words = sorted({*self.quotes, *self.tokens}, key=len, reverse=True)
        object.__setattr__(self, "words", tuple(words))
        object.__setattr__(self, "pattern", re.compile("|".join(map(re.escape, words))))


BRACKETS = ("{", "}", "[", "]")
JSON_QUOTES: Mapping[str, tuple[str, bool]] = {'"': ('"', True)}
JSON_VALUE = Syntax(JSON_QUOTES, BRACKETS)

_STRING_ENDS: dict[tuple[str, bool], re.Pattern[str]] = {}


def _string_end(closing: str, escapes: bool) -> re.Pattern[str]:
    key = (closing, escapes)
    if key not in _STRING_ENDS:
        _STRING_ENDS[key] = re.compile((r"\\.|" if escapes else "") + re.escape(closing), re.DOTALL)
    return _STRING_ENDS[key]


class Source:
    """The text of an answer so far, and how far it has been read.

    Attributes:
        text: what has come and may still be needed.
        pos: up to where it has been read.
        ended: no more text will come.
        complete: the model ended the answer itself; known when ``ended``.
    """

    def __init__(self, text: str = "", *, ended: bool = False) -> None:
        self.text = text
        self.pos = 0
        self.ended = ended
        self.complete = ended

    def drop_before(self, start: int) -> None:
        """Forgets the text before ``start``; positions move."""
        self.text = self.text[start:]
        self.pos -= start

    def skip_space(self) -> Wait[None]:
        """Moves to the next character that is no white space, or to the end."""
        while True:
            match = _SPACE.match(self.text, self.pos)
            assert match is not None
            self.pos = match.end()
            if self.pos < len(self.text) or self.ended:
                return
            yield

    def next_is(self, options: Sequence[str]) -> Wait[str | None]:
        """The longest option that the text goes on with, without moving."""
        longest = max(map(len, options))
        while True:
            rest = self.text[self.pos : self.pos + longest]
            if self.ended or not any(len(option) > len(rest) and option.startswith(rest) for option in options):
                return max((option for option in options if rest.startswith(option)), key=len, default=None)
            yield

    def take(self, options: Sequence[str]) -> Wait[str | None]:
        """As :meth:`next_is`, and moves past it."""
        option = yield from self.next_is(options)
        self.pos += len(option or "")
        return option

    def next_token(self, syntax: Syntax) -> Wait[str | None]:
        """Moves past the next token outside quotes and returns it; None at the end of the text."""
        while True:
            match = syntax.pattern.search(self.text, self.pos)
            begun = len(self.text)
            if not self.ended and (match is None or match.start() > begun - len(syntax.words[0])):
                begun -= held_back(self.text, syntax.words)
            if match is not None and match.start() < begun:
                self.pos = match.end()
                token = match.group()
                if token not in syntax.quotes:
                    return token
                yield from self._skip_string(*syntax.quotes[token])
                continue
            self.pos = max(self.pos, begun)
            if self.ended:
                return None
            yield

    def _skip_string(self, closing: str, escapes: bool) -> Wait[None]:
        end = _string_end(closing, escapes)
        reach = max(len(closing), 1 + escapes)
        while True:
            match = end.search(self.text, self.pos)
            if match is not None:
                self.pos = match.end()
                if match.group() == closing:
                    return
                continue
            if self.ended:
                self.pos = len(self.text)
                return
            self.pos = max(self.pos, len(self.text) - reach + 1)
            yield

    def skip_value(self, syntax: Syntax = JSON_VALUE) -> Wait[bool]:
        """Moves past a value in brackets that starts here; False if the text ended, or another token than a bracket came, first."""
        depth = 0
        while True:
            token = yield from self.next_token(syntax)
            if token is None:
                return False
            if token in ("{", "[", "("):
                depth += 1
            elif token in ("}", "]", ")"):
                depth -= 1
                if depth <= 0:
                    return True
            else:
                self.pos -= len(token)
                return False


def run(waiting: Wait[T]) -> T:
    """The result of a reader over a source that has ended."""
    try:
        while True:
            next(waiting)
    except StopIteration as stop:
        result: T = stop.value
        return result


THOUGHT_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class ThoughtSplitter:
    """Separates the thoughts that an answer begins with from the rest.

    Line breaks around the thoughts are not part of them, nor are those between them and the rest. Thoughts that never end are
    thoughts to the end; an answer that does not begin with a mark (white space aside) has none, and stays as it is.

    Args:
        reasoning: whether thoughts may come.
        marks: pairs of opening and closing marks; thoughts that the prompt began are closed by any of them.
    """

    def __init__(self, reasoning: Reasoning, marks: Sequence[tuple[str, str]] = THOUGHT_MARKS) -> None:
        self._source = Source()
        self._thoughts: list[Thought] = []
        self._rest: list[str] = []
        self._marks = dict(marks)
        self._state: Wait[None] | None = self._read(opened=reasoning == "open") if reasoning != "none" else None

    def feed(self, piece: str) -> tuple[list[Thought], str]:
        """Takes a piece; returns thoughts that are certain, and text after them."""
        if self._state is None:
            return [], piece
        self._source.text += piece
        return self._advance()

    def finish(self) -> tuple[list[Thought], str]:
        """What is left at the end of the answer."""
        self._source.ended = True
        return self._advance() if self._state is not None else ([], "")

    def _advance(self) -> tuple[list[Thought], str]:
        if self._state is not None:
            try:
                next(self._state)
            except StopIteration:
                self._state = None
                self._rest.append(self._source.text[self._source.pos :])
        thoughts, rest = self._thoughts, "".join(self._rest)
        self._thoughts, self._rest = [], []
        return thoughts, rest

    def _read(self, opened: bool) -> Wait[None]:
        source = self._source
        yield from source.skip_space()
        mark = yield from source.take(tuple(self._marks))
        if mark is None and not opened:
            source.pos = 0
            return
        if mark is None:
            source.pos = 0
        while (yield from source.take(("\n", "\r"))):
            pass
        closings = tuple(self._marks.values()) if mark is None else (self._marks[mark],)
        syntax = Syntax({}, closings)
        start = source.pos
        while True:
            match = syntax.pattern.search(source.text, start)
            if match is not None:
                self._think(source.text[start : match.start()].rstrip("\r\n"))
                source.pos = match.end()
                break
            if source.ended:
                self._think(source.text[start:])
                source.pos = len(source.text)
                return
            certain = len(source.text) - held_back(source.text, syntax.words)
            certain = start + len(source.text[start:certain].rstrip("\r\n"))
            self._think(source.text[start:certain])
            source.drop_before(certain)
            start = 0
            yield
        while (yield from source.take(("\n", "\r"))):
            pass

    def _think(self, text: str) -> None:
        if text:
            self._thoughts.append(Thought(text))


ReadCalls = Callable[[Source], Wait[Sequence[Event] | None]]
"""Reads the calls that begin at the source's position and moves past them, or returns None if what is there is text."""


class PlainParser(OutputParser):
    """Thoughts and text: for answers without tools."""

    def __init__(self, reasoning: Reasoning, marks: Sequence[tuple[str, str]] = THOUGHT_MARKS) -> None:
        self._splitter = ThoughtSplitter(reasoning, marks)

    def feed(self, piece: str) -> list[Event]:
        """See the base class."""
        thoughts, text = self._splitter.feed(piece)
        return [*thoughts, *([Text(text)] if text else [])]

    def finish(self, *, complete: bool) -> list[Event]:
        """See the base class."""
        thoughts, text = self._splitter.finish()
        return [*thoughts, *([Text(text)] if text else [])]


class CallParser(OutputParser):
    """Thoughts, text and calls.

    White space between text and calls belongs to neither. Text without calls stays as it is.

    Args:
        read: the format's reader, called where an opening stands.
        openings: marks that open a call anywhere.
        first: what opens a call only at the start of the answer, or after a call.
        reasoning: whether thoughts may come first.
        marks: of thoughts.
        calls_first: whether an answer that does not begin with a call has none.
    """

    def __init__(
        self,
        read: ReadCalls,
        openings: Sequence[str],
        first: Sequence[str],
        reasoning: Reasoning,
        marks: Sequence[tuple[str, str]] = THOUGHT_MARKS,
        *,
        calls_first: bool = False,
    ) -> None:
        self._calls_first = calls_first
        self._read = read
        self._openings = Syntax({}, tuple(openings)) if openings else None
        self._first = tuple(first)
        self._splitter = ThoughtSplitter(reasoning, marks)
        self._source = Source()
        self._events: list[Event] = []
        self._state: Wait[None] | None = self._run()

    def feed(self, piece: str) -> list[Event]:
        """See the base class."""
        thoughts, text = self._splitter.feed(piece)
        self._events += thoughts
        return self._advance(text)

    def finish(self, *, complete: bool) -> list[Event]:
        """See the base class."""
        thoughts, text = self._splitter.finish()
        self._events += thoughts
        self._source.ended = True
        self._source.complete = complete
        return self._advance(text)

    def _advance(self, text: str) -> list[Event]:
        self._source.text += text
        if self._state is not None and (text or self._source.ended):
            try:
                next(self._state)
            except StopIteration:
                self._state = None
        events, self._events = self._events, []
        return events

    def _run(self) -> Wait[None]:
        source = self._source
        start = 0  # of the text that has not been given out
        at_first = True
        while True:
            if at_first and self._first:
                yield from source.skip_space()
                if (yield from source.next_is(self._first)) is not None and (yield from self._calls()):
                    start = yield from self._after_calls()
                    continue
            at_first = False
            source.pos = max(source.pos, start)
            if self._calls_first and self._openings is not None:
                yield from source.skip_space()
                if (yield from source.next_is(self._openings.words)) is None:
                    self._openings = None  # text to the end
            opening = yield from self._text(start)
            if opening is None:
                return
            start = opening
            at = source.pos
            if (yield from self._calls()):
                start = yield from self._after_calls()
                at_first = True
            else:
                assert self._openings is not None
                match = self._openings.pattern.match(source.text, at)
                assert match is not None
                source.pos = match.end()

    def _calls(self) -> Wait[bool]:
        at = self._source.pos
        events = yield from self._read(self._source)
        if events is None:
            self._source.pos = at
            return False
        self._events += events
        return True

    def _after_calls(self) -> Wait[int]:
        yield from self._source.skip_space()
        self._source.drop_before(self._source.pos)
        return 0

    def _text(self, start: int) -> Wait[int | None]:
        """Gives text out up to the white space before the next opening, and stops at that; None at the end of the answer.

        Returns:
            Where the text begins that has not been given out.
        """
        source = self._source
        looked = start
        while True:
            match = self._openings.pattern.search(source.text, source.pos) if self._openings else None
            words = self._openings.words if self._openings else ()
            begun = len(source.text) - (0 if source.ended else held_back(source.text, words))
            if match is not None and match.start() < begun:
                start = self._give(start, match.start())
                source.pos = match.start()
                return start
            if source.ended:
                if start < len(source.text):
                    self._events.append(Text(source.text[start:]))
                return None
            edge = max(source.pos, begun)
            more = source.text[looked:edge].strip(SPACE)  # else only white space has come, which is kept
            source.pos = edge
            if more:
                source.drop_before(self._give(start, edge))
                start = 0
            looked = source.pos
            yield

    def _give(self, start: int, end: int) -> int:
        text = self._source.text[start:end].rstrip(SPACE)
        if text:
            self._events.append(Text(text))
        return start + len(text)
