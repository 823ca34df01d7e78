"""Which node of a LangGraph graph makes a call: for the priorities of the pool's workflow."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks.base import BaseCallbackManager


def caller_of(run_manager: BaseCallbackManager | Any | None) -> dict[str, Any]:
    """The request's ``agent``, ``agent_step`` and ``agent_run`` from the metadata that LangGraph gives to its nodes' runs.

    A node of a subgraph is named ``parent:child``, as ``get_graph(xray=True)`` names it. Its supersteps are counted within the
    subgraph, so they are left out.
    """
    metadata = getattr(run_manager, "metadata", None) or {}
    node = metadata.get("langgraph_node")
    if not isinstance(node, str):
        return {}
    path = [part.partition(":")[0] for part in str(metadata.get("langgraph_checkpoint_ns") or node).split("|")]
    step = metadata.get("langgraph_step")
    return {
        "agent": ":".join(path),
        "agent_step": step if isinstance(step, int) and len(path) == 1 else None,
        "agent_run": str(metadata.get("thread_id") or ""),
    }
