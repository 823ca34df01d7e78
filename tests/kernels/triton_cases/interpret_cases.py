"""Cases for Triton's interpreter: ``python interpret_cases.py CASE...`` prints one JSON line a case.

A process of its own, since ``TRITON_INTERPRET`` counts when the kernels are defined, and a process that interprets
cannot compile. ``test_triton.py`` starts it. The interpreter multiplies on the CPU with numpy, one program after
another.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).parents[1]))
from triton_cases.common import (
    BOUND,
    INF,
    LAYOUTS,
    check,
    check_keys,
    check_values,
    encode,
    oracle,
    random_segment,
    relative_error,
    visible,
)

from polykv_kernels import reference
from polykv_kernels.layouts import DenseKV, EncodedKV, Int8Keys, LloydMax3Values

FULL = os.environ.get("POLYKV_TEST_FULL") == "1"
CASES: dict[str, Callable[[], str]] = {}


def case(function: Callable[[], str]) -> Callable[[], str]:
    CASES[function.__name__] = function
    return function


def attend(
    q: Tensor,
    segment: EncodedKV,
    scale: float,
    *,
    rows: int = 16,
    block_n: int = 64,
    splits: int = 1,
    positions: Tensor | None = None,
    window: int | None = None,
    out_dtype: torch.dtype | None = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The kernel with a tile of ``rows`` rows. Float32 out, so that the output's rounding hides nothing."""
    from polykv_kernels.triton.attention import attend as kernel
    from polykv_kernels.triton.tiles import Tile

    return kernel(
        *(q, segment, scale),
        q_positions=positions,
        window=window,
        tile=Tile(rows, 4, 2, block_n),
        splits=splits,
        out_dtype=out_dtype,
    )


# --------------------------------------------------------------------------------------------------- attention


def grid() -> list[tuple[int, int, int, int, str, torch.dtype, int, int]]:
    """Points at which every pair of values of two axes occurs; in a full run every pair several times."""
    axes: tuple[Sequence[object], ...] = (
        (64, 128, 256),  # head dim
        (1, 3, 4, 7, 8),  # query heads a KV head
        (1, 2, 5, 15, 45),  # rows
        (1, 63, 64, 65, 200),  # tokens
        LAYOUTS,
        (torch.float16, torch.bfloat16),
        (16, 32, 64, 128),  # rows of a tile
        (64, 32),  # packed tokens at a time
    )
    rng = random.Random(0)
    chosen = []
    for _ in range(6 if FULL else 1):
        missing = {
            (i, a, j, b)
            for (i, one), (j, other) in itertools.combinations(enumerate(axes), 2)
            for a in one
            for b in other
        }
        while missing:
            candidates = [tuple(rng.choice(axis) for axis in axes) for _ in range(60)]
            pairs = [
                {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(point), 2)} & missing
                for point in candidates
            ]
            best = max(range(len(candidates)), key=lambda i: len(pairs[i]))
            missing -= pairs[best]
            chosen.append(candidates[best])
    return chosen  # type: ignore[return-value]


@case
def attention_equals_the_oracle_over_the_grid() -> str:
    errors = []
    for head_dim, ratio, rows, tokens, layout, dtype, block_m, block_n in grid():
        exact_tokens = (1, 20, 40)[rows % 3]
        start = tokens % 3 * 100
        segment = random_segment(
            layout, 1, tokens, head_dim, dtype=dtype, start=start, exact_tokens=min(exact_tokens, tokens)
        )
        q = torch.randn(rows, ratio, head_dim).to(dtype)
        got = attend(q, segment, head_dim**-0.5, rows=block_m, block_n=block_n, splits=1 + rows % 3)
        errors.append(check(got, oracle(q, segment, head_dim**-0.5)))
    return f"{len(errors)} points, largest error {max(errors):.2e}"


@case
def several_heads_use_their_own_keys_values_and_scales() -> str:
    errors = []
    for layout in LAYOUTS:
        segment = random_segment(layout, 3, 130, 64)
        q = torch.randn(4, 6, 64).half()
        errors.append(check(attend(q, segment, 0.125, splits=2), oracle(q, segment, 0.125)))
    return f"largest error {max(errors):.2e}"


@case
def a_prefill_chunk_of_512_rows() -> str:
    segment = random_segment("mixed", 1, 70, 64, dtype=torch.bfloat16)
    q = torch.randn(512, 2, 64).bfloat16()
    return f"error {check(attend(q, segment, 0.125, rows=128), oracle(q, segment, 0.125)):.2e}"


@case
def any_number_of_splits_gives_the_same() -> str:
    """To float32's rounding: weights are relative to integers, so they round to float16 alike in every split."""
    largest = 0.0
    for layout in LAYOUTS:
        segment = random_segment(layout, 1, 9 * 64 - 11, 64, exact_tokens=70)
        q = torch.randn(5, 3, 64).half() * 4
        one = attend(q, segment, 0.125, splits=1)
        check(one, oracle(q, segment, 0.125))
        for splits in (3, 8, 100):
            some = attend(q, segment, 0.125, splits=splits)
            largest = max(largest, relative_error(some[0], one[0]), relative_error(some[1], one[1]))
    assert largest <= 2e-6, f"splits change the result by {largest:.3g}"
    return f"largest difference {largest:.2e}"


@case
def a_row_gives_the_same_alone_and_among_others_in_any_tile() -> str:
    segment = random_segment("mixed", 1, 200, 64)
    q = torch.randn(23, 3, 64).half()
    together = attend(q, segment, 0.125, rows=64)
    largest = 0.0
    for row, rows, block_n in ((0, 16, 64), (7, 16, 32), (22, 32, 64)):
        alone = attend(q[row : row + 1], segment, 0.125, rows=rows, block_n=block_n)
        for a, b in zip(alone, together, strict=True):
            largest = max(largest, relative_error(a[0], b[row]))
    assert largest <= 2e-6, f"{largest:.3g}"
    return f"largest difference {largest:.2e}"


@case
def the_public_operation_chooses_a_tile_and_splits_and_keeps_the_dtype() -> str:
    from polykv_kernels import triton as backend

    for dtype, bound in ((torch.float16, BOUND), (torch.bfloat16, 2**-7)):  # the interpreter truncates to bfloat16
        segment = random_segment("mixed", 2, 130, 64, dtype=dtype)
        q = torch.randn(3, 6, 64).to(dtype)
        got = backend.shared_attention(q, segment, 0.125, q_positions=None, window=None)
        assert got[0].dtype == dtype
        check(got, oracle(q, segment, 0.125), bound)
    return ""


@case
def a_window_is_by_absolute_position_wherever_it_cuts() -> str:
    """Rows of successive positions slide the window over the tiles and past them."""
    errors = []
    for layout, start, kind in (
        ("mixed", 0, torch.int64),
        ("mixed", 37, torch.int32),
        ("per_channel", 4096, torch.int64),
        ("per_tensor", 1, torch.int64),
        ("exact", 5, torch.int32),
    ):
        tokens, rows = 150, 40
        segment = random_segment(layout, 1, tokens, 64, start=start, exact_tokens=20)
        positions = torch.arange(start + tokens, start + tokens + rows).to(kind)
        q = torch.randn(rows, 1, 64).half()
        for window in (32, 1, 64, 151, 10**6, 10**12) if FULL or layout == "mixed" else (32, 151):
            seen = visible(segment, positions, window)
            got = attend(q, segment, 0.2, rows=16, splits=2, positions=positions, window=window)
            errors.append(check(got, oracle(q, segment, 0.2, seen)))
    return f"{len(errors)} windows, largest error {max(errors):.2e}"


@case
def a_window_holds_for_every_query_head_of_a_row() -> str:
    segment = random_segment("mixed", 2, 150, 64)
    positions = torch.tensor([150, 170, 400, 151, 160])  # in no order
    q = torch.randn(5, 6, 64).half()
    seen = visible(segment, positions, 100)
    assert not seen[2].any()
    got = attend(q, segment, 0.2, positions=positions, window=100)
    return f"error {check(got, oracle(q, segment, 0.2, seen)):.2e}"


@case
def rows_whose_window_excludes_the_pool_have_out_0_and_lse_minus_infinity() -> str:
    for layout in LAYOUTS:
        segment = random_segment(layout, 1, 65, 64, exact_tokens=1)
        positions = torch.tensor([65, 500, 80, 64 + 16, 64 + 17])  # with a window of 16, the last key seen is 64
        q = torch.randn(5, 2, 64).bfloat16()
        out, lse = attend(q, segment, 0.2, positions=positions, window=16, splits=2, out_dtype=None)
        assert (lse == -INF).all(dim=1).tolist() == [False, True, True, True, True]
        assert (out == 0).flatten(1).all(dim=1).tolist() == [False, True, True, True, True]
        out, lse = attend(q, segment, 0.2, positions=positions + 16, window=16, splits=2)
        assert not out.any() and (lse == -INF).all()
    return ""


@case
def equal_keys_give_the_mean_value_however_large_their_logit() -> str:
    errors = []
    for layout, logit in itertools.product(LAYOUTS, (0.0, 1.0, 100.0, 1e4)):
        segment = encode(layout, torch.ones(1, 200, 64).half(), (1.0 + torch.rand(1, 200, 64)).half())
        q = (torch.ones(2, 2, 64) * logit).half()
        want = oracle(q, segment, 1 / 64)
        # float32 resolves a logit of 1e4 to 1e-3: the exact first token of "mixed" has another key than the others
        errors.append(check(attend(q, segment, 1 / 64, splits=2), want, BOUND + logit * 2**-22 / 200))
    return f"largest error {max(errors):.2e}"


@case
def one_logit_of_1e4_takes_everything() -> str:
    errors = []
    for layout, at, sign in itertools.product(LAYOUTS, (0, 1, 64, 129), (1.0, -1.0)):
        keys = torch.zeros(1, 130, 64)
        keys[0, at] = 100.0
        segment = encode(layout, keys.half(), torch.randn(1, 130, 64).half())
        q = torch.full((2, 2, 64), sign * 100.0).half()
        want = oracle(q, segment, 1 / 64)
        assert 9.9e3 < want[1].abs().max() < 1.01e4 or sign < 0
        errors.append(check(attend(q, segment, 1 / 64), want))
    return f"largest error {max(errors):.2e}"


@case
def queries_of_any_magnitude() -> str:
    """1e-4 and 1e3, where scores must be right to 1e-4 in absolute terms while they are thousands."""
    errors = []
    for layout, size, dtype in itertools.product(LAYOUTS, (1e-4, 1e3), (torch.float16, torch.bfloat16)):
        segment = random_segment(layout, 1, 130, 64, dtype=dtype)
        q = (torch.randn(4, 3, 64) * size).to(dtype)
        errors.append(check(attend(q, segment, 0.125), oracle(q, segment, 0.125)))
    return f"largest error {max(errors):.2e}"


@case
def close_large_logits_are_told_apart() -> str:
    """Two keys in 130 have logits of about 1000 that differ by about 1: an error of 1e-3 of a logit would show."""
    errors = []
    for layout in LAYOUTS:
        torch.manual_seed(5)
        keys = torch.randn(1, 130, 64)
        q = torch.randn(1, 4, 64).half()
        for token in (70, 100):
            keys[0, token] = 0.05 * torch.randn(64) + 8 * q[0].float().sum(0)
        segment = encode(layout, keys.half(), torch.randn(1, 130, 64).half())
        q = (q * 16).half()
        want = oracle(q, segment, 0.125)
        assert want[1].abs().max() > 900
        errors.append(check(attend(q, segment, 0.125), want))
    return f"largest error {max(errors):.2e}"


@case
def channels_of_very_different_size() -> str:
    """An outlier channel 1e3 times the others in the keys, which the queries have 1e-3 times the others."""
    errors = []
    for layout, dtype in itertools.product(("exact", "per_channel", "mixed"), (torch.float16, torch.bfloat16)):
        keys, values = torch.randn(2, 1, 130, 64)
        keys[..., 5] *= 1000.0
        q = torch.randn(4, 3, 64)
        q[..., 5] /= 1000.0
        segment = encode(layout, keys.to(dtype), values.to(dtype))
        errors.append(check(attend(q.to(dtype), segment, 0.125), oracle(q.to(dtype), segment, 0.125)))
    return f"largest error {max(errors):.2e}"


@case
def bfloat16_beyond_the_range_of_float16() -> str:
    """Keys, values and queries of 1e6 and of 1e-30."""
    errors = []
    for layout in ("exact", "mixed"):
        for k_size, v_size, q_size in ((1e6, 1.0, 1e-6), (1.0, 1e6, 1.0), (1e-30, 1.0, 1e30), (1.0, 1e-30, 1.0)):
            if layout == "mixed" and (v_size != 1.0 or k_size < 1.0):
                continue  # the packed form has float16 scales
            keys, values = torch.randn(2, 1, 70, 64)
            segment = encode(layout, (keys * k_size).bfloat16(), (values * v_size).bfloat16())
            q = (torch.randn(2, 2, 64) * q_size).bfloat16()
            errors.append(check(attend(q, segment, 0.125), oracle(q, segment, 0.125)))
    return f"largest error {max(errors):.2e}"


@case
def denormal_input_neither_overflows_nor_turns_into_nan() -> str:
    """Numbers of 1e-40: a denormal query or key leaves the mean of the values, denormal values almost 0."""
    for layout in LAYOUTS:
        keys, values = torch.randn(2, 1, 70, 64)
        for q_size, k_size, v_size in ((1e-40, 1.0, 1.0), (1.0, 1e-40, 1.0), (1.0, 1.0, 1e-40), (1e-40,) * 3):
            segment = encode(layout, (keys * k_size).bfloat16(), (values * v_size).bfloat16())
            q = (torch.randn(2, 2, 64) * q_size).bfloat16()
            got, want = attend(q, segment, 0.125), oracle(q, segment, 0.125)
            assert torch.isfinite(got[0]).all() and torch.isfinite(got[1]).all()
            assert (got[0].double() - want[0]).abs().max() <= BOUND * want[0].abs().max() + 1e-37
            assert relative_error(got[1], want[1]) <= 2e-6
    return ""


@case
def an_outlier_value_does_not_disturb_rows_that_ignore_it() -> str:
    errors = []
    for layout, at in itertools.product(LAYOUTS, (0, 100)):
        keys, values = torch.randn(2, 1, 130, 64)
        keys[0, at], values[0, at] = -1000.0, 1e4
        segment = encode(layout, keys.half(), values.half())
        q = (torch.rand(3, 2, 64) + 0.5).half()
        want = oracle(q, segment, 0.125)
        assert want[0].abs().max() < 10
        errors.append(check(attend(q, segment, 0.125), want))
    return f"largest error {max(errors):.2e}"


@case
def a_segment_without_tokens_leaves_every_row_empty() -> str:
    none = torch.zeros(2, 0, 64).half()
    segment = EncodedKV(0, 0, 2, 64, torch.float16, DenseKV(none, none), None, None)
    out, lse = attend(torch.randn(3, 4, 64).half(), segment, 0.125, splits=3)
    assert not out.any() and (lse == -INF).all()
    return ""


@case
def a_single_token_gives_its_own_value_whatever_the_query() -> str:
    errors = []
    for layout in LAYOUTS:
        segment = random_segment(layout, 2, 1, 64)
        q = torch.randn(5, 6, 64).half() * 50
        errors.append(check(attend(q, segment, 0.125), oracle(q, segment, 0.125), 2.0**-11))
    return f"largest error {max(errors):.2e}"


@case
def a_broken_row_stays_broken_and_leaves_the_others_bitwise_alike() -> str:
    """NaN must come out as NaN: an output of 0 would hide a broken forward pass."""
    for layout, bad in itertools.product(LAYOUTS, (math.nan, INF)):
        segment = random_segment(layout, 1, 130, 64, dtype=torch.bfloat16)
        q = torch.randn(6, 3, 64).bfloat16()
        want = attend(q, segment, 0.125, splits=2)
        q[4] = bad
        got = attend(q, segment, 0.125, splits=2)
        others = torch.arange(6) != 4
        assert torch.equal(got[0][others], want[0][others]) and torch.equal(got[1][others], want[1][others])
        assert got[0][4].isnan().all() and got[1][4].isnan().all()
    q = torch.randn(6, 3, 64).half()
    q[2, 1, 33] = math.nan  # one element
    out, lse = attend(q, segment, 0.125)
    assert out[2, 1].isnan().all() and lse[2, 1].isnan() and int(lse.isnan().sum()) == 1
    return ""


@case
def strided_queries_and_sliced_segments() -> str:
    """The model's query is a transposed view; a part of a segment is a view too."""
    segment = random_segment("per_channel", 2, 260, 64)
    wide = torch.randn(6, 9, 128).half()
    for q in (wide[..., ::2].transpose(0, 1), wide[..., :64].transpose(0, 1)):
        got, want = attend(q, segment, 0.125), attend(q.contiguous(), segment, 0.125)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert segment.keys is not None and segment.values is not None
    keys = Int8Keys(segment.keys.codes[:, 1:3], segment.keys.scales[:, 1:3], 100)
    values = LloydMax3Values(segment.values.codes[:, 64:164], segment.values.scales[:, 64:164], 7)
    part = EncodedKV(64, 100, 2, 64, torch.float16, None, keys, values)
    q = torch.randn(3, 4, 64).half()
    error = check(attend(q, part, 0.125), oracle(q, part, 0.125))
    storage = torch.zeros(2 * 100 * 24 + 1, dtype=torch.uint8)  # codes that do not lie on a word boundary
    odd = storage[1:].view(2, 100, 24)
    odd.copy_(values.codes)
    shifted = EncodedKV(64, 100, 2, 64, torch.float16, None, keys, LloydMax3Values(odd, values.scales, 7))
    assert torch.equal(attend(q, shifted, 0.125)[0], attend(q, part, 0.125)[0])
    both = random_segment("exact", 2, 50, 64)
    assert both.exact is not None
    view = type(both.exact)(both.exact.keys[:, 5:30], both.exact.values[:, 5:30])
    part = EncodedKV(5, 25, 2, 64, torch.float16, view, None, None)
    return f"largest error {max(error, check(attend(q, part, 0.125), oracle(q, part, 0.125))):.2e}"


@case
def exact_tokens_in_float32() -> str:
    """A float32 pool read by 16-bit queries: its keys are rounded to float16's precision."""
    segment = random_segment("exact", 1, 70, 64, dtype=torch.float32)
    q = torch.randn(3, 2, 64).half()
    return f"error {check(attend(q, segment, 0.125), oracle(q, segment, 0.125), BOUND, 1e-3):.2e}"


@case
def attention_changes_neither_the_segment_nor_the_query() -> str:
    segment = random_segment("mixed", 2, 130, 64)
    before = {name: tensor.clone() for name, tensor in segment.tensors().items()}
    q = torch.randn(3, 4, 64).half()
    kept = q.clone()
    attend(q, segment, 0.2, positions=torch.arange(200, 203), window=100)
    assert torch.equal(q, kept)
    assert all(torch.equal(before[name], tensor) for name, tensor in segment.tensors().items())
    return ""


@case
def the_bfloat16_dot_of_the_interpreter_is_wrong_and_we_do_not_use_it() -> str:
    """If it is right one day, this still passes, and says so: only the claim in the report changes."""
    import triton
    import triton.language as tl

    @triton.jit
    def product(a_ptr, b_ptr, c_ptr, CAST: tl.constexpr):  # type: ignore[no-untyped-def]
        i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
        a, b = tl.load(a_ptr + i * 16 + j).to(CAST), tl.load(b_ptr + i * 16 + j).to(CAST)
        tl.store(c_ptr + i * 16 + j, tl.dot(a, b))

    a, b, c = torch.randn(16, 16), torch.randn(16, 16), torch.empty(16, 16)
    product[(1,)](a, b, c, CAST=tl.float16)
    half = relative_error(c, a @ b)
    assert half < 2e-3
    product[(1,)](a, b, c, CAST=tl.bfloat16)
    brain = relative_error(c, a @ b)
    state = "wrong" if brain > 0.1 else "right"
    # bfloat16 queries, keys and values, yet float16's precision: no bfloat16 product is involved
    segment = random_segment("mixed", 1, 130, 64, dtype=torch.bfloat16, exact_tokens=64)
    q = torch.randn(4, 2, 64).bfloat16()
    error = check(attend(q, segment, 0.125), oracle(q, segment, 0.125))
    return f"tl.dot of bfloat16 is {state} (error {brain:.2e}, float16 {half:.2e}); our attention {error:.2e}"


# ------------------------------------------------------------------------------------------------------- merge


@case
def the_merge_equals_the_reference() -> str:
    from polykv_kernels.triton import merge_attention_states as merge

    largest = 0.0
    for count, dtype, head_dim in itertools.product(
        (1, 2, 3, 4, 5, 8), (torch.float32, torch.bfloat16, torch.float16), (64, 80)
    ):
        states = [(torch.randn(5, 3, head_dim).to(dtype), 3 * torch.randn(5, 3)) for _ in range(count)]
        states[-1][1][2] = -INF
        states[-1][0][2] = 0
        out, lse = merge(states)
        want_out, want_lse = reference.merge_attention_states([(o.double(), s.double()) for o, s in states])
        assert out.dtype == dtype and lse.dtype == torch.float32
        bound = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
        error = relative_error(out, want_out)
        assert error <= bound, f"{count} states of {dtype}: {error:.3g}"
        assert torch.equal(lse == -INF, want_lse == -INF)
        seen = want_lse != -INF
        assert relative_error(lse[seen], want_lse[seen]) <= 2e-6
        largest = max(largest, error if dtype == torch.float32 else 0.0)
    return f"largest float32 error {largest:.2e}"


@case
def empty_states_change_nothing_and_only_empty_ones_stay_empty() -> str:
    from polykv_kernels.triton import merge_attention_states as merge

    out, lse = torch.randn(4, 3, 64), torch.randn(4, 3)
    empty = torch.zeros(4, 3, 64), torch.full((4, 3), -INF)
    for states in (((out, lse), empty), (empty, (out, lse)), (empty, (out, lse), empty)):
        merged = merge(states)
        assert torch.equal(merged[0], out)
        assert relative_error(merged[1], lse) <= 1e-6
    for count in (1, 2, 5):
        merged = merge([empty] * count)
        assert not merged[0].any() and (merged[1] == -INF).all()
    return ""


@case
def states_that_agree_merge_to_what_they_agree_on_at_any_lse() -> str:
    from polykv_kernels.triton import merge_attention_states as merge

    out = torch.randn(3, 2, 64)
    for lse, count in itertools.product((-1e4, -50.0, 0.0, 50.0, 1e4), (2, 3, 7)):
        merged, total = merge([(out, torch.full((3, 2), lse))] * count)
        assert relative_error(merged, out) <= 1e-6
        assert float((total - (lse + math.log(count))).abs().max()) <= 2 * abs(lse) * 2**-23 + 1e-6
    return ""


@case
def a_broken_state_row_stays_broken_alone() -> str:
    from polykv_kernels.triton import merge_attention_states as merge

    states = [(torch.randn(9, 64), torch.randn(9)) for _ in range(3)]
    want = merge(states)
    states[1][0][4], states[1][1][4] = math.nan, math.nan
    out, lse = merge(states)
    others = torch.arange(9) != 4
    assert out[4].isnan().all() and lse[4].isnan()
    assert torch.equal(out[others], want[0][others]) and torch.equal(lse[others], want[1][others])
    return ""


@case
def the_merge_takes_strided_states_and_refuses_float64() -> str:
    from polykv_kernels.triton import merge_attention_states as merge

    states = [(torch.randn(3, 5, 64).transpose(0, 1), torch.randn(3, 5).T) for _ in range(2)]
    out, _ = merge(states)
    assert relative_error(out, reference.merge_attention_states(states)[0]) <= 1e-6
    with pytest.raises(TypeError, match="float64"):
        merge([(out.double(), out[..., 0])] * 2)
    return ""


# ---------------------------------------------------------------------------------------------------- encoding


@case
def key_codes_and_scales_are_the_references_bit_for_bit() -> str:
    from polykv_kernels.triton import encode_keys_int8

    count = 0
    for dtype, head_dim, tokens, per_tensor in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16),
        (64, 128, 256),
        (1, 63, 64, 65, 130) if FULL else (1, 65),
        (False, True),
    ):
        keys = (torch.randn(2, tokens, head_dim) * (1.0 + torch.arange(head_dim) % 7)).to(dtype)
        got = encode_keys_int8(keys, per_tensor=per_tensor)
        assert got.num_tokens == tokens and got.per_tensor == per_tensor
        check_keys(keys, got.codes, got.scales, per_tensor=per_tensor)
        count += 1
    return f"{count} shapes"


@case
def keys_of_every_kind_encode_like_the_reference() -> str:
    """Ties of the rounding, zero channels, denormals, scales next to float16's limits, strided views."""
    from polykv_kernels.triton import encode_keys_int8

    halves = (torch.arange(64)[:, None] * torch.ones(64)[None, :] - 32) / 2  # codes at .5 exactly
    halves[0] = 127.0
    zeros = torch.randn(64, 64)
    zeros[:, ::3] = 0.0
    kinds = {
        "ties": halves,
        "zero channels": zeros,
        "all zero": torch.zeros(64, 64),
        "float32 denormals": torch.randn(64, 64) * 1e-40,
        "float16 denormal scales": torch.randn(64, 64) * 1e-5,
        "tiny": torch.randn(64, 64) * 1e-12,
        "near the limit": torch.rand(64, 64) * 127 * 65504,
        "strided": torch.randn(64, 128)[:, ::2],
        "transposed": torch.randn(64, 64).T,
    }
    for name, keys in kinds.items():
        for per_tensor in (False, True):
            got = encode_keys_int8(keys[None], per_tensor=per_tensor)
            try:
                check_keys(keys[None], got.codes, got.scales, per_tensor=per_tensor)
            except AssertionError as error:
                raise AssertionError(f"{name}, per_tensor={per_tensor}: {error}") from error
    return f"{len(kinds)} kinds"


def same_error(call: Callable[[], object], reference_call: Callable[[], object]) -> str:
    messages = []
    for function in (call, reference_call):
        try:
            function()
        except ValueError as error:
            messages.append(str(error))
        else:
            raise AssertionError("nothing was raised")
    assert messages[0] == messages[1], messages
    return messages[0]


@case
def scales_that_float16_cannot_hold_are_refused_in_the_references_words() -> str:
    from polykv_kernels import triton as backend

    large = torch.randn(1, 70, 64)
    large[0, 66, 3] = 1e8
    message = same_error(
        lambda: backend.encode_keys_int8(large, per_tensor=False),
        lambda: reference.encode_keys_int8(large, per_tensor=False),
    )
    assert "too large for a float16 step" in message
    for size in (1e8, 1e30):
        message = same_error(
            lambda size=size: backend.encode_values_lloyd3(large * size, sign_seed=3, least_squares=True),
            lambda size=size: reference.encode_values_lloyd3(large * size, sign_seed=3, least_squares=True),
        )
    assert "too long for a float16 scale" in message
    return ""


@case
def value_codes_and_scales_are_the_references_within_rounding() -> str:
    from polykv_kernels.triton import encode_values_lloyd3

    codes = scales = total = 0
    for dtype, head_dim, tokens, (seed, least_squares) in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16),
        (64, 128, 256),
        (1, 16, 65) if FULL else (17,),
        ((None, False), (11, True), (11, False), (None, True)),
    ):
        values = torch.randn(2, tokens, head_dim).to(dtype)
        got = encode_values_lloyd3(values, sign_seed=seed, least_squares=least_squares)
        assert got.sign_seed == seed
        other = check_values(values, got.codes, got.scales, sign_seed=seed, least_squares=least_squares)
        codes, scales, total = codes + other[0], scales + other[1], total + values.numel()
    return f"{codes} of {total} codes differ, at thresholds; {scales} scales by one step"


@case
def values_of_every_kind_encode_like_the_reference() -> str:
    from polykv_kernels.triton import encode_values_lloyd3

    outlier = torch.randn(40, 64)
    outlier[7] *= 1e4
    kinds = {
        "zero": torch.zeros(40, 64),
        "some zero": torch.randn(40, 64) * (torch.arange(40)[:, None] % 2),
        "constant": torch.ones(40, 64),
        "one channel": torch.eye(64)[:40] * 3,
        "outlier": outlier,
        "small": torch.randn(40, 64) * 1e-6,
        "denormal": torch.randn(40, 64) * 1e-40,
        "large": torch.randn(40, 64) * 1e4,
        "strided": torch.randn(40, 128)[:, ::2],
        "transposed": torch.randn(64, 40).T,
    }
    for name, values in kinds.items():
        for seed, least_squares in ((5, True), (None, False)):
            got = encode_values_lloyd3(values[None], sign_seed=seed, least_squares=least_squares)
            try:
                check_values(values[None], got.codes, got.scales, sign_seed=seed, least_squares=least_squares)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
    return f"{len(kinds)} kinds"


@case
def what_the_kernels_encode_they_read() -> str:
    """Encoders and attention together, without the reference in between."""
    from polykv_kernels import triton as backend

    keys, values = torch.randn(2, 2, 130, 128).half()
    segment = EncodedKV(
        *(0, 130, 2, 128, torch.float16, None),
        backend.encode_keys_int8(keys, per_tensor=False),
        backend.encode_values_lloyd3(values, sign_seed=9, least_squares=True),
    )
    q = torch.randn(3, 4, 128).half()
    return f"error {check(attend(q, segment, 0.1), oracle(q, segment, 0.1)):.2e}"


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    warnings.simplefilter("ignore")  # numpy's, about logarithms of 0
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        torch.manual_seed(0)
        started = time.perf_counter()
        try:
            result = {"ok": True, "text": CASES[name]()}
        except Exception:
            result = {"ok": False, "text": traceback.format_exc()}
        print(json.dumps({"case": name, "seconds": time.perf_counter() - started, **result}), flush=True)


if __name__ == "__main__":
    main()
