"""Calls as tags, ``<function=name><parameter=key>value</parameter></function>``: Qwen3-Coder, Qwen3.5."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polykv.engine.grammar import json_rule
from polykv.errors import InvalidRequestError
from polykv_agents.tool_calls.base import Call, Event, InvalidCall, Tool, dumps
from polykv_agents.tool_calls.hermes import TaggedJson
from polykv_agents.tool_calls.json_text import parse_json
from polykv_agents.tool_calls.lark import Lark, Opening
from polykv_agents.tool_calls.reading import CUT, CallReader
from polykv_agents.tool_calls.schemas import JSON_TYPES, Argument, Arguments, json_type
from polykv_agents.tool_calls.streaming import SPACE, Source, Syntax, Wait

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
VALUE_END = "\n" + PARAMETER_END

_FUNCTION_NAME = re.compile(r"[\w.:-]*", re.ASCII)
_KEY = re.compile(r"[^<>\n]*")
_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class Qwen3Coder(TaggedJson):
    """Values are plain text, so only the tool's schema tells ``5`` from ``"5"``: a string stays text, others are read as JSON.

    A value ends at a closing tag that another tag of the call follows, so it may hold such tags itself. JSON between the outer
    tags is read as in ``hermes``.
    """

    name = "qwen3_coder"
    opening = "<tool_call>"
    closing = "</tool_call>"
    openings = (opening, FUNCTION)
    marks = (opening, closing)

    def read(self, source: Source, reader: CallReader) -> Wait[Sequence[Event] | None]:
        """See the base class."""
        start = source.pos
        wrapped = (yield from source.take((self.opening,))) is not None
        if wrapped:
            yield from source.skip_space()
            if (yield from source.next_is((FUNCTION,))) is None:
                source.pos = start
                return (yield from super().read(source, reader))
        start = source.pos
        source.pos += len(FUNCTION)
        name = yield from self._tag_name(source, _FUNCTION_NAME)
        if name is None:
            begun = source.text[start + len(FUNCTION) :]
            if source.pos < len(source.text) or not any(tool.startswith(begun) for tool in reader.tools):
                source.pos = start
                return None
            return [InvalidCall(None, source.text[start:], CUT)]
        arguments = Arguments(reader.tools[name]) if name in reader.tools else None
        types = (
            {part.name: arguments.types(part.name) for part in arguments.listed or ()} if arguments is not None else {}
        )
        values = yield from self._values(source, types)
        end = source.pos
        raw = source.text[start:end].strip(SPACE)
        yield from source.skip_space()
        if (yield from source.take((self.closing,))) is None:
            left = source.text[source.pos :]
            missing = wrapped and source.ended and not source.complete and self.closing.startswith(left)
            source.pos = len(source.text) if missing else end
            if missing:
                return [InvalidCall(name, source.text[start:].strip(SPACE), CUT)]
        if isinstance(values, str):
            return [InvalidCall(name, raw, values)]
        return [
            reader.checked(name, {key: _value(text, types.get(key, JSON_TYPES)) for key, text in values.items()}, raw)
        ]

    @staticmethod
    def _tag_name(source: Source, pattern: re.Pattern[str]) -> Wait[str | None]:
        """Moves past the name and the bracket after it; or to where the name ends if no bracket stands there."""
        while True:
            match = pattern.match(source.text, source.pos)
            assert match is not None
            if match.end() < len(source.text) or source.ended:
                source.pos = match.end()
                return match.group().strip() if (yield from source.take((">",))) else None
            yield

    def _values(self, source: Source, types: Mapping[str, frozenset[str]]) -> Wait[dict[str, str] | str]:
        """Moves past the end of the function; returns its values, or what is wrong."""
        values: dict[str, str] = {}
        while True:
            yield from source.skip_space()
            tag = yield from source.take((PARAMETER, FUNCTION_END))
            if tag == FUNCTION_END:
                return values
            key = (yield from self._tag_name(source, _KEY)) if tag is not None else None
            if key is None:
                stop = yield from source.next_token(Syntax({}, (FUNCTION_END, self.closing, FUNCTION)))
                if stop != FUNCTION_END:
                    source.pos -= len(stop or "")
                return CUT if stop is None else "text where a parameter should be"
            start = source.pos
            kinds = types.get(key, JSON_TYPES)
            if kinds & {"object", "array"} and (yield from self._skip_json(source)):
                values[key] = source.text[start : source.pos].strip(SPACE)
                yield from source.skip_space()
                source.pos += len(PARAMETER_END)
                continue
            while True:
                token = yield from source.next_token(Syntax({}, (PARAMETER_END,)))
                if token is None:
                    return CUT
                end = source.pos
                yield from source.skip_space()
                if (yield from source.next_is((PARAMETER, FUNCTION_END))) is not None:
                    break
                source.pos = end
            text = source.text[start : end - len(PARAMETER_END)]
            values[key] = text.removeprefix("\n").removesuffix("\n")

    @staticmethod
    def _skip_json(source: Source) -> Wait[bool]:
        """Moves past JSON in brackets that a closing tag follows, so that tags in its strings do not count; False if none."""
        start = source.pos
        yield from source.skip_space()
        if (yield from source.next_is(("{", "["))) is not None and (yield from source.skip_value()):
            end = source.pos
            yield from source.skip_space()
            found = (yield from source.next_is((PARAMETER_END,))) is not None
            source.pos = end if found else start
            return found
        source.pos = start
        return False

    def example(self) -> str:
        """See the base class."""
        return (
            f"{self.opening}\n{FUNCTION}tool_name>\n{PARAMETER}argument_name>\nvalue\n{PARAMETER_END}\n{FUNCTION_END}\n"
            f"{self.closing}"
        )

    def write_calls(self, calls: Sequence[Call]) -> str:
        """See the base class."""
        return "\n".join(f"{self.opening}\n{self._written(call)}\n{self.closing}" for call in calls)

    @staticmethod
    def _written(call: Call) -> str:
        parts = [
            f"{PARAMETER}{key}>\n{value if isinstance(value, str) else dumps(value)}\n{PARAMETER_END}\n"
            for key, value in call.arguments.items()
        ]
        return f"{FUNCTION}{call.name}>\n{''.join(parts)}{FUNCTION_END}"

    def call_openings(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> Sequence[Opening]:
        """See the base class."""
        line = lark.literal("\n")
        function = lark.rule(" | ".join(self._rule(lark, tool) for tool in tools))
        once = f"{lark.literal(chr(10) + FUNCTION)} {function} {line} {lark.mark(self.closing)}"
        again = f" ({line} {lark.mark(self.opening)} {once})*" if parallel else ""
        return [Opening(self.opening, once + again), Opening(FUNCTION, function)]

    def _rule(self, lark: Lark, tool: Tool) -> str:
        arguments = Arguments(tool)
        if arguments.listed is None:
            raise InvalidRequestError(
                f"the parameters of tool {tool.name!r} are not a plain list of properties, and the tool-call format "
                f"{self.name!r} writes them one by one; give a schema with 'properties' alone, or use the format 'hermes'"
            )
        parts = [lark.literal(f"{tool.name}>\n")]
        for argument in arguments.listed:
            value = lark.rule(" | ".join(self._value_rules(lark, arguments, argument)))
            part = f"{lark.literal(f'{PARAMETER}{argument.name}>{chr(10)}')} {value} {lark.literal(chr(10))}"
            parts.append(part if argument.required else f"({part})?")
        return lark.rule(" ".join([*parts, lark.literal(FUNCTION_END)]))

    @staticmethod
    def _value_rules(lark: Lark, arguments: Arguments, argument: Argument) -> list[str]:
        end = lark.literal(VALUE_END)
        rules: list[str] = []
        for branch in arguments.branches(argument.schema):
            choices = [branch["const"]] if "const" in branch else branch.get("enum", [None])
            free = not {"const", "enum", "pattern", "minLength", "maxLength"} & branch.keys()
            if branch.get("type") == "string" and free:
                return [lark.text_before(VALUE_END, branch)]  # which allows what other types look like, too
            if branch.get("type") == "string" or all(isinstance(choice, str) for choice in choices):
                rules.append(lark.text_before(VALUE_END, branch))
            else:
                rules.append(f"{lark.rule(json_rule(arguments.standalone(branch)))} {end}")
        return list(dict.fromkeys(rules))


def _value(text: str, types: frozenset[str]) -> Any:
    """The value that a text stands for where such types are allowed; the text itself where it is none of them."""
    if types == {"string"}:
        return text
    word = text.strip(SPACE)
    try:
        value = _WORDS[word] if word in _WORDS else parse_json(word)
    except ValueError:
        return text
    kind = json_type(value)
    if kind in types or (kind == "integer" and "number" in types):
        return text if kind == "string" else value
    if kind == "number" and "integer" in types and float(value).is_integer():
        return int(value)
    return text
