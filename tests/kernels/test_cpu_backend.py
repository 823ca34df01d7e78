"""What is particular to the C++ kernels: threads, processes, views of memory, encoding, and when they are chosen.

That they compute attention is in ``test_attention.py``, for every backend alike.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BOUNDS,
    FULL,
    LAYOUTS,
    SPLITS,
    Backend,
    assert_close,
    assert_equal,
    decoded,
    isas,
    merge_oracle,
    oracle,
    ragged_oracle,
    random_query,
    random_segment,
    segment_of,
    unavailable,
)
from torch import Tensor

from polykv_kernels import DenseKV, EncodedKV, Int8Keys, LloydMax3Values, cpu, ops, reference
from polykv_kernels.layouts import LLOYD_MAX_3BIT
from polykv_kernels.ops import BackendError
from polykv_kernels.reference import hadamard_transform, pack_3bit, random_signs, unpack_3bit

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled CPU kernels: {unavailable()}")
searched = settings(max_examples=1000 if FULL else 60, deadline=None, derandomize=not FULL, database=None)

BOUND = BOUNDS[torch.float32]
HEAD_DIMS = tuple(range(16, 257, 16))
SEED = 20260424
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def every_isa(test: Callable[[str], None]) -> None:
    for isa in isas():
        with Backend("cpu", isa, False).use():
            test(isa)


# ---------------------------------------------------------------------------------------- threads and processes


def flat(result: Any) -> tuple[Tensor, ...]:
    """The tensors of any operation's result."""
    if isinstance(result, tuple):
        return result
    return (result.codes.view(torch.uint8), result.scales)


def bits(result: Any) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in flat(result)]


def large_calls() -> dict[str, Callable[[], Any]]:
    """Calls of every operation with enough work that several threads share it (small ones stay on the caller's)."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    k8v3, paper, exact = (random_segment(layout, 2, 1000, 64) for layout in ("k8v3", "paper", "exact"))
    few, many = randn(3, 6, 64), randn(45, 6, 64)
    positions = torch.arange(1000, 1000 + 45 * 20, 20)
    lengths, counts = (700, 90, 300, 1), (60, 1, 5, 1)
    tails = [randn(2, length, 64) for length in lengths]
    rows = randn(sum(counts), 6, 64)
    states = [(randn(4096, 4, 64), randn(4096, 4)) for _ in range(3)]
    dense = randn(4, 1000, 128)
    return {
        "few rows": lambda: ops.shared_attention(few, k8v3, 0.125),
        "many rows": lambda: ops.shared_attention(many, k8v3, 0.125),
        "a window": lambda: ops.shared_attention(many, k8v3, 0.125, q_positions=positions, window=500),
        "one scale": lambda: ops.shared_attention(many, paper, 0.125),
        "exact": lambda: ops.shared_attention(many, exact, 0.125),
        "tails": lambda: ops.ragged_attention(rows, tails, tails, counts, 0.125, window=250),
        "merge": lambda: ops.merge_attention_states(*states),
        "keys": lambda: ops.encode_keys_int8(dense),
        "keys with one scale": lambda: ops.encode_keys_int8(dense, per_tensor=True),
        "values": lambda: ops.encode_values_lloyd3(dense, sign_seed=SEED),
    }


def test_results_are_bitwise_the_same_with_any_number_of_threads(isa):
    for name, call in large_calls().items():
        torch.set_num_threads(1)
        want = bits(call())
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            for _ in range(3):  # which thread does what differs from time to time
                assert bits(call()) == want, f"{name} with {threads} threads"


def test_callers_on_many_threads_do_not_disturb_each_other(isa):
    """One of them gets the workers, the others do their work alone: shapes are mixed, so all is in use at once."""
    calls = large_calls()
    torch.set_num_threads(1)
    want = {name: bits(call()) for name, call in calls.items()}
    torch.set_num_threads(3)
    start = threading.Barrier(8)

    def caller(seed: int) -> None:
        names = [*calls] * 2
        random.Random(seed).shuffle(names)
        start.wait(timeout=60)
        for name in names:
            assert bits(calls[name]()) == want[name], name

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(caller, seed) for seed in range(8)]:
            future.result(timeout=300)


def test_other_python_threads_run_during_a_call():
    """They do since ctypes releases the GIL; a thread that ticks would stop otherwise."""
    segment = random_segment("k8v3", 2, 1000, 128)
    q = random_query(2000, 8, 128)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.005):
            ticks.append(time.perf_counter())

    with Backend("cpu", "portable", False).use():
        thread = threading.Thread(target=tick)
        thread.start()
        try:
            for _ in range(3):  # the machine may be busy
                before = time.perf_counter()
                ops.shared_attention(q, segment, 0.1)
                after = time.perf_counter()
                seen = sum(before + 0.01 < t < after - 0.01 for t in ticks)
                if seen >= 3:
                    break
        finally:
            stop.set()
            thread.join()
    assert after - before > 0.05, "the call is too short to show anything"
    assert seen >= 3, f"{seen} ticks in {after - before:.2f} s"


SEGMENT = """
import torch
from polykv_kernels import EncodedKV, cpu, ops, reference

def random_segment(heads, tokens, head_dim):
    keys, values = torch.randn(2, heads, tokens, head_dim)
    keys = reference.encode_keys_int8(keys, per_tensor=False)
    values = reference.encode_values_lloyd3(values, sign_seed=1, least_squares=True)
    return EncodedKV(0, tokens, heads, head_dim, torch.float32, None, keys, values)
"""
FORK = """
import os, sys, threading

torch.set_num_threads(3)
segment, q = random_segment(2, 1000, 64), torch.randn(15, 6, 64)

def compute():
    # through numpy: torch's own workers are gone in a child
    return [x.numpy().tobytes() for x in ops.shared_attention(q, segment, 0.125)]

with ops.use_backend("cpu"):
    want = compute()
    stop = threading.Event()
    def work():
        while not stop.is_set():
            compute()
    others = [threading.Thread(target=work, daemon=True) for _ in range(int(sys.argv[1]))]
    for thread in others:
        thread.start()
    for _ in range(6):
        child = os.fork()
        if child == 0:
            ok = all(compute() == want for _ in range(3))
            if os.path.isdir("/proc/self/task"):  # only the thread that forks lives on: the others must be new
                ok &= len(os.listdir("/proc/self/task")) > 1
            grandchild = os.fork()  # a child that used them may fork as well
            if grandchild == 0:
                os._exit(0 if compute() == want else 1)
            ok &= os.waitpid(grandchild, 0)[1] == 0
            os._exit(0 if ok else 1)
        assert compute() == want
        assert os.waitpid(child, 0)[1] == 0, "the child computed something else"
        assert compute() == want
    stop.set()
    for thread in others:
        thread.join()
print("ok")
"""


def run_python(code: str, *arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter; a variable that is None is unset."""
    env = dict(os.environ)
    for name, value in environment.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SEGMENT + code, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("busy", [0, 2], ids=["idle", "busy"])
def test_a_process_may_fork_after_using_the_kernels_and_while_it_uses_them(busy):
    """The workers do not survive a fork: a child that waited for them would hang."""
    done = run_python(FORK, str(busy))
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_thread_that_ends_leaves_no_memory_behind():
    """Each thread has its own working memory, 0.5 MB at this head dim."""
    segment, q = random_segment("k8v3", 2, 130, 256), random_query(20, 6, 256)

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def run(count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=ops.shared_attention, args=(q, segment, 0.1))
            thread.start()
            thread.join()

    with ops.use_backend("cpu"):
        run(30)
        before = resident()
        run(200)
        assert resident() - before < 20e6


# ----------------------------------------------------------------------------------------------- shapes and paths


@pytest.mark.parametrize("rows", [*range(1, 15), 95, 96, 97, 192, 193])
def test_every_size_of_panel_and_of_block_of_rows_computes_the_same_attention(rows):
    """Rows go through the multiply in panels of up to 12, and through the units of work in blocks of up to 96."""
    tokens, head_dim = 130, 48
    q = random_query(rows, 2, head_dim)
    positions = torch.randint(tokens, tokens + 200, (rows,))
    for layout in LAYOUTS:
        segment = random_segment(layout, 2, tokens, head_dim)
        keys, values = decoded(segment)
        want = oracle(q, keys, values, 0.2)
        visible = torch.arange(tokens) > positions[:, None] - 150
        want_in_window = oracle(q, keys, values, 0.2, visible)

        def check(isa: str, segment: EncodedKV = segment, want: Any = want, windowed: Any = want_in_window) -> None:
            assert_close(ops.shared_attention(q, segment, 0.2), want, BOUND)
            got = ops.shared_attention(q, segment, 0.2, q_positions=positions, window=150)
            assert_close(got, windowed, BOUND)

        every_isa(check)
    # a tail of its own rows, and a longer one: causal, so that each row sees another number of tokens
    keys_, values_ = [torch.randn(2, rows, head_dim)], [torch.randn(2, rows, head_dim)]
    want = ragged_oracle(q, keys_, values_, [rows], 0.2)
    every_isa(lambda isa: assert_close(ops.ragged_attention(q, keys_, values_, [rows], 0.2), want, BOUND))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_multiple_of_16_up_to_256_is_a_head_dim(head_dim):
    tokens = 77
    for rows, layout in itertools.product((1, 5, 13), LAYOUTS):
        segment = random_segment(layout, 2, tokens, head_dim)
        q = random_query(rows, 6, head_dim)
        want = oracle(q, *decoded(segment), head_dim**-0.5)
        every_isa(
            lambda isa, q=q, segment=segment, want=want: assert_close(
                ops.shared_attention(q, segment, head_dim**-0.5), want, BOUND
            )
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 4, 133])
def test_a_window_may_begin_at_any_token_of_any_tile(isa, layout, rows):
    """Every first token there is, from before the segment to past it; few rows take another path than many."""
    tokens, start, window = 130, 100, 50
    segment = random_segment(layout, 2, tokens, 32, start)
    keys, values = decoded(segment)
    first = torch.arange(start - 1, start + tokens + 2)  # first visible token
    for part in first.split(rows):
        if len(part) < rows:
            break
        q = random_query(rows, 2, 32)
        visible = torch.arange(start, start + tokens) >= part[:, None]
        got = ops.shared_attention(q, segment, 0.2, q_positions=part + window - 1, window=window)
        assert_close(got, oracle(q, keys, values, 0.2, visible), BOUND)


def test_a_window_of_any_size_cuts_a_tail(isa):
    lengths, counts = (200, 70, 129), (3, 1, 40)
    keys = [torch.randn(2, length, 32) for length in lengths]
    values = [torch.randn(2, length, 32) for length in lengths]
    q = random_query(sum(counts), 4, 32)
    for window in (1, 2, 31, 63, 64, 65, 127, 128, 129, 199, 200, 10**12):
        want = ragged_oracle(q, keys, values, counts, 0.2, window)
        assert_close(ops.ragged_attention(q, keys, values, counts, 0.2, window=window), want, BOUND)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splitting_the_tokens_changes_results_by_rounding_only(isa, layout):
    segment = random_segment(layout, 2, 1000, 128)
    for rows in (1, 60):
        q = random_query(rows, 6, 128)
        positions = torch.arange(rows) * 10 + 1100
        for window in (None, 700):
            arguments = {"q_positions": positions, "window": window}
            whole = cpu.shared_attention(q, segment, 0.09, **arguments, splits=1)
            for splits in (0, *SPLITS, 16, 1000):
                got = cpu.shared_attention(q, segment, 0.09, **arguments, splits=splits)
                assert_close(got, tuple(x.double() for x in whole), 1e-6)


def test_splitting_tails_changes_results_by_rounding_only(isa):
    keys, values = [torch.randn(2, n, 64) for n in (700, 65)], [torch.randn(2, n, 64) for n in (700, 65)]
    q = random_query(40, 6, 64)
    for window in (None, 300):
        whole = cpu.ragged_attention(q, keys, values, [39, 1], 0.125, window=window, splits=1)
        for splits in (0, *SPLITS, 1000):
            got = cpu.ragged_attention(q, keys, values, [39, 1], 0.125, window=window, splits=splits)
            assert_close(got, tuple(x.double() for x in whole), 1e-6)


def test_a_row_has_the_same_bits_in_any_company(isa):
    """Alone, among few and among many, at another place: so an answer does not depend on who else asks."""
    total = 70
    positions = torch.arange(total) * 9 + 640
    companies = [torch.randperm(total)[:size] for size in (1, 2, 3, 4, 5, 17, 40)] + [torch.arange(total).flip(0)]
    for layout, head_dim in itertools.product(LAYOUTS, (48, 128)):
        segment = random_segment(layout, 2, 640, head_dim)
        q = random_query(total, 6, head_dim)
        for window in (None, 400):
            want = ops.shared_attention(q, segment, 0.1, q_positions=positions, window=window)
            for rows in companies:
                got = ops.shared_attention(q[rows], segment, 0.1, q_positions=positions[rows], window=window)
                assert_equal(got, tuple(x[rows] for x in want))


def test_a_request_has_the_same_bits_in_any_company(isa):
    lengths, counts = (300, 5, 129, 70), (1, 5, 33, 2)
    keys = [torch.randn(2, length, 48) for length in lengths]
    values = [torch.randn(2, length, 48) for length in lengths]
    q = random_query(sum(counts), 6, 48).split(counts)
    states = [ops.merge_attention_states(*[(x, x[..., 0])] * 2) for x in q]
    want = [ops.ragged_attention(x, [k], [v], [len(x)], 0.2) for x, k, v in zip(q, keys, values, strict=True)]
    for order in itertools.permutations(range(4)):
        rows = torch.cat([q[i] for i in order])
        got = ops.ragged_attention(
            rows, [keys[i] for i in order], [values[i] for i in order], [counts[i] for i in order], 0.2
        )
        assert_equal(got, tuple(torch.cat([want[i][part] for i in order]) for part in range(2)))
        got = ops.merge_attention_states(*[(rows, rows[..., 0])] * 2)
        assert_equal(got, tuple(torch.cat([states[i][part] for i in order]) for part in range(2)))


def test_logits_of_one_row_in_growing_and_shrinking_order_keep_the_maximum(isa):
    """The running maximum rises at every tile, at the first one only, or not at all."""
    tokens, head_dim = 500, 16
    for order in (torch.arange(tokens), tokens - torch.arange(tokens), torch.zeros(tokens)):
        keys = (order.float() * 0.2)[None, :, None].expand(2, tokens, head_dim).contiguous()
        values = torch.randn(2, tokens, head_dim)
        segment = segment_of("exact", keys, values)
        for rows in (1, 2, 30):
            q = torch.rand(rows, 4, head_dim) + 0.5
            want = oracle(q, keys, values, 0.1)
            for splits in (0, 1, 3):
                got = cpu.shared_attention(q, segment, 0.1, q_positions=None, window=None, splits=splits)
                # a weight is as exact as its logit, of which float32 keeps 24 bits: here up to 200
                rounding = float(want[1].abs().max()) * 2**-22
                assert relative_error(got[0], want[0]) <= BOUND + rounding
                assert relative_error(got[1], want[1]) <= BOUND


# ---------------------------------------------------------------------------------------------- views of memory


def views(x: Tensor) -> dict[str, Tensor]:
    """The same ``[Hkv, T, D]`` numbers, laid out otherwise, in buffers whose every other element is NaN."""
    heads, tokens, head_dim = x.shape
    longer = x.new_full((heads, tokens + 37, head_dim), math.nan)
    longer[:, :tokens] = x
    later = x.new_full((heads + 1, tokens + 37, head_dim), math.nan)
    later[1:, 30 : 30 + tokens] = x
    by_token = x.new_full((tokens, heads, head_dim + 3), math.nan)  # as a projection gives them
    by_token[:, :, :head_dim] = x.transpose(0, 1)
    by_channel = x.new_full((heads, head_dim, tokens), math.nan)
    by_channel[:] = x.transpose(1, 2)
    return {
        "the front of a longer buffer": longer[:, :tokens],
        "the middle of a larger buffer": later[1:, 30 : 30 + tokens],
        "heads inside tokens": by_token.transpose(0, 1)[:, :, :head_dim],
        "channels outside tokens": by_channel.transpose(1, 2),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_tails_may_be_any_views_of_larger_buffers(isa, dtype):
    """Bitwise what copies of them give: nothing around a tail, here NaN, takes part."""
    lengths, counts = (1, 70, 129), (1, 6, 33)
    keys = [torch.randn(2, length, 48).to(dtype) for length in lengths]
    values = [torch.randn(2, length, 48).to(dtype) for length in lengths]
    q = random_query(sum(counts), 6, 48)
    want = ops.ragged_attention(q, keys, values, counts, 0.2)
    assert_close(want, ragged_oracle(q, keys, values, counts, 0.2), BOUND)
    for name in views(keys[0]):
        got = ops.ragged_attention(q, [views(k)[name] for k in keys], [views(v)[name] for v in values], counts, 0.2)
        assert_equal(got, want)
        # keys and values need not be laid out alike
        got = ops.ragged_attention(q, [views(k)[name] for k in keys], values, counts, 0.2)
        assert_equal(got, want)


def test_heads_that_share_one_tail_may_be_expanded(isa):
    keys, values = torch.randn(2, 1, 70, 32).expand(2, 1, 70, 32)
    q = random_query(3, 4, 32)
    shared = ops.ragged_attention(q, [keys.expand(2, 70, 32)], [values.expand(2, 70, 32)], [3], 0.2)
    want = ops.ragged_attention(q, [keys.repeat(2, 1, 1)], [values.repeat(2, 1, 1)], [3], 0.2)
    assert_equal(shared, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_tokens_in_half_precision_are_read_exactly(isa, dtype):
    keys, values = torch.randn(2, 2, 150, 48).to(dtype)
    for rows in (1, 20):
        q = random_query(rows, 6, 48)
        half = ops.shared_attention(q, segment_of("exact", keys, values), 0.2)
        single = ops.shared_attention(q, segment_of("exact", keys.float(), values.float()), 0.2)
        assert_equal(half, single)
        assert_close(half, oracle(q, keys, values, 0.2), BOUND)
        mixed = segment_of("k8v3", keys, values)  # its first token is exact, in this dtype
        assert_close(ops.shared_attention(q, mixed, 0.2), oracle(q, *decoded(mixed), 0.2), BOUND)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_finite_half_precision_number_is_read_exactly(isa, dtype):
    """Both signs, zeros, denormals and the largest: one value a token, each with all of the weight."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 16)).view(-1, 1, 16)  # [T, 1, D]
    tails = list(numbers[:, :, None].unbind())  # requests of one token
    q = torch.zeros(len(tails), 1, 16)
    out, lse = ops.ragged_attention(q, tails, tails, [1] * len(tails), 1.0)
    assert torch.equal(out, numbers.float())
    assert (lse == 0).all()
    # eight tokens at a time take another path
    out, lse = ops.ragged_attention(torch.zeros(1, 1, 16), [numbers[:9, 0][None]], [numbers[:9, 0][None]], [1], 1.0)
    assert relative_error(out[0, 0], numbers[:9, 0].double().mean(dim=0)) <= 1e-6


def test_tiles_and_heads_of_a_segment_may_be_views(isa):
    """Only the axes inside a head must be contiguous."""
    for layout in ("paper", "k8v3"):
        whole = random_segment(layout, 3, 500, 48, 1000)
        for tile, last, head in ((0, 8, 1), (1, 3, 0), (2, 8, 1), (7, 8, 0)):
            part = slice(tile * 64, min(last * 64, 500))
            scales = whole.keys.scales if whole.keys.per_tensor else whole.keys.scales[head::1, tile:last]
            keys = Int8Keys(whole.keys.codes[head:, tile:last], scales, part.stop - part.start)
            codes, norms = whole.values.codes[head:, part], whole.values.scales[head:, part]
            values = LloydMax3Values(codes, norms, whole.values.sign_seed)
            view = EncodedKV(0, keys.num_tokens, 3 - head, 48, torch.float32, None, keys, values)
            copied = EncodedKV(
                0,
                keys.num_tokens,
                3 - head,
                48,
                torch.float32,
                None,
                Int8Keys(keys.codes.clone(), keys.scales.clone(), keys.num_tokens),
                LloydMax3Values(codes.clone(), norms.clone(), values.sign_seed),
            )
            for rows in (1, 9):
                q = random_query(rows, 3 * (3 - head), 48)
                assert_equal(ops.shared_attention(q, view, 0.2), ops.shared_attention(q, copied, 0.2))
                assert_close(ops.shared_attention(q, view, 0.2), oracle(q, *decoded(copied), 0.2), BOUND)


def test_what_pads_the_last_tile_takes_no_part(isa):
    """Codes of 0 are what encoding writes there, and nobody promises it."""
    for tokens, rows in itertools.product((1, 65, 70, 127), (1, 7, 30)):
        segment = random_segment("k8v3", 2, tokens, 32, 5)
        codes = segment.keys.codes.clone()
        codes[:, -1, :, (tokens - 1) % 64 + 1 :] = 127
        padded = EncodedKV(
            5,
            tokens,
            2,
            32,
            torch.float32,
            None,
            Int8Keys(codes, segment.keys.scales, tokens),
            segment.values,
        )
        q = random_query(rows, 2, 32) * 10
        assert_equal(ops.shared_attention(q, padded, 0.2), ops.shared_attention(q, segment, 0.2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_query_row_leaves_every_other_row_bitwise_alike(isa, bad):
    """In its own panel and in others, in few rows and many, whatever the layout."""
    for layout, rows in itertools.product(LAYOUTS, (3, 15, 50)):
        segment = random_segment(layout, 2, 200, 32)
        q = random_query(rows, 4, 32)
        want = ops.shared_attention(q, segment, 0.2)
        for broken in (0, rows // 2, rows - 1):
            spoilt = q.clone()
            spoilt[broken, :, 3] = bad
            got = ops.shared_attention(spoilt, segment, 0.2)
            others = torch.arange(rows) != broken
            assert_equal(tuple(x[others] for x in got), tuple(x[others] for x in want))
            assert not got[0][broken].isfinite().all(), "a broken row looks whole"


# ------------------------------------------------------------------------------------------------------ merge


@pytest.mark.parametrize("count", [2, 3, 9])
def test_the_merge_equals_its_definition(isa, count):
    for rows, head_dim in itertools.product((1, 63, 65, 200), (16, 80, 256)):
        states = [(torch.randn(rows, 3, head_dim), torch.randn(rows, 3) * 5) for _ in range(count)]
        for i, (_, lse) in enumerate(states):
            lse[i % rows, 0] = -math.inf
        assert_close(ops.merge_attention_states(*states), merge_oracle(states), BOUND)


def test_the_merge_reads_strided_states_and_leaves_them_as_they_were(isa):
    states = [(torch.randn(16, 5, 7).permute(2, 1, 0), torch.randn(5, 7).T) for _ in range(3)]
    kept = [(out.clone(), lse.clone()) for out, lse in states]
    want = ops.merge_attention_states(*[(out.contiguous(), lse.contiguous()) for out, lse in states])
    assert_equal(ops.merge_attention_states(*states), want)
    assert all(
        torch.equal(a, b) for state, copy in zip(states, kept, strict=True) for a, b in zip(state, copy, strict=True)
    )


def test_a_broken_partial_breaks_its_own_row_only(isa):
    states = [(torch.randn(5, 2, 16), torch.randn(5, 2)) for _ in range(3)]
    want = ops.merge_attention_states(*states)
    states[1][0][2], states[1][1][2] = math.nan, math.nan
    out, lse = ops.merge_attention_states(*states)
    assert out[2].isnan().all() and lse[2].isnan().all()
    others = torch.arange(5) != 2
    assert_equal((out[others], lse[others]), (want[0][others], want[1][others]))


# --------------------------------------------------------------------------------------------------- encoding

SHAPES = ((1, 1, 16), (2, 63, 48), (3, 64, 64), (2, 65, 96), (1, 130, 80), (2, 200, 256))


def inputs(heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Numbers of all sizes, with channels and tokens of zeros, in several forms of memory."""
    x = torch.randn(heads, tokens, head_dim) * torch.exp(torch.randn(heads, 1, head_dim))
    x[..., 3] = 0.0
    x[:, tokens // 2] = 0.0
    x[:, -1] *= 1e-6
    x = x.to(dtype)
    return {"contiguous": x, **views(x)}


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_keys_are_bitwise_those_of_the_reference(isa, dtype, per_tensor):
    for shape in SHAPES:
        for name, keys in inputs(*shape, dtype).items():
            got = ops.encode_keys_int8(keys, per_tensor=per_tensor)
            want = reference.encode_keys_int8(keys, per_tensor=per_tensor)
            assert got.scales.dtype == want.scales.dtype
            assert torch.equal(got.scales, want.scales), (shape, name)
            assert torch.equal(got.codes, want.codes), (shape, name)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_packed_keys_of_extreme_size_are_bitwise_those_of_the_reference(isa, per_tensor):
    for magnitude in (0.0, 1e-45, 1e-40, 1e-7, 5e-6, 1e-3, 1e4, 127 * 65504.0):
        keys = torch.rand(2, 70, 32) * 2 - 1
        keys[0, 0, 0] = 1.0
        keys *= magnitude
        got = ops.encode_keys_int8(keys, per_tensor=per_tensor)
        want = reference.encode_keys_int8(keys, per_tensor=per_tensor)
        assert torch.equal(got.scales, want.scales), magnitude
        assert torch.equal(got.codes, want.codes), magnitude


def test_keys_halfway_between_two_codes_go_to_the_even_one(isa):
    """127 fixes the step at 1."""
    keys = torch.zeros(1, 64, 16)
    keys[0, 0] = 127.0
    keys[0, 1:, 0] = torch.arange(-31, 32) + 0.5
    codes = ops.encode_keys_int8(keys).codes[0, 0, 0, 1:]
    assert torch.equal(codes.float(), keys[0, 1:, 0].round())
    assert (codes % 2 == 0).all()


def check_values(got: LloydMax3Values, values: Tensor, sign_seed: int | None, least_squares: bool) -> int:
    """Against the definition, in float64; returns how many codes are on the other side of a threshold."""
    v = values.double()
    head_dim = v.shape[-1]
    rms = v.norm(dim=-1, keepdim=True) / math.sqrt(head_dim)
    signs = 1.0 if sign_seed is None else random_signs(sign_seed, head_dim).double()
    z = torch.where(rms > 0, hadamard_transform(v * signs) / rms, 0.0)
    levels = torch.tensor(LLOYD_MAX_3BIT, dtype=torch.float64)
    thresholds = (levels[1:] + levels[:-1]) / 2
    codes = unpack_3bit(got.codes).long()
    near = (z[..., None] - thresholds).abs().amin(dim=-1)
    other = codes != torch.bucketize(z, thresholds)
    assert (near[other] <= 4e-6).all(), f"a code is wrong at a distance of {float(near[other].max()):.3g}"
    assert ((codes - torch.bucketize(z, thresholds)).abs() <= 1).all()
    chosen = levels[codes]
    scale = rms * (z * chosen).sum(-1, keepdim=True) / chosen.square().sum(-1, keepdim=True) if least_squares else rms
    half = scale[..., 0].float().to(torch.float16)
    assert ((got.scales.view(torch.int16) - half.view(torch.int16)).abs() <= 1).all()
    return int(other.sum())


@pytest.mark.parametrize(("sign_seed", "least_squares"), [(SEED, True), (None, False), (None, True), (7, False)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_values_are_those_of_the_definition_and_of_the_reference(isa, dtype, sign_seed, least_squares):
    """Only where a coordinate lies on a threshold, but for rounding, may the code be its neighbour."""
    arguments = {"sign_seed": sign_seed, "least_squares": least_squares}
    total = others = 0
    for shape in SHAPES:
        for values in inputs(*shape, dtype).values():
            got = ops.encode_values_lloyd3(values, **arguments)
            assert got.sign_seed == sign_seed
            others += check_values(got, values, sign_seed, least_squares)
            total += values.numel()
            want = reference.encode_values_lloyd3(values, **arguments)
            same = (got.codes == want.codes).all(dim=-1)
            ulps = (got.scales.view(torch.int16) - want.scales.view(torch.int16)).abs()
            assert (ulps[same] <= 1).all()
            assert same.double().mean() > 0.98 or same.numel() < 100
    assert others <= total * 1e-4


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_values_of_every_head_dim_are_rotated_in_its_own_blocks(head_dim):
    values = torch.randn(2, 67, head_dim)
    every_isa(lambda isa: check_values(ops.encode_values_lloyd3(values, sign_seed=SEED), values, SEED, True))


def test_values_of_extreme_size_are_encoded_as_the_reference_does(isa):
    for magnitude in (0.0, 1e-45, 1e-40, 1e-30, 1e-7, 1e4, 3e4):
        values = torch.randn(1, 70, 64).clamp(-2, 2) * magnitude
        got = ops.encode_values_lloyd3(values, sign_seed=SEED)
        want = reference.encode_values_lloyd3(values, sign_seed=SEED, least_squares=True)
        # a denormal norm has few digits, so it is the scale that counts, and float16 has none of that size
        assert ((got.scales.view(torch.int16) - want.scales.view(torch.int16)).abs() <= 1).all(), magnitude
        if magnitude >= 1e-30:
            check_values(got, values, SEED, True)


def test_a_value_vector_of_zeros_has_scale_0(isa):
    got = ops.encode_values_lloyd3(torch.zeros(1, 3, 32), sign_seed=SEED)
    assert not got.scales.any()
    assert not ops.decode(segment_from(got, torch.ones(1, 3, 32)))[1].any()


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the text is compared)
        call()
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_too_large_for_float16_scales_are_refused_with_the_same_words(isa, dtype):
    keys = torch.randn(2, 70, 32)
    keys[1, 66, 5] = 1e8
    keys = keys.to(dtype)
    got = message(lambda: ops.encode_keys_int8(keys))
    assert got == message(lambda: reference.encode_keys_int8(keys, per_tensor=False))
    assert "a key is too large" in got
    assert "codec='exact'" in got
    for least_squares in (False, True):
        got = message(lambda ls=least_squares: ops.encode_values_lloyd3(keys, sign_seed=SEED, least_squares=ls))
        want = message(lambda ls=least_squares: reference.encode_values_lloyd3(keys, sign_seed=SEED, least_squares=ls))
        assert got == want
        assert "a value vector is too long" in got


def test_the_largest_float16_scales_are_still_taken(isa):
    """Float16 ends at 65504, and what is rounded to that begins to overflow at 65520."""
    keys = torch.full((1, 3, 16), 127 * 65504.0)
    assert (ops.encode_keys_int8(keys).scales == 65504).all()
    with pytest.raises(ValueError, match="too large"):
        ops.encode_keys_int8(keys * (1 + 1e-6))
    values = torch.full((1, 1, 16), 65519.0)
    assert ops.encode_values_lloyd3(values, sign_seed=None, least_squares=False).scales.item() == 65504
    with pytest.raises(ValueError, match="too long"):
        ops.encode_values_lloyd3(torch.full((1, 1, 16), 65520.0), sign_seed=None, least_squares=False)


def test_keys_too_large_are_taken_with_one_float32_scale(isa):
    keys = torch.randn(2, 70, 32) * 1e20
    got = ops.encode_keys_int8(keys, per_tensor=True)
    assert torch.equal(got.codes, reference.encode_keys_int8(keys, per_tensor=True).codes)


# ------------------------------------------------------------------------------------------- codes of any kind


def segment_from(values: LloydMax3Values, keys: Tensor) -> EncodedKV:
    """A packed segment without exact tokens: given values, encoded keys."""
    heads, tokens, head_dim = keys.shape
    packed = reference.encode_keys_int8(keys, per_tensor=False)
    return EncodedKV(0, tokens, heads, head_dim, torch.float32, None, packed, values)


def levels_by_hand(packed: bytes) -> list[float]:
    """By the format's definition: code ``i`` at bits ``3i .. 3i + 2`` of one little-endian number."""
    number = int.from_bytes(packed, "little")
    return [LLOYD_MAX_3BIT[number >> (3 * i) & 7] for i in range(8 * len(packed) // 3)]


@searched
@given(st.data())
def test_any_bytes_are_read_as_the_levels_that_the_bitstream_means(data):
    """Row ``t`` of a query has all its weight on token ``t``, so that the output is that token's value."""
    head_dim = data.draw(st.sampled_from(HEAD_DIMS), "head_dim")
    tokens = data.draw(st.integers(1, min(head_dim, 66)), "tokens")
    raw = [data.draw(st.binary(min_size=3 * head_dim // 8, max_size=3 * head_dim // 8)) for _ in range(tokens)]
    codes = torch.tensor([list(row) for row in raw], dtype=torch.uint8)[None]
    sign_seed = data.draw(st.sampled_from([None, SEED]), "sign_seed")
    values = LloydMax3Values(codes, torch.ones(1, tokens, dtype=torch.float16), sign_seed)
    segment = segment_from(values, torch.eye(head_dim)[None, :tokens])
    want = hadamard_transform(torch.tensor([levels_by_hand(row) for row in raw], dtype=torch.float64))
    if sign_seed is not None:
        want = want * random_signs(sign_seed, head_dim).double()
    rows = data.draw(st.sampled_from([1, 2, 5, tokens]), "rows a call")
    for isa in isas():
        with Backend("cpu", isa, False).use():
            for first in range(0, tokens, rows):
                at = torch.arange(first, min(first + rows, tokens))
                q = torch.nn.functional.one_hot(at, head_dim).float()[:, None] * 1000.0
                out, _ = ops.shared_attention(q, segment, 1.0)
                assert (out[:, 0].double() - want[at]).abs().max() <= 1e-5


@searched
@given(st.data())
def test_codes_of_any_values_decode_to_what_the_definition_gives(data):
    """The encoder's bytes, through the format's definition: each code is that of its coordinate."""
    head_dim = data.draw(st.sampled_from(HEAD_DIMS), "head_dim")
    tokens = data.draw(st.integers(1, 5), "tokens")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), "seed"))
    values = torch.randn(1, tokens, head_dim, generator=generator)
    values *= data.draw(st.floats(1e-20, 1e3), "size")
    values[0, 0, data.draw(st.integers(0, head_dim - 1))] *= data.draw(st.sampled_from([1.0, 10.0]))
    for isa in isas():
        with Backend("cpu", isa, False).use():
            got = ops.encode_values_lloyd3(values, sign_seed=SEED)
            check_values(got, values, SEED, True)
            assert torch.equal(pack_3bit(unpack_3bit(got.codes)), got.codes)


@searched
@given(st.data())
def test_random_small_shapes_of_every_kind_equal_the_oracle(data):
    seed = data.draw(st.integers(0, 2**32), "seed")
    generator = torch.Generator().manual_seed(seed)
    kind = data.draw(st.sampled_from([*LAYOUTS, "tails"]), "kind")
    head_dim = data.draw(st.sampled_from(HEAD_DIMS), "head_dim")
    heads, ratio = data.draw(st.integers(1, 3), "heads"), data.draw(st.integers(1, 8), "ratio")
    splits = data.draw(st.integers(0, 4), "splits")
    window = data.draw(st.none() | st.integers(1, 200), "window")
    scale = head_dim**-0.5

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if kind == "tails":
        dtype = data.draw(st.sampled_from(DTYPES), "dtype")
        counts = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4), "counts")
        lengths = [count + data.draw(st.integers(0, 130), "more") for count in counts]
        keys, values = ([randn(heads, n, head_dim).to(dtype) for n in lengths] for _ in range(2))
        q = randn(sum(counts), heads * ratio, head_dim)
        want = ragged_oracle(q, keys, values, counts, scale, window)
        calls = [lambda: cpu.ragged_attention(q, keys, values, counts, scale, window=window, splits=splits)]
    else:
        rows, tokens = data.draw(st.integers(1, 30), "rows"), data.draw(st.integers(1, 200), "tokens")
        start = data.draw(st.sampled_from([0, 1, 50]), "start")
        with ops.use_backend("reference"):
            segment = segment_of(kind, randn(heads, tokens, head_dim), randn(heads, tokens, head_dim), start)
        q = randn(rows, heads * ratio, head_dim)
        positions = start + tokens + torch.randint(0, 2 * tokens, (rows,), generator=generator)
        visible = None if window is None else torch.arange(start, start + tokens) > positions[:, None] - window
        want = oracle(q, *decoded(segment), scale, visible)
        arguments = {"q_positions": positions, "window": window, "splits": splits}
        calls = [lambda: cpu.shared_attention(q, segment, scale, **arguments)]
    for isa, call in itertools.product(isas(), calls):
        with cpu.use_isa(isa):
            assert_close(call(), want, BOUND)


# --------------------------------------------------------------------------------------------------- dispatch


@pytest.fixture
def unforced(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("POLYKV_KERNELS", raising=False)
    return monkeypatch


def all_ops(q: Tensor, segment: EncodedKV) -> list[Callable[[], Any]]:
    kv = torch.ones(2, 5, q.shape[-1], dtype=q.dtype)
    return [
        lambda: ops.shared_attention(q, segment, 0.2),
        lambda: ops.ragged_attention(q, [kv], [kv], [len(q)], 0.2),
        lambda: ops.merge_attention_states((q, q[..., 0]), (q, q[..., 0])),
        lambda: ops.encode_keys_int8(kv),
    ]


def test_an_unknown_backend_is_refused_by_name_with_the_choices(unforced):
    unforced.setenv("POLYKV_KERNELS", "cuda")
    for call in all_ops(torch.zeros(3, 4, 32), random_segment("exact", 2, 65, 32)):
        with pytest.raises(BackendError, match=r"POLYKV_KERNELS names the backend 'cuda'.*reference, cpu, triton"):
            call()
    with (
        pytest.raises(BackendError, match=r"use_backend\(\) names the backend 'numpy'.*reference, cpu"),
        ops.use_backend("numpy"),
    ):
        pass


def test_the_variable_may_be_written_in_capitals_and_use_backend_goes_before_it(unforced):
    unforced.setenv("POLYKV_KERNELS", " CPU ")
    choice = ops.choose_backend(torch.device("cpu"), torch.float32, 64)
    assert (choice.name, choice.forced) == ("cpu", True)
    with ops.use_backend("reference"):
        assert ops.choose_backend(torch.device("cpu"), torch.float32, 64).name == "reference"
    assert ops.choose_backend(torch.device("cpu"), torch.float32, 64).name == "cpu"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "words"),
    [
        (torch.float64, 32, r"float32, float16 and bfloat16, not torch\.float64"),
        (torch.float32, 24, r"multiples of 16 up to 256, not 24"),
        (torch.float32, 8, r"multiples of 16 up to 256, not 8"),
        (torch.float32, 272, r"multiples of 16 up to 256, not 272"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_when_forced_and_left_to_the_reference_otherwise(
    unforced, dtype, head_dim, words
):
    segment = segment_of("exact", *torch.randn(2, 2, 65, head_dim))
    q = random_query(3, 4, head_dim, dtype)
    calls = all_ops(q, segment)
    unforced.setenv("POLYKV_KERNELS", "cpu")
    for call in calls:
        with pytest.raises(BackendError, match=rf"POLYKV_KERNELS forces the backend 'cpu', which cannot.*{words}"):
            call()
    unforced.delenv("POLYKV_KERNELS")
    choice = ops.choose_backend(torch.device("cpu"), dtype, head_dim)
    assert (choice.name, choice.forced) == ("reference", False)
    assert str(head_dim) in choice.reason or str(dtype) in choice.reason
    for call in calls:
        got = flat(call())
        with ops.use_backend("reference"):
            assert all(torch.equal(a, b) for a, b in zip(got, flat(call()), strict=True))


def test_without_force_the_kernels_are_chosen_for_tensors_on_the_cpu(unforced):
    for dtype, head_dim in itertools.product(DTYPES, (16, 64, 256)):
        choice = ops.choose_backend(torch.device("cpu"), dtype, head_dim)
        assert (choice.name, choice.forced) == ("cpu", False)


def test_gradients_are_those_of_the_reference_and_only_kept_when_wanted(unforced):
    segment = random_segment("k8v3", 2, 65, 32)
    keys, values = torch.randn(2, 2, 9, 32)
    q = random_query(3, 4, 32)

    def gradients() -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q, keys, values)]
        states = [
            ops.shared_attention(inputs[0], segment, 0.2),
            ops.ragged_attention(inputs[0], [inputs[1]], [inputs[2]], [3], 0.2),
        ]
        out, lse = ops.merge_attention_states(*states)
        (out.square().sum() + lse.sum()).backward()
        return [x.grad for x in inputs]

    got = gradients()
    with ops.use_backend("reference"):
        want = gradients()
    assert all(torch.equal(a, b) and a.any() for a, b in zip(got, want, strict=True))
    wanted = q.clone().requires_grad_()
    with torch.no_grad():
        inside = ops.shared_attention(wanted, segment, 0.2)
    with ops.use_backend("cpu"):
        plain = ops.shared_attention(q, segment, 0.2)
    assert not inside[0].requires_grad
    assert_equal(inside, plain)


@pytest.mark.parametrize("which", [0, 1])
def test_keys_or_values_alone_may_want_gradients(unforced, which):
    tails = [torch.randn(2, 9, 32) for _ in range(2)]
    tails[which].requires_grad_()
    out, lse = ops.ragged_attention(random_query(3, 4, 32), [tails[0]], [tails[1]], [3], 0.2)
    (out.sum() + lse.sum()).backward()
    assert tails[which].grad.any()
    merged = [torch.randn(3, 4, 32), torch.randn(3, 4), torch.randn(3, 4, 32), torch.randn(3, 4)]
    merged[2 + which].requires_grad_()
    out, lse = ops.merge_attention_states((merged[0], merged[1]), (merged[2], merged[3]))
    (out.sum() + lse.sum()).backward()
    assert merged[2 + which].grad.any()


MISSING = """
import json, warnings

segment, q = random_segment(2, 65, 32), torch.randn(3, 4, 32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    got = [ops.shared_attention(q, segment, 0.2) for _ in range(2)]
    codes = ops.encode_keys_int8(q).codes
    ops.merge_attention_states(*got)
with ops.use_backend("reference"):
    want = ops.shared_attention(q, segment, 0.2)
    same = torch.equal(codes, ops.encode_keys_int8(q).codes)
same = same and all(torch.equal(a, b) for state in got for a, b in zip(state, want))
refusal = ""
try:
    with ops.use_backend("cpu"):
        ops.shared_attention(q, segment, 0.2)
except ops.BackendError as error:
    refusal = str(error)
messages = [(w.category.__name__, str(w.message)) for w in caught]
print(json.dumps({"same": same, "warnings": messages, "refusal": refusal}))
"""


def test_without_a_compiler_one_warning_says_what_to_do_and_the_reference_computes(tmp_path):
    if cpu.describe()["origin"] == "prebuilt":
        pytest.skip("this installation carries a compiled library, so it needs no compiler")
    done = run_python(
        MISSING,
        CXX=str(tmp_path / "no-compiler"),
        POLYKV_CACHE_DIR=str(tmp_path),
        POLYKV_CPU_LIBRARY=None,
        POLYKV_KERNELS=None,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["same"]
    ((category, text),) = said["warnings"]
    assert category == "RuntimeWarning"
    assert "computes attention with torch, several times slower" in text
    assert "no-compiler" in text
    assert "apt install g++" in text
    assert "use_backend() forces the backend 'cpu', which cannot run here" in said["refusal"]
    assert "apt install g++" in said["refusal"]


USED = """
import json

with ops.use_backend("cpu"):
    try:
        ops.shared_attention(torch.zeros(1, 2, 32), random_segment(2, 65, 32), 0.2)
        print(json.dumps(cpu.describe()["isa"]))
    except ops.BackendError as error:
        print(json.dumps(str(error)))
"""


def test_the_environment_chooses_an_instruction_set_and_a_wrong_name_is_refused_with_the_choices():
    last = isas()[-1]  # and not what is chosen anyway
    assert json.loads(run_python(USED, POLYKV_CPU_ISA=last.upper()).stdout) == last
    said = json.loads(run_python(USED, POLYKV_CPU_ISA="sse9").stdout)
    assert "POLYKV_CPU_ISA names the instruction set 'sse9'" in said
    assert ", ".join(isas()) in said
    with pytest.raises(BackendError, match="sse9"), cpu.use_isa("sse9"):
        pass


def test_use_isa_is_undone_after_an_error():
    before = cpu.describe()["isa"]
    for name in isas():
        with pytest.raises(KeyError), cpu.use_isa(name):
            raise KeyError(cpu.describe()["isa"])
        assert cpu.describe()["isa"] == before


# -------------------------------------------------------------------------------------------------- bad input


def int8_keys(**other: Any) -> Int8Keys:
    given = {
        "codes": torch.zeros(2, 2, 32, 64, dtype=torch.int8),
        "scales": torch.zeros(2, 2, 32, dtype=torch.float16),
        "num_tokens": 70,
    }
    return Int8Keys(**{**given, **other})


def lloyd_values(**other: Any) -> LloydMax3Values:
    given = {
        "codes": torch.zeros(2, 70, 12, dtype=torch.uint8),
        "scales": torch.zeros(2, 70, dtype=torch.float16),
        "sign_seed": None,
    }
    return LloydMax3Values(**{**given, **other})


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: int8_keys(codes=torch.zeros(2, 2, 32, 64)), TypeError, "key codes must be torch.int8"),
        (lambda: int8_keys(codes=torch.zeros(2, 2, 32, 63).char()), ValueError, "key codes must have shape"),
        (lambda: int8_keys(codes=torch.zeros(2, 2, 64, 32).char().mT), ValueError, "contiguous.*strides"),
        (lambda: int8_keys(codes=torch.zeros(2, 2, 32).char()), ValueError, r"must be \[Hkv"),
        (lambda: int8_keys(num_tokens=129), ValueError, r"shape \[2, 3, 32, 64\], got \[2, 2, 32, 64\]"),
        (lambda: int8_keys(num_tokens=64), ValueError, r"shape \[2, 1, 32, 64\], got"),
        (lambda: int8_keys(scales=torch.zeros(2, 2, 32)), TypeError, "key scales must be torch.float16"),
        (lambda: int8_keys(scales=torch.zeros(2, 2, 31).half()), ValueError, "key scales must have shape"),
        (lambda: int8_keys(scales=torch.zeros(2, 32, 2).half().mT), ValueError, "key scales must be contiguous"),
        (lambda: int8_keys(scales=torch.zeros(1).half()), TypeError, "must be torch.float32"),
        (lambda: int8_keys(scales=torch.zeros(2)), ValueError, "must have shape"),
        (lambda: lloyd_values(codes=torch.zeros(2, 70, 12).char()), TypeError, "value codes must be torch.uint8"),
        (lambda: lloyd_values(codes=torch.zeros(2, 70, 13).byte()), ValueError, "value codes must be"),
        (lambda: lloyd_values(codes=torch.zeros(2, 12, 70).byte().mT), ValueError, "contiguous"),
        (lambda: lloyd_values(scales=torch.zeros(2, 70)), TypeError, "value scales must be torch.float16"),
        (lambda: lloyd_values(scales=torch.zeros(2, 71).half()), ValueError, "value scales must have shape"),
        (lambda: DenseKV(torch.zeros(2, 5, 32), torch.zeros(2, 6, 32)), ValueError, "dense values must have shape"),
        (lambda: DenseKV(torch.zeros(2, 5, 32), torch.zeros(2, 5, 32).half()), TypeError, "dense values must be"),
        (lambda: DenseKV(torch.zeros(2, 32, 5).mT, torch.zeros(2, 5, 32)), ValueError, "dense keys must be cont"),
        (lambda: DenseKV(*torch.zeros(2, 2, 5, 32).int()), TypeError, "floating point"),
    ],
)
def test_stored_tensors_that_a_kernel_would_misread_make_no_layout(make, error, words):
    with pytest.raises(error, match=words):
        make()


def packed_segment(keys: Int8Keys | None, values: LloydMax3Values | None, **other: Any) -> EncodedKV:
    given = {"start": 0, "num_tokens": 70, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32, "exact": None}
    return EncodedKV(**{**given, **other}, keys=keys, values=values)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: packed_segment(int8_keys(), lloyd_values(), num_tokens=71), "num_tokens is 71.*hold 70"),
        (lambda: packed_segment(int8_keys(), None), "packed together"),
        (lambda: packed_segment(int8_keys(num_tokens=69), lloyd_values(), num_tokens=69), "69 keys.*70 values"),
        (lambda: packed_segment(int8_keys(), lloyd_values(), num_kv_heads=3), "2 KV heads of 32.*3 of 32"),
        (lambda: packed_segment(int8_keys(), lloyd_values(), head_dim=64), "2 KV heads of 32.*2 of 64"),
        (
            lambda: packed_segment(int8_keys(), lloyd_values(codes=torch.zeros(2, 70, 24).byte())),
            "packed values have 2 KV heads of 64",
        ),
        (
            lambda: packed_segment(
                int8_keys(), lloyd_values(), num_tokens=75, exact=DenseKV(*torch.zeros(2, 1, 5, 32))
            ),
            "exact tokens have 1 KV heads of 32",
        ),
    ],
)
def test_a_segment_whose_parts_do_not_fit_is_refused_with_the_numbers(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_well_formed_segment_of_these_parts_is_taken(isa):
    out, lse = ops.shared_attention(torch.zeros(1, 2, 32), packed_segment(int8_keys(), lloyd_values()), 0.2)
    assert not out.any()
    assert relative_error(lse, torch.full((1, 2), math.log(70))) <= BOUND


def tails_like(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (tails_like((2, 9, 32)), tails_like((2, 9, 32), dtype=torch.bfloat16)),
        (tails_like((2, 9, 32), dtype=torch.float16), tails_like((2, 9, 32))),
        (tails_like((2, 9, 32), (1, 9, 32)), tails_like((2, 9, 32), (1, 9, 32))),
        (tails_like((1, 9, 32), (2, 9, 32)), tails_like((1, 9, 32), (2, 9, 32))),
        (tails_like((2, 9, 32), device="meta"), tails_like((2, 9, 32), device="meta")),
    ],
    ids=["values of another dtype", "keys of another dtype", "fewer heads", "more heads", "another device"],
)
def test_tails_that_a_kernel_would_misread_are_refused(keys, values):
    counts = [3] + [1] * (len(keys) - 1)
    with ops.use_backend("cpu"), pytest.raises((TypeError, ValueError)):
        ops.ragged_attention(torch.zeros(sum(counts), 4, 32), keys, values, counts, 0.2)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_no_tokens_is_refused(backend, window):
    q, kv = torch.zeros(3, 4, 32), torch.zeros(2, 9, 32)
    with pytest.raises(ValueError, match="window"):
        ops.ragged_attention(q, [kv], [kv], [3], 0.2, window=window)
    with pytest.raises(ValueError, match="window"):
        ops.shared_attention(q, random_segment("k8v3", 2, 65, 32), 0.2, q_positions=torch.arange(65, 68), window=window)


def test_exact_tokens_that_require_gradients_get_them_as_queries_do():
    keys, values = torch.randn(2, 2, 9, 32).unbind()
    keys.requires_grad_()
    segment = EncodedKV(0, 9, 2, 32, keys.dtype, DenseKV(keys, values), None, None)
    q = torch.randn(3, 4, 32)
    out, _ = ops.shared_attention(q, segment, 0.2)
    out.sum().backward()
    got, keys.grad = keys.grad, None
    with ops.use_backend("reference"):
        ops.shared_attention(q, segment, 0.2)[0].sum().backward()
    assert got is not None
    assert torch.equal(got, keys.grad)


def test_a_forced_backend_without_gradients_says_so_where_they_are_needed():
    q = torch.randn(3, 4, 32, requires_grad=True)
    segment = random_segment("k8v3", 2, 65, 32)
    with ops.use_backend("cpu"):
        with pytest.raises(BackendError, match=r"no gradients.*torch.no_grad"):
            ops.shared_attention(q, segment, 0.2)
        with torch.no_grad():
            ops.shared_attention(q, segment, 0.2)


def test_a_tensor_whose_sign_torch_keeps_apart_is_read_with_it(isa):
    """``torch._neg_view`` is what ``.conj().imag`` gives: the memory holds the opposite numbers."""
    q, segment = torch.randn(3, 4, 32), random_segment("k8v3", 2, 65, 32)
    keys, values = torch.randn(2, 2, 9, 32)
    got = ops.shared_attention(torch._neg_view(q), segment, 0.2)
    assert torch.equal(got[0], ops.shared_attention(-q, segment, 0.2)[0])
    got = ops.ragged_attention(q, [torch._neg_view(keys)], [torch._neg_view(values)], [3], 0.2)
    assert torch.equal(got[0], ops.ragged_attention(q, [-keys], [-values], [3], 0.2)[0])
    assert torch.equal(ops.encode_keys_int8(torch._neg_view(keys)).codes, ops.encode_keys_int8(-keys).codes)
    codes = ops.encode_values_lloyd3(torch._neg_view(values), sign_seed=3).codes
    assert torch.equal(codes, ops.encode_values_lloyd3(-values, sign_seed=3).codes)
    state = got[0], got[1]
    merged = ops.merge_attention_states((torch._neg_view(state[0]), torch._neg_view(state[1])), state)
    assert torch.equal(merged[0], ops.merge_attention_states((-state[0], -state[1]), state)[0])


def test_other_mistakes_are_named(backend):
    segment, kv = random_segment("k8v3", 2, 65, 32), torch.zeros(2, 9, 32)
    with pytest.raises(ValueError, match="there must be heads, got 0 query heads"):
        ops.shared_attention(torch.zeros(3, 0, 32), segment, 0.2)
    with pytest.raises(TypeError, match=r"window is a number of tokens.*2\.5"):
        ops.ragged_attention(torch.zeros(3, 4, 32), [kv], [kv], [3], 0.2, window=2.5)
    state = torch.zeros(3, 4, 32), torch.zeros(3, 4)
    with pytest.raises(TypeError, match="pairs of tensors, each an argument of its own"):
        ops.merge_attention_states([state, state])
    with pytest.raises(TypeError, match=r"keys must be floating point, got torch\.int64"):
        ops.encode_keys_int8(torch.zeros(2, 9, 32, dtype=torch.int64))
