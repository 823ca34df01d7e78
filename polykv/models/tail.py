"""A private tail: the exact keys and values of one reader's own tokens in one layer."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

MIN_GROWTH_TOKENS = 4
GROWTH_DIVISOR = 16
"""A decode step that finds no room grows the tail by a sixteenth: 6 % of slack, 16 copied tokens a token."""


class TailLayer(CacheLayerMixin):
    """Grows in small steps, so that its allocation stays within a few per cent of what it holds.

    Attributes:
        prefix_length: tokens of the pool that precede the tail; they count as seen, but are not held here.
        keys: ``[B, Hkv, T, D]`` view of the tokens held, or None before the first update.
        values: the same for values.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, prefix_length: int = 0) -> None:
        super().__init__()
        self.prefix_length = prefix_length
        self.length = 0
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates room for exactly the tokens of the first update."""
        self._key_buffer = torch.empty_like(key_states, memory_format=torch.contiguous_format)
        self._value_buffer = torch.empty_like(value_states, memory_format=torch.contiguous_format)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends ``[B, Hkv, t, D]`` keys and values and returns all that are held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self._reserve(end, exactly=key_states.shape[-2] > 1)
        assert self._key_buffer is not None and self._value_buffer is not None
        self._key_buffer[:, :, self.length : end] = key_states
        self._value_buffer[:, :, self.length : end] = value_states
        self._set_length(end)
        return self.held()

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, Hkv, T, D]`` of the tokens held; after the first update only."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _reserve(self, tokens: int, *, exactly: bool) -> None:
        assert self._key_buffer is not None and self._value_buffer is not None
        if tokens <= self._key_buffer.shape[2]:
            return
        capacity = tokens if exactly else tokens - 1 + max(MIN_GROWTH_TOKENS, tokens // GROWTH_DIVISOR)
        self._key_buffer = self._grown(self._key_buffer, capacity)
        self._value_buffer = self._grown(self._value_buffer, capacity)

    def _grown(self, buffer: Tensor, capacity: int) -> Tensor:
        batch, heads, _, head_dim = buffer.shape
        grown = buffer.new_empty((batch, heads, capacity, head_dim))
        grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def _set_length(self, length: int) -> None:
        self.length = length
        assert self._key_buffer is not None and self._value_buffer is not None
        self.keys = self._key_buffer[:, :, :length]
        self.values = self._value_buffer[:, :, :length]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        if self._key_buffer is None or self._value_buffer is None:
            return 0
        return self._key_buffer.untyped_storage().nbytes() + self._value_buffer.untyped_storage().nbytes()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys, pool included, that a mask must cover."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen, pool included."""
        return self.prefix_length + self.length

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def reset(self) -> None:
        """Drops the private tokens; the pool stays."""
        self.length = 0
        self.keys = self.values = self._key_buffer = self._value_buffer = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` private tokens (a forward that is undone).

        Raises:
            ValueError: positive, or more tokens than the tail holds; the pool itself is never cropped.
        """
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(
                f"crop({tokens_to_remove}): give a number from {-self.length} to 0, the private tokens to remove; "
                "tokens of the shared pool cannot be removed"
            )
        if tokens_to_remove:
            self._set_length(self.length + tokens_to_remove)

    def _take(self, indices: Tensor) -> None:
        if self._key_buffer is not None and self._value_buffer is not None:
            self._key_buffer = self._key_buffer.index_select(0, indices.to(self._key_buffer.device))
            self._value_buffer = self._value_buffer.index_select(0, indices.to(self._value_buffer.device))
            self._set_length(self.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Permutes the batch (beam search)."""
        self._take(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row of the batch."""
        if self._key_buffer is not None:
            self._take(torch.arange(self._key_buffer.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the given rows of the batch."""
        self._take(indices)
