"""The store: what is put comes back, names and paths cannot be tricked, and nothing foreign is touched."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polykv.errors import StoreError
from polykv.pool.store import FORMAT, VERSION, SegmentStore

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
A, B, C = (digit * 64 for digit in "abc")


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(
        got[key].dtype == want[key].dtype and got[key].shape == want[key].shape and torch.equal(got[key], want[key])
        for key in want
    )


def files(folder: Path) -> dict[str, bytes]:
    """All files of a store but its lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    return SegmentStore(tmp_path / "store")


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype(self, store: SegmentStore, dtype: torch.dtype) -> None:
        tensors = {"matrix": values(dtype, 7, 5), "number": values(dtype), "empty": values(dtype, 0, 3)}
        assert store.put(A, tensors, {"of": str(dtype)}, tokens=7)
        got, manifest = store.get(A)
        assert same(got, tensors)
        assert (manifest.name, manifest.tokens, manifest.metadata) == (A, 7, {"of": str(dtype)})
        assert manifest.data_bytes == (store.path / "segments" / f"{A}.safetensors").stat().st_size
        assert manifest.nbytes == store.nbytes
        assert same(SegmentStore(store.path, read_only=True).get(A, verify=False)[0], tensors)

    def test_special_floats(self, store: SegmentStore) -> None:
        x = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 5e-324])
        store.put(A, {"x": x}, {}, tokens=1)
        assert store.get(A)[0]["x"].view(torch.int32).tolist() == x.view(torch.int32).tolist()

    def test_views_of_one_storage_are_written_as_what_they_show(self, store: SegmentStore) -> None:
        base = torch.arange(10_000, dtype=torch.float32)
        views = {
            "first": base[:10],
            "overlapping": base[5:15],
            "strided": base[::1000],
            "transposed": base[:6].reshape(2, 3).T,
            "expanded": base[3].expand(4, 2),
            "same": base[:10],
        }
        store.put(A, views, {}, tokens=1)
        assert same(store.get(A)[0], views)
        assert store.nbytes < base.numel() * 4

    def test_tensors_with_gradients_are_written_without(self, store: SegmentStore) -> None:
        store.put(A, {"x": torch.ones(3, requires_grad=True) * 2}, {}, tokens=1)
        assert store.get(A)[0]["x"].tolist() == [2, 2, 2]

    def test_no_tensors_at_all(self, store: SegmentStore) -> None:
        assert store.put(A, {}, {}, tokens=0)
        assert store.get(A)[0] == {} and store.verify() == {A: None}

    def test_a_dtype_that_it_does_not_know_is_refused(self, store: SegmentStore) -> None:
        before = files(store.path)
        with pytest.raises(StoreError, match="complex64"):
            store.put(A, {"x": torch.ones(3, dtype=torch.complex64)}, {}, tokens=1)
        assert files(store.path) == before

    def test_a_name_that_safetensors_keeps_for_itself_is_refused(self, store: SegmentStore) -> None:
        with pytest.raises(StoreError, match="__metadata__"):
            store.put(A, {"__metadata__": torch.ones(3)}, {}, tokens=1)
        assert list(files(store.path)) == ["store.json"]

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
    def test_tensors_are_mapped_once_each_with_a_storage_of_its_own(self, store: SegmentStore) -> None:
        store.put(A, {"x": torch.ones(5000), "y": torch.ones(5000)}, {}, tokens=1)
        got, _ = store.get(A)
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if A in line]
        assert len(lines) == 1 and lines[0][1].endswith("p")  # private: what is written never reaches the file
        first, stop = (int(part, 16) for part in lines[0][0].split("-"))
        assert all(first <= tensor.data_ptr() < stop for tensor in got.values())
        assert [tensor.untyped_storage().nbytes() for tensor in got.values()] == [20_000, 20_000]

    def test_what_is_stored_is_not_what_the_caller_changes_later(self, store: SegmentStore) -> None:
        x = torch.ones(3)
        store.put(A, {"x": x}, {}, tokens=1)
        x.zero_()
        assert store.get(A)[0]["x"].tolist() == [1, 1, 1]


class TestPut:
    def test_twice(self, store: SegmentStore) -> None:
        assert store.put(A, {"x": torch.ones(3)}, {}, tokens=1)
        before = files(store.path)
        assert not store.put(A, {"x": torch.zeros(3)}, {"other": 1}, tokens=1)
        assert files(store.path) == before

    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    @pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
    def test_a_damaged_one_is_replaced(self, store: SegmentStore, suffix: str, damage: str) -> None:
        store.put(A, {"x": torch.ones(300)}, {}, tokens=1)
        path = store.path / "segments" / f"{A}.{suffix}"
        content = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(
                content[:-1] if damage == "cut" else content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
            )
        with pytest.raises(StoreError):
            store.get(A)
        assert store.put(A, {"x": torch.zeros(2)}, {}, tokens=1)
        assert store.get(A)[0]["x"].tolist() == [0, 0]
        assert len(files(store.path)) == 3

    def test_names_in_the_order_of_their_age(self, store: SegmentStore) -> None:
        for age, name in enumerate((B, A, C)):
            store.put(name, {"x": torch.ones(1)}, {}, tokens=1)
            os.utime(store.path / "segments" / f"{name}.json", (1000 + age, 1000 + age))
        assert store.names() == [B, A, C] and len(store) == 3
        assert A in store and "d" * 64 not in store and "a" not in store and 5 not in store

    def test_max_bytes(self, tmp_path: Path) -> None:
        store = SegmentStore(tmp_path / "store", max_bytes=10_000)
        store.put(A, {"x": torch.ones(2000)}, {}, tokens=1)
        before = files(store.path)
        with pytest.raises(StoreError, match="max_bytes 10000"):
            store.put(B, {"x": torch.ones(2000)}, {}, tokens=1)
        assert files(store.path) == before
        assert not store.put(A, {"x": torch.ones(2000)}, {}, tokens=1)
        store.remove(A)
        assert store.put(B, {"x": torch.ones(2000)}, {}, tokens=1)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, {1, 2}, b"bytes", torch.ones(1), 1j, object()])
    def test_metadata_that_is_no_json(self, store: SegmentStore, bad: Any) -> None:
        before = files(store.path)
        with pytest.raises(StoreError, match=r"cannot be written into .+: ."):
            store.put(A, {"x": torch.ones(1)}, {"nested": [{"value": bad}]}, tokens=1)
        assert files(store.path) == before and A not in store

    def test_metadata_that_refers_to_itself_or_is_too_large(self, store: SegmentStore) -> None:
        loop: list[Any] = []
        loop.append(loop)
        for bad in (loop, "x" * (5 << 20)):
            with pytest.raises(StoreError):
                store.put(A, {"x": torch.ones(1)}, {"value": bad}, tokens=1)
        assert list(files(store.path)) == ["store.json"]

    def test_metadata_that_are_nested_too_deeply(self, store: SegmentStore) -> None:
        nested: list[Any] = []
        for depth in range(1, 990):
            nested = [nested]
            if depth in (100, 500, 989):
                with pytest.raises(StoreError, match="nested deeper than 100|recursion"):
                    store.put(A, {"x": torch.ones(1)}, {"value": nested}, tokens=1)
            elif depth == 90:
                assert store.put(B, {"x": torch.ones(1)}, {"value": nested}, tokens=1)
                want = nested
        assert store.names() == [B] and store.manifest(B).metadata == {"value": want}

    def test_metadata_of_every_kind_comes_back(self, store: SegmentStore) -> None:
        facts = {"text": "ü\ud800\n\0", "float": 0.1, "int": -(2**70), "none": None, "list": [True, [], {}]}
        store.put(A, {"x": torch.ones(1)}, facts, tokens=1)
        assert store.manifest(A).metadata == facts


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "",
            "a",
            "A" * 64,
            "g" * 64,
            "a" * 63,
            "a" * 65,
            "a" * 64 + "\n",
            "../" + "a" * 61,
            "../../etc/passwd",
            "/" + "a" * 63,
            "a" * 32 + "/" + "a" * 31,
            "a" * 63 + "\0",
            "١" * 64,
            None,
            5,
            b"a" * 64,
            Path("a" * 64),
        ],
        ids=repr,
    )
    def test_no_name_leads_out_of_the_folder(self, store: SegmentStore, name: Any) -> None:
        before = files(store.path.parent)
        for call in (
            lambda: store.put(name, {"x": torch.ones(1)}, {}, tokens=1),
            lambda: store.get(name),
            lambda: store.manifest(name),
            lambda: store.remove(name),
        ):
            with pytest.raises(StoreError, match="64 hex digits"):
                call()
        assert name not in store
        assert files(store.path.parent) == before

    def test_other_files_are_not_listed(self, store: SegmentStore) -> None:
        segments = store.path / "segments"
        for name in ("x.json", "A" * 64 + ".json", A + ".JSON", A + ".json.bak", ".tmp-1-2"):
            (segments / name).write_text("{}")
        assert store.names() == [] and store.verify() == {}

    def test_what_is_not_there(self, store: SegmentStore) -> None:
        with pytest.raises(StoreError, match="no segment aaaaaaaaaaaa"):
            store.get(A)
        with pytest.raises(StoreError, match="no segment"):
            store.remove(A)


class TestRemove:
    @pytest.mark.skipif(os.name == "nt", reason="Windows keeps mapped files")
    def test_whoever_has_mapped_it_reads_on(self, store: SegmentStore) -> None:
        x = torch.arange(100_000)
        store.put(A, {"x": x}, {}, tokens=1)
        size = store.nbytes
        got, _ = store.get(A)
        assert store.remove(A) == size
        assert torch.equal(got["x"], x)
        assert (store.names(), store.nbytes, A in store) == ([], 0, False)
        store.put(A, {"x": torch.zeros(100_000)}, {}, tokens=1)
        assert torch.equal(got["x"], x)

    def test_half_of_one(self, store: SegmentStore) -> None:
        store.put(A, {"x": torch.ones(3)}, {}, tokens=1)
        (store.path / "segments" / f"{A}.json").unlink()
        assert store.remove(A) > 0 and list(files(store.path)) == ["store.json"]


class TestFolders:
    def test_read_only(self, store: SegmentStore, tmp_path: Path) -> None:
        store.put(A, {"x": torch.ones(3)}, {}, tokens=1)
        (store.path / ".lock").unlink(missing_ok=True)
        before = sorted(store.path.rglob("*"))
        reader = SegmentStore(store.path, read_only=True)
        assert reader.get(A)[0]["x"].tolist() == [1, 1, 1] and reader.verify() == {A: None}
        for call in (
            lambda: reader.put(B, {"x": torch.ones(3)}, {}, tokens=1),
            lambda: reader.remove(A),
            lambda: reader.gc(),
        ):
            with pytest.raises(StoreError, match="read-only"):
                call()
        assert sorted(store.path.rglob("*")) == before
        with pytest.raises(StoreError, match="no store"):
            SegmentStore(tmp_path / "nothing", read_only=True)
        with pytest.raises(StoreError, match="no store"):
            SegmentStore(tmp_path / "nothing", create=False)
        assert not (tmp_path / "nothing").exists()

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (json.dumps({"format": "other", "version": 1}), "not a store of this library"),
            (json.dumps({"format": FORMAT, "version": VERSION + 1}), f"has version {VERSION + 1}"),
            (json.dumps({"format": FORMAT, "version": 0}), "has version 0"),
            (json.dumps({"format": FORMAT}), "has version None"),
            ("[]", "not a store"),
            ("null", "not a store"),
            ("", "cannot be read"),
            ("{", "cannot be read"),
            ("[" * 100_000, "cannot be read"),
            ("9" * 10_000, "cannot be read"),
            ("\udcff", "cannot be read"),
            (" " * (5 << 20), "larger than"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_a_store_json_of_others(self, store: SegmentStore, content: str, reason: str) -> None:
        (store.path / "store.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        for options in ({}, {"read_only": True}, {"create": False}):
            with pytest.raises(StoreError, match=reason):
                SegmentStore(store.path, **options)  # type: ignore[arg-type]

    def test_a_store_json_that_is_a_folder(self, store: SegmentStore) -> None:
        (store.path / "store.json").unlink()
        (store.path / "store.json").mkdir()
        with pytest.raises(StoreError, match="cannot be read"):
            SegmentStore(store.path)

    @pytest.mark.skipif(os.name == "nt", reason="needs pipes")
    def test_a_store_json_that_is_a_pipe_does_not_block(self, store: SegmentStore) -> None:
        (store.path / "store.json").unlink()
        os.mkfifo(store.path / "store.json")
        with pytest.raises(StoreError, match="no plain file"):
            SegmentStore(store.path)

    def test_messages_are_fit_for_a_terminal(self, store: SegmentStore) -> None:
        store.put(A, {"\x1b[31mred": torch.ones(3)}, {}, tokens=1)
        path = store.path / "segments" / f"{A}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
        reasons = [store.verify()[A] or ""]
        for text in (r'"\u001b[31mred"', r'"\ud800"', r'{"format": "\u001b[31mred"}'):
            (store.path / "store.json").write_text(text)
            with pytest.raises(StoreError) as caught:
                SegmentStore(store.path)
            reasons.append(str(caught.value))
        assert "[31mred" in reasons[0] and all(reason.isprintable() for reason in reasons)

    def test_one_that_is_deleted_while_it_is_open(self, store: SegmentStore) -> None:
        store.put(A, {"x": torch.ones(3)}, {}, tokens=1)
        shutil.rmtree(store.path)
        assert (store.names(), store.nbytes, store.verify(), A in store) == ([], 0, {}, False)
        for call in (
            lambda: store.put(B, {"x": torch.ones(1)}, {}, tokens=1),
            lambda: store.remove(A),
            lambda: store.gc(),
            lambda: store.get(A),
        ):
            with pytest.raises(StoreError, match=r"is gone|no segment"):
                call()
        assert not store.path.exists()

    def test_a_file_a_path_below_a_file_and_a_path_too_long(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(StoreError, match="is a file"):
            SegmentStore(tmp_path / "file")
        for path in (tmp_path / "file" / "store", tmp_path / ("x" * 5000), f"{tmp_path}/a\0b"):
            with pytest.raises(StoreError, match="cannot be"):
                SegmentStore(path)
        assert files(tmp_path) == {"file": b"mine"}

    def test_a_folder_with_other_files(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(StoreError, match="holds other files"):
            SegmentStore(tmp_path)
        assert files(tmp_path) == {"notes.txt": b"mine"}

    def test_an_empty_folder_a_deep_one_and_one_half_made(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "half" / "segments").mkdir(parents=True)
        (tmp_path / "half" / ".tmp-1-2").write_text("{")
        for name in ("empty", "half", "a/b/c"):
            store = SegmentStore(tmp_path / name)
            assert store.put(A, {"x": torch.ones(1)}, {}, tokens=1)
            store.gc()
            assert set(files(store.path)) == {"store.json", f"segments/{A}.json", f"segments/{A}.safetensors"}

    def test_without_the_folder_of_segments(self, store: SegmentStore) -> None:
        (store.path / "segments").rmdir()
        again = SegmentStore(store.path)
        assert (again.names(), again.nbytes, len(again)) == ([], 0, 0)
        with pytest.raises(StoreError, match="cannot be written"):
            again.put(A, {"x": torch.ones(1)}, {}, tokens=1)


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need privileges")
class TestLinks:
    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    def test_a_linked_file_is_refused_and_its_target_is_left(
        self, store: SegmentStore, tmp_path: Path, suffix: str
    ) -> None:
        store.put(A, {"x": torch.ones(3)}, {}, tokens=1)
        store.put(B, {"x": torch.ones(3)}, {}, tokens=1)
        path, target = store.path / "segments" / f"{A}.{suffix}", tmp_path / "target"
        path.rename(target)
        path.symlink_to(target)
        content = target.read_bytes()
        with pytest.raises(StoreError, match="symbolic link"):
            store.get(A)
        assert store.verify()[B] is None
        assert store.put(A, {"x": torch.zeros(3)}, {}, tokens=1)  # replaced, not written through
        assert target.read_bytes() == content and store.verify() == {B: None, A: None}

    def test_links_that_lead_nowhere_or_to_themselves(self, store: SegmentStore) -> None:
        store.put(C, {"x": torch.ones(3)}, {}, tokens=1)
        segments = store.path / "segments"
        (segments / f"{A}.json").symlink_to("nowhere")
        (segments / f"{B}.json").symlink_to(f"{B}.json")
        assert sorted(store.names()) == [A, B, C]
        reasons = store.verify()
        assert reasons[C] is None and reasons[A] and reasons[B]
        assert store.gc().removed_files == 2 and store.names() == [C]

    def test_a_linked_lock_leaves_its_target(self, store: SegmentStore, tmp_path: Path) -> None:
        target = tmp_path / "target"
        target.write_text("mine")
        (store.path / ".lock").unlink(missing_ok=True)
        (store.path / ".lock").symlink_to(target)
        for call in (lambda: store.put(A, {"x": torch.ones(1)}, {}, tokens=1), lambda: store.gc()):
            with pytest.raises(StoreError, match="symbolic link"):
                call()
        assert target.read_text() == "mine" and store.names() == []

    def test_a_linked_folder_of_segments(self, store: SegmentStore, tmp_path: Path) -> None:
        (store.path / "segments").rename(tmp_path / "elsewhere")
        (store.path / "segments").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StoreError, match="symbolic link"):
            SegmentStore(store.path)

    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    def test_pipes_and_folders_do_not_block(self, store: SegmentStore, suffix: str) -> None:
        for name, make in ((A, os.mkfifo), (B, os.mkdir)):
            store.put(name, {"x": torch.ones(3)}, {}, tokens=1)
            path = store.path / "segments" / f"{name}.{suffix}"
            path.unlink()
            make(path)
        reasons = store.verify()
        assert "no file" in (reasons[A] or "") and "no file" in (reasons[B] or "")


class TestGc:
    def test_leftovers_go_and_the_rest_stays(self, store: SegmentStore) -> None:
        for name in (A, B, C):
            store.put(name, {"x": torch.ones(50)}, {}, tokens=1)
        segments = store.path / "segments"
        left = {
            segments / ".tmp-1-ab",
            store.path / ".tmp-2-cd",
            segments / ".tmpAbCdEf",
        }  # the last is safetensors' own
        for path in left:
            path.write_bytes(bytes(100))
        (segments / f"{B}.json").unlink()
        (segments / f"{C}.safetensors").unlink()
        (segments / "notes.txt").write_text("mine")
        (segments / "folder").mkdir()
        sizes = (segments / f"{B}.safetensors").stat().st_size + (segments / f"{C}.json").stat().st_size
        report = store.gc()
        assert (report.removed_files, report.freed_bytes, report.refused) == (5, 300 + sizes, {})
        assert store.names() == [A] and store.verify() == {A: None}
        assert (segments / "notes.txt").read_text() == "mine" and (segments / "folder").is_dir()
        assert store.gc().removed_files == 0

    def test_damaged_ones_stay_unless_one_asks(self, store: SegmentStore) -> None:
        for name in (A, B):
            store.put(name, {"x": torch.ones(50), "y": torch.ones(50)}, {}, tokens=1)
        path = store.path / "segments" / f"{A}.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"\1")
        report = store.gc()
        assert report.removed_files == 0 and report.refused.keys() == {A} and "changed: y" in report.refused[A]
        report = store.gc(delete_corrupt=True)
        assert (report.removed_files, report.refused) == (2, {}) and report.freed_bytes > len(content)
        assert store.names() == [B]

    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    def test_a_folder_in_the_place_of_a_file_stops_nothing(self, store: SegmentStore, suffix: str) -> None:
        for name in (A, B, C):
            store.put(name, {"x": torch.ones(50)}, {}, tokens=1)
        segments = store.path / "segments"
        (segments / f"{A}.{suffix}").unlink()
        (segments / f"{A}.{suffix}").mkdir()
        path = segments / f"{B}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
        (segments / ".tmp-1-ab").write_bytes(bytes(100))
        report = store.gc(delete_corrupt=True)
        assert report.removed_files == 3 and report.refused.keys() == {A} and "by hand" in report.refused[A]
        assert store.verify()[C] is None and sorted(store.names()) == [A, C]

    def test_verify_one(self, store: SegmentStore) -> None:
        store.put(A, {"x": torch.ones(5)}, {}, tokens=1)
        assert store.verify(A) == {A: None}
        assert "no segment" in (store.verify(B)[B] or "")
        path = store.path / "segments" / f"{A}.safetensors"
        path.write_bytes(path.read_bytes()[:-4])
        assert "cut or changed" in (store.verify(A)[A] or "")


class TestLock:
    @pytest.fixture
    def held(self, store: SegmentStore) -> Iterator[None]:
        """Another process writes all the time."""
        code = textwrap.dedent("""
            import sys
            from polykv.pool.store import SegmentStore
            with SegmentStore(sys.argv[1])._writing():
                print("ready", flush=True)
                sys.stdin.read()
        """)
        command = [sys.executable, "-c", code, str(store.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield
            process.communicate()

    def test_a_writer_waits_and_says_so_and_readers_do_not(self, store: SegmentStore, held: None) -> None:
        impatient = SegmentStore(store.path, lock_timeout=0.1)
        for call in (
            lambda: impatient.put(A, {"x": torch.ones(1)}, {}, tokens=1),
            lambda: impatient.remove(A),
            lambda: impatient.gc(),
        ):
            with pytest.raises(StoreError, match=r"another process has been writing .* for 0.1 s"):
                call()
        assert impatient.names() == [] and impatient.verify() == {}

    def test_threads_of_one_process_take_turns(self, store: SegmentStore) -> None:
        results: list[bool] = []

        def write(index: int) -> None:
            other = SegmentStore(store.path)
            for name in (A, B, f"{index:064x}"):
                results.append(other.put(name, {"x": torch.full((10,), index)}, {}, tokens=1))

        threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(results) == 6 and len(store) == 6 and set(store.verify().values()) == {None}
