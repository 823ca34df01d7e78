"""A segment: the compressed keys and values of a run of tokens, and how it is made."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from polykv.codecs import Codec
from polykv.errors import InvalidRequestError, PolyKVError, PromptTooLongError
from polykv.models.attention import exclusively
from polykv.models.identity import ModelIdentity, segment_identity
from polykv.models.support import embedding_weight, head_dim, layer_windows, max_positions
from polykv_kernels import EncodedKV
from polykv_kernels.layouts import tensor_bytes

PREFILL_CHUNK_TOKENS = 512
"""Tokens prefilled at a time: bounds the attention scores to ``[chunk, context]`` instead of ``[context, context]``."""


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
    """Immutable compressed KV of consecutive tokens from position 0.

    Attributes:
        identity: hex SHA-256 chain over model identity and token ids.
        model: identity of the model whose keys and values these are.
        codec: name of the codec; not part of the identity.
        token_ids: ``[T]`` int32.
        layers: one :class:`EncodedKV` a layer. A sliding-window layer holds only what the window of a token after the
            segment can reach.
        report: what the build took.
    """

    identity: str
    model: ModelIdentity
    codec: str
    token_ids: Tensor = field(repr=False)
    layers: tuple[EncodedKV, ...] = field(repr=False)
    report: BuildReport

    @property
    def num_tokens(self) -> int:
        """Tokens of the context."""
        return int(self.token_ids.shape[0])

    @property
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


def check_context(model: PreTrainedModel, token_ids: Sequence[int], codec: Codec) -> None:
    """Everything that can be wrong with a context, before a prefill is spent on it.

    Raises:
        InvalidRequestError: no tokens, or ids outside the vocabulary.
        PromptTooLongError: no position is left for a question.
        UnsupportedModelError: the codec cannot store the model's head_dim.
    """
    if len(token_ids) == 0:
        raise InvalidRequestError("the context has no tokens; give a text that is not empty")
    limit = max_positions(model.config)
    if len(token_ids) >= limit:
        raise PromptTooLongError(
            f"the context has {len(token_ids)} tokens, but the model has {limit} positions and needs some for the "
            f"question; shorten the context by at least {len(token_ids) - limit + 1} tokens"
        )
    low, high, vocabulary = min(token_ids), max(token_ids), embedding_weight(model).shape[0]
    if low < 0 or high >= vocabulary:
        raise InvalidRequestError(
            f"token ids must lie in [0, {vocabulary}), got {low if low < 0 else high}; was another tokenizer used?"
        )
    codec.check_head_dim(head_dim(model.config))


@contextmanager
def _no_grad() -> Iterator[None]:
    """No graph, but ordinary tensors whatever the caller's mode: inference tensors could not be read with gradients on."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def build_segment(
    model: PreTrainedModel,
    identity: ModelIdentity,
    token_ids: Sequence[int],
    codec: Codec,
    *,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
) -> Generator[tuple[str, int, int], None, KVSegment]:
    """Prefills a context in chunks and encodes it layer by layer.

    A generator, so that an engine can take other requests' steps between the chunks. One dense cache exists during the
    build; each of its layers is dropped as soon as it is encoded.

    Args:
        model: an attached model.
        identity: its identity.
        token_ids: the context.
        codec: how to store it.
        chunk_tokens: tokens a forward.

    Yields:
        ``("prefill", tokens done, tokens)`` after each chunk, then ``("encode", layers done, layers)``.

    Returns:
        The segment.

    Raises:
        InvalidRequestError, PromptTooLongError, UnsupportedModelError: see :func:`check_context`.
        PolyKVError: the model gave keys or values that cannot be stored.
    """
    check_context(model, token_ids, codec)
    started = time.perf_counter()
    ids = torch.tensor(list(token_ids), dtype=torch.int32)
    device = embedding_weight(model).device
    # without a config: with one, sliding layers would keep only their window, chunk by chunk
    cache = DynamicCache()
    try:
        for first in range(0, len(ids), chunk_tokens):
            chunk = ids[first : first + chunk_tokens].to(device=device, dtype=torch.long)[None]
            positions = torch.arange(first, first + chunk.shape[1], device=device)[None]
            with exclusively(model), _no_grad():
                model(input_ids=chunk, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
            yield "prefill", first + chunk.shape[1], len(ids)
        prefilled = time.perf_counter()
        windows = layer_windows(model.config)
        layers: list[EncodedKV] = []
        dense_layers: list[Any] = list(cache.layers)
        dense = sum(tensor_bytes(layer.keys, layer.values) for layer in dense_layers)
        peak = dense
        for index, (layer, window) in enumerate(zip(dense_layers, windows, strict=True)):
            # a token after the segment sees keys at positions > query - window, so window - 1 of the segment's
            start = 0 if window is None else max(0, len(ids) - (window - 1))
            with _no_grad():
                keys, values = layer.keys[0, :, start:], layer.values[0, :, start:]
                try:
                    layers.append(codec.encode(keys, values, torch.arange(start, len(ids))))
                except ValueError as error:
                    raise PolyKVError(f"layer {index} cannot be stored with codec {codec.name!r}: {error}") from error
            peak = max(peak, dense + sum(encoded.nbytes for encoded in layers))
            dense -= tensor_bytes(layer.keys, layer.values)
            del keys, values
            layer.reset()
            yield "encode", index + 1, len(windows)
    finally:
        cache.reset()
    report = BuildReport(time.perf_counter() - started, prefilled - started, peak)
    identity_hex = segment_identity(identity, [int(i) for i in ids])
    return KVSegment(identity_hex, identity, codec.name, ids, tuple(layers), report)
