"""What a finished request says about itself, in LangChain's terms. Plain Python numbers only: checkpointers pack them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata

from polykv.engine import Completion
from polykv.engine.detokenizer import token_text
from polykv.engine.sampling import Choice


def usage_metadata(completion: Completion, created: int = 0, reasoning: int = 0) -> UsageMetadata:
    """Token counts. ``input_tokens`` includes the tokens read from the pool, which ``cache_read`` counts alone.

    Args:
        completion: the finished request.
        created: tokens read from the pool that this very call had put there, for a mark; ``cache_creation`` counts them.
        reasoning: tokens of thoughts, which ``output_tokens`` includes.
    """
    usage = UsageMetadata(
        input_tokens=completion.prompt_tokens,
        output_tokens=len(completion.token_ids),
        total_tokens=completion.prompt_tokens + len(completion.token_ids),
        input_token_details=InputTokenDetails(cache_read=completion.cached_tokens - created, cache_creation=created),
    )
    if reasoning:
        usage["output_token_details"] = OutputTokenDetails(reasoning=reasoning)
    return usage


def response_metadata(
    completion: Completion,
    model_name: str,
    finish_reason: str,
    shared_context: dict[str, Any] | None,
    tokenizer: Any,
) -> dict[str, Any]:
    """Model, finish reason, seconds, private bytes, and which shared context was read.

    ``timing`` holds ``queue_s``, ``ttft_s`` (both from submission), ``total_s`` and ``tokens_per_s`` after the first token.
    ``logprobs`` is there if log-probabilities were asked for; see :func:`logprobs_metadata`.
    """
    timing = completion.timing
    decoding = timing.total_s - timing.ttft_s
    rate = (len(completion.token_ids) - 1) / decoding if decoding > 0 else 0.0
    metadata: dict[str, Any] = {
        "model_name": model_name,
        "model_provider": "polykv",
        "finish_reason": finish_reason,
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
    if completion.logprobs is not None:
        metadata["logprobs"] = logprobs_metadata(completion.logprobs, tokenizer)
    return metadata


def logprobs_metadata(choices: Sequence[Choice], tokenizer: Any) -> dict[str, Any]:
    """Log-probabilities in the shape of OpenAI's API: ``{"content": [{"token", "bytes", "logprob", "top_logprobs"}]}``.

    Args:
        choices: one for each generated token, those of a stop string and of the end of sequence included, though the
            answer's text holds neither.
        tokenizer: of the model.

    Returns:
        Plain lists and numbers. ``token`` is the text of one token, U+FFFD where it is half a character; ``bytes`` are
        its bytes as integers, or None where the tokenizer does not tell them.
    """

    @cache
    def described(token_id: int) -> tuple[str, list[int] | None]:
        text, raw = token_text(tokenizer, token_id)
        return text, None if raw is None else list(raw)

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        text, raw = described(token_id)
        # a list of its own for each entry: what a caller does to one must not show in another
        return {"token": text, "bytes": None if raw is None else list(raw), "logprob": logprob}

    return {
        "content": [
            {**entry(choice.token_id, choice.logprob), "top_logprobs": [entry(*top) for top in choice.top_logprobs]}
            for choice in choices
        ]
    }
