"""``exact``: keys and values as the model made them. The oracle of every test; shared, but not compressed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from polykv.codecs.base import Codec
from polykv_kernels import EncodedKV, ops


class ExactCodec(Codec):
    """Stores the model's dtype unchanged."""

    name: ClassVar[str] = "exact"

    def encode(
        self, keys: Tensor, values: Tensor, positions: Tensor, stats: Mapping[str, Tensor] | None = None
    ) -> EncodedKV:
        """See :meth:`Codec.encode`."""
        return ops.store_exact(keys, values, int(positions[0]))
