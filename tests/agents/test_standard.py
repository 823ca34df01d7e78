"""LangChain's standard tests over the scripted model: none may fail, be skipped by hand or be expected to fail.

The script is what a wise model would say to the suite's questions; all else is the real stack.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from polykv_agents import ChatPolyKV
from polykv_agents.testing import Script, make_model, scripted_tokenizer

JOKE = {"setup": "Why do cats not play poker?", "punchline": "Too many cheetahs."}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "pirate"},
    "my_adder_tool": {"a": 3, "b": 4},
    "get_weather": {"location": "San Francisco, CA"},
    "color_picker": {"fav_color": "green"},
    "Joke": JOKE,
    "JokeDict": JOKE,
}
DOCUMENT = "The carrier bears the risk until the goods are handed over to the buyer. " * 4


def wise(prompt: str) -> str:
    """The answer to a question of the suite."""
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, flags=re.DOTALL)
    question = turns[-1][1]
    tools = re.findall(r'^\{"name": "(\w+)", ', prompt, flags=re.MULTILINE)
    must_call = "Answer with a call" in prompt or "Answer with calls" in prompt
    if tools and not question.startswith("Result of") and (must_call or "weather" in question):
        name = next((tool for tool in tools if tool in question), tools[0])
        arguments = ARGUMENTS.get(name)
        if name == "unicode_customer":
            arguments = {"customer_name": re.findall("'(.+?)'", question)[0], "description": "a company"}
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
    if "joke" in question:
        return json.dumps(JOKE)
    return "I am well, and so, I hope, are you."


@pytest.fixture(scope="module", autouse=True)
def models() -> Any:
    """Both models, so that the suite's many short-lived chat models share engines and weights."""
    tokenizer = scripted_tokenizer()
    keep = [make_model(Script(wise), tokenizer) for _ in range(2)]
    MODELS.extend(keep)
    yield
    MODELS.clear()
    for llm in keep:
        llm.close()


MODELS: list[ChatPolyKV] = []
numbers = itertools.count()


class Settings:
    """What this model can do, for both suites."""

    method = "json_schema"

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPolyKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODELS[0].model, "max_tokens": 1000}

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": self.method}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return MODELS[1].model

    @property
    def returns_usage_metadata(self) -> bool:
        return True


class TestUnit(Settings, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODELS[0].model}


class StandardTests(Settings, ChatModelIntegrationTests):
    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {}

    @property
    def supported_usage_metadata_details(self) -> Any:
        both = ["cache_read_input", "cache_creation_input"]
        return {"invoke": both, "stream": both}

    def _ask(self, cold: bool, stream: bool) -> AIMessage:
        llm = ChatPolyKV(**self.chat_model_params)
        block = {"type": "text", "text": f"{next(numbers)} {DOCUMENT}", "cache_control": {"type": "ephemeral"}}
        messages = [SystemMessage([block]), HumanMessage("Who bears the risk?")]
        if not cold:
            llm.invoke(messages)
        if not stream:
            return llm.invoke(messages)
        chunks = list(llm.stream(messages))
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        return total

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        message = self._ask(True, stream)
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_creation"] > 0
        return message

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        message = self._ask(False, stream)
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message


class TestJsonSchema(StandardTests):
    method = "json_schema"


class TestFunctionCalling(StandardTests):
    method = "function_calling"


class TestJsonMode(StandardTests):
    method = "json_mode"
