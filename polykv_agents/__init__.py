"""LangChain and LangGraph on PolyKV: agents on one local model share one compressed context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polykv_agents.chat_models import ChatPolyKV
from polykv_agents.shared_context import SharedContext

if TYPE_CHECKING:
    from polykv_agents.middleware import SharedContextMiddleware
    from polykv_agents.node_cache import context_key

__all__ = ["ChatPolyKV", "SharedContext", "SharedContextMiddleware", "context_key"]


def __getattr__(name: str) -> Any:
    # these need packages that the chat model does not
    if name == "SharedContextMiddleware":
        from polykv_agents.middleware import SharedContextMiddleware

        return SharedContextMiddleware
    if name == "context_key":
        from polykv_agents.node_cache import context_key

        return context_key
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
