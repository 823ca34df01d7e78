"""LangChain's standard tests on SmolLM2-135M; expected to fail is only what asks for a wiser model."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from polykv_agents import ChatPolyKV

pytestmark = pytest.mark.real


WITHOUT_NETWORK = """
import sys

asked = []


def watch(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        asked.append((event, args[-1] if event == "socket.connect" else args[0]))
        raise OSError("no network here")


sys.addaudithook(watch)
from polykv_agents import ChatPolyKV


def search(query: str) -> str:
    \"\"\"Search the archive.\"\"\"
    return query


llm = ChatPolyKV(max_tokens=12)
reader = llm.with_context(llm.share("The carrier bears the risk. " * 10))
assert reader.invoke("Who bears the risk?").usage_metadata["input_token_details"]["cache_read"] > 0
assert reader.bind_tools([search], tool_choice="any").invoke("Find it.").response_metadata["finish_reason"]
assert not asked, asked
"""


@pytest.fixture(scope="module", autouse=True)
def keep() -> Any:
    """The suite makes many short-lived chat models: one that stays keeps the weights loaded."""
    llm = ChatPolyKV()
    llm.load()
    yield
    llm.close()


class Settings:
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPolyKV

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # one real model is packaged; the scripted suite overrides

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}


class TestUnit(Settings, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}


class TestIntegration(Settings, ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        # a model of this size repeats itself without end at temperature 0; the penalty looks at the answer alone
        return {"model": "smollm2-135m", "temperature": 0, "max_tokens": 300, "frequency_penalty": 0.3}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {}

    @pytest.mark.xfail(
        reason="left to choose, a model of 135M parameters invents the weather instead of asking for it", strict=True
    )
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)


def test_the_packaged_model_never_asks_the_network() -> None:
    """Neither to load nor to answer, though nothing tells it to stay offline."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-2000:]
