"""Tools and answer formats of a call: from everything LangChain passes around to what a prompt and a grammar need."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from polykv.engine.grammar import Grammar
from polykv.errors import InvalidRequestError
from polykv_agents.tool_calls import Reasoning, Tool, ToolChoice, ToolFormat
from polykv_agents.tool_calls.base import dumps

TOOL_KEYWORDS = ("tools", "tool_choice", "parallel_tool_calls", "strict", "response_format")
"""Keyword arguments of a call that say what its answer may be."""

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "regex", "choice", "grammar")
"""Types of ``response_format``: those of OpenAI's API, and what else a grammar can hold an answer to."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_SCHEMA = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "prefixItems")


def closed(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` wherever an object lists its properties and does not say.

    JSON schema allows further properties by default, but a model that may invent arguments will. Branches of ``allOf``
    stay open, since they describe one object together.
    """
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMA:
            result[key] = closed(value)
        elif key in _SCHEMA_MAPS and isinstance(value, Mapping):
            result[key] = {name: closed(part) for name, part in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            result[key] = [closed(part) for part in value]
    if "properties" in result and not {"additionalProperties", "patternProperties", "allOf"} & result.keys():
        result["additionalProperties"] = False
    return result


def _own_schema(tool: Any) -> dict[str, Any] | None:
    """The JSON schema of a pydantic class, or of a tool's arguments, if it refers to itself.

    LangChain writes references out, which a recursive one survives as "anything".
    """
    model = tool.tool_call_schema if isinstance(tool, BaseTool) else tool
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return None
    schema = model.model_json_schema()
    return schema if _refers_to_itself(schema) else None


def _refers_to_itself(schema: Mapping[str, Any]) -> bool:
    definitions = schema.get("$defs", {})

    def targets(part: Any) -> Iterator[str]:
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"].rpartition("/")[2]
            for key, value in part.items():
                if key != "$defs":
                    yield from targets(value)
        elif isinstance(part, list):
            for value in part:
                yield from targets(value)

    def reaches(name: str, goal: str, seen: set[str]) -> bool:
        for target in targets(definitions.get(name, {})):
            if target == goal or (target not in seen and reaches(target, goal, seen | {target})):
                return True
        return False

    return any(reaches(name, name, {name}) for name in definitions)


@lru_cache(maxsize=512)
def _check_schema(what: str, schema: str) -> None:
    try:
        Grammar.json_schema(json.loads(schema))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{what}: {error}") from error


def tool_schemas(tools: Sequence[Any], *, strict: bool | None = None) -> list[dict[str, Any]]:
    """Tools in OpenAI's form, which is plain data.

    Args:
        tools: LangChain tools, functions, pydantic classes, TypedDicts, JSON schemas, and dicts in OpenAI's or
            Anthropic's form.
        strict: see :meth:`ChatPolyKV.bind_tools`.

    Raises:
        InvalidRequestError: what is no tool, a tool that only a hosted service has, a broken schema, or one name
            for two tools.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequestError(f"tools must be a list of tools, got {tools!r:.80}")
    schemas: list[dict[str, Any]] = []
    for tool in tools:
        try:
            schema = convert_to_openai_tool(tool, strict=strict)
            own = _own_schema(tool)
            if own is not None:
                parameters = {key: own[key] for key in own if key not in ("title", "description")}
                schema = {**schema, "function": {**schema["function"], "parameters": parameters}}
        except Exception as error:
            raise InvalidRequestError(
                f"cannot make a tool of {tool!r:.80}: {error}. Give a LangChain tool, a function with type hints and a "
                "docstring, a pydantic class, a TypedDict, or a JSON schema with a title"
            ) from error
        function = schema.get("function")
        if schema.get("type") != "function" or not isinstance(function, Mapping):
            raise InvalidRequestError(
                f"tools of type {schema.get('type')!r} run at a hosted service, and this model is local; give a function"
            )
        name, parameters = function.get("name"), function.get("parameters", {"type": "object", "properties": {}})
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"the tool name {name!r} must be 1 to 128 letters, digits, '_', '-', '.' or ':'; rename the tool"
            )
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise InvalidRequestError(
                f"tool {name!r}: parameters must be a JSON schema of type object, got {parameters!r:.80}"
            )
        try:
            text = json.dumps(closed(parameters))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"tool {name!r}: its parameters are no JSON: {error}") from error
        _check_schema(f"tool {name!r}", text)
        schemas.append(schema)
    told: dict[str, dict[str, Any]] = {}
    for schema in schemas:
        name, before = schema["function"]["name"], told.setdefault(schema["function"]["name"], schema)
        if _arguments(before) != _arguments(schema):
            raise InvalidRequestError(f"two different tools are called {name!r}; rename one of them")
    return list(told.values())


def _arguments(schema: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names of all arguments and of the required ones; a class and its JSON schema differ in titles alone."""
    parameters = schema["function"].get("parameters") or {}
    return sorted(parameters.get("properties", ())), sorted(parameters.get("required", ()))


def normalize_tool_choice(tool_choice: Any, names: Sequence[str]) -> str | dict[str, Any]:
    """``"auto"``, ``"none"``, ``"required"``, or OpenAI's dict for a single tool.

    Args:
        tool_choice: None or False (not said), ``"auto"``, ``"none"``, ``"any"``, ``"required"``, True, a tool's name, or a
            dict of OpenAI's or Anthropic's API.
        names: of the tools.

    Raises:
        InvalidRequestError: an unknown tool or value, or a call is required and there is no tool.
    """
    given = tool_choice
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        named = function.get("name") if isinstance(function, Mapping) else tool_choice.get("name")
        tool_choice = named if named is not None else tool_choice.get("type")
    if tool_choice is None or tool_choice is False:
        return "auto"
    if tool_choice is True or tool_choice == "any":
        tool_choice = "required"
    if tool_choice in ("auto", "none"):
        return str(tool_choice)
    if tool_choice == "required":
        if not names:
            raise InvalidRequestError(f"tool_choice={given!r} demands a call, but there are no tools; give some")
        return "required"
    if isinstance(tool_choice, str) and tool_choice in names:
        return {"type": "function", "function": {"name": tool_choice}}
    raise InvalidRequestError(
        f"tool_choice={given!r} is not 'auto', 'none', 'any' (or 'required'), or one of the tools "
        f"({', '.join(map(repr, names)) or 'there are none'})"
    )


def answer_schema(schema: Any) -> tuple[str, dict[str, Any]]:
    """Name and JSON schema of a pydantic class, TypedDict, function, or JSON schema (OpenAI's wrapping too).

    Raises:
        InvalidRequestError: it is none of these.
    """
    if isinstance(schema, Mapping):
        if "name" in schema and isinstance(schema.get("schema"), Mapping):
            return str(schema["name"]), dict(schema["schema"])
        if "name" not in schema and schema.get("type") != "function":
            return str(schema.get("title", "answer")), dict(schema)
    try:
        converted = _own_schema(schema) or convert_to_json_schema(schema)
    except Exception as error:
        raise InvalidRequestError(
            f"cannot make a JSON schema of {schema!r:.80}: {error}. Give a pydantic class, a TypedDict or a JSON schema"
        ) from error
    return str(converted.get("title", "answer")), converted


@dataclass(frozen=True)
class AnswerFormat:
    """What an answer without calls must be.

    Attributes:
        schema: JSON schema of it, or None.
        grammar: the grammar of another kind of answer, or None.
        section: what the prompt says of it, or None.
    """

    schema: Mapping[str, Any] | None = None
    grammar: Grammar | None = None
    section: str | None = None


def answer_format(response_format: Any) -> AnswerFormat | None:
    """Reads ``response_format``; None for plain text.

    Raises:
        InvalidRequestError: an unknown type, a missing part, or what no grammar can hold an answer to.
    """
    if response_format is None:
        return None
    if isinstance(response_format, type) and is_basemodel_subclass(response_format):
        name, converted = answer_schema(response_format)
        response_format = {"type": "json_schema", "json_schema": {"name": name, "schema": converted}}
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in RESPONSE_FORMATS:
        raise InvalidRequestError(
            f"response_format={response_format!r:.120} is not supported; give a dict whose type is one of "
            f"{', '.join(RESPONSE_FORMATS)}, or a pydantic class"
        )
    if kind == "text":
        return None
    if kind in ("json_object", "json_schema"):
        inner = response_format.get("json_schema", {}) if kind == "json_schema" else response_format
        schema: Any = inner.get("schema") if isinstance(inner, Mapping) else None
        if schema is None and kind == "json_object":
            return AnswerFormat({"type": "object"})
        if not isinstance(schema, Mapping):
            raise InvalidRequestError(
                f"response_format of type {kind} needs a schema, as {{'type': 'json_schema', 'json_schema': {{'name': ..., "
                f"'schema': {{...}}}}}}, got {response_format!r:.120}"
            )
        strict = inner.get("strict") is not False
        held = closed(schema) if strict else dict(schema)
        try:
            text = json.dumps(held)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"response_format: the schema is no JSON: {error}") from error
        _check_schema("response_format", text)
        return AnswerFormat(held, section=_json_section(schema) if kind == "json_schema" else None)
    value = response_format.get({"regex": "pattern", "choice": "choices", "grammar": "grammar"}[kind])
    if kind == "regex":
        return AnswerFormat(grammar=Grammar.regex(value))
    if kind == "grammar":
        return AnswerFormat(grammar=Grammar.lark(value))
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise InvalidRequestError(f"response_format of type choice needs choices, a list of strings, got {value!r:.80}")
    return AnswerFormat(grammar=Grammar.choice(value), section=f"Answer with one of: {', '.join(map(str, value))}")


def _json_section(schema: Mapping[str, Any]) -> str:
    return f"Answer with one JSON value and nothing else. It must match this JSON schema:\n{dumps(dict(schema))}"


@dataclass(frozen=True)
class Ask:
    """What one call allows the model to answer.

    Attributes:
        tools: that the prompt tells of; none if ``tool_choice`` is ``"none"``.
        callable: those that may be called; fewer if one is named.
        choice: whether a call is required.
        parallel: whether there may be several calls.
        answer: what an answer without calls must be, or None for any text.
    """

    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True
    answer: AnswerFormat | None = None

    @property
    def section(self) -> str | None:
        """What the prompt says of the answer's form."""
        return None if self.answer is None else self.answer.section

    def grammar(self, tool_format: ToolFormat, reasoning: Reasoning, special_id: Any) -> Grammar | None:
        """The grammar of what may be answered; None for any text.

        Raises:
            InvalidRequestError: tools together with an answer that is no JSON, or thoughts before it.
        """
        answer = self.answer
        if answer is not None and answer.grammar is not None:
            if self.tools:
                raise InvalidRequestError(
                    "tools go together with a response_format of type json_schema or json_object only; leave one of them out"
                )
            if reasoning == "open":
                raise InvalidRequestError(
                    "this model's chat template begins every answer with thoughts, and a response_format of type regex, "
                    "choice or grammar has no room for them; use json_schema"
                )
            return answer.grammar
        if not self.callable and answer is None:
            return None
        held = tuple(
            tool if tool.strict is False else replace(tool, parameters=closed(tool.parameters))
            for tool in self.callable
        )
        text = tool_format.grammar(
            held,
            self.choice,
            parallel=self.parallel,
            answer=None if answer is None else answer.schema,
            reasoning=reasoning,
            is_special=special_id,
        )
        return _lark(text)


@lru_cache(maxsize=256)
def _lark(text: str) -> Grammar:
    return Grammar.lark(text)


def ask_of(
    *,
    tools: Sequence[Any] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    strict: bool | None = None,
    response_format: Any = None,
) -> Ask:
    """Reads the keyword arguments of a call; see :meth:`ChatPolyKV.bind_tools`.

    Raises:
        InvalidRequestError: a value is unknown, broken or contradicts another.
    """
    for name, value in (("parallel_tool_calls", parallel_tool_calls), ("strict", strict)):
        if value is not None and not isinstance(value, bool):
            raise InvalidRequestError(f"{name} must be True, False or None, got {value!r}")
    functions = [schema["function"] for schema in tool_schemas(tools or [], strict=strict)]
    offered = tuple(
        Tool(
            function["name"],
            function.get("description") or "",
            function.get("parameters") or {"type": "object", "properties": {}},
            function.get("strict"),
        )
        for function in functions
    )
    choice = normalize_tool_choice(tool_choice, [tool.name for tool in offered])
    answer = answer_format(response_format)
    if choice == "none":
        return Ask(answer=answer)
    if isinstance(choice, dict):
        named = tuple(tool for tool in offered if tool.name == choice["function"]["name"])
        return Ask(offered, named, "required", parallel_tool_calls is True, answer)
    kind: Literal["auto", "required"] = "required" if choice == "required" else "auto"
    # small models that must call repeat themselves where they may
    several = kind == "auto" if parallel_tool_calls is None else parallel_tool_calls
    return Ask(offered, offered, kind, several, answer)
