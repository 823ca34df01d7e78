"""LangGraph's patterns, with graph code as users write it; nothing in it knows of sharing but where the context is named."""

from __future__ import annotations

import asyncio
import gc
import json
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    SummarizationMiddleware,
)
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import CachePolicy, Command, Send, interrupt
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm
from pydantic import BaseModel

from polykv.errors import ContextReleasedError, InvalidRequestError, SharedContextMissing
from polykv_agents import ChatPolyKV, SharedContextMiddleware, context_key
from polykv_agents.testing import Script, scripted_chat_model

DOCUMENT = "The carrier bears the risk until the goods are handed over to the buyer at the quay. " * 3
MARK = {"cache_control": {"type": "ephemeral"}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def question_of(prompt: str) -> str:
    return re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, flags=re.DOTALL)[-1]


def cache_read(message: Any) -> int:
    return int(message.usage_metadata["input_token_details"]["cache_read"])


@pytest.fixture
def make() -> Iterator[Callable[..., ChatPolyKV]]:
    made: list[ChatPolyKV] = []

    def build(script: Any, **fields: Any) -> ChatPolyKV:
        made.append(scripted_chat_model(script, **fields))
        return made[-1]

    yield build
    for llm in made:
        llm.close()


@tool
def search(query: str) -> str:
    """Search the archive."""
    return f"found {query}"


class Answer(BaseModel):
    """The final answer."""

    verdict: str


class Verdict(BaseModel):
    """One of two."""

    verdict: Literal["carrier", "buyer"]


# ------------------------------------------------------------------------------------------------- fan-out


class Team(TypedDict):
    questions: list[str]
    messages: Annotated[list[Any], operator.add]


def fan_out(ask: Callable[..., Any]) -> Any:
    graph = StateGraph(Team)
    graph.add_node("ask", ask)
    graph.add_conditional_edges(START, lambda s: [Send("ask", {"q": q}) for q in s["questions"]], ["ask"])
    graph.add_edge("ask", END)
    return graph


QUESTIONS = [f"Question {i}?" for i in range(64)]


class TestFanOut:
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_64_sends_over_a_marked_document_build_once(self, make: Any, asynchronous: bool) -> None:
        llm = make(lambda prompt: f"answer to {question_of(prompt)}")

        def prompt(task: dict[str, str]) -> list[Any]:
            return [SystemMessage([{"type": "text", "text": DOCUMENT, **MARK}]), HumanMessage(task["q"])]

        def ask(task: dict[str, str]) -> dict[str, Any]:
            return {"messages": [llm.invoke(prompt(task))]}

        async def aask(task: dict[str, str]) -> dict[str, Any]:
            return {"messages": [await llm.ainvoke(prompt(task))]}

        state: Any = {"questions": QUESTIONS, "messages": []}
        if asynchronous:
            messages = asyncio.run(fan_out(aask).compile().ainvoke(state))["messages"]
        else:
            messages = fan_out(ask).compile().invoke(state)["messages"]
        assert [m.content for m in messages] == [f"answer to {q}" for q in QUESTIONS]
        created = [m.usage_metadata["input_token_details"]["cache_creation"] for m in messages]
        assert sum(count > 0 for count in created) == 1
        assert sum(cache_read(m) == max(created) for m in messages) == 63
        assert llm.pool.stats().cached_segments == 1 and llm.pool.num_leases == 0

    def test_answers_do_not_depend_on_company(self, make: Any) -> None:
        llm = make(lambda prompt: question_of(prompt)[::-1], temperature=1, seed=3)
        reader = llm.with_context(llm.share(DOCUMENT))
        graph = fan_out(lambda task: {"messages": [reader.invoke(task["q"])]}).compile()
        together = graph.invoke({"questions": QUESTIONS[:16], "messages": []})["messages"]
        alone = [reader.invoke(q) for q in QUESTIONS[:16]]
        assert [m.content for m in together] == [m.content for m in alone]
        assert {cache_read(m) for m in together} == {reader.shared_context.num_tokens}

    def test_map_reduce_over_documents_releases_each(self, make: Any) -> None:
        llm = make(lambda prompt: re.findall(r"document (\w+)", prompt)[0])
        documents = [f"This is document {name}. {DOCUMENT}" for name in ("one", "two", "three")]

        def ask(task: dict[str, str]) -> dict[str, Any]:
            with llm.share(task["q"]) as ctx:
                return {"messages": [llm.with_context(ctx).invoke("Which document is this?")]}

        messages = fan_out(ask).compile().invoke({"questions": documents, "messages": []})["messages"]
        assert [m.content for m in messages] == ["one", "two", "three"]
        assert llm.pool.segments == ()

    def test_half_of_200_tasks_cancelled_leave_nothing_behind(self, make: Any) -> None:
        llm = make(lambda prompt: question_of(prompt) * 40)
        reader = llm.with_context(llm.share(DOCUMENT))

        async def main() -> list[Any]:
            tasks = [asyncio.create_task(reader.ainvoke(f"q{i}", max_tokens=60)) for i in range(200)]
            await asyncio.sleep(0.3)
            for task in tasks[::2]:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = asyncio.run(main())
        assert all(r.content.startswith(f"q{i}") for i, r in enumerate(results) if i % 2)
        assert reader.invoke("after").content.startswith("after")
        assert llm.pool.num_leases == 0 and llm.engine.stats().tail_bytes == 0

    def test_sends_with_a_checkpointer(self, make: Any) -> None:
        llm = make(lambda prompt: f"answer to {question_of(prompt)}")
        graph = fan_out(lambda task: {"messages": [llm.invoke(task["q"])]}).compile(checkpointer=InMemorySaver())
        config: Any = {"configurable": {"thread_id": "1"}}
        state = graph.invoke({"questions": QUESTIONS[:4], "messages": []}, config)
        assert [m.content for m in state["messages"]] == [f"answer to {q}" for q in QUESTIONS[:4]]
        assert graph.get_state(config).values["messages"] == state["messages"]


# --------------------------------------------------------------------------------------------- create_agent


def agent_script(prompt: str) -> str:
    found = len(re.findall("<tool_response>", prompt))
    return call("search", query=f"clause {found}") if found < 3 else "The carrier."


class TestCreateAgent:
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_loop_of_tools_reads_the_document_at_every_turn(self, make: Any, asynchronous: bool) -> None:
        script = Script(agent_script)
        llm = make(script)
        middleware = SharedContextMiddleware(DOCUMENT)
        agent = create_agent(llm, [search], system_prompt="You are a lawyer.", middleware=[middleware])
        state: Any = {"messages": [HumanMessage("Who bears the risk?")]}
        result = asyncio.run(agent.ainvoke(state)) if asynchronous else agent.invoke(state)
        answers = [m for m in result["messages"] if isinstance(m, AIMessage)]
        assert [m.tool_calls[0]["args"] for m in answers[:3]] == [{"query": f"clause {i}"} for i in range(3)]
        assert answers[3].content == "The carrier."
        assert min(cache_read(m) for m in answers) > len(DOCUMENT) * 0.9
        assert len(llm.pool.segments) == 1
        assert all(prompt.index(DOCUMENT[:40]) < prompt.index("You are a lawyer.") for prompt in script.prompts)
        assert all(DOCUMENT[:40] not in str(m.content) for m in result["messages"]), "the state holds no context"

    def test_several_calls_of_one_answer(self, make: Any) -> None:
        def script(prompt: str) -> str:
            return "Done." if "tool_response" in prompt else f"{call('search', query='a')}\n{call('search', query='b')}"

        result = create_agent(make(script), [search]).invoke({"messages": [HumanMessage("Look for both.")]})
        assert [m.content for m in result["messages"] if m.type == "tool"] == ["found a", "found b"]
        assert result["messages"][-1].content == "Done."

    @pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy, None])
    def test_tools_and_a_final_object_go_together(self, make: Any, strategy: Any) -> None:
        def script(prompt: str) -> str:
            if "tool_response" not in prompt:
                return call("search", query="risk")
            return call("Answer", verdict="carrier") if strategy is ToolStrategy else '{"verdict": "carrier"}'

        llm = make(script)
        form = Answer if strategy is None else strategy(Answer)
        middleware = SharedContextMiddleware(llm.share(DOCUMENT))
        agent = create_agent(llm, [search], response_format=form, middleware=[middleware])
        result = agent.invoke({"messages": [HumanMessage("Who?")]})
        assert result["structured_response"] == Answer(verdict="carrier")
        assert min(cache_read(m) for m in result["messages"] if isinstance(m, AIMessage)) > len(DOCUMENT) * 0.9

    def test_a_model_that_wants_something_else_is_held_to_the_schema(self, make: Any) -> None:
        llm = make(lambda prompt: "I would rather not say.", temperature=1)
        chosen = {llm.with_structured_output(Verdict).invoke("Who?", seed=seed).verdict for seed in range(20)}
        assert chosen == {"carrier", "buyer"}

    def test_summarisation_counts_with_the_models_own_tokenizer_and_leaves_the_context(self, make: Any) -> None:
        script = Script(lambda prompt: "SUMMARY" if "context" in question_of(prompt).lower()[:400] else "Fine.")
        llm = make(script)
        summarise = SummarizationMiddleware(llm, trigger=("fraction", 0.02), keep=("messages", 2))
        agent = create_agent(llm, [], middleware=[summarise, SharedContextMiddleware(llm.share(DOCUMENT))])
        history = [HumanMessage("Tell me more about the clause. " * 20), AIMessage("Certainly. " * 40)] * 2
        result = agent.invoke({"messages": [*history, HumanMessage("Who?")]})
        assert len(result["messages"]) < 6
        assert DOCUMENT in script.prompts[-1]

    def test_clearing_old_results_of_tools_leaves_the_context(self, make: Any) -> None:
        script = Script(agent_script)
        llm = make(script)
        edit = ClearToolUsesEdit(trigger=250, keep=1)
        editing = ContextEditingMiddleware(edits=[edit], token_count_method="model")
        agent = create_agent(llm, [search], middleware=[editing, SharedContextMiddleware(DOCUMENT)])
        answers = [m for m in agent.invoke({"messages": [HumanMessage("Who?")]})["messages"] if m.type == "ai"]
        assert "[cleared]" in script.prompts[-1] and "found clause 2" in script.prompts[-1]
        assert "found clause 0" not in script.prompts[-1]
        assert answers[-1].content == "The carrier."
        assert min(cache_read(m) for m in answers) > len(DOCUMENT) * 0.9

    def test_a_call_that_is_tried_again_is_counted_once(self, make: Any) -> None:
        asked: list[str] = []

        def script(prompt: str) -> str:
            asked.append(prompt)
            if len(asked) < 3:
                raise RuntimeError("not yet")
            return "The carrier."

        llm = make(script)
        retry = ModelRetryMiddleware(max_retries=3, initial_delay=0.0, jitter=False)
        agent = create_agent(llm, [], middleware=[retry, SharedContextMiddleware(DOCUMENT)])
        with get_usage_metadata_callback() as counted:
            message = agent.invoke({"messages": [HumanMessage("Who?")]})["messages"][-1]
        assert message.content == "The carrier." and len(asked) == 3
        assert list(counted.usage_metadata.values()) == [message.usage_metadata]
        assert llm.pool.stats().builds == 1 and llm.pool.num_leases == 0

    def test_answers_bear_the_agents_name_and_a_later_call_may_read_them(self, make: Any) -> None:
        llm = make(lambda prompt: "The carrier." if prompt.count("The carrier.") == 0 else "As was said.")
        agent = create_agent(llm, [], name="lawyer")
        messages = agent.invoke({"messages": [HumanMessage("Who?", name="client")]})["messages"]
        assert (messages[-1].name, messages[-1].content) == ("lawyer", "The carrier.")
        assert agent.invoke({"messages": [*messages, HumanMessage("Again?")]})["messages"][-1].content == "As was said."

    @pytest.mark.parametrize("way", ["ignore", "warn"])
    def test_a_fallback_to_another_model_does_not_get_the_context(
        self, make: Any, way: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(prompt: str) -> str:
            raise RuntimeError("no answer")

        heard: list[Any] = []

        class Other(GenericFakeChatModel):
            def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
                heard.append(kwargs)
                return super()._generate(messages, stop, run_manager)

        llm = make(broken)
        other = Other(messages=iter([AIMessage("from the other")]))
        middleware = [ModelFallbackMiddleware(other), SharedContextMiddleware(DOCUMENT, on_unsupported_model=way)]
        agent = create_agent(llm, [], middleware=middleware)
        assert agent.invoke({"messages": [HumanMessage("Who?")]})["messages"][-1].content == "from the other"
        assert heard == [{}]
        assert ("cannot read a shared context" in caplog.text) == (way == "warn")

    def test_fallbacks_of_the_model_itself(self, make: Any) -> None:
        llm = make([], max_retries=2).with_fallbacks([make(["from the second"])])
        assert llm.invoke("Who?").content == "from the second"


class TestMiddleware:
    def test_a_context_from_the_runtime(self, make: Any) -> None:
        @dataclass
        class Context:
            shared: Any

        script = Script(lambda prompt: "ok")
        llm = make(script)
        agent = create_agent(llm, [], middleware=[SharedContextMiddleware()], context_schema=Context)
        one, other = llm.share(f"First. {DOCUMENT}", name="first"), llm.share(f"Second. {DOCUMENT}")
        for shared, begins in ((one, "First."), (other.id, "Second."), ("first", "First."), (None, None)):
            agent.invoke({"messages": [HumanMessage("Who?")]}, context=Context(shared))
            assert ("First." in script.prompts[-1], "Second." in script.prompts[-1]) == (
                begins == "First.",
                begins == "Second.",
            )

    def test_functions_of_the_runtime(self, make: Any) -> None:
        llm = make(lambda prompt: "yes" if DOCUMENT in prompt else "no")

        async def later(runtime: Any) -> str:
            return DOCUMENT

        for source in (lambda runtime: DOCUMENT, lambda runtime: None):
            agent = create_agent(llm, [], middleware=[SharedContextMiddleware(source)])
            want = "no" if source(None) is None else "yes"
            assert agent.invoke({"messages": [HumanMessage("?")]})["messages"][-1].content == want
        agent = create_agent(llm, [], middleware=[SharedContextMiddleware(later)])
        assert asyncio.run(agent.ainvoke({"messages": [HumanMessage("?")]}))["messages"][-1].content == "yes"
        with pytest.raises(InvalidRequestError, match="coroutine function"):
            agent.invoke({"messages": [HumanMessage("?")]})

    def test_what_is_missing_or_released_is_an_error(self, make: Any) -> None:
        llm = make(lambda prompt: "ok")
        ctx = llm.share(DOCUMENT)
        agent = create_agent(llm, [], middleware=[SharedContextMiddleware(ctx)])
        ctx.release()
        with pytest.raises(ContextReleasedError):
            agent.invoke({"messages": [HumanMessage("?")]})
        agent = create_agent(llm, [], middleware=[SharedContextMiddleware(lambda runtime: ctx.id)])
        with pytest.raises(SharedContextMissing, match=ctx.id):
            agent.invoke({"messages": [HumanMessage("?")]})

    def test_a_text_lives_as_long_as_the_middleware(self, make: Any) -> None:
        llm = make(lambda prompt: "ok")
        middleware = SharedContextMiddleware(DOCUMENT)
        agents = [create_agent(llm, [], middleware=[middleware], system_prompt=f"You are {i}.") for i in range(3)]
        for agent in agents:
            agent.invoke({"messages": [HumanMessage("?")]})
        assert len(llm.pool.segments) == 1
        del middleware, agents, agent
        gc.collect()
        llm.pool.sweep()
        assert llm.pool.segments == ()

    @pytest.mark.parametrize("bad", ["", 3, [], {"a": 1}])
    def test_bad_arguments(self, bad: Any) -> None:
        with pytest.raises(InvalidRequestError):
            SharedContextMiddleware(bad)
        with pytest.raises(InvalidRequestError, match="'ignore', 'warn' or 'raise'"):
            SharedContextMiddleware(DOCUMENT, on_unsupported_model=bad)

    def test_another_model_may_be_an_error(self) -> None:
        other = GenericFakeChatModel(messages=iter(["x"]))
        agent = create_agent(other, [], middleware=[SharedContextMiddleware(DOCUMENT, on_unsupported_model="raise")])
        with pytest.raises(InvalidRequestError, match="GenericFakeChatModel is no ChatPolyKV"):
            agent.invoke({"messages": [HumanMessage("?")]})


# --------------------------------------------------------------------------------------- supervisor and swarm


def test_a_supervisor_and_its_agents_share(make: Any) -> None:
    def script(prompt: str) -> str:
        if "You are the supervisor." in prompt:
            return "All is said." if "It is the carrier." in prompt else call("transfer_to_lawyer")
        return "It is the carrier."

    recorded = Script(script)
    llm = make(recorded)
    reader = llm.with_context(llm.share(DOCUMENT))
    lawyer = create_agent(reader, [search], name="lawyer", system_prompt="You are a lawyer.")
    accountant = create_agent(reader, [search], name="accountant", system_prompt="You are an accountant.")
    for mode in (None, "inline"):
        graph = create_supervisor(
            [lawyer, accountant],
            model=reader,
            prompt="You are the supervisor.",
            include_agent_name=mode,  # type: ignore[arg-type]
            add_handoff_back_messages=True,
        ).compile()
        result = graph.invoke({"messages": [HumanMessage("Who bears the risk?")]})
        assert (
            result["messages"][-1].content.endswith("All is said.") or "All is said." in result["messages"][-1].content
        )
        spoken = [m for m in result["messages"] if isinstance(m, AIMessage) and m.usage_metadata]
        assert {cache_read(m) for m in spoken} == {reader.shared_context.num_tokens}
        assert any(m.response_metadata.get("__is_handoff_back") for m in result["messages"])
        assert ("<name>lawyer</name>" in recorded.prompts[-1]) == (mode == "inline")
    assert len(llm.pool.segments) == 1


def test_a_swarm_hands_over_and_every_turn_reads_the_document(make: Any) -> None:
    def script(prompt: str) -> str:
        last = question_of(prompt)
        if "You are Alice." in prompt and "numbers" in last:
            return call("transfer_to_bob")
        if "You are Bob." in prompt and "words" in last:
            return call("transfer_to_alice")
        return "Alice speaks." if "You are Alice." in prompt else "Bob speaks."

    llm = make(script)
    reader = llm.with_context(llm.share(DOCUMENT))
    alice = create_agent(reader, [create_handoff_tool(agent_name="bob")], system_prompt="You are Alice.", name="alice")
    bob = create_agent(
        reader, [search, create_handoff_tool(agent_name="alice")], system_prompt="You are Bob.", name="bob"
    )
    graph = create_swarm([alice, bob], default_active_agent="alice").compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    said = []
    for question in ("Hello?", "And the numbers?", "Go on."):
        result = graph.invoke({"messages": [HumanMessage(question)]}, config)
        said.append(result["messages"][-1].content)
    assert said[0] == "Alice speaks." and said[-1] == "Bob speaks."
    spoken = [m for m in result["messages"] if isinstance(m, AIMessage) and m.usage_metadata]
    assert len(spoken) >= 4
    assert {cache_read(m) for m in spoken} == {reader.shared_context.num_tokens}


def test_parallel_hand_offs_can_be_forbidden_and_orphan_calls_render(make: Any) -> None:
    both = f"{call('transfer_to_bob')}\n{call('transfer_to_carol')}"
    llm = make(lambda prompt: both)
    tools = [create_handoff_tool(agent_name="bob"), create_handoff_tool(agent_name="carol")]
    one = llm.bind_tools(tools, parallel_tool_calls=False).invoke("Ask both.")
    two = llm.bind_tools(tools).invoke("Ask both.")
    assert [c["name"] for c in one.tool_calls] == ["transfer_to_bob"]
    assert [c["name"] for c in two.tool_calls] == ["transfer_to_bob", "transfer_to_carol"]
    assert llm.invoke([HumanMessage("Ask both."), two, HumanMessage("Go on.")]).content == both


# ----------------------------------------------------------------------------------- subgraphs, state, streams


def test_a_subgraph_reads_the_same_pool(make: Any) -> None:
    llm = make(lambda prompt: "yes" if DOCUMENT in prompt else "no")
    reader = llm.with_context(llm.share(DOCUMENT))

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [reader.invoke(state["messages"])]}

    inner = StateGraph(MessagesState)
    inner.add_node("ask", ask)
    inner.add_edge(START, "ask")
    outer = StateGraph(MessagesState)
    outer.add_node("first", ask)
    outer.add_node("inner", inner.compile())
    outer.add_edge(START, "first")
    outer.add_edge("first", "inner")
    messages = outer.compile().invoke({"messages": [HumanMessage("Who?")]})["messages"]
    assert [m.content for m in messages[1:]] == ["yes", "yes"]
    assert cache_read(messages[1]) == cache_read(messages[2]) == reader.shared_context.num_tokens
    assert len(llm.pool.segments) == 1


def approval(reader: Callable[[], ChatPolyKV]) -> Any:
    def draft(state: MessagesState) -> dict[str, Any]:
        message = reader().invoke(state["messages"])
        approved = interrupt(message.content)
        return {"messages": [AIMessage(f"{approved}: {message.content}")]}

    graph = StateGraph(MessagesState)
    graph.add_node("draft", draft)
    graph.add_edge(START, "draft")
    return graph


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
def test_what_was_approved_is_what_is_resumed(
    tmp_path: Path, tiny_llama: Any, tokenizer: Any, sampling: dict[str, Any]
) -> None:
    llm = ChatPolyKV(model=tiny_llama, tokenizer=tokenizer, max_tokens=12, **sampling)
    reader = llm.with_context(llm.share(DOCUMENT))
    config: Any = {"configurable": {"thread_id": "1"}}
    with SqliteSaver.from_conn_string(str(tmp_path / "state.sqlite")) as saver:
        graph = approval(lambda: reader).compile(checkpointer=saver)
        shown = graph.invoke({"messages": [HumanMessage("Write it.")]}, config)["__interrupt__"][0].value
        finished = graph.invoke(Command(resume="ok"), config)
    assert shown
    assert finished["messages"][-1].content == f"ok: {shown}"
    llm.close()


def test_a_resume_after_a_restart_needs_the_text(tmp_path: Path, tiny_llama: Any, tokenizer: Any) -> None:
    path, config = str(tmp_path / "state.sqlite"), {"configurable": {"thread_id": "1"}}

    def run(llm: ChatPolyKV, state: Any, text: str | None, saver: Any, identity: list[str]) -> Any:
        def reader() -> ChatPolyKV:
            return llm.with_context(identity[0], rebuild=text)

        return approval(reader).compile(checkpointer=saver).invoke(state, config)

    first = ChatPolyKV(model=tiny_llama, tokenizer=tokenizer, max_tokens=12)
    ctx = first.share(DOCUMENT)
    identity = [ctx.id]
    with SqliteSaver.from_conn_string(path) as saver:
        shown = run(first, {"messages": [HumanMessage("Write it.")]}, None, saver, identity)["__interrupt__"][0].value
    first.close()
    second = ChatPolyKV(
        model=tiny_llama, tokenizer=tokenizer, max_tokens=12
    )  # another engine, with nothing in its pool
    with SqliteSaver.from_conn_string(path) as saver:
        with pytest.raises(SharedContextMissing, match="rebuild=text"):
            run(second, Command(resume="ok"), None, saver, identity)
        finished = run(second, Command(resume="ok"), DOCUMENT, saver, identity)
    assert finished["messages"][-1].content == f"ok: {shown}"
    second.close()


def test_every_stream_mode_tells_the_same(make: Any) -> None:
    llm = make(lambda prompt: f"answer to {question_of(prompt)}")

    def ask(state: MessagesState) -> dict[str, Any]:
        message = llm.invoke(state["messages"])
        get_stream_writer()({"cache_read": cache_read(message), "text": message.content})
        return {"messages": [message]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    compiled = graph.compile()
    state: Any = {"messages": [HumanMessage("Who?")]}
    want = "answer to Who?"
    assert list(compiled.stream(state, stream_mode="values"))[-1]["messages"][-1].content == want
    assert next(iter(compiled.stream(state, stream_mode="updates")))["ask"]["messages"][-1].content == want
    assert list(compiled.stream(state, stream_mode="custom")) == [{"cache_read": 0, "text": want}]
    pieces = [chunk for chunk, _ in compiled.stream(state, stream_mode="messages")]
    assert "".join(chunk.content for chunk in pieces) == want and len(pieces) > 5

    async def events() -> str:
        found = [e async for e in compiled.astream_events(state, version="v2")]
        return "".join(e["data"]["chunk"].content for e in found if e["event"] == "on_chat_model_stream")

    assert asyncio.run(events()) == want


def test_node_caches_know_the_context(make: Any) -> None:
    llm = make(lambda prompt: re.findall(r"This is (\w+)\.", prompt)[0])
    one, other = (llm.with_context(llm.share(f"This is {name}. {DOCUMENT}")) for name in ("first", "second"))

    def graph(reader: ChatPolyKV, cache: InMemoryCache, **policy: Any) -> Any:
        built = StateGraph(Team)
        built.add_node(
            "ask", lambda state: {"messages": [reader.invoke("Which?").content]}, cache_policy=CachePolicy(**policy)
        )
        built.add_edge(START, "ask")
        return built.compile(cache=cache)

    state: Any = {"questions": [], "messages": []}
    plain: InMemoryCache[Any] = InMemoryCache()
    trapped = [graph(reader, plain).invoke(state)["messages"] for reader in (one, other)]
    assert trapped == [["first"], ["first"]], "LangGraph's own key does not know the context"
    aware: InMemoryCache[Any] = InMemoryCache()
    keyed = [graph(r, aware, key_func=context_key(r)).invoke(state)["messages"] for r in (one, other, one)]
    assert keyed == [["first"], ["second"], ["first"]]
    finished = llm.engine.stats().finished
    graph(one, aware, key_func=context_key(one.shared_context)).invoke(state)
    assert llm.engine.stats().finished == finished, "the same context is the same key"
