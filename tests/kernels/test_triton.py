"""The Triton backend without a GPU: kernels in Triton's interpreter, and compiled for GPUs that are not there.

Both run in processes of their own, since ``TRITON_INTERPRET`` is read when kernels are defined. What they cannot show,
that the compiled code computes the same on a GPU, is in ``test_triton_gpu.py``.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_cases import interpret_cases
from triton_cases.common import LAYOUTS, check, encode, oracle

from polykv_kernels import reference
from polykv_kernels import triton as backend
from polykv_kernels.triton import tiles
from polykv_kernels.triton.tiles import SplitRule, Tile, TileTable

FOLDER = Path(__file__).parent / "triton_cases"
INSTALLED = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not INSTALLED, reason="triton is not installed (pip install triton)")


def start(script: str, cache_folder: Path, **environment: str) -> list[dict[str, Any]]:
    """Runs a script to its end and reads its JSON lines."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / script)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "TRITON_CACHE_DIR": str(cache_folder),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=7200,
    )
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


# ----------------------------------------------------------------------------------------- without running triton


def test_the_package_imports_without_triton() -> None:
    code = (
        "import sys, torch; sys.modules['triton'] = None\n"
        "import polykv_kernels.triton as backend, polykv_kernels.triton.tiles\n"
        "reason = backend.unavailable_reason(torch.device('cuda'))\n"
        "assert reason == 'triton is not installed', reason"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


@pytest.mark.parametrize(
    "name",
    ["shared_attention", "ragged_attention", "merge_attention_states", "encode_keys_int8", "encode_values_lloyd3"],
)
def test_operations_take_the_arguments_of_the_reference(name: str) -> None:
    assert inspect.signature(getattr(backend, name)) == inspect.signature(getattr(reference, name))


@needs_triton
def test_what_is_unavailable_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "GPUs only" in (backend.unavailable_reason(torch.device("cpu")) or "")
    assert "mps" in (backend.unavailable_reason(torch.device("mps")) or "")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.unavailable_reason(torch.device("cpu")) is None


@needs_triton
@pytest.mark.parametrize(
    ("available", "capability", "reason"),
    [(False, (0, 0), "there is no GPU"), (True, (7, 5), "8.0"), (True, (8, 0), None), (True, (12, 0), None)],
)
def test_a_gpu_that_cannot_be_used_says_why(
    available: bool, capability: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    backend._gpu_reason.cache_clear()
    try:
        said = backend.unavailable_reason(torch.device("cuda", 0))
    finally:
        backend._gpu_reason.cache_clear()
    assert said is None if reason is None else reason in (said or "")


def test_what_is_unsupported_says_why() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for head_dim in (64, 128, 256):
            assert backend.supports(dtype, head_dim) is None
    for dtype in (torch.float32, torch.float64):
        assert str(dtype) in (backend.supports(dtype, 64) or "")
    for head_dim in (16, 32, 80, 96, 512):
        assert str(head_dim) in (backend.supports(torch.float16, head_dim) or "")
        assert str(head_dim) in (backend.supports(torch.float16, head_dim, encode=True) or "")
    assert backend.supports(torch.float32, 128, encode=True) is None
    assert "float64" in (backend.supports(torch.float64, 128, encode=True) or "")


def test_the_description_names_the_tiles() -> None:
    assert backend.describe()["tiles"] == str(tiles.tiles_file())


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "polykv_kernels.triton.autotune", "--output", "tiles.json"],
        [str(Path(__file__).parents[2] / "benchmarks" / "gpu_attention.py"), "--quick"],
    ],
    ids=["autotune", "benchmark"],
)
def test_what_measures_a_gpu_says_that_it_needs_one(command: list[str], tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert "torch.cuda.is_available() is false" in done.stderr
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------- the tile table

TABLE = tiles.read_table(tiles.TILES_FILE)
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_table_has_decode_and_prefill_tiles_for_every_head_dim(architecture: str) -> None:
    assert set(TABLE.tiles) == set(TABLE.splits) == set(ARCHITECTURES)
    for head_dim in backend.HEAD_DIMS:
        entries = TABLE.tiles[architecture][head_dim]
        sizes = [tile.block_m for tile in entries]
        assert sizes == sorted(set(sizes))
        assert sizes[0] == 16  # decode
        for tile in entries:
            assert tile.block_m >= 16 and tile.block_m & (tile.block_m - 1) == 0
            assert tile.num_warps in (1, 2, 4, 8) and tile.num_stages >= 1 and tile.block_n in (32, 64)
        assert TABLE.tile(architecture, head_dim, 1) == TABLE.tile(architecture, head_dim, 16) == entries[0]
        assert TABLE.tile(architecture, head_dim, 10**6) == entries[-1]
        assert TABLE.tile(architecture, head_dim, 17) == entries[min(1, len(entries) - 1)]


def test_splits_fill_the_processors_but_are_not_tiny() -> None:
    rule = SplitRule(programs_per_processor=2, min_tiles=4)
    assert rule.splits(tiles=64, programs=8, processors=100) == 16  # 25 wanted, but 4 tiles each
    assert rule.splits(tiles=640, programs=8, processors=100) == 25
    assert rule.splits(tiles=640, programs=1000, processors=100) == 1
    for few in (1, 3, 4, 7):
        assert rule.splits(tiles=few, programs=8, processors=100) == 1


def test_a_tiles_file_is_read_back_and_a_bad_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(TABLE.to_json()))
    assert tiles.read_table(path) == TABLE
    one = TileTable({"sm_80": {64: (Tile(16, 4, 2, 32),)}}, {"sm_80": SplitRule(1, 1)})
    path.write_text(json.dumps(one.to_json()))
    monkeypatch.setenv("POLYKV_TRITON_TILES", str(path))
    tiles.default_table.cache_clear()
    try:
        assert tiles.default_table() == one
    finally:
        tiles.default_table.cache_clear()
    for bad in ("[]", "{", '{"sm_80": {}}', '{"sm_80": {"tiles": {"64": [{"block": 1}]}, "splits": {}}}'):
        path.write_text(bad)
        with pytest.raises(ValueError, match="is not a tiles file"):
            tiles.read_table(path)


def test_devices_that_the_table_lacks_use_a_table_within_their_limits() -> None:
    names = {(8, 0): "sm_80", (8, 9): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100", (12, 0): "sm_80"}
    assert {capability: tiles.architecture_for(capability) for capability in names} == names
    assert tiles.architecture_for(None) == "gfx942"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_oracle_of_these_tests_agrees_with_the_reference(layout: str) -> None:
    keys, values = torch.randn(2, 2, 130, 64)
    segment = encode(layout, keys, values, exact_tokens=20)
    q = torch.randn(3, 6, 64)
    got = reference.shared_attention(q, segment, 0.125, q_positions=None, window=None)
    check(got, oracle(q, segment, 0.125), 1e-5, 1e-5)


# ------------------------------------------------------------------------------------------------- interpreted


@cache
def interpreted(cache_folder: Path) -> dict[str, dict[str, Any]]:
    return {result["case"]: result for result in start("interpret_cases.py", cache_folder, TRITON_INTERPRET="1")}


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", interpret_cases.CASES)
def test_interpreted(name: str, cache_folder: Path, record_property: Any) -> None:
    result = interpreted(cache_folder)[name]
    record_property("result", result["text"])
    assert result["ok"], result["text"]


# ---------------------------------------------------------------------------------------------------- compiled


@cache
def compiled(cache_folder: Path) -> dict[str, dict[str, Any]]:
    results = start("compile_cases.py", cache_folder, TRITON_INTERPRET="0")
    for result in results:
        assert "failure" not in result, f"{result['name']}: {result['failure']}"
    return {result["name"]: result for result in results}


@pytest.fixture
def kernels(cache_folder: Path) -> dict[str, dict[str, Any]]:
    return compiled(cache_folder)


compiles = [needs_triton, pytest.mark.slow, pytest.mark.timeout(7200)]


class TestCompiled:
    """One compilation of all, several looks at it."""

    pytestmark = compiles

    def test_every_kernel_compiles_for_every_architecture(self, kernels: dict[str, dict[str, Any]]) -> None:
        for kind in ("attention", "merge_splits", "merge_states", "encode_keys", "encode_values"):
            for architecture in ARCHITECTURES:
                names = [name for name in kernels if name.startswith(f"{kind}-{architecture}-")]
                assert names, f"no {kind} for {architecture}"
                assert all(kernels[name]["binary_bytes"] > 0 for name in names)

    def test_shared_memory_fits_the_architecture(self, kernels: dict[str, dict[str, Any]]) -> None:
        too_large = {name: k["shared"] for name, k in kernels.items() if k["shared"] > k["limit"]}
        assert not too_large

    def test_no_shipped_tile_spills_registers(self, kernels: dict[str, dict[str, Any]]) -> None:
        spilling = {name: k["spills"] for name, k in kernels.items() if k["spills"] and name != "spilling"}
        assert not spilling

    def test_spills_would_be_seen(self, kernels: dict[str, dict[str, Any]]) -> None:
        assert kernels["spilling"]["spills"] > 0

    def test_matrix_instructions_are_used(self, kernels: dict[str, dict[str, Any]]) -> None:
        allowed = {
            "sm_80": {"mma.sync"},
            "sm_90": {"mma.sync", "wgmma.mma_async"},
            "sm_100": {"mma.sync", "tcgen05.mma"},
            "gfx942": {"v_mfma"},
        }
        for name, k in kernels.items():
            if k["matrix_expected"]:
                assert k["matrix"], f"{name} has no matrix instruction"
                assert set(k["matrix"]) <= allowed[k["architecture"]], f"{name}: {k['matrix']}"

    def test_large_tiles_use_the_newer_matrix_instructions(self, kernels: dict[str, dict[str, Any]]) -> None:
        for architecture, instruction in (("sm_90", "wgmma.mma_async"), ("sm_100", "tcgen05.mma")):
            used = {m for k in kernels.values() if k["architecture"] == architecture for m in k["matrix"]}
            assert instruction in used
