"""PolyKV: many readers, one compressed KV cache of their common context.

The library needs torch and transformers only. ``polykv_agents`` adds the LangChain chat model.
"""

from polykv.agents import Agent, compress, create_agents
from polykv.codecs import CODECS, Codec, get_codec
from polykv.engine import Completion, Engine, Grammar, Request, RequestHandle, SamplingParams
from polykv.models import PooledCache, attach, load_model
from polykv.pool import KVSegment, PoolStats, SharedKVPool

__version__ = "0.1.0"

__all__ = [
    "CODECS",
    "Agent",
    "Codec",
    "Completion",
    "Engine",
    "Grammar",
    "KVSegment",
    "PoolStats",
    "PooledCache",
    "Request",
    "RequestHandle",
    "SamplingParams",
    "SharedKVPool",
    "__version__",
    "attach",
    "compress",
    "create_agents",
    "get_codec",
    "load_model",
]
