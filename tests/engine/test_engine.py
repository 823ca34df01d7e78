"""One forward for all: every request gets the tokens it would get alone, and takes nothing with it when it ends."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_tokens, greedy, random_ids, tiny_model

from polykv import Engine, SamplingParams, SharedKVPool, attach
from polykv.engine import engine as engine_module
from polykv.engine.request import RequestHandle
from polykv.errors import (
    EngineClosedError,
    IncompatiblePoolError,
    InvalidRequestError,
    NonFiniteLogitsError,
    PromptTooLongError,
    RequestCancelledError,
)
from polykv.models.tails import BUCKET_TOKENS, Tail

DOCUMENT = random_ids(150, seed=1)
LENGTHS = (1, 3, 17, 40, 7, 2)


def greedy_params(max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


@pytest.fixture
def engine(tiny_llama: Any, make_engine: Any) -> Engine:
    made: Engine = make_engine(tiny_llama)
    return made


def questions() -> list[list[int]]:
    return [random_ids(length, seed=10 + length) for length in LENGTHS]


class Gate:
    """Holds the engine's thread before a forward until it is opened, so that a state can be caught."""

    def __init__(self, engine: Engine) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        forward = engine._runner.forward

        def gated(batch: Any) -> Any:
            self.arrived.set()
            assert self.opened.wait(60)
            return forward(batch)

        engine._runner.forward = gated  # type: ignore[method-assign]


class TestEqualsTransformers:
    def test_mixed_lengths_decoded_together(self, family_model: Any, make_engine: Any) -> None:
        engine = make_engine(family_model)
        segment = engine.share(DOCUMENT, "exact")
        prompts = [DOCUMENT + q for q in questions()]
        handles = [engine.generate(p, greedy_params(), segment) for p in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            completion = handle.result(60)
            want = greedy(family_model, prompt, 20)
            assert_same_tokens(family_model, prompt, completion.token_ids, want)
            assert completion.cached_tokens == len(DOCUMENT)
        assert engine.stats().peak_running > 1

    def test_without_any_shared_context(self, family_model: Any, make_engine: Any) -> None:
        engine = make_engine(family_model)
        handles = [engine.generate(q, greedy_params()) for q in questions()]
        for prompt, handle in zip(questions(), handles, strict=True):
            completion = handle.result(60)
            assert_same_tokens(family_model, prompt, completion.token_ids, greedy(family_model, prompt, 20))
            assert completion.cached_tokens == 0

    def test_readers_of_two_contexts_and_of_none_in_one_batch(self, engine: Engine) -> None:
        other = random_ids(90, seed=4)
        first, second = engine.share(DOCUMENT, "exact"), engine.share(other, "exact")
        cases = []
        for index, question in enumerate(questions()):
            segment, context = ((first, DOCUMENT), (second, other), (None, []))[index % 3]
            cases.append((context + question, engine.generate(context + question, greedy_params(), segment)))
        for prompt, handle in cases:
            want = greedy(engine.model, prompt, 20)
            assert_same_tokens(engine.model, prompt, handle.result(60).token_ids, want)

    @pytest.mark.parametrize("budget", [1, 5, 512])
    def test_prompts_longer_than_the_token_budget(self, tiny_llama: Any, make_engine: Any, budget: int) -> None:
        engine = make_engine(tiny_llama, token_budget=budget)
        segment = engine.share(DOCUMENT, "exact")
        prompts = [DOCUMENT + q for q in questions()]
        handles = [engine.generate(p, greedy_params(6), segment) for p in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            want = greedy(tiny_llama, prompt, 6)
            assert_same_tokens(tiny_llama, prompt, handle.result(60).token_ids, want)

    def test_a_request_joins_while_others_decode(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT, "exact")
        prompts = [DOCUMENT + q for q in questions()[:2]]
        early = engine.generate(prompts[0], greedy_params(300), segment)
        next(iter(early))
        late = engine.generate(prompts[1], greedy_params(10), segment)
        completion = late.result(60)
        assert not early.done
        assert_same_tokens(engine.model, prompts[1], completion.token_ids, greedy(engine.model, prompts[1], 10))
        early.cancel()

    def test_more_requests_than_max_batch(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, max_batch=2)
        handles = [engine.generate(q, greedy_params(8)) for q in questions()]
        for prompt, handle in zip(questions(), handles, strict=True):
            assert_same_tokens(tiny_llama, prompt, handle.result(60).token_ids, greedy(tiny_llama, prompt, 8))
        assert engine.stats().peak_running == 2


@pytest.mark.parametrize("codec", ["exact", "paper", "k8v3"])
def test_company_order_and_a_cancelled_neighbour_do_not_change_an_answer(engine: Engine, codec: str) -> None:
    segment = engine.share(DOCUMENT, codec)
    prompts = [DOCUMENT + random_ids(3 + i, seed=50 + i) for i in range(15)]
    alone = [engine.generate(p, greedy_params(12), segment).result(60) for p in prompts]
    together = [engine.generate(p, greedy_params(12), segment) for p in prompts]
    reverse = [engine.generate(p, greedy_params(12), segment) for p in reversed(prompts)][::-1]
    neighbour = engine.generate(DOCUMENT + random_ids(30, seed=99), greedy_params(500), segment)
    crowd = [engine.generate(p, greedy_params(12), segment) for p in prompts]
    neighbour.cancel()
    for index, want in enumerate(alone):
        for handles in (together, reverse, crowd):
            got = handles[index].result(60)
            if codec == "exact":
                assert_same_tokens(engine.model, prompts[index], got.token_ids, want.token_ids)
            else:
                assert got.token_ids == want.token_ids
    with pytest.raises(RequestCancelledError):
        neighbour.result(60)


class TestSampling:
    def test_a_seed_gives_the_same_text_alone_and_in_company(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT)
        params = [SamplingParams(temperature=1.0, top_p=0.9, max_tokens=12, seed=s) for s in range(6)]
        prompt = DOCUMENT + questions()[2]
        alone = [engine.generate(prompt, p, segment).result(60).token_ids for p in params]
        together = [engine.generate(prompt, p, segment) for p in params]
        assert [h.result(60).token_ids for h in together] == alone
        assert len(set(alone)) > 1

    def test_global_seeds_are_neither_read_nor_moved(self, engine: Engine) -> None:
        state = torch.random.get_rng_state()
        params = SamplingParams(temperature=1.0, max_tokens=10, seed=1)
        first = engine.generate(DOCUMENT, params).result(60)
        torch.manual_seed(99)
        assert engine.generate(DOCUMENT, params).result(60).token_ids == first.token_ids
        torch.random.set_rng_state(state)

    def test_without_a_seed_draws_differ(self, engine: Engine) -> None:
        params = SamplingParams(temperature=1.5, max_tokens=10)
        drawn = {engine.generate(DOCUMENT, params).result(60).token_ids for _ in range(4)}
        assert len(drawn) > 1

    @pytest.mark.parametrize("temperature", [1e-8, 1e-38, 1e-45, 5e-324])
    def test_a_tiny_temperature_is_greedy(self, engine: Engine, temperature: float) -> None:
        params = SamplingParams(temperature=temperature, top_p=0.9, max_tokens=10)
        want = engine.generate(DOCUMENT, greedy_params(10)).result(60).token_ids
        assert engine.generate(DOCUMENT, params).result(60).token_ids == want

    def test_a_huge_temperature_still_draws(self, engine: Engine) -> None:
        params = SamplingParams(temperature=1e300, max_tokens=10, seed=1)  # seeded: any draw may be the end
        assert len(engine.generate(DOCUMENT, params).result(60).token_ids) == 10

    def test_top_p_near_zero_is_greedy(self, engine: Engine) -> None:
        params = SamplingParams(temperature=1.0, top_p=1e-9, max_tokens=10)
        want = engine.generate(DOCUMENT, greedy_params(10)).result(60).token_ids
        assert engine.generate(DOCUMENT, params).result(60).token_ids == want

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"temperature": -0.1}, "temperature must be a finite number >= 0, got -0.1"),
            ({"temperature": float("nan")}, "temperature"),
            ({"temperature": float("inf")}, "finite"),
            ({"temperature": 10**400}, "finite"),
            ({"temperature": "hot"}, "'hot'"),
            ({"top_p": 0}, r"top_p must lie in \(0, 1\], got 0"),
            ({"top_p": 1.1}, "1.1"),
            ({"max_tokens": -5}, "max_tokens must be an integer >= 1, got -5"),
            ({"max_tokens": 0}, "got 0"),
            ({"max_tokens": 2.5}, "2.5"),
            ({"stop": ("",)}, "non-empty strings"),
            ({"stop": "abc"}, "sequence"),
            ({"seed": 1.5}, "seed must be an integer"),
        ],
    )
    def test_bad_values_are_named(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            SamplingParams(**values)


class TestStopping:
    def test_end_of_sequence_ends_an_answer_and_is_not_shown(self, engine: Engine, tokenizer: Any) -> None:
        tokens = engine.generate(DOCUMENT, greedy_params(20)).result(60).token_ids
        engine._eos_ids = frozenset({tokens[5]})
        completion = engine.generate(DOCUMENT, greedy_params(20)).result(60)
        first = tokens.index(tokens[5])
        assert completion.token_ids == tokens[: first + 1]
        assert completion.finish_reason == "stop"
        assert completion.text == tokenizer.decode(tokens[:first], skip_special_tokens=True)

    def test_the_configured_and_the_tokenizers_end_both_count(self, tiny_llama: Any, make_engine: Any) -> None:
        tiny_llama.generation_config.eos_token_id = [5, 6]
        assert make_engine(tiny_llama)._eos_ids == {2, 5, 6}

    def test_a_stop_string_is_cut_and_the_request_ends(self, engine: Engine) -> None:
        text = engine.generate(DOCUMENT, greedy_params(40)).result(60).text
        stop = text[6:9]
        params = SamplingParams(max_tokens=40, stop=(stop,))
        handle = engine.generate(DOCUMENT, params)
        pieces = "".join(handle)
        completion = handle.result()
        assert completion.text == pieces == text[: text.index(stop)]
        assert completion.finish_reason == "stop"
        assert len(completion.token_ids) < 40

    def test_length(self, engine: Engine) -> None:
        completion = engine.generate(DOCUMENT, greedy_params(4)).result(60)
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 4

    def test_the_streams_pieces_join_to_the_text(self, engine: Engine) -> None:
        handle = engine.generate(DOCUMENT, greedy_params(30))
        assert "".join(handle) == handle.result().text

        async def consume() -> tuple[str, str]:
            other = engine.generate(DOCUMENT, greedy_params(30))
            return "".join([piece async for piece in other]), (await other.aresult()).text

        assert asyncio.run(consume()) == (handle.result().text,) * 2


class TestTails:
    def test_a_request_that_waits_has_no_tail(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, max_batch=1)
        gate = Gate(engine)
        handles = [engine.generate(DOCUMENT, greedy_params(2)) for _ in range(3)]
        assert gate.arrived.wait(30)
        assert (engine.stats().running, engine.stats().waiting) == (1, 2)
        one = engine.stats().tail_bytes
        assert one > 0
        gate.opened.set()
        for handle in handles:
            handle.result(60)
        assert engine.stats().peak_tail_bytes == one

    @pytest.mark.parametrize("generated", [1, 2, 20, 56, 90, 300])
    def test_a_tail_takes_little_more_than_its_tokens(self, engine: Engine, generated: int) -> None:
        segment = engine.share(DOCUMENT)
        per_token = 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, head_dim, float32
        for own in (1, 16, 40):
            prompt = DOCUMENT + random_ids(own)
            completion = engine.generate(prompt, greedy_params(generated), segment).result(60)
            held = own + len(completion.token_ids) - 1  # the last token is never computed
            assert held * per_token <= completion.tail_bytes <= (1.25 * held + BUCKET_TOKENS) * per_token
            assert completion.tail_bytes <= (own + generated - 1) * per_token, "it never needs more"

    def test_a_tail_for_which_there_is_no_memory_fails_its_request_alone(
        self, engine: Engine, monkeypatch: Any
    ) -> None:
        segment = engine.share(DOCUMENT)
        prompts = [DOCUMENT + q for q in questions()]
        want = [engine.generate(p, greedy_params(40), segment).result(60).token_ids for p in prompts]
        allocate = Tail._allocate

        def refuse(tail: Tail, capacity: int) -> Any:
            if tail._limit == 5 + 60 - 1 and capacity > 16:  # at its first growth, tokens in hand
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return allocate(tail, capacity)

        monkeypatch.setattr(Tail, "_allocate", refuse)
        poor = engine.generate(DOCUMENT + random_ids(5), greedy_params(60), segment)
        handles = [engine.generate(p, greedy_params(40), segment) for p in prompts]
        with pytest.raises(MemoryError, match=r"private tail of 17 tokens; run fewer requests"):
            poor.result(60)
        for prompt, handle, tokens in zip(prompts, handles, want, strict=True):
            assert_same_tokens(engine.model, prompt, handle.result(60).token_ids, tokens)
        assert (engine.stats().tail_bytes, engine.pool.num_leases) == (0, 0)

    def test_everything_is_free_afterwards(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT)
        handles = [engine.generate(DOCUMENT + q, greedy_params(), segment) for q in questions()]
        for handle in handles:
            handle.result(60)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.tail_bytes, engine.pool.num_leases) == (0, 0, 0, 0)
        assert stats.finished == len(handles)


class TestFailures:
    def test_nan_logits_fail_one_request_alone(self, engine: Engine) -> None:
        with torch.no_grad():
            engine.model.model.embed_tokens.weight[7] = torch.nan
        segment = engine.share([i for i in DOCUMENT if i != 7])
        context = segment.token_ids.tolist()
        healthy = [context + [i for i in q if i != 7] + [9] for q in questions()]
        want = [engine.generate(p, greedy_params(4), segment).result(60).token_ids for p in healthy]
        handles = [engine.generate(p, greedy_params(4), segment) for p in healthy]
        sick = engine.generate([*context, 7], greedy_params(4), segment)
        with pytest.raises(NonFiniteLogitsError, match="NaN or infinite"):
            sick.result(60)
        assert [h.result(60).token_ids for h in handles] == want
        assert engine.stats().failed == 1
        assert engine.pool.num_leases == 0

    def test_a_forward_that_fails_for_one_request_fails_it_alone(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT)
        prompts = [DOCUMENT + q for q in questions()]
        want = [engine.generate(p, greedy_params(6), segment).result(60).token_ids for p in prompts]
        forward = engine._runner.forward
        culprit: list[RequestHandle] = []

        def failing(batch: Any) -> Any:
            logits = forward(batch)  # the tails have been written already
            if any(work.sequence.handle in culprit and len(work.sequence.generated) == 2 for work in batch.work):
                raise MemoryError("no room")
            return logits

        engine._runner.forward = failing  # type: ignore[method-assign]
        culprit.append(engine.generate(DOCUMENT + [5, 6], greedy_params(6), segment))
        handles = [engine.generate(p, greedy_params(6), segment) for p in prompts]
        with pytest.raises(MemoryError, match="no room"):
            culprit[0].result(60)
        for prompt, handle, tokens in zip(prompts, handles, want, strict=True):
            assert_same_tokens(engine.model, prompt, handle.result(60).token_ids, tokens)
        assert engine.pool.num_leases == 0

    def test_a_changed_attention_implementation_is_an_error_and_not_a_wrong_answer(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT)
        want = engine.generate([*DOCUMENT, 5], greedy_params(4), segment).result(60).token_ids
        engine.model.set_attn_implementation("sdpa")
        with pytest.raises(IncompatiblePoolError, match=r"is 'sdpa'.*attach"):
            engine.generate([*DOCUMENT, 5], greedy_params(4), segment).result(60)
        attach(engine.model)
        assert engine.generate([*DOCUMENT, 5], greedy_params(4), segment).result(60).token_ids == want

    def test_a_model_in_train_mode_answers_without_dropout(self, make_engine: Any) -> None:
        model = tiny_model("phi3", resid_pdrop=0.5, embd_pdrop=0.5)
        engine = make_engine(model)
        want = engine.generate(DOCUMENT, greedy_params(8)).result(60).token_ids
        model.train()
        assert engine.generate(DOCUMENT, greedy_params(8)).result(60).token_ids == want
        assert model.training

    def test_a_thread_that_cannot_start_fails_the_request_and_not_the_engine(
        self, engine: Engine, monkeypatch: Any
    ) -> None:
        segment = SharedKVPool.build(engine.pool, DOCUMENT)

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                engine.generate([*DOCUMENT, 5], greedy_params(2), segment)
        assert engine.pool.num_leases == 0
        assert len(engine.generate([*DOCUMENT, 5], greedy_params(2), segment).result(60).token_ids) == 2

    def test_a_build_that_close_interrupted_frees_its_place(self, engine: Engine) -> None:
        errors: list[BaseException] = []

        def share() -> None:
            try:
                engine.share(random_ids(1900))
            except EngineClosedError as error:
                errors.append(error)  # kept, and its frames with it

        thread = threading.Thread(target=share)
        thread.start()
        until(lambda: engine._plan is not None)
        engine.close()
        thread.join(30)
        if errors:  # else the build was faster than close()
            assert engine.pool.build(random_ids(1900)).num_tokens == 1900

    def test_a_dead_engine_says_so_and_hangs_nobody(self, engine: Engine, monkeypatch: Any) -> None:
        monkeypatch.setattr(threading, "excepthook", lambda args: None)

        def broken(*args: object) -> None:
            raise RuntimeError("scheduler bug")

        engine._scheduler.next_batch = broken  # type: ignore[method-assign,assignment]
        handle = engine.generate(DOCUMENT, greedy_params(2))
        with pytest.raises(EngineClosedError, match="died: RuntimeError: scheduler bug"):
            handle.result(30)
        with pytest.raises(EngineClosedError, match="scheduler bug"):
            engine.generate(DOCUMENT, greedy_params(2))
        with pytest.raises(EngineClosedError, match="scheduler bug"):
            engine.share(DOCUMENT)


class TestBadRequests:
    def test_over_the_models_positions(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT)
        message = r"context 150 \+ prompt 2 \+ max_tokens 1900 = 2052 tokens, but the model has 2048 positions; .* by 4"
        with pytest.raises(PromptTooLongError, match=message):
            engine.generate([*DOCUMENT, 5, 6], greedy_params(1900), segment)
        engine.generate([*DOCUMENT, 5, 6], greedy_params(1896), segment).cancel()

    def test_a_prompt_that_does_not_start_with_the_context(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT)
        with pytest.raises(IncompatiblePoolError, match="does not start with the 150 tokens"):
            engine.generate(random_ids(160, seed=5), greedy_params(), segment)

    @pytest.mark.parametrize("bad", [-1, 320, 2**40])
    def test_ids_outside_the_vocabulary(self, engine: Engine, bad: int) -> None:
        with pytest.raises(InvalidRequestError, match=rf"\[0, 320\), got {bad}"):
            engine.generate([*DOCUMENT, bad], greedy_params())

    @pytest.mark.parametrize("shared", [True, False])
    def test_nothing_to_compute(self, engine: Engine, shared: bool) -> None:
        segment = engine.share(DOCUMENT) if shared else None
        with pytest.raises(InvalidRequestError, match="no tokens of its own"):
            engine.generate(DOCUMENT if shared else [], greedy_params(), segment)

    def test_a_segment_of_another_model(self, engine: Engine) -> None:
        foreign = SharedKVPool.from_token_ids(tiny_model("llama", seed=4), DOCUMENT).segment
        with pytest.raises(IncompatiblePoolError, match="in its weights"):
            engine.generate([*DOCUMENT, 5], greedy_params(), foreign)

    def test_a_pool_of_another_model(self, tiny_llama: Any, tokenizer: Any) -> None:
        pool = SharedKVPool(tiny_model("llama", seed=4))
        with pytest.raises(IncompatiblePoolError, match="differs in its weights"):
            Engine(tiny_llama, tokenizer, pool=pool)

    @pytest.mark.parametrize("option", ["max_batch", "token_budget", "num_threads"])
    def test_options_below_one(self, tiny_llama: Any, tokenizer: Any, option: str) -> None:
        with pytest.raises(InvalidRequestError, match=f"{option} must be at least 1, got 0"):
            Engine(tiny_llama, tokenizer, **{option: 0})


class TestLifetime:
    def test_close_ends_requests_and_the_thread(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT)
        handle = engine.generate([*DOCUMENT, 5], greedy_params(1800), segment)
        next(iter(handle))
        thread = engine._thread
        engine.close()
        engine.close()
        assert thread is not None
        assert not thread.is_alive()
        with pytest.raises(EngineClosedError):
            handle.result(5)
        with pytest.raises(EngineClosedError, match="closed"):
            engine.generate(DOCUMENT, greedy_params())
        assert engine.pool.num_leases == 0

    def test_close_in_the_middle_of_a_forward_is_calm(self, engine: Engine, caplog: Any) -> None:
        segment = engine.share(DOCUMENT)
        forward, inside, go_on = engine._runner.forward, threading.Event(), threading.Event()

        def slow(batch: Any) -> Any:
            inside.set()
            assert go_on.wait(60)
            return forward(batch)

        engine._runner.forward = slow  # type: ignore[method-assign]
        handle = engine.generate([*DOCUMENT, 5], greedy_params(50), segment)
        assert inside.wait(30)
        closing = threading.Thread(target=engine.close)
        closing.start()
        with pytest.raises(EngineClosedError):
            handle.result(30)
        assert engine.pool.num_leases == 1, "the forward still reads"
        go_on.set()
        closing.join(30)
        assert engine.pool.num_leases == 0
        assert caplog.records == []

    def test_an_idle_engine_gives_its_thread_up_and_can_be_collected(
        self, tiny_llama: Any, tokenizer: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.05)
        engine = Engine(tiny_llama, tokenizer)
        first = engine.generate(DOCUMENT, greedy_params(3)).result(60).token_ids
        until(lambda: engine._thread is None)
        assert engine.generate(DOCUMENT, greedy_params(3)).result(60).token_ids == first
        until(lambda: engine._thread is None)
        gone = weakref.ref(engine)
        engine = None  # type: ignore[assignment]
        until(lambda: gc.collect() >= 0 and gone() is None)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_fork_is_refused_in_the_child(self, engine: Engine) -> None:
        engine.generate(DOCUMENT, greedy_params(1)).result(60)
        child = os.fork()
        if child == 0:
            try:
                engine.generate(DOCUMENT, greedy_params(1))
            except EngineClosedError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_the_interpreter_exits_cleanly_with_requests_running(self) -> None:
        code = (
            "import sys; sys.path.insert(0, 'tests')\n"
            "from helpers import *; from polykv import Engine, SamplingParams\n"
            "engine = Engine(tiny_model('llama'), tiny_tokenizer())\n"
            "handle = engine.generate(random_ids(50), SamplingParams(max_tokens=1500))\n"
            "next(iter(handle)); print('running', flush=True)\n"
        )
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (0, "running"), done.stderr
        assert "Traceback" not in done.stderr


def test_sixteen_threads_get_right_answers_and_leave_no_lease(engine: Engine) -> None:
    segment = engine.share(DOCUMENT, "exact")
    prompts = [DOCUMENT + random_ids(2 + i, seed=200 + i) for i in range(16)]
    answers: dict[int, tuple[int, ...]] = {}

    def ask(index: int) -> None:
        answers[index] = engine.generate(prompts[index], greedy_params(10), segment).result(60).token_ids

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, prompt in enumerate(prompts):
        assert_same_tokens(engine.model, prompt, answers[index], greedy(engine.model, prompt, 10))
    assert engine.pool.num_leases == 0
