"""One thread owns the model; every running request takes part in one forward a step."""

from polykv.engine.engine import Engine, EngineStats, StepReport
from polykv.engine.grammar import Grammar
from polykv.engine.request import Completion, Request, RequestHandle, SamplingParams

__all__ = ["Completion", "Engine", "EngineStats", "Grammar", "Request", "RequestHandle", "SamplingParams", "StepReport"]
