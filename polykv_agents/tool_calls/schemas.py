"""What grammars and parsers ask of a tool's JSON schema: its parts, their types, and references that stay right elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from polykv.errors import InvalidRequestError
from polykv_agents.tool_calls.base import Tool

_SCHEMAS = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OPEN = frozenset(("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "not"))

_BEYOND_PROPERTIES = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "minProperties", "maxProperties")
)

JSON_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))


def rebased(schema: Any, root: str) -> Any:
    """The schema as it must read inside a larger one, at ``root``: references into itself go there."""
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            result[key] = root + value[1:]
        elif key in _SCHEMAS:
            result[key] = rebased(value, root)
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            result[key] = [rebased(part, root) for part in value]
        elif key in _SCHEMA_MAPS and isinstance(value, Mapping):
            result[key] = {name: rebased(part, root) for name, part in value.items()}
    return result


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments: an object.

    Arguments that the schema does not name are left out unless it, or ``strict=False``, asks for them: JSON schema allows
    them by default, but a model that may invent arguments will.

    Raises:
        InvalidRequestError: the schema is not that of an object.
    """
    schema = dict(tool.parameters)
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(
            f"the parameters of tool {tool.name!r} have type {schema['type']!r}; arguments are an object, so give a schema "
            "of type 'object'"
        )
    schema["type"] = "object"
    if tool.strict is not False and not _OPEN & schema.keys():
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False
    return schema


@dataclass(frozen=True)
class Argument:
    """One argument of a tool.

    Attributes:
        name: its key.
        schema: its JSON schema, in which references are those of the tool's whole schema.
        required: whether a call must have it.
    """

    name: str
    schema: Mapping[str, Any]
    required: bool


@dataclass(frozen=True)
class Arguments:
    """A tool's arguments one by one, for formats that write them so.

    Attributes:
        tool: the tool.
    """

    tool: Tool

    @cached_property
    def root(self) -> Mapping[str, Any]:
        """The whole schema."""
        return arguments_schema(self.tool)

    @cached_property
    def listed(self) -> tuple[Argument, ...] | None:
        """The arguments in order; None where the schema does not simply list them."""
        return self.properties(self.root)

    def properties(self, schema: Mapping[str, Any]) -> tuple[Argument, ...] | None:
        """The properties of an object in order; None where its schema does not simply list them."""
        schema = self.resolved(schema)
        if _BEYOND_PROPERTIES & schema.keys() or isinstance(schema.get("properties", {}), list):
            return None
        properties = schema.get("properties", {})
        required = list(schema.get("required", ()))
        names = [*properties, *(name for name in required if name not in properties)]
        if not names and schema.get("additionalProperties") is not False:
            return None
        return tuple(
            Argument(name, part if isinstance(part := properties.get(name, {}), Mapping) else {}, name in required)
            for name in names
        )

    def standalone(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A part of the schema as a whole one, with what it refers to."""
        if not _refers(schema):
            return dict(schema)
        return {**rebased(schema, "#/$defs/tool"), "$defs": {"tool": rebased(self.root, "#/$defs/tool")}}

    def resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema that a chain of references ends at; keywords beside a reference stay."""
        seen = 0
        while isinstance(reference := schema.get("$ref"), str) and reference.startswith("#") and seen < 32:
            target: Any = self.root
            for step in reference[1:].strip("/").split("/") if reference != "#" else ():
                step = step.replace("~1", "/").replace("~0", "~")
                if isinstance(target, Mapping):
                    target = target.get(step, {})
                elif isinstance(target, list) and step.isdigit() and int(step) < len(target):
                    target = target[int(step)]
                else:
                    target = {}
            beside = {key: value for key, value in schema.items() if key not in ("$ref", "$defs", "definitions")}
            schema = {**(target if isinstance(target, Mapping) else {}), **beside}
            seen += 1
        return schema

    def branches(self, schema: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """The schemas that a value may match, with unions taken apart."""
        schema = self.resolved(schema)
        kinds = schema.get("type")
        for union in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(union), list) and depth < 8:
                beside = {
                    key: value for key, value in schema.items() if key not in (union, "title", "description", "default")
                }
                for part in parts:
                    if isinstance(part, Mapping):
                        yield from self.branches({**beside, **part}, depth + 1)
                return
        if isinstance(kinds, list):
            for kind in kinds:
                yield {**schema, "type": kind}
        else:
            yield schema

    def types(self, name: str) -> frozenset[str]:
        """The JSON types that an argument may have; all where the schema does not say."""
        argument = next((argument for argument in self.listed or () if argument.name == name), None)
        if argument is None:
            return JSON_TYPES
        found: set[str] = set()
        for branch in self.branches(argument.schema):
            if isinstance(branch.get("type"), str):
                found.add(branch["type"])
            elif "const" in branch or "enum" in branch:
                values = [branch["const"]] if "const" in branch else branch["enum"]
                found.update(json_type(value) for value in values)
            else:
                return JSON_TYPES
        return frozenset(found)


def _refers(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(_refers(value) for value in schema.values())
    return isinstance(schema, list) and any(_refers(value) for value in schema)


def json_type(value: Any) -> str:
    """JSON schema's name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", tuple: "array", dict: "object"}
    return names.get(type(value), "object")
