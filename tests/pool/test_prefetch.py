"""What the workflow needs next comes back from the store before it is asked for, and what it needs late goes first."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from helpers import random_ids
from langgraph.graph import END, START, MessagesState, StateGraph

from polykv.engine import Request, SamplingParams

AGENTS = ("a", "b", "c", "d")


def ring() -> Any:
    graph = StateGraph(MessagesState)
    for name in AGENTS:
        graph.add_node(name, lambda state: {"messages": []})
    graph.add_edge(START, "a")
    for one, other in itertools.pairwise(AGENTS):
        graph.add_edge(one, other)
    graph.add_conditional_edges("d", lambda state: "a", ["a", END])
    return graph.compile()


def ask(engine: Any, agent: str, step: int) -> Any:
    ids = random_ids(100, seed=ord(agent))
    request = Request(
        tuple(ids), None, SamplingParams(temperature=0, max_tokens=2), agent=agent, agent_step=step, agent_run="1"
    )
    return engine.submit(request).result(60)


def resident(engine: Any) -> set[str]:
    return {agent for entry in engine.pool._table if entry.resident for agent in entry.agents}


def test_the_next_agents_prompt_comes_back_ahead(tiny_llama: Any, make_engine: Any, tmp_path: Path) -> None:
    probe = make_engine(tiny_llama, prefix_cache=True)
    ask(probe, "a", 1)
    one = probe.pool.stats().num_bytes
    engine = make_engine(tiny_llama, prefix_cache=True, max_pool_bytes=int(2.5 * one))
    engine.pool.open_store(tmp_path / "pool")
    engine.pool.attach_graph(ring())
    for step, agent in enumerate(AGENTS, 1):
        ask(engine, agent, step)
    assert engine.pool.stats().demotions >= 2
    ask(engine, "a", 5)
    deadline = time.monotonic() + 20
    while "b" not in resident(engine) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "b" in resident(engine)
    restores = engine.pool.stats().restores
    assert ask(engine, "b", 6).cached_tokens == 99
    assert engine.pool.stats().restores in (
        restores,
        restores + 1,
    )  # at most the one that is fetched for the next agent
    assert engine.pool.stats().num_bytes <= int(2.5 * one)


def test_without_a_store_the_ring_keeps_what_runs_next(tiny_llama: Any, make_engine: Any) -> None:
    probe = make_engine(tiny_llama, prefix_cache=True)
    ask(probe, "a", 1)
    one = probe.pool.stats().num_bytes
    computed = {}
    for workflow in (False, True):
        engine = make_engine(tiny_llama, prefix_cache=True, max_pool_bytes=int(2.5 * one))
        if workflow:
            engine.pool.attach_graph(ring())
        for step in range(1, 17):
            ask(engine, AGENTS[(step - 1) % 4], step)
        computed[workflow] = engine.stats().prefill_tokens
    # LRU has always just evicted the one that comes next
    assert computed[False] == 16 * 100 and computed[True] < 0.8 * computed[False]
