"""Grammars of whole answers in llguidance's Lark-like language: text, thoughts, marks, JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polykv.engine.grammar import json_rule, literal
from polykv_agents.tool_calls.base import Reasoning, Tool, ToolChoice, dumps
from polykv_agents.tool_calls.schemas import arguments_schema

SpecialToken = Callable[[str], int | None]
"""The id of the special token that a text is, or None if it is ordinary text."""

TEXT = "TEXT"
"""The terminal of any text."""


@dataclass(frozen=True)
class Opening:
    """One way in which calls begin.

    Attributes:
        mark: what opens them.
        rest: body of a rule: all that follows the mark, to the end of the last call.
    """

    mark: str
    rest: str


@dataclass(frozen=True)
class Answers:
    """What an answer may be, thoughts aside; all are bodies of rules.

    Attributes:
        openings: of calls that begin with a mark, the usual one first.
        bare: calls without a mark, which begin the answer; None: there are none.
        text: terminal of text that does not look like a bare call.
        json: an answer without calls that takes the place of text; None: text.
    """

    openings: Sequence[Opening] = ()
    bare: str | None = None
    text: str = TEXT
    json: str | None = None


class Lark:
    """Collects the rules of one grammar.

    Args:
        special: tells which marks are special tokens.
    """

    def __init__(self, special: SpecialToken) -> None:
        self._special = special
        self._rules: dict[str, str] = {}
        self._recursive: dict[str, str] = {}
        self._bodies: dict[str, str] = {}

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Adds a rule and returns its name; equal bodies share one. A lazy rule is one terminal and matches as little as it can."""
        key = f"{'[lazy]' if lazy else ''}: {body}"
        return self._rules.setdefault(key, f"r{len(self._rules)}")

    def recursive(self, key: str, body: Callable[[], str]) -> str:
        """The rule of a key, made when it is first asked for; its body may ask for it again."""
        if key not in self._recursive:
            name = self._recursive[key] = f"v{len(self._recursive)}"
            self._bodies[name] = body()
        return self._recursive[key]

    @staticmethod
    def literal(text: str) -> str:
        """A text to the letter."""
        return literal(text)

    def mark(self, text: str) -> str:
        """A mark: the special token if there is one, else its text."""
        for end in range(len(text), 0, -1):
            token = self._special(text[:end]) if text[end - 1] in ">]" else None
            if token is not None:  # a mark may go on after its token, as <|channel>thought does
                rest = f" {self.literal(text[end:])}" if text[end:] else ""
                return f"<[{int(token)}]>{rest}"
        return self.literal(text)

    def until(self, mark: str, text: str = TEXT) -> str:
        """Any text up to the first such mark, and the mark, be it written as a special token or in letters."""
        letters = self.rule(f"{text} {self.literal(mark)}", lazy=True)
        return letters if self.mark(mark) == self.literal(mark) else f"({letters} | {text} {self.mark(mark)})"

    def begins(self, mark: str) -> str:
        """A mark at the start of the answer, after white space, where any text could stand instead."""
        letters = self.rule(f"SPACE {self.literal(mark)}", lazy=True)
        return letters if self.mark(mark) == self.literal(mark) else f"({letters} | {self.mark(mark)})"

    def text_before(self, end: str, schema: Mapping[str, Any]) -> str:
        """A string as plain text up to a mark, and the mark: any text, or what ``schema`` (of type string) allows of it.

        White space before the mark's text is part of the mark, and left to the model where any text may stand.
        """
        if "enum" in schema or "const" in schema:
            choices = [schema["const"]] if "const" in schema else schema["enum"]
            texts = [choice for choice in choices if isinstance(choice, str) and end.lstrip() not in choice]
            return f"({' | '.join(map(self.literal, texts))}) {self.mark(end)}" if texts else self.until(end.lstrip())
        conditions = []
        if "minLength" in schema or "maxLength" in schema:
            conditions.append(f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
        if "pattern" in schema:
            conditions.append(_whole_pattern(str(schema["pattern"])))
        if not conditions:
            return self.until(end.lstrip())
        marked = self.terminal(f"MARKED{len(self._rules)}", f"TEXT {self.literal(end.lstrip())} TEXT")
        text = self.terminal(f"TEXT{len(self._rules)}", " & ".join([*conditions, "TEXT", f"~{marked}"]))
        return f"{text} {self.mark(end)}"

    def terminal(self, name: str, body: str) -> str:
        """Adds a terminal under a name in capitals."""
        return self._rules.setdefault(f": {body}", name)

    def call_object(self, tool: Tool, key: str = "arguments") -> str:
        """One call of a tool as a JSON object: its name to the letter, its arguments by its schema."""
        head = self.literal(f'{{"name": {dumps(tool.name)}, "{key}": ')
        return self.rule(f"{head} {self.rule(json_rule(arguments_schema(tool)))} {self.literal('}')}")

    def write(self, start: str) -> str:
        """The whole grammar."""
        lines = ["%llguidance {}", f"start: {start}"]
        lines += [name + key for key, name in self._rules.items()]
        lines += [f"{name}: {body}" for name, body in self._bodies.items()]
        lines += ["TEXT: /(.|\\n)*/", "SPACE: /[ \\t\\r\\n]*/"]
        return "\n".join(lines) + "\n"


def whole_answer(
    lark: Lark, answers: Answers, choice: ToolChoice, *, reasoning: Reasoning, thoughts: Sequence[tuple[str, str]]
) -> str:
    """The grammar of an answer: thoughts, then calls, text, or text with calls after it.

    Args:
        lark: holds the rules so far.
        answers: calls and text.
        choice: whether there must be calls, if there can be.
        reasoning: whether thoughts may, or must, come first.
        thoughts: pairs of marks around thoughts.
    """
    calls = [] if answers.bare is None else [answers.bare]
    calls += [f"{lark.mark(opening.mark)} {lark.rule(opening.rest)}" for opening in answers.openings[:1]]
    if choice == "required" and calls:
        body = calls
    elif answers.json is not None:
        body = [answers.json, *calls]
    else:
        body = [answers.text] if answers.bare is None else [answers.text, answers.bare]
        body += [f"{lark.until(opening.mark, answers.text)} {lark.rule(opening.rest)}" for opening in answers.openings]
    body_rule = lark.rule(" | ".join(body))
    if reasoning == "none":
        return lark.write(body_rule)
    endings = [f"{lark.until(end)}{_blank(lark, end)}" for _, end in thoughts]
    if reasoning == "open":
        return lark.write(f"({' | '.join(endings)}) {body_rule}")
    blocks = [
        f"{lark.begins(begin)} {ending} {body_rule}" for (begin, _), ending in zip(thoughts, endings, strict=True)
    ]
    return lark.write(" | ".join([body_rule, *blocks]))


def _blank(lark: Lark, mark: str) -> str:
    """The empty line that models were trained to write after some marks."""
    return f" {lark.literal(chr(10) * 2)}" if mark == "</think>" else ""


def _whole_pattern(pattern: str) -> str:
    """JSON schema's ``pattern``, which may match anywhere in a string, as a regular expression of the whole string."""
    begin, end = "(.|\\n)*", "(.|\\n)*"
    if pattern.startswith("^"):
        begin, pattern = "", pattern[1:]
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        end, pattern = "", pattern[:-1]
    slashed = re.sub(r"(\\.)|/", lambda match: match.group(1) or "\\/", pattern, flags=re.DOTALL)
    return f"/{begin}({slashed}){end}/"


def listed(lark: Lark, parts: Sequence[tuple[str, bool]], separator: str) -> str:
    """A rule body of a list in fixed order, from which parts that are not required may be missing.

    Args:
        lark: takes the rules.
        parts: rule body and whether it is required, in order.
        separator: rule body between two of them.
    """
    after, first = '""', '""'  # of what follows a part, and of what follows none
    for body, required in reversed(parts):
        tail = "" if after == '""' else f" {after}"
        with_part = f"{separator} {body}{tail}"
        start = f"{body}{tail}"
        if not required:
            with_part = f"({with_part})?" if after == '""' else f"({with_part} | {after})"
            start = f"({start})?" if first == '""' else f"({start} | {first})"
        after, first = lark.rule(with_part), lark.rule(start)
    return first
