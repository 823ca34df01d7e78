"""The attention benchmark runs, refuses wrong results and stays within its memory."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from polykv.codecs import get_codec

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "attention.py"
KEYS = {"shape", "tokens", "agents", "threads", "backend", "ours_s", "stacked_s", "independent_s", "roofline_s"}


@pytest.fixture(scope="module")
def attention() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_attention", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def tiny(attention: ModuleType, budget: int = 2**28, agents: int = 3) -> "attention.Operands":
    shape = attention.Shape(num_heads=4, num_kv_heads=2, head_dim=32, num_layers=1)
    return attention.Operands.make(shape, 200, get_codec("k8v3"), agents, budget, 2**20)


@pytest.mark.parametrize("agents", [1, 3])
def test_every_form_of_the_baselines_computes_what_the_segment_holds(attention, agents):
    operands = tiny(attention)
    q = operands.queries(agents)
    want, _ = attention.oracle(operands, q)
    forms = attention.stacked_forms(operands, q) | {
        f"independent {name}": form for name, form in attention.independent_forms(operands, q).items()
    }
    assert {"grouped", "gqa", "independent grouped", "independent gqa", "independent expanded"} <= forms.keys()
    for name, form in forms.items():
        attention.check(name, form.output(), want)


def test_a_wrong_result_is_not_timed(attention):
    want = torch.ones(3)
    attention.check("ours", want + 1e-6, want)
    for wrong in (want * 1.001, want * float("nan"), torch.ones(4)):
        with pytest.raises(attention.WrongResult, match="ours"):
            attention.check("ours", wrong, want)


def test_operands_stay_within_the_budget(attention):
    slab = 2 * 4 * 2 * 200 * 32
    budget = 10 * slab
    operands = tiny(attention, budget, agents=64)
    dense = operands.keys.nbytes + operands.values.nbytes
    assert dense + sum(segment.nbytes for segment in operands.segments) <= budget
    assert operands.keys.shape[0] < 64  # so the independent baseline is skipped
    with pytest.raises(attention.OverBudget):
        tiny(attention, 5 * slab)


def test_turns_cycle_through_the_copies(attention):
    seen: list[int] = []
    system = attention.System(seen.append, copies=5, calls_a_turn=3)
    for _ in range(3):
        system.turn()
    assert seen == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_the_slope_of_a_power_law_is_its_exponent(attention):
    assert attention.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


@pytest.mark.slow
def test_it_writes_a_row_for_each_backend_and_configuration(attention, tmp_path, monkeypatch, capsys):
    arguments = "--tokens 64 128 --agents 1 2 --threads 1 --backends reference --rounds 1 --memory 0.5"
    files = ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "curves.png")]
    monkeypatch.setattr(sys, "argv", ["attention.py", "--quick", *arguments.split(), *files])
    attention.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["tokens"], r["agents"]) for r in rows] == [(64, 1), (64, 2), (128, 1), (128, 2)]
    for row in rows:
        assert row.keys() >= KEYS
        assert (row["shape"], row["threads"], row["backend"]) == ("smollm2-135m", 1, "reference")
        assert all(row[key] > 0 for key in KEYS if key.endswith("_s"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "log-log slope" in out and "not measured" in out
