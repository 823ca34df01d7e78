"""Who starts when, who is turned away, who is too late, and contexts that are built for those who wait for them."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import assert_same_tokens, greedy, random_ids, tiny_model

from polykv import Engine, SamplingParams
from polykv.engine import Request
from polykv.engine import engine as engine_module
from polykv.engine.engine import EngineStats, StepReport
from polykv.engine.request import RequestHandle
from polykv.errors import (
    EngineClosedError,
    EngineOverloaded,
    InvalidRequestError,
    PolyKVError,
    RequestCancelledError,
    RequestTimeoutError,
)

DOCUMENT = random_ids(150, seed=1)
OTHER = random_ids(1200, seed=2)


def params(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def assert_idle(engine: Engine, *, segments: int = 0) -> None:
    """Nothing is left of any request: no row, no tail, no lease, no build."""
    until(lambda: not (engine._builds or engine._scheduler.running or engine._scheduler.waiting))
    until(lambda: engine._plan is None)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.building, stats.tail_bytes) == (0, 0, 0, 0)
    until(lambda: engine.pool.num_leases == 0)
    assert engine.pool.stats().num_segments == segments


class Gate:
    """Lets the engine's forwards through one by one, or all of them once it is opened."""

    def __init__(self, engine: Engine) -> None:
        self.passes, self.waiting = threading.Semaphore(0), threading.Event()
        self.batches: list[Any] = []
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
def make_engine(tokenizer: Any, tiny_llama: Any) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(options.pop("model", tiny_llama), tokenizer, **options))
        engines[-1]._eos_ids = frozenset()
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: Any) -> Engine:
    made: Engine = make_engine()
    return made


def ask(engine: Engine, *ids: int, tokens: int = 4, **options: Any) -> RequestHandle:
    return engine.submit(Request(tuple(ids) or (5, 6, 7), None, params(tokens), **options))


# ---------------------------------------------------------------------------------------------- order and priority


class TestOrder:
    def start_order(self, gate: Gate) -> list[RequestHandle]:
        seen: list[RequestHandle] = []
        for batch in gate.batches:
            seen.extend(handle for handle in batch if handle not in seen)
        return seen

    def test_higher_priorities_start_earlier_and_equal_ones_in_order(self, make_engine: Any) -> None:
        engine = make_engine(max_batch=1)
        gate = Gate(engine)
        first = ask(engine, priority=0)
        gate.arrived()
        priorities = [0, 5, -1, 5, 0, 7, -1]
        handles = [ask(engine, 5, 6 + i, priority=priority) for i, priority in enumerate(priorities)]
        gate.open()
        for handle in (first, *handles):
            handle.result(60)
        assert self.start_order(gate) == [first, *(handles[i] for i in (5, 1, 3, 0, 4, 2, 6))]

    def test_a_running_request_is_not_interrupted_by_more_important_ones(self, make_engine: Any) -> None:
        engine = make_engine(max_batch=2)
        gate = Gate(engine)
        running = [ask(engine, 5, 6, tokens=6), ask(engine, 5, 7, tokens=6)]
        gate.arrived()
        late = [ask(engine, 5, 8 + i, priority=100) for i in range(3)]
        for _ in range(3):
            gate.step()
            assert set(gate.batches[-1]) == set(running)
        gate.open()
        for handle in (*running, *late):
            handle.result(60)

    def test_a_request_whose_context_was_built_keeps_its_place(self, make_engine: Any) -> None:
        """It came first, so it starts before those that came while its context was built."""
        engine = make_engine(max_batch=1)
        gate = Gate(engine)
        blocking = ask(engine, tokens=400)
        gate.arrived()
        sharing = engine.submit(Request((*DOCUMENT, 5), None, params(), shared_tokens=150))
        others = [ask(engine, 5, 8 + i) for i in range(3)]
        while engine.stats().building:
            gate.step()
        assert not blocking.done
        gate.open()
        blocking.cancel()
        for handle in (sharing, *others):
            handle.result(60)
        assert self.start_order(gate) == [blocking, sharing, *others]

    @pytest.mark.parametrize("value", [1.5, "1", None, True])
    def test_a_priority_is_an_integer(self, value: Any) -> None:
        with pytest.raises(InvalidRequestError, match="priority must be an integer"):
            Request((5,), priority=value)

    def test_a_request_whose_context_is_built_blocks_nobody(self, make_engine: Any) -> None:
        """While a long context is computed in small lots, requests come and go."""
        engine = make_engine(token_budget=64)
        gate = Gate(engine)
        sharing = engine.submit(Request((*OTHER, 5), None, params(), shared_tokens=len(OTHER)))
        gate.arrived()
        short = [ask(engine, 5, 6 + i, tokens=2) for i in range(3)]
        steps = 0
        while not all(handle.done for handle in short):
            gate.step()
            steps += 1
            assert steps < 10
        assert engine.stats().building == 1
        assert not sharing.done
        gate.open()
        assert sharing.result(60).cached_tokens == len(OTHER)
        assert_idle(engine)


# -------------------------------------------------------------------------------------------------------- overload


class TestOverload:
    def test_what_finds_the_queue_full_is_refused_and_holds_nothing(self, make_engine: Any) -> None:
        engine = make_engine(max_batch=1, max_waiting=2)
        segment = engine.share(DOCUMENT)
        gate = Gate(engine)
        accepted = [engine.generate([*DOCUMENT, 5], params(), segment)]
        gate.arrived()
        accepted += [engine.generate([*DOCUMENT, 6], params(), segment), ask(engine)]
        refused = []  # kept, and with them the frames that hold the requests
        for _ in range(3):
            with pytest.raises(EngineOverloaded, match=r"2 requests wait already and 1 run; .*max_waiting=2") as caught:
                engine.generate([*DOCUMENT, 7], params(), segment)
            refused.append(caught.value)
        with pytest.raises(EngineOverloaded):
            engine.submit(Request((*OTHER, 5), None, params(), shared_tokens=10))
        stats = engine.stats()
        assert (stats.rejected, stats.waiting, stats.building, stats.running) == (4, 2, 0, 1)
        assert engine.pool.num_leases == 2
        assert isinstance(EngineOverloaded("x"), PolyKVError)
        gate.open()
        for handle in accepted:
            assert len(handle.result(60).token_ids) == 4
        assert engine.stats().finished == 3
        engine.generate([*DOCUMENT, 7], params(), segment).result(60)
        assert_idle(engine, segments=1)

    def test_those_who_wait_for_a_context_are_in_the_queue_too(self, make_engine: Any) -> None:
        engine = make_engine(max_batch=1, max_waiting=2)
        gate = Gate(engine)
        accepted = [ask(engine)]
        gate.arrived()
        accepted += [engine.submit(Request((*DOCUMENT, 5 + i), shared_tokens=150, sampling=params())) for i in range(2)]
        with pytest.raises(EngineOverloaded):
            ask(engine)
        gate.open()
        for handle in accepted:
            handle.result(60)
        assert_idle(engine)

    def test_requests_that_start_at_once_are_no_queue(self, make_engine: Any) -> None:
        engine = make_engine(max_batch=4, max_waiting=1)
        gate = Gate(engine)
        handles = [ask(engine, 5 + i) for i in range(5)]
        with pytest.raises(EngineOverloaded):
            ask(engine)
        gate.open()
        for handle in handles:
            handle.result(60)

    def test_a_cancelled_request_leaves_its_place_to_another(self, make_engine: Any) -> None:
        engine = make_engine(max_batch=1, max_waiting=1)
        gate = Gate(engine)
        running = ask(engine)
        gate.arrived()
        waiting = ask(engine)
        waiting.cancel()
        gate.step()
        another = ask(engine)
        gate.open()
        running.result(60)
        assert len(another.result(60).token_ids) == 4

    def test_max_waiting_below_one_is_refused(self, make_engine: Any) -> None:
        with pytest.raises(InvalidRequestError, match="max_waiting must be at least 1, got 0"):
            make_engine(max_waiting=0)


# -------------------------------------------------------------------------------------------------------- timeouts


class TestTimeouts:
    """Time is moved by hand: a request that was submitted long ago is too late."""

    def age(self, handle: RequestHandle, seconds: float = 100.0) -> None:
        handle.submitted_at -= seconds

    def check(self, engine: Engine, handle: RequestHandle, message: str, segments: int = 0) -> None:
        with pytest.raises(RequestTimeoutError, match=message):
            handle.result(60)
        assert_idle(engine, segments=segments)
        stats = engine.stats()
        assert (stats.timed_out, stats.failed, stats.cancelled) == (1, 1, 0)

    def test_in_the_queue(self, make_engine: Any) -> None:
        engine = make_engine(max_batch=1)
        segment = engine.share(DOCUMENT)
        gate = Gate(engine)
        first = ask(engine)
        gate.arrived()
        late = engine.submit(Request((*DOCUMENT, 5), segment, params(), timeout=50))
        self.age(late)
        gate.step()
        assert late.done
        gate.open()
        assert len(first.result(60).token_ids) == 4
        self.check(engine, late, r"timeout of 50 s was over before it started; raise timeout", segments=1)

    def test_while_its_context_is_built(self, make_engine: Any) -> None:
        engine = make_engine(token_budget=64)
        gate = Gate(engine)
        late = engine.submit(Request((*OTHER, 5), None, params(), shared_tokens=len(OTHER), timeout=50))
        gate.arrived()
        self.age(late)
        gate.open()
        self.check(engine, late, "was over while its shared context was built")
        assert engine.pool.stats().builds == 0

    def test_while_its_prompt_is_computed(self, make_engine: Any) -> None:
        engine = make_engine(token_budget=64)
        segment = engine.share(DOCUMENT)
        gate = Gate(engine)
        late = engine.submit(Request((*DOCUMENT, *OTHER), segment, params(), timeout=50))
        gate.arrived()
        gate.step()
        self.age(late)
        gate.open()
        self.check(engine, late, "was over after 0 tokens", segments=1)
        assert engine.stats().prefill_tokens == 128

    def test_while_it_decodes(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT)
        late = engine.submit(Request((*DOCUMENT, 5), segment, params(1500), timeout=50))
        stream = iter(late)
        next(stream)
        self.age(late)
        self.check(engine, late, r"was over after \d+ tokens", segments=1)
        with pytest.raises(RequestTimeoutError):
            for _ in stream:
                pass
        assert isinstance(RequestTimeoutError("x"), TimeoutError)

    def test_by_the_real_clock(self, engine: Engine) -> None:
        forward = engine._runner.forward
        engine._runner.forward = lambda batch: time.sleep(0.01) or forward(batch)  # type: ignore[method-assign]
        with pytest.raises(RequestTimeoutError):
            ask(engine, tokens=2000, timeout=0.2).result(60)
        assert len(ask(engine, tokens=3, timeout=1000).result(60).token_ids) == 3

    def test_one_of_several_that_wait_for_a_context(self, make_engine: Any) -> None:
        engine = make_engine(token_budget=64)
        gate = Gate(engine)
        requests = [
            Request((*OTHER, 5 + i), None, params(), shared_tokens=len(OTHER), timeout=50 if i == 1 else None)
            for i in range(3)
        ]
        handles = [engine.submit(request) for request in requests]
        gate.arrived()
        self.age(handles[1])
        gate.open()
        for handle in (handles[0], handles[2]):
            assert handle.result(60).cached_tokens == len(OTHER)
        self.check(engine, handles[1], "while its shared context was built")

    @pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", True])
    def test_values_that_are_no_seconds(self, value: Any) -> None:
        with pytest.raises(InvalidRequestError, match="timeout must be a finite number of seconds > 0, or None"):
            Request((5,), timeout=value)


# ------------------------------------------------------------------------------------------ contexts built on demand


CROWD = 64


class TestColdContexts:
    def requests(self, codec: str | None) -> list[Request]:
        return [
            Request((*DOCUMENT, *random_ids(1 + i % 7, seed=i)), None, params(6), shared_tokens=150, codec=codec)
            for i in range(CROWD)
        ]

    def check(self, engine: Engine, requests: list[Request], answers: dict[int, Any], codec: str | None) -> None:
        stats = engine.pool.stats()
        assert (stats.builds, stats.num_segments, stats.num_leases) == (1, 0, 0)
        assert engine.stats().build_tokens == 150
        segment = engine.share(DOCUMENT, codec)
        handles = [engine.generate(request.token_ids, params(6), segment) for request in requests]
        for index, handle in enumerate(handles):
            prompt, want = requests[index].token_ids, handle.result(60).token_ids
            assert answers[index].cached_tokens == 150
            if codec == "exact":
                assert_same_tokens(engine.model, prompt, answers[index].token_ids, want)
                if index < 8:
                    assert_same_tokens(engine.model, prompt, want, greedy(engine.model, prompt, 6))
            else:
                assert answers[index].token_ids == want

    @pytest.mark.parametrize("codec", [None, "exact"])
    def test_from_as_many_threads(self, engine: Engine, codec: str | None) -> None:
        requests, answers, start = self.requests(codec), {}, threading.Barrier(CROWD)

        def one(index: int) -> None:
            start.wait()
            answers[index] = engine.submit(requests[index]).result(60)

        gate = Gate(engine)
        threads = [threading.Thread(target=one, args=(index,)) for index in range(CROWD)]
        for thread in threads:
            thread.start()
        gate.arrived()  # the build has begun: late threads join it
        until(lambda: engine.stats().building == CROWD)
        gate.open()
        for thread in threads:
            thread.join(60)
        self.check(engine, requests, answers, codec)

    def test_from_as_many_tasks(self, engine: Engine) -> None:
        requests = self.requests(None)

        async def main() -> list[Any]:
            return await asyncio.gather(*(engine.submit(request).aresult() for request in requests))

        self.check(engine, requests, dict(enumerate(asyncio.run(main()))), None)

    def test_the_segment_goes_with_its_last_reader(self, make_engine: Any) -> None:
        engine = make_engine()
        gate = Gate(engine)
        handles = [
            engine.submit(Request((*DOCUMENT, 5 + i), None, params(2 + 3 * i), shared_tokens=150)) for i in range(3)
        ]
        gate.arrived()
        for index, handle in enumerate(handles):
            while not handle.done:
                assert engine.pool.stats().num_segments <= 1
                if engine.stats().running:
                    assert engine.pool.stats().num_segments == 1
                    assert engine.pool.num_leases == 3 - index
                if engine.stats().running == 1 and len(engine._scheduler.running[0].generated) == 7:
                    gate.open()
                    handle.result(60)
                else:
                    gate.step()
        assert_idle(engine)

    def test_a_context_that_is_there_already_is_found(self, engine: Engine) -> None:
        segment = engine.share(DOCUMENT)
        completion = engine.submit(Request((*DOCUMENT, 5), None, params(), shared_tokens=150)).result(60)
        assert completion.cached_tokens == 150
        assert engine.pool.stats().builds == 1
        assert engine.pool.segments == (segment,)

    def test_a_context_that_is_being_shared_is_built_once_too(self, engine: Engine) -> None:
        gate = Gate(engine)
        found: list[Any] = []
        sharing = threading.Thread(target=lambda: found.append(engine.share(tuple(DOCUMENT))))
        sharing.start()
        gate.arrived()
        handles = [engine.submit(Request((*DOCUMENT, 5 + i), None, params(), shared_tokens=150)) for i in range(2)]
        gate.open()
        assert [handle.result(60).cached_tokens for handle in handles] == [150, 150]
        sharing.join(30)
        assert engine.pool.segments == tuple(found)
        assert engine.pool.stats().builds == 1
        engine.pool.release(found[0])
        assert_idle(engine)

    def test_codecs_and_lengths_of_one_text_are_different_contexts(self, engine: Engine) -> None:
        gate = Gate(engine)
        handles = [
            engine.submit(Request((*DOCUMENT, 5), None, params(), shared_tokens=shared, codec=codec))
            for shared, codec in ((150, None), (150, "paper"), (150, "exact"), (100, None), (100, None))
        ]
        gate.arrived()
        gate.open()
        assert [handle.result(60).cached_tokens for handle in handles] == [150, 150, 150, 100, 100]
        assert engine.pool.stats().builds == 4
        assert_idle(engine)

    def test_a_build_that_fails_fails_those_who_waited_for_it_and_nobody_else(self, engine: Engine) -> None:
        with torch.no_grad():
            engine.model.model.embed_tokens.weight[7] = torch.nan
        gate = Gate(engine)
        healthy = [ask(engine, 5, 6), engine.submit(Request((8, 9, 10, 11), None, params(), shared_tokens=3))]
        sick = [engine.submit(Request((8, 7, 9, 5 + i), None, params(), shared_tokens=3)) for i in range(3)]
        gate.arrived()
        gate.open()
        for handle in sick:
            with pytest.raises(PolyKVError, match="cannot be stored"):
                handle.result(60)
        for handle in healthy:
            assert len(handle.result(60).token_ids) == 4
        stats = engine.stats()
        assert (stats.failed, stats.finished) == (3, 2)
        assert_idle(engine)

    def test_a_forward_that_fails_for_the_build_fails_it_alone(self, engine: Engine) -> None:
        forward = engine._runner.forward

        def failing(batch: Any) -> Any:
            logits = forward(batch)
            if batch.build is not None:
                raise MemoryError("no room")
            return logits

        engine._runner.forward = failing  # type: ignore[method-assign]
        want = greedy(engine.model, [5, 6, 7], 40)
        healthy = ask(engine, 5, 6, 7, tokens=40)
        sick = [engine.submit(Request((*DOCUMENT, 5 + i), None, params(), shared_tokens=150)) for i in range(2)]
        for handle in sick:
            with pytest.raises(MemoryError, match="no room"):
                handle.result(60)
        with pytest.raises(MemoryError, match="no room"):
            engine.share(DOCUMENT)
        assert_same_tokens(engine.model, [5, 6, 7], healthy.result(60).token_ids, want)
        assert_idle(engine)
        engine._runner.forward = forward  # type: ignore[method-assign]
        assert engine.share(DOCUMENT).num_tokens == 150

    @pytest.mark.parametrize("how", ["idle", "within steps"])
    def test_a_build_within_the_steps_of_others_stores_the_same(self, engine: Engine, how: str) -> None:
        alone = engine.pool.build(OTHER, "k8v3")
        codes = [layer.tensors() for layer in alone.layers]
        engine.pool.release(alone)
        running = [ask(engine, 5, 6 + i, tokens=400) for i in range(3)] if how == "within steps" else []
        for handle in running:
            next(iter(handle))
        mixed = engine.share(OTHER, "k8v3")
        assert mixed is not alone
        for before, layer in zip(codes, mixed.layers, strict=True):
            for name, tensor in layer.tensors().items():
                if tensor.is_floating_point():
                    assert torch.allclose(tensor.float(), before[name].float(), rtol=1e-2, atol=1e-3)
                else:  # other batch shapes round otherwise, which moves few codes
                    assert (tensor != before[name]).float().mean() < 0.01


def test_a_context_that_is_there_does_not_wait_for_the_build_of_another(make_engine: Any) -> None:
    engine = make_engine(token_budget=64)
    segment = engine.share(DOCUMENT)
    gate = Gate(engine)
    slow = engine.submit(Request((*OTHER, 5), None, params(), shared_tokens=len(OTHER)))
    gate.arrived()
    quick = engine.submit(Request((*DOCUMENT, 5), None, params(2), shared_tokens=150))
    for _ in range(8):
        gate.step()
    try:
        assert quick.done
        assert not slow.done
    finally:
        gate.open()
        slow.result(60)
        quick.result(60)
        engine.pool.release(segment)


def test_streams_go_on_at_full_speed_while_a_context_waits_for_another_builder(
    engine: Engine, monkeypatch: Any
) -> None:
    inside, go_on, naps = threading.Event(), threading.Event(), []

    def progress(*event: object) -> None:
        inside.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=lambda: engine.pool.build(DOCUMENT, progress=progress))
    thread.start()
    assert inside.wait(30)
    stream = ask(engine, tokens=1900)
    next(iter(stream))
    wait, sleep = threading.Event.wait, time.sleep

    def recorded(nap: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if threading.current_thread() is engine._thread:
                naps.append(args[-1])
            return nap(*args)

        return called

    monkeypatch.setattr(threading.Event, "wait", recorded(wait))
    monkeypatch.setattr(time, "sleep", recorded(sleep))
    waiting = engine.submit(Request((*DOCUMENT, 5), None, params(1), shared_tokens=150))
    before = engine.stats().steps
    until(lambda: engine.stats().steps > before + 10)
    stream.cancel()
    go_on.set()
    thread.join(60)
    assert waiting.result(60).cached_tokens == 150
    assert sum(naps) < 0.01


def test_the_context_of_a_more_important_request_is_built_first(make_engine: Any) -> None:
    engine = make_engine()
    gate = Gate(engine)
    ask(engine, tokens=1)
    gate.arrived()
    order: list[int] = []
    handles = [
        engine.submit(Request((*random_ids(60, seed=i), 5), None, params(1), shared_tokens=60, priority=i))
        for i in range(3)
    ]
    gate.open()
    threads = [threading.Thread(target=lambda i=i: (handles[i].result(60), order.append(i))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    starts = [handles[i].submitted_at + handles[i].result().timing.ttft_s for i in range(3)]
    assert starts[2] < starts[1] < starts[0]


def test_a_request_that_joins_a_build_as_it_is_given_up_is_served(engine: Engine, monkeypatch: Any) -> None:
    """The last one who waited has just been cancelled when another comes for the same context."""
    gate = Gate(engine)
    first = engine.submit(Request((*DOCUMENT, 5), None, params(), shared_tokens=150))
    gate.arrived()
    first.cancel()
    late: list[RequestHandle] = []
    end_build = engine._end_build

    def joined_at_the_last_moment() -> None:
        if not late:
            late.append(engine.submit(Request((*DOCUMENT, 6), None, params(), shared_tokens=150)))
        end_build()

    monkeypatch.setattr(engine, "_end_build", joined_at_the_last_moment)
    gate.open()
    with pytest.raises(RequestCancelledError):
        first.result(60)
    until(lambda: bool(late))
    assert len(late[0].result(60).token_ids) == 4
    assert_idle(engine)


def test_a_thread_that_ends_as_another_starts_takes_nothing_from_it(engine: Engine, monkeypatch: Any) -> None:
    """An idle thread has given its place up, but not quite ended, when the next request starts its successor."""
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    ask(engine, tokens=1).result(60)
    wait_for_work, building, ended = engine._wait_for_work, threading.Event(), []

    def slow() -> bool:
        more = wait_for_work()
        if not more and not ended:
            ended.append(threading.current_thread())
            assert building.wait(30)
        return more

    monkeypatch.setattr(engine, "_wait_for_work", slow)
    ask(engine, tokens=1).result(60)  # the thread goes by the slow one from its next look on
    until(lambda: bool(ended))
    gate = Gate(engine)
    handle = engine.submit(Request((*DOCUMENT, 5), None, params(), shared_tokens=150))
    gate.arrived()
    building.set()
    ended[0].join(30)
    gate.open()
    assert len(handle.result(60).token_ids) == 4


# ---------------------------------------------------------------------------------------- reports, stats and errors


def test_reports_add_up(make_engine: Any) -> None:
    engine = make_engine(token_budget=64, max_batch=3)
    reports: list[StepReport] = []
    remove = engine.add_step_callback(reports.append)
    segment = engine.share(DOCUMENT)
    handles = [engine.generate([*DOCUMENT, *random_ids(70 + i)], params(5 + i), segment) for i in range(4)]
    handles.append(engine.submit(Request((*OTHER, 5), None, params(9), shared_tokens=len(OTHER))))
    generated = sum(len(handle.result(60).token_ids) for handle in handles)
    until(lambda: engine.stats().finished == 5 and len(reports) == engine.stats().steps)
    assert remove() is None
    stats = engine.stats()
    assert stats.generated_tokens == generated == 5 + 6 + 7 + 8 + 9
    # each request's first token comes with the end of its prompt, so it has no row of its own
    assert sum(r.decode_rows for r in reports) == generated - len(handles)
    assert sum(r.prompt_rows for r in reports) == stats.prefill_tokens == 70 + 71 + 72 + 73 + 1
    assert sum(r.build_rows for r in reports) == stats.build_tokens == 150 + len(OTHER)
    assert stats.prefill_saved_tokens == 4 * 150 + len(OTHER)
    assert stats.peak_running == 3
    assert all(r.prompt_rows + r.build_rows <= 64 and r.decode_rows <= 3 for r in reports)
    assert all(r.seconds > 0 and r.stats.steps == i + 1 for i, r in enumerate(reports))
    assert stats.tokens_per_s > 0
    before = len(reports)
    ask(engine).result(60)
    assert len(reports) == before, "a callback that was removed is not called"
    remove()
    assert (stats.finished, stats.failed, stats.cancelled, stats.timed_out, stats.rejected) == (5, 0, 0, 0, 0)


def test_a_callback_that_fails_is_logged_and_harms_nobody(engine: Engine, caplog: Any) -> None:
    seen: list[StepReport] = []

    def broken(report: StepReport) -> None:
        raise ZeroDivisionError

    engine.add_step_callback(broken)
    engine.add_step_callback(seen.append)
    with caplog.at_level(logging.ERROR):
        assert len(ask(engine, tokens=5).result(60).token_ids) == 5
    until(lambda: len(seen) == 5)
    assert {r.levelname for r in caplog.records} == {"ERROR"}
    assert "step callback" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_may_cancel_submit_and_read(engine: Engine) -> None:
    handles: list[RequestHandle] = []

    def callback(report: StepReport) -> None:
        assert engine.stats().steps == report.stats.steps
        if report.stats.steps == 3:
            handles[0].cancel()
            handles.append(ask(engine, tokens=2))

    handles.append(ask(engine, tokens=1000))
    engine.add_step_callback(callback)
    with pytest.raises(RequestCancelledError):
        handles[0].result(60)
    assert len(handles[1].result(60).token_ids) == 2


@pytest.mark.parametrize("what", ["share", "result"])
def test_a_callback_that_waits_for_its_own_engine_is_told_so(engine: Engine, caplog: Any, what: str) -> None:
    def callback(report: StepReport) -> None:
        if report.stats.steps == 1:
            engine.share(DOCUMENT) if what == "share" else ask(engine).result()

    engine.add_step_callback(callback)
    assert len(ask(engine).result(1).token_ids) == 4
    assert "step callback" in caplog.text


def test_a_callback_may_close_the_engine(engine: Engine) -> None:
    handles = [ask(engine, 5, 6 + i, tokens=1000) for i in range(3)]
    engine.add_step_callback(lambda report: engine.close())
    for handle in handles:
        with pytest.raises(EngineClosedError):
            handle.result(60)
    thread = engine._thread
    if thread is not None:
        thread.join(30)
    assert engine.stats().tail_bytes == 0


def test_stats_of_an_engine_that_has_done_nothing(engine: Engine) -> None:
    assert engine.stats() == EngineStats()


def test_peak_tail_bytes_are_those_of_the_fullest_moment(make_engine: Any) -> None:
    engine = make_engine()
    gate = Gate(engine)
    seen: list[int] = []
    engine.add_step_callback(lambda report: seen.append(report.stats.tail_bytes))
    handles = [ask(engine, *random_ids(10 + 30 * i), tokens=20) for i in range(3)]
    gate.arrived()
    gate.open()
    completions = [handle.result(60) for handle in handles]
    until(lambda: len(seen) == engine.stats().steps)
    per_token = 3 * 2 * 2 * 32 * 4
    assert engine.stats().peak_tail_bytes == sum(c.tail_bytes for c in completions) >= max(seen)
    assert sum(c.tail_bytes for c in completions) >= per_token * (29 + 59 + 89)
    assert engine.stats().tail_bytes == 0


@pytest.mark.parametrize("make_copy", [pickle.dumps, copy.copy, copy.deepcopy])
def test_engines_and_handles_are_neither_pickled_nor_copied(engine: Engine, make_copy: Any) -> None:
    handle = ask(engine)
    with pytest.raises(TypeError, match="an Engine holds a model and a thread of this process"):
        make_copy(engine)
    with pytest.raises(TypeError, match="a RequestHandle belongs to an engine of this process"):
        make_copy(handle)
    assert len(handle.result(60).token_ids) == 4
    assert pickle.loads(pickle.dumps(handle.result())) == handle.result()


def test_a_dead_engine_says_so_at_once_in_every_state(make_engine: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    engine = make_engine(max_batch=1)
    segment = engine.share(DOCUMENT)
    gate = Gate(engine)
    running = engine.generate([*DOCUMENT, 5], params(50), segment)
    gate.arrived()
    thread = engine._thread
    assert thread is not None
    queued = engine.generate([*DOCUMENT, 6], params(), segment)
    building = engine.submit(Request((*OTHER, 5), None, params(), shared_tokens=len(OTHER)))
    errors: list[BaseException] = []

    def share() -> None:
        try:
            engine.share(OTHER)
        except EngineClosedError as error:
            errors.append(error)

    sharing = threading.Thread(target=share)
    sharing.start()
    until(lambda: len(engine._builds) == 2)

    def broken(*args: object) -> None:
        raise RuntimeError("scheduler bug")

    monkeypatch.setattr(engine._scheduler, "next_batch", broken)
    gate.open()
    for handle in (running, queued, building):
        with pytest.raises(EngineClosedError, match="the engine died: RuntimeError: scheduler bug"):
            handle.result(30)
    sharing.join(30)
    thread.join(30)
    assert len(errors) == 1
    until(lambda: engine.pool.num_leases == 0)
    assert engine.closed
    for call in (lambda: ask(engine), lambda: engine.share(DOCUMENT), lambda: engine.generate([5], params())):
        with pytest.raises(EngineClosedError, match="scheduler bug"):
            call()
    assert engine.stats().tail_bytes == 0


def test_a_model_of_another_dtype_is_scheduled_alike(make_engine: Any) -> None:
    engine = make_engine(model=tiny_model("llama").to(torch.bfloat16))
    handles = [engine.submit(Request((*DOCUMENT, 5 + i), None, params(), shared_tokens=150)) for i in range(3)]
    assert all(handle.result(60).cached_tokens == 150 for handle in handles)
    assert_idle(engine)
