"""Fixtures of the chat-model tests; each file makes its own ``llm`` and names its own ``DOCUMENT``."""

from __future__ import annotations

import pytest

from polykv_agents import ChatPolyKV, SharedContext


@pytest.fixture
def ctx(llm: ChatPolyKV, request: pytest.FixtureRequest) -> SharedContext:
    """The file's document, shared."""
    return llm.share(request.module.DOCUMENT)


@pytest.fixture
def agent(llm: ChatPolyKV, ctx: SharedContext) -> ChatPolyKV:
    """A reader of it."""
    return llm.with_context(ctx)
