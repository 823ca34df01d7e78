"""The scripts of examples/ run on the real model as a reader would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SHOWN = {
    "migrating.py": ["cache_creation 0, cache_read 1"],
    "map_reduce.py": ["read 3 times", "contexts left in the pool: 0"],
    "structured_extraction.py": [
        "json_schema: Estate(",
        "function_calling: Estate(",
        "json_mode: Estate(",
        "choice: a ",
    ],
    "supervisor_with_tools.py": ["supervisor: the ", "tokens read from the pool", "one copy for all"],
    "swarm_handoff.py": [
        "historian: transfer_to_accountant",
        "accountant: transfer_to_historian",
        "contexts in the pool: 1",
    ],
}
QUICK = "migrating.py"

pytestmark = pytest.mark.real


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == QUICK else pytest.mark.full) for n in SHOWN])
def test_an_example_shows_what_it_is_about(name: str) -> None:
    output = run(name)
    assert [text for text in SHOWN[name] if text not in output] == [], output


@pytest.mark.full
def test_a_draft_is_resumed_by_another_process(tmp_path: Path) -> None:
    path = str(tmp_path / "state.sqlite")
    drafted = run("resume_with_sqlite.py", "--db", path)
    published = run("resume_with_sqlite.py", "--db", path, "--approve")
    draft = drafted.partition("draft: ")[2].splitlines()[0]
    assert len(draft) > 20 and published.strip() == f"published: {draft}"


def test_every_example_is_run() -> None:
    # make demo and tests/real run the research team
    assert {p.name for p in EXAMPLES.glob("*.py")} == {*SHOWN, "research_team.py", "resume_with_sqlite.py"}
