"""Joins partial attentions: of the splits of one segment, and of several segments and tails."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from polykv_kernels.triton.transforms import device_signs, hadamard

_LN2 = tl.constexpr(math.log(2.0))

MERGE_ROWS = 8
"""Rows of one program of either kernel: enough to fill a warp's lanes, few enough to occupy the GPU."""

MAX_STATES = 4
"""States that one launch joins; more are joined in rounds."""


@triton.jit(do_not_specialize=["rows", "group", "num_kv_heads", "exact_splits", "splits"])
def merge_splits_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    stats_ptr,
    signs_ptr,
    out_ptr,
    lse_ptr,
    rows,
    group,
    num_kv_heads,
    exact_splits,
    splits,
    D: tl.constexpr,
    LOG2_D: tl.constexpr,
    BR: tl.constexpr,
    SIGNS: tl.constexpr,
):
    """``BR`` rows of ``[rows * Hq]``: sums the splits by their maxima and leaves the rotated basis once a row."""
    num_heads = num_kv_heads * group
    out_row = tl.program_id(0) * BR + tl.arange(0, BR)
    valid = out_row < rows * num_heads
    head = (out_row % num_heads) // group
    stacked_row = (out_row // num_heads) * group + out_row % group
    slot = head.to(tl.int64) * (rows * group) + stacked_row
    stride_split = num_heads.to(tl.int64) * rows
    channel = tl.arange(0, D)

    m = tl.full((BR,), float("-inf"), tl.float32)
    for split in range(0, splits):
        m = tl.maximum(m, tl.load(stats_ptr + (split * stride_split + slot) * 2, mask=valid, other=float("-inf")))
    finite_m = tl.where(m == float("-inf"), 0.0, m)

    total = tl.zeros((BR,), tl.float32)
    plain = tl.zeros((BR, D), tl.float32)
    for split in range(0, exact_splits):
        at = split * stride_split + slot
        split_m = tl.load(stats_ptr + at * 2, mask=valid, other=float("-inf"))
        weight = tl.exp2(split_m - finite_m) * tl.load(stats_ptr + at * 2 + 1, mask=valid, other=0.0)
        part = tl.load(partial_ptr + at[:, None] * D + channel[None, :], mask=valid[:, None], other=0.0)
        total += weight
        plain += part * weight[:, None]
    rotated = tl.zeros((BR, D), tl.float32)
    for split in range(exact_splits, splits):
        at = split * stride_split + slot
        split_m = tl.load(stats_ptr + at * 2, mask=valid, other=float("-inf"))
        weight = tl.exp2(split_m - finite_m) * tl.load(stats_ptr + at * 2 + 1, mask=valid, other=0.0)
        part = tl.load(partial_ptr + at[:, None] * D + channel[None, :], mask=valid[:, None], other=0.0)
        total += weight
        rotated += part * weight[:, None]

    if exact_splits < splits:
        rotated = hadamard(rotated, BR, D, LOG2_D) * (1.0 / D**0.5)
        if SIGNS:
            rotated = rotated * tl.load(signs_ptr + channel)[None, :]
    # a row that no split saw is 0 and stays 0; a NaN stays one
    out = (plain + rotated) / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_row.to(tl.int64)[:, None] * D + channel[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])
    tl.store(lse_ptr + out_row, (m + tl.log2(total)) * _LN2, mask=valid)


def merge_splits(
    partial: Tensor, stats: Tensor, exact_splits: int, sign_seed: int | None, rows: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Joins what the attention kernel left.

    Args:
        partial: ``[splits, Hkv, rows * G, D]`` float32, normalised within each split.
        stats: ``[splits, Hkv, rows * G, 2]`` float32, maximum (base two) and sum.
        exact_splits: how many of the first splits are in the plain basis; the others are rotated.
        sign_seed: seed of the signs of the rotation, or None.
        rows: query tokens.
        out_dtype: dtype of out.

    Returns:
        ``out`` ``[rows, Hq, D]`` and ``lse`` ``[rows, Hq]`` float32.
    """
    splits, num_kv_heads, stacked, head_dim = partial.shape
    num_heads = num_kv_heads * (stacked // rows)
    out = torch.empty((rows, num_heads, head_dim), dtype=out_dtype, device=partial.device)
    lse = torch.empty((rows, num_heads), dtype=torch.float32, device=partial.device)
    signs = partial if sign_seed is None else device_signs(sign_seed, head_dim, partial.device)
    with torch.cuda.device_of(partial):
        merge_splits_kernel[(-(-rows * num_heads // MERGE_ROWS),)](
            partial,
            stats,
            signs,
            out,
            lse,
            rows,
            stacked // rows,
            num_kv_heads,
            exact_splits,
            splits,
            D=head_dim,
            LOG2_D=head_dim.bit_length() - 1,
            BR=MERGE_ROWS,
            SIGNS=sign_seed is not None,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out, lse


@triton.jit
def _add_state(out_ptr, lse_ptr, row, valid, channel, in_d, largest, D, total, merged):  # type: ignore[no-untyped-def]
    weight = tl.exp(tl.load(lse_ptr + row, mask=valid, other=float("-inf")) - largest)
    at = row[:, None] * D + channel[None, :]
    out = tl.load(out_ptr + at, mask=valid[:, None] & in_d[None, :], other=0.0).to(tl.float32)
    return total + weight, merged + out * weight[:, None]


@triton.jit(do_not_specialize=["rows"])
def merge_states_kernel(  # type: ignore[no-untyped-def]
    out0_ptr,
    out1_ptr,
    out2_ptr,
    out3_ptr,
    lse0_ptr,
    lse1_ptr,
    lse2_ptr,
    lse3_ptr,
    out_ptr,
    lse_ptr,
    rows,
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    STATES: tl.constexpr,
):
    """``BR`` rows: ``out = sum_i out_i exp(lse_i - lse)`` over two to four states (arXiv 2307.08691, section 3.1)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    valid = row < rows
    channel = tl.arange(0, BD)
    in_d = channel < D
    nothing = float("-inf")
    largest = tl.maximum(
        tl.load(lse0_ptr + row, mask=valid, other=nothing), tl.load(lse1_ptr + row, mask=valid, other=nothing)
    )
    if STATES > 2:
        largest = tl.maximum(largest, tl.load(lse2_ptr + row, mask=valid, other=nothing))
    if STATES > 3:
        largest = tl.maximum(largest, tl.load(lse3_ptr + row, mask=valid, other=nothing))
    finite = tl.where(largest == nothing, 0.0, largest)
    total = tl.zeros((BR,), tl.float32)
    merged = tl.zeros((BR, BD), tl.float32)
    total, merged = _add_state(out0_ptr, lse0_ptr, row, valid, channel, in_d, finite, D, total, merged)
    total, merged = _add_state(out1_ptr, lse1_ptr, row, valid, channel, in_d, finite, D, total, merged)
    if STATES > 2:
        total, merged = _add_state(out2_ptr, lse2_ptr, row, valid, channel, in_d, finite, D, total, merged)
    if STATES > 3:
        total, merged = _add_state(out3_ptr, lse3_ptr, row, valid, channel, in_d, finite, D, total, merged)
    # weights that are divided by their own sum stay exact where exp(lse_i - lse) would round with the size of lse
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    at = row[:, None] * D + channel[None, :]
    tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), mask=valid[:, None] & in_d[None, :])
    tl.store(lse_ptr + row, largest + tl.log(total), mask=valid)


def merge_attention_states(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.merge_attention_states`.

    Raises:
        TypeError: a state is float64, in which these kernels do not compute.
    """
    for out, lse in states:
        if torch.float64 in (out.dtype, lse.dtype):
            raise TypeError("the Triton merge computes in float32 and takes no float64 states")
    if len(states) == 1:
        return states[0]
    dtype = states[0][0].dtype
    pending = list(states)
    while len(pending) > 1:
        joined, pending = pending[:MAX_STATES], pending[MAX_STATES:]
        # what is joined again stays in float32
        pending.append(_merge_few(joined, torch.float32 if pending else dtype))
    return pending[0]


def _merge_few(states: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    outs = [out.contiguous() for out, _ in states]
    lses = [lse.float().contiguous() for _, lse in states]
    out, lse = torch.empty_like(outs[0], dtype=dtype), torch.empty_like(lses[0])
    rows, head_dim = lse.numel(), outs[0].shape[-1]
    if out.numel() == 0:
        return out, lse
    unused = MAX_STATES - len(states)
    with torch.cuda.device_of(out):
        merge_states_kernel[(-(-rows // MERGE_ROWS),)](
            *outs,
            *outs[:1] * unused,
            *lses,
            *lses[:1] * unused,
            out,
            lse,
            rows,
            D=head_dim,
            BD=triton.next_power_of_2(head_dim),
            BR=MERGE_ROWS,
            STATES=len(states),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out, lse
