"""Calls after ``[TOOL_CALLS]``: a JSON list, or since 2025 ``name[ARGS]{...}`` for each call. Mistral."""

from __future__ import annotations

import re
from collections.abc import Sequence

from polykv.engine.grammar import json_rule
from polykv_agents.tool_calls.base import Call, Event, InvalidCall, Tool, dumps
from polykv_agents.tool_calls.family import StreamedFormat
from polykv_agents.tool_calls.json_text import guess_name
from polykv_agents.tool_calls.lark import Lark, Opening
from polykv_agents.tool_calls.reading import CUT, CallReader
from polykv_agents.tool_calls.schemas import arguments_schema
from polykv_agents.tool_calls.streaming import JSON_QUOTES, SPACE, THOUGHT_MARKS, Source, Syntax, Wait

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAME = re.compile(r"[\w.:-]+", re.ASCII)


class Mistral(StreamedFormat):
    """Calls have no end mark: the last one ends with the answer, so it counts only if the model ended the answer itself.

    Args:
        name: of the format.
        separate: whether each call is written as ``[TOOL_CALLS]name[ARGS]{...}``. Both forms are read.
    """

    openings = (CALLS,)
    marks = (CALLS, ARGS, CALL_ID)
    thoughts = (THOUGHT_MARKS[1], THOUGHT_MARKS[0])

    def __init__(self, name: str = "mistral", *, separate: bool = False) -> None:
        self.name = name
        self._separate = separate

    def read(self, source: Source, reader: CallReader) -> Wait[Sequence[Event] | None]:
        """See the base class."""
        yield from source.take((CALLS,))
        yield from source.skip_space()
        start = source.pos
        name: str | None = None
        begin = yield from source.next_is(("[", "{", CALLS))
        if begin == CALLS:
            return None
        if begin is None:
            name = yield from self._name(source)
            if name is None:
                return None
            yield from source.skip_space()
            if (yield from source.next_is(("{",))) is None:
                if source.pos < len(source.text) or name not in reader.tools:
                    return None
                return [InvalidCall(name, source.text[start:].strip(SPACE), CUT)]
        arguments = source.pos
        closed = yield from source.skip_value(Syntax(JSON_QUOTES, ("{", "}", "[", "]", CALLS)))
        end = source.pos
        raw = source.text[arguments:end].strip(SPACE)
        if closed:
            yield from source.skip_space()
        cut = source.pos == len(source.text) and not (closed and source.complete)
        source.pos = end
        if cut:
            return [InvalidCall(name or guess_name(raw), raw, CUT)]
        return [reader.named(name, raw)] if name is not None else reader.values(raw)

    @staticmethod
    def _name(source: Source) -> Wait[str | None]:
        """Moves past a tool's name, the call's id if it has one, and the mark before the arguments."""
        start = source.pos
        while (match := _NAME.match(source.text, start)) is None or match.end() == len(source.text):
            if source.ended or (match is None and start < len(source.text)):
                break
            yield
        if match is None:
            return None
        source.pos = match.end()
        yield from source.skip_space()
        if (yield from source.take((CALL_ID,))):
            while (yield from source.next_is((ARGS, "{"))) is None and source.pos < len(source.text):
                source.pos += 1
        yield from source.take((ARGS,))
        return match.group()

    def example(self) -> str:
        """See the base class."""
        arguments = '{"argument name": "value"}'
        if self._separate:
            return f"{CALLS}tool_name{ARGS}{arguments}"
        return f'{CALLS} [{{"name": "tool name", "arguments": {arguments}}}]'

    def write_calls(self, calls: Sequence[Call]) -> str:
        """See the base class."""
        if self._separate:
            return "".join(f"{CALLS}{call.name}{ARGS}{dumps(dict(call.arguments))}" for call in calls)
        return f"{CALLS} {dumps([{'name': call.name, 'arguments': dict(call.arguments)} for call in calls])}"

    def call_openings(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> Sequence[Opening]:
        """See the base class."""
        if self._separate:
            calls = [
                f"{lark.literal(tool.name)} {lark.mark(ARGS)} {lark.rule(json_rule(arguments_schema(tool)))}"
                for tool in tools
            ]
            call = lark.rule(" | ".join(calls))
            return [Opening(CALLS, f"{call} ({lark.mark(CALLS)} {call})*" if parallel else call)]
        call = lark.rule(" | ".join(lark.call_object(tool) for tool in tools))
        more = f" ({lark.literal(', ')} {call})*" if parallel else ""
        return [Opening(CALLS, f"{lark.literal(' [')} {call}{more} {lark.literal(']')}")]
