"""Calls of tokenizers that carry a ``response_template`` of a format that is not among ours: read with transformers' parser.

transformers' ``ResponseParser`` (5.24, ``utils/chat_parsing``) finds the regions of an answer and turns each into calls. What it
does not do is done here. A region that cannot be parsed raises and takes the events before it along, so it gets one character
at a time, and a fresh parser after an error. A region that the answer's end cuts off is closed like any other, so its call would
count as valid. A tool's name is not checked. And a closing mark inside a JSON string closes the region: such a call comes out
invalid, which is one reason why the formats that we know are read by parsers of our own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from polykv.errors import InvalidRequestError
from polykv_agents.tool_calls.base import (
    Call,
    Event,
    InvalidCall,
    OutputParser,
    Reasoning,
    Text,
    Thought,
    Tool,
    ToolChoice,
    ToolFormat,
)
from polykv_agents.tool_calls.hermes import TaggedJson
from polykv_agents.tool_calls.json_text import guess_name
from polykv_agents.tool_calls.lark import SpecialToken
from polykv_agents.tool_calls.reading import CUT, CallReader
from polykv_agents.tool_calls.streaming import SPACE, PlainParser, ThoughtSplitter

CALLS = "tool_calls"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_AS_IS = {"type": "function", "function": "{content}"}


def from_response_template(template: Mapping[str, Any]) -> ToolFormat:
    """The format that a tokenizer's ``response_template`` describes.

    JSON between two fixed marks needs no more than the marks, so it gets the parser and the grammar of our own formats.
    """
    field = template.get("fields", {}).get(CALLS, {})
    opening, closing = field.get("open"), field.get("close")
    if (
        isinstance(opening, str)
        and isinstance(closing, str)
        and field.get("content") == "json"
        and not field.get("content_args")
        and field.get("transform") == _AS_IS
    ):
        return TemplateJson(opening, closing)
    return ResponseTemplateFormat(template)


class TemplateJson(TaggedJson):
    """JSON between the marks that a response template names.

    Args:
        opening: mark before a call.
        closing: mark after a call.
    """

    name = "response_template"

    def __init__(self, opening: str, closing: str) -> None:
        self.opening = opening
        self.closing = closing
        self.openings = (opening,)
        self.marks = (opening, closing)


class ResponseTemplateFormat(ToolFormat):
    """Any response template. Calls can be read, but not asked for: how to write them is known to the chat template alone.

    Args:
        template: the tokenizer's ``response_template``.
    """

    name = "response_template"

    def __init__(self, template: Mapping[str, Any]) -> None:
        self._template = deepcopy(dict(template))
        for field in self._template.get("fields", {}).values():
            field["optional"] = True  # a missing field would raise and take the rest along
            for key in ("open", "close"):
                marks = field.get(key, ())
                self.marks += (marks,) if isinstance(marks, str) else tuple(marks)

    def instructions(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> str:
        """See the base class.

        Raises:
            InvalidRequestError: always.
        """
        raise self._unknown("ask for calls in the prompt")

    def write_calls(self, calls: Sequence[Call]) -> str:
        """See the base class.

        Raises:
            InvalidRequestError: always.
        """
        raise self._unknown("write calls")

    def write_result(self, name: str, content: str) -> str:
        """See the base class."""
        return f"Result of {name}:\n{content}"

    @staticmethod
    def _unknown(what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the tokenizer's response_template says how calls are read, not how to {what}; name a tool-call format, such as "
            "'hermes'"
        )

    def parser(
        self, tools: Sequence[Tool], *, reasoning: Reasoning = "none", json_answer: bool = False
    ) -> OutputParser:
        """See the base class."""
        return _TemplateParser(self._template, tools, reasoning) if tools else PlainParser(reasoning)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool,
        answer: Mapping[str, Any] | None = None,
        reasoning: Reasoning = "none",
        is_special: SpecialToken = lambda mark: None,
    ) -> str:
        """See the base class.

        Raises:
            InvalidRequestError: there are tools, and the answer may not be just anything.
        """
        if not tools:
            return TemplateJson("", "").grammar(
                tools, choice, parallel=parallel, answer=answer, reasoning=reasoning, is_special=is_special
            )
        if choice == "auto" and answer is None:
            return "%llguidance {}\nstart: <[*]>*\n"
        raise self._unknown("hold an answer to them")


class _TemplateParser(OutputParser):
    def __init__(self, template: dict[str, Any], tools: Sequence[Tool], reasoning: Reasoning) -> None:
        self._template = template
        self._tools: list[dict[Any, Any] | Callable[..., Any]] = [tool.openai() for tool in tools]
        self._reader = CallReader(tools)
        self._splitter = ThoughtSplitter(reasoning)
        self._parser = self._fresh()
        self._region: str | None = None
        self._raw = ""
        self._events: list[Event] = []
        self._space = ""
        self._strip = False

    def _fresh(self) -> ResponseParser:
        return ResponseParser(self._template, prefix="", tools=self._tools)

    def feed(self, piece: str) -> list[Event]:
        """See the base class."""
        thoughts, text = self._splitter.feed(piece)
        self._events += thoughts
        for character in text:
            self._step(character)
        return self._given()

    def finish(self, *, complete: bool) -> list[Event]:
        """See the base class."""
        thoughts, text = self._splitter.finish()
        self._events += thoughts
        for character in text:
            self._step(character)
        cut = self._region == CALLS and not complete
        try:
            events = self._parser.finalize()[1]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._fail(CUT if cut else str(error))
        else:
            for event in events:
                if cut and event["type"] == "region_close" and event["field"] == CALLS:
                    self._fail(CUT)
                else:
                    self._take(event)
        if self._space and not self._strip:
            self._events.append(Text(self._space))
        return self._given()

    def _given(self) -> list[Event]:
        events: list[Event] = []
        for event in self._events:
            last = events[-1] if events else None
            if isinstance(event, Text) and isinstance(last, Text):
                events[-1] = Text(last.text + event.text)
            elif isinstance(event, Thought) and isinstance(last, Thought):
                events[-1] = Thought(last.text + event.text)
            else:
                events.append(event)
        self._events = []
        return events

    def _step(self, character: str) -> None:
        try:
            events = self._parser.feed(character)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._fail(str(error).partition("\n")[0])
            self._parser = self._fresh()
        else:
            for event in events:
                self._take(event)

    def _fail(self, problem: str) -> None:
        raw, self._raw, self._region = self._raw, "", None
        self._space, self._strip = "", True
        self._events.append(InvalidCall(guess_name(raw), raw.strip(SPACE), f"the call cannot be read: {problem}"))

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, field = event["type"], event["field"]
        if kind == "region_open":
            self._region, self._raw = field, ""
        elif kind == "region_chunk" and field == CALLS:
            self._raw += event["text"]
        elif kind == "region_chunk" and field in _THOUGHTS:
            self._events.append(Thought(event["text"]))
        elif kind == "region_chunk":
            self._text(event["text"])
        elif kind == "region_close":
            raw, self._raw, self._region = self._raw, "", None
            if field == CALLS:
                self._space, self._strip = "", True
                self._events += self._calls(event["value"], raw)

    def _text(self, text: str) -> None:
        if self._strip:
            text = text.lstrip(SPACE)
            self._strip = not text
        if not text.strip(SPACE):
            self._space += text
            return
        text = self._space + text
        kept = text.rstrip(SPACE)
        self._space = text[len(kept) :]
        self._events.append(Text(kept))

    def _calls(self, value: Any, raw: str) -> list[Event]:
        events: list[Event] = []
        for item in value if isinstance(value, list) else [value]:
            function = item.get("function") if isinstance(item, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(name, str):
                return [InvalidCall(guess_name(raw), raw.strip(SPACE), "the call has no name")]
            arguments = function.get("arguments", {})
            try:
                written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError):
                return [InvalidCall(name, raw.strip(SPACE), "the arguments are no JSON")]
            events.append(self._reader.named(name, written))
        return events or [InvalidCall(None, raw.strip(SPACE), "an empty list of calls")]
