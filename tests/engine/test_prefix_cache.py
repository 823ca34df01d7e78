"""Prompts find what the pool holds of their beginnings, and nothing but the time they take depends on it."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import FULL, WINDOW, assert_same_tokens, greedy, random_ids, tiny_model

from polykv import Engine, Grammar, SamplingParams, SharedKVPool
from polykv.engine import Request
from polykv.engine import engine as engine_module
from polykv.engine.engine import MIN_SHARED_TOKENS, StepReport
from polykv.engine.request import Completion, RequestHandle
from polykv.errors import InvalidRequestError, PoolFullError, RequestCancelledError, RequestTimeoutError
from polykv.evaluation import live_tensor_bytes
from polykv_kernels.layouts import tensor_bytes

DOCUMENT = random_ids(150, seed=1)
LONG = random_ids(300, seed=2)
TOKEN_BYTES = 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, head_dim, float32
LOGPROB_TOLERANCE = 1e-4


def params(max_tokens: int = 6, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **options)


def ask(engine: Engine, prompt: Sequence[int], tokens: int = 6, **options: Any) -> RequestHandle:
    segment = options.pop("segment", None)
    sampling = options.pop("sampling", None) or params(tokens)
    return engine.submit(Request(tuple(prompt), segment, sampling, **options))


def answer(engine: Engine, prompt: Sequence[int], tokens: int = 6, **options: Any) -> Completion:
    return ask(engine, prompt, tokens, **options).result(60)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def check_table(engine: Engine) -> None:
    """What the pool counts is what there is; in the engine's thread, or while no request runs."""
    pool = engine.pool
    with pool._lock:
        table = pool._table
        entries = list(table)
        segments = [entry.segment for entry in entries if entry.segment is not None]
        tensors = [
            x
            for segment in segments
            for x in (segment.token_ids, *(t for y in segment.layers for t in y.tensors().values()))
        ]
        assert table.num_bytes == sum(segment.num_bytes for segment in segments) == tensor_bytes(*tensors)
        assert table.max_bytes is None or table.num_bytes <= table.max_bytes
        for entry in entries:
            assert entry.dependents == sum(entry in other.requires for other in entries if other.resident)
            assert all(table.get(required.key) is required for required in entry.requires)
            readers = sum(entry in lease.entries for lease in pool._live)
            assert entry.leases == readers
            needing = [entry, *(other for other in entries if entry in other.requires)]
            assert entry.cached or any(x.handles or x.leases for x in needing), "nobody wants it any more"


def check_idle(engine: Engine) -> None:
    """No request is left, and no claim of one."""
    until(lambda: not (engine._scheduler.running or engine._scheduler.waiting or engine._builds))
    until(lambda: engine.pool.num_leases == 0)
    assert engine.stats().tail_bytes == 0
    check_table(engine)


def check_same(model: Any, prompt: Sequence[int], got: Completion, want: Completion) -> None:
    """The same tokens but for ties, and the same log-probabilities but for rounding."""
    assert_same_tokens(model, prompt, got.token_ids, want.token_ids)
    for one, other in zip(got.logprobs or (), want.logprobs or (), strict=False):
        if one.token_id != other.token_id:
            break
        assert one.logprob is not None and other.logprob is not None
        assert abs(one.logprob - other.logprob) < LOGPROB_TOLERANCE


class Gate:
    """Lets the engine's forwards through one by one, or all of them once it is opened."""

    def __init__(self, engine: Engine) -> None:
        self.passes, self.waiting = threading.Semaphore(0), threading.Event()
        self.batches: list[list[RequestHandle]] = []
        self._open = False
        forward = engine._runner.forward

        def gated(batch: Any) -> Any:
            self.batches.append([work.sequence.handle for work in batch.work])
            if not self._open:
                self.waiting.set()
                assert self.passes.acquire(timeout=60)
            return forward(batch)

        engine._runner.forward = gated  # type: ignore[method-assign]

    def arrived(self) -> None:
        assert self.waiting.wait(30)

    def step(self) -> None:
        """Lets one forward pass and waits until the next one stands there."""
        self.waiting.clear()
        self.passes.release()
        self.arrived()

    def open(self) -> None:
        self._open = True
        self.passes.release(10_000)


@pytest.fixture
def engine(tiny_llama: Any, make_engine: Any) -> Engine:
    made: Engine = make_engine(tiny_llama, prefix_cache=True, max_pool_bytes=math.inf)
    made._eos_ids = frozenset()
    return made


@pytest.fixture
def plain(tiny_llama: Any, make_engine: Any) -> Engine:
    """The same without a prefix cache."""
    made: Engine = make_engine(tiny_llama, prefix_cache=False)
    made._eos_ids = frozenset()
    return made


# ---------------------------------------------------------------------------------------------- what is found


@pytest.fixture(scope="module")
def shared_model() -> Any:
    return tiny_model("llama")


class TestHits:
    @pytest.mark.parametrize("seed", range(100 if FULL else 12))
    def test_a_prompt_finds_the_longest_beginning_of_all_that_was_computed(
        self, shared_model: Any, make_engine: Any, seed: int
    ) -> None:
        """Conversations that go on, go on otherwise, or are asked again; and texts over three tokens."""
        chosen = random.Random(seed)
        engine = make_engine(shared_model, prefix_cache=True, max_pool_bytes=math.inf)
        known: list[tuple[int, ...]] = []
        said: list[tuple[int, ...]] = []

        def some(most: int) -> tuple[int, ...]:
            return tuple(chosen.choices((3, 4, 5), k=chosen.randint(0, most)))

        for _ in range(25):
            old = chosen.choice(said) if said and chosen.random() < 0.7 else ()
            if chosen.random() < 0.5:
                old = old[: chosen.randint(0, len(old))]
            prompt = (*old, *some(40 if chosen.random() < 0.2 else 8)) or (3,)
            if chosen.random() < 0.1 and said:
                prompt = chosen.choice(known)
            tokens = chosen.choice((1, 1, 2, 3, 6, 20))
            completion = answer(engine, prompt, tokens)
            want = min(max((common(prompt, other) for other in known), default=0), len(prompt) - 1)
            assert completion.cached_tokens == want
            known.append((*prompt, *completion.token_ids[:-1]))
            said.append((*prompt, *completion.token_ids))
            check_table(engine)
        check_idle(engine)
        stats = engine.stats()
        assert engine.pool.stats().hit_tokens == stats.prefill_saved_tokens
        for index in chosen.sample(range(len(known)), 4):
            got = answer(engine, known[index], 6).token_ids
            assert_same_tokens(shared_model, known[index], got, greedy(shared_model, known[index], 6))

    def test_the_same_prompt_again_computes_one_token(self, engine: Engine) -> None:
        first = answer(engine, DOCUMENT)
        before = engine.stats().prefill_tokens
        second = answer(engine, DOCUMENT)
        assert (first.cached_tokens, second.cached_tokens) == (0, len(DOCUMENT) - 1)
        assert engine.stats().prefill_tokens - before == 1
        assert engine.stats().prefill_saved_tokens == len(DOCUMENT) - 1
        assert_same_tokens(engine.model, DOCUMENT, second.token_ids, first.token_ids)
        check_idle(engine)

    def test_without_the_cache_nothing_is_found_or_left(self, plain: Engine) -> None:
        assert [answer(plain, DOCUMENT).cached_tokens for _ in range(2)] == [0, 0]
        assert plain.pool.stats().num_bytes == 0

    def test_a_prompt_of_one_token_is_computed(self, engine: Engine) -> None:
        assert [answer(engine, [7]).cached_tokens for _ in range(3)] == [0, 0, 0]

    def test_a_cleared_pool_finds_nothing(self, engine: Engine) -> None:
        answer(engine, DOCUMENT)
        held = engine.pool.stats().num_bytes
        assert held > 0 and engine.pool.clear() == held
        assert engine.pool.stats().num_bytes == 0
        assert answer(engine, DOCUMENT).cached_tokens == 0

    def test_one_pool_serves_two_engines(self, engine: Engine, tiny_llama: Any, make_engine: Any) -> None:
        other = make_engine(tiny_llama, prefix_cache=True, pool=engine.pool)
        first = answer(engine, DOCUMENT)
        second = answer(other, DOCUMENT)
        assert second.cached_tokens == len(DOCUMENT) - 1
        assert_same_tokens(tiny_llama, DOCUMENT, second.token_ids, first.token_ids)


# ------------------------------------------------------------------------------------------ who came first


def crossing_prompts() -> list[list[int]]:
    """Shared beginnings that end inside the window, at its edges and outside, and prompts shorter than it."""
    text = DOCUMENT[:90]
    ends = (3, WINDOW - 1, WINDOW, WINDOW + 1, 60, 90)
    return [text[:end] + random_ids(1 + 5 * (i % 3), seed=40 + i) for i, end in enumerate(ends)] + [text]


class TestWhoCameFirst:
    def test_does_not_matter(self, family_model: Any, make_engine: Any) -> None:
        prompts = crossing_prompts()
        sampling = params(5, logprobs=True)

        def fresh(cached: bool = True) -> Engine:
            made: Engine = make_engine(family_model, prefix_cache=cached)
            made._eos_ids = frozenset()
            return made

        plain = fresh(False)
        want = [answer(plain, p, sampling=sampling) for p in prompts]
        # the alone run's own correctness
        assert_same_tokens(family_model, prompts[4], want[4].token_ids, greedy(family_model, prompts[4], 5))
        orders = [list(range(len(prompts))), list(range(len(prompts)))[::-1]]
        orders += [random.Random(s).sample(range(len(prompts)), len(prompts)) for s in range(20 if FULL else 1)]
        for order in orders:
            engine = fresh()
            got = [answer(engine, prompts[i], sampling=sampling) for i in order]
            assert sum(c.cached_tokens for c in got) > 100
            together = fresh()
            handles = [ask(together, prompts[i], sampling=sampling) for i in order]
            for position, index in enumerate(order):
                check_same(family_model, prompts[index], got[position], want[index])
                check_same(family_model, prompts[index], handles[position].result(60), want[index])
            check_idle(engine)
            check_idle(together)

    def test_conversations_longer_than_the_window(self, family_model: Any, make_engine: Any) -> None:
        engine = make_engine(family_model, prefix_cache=True)
        plain = make_engine(family_model)
        engine._eos_ids = plain._eos_ids = frozenset()
        said = random_ids(9, seed=3)
        sampling = params(9, logprobs=True)
        length = 0
        for turn in range(5):
            got, want = (answer(e, said, sampling=sampling) for e in (engine, plain))
            check_same(family_model, said, got, want)
            assert got.cached_tokens == length
            length = len(said) + len(got.token_ids) - 1
            said = [*said, *got.token_ids, *random_ids(7, seed=60 + turn)]

    def test_an_answer_that_decodes_while_its_prompt_is_read_by_others(self, engine: Engine) -> None:
        """What a request has computed becomes a segment in the middle of its answer."""
        gate = Gate(engine)
        prompt = LONG[:200]
        first = ask(engine, prompt, 60)
        gate.arrived()
        for _ in range(5):
            gate.step()
        others = [ask(engine, prompt[:150] + [9, 8 + i], 6) for i in range(3)]
        again = ask(engine, prompt, 6)
        gate.open()
        assert_same_tokens(engine.model, prompt, first.result(60).token_ids, greedy(engine.model, prompt, 60))
        for i, handle in enumerate(others):
            other = prompt[:150] + [9, 8 + i]
            assert handle.result(60).cached_tokens == 150
            assert_same_tokens(engine.model, other, handle.result().token_ids, greedy(engine.model, other, 6))
        assert again.result(60).cached_tokens == 199
        assert_same_tokens(engine.model, prompt, again.result().token_ids, greedy(engine.model, prompt, 6))
        check_idle(engine)


# --------------------------------------------------------------------------------------------- all at once


class TestConcurrent:
    OWN = 3

    def prompts(self, count: int = 5, shared: int = len(LONG)) -> list[list[int]]:
        return [[*LONG[:shared], 10 + i, 20, 30] for i in range(count)]

    def check(self, engine: Engine, prompts: list[list[int]], handles: list[RequestHandle]) -> None:
        for prompt, handle in zip(prompts, handles, strict=True):
            got = handle.result(60).token_ids
            assert_same_tokens(engine.model, prompt, got, greedy(engine.model, prompt, len(got)))
        check_idle(engine)

    @pytest.mark.parametrize("budget", [64, 512])
    def test_a_common_beginning_is_computed_once(self, tiny_llama: Any, make_engine: Any, budget: int) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=budget)
        prompts = self.prompts()
        handles = [ask(engine, p) for p in prompts]
        self.check(engine, prompts, handles)
        assert engine.stats().prefill_tokens == len(LONG) + len(prompts) * self.OWN
        assert sorted(h.result().cached_tokens for h in handles) == [0] + [len(LONG)] * 4

    def test_more_followers_than_places(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=64, max_batch=2)
        prompts = self.prompts(9)
        self.check(engine, prompts, [ask(engine, p) for p in prompts])
        assert engine.stats().prefill_tokens == len(LONG) + 9 * self.OWN

    @pytest.mark.parametrize("fate", ["cancelled", "late", "fails"])
    def test_the_first_goes_in_the_middle(self, tiny_llama: Any, make_engine: Any, fate: str) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=64)
        gate = Gate(engine)
        gated, failing = engine._runner.forward, threading.Event()
        prompts = self.prompts()
        first = ask(engine, prompts[0], timeout=50)

        def forward(batch: Any) -> Any:
            if failing.is_set() and any(work.sequence.handle is first for work in batch.work):
                gate.batches.append([])
                raise ArithmeticError("broken")
            return gated(batch)

        engine._runner.forward = forward
        gate.arrived()
        handles = [ask(engine, p) for p in prompts[1:]]
        gate.step()
        gate.step()
        assert engine.stats().waiting == 4
        if fate == "cancelled":
            first.cancel()
        elif fate == "late":
            first.submitted_at -= 100
        else:
            failing.set()
        gate.open()
        errors = {"cancelled": RequestCancelledError, "late": RequestTimeoutError, "fails": ArithmeticError}
        with pytest.raises(errors[fate]):
            first.result(60)
        self.check(engine, prompts[1:], handles)
        # one of the others has computed it, whatever the first had done
        assert engine.stats().prefill_tokens <= 3 * 64 + len(LONG) + 4 * self.OWN

    def test_the_first_gets_cancelled_over_and_over(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=64)
        gate = Gate(engine)
        prompts = self.prompts()
        handles = [ask(engine, prompts[0])]
        gate.arrived()
        handles += [ask(engine, p) for p in prompts[1:]]
        for handle in handles[:-1]:
            gate.step()
            handle.cancel()
            gate.step()
        gate.open()
        for handle in handles[:-1]:
            with pytest.raises(RequestCancelledError):
                handle.result(60)
        self.check(engine, prompts[-1:], handles[-1:])

    def test_others_are_not_held_up(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=64)
        gate = Gate(engine)
        first = ask(engine, self.prompts()[0])
        gate.arrived()
        followers = [ask(engine, p) for p in self.prompts()[1:]]
        unlike = ask(engine, [5, 6, 7], 2)
        gate.step()
        assert {first, unlike} == set(gate.batches[-1])
        gate.step()
        gate.step()
        assert unlike.done and not first.done and not any(h.done for h in followers)
        gate.open()
        self.check(engine, self.prompts(), [first, *followers])

    @pytest.mark.parametrize("shared", [0, 1, MIN_SHARED_TOKENS - 1, MIN_SHARED_TOKENS])
    def test_a_short_common_beginning_makes_nobody_wait(self, tiny_llama: Any, make_engine: Any, shared: int) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=16)
        gate = Gate(engine)
        prompts = [[*LONG[:shared], 10 + i, *random_ids(100, seed=i)] for i in range(3)]
        handles = [ask(engine, prompts[0])]
        gate.arrived()
        handles += [ask(engine, p) for p in prompts[1:]]
        gate.step()
        assert len(gate.batches[-1]) == (1 if shared == MIN_SHARED_TOKENS else 3)
        gate.open()
        self.check(engine, prompts, handles)

    def test_salts_never_share(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=64)
        gate = Gate(engine)
        prompt = self.prompts()[0]
        salts = ["", "a", "b", "a ", "A"]
        handles = [ask(engine, prompt, salt=salts[0])]
        gate.arrived()
        handles += [ask(engine, prompt, salt=salt) for salt in salts[1:]]
        gate.step()
        assert len(gate.batches[-1]) == len(salts), "nobody waits for another salt's"
        gate.open()
        self.check(engine, [prompt] * len(salts), handles)
        assert [h.result().cached_tokens for h in handles] == [0] * len(salts)
        assert engine.stats().prefill_tokens == len(prompt) * len(salts)
        again = [answer(engine, prompt, salt=salt).cached_tokens for salt in (*salts, "c")]
        assert again == [len(prompt) - 1] * len(salts) + [0]

    def test_salted_contexts_are_found_under_their_salt_only(self, engine: Engine) -> None:
        engine.share(DOCUMENT, "exact", salt="a")
        prompt = [*DOCUMENT, 5, 6]
        assert [answer(engine, prompt, salt=s).cached_tokens for s in ("", "b", "a")] == [0, 0, len(DOCUMENT)]

    def test_a_follower_that_is_too_late_or_cancelled(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=64)
        gate = Gate(engine)
        prompts = self.prompts()
        first = ask(engine, prompts[0])
        gate.arrived()
        late, cancelled, stays = (ask(engine, p, timeout=50) for p in prompts[1:4])
        gate.step()
        late.submitted_at -= 100
        cancelled.cancel()
        gate.step()
        assert late.done and cancelled.done and not stays.done
        gate.open()
        with pytest.raises(RequestTimeoutError, match="before it started"):
            late.result(60)
        with pytest.raises(RequestCancelledError, match="before it started"):
            cancelled.result(60)
        self.check(engine, [prompts[0], prompts[3]], [first, stays])

    def test_followers_start_by_priority(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=64, max_batch=2)
        gate = Gate(engine)
        prompts = self.prompts(5)
        handles = [ask(engine, prompts[0], 30)]
        gate.arrived()
        handles += [ask(engine, p, 4, priority=i % 4) for i, p in enumerate(prompts[1:])]
        gate.open()
        self.check(engine, prompts, handles)
        seen: list[RequestHandle] = []
        for batch in gate.batches:
            seen.extend(handle for handle in batch if handle not in seen)
        assert seen == [handles[0], *handles[:0:-1]]

    def test_the_engine_is_closed_while_some_wait(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=64)
        gate = Gate(engine)
        handles = [ask(engine, self.prompts()[0])]
        gate.arrived()
        handles += [ask(engine, p) for p in self.prompts()[1:]]
        gate.step()
        engine.close(wait=False)
        gate.open()
        engine.close()
        assert all(handle.done for handle in handles)
        assert engine.pool.num_leases == 0
        check_table(engine)

    @pytest.mark.parametrize("method", ["_segment", "stored_tokens", "publish"])
    def test_what_fails_in_the_pool_fails_nobody(
        self, tiny_llama: Any, make_engine: Any, monkeypatch: Any, method: str
    ) -> None:
        """No memory to copy a tail, say: requests compute what they could have read."""
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=64)

        def fail(*args: Any, **options: Any) -> Any:
            raise RuntimeError("can't allocate memory")

        monkeypatch.setattr(engine.pool.prefix, method, fail)
        prompts = self.prompts(3)
        self.check(engine, prompts, [ask(engine, p) for p in prompts])

    @pytest.mark.parametrize("codec", ["exact", "k8v3"])
    def test_followers_over_a_named_context(self, tiny_llama: Any, make_engine: Any, codec: str) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=64)
        segment = engine.share(DOCUMENT, codec)
        prompts = [[*DOCUMENT, *p] for p in self.prompts()]
        handles = [ask(engine, p, segment=segment) for p in prompts]
        cached = sorted(h.result(60).cached_tokens for h in handles)
        assert cached == [len(DOCUMENT)] + [len(DOCUMENT) + len(LONG)] * 4
        assert engine.stats().prefill_tokens == len(LONG) + len(prompts) * self.OWN
        check_idle(engine)


# ----------------------------------------------------------------------------------------- named contexts


class TestNamedContexts:
    @pytest.mark.parametrize("codec", ["exact", "k8v3", "paper"])
    @pytest.mark.parametrize("chain", [False, True], ids=["one", "chain"])
    def test_a_conversation_goes_on_under_its_context(
        self, tiny_llama: Any, make_engine: Any, codec: str, chain: bool
    ) -> None:
        engines = [make_engine(tiny_llama, prefix_cache=cached) for cached in (True, False)]
        contexts = []
        for each in engines:
            each._eos_ids = frozenset()
            context = each.share(DOCUMENT, codec)
            contexts.append(each.share(LONG[:80], "exact", parent=context) if chain else context)
        said = [*DOCUMENT, *(LONG[:80] if chain else []), 5, 6, 7]
        length = len(said) - 3
        for turn in range(4):
            got, want = (answer(e, said, 8, segment=c) for e, c in zip(engines, contexts, strict=True))
            assert got.cached_tokens == length
            if codec == "exact":
                assert_same_tokens(tiny_llama, said, got.token_ids, want.token_ids)
            else:
                assert got.token_ids == want.token_ids
            length = len(said) + len(got.token_ids) - 1
            said = [*said, *got.token_ids, *random_ids(4, seed=turn)]
        # and a turn that goes on otherwise
        other = [*said[: length - 20], 9, 9, 9]
        assert answer(engines[0], other, segment=contexts[0]).cached_tokens == length - 20 - (said[length - 20] == -1)
        check_idle(engines[0])

    @pytest.mark.parametrize("codec", ["k8v3", "paper"])
    def test_a_lossy_contexts_conversation_is_read_under_it_alone(
        self, tiny_llama: Any, make_engine: Any, plain: Engine, codec: str
    ) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        engine._eos_ids = frozenset()
        segment = engine.share(DOCUMENT, codec)
        prompt = [*DOCUMENT, 5, 6, 7]
        lossy = answer(engine, prompt, 12, segment=segment)
        sampling = params(12, logprobs=True)
        first = answer(engine, prompt, sampling=sampling)
        assert first.cached_tokens == 0
        check_same(tiny_llama, prompt, first, answer(plain, prompt, sampling=sampling))
        # nor the other way round, nor under a context that is stored in another way
        assert answer(engine, prompt, 12, segment=segment).token_ids == lossy.token_ids
        other = engine.share(DOCUMENT, "paper" if codec == "k8v3" else "k8v3")
        assert answer(engine, prompt, 12, segment=other).cached_tokens == len(DOCUMENT)
        assert answer(engine, prompt, 12, segment=segment).cached_tokens == len(prompt) - 1
        check_idle(engine)

    def test_it_goes_with_its_context(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT, "k8v3")
        prompt = [*DOCUMENT, 5, 6, 7]
        answer(engine, prompt, segment=segment)
        assert len(list(engine.pool._table)) == 2
        engine.pool.release(segment)
        assert engine.pool.stats().num_bytes == 0 and not list(engine.pool._table)
        check_table(engine)

    def test_an_exact_context_is_found_by_prompts_that_do_not_name_it(self, engine: Engine, plain: Engine) -> None:
        segment = engine.share(DOCUMENT, "exact")
        child = engine.share(LONG[:80], "exact", parent=segment)
        prompts = [[*DOCUMENT, *LONG[:80], 5, 6], [*DOCUMENT, *LONG[:40], 5], [*DOCUMENT[:100], 5], [*DOCUMENT, 5]]
        for prompt, want in zip(prompts, (230, 190, 100, 150), strict=True):
            got = answer(engine, prompt, sampling=params(6, logprobs=True))
            assert got.cached_tokens == want
            check_same(engine.model, prompt, got, answer(plain, prompt, sampling=params(6, logprobs=True)))
        # and its conversations by those who name it
        assert answer(engine, prompts[0], segment=child).cached_tokens == len(prompts[0]) - 1
        check_idle(engine)

    def test_what_was_computed_unasked_serves_a_context_that_is_named_later(self, engine: Engine) -> None:
        said = [*DOCUMENT, 5, 6, 7]
        answer(engine, said)
        segment = engine.share(DOCUMENT, "exact")
        assert answer(engine, said, segment=segment).cached_tokens == len(said) - 1
        engine.pool.release(segment)
        assert answer(engine, said).cached_tokens == len(said) - 1
        check_idle(engine)

    def test_a_kept_context_is_still_there_after_a_long_conversation(self, engine: Engine) -> None:
        """A segment that a caller keeps is not taken apart: who names its text again finds it."""
        segment = engine.pool.keep(engine.share(DOCUMENT, "exact"))
        said = [*DOCUMENT, *random_ids(120, seed=7)]
        assert answer(engine, said, segment=segment).cached_tokens == len(DOCUMENT)
        assert engine.share(DOCUMENT, "exact") is segment
        assert engine.pool.stats().builds == 1
        check_table(engine)

    def test_shared_tokens_find_conversations_again(self, engine: Engine) -> None:
        for codec in ("exact", "k8v3"):
            segment = engine.share(DOCUMENT, codec)  # keeps it from going with its last reader
            said = [*DOCUMENT, 5, 6, 7]
            first = answer(engine, said, shared_tokens=len(DOCUMENT), codec=codec)
            more = [*said, *first.token_ids, 9]
            second = answer(engine, more, shared_tokens=len(DOCUMENT), codec=codec)
            assert second.cached_tokens == len(said) + 5
            engine.pool.release(segment)
        check_idle(engine)

    def test_a_sliding_models_context(self, make_engine: Any) -> None:
        """Its segments keep only the window, so that prompts that do not name it cannot read them."""
        model = tiny_model("mistral", WINDOW)
        engine, plain = make_engine(model, prefix_cache=True), make_engine(model)
        segment = engine.share(DOCUMENT, "exact")
        said = [*DOCUMENT, 5, 6, 7]
        for options, cached in (({"segment": segment}, 150), ({}, 0), ({"segment": segment}, 152), ({}, 152)):
            got = answer(engine, said, sampling=params(8, logprobs=True), **options)
            assert got.cached_tokens == cached
            check_same(model, said, got, answer(plain, said, sampling=params(8, logprobs=True)))
        check_idle(engine)


# ------------------------------------------------------------------------------------------------- memory


class TestMemory:
    def test_the_bytes_counted_are_those_allocated(self, engine: Engine, monkeypatch: Any) -> None:
        monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.05)

        def live() -> int:
            until(lambda: engine._thread is None)  # its frames hold its last step
            return live_tensor_bytes()

        answer(engine, DOCUMENT, 8)
        engine.pool.clear()
        before = live()
        for seed, length in enumerate((1, 5, 17, 150, 149)):
            for cut in (length, length // 2):
                answer(engine, [*DOCUMENT[:cut], *random_ids(5, seed=seed)], 1 + 7 * seed)
        held = engine.pool.stats().num_bytes
        assert held > 0
        assert held <= live() - before <= 1.01 * held
        assert held <= 1.13 * sum(len(e.tokens) for e in engine.pool._table) * (TOKEN_BYTES + 4)
        engine.pool.clear()
        assert live() == before

    def test_branches_of_a_long_prompt_take_what_is_counted(self, engine: Engine, monkeypatch: Any) -> None:
        monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.05)
        text = random_ids(1500, seed=9)
        answer(engine, text, 1)
        until(lambda: engine._thread is None)
        before, counted = live_tensor_bytes(), engine.pool.stats().num_bytes
        for i in range(20):
            answer(engine, [*text[: 1400 + i], 7], 1)
        until(lambda: engine._thread is None)
        held = engine.pool.stats().num_bytes - counted
        assert live_tensor_bytes() - before <= 1.1 * held

    def test_what_is_cleared_is_freed_at_once(self, engine: Engine) -> None:
        """The engine's thread, which waits for work, keeps nothing of its last step."""
        answer(engine, [5], 1)
        until(lambda: not engine._scheduler.running)
        before = live_tensor_bytes()
        answer(engine, DOCUMENT, 1)
        time.sleep(0.05)
        held = engine.pool.clear()
        assert held >= len(DOCUMENT) * TOKEN_BYTES
        assert live_tensor_bytes() - before < held / 2

    @pytest.mark.parametrize("tokens", [1, 20, 60, 130, 250])
    def test_the_budget_holds_after_every_step(
        self, tiny_llama: Any, make_engine: Any, plain: Engine, tokens: int
    ) -> None:
        budget = tokens * TOKEN_BYTES
        engine = make_engine(tiny_llama, prefix_cache=True, max_pool_bytes=budget, max_batch=3)
        engine._eos_ids = frozenset()
        wrong: list[BaseException] = []

        def look(report: StepReport) -> None:
            try:
                check_table(engine)
            except BaseException as error:
                wrong.append(error)

        engine.add_step_callback(look)
        chosen = random.Random(tokens)
        said: list[list[int]] = [DOCUMENT[:30]]
        for _ in range(6):
            prompts = []
            for _ in range(4):
                old = chosen.choice(said)
                cut = chosen.randint(0, len(old))
                prompts.append([*old[:cut], *random_ids(chosen.randint(1, 9), seed=chosen.randint(0, 99))])
            handles = [ask(engine, p, chosen.randint(1, 12)) for p in prompts]
            for prompt, handle in zip(prompts, handles, strict=True):
                got = handle.result(60).token_ids
                assert_same_tokens(tiny_llama, prompt, got, answer(plain, prompt, len(got)).token_ids)
                said.append([*prompt, *got])
            check_idle(engine)
        if wrong:
            raise wrong[0]
        stats = engine.pool.stats()
        assert stats.evictions + stats.refused > 0
        if tokens > 60:
            assert stats.hit_tokens > 0

    def test_an_answer_comes_whose_keys_find_no_room(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, max_pool_bytes=10 * TOKEN_BYTES)
        for _ in range(2):
            completion = answer(engine, DOCUMENT, 12)
            assert completion.cached_tokens == 0
            assert_same_tokens(tiny_llama, DOCUMENT, completion.token_ids, greedy(tiny_llama, DOCUMENT, 12))
        stats = engine.pool.stats()
        assert (stats.num_bytes, stats.published) == (0, 0) and stats.refused > 0
        check_idle(engine)

    def test_followers_of_one_that_finds_no_room(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, max_pool_bytes=10 * TOKEN_BYTES, token_budget=64)
        prompts = [[*LONG, 10 + i] for i in range(4)]
        handles = [ask(engine, p) for p in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            assert_same_tokens(tiny_llama, prompt, handle.result(60).token_ids, greedy(tiny_llama, prompt, 6))
        check_idle(engine)

    def test_what_is_joined_is_not_lost_when_there_is_no_room_for_it(self, tiny_llama: Any, make_engine: Any) -> None:
        """The longer of two answers to one prompt finds the shorter one's segment, which would have to be evicted."""
        first, question = DOCUMENT[:100], random_ids(20, seed=5)
        room = int((100 + 20 + 9 + 30) * (TOKEN_BYTES + 4))
        engine = make_engine(tiny_llama, prefix_cache=True, max_pool_bytes=room)
        engine._eos_ids = frozenset()
        answer(engine, first, 1)
        prompt = [*first, *question]
        gate = Gate(engine)
        long = ask(engine, prompt, 60)
        gate.arrived()
        short = ask(engine, prompt, 10)
        gate.open()
        assert_same_tokens(tiny_llama, prompt, long.result(60).token_ids, greedy(tiny_llama, prompt, 60))
        short.result(60)
        check_idle(engine)
        assert engine.pool.prefix.stored_tokens(first) >= 100, "what was there is lost"

    @pytest.mark.parametrize("chunk", [3, 30])
    def test_a_long_conversation_stays_few_segments(self, engine: Engine, chunk: int) -> None:
        turns = 40
        said, length = random_ids(20, seed=3), 0
        for turn in range(turns):
            got = answer(engine, said, 4)
            assert got.cached_tokens == length
            if turn % 13 == 0 or turn == turns - 1:
                assert_same_tokens(engine.model, said, got.token_ids, greedy(engine.model, said, 4))
            length = len(said) + 3
            said = [*said, *got.token_ids, *random_ids(chunk, seed=100 + turn)]
            check_table(engine)
        segments = list(engine.pool._table)
        assert len(segments) <= 2 + math.log2(len(said)), [len(e.tokens) for e in segments]
        assert sum(len(e.tokens) for e in segments) == length
        assert engine.pool.stats().num_bytes <= 1.13 * length * (TOKEN_BYTES + 4)
        got = answer(engine, said, 20).token_ids
        assert_same_tokens(engine.model, said, got, greedy(engine.model, said, 20))
        # turns from the middle, which are parts of joined segments
        for end in (17, 100, length // 2):
            prompt = [*said[:end], 7, 8]
            got_part = answer(engine, prompt, 5)
            assert got_part.cached_tokens >= end
            assert_same_tokens(engine.model, prompt, got_part.token_ids, greedy(engine.model, prompt, 5))
        check_idle(engine)

    def test_nothing_is_left_when_all_is_gone(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        answer(engine, DOCUMENT, 8)
        engine.close()
        engine.pool.clear()
        assert engine.pool.stats().num_bytes == 0 and engine.pool.num_leases == 0
        assert not list(engine.pool._table) and not engine.pool._table.trees


class TestRandomSchedules:
    @pytest.mark.parametrize("seed", range(100 if FULL else 8))
    def test_contexts_come_and_go(self, shared_model: Any, make_engine: Any, seed: int) -> None:
        """Exact and lossy ones, chains of them, kept and released, among conversations of the same texts."""
        chosen = random.Random(seed)
        budget = chosen.choice((math.inf, 700 * TOKEN_BYTES))
        engine = make_engine(shared_model, prefix_cache=True, token_budget=64, max_pool_bytes=budget)
        held: list[Any] = []
        said = [DOCUMENT[:60], LONG[:90]]
        handles = []
        for _ in range(30):
            text = chosen.choice(said)
            text = text[: chosen.randint(1, len(text))]
            deed = chosen.random()
            if deed < 0.2:
                parent = chosen.choice([None, *held])
                if parent is not None:
                    start = parent.context_ids.tolist()
                    text = text[len(start) :] if text[: len(start)] == start else text
                if text and (parent is None or parent.end < 250):
                    with contextlib.suppress(PoolFullError):
                        held.append(engine.share(text, chosen.choice(("exact", "exact", "k8v3")), parent=parent))
            elif deed < 0.35 and held:
                segment = held.pop(chosen.randrange(len(held)))
                chosen.choice((engine.pool.release, engine.pool.keep))(segment)
            elif deed < 0.4:
                engine.pool.clear()
            else:
                segment = chosen.choice([None, *held])
                lossy = segment is not None and any(span.codec != "exact" for span in segment.chain)
                prompt = [*(segment.context_ids.tolist() if segment is not None else text), *random_ids(4, seed=seed)]
                tokens = chosen.choice((1, 5, 30))
                handle = ask(engine, prompt, tokens, segment=segment)
                handles.append((prompt, handle, lossy))
                if chosen.random() < 0.7:
                    said.append([*prompt, *handle.result(60).token_ids])
                    check_table(engine)
        for prompt, handle, lossy in handles:
            got = handle.result(60).token_ids
            if not lossy:
                assert_same_tokens(shared_model, prompt, got, greedy(shared_model, prompt, len(got)))
        for segment in held:
            engine.pool.release(segment)
        check_idle(engine)
        engine.pool.clear()
        assert engine.pool.stats().num_bytes == 0 and not list(engine.pool._table)

    @pytest.mark.parametrize("seed", range(20 if FULL else 3))
    def test_two_engines_over_one_small_pool(self, shared_model: Any, make_engine: Any, seed: int) -> None:
        chosen = random.Random(seed)
        pool = SharedKVPool(shared_model, max_bytes=chosen.choice((250, 600, 2000)) * TOKEN_BYTES)
        engines = [make_engine(shared_model, prefix_cache=True, pool=pool, token_budget=64) for _ in range(2)]
        prompts = [[*LONG[: chosen.choice((20, 100, 101, 200))], *random_ids(3, seed=s)] for s in range(8)]
        want = [greedy(shared_model, p, 8) for p in prompts]
        handles = []
        for _ in range(40):
            index = chosen.randrange(8)
            handles.append((index, ask(chosen.choice(engines), prompts[index], chosen.choice((1, 4, 8)))))
            if chosen.random() < 0.2:
                time.sleep(0.01)
        for index, handle in handles:
            got = handle.result(60).token_ids
            assert_same_tokens(shared_model, prompts[index], got, want[index][: len(got)])
        for engine in engines:
            check_idle(engine)

    @pytest.mark.parametrize("seed", range(200 if FULL else 16))
    def test_whatever_is_cancelled_or_late_nothing_is_left(
        self, shared_model: Any, make_engine: Any, seed: int
    ) -> None:
        chosen = random.Random(seed)
        budget = chosen.choice((math.inf, 800 * TOKEN_BYTES, 300 * TOKEN_BYTES, 100 * TOKEN_BYTES))
        engine = make_engine(
            shared_model,
            prefix_cache=True,
            token_budget=chosen.choice((16, 64, 512)),
            max_batch=chosen.choice((1, 2, 4, 32)),
            max_pool_bytes=budget,
        )
        exact = engine.share(DOCUMENT[:40], "exact") if chosen.random() < 0.5 else None
        handles: list[tuple[list[int], RequestHandle]] = []
        wrong: list[BaseException] = []
        step = itertools.count()

        def meddle(report: StepReport) -> None:
            try:
                check_table(engine)
                rng = random.Random(seed * 1000 + next(step))
                for _, handle in list(handles):
                    fate = rng.random()
                    if fate < 0.01:
                        handle.cancel()
                    elif fate < 0.015 and handle.request.timeout:
                        handle.submitted_at -= 100
            except BaseException as error:
                wrong.append(error)

        engine.add_step_callback(meddle)
        said = [DOCUMENT[:140], LONG[:200], LONG[:10]]
        for _ in range(chosen.randint(6, 16)):
            old = chosen.choice(said)
            cut = chosen.choice((len(old), chosen.randint(0, len(old))))
            prompt = [*old[:cut], *random_ids(chosen.randint(1, 12), seed=chosen.randint(0, 9))]
            named = exact if exact is not None and cut > 40 and prompt[:40] == DOCUMENT[:40] else None
            options: dict[str, Any] = {"segment": named} if named is not None and chosen.random() < 0.5 else {}
            handle = ask(engine, prompt, chosen.choice((1, 3, 8)), timeout=50, priority=chosen.randint(0, 2), **options)
            handles.append((prompt, handle))
            if chosen.random() < 0.3:
                time.sleep(0.01)
            if chosen.random() < 0.2:
                with contextlib.suppress(RequestCancelledError, RequestTimeoutError):
                    said.append([*prompt, *handle.result(60).token_ids])
        for prompt, handle in handles:
            try:
                got = handle.result(60).token_ids
            except (RequestCancelledError, RequestTimeoutError):
                continue
            assert_same_tokens(shared_model, prompt, got, greedy(shared_model, prompt, len(got)))
        if exact is not None:
            engine.pool.release(exact)
        check_idle(engine)
        if wrong:
            raise wrong[0]
        engine.pool.clear()
        assert engine.pool.stats().num_bytes == 0 and not list(engine.pool._table)


# ------------------------------------------------------------------------------------ settings of requests


class TestSettings:
    def turn(self, engine: Engine, plain: Engine, prompt: list[int], sampling: SamplingParams) -> Completion:
        """Once, again, and as the beginning of a further turn: always as without a cache."""
        want = answer(plain, prompt, sampling=sampling)
        for _ in range(2):
            got = answer(engine, prompt, sampling=sampling)
            assert (got.token_ids, got.text, got.finish_reason, got.stop_string) == (
                want.token_ids,
                want.text,
                want.finish_reason,
                want.stop_string,
            )
        assert got.cached_tokens == len(prompt) - 1
        more = [*prompt, *got.token_ids, 9, 8]
        after = answer(engine, more)
        assert len(prompt) <= after.cached_tokens <= len(prompt) + len(got.token_ids) - 1
        assert_same_tokens(engine.model, more, after.token_ids, greedy(engine.model, more, 6))
        check_idle(engine)
        self.after = after.cached_tokens - len(prompt)
        return got

    def test_one_token(self, engine: Engine, plain: Engine) -> None:
        self.turn(engine, plain, DOCUMENT, params(1))
        assert self.after == 0

    def test_a_stop_string(self, engine: Engine, plain: Engine) -> None:
        text = answer(plain, DOCUMENT, 30).text
        got = self.turn(engine, plain, DOCUMENT, params(30, stop=(text[6:9],)))
        assert got.finish_reason == "stop" and got.stop_string == text[6:9]
        assert self.after == len(got.token_ids) - 1

    def test_the_end_of_the_sequence(self, engine: Engine, plain: Engine) -> None:
        tokens = answer(plain, DOCUMENT, 12).token_ids
        engine._eos_ids = plain._eos_ids = frozenset({tokens[5]})
        want = answer(plain, DOCUMENT, 12)
        assert want.finish_reason == "stop"
        got = [answer(engine, DOCUMENT, 12) for _ in range(2)]
        assert [c.token_ids for c in got] == [want.token_ids] * 2
        more = answer(engine, [*DOCUMENT, *want.token_ids, 9], 1)
        assert more.cached_tokens == len(DOCUMENT) + len(want.token_ids) - 1

    @pytest.mark.parametrize("fast_forward", [True, False])
    @pytest.mark.parametrize("rule", ["choice", "object"])
    def test_a_grammar(self, tiny_llama: Any, make_engine: Any, plain: Engine, rule: str, fast_forward: bool) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, fast_forward=fast_forward)
        plain._eos_ids = engine._eos_ids
        if rule == "choice":
            grammar = Grammar.choice(["a long answer without any choice"])
        else:
            grammar = Grammar.json_schema(
                {
                    "type": "object",
                    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}, "tag": {"enum": ["aa"]}},
                    "required": ["age", "tag"],
                    "additionalProperties": False,
                }
            )
        got = self.turn(engine, plain, DOCUMENT, params(60, grammar=grammar))
        if not fast_forward:
            assert self.after == len(got.token_ids) - 1
        for limit in (1, 2, 3, 7):
            engine.pool.clear()
            self.turn(engine, plain, DOCUMENT, params(limit, grammar=grammar))

    def test_logprobs(self, engine: Engine, plain: Engine) -> None:
        sampling = params(10, logprobs=True, top_logprobs=5)
        want = answer(plain, DOCUMENT, sampling=sampling)
        for _ in range(2):
            got = answer(engine, DOCUMENT, sampling=sampling)
            check_same(engine.model, DOCUMENT, got, want)
            assert got.logprobs is not None and len(got.logprobs) == 10

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0.9, "seed": 3},
            {"temperature": 0.9, "seed": 3, "top_p": 0.8, "top_k": 20},
            {"repetition_penalty": 3.0},
            {"presence_penalty": 2.0, "frequency_penalty": 2.0},
            {"logit_bias": {7: 100.0}},
        ],
        ids=lambda options: "-".join(options),
    )
    def test_how_tokens_are_chosen(self, engine: Engine, plain: Engine, options: dict[str, Any]) -> None:
        self.turn(engine, plain, DOCUMENT, params(12, **options))
        assert self.after == 11

    def test_a_repetition_penalty_sees_the_tokens_that_were_read(self, engine: Engine, plain: Engine) -> None:
        """The likeliest token is put where only a prompt that is read from the pool has it."""
        best = answer(plain, DOCUMENT, 1).token_ids[0]
        prompt = [best, *DOCUMENT]
        free = answer(plain, prompt, 1).token_ids[0]
        prompt = [free, *prompt]
        sampling = params(8, repetition_penalty=50.0)
        want = answer(plain, prompt, sampling=sampling)
        answer(engine, prompt, 1)
        got = answer(engine, prompt, sampling=sampling)
        assert got.cached_tokens == len(prompt) - 1 and got.token_ids == want.token_ids
        assert not set(got.token_ids) & set(prompt)

    def test_processors_see_the_whole_prompt(self, engine: Engine) -> None:
        seen: list[list[int]] = []

        def look(ids: Any, scores: Any) -> Any:
            seen.append(ids[0].tolist())
            return scores

        engine.request_processors = lambda request: (look,)  # type: ignore[assignment,return-value]
        tokens = answer(engine, DOCUMENT, 3).token_ids
        first, seen[:] = list(seen), []
        assert answer(engine, DOCUMENT, 3).cached_tokens == len(DOCUMENT) - 1
        assert seen == first == [[*DOCUMENT, *tokens[:i]] for i in range(3)]

    def test_deterministic_engines_have_none(self, tiny_llama: Any, tokenizer: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(engine_module, "PREFIX_CACHE", True)  # the tests' conftest turns it off
        with pytest.raises(InvalidRequestError, match="deterministic=True and prefix_cache=True exclude each other"):
            Engine(tiny_llama, tokenizer, deterministic=True, prefix_cache=True)
        for options, on in (({}, True), ({"deterministic": True}, False), ({"prefix_cache": False}, False)):
            engine = Engine(tiny_llama, tokenizer, **options)  # type: ignore[arg-type]
            assert engine.prefix_cache is on
            assert [answer(engine, DOCUMENT, 2).cached_tokens for _ in range(2)] == [0, len(DOCUMENT) - 1 if on else 0]
            engine.close()
