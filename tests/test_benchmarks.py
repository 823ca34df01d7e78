"""The benchmarks run, refuse wrong results and say what they did not measure."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer

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


END_TO_END = Path(__file__).parents[1] / "benchmarks" / "end_to_end.py"
ROW_KEYS = {
    "system",
    "agents",
    "context_tokens",
    "cold_s",
    "first_ttft_s",
    "next_ttft_s",
    "decode_tokens_per_s",
    "peak_extra_bytes",
    "wall_s",
}


@pytest.fixture(scope="module")
def end_to_end() -> ModuleType:
    sys.path.insert(0, str(END_TO_END.parent))  # as for a script that is run
    spec = importlib.util.spec_from_file_location("benchmark_end_to_end", END_TO_END)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.full
def test_end_to_end_measures_every_system_it_can(end_to_end, tiny_folder, tmp_path, capsys):
    systems = "static exact k8v3 k8v3-int8 k8v3-deterministic static-generate dynamic sequential llama.cpp-f16 llama.cpp-native-f16"
    arguments = f"--agents 1 2 --tokens 96 --new-tokens 6 --threads 1 --json {tmp_path / 'rows.json'}"
    options = end_to_end.parse(["--model", str(tiny_folder), *arguments.split(), "--systems", *systems.split()])
    assert end_to_end.run(options, lambda task: list(end_to_end.measure(task))) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["system"], r["agents"]) for r in rows] == [(s, n) for s in systems.split() for n in (1, 2)]
    assert all(row.keys() >= ROW_KEYS and "answers" not in row for row in rows)
    measured = [row for row in rows if not row["note"].startswith("not run")]
    assert {r["system"] for r in measured} >= {"static", "exact", "k8v3", "dynamic", "sequential", "static-generate"}
    for row in measured:
        assert 90 <= row["context_tokens"] <= 96
        assert all(row[key] > 0 for key in ROW_KEYS if key.endswith("_s")), row
    assert all(row["correct"] for row in measured if row["system"] in ("static", "exact", "dynamic", "sequential"))
    out = capsys.readouterr().out
    assert "later, alone s" in out and "decode against batched StaticCache" in out
    assert "llama.cpp-native-f16: not run: build llama.cpp natively" in out


@pytest.mark.slow
@pytest.mark.parametrize("system", ["continuous", "chat-huggingface"])
def test_further_peers_give_the_answers_of_the_reference(end_to_end, tiny_folder, system):
    from _end_to_end.measuring import Task
    from _end_to_end.report import compare_answers

    if system == "chat-huggingface":
        pytest.importorskip("langchain_huggingface")
    tasks = [Task(name, str(tiny_folder), (2,), 96, 6, 1) for name in ("static", system)]
    rows = [row for task in tasks for row in end_to_end.measure(task)]
    compare_answers(rows, lambda ids: "text")
    assert all(row.measured and row.wall_s > 0 for row in rows), rows[1].note
    assert len(rows[1].answers or rows[1].texts) == 2


def test_a_missing_peer_is_a_row_that_says_how_to_get_it(end_to_end, monkeypatch):
    from _end_to_end import llama_peers
    from _end_to_end.measuring import Task

    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    monkeypatch.setattr(llama_peers, "gguf", lambda task: Path("model.gguf"))
    (row,) = end_to_end.measure(Task("llama.cpp-f16", "smollm2-135m", (4,), 100, 8, 1))
    assert not row.measured and row.note == "not run: pip install xllamacpp (make bench-peers)"


def test_wrong_answers_fail_the_run_and_near_ties_do_not(end_to_end):
    from _end_to_end.measuring import Row
    from _end_to_end.report import compare_answers

    reference = Row("static", 2, answers=[[1, 2, 3], [4, 5, 6]], margins=[[1.0, 1e-5, 1.0], [1.0, 1.0, 1.0]])
    tied, wrong = Row("exact", 2, answers=[[1, 9, 9], [4, 5, 6]]), Row("dynamic", 1, answers=[[1, 2, 9]])
    lossy, text = Row("k8v3", 2, answers=[[9, 9, 9], [4, 5, 6]]), Row("llama.cpp-f16", 1, texts=["ab"])
    compare_answers([reference, tied, wrong, lossy, text], lambda ids: "abcd")
    assert (reference.correct, tied.correct, wrong.correct, lossy.correct) == (True, True, False, None)
    assert tied.agreement == pytest.approx((1 / 3 + 1) / 2)
    assert (lossy.agreement, text.agreement) == (0.5, 0.5)


def test_the_table_marks_what_is_extrapolated_and_the_goals_what_is_missed(end_to_end):
    from _end_to_end.measuring import Row
    from _end_to_end.report import goals, table

    rows = [
        Row("static", 15, 4000, decode_tokens_per_s=50, live_bytes=1e9),
        Row("k8v3", 15, 4000, decode_tokens_per_s=150, live_bytes=2e8, wall_s=20),
        Row("sequential", 15, 4000, decode_tokens_per_s=20, wall_s=300, extrapolated=["wall_s"], note="2 agents run"),
        Row("llama.cpp-f16", 15, note="not run: reasons"),
    ]
    text = table(rows)
    assert "300.0*" in text and "sequential: 2 agents run" in text and "not run: reasons (N = 15)" in text
    stated = {line.split("|")[1].strip(): line for line in goals(rows).splitlines()}
    assert "| 3 | met |" in stated["N = 15: decode against batched StaticCache"]
    assert "| 7.5 | NOT MET |" in stated["N = 15: decode against sequential generate"]
    assert "not measured" in stated["N = 15: decode against llama.cpp, native, the better of f16 and q8_0"]


def test_decode_rate_is_of_the_time_in_which_all_agents_decode(end_to_end):
    from _end_to_end.measuring import TokenTimes

    times = TokenTimes()
    times.started = {0: 0.0, 1: 0.0}
    times.times = {0: [1.0, 3.0, 3.5, 4.0, 4.5], 1: [3.0, 3.5, 4.0, 4.5, 4.6]}  # the second starts later
    assert times.step() == pytest.approx(0.5)
    assert times.decode_rate() == pytest.approx(4)
    assert (times.first, times.slowest_ttft, times.ttft(1)) == (1.0, 3.0, 3.0)


def test_lines_of_llama_batched_bench_are_found_among_others(end_to_end):
    from _end_to_end.llama_peers import parse_batched_bench

    output = 'loading {x}\n{"pp": 4000, "pl": 15, "t_pp": 12.5, "t_tg": 9.0, "speed_tg": 106.6}\nllama_perf: 1 {\n'
    assert parse_batched_bench(output)[15]["speed_tg"] == 106.6


def test_growth_times_the_shared_part_of_a_step(end_to_end, tiny_folder, tmp_path, capsys):
    arguments = "--growth --agents 1 3 --tokens 64 128 --threads 1 --ours exact"
    files = ["--json", str(tmp_path / "points.json"), "--plot", str(tmp_path / "growth.png")]
    assert end_to_end.main(["--model", str(tiny_folder), *arguments.split(), *files]) == 0
    points = json.loads((tmp_path / "points.json").read_text())
    assert [p["agents"] for p in points] == [1, 3, 1, 3]
    assert all(p["step_s"] > 0 and 0 < p["shared_share"] < 1 for p in points)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert "share of it spent in attention over the shared context" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--agents", "0"], ["--tokens", "10", "20"], ["--systems", "vllm"], ["--new-tokens", "1"]]
)
def test_end_to_end_refuses_what_it_cannot_measure(end_to_end, arguments):
    with pytest.raises(SystemExit):
        end_to_end.parse(arguments)


@pytest.fixture(scope="module")
def linear() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_linear", SCRIPT.with_name("linear.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_linear_benchmark_measures_every_system_and_refuses_wrong_results(linear, tmp_path, monkeypatch, capsys):
    systems = [s for s in linear.SYSTEMS if s != "mkldnn" or torch.backends.mkldnn.is_available()]
    arguments = ["--shape", "tiny", "--rows", "1", "5", "--threads", "1", "--rounds", "1", "--systems", *systems]
    monkeypatch.setattr(sys, "argv", ["linear.py", *arguments, "--json", str(tmp_path / "rows.json")])
    linear.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["rows"], r["system"]) for r in rows] == [(n, system) for n in (1, 5) for system in systems]
    assert all(r["ms"] > 0 and r["gflops"] > 0 and r["ratio"] > 0 for r in rows)
    assert "x torch" in capsys.readouterr().out
    with pytest.raises(linear.WrongResult, match="ours"):
        linear.check("ours", [torch.ones(3)], [torch.full((3,), 1.001)])
