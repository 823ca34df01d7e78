"""What the Triton tests share: segments, a dense float64 oracle, errors. Imports neither triton nor pytest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polykv_kernels import reference
from polykv_kernels.layouts import DenseKV, EncodedKV

INF = math.inf
BOUND = 1e-3
"""Of attention: max|error| / max|reference|."""

LAYOUTS = ("exact", "per_tensor", "per_channel", "mixed")


def device_kv(x: EncodedKV, device: torch.device) -> EncodedKV:
    """The segment on another device."""
    exact = DenseKV(x.exact.keys.to(device), x.exact.values.to(device)) if x.exact is not None else None
    keys, values = x.keys, x.values
    if keys is not None:
        keys = type(keys)(keys.codes.to(device), keys.scales.to(device), keys.num_tokens)
    if values is not None:
        values = type(values)(values.codes.to(device), values.scales.to(device), values.sign_seed)
    return EncodedKV(x.start, x.num_tokens, x.num_kv_heads, x.head_dim, x.dtype, exact, keys, values)


def encode(
    layout: str, keys: Tensor, values: Tensor, *, start: int = 0, exact_tokens: int = 1, sign_seed: int | None = 7
) -> EncodedKV:
    """A segment of ``[Hkv, T, D]`` keys and values, made by the reference encoders."""
    heads, tokens, head_dim = keys.shape
    first = {"exact": tokens, "mixed": min(exact_tokens, tokens)}.get(layout, 0)
    exact = DenseKV(keys[:, :first].contiguous(), values[:, :first].contiguous()) if first else None
    packed_keys = packed_values = None
    if first < tokens:
        per_tensor = layout == "per_tensor"
        packed_keys = reference.encode_keys_int8(keys[:, first:], per_tensor=per_tensor)
        packed_values = reference.encode_values_lloyd3(
            values[:, first:], sign_seed=None if per_tensor else sign_seed, least_squares=not per_tensor
        )
    return EncodedKV(start, tokens, heads, head_dim, keys.dtype, exact, packed_keys, packed_values)


def random_segment(
    layout: str,
    heads: int,
    tokens: int,
    head_dim: int,
    *,
    start: int = 0,
    dtype: torch.dtype = torch.float16,
    exact_tokens: int = 1,
) -> EncodedKV:
    """Keys whose channels differ in size; logits of queries N(0, 1) have variance 1."""
    keys, values = torch.randn(2, heads, tokens, head_dim)
    size = 1.0 + torch.arange(head_dim) % 5
    keys = keys * size / size.square().mean().sqrt()
    return encode(layout, keys.to(dtype), values.to(dtype), start=start, exact_tokens=exact_tokens)


def visible(segment: EncodedKV, positions: Tensor, window: int) -> Tensor:
    """``[rows, T]``: the tokens that a sliding window leaves."""
    return torch.arange(segment.start, segment.start + segment.num_tokens) > positions.long()[:, None] - window


def oracle(q: Tensor, segment: EncodedKV, scale: float, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax over the decoded tokens in float64, head by head."""
    keys, values = reference.decode(segment, torch.float64)
    ratio = q.shape[1] // keys.shape[0]
    outs, lses = [], []
    for head in range(q.shape[1]):
        logits = q[:, head].double() @ keys[head // ratio].T * scale  # [rows, T]
        if seen is not None:
            logits = logits.masked_fill(~seen, -INF)
        top = logits.amax(dim=1, keepdim=True).clamp_min(-1e300)
        weights = (logits - top).exp()
        total = weights.sum(dim=1, keepdim=True)
        outs.append(weights @ values[head // ratio] / total.clamp_min(1e-300))
        lses.append((total.log() + top)[:, 0])
    return torch.stack(outs, 1), torch.stack(lses, 1)


def relative_error(value: Tensor, want: Tensor) -> float:
    """``max|error| / max|reference|``; 0 for two zeros."""
    error = float((value.double() - want.double()).abs().max())
    return error / max(float(want.double().abs().max()), 1e-300) if error else 0.0


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], bound: float = BOUND, lse: float = 2e-6) -> float:
    """Out within the bound, lse within its own (in units of 1 at least), empty rows equal; gives out's error back."""
    out, got_lse, want_out, want_lse = (x.cpu() for x in (*got, *want))
    assert out.shape == want_out.shape and got_lse.shape == want_lse.shape
    assert got_lse.dtype == torch.float32
    empty = want_lse == -INF
    assert torch.equal(got_lse == -INF, empty), "other rows are empty"
    assert (out[empty] == 0).all(), "an empty row is not 0"
    if empty.all():
        return 0.0
    error = relative_error(out[~empty], want_out[~empty])
    assert error <= bound, f"out is off by {error:.3g}, bound {bound:.3g}"
    difference = float((got_lse[~empty].double() - want_lse[~empty]).abs().max())
    lse_error = difference / max(1.0, float(want_lse[~empty].abs().max()))
    assert lse_error <= lse, f"lse is off by {lse_error:.3g}, bound {lse:.3g}"
    return error


def check_keys(keys: Tensor, codes: Tensor, scales: Tensor, *, per_tensor: bool) -> None:
    """Codes and scales are the reference's, bit for bit."""
    want = reference.encode_keys_int8(keys.cpu(), per_tensor=per_tensor)
    assert scales.dtype == want.scales.dtype and codes.dtype == want.codes.dtype
    assert torch.equal(scales.cpu(), want.scales), "other scales"
    assert torch.equal(codes.cpu(), want.codes), "other codes"


def check_values(
    values: Tensor, codes: Tensor, scales: Tensor, *, sign_seed: int | None, least_squares: bool
) -> tuple[int, int]:
    """Codes are the reference's but within float32 rounding of a threshold, scales within one float16 step.

    Returns how many codes and scales differ.
    """
    values = values.cpu()
    want = reference.encode_values_lloyd3(values, sign_seed=sign_seed, least_squares=least_squares)
    got_codes, want_codes = reference.unpack_3bit(codes.cpu()), reference.unpack_3bit(want.codes)
    assert codes.shape == want.codes.shape and scales.dtype == torch.float16
    other = got_codes != want_codes
    if other.any():
        v = values.double()
        rms = v.norm(dim=-1, keepdim=True) / math.sqrt(v.shape[-1])
        signed = v if sign_seed is None else v * reference.random_signs(sign_seed, v.shape[-1]).double()
        z = reference.hadamard_transform(signed) / rms
        levels = torch.tensor(reference.LLOYD_MAX_3BIT, dtype=torch.float64)
        thresholds = (levels[1:] + levels[:-1]) / 2
        distance = (z[..., None] - thresholds).abs().amin(dim=-1)
        usable = (rms > 1e-15).expand_as(z)  # squares of smaller numbers leave float32, and the scale is 0
        assert (distance[other & usable] < 1e-5).all(), "a code differs away from a threshold"
        assert ((got_codes.int() - want_codes.int()).abs()[other & usable] <= 1).all()
        assert not (other & (rms == 0)).any(), "a zero vector has other codes"
    bits, want_bits = scales.cpu().view(torch.int16).int(), want.scales.view(torch.int16).int()
    assert ((bits - want_bits).abs() <= 1).all(), "a scale differs by more than one float16 step"
    return int(other.sum()), int((bits != want_bits).sum())
