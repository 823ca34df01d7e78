"""Which format a model writes: by name, or by the marks in its chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import meta, nodes

from polykv.errors import InvalidRequestError
from polykv_agents.tool_calls.base import ToolFormat
from polykv_agents.tool_calls.gemma import Gemma, function_gemma, gemma4
from polykv_agents.tool_calls.hermes import Hermes
from polykv_agents.tool_calls.llama3_json import Llama3Json
from polykv_agents.tool_calls.llama_pythonic import LlamaPythonic
from polykv_agents.tool_calls.mistral import Mistral
from polykv_agents.tool_calls.phi import Phi
from polykv_agents.tool_calls.plain_json import PlainJson
from polykv_agents.tool_calls.qwen3_coder import Qwen3Coder
from polykv_agents.tool_calls.response_template import from_response_template

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        tool_format.name: tool_format
        for tool_format in (
            Hermes(),
            Qwen3Coder(),
            Llama3Json(),
            LlamaPythonic(),
            Mistral(),
            Mistral("mistral_args", separate=True),
            Gemma(),
            function_gemma(),
            gemma4(),
            Phi(),
            PlainJson(),
        )
    }
)
"""Every format by name."""

# All signs of a row in a template's text; the first such row counts.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<start_function_call>",), "function_gemma"),
    (("<|tool_call>",), "gemma4"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>",), "phi"),
    (("<|tool|>",), "phi"),
    (("functools[",), "phi"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "llama_pythonic"),
    (("func_name1(",), "llama_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary',), "llama3_json"),
)
_TOOLS_IN_TAG = re.compile(r"\{[{%](?:(?![}%]\}).)*\btools\b", re.DOTALL)


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
    """The format that a model writes, by the marks in its chat template, or in its tokenizer's ``response_template``.

    Args:
        chat_template: the template's text; None: the model has none.
        tokenizer: of the model; its ``response_template`` counts where the chat template shows no marks.

    Returns:
        A format of :data:`FORMATS`; one made from the ``response_template`` if that is all there is; ``gemma`` for a template of
        Gemma's that knows no tools; else ``hermes``.
    """
    template = chat_template or ""
    response_template = getattr(tokenizer, "response_template", None)
    if not isinstance(response_template, Mapping) or "tool_calls" not in response_template.get("fields", {}):
        response_template = None
    marks = [] if response_template is None else list(_strings(response_template["fields"]["tool_calls"]))
    for text in (template, *marks):
        text = text.replace("\\", "")  # marks may stand in a regular expression, or in a string of a template
        for signs, name in _SIGNS:
            if all(sign in text for sign in signs):
                return FORMATS[name]
    if response_template is not None:
        return from_response_template(response_template)
    if "<start_of_turn>" in template and not template_takes_tools(template):
        return FORMATS["gemma"]
    return FORMATS["hermes"]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _strings(part)


def template_takes_tools(chat_template: str | None) -> bool:
    """Whether a chat template does anything with ``tools``."""
    if not chat_template:
        return False
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(chat_template)
    except jinja2.TemplateSyntaxError:
        # Tags that only transformers knows ({% generation %}): look at the text.
        return _TOOLS_IN_TAG.search(chat_template) is not None
    if "tools" in meta.find_undeclared_variables(tree):
        return True
    # A template may give tools a default first ({% if tools is not defined %}{% set tools = none %}), which declares it.
    return any(test.name == "defined" and _is_tools(test.node) for test in tree.find_all(nodes.Test))


def _is_tools(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "tools"
