"""The stored format, bit by bit: 3-bit packing, Hadamard rotation, random signs, Lloyd-Max levels."""

import hashlib
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_kernels import layouts, reference
from polykv_kernels.reference import hadamard_block, hadamard_transform, pack_3bit, random_signs, unpack_3bit

FULL = os.environ.get("POLYKV_TEST_FULL") == "1"
searched = settings(max_examples=1000 if FULL else 100, deadline=None, derandomize=not FULL, database=None)

# Head dims that can be packed, with the transform's block: the largest power of two that divides them.
BLOCKS = {16: 16, 32: 32, 48: 16, 64: 64, 80: 16, 96: 32, 112: 16, 128: 128, 160: 32, 192: 64, 256: 256}


# --------------------------------------------------------------------------------------------------- packing


def packed_by_hand(codes: list[int]) -> list[int]:
    """The bitstream by definition: code ``i`` at bits ``3i .. 3i + 2`` of one little-endian number a row."""
    number = sum(code << (3 * i) for i, code in enumerate(codes))
    return list(number.to_bytes(3 * len(codes) // 8, "little"))


def unpacked_by_hand(row: list[int]) -> list[int]:
    number = int.from_bytes(bytes(row), "little")
    return [(number >> (3 * i)) & 7 for i in range(8 * len(row) // 3)]


@st.composite
def byte_rows(draw: st.DrawFn, group: int) -> tuple[list[int], bytes]:
    """A shape of up to four axes, whose last axis is a multiple of ``group``, and its bytes."""
    shape = [*draw(st.lists(st.integers(1, 3), max_size=3)), group * draw(st.integers(1, 5))]
    size = math.prod(shape)
    return shape, draw(st.binary(min_size=size, max_size=size))


def as_tensor(shape: list[int], numbers: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype).reshape(shape)


@searched
@given(byte_rows(8), st.sampled_from([torch.uint8, torch.int32, torch.int64]))
def test_packing_is_the_little_endian_bitstream_for_any_shape_and_integer_dtype(drawn, dtype):
    shape, raw = drawn
    codes = as_tensor(shape, [byte & 7 for byte in raw], dtype)
    packed = pack_3bit(codes)
    assert packed.dtype == torch.uint8
    assert list(packed.shape) == [*shape[:-1], 3 * shape[-1] // 8]
    rows = codes.reshape(-1, shape[-1]).tolist()
    assert packed.flatten().tolist() == [byte for row in rows for byte in packed_by_hand(row)]
    assert torch.equal(unpack_3bit(packed), codes.to(torch.uint8))


@searched
@given(byte_rows(3))
def test_every_byte_string_unpacks_to_its_bits_and_packs_back_to_itself(drawn):
    shape, raw = drawn
    packed = as_tensor(shape, list(raw), torch.uint8)
    codes = unpack_3bit(packed)
    assert codes.dtype == torch.uint8
    assert list(codes.shape) == [*shape[:-1], 8 * shape[-1] // 3]
    rows = packed.reshape(-1, shape[-1]).tolist()
    assert codes.flatten().tolist() == [code for row in rows for code in unpacked_by_hand(row)]
    assert torch.equal(pack_3bit(codes), packed)


def test_three_known_bytes():
    """Literal bytes, so that packing and unpacking cannot drift together."""
    assert pack_3bit(torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])).tolist() == [0x88, 0xC6, 0xFA]
    assert pack_3bit(torch.tensor([7, 0, 0, 0, 0, 0, 0, 0])).tolist() == [0x07, 0, 0]
    assert pack_3bit(torch.tensor([0, 0, 0, 0, 0, 0, 0, 7])).tolist() == [0, 0, 0xE0]
    assert unpack_3bit(torch.tensor([0x88, 0xC6, 0xFA], dtype=torch.uint8)).tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
    ]


@pytest.mark.parametrize("leading", [(), (0,), (3, 0), (0, 2)])
@pytest.mark.parametrize("groups", [0, 1, 4])
def test_nothing_packs_to_nothing(leading, groups):
    if leading or not groups:
        codes, packed = torch.zeros(*leading, 8 * groups).byte(), torch.zeros(*leading, 3 * groups).byte()
        assert torch.equal(pack_3bit(codes), packed)
        assert torch.equal(unpack_3bit(packed), codes)


def test_packing_reads_strided_codes():
    codes = torch.arange(7 * 16).reshape(16, 7) % 8
    assert torch.equal(pack_3bit(codes.T), pack_3bit(codes.T.contiguous()))


def test_rows_that_are_no_whole_groups_are_refused_with_their_length():
    with pytest.raises(ValueError, match=r"multiple of 8, got 12"):
        pack_3bit(torch.zeros(2, 12, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"multiple of 3, got 8"):
        unpack_3bit(torch.zeros(2, 8, dtype=torch.uint8))


@searched
@given(byte_rows(3))
def test_the_levels_of_packed_codes_are_looked_up_one_code_at_a_time(drawn):
    """The decoder gathers four levels per 12-bit word; code by code must give the same."""
    shape, raw = drawn
    levels = reference._levels_of(as_tensor(shape, list(raw), torch.uint8), torch.float64)
    rows = as_tensor(shape, list(raw), torch.uint8).reshape(-1, shape[-1]).tolist()
    want = [layouts.LLOYD_MAX_3BIT[code] for row in rows for code in unpacked_by_hand(row)]
    assert list(levels.shape) == [*shape[:-1], 8 * shape[-1] // 3]
    assert levels.flatten().tolist() == want


# -------------------------------------------------------------------------------------------------- rotation


def sylvester(head_dim: int, block: int) -> torch.Tensor:
    """Entry ``(i, j)`` of a block is ``(-1) ** popcount(i & j) / sqrt(block)``; blocks are diagonal."""
    rows = [[(-1.0) ** (i & j).bit_count() / math.sqrt(block) for j in range(block)] for i in range(block)]
    return torch.block_diag(*[torch.tensor(rows, dtype=torch.float64)] * (head_dim // block))


@pytest.mark.parametrize(("head_dim", "block"), BLOCKS.items())
def test_the_transform_is_the_orthonormal_sylvester_matrix_in_blocks(head_dim, block):
    assert hadamard_block(head_dim) == block
    matrix = hadamard_transform(torch.eye(head_dim, dtype=torch.float64))
    want = sylvester(head_dim, block)
    assert (matrix - want).abs().max() <= 1e-15
    assert (matrix @ matrix.T - torch.eye(head_dim, dtype=torch.float64)).abs().max() <= 1e-13
    x = torch.randn(3, 5, head_dim, dtype=torch.float64)
    assert (hadamard_transform(x) - x @ want).abs().max() <= 1e-13
    single = hadamard_transform(x.float())
    assert single.dtype == torch.float32
    assert (single.double() - x @ want).abs().max() <= 2e-6


@searched
@given(
    st.sampled_from(sorted(BLOCKS)),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 2**32),
    st.floats(1e-30, 1e30),
)
def test_the_transform_is_its_own_inverse_and_keeps_norms(head_dim, leading, seed, magnitude):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, head_dim, generator=generator, dtype=torch.float64) * magnitude
    y = hadamard_transform(x)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    norms = x.norm(dim=-1)
    assert ((y.norm(dim=-1) - norms).abs() <= 1e-12 * norms).all()
    assert ((hadamard_transform(y) - x).abs() <= 1e-12 * norms[..., None]).all()


def test_blocks_of_a_head_dim_do_not_mix():
    """head_dim 80 is five blocks of 16: a change in one stays in it."""
    x = torch.randn(80, dtype=torch.float64)
    changed = x.clone()
    changed[16:32] += torch.randn(16, dtype=torch.float64)
    moved = (hadamard_transform(changed) - hadamard_transform(x)).abs() > 1e-9
    assert moved[16:32].all()
    assert not moved[:16].any()
    assert not moved[32:].any()


@pytest.mark.parametrize("head_dim", [8, 24, 40, 72, 100, 1, 0])
def test_a_head_dim_that_is_no_multiple_of_16_is_refused_by_number(head_dim):
    with pytest.raises(ValueError, match=rf"head_dim {head_dim} .*multiple of 16.*codec='exact'"):
        hadamard_transform(torch.zeros(2, head_dim))


# ----------------------------------------------------------------------------------------------------- signs


@pytest.mark.parametrize(
    ("seed", "head_dim", "want"),
    [
        (0, 16, "---++++-+-+-+++-"),
        (20260424, 64, "-+++------+-+---+-+++-++++++-++++-+-+++-+--++++-+--++--+++-++-++"),
        (20260424, 80, "+----+-++--++---+--++-+++--++--++-++++-++---+---++++-++-+-++-+++-++-+++-+++--++-"),
    ],
)
def test_random_signs_are_pinned_sign_by_sign(seed, head_dim, want):
    """Signs are not stored with a pool, so other signs would make every stored pool decode to noise."""
    signs = random_signs(seed, head_dim)
    assert signs.dtype == torch.float32
    assert signs.tolist() == [1.0 if sign == "+" else -1.0 for sign in want]


def test_random_signs_of_every_head_dim_are_pinned_by_a_digest():
    """All of 16 .. 512, so past the 256 bits of one hash too."""
    text = "\n".join(
        "".join("+" if sign > 0 else "-" for sign in random_signs(20260424, head_dim).tolist())
        for head_dim in range(16, 513, 16)
    )
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "d9ee4561fff7b80c55302705067fe916edbdc71e8aec87fb1e91925f76c99250"


def test_random_signs_depend_on_the_seed_and_on_the_head_dim():
    drawn = [tuple(random_signs(seed, 64).tolist()) for seed in range(50)]
    assert len(set(drawn)) == 50
    assert random_signs(0, 64).tolist() != random_signs(0, 128)[:64].tolist()
    assert set(torch.cat([random_signs(seed, 256) for seed in range(4)]).tolist()) == {-1.0, 1.0}
    share = torch.stack([random_signs(seed, 64) for seed in range(500)]).mean(dim=0)
    assert share.abs().max() < 5 / math.sqrt(500)  # five standard deviations: no position is biased


# ---------------------------------------------------------------------------------------------------- levels


def gaussian_cells() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Points of a fine grid over [-12, 12], their weight under N(0, 1), and which level is nearest."""
    x = torch.linspace(-12.0, 12.0, 1_200_001, dtype=torch.float64)
    weight = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    levels = torch.tensor(layouts.LLOYD_MAX_3BIT, dtype=torch.float64)
    return x, weight, torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)


def test_the_levels_are_the_published_ones():
    assert layouts.LLOYD_MAX_3BIT == (-2.152, -1.344, -0.756, -0.245, 0.245, 0.756, 1.344, 2.152)


def test_the_levels_distortion_on_a_gaussian_is_that_of_the_optimum():
    x, weight, cell = gaussian_cells()
    levels = torch.tensor(layouts.LLOYD_MAX_3BIT, dtype=torch.float64)
    distortion = float((weight * (x - levels[cell]).square()).sum())
    assert distortion == pytest.approx(0.0346, rel=0.01)


def test_each_level_is_the_mean_of_what_it_stands_for():
    """Lloyd's fixed point: the conditional mean of N(0, 1) over the points nearest to a level is that level,
    to the three decimals at which the levels are published.
    """
    x, weight, cell = gaussian_cells()
    mass = torch.zeros(8, dtype=torch.float64).index_add_(0, cell, weight)
    means = torch.zeros(8, dtype=torch.float64).index_add_(0, cell, weight * x) / mass
    assert float(mass.sum()) == pytest.approx(1.0, abs=1e-9)
    assert means.tolist() == pytest.approx(list(layouts.LLOYD_MAX_3BIT), abs=5e-4)
