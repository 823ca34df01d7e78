"""Calls as plain JSON: the whole answer, perhaps in a code fence, is one object or a list of such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polykv.engine.grammar import json_rule
from polykv_agents.tool_calls.bare_json import NOT_JSON, begins_like_call, calls_schema, is_calls, is_cut_call
from polykv_agents.tool_calls.base import Call, Event, InvalidCall, Tool, dumps
from polykv_agents.tool_calls.family import StreamedFormat, call_object
from polykv_agents.tool_calls.json_text import guess_name
from polykv_agents.tool_calls.lark import Answers, Lark
from polykv_agents.tool_calls.reading import CUT, CallReader
from polykv_agents.tool_calls.streaming import SPACE, Source, Wait

FENCE = "```"


class PlainJson(StreamedFormat):
    """For models that were trained on no format. An answer with anything beside the JSON is text."""

    name = "plain_json"
    first = ("{", "[", FENCE)
    several = "For several calls, write a JSON list of them."

    def read(self, source: Source, reader: CallReader) -> Wait[Sequence[Event] | None]:
        """See the base class."""
        fenced = (yield from source.take((FENCE,))) is not None
        if fenced:
            yield from source.take(("json",))
            yield from source.skip_space()
        start = source.pos
        if (yield from source.next_is(("{", "["))) is None or not (yield from begins_like_call(source)):
            return None
        while True:
            if not (yield from source.skip_value()):
                raw = source.text[start:]
                if not is_cut_call(raw, reader):
                    return None
                return [InvalidCall(guess_name(raw), raw.strip(SPACE), CUT)]
            if not is_calls(source.text[start : source.pos].strip(SPACE), reader):
                return None
            end = source.pos
            yield from source.skip_space()
            if (yield from source.next_is(("{",))) is None:
                break
        closed = fenced and (yield from source.take((FENCE,))) is not None
        yield from source.skip_space()
        if source.pos < len(source.text):
            return None
        value = source.text[start:end]
        if not (closed or source.complete):
            return [InvalidCall(guess_name(value), value, CUT)]
        return reader.values(value)

    def example(self) -> str:
        """See the base class."""
        return '{"name": "tool name", "arguments": {"argument name": "value"}}'

    def write_calls(self, calls: Sequence[Call]) -> str:
        """See the base class."""
        if len(calls) == 1:
            return call_object(calls[0])
        return dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in calls])

    def answers(
        self, lark: Lark, tools: Sequence[Tool], *, parallel: bool, answer: Mapping[str, Any] | None
    ) -> Answers:
        """See the base class."""
        calls = calls_schema(tools, "arguments", lists=parallel)
        text = f"{NOT_JSON} & ~/[ \\t\\r\\n]*```(json)?[ \\t\\r\\n]*[\\[{{](.|\\n)*/"
        json = None
        if answer is not None:
            json = lark.rule(json_rule(calls_schema(tools, "arguments", lists=parallel, answer=answer)))
        return Answers((), lark.rule(json_rule(calls)), lark.terminal("NOT_JSON", text), json)
