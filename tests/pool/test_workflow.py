"""Steps to execution: real LangGraph graphs, and random ones against a naive model."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm
from typing_extensions import TypedDict

from polykv.errors import InvalidRequestError
from polykv.pool.workflow import HORIZON, MAX_RUNS, Workflow

UNKNOWN, NEVER = HORIZON + 1, HORIZON + 2


class State(TypedDict):
    seen: Annotated[list[str], operator.add]


def noop(state: State) -> dict[str, Any]:
    return {"seen": []}


def graph_of(*edges: tuple[Any, str], nodes: dict[str, Any] | None = None) -> Any:
    """A compiled graph: its edges (a list as source waits for all of them), and nodes that are not just ``noop``."""
    builder = StateGraph(State)
    names = {n for source, target in edges for n in ([*source] if isinstance(source, list) else [source]) + [target]}
    for name in sorted((names | set(nodes or {})) - {START, END}):
        builder.add_node(name, (nodes or {}).get(name, noop))
    for source, target in edges:
        builder.add_edge(source, target)
    return builder.compile()


def drawing(nodes: list[str], edges: list[tuple[str, str]]) -> Any:
    """What get_graph() returns, as far as it is read."""
    return SimpleNamespace(
        nodes=dict.fromkeys(nodes),
        edges=[SimpleNamespace(source=source, target=target, conditional=False) for source, target in edges],
    )


def ring(names: str = "abcdef") -> Any:
    return graph_of((START, names[0]), *zip(names, names[1:] + names[:1], strict=True))


def values(workflow: Workflow, agents: str | list[str]) -> list[int]:
    return [workflow.steps_to_execution(agent) for agent in agents]


class ToolModel(GenericFakeChatModel):
    def bind_tools(self, *args: Any, **kwargs: Any) -> Any:
        return self


def model() -> ToolModel:
    return ToolModel(messages=iter([]))


@tool
def look_up(word: str) -> str:
    """Looks a word up."""
    return word


# graphs of LangGraph


def test_a_ring_of_six() -> None:
    workflow = Workflow(ring())
    assert values(workflow, "abcdef") == [1, 2, 3, 4, 5, 6]  # from the start
    for step in range(13):
        at = step % 6
        workflow.observe("abcdef"[at], step=step + 1)
        assert values(workflow, "abcdef") == [(i - at) % 6 for i in range(6)]
        assert workflow.next_agents() == ["abcdef"[at], "abcdef"[(at + 1) % 6]]
        workflow.ended("abcdef"[at])
        assert values(workflow, "abcdef") == [(i - at - 1) % 6 + 1 for i in range(6)]
        assert workflow.next_agents() == ["abcdef"[(at + 1) % 6]]
    workflow.finish()
    assert values(workflow, "abcdef") == [1, 2, 3, 4, 5, 6]


def test_what_langgraph_runs_next_was_one_step_away() -> None:
    """Steps and names as LangGraph gives them to the nodes."""
    found: list[tuple[str, int]] = []
    workflow: Workflow | None = None

    def node(state: State, config: RunnableConfig) -> dict[str, Any]:
        assert workflow is not None
        name, step = config["metadata"]["langgraph_node"], config["metadata"]["langgraph_step"]
        found.append((name, workflow.steps_to_execution(name)))
        workflow.observe(name, step=step)
        workflow.ended(name)
        return {"seen": [name]}

    def turn(state: State) -> str:
        return END if state["seen"].count("c") == 3 else "a"

    builder = StateGraph(State)
    for name in "abc":
        builder.add_node(name, node)
    builder.add_edge(START, "a")
    builder.add_edge("a", "b")
    builder.add_edge("b", "c")
    builder.add_conditional_edges("c", turn, ["a", END])
    graph = builder.compile()
    workflow = Workflow(graph)
    graph.invoke({"seen": []})
    assert found == [(name, 1) for name in "abcabcabc"]


def test_a_supervisor_and_its_workers() -> None:
    builder = StateGraph(State)
    for name in ("boss", "one", "two", "writer"):
        builder.add_node(name, noop)
    builder.add_edge(START, "boss")
    builder.add_conditional_edges("boss", lambda state: END, ["one", "two", "writer", END])
    builder.add_edge("one", "boss")
    builder.add_edge("two", "boss")
    builder.add_edge("writer", END)
    workflow = Workflow(builder.compile())
    team = ["boss", "one", "two", "writer"]
    assert values(workflow, team) == [1, 2, 2, 2]
    workflow.observe("boss", 1)
    assert values(workflow, team) == [0, 1, 1, 1]
    assert workflow.next_agents() == team
    workflow.ended("boss")
    assert values(workflow, team) == [2, 1, 1, 1]
    workflow.observe("one", 2)
    assert values(workflow, team) == [1, 0, 2, 2]
    assert workflow.next_agents(0) == ["one"]
    workflow.observe("writer", 4)
    assert values(workflow, team) == [NEVER, NEVER, NEVER, 0]
    workflow.ended("writer")
    assert values(workflow, team) == [NEVER] * 4
    assert workflow.next_agents(100) == []


def test_fan_out_and_join() -> None:
    edges: list[Any] = [(START, "a"), ("a", "p"), ("a", "q"), ("q", "r"), (["p", "r"], "j"), ("j", END)]
    workflow = Workflow(graph_of(*edges))
    assert values(workflow, "apqrj") == [1, 2, 2, 3, 3]  # the join: as if p alone started it
    workflow.observe("a", 1)
    workflow.ended("a")
    workflow.observe("p", 2)
    workflow.observe("q", 2)  # the same step: both are the frontier
    assert values(workflow, "apqrj") == [NEVER, 0, 0, 1, 1]
    workflow.ended("p")
    assert values(workflow, "apqrj") == [NEVER, NEVER, 0, 1, 1]
    workflow.observe("r", 3)
    assert values(workflow, "apqrj") == [NEVER, NEVER, NEVER, 0, 1]
    workflow.observe("q", 2)  # late
    assert values(workflow, "apqrj") == [NEVER, NEVER, NEVER, 0, 1]


def test_a_subgraph() -> None:
    team = graph_of((START, "p"), ("p", "q"), ("q", END))
    workflow = Workflow(graph_of((START, "a"), ("a", "team"), ("team", "z"), nodes={"team": team}))
    assert values(workflow, ["a", "team:p", "team:q", "z"]) == [1, 2, 3, 4]
    assert values(workflow, ["p", "q", "team"]) == [2, 3, 2]
    workflow.observe("p")
    assert values(workflow, ["a", "p", "q", "z", "team"]) == [NEVER, 0, 1, 2, 0]
    assert workflow.next_agents(2) == ["team:p", "team:q", "z"]
    workflow.observe("team:q")
    workflow.ended("q")
    assert values(workflow, ["p", "q", "z"]) == [NEVER, NEVER, 1]


def test_a_subgraphs_own_start_and_end_are_no_steps() -> None:
    pair = graph_of((START, "p"), (START, "q"), ("p", END), ("q", END))
    inner = graph_of((START, "a"), ("a", "pair"), ("pair", "z"), nodes={"pair": pair})
    graph = graph_of((START, "top"), ("top", "w"), ("w", "top"), nodes={"top": inner})
    assert "top:pair:__start__" in graph.get_graph(xray=True).nodes  # LangGraph does not leave it out
    workflow = Workflow(graph)
    assert values(workflow, ["a", "p", "q", "z", "w"]) == [1, 2, 2, 3, 4]
    assert workflow.next_agents(4) == ["top:a", "top:pair:p", "top:pair:q", "top:z", "w"]
    workflow.observe("pair:q")
    assert values(workflow, ["top:pair:p", "pair:q", "top:z", "w", "top", "pair"]) == [4, 0, 1, 2, 0, 0]
    assert values(workflow, ["top:pair:__start__", "__start__", "__end__", ""]) == [UNKNOWN] * 4


def test_a_name_of_several_agents_takes_the_soonest() -> None:
    one, two = graph_of((START, "model"), ("model", "left")), graph_of((START, "model"), ("model", "right"))
    workflow = Workflow(graph_of((START, "x"), ("x", "y"), ("y", END), nodes={"x": one, "y": two}))
    assert values(workflow, ["x:model", "y:model", "model", "x", "y"]) == [1, 3, 1, 1, 3]
    workflow.observe("model")  # either may be meant
    assert values(workflow, ["x:model", "y:model", "left", "right"]) == [0, 0, 1, 1]
    workflow.ended("model")
    assert values(workflow, ["x:model", "y:model", "model"]) == [NEVER, 2, 2]


def test_a_subgraphs_name_is_the_last_choice() -> None:
    workflow = Workflow(
        drawing(
            ["__start__", "worker", "team:worker:a", "team:worker:b", "__end__"],
            [("__start__", "team:worker:a"), ("team:worker:a", "team:worker:b"), ("team:worker:b", "worker")],
        )
    )
    assert values(workflow, ["worker", "team", "team:worker", "worker:b"]) == [3, 1, 1, 2]


def test_create_agent() -> None:
    workflow = Workflow(create_agent(model(), [look_up]))
    assert values(workflow, ["model", "tools"]) == [1, 2]
    workflow.observe("model", 1)
    assert values(workflow, ["model", "tools"]) == [0, 1]
    workflow.ended("model")
    assert values(workflow, ["model", "tools"]) == [2, 1]
    workflow.observe("tools", 2)
    assert values(workflow, ["model", "tools"]) == [1, 0]
    alone = Workflow(create_agent(model(), []))
    alone.observe("model")
    alone.ended("model")
    assert values(alone, ["model", "tools"]) == [NEVER, UNKNOWN]


def test_create_supervisor_opens_its_agents() -> None:
    agents: list[Any] = [create_agent(model(), [look_up], name=name) for name in ("one", "two")]
    workflow = Workflow(create_supervisor(agents, model=model()).compile())
    assert values(workflow, ["supervisor", "one", "two", "one:model", "one:tools"]) == [1, 2, 2, 2, 3]
    workflow.observe("one:model")
    assert values(workflow, ["one:model", "one:tools", "supervisor:agent", "two:model"]) == [0, 1, 1, 2]
    workflow.observe("two")  # by the agent's name, its nodes being drawn only
    assert values(workflow, ["two", "supervisor", "one"]) == [0, 1, 2]


def test_create_swarm() -> None:
    agents: list[Any] = [
        create_agent(model(), [create_handoff_tool(agent_name=other)], name=name) for name, other in ("AB", "BA")
    ]
    workflow = Workflow(create_swarm(agents, default_active_agent="A").compile())
    assert values(workflow, "AB") == [1, 1]  # either may be the active one
    workflow.observe("A:model")
    assert values(workflow, ["A:model", "A:tools", "B:model", "B:tools"]) == [0, 1, 1, 2]
    workflow.observe("B")
    workflow.ended("B")
    assert values(workflow, ["A", "A:tools", "B"]) == [1, 2, 1]


def to_b_or_c(state: State) -> Command[Literal["b", "c"]]:
    return Command(goto="b")


def to_a_or_end(state: State) -> Command[Literal["a", "__end__"]]:
    return Command(goto="a")


def anywhere(state: State) -> Any:
    return Command(goto="b")


def test_commands_with_an_annotation_are_drawn() -> None:
    workflow = Workflow(graph_of((START, "a"), nodes={"a": to_b_or_c, "b": to_a_or_end, "c": noop}))
    assert values(workflow, "abc") == [1, 2, 2]
    workflow.observe("b")
    workflow.ended("b")
    assert values(workflow, "abc") == [1, 2, 2]
    workflow.observe("c")
    workflow.ended("c")
    assert values(workflow, "abc") == [NEVER] * 3


def test_commands_with_destinations_are_drawn() -> None:
    builder = StateGraph(State)
    builder.add_node("a", anywhere, destinations=("b", "c"))
    builder.add_node("b", anywhere, destinations={"a": "back"})
    builder.add_node("c", anywhere)
    builder.add_edge(START, "a")
    workflow = Workflow(builder.compile())
    workflow.observe("b")
    assert values(workflow, "abc") == [1, 0, 2]


def test_commands_without_either_are_unknown() -> None:
    workflow = Workflow(graph_of((START, "a"), nodes={"a": anywhere, "b": anywhere, "c": anywhere}))
    assert values(workflow, "abc") == [1, UNKNOWN, UNKNOWN]
    workflow.observe("a")
    workflow.ended("a")
    assert values(workflow, "abc") == [NEVER, UNKNOWN, UNKNOWN]
    workflow.observe("b")  # from where nothing is drawn, everything may come
    assert values(workflow, "abc") == [UNKNOWN, 0, UNKNOWN]


def test_what_follows_an_undrawn_subgraph_node_is_unknown_too() -> None:
    team = graph_of((START, "p"), ("p", "q"), ("q", END))
    workflow = Workflow(graph_of((START, "a"), ("a", "z"), nodes={"a": anywhere, "team": team}))
    workflow.observe("z")
    assert values(workflow, ["a", "z", "p", "q"]) == [NEVER, 0, UNKNOWN, UNKNOWN]
    workflow.observe("p")
    assert values(workflow, ["a", "z", "p", "q"]) == [UNKNOWN, UNKNOWN, 0, 1]


@pytest.mark.parametrize("declared", [False, True])
def test_sends(declared: bool) -> None:
    builder = StateGraph(State)
    for name in ("plan", "worker", "merge"):
        builder.add_node(name, noop)
    builder.add_edge(START, "plan")
    builder.add_conditional_edges("plan", lambda state: [Send("worker", state)], ["worker"] if declared else None)
    builder.add_edge("worker", "merge")
    workflow = Workflow(builder.compile())
    workflow.observe("plan", 1)
    assert values(workflow, ["worker", "merge"]) == ([1, 2] if declared else [UNKNOWN, UNKNOWN])
    for _ in range(3):
        workflow.observe("worker", 2)
    for left in (2, 1, 0):
        workflow.ended("worker")
        assert workflow.steps_to_execution("worker") == (0 if left else NEVER if declared else UNKNOWN)


# runs, steps, versions


def test_steps_are_clamped_to_the_horizon() -> None:
    names = [f"n{i}" for i in range(40)]
    workflow = Workflow(drawing(["__start__", *names], [*zip(["__start__", *names], names, strict=False)]))
    assert values(workflow, names) == [min(i + 1, HORIZON) for i in range(40)]
    workflow.observe("n20")
    assert values(workflow, names) == [NEVER] * 20 + [0] + [min(i, HORIZON) for i in range(1, 20)]
    assert workflow.next_agents(10**6) == names[20:]
    assert workflow.next_agents(-1) == []


def test_an_agent_that_calls_itself() -> None:
    workflow = Workflow(drawing(["__start__", "a"], [("__start__", "a"), ("a", "a")]))
    workflow.observe("a")
    assert workflow.steps_to_execution("a") == 0
    workflow.ended("a")
    assert workflow.steps_to_execution("a") == 1


def test_without_steps_an_observation_replaces_the_frontier() -> None:
    workflow = Workflow(ring())
    workflow.observe("a")
    workflow.observe("c")
    assert values(workflow, "abcdef") == [4, 5, 0, 1, 2, 3]
    workflow.observe("c")  # two calls at once
    workflow.ended("c")
    assert workflow.steps_to_execution("c") == 0
    workflow.ended("c")
    workflow.ended("c")  # once too often
    assert workflow.steps_to_execution("c") == 6
    workflow.observe("b", step=3)  # steps may begin later
    workflow.observe("e", step=3)
    assert values(workflow, "abcdef") == [2, 0, 1, 2, 0, 1]


def test_the_nearest_of_several_runs_counts() -> None:
    workflow = Workflow(ring())
    workflow.observe("a", 7, run="one")
    workflow.observe("d", 2, run="two")  # an earlier step, but of another run
    assert values(workflow, "abcdef") == [0, 1, 2, 0, 1, 2]
    workflow.ended("a", run="two")  # does not run there
    workflow.ended("a", run="three")
    assert workflow.steps_to_execution("a") == 0
    workflow.ended("a", run="one")
    assert values(workflow, "abcdef") == [3, 1, 2, 0, 1, 2]
    workflow.finish("two")
    assert values(workflow, "abcdef") == [6, 1, 2, 3, 4, 5]
    workflow.finish("one")
    assert values(workflow, "abcdef") == [1, 2, 3, 4, 5, 6]


def test_the_least_recently_seen_of_many_runs_is_dropped() -> None:
    workflow = Workflow(graph_of((START, "a"), (START, "b"), (START, "c"), (START, "d"), ("d", END)))
    workflow.observe("a", 2, run="ended later")
    workflow.observe("b", 2, run="observed later")
    workflow.observe("c", 2, run="old")
    for i in range(MAX_RUNS - 3):
        workflow.observe("d", run=str(i))
    workflow.ended("d", run="ended later")  # no call of this run, and a late one: they have been seen still
    workflow.observe("b", 1, run="observed later")
    assert values(workflow, "abcd") == [0, 0, 0, 0]
    version = workflow.version
    workflow.observe("d", run="one more")
    assert workflow.version > version
    assert values(workflow, "abcd") == [0, 0, NEVER, 0]
    for i in range(MAX_RUNS - 3):
        workflow.observe("d", run=f"new {i}")
    assert values(workflow, "abcd") == [0, 0, NEVER, 0]
    workflow.observe("d", run="the next")
    assert values(workflow, "abcd") == [NEVER, 0, NEVER, 0]


def test_agents_that_the_graph_does_not_have() -> None:
    workflow = Workflow(ring())
    workflow.observe("b", 1)
    version = workflow.version
    workflow.observe("summarizer", 2)
    workflow.observe("__end__", 2)
    workflow.ended("summarizer")
    assert workflow.version == version
    assert values(workflow, ["summarizer", "__start__", "__end__", "b", "a"]) == [UNKNOWN] * 3 + [0, 5]
    workflow.observe("summarizer", run="other")  # does not make a run either
    workflow.finish()
    assert values(workflow, "ab") == [1, 2]


def test_the_version_moves_with_the_values_only() -> None:
    workflow = Workflow(ring())

    def bumps(change: Callable[[], object]) -> bool:
        before, old = workflow.version, values(workflow, "abcdef")
        change()
        assert workflow.version >= before
        if workflow.version == before:
            assert values(workflow, "abcdef") == old
        return workflow.version > before

    assert not bumps(lambda: workflow.finish())
    assert not bumps(lambda: workflow.ended("a"))
    assert bumps(lambda: workflow.observe("a", 1))
    assert not bumps(lambda: workflow.observe("a", 1))
    assert not bumps(lambda: workflow.ended("a"))  # one of two
    assert bumps(lambda: workflow.ended("a"))
    assert not bumps(lambda: workflow.ended("a"))
    assert bumps(lambda: workflow.observe("b", 2))
    assert not bumps(lambda: workflow.observe("a", 1))
    assert bumps(lambda: workflow.finish())
    assert not bumps(lambda: workflow.next_agents())


def test_threads() -> None:
    workflow = Workflow(ring())
    wrong: list[object] = []

    def work(run: str) -> None:
        try:
            for i in range(300):
                name = "abcdef"[i % 6]
                workflow.observe(name, step=i, run=run)
                if workflow.steps_to_execution(name) != 0 or name not in workflow.next_agents(2):
                    wrong.append((run, i))
                workflow.ended(name, run=run)
                if not 0 <= workflow.steps_to_execution("a") <= 6:
                    wrong.append((run, i))
            workflow.finish(run)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert values(workflow, "abcdef") == [1, 2, 3, 4, 5, 6]


# what may be given


def test_a_graph_or_its_drawing() -> None:
    graph = graph_of((START, "a"), ("a", "team"), nodes={"team": graph_of((START, "p"), ("p", "q"))})
    assert values(Workflow(graph.get_graph(xray=True)), ["a", "team:p", "q"]) == [1, 2, 3]
    assert values(Workflow(graph.get_graph()), ["a", "team", "q"]) == [1, 2, UNKNOWN]


class PlainGraph:
    def get_graph(self) -> Any:
        return drawing(["__start__", "a"], [("__start__", "a")])


class FailingXray:
    def get_graph(self, *, xray: bool = False) -> Any:
        if xray:
            raise RuntimeError("a subgraph is not there")
        return PlainGraph().get_graph()


class Failing:
    def get_graph(self, *, xray: bool = False) -> Any:
        raise RuntimeError("no server")


@pytest.mark.parametrize("graph", [PlainGraph(), FailingXray()])
def test_without_xray(graph: Any) -> None:
    assert Workflow(graph).steps_to_execution("a") == 1


@pytest.mark.parametrize(
    "graph",
    [
        None,
        7,
        "graph",
        {"a": ["b"]},
        StateGraph(State),
        StateGraph,
        type(graph_of((START, "a"))),
        Failing(),
        RunnableLambda(len) | RunnableLambda(abs),
        SimpleNamespace(nodes=["__start__", "a"], edges=[]),
        SimpleNamespace(nodes={"__start__": None}, edges=None),
        SimpleNamespace(nodes={"__start__": None}, edges=[("__start__", "a")]),
        SimpleNamespace(nodes={"__start__": None}, edges=[SimpleNamespace(source=["__start__"], target="__start__")]),
        SimpleNamespace(get_graph=lambda xray=False: "drawn"),
        drawing(["__start__"], [("__start__", "a")]),
        drawing([], []),
    ],
    ids=lambda graph: repr(graph)[:30],
)
def test_no_graph(graph: Any) -> None:
    with pytest.raises(InvalidRequestError, match="compiled LangGraph graph"):
        Workflow(graph)


@pytest.mark.parametrize("step", ["3", 1.5, [1]])
def test_no_step(step: Any) -> None:
    workflow = Workflow(ring())
    with pytest.raises(InvalidRequestError, match="step must be an integer"):
        workflow.observe("a", step=step)


# against a naive model

MARKS = ["__start__", "__end__", "s:__start__", "s:__end__", "t:__start__"]
AGENTS = ["a", "b", "c", "d", "s:e", "s:f", "t:g"]


@st.composite
def drawings(draw: st.DrawFn) -> list[tuple[str, str]]:
    nodes = st.sampled_from(MARKS + AGENTS)
    return draw(st.lists(st.tuples(nodes, nodes), max_size=24))


def is_mark(node: str) -> bool:
    return node in MARKS


def distances(edges: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Floyd-Warshall, without the empty path from a node to itself."""
    nodes = MARKS + AGENTS
    found = {(u, v): math.inf for u in nodes for v in nodes}
    for u, v in edges:
        if u != "__end__" and v != "__start__":  # behind the end nothing goes on, and nothing leads to the start
            found[u, v] = 0 if is_mark(v) else 1
    for k in nodes:
        for u in nodes:
            for v in nodes:
                found[u, v] = min(found[u, v], found[u, k] + found[k, v])
    return found


class Naive:
    """The same rules, one agent and one run at a time."""

    def __init__(self, edges: list[tuple[str, str]]) -> None:
        self.distances = distances(edges)
        self.runs: list[tuple[str, int | None, list[tuple[str, int]]]] = []

    def take(self, run: str) -> tuple[int | None, dict[str, int]]:
        found = [(step, dict(calls)) for name, step, calls in self.runs if name == run]
        self.runs = [r for r in self.runs if r[0] != run]
        return found[0] if found else (None, {})

    def put(self, run: str, step: int | None, calls: dict[str, int]) -> None:
        self.runs = [*self.runs, (run, step, list(calls.items()))][-MAX_RUNS:]

    def observe(self, agent: str, step: int | None, run: str) -> None:
        old, calls = self.take(run)
        if step is not None and old is not None and step < old:
            self.put(run, old, calls)
        elif step is not None and step == old:
            self.put(run, step, {**calls, agent: calls.get(agent, 0) + 1})
        else:
            self.put(run, step, {agent: 1 + (calls.get(agent, 0) if step is None else 0)})

    def ended(self, agent: str, run: str) -> None:
        if any(name == run for name, _, _ in self.runs):
            step, calls = self.take(run)
            if agent in calls:
                calls[agent] = max(0, calls[agent] - 1)
            self.put(run, step, calls)

    def value(self, agent: str) -> int:
        frontier = [(node, count) for _, _, calls in self.runs for node, count in calls]
        if any(node == agent and count for node, count in frontier):
            return 0
        sources = [node for node, _ in frontier] or ["__start__"]
        nearest = min(self.distances[source, agent] for source in sources)
        if nearest < math.inf:
            return min(int(nearest), HORIZON)
        drawn = [n for n in AGENTS if self.distances["__start__", n] < math.inf]
        return NEVER if agent in drawn and all(n in drawn for n, _ in frontier) else UNKNOWN


events = st.lists(
    st.one_of(
        st.tuples(
            st.just("observe"), st.sampled_from(AGENTS), st.none() | st.integers(0, 4), st.sampled_from(["", "x", "y"])
        ),
        st.tuples(st.just("ended"), st.sampled_from(AGENTS), st.none(), st.sampled_from(["", "x", "y"])),
        st.tuples(st.just("finish"), st.just(""), st.none(), st.sampled_from(["", "x", "y"])),
    ),
    max_size=15,
)


@settings(max_examples=200, deadline=None)
@given(edges=drawings(), history=events)
def test_random_graphs_and_histories(edges: list[tuple[str, str]], history: list[Any]) -> None:
    workflow, naive = Workflow(drawing(MARKS + AGENTS, edges)), Naive(edges)
    expected = [naive.value(agent) for agent in AGENTS]
    assert values(workflow, AGENTS) == expected
    for kind, agent, step, run in history:
        version = workflow.version
        if kind == "observe":
            workflow.observe(agent, step, run)
            naive.observe(agent, step, run)
        elif kind == "ended":
            workflow.ended(agent, run)
            naive.ended(agent, run)
        else:
            workflow.finish(run)
            naive.take(run)
        before, expected = expected, [naive.value(agent) for agent in AGENTS]
        assert values(workflow, AGENTS) == expected
        assert workflow.version > version or expected == before
        assert workflow.next_agents(2) == [
            a for n in (0, 1, 2) for a, v in zip(AGENTS, expected, strict=True) if v == n
        ]
        assert workflow.steps_to_execution("s") == min(expected[4:6])
