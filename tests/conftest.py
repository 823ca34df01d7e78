"""Tiny random models of every supported family, a byte-level tokenizer for them, and the packaged real model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "real_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)


DEFAULT_THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    # tiny matrices are slower on several threads, much slower when other processes want the cores too
    torch.set_num_threads(DEFAULT_THREADS if "real_model" in request.fixturenames else 1)


@pytest.fixture(params=FAMILIES, ids=lambda family: f"{family[0]}-{'sliding' if family[1] else 'full'}")
def family_model(request: pytest.FixtureRequest) -> Any:
    """A tiny model of each family, with full and with sliding attention where the family has it."""
    name, window = request.param
    return tiny_model(name, window)


@pytest.fixture
def tiny_llama() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level tokenizer with a ChatML template, vocabulary below the tiny models' size."""
    return tiny_tokenizer()


@pytest.fixture
def make_engine(tokenizer: Any) -> Iterator[Callable[..., Any]]:
    """Makes engines, and closes them after the test."""
    from polykv import Engine

    engines: list[Engine] = []

    def make(model: Any, **options: Any) -> Engine:
        engines.append(Engine(model, tokenizer, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def real_model() -> tuple[Any, Any]:
    """``(model, tokenizer)`` of SmolLM2-135M-Instruct in float32."""
    from polykv import load_model

    return load_model("smollm2-135m")
