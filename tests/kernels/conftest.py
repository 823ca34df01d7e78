"""Every backend and instruction set that can run here, one test each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_cases import Backend, backends


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``backend`` means each of them and ``isa`` those of the CPU kernels; a test may list its cases itself.

    Not ``params`` of the fixtures: to know them may compile the kernels, which is for tests that want them only.
    """
    listed = [name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])]
    for fixture in ("backend", "isa"):
        if fixture in metafunc.fixturenames and fixture not in listed:
            metafunc.parametrize(fixture, backends(cpu_only=fixture == "isa"), indirect=True, ids=str)


def _names(names: str | tuple[str, ...]) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend, forced for the test."""
    with request.param.use():
        yield request.param


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """An instruction set of the CPU kernels, which are forced for the test."""
    with request.param.use():
        yield request.param.isa
