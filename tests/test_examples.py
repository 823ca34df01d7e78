"""The scripts of examples/ run on the real model as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SHOWN = {
    "migrating.py": [r"cache_creation [1-9]\d*, cache_read 0", r"cache_creation 0, cache_read [1-9]"],
    "map_reduce.py": ["read 3 times", "contexts left in the pool: 0"],
    "structured_extraction.py": [
        r"json_schema: Estate\(.*\[[1-9]\d* tokens read",
        r"function_calling: Estate\(.*\[[1-9]\d* tokens read",
        r"json_mode: Estate\(.*\[[1-9]\d* tokens read",
        "choice: a (family|ship)",
    ],
    "supervisor_with_tools.py": [
        r"supervisor: (calculate|find_word)\(\{\}\)   \[[1-9]\d* tokens read from the pool\]",
        r"(accountant: add|librarian: search)\(\{.+\}\)   \[[1-9]\d* tokens read from the pool\]",
        r"  (add|search): .",
        r"supervisor: [A-Z].*\.   \[[1-9]",
        r"shared: \d+ tokens in .* one copy for all",
    ],
    "swarm_handoff.py": [
        r"historian: transfer_to_accountant   \[[1-9]",
        r"accountant: transfer_to_historian   \[[1-9]",
        "contexts in the pool: 1",
    ],
}
QUICK = "migrating.py"

pytestmark = pytest.mark.real


def start(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def run(name: str, *arguments: str) -> str:
    done = start(name, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == QUICK else pytest.mark.full) for n in SHOWN])
def test_an_example_shows_what_it_is_about(name: str) -> None:
    output = run(name)
    assert [text for text in SHOWN[name] if re.search(text, output) is None] == [], output


@pytest.mark.full
def test_a_draft_is_resumed_by_another_process(tmp_path: Path) -> None:
    path = str(tmp_path / "state.sqlite")
    drafted = run("resume_with_sqlite.py", "--db", path, "--thread", "a")
    draft = drafted.partition("draft: ")[2].splitlines()[0]
    assert len(draft) > 20 and ": alive" in drafted

    other = start("resume_with_sqlite.py", "--db", path, "--thread", "b", "--approve")
    assert other.returncode == 2 and "no draft of thread 'b' waits" in other.stderr

    published = run("resume_with_sqlite.py", "--db", path, "--thread", "a", "--approve")
    assert f"published: {draft}" in published.splitlines() and "made again from the text" in published


def test_every_example_is_run() -> None:
    # make demo and tests/real run the research team
    assert {p.name for p in EXAMPLES.glob("*.py")} == {*SHOWN, "research_team.py", "resume_with_sqlite.py"}
