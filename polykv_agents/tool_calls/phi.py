"""Calls as a JSON list between ``<|tool_call|>`` and ``<|/tool_call|>``, or as ``functools[...]``: Phi-4-mini."""

from __future__ import annotations

from collections.abc import Sequence

from polykv_agents.tool_calls.base import Call, Event, InvalidCall, Tool, dumps
from polykv_agents.tool_calls.hermes import TaggedJson
from polykv_agents.tool_calls.json_text import guess_name
from polykv_agents.tool_calls.lark import Lark, Opening
from polykv_agents.tool_calls.reading import CUT, CallReader
from polykv_agents.tool_calls.streaming import SPACE, Source, Wait

FUNCTOOLS = "functools["


class Phi(TaggedJson):
    """``functools[...]`` has no end mark: it ends with the answer, so it counts only if the model ended the answer itself."""

    name = "phi"
    opening = "<|tool_call|>"
    closing = "<|/tool_call|>"
    openings = (opening, FUNCTOOLS)
    marks = (opening, closing)

    def read(self, source: Source, reader: CallReader) -> Wait[Sequence[Event] | None]:
        """See the base class."""
        if (yield from source.next_is((self.opening,))) is not None:
            return (yield from super().read(source, reader))
        start = source.pos = source.pos + len(FUNCTOOLS) - 1
        source.pos += 1
        yield from source.skip_space()
        if (yield from source.next_is(("{",))) is None:
            return None
        source.pos = start
        closed = yield from source.skip_value()
        end = source.pos
        yield from source.skip_space()
        raw = source.text[start:end]
        if not closed or (source.pos == len(source.text) and not source.complete):
            return [InvalidCall(guess_name(raw), raw.strip(SPACE), CUT)]
        source.pos = end
        return reader.values(raw)

    def example(self) -> str:
        """See the base class."""
        return f'{self.opening}[{{"name": "tool name", "arguments": {{"argument name": "value"}}}}]{self.closing}'

    def write_calls(self, calls: Sequence[Call]) -> str:
        """See the base class."""
        objects = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        return f"{self.opening}{dumps(objects)}{self.closing}"

    def call_openings(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> Sequence[Opening]:
        """See the base class."""
        call = lark.rule(" | ".join(lark.call_object(tool) for tool in tools))
        calls = f"{call} ({lark.literal(', ')} {call})*" if parallel else call
        end = lark.literal("]")
        return [
            Opening(self.opening, f"{lark.literal('[')} {calls} {end} {lark.mark(self.closing)}"),
            Opening(FUNCTOOLS, f"{calls} {end}"),
        ]
