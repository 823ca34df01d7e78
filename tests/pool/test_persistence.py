"""Pools on disk: what is saved comes back bit for bit, to the same model only, within every budget, to several processes."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FULL, WINDOW, assert_same_tokens, greedy, random_ids, tiny_model, tiny_tokenizer

from polykv import Engine, SamplingParams, SharedKVPool
from polykv.engine import Request
from polykv.errors import InvalidRequestError
from polykv.pool import KVSegment
from polykv.pool.store import SegmentStore

CODECS = ("exact", "k8v3", "paper")
FIRST, SECOND, THIRD = random_ids(150, seed=1), random_ids(90, seed=2), random_ids(40, seed=3)
QUESTION = random_ids(7, seed=4)
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def equal(got: KVSegment, want: KVSegment) -> None:
    """The same, bit for bit, wherever its tensors lie."""
    assert got is not want
    assert got.key == want.key and got.identity == want.identity and got.salt == want.salt
    assert torch.equal(got.token_ids, want.token_ids) and got.exact_tokens == want.exact_tokens
    for one, other in zip(got.layers, want.layers, strict=True):
        assert (one.start, one.num_tokens, one.num_kv_heads, one.head_dim, one.dtype) == (
            other.start,
            other.num_tokens,
            other.num_kv_heads,
            other.head_dim,
            other.dtype,
        )
        mine, theirs = one.tensors(), other.tensors()
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert mine[key].dtype == theirs[key].dtype
            assert torch.equal(mine[key].contiguous().view(torch.uint8), theirs[key].contiguous().view(torch.uint8))
        if one.values is not None and other.values is not None:
            assert one.values.sign_seed == other.values.sign_seed
    assert (got.parent is None) == (want.parent is None)
    if got.parent is not None and want.parent is not None:
        assert [(x.first, x.stop, x.at) for x in got.parent.chain] == [
            (x.first, x.stop, x.at) for x in want.parent.chain
        ]


def reopened(model: Any, folder: Path, segments: int, **options: Any) -> SharedKVPool:
    pool = SharedKVPool(model, **options)
    report = pool.load(folder)
    assert (report.segments, report.refused) == (segments, {})
    return pool


def tokens_over(model: Any, segment: KVSegment, pool: SharedKVPool, prompt: Sequence[int]) -> list[int]:
    engine = Engine(model, tiny_tokenizer(), pool=pool, prefix_cache=False)
    try:
        request = Request((*prompt, *QUESTION), segment, SamplingParams(max_tokens=8))
        return list(engine.submit(request).result(60).token_ids)
    finally:
        engine.close()


class TestEquality:
    @pytest.mark.parametrize("codec", CODECS)
    def test_every_codec_and_family(self, family_model: Any, codec: str, tmp_path: Path) -> None:
        pool = SharedKVPool(family_model)
        kept = pool.build(FIRST, codec)
        short = pool.build(THIRD[:5], codec)
        report = pool.save(tmp_path)
        assert (report.segments, report.known, report.refused) == (2, 0, {})
        assert report.num_bytes == SegmentStore(tmp_path, read_only=True).nbytes
        again = pool.save(tmp_path)
        assert (again.segments, again.known, again.num_bytes) == (0, 2, 0)
        other = reopened(family_model, tmp_path, 2)
        got = other.build(FIRST, codec)
        equal(got, kept)
        equal(other.build(THIRD[:5], codec), short)
        assert (other.stats().builds, other.stats().restores, other.stats().stored_segments) == (0, 2, 0)
        want = tokens_over(family_model, kept, pool, FIRST)
        assert tokens_over(family_model, got, other, FIRST) == want
        if codec == "exact":
            prompt = [*FIRST, *QUESTION]
            assert_same_tokens(family_model, prompt, want, greedy(family_model, prompt, 8)[: len(want)])

    @pytest.mark.parametrize("codec", CODECS)
    @pytest.mark.parametrize("family", [("llama", None), ("gemma3", WINDOW), ("mistral", WINDOW)], ids=str)
    def test_chains(self, family: tuple[str, int | None], codec: str, tmp_path: Path) -> None:
        """Saved with their parents, whichever codec those have; the leaf brings all of them back."""
        model = tiny_model(*family)
        pool = SharedKVPool(model)
        first = pool.build(FIRST, codec)
        second = pool.build(SECOND, "exact", parent=first)
        third = pool.build(THIRD, codec, parent=second)
        assert pool.save(tmp_path).segments == 3
        other = reopened(model, tmp_path, 3)
        leaves = [entry for entry in other._table if len(entry.tokens) == len(THIRD)]
        with other._lock:
            assert other._table.bring(leaves[0])
        got = leaves[0].segment
        assert got is not None
        for mine, theirs in zip(got.chain, third.chain, strict=True):
            equal(mine.segment, theirs.segment)
        equal(other.build(THIRD, codec, parent=other.build(SECOND, "exact", parent=other.build(FIRST, codec))), third)
        assert (other.stats().builds, other.stats().restores) == (0, 3)
        prompt = [*FIRST, *SECOND, *THIRD]
        assert tokens_over(model, got, other, prompt) == tokens_over(model, third, pool, prompt)

    @pytest.mark.parametrize("codec", CODECS)
    def test_documents_that_stand_anywhere(self, model: Any, codec: str, tmp_path: Path) -> None:
        def engine_of(pool: SharedKVPool) -> Engine:
            engine = Engine(model, tiny_tokenizer(), pool=pool, prefix_cache=True)
            engine._eos_ids = frozenset()
            return engine

        prompt = [*THIRD, *FIRST, *SECOND[:20]]
        pool = SharedKVPool(model)
        kept = pool.build(FIRST, codec, anywhere=True)
        pool.save(tmp_path)
        results = []
        for each in (pool, reopened(model, tmp_path, 1)):
            engine = engine_of(each)
            request = Request(tuple(prompt), None, SamplingParams(max_tokens=8), reuse="anywhere")
            completion = engine.submit(request).result(60)
            results.append((completion.token_ids, completion.cached_tokens))
            engine.close()
        assert results[0] == results[1] and results[1][1] >= len(FIRST) - 32
        other = reopened(model, tmp_path, 1)
        equal(other.build(FIRST, codec, anywhere=True), kept)

    def test_what_requests_have_left(self, model: Any, tmp_path: Path) -> None:
        def ask(engine: Engine, prompt: Sequence[int]) -> tuple[list[int], int]:
            done = engine.submit(Request(tuple(prompt), None, SamplingParams(max_tokens=6))).result(60)
            return list(done.token_ids), done.cached_tokens

        first = Engine(model, tiny_tokenizer(), prefix_cache=True)
        want, _ = ask(first, FIRST)
        longer = [*FIRST, *want, *SECOND]
        more, _ = ask(first, longer)
        first.pool.save(tmp_path)
        first.close()
        second = Engine(model, tiny_tokenizer(), prefix_cache=True)
        assert second.pool.load(tmp_path).refused == {}
        got, cached = ask(second, longer)
        assert cached == len(longer) - 1
        assert_same_tokens(model, longer, got, more)
        got, cached = ask(second, FIRST)
        assert cached == len(FIRST) - 1
        assert_same_tokens(model, FIRST, got, want)
        assert second.pool.stats().builds == 0 and second.pool.num_leases == 0
        second.close()

    def test_salts(self, model: Any, tmp_path: Path) -> None:
        pool = SharedKVPool(model)
        mine, theirs = pool.build(FIRST, "k8v3", salt="mine"), pool.build(FIRST, "k8v3", salt="theirs")
        assert pool.save(tmp_path).segments == 2
        other = reopened(model, tmp_path, 2)
        equal(other.build(FIRST, "k8v3", salt="mine"), mine)
        assert other.build(FIRST, "k8v3").salt == "" and other.stats().builds == 1
        equal(other.build(FIRST, "k8v3", salt="theirs"), theirs)
        assert other.stats().builds == 1
        assert b"theirs" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_other_dtypes(self, dtype: torch.dtype, tmp_path: Path) -> None:
        model = tiny_model("llama").to(dtype)
        pool = SharedKVPool(model)
        kept = [pool.build(FIRST, codec) for codec in CODECS]
        pool.save(tmp_path)
        other = reopened(model, tmp_path, 3)
        for codec, segment in zip(CODECS, kept, strict=True):
            equal(other.build(FIRST, codec), segment)

    def test_a_context_that_fills_the_model_has_room_for_no_probe(self, tmp_path: Path) -> None:
        model = tiny_model("llama", max_position_embeddings=64)
        pool = SharedKVPool(model)
        kept = [pool.build(random_ids(count, seed=count), "exact") for count in (60, 62, 63)]
        pool.save(tmp_path)
        other = reopened(model, tmp_path, 3)
        for segment in kept:
            equal(other.build(segment.token_ids.tolist(), "exact"), segment)


class TestRefusals:
    def test_another_model_is_told_at_once(self, model: Any, tmp_path: Path) -> None:
        SharedKVPool(model).save(tmp_path / "empty")
        pool = SharedKVPool(model)
        pool.build(FIRST, "k8v3")
        pool.build(SECOND, "exact", parent=pool.build(FIRST, "exact"))
        pool.save(tmp_path / "store")
        assert SharedKVPool(model).load(tmp_path / "empty").segments == 0
        others = [tiny_model("llama", seed=1), tiny_model("qwen3"), tiny_model("llama").half(), tiny_model("mistral")]
        for other in others:
            report = SharedKVPool(other).load(tmp_path / "store")
            assert report.segments == 0 and len(report.refused) == 3
            reasons = " ".join(report.refused.values())
            assert "another model or tokenizer" in reasons
        report = SharedKVPool(model, tiny_tokenizer()).load(tmp_path / "store")
        assert report.segments == 0, "whether the tokenizer is the same is not known"

    def test_weights_that_the_identity_does_not_see_are_caught_by_the_probe(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = tiny_model("llama"), tiny_model("llama")
        pool = SharedKVPool(first)
        pool.build(FIRST, "k8v3")
        pool.build(SECOND, "exact")
        pool.save(tmp_path)
        other = SharedKVPool(second)  # its identity is computed here
        with torch.no_grad():
            for layer in second.model.layers:
                layer.self_attn.k_proj.weight.mul_(1.5)
        report = other.open_store(tmp_path)
        assert report.segments == 2, "the identity samples the weights once"
        caplog.set_level(logging.WARNING)
        fresh = other.build(FIRST, "k8v3")
        assert other.stats().builds == 1 and other.stats().restores == 0
        assert any("logits after it are off" in record.getMessage() for record in caplog.records)
        assert other.stats().stored_segments == 1
        # and then it is this model's
        assert other.save().segments == 1
        third = SharedKVPool(second)
        third.open_store(tmp_path)
        equal(third.build(FIRST, "k8v3"), fresh)
        assert third.stats().restores == 1

    def test_a_parent_that_is_gone(self, model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        pool = SharedKVPool(model)
        first = pool.build(FIRST, "k8v3")
        second = pool.build(SECOND, "k8v3", parent=first)
        pool.save(tmp_path)
        store = SegmentStore(tmp_path)
        parent = next(name for name in store.names() if not store.manifest(name).metadata["requires"])
        child = next(name for name in store.names() if name != parent)
        late = SharedKVPool(model)
        assert late.load(tmp_path).segments == 2
        store.remove(parent)
        report = SharedKVPool(model).load(tmp_path)
        assert report.segments == 0 and "is not there, or not usable" in report.refused[child]
        # one that knew it already finds out when it needs it
        again = late.build(SECOND, "k8v3", parent=late.build(FIRST, "k8v3"))
        assert late.stats().builds == 2 and caplog.records
        equal(again, second)

    def test_refresh_needs_a_store(self, model: Any) -> None:
        with pytest.raises(InvalidRequestError, match="open_store"):
            SharedKVPool(model).refresh_store()


class TestTiers:
    def test_refresh_finds_what_another_pool_wrote(self, model: Any, tmp_path: Path) -> None:
        one, two = SharedKVPool(model), SharedKVPool(model)
        one.open_store(tmp_path)
        two.open_store(tmp_path)
        kept = one.build(FIRST, "k8v3")
        child = one.build(SECOND, "exact", parent=kept)
        one.save()
        assert two.stats().stored_segments == 0
        report = two.refresh_store()
        assert (report.segments, report.tokens, report.refused) == (2, len(FIRST) + len(SECOND), {})
        got = two.build(FIRST, "k8v3")
        equal(got, kept)
        equal(two.build(SECOND, "exact", parent=got), child)
        assert two.stats().builds == 0
        assert two.refresh_store().segments == 2 and two.stats().stored_segments == 0

    def test_refresh_notices_what_was_removed(self, model: Any, tmp_path: Path) -> None:
        pool = SharedKVPool(model, max_bytes=math.inf)
        pool.open_store(tmp_path)
        segment = pool.build(FIRST, "k8v3")
        pool.save()
        (entry,) = pool._table
        assert entry.stored
        SegmentStore(tmp_path).remove(entry.name)
        pool.refresh_store()
        assert not entry.stored
        pool.keep(segment)
        with pool._lock:
            pool._table.evict(entry)
        assert len(SegmentStore(tmp_path)) == 1 and not entry.resident

    def test_another_store(self, model: Any, tmp_path: Path) -> None:
        pool = SharedKVPool(model)
        pool.open_store(tmp_path / "one")
        segment = pool.build(FIRST, "k8v3")
        pool.save()
        pool.open_store(tmp_path / "two")
        pool.keep(segment)
        with pool._lock:
            pool._table.evict(next(iter(pool._table)))
        assert len(SegmentStore(tmp_path / "two")) == 1
        equal(pool.build(FIRST, "k8v3"), segment)

    def test_the_least_recently_used_leaves_the_disk(self, model: Any, tmp_path: Path) -> None:
        pool = SharedKVPool(model, max_bytes=math.inf)
        texts = [random_ids(120, seed=seed) for seed in range(6)]
        size = pool.build(texts[0], "exact").num_bytes
        limit = 4 * size + 100_000
        pool = SharedKVPool(model, max_bytes=size)
        pool.open_store(tmp_path, max_bytes=limit)
        for ids in texts[:4]:
            pool.keep(pool.build(ids, "exact"))  # 0, 1 and 2 are on disk
        pool.keep(pool.build(texts[0], "exact"))  # 3 too
        assert pool.stats().restores == 1 and len(SegmentStore(tmp_path)) == 4
        for ids in texts[4:]:
            pool.keep(pool.build(ids, "exact"))
        store = SegmentStore(tmp_path, read_only=True)
        assert store.nbytes <= limit and pool.stats().num_bytes <= size
        held = {tuple(store.get(name)[0]["token_ids"].tolist()) for name in store.names()}
        assert tuple(texts[0]) in held and tuple(texts[1]) not in held

    def test_one_that_is_larger_than_the_store_does_not_empty_it(self, model: Any, tmp_path: Path) -> None:
        pool = SharedKVPool(model, max_bytes=math.inf)
        pool.open_store(tmp_path, max_bytes=250_000)
        pool.keep(pool.build(FIRST[:60], "exact"))
        pool.keep(pool.build(random_ids(300, seed=9), "exact"))
        small, large = pool._table
        with pool._lock:
            pool._table.evict(small)
            pool._table.evict(large)
        assert len(pool._table.tier.store) == 1 and list(pool._table) == [small]  # type: ignore[union-attr]
        report = pool.save()
        assert report.segments == 0

    def test_save_says_what_does_not_fit(self, model: Any, tmp_path: Path) -> None:
        pool = SharedKVPool(model)
        pool.open_store(tmp_path, max_bytes=100_000)
        pool.build(random_ids(300, seed=9), "exact")
        pool.build(FIRST, "k8v3")
        report = pool.save()
        assert report.segments == 1 and len(report.refused) == 1
        assert "max_bytes 100000" in next(iter(report.refused.values()))

    def test_a_read_only_store_is_never_written(self, model: Any, tmp_path: Path) -> None:
        pool = SharedKVPool(model)
        kept = pool.build(FIRST, "exact")
        pool.save(tmp_path)
        (tmp_path / ".lock").unlink(missing_ok=True)
        before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(tmp_path.rglob("*"))}
        other = SharedKVPool(model, max_bytes=2 * kept.num_bytes)
        other.open_store(tmp_path, read_only=True)
        for seed in range(4):
            other.keep(other.build(random_ids(140, seed=seed), "exact"))
            other.keep(other.build(FIRST, "exact"))
        stats = other.stats()
        assert stats.evictions > 0 and stats.num_bytes <= 2 * kept.num_bytes
        assert other.save().segments == 0 and other.refresh_store().segments == 1
        assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(tmp_path.rglob("*"))} == before

    def test_bytes_on_disk_are_those_in_memory(self, model: Any, tmp_path: Path) -> None:
        for codec in CODECS:
            pool = SharedKVPool(model)
            segment = pool.build(random_ids(2000, seed=5), codec)
            pool.save(tmp_path / codec)
            store = SegmentStore(tmp_path / codec, read_only=True)
            assert abs(store.nbytes - segment.num_bytes) <= 0.02 * segment.num_bytes
            other = reopened(model, tmp_path / codec, 1)
            got = other.build(random_ids(2000, seed=5), codec)
            assert abs(got.num_bytes - segment.num_bytes) <= 0.02 * segment.num_bytes
            assert other.stats().num_bytes == got.num_bytes

    def test_leases_of_dead_owners_come_back(self, model: Any, tmp_path: Path) -> None:
        size = SharedKVPool(model).build(FIRST, "exact").num_bytes
        pool = SharedKVPool(model, max_bytes=int(2.2 * size))
        pool.open_store(tmp_path)
        pool.keep(pool.build(FIRST, "exact"))
        pool.keep(pool.build(random_ids(150, seed=6), "exact"))
        pool.keep(pool.build(random_ids(150, seed=7), "exact"))  # the first goes
        assert pool.stats().demotions == 1
        segment = pool.build(FIRST, "exact")
        cache = pool.new_cache(segment)
        pool.keep(segment)
        with torch.no_grad():
            model(torch.tensor([QUESTION]), cache=cache)
        entry = pool._table.get(segment.key)
        assert entry is not None and entry.leases == 1 and pool.num_leases == 1
        pool.keep(pool.build(random_ids(150, seed=8), "exact"))
        assert entry.resident, "a reader keeps it in memory"
        del cache
        gc.collect()
        assert pool.sweep() == 1 and entry.leases == 0
        for seed in (9, 10):
            pool.keep(pool.build(random_ids(150, seed=seed), "exact"))
        assert not entry.resident and pool.num_leases == 0
        equal(pool.build(FIRST, "exact"), segment)

    def test_the_budget_holds_at_every_moment(
        self, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool = SharedKVPool(model, max_bytes=300_000)
        table, peak = pool._table, 0
        pool.open_store(tmp_path, max_bytes=2_000_000)
        tier = table.tier
        assert tier is not None

        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                nonlocal peak
                peak = max(peak, table.num_bytes)
                result = function(*args)
                peak = max(peak, table.num_bytes)
                return result

            return call

        for name in ("demote", "restore"):
            monkeypatch.setattr(tier, name, watched(getattr(tier, name)))
        count_in = table._count_in
        monkeypatch.setattr(table, "_count_in", watched(count_in))
        generator = torch.Generator().manual_seed(0)
        for step in range(200 if FULL else 40):
            number = int(torch.randint(0, 9, (1,), generator=generator))
            codec = CODECS[number % 3]
            segment = pool.build(random_ids(60 + 10 * number, seed=number), codec)
            if number % 2:
                child = pool.build(THIRD, "k8v3", parent=segment)
                pool.keep(child)
            pool.keep(segment)
            assert table.num_bytes <= 300_000 and SegmentStore(tmp_path).nbytes <= 2_000_000, step
            held = sum(entry.segment.num_bytes for entry in table if entry.segment is not None)
            assert held == table.num_bytes
        stats = pool.stats()
        assert stats.restores and stats.demotions and peak <= 300_000
        fresh = SharedKVPool(model, max_bytes=math.inf)
        for number in range(9):
            ids = random_ids(60 + 10 * number, seed=number)
            segment = pool.build(ids, CODECS[number % 3])
            equal(segment, fresh.build(ids, CODECS[number % 3]))
            pool.keep(segment)


# --------------------------------------------------------------------------------------------- processes

PROCESSES = """
    import hashlib, json, os, sys
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_num_threads(1)
    from helpers import random_ids, tiny_model
    from polykv import SharedKVPool

    def work(path, seeds, begin, said):
        pool = SharedKVPool(tiny_model("llama"))
        report = pool.open_store(path)
        os.write(said, b"r")
        os.read(begin, 1)  # until all of them are there
        digests = {{}}
        for seed in seeds:
            segment = pool.build(random_ids(120, seed=seed), "k8v3")
            sha = hashlib.sha256()
            for layer in segment.layers:
                for name, tensor in sorted(layer.tensors().items()):
                    sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            digests[seed] = sha.hexdigest()
            refused = pool.save().refused
        stats = pool.stats()
        return digests, stats.builds, stats.restores, len(report.refused) + len(refused)

    for line in sys.stdin:
        path, *jobs = json.loads(line)
        begin, end = os.pipe()
        children = []
        for seeds in jobs:
            answer, said = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(end)
                os.write(said, json.dumps(work(path, seeds, begin, said)).encode())
                os._exit(0)
            os.close(said)
            children.append((child, answer))
        ready = [os.read(answer, 1) for _, answer in children]
        os.close(begin)
        os.close(end)
        results = [json.loads(os.fdopen(answer).read() or "null") for _, answer in children]
        for child, _ in children:
            os.waitpid(child, 0)
        print(json.dumps(results), flush=True)
"""


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[..., list[Any]]]:
    code = textwrap.dedent(PROCESSES).format(tests=str(TESTS))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )

    def together(folder: Path, *jobs: Sequence[int]) -> list[Any]:
        """Processes with a pool of their own each, which build and save these texts at the same time."""
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps([str(folder), *map(list, jobs)]), file=process.stdin, flush=True)
        results: list[Any] = json.loads(process.stdout.readline())
        return results

    yield together
    process.communicate()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
class TestProcesses:
    @pytest.fixture
    def run(self, processes: Callable[..., list[Any]], tmp_path: Path) -> Callable[..., list[Any]]:
        return lambda *jobs: processes(tmp_path / "store", *jobs)

    def test_one_writes_and_another_reads_then_both_race(self, run: Any, tmp_path: Path) -> None:
        ((want, *counts),) = run([1, 2, 3])
        assert counts == [3, 0, 0]
        # the same names and different ones, at once
        one, two = run([1, 4, 5, 6, 7], [2, 4, 5, 6, 8])
        assert one[1:] == two[1:] == [4, 1, 0]
        for seed, digest in (*one[0].items(), *two[0].items()):
            assert want.setdefault(seed, digest) == digest
        assert len(want) == 8
        store = SegmentStore(tmp_path / "store")
        assert len(store) == 8 and set(store.verify().values()) == {None}
        assert store.gc().removed_files == 0, "nothing is left over"
        ((digests, *counts),) = run(range(1, 9))
        assert digests == want and counts == [0, 8, 0]

    def test_races_lose_nothing(self, run: Any, tmp_path: Path) -> None:
        for first in range(10, 60 if FULL else 15, 5):
            texts = list(range(first, first + 4))
            results = run(texts, texts[::-1], texts, [*texts, first + 4])
            assert all(result[1] == len(result[0]) and result[3] == 0 for result in results)
            assert all(result[0][str(seed)] == results[0][0][str(seed)] for result in results for seed in texts)
        store = SegmentStore(tmp_path / "store")
        assert len(store) == (50 if FULL else 5) and set(store.verify().values()) == {None}
        assert store.gc().removed_files == 0
