"""What every tool-call format offers: how calls are asked for, written, constrained and read."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ToolChoice = Literal["auto", "required"]
"""``auto``: text or calls; ``required``: at least one call. A single named tool is ``required`` with that tool alone."""
Reasoning = Literal["none", "optional", "open"]
"""``optional``: an answer may begin with a block of thoughts; ``open``: the prompt has begun one already."""


@dataclass(frozen=True)
class Tool:
    """A tool as a model is told of it.

    Attributes:
        name: what the model calls it by.
        description: what it does; may be empty.
        parameters: JSON schema of its arguments, of type object.
        strict: whether arguments must match to the letter where a format leaves a choice; None: not said.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None

    def openai(self) -> dict[str, Any]:
        """The shape that chat templates take as ``tools``."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Call:
    """A call that the model has finished, with arguments that are a JSON object."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class InvalidCall:
    """A call that cannot be used: cut off, not JSON, or of a tool that was not offered.

    Attributes:
        name: what can be told of the tool's name, or None.
        arguments: the raw text of the arguments, or of the whole call where they cannot be told apart.
        error: what is wrong, for a person to read.
    """

    name: str | None
    arguments: str
    error: str


@dataclass(frozen=True)
class Text:
    """A part of the visible answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A part of the model's reasoning."""

    text: str


Event = Text | Thought | Call | InvalidCall


class OutputParser(ABC):
    """Reads one answer as it arrives; the whole text at once is one piece.

    Whatever pieces an answer arrives in, the joined texts, thoughts, calls and invalid calls are the same. What may become the
    start of a call is held back until it is one or is not. A call is an event once, when it has closed: one that is cut off is an
    :class:`InvalidCall` with its raw text, so nothing is ever lost. Never raises, whatever the model wrote.
    """

    @abstractmethod
    def feed(self, piece: str) -> list[Event]:
        """Takes the next piece and returns what is certain now."""

    @abstractmethod
    def finish(self, *, complete: bool) -> list[Event]:
        """What is left at the end.

        Args:
            complete: the model ended the answer itself; False if ``max_tokens`` or a stop string did. A call without its end
                mark counts as finished only in formats whose calls end with the answer, and only if ``complete``.
        """


class ToolFormat(ABC):
    """One family's way to write tool calls. Stateless.

    Attributes:
        name: short name, as ``hermes``.
        marks: texts of the format that may be special tokens of a tokenizer (``[TOOL_CALLS]``): decoding must show them.
        thoughts: pairs of marks around thoughts, the usual one first; decoding must show them, too.
    """

    name: str
    marks: tuple[str, ...] = ()
    thoughts: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)

    @abstractmethod
    def instructions(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> str:
        """A section for the prompt that tells of the tools and how to call them. Equal tools give equal text.

        For templates that have none of their own, or put it before the shared context.
        """

    @abstractmethod
    def write_calls(self, calls: Sequence[Call]) -> str:
        """Calls as the model writes them; :meth:`parser` reads this back."""

    @abstractmethod
    def write_result(self, name: str, content: str) -> str:
        """A tool's result as text for a user turn, for templates without a tool role."""

    @abstractmethod
    def parser(
        self, tools: Sequence[Tool], *, reasoning: Reasoning = "none", json_answer: bool = False
    ) -> OutputParser:
        """A parser for one answer. Calls of tools not among ``tools`` become invalid calls. Without tools text stays text.

        Args:
            tools: that were offered.
            reasoning: whether thoughts may come first.
            json_answer: the answer was held to calls or one JSON value (``answer`` of :meth:`grammar`): one that does not begin
                with a call is text to its end, whatever marks stand in its strings.
        """

    @abstractmethod
    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool,
        answer: Mapping[str, Any] | None = None,
        reasoning: Reasoning = "none",
        is_special: Callable[[str], int | None] = lambda mark: None,
    ) -> str:
        """The grammar, in llguidance's Lark-like language, of all answers that are allowed.

        Args:
            tools: that may be called; empty for none.
            choice: ``auto`` allows an answer without calls, ``required`` does not.
            parallel: whether one answer may hold several calls.
            answer: JSON schema of an answer without calls; None: any text.
            reasoning: whether thoughts may come first.
            is_special: the id of the special token that a text is, since a grammar names special tokens by id; None for
                ordinary text.

        Raises:
            InvalidRequestError: a tool's schema has something that the format cannot express.
        """


def dumps(value: Any) -> str:
    """JSON as models were trained on: ``", "`` and ``": "`` between parts, letters as they are."""
    return json.dumps(value, ensure_ascii=False)
