"""LangChain and LangGraph on PolyKV: agents on one local model share one compressed context."""

from polykv_agents.chat_models import ChatPolyKV
from polykv_agents.shared_context import SharedContext

__all__ = ["ChatPolyKV", "SharedContext"]
