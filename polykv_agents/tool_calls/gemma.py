"""Calls of the Gemma family: Python in a code block (Gemma 3), and braces with quotes of their own (FunctionGemma, Gemma 4)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from polykv.engine.grammar import json_rule
from polykv_agents.tool_calls.base import Call, Event, InvalidCall, Tool, dumps
from polykv_agents.tool_calls.family import StreamedFormat
from polykv_agents.tool_calls.json_text import MAX_DEPTH, parse_json
from polykv_agents.tool_calls.lark import Lark, Opening
from polykv_agents.tool_calls.notation import Notation
from polykv_agents.tool_calls.python_calls import PYTHON_QUOTES, call_rule, read_calls, write_call
from polykv_agents.tool_calls.reading import CUT, CallReader
from polykv_agents.tool_calls.schemas import Arguments
from polykv_agents.tool_calls.streaming import SPACE, Source, Syntax, Wait, run

FENCE = "```"
TOOL_CODE = "```tool_code"

_FIRST_NAME = re.compile(r"[\s\[]*(?:print\()?([A-Za-z_][\w.-]*)\s*\(", re.ASCII)


class Gemma(StreamedFormat):
    """Gemma 3 has no tokens for tools: it is asked for Python in a ``tool_code`` block, one call on each line."""

    name = "gemma"
    openings = (TOOL_CODE,)
    several = "You may write several calls in the block, one on each line."

    def read(self, source: Source, reader: CallReader) -> Wait[Sequence[Event] | None]:
        """See the base class."""
        yield from source.take((TOOL_CODE,))
        start = source.pos
        syntax = Syntax(PYTHON_QUOTES, (FENCE,))
        if (yield from source.next_is((" ", "\t", "\n", "\r"))) is None and source.pos < len(source.text):
            return None
        token = yield from source.next_token(syntax)
        end = source.pos - len(token or "")
        if token is None:
            hidden = source.text.find("\n" + FENCE, start)
            if hidden >= 0:
                source.pos = hidden + 1 + len(FENCE)
                end = hidden
        body = source.text[start:end].strip(SPACE)
        if not body:
            return None
        match = _FIRST_NAME.match(body)
        name = match.group(1) if match is not None else None
        if source.pos == end and not source.complete:
            return [InvalidCall(name, body, CUT)]
        events = read_calls(body, reader)
        return events or [InvalidCall(name, body, "not a list of calls")]

    def example(self) -> str:
        """See the base class."""
        return f'{TOOL_CODE}\ntool_name(argument_name="value", other_argument=1)\n{FENCE}'

    def write_calls(self, calls: Sequence[Call]) -> str:
        """See the base class."""
        lines = "\n".join(map(write_call, calls))
        return f"{TOOL_CODE}\n{lines}\n{FENCE}"

    def write_result(self, name: str, content: str) -> str:
        """See the base class."""
        return f"```tool_output\n{content}\n{FENCE}"

    def call_openings(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> Sequence[Opening]:
        """See the base class."""
        line = lark.literal("\n")
        call = lark.rule(" | ".join(call_rule(lark, tool) for tool in tools))
        more = f" ({line} {call})*" if parallel else ""
        return [Opening(TOOL_CODE, f"{line} {call}{more} {lark.literal(chr(10) + FENCE)}")]


_NAME = re.compile(r"call:[ \t\r\n]*([\w.-]+)[ \t\r\n]*(?=\{)", re.ASCII)
_NAME_BEGUN = re.compile(r"c?|ca|cal|call|call:[ \t\r\n]*([\w.-]+[ \t\r\n]*)?", re.ASCII)
_BARE_KEY = re.compile(r"[\w.$-]+")
_BARE_VALUE = re.compile(r"[^,\]}]*")
_JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class BracedCalls(StreamedFormat):
    """``call:name{key:value,...}`` between marks. Strings stand between quotes that nothing escapes; keys have none.

    Strings in JSON quotes are read too, and a string that holds the quote is written so. A bare word is a string.

    Args:
        name: of the format.
        opening: mark before a call.
        closing: mark after a call.
        quote: mark on both sides of a string.
        thoughts: pairs of marks around thoughts, the usual one first.
    """

    def __init__(
        self, name: str, opening: str, closing: str, quote: str, thoughts: tuple[tuple[str, str], ...] | None = None
    ) -> None:
        self.name = name
        self.openings = (opening,)
        self.marks = (opening, closing, quote)
        self._closing = closing
        self._quote = quote
        if thoughts is not None:
            self.thoughts = thoughts
        quotes = {quote: (quote, False), '"': ('"', True)}
        self._value = Syntax(quotes, ("{", "}", "[", "]", closing))
        self._end = Syntax(quotes, (closing, opening))

    def read(self, source: Source, reader: CallReader) -> Wait[Sequence[Event] | None]:
        """See the base class."""
        source.pos += len(self.openings[0])
        yield from source.skip_space()
        start = source.pos
        while (match := _NAME.match(source.text, start)) is None:
            if source.ended or _NAME_BEGUN.fullmatch(source.text, start) is None:
                break
            yield
        if match is None:
            return None
        name = match.group(1)
        source.pos = match.end()
        closed = yield from source.skip_value(self._value)
        raw = source.text[match.end() : source.pos]
        end = source.pos
        if closed:
            yield from source.skip_space()
            if (yield from source.take((self._closing,))) or (yield from source.next_is(self.openings)):
                return [self._call(name, raw, reader)]
            if source.pos == len(source.text) and source.complete:
                return [self._call(name, raw, reader)]
        token = yield from source.next_token(self._end)
        if token is None and self._closing in source.text[match.end() :]:
            end = source.text.index(self._closing, match.end())
            source.pos = end + len(self._closing)
            return [InvalidCall(name, source.text[match.end() : end].strip(SPACE), "a quote is not closed")]
        end = source.pos - len(token or "")
        if token == self.openings[0]:
            source.pos = end
        raw = source.text[match.end() : end].strip(SPACE)
        return [InvalidCall(name, raw, CUT if token is None else "the arguments are not between one pair of braces")]

    def _call(self, name: str, raw: str, reader: CallReader) -> Event:
        try:
            value, end = _ValueReader(raw, self._quote).value(0, 0)
        except ValueError as error:
            return InvalidCall(name, raw, f"the arguments cannot be read: {error}")
        assert end == len(raw)
        return reader.checked(name, value, raw)

    def example(self) -> str:
        """See the base class."""
        return f"{self.openings[0]}call:tool_name{{argument_name:{self._quote}value{self._quote},other_argument:1}}{self._closing}"

    def write_calls(self, calls: Sequence[Call]) -> str:
        """See the base class."""
        return "".join(
            f"{self.openings[0]}call:{call.name}{self._written(call.arguments)}{self._closing}" for call in calls
        )

    def _written(self, value: Any) -> str:
        if isinstance(value, Mapping):
            parts = []
            for key, part in value.items():
                name = str(key) if _BARE_KEY.fullmatch(str(key)) else self._written(str(key))
                parts.append(f"{name}:{self._written(part)}")
            return "{" + ",".join(parts) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(map(self._written, value)) + "]"
        if isinstance(value, str) and self._quote not in value:
            return f"{self._quote}{value}{self._quote}"
        return json.dumps(value, ensure_ascii=False)

    def call_openings(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> Sequence[Opening]:
        """See the base class."""
        call = lark.rule(" | ".join(self._rule(lark, tool) for tool in tools))
        more = f" ({lark.mark(self.openings[0])} {call})*" if parallel else ""
        return [Opening(self.openings[0], call + more)]

    def _rule(self, lark: Lark, tool: Tool) -> str:
        arguments = Arguments(tool)
        head = lark.literal(f"call:{tool.name}")
        end = lark.mark(self._closing)
        members = _BracedNotation(lark, arguments, self._quote).members(arguments.root)
        if members is None:
            return lark.rule(f"{head} {lark.rule(json_rule(arguments.root))} {end}")
        return lark.rule(f"{head} {lark.literal('{')} {members} {lark.literal('}')} {end}")


class _BracedNotation(Notation):
    separator = ","
    words: Mapping[bool | None, str] = {True: "true", False: "false", None: "null"}

    def __init__(self, lark: Lark, arguments: Arguments, quote: str) -> None:
        super().__init__(lark, arguments)
        self._quote = quote

    def key(self, name: str) -> str | None:
        return f"{name}:" if _BARE_KEY.fullmatch(name) else None

    def string(self, schema: Mapping[str, Any]) -> str:
        return f"{self.lark.mark(self._quote)} {self.lark.text_before(self._quote, schema)}"

    def constant(self, value: Any) -> str:
        if isinstance(value, str) and self._quote not in value:
            quote = self.lark.mark(self._quote)
            return f"{quote} {self.lark.literal(value)} {quote}" if value else f"{quote} {quote}"
        return self.lark.literal(dumps(value))


class _ValueReader:
    """Reads one value of the notation."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote

    def value(self, pos: int, depth: int) -> tuple[Any, int]:
        """The value that begins at ``pos``, and where it ends."""
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        pos = self._space(pos)
        text = self._text
        if text.startswith("{", pos):
            return self._object(pos + 1, depth + 1)
        if text.startswith("[", pos):
            return self._list(pos + 1, depth + 1)
        if (string := self._string(pos)) is not None:
            return string
        match = _BARE_VALUE.match(text, pos)
        assert match is not None
        word = match.group().strip(SPACE)
        if not word or any(character in word for character in '{[:"') or self._quote in word:
            raise ValueError(f"no value at character {pos}")
        try:
            value = parse_json(word)
        except ValueError:
            value = word
        return value, match.end()

    def _object(self, pos: int, depth: int) -> tuple[dict[str, Any], int]:
        result: dict[str, Any] = {}
        pos = self._space(pos)
        while not self._text.startswith("}", pos):
            if result:
                pos = self._space(self._past(",", pos))
            string = self._string(pos)
            if string is not None:
                key, pos = string
            else:
                match = _BARE_KEY.match(self._text, pos)
                if match is None:
                    raise ValueError(f"no key at character {pos}")
                key, pos = match.group(), match.end()
            result[key], pos = self.value(self._past(":", self._space(pos)), depth)
            pos = self._space(pos)
        return result, pos + 1

    def _list(self, pos: int, depth: int) -> tuple[list[Any], int]:
        result: list[Any] = []
        pos = self._space(pos)
        while not self._text.startswith("]", pos):
            if result:
                pos = self._past(",", pos)
            item, pos = self.value(pos, depth)
            result.append(item)
            pos = self._space(pos)
        return result, pos + 1

    def _string(self, pos: int) -> tuple[str, int] | None:
        if self._text.startswith(self._quote, pos):
            start = pos + len(self._quote)
            end = self._text.find(self._quote, start)
            if end < 0:
                raise ValueError("a quote is not closed")
            return self._text[start:end], end + len(self._quote)
        match = _JSON_STRING.match(self._text, pos)
        if match is None:
            return None
        return str(parse_json(match.group())), match.end()

    def _past(self, character: str, pos: int) -> int:
        if not self._text.startswith(character, pos):
            raise ValueError(f"no {character!r} at character {pos}")
        return pos + 1

    def _space(self, pos: int) -> int:
        source = Source(self._text, ended=True)
        source.pos = pos
        run(source.skip_space())
        return source.pos


def function_gemma() -> BracedCalls:
    """The format of FunctionGemma."""
    return BracedCalls("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")


def gemma4() -> BracedCalls:
    """The format of Gemma 4."""
    thoughts = (("<|channel>thought\n", "<channel|>"),)
    tool_format = BracedCalls("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', thoughts)
    tool_format.marks += ("<|channel>", "<channel|>")
    return tool_format
