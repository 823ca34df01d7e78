"""Which format a model writes: by name, or by the marks in its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import meta

from polykv.errors import InvalidRequestError
from polykv_agents.tool_calls.base import ToolFormat
from polykv_agents.tool_calls.hermes import Hermes
from polykv_agents.tool_calls.llama3_json import Llama3Json
from polykv_agents.tool_calls.plain_json import PlainJson

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {tool_format.name: tool_format for tool_format in (Hermes(), Llama3Json(), PlainJson())}
)
"""Every format by name."""

_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary',), "llama3_json"),
)


def get_format(name: str) -> ToolFormat:
    """The format of a name.

    Raises:
        InvalidRequestError: there is none.
    """
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        known = ", ".join(sorted(FORMATS))
        raise InvalidRequestError(f"there is no tool-call format {name!r}; known are: {known}") from None


def detect_format(chat_template: str | None, tokenizer: Any = None) -> ToolFormat:
    """The format that a model's chat template writes calls in, by its marks; ``hermes`` if there are none."""
    for signs, name in _SIGNS:
        if chat_template and all(sign in chat_template for sign in signs):
            return FORMATS[name]
    return FORMATS["hermes"]


def template_takes_tools(chat_template: str | None) -> bool:
    """Whether a chat template does anything with ``tools``."""
    if not chat_template:
        return False
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(chat_template)
    except jinja2.TemplateSyntaxError:
        return "tools" in chat_template
    return "tools" in meta.find_undeclared_variables(tree)
