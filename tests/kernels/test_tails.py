"""Private tails in place: writing to them and attending to them, on every backend, and how their storage grows."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BOUNDS, FULL, Backend, assert_close, assert_equal, backends, isas, ragged_oracle, unavailable
from torch import Tensor

from polykv.models.tails import BUCKET_TOKENS, GROWTH, Tail, bucket
from polykv_kernels import BackendError, LayeredKV, RaggedBatch, cpu, ops

searched = settings(max_examples=600 if FULL else 60, deadline=None, derandomize=not FULL, database=None)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def able(dtype: torch.dtype) -> list[Backend]:
    """The backends that compute in a dtype: the compiled ones leave float64 to the reference."""
    found = [backend for backend in backends() if isinstance(backend, Backend)]
    return [backend for backend in found if dtype != torch.float64 or backend.name == "reference"]


def room(
    heads: int, capacity: int, head_dim: int, dtype: torch.dtype, *, layers: int = 1, layout: str = "engine"
) -> LayeredKV:
    """Storage full of NaN, which no result may show: as the engine lays it out, a layer each, or with gaps and strides."""
    if layout == "engine":
        whole = list(torch.full((layers, 2, heads, capacity, head_dim), torch.nan, dtype=dtype))
    elif layout == "tokens first":
        whole = [
            torch.full((2, capacity, heads, head_dim), torch.nan, dtype=dtype).transpose(1, 2) for _ in range(layers)
        ]
    else:
        whole = [
            torch.full((2, heads + 1, 2 * capacity + 3, head_dim + 8), torch.nan, dtype=dtype)[
                :, 1:, 3 : 3 + 2 * capacity : 2, 8:
            ]
            for _ in range(layers)
        ]
    return LayeredKV(tuple(x[0] for x in whole), tuple(x[1] for x in whole))


LAYOUTS_OF_ROOM = ("engine", "tokens first", "gaps")


def fill(batch: RaggedBatch, layer: int, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """What the tails hold already is written with torch; returned are copies."""
    held = []
    for tail, length in zip(batch.tails, batch.lengths, strict=True):
        for x in (tail.keys[layer], tail.values[layer]):
            x[:, :length] = torch.randn(x.shape[0], length, x.shape[2], generator=generator).to(x.dtype)
        held.append((tail.keys[layer][:, :length].clone(), tail.values[layer][:, :length].clone()))
    return [k for k, _ in held], [v for _, v in held]


def expand(rows: Tensor, counts: list[int]) -> list[Tensor]:
    """``[rows, Hkv, D]`` by request, ``[Hkv, n, D]`` each."""
    return [x.transpose(0, 1) for x in rows.split(counts)]


@st.composite
def steps(draw: Any) -> dict[str, Any]:
    """Some requests' tails and rows, of everything that varies between models and steps."""
    count = draw(st.integers(1, 5))
    return {
        "heads": draw(st.integers(1, 3)),
        "ratio": draw(st.integers(1, 4)),
        "head_dim": draw(st.sampled_from((16, 32, 48, 64, 128))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "lengths": draw(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 600)), min_size=count, max_size=count)),
        "rows": draw(st.lists(st.one_of(st.just(1), st.integers(1, 70)), min_size=count, max_size=count)),
        "spare": draw(st.lists(st.integers(0, 40), min_size=count, max_size=count)),
        "layouts": draw(st.lists(st.sampled_from(LAYOUTS_OF_ROOM), min_size=count, max_size=count)),
        "window": draw(st.one_of(st.none(), st.integers(1, 700))),
        "strided": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@searched
@given(steps())
def test_a_step_on_tails_in_place_equals_attention_on_contiguous_tensors(case: dict[str, Any]) -> None:
    dtype, heads, head_dim, counts = case["dtype"], case["heads"], case["head_dim"], case["rows"]
    num_heads, scale = heads * case["ratio"], head_dim**-0.5
    for backend in able(dtype):
        generator = torch.Generator().manual_seed(case["seed"])
        rooms = [
            room(heads, length + rows + spare, head_dim, dtype, layers=2, layout=layout)
            for length, rows, spare, layout in zip(case["lengths"], counts, case["spare"], case["layouts"], strict=True)
        ]
        batch = RaggedBatch(rooms, case["lengths"], counts)
        for layer in (0, 1):
            old_keys, old_values = fill(batch, layer, generator)
            new = torch.randn(2, batch.num_rows, heads, head_dim, generator=generator).to(dtype)
            given_keys, given_values = new
            if case["strided"]:  # as a model's projections: heads first, or part of a larger tensor
                given_keys = given_keys.transpose(0, 1).contiguous().transpose(0, 1)
                given_values = torch.cat([given_values, given_values], dim=2)[..., head_dim:]
            q = torch.randn(batch.num_rows, num_heads, head_dim, generator=generator).to(dtype)
            keys = [torch.cat(pair, 1) for pair in zip(old_keys, expand(new[0], counts), strict=True)]
            values = [torch.cat(pair, 1) for pair in zip(old_values, expand(new[1], counts), strict=True)]
            with backend.use():
                ops.append_to_tails(batch, layer, given_keys, given_values)
                got = ops.tail_attention(q, batch, layer, scale, window=case["window"])
                plain = ops.ragged_attention(q, keys, values, counts, scale, window=case["window"])
            for tail, k, v in zip(rooms, keys, values, strict=True):
                end = k.shape[1]
                assert torch.equal(tail.keys[layer][:, :end], k)
                assert torch.equal(tail.values[layer][:, :end], v)
                assert tail.keys[layer][:, end:].isnan().all()
                assert tail.values[layer][:, end:].isnan().all()
            if layer == 0:
                assert all(x.isnan().all() for tail in rooms for x in (tail.keys[1], tail.values[1]))
            assert_equal(got, plain)
            want = ragged_oracle(q, keys, values, counts, scale, case["window"])
            assert got[0].dtype == dtype
            bound = BOUNDS[torch.float64 if dtype == torch.float64 else torch.float32]
            if dtype in (torch.float16, torch.bfloat16):
                assert_close((want[0], got[1]), want, bound)
                allowed = torch.finfo(dtype).eps / 2 * want[0].abs() + 1e-5
                assert ((got[0].double() - want[0]).abs() <= allowed).all()
            else:
                assert_close(got, want, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_a_prompt_in_any_chunks_gives_the_same_bits(isa: str, dtype: torch.dtype, window: int | None) -> None:
    """Past 1,024 tokens, where the partial results of several units are joined: chunks end within and between them."""
    # many heads, with which tokens would be divided into fewer units past 1,152 if chunks did not matter
    total, heads, num_heads, head_dim = (2600 if FULL else 1300), 32, 32, 16
    k, v = torch.randn(2, total, heads, head_dim).to(dtype)
    q = torch.randn(total, num_heads, head_dim).to(dtype)

    def compute(cuts: list[int]) -> tuple[Tensor, Tensor, LayeredKV]:
        tail = room(heads, total + 7, head_dim, dtype)
        outs = []
        for first, end in itertools.pairwise([0, *cuts, total]):
            batch = RaggedBatch([tail], [first], [end - first])
            ops.append_to_tails(batch, 0, k[first:end], v[first:end])
            outs.append(ops.tail_attention(q[first:end], batch, 0, 0.17, window=window))
        return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs]), tail

    out, lse, tail = compute([])
    generator = torch.Generator().manual_seed(1)
    splits = [
        list(range(512, total, 512)),
        list(range(63, total, 63)),
        [1, 2, 511, 513, 1023, 1024, 1025, 1088],
        list(range(total - 40, total)),  # what decoding does
        *(sorted(set(torch.randint(1, total, (n,), generator=generator).tolist())) for n in (1, 3, 20)),
    ]
    for cuts in splits:
        chunked_out, chunked_lse, chunked = compute(cuts)
        assert torch.equal(chunked.keys[0][:, :total], tail.keys[0][:, :total])
        assert torch.equal(chunked.values[0][:, :total], tail.values[0][:, :total])
        assert_equal((chunked_out, chunked_lse), (out, lse))
    want = ragged_oracle(q, [k.transpose(0, 1)], [v.transpose(0, 1)], [total], 0.17, window)
    if dtype == torch.float32:
        assert_close((out, lse), want, BOUNDS[torch.float32])


def test_a_tails_bits_depend_on_nobody_else(isa: str) -> None:
    """Alone and among others, whose tails are long, in any order."""
    counts, lengths = [1, 30, 1, 64], [700, 0, 5, 1100]
    rooms = [room(2, length + rows, 64, torch.float32) for length, rows in zip(lengths, counts, strict=True)]
    fill(RaggedBatch(rooms, lengths, counts), 0, torch.Generator().manual_seed(3))
    new = torch.randn(2, sum(counts), 2, 64).split(counts, dim=1)
    q = torch.randn(sum(counts), 6, 64).split(counts)
    want = []
    for i in range(4):
        batch = RaggedBatch([rooms[i]], [lengths[i]], [counts[i]])
        ops.append_to_tails(batch, 0, *new[i])
        want.append(ops.tail_attention(q[i], batch, 0, 0.125))
    for order in itertools.permutations(range(4)):
        batch = RaggedBatch([rooms[i] for i in order], [lengths[i] for i in order], [counts[i] for i in order])
        ops.append_to_tails(batch, 0, *torch.cat([new[i] for i in order], dim=1))
        got = ops.tail_attention(torch.cat([q[i] for i in order]), batch, 0, 0.125)
        assert_equal(got, tuple(torch.cat([want[i][part] for i in order]) for part in range(2)))


def test_a_wide_query_over_half_precision_tails_is_computed_in_its_own_dtype() -> None:
    tail = room(2, 9, 32, torch.bfloat16)
    batch = RaggedBatch([tail], [5], [4])
    keys, values = fill(batch, 0, torch.Generator())
    new = torch.randn(2, 4, 2, 32).to(torch.bfloat16)
    ops.append_to_tails(batch, 0, *new)
    for dtype, bound in BOUNDS.items():
        q = torch.randn(4, 4, 32, dtype=dtype)
        got = ops.tail_attention(q, batch, 0, 0.2)
        assert got[0].dtype == dtype
        k, v = (torch.cat([x, n.transpose(0, 1)], 1) for x, n in zip((keys[0], values[0]), new, strict=True))
        assert_close(got, ragged_oracle(q, [k], [v], [4], 0.2), bound)


# ------------------------------------------------------------------------------------------------ what is refused


def test_float64_is_refused_by_forced_kernels_and_left_to_the_reference_otherwise() -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    batch = RaggedBatch([room(1, 3, 32, torch.float64)], [0], [3])
    rows = torch.randn(3, 1, 32, dtype=torch.float64)
    ops.append_to_tails(batch, 0, rows, rows)
    ops.tail_attention(rows, batch, 0, 1.0)
    with ops.use_backend("cpu"), pytest.raises(BackendError, match="float64"):
        ops.tail_attention(rows, batch, 0, 1.0)


def test_storage_that_does_not_fit_together_is_refused() -> None:
    x = torch.zeros(2, 5, 16)
    for keys, values, message in (
        ((), (), "keys and values of every layer, got 0 and 0"),
        ((x,), (x, x), "got 1 and 2"),
        ((x[0],), (x[0],), r"must be floating-point \[Hkv, capacity, D\]"),
        ((x.long(),), (x.long(),), "floating-point"),
        ((x.transpose(1, 2),), (x.transpose(1, 2),), "contiguous last axis"),
        ((x,), (x.half(),), "laid out alike"),
        ((x,), (x[:, :4],), "laid out alike"),
        ((x, x.transpose(0, 1).contiguous().transpose(0, 1)), (x, x), "laid out alike"),
    ):
        with pytest.raises(ValueError, match=message):
            LayeredKV(keys, values)


def test_batches_that_do_not_fit_together_are_refused() -> None:
    tail = room(2, 8, 32, torch.float32)
    for tails, lengths, rows, message in (
        ([], [], [], "at least one request"),
        ([tail], [1, 2], [1], "1 tails, 2 lengths and 1 row counts"),
        ([tail], [1], [], "0 row counts"),
        ([tail], [8], [1], r"room for 8 tokens cannot hold 8 \+ 1"),
        ([tail], [0], [0], r"cannot hold 0 \+ 0"),
        ([tail], [-1], [1], r"cannot hold -1 \+ 1"),
        ([tail, room(1, 8, 32, torch.float32)], [0, 0], [1, 1], "same layers, KV heads"),
        ([tail, room(2, 8, 16, torch.float32)], [0, 0], [1, 1], "head dim"),
        ([tail, room(2, 8, 32, torch.float16)], [0, 0], [1, 1], "dtype"),
        ([tail, room(2, 8, 32, torch.float32, layers=2)], [0, 0], [1, 1], "same layers"),
    ):
        with pytest.raises(ValueError, match=message):
            RaggedBatch(tails, lengths, rows)


@pytest.mark.parametrize("which", ["keys", "values"])
def test_rows_that_are_not_the_tails_are_refused_and_nothing_is_written(backend: Backend, which: str) -> None:
    tail = room(2, 8, 32, torch.float32)
    batch = RaggedBatch([tail, room(2, 8, 32, torch.float32)], [0, 1], [3, 1])
    good = torch.zeros(4, 2, 32)
    for bad in (good[:3], good[:, :1], good[..., :16], good.half(), good.double(), good[0], good.to("meta")):
        given = {"keys": good, "values": good, which: bad}
        with pytest.raises(ValueError, match=rf"{which} must be \[4, 2, 32\] torch.float32 on cpu like the tails"):
            ops.append_to_tails(batch, 0, given["keys"], given["values"])
    assert tail.keys[0].isnan().all()


def test_queries_that_are_not_the_batchs_are_refused(backend: Backend) -> None:
    batch = RaggedBatch([room(2, 8, 32, torch.float32)], [0], [3])
    ops.append_to_tails(batch, 0, torch.zeros(3, 2, 32), torch.zeros(3, 2, 32))
    q = torch.zeros(3, 4, 32)
    for bad, error in (
        (q[:2], ValueError),
        (q[0], ValueError),
        (q[..., :16], ValueError),
        (q[:, :3], ValueError),
        (q.long(), TypeError),
        (q.to("meta"), ValueError),
    ):
        with pytest.raises(error):
            ops.tail_attention(bad, batch, 0, 0.2)
    for window in (0, -1):
        with pytest.raises(ValueError, match="window"):
            ops.tail_attention(q, batch, 0, 0.2, window=window)


@pytest.mark.parametrize("layer", [2, -3, 10**6])
def test_a_layer_that_does_not_exist_is_an_error_and_not_a_wild_address(layer: int) -> None:
    code = (
        "import sys, torch\n"
        "from polykv_kernels import LayeredKV, RaggedBatch, ops\n"
        "keys = tuple(torch.zeros(2, 8, 32) for _ in range(2))\n"
        "batch = RaggedBatch([LayeredKV(keys, keys)], [0], [1])\n"
        "for call in (lambda x: ops.append_to_tails(batch, int(sys.argv[1]), x, x),\n"
        "             lambda x: ops.tail_attention(x, batch, int(sys.argv[1]), 1.0)):\n"
        "    try: call(torch.zeros(1, 2, 32))\n"
        "    except (IndexError, ValueError): print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(layer)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\nrefused\n"), done.stderr


# ----------------------------------------------------------------------------------------------- how storage grows


MODEL = tiny_model("llama", num_hidden_layers=2)


def tokens_of(tail: Tail) -> list[Tensor]:
    return [x[:, : tail.length] for x in (*tail.room.keys, *tail.room.values)]


@searched
@given(
    st.one_of(st.none(), st.integers(1, 300)),
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(("grow", "fail", "rewind", "release")), st.integers(1, 60)), min_size=1, max_size=25
    ),
)
def test_a_tail_keeps_what_it_holds_whatever_happens_to_it(
    limit: int | None, by_layer: bool, events: list[tuple[str, int]]
) -> None:
    tail = Tail(MODEL, limit=limit, by_layer=by_layer)
    shape = (2, 0, 32)
    mirror = [torch.zeros(shape) for _ in range(4)]
    per_token = 2 * 2 * 2 * 32 * 4
    largest = 0
    for kind, amount in events:
        before, room_before = tail.capacity, tail._room
        if kind in ("grow", "fail"):
            rows = amount if limit is None else min(amount, limit - tail.length)
            if rows < 1:
                continue
            tail.reserve(tail.length + rows)
            largest = max(largest, tail.length + rows)
            for index, x in enumerate((*tail.room.keys, *tail.room.values)):
                new = torch.randn(2, rows, 32)
                x[:, tail.length : tail.length + rows] = new
                if kind == "grow":
                    mirror[index] = torch.cat([mirror[index], new], 1)
            if kind == "grow":  # a forward that fails writes, but commits nothing
                tail.commit(rows)
            assert (tail._room is room_before) == (tail.capacity == before), "moved only to grow"
        elif kind == "rewind":
            keep = max(0, tail.length - amount)
            tail.rewind(keep)
            mirror = [x[:, :keep] for x in mirror]
        else:
            tail.release()
            mirror, largest = [torch.zeros(shape) for _ in range(4)], 0
        assert tail.length == mirror[0].shape[1]
        assert tail.length <= largest <= tail.capacity
        assert tail.capacity <= max(GROWTH * largest + BUCKET_TOKENS, 0)
        assert limit is None or tail.capacity <= limit
        assert tail.nbytes == tail.capacity * per_token
        if tail.capacity:
            storages = {
                x.untyped_storage().data_ptr(): x.untyped_storage() for x in (*tail.room.keys, *tail.room.values)
            }
            assert sum(storage.nbytes() for storage in storages.values()) == tail.nbytes
            assert len(storages) == (2 if by_layer else 1)
            assert all(torch.equal(a, b) for a, b in zip(tokens_of(tail), mirror, strict=True))


@pytest.mark.parametrize("limit", [None, 5000])
def test_a_tail_that_grows_by_single_tokens_copies_each_five_times_at_most_on_average(limit: int | None) -> None:
    tail, copied = Tail(MODEL, limit=limit), 0
    for tokens in range(1, 5001):
        room_before = tail._room
        tail.reserve(tokens)
        if tail._room is not room_before:
            copied += tail.length
        tail.commit(1)
        assert copied <= 5 * tokens
    assert limit is None or tail.capacity == limit


def test_whole_buckets_but_no_more_than_the_limit() -> None:
    assert [bucket(tokens) for tokens in (1, 16, 17, 32)] == [16, 16, 32, 32]
    assert [bucket(tokens, 20) for tokens in (1, 16, 17, 20)] == [16, 16, 20, 20]


def test_a_tail_without_memory_keeps_what_it_holds(monkeypatch: Any) -> None:
    tail = Tail(MODEL)
    tail.reserve(3)
    for x in (*tail.room.keys, *tail.room.values):
        x.fill_(7.0)
    tail.commit(3)

    def refuse(capacity: int) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(tail, "_allocate", refuse)
    tail.reserve(16)
    with pytest.raises(MemoryError, match=r"private tail of 17 tokens; run fewer requests at once"):
        tail.reserve(17)
    assert (tail.length, tail.capacity) == (3, 16)
    assert all((x == 7.0).all() for x in tokens_of(tail))


def test_layers_are_handed_over_one_storage_each() -> None:
    tail = Tail(MODEL, limit=10, by_layer=True)
    tail.reserve(10)
    for index, (keys, values) in enumerate(zip(tail.room.keys, tail.room.values, strict=True)):
        keys.fill_(index)
        values.fill_(-index)
    tail.commit(6)
    layers = tail.take_layers()
    assert (tail.length, tail.capacity, tail.nbytes) == (0, 0, 0)
    assert [tuple(x.shape) for pair in layers for x in pair] == [(2, 6, 32)] * 4
    assert all((k == i).all() and (v == -i).all() for i, (k, v) in enumerate(layers))
    assert len({x.untyped_storage().data_ptr() for pair in layers for x in pair}) == 2
    tail.release()
    tail.release()


def test_every_instruction_set_is_among_the_backends() -> None:
    assert {b.isa for b in able(torch.float32) if b.name == "cpu"} == set(isas())
    assert cpu.append_to_tails is not None
