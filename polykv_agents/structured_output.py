"""Answers as objects: ``with_structured_output``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

from polykv.errors import InvalidRequestError
from polykv_agents.tools import answer_schema, tool_schemas

if TYPE_CHECKING:
    from polykv_agents.chat_models import ChatPolyKV

Method = Literal["json_schema", "function_calling", "json_mode"]
METHODS: tuple[str, ...] = get_args(Method)


def structured_output(
    llm: ChatPolyKV, schema: Any, *, method: str, strict: bool | None, include_raw: bool, bound: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """See :meth:`ChatPolyKV.with_structured_output`."""
    if method not in METHODS:
        raise InvalidRequestError(f"method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    if schema is None and method != "json_mode":
        raise InvalidRequestError(f"method {method!r} needs a schema; only json_mode goes without")
    if method == "json_mode" and strict:
        raise InvalidRequestError(
            "strict=True goes with json_schema or function_calling; json_mode knows no strictness"
        )
    as_object = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: BaseOutputParser[Any]
    asked: dict[str, Any] = {
        "ls_structured_output_format": {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    }
    if method == "function_calling":
        if isinstance(schema, dict) and schema.get("type", "object") not in ("object", "function"):
            raise InvalidRequestError(
                f"a function's arguments are an object, and the schema is of type {schema['type']!r}; use method='json_schema'"
            )
        function = tool_schemas([schema], strict=strict)[0]
        name = function["function"]["name"]
        model = llm.bind_tools([function], tool_choice=name, parallel_tool_calls=False, strict=strict, **asked, **bound)
        parser = (
            PydanticToolsParser(tools=[schema], first_tool_only=True)
            if as_object
            else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        )
    else:
        response_format: dict[str, Any] = {"type": "json_object"}
        if schema is not None:
            name, json_schema = answer_schema(schema)
            response_format = (
                {"type": "json_object", "schema": json_schema}
                if method == "json_mode"
                else {"type": "json_schema", "json_schema": {"name": name, "schema": json_schema, "strict": strict}}
            )
        model = llm.bind_tools([], response_format=response_format, **asked, **bound)
        parser = PydanticOutputParser(pydantic_object=schema) if as_object else JsonOutputParser()
    checked: Runnable[Any, Any] = RunnableGenerator(_finished, _afinished)
    reader = checked | parser
    if not include_raw:
        return model | reader
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | reader, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _check(message: AIMessage | None) -> None:
    """The parsers read JSON that was cut off as if it were whole, so an answer that did not end is refused before."""
    if message is None:
        return
    reason = message.response_metadata.get("finish_reason")
    if reason == "length":
        raise OutputParserException(
            "the answer was cut off by max_tokens before it was whole; raise max_tokens",
            llm_output=str(message.content),
        )
    if message.invalid_tool_calls:
        call = message.invalid_tool_calls[0]
        raise OutputParserException(
            f"the answer's call is not whole: {call.get('error') or 'a stop string cut it'}",
            llm_output=call.get("args"),
        )


def _finished(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    total: Any = None
    for message in messages:
        total = message if total is None or not isinstance(message, AIMessageChunk) else total + message
        if not isinstance(message, AIMessageChunk):
            _check(message)
        yield message
    _check(total)


async def _afinished(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    total: Any = None
    async for message in messages:
        total = message if total is None or not isinstance(message, AIMessageChunk) else total + message
        if not isinstance(message, AIMessageChunk):
            _check(message)
        yield message
    _check(total)
