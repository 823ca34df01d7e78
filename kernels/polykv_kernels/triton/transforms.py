"""Device functions that several kernels share."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from polykv_kernels.reference import random_signs


@triton.jit
def hadamard(x, ROWS: tl.constexpr, D: tl.constexpr, LOG2_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Walsh-Hadamard transform of ``[ROWS, D]`` float32, Sylvester's order, without the factor ``D ** -0.5``.

    Constant-geometry butterflies (Pease 1968): every stage adds and subtracts neighbours and moves that bit of the
    index to the top, so after log2(D) equal stages all bits are transformed and back in their places.
    """
    for _ in tl.static_range(LOG2_D):
        even, odd = tl.split(tl.reshape(x, (ROWS, D // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, D))
    return x


@triton.jit
def power_of_two(x):  # type: ignore[no-untyped-def]
    """``(u, 1 / u)`` with ``u`` the power of two next below float32 ``x >= 0``, kept within ``2 ** +-126``.

    Dividing by a power of two is exact, so it brings numbers into float16's range without rounding them.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@lru_cache(maxsize=32)
def device_signs(sign_seed: int, head_dim: int, device: torch.device) -> Tensor:
    """:func:`polykv_kernels.reference.random_signs` on a device: ``[D]`` float32."""
    return random_signs(sign_seed, head_dim).to(device)
