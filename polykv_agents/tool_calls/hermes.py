"""Calls as JSON between ``<tool_call>`` and ``</tool_call>``: Hermes, Qwen2.5, Qwen3, SmolLM2, SmolLM3."""

from __future__ import annotations

from collections.abc import Sequence

from polykv_agents.tool_calls.base import Call, Event, InvalidCall, Tool, dumps
from polykv_agents.tool_calls.family import StreamedFormat, call_object
from polykv_agents.tool_calls.json_text import guess_name, is_json
from polykv_agents.tool_calls.lark import Lark, Opening
from polykv_agents.tool_calls.reading import CUT, CallReader
from polykv_agents.tool_calls.streaming import JSON_QUOTES, SPACE, Source, Syntax, Wait


class TaggedJson(StreamedFormat):
    """JSON between an opening and a closing mark: objects, or lists of them.

    A closing mark inside a JSON string is part of the string. A string that never ends does not hide the mark: the call is
    invalid, and what follows it is read.
    """

    opening: str
    closing: str

    def read(self, source: Source, reader: CallReader) -> Wait[Sequence[Event] | None]:
        """See the base class."""
        source.pos += len(self.opening)
        start = source.pos
        yield from source.skip_space()
        first = yield from source.next_is(("{", "["))
        syntax = Syntax(JSON_QUOTES if first else {}, (self.opening, self.closing))
        token = yield from source.next_token(syntax)
        if token == self.opening:
            source.pos -= len(token)
        body = source.text[start : source.pos - len(token or "") * (token == self.closing)]
        if token is not None:
            if not body.strip(SPACE):
                return None
            if first is None:
                return (
                    [InvalidCall(guess_name(body), body.strip(SPACE), "the call is not JSON")]
                    if token == self.closing
                    else None
                )
            return reader.values(body)
        if first is None:
            return None
        hidden = source.text.find(self.closing, start)
        if hidden >= 0 and not (source.complete and is_json(body.strip(SPACE))):
            source.pos = hidden + len(self.closing)
            return reader.values(source.text[start:hidden])
        if source.complete:
            return reader.values(body)
        return [InvalidCall(guess_name(body), body.strip(SPACE), CUT)]

    def example(self) -> str:
        """See the base class."""
        return f'{self.opening}\n{{"name": "tool name", "arguments": {{"argument name": "value"}}}}\n{self.closing}'

    def write_calls(self, calls: Sequence[Call]) -> str:
        """See the base class."""
        return "\n".join(f"{self.opening}\n{call_object(call)}\n{self.closing}" for call in calls)

    def call_openings(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> Sequence[Opening]:
        """See the base class."""
        body = lark.rule(" | ".join(lark.call_object(tool) for tool in tools))
        blank = lark.literal("\n")
        once = f"{blank} {body} {blank} {lark.mark(self.closing)}"
        again = f" ({blank} {lark.mark(self.opening)} {once})*" if parallel else ""
        return [Opening(self.opening, once + again)]


class Hermes(TaggedJson):
    """The format of most small models, and of those that know none."""

    name = "hermes"
    opening = "<tool_call>"
    closing = "</tool_call>"
    openings = (opening,)
    marks = (opening, closing)

    def write_result(self, name: str, content: str) -> str:
        """See the base class."""
        return f"<tool_response>\n{dumps({'name': name, 'content': content})}\n</tool_response>"
