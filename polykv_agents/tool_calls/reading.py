"""From the raw text of a call to a call: the checks that all formats share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polykv_agents.tool_calls.base import Call, Event, InvalidCall, Tool
from polykv_agents.tool_calls.json_text import guess_name, is_json, parse_json, split_items, split_members
from polykv_agents.tool_calls.streaming import SPACE, Source, run

_BESIDE_ARGUMENTS = frozenset(("name", "type", "id"))

CUT = "the answer ended before the call did"


class CallReader:
    """Turns raw calls into events, for one list of tools.

    Args:
        tools: that were offered.
        keys: under which a call's arguments may be written, the format's own first.
        json_answer: whether an answer may be JSON that is no call, so that only arguments make a call.
    """

    def __init__(
        self, tools: Sequence[Tool], keys: Sequence[str] = ("arguments", "parameters"), *, json_answer: bool = False
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.keys = tuple(keys)
        self.json_answer = json_answer

    def checked(self, name: str, arguments: Mapping[str, Any], raw: str) -> Call | InvalidCall:
        """A call with arguments that have been read, or an invalid one if its tool was not offered."""
        if name not in self.tools:
            offered = ", ".join(sorted(self.tools))
            return InvalidCall(name, raw, f"there is no tool {name!r}; the tools are: {offered}")
        return Call(name, dict(arguments))

    def named(self, name: str, raw: str) -> Call | InvalidCall:
        """A call whose arguments are JSON text: an object, or a string that holds one."""
        try:
            value = parse_json(raw)
            if isinstance(value, str):
                value = parse_json(value)
        except ValueError as error:
            return InvalidCall(name, raw, f"the arguments are not JSON: {error}")
        if not isinstance(value, dict):
            return InvalidCall(name, raw, f"the arguments are a JSON {kind(value)}, not an object")
        return self.checked(name, value, raw)

    def values(self, text: str) -> list[Event]:
        """Calls from JSON text: an object, a list of objects, or several of these with white space, ``;`` or ``,`` between.

        If any of the text is something else, all of it is one invalid call.
        """
        raw = text.strip(SPACE)
        objects: list[str] = []
        source = Source(raw, ended=True)
        while source.pos < len(raw):
            start = source.pos
            if raw[start] in SPACE + ";,":
                source.pos += 1
                continue
            if raw[start] not in "{[" or not run(source.skip_value()):
                return [self._not_calls(raw)]
            value = raw[start : source.pos]
            items = [value]
            if raw[start] == "[":
                items = split_items(value)
                if not items or not all(item.startswith("{") for item in items) or not is_json(value):
                    return [self._not_calls(raw)]
            objects += items
        return [self.value(item) for item in objects] if objects else [self._not_calls(raw)]

    @staticmethod
    def _not_calls(raw: str) -> InvalidCall:
        try:
            problem = (
                f"a JSON {kind(parse_json(raw))} is neither an object with a name and arguments nor a list of such"
            )
        except ValueError as error:
            problem = f"the call is not JSON: {error}"
        return InvalidCall(guess_name(raw), raw, problem)

    def value(self, raw: str) -> Call | InvalidCall:
        """One call from the JSON text of an object with its name and arguments."""
        members = split_members(raw)
        if "name" not in members and members.get("function", "").startswith("{"):
            members = split_members(members["function"])  # the shape of OpenAI's messages
        try:
            name = parse_json(members["name"])
        except (KeyError, ValueError):
            name = None
        if not isinstance(name, str):
            return InvalidCall(None, raw, "the call has no name")
        arguments = next((members[key] for key in self.keys if key in members), None)
        if arguments is None:
            if not members.keys() <= _BESIDE_ARGUMENTS:
                return InvalidCall(name, raw, f"the call has no {self.keys[0]!r}")
            arguments = "{}"
        call: Call | InvalidCall
        try:
            parse_json(raw)
        except ValueError as error:
            call = InvalidCall(name, arguments, f"the call is not JSON: {error}")
        else:
            call = self.named(name, arguments)
        whole = len(split_items(raw)) == 2 and any(key in members for key in self.keys)
        if isinstance(call, InvalidCall) and not whole:
            call = replace(call, arguments=raw)  # it holds more than a name and arguments, or less
        return call


def kind(value: Any) -> str:
    """JSON's word for the type of a value that was read from JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)
