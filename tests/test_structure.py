"""Imports run downwards only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up; a package may import itself and what stands before it.
LAYERS = (
    "polykv_kernels",
    "polykv.errors",
    "polykv.codecs",
    "polykv.models",
    "polykv.pool",
    "polykv.engine",
    "polykv.evaluation",
    "polykv.agents",
    "polykv.cli",
    "polykv_agents",
)
# models/cache.py names these in annotations only
ALLOWED = {("polykv.models", "polykv.pool")}


def layer_of(module: str) -> str | None:
    return next((layer for layer in LAYERS if module == layer or module.startswith(layer + ".")), None)


def imports(path: Path, *, at_run_time: bool) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if at_run_time and id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def files() -> list[tuple[str, Path]]:
    found = []
    for base, folder in ((ROOT, "polykv"), (ROOT, "polykv_agents"), (ROOT / "kernels", "polykv_kernels")):
        for path in sorted((base / folder).rglob("*.py")):
            found.append((".".join(path.relative_to(base).with_suffix("").parts), path))
    return found


@pytest.mark.parametrize(("module", "path"), files(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_module_imports_only_what_stands_below_it(module: str, path: Path) -> None:
    own = layer_of(module)
    if own is None:  # polykv/__init__.py gathers everything of its package
        return
    for at_run_time in (True, False):
        for name in imports(path, at_run_time=at_run_time):
            other = layer_of(name)
            if other is None or other == own or (not at_run_time and (own, other) in ALLOWED):
                continue
            assert LAYERS.index(other) < LAYERS.index(own), f"{module} imports {name}"


@pytest.mark.parametrize(("module", "path"), files(), ids=lambda value: value if isinstance(value, str) else "")
def test_only_the_agents_package_knows_langchain(module: str, path: Path) -> None:
    if not module.startswith("polykv_agents"):
        assert not {
            n for n in imports(path, at_run_time=False) if n.split(".")[0].startswith(("langchain", "langgraph"))
        }
