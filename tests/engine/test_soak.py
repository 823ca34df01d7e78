"""Thousands of requests, of which many are cancelled, late or broken: nothing leaks, and every answer is the right one."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from helpers import FULL, assert_same_tokens, greedy, random_ids, tiny_model

from polykv import Engine, SamplingParams
from polykv.codecs import get_codec
from polykv.engine import Request
from polykv.engine.request import RequestHandle
from polykv.engine.sampling import Sampler
from polykv.errors import NonFiniteLogitsError, RequestCancelledError, RequestTimeoutError
from polykv.models.tails import Tail
from polykv.pool import KVSegment

REQUESTS = 2000 if FULL else 480
WORKERS = 8
OUTSTANDING = 8
MOST_TOKENS = 24
SICK, HEAVY = 7, 8  # tokens: the one breaks the logits, the other the forward
ILL_SEED = 666  # breaks the sampler
FATES = ("well",) * 12 + ("cancelled",) * 4 + ("late",) * 2 + ("sick", "heavy", "ill")
ENDS: dict[str, type[Exception]] = {
    "cancelled": RequestCancelledError,
    "late": RequestTimeoutError,
    "sick": NonFiniteLogitsError,
    "heavy": MemoryError,
    "ill": ArithmeticError,
}
CONTEXTS = [[t for t in random_ids(40 + 30 * i, seed=i) if t > HEAVY] for i in range(5)]
COLD = [t for t in random_ids(70, seed=50) if t > HEAVY]
"""A context that nobody holds: it is built whenever somebody wants it, and goes again."""


@dataclass(frozen=True)
class Ask:
    """One prompt; of each many requests are made, of any length and fate."""

    prompt: tuple[int, ...]
    context: int | None
    shared_tokens: int
    seed: int | None


def asks() -> list[Ask]:
    """Over five contexts, over none, over one that must be built, and over one that must be built after another."""
    chosen = random.Random(1)
    made = []
    for index in range(56):
        own = [t for t in random_ids(chosen.choice((1, 3, 8, 40, 150)), seed=100 + index) if t > HEAVY] + [20]
        seed = index if index % 7 == 0 else None
        kind = index % 8
        if kind < 5:
            made.append(Ask((*CONTEXTS[kind], *own), kind, 0, seed))
        elif kind == 5:
            made.append(Ask(tuple(own), None, 0, seed))
        elif kind == 6:
            made.append(Ask((*COLD, *own), None, len(COLD), seed))
        else:
            prompt = (*CONTEXTS[0], *COLD, *own)
            made.append(Ask(prompt, 0, len(prompt) - len(own), seed))
    return made


class Soak:
    """Makes requests from several threads, in several ways, and checks how each of them ends."""

    def __init__(self, engine: Engine, segments: list[KVSegment]) -> None:
        self.engine, self.segments, self.asks = engine, segments, asks()
        self.outcomes: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self.memory: list[int] = []
        self._process, self._lock = psutil.Process(), threading.Lock()
        self.alone = [self.submit(ask, MOST_TOKENS).result(60).token_ids for ask in self.asks]

    def submit(self, ask: Ask, max_tokens: int, fate: str = "well", timeout: float | None = None) -> RequestHandle:
        prompt = ask.prompt
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0 if ask.seed is None else 1.0, seed=ask.seed)
        if fate == "sick":
            prompt = (*prompt, SICK)
        elif fate == "heavy":
            prompt = (*prompt, HEAVY)
        elif fate == "ill":
            sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=ILL_SEED)
        segment = None if ask.context is None else self.segments[ask.context]
        return self.engine.submit(Request(prompt, segment, sampling, ask.shared_tokens, timeout=timeout))

    def check(self, index: int, max_tokens: int, fate: str, handle: RequestHandle) -> str:
        """How it ended, which must be as its fate has it."""
        ask = self.asks[index]
        try:
            completion = handle.result(60)
        except ENDS.get(fate, ()):
            return fate
        assert fate in ("well", "cancelled", "late"), fate
        want = self.alone[index][:max_tokens]
        assert len(completion.token_ids) == max_tokens
        if ask.seed is None:
            assert_same_tokens(self.engine.model, ask.prompt, completion.token_ids, want)
        else:
            assert completion.token_ids == want
        cached = ask.shared_tokens or (0 if ask.context is None else len(CONTEXTS[ask.context]))
        assert completion.cached_tokens == cached
        return "well"

    def work(self, worker: int, count: int) -> None:
        chosen = random.Random(worker)
        outstanding: list[tuple[int, int, str, RequestHandle]] = []
        try:
            for _ in range(count):
                index, fate = chosen.randrange(len(self.asks)), chosen.choice(FATES)
                max_tokens = chosen.randint(4 if fate == "heavy" else 1, MOST_TOKENS)
                timeout = chosen.choice((0.001, 0.01, 0.05)) if fate == "late" else None
                handle = self.submit(self.asks[index], max_tokens, fate, timeout)
                if fate == "cancelled":
                    self.give_up(chosen.randrange(4), handle, chosen)
                elif fate == "well" and chosen.random() < 0.3:
                    list(handle)
                outstanding.append((index, max_tokens, fate, handle))
                if len(outstanding) >= OUTSTANDING:
                    self.settle(outstanding.pop(chosen.randrange(OUTSTANDING)))
            while outstanding:
                self.settle(outstanding.pop())
        except BaseException as error:
            self.errors.append(error)

    def give_up(self, way: int, handle: RequestHandle, chosen: random.Random) -> None:
        if way == 0:
            handle.cancel()
        elif way == 1:
            with handle:
                time.sleep(chosen.random() * 0.02)
        elif way == 2:
            with handle:
                next(iter(handle), None)
        else:

            async def leave() -> None:
                await asyncio.wait_for(handle.aresult(), 0.001 + chosen.random() * 0.02)

            try:
                asyncio.run(leave())
            except TimeoutError:
                assert handle.cancelled

    def settle(self, entry: tuple[int, int, str, RequestHandle]) -> None:
        outcome = self.check(*entry)
        with self._lock:
            self.outcomes[outcome] += 1
            if sum(self.outcomes.values()) % 20 == 0:
                self.memory.append(self._process.memory_info().rss)


@pytest.fixture
def soak(tokenizer: Any, monkeypatch: Any, caplog: Any) -> Any:
    caplog.set_level(logging.ERROR, logger="polykv")  # warnings would be kept, and with them what was in the forwards
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=64, intermediate_size=64, head_dim=16)
    with torch.no_grad():
        model.model.embed_tokens.weight[SICK] = torch.nan
        model.lm_head.weight[SICK] = 0.0  # so that it is never the most likely one
    engine = Engine(model, tokenizer, max_batch=12, num_threads=1)
    engine.pool.codec = get_codec("exact")
    engine._eos_ids = frozenset()
    forward, sample = engine._runner.forward, Sampler.sample

    def heavy(batch: Any) -> Any:
        logits = forward(batch)
        for work in batch.work:
            if HEAVY in work.sequence.handle.request.token_ids and len(work.sequence.generated) == 2:
                raise MemoryError("no room")
        return logits

    def ill(sampler: Sampler, logits: Any, mask: Any = None) -> Any:
        if sampler._params.seed == ILL_SEED:
            raise ArithmeticError("a processor failed")
        return sample(sampler, logits, mask)

    monkeypatch.setattr(engine._runner, "forward", heavy)
    monkeypatch.setattr(Sampler, "sample", ill)
    segments = [engine.share(context) for context in CONTEXTS]
    yield Soak(engine, segments)
    engine.close()


def test_alone_every_answer_is_the_one_of_transformers(soak: Soak) -> None:
    """What the soak compares with is itself right."""
    for ask, tokens in zip(soak.asks, soak.alone, strict=True):
        if ask.seed is None:
            want = greedy(soak.engine.model, ask.prompt, MOST_TOKENS)
            assert_same_tokens(soak.engine.model, ask.prompt, tokens, want)


def test_nothing_leaks_and_every_answer_is_right(soak: Soak) -> None:
    engine, before = soak.engine, set(threading.enumerate())
    submitted = len(soak.asks) + REQUESTS
    threads = [threading.Thread(target=soak.work, args=(i, REQUESTS // WORKERS)) for i in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if soak.errors:
        raise soak.errors[0]
    assert sum(soak.outcomes.values()) == REQUESTS
    assert soak.outcomes["well"] > REQUESTS // 2
    assert set(soak.outcomes) == set(FATES), "some of everything"

    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.building, stats.tail_bytes) == (0, 0, 0, 0)
    assert stats.finished + stats.failed + stats.cancelled == submitted
    assert stats.cancelled == soak.outcomes["cancelled"]
    assert stats.timed_out == soak.outcomes["late"]
    assert stats.failed == sum(soak.outcomes[fate] for fate in ("late", "sick", "heavy", "ill"))
    assert stats.rejected == 0
    assert 6 < stats.peak_running <= 12
    deadline = time.monotonic() + 10
    while engine._builds and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine._builds == []
    assert engine.pool.num_leases == 0
    assert set(engine.pool.segments) == set(soak.segments)
    assert set(threading.enumerate()) - before <= {engine._thread}

    half = len(soak.memory) // 2
    settled, later = sorted(soak.memory[half : half + 5])[2], sorted(soak.memory[-5:])[2]
    assert later < 1.02 * settled, f"{settled} bytes at half time, {later} at the end"
    engine.close()
    assert set(threading.enumerate()) <= before
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is Tail and x.nbytes]
