"""Kernels in C++ for the CPU, called through ctypes, which releases the GIL for the call.

``polykv_cpu.cpp`` is the library, ``loader.py`` finds or compiles it, ``build.py`` holds the compiler call, and
``backend.py`` the functions with the signatures of :mod:`polykv_kernels.reference`.
"""

from polykv_kernels.cpu.backend import (
    append_to_tails,
    describe,
    encode_keys_int8,
    encode_values_lloyd3,
    linear,
    merge_attention_states,
    ragged_attention,
    shared_attention,
    supports,
    supports_linear,
    tail_attention,
    unavailable_reason,
    use_isa,
)

__all__ = [
    "append_to_tails",
    "describe",
    "encode_keys_int8",
    "encode_values_lloyd3",
    "linear",
    "merge_attention_states",
    "ragged_attention",
    "shared_attention",
    "supports",
    "supports_linear",
    "tail_attention",
    "unavailable_reason",
    "use_isa",
]
