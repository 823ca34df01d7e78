"""Torch implementation of every op: the oracle in float64, the portable backend in float32.

Attention walks the packed tokens in chunks of a few tiles, so no more than ``CHUNK_TOKENS`` tokens of one layer
are ever dense at once, however long the context is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from polykv_kernels.layouts import (
    LLOYD_MAX_3BIT,
    TILE_SIZE,
    WEIGHT_GROUP,
    EncodedKV,
    Int8Keys,
    Int8Weights,
    LloydMax3Values,
)

CHUNK_TOKENS = 8 * TILE_SIZE
"""Tokens dequantised at a time: large enough to amortise torch's call overhead, small enough to stay in cache."""

MIN_HADAMARD_BLOCK = 16
"""Smaller blocks leave the rotated coordinates too far from Gaussian for the Lloyd-Max levels."""


# ---------------------------------------------------------------------------------------------- transforms


def hadamard_block(head_dim: int) -> int:
    """Size of the Hadamard blocks for a head dim: its largest power-of-two divisor (80 gives 16, 96 gives 32).

    Raises:
        ValueError: the blocks would be smaller than 16, so head_dim is no multiple of 16.
    """
    block = head_dim & -head_dim
    if block < MIN_HADAMARD_BLOCK:
        raise ValueError(
            f"head_dim {head_dim} cannot be packed: the Hadamard transform needs a multiple of "
            f"{MIN_HADAMARD_BLOCK}. Use codec='exact' for this model."
        )
    return block


@lru_cache(maxsize=32)
def _hadamard_matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < block:  # Sylvester's construction
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return (matrix / math.sqrt(block)).to(dtype=dtype, device=device)


def hadamard_transform(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform over the last axis, in equal blocks; its own inverse.

    Args:
        x: ``[..., D]`` floating point.

    Returns:
        ``[..., D]``, same dtype.
    """
    head_dim = x.shape[-1]
    block = hadamard_block(head_dim)
    matrix = _hadamard_matrix(block, x.dtype, x.device)
    return (x.reshape(*x.shape[:-1], head_dim // block, block) @ matrix).reshape(x.shape)


@lru_cache(maxsize=32)
def random_signs(seed: int, head_dim: int) -> Tensor:
    """``[D]`` float32 of +1 and -1, a function of the seed and D alone.

    Drawn from SHA-256 and not from a torch generator, whose stream is not promised across releases: stored codes
    are only as lasting as the signs they were made with.
    """
    bits: list[int] = []
    counter = 0
    while len(bits) < head_dim:
        digest = hashlib.sha256(f"polykv/signs/{seed}/{head_dim}/{counter}".encode()).digest()
        bits.extend((byte >> shift) & 1 for byte in digest for shift in range(8))
        counter += 1
    return torch.tensor([1.0 if bit else -1.0 for bit in bits[:head_dim]])


def _apply_signs(x: Tensor, sign_seed: int | None) -> Tensor:
    if sign_seed is None:
        return x
    return x * random_signs(sign_seed, x.shape[-1]).to(device=x.device, dtype=x.dtype)


# --------------------------------------------------------------------------------------------------- packing


def pack_3bit(codes: Tensor) -> Tensor:
    """Packs eight 3-bit codes into three bytes, little endian.

    Args:
        codes: ``[..., n]`` integers in [0, 7], n a multiple of 8.

    Returns:
        ``[..., 3 * n / 8]`` uint8.
    """
    if codes.shape[-1] % 8:
        raise ValueError(f"the last axis must be a multiple of 8, got {codes.shape[-1]}")
    groups = codes.to(torch.int32).reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)
    words = torch.zeros(groups.shape[:-1], dtype=torch.int32, device=codes.device)
    for i in range(8):
        words |= groups[..., i] << (3 * i)
    packed = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16)], dim=-1)
    return packed.to(torch.uint8).reshape(*codes.shape[:-1], codes.shape[-1] // 8 * 3)


def unpack_3bit(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_3bit`: ``[..., 3 * m]`` uint8 to ``[..., 8 * m]`` uint8 codes."""
    if packed.shape[-1] % 3:
        raise ValueError(f"the last axis must be a multiple of 3, got {packed.shape[-1]}")
    groups = packed.to(torch.int32).reshape(*packed.shape[:-1], packed.shape[-1] // 3, 3)
    words = groups[..., 0] | (groups[..., 1] << 8) | (groups[..., 2] << 16)
    codes = torch.stack([(words >> (3 * i)) & 7 for i in range(8)], dim=-1)
    return codes.to(torch.uint8).reshape(*packed.shape[:-1], packed.shape[-1] // 3 * 8)


@lru_cache(maxsize=8)
def _four_level_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[4096, 4]``: the four levels of every 12-bit word. One gather then gives four values."""
    words = torch.arange(4096)
    levels = torch.tensor(LLOYD_MAX_3BIT, dtype=torch.float64)
    table = torch.stack([levels[(words >> (3 * i)) & 7] for i in range(4)], dim=-1)
    return table.to(dtype=dtype, device=device)


def _levels_of(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., 3 * m]`` uint8 to the ``[..., 8 * m]`` levels that its codes stand for."""
    low, mid, high = packed.reshape(*packed.shape[:-1], -1, 3).to(torch.int32).unbind(-1)
    words = torch.stack([low | ((mid & 15) << 8), (mid >> 4) | (high << 4)], dim=-1)
    levels = F.embedding(words, _four_level_table(dtype, packed.device))
    return levels.reshape(*packed.shape[:-1], -1)


# -------------------------------------------------------------------------------------------- encode / decode


def _float16_not_below(x: Tensor) -> Tensor:
    """Float16 rounded up, for ``x >= 0``: a step rounded down would clip the channel's largest key."""
    half = x.to(torch.float16)
    up = (half.view(torch.int16) + 1).view(torch.float16)  # the next float16: their bit patterns are in order
    return torch.where(half.float() < x, up, half)


def key_too_large(keys: Tensor) -> ValueError:
    """The error for keys whose float16 step would be infinite."""
    return ValueError(
        f"a key is too large for a float16 step: {float(keys.abs().max()):.3g}, limit {127 * 65504:.3g}. "
        "Use codec='exact' for this model."
    )


def value_too_long(values: Tensor) -> ValueError:
    """The error for values ``[Hkv, T, D]`` of which one has an infinite float16 scale."""
    rms = values.double().norm(dim=-1).max() / math.sqrt(values.shape[-1])
    return ValueError(
        f"a value vector is too long for a float16 scale: largest rms {float(rms):.3g}, limit 65504. "
        "Use codec='exact' for this model."
    )


def encode_keys_int8(keys: Tensor, *, per_tensor: bool) -> Int8Keys:
    """See :func:`polykv_kernels.ops.encode_keys_int8`."""
    heads, tokens, head_dim = keys.shape
    n_tiles = -(-tokens // TILE_SIZE)
    k = keys.float()
    if per_tensor:
        scales = (k.abs().amax() / 127.0).reshape(1)
        step = scales
    else:
        k = F.pad(k, (0, 0, 0, n_tiles * TILE_SIZE - tokens))
        tiles = k.view(heads, n_tiles, TILE_SIZE, head_dim).transpose(2, 3)  # [Hkv, n_tiles, D, 64]
        scales = _float16_not_below(tiles.abs().amax(dim=-1) / 127.0)
        if not torch.isfinite(scales).all():
            raise key_too_large(keys)
        step = scales.float()[..., None]
        codes = torch.where(step > 0, tiles / step, 0.0).round_().clamp_(-127, 127).to(torch.int8)
        return Int8Keys(codes.contiguous(), scales, tokens)
    codes = torch.where(step > 0, k / step, 0.0).round_().clamp_(-127, 127).to(torch.int8)
    codes = F.pad(codes, (0, 0, 0, n_tiles * TILE_SIZE - tokens))
    codes = codes.view(heads, n_tiles, TILE_SIZE, head_dim).transpose(2, 3).contiguous()
    return Int8Keys(codes, scales, tokens)


def decode_key_tiles(keys: Int8Keys, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Dequantises tiles ``first <= i < last``: ``[Hkv, D, (last - first) * 64]``, channel-major, padding included."""
    codes = keys.codes[:, first:last].to(dtype)  # [Hkv, n, D, 64]
    scales = keys.scales if keys.per_tensor else keys.scales[:, first:last, :, None]
    out = codes.mul_(scales.to(dtype))
    return out.permute(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1)


def encode_values_lloyd3(values: Tensor, *, sign_seed: int | None, least_squares: bool) -> LloydMax3Values:
    """See :func:`polykv_kernels.ops.encode_values_lloyd3`."""
    head_dim = values.shape[-1]
    v = values.float()
    rms = v.norm(dim=-1, keepdim=True) / math.sqrt(head_dim)  # [Hkv, T, 1]
    z = hadamard_transform(_apply_signs(v, sign_seed))
    z = torch.where(rms > 0, z / rms, 0.0)  # about N(0, 1)
    levels = torch.tensor(LLOYD_MAX_3BIT, dtype=torch.float32, device=v.device)
    thresholds = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(z, thresholds)
    scale = rms
    if least_squares:
        chosen = levels[codes]
        # argmin_a ||z - a * chosen||: costs nothing at decode, since it is folded into the stored scale
        scale = rms * (z * chosen).sum(-1, keepdim=True) / chosen.square().sum(-1, keepdim=True)
    scales = scale.squeeze(-1).to(torch.float16)
    if not torch.isfinite(scales).all():
        raise value_too_long(values)
    return LloydMax3Values(pack_3bit(codes), scales, sign_seed)


def _rotated_values(values: LloydMax3Values, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Scaled levels of tokens ``first <= t < last``, still in the rotated basis: ``[Hkv, last - first, D]``."""
    levels = _levels_of(values.codes[:, first:last], dtype)
    return levels.mul_(values.scales[:, first:last, None].to(dtype))


def unrotate_values(x: Tensor, sign_seed: int | None) -> Tensor:
    """Leaves the rotated basis: Hadamard, then signs. Linear, so it may follow the attention-weighted sum."""
    return _apply_signs(hadamard_transform(x), sign_seed)


def decode(encoded: EncodedKV, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.decode`."""
    dtype = dtype or encoded.dtype
    compute = torch.promote_types(dtype, torch.float32)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    if encoded.exact is not None:
        keys.append(encoded.exact.keys.to(compute))
        values.append(encoded.exact.values.to(compute))
    if encoded.keys is not None and encoded.values is not None:
        k = decode_key_tiles(encoded.keys, 0, encoded.keys.codes.shape[1], compute)
        keys.append(k[..., : encoded.keys.num_tokens].transpose(1, 2))
        v = _rotated_values(encoded.values, 0, encoded.values.num_tokens, compute)
        values.append(unrotate_values(v, encoded.values.sign_seed))
    return torch.cat(keys, dim=1).to(dtype), torch.cat(values, dim=1).to(dtype)


# ------------------------------------------------------------------------------------------------- attention


class _OnlineSoftmax:
    """Running maximum, normaliser and un-normalised output over chunks of keys (Milakov & Gimelshein 2018).

    Values may come in two bases, plain and rotated; each has its own accumulator under one common maximum and sum, so
    that no precision is lost in joining them by logarithms.
    """

    def __init__(self, q: Tensor) -> None:
        heads, rows, head_dim = q.shape
        self.max = q.new_full((heads, rows, 1), -math.inf)
        self.sum = q.new_zeros((heads, rows, 1))
        self._shape = (heads, rows, head_dim)
        self._accumulators: dict[bool, Tensor] = {}

    def add(self, scores: Tensor, values: Tensor, *, rotated: bool) -> None:
        """Adds a chunk: ``scores`` ``[Hkv, rows, t]`` (masked entries -inf), ``values`` ``[Hkv, t, D]``."""
        new_max = torch.maximum(self.max, scores.amax(dim=-1, keepdim=True))
        safe_max = new_max.masked_fill(new_max == -math.inf, 0.0)  # a row that has seen no key yet
        p = torch.exp(scores - safe_max)
        correction = torch.exp(self.max - safe_max)
        self.sum = self.sum * correction + p.sum(dim=-1, keepdim=True)
        for accumulator in self._accumulators.values():
            accumulator.mul_(correction)
        if rotated not in self._accumulators:
            self._accumulators[rotated] = scores.new_zeros(self._shape)
        self._accumulators[rotated].add_(p @ values)
        self.max = new_max

    def finish(self, sign_seed: int | None) -> tuple[Tensor, Tensor]:
        """``(out [Hkv, rows, D], lse [Hkv, rows])``; a row without any key has out 0 and lse -inf."""
        total = sum(
            unrotate_values(x, sign_seed) if rotated else x for rotated, x in self._accumulators.items()
        ) + self.sum.new_zeros(self._shape)
        # masked_fill and not where(sum > 0): a NaN must stay visible
        out = (total / self.sum).masked_fill(self.sum == 0, 0.0)
        return out, (self.max + self.sum.log()).squeeze(-1)


def _group_rows(q: Tensor, num_kv_heads: int, compute: torch.dtype) -> Tensor:
    """``[rows, Hq, D]`` to ``[Hkv, rows * G, D]``: every query row that reads one KV head, stacked."""
    rows, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    return q.to(compute).view(rows, num_kv_heads, group, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)


def _ungroup(out: Tensor, rows: int) -> Tensor:
    """``[Hkv, rows * G, ...]`` back to ``[rows, Hq, ...]``."""
    return out.reshape(out.shape[0], rows, -1, *out.shape[2:]).transpose(0, 1).reshape(rows, -1, *out.shape[2:])


def _chunks(encoded: EncodedKV, compute: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor, bool]]:
    """Yields ``(offset, keys [Hkv, D, t], values [Hkv, t, D], rotated)``, a bounded number of tokens at a time."""
    if encoded.exact is not None:
        for first in range(0, encoded.exact.num_tokens, CHUNK_TOKENS):
            part = slice(first, first + CHUNK_TOKENS)
            keys = encoded.exact.keys[:, part].to(compute).transpose(1, 2)
            yield first, keys, encoded.exact.values[:, part].to(compute), False
    if encoded.keys is not None and encoded.values is not None:
        tokens, tiles = encoded.keys.num_tokens, CHUNK_TOKENS // TILE_SIZE
        for first_tile in range(0, encoded.keys.codes.shape[1], tiles):
            first, last = first_tile * TILE_SIZE, min((first_tile + tiles) * TILE_SIZE, tokens)
            keys = decode_key_tiles(encoded.keys, first_tile, first_tile + tiles, compute)[..., : last - first]
            yield encoded.num_exact + first, keys, _rotated_values(encoded.values, first, last, compute), True


def _dot_products(q: Tensor, keys: Tensor) -> Tensor:
    """``q @ keys``, ``[..., R, D]`` and ``[..., D, T]``, summed in parts of 64 dims.

    On some CPUs torch adds a long row's products one by one, whose rounding at head dim 256 moves attention by more than 2e-6.
    """
    parts = [q[..., i : i + 64] @ keys[..., i : i + 64, :] for i in range(0, q.shape[-1], 64)]
    return torch.stack(parts).sum(dim=0) if len(parts) > 1 else parts[0]


def shared_attention(
    q: Tensor, encoded: EncodedKV, scale: float, *, q_positions: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.shared_attention`."""
    rows, num_heads, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    stacked = _group_rows(q, encoded.num_kv_heads, compute)  # [Hkv, R, D]
    oldest = None
    if window is not None:
        assert q_positions is not None
        group = num_heads // encoded.num_kv_heads
        oldest = (q_positions - window + 1).repeat_interleave(group)[None, :, None]  # [1, R, 1]
    # The packed tokens' sum stays in the rotated basis and leaves it once per row, not once per token.
    state = _OnlineSoftmax(stacked)
    for offset, keys, values, rotated in _chunks(encoded, compute):
        scores = _dot_products(stacked, keys).mul_(scale)  # [Hkv, R, t]; on q the factor would be rounded D times
        if oldest is not None:
            positions = torch.arange(encoded.start + offset, encoded.start + offset + keys.shape[-1], device=q.device)
            scores = scores.masked_fill(positions < oldest, -math.inf)
        state.add(scores, values, rotated=rotated)
    out, lse = state.finish(encoded.values.sign_seed if encoded.values is not None else None)
    return _ungroup(out, rows).to(q.dtype), _ungroup(lse, rows)


def masked_attention(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.masked_attention`."""
    batch, num_heads, rows, head_dim = q.shape
    num_kv_heads, tokens = keys.shape[1], keys.shape[2]
    compute = torch.promote_types(q.dtype, torch.float32)
    if tokens == 0:
        return torch.zeros_like(q), q.new_full((batch, num_heads, rows), -math.inf, dtype=compute)
    grouped = q.to(compute).reshape(batch, num_kv_heads, num_heads // num_kv_heads * rows, head_dim)
    scores = _dot_products(grouped, keys.to(compute).transpose(-1, -2)).mul_(scale)
    scores = scores.view(batch, num_heads, rows, tokens)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    largest = scores.amax(dim=-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)  # fully masked
    p = torch.exp(scores - largest)
    total = p.sum(dim=-1, keepdim=True)
    out = (p.view(batch, num_kv_heads, -1, tokens) @ values.to(compute)).view(batch, num_heads, rows, head_dim)
    out = (out / total).masked_fill(total == 0, 0.0)
    return out.to(q.dtype), (largest + total.log()).squeeze(-1)


def ragged_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    row_counts: Sequence[int],
    scale: float,
    *,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.ragged_attention`."""
    compute = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=compute)
    starts = [0]
    for count in row_counts:
        starts.append(starts[-1] + count)
    decoding = [i for i, count in enumerate(row_counts) if count == 1]
    if decoding:  # single rows: one padded batch costs far fewer calls than a loop
        lengths = torch.tensor([keys[i].shape[1] for i in decoding], device=q.device)
        longest = int(lengths.max())
        slots = torch.arange(longest, device=q.device)
        mask = slots < lengths[:, None]
        if window is not None:
            mask &= slots >= lengths[:, None] - window
        padded_k = q.new_zeros((len(decoding), keys[0].shape[0], longest, q.shape[-1]))
        padded_v = torch.zeros_like(padded_k)
        for slot, i in enumerate(decoding):
            padded_k[slot, :, : keys[i].shape[1]] = keys[i]
            padded_v[slot, :, : values[i].shape[1]] = values[i]
        rows = torch.tensor([starts[i] for i in decoding], device=q.device)
        o, s = masked_attention(q[rows][:, :, None], padded_k, padded_v, scale, mask[:, None, None, :])
        out[rows], lse[rows] = o[:, :, 0], s[:, :, 0]
    for i, count in enumerate(row_counts):
        if count <= 1:
            continue
        tokens = keys[i].shape[1]
        row_at = torch.arange(tokens - count, tokens, device=q.device)[:, None]
        slots = torch.arange(tokens, device=q.device)
        mask = slots <= row_at
        if window is not None:
            mask &= slots > row_at - window
        part = slice(starts[i], starts[i + 1])
        o, s = masked_attention(q[part].transpose(0, 1)[None], keys[i][None], values[i][None], scale, mask)
        out[part], lse[part] = o[0].transpose(0, 1), s[0].transpose(0, 1)
    return out, lse


def merge_attention_states(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.merge_attention_states`."""
    if len(states) == 1:
        return states[0]
    outs, lses = zip(*states, strict=True)
    stacked = torch.stack(lses)  # [n, ...]
    largest = stacked.amax(dim=0)
    # weights that are divided by their own sum stay exact where exp(lse - total) would round with the size of lse
    weights = torch.exp(stacked - largest.masked_fill(largest == -math.inf, 0.0))
    total = weights.sum(dim=0)
    merged = sum(out.to(weights.dtype) * weight[..., None] for out, weight in zip(outs, weights, strict=True))
    merged = (merged / total[..., None]).masked_fill((total == 0)[..., None], 0.0)
    return merged.to(outs[0].dtype), largest + total.log()


# -------------------------------------------------------------------------------------------- linear layers


def linear(x: Tensor, weight: Tensor | Int8Weights, bias: Tensor | None) -> Tensor:
    """See :func:`polykv_kernels.ops.linear`: torch's own where the dtypes agree, else through float32 (or float64)."""
    if isinstance(weight, Int8Weights):
        weight = dequantize_weights(weight)
    if x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype):
        return F.linear(x, weight, bias)
    common = torch.float64 if x.dtype == torch.float64 else torch.float32
    return F.linear(x.to(common), weight.to(common), None if bias is None else bias.to(common)).to(x.dtype)


def quantize_weights_int8(weight: Tensor) -> Int8Weights:
    """See :func:`polykv_kernels.ops.quantize_weights_int8`."""
    outputs, inputs = weight.shape
    groups = -(-inputs // WEIGHT_GROUP)
    padded = F.pad(weight.detach().float(), (0, groups * WEIGHT_GROUP - inputs)).view(outputs, groups, WEIGHT_GROUP)
    # a group of zeros, or one so small that its step is zero, has codes of 0
    scales = padded.abs().amax(dim=-1) / 127.0
    steps = torch.where(scales > 0, scales, 1.0)
    codes = (padded / steps[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Weights(codes.view(outputs, -1)[:, :inputs].contiguous(), scales)


def dequantize_weights(weight: Int8Weights) -> Tensor:
    """What int8 weights stand for: ``[out, in]`` float32, each weight rounded once."""
    inputs = weight.codes.shape[1]
    return weight.codes.float() * weight.scales.repeat_interleave(WEIGHT_GROUP, dim=1)[:, :inputs]
