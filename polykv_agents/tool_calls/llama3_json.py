"""Calls as JSON objects that begin the answer, perhaps after ``<|python_tag|>``: Llama 3.1 and later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polykv.engine.grammar import json_rule
from polykv_agents.tool_calls.bare_json import NOT_JSON, begins_like_call, calls_schema, is_calls, is_cut_call
from polykv_agents.tool_calls.base import Call, Event, InvalidCall, Tool
from polykv_agents.tool_calls.family import StreamedFormat, call_object
from polykv_agents.tool_calls.json_text import guess_name
from polykv_agents.tool_calls.lark import Answers, Lark, Opening
from polykv_agents.tool_calls.reading import CUT, CallReader
from polykv_agents.tool_calls.streaming import SPACE, Source, Wait

TAG = "<|python_tag|>"


class Llama3Json(StreamedFormat):
    """Calls have no end mark: the last one ends with the answer, so it counts only if the model ended the answer itself."""

    name = "llama3_json"
    openings = (TAG,)
    first = ("{", "[")
    marks = (TAG,)
    keys = ("parameters", "arguments")
    several = 'You may write several calls, with "; " between them.'

    def read(self, source: Source, reader: CallReader) -> Wait[Sequence[Event] | None]:
        """See the base class."""
        tagged = (yield from source.take((TAG,))) is not None
        yield from source.skip_space()
        start = source.pos
        if (yield from source.next_is(self.first)) is None:
            if not (source.text[start:] or source.ended):
                return None
            return (yield from self._rest(source, start)) if tagged else None
        if not tagged and not (yield from begins_like_call(source)):
            return None
        if not (yield from source.skip_value()):
            raw = source.text[start:]
            if not tagged and not is_cut_call(raw, reader):
                return None
            return [InvalidCall(guess_name(raw), raw.strip(SPACE), CUT)]
        value = source.text[start : source.pos]
        if not tagged and not is_calls(value, reader):
            return None
        end = source.pos
        yield from source.skip_space()
        if source.pos == len(source.text) and not source.complete:
            return [InvalidCall(guess_name(value), value, CUT)]
        if (yield from source.take((";",))):
            yield from source.skip_space()
            if (yield from source.next_is(("{", TAG))) is None:
                source.pos = end
        return reader.values(value)

    @staticmethod
    def _rest(source: Source, start: int) -> Wait[Sequence[Event] | None]:
        while not source.ended:
            yield
        source.pos = len(source.text)
        raw = source.text[start:].strip(SPACE)
        return [InvalidCall(None, raw, "the call is not JSON")] if raw else None

    def example(self) -> str:
        """See the base class."""
        return '{"name": "tool name", "parameters": {"argument name": "value"}}'

    def write_calls(self, calls: Sequence[Call]) -> str:
        """See the base class."""
        return "; ".join(call_object(call, "parameters") for call in calls)

    def answers(
        self, lark: Lark, tools: Sequence[Tool], *, parallel: bool, answer: Mapping[str, Any] | None
    ) -> Answers:
        """See the base class."""
        call = lark.rule(json_rule(calls_schema(tools, "parameters")))
        calls = f"{call} ({lark.literal('; ')} {call})*" if parallel else call
        json = None
        if answer is not None:
            json = lark.rule(json_rule(calls_schema(tools, "parameters", answer=answer)))
        text = lark.terminal("NOT_JSON", NOT_JSON)
        return Answers([Opening(TAG, calls)], lark.rule(calls), text, json)
