"""``paper``: the scheme of arXiv 2604.24971 as published, but really packed.

Keys: ``s = max|K| / 127`` over the whole layer tensor, ``q = round(K / s)`` in int8. Values: ``v / ||v||`` through the
orthonormal Walsh-Hadamard transform, times ``sqrt(D)``, each coordinate to the nearest of the eight Lloyd-Max levels,
and the norm. The paper's own code spends a byte on every 3-bit code and four on every norm; here they take three bits
and two bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from polykv.codecs.base import PackedCodec
from polykv_kernels import EncodedKV, ops


class PaperCodec(PackedCodec):
    """int8 keys with one scale a layer, 3-bit rotated values without signs or norm correction."""

    name: ClassVar[str] = "paper"

    def encode(
        self, keys: Tensor, values: Tensor, positions: Tensor, stats: Mapping[str, Tensor] | None = None
    ) -> EncodedKV:
        """See :meth:`Codec.encode`."""
        heads, tokens, head_dim = keys.shape
        packed_keys = ops.encode_keys_int8(keys, per_tensor=True)
        packed_values = ops.encode_values_lloyd3(values, sign_seed=None, least_squares=False)
        return EncodedKV(int(positions[0]), tokens, heads, head_dim, keys.dtype, None, packed_keys, packed_values)
