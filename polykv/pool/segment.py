"""A segment: the compressed keys and values of a run of tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polykv.codecs import Codec
from polykv.errors import InvalidRequestError, PromptTooLongError
from polykv.models.identity import ModelIdentity
from polykv.models.support import embedding_weight, head_dim, max_positions
from polykv_kernels import EncodedKV
from polykv_kernels.layouts import tensor_bytes


@dataclass(frozen=True)
class BuildReport:
    """What building a segment took.

    Attributes:
        seconds: wall time, prefill and encoding.
        prefill_seconds: the prefill's part.
        peak_bytes: largest sum of dense cache and encoded layers during the build.
    """

    seconds: float
    prefill_seconds: float
    peak_bytes: int


@dataclass(frozen=True, eq=False)
class KVSegment:
    """Immutable compressed KV of consecutive tokens, from position 0 or from the end of another segment.

    A segment with a parent was computed over the parent's stored form, and whoever reads it reads the parent too: documents
    of one team over a handbook of all teams, for example. Each is stored once and read once a step.

    Attributes:
        identity: hex SHA-256 chain over model identity and all token ids from position 0.
        model: identity of the model whose keys and values these are.
        codec: name of the codec; not part of the identity.
        token_ids: ``[T]`` int32, without the parent's.
        layers: one :class:`EncodedKV` a layer. A sliding-window layer holds only what the window of a token after the
            segment can reach.
        report: what the build took.
        parent: the segment before this one, or None for one that starts at position 0.
    """

    identity: str
    model: ModelIdentity
    codec: str
    token_ids: Tensor = field(repr=False)
    layers: tuple[EncodedKV, ...] = field(repr=False)
    report: BuildReport
    parent: KVSegment | None = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens held, without the parent's."""
        return int(self.token_ids.shape[0])

    @cached_property
    def start(self) -> int:
        """Absolute position of the first token."""
        return 0 if self.parent is None else self.parent.end

    @cached_property
    def end(self) -> int:
        """Absolute position after the last token: tokens of the whole context, the parents' included."""
        return self.start + self.num_tokens

    @cached_property
    def chain(self) -> tuple[KVSegment, ...]:
        """The segments of the whole context from position 0 on, this one last."""
        return (self,) if self.parent is None else (*self.parent.chain, self)

    @cached_property
    def context_ids(self) -> Tensor:
        """``[end]`` int32: ids of the whole context."""
        if self.parent is None:
            return self.token_ids
        return torch.cat([segment.token_ids for segment in self.chain])

    @cached_property
    def num_bytes(self) -> int:
        """Bytes allocated: every layer and the token ids."""
        return sum(layer.nbytes for layer in self.layers) + tensor_bytes(self.token_ids)

    @property
    def dense_bytes(self) -> int:
        """Bytes of one private float16 cache of the same tokens, sliding layers cut to their window."""
        return sum(layer.dense_fp16_nbytes for layer in self.layers)

    @property
    def compression_ratio(self) -> float:
        """``dense_bytes / num_bytes``: allocated bytes, never arithmetic on bit widths."""
        return self.dense_bytes / self.num_bytes


def checked_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    """Token ids as a tuple of integers.

    Raises:
        InvalidRequestError: they are no integers, or no sequence of any.
    """
    try:
        return tuple(map(operator.index, token_ids))
    except TypeError:
        raise InvalidRequestError(
            f"token_ids must be a sequence of integers, got {token_ids!r:.60}; encode a text with the model's tokenizer first"
        ) from None


def check_context(
    model: PreTrainedModel, token_ids: Sequence[int], codec: Codec, parent: KVSegment | None = None
) -> None:
    """Everything that can be wrong with a context, before a prefill is spent on it.

    Raises:
        InvalidRequestError: no tokens, or ids outside the vocabulary.
        PromptTooLongError: no position is left for a question.
        UnsupportedModelError: the codec cannot store the model's head_dim.
    """
    if len(token_ids) == 0:
        raise InvalidRequestError("the context has no tokens; give a text that is not empty")
    limit = max_positions(model.config)
    total = len(token_ids) + (parent.end if parent is not None else 0)
    if total >= limit:
        raise PromptTooLongError(
            f"the context has {total} tokens, but the model has {limit} positions and needs some for the "
            f"question; shorten the context by at least {total - limit + 1} tokens"
        )
    low, high, vocabulary = min(token_ids), max(token_ids), embedding_weight(model).shape[0]
    if low < 0 or high >= vocabulary:
        raise InvalidRequestError(
            f"token ids must lie in [0, {vocabulary}), got {low if low < 0 else high}; was another tokenizer used?"
        )
    codec.check_head_dim(head_dim(model.config))
