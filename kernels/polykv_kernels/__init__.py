"""Pure functions on tensors: how keys and values are packed, and attention on the packed form.

This package knows nothing of pools, models or agents. :mod:`polykv_kernels.layouts` names the
stored forms, :mod:`polykv_kernels.ops` holds the public operations, and
:mod:`polykv_kernels.reference` the torch implementation that every faster backend is tested against.
:func:`show_config` prints what runs here, and why.
"""

from polykv_kernels.config import config_report, show_config
from polykv_kernels.errors import BackendError
from polykv_kernels.layouts import TILE_SIZE, DenseKV, EncodedKV, Int8Keys, Int8Weights, LloydMax3Values
from polykv_kernels.tails import LayeredKV, RaggedBatch

__all__ = [
    "TILE_SIZE",
    "BackendError",
    "DenseKV",
    "EncodedKV",
    "Int8Keys",
    "Int8Weights",
    "LayeredKV",
    "LloydMax3Values",
    "RaggedBatch",
    "config_report",
    "show_config",
]
