"""Fixtures of the chat-model tests; each file makes its own ``llm`` and names its own ``DOCUMENT``."""

from __future__ import annotations

import pytest

from polykv_agents import ChatPolyKV, SharedContext


@pytest.fixture(autouse=True)
def _no_prefix_cache_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests here compare whole messages, counts of what came from the pool included, of calls that are repeated."""
    monkeypatch.setattr("polykv.engine.engine.PREFIX_CACHE", False)


@pytest.fixture
def ctx(llm: ChatPolyKV, request: pytest.FixtureRequest) -> SharedContext:
    """The file's document, shared."""
    return llm.share(request.module.DOCUMENT)


@pytest.fixture
def agent(llm: ChatPolyKV, ctx: SharedContext) -> ChatPolyKV:
    """A reader of it."""
    return llm.with_context(ctx)
