"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_python_blocks(real_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert len(blocks) == 5
    monkeypatch.chdir(ROOT)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec", dont_inherit=True), namespace)
    printed = capsys.readouterr().out
    tokens = re.match(r"(\d+) tokens in (\d+) bytes", printed)
    assert tokens is not None
    assert int(tokens[1]) > 4000
    assert printed.splitlines()[1].endswith(f" {tokens[1]}"), "the answer's cache_read is the context's length"
    assert "[{'name': 'search', 'args': {'query': " in printed and "name='" in printed
    assert "15 x that" in printed
    first, second = (int(line) for line in printed.splitlines() if line.isdigit())
    assert first == 0 and second > 1000, "the second agent's prompt begins as the first one's"


def test_relative_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
