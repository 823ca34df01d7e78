"""Most tests here count the rows and segments of what they named; those of the prefix cache turn it on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_prefix_cache_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polykv.engine.engine.PREFIX_CACHE", False)
