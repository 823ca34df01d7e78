"""What the formats have in common: a parser over a reader of calls, a prompt section, a grammar from openings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from polykv.engine.grammar import json_rule
from polykv_agents.tool_calls.base import (
    Call,
    Event,
    OutputParser,
    Reasoning,
    Tool,
    ToolChoice,
    ToolFormat,
    dumps,
)
from polykv_agents.tool_calls.lark import Answers, Lark, Opening, SpecialToken, whole_answer
from polykv_agents.tool_calls.reading import CallReader
from polykv_agents.tool_calls.streaming import CallParser, PlainParser, Source, Wait


class StreamedFormat(ToolFormat):
    """A format that says where calls may begin and how one is read.

    Attributes:
        openings: marks that open calls, anywhere in an answer.
        first: what opens calls only where an answer begins, or after another call.
        keys: under which the arguments may be written, the usual one first.
        several: tells a model how to write more than one call.
    """

    openings: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    keys: tuple[str, ...] = ("arguments", "parameters")
    several: str = "You may write several calls, one after another."

    @abstractmethod
    def read(self, source: Source, reader: CallReader) -> Wait[Sequence[Event] | None]:
        """Reads what begins at the source's position and moves past it; None if that is text."""

    @abstractmethod
    def example(self) -> str:
        """How a call looks, with placeholders, for the prompt."""

    def instructions(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> str:
        """See the base class."""
        lines = ["You can call these tools, one on each line:"]
        lines += [dumps(tool.openai()["function"]) for tool in tools]
        lines += ["", "A call looks like this:", self.example(), ""]
        lines.append(self.several if parallel else "Write no more than one call at a time.")
        if choice == "auto":
            lines.append("If you need no tool, answer in plain text.")
        else:
            lines.append("Answer with a call, and with nothing else.")
        return "\n".join(lines)

    def write_result(self, name: str, content: str) -> str:
        """See the base class."""
        return f"Result of {name}:\n{content}"

    def parser(
        self, tools: Sequence[Tool], *, reasoning: Reasoning = "none", json_answer: bool = False
    ) -> OutputParser:
        """See the base class."""
        if not tools:
            return PlainParser(reasoning, self.thoughts)
        reader = CallReader(tools, self.keys, json_answer=json_answer)
        return CallParser(
            lambda source: self.read(source, reader),
            self.openings,
            self.first,
            reasoning,
            self.thoughts,
            calls_first=json_answer,
        )

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
        """See the base class."""
        lark = Lark(is_special)
        if tools:
            answers = self.answers(lark, tools, parallel=parallel, answer=answer)
        else:
            answers = Answers(json=None if answer is None else lark.rule(json_rule(answer)))
        return whole_answer(lark, answers, choice, reasoning=reasoning, thoughts=self.thoughts)

    def answers(
        self, lark: Lark, tools: Sequence[Tool], *, parallel: bool, answer: Mapping[str, Any] | None
    ) -> Answers:
        """What an answer may be where there are tools."""
        json = None if answer is None else lark.rule(json_rule(answer))
        return Answers(self.call_openings(lark, tools, parallel=parallel), json=json)

    def call_openings(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> Sequence[Opening]:
        """The ways in which calls may begin, the usual one first. All of ``openings`` must be among them."""
        return ()


def call_object(call: Call, key: str = "arguments") -> str:
    """A call as a JSON object."""
    return dumps({"name": call.name, key: dict(call.arguments)})
