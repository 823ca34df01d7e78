"""Workflow-aware priorities: which agents of a graph run soon, so that the prefix cache keeps what they will read.

After KVFlow (arXiv 2507.07400): every agent has a steps-to-execution value, the number of steps until it can run,
counted on the workflow's graph from the agents that run now. A cache evicts the largest values first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polykv.errors import InvalidRequestError

HORIZON = 16
"""Steps are clamped to it. Unknown agents have HORIZON + 1, agents that cannot run again HORIZON + 2."""

MAX_RUNS = 64
"""Runs that are remembered at once."""

_START, _END = "__start__", "__end__"


class Workflow:
    """Which agents of a graph run soon. Thread-safe.

    The agents are the graph's nodes without ``__start__`` and ``__end__``. Subgraphs are opened: LangGraph names their
    nodes ``parent:child``, and their own start and end are passed without a step. An agent is called by its full name
    or by the name's end (``child``), and a subgraph that nothing else is called like by its name (``parent``, for all
    agents within). Where a name fits several agents it means all of them, and its value is the smallest.

    A graph does not tell joins from alternatives, so a node that waits for several parents counts like one that any of
    them starts: the minimum. Nor does it draw where a ``Send`` or ``Command`` goes that declares no targets. So an
    agent that cannot be reached from the graph's start is not "cannot run again" but unknown, and while such an agent
    runs, all that it does not lead to is.

    Args:
        graph: a compiled LangGraph graph, or what its ``get_graph()`` returns.

    Raises:
        InvalidRequestError: it is neither.
    """

    def __init__(self, graph: Any) -> None:
        names, edges = _drawn(graph)
        self._agents = tuple(name for name in names if not _is_mark(name))
        self._successors = _contracted(names, edges)
        self._names = _names(self._agents)
        self._from_start = _hops([_START], self._successors)
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, _Run] = OrderedDict()  # the least recently seen first
        self._version = 0
        self._steps: dict[str, int] | None = None  # of this version, once asked for

    @property
    def version(self) -> int:
        """Bumped whenever a value may have changed."""
        with self._lock:
            return self._version

    def observe(self, agent: str, step: int | None = None, run: str = "") -> None:
        """An agent makes a call now.

        Agents of one step run together: they are the run's frontier until a later step is seen. Without a step every
        observation replaces the frontier. An agent that the graph does not have says nothing about where the run is,
        and is ignored.

        Args:
            agent: its name.
            step: LangGraph's superstep (``langgraph_step`` in the metadata). A call of an earlier step than the
                frontier's is late, and ignored. Steps count within one run of one graph: a subgraph's calls have steps
                of their own.
            run: which run it belongs to, if there are several: a thread's or a run's id. At most ``MAX_RUNS`` are
                remembered; the least recently seen goes first.

        Raises:
            InvalidRequestError: the step is no integer.
        """
        if step is not None and not isinstance(step, int):
            raise InvalidRequestError(f"step must be an integer (LangGraph's langgraph_step) or None, got {step!r:.60}")
        nodes = self._names.get(agent, ())
        if not nodes:
            return
        with self._lock:
            state = self._runs.get(run)
            if state is None:
                state = self._runs[run] = _Run()
                if len(self._runs) > MAX_RUNS:
                    self._runs.popitem(last=False)
            self._runs.move_to_end(run)
            before = state.shape()
            if step is None:
                # without steps, calls of the same agent that overlap can only be told by their number
                state.calls = {node: state.calls.get(node, 0) for node in nodes}
            elif state.step is None or step > state.step:
                state.calls = {}
            elif step < state.step:
                return
            state.step = step
            for node in nodes:
                state.calls[node] = state.calls.get(node, 0) + 1
            if state.shape() != before:
                self._changed()

    def ended(self, agent: str, run: str = "") -> None:
        """A call that was observed has ended.

        When all calls of an agent have, it stays in the frontier but does not run any more: its value is the length of
        its shortest way back to itself, or from another agent of the frontier.

        Args:
            agent: its name, as it was observed.
            run: which run the call belongs to.
        """
        with self._lock:
            state = self._runs.get(run)
            if state is None:
                return
            self._runs.move_to_end(run)
            before = state.shape()
            for node in self._names.get(agent, ()):
                if state.calls.get(node, 0):
                    state.calls[node] -= 1
            if state.shape() != before:
                self._changed()

    def finish(self, run: str = "") -> None:
        """A run is over. With no run left, values count from the graph's start again. Safe to call again."""
        with self._lock:
            if self._runs.pop(run, None) is not None:
                self._changed()

    def steps_to_execution(self, agent: str) -> int:
        """How many steps there are until an agent can run.

        0 while it runs; else the fewest hops, at least 1, from any agent of any run's frontier, or from the graph's
        start if there is no run. Nothing goes on behind the graph's end.

        Args:
            agent: its name.

        Returns:
            The steps, clamped to ``HORIZON``; ``HORIZON + 1`` for an agent that the graph does not have or whose
            callers it does not draw, ``HORIZON + 2`` for one that cannot run again.
        """
        nodes = self._names.get(agent, ())
        if not nodes:
            return HORIZON + 1
        with self._lock:
            steps = self._current()
        return min(steps[node] for node in nodes)

    def next_agents(self, within: int = 1) -> list[str]:
        """The agents that run now or can within some steps, for prefetching.

        Args:
            within: how many steps; beyond ``HORIZON`` there are none.

        Returns:
            Their full names, the nearest first, in the graph's order where equally near.
        """
        with self._lock:
            steps = self._current()
        return sorted((a for a in self._agents if steps[a] <= min(within, HORIZON)), key=steps.__getitem__)

    def _changed(self) -> None:
        self._version += 1
        self._steps = None

    def _current(self) -> dict[str, int]:
        """Every agent's steps. Made anew for each version, and not changed after: readers need no lock."""
        if self._steps is None:
            frontier = {node for state in self._runs.values() for node in state.calls}
            hops = _hops(frontier, self._successors) if self._runs else self._from_start
            # a run got there by a jump that is not drawn, so it may get anywhere by another
            lost = any(node not in self._from_start for node in frontier)
            self._steps = {}
            for agent in self._agents:
                if agent in hops:
                    self._steps[agent] = min(hops[agent], HORIZON)
                else:
                    self._steps[agent] = HORIZON + (1 if lost or agent not in self._from_start else 2)
            for state in self._runs.values():
                self._steps.update((node, 0) for node, calls in state.calls.items() if calls)
        return self._steps


@dataclass
class _Run:
    """Where a run is: the step of its frontier, and how many calls each agent of the frontier has under way."""

    step: int | None = None
    calls: dict[str, int] = field(default_factory=dict)

    def shape(self) -> dict[str, bool]:
        """What the values depend on: who is in the frontier, and who of it runs."""
        return {node: calls > 0 for node, calls in self.calls.items()}


def _drawn(graph: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """Names and edges of a graph's drawing, subgraphs opened."""
    remedy = "give a compiled LangGraph graph (builder.compile()), or what its get_graph() returns"
    drawing = graph
    if callable(getattr(graph, "get_graph", None)):
        try:
            drawing = graph.get_graph(xray=True)
        except Exception:  # no xray, or a subgraph that cannot be drawn; the graph itself may be drawn still
            try:
                drawing = graph.get_graph()
            except Exception as error:
                raise InvalidRequestError(f"{graph!r:.60} could not be drawn ({error}); {remedy}") from error
    nodes, drawn_edges = getattr(drawing, "nodes", None), getattr(drawing, "edges", None)
    if not isinstance(nodes, Mapping) or not isinstance(drawn_edges, Iterable) or isinstance(drawn_edges, str):
        raise InvalidRequestError(f"a workflow needs a graph with nodes and edges, got {graph!r:.60}; {remedy}")
    if _START not in nodes:
        raise InvalidRequestError(f"the graph has no node {_START}, only {list(nodes)!r:.60}; {remedy}")
    edges = []
    for edge in drawn_edges:
        source, target = getattr(edge, "source", None), getattr(edge, "target", None)
        if not isinstance(source, str) or not isinstance(target, str) or source not in nodes or target not in nodes:
            raise InvalidRequestError(f"{edge!r:.60} is no edge between the graph's nodes; {remedy}")
        edges.append((source, target))
    return [str(name) for name in nodes], edges


def _is_mark(name: str) -> bool:
    """Whether a node is a graph's or subgraph's start or end, and no agent."""
    return name.rpartition(":")[2] in (_START, _END)


def _contracted(names: Iterable[str], edges: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The agents that each agent, and the start, leads to; subgraphs' starts and ends are passed through."""
    targets: dict[str, list[str]] = {name: [] for name in names}
    for source, target in edges:
        if source != _END:
            targets[source].append(target)
    found = {}
    for name in targets:
        if _is_mark(name) and name != _START:
            continue
        seen: set[str] = set()
        agents, ahead = [], list(targets[name])
        while ahead:
            node = ahead.pop()
            if node in seen:
                continue
            seen.add(node)
            if not _is_mark(node):
                agents.append(node)
            elif node != _START:
                ahead += targets[node]
        found[name] = agents
    return found


def _names(agents: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What agents are called: by the end of their names, and else by a subgraph they belong to."""
    ends: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {}
    for agent in agents:
        parts = agent.split(":")
        within = {":".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts))}
        for name in {":".join(parts[i:]) for i in range(len(parts))}:
            ends.setdefault(name, []).append(agent)
        for name in within:
            groups.setdefault(name, []).append(agent)
    return {name: tuple(found) for name, found in {**groups, **ends}.items()}


def _hops(sources: Iterable[str], successors: Mapping[str, list[str]]) -> dict[str, int]:
    """The fewest hops, at least one, from any source to each node that can be reached: breadth first."""
    hops: dict[str, int] = {}
    level, depth = list(sources), 0
    while level:
        depth += 1
        ahead = []
        for node in level:
            for target in successors[node]:
                if target not in hops:
                    hops[target] = depth
                    ahead.append(target)
        level = ahead
    return hops
