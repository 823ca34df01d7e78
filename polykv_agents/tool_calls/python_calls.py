"""Calls written as Python, ``get_weather(city="Paris", days=2)``: literals only, read with Python's own parser."""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
from collections.abc import Mapping
from typing import Any

from polykv.engine.grammar import json_rule
from polykv_agents.tool_calls.base import Call, Event, InvalidCall, Tool
from polykv_agents.tool_calls.json_text import MAX_DEPTH
from polykv_agents.tool_calls.lark import Lark
from polykv_agents.tool_calls.notation import Notation
from polykv_agents.tool_calls.reading import CallReader
from polykv_agents.tool_calls.schemas import Arguments
from polykv_agents.tool_calls.streaming import SPACE, Source, Syntax, run

PYTHON_QUOTES: Mapping[str, tuple[str, bool]] = {quote: (quote, True) for quote in ('"""', "'''", '"', "'")}
PYTHON_VALUE = Syntax(PYTHON_QUOTES, ("(", ")", "[", "]", "{", "}"))

_CALL = re.compile(r"([A-Za-z_][\w.-]*)[ \t\r\n]*(?=\()", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STRING = re.compile(
    r"""([A-Za-z]*)('''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\"|'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")""",
    re.DOTALL,
)
_IN_STRING = re.compile(r"\\(.)|[\n\r\0]", re.DOTALL)
_ESCAPES = frozenset("\\'\"abfnrtvxNuU01234567")
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None}


def write_call(call: Call) -> str:
    """A call in Python; arguments whose names are no identifiers come in ``**{...}``."""
    plain = {key: value for key, value in call.arguments.items() if is_identifier(key)}
    other = {key: value for key, value in call.arguments.items() if key not in plain}
    parts = [f"{key}={_literal(value)}" for key, value in plain.items()]
    parts += [f"**{_literal(other)}"] if other else []
    return f"{call.name}({', '.join(parts)})"


def is_identifier(name: str) -> bool:
    """Whether an argument's name can stand before ``=``."""
    return _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name)


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{json.dumps(str(key), ensure_ascii=False)}: {_literal(part)}" for key, part in value.items())
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def read_calls(text: str, reader: CallReader) -> list[Event] | None:
    """The calls in text that is nothing but calls, with white space, ``,`` or ``;`` between, perhaps in one list.

    Returns:
        None if the text is something else.
    """
    text = text.strip(SPACE)
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    events: list[Event] = []
    source = Source(text, ended=True)
    while source.pos < len(text):
        if text[source.pos] in SPACE + ",;":
            source.pos += 1
            continue
        match = _CALL.match(text, source.pos)
        if match is None:
            return None
        name = match.group(1)
        source.pos = match.end()
        if not run(source.skip_value(PYTHON_VALUE)):
            return None
        raw = text[match.end() : source.pos]
        if name == "print" and name not in reader.tools:
            inner = read_calls(raw[1:-1], reader)
            if inner is None:
                return None
            events += inner
            continue
        try:
            arguments = read_arguments(raw)
        except ValueError as error:
            events.append(InvalidCall(name, raw, f"the arguments cannot be read: {error}"))
        else:
            events.append(reader.checked(name, arguments, raw))
    return events


def read_arguments(raw: str) -> dict[str, Any]:
    """The arguments in brackets, ``(city="Paris")``.

    Raises:
        ValueError: they are not keyword arguments with literals. Nothing else, whatever the text.
    """
    if raw.count("[") + raw.count("{") + raw.count("(") > MAX_DEPTH and _depth(raw) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    try:
        tree = ast.parse("f" + _STRING.sub(_repaired, raw), mode="eval").body
    except SyntaxError as error:
        raise ValueError(error.msg) from None
    except (RecursionError, MemoryError):
        raise ValueError("too deep") from None
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise ValueError("not one call")
    if tree.args:
        raise ValueError("arguments need their names, as in name=value")
    arguments: dict[str, Any] = {}
    for part in tree.keywords:
        value = _value(part.value)
        if part.arg is not None:
            arguments[part.arg] = value
        elif isinstance(value, dict):
            arguments.update(value)
        else:
            raise ValueError("** takes a dict")
    return arguments


def _repaired(match: re.Match[str]) -> str:
    """A string literal without what Python warns of or refuses though its meaning is clear: unknown escapes, line breaks."""
    prefix, body = match.groups()
    if "r" in prefix.lower():
        return match.group()

    def repair(part: re.Match[str]) -> str:
        if part.group(1) is None:
            return {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}[part.group()]
        if part.group(1) == "\n":
            return ""  # a line that goes on
        return part.group() if part.group(1) in _ESCAPES else "\\" + part.group()

    return prefix + _IN_STRING.sub(repair, body)


def _depth(raw: str) -> int:
    depth = deepest = 0
    for character in _STRING.sub("", raw):
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return _constant(node.value)
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(part) for part in node.elts]
    if isinstance(node, ast.Dict):
        result: dict[str, Any] = {}
        for key, part in zip(node.keys, node.values, strict=True):
            name = None if key is None else _value(key)
            if not isinstance(name, str):
                raise ValueError("keys of a dict must be strings")
            result[name] = _value(part)
        return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        number = _value(node.operand) if isinstance(node.operand, ast.Constant) else None
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    raise ValueError("values must be literals: strings, numbers, True, False, None, lists, dicts")


def _constant(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")  # joins pairs written as two escapes
        except UnicodeDecodeError:
            raise ValueError("half of a surrogate pair, which is no character") from None
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError("values must be literals that JSON has too")


class PythonNotation(Notation):
    """Python literals."""

    separator = ", "
    words: Mapping[bool | None, str] = {True: "True", False: "False", None: "None"}

    def key(self, name: str) -> str | None:
        """See the base class."""
        return json.dumps(name, ensure_ascii=False) + ": "

    def string(self, schema: Mapping[str, Any]) -> str:
        """See the base class. JSON's strings are Python's, too."""
        return self.lark.rule(json_rule(self.arguments.standalone(schema)))

    def constant(self, value: Any) -> str:
        """See the base class."""
        return self.lark.literal(_literal(value))


def call_rule(lark: Lark, tool: Tool) -> str:
    """The rule of a call of one tool."""
    arguments = Arguments(tool)
    members = PythonNotation(lark, arguments).members(
        arguments.root, lambda name: f"{name}=" if is_identifier(name) else None
    )
    if members is None:
        return lark.rule(
            f"{lark.literal(f'{tool.name}(**')} {lark.rule(json_rule(arguments.root))} {lark.literal(')')}"
        )
    return lark.rule(f"{lark.literal(tool.name + '(')} {members} {lark.literal(')')}")
