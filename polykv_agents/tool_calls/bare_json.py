"""Calls that are JSON without marks around it: telling them from answers that are JSON, and one schema for both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polykv_agents.tool_calls.base import Tool
from polykv_agents.tool_calls.json_text import guess_name, parse_json, split_items, split_members
from polykv_agents.tool_calls.reading import CallReader
from polykv_agents.tool_calls.schemas import arguments_schema, rebased
from polykv_agents.tool_calls.streaming import Source, Wait

_KEYS = ("name", "arguments", "parameters", "type", "id", "function")
_FIRST = tuple(f'"{key}"' for key in _KEYS)
_CUT_NAME = re.compile(r'[\[\s]*\{\s*"name"\s*:\s*"([^"\\]*)')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:')

NOT_JSON = r"/[ \t\r\n]*([^ \t\r\n{\[](.|\n)*)?/"
"""Regular expression of a text that does not begin with a bracket."""


def begins_like_call(source: Source) -> Wait[bool]:
    """Whether the JSON here, an object or a list, may be calls by its first key. Does not move."""
    start = source.pos
    if (yield from source.take(("[",))):
        yield from source.skip_space()
    begins = False
    if (yield from source.take(("{",))):
        yield from source.skip_space()
        begins = (yield from source.next_is(_FIRST)) is not None
    source.pos = start
    return begins


def is_calls(value: str, reader: CallReader) -> bool:
    """Whether JSON, perhaps broken inside, is a call or a list of calls, and not some other answer in JSON.

    An object is a call if it has a name, no keys but those of calls, and either arguments or the name of a tool.
    """
    items = split_items(value) if value.startswith("[") else [value]
    return bool(items) and all(_is_call(item, reader) for item in items)


def _is_call(item: str, reader: CallReader) -> bool:
    members = split_members(item)
    if "name" not in members and members.get("function", "").startswith("{"):
        members = split_members(members["function"])
    if "name" not in members or not members.keys() <= set(_KEYS):
        return False
    try:
        name = parse_json(members["name"])
    except ValueError:
        return False
    if not isinstance(name, str):
        return False
    return any(key in members for key in reader.keys) or (name in reader.tools and not reader.json_answer)


def is_cut_call(raw: str, reader: CallReader) -> bool:
    """Whether JSON that breaks off was going to be a call."""
    name = guess_name(raw)
    if reader.json_answer:
        return name in reader.tools and _ARGUMENTS.search(raw) is not None
    if name is not None:
        return name in reader.tools or _ARGUMENTS.search(raw) is not None
    match = _CUT_NAME.match(raw)
    if match is not None:
        return any(tool.startswith(match.group(1)) for tool in reader.tools)
    return _ARGUMENTS.search(raw) is not None


def calls_schema(
    tools: Sequence[Tool], key: str, *, lists: bool = False, answer: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One JSON schema of a call, or of an answer.

    Args:
        tools: that may be called.
        key: under which arguments stand.
        lists: whether a list of calls is allowed too.
        answer: schema of an answer that is no call; None: calls only.
    """
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        part = f"tool_{number}"
        definitions[part] = rebased(arguments_schema(tool), f"#/$defs/{part}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, key: {"$ref": f"#/$defs/{part}"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    alternatives = list(calls)
    if lists:
        alternatives.append({"type": "array", "items": {"anyOf": calls}, "minItems": 1})
    if answer is not None:
        definitions["answer"] = rebased(answer, "#/$defs/answer")
        alternatives.append({"$ref": "#/$defs/answer"})
    return {"anyOf": alternatives, "$defs": definitions}
