"""Grammars of values in notations that are not JSON: each type as the notation writes it, down to the innermost."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from polykv.engine.grammar import json_rule
from polykv_agents.tool_calls.lark import Lark, listed
from polykv_agents.tool_calls.schemas import Arguments

_ARRAYS = frozenset(("prefixItems", "contains", "uniqueItems", "unevaluatedItems"))


class Notation(ABC):
    """Rules of one tool's values. What a notation has no rule for is JSON, which its parser reads too.

    Args:
        lark: takes the rules.
        arguments: of the tool.

    Attributes:
        separator: between items, and between members.
        words: how ``true``, ``false`` and ``null`` are written.
    """

    separator: str
    words: Mapping[bool | None, str]

    def __init__(self, lark: Lark, arguments: Arguments) -> None:
        self.lark = lark
        self.arguments = arguments

    @abstractmethod
    def key(self, name: str) -> str | None:
        """A member's name and what stands before its value; None if the notation cannot write it."""

    @abstractmethod
    def string(self, schema: Mapping[str, Any]) -> str:
        """Rule body of a string."""

    @abstractmethod
    def constant(self, value: Any) -> str:
        """Rule body of one value."""

    def value(self, schema: Mapping[str, Any]) -> str:
        """The rule of a value."""
        key = json.dumps([type(self).__name__, self.arguments.tool.name, schema], default=str)

        def body() -> str:
            return " | ".join(dict.fromkeys(map(self._branch, self.arguments.branches(schema))))

        return self.lark.recursive(key, body)

    def members(self, schema: Mapping[str, Any], key: Any = None) -> str | None:
        """Rule body of an object's members, without brackets; None if they cannot be listed.

        Args:
            schema: of the object.
            key: replaces :meth:`key`.
        """
        properties = self.arguments.properties(schema)
        keys = [(key or self.key)(part.name) for part in properties or ()]
        if properties is None or None in keys:
            return None
        parts = [
            (f"{self.lark.literal(str(name))} {self.value(part.schema)}", part.required)
            for name, part in zip(keys, properties, strict=True)
        ]
        return listed(self.lark, parts, self.lark.literal(self.separator))

    def _branch(self, schema: Mapping[str, Any]) -> str:
        kind = schema.get("type")
        choices: Sequence[Any] | None = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices is not None:
            return " | ".join(map(self.constant, choices))
        if kind == "boolean":
            return f"{self.lark.literal(self.words[True])} | {self.lark.literal(self.words[False])}"
        if kind == "null":
            return self.lark.literal(self.words[None])
        if kind == "string":
            return self.string(schema)
        if kind == "array" and isinstance(schema.get("items"), Mapping) and not _ARRAYS & schema.keys():
            return self._array(schema)
        if kind == "object" and not isinstance(schema.get("additionalProperties"), Mapping):
            members = self.members(schema)
            if members is not None:
                return f"{self.lark.literal('{')} {members} {self.lark.literal('}')}"
        return self.lark.rule(json_rule(self.arguments.standalone(schema)))

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        opening, closing = self.lark.literal("["), self.lark.literal("]")
        if most == 0:
            return f"{opening} {closing}"
        item = self.value(schema["items"])
        times = f"{{{max(least - 1, 0)},{'' if most is None else int(most) - 1}}}"
        items = self.lark.rule(f"{item} ({self.lark.literal(self.separator)} {item}){times}")
        return f"{opening} ({items}){'' if least else '?'} {closing}"
