"""A request's private tail: the exact keys and values of its own tokens, in all layers, in storage that is reserved ahead."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from polykv.models.support import embedding_weight, head_dim, num_kv_heads
from polykv_kernels import LayeredKV
from polykv_kernels.layouts import tensor_bytes

BUCKET_TOKENS = 16
GROWTH = 1.25
"""Capacities are multiples of 16 tokens, each at least a quarter above the one before: a token is copied five times at most
on average in the life of a tail, and the slack stays below a quarter of what is held, plus a bucket."""


def bucket(tokens: int, limit: int | None = None) -> int:
    """Capacity for ``tokens``, at most ``limit``: whole buckets, but no more than the limit."""
    capacity = -(-tokens // BUCKET_TOKENS) * BUCKET_TOKENS
    return capacity if limit is None else min(capacity, limit)


class Tail:
    """Keys and values of one request, ``[Hkv, capacity, D]`` in each layer.

    A forward reserves room, writes behind the tokens held, and :meth:`commit` counts them in only when it succeeded: a forward
    that failed leaves nothing to undo.

    Args:
        model: decides layers, KV heads, head dim, dtype and device.
        limit: tokens that it will hold at most, or None.
        by_layer: separate storage for each layer, so that layers can be dropped one by one (:meth:`take_layers`).

    Attributes:
        length: tokens held.
        nbytes: bytes allocated.
    """

    def __init__(self, model: PreTrainedModel, *, limit: int | None = None, by_layer: bool = False) -> None:
        config, weight = model.config, embedding_weight(model)
        self.num_layers = int(config.num_hidden_layers)
        self.length = 0
        self._heads, self._head_dim = num_kv_heads(config), head_dim(config)
        self._dtype, self._device = weight.dtype, weight.device
        self._limit = limit
        self._by_layer = by_layer
        self._room: LayeredKV | None = None
        self.nbytes = 0

    @property
    def room(self) -> LayeredKV:
        """The storage; after :meth:`reserve` only."""
        assert self._room is not None
        return self._room

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self._room.capacity if self._room is not None else 0

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` in all, moving what is held to a larger bucket if need be.

        Raises:
            MemoryError: the storage cannot be allocated; what is held stays.
        """
        if tokens <= self.capacity:
            return
        assert self._limit is None or tokens <= self._limit
        wanted = max(tokens, int(self.capacity * GROWTH))
        try:
            grown = self._allocate(bucket(wanted, self._limit))
        except RuntimeError as error:  # torch's allocators know no MemoryError
            raise MemoryError(
                f"no memory for a private tail of {tokens} tokens; run fewer requests at once (max_batch) or shorter ones"
            ) from error
        if self._room is not None and self.length:
            for new, old in zip((*grown.keys, *grown.values), (*self._room.keys, *self._room.values), strict=True):
                new[:, : self.length] = old[:, : self.length]
        self._room = grown
        self.nbytes = tensor_bytes(*grown.keys, *grown.values)

    def _allocate(self, capacity: int) -> LayeredKV:
        # ordinary tensors, whatever mode the caller is in: a segment may be made of them
        with torch.inference_mode(False):
            shape = (2, self._heads, capacity, self._head_dim)
            options = {"dtype": self._dtype, "device": self._device}
            if self._by_layer:
                layers = [torch.empty(shape, **options) for _ in range(self.num_layers)]  # type: ignore[call-overload]
            else:
                layers = list(torch.empty((self.num_layers, *shape), **options))  # type: ignore[call-overload]
        return LayeredKV(tuple(layer[0] for layer in layers), tuple(layer[1] for layer in layers))

    def commit(self, tokens: int) -> None:
        """Counts ``tokens`` that a forward has written."""
        assert self.length + tokens <= self.capacity
        self.length += tokens

    def rewind(self, tokens: int) -> None:
        """Forgets all but the first ``tokens`` tokens."""
        assert tokens <= self.length
        self.length = tokens

    def held(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every layer's keys and values, each ``[Hkv, length, D]``: views of the storage."""
        return [
            (keys[:, : self.length], values[:, : self.length])
            for keys, values in zip(self.room.keys, self.room.values, strict=True)
        ]

    def take_layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Hands over every layer's keys and values, each ``[Hkv, length, D]``, and forgets them."""
        layers = self.held()
        self.release()
        return layers

    def release(self) -> None:
        """Frees the storage."""
        self.length = self.nbytes = 0
        self._room = None
