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
from polykv_agents.tool_calls.registry import FORMATS, detect_format, get_format, template_takes_tools

__all__ = [
    "FORMATS",
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
    "detect_format",
    "get_format",
    "template_takes_tools",
]
