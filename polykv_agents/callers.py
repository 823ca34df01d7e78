"""Which node of a LangGraph graph makes a call: for the priorities of the pool's workflow."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks.base import BaseCallbackManager


def caller_of(run_manager: BaseCallbackManager | Any | None) -> dict[str, Any]:
    """The request's ``agent``, ``agent_step`` and ``agent_run`` from the metadata that LangGraph gives to its nodes' runs.

    A node of a subgraph is named ``parent:child``, as ``get_graph(xray=True)`` names it. Its supersteps are counted within the
    subgraph, and those of a graph without a checkpointer start again with every call of it: then they are left out.
    """
    metadata = getattr(run_manager, "metadata", None) or {}
    node = metadata.get("langgraph_node")
    if not isinstance(node, str):
        return {}
    parts = [part.partition(":")[0] for part in str(metadata.get("langgraph_checkpoint_ns") or node).split("|")]
    path = [part for part in parts if not part.isdigit()]  # LangGraph counts repeated calls of a subgraph
    step, thread = metadata.get("langgraph_step"), metadata.get("thread_id")
    return {
        "agent": ":".join(path),
        "agent_step": step if isinstance(step, int) and thread and len(path) == 1 else None,
        "agent_run": str(thread or ""),
    }
