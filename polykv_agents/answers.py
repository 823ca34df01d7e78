"""From a model's text to LangChain's messages: one reader for whole answers and for streams."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.utils.json import parse_partial_json

from polykv.engine import Completion
from polykv_agents.tool_calls import Call, Event, InvalidCall, OutputParser, Text, Thought
from polykv_agents.tool_calls.base import dumps

CUT_OFF = "[not finished] "
"""Before the raw text of a call that was cut where a lenient JSON parser would still read it: LangChain's chunks do."""


FIRST_CALL_BLOCK = 1000


class AnswerReader:
    """Turns the pieces of one answer into message chunks.

    Args:
        parser: reads calls and thoughts; None leaves the text as it is.
        in_blocks: chunks will become standard content blocks (``output_version="v1"``). LangChain numbers the blocks of text
            itself and merges blocks of one number, so calls then need numbers far from those.
    """

    def __init__(self, parser: OutputParser | None, *, in_blocks: bool = False) -> None:
        self._parser = parser
        self._in_blocks = in_blocks
        self._calls = 0
        self._index = 0
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._tool_calls: list[ToolCall] = []
        self._invalid: list[InvalidToolCall] = []

    @property
    def thoughts(self) -> str:
        """The reasoning so far."""
        return "".join(self._thoughts)

    def feed(self, piece: str) -> list[AIMessageChunk]:
        """Chunks that are certain after this piece; often none while a call is being written."""
        return self._chunks(self._parser.feed(piece) if self._parser is not None else [Text(piece)])

    def finish(self, completion: Completion) -> list[AIMessageChunk]:
        """Chunks that only the end makes certain."""
        if self._parser is None:
            return []
        complete = completion.finish_reason == "stop" and completion.stop_string is None
        return self._chunks(self._parser.finish(complete=complete))

    def finish_reason(self, completion: Completion) -> str:
        """``stop``, ``length`` or ``tool_calls``."""
        return "tool_calls" if self._calls and completion.finish_reason == "stop" else completion.finish_reason

    def message(self, usage: Any, metadata: Mapping[str, Any]) -> AIMessage:
        """The whole answer, after :meth:`finish`."""
        return AIMessage(
            content="".join(self._texts),
            additional_kwargs={"reasoning_content": self.thoughts} if self.thoughts else {},
            tool_calls=self._tool_calls,
            invalid_tool_calls=self._invalid,
            usage_metadata=usage,
            response_metadata=dict(metadata),
        )

    def _chunks(self, events: Iterable[Event]) -> list[AIMessageChunk]:
        return [chunk for event in events if (chunk := self._chunk(event)) is not None]

    def _chunk(self, event: Event) -> AIMessageChunk | None:
        if isinstance(event, Text):
            self._texts.append(event.text)
            return AIMessageChunk(content=event.text) if event.text else None
        if isinstance(event, Thought):
            self._thoughts.append(event.text)
            return (
                AIMessageChunk(content="", additional_kwargs={"reasoning_content": event.text}) if event.text else None
            )
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        if isinstance(event, Call):
            self._calls += 1
            arguments = dumps(dict(event.arguments))
            self._tool_calls.append(ToolCall(name=event.name, args=dict(event.arguments), id=call_id, type="tool_call"))
        else:
            arguments = _unreadable(event.arguments)
            self._invalid.append(_invalid_call(event, arguments, call_id))
        index = self._index + (FIRST_CALL_BLOCK if self._in_blocks else 0)
        chunk = tool_call_chunk(name=event.name, args=arguments, id=call_id, index=index)
        self._index += 1
        return AIMessageChunk(content="", tool_call_chunks=[chunk])


def _invalid_call(event: InvalidCall, arguments: str, call_id: str) -> InvalidToolCall:
    return InvalidToolCall(name=event.name, args=arguments, id=call_id, error=event.error, type="invalid_tool_call")


def _unreadable(arguments: str) -> str:
    """The raw text, such that no lenient parser takes it for arguments: chunks are parsed as partial JSON when merged."""
    try:
        lenient = parse_partial_json(arguments) if arguments else {}
    except ValueError:
        return arguments
    return CUT_OFF + arguments if isinstance(lenient, dict) else arguments
