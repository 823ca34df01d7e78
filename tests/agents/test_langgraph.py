"""Teams of agents in LangGraph read one shared context."""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, Send, interrupt

from polykv_agents import ChatPolyKV, SharedContext

AGENTS = 12
DOCUMENT = "The bond: the merchant owes the moneylender three thousand ducats, and the court decides. " * 3
ROLES = [f"You are agent {i}{', a doctor of law' * (i % 4)}." for i in range(AGENTS)]
QUESTIONS = [f"Question {i}: who {'really ' * (i % 5)}carries the risk?" for i in range(AGENTS)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def llm() -> Iterator[ChatPolyKV]:
    """A chat model; no request and no lease is left at the end of any test."""
    made = ChatPolyKV(model=tiny_model("llama"), tokenizer=tiny_tokenizer(), codec="k8v3", max_tokens=10, num_threads=1)
    engine = made.engine
    yield made
    deadline = time.monotonic() + 10
    while engine.stats().running and time.monotonic() < deadline:
        time.sleep(0.005)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.failed, stats.tail_bytes) == (0, 0, 0, 0)
    assert engine.pool.stats().num_leases == 0
    made.close()


@contextmanager
def slow_steps(llm: ChatPolyKV, seconds: float) -> Iterator[None]:
    """Every forward of the model takes at least this long."""
    hook = llm.engine.model.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    try:
        yield
    finally:
        hook.remove()


def prompt(number: int) -> list[tuple[str, str]]:
    return [("system", ROLES[number]), ("human", QUESTIONS[number])]


def alone(agent: ChatPolyKV) -> dict[int, str]:
    """What each agent answers when nobody else asks."""
    answers = {number: str(agent.invoke(prompt(number)).content) for number in range(AGENTS)}
    assert len(set(answers.values())) > AGENTS // 2, "the agents would all say the same"
    return answers


class Task(TypedDict):
    number: int


class Team(TypedDict):
    numbers: list[int]
    answers: Annotated[dict[int, Any], operator.or_]
    summary: str


def fan_out(state: Team) -> list[Send]:
    return [Send("agent", {"number": number}) for number in state["numbers"]]


def team_of(node: Any, reducer: Any = None) -> Any:
    graph = StateGraph(Team)
    graph.add_node("agent", node)
    graph.add_conditional_edges(START, fan_out, ["agent"])
    if reducer is not None:
        graph.add_node("reduce", reducer)
        graph.add_edge("agent", "reduce")
        graph.add_edge("reduce", END)
    return graph.compile()


def start(numbers: list[int] | None = None) -> dict[str, Any]:
    return {"numbers": list(range(AGENTS)) if numbers is None else numbers, "answers": {}, "summary": ""}


@pytest.mark.parametrize("order", [1, -1], ids=["in-order", "reversed"])
def test_a_fan_out_answers_as_each_agent_alone(
    llm: ChatPolyKV, ctx: SharedContext, agent: ChatPolyKV, order: int
) -> None:
    want = alone(agent)

    def node(task: Task) -> dict[str, Any]:
        message = agent.invoke(prompt(task["number"]))
        assert message.usage_metadata["input_token_details"]["cache_read"] == ctx.num_tokens
        return {"answers": {task["number"]: message.content}}

    def reduce(state: Team) -> dict[str, Any]:
        digest = "\n".join(state["answers"][number] for number in sorted(state["answers"]))
        return {"summary": agent.invoke([("system", "You sum up."), ("human", digest)]).content}

    final = team_of(node, reduce).invoke(start(list(range(AGENTS))[::order]))
    assert final["answers"] == want
    digest = "\n".join(want[number] for number in range(AGENTS))
    assert final["summary"] == agent.invoke([("system", "You sum up."), ("human", digest)]).content
    stats = llm.pool.stats()
    assert (stats.builds, stats.num_segments, stats.num_leases) == (1, 1, 0)


async def test_an_async_fan_out_runs_all_agents_at_once(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    want = alone(agent)

    async def node(task: Task) -> dict[str, Any]:
        return {"answers": {task["number"]: (await agent.ainvoke(prompt(task["number"]))).content}}

    with slow_steps(llm, 0.02):
        final = await team_of(node).ainvoke(start())
    assert final["answers"] == want
    assert llm.engine.stats().peak_running == AGENTS
    assert llm.pool.stats().builds == 1
    assert llm.pool.stats().num_leases == 0


def test_a_batch_inside_a_node(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    want = alone(agent)

    def node(task: Task) -> dict[str, Any]:
        messages = agent.batch([prompt(number) for number in range(AGENTS)])
        return {"answers": {number: message.content for number, message in enumerate(messages)}}

    with slow_steps(llm, 0.02):
        assert team_of(node).invoke(start([0]))["answers"] == want
    assert llm.engine.stats().peak_running == AGENTS


def test_agents_that_share_cold_build_once(llm: ChatPolyKV) -> None:
    """Every node shares the document itself, all at once: one prefills, the others wait for it."""
    handles: list[SharedContext] = []

    def node(task: Task) -> dict[str, Any]:
        ctx = llm.share(DOCUMENT)
        handles.append(ctx)
        return {"answers": {task["number"]: llm.with_context(ctx).invoke(prompt(task["number"])).content}}

    with slow_steps(llm, 0.01):
        final = team_of(node).invoke(start())
    assert len(handles) == AGENTS
    assert final["answers"] == alone(llm.with_context(handles[0]))
    assert llm.pool.stats().builds == 1
    for handle in handles:
        handle.release()
    assert llm.pool.stats().num_segments == 0


async def test_cold_async_agents_build_once(llm: ChatPolyKV) -> None:
    handles: list[SharedContext] = []

    async def node(task: Task) -> dict[str, Any]:
        handles.append(await llm.ashare(DOCUMENT))
        message = await llm.with_context(handles[-1]).ainvoke(prompt(task["number"]))
        return {"answers": {task["number"]: message.content}}

    with slow_steps(llm, 0.01):
        final = await team_of(node).ainvoke(start())
    assert len(handles) == AGENTS
    assert final["answers"] == alone(llm.with_context(handles[0]))
    assert llm.pool.stats().builds == 1
    for handle in handles:
        handle.release()
    assert llm.pool.stats().num_segments == 0


def test_two_contexts_in_one_graph(llm: ChatPolyKV, ctx: SharedContext) -> None:
    other = llm.share("The dukes of the isle quarrel about a book of spells. " * 4)
    agents = [llm.with_context(ctx), llm.with_context(other), llm]
    want = {n: agents[n % 3].invoke(prompt(n)).content for n in range(AGENTS)}

    def node(task: Task) -> dict[str, Any]:
        return {"answers": {task["number"]: agents[task["number"] % 3].invoke(prompt(task["number"])).content}}

    with slow_steps(llm, 0.005):
        assert team_of(node).invoke(start())["answers"] == want
    assert llm.pool.stats().builds == 2


def test_a_node_that_fails_leaves_no_lease(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    want = alone(agent)

    def node(task: Task) -> dict[str, Any]:
        message = agent.invoke(prompt(task["number"]))
        if task["number"] == 3:
            raise ZeroDivisionError
        return {"answers": {task["number"]: message.content}}

    with pytest.raises(ZeroDivisionError):
        team_of(node).invoke(start())
    deadline = time.monotonic() + 10
    while llm.pool.stats().num_leases and time.monotonic() < deadline:
        time.sleep(0.005)
    assert llm.pool.stats().num_leases == 0
    assert alone(agent) == want


async def test_a_graph_that_times_out_frees_everything(llm: ChatPolyKV, ctx: SharedContext) -> None:
    agent = llm.model_copy(update={"max_tokens": 1000}).with_context(ctx)

    async def node(task: Task) -> dict[str, Any]:
        return {"answers": {task["number"]: (await agent.ainvoke(prompt(task["number"]))).content}}

    graph = team_of(node)
    graph.step_timeout = 0.3
    with slow_steps(llm, 0.02):
        with pytest.raises(TimeoutError):
            await graph.ainvoke(start())
        deadline = time.monotonic() + 3
        while llm.engine.stats().running and time.monotonic() < deadline:
            time.sleep(0.005)
    assert llm.engine.stats().running == 0
    assert llm.engine.stats().cancelled == AGENTS
    assert llm.pool.stats().num_leases == 0


# ------------------------------------------------------------------------------------------------- streaming


def invoking(agent: ChatPolyKV) -> Any:
    def node(task: Task) -> dict[str, Any]:
        return {"answers": {task["number"]: agent.invoke(prompt(task["number"])).content}}

    return node


def ainvoking(agent: ChatPolyKV) -> Any:
    async def node(task: Task) -> dict[str, Any]:
        return {"answers": {task["number"]: (await agent.ainvoke(prompt(task["number"]))).content}}

    return node


def check_streamed(events: list[Any], agent: ChatPolyKV, ctx: SharedContext, want: dict[int, str]) -> None:
    by_message: dict[str, list[AIMessageChunk]] = defaultdict(list)
    for chunk, metadata in events:
        assert isinstance(chunk, AIMessageChunk)
        assert metadata["langgraph_node"] == "agent"
        by_message[chunk.id].append(chunk)
    assert len(by_message) == AGENTS
    texts = []
    for chunks in by_message.values():
        assert len(chunks) > 2, "tokens come one by one"
        assert sum(c.usage_metadata is not None for c in chunks) == 1
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert whole.usage_metadata["input_token_details"]["cache_read"] == ctx.num_tokens
        assert whole.response_metadata["model_name"] == agent.model
        assert whole.response_metadata["finish_reason"] == "length"
        texts.append(whole.content)
    assert sorted(texts) == sorted(want.values())


def test_stream_mode_messages_streams_tokens(llm: ChatPolyKV, ctx: SharedContext, agent: ChatPolyKV) -> None:
    want = alone(agent)
    events = list(team_of(invoking(agent)).stream(start(), stream_mode="messages"))
    check_streamed(events, agent, ctx, want)
    assert llm.pool.stats().builds == 1


async def test_stream_mode_messages_streams_tokens_of_async_nodes(
    llm: ChatPolyKV, ctx: SharedContext, agent: ChatPolyKV
) -> None:
    want = alone(agent)
    with slow_steps(llm, 0.01):
        stream = team_of(ainvoking(agent)).astream(start(), stream_mode="messages")
        events = [event async for event in stream]
    check_streamed(events, agent, ctx, want)
    ids = [chunk.id for chunk, _ in events]
    assert sum(a != b for a, b in pairwise(ids)) > AGENTS, "the agents' tokens interleave"
    assert llm.engine.stats().peak_running == AGENTS


def test_every_stream_mode_gives_the_same_answers(agent: ChatPolyKV) -> None:
    want = alone(agent)
    graph = team_of(invoking(agent))
    updates: dict[int, str] = {}
    for update in graph.stream(start(), stream_mode="updates"):
        updates |= update["agent"]["answers"]
    assert updates == want
    assert list(graph.stream(start(), stream_mode="values"))[-1]["answers"] == want
    both = list(graph.stream(start(), stream_mode=["messages", "values"]))
    assert [value for mode, value in both if mode == "values"][-1]["answers"] == want


def test_a_stream_that_is_left_frees_everything(llm: ChatPolyKV, ctx: SharedContext) -> None:
    agent = llm.model_copy(update={"max_tokens": 60}).with_context(ctx)
    with slow_steps(llm, 0.005):
        for _ in team_of(invoking(agent)).stream(start([0, 1]), stream_mode="messages"):
            break
    deadline = time.monotonic() + 10
    while llm.engine.stats().running and time.monotonic() < deadline:
        time.sleep(0.005)
    assert llm.pool.stats().num_leases == 0


# ---------------------------------------------------------------------------------------------- checkpointing


def conversation(agent: ChatPolyKV) -> Any:
    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [agent.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    return graph.compile(checkpointer=InMemorySaver())


def test_a_checkpointer_keeps_our_messages(agent: ChatPolyKV, ctx: SharedContext) -> None:
    graph = conversation(agent)
    config: Any = {"configurable": {"thread_id": "1"}}
    first = graph.invoke({"messages": [HumanMessage("Who owes?")]}, config)["messages"]
    second = graph.invoke({"messages": [HumanMessage("And why?")]}, config)["messages"]
    assert [m.type for m in second] == ["human", "ai", "human", "ai"]
    assert second[:2] == first
    assert second[1].content == agent.invoke("Who owes?").content
    assert second[3].content == agent.invoke(second[:3]).content
    stored = graph.get_state(config).values["messages"]
    assert stored == second
    for message in (stored[1], stored[3]):
        assert isinstance(message, AIMessage)
        assert message.usage_metadata["input_token_details"]["cache_read"] == ctx.num_tokens
        assert message.response_metadata["shared_context"]["id"] == ctx.id
    other: Any = {"configurable": {"thread_id": "2"}}
    assert len(graph.invoke({"messages": [HumanMessage("Who owes?")]}, other)["messages"]) == 2


def test_a_resumed_node_gives_the_text_that_was_approved(agent: ChatPolyKV) -> None:
    """LangGraph runs an interrupted node again from its start."""
    seen: list[str] = []

    def node(state: MessagesState) -> dict[str, Any]:
        message = agent.invoke(state["messages"], temperature=1.0, seed=4)
        seen.append(str(message.content))
        return {"messages": [message] if interrupt("publish?") else []}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    compiled = graph.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    compiled.invoke({"messages": [HumanMessage("Who owes?")]}, config)
    final = compiled.invoke(Command(resume=True), config)
    assert seen[0] == seen[1] == final["messages"][-1].content


def test_the_context_rides_in_the_runtime_context(llm: ChatPolyKV, ctx: SharedContext, agent: ChatPolyKV) -> None:
    """It is never checkpointed there; the state would have to pickle it."""

    @dataclass
    class Shared:
        ctx: SharedContext

    def node(state: MessagesState, runtime: Runtime[Shared]) -> dict[str, Any]:
        return {"messages": [llm.with_context(runtime.context.ctx).invoke(state["messages"])]}

    graph = StateGraph(MessagesState, context_schema=Shared)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    compiled = graph.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    final = compiled.invoke({"messages": [HumanMessage("Who owes?")]}, config, context=Shared(ctx))
    assert final["messages"][-1].content == agent.invoke("Who owes?").content


def test_a_context_in_the_state_is_refused(llm: ChatPolyKV, ctx: SharedContext) -> None:
    class State(TypedDict):
        ctx: Any

    graph = StateGraph(State)
    graph.add_node("node", lambda state: {"ctx": ctx})
    graph.add_edge(START, "node")
    compiled = graph.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    with pytest.raises(TypeError, match=r"SharedContext|cannot be pickled|not.*serializable"):
        compiled.invoke({"ctx": None}, config)
