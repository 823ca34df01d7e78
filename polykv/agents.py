"""The names that users of the reference package know: ``compress``, ``create_agents``, ``Agent``.

Everything here is raw text without a chat template; for chat models and graphs use ``polykv_agents.ChatPolyKV``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from polykv.codecs import DEFAULT_CODEC, Codec
from polykv.engine import Engine, SamplingParams
from polykv.errors import InvalidRequestError
from polykv.models.loading import ProgressCallback
from polykv.pool import SharedKVPool
from polykv.pool.pool import question_ids

# weak on both sides: an engine holds its pool, so a strong value would keep its own key alive
_engines: weakref.WeakKeyDictionary[SharedKVPool, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def compress(
    model: PreTrainedModel,
    tokenizer: Any,
    document: str,
    codec: str | Codec = DEFAULT_CODEC,
    *,
    progress: ProgressCallback | None = None,
) -> SharedKVPool:
    """Prefills a document once and compresses it.

    The document is tokenised as raw text, with the special tokens the tokenizer adds by itself (often a BOS) and
    without a chat template: an instruction-tuned model sees it as plain text.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        document: the text.
        codec: how to store it.
        progress: called with a phase, units done and units in all.

    Raises:
        InvalidRequestError: the document is no string, or holds nothing but white space.
        PromptTooLongError: it has more tokens than the model has positions.
        UnsupportedModelError: the model cannot be served.
    """
    if not isinstance(document, str):
        raise InvalidRequestError(
            f"document must be one string, got {type(document).__name__}; join several texts first"
        )
    if not document.strip():
        raise InvalidRequestError("the document is empty or white space only; give a text")
    ids: list[int] = tokenizer.encode(document)
    return SharedKVPool.from_token_ids(model, ids, codec, tokenizer=tokenizer, progress=progress)


class Agent:
    """A reader of a pool. It keeps nothing between calls; several may generate at once and then share each forward.

    Args:
        engine: runs the model over the pool.
        name: for the user's own use.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name = name

    def generate(
        self,
        query: str,
        max_tokens: int = 200,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> str:
        """Continues document and query; the query is raw text and gets no BOS.

        Args:
            query: text that follows the document.
            max_tokens: tokens to generate at most.
            temperature: 0 takes the most likely token.
            top_p: nucleus sampling.
            stop: the answer ends before this string, or the first of these.
            seed: seed of the draws.

        Returns:
            The generated text.

        Raises:
            InvalidRequestError: an empty query, or a value out of range.
            PromptTooLongError: document, query and max_tokens exceed the model's positions.
        """
        sampling = SamplingParams(
            temperature, top_p, max_tokens, (stop,) if isinstance(stop, str) else tuple(stop), seed
        )
        segment = self._engine.pool.segment
        prompt = [*segment.token_ids.tolist(), *question_ids(self._engine.tokenizer, query)]
        handle = self._engine.generate(prompt, sampling, segment)
        try:
            return handle.result().text
        finally:
            handle.cancel()


def create_agents(pool: SharedKVPool, model: PreTrainedModel, tokenizer: Any, n: int) -> list[Agent]:
    """Makes ``n`` readers of a pool that share one engine.

    Raises:
        InvalidRequestError: n is below 1, or the tokenizer is none.
        IncompatiblePoolError: model or tokenizer are not the pool's.
    """
    if n < 1:
        raise InvalidRequestError(f"n must be at least 1, got {n}")
    if not hasattr(tokenizer, "get_vocab"):
        raise InvalidRequestError(f"tokenizer must be the model's transformers tokenizer, got {tokenizer!r:.60}")
    pool.check_model(model, tokenizer)
    with _lock:
        known = _engines.get(pool)
        engine = known() if known is not None else None
        if engine is None or engine.closed or (engine.model, engine.tokenizer) != (model, tokenizer):
            engine = Engine(model, tokenizer, pool=pool)
            _engines[pool] = weakref.ref(engine)
    return [Agent(engine, f"agent-{index}") for index in range(n)]
