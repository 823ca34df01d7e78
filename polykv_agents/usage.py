"""What a finished request says about itself, in LangChain's terms. Plain Python numbers only: checkpointers pack them."""

from __future__ import annotations

from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from polykv.engine import Completion


def usage_metadata(completion: Completion) -> UsageMetadata:
    """Token counts. ``input_tokens`` includes the tokens read from the pool, which ``cache_read`` counts alone."""
    return UsageMetadata(
        input_tokens=completion.prompt_tokens,
        output_tokens=len(completion.token_ids),
        total_tokens=completion.prompt_tokens + len(completion.token_ids),
        # explicit contexts are written by share(), never by a call
        input_token_details=InputTokenDetails(cache_read=completion.cached_tokens, cache_creation=0),
    )


def response_metadata(completion: Completion, model_name: str, shared_context: dict[str, Any] | None) -> dict[str, Any]:
    """Model, finish reason, seconds, private bytes, and which shared context was read.

    ``timing`` holds ``queue_s``, ``ttft_s`` (both from submission), ``total_s`` and ``tokens_per_s`` after the first token.
    """
    timing = completion.timing
    decoding = timing.total_s - timing.ttft_s
    rate = (len(completion.token_ids) - 1) / decoding if decoding > 0 else 0.0
    metadata: dict[str, Any] = {
        "model_name": model_name,
        "model_provider": "polykv",
        "finish_reason": completion.finish_reason,
        "timing": {
            "queue_s": timing.queue_s,
            "ttft_s": timing.ttft_s,
            "total_s": timing.total_s,
            "tokens_per_s": rate,
        },
        "tail_bytes": completion.tail_bytes,
    }
    if shared_context is not None:
        metadata["shared_context"] = shared_context
    return metadata
