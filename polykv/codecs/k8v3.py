"""``k8v3``: int8 keys with a scale per channel and tile, 3-bit rotated values, the first token exact.

What changed against ``paper``, and why:

* a key scale per channel and 64-token tile: one outlier channel no longer sets the step of every head;
* the first token stays exact: it is the attention sink, and much of the quality loss comes from quantising it;
* random signs before the Hadamard transform: structured vectors (a constant one, say) would concentrate in one
  coordinate and clip;
* a least-squares scale instead of the norm: free at decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from polykv.codecs.base import PackedCodec
from polykv_kernels import EncodedKV, ops

SIGN_SEED = 20260424
"""Seed of the value signs. Part of the stored format: changing it orphans every stored pool."""


class K8V3Codec(PackedCodec):
    """8.25 bits a key element, 3.25 bits a value element at head_dim 64."""

    name: ClassVar[str] = "k8v3"

    def encode(
        self, keys: Tensor, values: Tensor, positions: Tensor, stats: Mapping[str, Tensor] | None = None
    ) -> EncodedKV:
        """See :meth:`Codec.encode`."""
        heads, tokens, head_dim = keys.shape
        start = int(positions[0])
        num_exact = 1 if start == 0 else 0
        if tokens == num_exact:
            return ops.store_exact(keys, values, start)
        exact = ops.exact_tokens(keys[:, :1], values[:, :1]) if num_exact else None
        packed_keys = ops.encode_keys_int8(keys[:, num_exact:])
        packed_values = ops.encode_values_lloyd3(values[:, num_exact:], sign_seed=SIGN_SEED)
        return EncodedKV(start, tokens, heads, head_dim, keys.dtype, exact, packed_keys, packed_values)
