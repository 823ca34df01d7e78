"""Tool calls of local model families: one format a file, one base class."""

from polykv_agents.tool_calls.base import (
    Call,
    Event,
    InvalidCall,
    OutputParser,
    Reasoning,
    Text,
    Thought,
    Tool,
    ToolChoice,
    ToolFormat,
)

__all__ = [
    "Call",
    "Event",
    "InvalidCall",
    "OutputParser",
    "Reasoning",
    "Text",
    "Thought",
    "Tool",
    "ToolChoice",
    "ToolFormat",
]
