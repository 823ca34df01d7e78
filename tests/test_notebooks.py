"""The notebooks run on the real model, twice in one kernel, and their stored outputs are small and clean."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
QUICK = "01_quickstart.ipynb"
MACHINE_PATH = re.compile(r"(/home/|/root/|/Users/|/tmp/|site-packages|\.venv)")
MAX_BYTES = 400_000


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel of this very interpreter, whatever kernels the user has installed."""
    spec = tmp_path / "kernels" / "polykv-test"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "test", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    return "polykv-test"


def load(name: str) -> Any:
    return nbformat.read(FOLDER / name, as_version=4)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def run(notebook: Any, kernel: str) -> Any:
    NotebookClient(notebook, timeout=500, kernel_name=kernel, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return notebook


@pytest.mark.real
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == QUICK else pytest.mark.full) for n in NOTEBOOKS])
def test_it_runs(name: str, kernel: str) -> None:
    done = run(load(name), kernel)
    assert not [output for output in outputs(done) if output.output_type == "error"]
    assert all(output.get("name") != "stderr" for output in outputs(done)), "no warnings"


@pytest.mark.real
@pytest.mark.full
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_can_be_run_twice(name: str, kernel: str) -> None:
    notebook = load(name)
    again = [nbformat.v4.new_code_cell(cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells += again
    done = run(notebook, kernel)
    assert all(output.get("name") != "stderr" for output in outputs(done)), "no warnings the second time"


def test_there_are_the_four() -> None:
    assert [name[:2] for name in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_stored_is_whole_small_and_clean(name: str) -> None:
    notebook = load(name)
    nbformat.validate(notebook)
    assert os.path.getsize(FOLDER / name) < MAX_BYTES
    assert outputs(notebook) and not [
        o for o in outputs(notebook) if o.output_type == "error" or o.get("name") == "stderr"
    ]
    shown = outputs(notebook)
    for output in shown:
        output.get("data", {}).pop("image/png", None)
    text = json.dumps([notebook.metadata, shown, [[cell.source, cell.metadata] for cell in notebook.cells]])
    assert not MACHINE_PATH.search(text)
    assert not any(cell.metadata for cell in notebook.cells), "no times of a run"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count == number for number, cell in enumerate(ran, start=1)), "run from top to bottom"
