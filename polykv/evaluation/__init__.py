"""Measuring what a pool costs and what it changes."""

from polykv.evaluation.memory import live_tensor_bytes, resident_bytes
from polykv.evaluation.quality import QualityReport, compare_codec

__all__ = ["QualityReport", "compare_codec", "live_tensor_bytes", "resident_bytes"]
