"""Stores that were killed, filled up, damaged or forged: refused with a reason, never a wrong value, never a crash."""

from __future__ import annotations

import ast
import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FULL, VOCABULARY, assert_same_tokens, random_ids, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save
from torch import Tensor

import polykv
from polykv import Engine, SamplingParams, SharedKVPool
from polykv.engine import Request
from polykv.errors import StoreError
from polykv.models.identity import salt_digest
from polykv.pool import store as store_module
from polykv.pool.store import SegmentStore, _checksum, _crc

KILLS_OF_STORES = 140 if FULL else 7
KILLS_OF_POOLS = 60 if FULL else 3
MUTATIONS = 10_000 if FULL else 300
ROUNDS = 25 if FULL else 3
POOL_MUTATIONS = 300 if FULL else 20
A, B, C = (digit * 64 for digit in "abc")
TESTS = Path(__file__).parents[1]
DOCUMENTS = 5
linux = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def name_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def tensors_of(name: str) -> dict[str, Tensor]:
    """What a name's tensors must be."""
    generator = torch.Generator().manual_seed(int(name[:8], 16))
    return {
        "floats": torch.randn(50 + int(name[8:12], 16), generator=generator),
        "codes": torch.randint(-128, 128, (3, 40), generator=generator).to(torch.int8),
    }


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(
        got[key].dtype == want[key].dtype and torch.equal(got[key], want[key]) for key in want
    )


def put(store: SegmentStore, name: str) -> bool:
    return store.put(name, tensors_of(name), {"of": name}, tokens=1)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def leftovers(store: SegmentStore) -> list[str]:
    """Files that belong to no listed segment."""
    known = {f"segments/{name}.{suffix}" for name in store.names() for suffix in ("json", "safetensors")}
    return sorted(files(store.path).keys() - known - {"store.json"})


def replace(path: Path, content: bytes) -> None:
    """As a new file: who has mapped the old one keeps it."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


# ------------------------------------------------------------------------------------------------- kill -9

WORKERS = """
    import logging, os, random, sys
    logging.disable(logging.CRITICAL)
    sys.path[:0] = [{tests!r}, {here!r}]
    import torch
    torch.set_num_threads(1)
    import test_store_faults as faults
    from polykv.pool.store import SegmentStore

    model = faults.tiny_model("llama") if sys.argv[1] == "pool" else None

    def write(path, seed):
        store, chosen = SegmentStore(path), random.Random(seed)
        for _ in range(100_000):
            name = faults.name_of(chosen.randrange(12))
            if chosen.random() < 0.3 and name in store:
                store.remove(name)
            else:
                faults.put(store, name)

    def demote(path, seed):
        pool = faults.pool_of(model, path)
        chosen = random.Random(seed)
        for _ in range(100_000):
            pool.keep(pool.build(faults.document(chosen.randrange(faults.DOCUMENTS)), "k8v3"))
            if chosen.random() < 0.2:
                pool.save()
            if chosen.random() < 0.3 and len(pool._table.tier.store):
                pool._table.tier.store.remove(chosen.choice(pool._table.tier.store.names()))

    for line in sys.stdin:
        path, seed = line.split()
        child = os.fork()
        if child == 0:
            (demote if model is not None else write)(path, int(seed))
            os._exit(1)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)
"""


class Workers:
    """A process that forks writers, which are killed."""

    def __init__(self, kind: str) -> None:
        code = textwrap.dedent(WORKERS).format(tests=str(TESTS), here=str(Path(__file__).parent))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def kill_one(self, path: Path, seed: int, seconds: float) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(path, seed, file=self._process.stdin, flush=True)
        child = int(self._process.stdout.readline())
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        assert self._process.stdout.readline() == "dead\n"

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


def document(number: int) -> list[int]:
    return random_ids(100, seed=number)


def pool_of(model: Any, path: Path | str) -> SharedKVPool:
    """A pool with room for two of the documents."""
    pool = SharedKVPool(model, max_bytes=120_000)
    pool.open_store(path)
    return pool


@linux
class TestKilled:
    @pytest.fixture
    def workers(self, request: pytest.FixtureRequest) -> Iterator[Workers]:
        made = Workers(request.param)
        yield made
        made.close()

    @pytest.mark.parametrize("workers", ["store"], indirect=True)
    def test_a_writer(self, workers: Workers, tmp_path: Path) -> None:
        path, chosen = tmp_path / "store", random.Random(1)
        written, found, longest = 0, 0, 0.05
        for seed in range(KILLS_OF_STORES):
            workers.kill_one(path, seed, chosen.uniform(0, longest))
            store = SegmentStore(path, lock_timeout=5)
            for name in store.names():
                got, manifest = store.get(name)
                assert same(got, tensors_of(name)) and manifest.metadata == {"of": name}
                written += 1
            if not written:  # a busy disk
                longest *= 2
            left = leftovers(store)
            report = store.gc()
            assert (report.removed_files, report.refused) == (len(left), {})
            assert leftovers(store) == []
            found += len(left)
            name = name_of(1000 + seed)
            assert put(store, name) and same(store.get(name)[0], tensors_of(name))
            store.remove(name)
            if len(store) > 8:
                shutil.rmtree(path)
        assert written
        if FULL:
            assert found, "no kill has met a write"

    @pytest.mark.parametrize("workers", ["pool"], indirect=True)
    def test_a_pool_that_demotes_and_saves(self, workers: Workers, tmp_path: Path) -> None:
        path, chosen = tmp_path / "store", random.Random(2)
        model = tiny_model("llama")
        fresh = SharedKVPool(model)
        want = {tuple(document(i)): fresh.build(document(i), "k8v3") for i in range(DOCUMENTS)}
        restored = 0
        for seed in range(KILLS_OF_POOLS):
            workers.kill_one(path, seed, chosen.uniform(0, 0.4))
            store = SegmentStore(path, lock_timeout=5)
            assert set(store.verify().values()) <= {None}
            left = leftovers(store)
            assert store.gc().removed_files == len(left) and leftovers(store) == []
            pool = SharedKVPool(model)
            report = pool.open_store(path)
            assert report.refused == {} and report.segments == len(store)
            for ids, segment in want.items():
                got = pool.build(ids, "k8v3")
                for one, other in zip(got.layers, segment.layers, strict=True):
                    assert same(one.tensors(), other.tensors())
            stats = pool.stats()
            assert stats.restores == report.segments and stats.builds == DOCUMENTS - report.segments
            restored += stats.restores
            assert pool.save().segments == stats.builds
            if chosen.random() < 0.5:
                shutil.rmtree(path)
        assert restored


# ------------------------------------------------------------------------------------------- several at once

ONE_OF_SEVERAL = """
    import sys
    sys.path[:0] = [{tests!r}, {here!r}]
    import random, torch
    torch.set_num_threads(1)
    import test_store_faults as faults

    store, chosen = faults.SegmentStore(sys.argv[1]), random.Random(int(sys.argv[2]))
    print("ready", flush=True)
    for line in sys.stdin:
        task, *numbers = line.split()
        if task == "put":
            print(sum(faults.put(store, faults.name_of(int(number))) for number in numbers), flush=True)
        else:  # other values under the same names, again and again
            name = faults.name_of(chosen.choice(range(3)))
            if name in store:
                store.remove(name)
            number = chosen.randrange(100)
            store.put(name, {{"x": torch.full((20_000,), number)}}, {{"of": number}}, tokens=1)
            print("done", flush=True)
"""


class TestSeveralProcesses:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return SegmentStore(tmp_path / "store").path

    @pytest.fixture
    def others(self, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
        code = textwrap.dedent(ONE_OF_SEVERAL).format(tests=str(TESTS), here=str(Path(__file__).parent))
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(folder), str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            for seed in range(2)
        ]
        for process in started:
            assert self.answer(process) == "ready"
        yield started
        for process in started:
            process.communicate()
            assert process.returncode == 0

    @staticmethod
    def answer(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    @staticmethod
    def ask(process: subprocess.Popen[str], *words: object) -> None:
        print(*words, file=process.stdin, flush=True)

    def test_a_race_of_writers_loses_nothing(self, folder: Path, others: list[subprocess.Popen[str]]) -> None:
        store = SegmentStore(folder)
        for first in range(0, ROUNDS * 10, 10):
            common, own = list(range(first, first + 6)), ([first + 6, first + 7], [first + 8, first + 9])
            for process, names in zip(others, own, strict=True):
                self.ask(process, "put", *common, *names)
            assert sum(int(self.answer(process)) for process in others) == 10  # each is written by one of them
            for number in range(first, first + 10):
                assert same(store.get(name_of(number))[0], tensors_of(name_of(number)))
        assert len(store) == ROUNDS * 10 and leftovers(store) == [] and set(store.verify().values()) == {None}

    def test_a_reader_sees_whole_segments_or_none(self, folder: Path, others: list[subprocess.Popen[str]]) -> None:
        reader = SegmentStore(folder, read_only=True)
        read, reasons = 0, []
        for _ in range(ROUNDS * 20):
            self.ask(others[0], "change")
            for name in reader.names() * 2:
                try:
                    got, manifest = reader.get(name, verify=read % 2 == 0)
                except StoreError as error:  # it is being written anew
                    reasons.append(str(error))
                else:
                    assert got["x"].unique().tolist() == [manifest.metadata["of"]]
                    read += 1
            assert self.answer(others[0]) == "done"
        assert read > len(reasons)
        assert all("removed or replaced" in x or "no segment" in x or "not there" in x for x in reasons), reasons
        assert set(reader.verify().values()) == {None}

    @pytest.mark.parametrize("verify", [True, False])
    @pytest.mark.parametrize("at", ["_header", "_sha256", "load_file"])
    def test_one_that_is_replaced_while_it_is_read(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, at: str, verify: bool
    ) -> None:
        """The reader opens a file more than once; no two of its looks are of different files."""
        store = SegmentStore(folder)
        store.put(A, {"x": torch.zeros(9)}, {"of": 0}, tokens=1)
        real = getattr(store_module, at)

        def replaced(path: Any) -> Any:
            monkeypatch.undo()
            store.remove(A)
            store.put(A, {"x": torch.ones(9)}, {"of": 1}, tokens=1)
            return real(path)

        monkeypatch.setattr(store_module, at, replaced)
        if at == "_sha256" and not verify:
            assert store.get(A, verify=False)[1].metadata == {"of": 0}
            return
        with pytest.raises(StoreError, match="removed or replaced"):
            store.get(A, verify=verify)
        got, manifest = store.get(A)
        assert got["x"].tolist() == [1.0] * 9 and manifest.metadata == {"of": 1}


# ------------------------------------------------------------------------------------- no room, no permission


def failing(function: Any, at: int, code: int) -> Any:
    """The function, but its ``at``-th call fails."""
    calls = iter(range(1_000_000))

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise OSError(code, os.strerror(code))
        return function(*args, **options)

    return call


FAULTS = [
    *((os, "fsync", at) for at in range(4)),
    *((os, "replace", at) for at in range(2)),
    (store_module, "save_file", 0),
    (store_module, "_sha256", 0),
    (shutil, "disk_usage", 0),
]


class TestNoRoom:
    @pytest.fixture
    def store(self, tmp_path: Path) -> SegmentStore:
        store = SegmentStore(tmp_path / "store")
        put(store, A)
        return store

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
    @pytest.mark.parametrize(("module", "function", "at"), FAULTS, ids=lambda x: getattr(x, "__name__", str(x)))
    def test_a_failing_call(
        self, store: SegmentStore, monkeypatch: pytest.MonkeyPatch, module: Any, function: str, at: int, code: int
    ) -> None:
        before = files(store.path)
        with monkeypatch.context() as patch:
            patch.setattr(module, function, failing(getattr(module, function), at, code))
            with pytest.raises(StoreError) as caught:
                put(store, B)
        full = code in (errno.ENOSPC, errno.EDQUOT)
        assert ("the disk is full" if full else os.strerror(code)) in str(caught.value)
        assert files(store.path) == before
        assert put(store, B) and same(store.get(B)[0], tensors_of(B))

    def test_an_interrupted_one(self, store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
        before = files(store.path)
        for at in range(4):
            with monkeypatch.context() as patch:
                calls = iter(range(100))

                def fsync(descriptor: int, at: int = at, calls: Iterator[int] = calls) -> None:
                    if next(calls) == at:
                        raise KeyboardInterrupt

                patch.setattr(os, "fsync", fsync)
                with pytest.raises(KeyboardInterrupt):
                    put(store, B)
            assert files(store.path) == before

    def test_a_disk_without_room(self, store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
        before = files(store.path)
        usage = shutil.disk_usage(store.path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(StoreError, match="1000 are free; make room"):
            put(store, B)
        assert files(store.path) == before and not put(store, A)

    def test_a_folder_that_cannot_be_written(self, store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
        before = files(store.path)
        real = os.open
        if os.geteuid() == 0:  # whom permissions do not stop

            def deny(path: Any, flags: int, *args: Any, **options: Any) -> int:
                if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
                return real(path, flags, *args, **options)

            monkeypatch.setattr(os, "open", deny)
        else:
            for path in (store.path, store.path / "segments"):
                path.chmod(0o500)
        try:
            for call in (lambda: put(store, B), lambda: store.remove(A), store.gc):
                with pytest.raises(StoreError, match="cannot be"):
                    call()
            assert same(SegmentStore(store.path, read_only=True).get(A)[0], tensors_of(A))
        finally:
            for path in (store.path, store.path / "segments"):
                path.chmod(0o700)
        assert files(store.path) == before

    @linux
    def test_a_limit_on_the_size_of_files(self, store: SegmentStore) -> None:
        before = files(store.path)
        code = f"""
            import resource, sys
            sys.path[:0] = [{str(TESTS)!r}, {str(Path(__file__).parent)!r}]
            import test_store_faults as faults, torch
            store = faults.SegmentStore(sys.argv[1])
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            try:
                store.put(faults.B, {{"x": torch.ones(100_000)}}, {{}}, tokens=1)
            except faults.StoreError as error:
                print(error)
            print(store.put(faults.C, {{"x": torch.ones(10)}}, {{}}, tokens=1))
        """
        command = [sys.executable, "-c", textwrap.dedent(code), str(store.path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        reason, put_ = done.stdout.splitlines()
        assert "cannot be written" in reason and "too large" in reason.lower() and put_ == "True"
        store.remove(C)
        assert files(store.path) == before


# ------------------------------------------------------------------------------------------------- damage


def mutated(content: bytes, chosen: random.Random, low: int, high: int) -> bytes:
    """Damage somewhere in ``[low, high)``."""
    at = chosen.randrange(low, max(high, low + 1))
    kind = chosen.randrange(7)
    if kind <= 1 and at < len(content):
        return content[:at] + bytes([content[at] ^ (1 << chosen.randrange(8))]) + content[at + 1 :]
    if kind == 2:
        return content[:at]
    if kind == 3:
        count = chosen.randrange(1, 40)
        return content[:at] + bytes(len(content[at : at + count])) + content[at + count :]
    if kind == 4:
        return content[:at] + chosen.randbytes(chosen.randrange(1, 9)) + content[at:]
    if kind == 5:
        return content[:at] + content[at + chosen.randrange(1, 9) :]
    count = chosen.randrange(1, 9)
    return content[:at] + chosen.randbytes(count) + content[at + count :]


def damage(folder: Path, name: str, chosen: random.Random) -> tuple[Path, bytes]:
    """Damages a file of a store; returns it and what it was."""
    data, manifest = (folder / "segments" / f"{name}.{suffix}" for suffix in ("safetensors", "json"))
    kind = chosen.choice(("length", "header", "data", "data", "manifest", "manifest", "store"))
    path = {"manifest": manifest, "store": folder / "store.json"}.get(kind, data)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    low, high = {"length": (0, 8), "header": (8, start), "data": (start, len(content))}.get(kind, (0, len(content)))
    replace(path, mutated(content, chosen, low, high))
    return path, content


class TestDamage:
    def test_what_comes_back_is_what_was_put_or_an_error_with_a_reason(self, tmp_path: Path) -> None:
        folder = tmp_path / "store"
        store = SegmentStore(folder)
        small = {"codes": torch.arange(60, dtype=torch.int8), "x": torch.randn(4, 3), "none": torch.empty(0, 2)}
        store.put(A, small, {"key": [1, 2, {"a": "b"}], "probe": None, "seconds": 0.25}, tokens=9)
        put(store, B)
        want = store.manifest(A)
        chosen, refused, used = random.Random(3), 0, 0
        for index in range(MUTATIONS):
            path, content = damage(folder, A, chosen)
            try:
                store = SegmentStore(folder, read_only=True)
                got, manifest = store.get(A)
            except StoreError as error:
                refused += bool(str(error).strip())
            else:
                assert same(got, small), index
                # spaces between its fields may have come or gone
                assert dataclasses.replace(manifest, nbytes=want.nbytes) == want, index
                used += 1
                del got
            if path.name != "store.json":
                assert same(store.get(B)[0], tensors_of(B)) and sorted(store.names()) == [A, B]
                reasons = store.verify()
                assert reasons[B] is None and reasons[A] != ""
            replace(path, content)
        assert refused + used == MUTATIONS and refused > 0.8 * MUTATIONS
        assert set(SegmentStore(folder).verify().values()) == {None}

    def test_every_bit_of_a_small_segment(self, tmp_path: Path) -> None:
        folder = tmp_path / "store"
        store = SegmentStore(folder)
        small = {"x": torch.arange(6, dtype=torch.int16)}
        store.put(A, small, {}, tokens=1)
        for path in (folder / "segments").iterdir():
            content = path.read_bytes()
            for bit in range(0, 8 * len(content), 1 if FULL else 7):
                at = bit // 8
                replace(path, content[:at] + bytes([content[at] ^ (1 << bit % 8)]) + content[at + 1 :])
                try:
                    got, _ = store.get(A)
                except StoreError:
                    continue
                assert same(got, small)
                del got
            replace(path, content)
        assert store.verify() == {A: None}


# ------------------------------------------------------------------------------------- damage, seen by a pool

PROMPTS = [random_ids(90, seed=31), random_ids(70, seed=32), random_ids(80, seed=33)]
CONTEXT = random_ids(100, seed=34)


def answers(engine: Engine, count: int = 5) -> list[tuple[list[int], int]]:
    """Greedy tokens and cached tokens of each prompt, the first continued, and one over a context."""
    engine._eos_ids = frozenset()
    done = []
    for prompt in (*PROMPTS, [*PROMPTS[0], *range(50, 60)])[:count]:
        completion = engine.submit(Request(tuple(prompt), None, SamplingParams(max_tokens=4))).result(60)
        done.append((list(completion.token_ids), completion.cached_tokens))
    if count < 5:
        return done
    segment = engine.pool.build(CONTEXT, "k8v3")
    prompt = (*CONTEXT, *range(20, 26))
    completion = engine.submit(Request(prompt, segment, SamplingParams(max_tokens=4))).result(60)
    done.append((list(completion.token_ids), completion.cached_tokens))
    engine.pool.keep(segment)
    return done


class Stored:
    """A store that an engine has left, and what an engine without any says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.tokenizer = tiny_model("llama"), tiny_tokenizer()
        with_cache = Engine(self.model, self.tokenizer, prefix_cache=True)
        with_cache.pool.open_store(folder)
        answers(with_cache, 3)
        assert with_cache.pool.save().segments == 3
        answers(with_cache)  # the first goes on in a segment of its own, since it is stored
        assert with_cache.pool.save().segments == 3  # and what was said over the context
        with_cache.close()
        without = Engine(self.model, self.tokenizer, prefix_cache=False)
        self.want = [tokens for tokens, _ in answers(without)]
        without.close()
        store = SegmentStore(folder)
        self.names = store.names()
        self.prompt_of: dict[str, int] = {}
        for name in self.names:
            metadata = store.manifest(name).metadata
            ids = store.get(name)[0]["token_ids"].tolist()
            if metadata["codec"] == "k8v3":
                self.prompt_of[name] = 4
            elif metadata["base"]:
                self.prompt_of[name] = 5
            elif metadata["requires"]:
                self.prompt_of[name] = 3
            else:
                self.prompt_of[name] = next(i for i, prompt in enumerate(PROMPTS) if prompt[:9] == ids[:9])
        assert sorted(self.prompt_of.values()) == [0, 1, 2, 3, 4, 5]

    def name(self, prompt: int) -> str:
        return next(name for name, index in self.prompt_of.items() if index == prompt)

    def check(self, folder: Path, damaged: int | None = None) -> tuple[Any, list[int]]:
        """A pool that opens a store answers as without one, and uses what does not depend on the damaged one."""
        engine = Engine(self.model, self.tokenizer, prefix_cache=True)
        try:
            try:
                report = engine.pool.open_store(folder)
            except StoreError:  # its store.json
                report = None
            got = answers(engine)
        finally:
            engine.close()
        for index, (tokens, _) in enumerate(got):
            prompt = PROMPTS[index] if index < 3 else [*PROMPTS[0], *range(50, 60)]
            if index < 4:
                assert_same_tokens(self.model, prompt, tokens, self.want[index])
            else:
                assert tokens == self.want[index]
        cached = [count for _, count in got]
        assert report is not None or damaged is None
        if report is not None:
            for index in range(3):
                if index != damaged:
                    assert cached[index] == len(PROMPTS[index]) - 1, (index, damaged, report)
        return report, cached


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(tmp_path_factory.mktemp("stored") / "store")


class TestDamageInPools:
    def test_an_intact_one(self, stored: Stored, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        shutil.copytree(stored.folder, tmp_path / "store")
        report, cached = stored.check(tmp_path / "store")
        assert (report.segments, report.refused) == (6, {})
        assert cached[:3] == [len(prompt) - 1 for prompt in PROMPTS] and cached[3] == 99
        assert not caplog.records

    def test_mutations(self, stored: Stored, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        chosen, reasons = random.Random(4), 0
        caplog.set_level(logging.WARNING)
        for index in range(POOL_MUTATIONS):
            folder = tmp_path / str(index)
            shutil.copytree(stored.folder, folder)
            name = chosen.choice(stored.names)
            path, _ = damage(folder, name, chosen)
            damaged = stored.prompt_of[name] if path.name != "store.json" else None
            caplog.clear()
            report, _ = stored.check(folder, damaged)
            messages = [record.getMessage() for record in caplog.records]
            assert all(message.split(":", 1)[1].strip() for message in messages)
            try:
                sound = SegmentStore(folder, read_only=True).verify(name) == {name: None}
            except StoreError:
                assert report is None
                continue
            # each refusal is told, and only those
            assert bool(messages) != sound or damaged is None
            reasons += bool(messages)
            shutil.rmtree(folder)
        assert reasons > POOL_MUTATIONS // 2

    def test_a_disk_that_fills_up_while_a_pool_demotes(
        self, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        engine = Engine(stored.model, stored.tokenizer, prefix_cache=True, max_pool_bytes=400_000)
        engine.pool.open_store(tmp_path / "store")
        before = files(tmp_path / "store")
        for fault in (OSError(errno.ENOSPC, "No space left on device"), MemoryError("none"), RuntimeError("any")):

            def fail(*args: Any, fault: BaseException = fault) -> None:
                raise fault

            monkeypatch.setattr(store_module, "save_file", fail)
            got = answers(engine)
            assert [tokens for tokens, _ in got][4] == stored.want[4]
            for prompt, (tokens, _), want in zip(PROMPTS, got, stored.want, strict=False):
                assert_same_tokens(stored.model, prompt, tokens, want)
            assert engine.pool.stats().num_bytes <= 400_000
        stats = engine.pool.stats()
        assert stats.evictions > 0 and stats.demotions == 0
        messages = [record.getMessage() for record in caplog.records]
        assert any("is dropped" in message and "the disk is full" in message for message in messages)
        assert files(tmp_path / "store") == before
        engine.close()


# ------------------------------------------------------------------------------------------------- forgery


def seal(folder: Path, name: str, data: bytes, manifest: dict[str, Any], *, under: str | None = None) -> None:
    """Writes both files with checksums that fit."""
    manifest = {key: value for key, value in manifest.items() if key != "checksum"}
    manifest |= {"data_bytes": len(data), "data_sha256": hashlib.sha256(data).hexdigest(), "name": under or name}
    segments = folder / "segments"
    for suffix in ("json", "safetensors"):
        (segments / f"{name}.{suffix}").unlink()
    replace(segments / f"{under or name}.safetensors", data)
    text = json.dumps({**manifest, "checksum": _checksum(manifest)})
    replace(segments / f"{under or name}.json", text.encode())


def parts(folder: Path, name: str) -> tuple[dict[str, Any], bytes, dict[str, Any]]:
    """Header, data and manifest of a segment."""
    content = (folder / "segments" / f"{name}.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    manifest = json.loads((folder / "segments" / f"{name}.json").read_bytes())
    return json.loads(content[8 : 8 + length]), content[8 + length :], manifest


def framed(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def follow(header: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Lets the manifest say what a forged header says."""
    manifest["tensors"] = {
        key: {"dtype": value["dtype"], "shape": value["shape"], "crc32": 0} for key, value in header.items()
    }


def set_of(key: str, field: str, value: Any) -> Callable[[dict[str, Any], bytes], Any]:
    def edit(header: dict[str, Any], data: bytes) -> bytes:
        header[key][field] = value
        return framed(header, data)

    return edit


def raw(text: Callable[[dict[str, Any]], bytes]) -> Callable[[dict[str, Any], bytes], bytes]:
    return lambda header, data: framed(text(header), data)


HEADERS: dict[str, Callable[[dict[str, Any], bytes], bytes]] = {
    "offsets beyond the file": set_of("x", "data_offsets", [0, 1 << 40]),
    "offsets and shape beyond the file": lambda h, d: framed(
        {**h, "x": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}, d
    ),
    "offsets backwards": set_of("x", "data_offsets", [48, 0]),
    "negative offsets": set_of("x", "data_offsets", [-48, 0]),
    "offsets that are no numbers": set_of("x", "data_offsets", ["0", "48"]),
    "three offsets": set_of("x", "data_offsets", [0, 48, 96]),
    "no offsets": set_of("x", "data_offsets", None),
    "floats as offsets": set_of("x", "data_offsets", [0.0, 48.0]),
    "overlapping tensors": lambda h, d: framed({**h, "y": {**h["x"]}}, d),
    "partly overlapping tensors": lambda h, d: framed(
        {**h, "z": {"dtype": "I8", "shape": [10], "data_offsets": [40, 50]}}, d
    ),
    "a hole": lambda h, d: framed({"x": h["x"]}, d),
    "negative shape": set_of("x", "shape", [-4, -3]),
    "huge shape": set_of("x", "shape", [1 << 62, 1 << 62]),
    "shape that overflows to its size": set_of("x", "shape", [(1 << 62) + 3, 4]),
    "shape of nothing and everything": set_of("x", "shape", [0, 1 << 70]),
    "shape of millions of axes": set_of("x", "shape", [2] * 300_000),
    "deep shape": set_of("x", "shape", [[[[]]]]),
    "shape of text": set_of("x", "shape", ["4", "3"]),
    "no shape": set_of("x", "shape", None),
    "an unknown dtype": set_of("x", "dtype", "F8_E4M3"),
    "a dtype that is no text": set_of("x", "dtype", 32),
    "another dtype": set_of("x", "dtype", "I64"),
    "no dtype": lambda h, d: framed({**h, "x": {"shape": [4, 3], "data_offsets": [0, 48]}}, d),
    "a tensor that is a number": lambda h, d: framed({**h, "x": 5}, d),
    "a huge header length": lambda h, d: framed(h, d, (1 << 63) + 1),
    "a header length past the end": lambda h, d: framed(h, d, 100_000),
    "a header length of all bits": lambda h, d: framed(h, d, (1 << 64) - 1),
    "a header length of 0": lambda h, d: framed(h, d, 0),
    "a huge header": lambda h, d: framed(json.dumps(h).encode() + b" " * (17 << 20), d),
    "duplicate keys": raw(lambda h: b'{"x":' + json.dumps(h["x"]).encode() + b"," + json.dumps(h).encode()[1:]),
    "duplicate fields": raw(lambda h: json.dumps(h).encode().replace(b'"dtype"', b'"dtype": "I8", "dtype"', 1)),
    "deeply nested": raw(lambda h: b'{"__metadata__":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deeply nested objects": raw(lambda h: b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a list": raw(lambda h: b"[]"),
    "a number": raw(lambda h: b"1" * 5000),
    "no utf-8": raw(lambda h: b'{"\xff": 1}'),
    "nothing": lambda h, d: b"",
    "seven bytes": lambda h, d: b"1234567",
    "an archive": lambda h, d: b"PK\3\4" + bytes(200),
    "a pickle": lambda h, d: b"\x80\x04cos\nsystem\n(S'touch /tmp/x'\ntR." + bytes(100),
}


class TestForgedFiles:
    @pytest.fixture
    def store(self, tmp_path: Path) -> SegmentStore:
        store = SegmentStore(tmp_path / "store")
        tensors = {"x": torch.arange(12, dtype=torch.float32).reshape(4, 3), "y": torch.arange(60, dtype=torch.int8)}
        store.put(A, tensors, {}, tokens=1)
        put(store, B)
        return store

    @pytest.mark.parametrize("told", [False, True], ids=["manifest as it was", "manifest that agrees"])
    @pytest.mark.parametrize("case", HEADERS)
    def test_headers(self, store: SegmentStore, case: str, told: bool) -> None:
        header, data, manifest = parts(store.path, A)
        forged = HEADERS[case](header, data)
        if told:
            try:
                follow(json.loads(forged[8 : len(forged) - len(data)]), manifest)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                manifest["tensors"] = {}  # there is nothing to agree with
        seal(store.path, A, forged, manifest)
        started = time.monotonic()
        for verify in (True, False):
            with pytest.raises(StoreError) as caught:
                store.get(A, verify=verify)
            assert str(caught.value).strip()
        assert time.monotonic() - started < 20
        assert store.verify()[B] is None
        assert store.gc(delete_corrupt=True).removed_files == 2 and store.names() == [B]

    def test_data_that_are_not_aligned_are_read_or_refused(self, store: SegmentStore) -> None:
        header, data, manifest = parts(store.path, A)
        text = json.dumps(header).encode()
        for spaces in range(9):
            padded = text + b" " * spaces
            seal(store.path, A, len(padded).to_bytes(8, "little") + padded + data, manifest)
            try:
                got, _ = store.get(A)
            except StoreError:
                assert spaces % 4
            else:
                assert got["x"].flatten().tolist() == list(range(12)) and got["y"].tolist() == list(range(60))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("tokens", "1"),
            ("tokens", None),
            ("tokens", True),
            ("tokens", -1),
            ("tensors", []),
            ("tensors", {"x": 5, "y": 5}),
            ("tensors", {"x": {}, "y": {}}),
            ("tensors", {}),
            ("metadata", [1]),
            ("metadata", None),
            ("metadata", {"deep": json.loads("[" * 150 + "]" * 150)}),
            ("version", 2),
            ("version", "1"),
            ("version", True),
            ("version", 1.0),
            ("version", None),
        ],
    )
    def test_manifests(self, store: SegmentStore, field: str, value: Any) -> None:
        header, data, manifest = parts(store.path, A)
        seal(store.path, A, framed(header, data), {**manifest, field: value})
        with pytest.raises(StoreError, match=r"\w"):
            store.get(A)
        assert store.verify()[B] is None

    @pytest.mark.parametrize("created", [None, "x", [], 10**400, -1, 1e300, {}])
    def test_times(self, store: SegmentStore, created: Any) -> None:
        header, data, manifest = parts(store.path, A)
        seal(store.path, A, framed(header, data), {**manifest, "created": created})
        assert isinstance(store.manifest(A).created, float)

    @pytest.mark.parametrize(
        "text",
        [b"", b"[]", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b'"\xff"', b"{}", b" " * (5 << 20)],
        ids=lambda text: repr(text[:8]),
    )
    def test_manifests_that_are_none(self, store: SegmentStore, text: bytes) -> None:
        replace(store.path / "segments" / f"{A}.json", text)
        with pytest.raises(StoreError, match=r"\w"):
            store.get(A)
        assert store.verify()[B] is None and store.names()

    def test_one_under_the_name_of_another(self, store: SegmentStore) -> None:
        segments = store.path / "segments"
        for suffix in ("json", "safetensors"):
            shutil.copy(segments / f"{A}.{suffix}", segments / f"{C}.{suffix}")
        with pytest.raises(StoreError, match="another segment's"):
            store.get(C)


Tensors = dict[str, Tensor]
Facts = dict[str, Any]


def _swap_layers(t: Tensors, m: Facts) -> None:
    for key in [key for key in t if key.startswith("000.")]:
        other = "001." + key[4:]
        t[key], t[other] = t[other], t[key]


def _scaled(t: Tensors, m: Facts) -> None:
    for key in t:
        if key.endswith(".values"):
            t[key] = t[key] * 1.2


def _noisy(t: Tensors, m: Facts) -> None:
    for key in t:
        if t[key].is_floating_point():
            t[key] = t[key] + 0.2 * torch.randn(t[key].shape)


def _fill(value: float, key: str = "002.exact.values") -> Callable[[Tensors, Facts], None]:
    def edit(t: Tensors, m: Facts) -> None:
        t[key] = torch.full_like(t[key], value)

    return edit


def _one_nan(t: Tensors, m: Facts) -> None:
    t["001.exact.values"] = t["001.exact.values"].clone()
    t["001.exact.values"][0, 5, 3] = math.nan


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Facts], None]:
    def edit(t: Tensors, m: Facts) -> None:
        for key in t:
            if key != "token_ids":
                t[key] = change(t[key]).contiguous()

    return edit


def _ids(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Facts], None]:
    def edit(t: Tensors, m: Facts) -> None:
        t["token_ids"] = change(t["token_ids"].clone())

    return edit


def _probe(change: Callable[[Facts], object]) -> Callable[[Tensors, Facts], None]:
    def edit(t: Tensors, m: Facts) -> None:
        change(m["probe"])

    return edit


def _layer(field: str, value: Any) -> Callable[[Tensors, Facts], None]:
    def edit(t: Tensors, m: Facts) -> None:
        m["layers"][1][field] = value

    return edit


def _set(field: str, value: Any) -> Callable[[Tensors, Facts], None]:
    def edit(t: Tensors, m: Facts) -> None:
        m[field] = value

    return edit


def _drop(field: str) -> Callable[[Tensors, Facts], None]:
    def edit(t: Tensors, m: Facts) -> None:
        del m[field]

    return edit


def _without(key: str) -> Callable[[Tensors, Facts], None]:
    def edit(t: Tensors, m: Facts) -> None:
        del t[key]

    return edit


def _set_id(value: int) -> Callable[[Tensor], Tensor]:
    def change(ids: Tensor) -> Tensor:
        ids[3] = value
        return ids

    return change


SEGMENTS: dict[str, Callable[[Tensors, Facts], None]] = {
    "swapped layers": _swap_layers,
    "scaled values": _scaled,
    "noise": _noisy,
    "zeros": _fill(0.0),
    "a NaN": _one_nan,
    "NaN everywhere": _fill(math.nan),
    "inf in keys": _fill(math.inf, "001.exact.keys"),
    "NaN in the last keys": _fill(math.nan, "002.exact.keys"),
    "another dtype": _each(lambda x: x.half()),
    "another head_dim": _each(lambda x: x[..., :16]),
    "another number of heads": _each(lambda x: x[:1]),
    "fewer tokens": _each(lambda x: x[:, :-1]),
    "flat tensors": _each(lambda x: x.flatten()),
    "empty tensors": _each(lambda x: x[:, :0]),
    "integers": _each(lambda x: x.to(torch.int32)),
    "keys without values": _without("001.exact.values"),
    "a missing layer": _without("002.exact.keys"),
    "no token ids": _without("token_ids"),
    "one id changed": _ids(_set_id(7)),
    "an id beyond the vocabulary": _ids(_set_id(VOCABULARY)),
    "a negative id": _ids(_set_id(-1)),
    "ids of another dtype": _ids(lambda x: x.long()),
    "ids that are floats": _ids(lambda x: x.float() + 0.5),
    "ids that are NaN": _ids(lambda x: x.float() * math.nan),
    "huge ids": _ids(lambda x: x.long() + 2**40),
    "ids of two axes": _ids(lambda x: x[None]),
    "ids of no axis": _ids(lambda x: x[0]),
    "no ids": _ids(lambda x: x[:0]),
    "fewer ids": _ids(lambda x: x[:-1]),
    "too few layers": lambda t, m: m["layers"].pop(),
    "too many layers": lambda t, m: m["layers"].append(m["layers"][0]),
    "no layers": _set("layers", []),
    "layers that are a number": _set("layers", 3),
    "a layer that starts elsewhere": _layer("start", 64),
    "a layer that starts before": _layer("start", -1),
    "a layer of more tokens": _layer("tokens", 10**6),
    "a layer of no tokens": _layer("tokens", 0),
    "a layer that says packed": _layer("packed", 64),
    "a layer of negative packed": _layer("packed", -64),
    "a layer of text": _layer("tokens", "many"),
    "salt of another tenant": _set("salt", salt_digest("other")),
    "salt of no text": _set("salt", 5),
    "spans of itself": lambda t, m: m.update(spans=[["f" * 64, 0, 10, 0]]),
    "spans of text": _set("spans", "abc"),
    "spans of numbers": _set("spans", [[1, 2, 3]]),
    "requires what is not there": _set("requires", ["0" * 64]),
    "requires text": _set("requires", "abc"),
    "requires numbers": _set("requires", [5]),
    "requires lists": _set("requires", [[[]]]),
    "requires nothing at all": _set("requires", None),
    "another key": lambda t, m: m["key"].__setitem__(1, "0" * 64),
    "a key of another codec": lambda t, m: m["key"].__setitem__(2, "k8v3"),
    "a key over others": lambda t, m: m["key"].__setitem__(0, [["0" * 64, "exact", 0, 10, 0]]),
    "a key of text": _set("key", "key"),
    "a key of objects": _set("key", {}),
    "a deep key": _set("key", [[[[[[]]]]], [], []]),
    "another codec": _set("codec", "k8v3"),
    "an unknown codec": _set("codec", "zip"),
    "a codec of no text": _set("codec", ["exact"]),
    "exact tokens": _set("exact_tokens", 32),
    "exact tokens as text": _set("exact_tokens", "32"),
    "another identity": _set("identity", "0" * 64),
    "another format": _set("format", 2),
    "a base that is not its own": _set("base", [["0" * 64, "k8v3", 0, 10, 0]]),
    "a base of negative length": _set("base", [["0" * 64, "exact", 10, 0, 0]]),
    "a base of text": _set("base", "base"),
    "seconds of text": _set("seconds", "long"),
    "seconds without end": _set("seconds", 10**400),
    "agents of numbers": _set("agents", 5),
    "no probe": _set("probe", None),
    "a probe of text": _set("probe", "probe"),
    "a probe of nothing": _set("probe", {}),
    "other logits": _probe(lambda p: p.update(logits=[x + 1 for x in p["logits"]])),
    "one other logit": _probe(lambda p: p["logits"].__setitem__(3, p["logits"][3] + 0.5)),
    "logits of text": _probe(lambda p: p.update(logits=["1"] * len(p["logits"]))),
    "no logits": _probe(lambda p: p.update(logits=[], ids=[])),
    "too few logits": _probe(lambda p: p["logits"].pop()),
    "one token twice": _probe(lambda p: p.update(ids=[p["ids"][0]] * 16, logits=[p["logits"][0]] * 16)),
    "another logsumexp": _probe(lambda p: p.update(logsumexp=p["logsumexp"] - 1)),
    "probe of other tokens": _probe(lambda p: p["tokens"].__setitem__(0, 9)),
    "probe of no tokens": _probe(lambda p: p.update(tokens=[])),
    "probe of ids beyond the vocabulary": _probe(lambda p: p["ids"].__setitem__(0, 10**6)),
    "probe of text ids": _probe(lambda p: p.update(ids=["a"] * 16)),
    **{
        f"no {field}": _drop(field)
        for field in (
            "format",
            "key",
            "identity",
            "codec",
            "exact_tokens",
            "salt",
            "spans",
            "base",
            "requires",
            "layers",
        )
    },
    "no metadata at all": lambda t, m: m.clear(),
}


def reseal(folder: Path, name: str, edit: Callable[[Tensors, Facts], Any], *, under: str | None = None) -> None:
    """Changes a segment, and writes it with checksums that fit."""
    tensors = {key: x.clone() for key, x in load_file(str(folder / "segments" / f"{name}.safetensors")).items()}
    manifest = json.loads((folder / "segments" / f"{name}.json").read_bytes())
    edit(tensors, manifest["metadata"])
    data = save(tensors)
    codes = {dtype: code for code, dtype in store_module._DTYPES.items()}
    manifest["tensors"] = {
        key: {"dtype": codes[x.dtype], "shape": list(x.shape), "crc32": _crc(x)} for key, x in tensors.items()
    }
    seal(folder, name, data, manifest, under=under)


class TestForgedSegments:
    @pytest.fixture(autouse=True)
    def _warnings(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)

    def test_sealed_without_a_change_it_is_used(
        self, stored: Stored, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        shutil.copytree(stored.folder, tmp_path / "store")
        reseal(tmp_path / "store", stored.name(0), lambda tensors, metadata: None)
        report, cached = stored.check(tmp_path / "store")
        assert report.refused == {} and cached[0] == len(PROMPTS[0]) - 1 and not caplog.records

    @pytest.mark.parametrize("case", SEGMENTS)
    def test_it_is_refused_with_a_reason(
        self, stored: Stored, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = tmp_path / "store"
        shutil.copytree(stored.folder, folder)
        name = stored.name(0)
        reseal(folder, name, SEGMENTS[case])
        assert SegmentStore(folder).verify(name) == {name: None}, "the forgery is not well made"
        _, cached = stored.check(folder, 0)
        messages = [record.getMessage() for record in caplog.records if name[:12] in record.getMessage()]
        assert messages and all(message.partition("is not used: ")[2].strip() for message in messages)
        assert cached[0] < len(PROMPTS[0]) - 1

    @pytest.mark.parametrize(
        "case",
        {
            "codes": lambda t, m: t.update({"001.keys.codes": t["001.keys.codes"].flip(2).contiguous()}),
            "code dtype": lambda t, m: t.update({"001.keys.codes": t["001.keys.codes"].view(torch.uint8)}),
            "NaN scales": lambda t, m: t["001.values.scales"].fill_(math.nan),
            "inf scales": lambda t, m: t["002.keys.scales"].fill_(math.inf),
            "no scales": lambda t, m: t.pop("001.keys.scales"),
            "scales cut": lambda t, m: t.update({"001.keys.scales": t["001.keys.scales"][:, :1].contiguous()}),
            "another seed": lambda t, m: m["layers"][0].update(sign_seed=12345),
            "seed of text": lambda t, m: m["layers"][0].update(sign_seed="seed"),
            "a huge seed": lambda t, m: m["layers"][0].update(sign_seed=10**30),
            "exact": lambda t, m: (m.update(codec="exact"), m["key"].__setitem__(2, "exact")),
            "in the tree of prompts": lambda t, m: m.update(base=[]),
            "nothing packed": lambda t, m: [layer.update(packed=0) for layer in m["layers"]],
        }.items(),
        ids=lambda case: case[0],
    )
    def test_packed_ones(
        self,
        stored: Stored,
        tmp_path: Path,
        case: tuple[str, Callable[[Tensors, Facts], Any]],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        folder = tmp_path / "store"
        shutil.copytree(stored.folder, folder)
        name = stored.name(4)
        reseal(folder, name, case[1])
        stored.check(folder, 4)
        assert any(name[:12] in record.getMessage() for record in caplog.records)

    def test_a_cycle(self, stored: Stored, tmp_path: Path) -> None:
        folder = tmp_path / "store"
        shutil.copytree(stored.folder, folder)
        first, second = stored.name(0), stored.name(3)
        reseal(folder, first, _set("requires", [second]))
        report, _ = stored.check(folder, 0)
        assert report.refused.keys() == {first, second}
        assert all("refer to each other" in reason for reason in report.refused.values())
        reseal(folder, stored.name(1), _set("requires", [stored.name(1)]))
        engine = Engine(stored.model, stored.tokenizer)
        assert engine.pool.open_store(folder).refused.keys() == {first, second, stored.name(1)}
        engine.close()

    def test_another_name(self, stored: Stored, tmp_path: Path) -> None:
        folder = tmp_path / "store"
        shutil.copytree(stored.folder, folder)
        reseal(folder, stored.name(0), lambda tensors, metadata: None, under=C)
        report, _ = stored.check(folder, 0)
        assert "its name is not that of its key" in report.refused[C]
        assert "is not there, or not usable" in report.refused[stored.name(3)]

    def test_another_name_for_the_same_tokens(self, stored: Stored, tmp_path: Path) -> None:
        """Two stored segments of one text, one of them with a key of its own: each is used or refused, nothing fails."""
        folder = tmp_path / "store"
        shutil.copytree(stored.folder, folder)
        other = tmp_path / "other"
        shutil.copytree(stored.folder, other)
        name = stored.name(1)
        reseal(other, name, lambda t, m: m.update(key=[[["0" * 64, "exact", 0, 5, 0]], *m["key"][1:]]))
        key = json.loads((other / "segments" / f"{name}.json").read_bytes())["metadata"]["key"]
        forged = hashlib.sha256(b"polykv/entry/1" + json.dumps(key).encode()).hexdigest()
        reseal(other, name, lambda t, m: None, under=forged)
        for suffix in ("json", "safetensors"):
            shutil.copy(other / "segments" / f"{forged}.{suffix}", folder / "segments" / f"{forged}.{suffix}")
        report, _ = stored.check(folder)
        assert report.refused.keys() == {forged}

    def test_what_is_refused_is_written_anew(
        self, stored: Stored, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = tmp_path / "store"
        shutil.copytree(stored.folder, folder)
        name = stored.name(0)
        reseal(folder, name, _scaled)
        engine = Engine(stored.model, stored.tokenizer, prefix_cache=True)
        engine.pool.open_store(folder)
        answers(engine)
        engine.pool.save()
        engine.close()
        assert caplog.records
        caplog.clear()
        _, cached = stored.check(folder)
        assert not caplog.records and cached[0] == len(PROMPTS[0]) - 1


def test_nothing_of_a_store_is_unpickled() -> None:
    """No module of the library imports what runs code from files."""
    for path in Path(polykv.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = [f"{node.value.id}.{node.attr}"]
            else:
                continue
            for name in names:
                assert name.split(".")[0] not in ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"), path
                assert name not in ("torch.load", "joblib.load", "numpy.load", "np.load"), path
