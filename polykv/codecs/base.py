"""What a codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from polykv.errors import UnsupportedModelError
from polykv_kernels import EncodedKV, ops


class Codec(ABC):
    """How one layer's keys and values are stored in a segment.

    A codec is stateless: two codecs of one name store the same bytes for the same tensors.
    """

    name: ClassVar[str]

    @abstractmethod
    def encode(
        self, keys: Tensor, values: Tensor, positions: Tensor, stats: Mapping[str, Tensor] | None = None
    ) -> EncodedKV:
        """Packs one layer.

        Args:
            keys: ``[Hkv, T, D]``, the model's dtype, after RoPE.
            values: ``[Hkv, T, D]``.
            positions: ``[T]`` int64, consecutive absolute positions.
            stats: statistics of the layer's queries, for codecs that use them; the present ones do not.

        Returns:
            The stored form.

        Raises:
            ValueError: keys or values are not finite, or too large for the stored form.
        """

    def decode(self, encoded: EncodedKV) -> tuple[Tensor, Tensor]:
        """Keys and values ``[Hkv, T, D]`` as a reader sees them; for tests and tools."""
        return ops.decode(encoded)

    def nbytes(self, encoded: EncodedKV) -> int:
        """Bytes allocated, padding and scales included."""
        return encoded.nbytes

    def check_head_dim(self, head_dim: int) -> None:  # noqa: B027  (a codec without limits has nothing to refuse)
        """Refuses a head dim before any prefill is spent on it.

        Raises:
            UnsupportedModelError: the codec cannot store vectors of this length.
        """


class PackedCodec(Codec):
    """A codec with 3-bit values, whose Hadamard transform needs a head dim that is a multiple of 16."""

    def check_head_dim(self, head_dim: int) -> None:
        """See :meth:`Codec.check_head_dim`."""
        if head_dim % 16:
            raise UnsupportedModelError(
                f"codec {self.name!r} cannot store head_dim {head_dim}: it needs a multiple of 16. "
                "Use codec='exact' for this model."
            )
