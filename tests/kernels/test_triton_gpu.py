"""Every Triton kernel on a GPU: the same oracle and bounds as in the interpreter, on grids that a GPU can afford."""

from __future__ import annotations

import importlib.util
import itertools
import math

import pytest
import torch
from torch import Tensor
from triton_cases.common import (
    BOUND,
    INF,
    LAYOUTS,
    check_keys,
    check_values,
    device_kv,
    encode,
    oracle,
    random_segment,
    relative_error,
    visible,
)
from triton_cases.common import (
    check as check_within,
)

from polykv_kernels import reference
from polykv_kernels import triton as backend
from polykv_kernels.layouts import EncodedKV


def missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None if torch.cuda.is_available() else "there is no GPU (torch.cuda.is_available() is false)"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

DEVICE = torch.device("cuda")
DTYPES = (torch.float16, torch.bfloat16)
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Of the output, relative to its element."""
LSE_BOUND = 5e-6
"""GPUs approximate exp2 and log2 to about 2 ** -22."""
SAME = 1e-4
"""Between tiles and splits: a score that differs in its last bits may round a weight to the next float16."""


def attend(
    q: Tensor,
    segment: EncodedKV,
    scale: float,
    *,
    positions: Tensor | None = None,
    window: int | None = None,
    splits: int | None = None,
    out_dtype: torch.dtype | None = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The kernel on the GPU with the shipped tiles; float32 out, so that the output's rounding hides nothing."""
    from polykv_kernels.triton.attention import attend as kernel

    return kernel(
        *(q.to(DEVICE), device_kv(segment, DEVICE), scale),
        q_positions=positions.to(DEVICE) if positions is not None else None,
        window=window,
        splits=splits,
        out_dtype=out_dtype,
    )


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], bound: float = BOUND) -> None:
    check_within(got, want, bound, LSE_BOUND)


# --------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", backend.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_the_oracle(layout: str, head_dim: int, dtype: torch.dtype) -> None:
    """Every tile of the table occurs: 1 to 512 rows times 1 to 8 query heads a KV head."""
    for tokens, (ratio, rows) in itertools.product(
        (1, 63, 64, 65, 513, 3000), ((1, 1), (3, 5), (4, 15), (7, 4), (8, 60), (1, 129), (3, 512))
    ):
        heads = 1 if ratio > 4 else 2
        segment = random_segment(layout, heads, tokens, head_dim, dtype=dtype, exact_tokens=min(tokens, 1 + rows % 40))
        q = torch.randn(rows, heads * ratio, head_dim).to(dtype)
        check(attend(q, segment, head_dim**-0.5), oracle(q, segment, head_dim**-0.5))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_public_operation_rounds_once_to_the_dtype_of_the_query(layout: str, dtype: torch.dtype) -> None:
    segment = random_segment(layout, 2, 700, 64, dtype=dtype)
    q = torch.randn(15, 6, 64).to(dtype)
    on_gpu = device_kv(segment, DEVICE)
    out, lse = backend.shared_attention(q.to(DEVICE), on_gpu, 0.125, q_positions=None, window=None)
    assert out.dtype == dtype
    want = oracle(q, segment, 0.125)
    check((out, lse), want, BOUND + ROUNDING[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_splits_gives_the_same(layout: str) -> None:
    segment = random_segment(layout, 2, 5000, 128, exact_tokens=70)
    q = torch.randn(15, 8, 128).half() * 4
    one = attend(q, segment, 0.1, splits=1)
    check(one, oracle(q, segment, 0.1))
    for splits in (2, 3, 8, 50, 1000):
        some = attend(q, segment, 0.1, splits=splits)
        assert relative_error(some[0], one[0]) <= SAME
        assert relative_error(some[1], one[1]) <= LSE_BOUND


def test_equal_calls_give_equal_bits() -> None:
    segment = random_segment("mixed", 2, 5000, 128)
    q = torch.randn(15, 8, 128).half()
    first = attend(q, segment, 0.1)
    for _ in range(5):
        again = attend(q, segment, 0.1)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("rows", [1, 15, 60, 512])
def test_a_row_gives_the_same_alone_and_among_others(rows: int) -> None:
    segment = random_segment("mixed", 2, 3000, 64)
    q = torch.randn(rows, 6, 64).half()
    together = attend(q, segment, 0.125)
    for row in {0, rows // 2, rows - 1}:
        alone = attend(q[row : row + 1], segment, 0.125)
        assert relative_error(alone[0][0], together[0][row]) <= SAME
        assert relative_error(alone[1][0], together[1][row]) <= LSE_BOUND


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", [0, 37, 4096])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_window_is_by_absolute_position_wherever_it_cuts(layout: str, start: int, kind: torch.dtype) -> None:
    tokens, rows = 300, 100
    segment = random_segment(layout, 2, tokens, 64, start=start, exact_tokens=20)
    positions = torch.arange(start + tokens, start + tokens + rows).to(kind)
    q = torch.randn(rows, 6, 64).half()
    for window in (32, 64, 1, 2, 150, 301, 10**6, 10**12):
        got = attend(q, segment, 0.2, positions=positions, window=window, splits=3)
        check(got, oracle(q, segment, 0.2, visible(segment, positions, window)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_extreme_queries_and_keys(layout: str) -> None:
    tokens = 600
    for logit in (0.0, 1.0, 100.0, 1e4):  # all keys equal
        segment = encode(layout, torch.ones(1, tokens, 64).half(), (1.0 + torch.rand(1, tokens, 64)).half())
        q = (torch.ones(2, 2, 64) * logit).half()
        check(attend(q, segment, 1 / 64), oracle(q, segment, 1 / 64), BOUND + logit * 2**-22 / tokens)
    for at, sign in itertools.product((0, 1, 64, 599), (1.0, -1.0)):  # one huge logit
        keys = torch.zeros(1, tokens, 64)
        keys[0, at] = 100.0
        segment = encode(layout, keys.half(), torch.randn(1, tokens, 64).half())
        q = torch.full((2, 2, 64), sign * 100.0).half()
        check(attend(q, segment, 1 / 64), oracle(q, segment, 1 / 64))
    for size, dtype in itertools.product((1e-4, 1e3), DTYPES):
        segment = random_segment(layout, 1, tokens, 64, dtype=dtype)
        q = (torch.randn(4, 3, 64) * size).to(dtype)
        check(attend(q, segment, 0.125), oracle(q, segment, 0.125))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_denormal_input_neither_overflows_nor_turns_into_nan(layout: str) -> None:
    """float32 denormals may count as 0 on a GPU."""
    keys, values = torch.randn(2, 1, 130, 64)
    for q_size, k_size, v_size in ((1e-40, 1.0, 1.0), (1.0, 1e-40, 1.0), (1.0, 1.0, 1e-40), (1e-40,) * 3):
        segment = encode(layout, (keys * k_size).bfloat16(), (values * v_size).bfloat16())
        q = (torch.randn(2, 2, 64) * q_size).bfloat16()
        got, want = attend(q, segment, 0.125), oracle(q, segment, 0.125)
        assert torch.isfinite(got[0]).all()
        assert (got[0].cpu().double() - want[0]).abs().max() <= BOUND * want[0].abs().max() + 1e-37
        assert relative_error(got[1].cpu(), want[1]) <= LSE_BOUND


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_outlier_value_does_not_disturb_rows_that_ignore_it(layout: str) -> None:
    keys, values = torch.randn(2, 1, 130, 64)
    keys[0, 100], values[0, 100] = -1000.0, 1e4
    segment = encode(layout, keys.half(), values.half())
    q = (torch.rand(3, 2, 64) + 0.5).half()
    check(attend(q, segment, 0.125), oracle(q, segment, 0.125))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_broken_row_stays_broken_and_leaves_the_others_bitwise_alike(layout: str, bad: float) -> None:
    segment = random_segment(layout, 2, 600, 64, dtype=torch.bfloat16)
    q = torch.randn(15, 6, 64).bfloat16()
    want = attend(q, segment, 0.125, splits=3)
    q[4] = bad
    got = attend(q, segment, 0.125, splits=3)
    others = torch.arange(15) != 4
    assert torch.equal(got[0].cpu()[others], want[0].cpu()[others])
    assert torch.equal(got[1].cpu()[others], want[1].cpu()[others])
    assert got[0][4].isnan().all()
    assert got[1][4].isnan().all()


def test_strided_queries_give_what_contiguous_ones_do() -> None:
    segment = random_segment("mixed", 2, 300, 64)
    wide = torch.randn(6, 9, 128, device=DEVICE).half()
    for q in (wide[..., ::2].transpose(0, 1), wide[..., :64].transpose(0, 1)):
        got, want = attend(q, segment, 0.125), attend(q.contiguous(), segment, 0.125)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_attention_in_a_cuda_graph() -> None:
    """No call waits for the GPU or allocates outside torch's pools."""
    segment = device_kv(random_segment("mixed", 2, 3000, 64), DEVICE)
    q = torch.randn(15, 6, 64, device=DEVICE).half()
    want = attend(q, segment, 0.125)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(q, segment, 0.125)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(q, segment, 0.125)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


# ------------------------------------------------------------------------------------------- merge and encoding


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
def test_the_merge_equals_the_reference(count: int, dtype: torch.dtype) -> None:
    for rows, head_dim in ((1, 64), (15, 128), (200, 80)):
        states = [(torch.randn(rows, 3, head_dim).to(dtype), 3 * torch.randn(rows, 3)) for _ in range(count)]
        states[-1][1][0] = -INF
        states[-1][0][0] = 0
        out, lse = backend.merge_attention_states([(o.to(DEVICE), s.to(DEVICE)) for o, s in states])
        want_out, want_lse = reference.merge_attention_states([(o.double(), s.double()) for o, s in states])
        assert out.dtype == dtype
        assert relative_error(out.cpu(), want_out) <= LSE_BOUND + ROUNDING.get(dtype, 0.0)
        seen = want_lse != -INF
        assert torch.equal(lse.cpu() != -INF, seen)
        if seen.any():
            assert relative_error(lse.cpu()[seen], want_lse[seen]) <= LSE_BOUND


@pytest.mark.parametrize("lse", [-1e4, 0.0, 1e4])
def test_states_that_agree_merge_to_what_they_agree_on(lse: float) -> None:
    out = torch.randn(3, 2, 64, device=DEVICE)
    for count in (2, 3, 7):
        merged, total = backend.merge_attention_states([(out, torch.full((3, 2), lse, device=DEVICE))] * count)
        assert relative_error(merged, out) <= LSE_BOUND
        assert float((total - (lse + math.log(count))).abs().max()) <= 2 * abs(lse) * 2**-23 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize("head_dim", backend.HEAD_DIMS)
@pytest.mark.parametrize("per_tensor", [False, True])
def test_key_codes_and_scales_are_the_references_bit_for_bit(
    dtype: torch.dtype, head_dim: int, per_tensor: bool
) -> None:
    for tokens in (1, 63, 64, 65, 1000):
        keys = (torch.randn(2, tokens, head_dim) * (1.0 + torch.arange(head_dim) % 7)).to(dtype)
        got = backend.encode_keys_int8(keys.to(DEVICE), per_tensor=per_tensor)
        check_keys(keys, got.codes, got.scales, per_tensor=per_tensor)
    halves = ((torch.arange(64)[:, None] * torch.ones(head_dim)[None, :] - 32) / 2)[None]
    halves[:, 0] = 127.0
    got = backend.encode_keys_int8(halves.to(dtype).to(DEVICE), per_tensor=per_tensor)
    check_keys(halves.to(dtype), got.codes, got.scales, per_tensor=per_tensor)


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-5, 1e6])
def test_keys_of_any_size_encode_like_the_reference(size: float) -> None:
    keys = torch.randn(1, 130, 64) * size
    keys[..., ::3] = 0.0
    for per_tensor in (False, True):
        got = backend.encode_keys_int8(keys.to(DEVICE), per_tensor=per_tensor)
        check_keys(keys, got.codes, got.scales, per_tensor=per_tensor)


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize("head_dim", backend.HEAD_DIMS)
@pytest.mark.parametrize(("seed", "least_squares"), [(None, False), (11, True), (11, False), (None, True)])
def test_value_codes_and_scales_are_the_references_within_rounding(
    dtype: torch.dtype, head_dim: int, seed: int | None, least_squares: bool
) -> None:
    for tokens in (1, 16, 65, 1000):
        values = torch.randn(2, tokens, head_dim).to(dtype)
        got = backend.encode_values_lloyd3(values.to(DEVICE), sign_seed=seed, least_squares=least_squares)
        check_values(values, got.codes, got.scales, sign_seed=seed, least_squares=least_squares)


def test_scales_that_float16_cannot_hold_are_refused_in_the_references_words() -> None:
    large = torch.randn(1, 70, 64)
    large[0, 66, 3] = 1e8
    with pytest.raises(ValueError, match="too large for a float16 step"):
        backend.encode_keys_int8(large.to(DEVICE), per_tensor=False)
    with pytest.raises(ValueError, match="too long for a float16 scale"):
        backend.encode_values_lloyd3(large.to(DEVICE), sign_seed=3, least_squares=True)


def test_what_the_kernels_encode_they_read() -> None:
    keys, values = torch.randn(2, 2, 1000, 128, device=DEVICE).half()
    segment = EncodedKV(
        *(0, 1000, 2, 128, torch.float16, None),
        backend.encode_keys_int8(keys, per_tensor=False),
        backend.encode_values_lloyd3(values, sign_seed=9, least_squares=True),
    )
    q = torch.randn(15, 8, 128).half()
    check(attend(q, segment, 0.1), oracle(q, device_kv(segment, torch.device("cpu")), 0.1))
