"""The attention ops against a dense float64 oracle: softmax over the concatenated decoded keys."""

import itertools
import math
import random

import pytest
import torch
from helpers import relative_error
from kernel_cases import (
    BOUNDS,
    FULL,
    HEAD_DIMS,
    INF,
    LAYOUTS,
    RATIOS,
    ROWS,
    TOKENS,
    all_pairs,
    assert_close,
    decoded,
    oracle,
    over_backends,
    ragged_oracle,
    random_query,
    random_segment,
    segment_of,
    whole_grid,
    windows,
)

from polykv_kernels import EncodedKV, Int8Keys, LloydMax3Values, cpu, ops

# ------------------------------------------------------------------------------------------ shared attention

UNKIND = (128, 8, 129, 513)  # out is off by 2.5e-6 here when q is scaled, and so rounded, before the product
GRID = over_backends(HEAD_DIMS, RATIOS, ROWS, TOKENS, also=(UNKIND,))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("backend", "head_dim", "ratio", "rows", "tokens"), GRID, indirect=["backend"], ids=str)
def test_shared_attention_equals_the_dense_oracle(layout, backend, head_dim, ratio, rows, tokens):
    """With and without a sliding window, in every dtype and number of splits, for one or two KV heads."""
    heads = 1 if ratio > 4 else 2
    start = 0 if rows % 2 else 100
    segment = random_segment(layout, heads, tokens, head_dim, start)
    keys, values = decoded(segment)
    scale = head_dim**-0.5
    positions, window = windows(start, tokens, rows)
    in_window = torch.arange(start, start + tokens) > positions[:, None] - window
    for dtype, bound in backend.bounds.items():
        q = random_query(rows, ratio * heads, head_dim, dtype)
        for arguments, visible in (
            ({"q_positions": None, "window": None}, None),
            ({"q_positions": positions, "window": window}, in_window),
        ):
            want = oracle(q, keys, values, scale, visible)
            got = ops.shared_attention(q, segment, scale, **arguments)
            assert got[0].dtype == got[1].dtype == dtype
            assert_close(got, want, bound)
            for splits in backend.splits:
                got = cpu.shared_attention(q, segment, scale, **arguments, splits=splits)
                assert_close(got, want, bound)


def test_the_grid_has_every_pair_of_values():
    axes = (HEAD_DIMS, RATIOS, ROWS, TOKENS)
    grid = all_pairs(*axes)
    for i, j in itertools.combinations(range(4), 2):
        assert {(point[i], point[j]) for point in grid} == set(itertools.product(axes[i], axes[j]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", [0, 1, 37, 4096])
def test_a_window_is_by_absolute_position_wherever_it_cuts(backend, layout, start):
    """Rows of successive positions slide the window over three tiles and past them."""
    tokens, window = 150, 64
    segment = random_segment(layout, 2, tokens, 64, start)
    keys, values = decoded(segment)
    positions = torch.arange(start + tokens, start + tokens + 70).to(torch.int32 if start else torch.int64)
    q = random_query(len(positions), 6, 64)
    visible = torch.arange(start, start + tokens) > positions[:, None] - window
    assert visible[:, -1].sum() == 63  # the last 7 rows see nothing
    for size in (window, 1, 2, 150, 151, 10**6):
        visible = torch.arange(start, start + tokens) > positions[:, None] - size
        got = ops.shared_attention(q, segment, 0.2, q_positions=positions, window=size)
        assert_close(got, oracle(q, keys, values, 0.2, visible), BOUNDS[torch.float32])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_whose_window_excludes_the_segment_has_out_0_and_lse_minus_infinity(backend, layout):
    segment = random_segment(layout, 2, 65, 32)
    positions = torch.tensor([65, 500, 80, 64 + 16, 64 + 17])  # with a window of 16, the last key seen is 64
    for dtype in (torch.bfloat16, *backend.bounds):
        q = random_query(5, 4, 32, dtype)
        out, lse = ops.shared_attention(q, segment, 0.2, q_positions=positions, window=16)
        assert torch.isfinite(out).all()
        assert (lse == -INF).all(dim=1).tolist() == [False, True, True, True, True]
        assert (out == 0).flatten(1).all(dim=1).tolist() == [False, True, True, True, True]
        out, lse = ops.shared_attention(q, segment, 0.2, q_positions=positions + 16, window=16)
        assert not out.any()
        assert (lse == -INF).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_without_a_window_change_nothing(backend, layout):
    segment = random_segment(layout, 2, 65, 32)
    q = random_query(3, 4, 32)
    got = ops.shared_attention(q, segment, 0.2, q_positions=torch.arange(3))
    want = ops.shared_attention(q, segment, 0.2)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries_are_computed_in_float32_and_rounded_once(backend, layout, dtype):
    segment = random_segment(layout, 2, 513, 64)
    q = random_query(15, 6, 64, dtype)
    out, lse = ops.shared_attention(q, segment, 0.125)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    want = oracle(q, *decoded(segment), 0.125)
    assert_close((want[0], lse), want, BOUNDS[torch.float32])
    assert ((out.double() - want[0]).abs() <= torch.finfo(dtype).eps / 2 * want[0].abs() + 2e-6).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_queries_give_what_contiguous_ones_do(backend, layout):
    """The model's query is a transposed view ``[1, Hq, rows, D]``."""
    segment = random_segment(layout, 2, 65, 64)
    q = torch.randn(6, 9, 128)[..., ::2].transpose(0, 1)
    got = ops.shared_attention(q, segment, 0.125)
    want = ops.shared_attention(q.contiguous(), segment, 0.125)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_changes_neither_the_segment_nor_the_query(backend, layout):
    segment = random_segment(layout, 2, 130, 32)
    before = {name: tensor.clone() for name, tensor in segment.tensors().items()}
    q = random_query(3, 4, 32)
    kept = q.clone()
    ops.shared_attention(q, segment, 0.2, q_positions=torch.arange(200, 203), window=100)
    ops.decode(segment)
    assert torch.equal(q, kept)
    assert all(torch.equal(before[name], tensor) for name, tensor in segment.tensors().items())


# ---------------------------------------------------------------------------------------------- extreme input


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("logit", [0.0, 1.0, 100.0, 1e4])
def test_equal_keys_give_the_mean_value_however_large_their_logit(backend, layout, logit):
    """Rounding a logit of 1e4 in float32 costs 1e-3, but the same 1e-3 for every key.

    Only the exact first token of ``k8v3`` may be off the rest by that, with 1 / tokens of the weight.
    """
    tokens, head_dim = 700, 64
    segment = segment_of(layout, torch.ones(2, tokens, head_dim), 1.0 + torch.rand(2, tokens, head_dim))
    keys, values = decoded(segment)
    q = torch.ones(3, 4, head_dim) * logit / float(keys[0, 1, 0])  # the quantised key's logit is `logit`
    out, lse = ops.shared_attention(q, segment, 1.0 / head_dim)
    want_out, want_lse = oracle(q, keys, values, 1.0 / head_dim)
    first_token = logit * 2**-23 / tokens if layout == "k8v3" else 0.0
    assert relative_error(out, want_out) <= BOUNDS[torch.float32] + first_token
    assert relative_error(lse, want_lse) <= BOUNDS[torch.float32]
    batched = q.transpose(0, 1)[None]
    out, lse = ops.masked_attention(batched, keys.float()[None], values.float()[None], 1.0 / head_dim)
    assert relative_error(out[0].transpose(0, 1), want_out) <= BOUNDS[torch.float32]
    assert relative_error(lse[0].T, want_lse) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("at", [0, 1, 64, 599])
def test_one_logit_of_1e4_takes_everything(backend, layout, at):
    head_dim = 64
    keys = torch.zeros(1, 600, head_dim)
    keys[0, at] = 100.0
    segment = segment_of(layout, keys, torch.randn(1, 600, head_dim))
    keys, values = decoded(segment)
    for sign in (1.0, -1.0):
        q = torch.full((3, 2, head_dim), sign * 100.0)
        got = ops.shared_attention(q, segment, 1.0 / head_dim)
        want = oracle(q, keys, values, 1.0 / head_dim)
        assert want[1].abs().max() < 1e4 * 1.01
        assert_close(got, want, BOUNDS[torch.float32])
    assert relative_error(ops.shared_attention(q.abs(), segment, 1 / 64)[0], values[:, at].expand(3, 2, 64)) <= 2e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_denormal_input_neither_overflows_nor_turns_into_nan(backend, layout):
    """Numbers of 1e-40: a denormal query or key leaves the mean of the values, denormal values almost 0."""
    keys, values = torch.randn(2, 1, 130, 64)
    for scaled in ((1e-40, 1.0, 1.0), (1.0, 1e-40, 1.0), (1.0, 1.0, 1e-40), (1e-40, 1e-40, 1e-40)):
        segment = segment_of(layout, keys * scaled[1], values * scaled[2])
        q = random_query(3, 3, 64) * scaled[0]
        out, lse = ops.shared_attention(q, segment, 0.125)
        want_out, want_lse = oracle(q, *decoded(segment), 0.125)
        # below 2 ** -126 floats are spaced evenly by 2 ** -149, and each of 130 products is rounded to one
        bound = BOUNDS[torch.float32] * want_out.abs().max() + 130 * 2.0**-149
        assert (out.double() - want_out).abs().max() <= bound
        assert relative_error(lse, want_lse) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", [0, 7])
def test_a_single_token_gives_its_own_value_whatever_the_query(backend, layout, start):
    segment = segment_of(layout, torch.randn(2, 1, 64), torch.randn(2, 1, 64), start)
    keys, values = decoded(segment)
    q = random_query(15, 6, 64) * 50
    out, lse = ops.shared_attention(q, segment, 0.125)
    assert relative_error(out, values[:, 0].repeat_interleave(3, dim=0).expand(15, 6, 64)) <= 1e-6
    assert relative_error(lse, oracle(q, keys, values, 0.125)[1]) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_outlier_token_with_a_huge_value_does_not_disturb_rows_that_ignore_it(backend, layout):
    """A value of 1e4 behind a logit of -1e4 contributes exactly nothing."""
    keys, values = torch.randn(2, 1, 130, 64)
    keys[0, 100] = -1000.0
    values[0, 100] = 1e4
    segment = segment_of(layout, keys, values)
    q = torch.rand(3, 2, 64) + 0.5
    got = ops.shared_attention(q, segment, 0.125)
    want = oracle(q, *decoded(segment), 0.125)
    assert want[0].abs().max() < 10
    assert_close(got, want, BOUNDS[torch.float32])


@pytest.mark.parametrize("below", [14, 40, 80])
def test_a_weight_far_below_the_largest_counts_as_much_as_its_value_is_large(backend, below):
    """Weights of exp(-below) times values of exp(below): half of the output, down to the end of float32's range."""
    tokens, head_dim = 130, 32
    keys = torch.zeros(1, tokens, head_dim)
    keys[:, 1:] = -below / head_dim
    values = torch.rand(1, tokens, head_dim) + 0.5
    values[:, 1:] *= math.exp(below) / tokens
    segment = segment_of("exact", keys, values)
    for rows in (1, 20):
        q = torch.ones(rows, 2, head_dim)
        want = oracle(q, keys, values, 1.0)
        assert (want[0] - values[0, 0]).min() > 0.4  # what the small weights add
        out, lse = ops.shared_attention(q, segment, 1.0)
        rounding = below * 2**-22  # a weight is as exact as its logit
        assert relative_error(out, want[0]) <= BOUNDS[torch.float32] + rounding
        assert (lse.double() - want[1]).abs().max() <= BOUNDS[torch.float32]


# ----------------------------------------------------------------------------------------- independent rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_broken_row_stays_broken_and_leaves_the_others_bitwise_alike(backend, layout, bad):
    """NaN must come out as NaN: an output of 0 would hide a broken forward pass from the logits' check."""
    segment = random_segment(layout, 2, 600, 64)
    q = random_query(15, 6, 64)
    want = ops.shared_attention(q, segment, 0.125)
    q[4] = bad
    got = ops.shared_attention(q, segment, 0.125)
    others = torch.arange(15) != 4
    assert torch.equal(got[0][others], want[0][others])
    assert torch.equal(got[1][others], want[1][others])
    assert got[0][4].isnan().all()
    assert got[1][4].isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_gives_the_same_alone_and_among_others(backend, layout):
    """Batches of different shapes reduce in different orders, each within its own bound of the oracle."""
    bound = 2 * BOUNDS[torch.float32]
    segment = random_segment(layout, 2, 600, 64)
    q = random_query(45, 6, 64)
    together = ops.shared_attention(q, segment, 0.125)
    order = torch.randperm(45)
    shuffled = ops.shared_attention(q[order], segment, 0.125)
    assert relative_error(shuffled[0], together[0][order]) <= bound
    for row in (0, 17, 44):
        alone = ops.shared_attention(q[row : row + 1], segment, 0.125)
        assert relative_error(alone[0][0], together[0][row]) <= bound
        assert relative_error(alone[1][0], together[1][row]) <= bound


def test_a_broken_tail_leaves_the_other_requests_bitwise_alike(backend):
    """Decode steps are padded into one batch, prefill chunks are not: requests must be kept apart in both."""
    lengths, counts = (3, 40, 1, 17, 9), (1, 1, 1, 5, 9)
    keys = [torch.randn(2, length, 32) for length in lengths]
    values = [torch.randn(2, length, 32) for length in lengths]
    q = random_query(sum(counts), 6, 32)
    want = ops.ragged_attention(q, keys, values, counts, 0.2)
    ends = list(itertools.accumulate(counts))
    for broken in range(len(counts)):
        bad_k, bad_v = list(keys), list(values)
        bad_k[broken], bad_v[broken] = keys[broken] * math.nan, values[broken] * math.nan
        got = ops.ragged_attention(q, bad_k, bad_v, counts, 0.2)
        own = torch.zeros(sum(counts), dtype=torch.bool)
        own[ends[broken] - counts[broken] : ends[broken]] = True
        assert torch.equal(got[0][~own], want[0][~own])
        assert torch.equal(got[1][~own], want[1][~own])
        assert got[0][own].isnan().all()


def test_a_broken_row_of_masked_attention_leaves_the_others_bitwise_alike():
    q, keys, values = torch.randn(2, 6, 5, 32), torch.randn(2, 2, 9, 32), torch.randn(2, 2, 9, 32)
    want = ops.masked_attention(q, keys, values, 0.2)
    q[1, :, 3] = math.nan
    out, lse = ops.masked_attention(q, keys, values, 0.2)
    assert out[1, :, 3].isnan().all()
    assert lse[1, :, 3].isnan().all()
    out[1, :, 3], lse[1, :, 3] = want[0][1, :, 3], want[1][1, :, 3]
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


# ---------------------------------------------------------------------------------------------- private tails


@pytest.mark.parametrize(
    ("backend", "head_dim", "ratio", "rows"), over_backends(HEAD_DIMS, RATIOS, ROWS), indirect=["backend"], ids=str
)
def test_ragged_attention_equals_the_causal_oracle_of_each_request(backend, head_dim, ratio, rows):
    """Decode steps and prefill chunks of up to ``rows`` rows together, after tails of 0 to 100 tokens."""
    heads = 1 if ratio > 4 else 2
    rng = random.Random(head_dim * ratio + rows)
    counts = [1, rows, 1, 2, 1]
    rng.shuffle(counts)
    lengths = [count + rng.choice([0, 1, 23, 64, 100]) for count in counts]
    scale = head_dim**-0.5
    for dtype, bound in backend.bounds.items():
        keys = [torch.randn(heads, length, head_dim, dtype=dtype) for length in lengths]
        values = [torch.randn(heads, length, head_dim, dtype=dtype) for length in lengths]
        q = random_query(sum(counts), heads * ratio, head_dim, dtype)
        for window in (None, 1, 20, 64):
            want = ragged_oracle(q, keys, values, counts, scale, window)
            got = ops.ragged_attention(q, keys, values, counts, scale, window=window)
            assert got[0].dtype == got[1].dtype == dtype
            assert_close(got, want, bound)
            for splits in backend.splits:
                got = cpu.ragged_attention(q, keys, values, counts, scale, window=window, splits=splits)
                assert_close(got, want, bound)


def test_ragged_attention_of_half_precision_tails_keeps_q_dtype_and_a_float32_lse(backend):
    keys, values = torch.randn(2, 2, 30, 64, dtype=torch.bfloat16)
    q = random_query(4, 6, 64, torch.bfloat16)
    out, lse = ops.ragged_attention(q, [keys, keys[:, :9]], [values, values[:, :9]], [1, 3], 0.125)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    want = oracle(q[:1], keys, values, 0.125)
    assert relative_error(lse[:1], want[1]) <= BOUNDS[torch.float32]
    assert relative_error(out[:1], want[0]) <= 2**-8


def test_ragged_attention_of_no_requests_is_empty(backend):
    out, lse = ops.ragged_attention(torch.zeros(0, 6, 32), [], [], [], 0.2)
    assert out.shape == (0, 6, 32)
    assert lse.shape == (0, 6)


# ------------------------------------------------------------------------------------------ masked attention


@pytest.mark.parametrize(
    ("head_dim", "ratio", "rows", "tokens"),
    (whole_grid if FULL else all_pairs)(HEAD_DIMS, RATIOS, (1, 3, 15), (1, 65, 513)),
)
def test_masked_attention_equals_the_dense_oracle_for_every_form_of_mask(head_dim, ratio, rows, tokens):
    heads = 1 if ratio > 4 else 2
    scale = head_dim**-0.5
    mask = torch.rand(2, ratio * heads, rows, tokens) < 0.5
    mask[1, :, 0] = False  # a row that sees nothing
    masks = (None, mask, mask[:, :1], mask[:1, :1], mask[0, 0], mask[0, 0, :1])
    for dtype, bound in BOUNDS.items():
        q = torch.randn(2, ratio * heads, rows, head_dim, dtype=dtype)
        keys, values = torch.randn(2, 2, heads, tokens, head_dim, dtype=dtype)
        for given in masks:
            out, lse = ops.masked_attention(q, keys, values, scale, given)
            assert out.dtype == lse.dtype == dtype
            full = None if given is None else given.broadcast_to(2, ratio * heads, rows, tokens)
            for batch, head in itertools.product(range(2), range(ratio * heads)):
                want = oracle(
                    q[batch, head][:, None],
                    keys[batch, head // ratio][None],
                    values[batch, head // ratio][None],
                    scale,
                    None if full is None else full[batch, head],
                )
                assert_close((out[batch, head][:, None], lse[batch, head][:, None]), want, bound)


def test_masked_attention_over_no_keys_is_empty_too():
    """A request without a tail yet: out 0, lse -inf, as when everything is masked."""
    out, lse = ops.masked_attention(torch.randn(1, 6, 3, 32), torch.zeros(1, 2, 0, 32), torch.zeros(1, 2, 0, 32), 0.2)
    assert out.shape == (1, 6, 3, 32)
    assert not out.any()
    assert lse.shape == (1, 6, 3)
    assert (lse == -INF).all()


# ------------------------------------------------------------------------------------------------------ merge


def tiles_of(segment: EncodedKV, first: int, last: int) -> EncodedKV:
    """Packed tiles ``first <= i < last`` of a segment without exact tokens, as a segment of its own."""
    assert segment.exact is None
    assert segment.keys is not None
    assert segment.values is not None
    part = slice(first * 64, min(last * 64, segment.num_tokens))
    count = part.stop - part.start
    scales = segment.keys.scales if segment.keys.per_tensor else segment.keys.scales[:, first:last]
    keys = Int8Keys(segment.keys.codes[:, first:last], scales, count)
    values = LloydMax3Values(segment.values.codes[:, part], segment.values.scales[:, part], segment.values.sign_seed)
    start = segment.start + part.start
    return EncodedKV(start, count, segment.num_kv_heads, segment.head_dim, segment.dtype, None, keys, values)


@pytest.mark.parametrize("layout", ["paper", "k8v3"])
@pytest.mark.parametrize("window", [None, 300])
def test_a_segment_split_at_any_tile_and_merged_equals_the_whole(backend, layout, window):
    """The windows of the last rows exclude the whole first part."""
    segment = random_segment(layout, 2, 500, 64, 1000)
    positions = torch.arange(1500, 1500 + 9 * 30, 30)
    arguments = {"q_positions": positions, "window": window}
    for dtype, bound in backend.bounds.items():
        q = random_query(9, 6, 64, dtype)
        whole = ops.shared_attention(q, segment, 0.125, **arguments)
        for cut in range(1, 8):
            parts = (tiles_of(segment, 0, cut), tiles_of(segment, cut, 8))
            states = [ops.shared_attention(q, part, 0.125, **arguments) for part in parts]
            assert_close(ops.merge_attention_states(*states), tuple(x.double() for x in whole), bound)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_segments_encoded_apart_merge_to_attention_over_all_their_tokens(backend, layout):
    """Segments of 1, 63, 130 and 600 tokens and a private tail, merged in random orders and groupings."""
    sizes = (1, 63, 130, 600)
    starts = [0, *itertools.accumulate(sizes)]
    segments = [random_segment(layout, 2, size, 64, start) for size, start in zip(sizes, starts, strict=False)]
    for dtype, bound in backend.bounds.items():
        q = random_query(5, 6, 64, dtype)
        tail_k, tail_v = torch.randn(2, 2, 20, 64, dtype=dtype)
        states = [ops.shared_attention(q, segment, 0.125) for segment in segments]
        states.append(ops.ragged_attention(q, [tail_k], [tail_v], [5], 0.125))
        dense = [decoded(segment) for segment in segments] + [(tail_k.double(), tail_v.double())]
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*dense, strict=True))
        visible = torch.arange(keys.shape[1]) <= torch.arange(keys.shape[1] - 5, keys.shape[1])[:, None]
        want = oracle(q, keys, values, 0.125, visible)
        rng = random.Random(0)
        for _ in range(20):
            rng.shuffle(states)
            assert_close(ops.merge_attention_states(*states), want, bound)
            cut = rng.randint(1, len(states) - 1)
            halves = ops.merge_attention_states(*states[:cut]), ops.merge_attention_states(*states[cut:])
            assert_close(ops.merge_attention_states(*halves), want, bound)


def test_an_empty_partial_changes_nothing_and_only_empty_ones_stay_empty(backend):
    out, lse = torch.randn(4, 3, 16), torch.randn(4, 3)
    empty = torch.zeros(4, 3, 16), torch.full((4, 3), -INF)
    for states in (((out, lse), empty), (empty, (out, lse)), (empty, (out, lse), empty)):
        merged = ops.merge_attention_states(*states)
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    for count in (1, 2, 5):
        merged = ops.merge_attention_states(*[empty] * count)
        assert not merged[0].any()
        assert (merged[1] == -INF).all()


def test_the_merge_weighs_by_exp_lse(backend):
    """log 1 and log 3: a quarter and three quarters, and log 4."""
    ones, twos = torch.ones(1, 16), torch.full((1, 16), 2.0)
    out, lse = ops.merge_attention_states((ones, torch.zeros(1)), (twos, torch.tensor([math.log(3)])))
    assert out.flatten().tolist() == pytest.approx([1.75] * 16)
    assert lse.tolist() == pytest.approx([math.log(4)])


@pytest.mark.parametrize("lse", [-1e4, -50.0, 0.0, 50.0, 1e4])
def test_partials_that_agree_merge_to_what_they_agree_on_at_any_lse(backend, lse):
    """Weights sum to 1: float32 resolves an lse of 1e4 to 1e-3, and the output must not scale with that."""
    out = torch.randn(3, 2, 16)
    for count in (2, 3, 7):
        merged, total = ops.merge_attention_states(*[(out, torch.full((3, 2), lse))] * count)
        assert relative_error(merged, out) <= 1e-6
        assert float((total - (lse + math.log(count))).abs().max()) <= abs(lse) * 2**-23 + 1e-6


def test_the_merge_keeps_dtypes(backend):
    for dtype, lse_dtype in ((torch.bfloat16, torch.float32), *((dtype, dtype) for dtype in backend.bounds)):
        state = torch.randn(3, 2, 16, dtype=dtype), torch.randn(3, 2, dtype=lse_dtype)
        for count in (1, 2, 3):
            out, lse = ops.merge_attention_states(*[state] * count)
            assert out.dtype == dtype
            assert lse.dtype == lse_dtype


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 4, 32), r"at least one row, got \(0, 4, 32\)"),
        ((4, 32), r"\[rows, Hq, D\].*got \(4, 32\)"),
        ((1, 3, 4, 32), r"\[rows, Hq, D\].*got \(1, 3, 4, 32\)"),
        ((3, 4, 64), r"head_dim 64, the keys have 32"),
        ((3, 5, 32), r"5 query heads .* 2 KV heads"),
        ((3, 1, 32), r"1 query heads .* 2 KV heads"),
    ],
)
def test_a_query_that_does_not_fit_the_segment_is_refused_with_the_numbers(layout, shape, message):
    with pytest.raises(ValueError, match=message):
        ops.shared_attention(torch.zeros(shape), random_segment(layout, 2, 65, 32), 0.2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_a_query_that_is_not_floating_point_is_refused_by_every_op(dtype):
    q = torch.zeros(3, 4, 32, dtype=dtype)
    kv = torch.zeros(2, 5, 32)
    with pytest.raises(TypeError, match=f"q must be floating point, got {dtype}"):
        ops.shared_attention(q, random_segment("k8v3", 2, 65, 32), 0.2)
    with pytest.raises(TypeError, match=f"q must be floating point, got {dtype}"):
        ops.ragged_attention(q, [kv], [kv], [3], 0.2)
    with pytest.raises(TypeError, match=f"q must be floating point, got {dtype}"):
        ops.masked_attention(q.transpose(0, 1)[None], kv[None], kv[None], 0.2)


@pytest.mark.parametrize("positions", [None, torch.arange(4), torch.arange(3)[:, None], torch.tensor(5)])
def test_a_window_without_one_position_a_row_is_refused(positions):
    with pytest.raises(ValueError, match=r"sliding window needs q_positions of shape \[rows\]"):
        ops.shared_attention(
            torch.zeros(3, 4, 32), random_segment("k8v3", 2, 65, 32), 0.2, q_positions=positions, window=8
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_that_is_not_boolean_is_refused(dtype):
    """An additive float mask, taken for a boolean one, would invert its meaning."""
    with pytest.raises(TypeError, match=f"mask must be boolean, got {dtype}"):
        ops.masked_attention(
            torch.zeros(1, 4, 3, 32), *torch.zeros(2, 1, 2, 5, 32), 0.2, torch.zeros(3, 5, dtype=dtype)
        )


@pytest.mark.parametrize(
    ("q", "keys", "values"),
    [
        ((4, 3, 32), (1, 2, 5, 32), (1, 2, 5, 32)),
        ((1, 4, 3, 32), (1, 2, 5, 32), (1, 2, 6, 32)),
        ((2, 4, 3, 32), (1, 2, 5, 32), (1, 2, 5, 32)),
        ((1, 4, 3, 64), (1, 2, 5, 32), (1, 2, 5, 32)),
        ((1, 5, 3, 32), (1, 2, 5, 32), (1, 2, 5, 32)),
    ],
)
def test_masked_attention_refuses_shapes_that_do_not_fit(q, keys, values):
    with pytest.raises(ValueError, match=r"do not fit|head_dim|query heads"):
        ops.masked_attention(torch.zeros(q), torch.zeros(keys), torch.zeros(values), 0.2)


@pytest.mark.parametrize(
    ("rows", "keys", "values", "counts"),
    [
        (3, [(2, 5, 32)], [(2, 5, 32)], [2]),  # rows and counts differ
        (3, [(2, 5, 32)], [(2, 5, 32)] * 2, [3]),
        (3, [(2, 5, 32)] * 2, [(2, 5, 32)] * 2, [3]),
        (3, [(2, 5, 32)], [(2, 4, 32)], [3]),
        (3, [(2, 2, 32)], [(2, 2, 32)], [3]),  # the tail must hold its rows
        (3, [(2, 5, 32)] * 2, [(2, 5, 32)] * 2, [3, 0]),
        (3, [(2, 5, 32)] * 2, [(2, 5, 32)] * 2, [4, -1]),
        (3, [(2, 5, 64)], [(2, 5, 64)], [3]),
        (3, [(3, 5, 32)], [(3, 5, 32)], [3]),
    ],
)
def test_ragged_attention_refuses_tails_and_counts_that_do_not_fit(rows, keys, values, counts):
    with pytest.raises(ValueError, match=r"row_counts|cannot hold|head_dim|query heads"):
        ops.ragged_attention(
            torch.zeros(rows, 4, 32),
            [torch.zeros(k) for k in keys],
            [torch.zeros(v) for v in values],
            counts,
            0.2,
        )


@pytest.mark.parametrize(
    "states",
    [
        (),
        ((torch.zeros(3, 2, 8), torch.zeros(3, 1)),),
        ((torch.zeros(3, 2, 8), torch.zeros(3, 2, 1)),),
        ((torch.zeros(3, 2, 8), torch.zeros(3, 2)), (torch.zeros(4, 2, 8), torch.zeros(4, 2))),
        ((torch.zeros(3, 2, 8), torch.zeros(3, 2)), (torch.zeros(1, 2, 8), torch.zeros(1, 2))),
    ],
)
def test_the_merge_refuses_no_states_and_states_of_different_shapes(states):
    with pytest.raises(ValueError, match=r"at least one|do not fit"):
        ops.merge_attention_states(*states)
