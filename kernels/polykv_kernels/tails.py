"""The private keys and values of one step's requests: written and read in place, layer by layer.

A step's bookkeeping (whose rows, how many tokens each tail holds, where its memory is) is the same in every layer, so it is
laid out once, as FlashInfer's ``plan()`` does, and each layer pays for its arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayeredKV:
    """Room for the keys and values of one request in every layer.

    Attributes:
        keys: one ``[Hkv, capacity, D]`` tensor a layer, the model's dtype, last axis contiguous.
        values: the same for values, of the same shapes.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise ValueError(
                f"there must be keys and values of every layer, got {len(self.keys)} and {len(self.values)}"
            )
        first = self.keys[0]
        if first.ndim != 3 or not first.is_floating_point() or first.stride(-1) != 1:
            raise ValueError(
                f"keys must be floating-point [Hkv, capacity, D] with a contiguous last axis, got {first.dtype} "
                f"{list(first.shape)} with strides {list(first.stride())}"
            )
        # of equal layout in every layer: the kernels take the first layer's strides for all of them
        layout = (first.shape, first.stride(), first.dtype, first.device)
        for x in (*self.keys, *self.values):
            if (x.shape, x.stride(), x.dtype, x.device) != layout:
                raise ValueError(
                    f"the layers' keys and values must be laid out alike, got {list(first.shape)} {first.dtype} and "
                    f"{list(x.shape)} {x.dtype}"
                )

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return int(self.keys[0].shape[1])

    @cached_property
    def addresses(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """``[2, L]``: where each layer's keys and values are."""
        return np.array([[x.data_ptr() for x in self.keys], [x.data_ptr() for x in self.values]], dtype=np.uint64)


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """The tails of one step's requests.

    Attributes:
        tails: one a request.
        lengths: tokens that each tail holds before the step, the same in every layer.
        row_counts: new tokens of each request, which are its rows in the step.
        plan: a backend's own form of these, made by it at first use.
    """

    tails: Sequence[LayeredKV]
    lengths: Sequence[int]
    row_counts: Sequence[int]
    plan: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.tails or not len(self.tails) == len(self.lengths) == len(self.row_counts):
            raise ValueError(
                f"{len(self.tails)} tails, {len(self.lengths)} lengths and {len(self.row_counts)} row counts do not fit; "
                "there must be one of each a request, and at least one request"
            )
        first = self.tails[0].keys[0]
        for tail, length, rows in zip(self.tails, self.lengths, self.row_counts, strict=True):
            keys = tail.keys[0]
            if rows < 1 or length < 0 or length + rows > tail.capacity:
                raise ValueError(f"a tail with room for {tail.capacity} tokens cannot hold {length} + {rows}")
            if (keys.shape[0], keys.shape[2], keys.dtype, keys.device, len(tail.keys)) != (
                first.shape[0],
                first.shape[2],
                first.dtype,
                first.device,
                len(self.tails[0].keys),
            ):
                raise ValueError("the tails of a batch must have the same layers, KV heads, head dim, dtype and device")

    @property
    def num_rows(self) -> int:
        """Rows of all requests."""
        return sum(self.row_counts)

    def held(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Views of one layer's keys and values, each ``[Hkv, length + rows, D]``: the step's own tokens included."""
        ends = [length + rows for length, rows in zip(self.lengths, self.row_counts, strict=True)]
        keys = [tail.keys[layer][:, :end] for tail, end in zip(self.tails, ends, strict=True)]
        values = [tail.values[layer][:, :end] for tail, end in zip(self.tails, ends, strict=True)]
        return keys, values

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Puts the step's new keys and values, ``[rows, Hkv, D]`` each, at the ends of the tails (with torch)."""
        first = 0
        for tail, length, rows in zip(self.tails, self.lengths, self.row_counts, strict=True):
            with torch.no_grad():
                tail.keys[layer][:, length : length + rows] = keys[first : first + rows].transpose(0, 1)
                tail.values[layer][:, length : length + rows] = values[first : first + rows].transpose(0, 1)
            first += rows
