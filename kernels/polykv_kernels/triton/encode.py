"""Encoders: int8 keys by tile, rotated 3-bit values."""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from polykv_kernels.layouts import LLOYD_MAX_3BIT, TILE_SIZE, Int8Keys, LloydMax3Values
from polykv_kernels.reference import key_too_large, value_too_long
from polykv_kernels.triton.transforms import device_signs, hadamard

_TILE = tl.constexpr(TILE_SIZE)
_ROUND = tl.constexpr(1.5 * 2**23)
_THRESHOLDS = tl.constexpr(tuple((a + b) / 2 for a, b in itertools.pairwise(LLOYD_MAX_3BIT)))
_LEVELS = tl.constexpr(LLOYD_MAX_3BIT)

CHANNELS = 64
"""Channels of one program of the key encoder."""

TOKENS = 16
"""Tokens of one program of the value encoder."""


@triton.jit
def _float16_not_below(x):  # type: ignore[no-untyped-def]
    """Float16 rounded up, for ``x >= 0``, as in the reference: the next float16 has the next bit pattern."""
    half = x.to(tl.float16)
    up = (half.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    return tl.where(half.to(tl.float32) < x, up, half)


@triton.jit(do_not_specialize=["tokens"])
def encode_keys_kernel(  # type: ignore[no-untyped-def]
    keys_ptr,
    largest_ptr,
    codes_ptr,
    scales_ptr,
    tokens,
    stride_head,
    stride_token,
    D: tl.constexpr,
    BC: tl.constexpr,
    PER_TENSOR: tl.constexpr,
):
    """One (tile, head, ``BC`` channels): scales and codes, channel-major.

    Divisions are IEEE ones: a step that is off by one unit in the last place gives other codes than the reference's.
    """
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * BC + tl.arange(0, BC)
    lane = tl.arange(0, _TILE)
    token = tile * _TILE + lane
    k = tl.load(
        keys_ptr + head * stride_head + token[:, None] * stride_token + channel[None, :],
        mask=token[:, None] < tokens,
        other=0.0,
    ).to(tl.float32)
    at = (head * tl.num_programs(0) + tile) * D + channel
    if PER_TENSOR:
        step = tl.zeros((BC,), tl.float32) + tl.div_rn(tl.load(largest_ptr).to(tl.float32), 127.0)
        # every program has the same step, and writes it: cheaper than a launch of its own
        tl.store(scales_ptr + tl.zeros((BC,), tl.int32), step)
    else:
        largest = tl.max(tl.abs(k), 0)
        half = _float16_not_below(tl.div_rn(largest, tl.full((BC,), 127.0, tl.float32)))
        tl.store(scales_ptr + at, half)
        step = half.to(tl.float32)
    usable = step > 0.0
    x = tl.div_rn(k, tl.where(usable, step, 1.0)[None, :] + tl.zeros((_TILE, BC), tl.float32))
    # adding and subtracting 1.5 * 2 ** 23 rounds to an integer, ties to even
    codes = (tl.minimum(tl.maximum(x, -127.0), 127.0) + _ROUND) - _ROUND
    codes = tl.where(usable[None, :], codes, 0.0).to(tl.int8)
    tl.store(codes_ptr + at[:, None] * _TILE + lane[None, :], tl.trans(codes))


def encode_keys_int8(keys: Tensor, *, per_tensor: bool) -> Int8Keys:
    """See :func:`polykv_kernels.ops.encode_keys_int8`; float16, bfloat16 or float32 keys."""
    heads, tokens, head_dim = keys.shape
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    n_tiles = -(-tokens // TILE_SIZE)
    codes = torch.empty((heads, n_tiles, head_dim, TILE_SIZE), dtype=torch.int8, device=keys.device)
    if per_tensor:
        lowest, highest = torch.aminmax(keys)
        largest = torch.maximum(-lowest, highest)
        scales = torch.empty(1, dtype=torch.float32, device=keys.device)
    else:
        largest = keys
        scales = torch.empty((heads, n_tiles, head_dim), dtype=torch.float16, device=keys.device)
    with torch.cuda.device_of(keys):
        encode_keys_kernel[(n_tiles, heads, head_dim // CHANNELS)](
            keys,
            largest,
            codes,
            scales,
            tokens,
            *keys.stride()[:2],
            D=head_dim,
            BC=CHANNELS,
            PER_TENSOR=per_tensor,
            num_warps=4,
            enable_fp_fusion=True,
        )
    if not per_tensor and not torch.isfinite(scales).all():
        raise key_too_large(keys)
    return Int8Keys(codes, scales, tokens)


@triton.jit(do_not_specialize=["tokens"])
def encode_values_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    signs_ptr,
    codes_ptr,
    scales_ptr,
    tokens,
    stride_head,
    stride_token,
    D: tl.constexpr,
    LOG2_D: tl.constexpr,
    BT: tl.constexpr,
    SIGNS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
):
    """``BT`` tokens of a head: signs, rotation, nearest levels, scale, packing. All in float32."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    valid = token < tokens
    channel = tl.arange(0, D)
    v = tl.load(
        values_ptr + head * stride_head + token.to(tl.int64)[:, None] * stride_token + channel[None, :],
        mask=valid[:, None],
        other=0.0,
    ).to(tl.float32)
    rms = tl.sqrt_rn(tl.sum(v * v, 1)) * (1.0 / D**0.5)
    if SIGNS:
        v = v * tl.load(signs_ptr + channel)[None, :]
    z = hadamard(v, BT, D, LOG2_D) * (1.0 / D**0.5)
    usable = rms > 0.0
    z = tl.div_rn(z, tl.where(usable, rms, 1.0)[:, None] + tl.zeros((BT, D), tl.float32))
    z = tl.where(usable[:, None], z, 0.0)
    codes = tl.zeros((BT, D), tl.int32)
    chosen = tl.full((BT, D), _LEVELS[0], tl.float32)
    for i in tl.static_range(7):
        above = z > _THRESHOLDS[i]
        codes += above.to(tl.int32)
        chosen = tl.where(above, _LEVELS[i + 1], chosen)
    scale = rms
    if LEAST_SQUARES:
        scale = tl.div_rn(rms * tl.sum(z * chosen, 1), tl.sum(chosen * chosen, 1))
    row = head * tokens + token
    tl.store(scales_ptr + row, scale.to(tl.float16), mask=valid)

    shifts = 3 * tl.arange(0, 8)
    words = tl.sum(tl.reshape(codes, (BT, D // 8, 8)) << shifts[None, None, :], 2)  # the fields are disjoint
    group = tl.arange(0, D // 8)
    at = codes_ptr + row[:, None] * (D // 8 * 3) + group[None, :] * 3
    mask = valid[:, None] & (group[None, :] >= 0)
    tl.store(at, (words & 0xFF).to(tl.uint8), mask=mask)
    tl.store(at + 1, ((words >> 8) & 0xFF).to(tl.uint8), mask=mask)
    tl.store(at + 2, ((words >> 16) & 0xFF).to(tl.uint8), mask=mask)


def encode_values_lloyd3(values: Tensor, *, sign_seed: int | None, least_squares: bool) -> LloydMax3Values:
    """See :func:`polykv_kernels.ops.encode_values_lloyd3`; float16, bfloat16 or float32 values."""
    heads, tokens, head_dim = values.shape
    if values.stride(2) != 1:
        values = values.contiguous()
    codes = torch.empty((heads, tokens, head_dim // 8 * 3), dtype=torch.uint8, device=values.device)
    scales = torch.empty((heads, tokens), dtype=torch.float16, device=values.device)
    with torch.cuda.device_of(values):
        encode_values_kernel[(-(-tokens // TOKENS), heads)](
            values,
            values if sign_seed is None else device_signs(sign_seed, head_dim, values.device),
            codes,
            scales,
            tokens,
            *values.stride()[:2],
            D=head_dim,
            LOG2_D=head_dim.bit_length() - 1,
            BT=TOKENS,
            SIGNS=sign_seed is not None,
            LEAST_SQUARES=least_squares,
            num_warps=4,
            enable_fp_fusion=True,
        )
    if not torch.isfinite(scales).all():
        raise value_too_long(values)
    return LloydMax3Values(codes, scales, sign_seed)
