"""SharedContextMiddleware: what it takes, when it shares a text, and what it does not do silently."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import FULL
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import ConfigurableField

from polykv.errors import (
    ContextReleasedError,
    IncompatiblePoolError,
    InvalidRequestError,
    PromptTooLongError,
    SharedContextMissing,
)
from polykv_agents import ChatPolyKV, SharedContextMiddleware
from polykv_agents.middleware import KEPT, MAX_NAME
from polykv_agents.testing import POSITIONS, Script, scripted_chat_model

DOCUMENT = "The carrier bears the risk until the goods are handed over to the buyer at the quay. " * 3
QUESTION: Any = {"messages": [HumanMessage("Who?")]}
PATIENCE = 20.0
"""Seconds after which something that should have happened has not."""


def says_whether_it_reads(prompt: str) -> str:
    return "yes" if DOCUMENT in prompt else "no"


@pytest.fixture
def make() -> Iterator[Callable[..., ChatPolyKV]]:
    made: list[ChatPolyKV] = []

    def build(script: Any = says_whether_it_reads, **fields: Any) -> ChatPolyKV:
        made.append(scripted_chat_model(script, **fields))
        return made[-1]

    yield build
    for llm in made:
        llm.close()


@pytest.fixture
def llm(make: Callable[..., ChatPolyKV]) -> ChatPolyKV:
    return make()


def ask(model: Any, middleware: Any, context: Any = None, **more: Any) -> Any:
    """The last message of an agent without tools."""
    listed = middleware if isinstance(middleware, list) else [middleware]
    return create_agent(model, [], middleware=listed, **more).invoke(QUESTION, context=context)["messages"][-1]


def cache_read(message: Any) -> int:
    return int(message.usage_metadata["input_token_details"]["cache_read"])


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.005)


@dataclass
class Held:
    shared: Any


class TestWhatItTakes:
    @pytest.mark.parametrize(
        "given",
        [
            DOCUMENT,
            Document(DOCUMENT),
            [DOCUMENT, Document("A second one.")],
            [("human", DOCUMENT), ("ai", "Understood.")],
        ],
        ids=["text", "document", "list", "messages"],
    )
    @pytest.mark.parametrize("way", ["value", "function", "runtime"])
    def test_texts_documents_and_messages(self, llm: ChatPolyKV, given: Any, way: str) -> None:
        source = {"value": given, "function": lambda runtime: given, "runtime": None}[way]
        message = ask(llm, SharedContextMiddleware(source), Held(given))
        assert message.content == "yes"
        assert cache_read(message) > len(DOCUMENT) * 0.9

    @pytest.mark.parametrize("way", ["value", "function", "runtime"])
    def test_an_id_is_never_taken_for_a_text(self, llm: ChatPolyKV, way: str) -> None:
        ctx = llm.share(DOCUMENT)
        source = {"value": ctx.id, "function": lambda runtime: ctx.id, "runtime": None}[way]
        middleware = SharedContextMiddleware(source)
        assert ask(llm, middleware, Held(ctx.id)).content == "yes"
        ctx.release()
        with pytest.raises(SharedContextMissing, match=f"{ctx.id}.*Share its text again"):
            ask(llm, middleware, Held(ctx.id))
        assert llm.pool.segments == ()

    @pytest.mark.parametrize("way", ["function", "runtime"])
    def test_a_name_whose_context_is_gone_is_missing_and_not_a_text_of_one_word(
        self, llm: ChatPolyKV, way: str
    ) -> None:
        middleware = SharedContextMiddleware(None if way == "runtime" else lambda runtime: "contract")
        with llm.share(DOCUMENT, name="contract"):
            assert ask(llm, middleware, Held("contract")).content == "yes"
        with pytest.raises(SharedContextMissing, match="'contract'"):
            ask(llm, middleware, Held("contract"))
        short, long = "The carrier.".ljust(MAX_NAME, "."), "The carrier.".ljust(MAX_NAME + 1, ".")
        with pytest.raises(SharedContextMissing, match="as a list"):
            ask(llm, SharedContextMiddleware(), Held(short))
        assert cache_read(ask(llm, SharedContextMiddleware(), Held([short]))) > MAX_NAME
        assert cache_read(ask(llm, SharedContextMiddleware(), Held(long))) > MAX_NAME

    def test_a_context_object_may_be_a_mapping_and_the_attribute_another(self, llm: ChatPolyKV) -> None:
        middleware = SharedContextMiddleware(attribute="contract")
        assert ask(llm, middleware, {"contract": DOCUMENT}).content == "yes"
        assert ask(llm, middleware, {"contract": None}).content == "no"

    @pytest.mark.parametrize(
        ("context", "message"), [(None, "the run has none"), ({"other": 1}, "the dict"), (Held(1), "the Held")]
    )
    def test_a_runtime_that_holds_nothing_of_that_name_is_an_error(
        self, llm: ChatPolyKV, context: Any, message: str
    ) -> None:
        with pytest.raises(InvalidRequestError, match=f"'contract'.*{message}.*invoke"):
            ask(llm, SharedContextMiddleware(attribute="contract"), context)

    @pytest.mark.parametrize("bad", [3, "", [], [3]])
    def test_what_cannot_be_shared_is_an_error_at_the_call(self, llm: ChatPolyKV, bad: Any) -> None:
        with pytest.raises((InvalidRequestError, SharedContextMissing)):
            ask(llm, SharedContextMiddleware(lambda runtime: bad))

    @pytest.mark.parametrize("own", ["same", "another", "none"])
    def test_it_wins_over_the_models_own_context(self, llm: ChatPolyKV, own: str) -> None:
        ctx = llm.share(DOCUMENT)
        model = {
            "same": llm.with_context(ctx),
            "another": llm.with_context(llm.share(f"B {DOCUMENT[:99]}")),
            "none": llm,
        }
        message = ask(model[own], SharedContextMiddleware(ctx))
        assert message.response_metadata["shared_context"]["id"] == ctx.id
        assert message.content == "yes"

    def test_nothing_for_a_call_leaves_the_model_its_own(self, llm: ChatPolyKV) -> None:
        reader = llm.with_context(llm.share(DOCUMENT))
        assert ask(reader, SharedContextMiddleware(lambda runtime: None)).content == "yes"

    def test_a_handle_of_another_model_or_one_that_was_released(self, llm: ChatPolyKV, make: Any) -> None:
        ctx = make().share(DOCUMENT)
        with pytest.raises(IncompatiblePoolError, match="another pool"):
            ask(llm, SharedContextMiddleware(ctx))
        ctx.release()
        with pytest.raises(ContextReleasedError, match="share\\(\\) again"):
            ask(llm, SharedContextMiddleware(ctx))

    def test_a_handle_that_only_the_function_made_lives_through_the_call(self, llm: ChatPolyKV) -> None:
        assert ask(llm, SharedContextMiddleware(lambda runtime: llm.share(DOCUMENT))).content == "yes"
        gc.collect()
        llm.pool.sweep()
        assert llm.pool.segments == ()


class TestCodecs:
    @pytest.mark.parametrize("codec", ["exact", "k8v3", "paper"])
    def test_the_codec_of_the_handle_is_read_though_others_of_the_text_are_live(
        self, llm: ChatPolyKV, codec: str
    ) -> None:
        handles = {name: llm.share(DOCUMENT, codec=name) for name in (codec, "exact", "k8v3", "paper")}
        message = ask(llm, SharedContextMiddleware(handles[codec]))
        facts = message.response_metadata["shared_context"]
        assert (facts["codec"], facts["id"], cache_read(message)) == (codec, handles[codec].id, facts["tokens"])

    def test_a_text_is_stored_as_the_model_says(self, llm: ChatPolyKV) -> None:
        middleware = SharedContextMiddleware(DOCUMENT)
        for model in (llm, llm.model_copy(update={"codec": "exact"})):
            assert ask(model, middleware).response_metadata["shared_context"]["codec"] == model.codec
        assert len(llm.pool.segments) == 2


def with_field(llm: ChatPolyKV) -> Any:
    return llm.configurable_fields(temperature=ConfigurableField(id="warmth"))


class TestWrappedModels:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda llm: llm.bind(temperature=1.0),
            lambda llm: llm.with_retry(),
            lambda llm: llm.with_config(tags=["a"]).bind(seed=1),
            with_field,
            lambda llm: with_field(llm).with_config(configurable={"warmth": 1.0}),
        ],
        ids=["bind", "retry", "twice", "fields", "field set"],
    )
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_bindings_retries_and_fields_read_it(self, llm: ChatPolyKV, wrap: Any, asynchronous: bool) -> None:
        agent = create_agent(
            wrap(llm), [], middleware=[SharedContextMiddleware(DOCUMENT, on_unsupported_model="raise")]
        )
        result = asyncio.run(agent.ainvoke(QUESTION)) if asynchronous else agent.invoke(QUESTION)
        assert result["messages"][-1].content == "yes"
        assert cache_read(result["messages"][-1]) > len(DOCUMENT) * 0.9

    def test_a_wrapped_model_can_not_be_told_one_of_several_codecs(self, llm: ChatPolyKV) -> None:
        first = llm.share(DOCUMENT, codec="exact")
        second = llm.share(DOCUMENT, codec="k8v3")
        middleware = SharedContextMiddleware(first)
        with pytest.raises(InvalidRequestError, match="several codecs.*'exact'.*release the others"):
            ask(llm.bind(seed=1), middleware)
        second.release()
        assert ask(llm.bind(seed=1), middleware).response_metadata["shared_context"]["codec"] == "exact"

    def test_fallbacks_are_not_told_and_it_says_so(self, llm: ChatPolyKV, caplog: pytest.LogCaptureFixture) -> None:
        assert ask(llm.with_fallbacks([llm]), SharedContextMiddleware(DOCUMENT)).content == "no"
        assert "RunnableWithFallbacks is no ChatPolyKV" in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_settings_of_others_are_kept_and_hold_the_id_alone(llm: ChatPolyKV, asynchronous: bool) -> None:
    ctx = llm.share(DOCUMENT)
    seen: list[dict[str, Any]] = []

    class Inner(SharedContextMiddleware):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            seen.append(dict(request.model_settings))
            return handler(request)

        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            seen.append(dict(request.model_settings))
            return await handler(request)

    class Outer(Inner):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(model_settings={"seed": 3}))

        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(request.override(model_settings={"seed": 3}))

    agent = create_agent(llm, [], middleware=[Outer(DOCUMENT), SharedContextMiddleware(ctx), Inner(DOCUMENT)])
    if asynchronous:
        asyncio.run(agent.ainvoke(QUESTION))
    else:
        agent.invoke(QUESTION)
    assert seen == [{"seed": 3, "shared_context": ctx.id}]


def test_an_agents_stream_says_the_same(llm: ChatPolyKV) -> None:
    agent = create_agent(llm, [], middleware=[SharedContextMiddleware(DOCUMENT)])
    want = agent.invoke(QUESTION)["messages"][-1]
    chunks: list[Any] = [chunk for chunk, _ in agent.stream(QUESTION, stream_mode="messages")]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert (whole.content, whole.usage_metadata) == (want.content, want.usage_metadata)


def test_the_answer_cache_tells_codecs_and_what_a_name_stands_for_apart(make: Any) -> None:
    from langchain_core.caches import InMemoryCache

    llm = make(lambda prompt: "one" if "One. The" in prompt else "two", cache=InMemoryCache())
    for codec in ("exact", "k8v3", "exact"):
        message = ask(llm, SharedContextMiddleware(llm.share(DOCUMENT, codec=codec)))
        assert message.response_metadata["shared_context"]["codec"] == codec
    for begins in ("One", "Two"):
        held = llm.share(f"{begins}. {DOCUMENT}", name="contract")
        assert llm.invoke("Which?", shared_context="contract").content == begins.lower()
    assert held.name == "contract" and llm.engine.stats().finished == 4


# ------------------------------------------------------------------------------------------- sharing of texts


class Gate:
    """Holds ``share`` at its start, so that a test decides what happens meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: BaseException | None = None) -> None:
        self.calls = 0
        self.open = threading.Event()
        real, self._first = ChatPolyKV.share, first

        def share(llm: ChatPolyKV, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            assert self.open.wait(PATIENCE)
            if self._first is not None:
                error, self._first = self._first, None
                raise error
            return real(llm, *args, **kwargs)

        monkeypatch.setattr(ChatPolyKV, "share", share)


def waiting(middleware: SharedContextMiddleware, llm: ChatPolyKV) -> int:
    return sum(build.waiting for build in list(middleware._shelf(llm).builds.values()))


COLD = 200 if FULL else 40


class TestOneBuild:
    def test_for_many_cold_threads(self, llm: ChatPolyKV, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, middleware = Gate(monkeypatch), SharedContextMiddleware(DOCUMENT)
        agent = create_agent(llm, [], middleware=[middleware])
        with ThreadPoolExecutor(COLD) as threads:
            answers = [threads.submit(agent.invoke, QUESTION) for _ in range(COLD)]
            until(lambda: waiting(middleware, llm) == COLD)
            gate.open.set()
            assert {answer.result()["messages"][-1].content for answer in answers} == {"yes"}
        assert (gate.calls, llm.pool.stats().builds, llm.pool.num_leases) == (1, 1, 0)

    async def test_for_many_cold_tasks_which_take_one_thread(
        self, llm: ChatPolyKV, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, middleware = Gate(monkeypatch), SharedContextMiddleware(DOCUMENT)
        agent = create_agent(llm, [], middleware=[middleware])
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        tasks = [asyncio.create_task(agent.ainvoke(QUESTION)) for _ in range(COLD)]
        while waiting(middleware, llm) < COLD:
            await asyncio.sleep(0.005)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), PATIENCE) == "free"
        gate.open.set()
        assert {result["messages"][-1].content for result in await asyncio.gather(*tasks)} == {"yes"}
        assert (gate.calls, llm.pool.stats().builds, llm.pool.num_leases) == (1, 1, 0)

    async def test_a_cancelled_task_leaves_the_build_to_those_who_wait(
        self, llm: ChatPolyKV, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, middleware = Gate(monkeypatch), SharedContextMiddleware(DOCUMENT)
        agent = create_agent(llm, [], middleware=[middleware])
        tasks = [asyncio.create_task(agent.ainvoke(QUESTION)) for _ in range(4)]
        while waiting(middleware, llm) < 4:
            await asyncio.sleep(0.005)
        for task in tasks[:3]:
            task.cancel()
        results = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)
        gate.open.set()
        *cancelled, last = await results
        assert all(isinstance(result, asyncio.CancelledError) for result in cancelled)
        assert last["messages"][-1].content == "yes"  # type: ignore[index]
        assert (gate.calls, llm.pool.stats().builds, llm.pool.num_leases) == (1, 1, 0)

    async def test_a_build_that_nobody_waits_for_any_more_is_dropped(
        self, llm: ChatPolyKV, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, middleware = Gate(monkeypatch), SharedContextMiddleware(DOCUMENT)
        agent = create_agent(llm, [], middleware=[middleware])
        tasks = [asyncio.create_task(agent.ainvoke(QUESTION)) for _ in range(3)]
        while waiting(middleware, llm) < 3:
            await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gate.open.set()
        await asyncio.to_thread(until, lambda: not middleware._shelf(llm).builds)
        assert llm.pool.segments == () and llm.pool.num_leases == 0
        assert (await agent.ainvoke(QUESTION))["messages"][-1].content == "yes"
        assert gate.calls == 2

    async def test_who_comes_after_a_build_was_given_up_makes_another(
        self, llm: ChatPolyKV, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        middleware = SharedContextMiddleware(DOCUMENT)
        agent = create_agent(llm, [], middleware=[middleware])
        given_up, go = threading.Event(), threading.Event()
        real = ChatPolyKV.share
        calls: list[int] = []

        def share(llm: ChatPolyKV, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            try:
                until(lambda: len(calls) > 1 or waiting(middleware, llm) == 0)
                return real(llm, *args, **kwargs)
            except BaseException:
                given_up.set()
                assert go.wait(PATIENCE)
                raise

        monkeypatch.setattr(ChatPolyKV, "share", share)
        first = asyncio.create_task(agent.ainvoke(QUESTION))
        while not calls:
            await asyncio.sleep(0.005)
        first.cancel()
        await asyncio.to_thread(given_up.wait, PATIENCE)
        second = asyncio.create_task(
            agent.ainvoke(QUESTION)
        )  # joins the one that has failed already, and does not know
        while waiting(middleware, llm) < 1:
            await asyncio.sleep(0.005)
        go.set()
        assert (await second)["messages"][-1].content == "yes"
        assert len(calls) == 2

    async def test_a_synchronous_call_inside_the_loop_does_not_wait_for_the_loop(
        self, llm: ChatPolyKV, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, middleware = Gate(monkeypatch), SharedContextMiddleware(DOCUMENT)
        agent = create_agent(llm, [], middleware=[middleware])
        task = asyncio.create_task(agent.ainvoke(QUESTION))
        while waiting(middleware, llm) < 1:
            await asyncio.sleep(0.005)
        timer = threading.Timer(0.1, gate.open.set)
        timer.start()
        assert agent.invoke(QUESTION)["messages"][-1].content == "yes"
        assert (await task)["messages"][-1].content == "yes"
        assert gate.calls == 1

    def test_one_who_is_interrupted_leaves_the_work_to_another(
        self, llm: ChatPolyKV, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, middleware = Gate(monkeypatch, KeyboardInterrupt()), SharedContextMiddleware(DOCUMENT)
        agent = create_agent(llm, [], middleware=[middleware])
        outcomes: list[Any] = []

        def run() -> None:
            try:
                outcomes.append(agent.invoke(QUESTION)["messages"][-1].content)
            except BaseException as error:
                outcomes.append(type(error))

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: waiting(middleware, llm) == 3)
        gate.open.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(outcomes, key=str) == [KeyboardInterrupt, "yes", "yes"]
        assert gate.calls == 2

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_an_error_is_everybodys_and_is_tried_again(self, llm: ChatPolyKV, asynchronous: bool) -> None:
        middleware = SharedContextMiddleware(lambda runtime: "x " * POSITIONS if runtime.context else DOCUMENT)
        agent = create_agent(llm, [], middleware=[middleware])

        async def main() -> list[Any]:
            return await asyncio.gather(
                *[agent.ainvoke(QUESTION, context=True) for _ in range(3)], return_exceptions=True
            )

        if asynchronous:
            assert {type(error) for error in asyncio.run(main())} == {PromptTooLongError}
        else:
            for _ in range(2):
                with pytest.raises(PromptTooLongError):
                    agent.invoke(QUESTION, context=True)
        assert not middleware._shelf(llm).builds
        assert agent.invoke(QUESTION)["messages"][-1].content == "yes"


class TestKeeping:
    def test_a_context_lives_through_its_call_though_many_others_came(self, llm: ChatPolyKV) -> None:
        @wrap_model_call
        def busy(request: Any, handler: Any) -> Any:
            if request.runtime.context == "first":
                for number in range(KEPT + 1):
                    agent.invoke(QUESTION, context=str(number))
            return handler(request)

        middleware = SharedContextMiddleware(lambda runtime: f"{runtime.context} {DOCUMENT}")
        agent = create_agent(llm, [], middleware=[middleware, busy])
        message: AIMessage = agent.invoke(QUESTION, context="first")["messages"][-1]
        assert message.content == "yes" and cache_read(message) > len(DOCUMENT) * 0.9
        gc.collect()
        llm.pool.sweep()
        assert len(llm.pool.segments) == KEPT

    def test_the_least_recently_used_goes_first(self, llm: ChatPolyKV) -> None:
        middleware = SharedContextMiddleware(lambda runtime: f"{runtime.context} {DOCUMENT}")
        agent = create_agent(llm, [], middleware=[middleware])
        for number in (*range(KEPT), 0, KEPT, 0):
            agent.invoke(QUESTION, context=str(number))
        builds = llm.pool.stats().builds
        assert builds == KEPT + 1
        agent.invoke(QUESTION, context="1")
        assert llm.pool.stats().builds == builds + 1

    def test_one_that_was_released_by_another_is_made_again(self, llm: ChatPolyKV) -> None:
        middleware = SharedContextMiddleware(DOCUMENT)
        found = llm.find_context(ask(llm, middleware).response_metadata["shared_context"]["id"])
        assert found is not None
        found.release()
        assert ask(llm, middleware).content == "yes"

    def test_each_engine_has_its_own_and_none_is_held(self, make: Any) -> None:
        middleware = SharedContextMiddleware(DOCUMENT)
        first, second = make(), make(Script(says_whether_it_reads))
        for llm in (first, second, first):
            assert ask(llm, middleware).content == "yes"
        assert [llm.pool.stats().builds for llm in (first, second)] == [1, 1]
        engine = weakref.ref(first.engine)
        first.close()
        until(lambda: gc.collect() >= 0 and engine() is None)
        assert ask(second, middleware).content == "yes"
