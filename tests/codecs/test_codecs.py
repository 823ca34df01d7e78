"""The codecs against the published formulas, the layout on paper, and the bytes really allocated."""

import dataclasses
import hashlib
import math
import os

import numpy as np
import pytest
import torch
from helpers import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from polykv.codecs import CODECS, DEFAULT_CODEC, get_codec
from polykv.codecs.k8v3 import SIGN_SEED
from polykv.errors import PolyKVError, UnknownCodecError, UnsupportedModelError
from polykv_kernels import DenseKV, EncodedKV, ops
from polykv_kernels.reference import random_signs

FULL = os.environ.get("POLYKV_TEST_FULL") == "1"
ALL = ("exact", "k8v3", "paper")
PACKED = ("k8v3", "paper")
HEAD_DIMS = tuple(range(16, 257, 16))
LEVELS = np.array([-2.152, -1.344, -0.756, -0.245, 0.245, 0.756, 1.344, 2.152])
HALF_EPS = 2.0**-11  # relative rounding of a normal float16


def encode(codec: str, keys: Tensor, values: Tensor, start: int = 0) -> EncodedKV:
    return get_codec(codec).encode(keys, values, torch.arange(start, start + keys.shape[1]))


def gaussian(heads: int, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, heads, tokens, head_dim).to(dtype)
    return keys, values


def exact_decode(encoded: EncodedKV) -> tuple[np.ndarray, np.ndarray]:
    keys, values = ops.decode(encoded, torch.float64)
    return keys.numpy(), values.numpy()


def relative_norm(error: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(error) / np.linalg.norm(reference))


# ---------------------------------------------------------- oracles, from the formulas and the layout's words


def hadamard(head_dim: int) -> np.ndarray:
    """Orthonormal Walsh-Hadamard matrix, Sylvester order; blocks of the largest power of two in head_dim."""
    block = head_dim & -head_dim
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)])
    return np.kron(np.eye(head_dim // block), matrix / math.sqrt(block))


def paper_keys(keys: np.ndarray) -> np.ndarray:
    """``s = max|K| / 127`` over the layer, ``q = clip(round(K / s), -128, 127)``, ``q * s``; in float32."""
    scale = np.abs(keys).max() / np.float32(127)
    return np.clip(np.round(keys / scale), -128, 127) * scale


def paper_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The published round trip in float64, and which vectors have no coordinate near a tie of two levels."""
    matrix, head_dim = hadamard(values.shape[-1]), values.shape[-1]
    norm = np.linalg.norm(values, axis=-1, keepdims=True)
    z = values / norm @ matrix * math.sqrt(head_dim)
    distance = np.abs(z[..., None] - LEVELS)
    nearest = LEVELS[distance.argmin(-1)]
    two_best = np.sort(distance, axis=-1)[..., :2]
    clear = ((two_best[..., 1] - two_best[..., 0]) > 1e-5).all(-1)
    return nearest / math.sqrt(head_dim) * norm @ matrix, clear


def decode_by_the_layout(encoded: EncodedKV) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values from the stored bytes, after the docstrings of the layouts alone, token by token."""
    head_dim, tensors = encoded.head_dim, {name: t.numpy() for name, t in encoded.tensors().items()}
    exact = encoded.num_exact
    shape = (encoded.num_kv_heads, encoded.num_tokens, head_dim)
    keys, values = np.zeros(shape), np.zeros(shape)
    if exact:
        keys[:, :exact], values[:, :exact] = tensors["exact.keys"], tensors["exact.values"]
    if encoded.keys is None or encoded.values is None:
        return keys, values
    signs = np.ones(head_dim)
    if encoded.values.sign_seed is not None:
        signs = random_signs(encoded.values.sign_seed, head_dim).numpy().astype(float)
    key_codes, key_scales = tensors["keys.codes"], tensors["keys.scales"].astype(float)
    for head in range(shape[0]):
        for token in range(shape[1] - exact):
            tile, slot = divmod(token, 64)
            scale = key_scales[0] if encoded.keys.per_tensor else key_scales[head, tile]
            keys[head, exact + token] = key_codes[head, tile, :, slot] * scale
            bits = int.from_bytes(tensors["values.codes"][head, token].tobytes(), "little")
            levels = np.array([LEVELS[(bits >> (3 * i)) & 7] for i in range(head_dim)])
            scaled = levels * float(tensors["values.scales"][head, token])
            values[head, exact + token] = signs * (hadamard(head_dim) @ scaled)
    return keys, values


# ----------------------------------------------------------------------------------------------------- paper


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_paper_equals_the_published_scheme(head_dim, dtype):
    """Keys to 1e-6, values to the float16 rounding of each vector's norm."""
    keys, values = gaussian(3, 200, head_dim, dtype)
    values *= torch.logspace(-1, 1, 200).to(dtype)[:, None]
    got_keys, got_values = exact_decode(encode("paper", keys, values))
    want_keys = paper_keys(keys.float().numpy())
    assert np.abs(got_keys - want_keys).max() <= 1e-6 * np.abs(want_keys).max()
    want_values, clear = paper_values(values.double().numpy())
    assert clear.mean() > 0.99
    error = np.linalg.norm(got_values - want_values, axis=-1)[clear]
    assert (error <= 1.001 * HALF_EPS * np.linalg.norm(want_values, axis=-1)[clear]).all()


def test_paper_has_one_key_scale_for_all_heads_and_tokens():
    """The step is that of the largest key of the layer, also for a head a thousand times smaller."""
    keys, values = gaussian(2, 100, 64)
    keys[1] /= 1000
    encoded = encode("paper", keys, values)
    assert encoded.keys.per_tensor
    assert float(encoded.keys.scales) == pytest.approx(float(keys.abs().max()) / 127)
    assert not ops.decode(encoded)[0][1].any()


def test_paper_keeps_the_norm_and_uses_no_signs():
    """The decoded norm is the vector's norm times that of its levels over sqrt(D): no correction."""
    keys, values = gaussian(2, 100, 64)
    encoded = encode("paper", keys, values)
    assert encoded.values.sign_seed is None
    assert encoded.exact is None
    want = values.norm(dim=-1) / 8
    assert ((encoded.values.scales.float() - want).abs() <= 1.001 * HALF_EPS * want).all()


# ------------------------------------------------------------------------------------------------------ k8v3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 65, 130])
def test_k8v3_keeps_the_first_token_bit_exact(tokens, dtype):
    keys, values = gaussian(2, tokens, 64, dtype)
    encoded = encode("k8v3", keys, values)
    assert encoded.num_exact == 1
    got_keys, got_values = get_codec("k8v3").decode(encoded)
    assert got_keys.dtype == got_values.dtype == dtype
    assert got_keys.shape == got_values.shape == keys.shape
    assert torch.equal(got_keys[:, 0], keys[:, 0])
    assert torch.equal(got_values[:, 0], values[:, 0])


@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 200])
@pytest.mark.parametrize("start", [1, 64, 5000])
def test_k8v3_of_a_segment_that_starts_later_keeps_no_exact_token(tokens, start):
    """Only position 0 is the attention sink."""
    encoded = encode("k8v3", *gaussian(2, tokens, 64), start=start)
    assert encoded.exact is None
    assert encoded.num_exact == 0
    assert encoded.start == start
    assert encoded.num_tokens == encoded.keys.num_tokens == encoded.values.num_tokens == tokens


def key_steps(keys: np.ndarray) -> np.ndarray:
    """The step ``max|K| / 127`` of each channel and tile of 64 tokens, at every token of ``[Hkv, T, D]``."""
    steps = np.empty_like(keys)
    for first in range(0, keys.shape[1], 64):
        tile = slice(first, first + 64)
        steps[:, tile] = np.abs(keys[:, tile]).max(axis=1, keepdims=True) / 127
    return steps


@pytest.mark.parametrize("head_dim", [32, 64, 80, 256])
@pytest.mark.parametrize("start", [0, 64])
def test_k8v3_key_error_is_at_most_half_a_step_of_its_channel_and_tile(head_dim, start):
    """A step is the float16 next to max|K| / 127, at most 2**-10 larger. Tiles follow the exact token."""
    keys, values = gaussian(3, 200, head_dim)
    keys *= torch.logspace(-2, 3, head_dim)[torch.randperm(head_dim)]
    got, _ = exact_decode(encode("k8v3", keys, values, start))
    packed = slice(1 if start == 0 else 0, None)
    want = keys.double().numpy()[:, packed]
    assert (np.abs(got[:, packed] - want) <= key_steps(want) * (0.5 + 2 * HALF_EPS)).all()


@settings(max_examples=300 if FULL else 60, deadline=None, derandomize=not FULL, database=None)
@given(st.integers(-24, 16), st.integers(0, 2**32))
def test_k8v3_key_error_is_at_most_half_a_step_at_every_magnitude(exponent, seed):
    """Channels of 2**-24 to 2**22. The stored step is a float16: up to 2**-10 larger than max|K| / 127, or by
    up to 2**-24, the spacing of the smallest ones. Never so much smaller that the largest key is clipped.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 70, 16, generator=generator) * 2.0**exponent * (1 + torch.arange(16))
    got, _ = exact_decode(encode("k8v3", keys, torch.randn(1, 70, 16, generator=generator), start=64))
    want = keys.double().numpy()
    step = key_steps(want)
    stored = np.maximum(step * (1 + 2 * HALF_EPS), step + 2.0**-24)
    assert (np.abs(got - want) <= 0.5 * stored * (1 + 1e-6)).all()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_k8v3_value_error_on_gaussians_is_that_of_the_eight_levels(head_dim):
    """sqrt(0.0346) = 0.186 for the levels alone; the least-squares scale takes a little off."""
    keys, values = gaussian(3, 1000, head_dim)
    _, got = exact_decode(encode("k8v3", keys, values, start=64))
    assert relative_norm(got - values.numpy(), values.numpy()) == pytest.approx(0.18, abs=0.01)


def test_k8v3_scales_are_the_least_squares_ones():
    """No other scale brings a decoded vector closer to the original: what is left is orthogonal to it."""
    keys, values = gaussian(2, 300, 64)
    _, got = exact_decode(encode("k8v3", keys, values, start=64))
    residual = (values.double().numpy() - got).reshape(-1, 64)
    got = got.reshape(-1, 64)
    along = (residual * got).sum(-1) / (got * got).sum(-1)
    assert np.abs(along).max() <= 1.001 * HALF_EPS  # the float16 rounding of the scale
    _, plain = exact_decode(encode("paper", keys, values))
    assert np.linalg.norm(residual) < np.linalg.norm(values.numpy() - plain)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_constant_vectors_survive_k8v3_and_not_paper(head_dim):
    """The Hadamard transform sends a constant vector to a single coordinate, sqrt(D), which the largest level
    clips to 2.152, while the D - 1 zeros beside it become 0.245. Random signs before the transform spread it
    again. ``paper`` is meant to have this fault: it is the published scheme.
    """
    values = torch.full((1, 3, head_dim), 3.7)
    keys = torch.randn(1, 3, head_dim)
    _, got = exact_decode(encode("k8v3", keys, values, start=64))
    assert relative_norm(got - values.numpy(), values.numpy()) <= 0.25
    _, got = exact_decode(encode("paper", keys, values))
    clipped = math.sqrt(((math.sqrt(head_dim) - 2.152) ** 2 + (head_dim - 1) * 0.245**2) / head_dim)
    assert relative_norm(got - values.numpy(), values.numpy()) == pytest.approx(clipped, abs=1e-3)
    assert clipped > 0.75


@pytest.mark.parametrize("row", [1, 5, 16, 63])
def test_walsh_functions_survive_k8v3(row):
    """The other vectors that the transform sends to a single coordinate: alternating, block-wise constant."""
    values = torch.from_numpy(hadamard(64)[row] * 8).float().expand(1, 3, 64)
    _, got = exact_decode(encode("k8v3", torch.randn(1, 3, 64), values, start=64))
    assert relative_norm(got - values.numpy(), values.numpy()) <= 0.25


def test_an_outlier_channel_costs_k8v3_nothing_elsewhere_and_paper_everything():
    """One channel of 1e4 in one head, as models with a massive key channel have it."""
    keys, values = gaussian(3, 130, 64)
    keys[1, :, 7] = 1e4 * (1 + 0.1 * torch.randn(130))
    elsewhere = torch.ones(3, 64, dtype=torch.bool)
    elsewhere[1, 7] = False
    want = keys.transpose(0, 1)[:, elsewhere].double().numpy()
    got, _ = ops.decode(encode("k8v3", keys, values), torch.float64)
    assert np.abs(got.transpose(0, 1)[:, elsewhere].numpy() - want).max() <= 0.5 * 6 / 127  # no Gaussian is above 6
    assert relative_error(got[1, :, 7], keys[1, :, 7]) <= 0.005
    got, _ = ops.decode(encode("paper", keys, values), torch.float64)
    assert not got.transpose(0, 1)[:, elsewhere].any()


def test_an_outlier_token_stays_in_its_tile():
    """A key of 1e4 at token 70 coarsens tokens 65 to 128 of its own channel, no others (token 0 is exact)."""
    keys, values = gaussian(1, 200, 64)
    clean = ops.decode(encode("k8v3", keys, values))[0]
    keys[0, 70, 3] = 1e4
    got = ops.decode(encode("k8v3", keys, values))[0]
    changed = (got != clean).nonzero()[:, 1:].tolist()
    assert {channel for _, channel in changed} == {3}
    assert {token for token, _ in changed} <= set(range(65, 129))


# ---------------------------------------------------------------------------------------- every codec: layout


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (1, 9), (2, 0), (64, 0), (65, 0), (66, 0), (130, 64)])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_decoding_follows_the_documented_layout_byte_by_byte(codec, tokens, start, head_dim):
    keys, values = gaussian(2, tokens, head_dim)
    encoded = encode(codec, keys, values, start)
    got = exact_decode(encoded)
    for mine, theirs in zip(decode_by_the_layout(encoded), got, strict=True):
        assert np.abs(mine - theirs).max() <= 1e-12 * np.abs(mine).max()
    single = ops.decode(encoded, torch.float32)
    for mine, theirs in zip(single, got, strict=True):
        assert np.abs(mine.numpy() - theirs).max() <= 1e-6 * np.abs(theirs).max()


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (1, 9), (65, 0), (66, 0), (200, 640)])
def test_shapes_and_dtypes_are_the_documented_ones(codec, tokens, start):
    heads, head_dim = 3, 80
    encoded = encode(codec, *gaussian(heads, tokens, head_dim, torch.bfloat16), start)
    exact = {"exact": tokens, "k8v3": int(start == 0), "paper": 0}[codec]
    packed = tokens - exact
    tiles = -(-packed // 64)
    want = {}
    if exact:
        want["exact.keys"] = want["exact.values"] = ((heads, exact, head_dim), torch.bfloat16)
    if packed:
        want |= {
            "keys.codes": ((heads, tiles, head_dim, 64), torch.int8),
            "keys.scales": ((1,), torch.float32) if codec == "paper" else ((heads, tiles, head_dim), torch.float16),
            "values.codes": ((heads, packed, 3 * head_dim // 8), torch.uint8),
            "values.scales": ((heads, packed), torch.float16),
        }
    assert {name: (tuple(t.shape), t.dtype) for name, t in encoded.tensors().items()} == want
    assert (encoded.start, encoded.num_tokens, encoded.num_exact) == (start, tokens, exact)
    assert (encoded.num_kv_heads, encoded.head_dim, encoded.dtype) == (heads, head_dim, torch.bfloat16)
    if packed:
        padding = encoded.keys.codes.transpose(2, 3).reshape(heads, -1, head_dim)[:, packed:]
        assert not padding.any()
        assert encoded.keys.codes.min() >= -127


def test_the_exact_codec_gives_back_the_bits():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        keys, values = gaussian(2, 70, 24, dtype)
        got_keys, got_values = get_codec("exact").decode(encode("exact", keys, values, start=5))
        assert got_keys.dtype == got_values.dtype == dtype
        assert torch.equal(got_keys, keys)
        assert torch.equal(got_values, values)


def test_the_seed_of_the_signs_is_part_of_the_format():
    """Another seed orphans every stored pool; the signs themselves are pinned in tests/kernels."""
    assert SIGN_SEED == 20260424
    assert encode("k8v3", *gaussian(1, 3, 64)).values.sign_seed == SIGN_SEED


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_multiple_of_16_up_to_256_is_stored_and_attended_to(codec, head_dim):
    """Keys within 1.5 % of the largest, values within 20 %: blocks of 16 cost a little over 18 %."""
    get_codec(codec).check_head_dim(head_dim)
    keys, values = gaussian(2, 300, head_dim)
    encoded = encode(codec, keys, values)
    got_keys, got_values = exact_decode(encoded)
    assert np.abs(got_keys - keys.numpy()).max() <= 0.015 * float(keys.abs().max())
    assert relative_norm(got_values - values.numpy(), values.numpy()) <= 0.2
    out, lse = ops.shared_attention(torch.randn(2, 4, head_dim), encoded, head_dim**-0.5)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("head_dim", [24, 8, 40, 72, 100])
def test_another_head_dim_is_refused_by_number_before_anything_is_stored(codec, head_dim):
    with pytest.raises(UnsupportedModelError, match=rf"'{codec}'.* head_dim {head_dim}: .*16.*codec='exact'") as caught:
        get_codec(codec).check_head_dim(head_dim)
    assert isinstance(caught.value, PolyKVError)
    with pytest.raises(ValueError, match=f"head_dim {head_dim}"):
        encode(codec, *gaussian(1, 70, head_dim))


@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 100])
def test_exact_takes_any_head_dim(head_dim):
    get_codec("exact").check_head_dim(head_dim)
    assert encode("exact", *gaussian(1, 3, head_dim)).head_dim == head_dim


# ---------------------------------------------------------------------------------------- every codec: bytes


def allocated(encoded: EncodedKV) -> int:
    """Counted without the library: every storage that a tensor of the layer keeps alive, once, whole."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in encoded.tensors().values()}
    return sum(storage.size() for storage in storages.values())


@pytest.mark.parametrize(("codec", "bound"), [("paper", 2.70), ("k8v3", 2.75)])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ratio_of_allocated_bytes_against_float16(codec, bound, heads, dtype):
    """head_dim 64, 2,048 tokens; padding, scales and the exact token included."""
    encoded = encode(codec, *gaussian(heads, 2048, 64, dtype))
    dense = 2 * 2 * heads * 2048 * 64
    assert encoded.dense_fp16_nbytes == dense
    assert dense / encoded.nbytes >= bound
    assert dense / allocated(encoded) >= bound
    assert get_codec(codec).nbytes(encoded) == encoded.nbytes == allocated(encoded)


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (1, 9), (64, 0), (65, 0), (66, 0), (1000, 64)])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_bytes_are_what_the_layout_needs_and_not_one_more(codec, tokens, start, head_dim):
    heads = 2
    encoded = encode(codec, *gaussian(heads, tokens, head_dim), start)
    exact = {"exact": tokens, "k8v3": int(start == 0), "paper": 0}[codec]
    packed = tokens - exact
    tiles = -(-packed // 64)
    want = 2 * 4 * heads * exact * head_dim
    if packed:
        want += heads * tiles * 64 * head_dim  # int8 codes
        want += 4 if codec == "paper" else 2 * heads * tiles * head_dim  # key scales
        want += heads * packed * (3 * head_dim // 8 + 2)  # 3-bit codes and a float16 scale
    assert encoded.nbytes == allocated(encoded) == want


def test_nbytes_counts_whole_storages_and_each_once():
    """Otherwise a segment of views would look small while it keeps a long cache alive."""
    both = torch.randn(2, 2, 4096, 64)
    encoded = EncodedKV(0, 10, 2, 64, both.dtype, DenseKV(both[0, :, :10], both[1, :, :10]), None, None)
    assert encoded.nbytes == allocated(encoded) == both.numel() * 4


def test_a_layer_that_does_not_hold_the_tokens_it_claims_is_refused():
    encoded = encode("k8v3", *gaussian(2, 100, 64))
    with pytest.raises(ValueError, match=r"num_tokens is 101, but the tensors hold 100"):
        dataclasses.replace(encoded, num_tokens=101)
    with pytest.raises(ValueError, match=r"num_tokens is 100, but the tensors hold 99"):
        dataclasses.replace(encoded, exact=None)
    with pytest.raises(ValueError, match=r"packed together or not at all"):
        dataclasses.replace(encoded, values=None)


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("tokens", [1, 2, 100])
def test_a_slice_of_a_long_cache_does_not_keep_the_cache_alive(codec, tokens):
    long_keys, long_values = gaussian(2, 4096, 64)
    for part in (slice(0, tokens), slice(1000, 1000 + tokens)):
        encoded = encode(codec, long_keys[:, part], long_values[:, part], part.start)
        alone = encode(codec, long_keys[:, part].clone(), long_values[:, part].clone(), part.start)
        assert allocated(encoded) == encoded.nbytes == alone.nbytes
        for mine, own in zip(encoded.tensors().values(), alone.tensors().values(), strict=True):
            assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size()
            assert torch.equal(mine, own)


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("tokens", [1, 2, 100])
def test_what_happens_to_the_input_afterwards_does_not_reach_the_stored_form(codec, tokens):
    keys, values = gaussian(2, tokens, 64)
    encoded = encode(codec, keys, values)
    before = {name: tensor.clone() for name, tensor in encoded.tensors().items()}
    keys.fill_(7.0)
    values.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in encoded.tensors().items())


@pytest.mark.parametrize("codec", ALL)
def test_encoding_does_not_change_its_input(codec):
    keys, values = gaussian(2, 100, 64)
    kept = keys.clone(), values.clone()
    encode(codec, keys, values)
    assert torch.equal(keys, kept[0])
    assert torch.equal(values, kept[1])


@pytest.mark.parametrize("codec", ALL)
def test_decoded_tensors_are_the_callers_own(codec):
    encoded = encode(codec, *gaussian(2, 100, 64))
    keys, values = ops.decode(encoded)
    keys.zero_()
    values.zero_()
    assert ops.decode(encoded)[0].any()
    assert ops.decode(encoded)[1].any()


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_input_gives_the_same_bytes(codec, dtype):
    """Twice in a row, and from strided views as a model hands them over."""
    keys, values = gaussian(2, 150, 64, dtype)
    digests = set()
    for k, v in ((keys, values), (keys, values), (keys.clone(), values.clone()), token_major(keys, values)):
        digest = hashlib.sha256()
        for name, tensor in encode(codec, k, v).tensors().items():
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        digests.add(digest.hexdigest())
    assert len(digests) == 1


def token_major(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same numbers, held as ``[T, Hkv, D]``."""
    return tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors)


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("tokens", [1, 2, 100])
def test_stored_tensors_go_to_safetensors_and_back(codec, tokens):
    """Contiguous, and no two in one storage, also when the model's keys are strided views."""
    encoded = encode(codec, *token_major(*gaussian(3, tokens, 64)))
    for name, tensor in encoded.tensors().items():
        assert tensor.is_contiguous(), name
    loaded = load_safetensors(save_safetensors(encoded.tensors()))
    assert loaded.keys() == encoded.tensors().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in encoded.tensors().items())


# --------------------------------------------------------------------------------------- every codec: numbers


@pytest.mark.parametrize("codec", ALL)
def test_zeros_come_back_as_zeros(codec):
    """All of them; one token; one channel; one head: no 0 / 0, and no level of 0.245 for an empty vector."""
    zeros = torch.zeros(2, 130, 64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        keys, values = ops.decode(encode(codec, zeros.to(dtype), zeros.to(dtype)))
        assert not keys.any()
        assert not values.any()
    keys, values = gaussian(2, 130, 64)
    keys[:, :, 5], keys[:, 70], values[:, 70], keys[1], values[1] = 0.0, 0.0, 0.0, 0.0, 0.0
    got_keys, got_values = ops.decode(encode(codec, keys, values))
    assert torch.isfinite(got_keys).all()
    assert torch.isfinite(got_values).all()
    for x in (got_keys[:, :, 5], got_keys[:, 70], got_values[:, 70], got_keys[1], got_values[1]):
        assert not x.any()
    assert got_keys[0, :70].any()
    assert got_values[0, :70].any()


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-30, 1e-8])
def test_tiny_numbers_come_back_finite_and_no_larger_than_float16_can_tell(codec, magnitude):
    keys, values = gaussian(2, 130, 64)
    keys, values = keys * magnitude, values * magnitude
    got_keys, got_values = ops.decode(encode(codec, keys, values))
    for got, want in ((got_keys, keys), (got_values, values)):
        assert torch.isfinite(got).all()
        assert (got - want).abs().max() <= 127 * 2.0**-24


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("token", [0, 1, 64, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_are_refused_wherever_they_are(codec, bad, token, dtype):
    """A pool is read by every agent: one NaN in it, the first, exact token included, would break them all."""
    for name in ("keys", "values"):
        broken = dict(zip(("keys", "values"), gaussian(2, 100, 64, dtype), strict=True))
        broken[name][1, token, 3] = bad
        with pytest.raises(ValueError, match=rf"{name} .*(NaN|infinite)"):
            encode(codec, **broken)


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_refused_in_a_single_token(codec, bad):
    keys, values = gaussian(2, 1, 64)
    with pytest.raises(ValueError, match=r"keys .*(NaN|infinite)"):
        encode(codec, torch.full_like(keys, bad), values)
    with pytest.raises(ValueError, match=r"values .*(NaN|infinite)"):
        encode(codec, keys, torch.full_like(values, bad))


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("size", [1e5, 1e20, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_too_large_for_the_stored_scale_are_refused_with_the_limit_and_a_remedy(codec, size, dtype):
    keys, values = gaussian(2, 100, 64, dtype)
    values[1, 70] = size
    with pytest.raises(ValueError, match=r"value.*65504.*codec='exact'"):
        encode(codec, keys, values)


@pytest.mark.parametrize("size", [1e7, 1e20, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_too_large_for_the_stored_step_are_refused_with_the_limit_and_a_remedy(size, dtype):
    """A float16 step: 127 * 65504 = 8.3e6 is the largest key of ``k8v3``. ``paper`` has a float32 step."""
    keys, values = gaussian(2, 100, 64, dtype)
    keys[1, 70, 3] = size
    with pytest.raises(ValueError, match=r"key.*codec='exact'"):
        encode("k8v3", keys, values)
    got, _ = ops.decode(encode("paper", keys, values))
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("codec", PACKED)
def test_the_largest_numbers_that_fit_are_stored(codec):
    keys, values = gaussian(2, 100, 64)
    keys[1, 70, 3] = 8.3e6
    values[1, 70] = 3e4 * torch.randn(64)
    got_keys, got_values = ops.decode(encode(codec, keys, values))
    assert float(got_keys[1, 70, 3]) == pytest.approx(8.3e6, rel=0.01)
    assert relative_norm((got_values - values)[1, 70].numpy(), values[1, 70].numpy()) <= 0.25


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("shape", [(2, 0, 64), (0, 5, 64)])
def test_nothing_to_store_is_refused(codec, shape):
    with pytest.raises(ValueError, match=r"not empty"):
        get_codec(codec).encode(torch.zeros(shape), torch.zeros(shape), torch.arange(shape[1] or 1))


# ---------------------------------------------------------------------------------------------------- presets


def test_codecs_are_found_by_name_and_given_back_as_they_are():
    assert set(CODECS) == set(ALL)
    assert DEFAULT_CODEC == "k8v3"
    for name in ALL:
        assert get_codec(name).name == name
        assert get_codec(get_codec(name)) is get_codec(name)


@pytest.mark.parametrize("name", ["int4", "", "K8V3", None])
def test_an_unknown_codec_is_refused_with_the_ones_there_are(name):
    with pytest.raises(UnknownCodecError) as caught:
        get_codec(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in ALL)
    assert isinstance(caught.value, PolyKVError)
    assert isinstance(caught.value, ValueError)
