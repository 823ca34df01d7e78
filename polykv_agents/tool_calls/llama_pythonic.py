"""Calls as a Python list that begins the answer, ``[get_weather(city="Paris")]``: Llama 3.2, and Llama 4 with marks around it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polykv.engine.grammar import json_rule
from polykv_agents.tool_calls.base import Call, Event, InvalidCall, Tool
from polykv_agents.tool_calls.family import StreamedFormat
from polykv_agents.tool_calls.lark import Answers, Lark, Opening
from polykv_agents.tool_calls.python_calls import PYTHON_VALUE, call_rule, read_arguments, read_calls, write_call
from polykv_agents.tool_calls.reading import CUT, CallReader
from polykv_agents.tool_calls.streaming import SPACE, Source, Wait

START, END = "<|python_start|>", "<|python_end|>"

_LIST = re.compile(r"\[[ \t\r\n]*([A-Za-z_][\w.-]*)[ \t\r\n]*\(", re.ASCII)
_LIST_BEGUN = re.compile(r"\[[ \t\r\n]*([A-Za-z_][\w.-]*[ \t\r\n]*)?", re.ASCII)

NOT_LIST = r"/[ \t\r\n]*([^ \t\r\n\[](.|\n)*)?/"
"""Regular expression of a text that does not begin with a square bracket."""


def read_list(source: Source, reader: CallReader, *, marked: bool) -> Wait[Sequence[Event] | None]:
    """Reads a list of calls; None if what is there is no list of calls.

    A list without a closing mark ends with the answer, so it counts as finished only if text follows or the model ended the
    answer itself.
    """
    start = source.pos
    while (match := _LIST.match(source.text, start)) is None:
        if source.ended or _LIST_BEGUN.fullmatch(source.text, start) is None:
            return None
        yield
    source.pos = start
    if not (yield from source.skip_value(PYTHON_VALUE)):
        if not marked and match.group(1) not in reader.tools:
            return None
        raw = source.text[start : source.pos]
        return [InvalidCall(match.group(1), raw.strip(SPACE), CUT)]
    raw = source.text[start : source.pos]
    events = read_calls(raw, reader)
    if events is None:
        return [InvalidCall(match.group(1), raw, "not a list of calls")] if match.group(1) in reader.tools else None
    if not marked and not any(_name(event) in reader.tools for event in events):
        return events if all(_is_readable(event) for event in events) else None
    return events


def _name(event: Event) -> str | None:
    return event.name if isinstance(event, (Call, InvalidCall)) else None


def _is_readable(event: Event) -> bool:
    try:
        return isinstance(event, InvalidCall) and read_arguments(event.arguments) is not None
    except ValueError:
        return False


class LlamaPythonic(StreamedFormat):
    """The list may stand between ``<|python_start|>`` and ``<|python_end|>``; without them only at the start of an answer."""

    name = "llama_pythonic"
    openings = (START,)
    first = ("[",)
    several = "You may write several calls in the list, with commas between them."
    marks = (START, END)

    def read(self, source: Source, reader: CallReader) -> Wait[Sequence[Event] | None]:
        """See the base class."""
        marked = (yield from source.take((START,))) is not None
        yield from source.skip_space()
        start = source.pos
        events = yield from read_list(source, reader, marked=marked)
        if events is None:
            return None
        end = source.pos
        yield from source.skip_space()
        closed = marked and (yield from source.take((END,))) is not None
        if not closed:
            if source.pos == len(source.text) and not source.complete:
                raw = source.text[start:end].strip(SPACE)
                return [InvalidCall(_name(events[0]), raw, CUT)]
            source.pos = end
        return events

    def example(self) -> str:
        """See the base class."""
        return '[tool_name(argument_name="value", other_argument=1)]'

    def write_calls(self, calls: Sequence[Call]) -> str:
        """See the base class."""
        return f"[{', '.join(map(write_call, calls))}]"

    def answers(
        self, lark: Lark, tools: Sequence[Tool], *, parallel: bool, answer: Mapping[str, Any] | None
    ) -> Answers:
        """See the base class."""
        call = lark.rule(" | ".join(call_rule(lark, tool) for tool in tools))
        more = f" ({lark.literal(', ')} {call})*" if parallel else ""
        calls = lark.rule(f"{lark.literal('[')} {call}{more} {lark.literal(']')}")
        text = lark.terminal("NOT_LIST", NOT_LIST)
        json = None if answer is None else lark.rule(json_rule(answer))
        return Answers([Opening(START, f"{calls} {lark.mark(END)}")], calls, text, json)
