"""Attention of stacked queries over one packed segment, split over its tokens.

The grid is (KV heads, splits, row blocks). A program dequantises each of its 64-token tiles once for all the rows of
its block, multiplies in float16 with float32 sums, and keeps an online softmax (FlashAttention-2, arXiv 2307.08691) in
base two. Partial results over splits are joined by a second kernel, as in FlashDecoding.

What keeps float16 products as good as the formats they come from:

* A query row is divided by a power of two, which is exact, so that its largest element is in [1, 2); the scores are
  multiplied back in float32. float16 and bfloat16 queries lose nothing by it, but what lies 2 ** -24 below the largest.
* int8 codes are exact in float16. Channel scales go into the query, not into the keys, and the product is split into a
  high and a low float16 part, hence two dots: scores have float32's precision, which large logits need.
* The eight levels times 1250 / 1024 are float16 numbers exactly, so the codebook is not rounded either.
* A token's value scale goes into its probability, which is divided by a power of two kept per row.

What remains is the rounding of probabilities to float16, 2 ** -12 each. The maximum that they are relative to is
rounded up to an integer, so they round alike in any tile and split: how many rows or splits there are does not change
a row's result beyond float32's rounding.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from polykv_kernels.layouts import LLOYD_MAX_3BIT, TILE_SIZE, EncodedKV
from polykv_kernels.triton.merge import merge_splits
from polykv_kernels.triton.tiles import Tile, default_table, device_properties
from polykv_kernels.triton.transforms import power_of_two

_LEVEL_UNIT = 1250 / 1024


def _level_polynomial() -> list[float]:
    """Coefficients of the odd polynomial in ``code - 3.5`` through the eight levels, times ``_LEVEL_UNIT``.

    The codebook is symmetric, so four coefficients meet all eight levels: arithmetic in place of a table look-up.
    """
    x = torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.float64)
    powers = torch.stack([x, x**3, x**5, x**7], dim=1)
    levels = torch.tensor(LLOYD_MAX_3BIT[4:], dtype=torch.float64) * _LEVEL_UNIT
    return [float(c) for c in torch.linalg.solve(powers, levels)]


_C1, _C3, _C5, _C7 = (tl.constexpr(c) for c in _level_polynomial())
_INVERSE_LEVEL_UNIT = tl.constexpr(1 / _LEVEL_UNIT)
_TILE = tl.constexpr(TILE_SIZE)
_FAR = tl.constexpr(1 << 30)


@triton.jit
def _value_tile(codes_ptr, tokens, valid, BN: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Levels (times ``_LEVEL_UNIT``) of ``BN`` tokens of a tile: ``[BN, D]`` float16.

    32 codes are 96 bits, three aligned 32-bit words: they hold four groups of 24 bits, that is of eight codes.
    """
    chunk = tl.arange(0, D // 32)
    words_ptr = codes_ptr + tokens[:, None] * (D // 32 * 3) + chunk[None, :] * 3
    mask = valid[:, None] & (chunk[None, :] >= 0)
    w0 = tl.load(words_ptr, mask=mask, other=0)
    w1 = tl.load(words_ptr + 1, mask=mask, other=0)
    w2 = tl.load(words_ptr + 2, mask=mask, other=0)
    # the shift of a negative int32 drags its sign along, hence the masks
    g0 = w0
    g1 = ((w0 >> 24) & 0xFF) | (w1 << 8)
    g2 = ((w1 >> 16) & 0xFFFF) | (w2 << 16)
    g3 = w2 >> 8
    groups = tl.reshape(tl.join(tl.join(g0, g2), tl.join(g1, g3)), (BN, D // 8))
    shifts = 3 * tl.arange(0, 8)
    codes = (groups[:, :, None] >> shifts[None, None, :]) & 7
    x = tl.reshape(codes, (BN, D)).to(tl.float32) - 3.5
    y = x * x
    return (x * (_C1 + y * (_C3 + y * (_C5 + y * _C7)))).to(tl.float16)


@triton.jit
def _softmax_step(s, value_scale, m, sums, unit):  # type: ignore[no-untyped-def]
    """One online-softmax step.

    Args:
        s: scores of the tile in base two, float32 ``[BM, tokens]``; -inf where masked.
        value_scale: factor of each token's value, float32 ``[tokens]``.
        m: running maximum ``[BM]``, rounded up to an integer: factors between tiles and splits are then powers of two,
            so that the float16 weights round alike however the tokens are split.
        sums: running sum ``[BM]`` of ``exp2(s - m)``.
        unit: ``[BM]``, the power of two in whose units the rows of the accumulator are.

    Returns:
        The float16 weights ``[BM, tokens]`` in the new units, the factor for the accumulator, and new m, sums and unit.
    """
    new_m = tl.maximum(m, tl.ceil(tl.max(s, 1)))
    finite_m = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen no key yet
    p = tl.exp2(s - finite_m[:, None])
    alpha = tl.exp2(m - finite_m)
    sums = sums * alpha + tl.sum(p, 1)
    weights = p * value_scale[None, :]
    before = unit * alpha
    unit, inverse = power_of_two(tl.maximum(before, tl.max(weights, 1)))
    return (weights * inverse[:, None]).to(tl.float16), before * inverse, new_m, sums, unit


@triton.jit
def _masked(s, tokens, valid, oldest, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    if WINDOW:
        s = tl.where(valid[None, :] & (tokens[None, :] >= oldest[:, None]), s, float("-inf"))
    else:
        s = tl.where(valid[None, :], s, float("-inf"))
    return s


@triton.jit
def _float16_rows(x, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(float16 [ROWS, D], unit [ROWS])`` with ``x = float16 * unit``: bfloat16 and float32 exceed float16's range."""
    if x.dtype == tl.float16:
        unit = tl.full((ROWS,), 1.0, tl.float32)
        half = x
    else:
        wide = x.to(tl.float32)
        unit, inverse = power_of_two(tl.max(tl.abs(wide), 1))
        half = (wide * inverse[:, None]).to(tl.float16)
    return half, unit


@triton.jit(
    do_not_specialize=[
        *("rows", "group", "exact_tokens", "exact_splits", "exact_tiles_per_split"),
        *("packed_tokens", "packed_tiles_per_split", "start", "window"),
    ]
)
def attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    positions_ptr,
    exact_keys_ptr,
    exact_values_ptr,
    key_codes_ptr,
    key_scales_ptr,
    value_codes_ptr,
    value_scales_ptr,
    partial_ptr,
    stats_ptr,
    scale_log2,
    rows,
    group,
    exact_tokens,
    exact_splits,
    exact_tiles_per_split,
    packed_tokens,
    packed_tiles_per_split,
    start,
    window,
    stride_q_row,
    stride_q_head,
    stride_exact_keys_head,
    stride_exact_values_head,
    stride_key_codes_head,
    stride_key_scales_head,
    stride_value_codes_head,
    stride_value_scales_head,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
    EXACT: tl.constexpr,
    PACKED: tl.constexpr,
    PER_TENSOR: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One (KV head, split, row block): partial ``[BM, D]``, normalised, with its maximum (base two) and sum.

    Splits below ``exact_splits`` are over exact tokens, the others over packed ones, whose partial result stays in the
    rotated basis. Maximum and sum are stored apart, since their common logarithm would round with its size.
    """
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    stacked = rows * group
    row = tl.program_id(2) * BM + tl.arange(0, BM)  # of the stacked rows: query token times group, plus query head
    in_rows = row < stacked
    token_of_row = row // group
    channel = tl.arange(0, D)

    q_row_ptr = q_ptr + token_of_row.to(tl.int64) * stride_q_row + (head * group + row % group) * stride_q_head
    q = tl.load(q_row_ptr[:, None] + channel[None, :], mask=in_rows[:, None], other=0.0)
    q_wide = q.to(tl.float32)
    q_unit, q_inverse = power_of_two(tl.max(tl.abs(q_wide), 1))
    q_half = (q_wide * q_inverse[:, None]).to(tl.float16)

    # the oldest token that a row sees, counted from the segment's first; a window of w holds the query itself
    if WINDOW:
        position = tl.load(positions_ptr + token_of_row, mask=in_rows, other=0).to(tl.int64)
        oldest = tl.minimum(tl.maximum(position - window + 1 - start, 0), _FAR).to(tl.int32)
        oldest_of_block = tl.min(tl.where(in_rows, oldest, _FAR), 0)
    else:
        oldest = tl.zeros((BM,), tl.int32)
        oldest_of_block = 0

    m = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    unit = tl.full((BM,), 2.0**-126, tl.float32)
    acc = tl.zeros((BM, D), tl.float32)

    if EXACT:
        first = split * exact_tiles_per_split
        last = tl.minimum(first + exact_tiles_per_split, (exact_tokens + BE - 1) // BE)
        last = tl.where(split < exact_splits, last, first)  # no tile, if this split is over packed tokens
        keys_ptr = exact_keys_ptr + head * stride_exact_keys_head
        values_ptr = exact_values_ptr + head * stride_exact_values_head
        for tile in range(tl.maximum(first, oldest_of_block // BE), last):
            token = tile * BE + tl.arange(0, BE)
            valid = token < exact_tokens
            k = tl.load(keys_ptr + token[:, None] * D + channel[None, :], mask=valid[:, None], other=0.0)
            k_half, k_unit = _float16_rows(k, BE)
            s = tl.dot(q_half, tl.trans(k_half)) * q_unit[:, None]
            s = _masked(s * (k_unit * scale_log2)[None, :], token, valid, oldest, WINDOW)
            v = tl.load(
                values_ptr + token[:, None] * D + channel[None, :],
                mask=valid[:, None],
                other=0.0,
            )
            v_half, v_unit = _float16_rows(v, BE)
            weights, factor, m, sums, unit = _softmax_step(s, v_unit, m, sums, unit)
            acc = tl.dot(weights, v_half, acc * factor[:, None])

    if PACKED:
        first = (split - exact_splits) * packed_tiles_per_split
        last = tl.minimum(first + packed_tiles_per_split, (packed_tokens + _TILE - 1) // _TILE)
        # an exact split has a negative first tile, and last <= 0
        first = tl.maximum(first, tl.maximum(oldest_of_block - exact_tokens, 0) // _TILE)
        codes_ptr = key_codes_ptr + head * stride_key_codes_head
        scales_ptr = key_scales_ptr + head * stride_key_scales_head
        words_ptr = value_codes_ptr + head * stride_value_codes_head
        norms_ptr = value_scales_ptr + head * stride_value_scales_head
        if PER_TENSOR:
            key_scale = tl.load(key_scales_ptr)
        elif EXACT:
            # loaded anew, so that it need not be kept in registers past the exact tokens; volatile, or it would be
            again = tl.load(q_row_ptr[:, None] + channel[None, :], mask=in_rows[:, None], other=0.0, volatile=True)
            q_wide = again.to(tl.float32)
        for tile in range(first, last):
            if not PER_TENSOR:
                channel_scale = tl.load(scales_ptr + tile * D + channel).to(tl.float32)
                scaled = q_wide * channel_scale[None, :]
                s_unit, s_inverse = power_of_two(tl.max(tl.abs(scaled), 1))
                scaled = scaled * s_inverse[:, None]
                high = scaled.to(tl.float16)
                low = (scaled - high.to(tl.float32)).to(tl.float16)
            for part in range(_TILE // BN):
                in_tile = part * BN + tl.arange(0, BN)
                token = tile * _TILE + in_tile
                valid = token < packed_tokens
                codes = tl.load(codes_ptr + tile * (D * _TILE) + channel[:, None] * _TILE + in_tile[None, :])
                k_half = codes.to(tl.float16)
                if PER_TENSOR:
                    s = tl.dot(q_half, k_half) * q_unit[:, None] * (key_scale * scale_log2)
                else:
                    s = tl.dot(high, k_half, tl.dot(low, k_half)) * s_unit[:, None] * scale_log2
                s = _masked(s, token + exact_tokens, valid, oldest, WINDOW)
                v_half = _value_tile(words_ptr, token, valid, BN, D)
                v_scale = tl.load(norms_ptr + token, mask=valid, other=0.0).to(tl.float32)
                weights, factor, m, sums, unit = _softmax_step(s, v_scale, m, sums, unit)
                acc = tl.dot(weights, v_half, acc * factor[:, None])
        if split >= exact_splits:
            unit = unit * _INVERSE_LEVEL_UNIT

    # a row that saw nothing has acc 0 and stays 0; a NaN stays one
    out = acc * (unit / tl.where(sums == 0.0, 1.0, sums))[:, None]
    heads = tl.num_programs(0)
    slot = (split * heads + head) * stacked + row  # int64, as head is
    tl.store(partial_ptr + slot[:, None] * D + channel[None, :], out, mask=in_rows[:, None])
    tl.store(stats_ptr + slot * 2, m, mask=in_rows)
    tl.store(stats_ptr + slot * 2 + 1, sums, mask=in_rows)


def shared_attention(
    q: Tensor, encoded: EncodedKV, scale: float, *, q_positions: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.shared_attention`; q is float16 or bfloat16."""
    return attend(q, encoded, scale, q_positions=q_positions, window=window)


def attend(
    q: Tensor,
    encoded: EncodedKV,
    scale: float,
    *,
    q_positions: Tensor | None = None,
    window: int | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`shared_attention` with the choices of the tile table open, for tests and for the tuner.

    Args:
        q: ``[rows, Hq, D]`` float16 or bfloat16.
        encoded: one layer of the pool.
        scale: factor on the logits.
        q_positions: ``[rows]`` integer absolute positions; needed with ``window`` only.
        window: sliding window in tokens, or None.
        tile: tile instead of the table's.
        splits: number of splits over the packed tokens (at most one a tile; over the exact ones too) instead of the
            rule's.
        out_dtype: dtype of out instead of q's.

    Returns:
        ``out`` ``[rows, Hq, D]`` and ``lse`` ``[rows, Hq]`` float32, natural log.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads = encoded.num_kv_heads
    group = num_heads // num_kv_heads
    if q.stride(2) != 1:
        q = q.contiguous()
    architecture, processors = device_properties(q.device)
    table = default_table()
    tile = tile or table.tile(architecture, head_dim, rows * group)
    row_blocks = -(-rows * group // tile.block_m)

    def split(tokens: int, tile_size: int = TILE_SIZE) -> tuple[int, int]:
        """``(splits, tiles a split)`` such that no split is empty."""
        tiles = -(-tokens // tile_size)
        if tiles == 0:
            return 0, 0
        rule = table.splits[architecture]
        wanted = splits or rule.splits(tiles, num_kv_heads * row_blocks, processors)
        tiles_per_split = -(-tiles // min(wanted, tiles))
        return -(-tiles // tiles_per_split), tiles_per_split

    packed_tokens = encoded.num_tokens - encoded.num_exact
    exact_element = encoded.exact.keys.element_size() if encoded.exact is not None else q.element_size()
    exact_tile = exact_tile_size(packed_tokens > 0, head_dim, exact_element)
    exact_splits, exact_tiles_per_split = split(encoded.num_exact, exact_tile)
    packed_splits, packed_tiles_per_split = split(packed_tokens)
    all_splits = max(exact_splits + packed_splits, 1)  # one that sees nothing, if there are no tokens

    # unused pointers get some tensor of the device; the kernel's constants keep it from reading them
    exact_keys = exact_values = key_codes = key_scales = value_words = value_scales = q
    head_strides = [0] * 6  # all that layouts leave open: the other axes are contiguous
    if encoded.exact is not None:
        exact_keys, exact_values = encoded.exact.keys, encoded.exact.values
        head_strides[:2] = exact_keys.stride(0), exact_values.stride(0)
    if encoded.keys is not None and encoded.values is not None:
        key_codes, key_scales = encoded.keys.codes, encoded.keys.scales
        value_words, value_scales = _as_words(encoded.values.codes), encoded.values.scales
        head_strides[2:] = key_codes.stride(0), key_scales.stride(0), value_words.stride(0), value_scales.stride(0)
    positions = q
    if window is not None:
        assert q_positions is not None
        positions = q_positions.contiguous()

    partial = torch.empty((all_splits, num_kv_heads, rows * group, head_dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((all_splits, num_kv_heads, rows * group, 2), dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        attention_kernel[(num_kv_heads, all_splits, row_blocks)](
            q,
            positions,
            exact_keys,
            exact_values,
            key_codes,
            key_scales,
            value_words,
            value_scales,
            partial,
            stats,
            scale / math.log(2.0),
            rows,
            group,
            encoded.num_exact,
            exact_splits,
            exact_tiles_per_split,
            packed_tokens,
            packed_tiles_per_split,
            encoded.start,
            min(window, 2**31 - 1) if window is not None else 0,
            *q.stride()[:2],
            *head_strides,
            D=head_dim,
            BM=tile.block_m,
            BN=tile.block_n,
            BE=exact_tile,
            EXACT=exact_splits > 0,
            PACKED=packed_splits > 0,
            PER_TENSOR=encoded.keys is not None and encoded.keys.per_tensor,
            WINDOW=window is not None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )
    sign_seed = encoded.values.sign_seed if encoded.values is not None else None
    return merge_splits(partial, stats, exact_splits, sign_seed, rows, out_dtype or q.dtype)


def exact_tile_size(packed: bool, head_dim: int, element_size: int) -> int:
    """Exact tokens taken at a time.

    Few in front of packed ones, where there are few and registers are wanted elsewhere; else as many as make 16 KB of
    keys, for shared memory's sake.
    """
    return 16 if packed else min(TILE_SIZE, 16384 // (head_dim * element_size))


def _as_words(codes: Tensor) -> Tensor:
    """Packed codes ``[Hkv, T, 3 * D / 8]`` uint8 as int32 words, ``[Hkv, T, 3 * D / 32]``."""
    # the storage may lie anywhere, in a mapped file for example
    if codes.stride(0) % 4 or codes.storage_offset() % 4 or codes.data_ptr() % 4:
        codes = codes.clone(memory_format=torch.contiguous_format)
    return codes.view(torch.int32)
