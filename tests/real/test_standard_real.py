"""LangChain's standard tests on SmolLM2-135M; expected to fail is only what asks for a wiser model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from polykv_agents import ChatPolyKV

pytestmark = pytest.mark.real


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
