"""`polykv pool`: what it lists, shows, removes and finds damaged; errors are one line and status 1."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polykv.cli import main
from polykv.pool.store import SegmentStore, _checksum

FACTS = {"kind": "context", "codec": "k8v3", "model": "/models/tiny", "parent": None, "layers": [{}, {}, {}]}
A, B, C = "ab" + "0" * 62, "ac" + "0" * 62, "c" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = SegmentStore(tmp_path / "store")
    for age, name in enumerate((A, B, C)):
        store.put(name, {"x": torch.ones(1000)}, {**FACTS, "parent": A if name == B else None}, tokens=10 + age)
        os.utime(store.path / "segments" / f"{name}.json", (1000 + age, 1000 + age))
    return store.path


class Run:
    """Runs a command line; what it printed, and that it never was a traceback."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.out = self.err = ""

    def __call__(self, *arguments: Any, answer: str = "") -> int:
        self._monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        status = main(["pool", *map(str, arguments)])
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.out + self.err
        return status


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(capsys, monkeypatch)


def names(folder: Path) -> list[str]:
    return SegmentStore(folder, read_only=True).names()


def damage(folder: Path, name: str) -> None:
    path = folder / "segments" / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


class TestLs:
    def test_a_line_each(self, run: Run, folder: Path) -> None:
        assert run("ls", folder) == 0
        head, *lines, last = run.out.splitlines()
        assert head.split() == ["name", "tokens", "bytes", "kind", "codec", "parent", "age", "model"]
        assert [line.split()[:2] for line in lines] == [[A[:12], "10"], [B[:12], "11"], [C[:12], "12"]]
        assert lines[1].split()[6] == A[:12] and lines[0].split()[-1] == "tiny"
        assert last.startswith("3 segment(s), ") and run.err == ""

    def test_json(self, run: Run, folder: Path) -> None:
        (folder / "segments" / f"{B}.json").write_text("{")
        assert run("ls", folder, "--json") == 0
        report = json.loads(run.out)
        assert [row["name"] for row in report["segments"]] == [A, C]
        store = SegmentStore(folder, read_only=True)
        assert report["segments"][0]["bytes"] == store.manifest(A).nbytes
        assert report["segments"][0]["codec"] == "k8v3" and report["segments"][0]["parent"] == "-"
        assert list(report["refused"]) == [B] and report["refused"][B]

    def test_damaged_manifests_are_named(self, run: Run, folder: Path) -> None:
        (folder / "segments" / f"{B}.json").write_text("{")
        assert run("ls", folder) == 0
        assert run.err.startswith(B[:12]) and "2 segment(s)" in run.out

    def test_an_empty_store(self, run: Run, tmp_path: Path) -> None:
        SegmentStore(tmp_path / "empty")
        assert run("ls", tmp_path / "empty") == 0
        assert "0 segment(s), 0 B" in run.out
        assert run("verify", tmp_path / "empty") == 0 and run("gc", tmp_path / "empty") == 0

    @pytest.mark.parametrize(
        "facts",
        [
            {},
            dict.fromkeys(FACTS),
            dict.fromkeys(FACTS, 5),
            dict.fromkeys(FACTS, True),
            {key: {"a": 1} for key in FACTS},
            dict.fromkeys(FACTS, "\x1b[31mred\n\ud800"),
        ],
        ids=repr,
    )
    def test_any_metadata(self, run: Run, folder: Path, facts: dict[str, Any]) -> None:
        name = "d" * 64
        SegmentStore(folder).put(name, {"x": torch.ones(1)}, facts, tokens=1)
        for command in (("ls", folder), ("ls", folder, "--json"), ("show", folder, name), ("verify", folder)):
            assert run(*command) == 0
            assert name[:12] in run.out and "\x1b" not in run.out
            (run.out + run.err).encode()

    def test_a_forged_age(self, run: Run, folder: Path) -> None:
        path = folder / "segments" / f"{C}.json"
        content = json.loads(path.read_bytes()) | {"created": -1e308}
        content["checksum"] = _checksum({key: value for key, value in content.items() if key != "checksum"})
        path.write_text(json.dumps(content))
        assert run("ls", folder) == 0
        assert C[:12] in run.out and max(map(len, run.out.splitlines())) < 120

    def test_a_missing_folder_of_segments(self, run: Run, tmp_path: Path) -> None:
        store = SegmentStore(tmp_path / "store")
        (store.path / "segments").rmdir()
        assert run("ls", store.path) == 0 and "0 segment(s)" in run.out


class TestShow:
    def test_by_prefix(self, run: Run, folder: Path) -> None:
        for prefix in ("c", C[:12], C):
            assert run("show", folder, prefix) == 0
            shown = json.loads(run.out)
            assert (shown["name"], shown["tokens"], shown["layers"], shown["tensors"]) == (C, 12, 3, 1)
            assert shown["metadata"]["codec"] == "k8v3" and "layers" not in shown["metadata"]

    @pytest.mark.parametrize(
        ("prefix", "reason"),
        [("a", "2 segments' names begin"), ("f", "no segment's name begins"), ("../", "no segment")],
    )
    def test_ambiguous_and_unknown(self, run: Run, folder: Path, prefix: str, reason: str) -> None:
        assert run("show", folder, prefix) == 1
        assert reason in run.err and len(run.err.splitlines()) == 1 and run.out == ""

    def test_a_damaged_manifest(self, run: Run, folder: Path) -> None:
        (folder / "segments" / f"{C}.json").write_text("{}")
        assert run("show", folder, "c") == 1
        assert run.err.startswith("polykv pool: ") and len(run.err.splitlines()) == 1


class TestRm:
    def test_it_asks(self, run: Run, folder: Path) -> None:
        for answer in ("n\n", "", "\n"):
            assert run("rm", folder, "c", answer=answer) == 1
            assert "Remove 1 segment(s)" in run.out + run.err and len(names(folder)) == 3
        assert run("rm", folder, "c", answer="y\n") == 0
        assert "removed 1 segment(s)" in run.out and names(folder) == [A, B]

    def test_yes_and_several(self, run: Run, folder: Path) -> None:
        assert run("rm", folder, "--yes", "ab", "c", C[:3]) == 0
        assert "removed 2 segment(s)" in run.out and names(folder) == [B]

    def test_all(self, run: Run, folder: Path) -> None:
        assert run("rm", folder, "--all", answer="n\n") == 1 and len(names(folder)) == 3
        assert run("rm", folder, "--all", "-y") == 0
        assert names(folder) == [] and "removed 3 segment(s)" in run.out
        assert run("rm", folder, "--all", "-y") == 0

    @pytest.mark.parametrize("arguments", [(), ("-y",), ("-y", "a"), ("-y", "c", "f"), ("-y", "")])
    def test_nothing_goes_if_a_name_is_wrong(self, run: Run, folder: Path, arguments: tuple[str, ...]) -> None:
        assert run("rm", folder, *arguments) == 1
        assert len(run.err.splitlines()) == 1 and len(names(folder)) == 3

    def test_damaged_ones_too(self, run: Run, folder: Path) -> None:
        (folder / "segments" / f"{C}.json").write_text("{")
        assert run("rm", folder, "-y", "c") == 0 and names(folder) == [A, B]


class TestVerifyAndGc:
    def test_verify(self, run: Run, folder: Path) -> None:
        assert run("verify", folder) == 0
        assert run.out.splitlines()[-1] == "3 segment(s), 0 damaged"
        damage(folder, B)
        assert run("verify", folder) == 1
        lines = run.out.splitlines()
        assert [line.split()[1] == "ok" for line in lines[:3]] == [True, False, True]
        assert "SHA-256" in lines[1] and lines[-1] == "3 segment(s), 1 damaged"

    def test_gc(self, run: Run, folder: Path) -> None:
        (folder / "segments" / ".tmp-1-2").write_bytes(bytes(2000))
        damage(folder, B)
        assert run("gc", folder) == 0
        assert run.out == "removed 1 file(s), 2.0 kB\n"
        assert run.err.startswith(B[:12]) and "--delete-corrupt" in run.err
        assert len(names(folder)) == 3
        assert run("gc", folder, "--delete-corrupt") == 0
        assert "removed 2 file(s)" in run.out and names(folder) == [A, C]


@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["show", "a"], ["rm", "-y", "a"], ["verify"], ["gc"]])
class TestBadFolders:
    def test_missing(self, run: Run, tmp_path: Path, command: list[str]) -> None:
        assert run(command[0], tmp_path / "nothing", *command[1:]) == 1
        assert "no store" in run.err and len(run.err.splitlines()) == 1 and run.out == ""
        assert not (tmp_path / "nothing").exists()

    def test_others(self, run: Run, tmp_path: Path, command: list[str]) -> None:
        (tmp_path / "file").write_text("x")
        (tmp_path / "newer" / "segments").mkdir(parents=True)
        (tmp_path / "newer" / "store.json").write_text('{"format": "polykv-store", "version": 99}')
        for path in (tmp_path, tmp_path / "file", tmp_path / "newer", tmp_path / "file" / "x", "x" * 5000):
            assert run(command[0], path, *command[1:]) == 1
            assert run.err.startswith("polykv pool: ") and len(run.err.splitlines()) == 1


def test_usage(run: Run, folder: Path) -> None:
    for arguments in ((), ("frobnicate",), ("ls",), ("show", folder), ("ls", folder, "--what")):
        assert run(*arguments) == 2, arguments
        assert run.out + run.err
    for arguments in (("--help",), ("ls", "--help"), ("rm", "--help")):
        assert run(*arguments) == 0 and "Usage: polykv pool" in run.out


def test_help_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert any(line.split()[:1] == ["pool"] for line in capsys.readouterr().out.splitlines())


def test_as_a_process(folder: Path) -> None:
    """Errors leave through the exit status, without a traceback."""

    def polykv(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "polykv.cli", "pool", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    bad = polykv("ls", str(folder / "nothing"))
    assert bad.returncode == 1 and len(bad.stderr.splitlines()) == 1 and not bad.stdout
