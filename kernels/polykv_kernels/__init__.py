"""Pure functions on tensors: how keys and values are packed, and attention on the packed form.

This package knows nothing of pools, models or agents. :mod:`polykv_kernels.layouts` names the
stored forms, :mod:`polykv_kernels.ops` holds the public operations, and
:mod:`polykv_kernels.reference` the torch implementation that every faster backend is tested against.
"""

from polykv_kernels.layouts import TILE_SIZE, DenseKV, EncodedKV, Int8Keys, LloydMax3Values

__all__ = ["TILE_SIZE", "DenseKV", "EncodedKV", "Int8Keys", "LloydMax3Values"]
