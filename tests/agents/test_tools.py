"""Tools, choices and answer formats as callers give them."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from pydantic.v1 import BaseModel as BaseModelV1

from polykv.errors import InvalidRequestError
from polykv_agents.tools import answer_format, answer_schema, ask_of, closed, normalize_tool_choice, tool_schemas


@tool
def search(query: str, limit: int = 5) -> str:
    """Search the archive.

    Args:
        query: what for.
        limit: how many.
    """
    return query * limit


def weather(city: str) -> str:
    """Tell the weather."""
    return city


class Person(BaseModel):
    """A person."""

    name: str = Field(description="full name")
    age: int | None = None


class OldPerson(BaseModelV1):
    """A person, in pydantic's first version."""

    name: str


class Place(TypedDict):
    """A place."""

    city: str


JSON_SCHEMA = {
    "title": "point",
    "description": "A point.",
    "type": "object",
    "properties": {"x": {"type": "number"}},
    "required": ["x"],
}
OPENAI = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
ANTHROPIC = {
    "name": "g",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
}


class TestToolSchemas:
    def test_every_kind_becomes_openai_form(self) -> None:
        schemas = tool_schemas([search, weather, Person, OldPerson, Place, JSON_SCHEMA, OPENAI, ANTHROPIC])
        assert [s["type"] for s in schemas] == ["function"] * 8
        functions = {s["function"]["name"]: s["function"] for s in schemas}
        assert list(functions) == ["search", "weather", "Person", "OldPerson", "Place", "point", "f", "g"]
        assert functions["search"]["parameters"]["required"] == ["query"]
        assert functions["g"]["parameters"]["properties"] == {"a": {"type": "string"}}

    def test_a_tool_given_twice_is_told_once(self) -> None:
        assert tool_schemas([Person, weather, Person]) == tool_schemas([Person, weather])

    def test_a_tool_without_parameters(self) -> None:
        assert ask_of(tools=[{"type": "function", "function": {"name": "now"}}]).tools[0].parameters == {
            "type": "object",
            "properties": {},
        }

    @pytest.mark.parametrize(
        ("tools", "message"),
        [
            ("search", "tools must be a list"),
            ([3], "cannot make a tool of 3"),
            ([{"type": "web_search_preview"}], "hosted service"),
            ([search, {"name": "search", "description": "d", "parameters": {"type": "object"}}], "two different tools"),
            ([{"type": "function", "function": {"name": "two words"}}], "tool name 'two words'"),
            ([{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}], "of type object"),
            (
                [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"type": "object", "properties": {"a": {"type": "what"}}},
                        },
                    }
                ],
                "tool 'f'",
            ),
            (
                [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}},
                        },
                    }
                ],
                "tool 'f'",
            ),
            (
                [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": {1}}}}},
                    }
                ],
                "no JSON",
            ),
        ],
    )
    def test_what_is_no_tool_is_named(self, tools: Any, message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            tool_schemas(tools)


class TestToolChoice:
    @pytest.mark.parametrize(
        ("given", "normal"),
        [
            (None, "auto"),
            (False, "auto"),
            ("auto", "auto"),
            ("none", "none"),
            ("any", "required"),
            ("required", "required"),
            (True, "required"),
            ("a", {"type": "function", "function": {"name": "a"}}),
            ({"type": "function", "function": {"name": "b"}}, {"type": "function", "function": {"name": "b"}}),
            ({"type": "tool", "name": "b"}, {"type": "function", "function": {"name": "b"}}),
            ({"type": "any"}, "required"),
            ({"type": "auto"}, "auto"),
            ({"type": "none"}, "none"),
        ],
    )
    def test_every_way_to_say_it(self, given: Any, normal: Any) -> None:
        assert normalize_tool_choice(given, ["a", "b"]) == normal
        assert normalize_tool_choice(normal, ["a", "b"]) == normal

    @pytest.mark.parametrize(
        "given", ["c", {"type": "function", "function": {"name": "c"}}, 3, {"type": "what"}, ["a"]]
    )
    def test_what_is_unknown_is_refused_and_the_tools_are_named(self, given: Any) -> None:
        with pytest.raises(InvalidRequestError, match=r"one of the tools \('a', 'b'\)"):
            normalize_tool_choice(given, ["a", "b"])

    def test_a_call_cannot_be_demanded_without_tools(self) -> None:
        with pytest.raises(InvalidRequestError, match="there are no tools"):
            normalize_tool_choice("any", [])


class TestAsk:
    def test_none_leaves_the_tools_out(self) -> None:
        ask = ask_of(tools=[search], tool_choice="none")
        assert (ask.tools, ask.callable) == ((), ())

    def test_a_named_tool_is_told_among_all_and_callable_alone(self) -> None:
        ask = ask_of(tools=[search, weather], tool_choice="weather")
        assert [t.name for t in ask.tools] == ["search", "weather"]
        assert [t.name for t in ask.callable] == ["weather"]
        assert (ask.choice, ask.parallel) == ("required", False)

    def test_parallel(self) -> None:
        assert ask_of(tools=[search]).parallel
        assert not ask_of(tools=[search], parallel_tool_calls=False).parallel
        assert not ask_of(tools=[search], tool_choice="any").parallel
        assert ask_of(tools=[search], tool_choice="any", parallel_tool_calls=True).parallel
        assert ask_of(tools=[search], tool_choice="search", parallel_tool_calls=True).parallel

    @pytest.mark.parametrize("kwargs", [{"parallel_tool_calls": "yes"}, {"strict": 1}])
    def test_flags_are_flags(self, kwargs: Any) -> None:
        with pytest.raises(InvalidRequestError, match="must be True, False or None"):
            ask_of(tools=[search], **kwargs)


class TestAnswerFormat:
    def test_json_schema(self) -> None:
        answer = answer_format({"type": "json_schema", "json_schema": {"name": "point", "schema": JSON_SCHEMA}})
        assert answer is not None and answer.section is not None
        assert answer.schema == {**JSON_SCHEMA, "additionalProperties": False}
        assert '"required": ["x"]' in answer.section

    def test_strict_false_leaves_objects_open(self) -> None:
        answer = answer_format(
            {"type": "json_schema", "json_schema": {"name": "p", "schema": JSON_SCHEMA, "strict": False}}
        )
        assert answer is not None and answer.schema == JSON_SCHEMA

    def test_a_pydantic_class(self) -> None:
        answer = answer_format(Person)
        assert answer is not None and set(answer.schema["properties"]) == {"name", "age"}  # type: ignore[index]

    def test_text_and_none_are_no_format(self) -> None:
        assert answer_format(None) is None and answer_format({"type": "text"}) is None

    def test_other_grammars(self) -> None:
        for response_format in (
            {"type": "regex", "pattern": "[0-9]+"},
            {"type": "choice", "choices": ["yes", "no"]},
            {"type": "grammar", "grammar": 'start: "a" | "b"'},
        ):
            answer = answer_format(response_format)
            assert answer is not None and answer.grammar is not None

    @pytest.mark.parametrize(
        ("response_format", "message"),
        [
            ("json", "one of text, json_object"),
            ({"type": "xml"}, "one of text, json_object"),
            ({"type": "json_schema"}, "needs a schema"),
            ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "what"}}}, "response_format"),
            ({"type": "choice", "choices": "yes"}, "list of strings"),
            ({"type": "choice", "choices": []}, "choice"),
            ({"type": "regex", "pattern": "("}, "regex|expression"),
        ],
    )
    def test_what_is_wrong_is_named(self, response_format: Any, message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            answer_format(response_format)

    @pytest.mark.parametrize(
        "schema", [Person, OldPerson, Place, JSON_SCHEMA, {"name": "point", "schema": JSON_SCHEMA}]
    )
    def test_schemas_of_every_kind(self, schema: Any) -> None:
        _, converted = answer_schema(schema)
        assert converted["type"] == "object" and converted["properties"]

    def test_no_schema(self) -> None:
        with pytest.raises(InvalidRequestError, match="cannot make a JSON schema of 3"):
            answer_schema(3)


class TestClosed:
    def test_objects_with_properties_are_closed_at_every_depth(self) -> None:
        inner = {"type": "object", "properties": {"a": {"type": "string"}}}
        shut = {**inner, "additionalProperties": False}
        schema = {
            "type": "object",
            "properties": {
                "properties": inner,
                "list": {"type": "array", "items": inner},
                "any": {"anyOf": [inner, {"type": "null"}]},
            },
            "$defs": {"d": inner},
        }
        assert closed(schema) == {
            "type": "object",
            "properties": {
                "properties": shut,
                "list": {"type": "array", "items": shut},
                "any": {"anyOf": [shut, {"type": "null"}]},
            },
            "$defs": {"d": shut},
            "additionalProperties": False,
        }

    @pytest.mark.parametrize(
        "schema",
        [
            True,
            {"type": "object"},
            {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}},
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "properties": {"c": {}}},
            {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        ],
    )
    def test_what_says_itself_or_cannot_be_closed_stays(self, schema: Any) -> None:
        assert closed(schema) == schema
