"""However a caller goes away, and whatever its request is doing: at the next step nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import pytest
import torch
from helpers import assert_same_tokens, greedy, random_ids, tiny_model
from langgraph.graph import END, START, StateGraph

from polykv import Engine, SamplingParams
from polykv.engine import Request
from polykv.engine.request import RequestHandle
from polykv.errors import RequestCancelledError
from polykv.pool import KVSegment
from polykv_agents import ChatPolyKV, SharedContext

DOCUMENT = random_ids(150, seed=1)
LONG = random_ids(1400, seed=2)
NEIGHBOUR = [5, 6, 7]
NEIGHBOUR_TOKENS = 40
STATES = ("queued", "building", "prefilling", "decoding")


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.001)


class Scene:
    """An engine whose forwards are let through one by one, with a neighbour that decodes all the while."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.segment: KVSegment | None = None
        self.batches: list[list[RequestHandle]] = []
        self.builds: list[bool] = []
        self._waiting, self._passes, self._open = threading.Event(), threading.Semaphore(0), True
        forward = engine._runner.forward

        def gated(batch: Any) -> Any:
            self.batches.append([work.sequence.handle for work in batch.work])
            self.builds.append(batch.build is not None)
            if not self._open:
                self._waiting.set()
                assert self._passes.acquire(timeout=60)
            return forward(batch)

        engine._runner.forward = gated  # type: ignore[method-assign]

    def begin(self) -> None:
        """The neighbour stands at its first forward."""
        self._open = False
        self.batches.clear()
        self.builds.clear()
        params = SamplingParams(max_tokens=NEIGHBOUR_TOKENS)
        self.neighbour = self.engine.submit(Request(tuple(NEIGHBOUR), None, params))
        assert self._waiting.wait(30)

    def step(self) -> None:
        """Lets one forward pass, and waits until the next one stands there."""
        self._waiting.clear()
        self._passes.release()
        assert self._waiting.wait(30)

    def request(self, state: str) -> Request:
        """One that comes into that state."""
        assert self.segment is not None
        own, shared = [9], 0
        if state == "prefilling":
            own = LONG
        elif state == "building":
            own, shared = [*LONG, 9], len(DOCUMENT) + len(LONG)
        return Request((*DOCUMENT, *own), self.segment, SamplingParams(max_tokens=300), shared_tokens=shared)

    def reach(self, handle: RequestHandle, state: str) -> None:
        """Steps until the request is in that state, and in the middle of it."""
        for _ in range(20):
            if self._is(handle, state):
                return
            self.step()
        raise AssertionError(f"the request did not come to be {state}")

    def _is(self, handle: RequestHandle, state: str) -> bool:
        assert not handle.done
        if state == "queued":
            return any(s.handle is handle for s in self.engine._scheduler.waiting)
        if state == "building":
            return self.engine.stats().building > 0 and self.engine.stats().build_tokens > 0
        running = [s for s in self.engine._scheduler.running if s.handle is handle]
        begun = bool(running) and sum(handle in batch for batch in self.batches[:-1]) > 0
        return begun and bool(running[0].generated) == (state == "decoding")

    def check_gone(self, *handles: RequestHandle, engine_cancelled: int = 1) -> None:
        """One step later nothing is left of them."""
        self.step()  # the forward that was under way
        assert not any(handle in self.batches[-1] for handle in handles)
        assert not self.builds[-1]
        assert all(handle.done for handle in handles)
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.building) == (1, 0, 0)
        assert stats.cancelled == engine_cancelled
        assert stats.tail_bytes == self.engine._scheduler.running[0].tail.nbytes
        assert (self.engine._plan, self.engine._build) == (None, None)
        assert self.engine.pool.num_leases == 0
        assert self.engine.pool.segments == ((self.segment,) if self.segment is not None else ())
        self.end()

    def end(self) -> None:
        """The neighbour has noticed nothing."""
        self._open = True
        self._passes.release(10_000)
        tokens = self.neighbour.result(60).token_ids
        want = greedy(self.engine.model, NEIGHBOUR, NEIGHBOUR_TOKENS)
        assert_same_tokens(self.engine.model, NEIGHBOUR, tokens, want)
        assert self.engine.stats().tail_bytes == 0


def make_scene(engine: Engine) -> Scene:
    engine._eos_ids = frozenset()
    return Scene(engine)


@pytest.fixture
def scene(tiny_llama: Any, tokenizer: Any, request: Any) -> Iterator[Scene]:
    state = request.node.callspec.params.get("state") if hasattr(request.node, "callspec") else None
    tiny_llama.generation_config.eos_token_id = None
    engine = Engine(tiny_llama, tokenizer, max_batch=1 if state == "queued" else 2, token_budget=64)
    made = make_scene(engine)
    made.segment = engine.share(DOCUMENT, "exact")
    made.begin()
    yield made
    made._open = True
    made._passes.release(10_000)
    engine.close()


# -------------------------------------------------------------------------------------- from synchronous callers


def interrupt_when(ready: Callable[[], None], waits: Callable[[], bool]) -> threading.Thread:
    """Ctrl-C for the main thread, as soon as it waits and all is ready."""

    def press() -> None:
        ready()
        until(waits)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def waits_on(handle: RequestHandle) -> bool:
    return len(handle._condition._waiters) > 0  # type: ignore[attr-defined]


def by_cancel(scene: Scene, handle: RequestHandle, state: str) -> None:
    scene.reach(handle, state)
    handle.cancel()


def by_leaving_a_with_block(scene: Scene, handle: RequestHandle, state: str) -> None:
    with handle:
        scene.reach(handle, state)
        assert not handle.cancelled


def by_control_c_in_result(scene: Scene, handle: RequestHandle, state: str) -> None:
    thread = interrupt_when(lambda: scene.reach(handle, state), lambda: waits_on(handle))
    with pytest.raises(KeyboardInterrupt):
        handle.result(60)
    thread.join(30)


def by_control_c_in_a_stream(scene: Scene, handle: RequestHandle, state: str) -> None:
    thread = interrupt_when(lambda: scene.reach(handle, state), lambda: waits_on(handle))
    with pytest.raises(KeyboardInterrupt):
        for _ in handle:
            pass
    thread.join(30)


def by_an_error_raised_in_the_wait(scene: Scene, handle: RequestHandle, state: str) -> None:
    scene.reach(handle, state)

    def wait(*args: object) -> None:
        raise SystemExit

    handle._condition.wait = wait  # type: ignore[method-assign]
    for _ in range(2):  # a second caller changes nothing
        with pytest.raises(SystemExit):
            handle.result(60)
    del handle._condition.wait


# -------------------------------------------------------------------------------------- from asynchronous callers


def asynchronous(way: Callable[[Scene, RequestHandle, str], Awaitable[None]]) -> Callable[..., None]:
    def run(scene: Scene, handle: RequestHandle, state: str) -> None:
        asyncio.run(way(scene, handle, state))

    run.__name__ = way.__name__  # type: ignore[attr-defined]
    return run


async def by_cancelling_a_task(scene: Scene, handle: RequestHandle, state: str) -> None:
    task = asyncio.create_task(handle.aresult())
    await asyncio.to_thread(scene.reach, handle, state)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_cancelling_a_task_that_streams(scene: Scene, handle: RequestHandle, state: str) -> None:
    async def consume() -> None:
        async for _ in handle:
            pass

    task = asyncio.create_task(consume())
    await asyncio.to_thread(scene.reach, handle, state)
    await asyncio.sleep(0.01)  # it has taken what was there, and waits
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_wait_for(scene: Scene, handle: RequestHandle, state: str) -> None:
    await asyncio.to_thread(scene.reach, handle, state)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle.aresult(), 0.02)


async def by_a_task_group_that_fails(scene: Scene, handle: RequestHandle, state: str) -> None:
    async def fail() -> None:
        await asyncio.to_thread(scene.reach, handle, state)
        raise ZeroDivisionError

    async def team() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(handle.aresult())
            group.create_task(fail())

    with pytest.raises(ExceptionGroup):
        await team()


WAYS: list[Callable[..., None]] = [
    by_cancel,
    by_leaving_a_with_block,
    by_control_c_in_result,
    by_control_c_in_a_stream,
    by_an_error_raised_in_the_wait,
    asynchronous(by_cancelling_a_task),
    asynchronous(by_cancelling_a_task_that_streams),
    asynchronous(by_wait_for),
    asynchronous(by_a_task_group_that_fails),
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_request_that_is_given_up_frees_everything_at_the_next_step(
    scene: Scene, state: str, way: Callable[..., None]
) -> None:
    handle = scene.engine.submit(scene.request(state))
    assert scene.engine.pool.num_leases == 1
    way(scene, handle, state)
    assert handle.cancelled
    scene.check_gone(handle)
    with pytest.raises(RequestCancelledError):
        handle.result(5)
    with pytest.raises(RequestCancelledError):
        list(handle)


def test_a_request_that_is_cancelled_before_the_engine_has_seen_it(scene: Scene) -> None:
    handles = [scene.engine.submit(scene.request(state)) for state in ("decoding", "building")]
    for handle in handles:
        handle.cancel()
    scene.check_gone(*handles, engine_cancelled=2)


def test_cancelling_what_has_ended_changes_nothing(scene: Scene) -> None:
    handle = scene.engine.submit(Request((5, 9), None, SamplingParams(max_tokens=1)))
    while not handle.done:
        scene.step()
    with handle:
        pass
    handle.cancel()
    scene.step()
    assert len(handle.result().token_ids) == 1
    assert scene.engine.stats().cancelled == 0
    scene.end()


# -------------------------------------------------------------------------------------- contexts that several want


class TestBuilds:
    def crowd(self, scene: Scene, count: int = 3) -> list[RequestHandle]:
        request = scene.request("building")
        handles = [
            scene.engine.submit(
                Request(
                    (*request.token_ids, 5 + i), request.segment, SamplingParams(max_tokens=3), request.shared_tokens
                )
            )
            for i in range(count)
        ]
        scene.reach(handles[0], "building")
        return handles

    @pytest.mark.parametrize("gone", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
    def test_a_build_goes_on_while_anybody_waits_for_it(self, scene: Scene, gone: tuple[int, ...]) -> None:
        handles = self.crowd(scene)
        for index in gone:
            handles[index].cancel()
        scene.step()
        assert [handle.done for handle in handles] == [index in gone for index in range(3)]
        assert scene.engine.pool.num_leases == 1 + 3 - len(gone), "those of the others, and the build's on its parent"
        scene._open = True
        scene._passes.release(10_000)
        for index in set(range(3)) - set(gone):
            prompt = handles[index].request.token_ids
            completion = handles[index].result(60)
            assert completion.cached_tokens == len(DOCUMENT) + len(LONG)
            if scene.engine.pool.codec.name == "exact":
                assert_same_tokens(
                    scene.engine.model, prompt, completion.token_ids, greedy(scene.engine.model, prompt, 3)
                )
        scene.end()
        assert scene.engine.pool.stats().builds == 2
        assert (scene.engine.pool.num_leases, scene.engine.pool.stats().num_segments) == (0, 1)

    def test_a_build_that_nobody_waits_for_any_more_stops(self, scene: Scene) -> None:
        handles = self.crowd(scene)
        for handle in handles:
            handle.cancel()
        scene.check_gone(*handles, engine_cancelled=3)
        assert scene.engine.pool.stats().builds == 1
        assert scene.engine.share(LONG, parent=scene.segment).num_tokens == len(LONG)

    def test_the_next_in_line_is_built_then(self, scene: Scene) -> None:
        first = self.crowd(scene, 1)[0]
        second = scene.engine.submit(Request((*LONG, 5), None, SamplingParams(max_tokens=2), shared_tokens=len(LONG)))
        first.cancel()
        scene.step()
        assert first.done
        scene._open = True
        scene._passes.release(10_000)
        assert second.result(60).cached_tokens == len(LONG)
        scene.end()

    def test_one_in_line_goes_before_its_turn(self, scene: Scene) -> None:
        first = self.crowd(scene, 1)[0]
        second = scene.engine.submit(Request((*LONG, 5), None, SamplingParams(max_tokens=2), shared_tokens=len(LONG)))
        second.cancel()
        scene.step()
        assert second.done
        assert not first.done
        first.cancel()
        scene.check_gone(first, second, engine_cancelled=2)

    @pytest.mark.parametrize("whose", ["pool", "engine"])
    def test_while_another_thread_builds_the_same_text(self, scene: Scene, whose: str) -> None:
        """Who waits for the other's build goes at once; who is waited for leaves the build to the other."""
        engine, pool = scene.engine, scene.engine.pool
        built: list[KVSegment] = []
        inside, go_on = threading.Event(), threading.Event()

        def progress(phase: str, done: int, total: int) -> None:
            inside.set()
            if phase != "wait" and whose == "pool":
                assert go_on.wait(60)

        thread = threading.Thread(target=lambda: built.append(pool.build(LONG, progress=progress)))
        request = Request((*LONG, 5), None, SamplingParams(max_tokens=2), shared_tokens=len(LONG))
        if whose == "pool":
            thread.start()
            assert inside.wait(30)
            handle = engine.submit(request)
            scene.step()
            scene.step()
            assert engine.stats().building == 1
            assert not any(scene.builds), "it waits for the other"
        else:
            handle = engine.submit(request)
            scene.reach(handle, "building")
            thread.start()
            assert inside.wait(30), "the other waits for it"
        handle.cancel()
        scene.step()
        assert handle.done
        assert engine._plan is None
        assert not built
        go_on.set()
        scene._open = True
        scene._passes.release(10_000)
        thread.join(60)
        assert [segment.num_tokens for segment in built] == [len(LONG)]
        scene.end()
        assert pool.num_leases == 0
        pool.release(built[0])
        assert pool.segments == (scene.segment,)

    def test_a_request_that_waits_for_another_threads_build_gets_it(self, scene: Scene) -> None:
        inside, go_on = threading.Event(), threading.Event()

        def progress(*event: object) -> None:
            inside.set()
            assert go_on.wait(60)

        thread = threading.Thread(target=lambda: scene.engine.pool.build(LONG, progress=progress))
        thread.start()
        assert inside.wait(30)
        handle = scene.engine.submit(Request((*LONG, 5), None, SamplingParams(max_tokens=2), shared_tokens=len(LONG)))
        scene.step()
        go_on.set()
        thread.join(60)
        scene._open = True
        scene._passes.release(10_000)
        assert handle.result(60).cached_tokens == len(LONG)
        assert scene.engine.pool.stats().builds == 2
        assert not any(scene.builds)
        scene.end()


class TestShare:
    """The caller of ``share`` is interrupted while its context is built, or waits in line."""

    CONTEXT = random_ids(1000, seed=5)

    def begun(self, scene: Scene) -> None:
        """Steps until the context is being built."""
        until(lambda: bool(scene.engine._builds))
        for _ in range(20):
            if sum(scene.builds) > 1:
                return
            scene.step()
        raise AssertionError("it is not being built")

    def test_control_c_while_it_is_built(self, scene: Scene) -> None:
        thread = interrupt_when(lambda: self.begun(scene), lambda: True)
        with pytest.raises(KeyboardInterrupt):
            scene.engine.share(self.CONTEXT, parent=scene.segment)
        thread.join(30)
        scene.check_gone(engine_cancelled=0)

    def test_control_c_in_line(self, scene: Scene) -> None:
        ahead = scene.engine.submit(scene.request("building"))
        scene.reach(ahead, "building")
        thread = interrupt_when(lambda: until(lambda: len(scene.engine._builds) == 2), lambda: True)
        with pytest.raises(KeyboardInterrupt):
            scene.engine.share(self.CONTEXT, parent=scene.segment)
        thread.join(30)
        scene.step()
        scene.step()
        left = len(scene.engine._builds)
        ahead.cancel()
        scene.check_gone(ahead)
        assert left == 1

    @pytest.mark.parametrize("line", ["first", "in line"])
    def test_a_share_whose_progress_raises(self, scene: Scene, line: str) -> None:
        """As a cancelled ``ashare`` does; in line, it hears of it when its turn comes."""
        ahead = [scene.engine.submit(scene.request("building"))] if line == "in line" else []
        for handle in ahead:
            scene.reach(handle, "building")
        errors: list[BaseException] = []

        def progress(*event: object) -> None:
            raise ZeroDivisionError

        def share() -> None:
            try:
                scene.engine.share(self.CONTEXT, None, progress, parent=scene.segment)
            except ZeroDivisionError as error:
                errors.append(error)

        thread = threading.Thread(target=share)
        thread.start()
        until(lambda: len(scene.engine._builds) == 1 + len(ahead))
        for handle in ahead:
            handle.cancel()
        for _ in range(20):
            if errors:
                break
            scene.step()
            thread.join(0.05)
        thread.join(30)
        assert len(errors) == 1
        scene.check_gone(engine_cancelled=len(ahead))


# ---------------------------------------------------------------------------------- chat models and LangGraph's graphs


TEXT = "The bond: the merchant owes the moneylender three thousand ducats, and the court decides. " * 2
CHAT_STATES = ("queued", "prefilling", "decoding")


class State(TypedDict):
    question: str
    answer: str


@pytest.fixture
def chat(tokenizer: Any, request: Any) -> Iterator[tuple[Scene, ChatPolyKV, SharedContext]]:
    state = request.node.callspec.params["state"]
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    llm = ChatPolyKV(
        model=model, tokenizer=tokenizer, max_batch=1 if state == "queued" else 2, max_tokens=400, num_threads=1
    )
    context = llm.share(TEXT)
    scene = make_scene(llm.engine)
    scene.segment = llm.engine.pool.segment
    scene.handles = []  # type: ignore[attr-defined]
    submit = llm.engine.submit

    def recording(request: Request) -> RequestHandle:
        scene.handles.append(submit(request))  # type: ignore[attr-defined]
        return scene.handles[-1]  # type: ignore[attr-defined, no-any-return]

    scene.begin()
    llm.engine.submit = recording  # type: ignore[method-assign]
    yield scene, llm.with_context(context), context
    scene._open = True
    scene._passes.release(10_000)
    llm.close()


def question(state: str) -> str:
    """One whose tokens take several forwards, or one."""
    return "Who carries the risk of the merchant? " * (45 if state == "prefilling" else 1)


def reach(scene: Scene, state: str) -> None:
    until(lambda: bool(scene.handles))  # type: ignore[attr-defined]
    scene.reach(scene.handles[0], state)  # type: ignore[attr-defined]


def graph_of(node: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    return graph.compile()


async def chat_task(scene: Scene, agent: ChatPolyKV, state: str) -> None:
    task = asyncio.create_task(agent.ainvoke(question(state)))
    await asyncio.to_thread(reach, scene, state)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def chat_batch(scene: Scene, agent: ChatPolyKV, state: str) -> None:
    task = asyncio.create_task(agent.abatch([question(state)]))
    await asyncio.to_thread(reach, scene, state)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def chat_stream_task(scene: Scene, agent: ChatPolyKV, state: str) -> None:
    async def consume() -> None:
        async for _ in agent.astream(question(state)):
            pass

    task = asyncio.create_task(consume())
    await asyncio.to_thread(reach, scene, state)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def chat_astream_closed(scene: Scene, agent: ChatPolyKV, state: str) -> None:
    stream = agent.astream(question(state))
    first = asyncio.create_task(anext(stream))
    await asyncio.to_thread(reach, scene, state)
    if state == "decoding":
        while not first.done():
            await asyncio.sleep(0.005)
            if not first.done():
                await asyncio.to_thread(scene.step)
    else:
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    await stream.aclose()


async def node_under_wait_for(scene: Scene, agent: ChatPolyKV, state: str) -> None:
    """The node gives up by itself and the graph goes on."""
    entered = asyncio.Event()

    async def node(given: State) -> dict[str, str]:
        task = asyncio.create_task(agent.ainvoke(given["question"]))
        await asyncio.to_thread(reach, scene, state)
        entered.set()
        try:
            return {"answer": str((await asyncio.wait_for(task, 0.02)).content)}
        except TimeoutError:
            return {"answer": "too late"}

    final = await graph_of(node).ainvoke({"question": question(state), "answer": ""})
    assert final["answer"] == "too late"
    assert entered.is_set()


async def graphs_step_timeout(scene: Scene, agent: ChatPolyKV, state: str) -> None:
    async def node(given: State) -> dict[str, str]:
        return {"answer": str((await agent.ainvoke(given["question"])).content)}

    graph = graph_of(node)
    graph.step_timeout = 1.0
    task = asyncio.create_task(graph.ainvoke({"question": question(state), "answer": ""}))
    await asyncio.to_thread(reach, scene, state)
    with pytest.raises(TimeoutError):
        await task


async def graphs_task(scene: Scene, agent: ChatPolyKV, state: str) -> None:
    async def node(given: State) -> dict[str, str]:
        return {"answer": str((await agent.ainvoke(given["question"])).content)}

    task = asyncio.create_task(graph_of(node).ainvoke({"question": question(state), "answer": ""}))
    await asyncio.to_thread(reach, scene, state)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def chat_control_c(scene: Scene, agent: ChatPolyKV, state: str) -> None:
    thread = interrupt_when(lambda: reach(scene, state), lambda: waits_on(scene.handles[0]))  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        agent.invoke(question(state))
    thread.join(30)


def chat_stream_control_c(scene: Scene, agent: ChatPolyKV, state: str) -> None:
    thread = interrupt_when(lambda: reach(scene, state), lambda: waits_on(scene.handles[0]))  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        for _ in agent.stream(question(state)):
            pass
    thread.join(30)


def chat_batch_control_c(scene: Scene, agent: ChatPolyKV, state: str) -> None:
    thread = interrupt_when(lambda: reach(scene, state), lambda: True)
    with pytest.raises(KeyboardInterrupt):
        agent.batch([question(state)])
    thread.join(30)


CHAT_WAYS: list[Callable[..., Any]] = [
    chat_task,
    chat_batch,
    chat_stream_task,
    chat_astream_closed,
    node_under_wait_for,
    graphs_step_timeout,
    graphs_task,
    chat_control_c,
    chat_stream_control_c,
    chat_batch_control_c,
]


@pytest.mark.parametrize("state", CHAT_STATES)
@pytest.mark.parametrize("way", CHAT_WAYS, ids=lambda way: way.__name__)
def test_a_call_that_is_given_up_frees_everything_at_the_next_step(
    chat: tuple[Scene, ChatPolyKV, SharedContext], state: str, way: Callable[..., Any]
) -> None:
    scene, agent, context = chat
    given_up = way(scene, agent, state)
    if given_up is not None:
        asyncio.run(given_up)
    (handle,) = scene.handles  # type: ignore[attr-defined]
    until(lambda: handle.cancelled)  # batch() hears of Ctrl-C in a thread of its own
    scene.check_gone(handle)
    assert context.num_tokens > 0


@pytest.mark.parametrize("state", ["decoding"])
@pytest.mark.parametrize("how", ["closed", "collected"])
def test_a_stream_that_is_left_frees_everything(
    chat: tuple[Scene, ChatPolyKV, SharedContext], state: str, how: str
) -> None:
    scene, agent, context = chat
    stream = agent.stream(question(state))
    pieces: list[Any] = []
    thread = threading.Thread(target=lambda: pieces.append(next(stream)))
    thread.start()
    reach(scene, state)
    while thread.is_alive():
        thread.join(0.02)
        if thread.is_alive():
            scene.step()
    if how == "closed":
        stream.close()
    else:
        del stream
    del thread
    (handle,) = scene.handles  # type: ignore[attr-defined]
    assert handle.cancelled
    scene.check_gone(handle)
    assert context.num_tokens > 0


# ------------------------------------------------------------------------------------------------ a process of its own


PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys, time
sys.path.insert(0, "tests")
from helpers import *
from polykv import Engine, SamplingParams
from polykv.engine import Request

engine = Engine(tiny_model("llama"), tiny_tokenizer(), token_budget=16)
engine._eos_ids = frozenset()
forward = engine._runner.forward
engine._runner.forward = lambda batch: time.sleep(0.02) or forward(batch)
context = random_ids(50)
segment = engine.share(context, "exact")
long = random_ids(1500, seed=3)
waits = {
    "decoding": lambda: list(engine.generate([*context, 5], SamplingParams(max_tokens=1900), segment)),
    "building": lambda: engine.submit(
        Request((*context, *long, 5), segment, SamplingParams(max_tokens=9), shared_tokens=1550)
    ).result(),
    "share": lambda: engine.share(long),
}
for wait in waits.values():
    begun = engine.stats().steps
    remove = engine.add_step_callback(lambda report: report.stats.steps == begun + 4 and print("waiting", flush=True))
    try:
        wait()
    except KeyboardInterrupt:
        remove()
        deadline = time.monotonic() + 20
        while (engine._builds or engine.stats().running or engine.pool.num_leases) and time.monotonic() < deadline:
            time.sleep(0.005)
        stats = engine.stats()
        print(stats.running, stats.waiting, stats.building, stats.tail_bytes, engine.pool.num_leases,
              engine.pool.stats().num_segments, flush=True)
print(engine.stats().cancelled)
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_control_c_at_a_terminal_frees_everything() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for _ in ("decoding", "building", "share"):
                assert process.stdout.readline().strip() == "waiting", process.stderr.read()
                process.send_signal(signal.SIGINT)
                assert process.stdout.readline().split() == ["0", "0", "0", "0", "0", "1"]
            out, err = process.stdout.read(), process.stderr.read()
            process.wait(60)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, "2\n"), err
    assert "Traceback" not in err


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _control_c() -> Iterator[None]:
    """Ctrl-C as at a terminal: a shell starts background jobs, a CI's too, with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
