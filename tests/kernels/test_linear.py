"""Linear layers: every backend and instruction set against float64, and the same bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import FULL, Backend, assert_equal, isas, unavailable
from torch import Tensor

from polykv_kernels import BackendError, Int8Weights, cpu, ops, reference
from polykv_kernels.layouts import WEIGHT_GROUP

BOUND = 2e-6  # ||error|| / ||reference||
KINDS = ("float32", "float16", "bfloat16", "int8")
compiled = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled CPU kernels: {unavailable()}")
searched = settings(max_examples=1000 if FULL else 80, deadline=None, derandomize=not FULL, database=None)


def stored(weight: Tensor, kind: str) -> Tensor | Int8Weights:
    return ops.quantize_weights_int8(weight) if kind == "int8" else weight.to(getattr(torch, kind))


def meant(weight: Tensor | Int8Weights) -> Tensor:
    """What the weights stand for, in float64."""
    return (reference.dequantize_weights(weight) if isinstance(weight, Int8Weights) else weight).double()


def oracle(x: Tensor, weight: Tensor | Int8Weights, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.double(), meant(weight), None if bias is None else bias.double())


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def same(got: Tensor, want: Tensor) -> None:
    assert_equal((got,), (want,))


# -------------------------------------------------------------------------------------------------- the results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (1, 1, 1),
        (1, 192, 576),
        (2, 5, 63),
        (3, 4, 64),
        (5, 7, 65),
        (6, 33, 100),
        (7, 96, 1023),
        (13, 50, 1025),
        (15, 576, 1536),
        (40, 31, 4096),
        (129, 70, 1100),
        (300, 37, 640),
    ],
)
def test_a_linear_layer_equals_its_definition(backend, kind, rows, outputs, inputs):
    x, weight, bias = torch.randn(rows, inputs), stored(torch.randn(outputs, inputs), kind), torch.randn(outputs)
    got = ops.linear(x, weight, bias)
    assert got.dtype == torch.float32 and got.is_contiguous()
    assert error(got, oracle(x, weight, bias)) <= BOUND
    assert error(ops.linear(x, weight), oracle(x, weight)) <= BOUND


def test_every_number_of_rows_and_outputs_has_its_tile(backend):
    x, weight = torch.randn(40, 70), torch.randn(21, 70)
    for rows in range(1, 41):
        assert error(ops.linear(x[:rows], weight), oracle(x[:rows], weight)) <= BOUND
    for outputs in range(1, 22):
        assert error(ops.linear(x[:3], weight[:outputs]), oracle(x[:3], weight[:outputs])) <= BOUND
    for inputs in range(1, 71):
        assert error(ops.linear(x[:, :inputs], weight[:, :inputs]), oracle(x[:, :inputs], weight[:, :inputs])) <= BOUND


def test_numbers_of_one_sign_are_summed_as_exactly(backend):
    x, weight = torch.rand(4, 4096), torch.rand(16, 4096)
    assert error(ops.linear(x, weight), oracle(x, weight)) <= BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_any_shape_in_front_and_none_at_all(backend, kind):
    weight, bias = stored(torch.randn(9, 20), kind), torch.randn(9)
    for shape in ((20,), (1, 20), (2, 3, 20), (1, 7, 20)):
        x = torch.randn(shape)
        got = ops.linear(x, weight, bias)
        assert got.shape == (*shape[:-1], 9)
        assert error(got, oracle(x, weight, bias)) <= BOUND
    assert ops.linear(torch.empty(0, 20), weight, bias).shape == (0, 9)
    assert ops.linear(torch.empty(2, 0, 20), weight).shape == (2, 0, 9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_half_precision_are_computed_in_float32_and_rounded_once(backend, dtype, kind):
    x, weight, bias = torch.randn(7, 130).to(dtype), stored(torch.randn(11, 130), kind), torch.randn(11)
    got = ops.linear(x, weight, bias)
    assert got.dtype == dtype
    want = ops.linear(x.float(), weight, bias).to(dtype)
    assert (got.float() - want.float()).abs().max() <= torch.finfo(dtype).eps * want.float().abs().max()


def test_a_layer_without_inputs_or_outputs_is_torchs(backend):
    bias = torch.randn(3)
    if backend.name != "cpu":  # which says so when forced, below
        same(ops.linear(torch.empty(2, 0), torch.empty(3, 0), bias), bias.expand(2, 3).contiguous())
    assert ops.linear(torch.randn(2, 5), torch.empty(0, 5)).shape == (2, 0)


# ---------------------------------------------------------------------------------------------- views of memory


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_weights_may_be_views(isa, kind):
    x, weight = torch.randn(12, 100), torch.randn(30, 100)
    wide = stored(weight, kind)
    if isinstance(wide, Int8Weights):
        views: list[Any] = [Int8Weights(wide.codes[::3], wide.scales[::3])]
    else:
        views = [wide[::3], wide[:, 13:], wide.T.contiguous().T, wide[:, ::2], wide[:1].expand(4, 100)]
    for view in views:
        inputs = meant(view).shape[1]
        for rows in (
            x[:, :inputs],
            x[::2, 100 - inputs :],
            x.T.contiguous().T[:, :inputs],
            x[:1, :inputs].expand(5, -1),
        ):
            assert error(ops.linear(rows, view), oracle(rows, view)) <= BOUND
            same(ops.linear(rows, view), ops.linear(rows.contiguous(), view))
    three = x[:, : meant(views[0]).shape[1]].unflatten(0, (3, 4)).transpose(0, 1)
    same(ops.linear(three, views[0]), ops.linear(three.contiguous(), views[0]))
    bias = torch.randn(60)[::2]
    same(ops.linear(x, wide, bias), ops.linear(x, wide, bias.contiguous()))
    same(ops.linear(x, wide, bias.half()), ops.linear(x, wide, bias.half().float()))


@compiled
def test_a_tensor_whose_sign_torch_keeps_apart_is_read_with_it(isa):
    x = torch.randn(3, 8, dtype=torch.complex64).conj().imag
    weight = torch.randn(5, 8, dtype=torch.complex64).conj().imag
    bias = torch.randn(5, dtype=torch.complex64).conj().imag
    assert x.is_neg() and weight.is_neg() and bias.is_neg()
    assert error(ops.linear(x, weight, bias), oracle(x.clone(), weight.clone(), bias.clone())) <= BOUND


@compiled
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_leaves_the_others_bitwise_alike_and_a_broken_weight_its_output(isa, bad):
    x, weight = torch.randn(9, 70), torch.randn(10, 70)
    want = ops.linear(x, weight)
    broken = x.clone()
    broken[4, 69] = bad
    got = ops.linear(broken, weight)
    assert not got[4].isfinite().any()
    same(got[torch.arange(9) != 4], want[torch.arange(9) != 4])
    weight[9, 0] = bad
    got = ops.linear(x, weight)
    assert not got[:, 9].isfinite().any()
    same(got[:, :9].contiguous(), want[:, :9].contiguous())


# ----------------------------------------------------------------------------------------------- the same bits


def check_bits(x: Tensor, weight: Tensor | Int8Weights, bias: Tensor | None, data: Any) -> None:
    """Whole, row by row, some rows, and on other numbers of threads."""
    torch.set_num_threads(1)
    want = ops.linear(x, weight, bias)
    rows = x.shape[0]
    torch.set_num_threads(data.draw(st.integers(1, 5)))
    same(ops.linear(x, weight, bias), want)
    for row in {0, rows - 1, data.draw(st.integers(0, rows - 1))}:
        same(ops.linear(x[row : row + 1], weight, bias), want[row : row + 1])
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    same(ops.linear(x[first:last], weight, bias), want[first:last])
    order = torch.randperm(rows)
    same(ops.linear(x[order], weight, bias), want[order])
    torch.set_num_threads(1)


@compiled
@searched
@given(st.data())
def test_a_number_has_the_same_bits_in_any_company_and_on_any_number_of_threads(data):
    rows = data.draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 256, 257, 600])))
    outputs = data.draw(st.integers(1, 100))
    inputs = data.draw(st.one_of(st.integers(1, 200), st.sampled_from([576, 1023, 1024, 1025, 1536, 2100])))
    kind = data.draw(st.sampled_from(KINDS))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    x, weight = torch.randn(rows, inputs), stored(torch.randn(outputs, inputs), kind)
    bias = torch.randn(outputs) if data.draw(st.booleans()) else None
    want = oracle(x, weight, bias)
    for isa in isas():
        with Backend("cpu", isa, False).use():
            # numbers that cancel out have few right digits in any order of summing: hence the size of what was summed
            size = want.norm() + (x.double().norm(dim=1, keepdim=True) * meant(weight).norm(dim=1)).norm()
            assert (ops.linear(x, weight, bias).double() - want).norm() <= BOUND * size
            check_bits(x, weight, bias, data)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_several_threads_share_has_the_bits_of_one_thread(isa, kind):
    weight, bias = stored(torch.randn(1537, 576), kind), torch.randn(1537)
    for rows in (1, 15, 61, 512):
        x = torch.randn(rows, 576)
        torch.set_num_threads(1)
        want = ops.linear(x, weight, bias)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            for _ in range(3):
                same(ops.linear(x, weight, bias), want)
        same(ops.linear(x[-1:], weight, bias), want[-1:])


# ------------------------------------------------------------------------------------------------ int8 weights


def test_int8_weights_are_within_half_a_step_and_keep_what_is_largest(backend):
    weight = torch.randn(6, 150) * torch.exp(torch.randn(6, 1) * 3)
    weight[2] = 0.0
    weight[3, 64:128] = 0.0
    packed = ops.quantize_weights_int8(weight)
    assert packed.codes.shape == (6, 150) and packed.scales.shape == (6, 3)
    steps = packed.scales.repeat_interleave(WEIGHT_GROUP, dim=1)[:, :150]
    assert ((reference.dequantize_weights(packed) - weight).abs() <= 0.50001 * steps).all()
    assert packed.codes[0, :64].abs().max() == 127
    assert not packed.codes[2].any() and not packed.codes[3, 64:128].any()
    assert packed.nbytes == 6 * 150 + 6 * 3 * 4


def test_weights_of_extreme_size_are_quantised_too(backend):
    for size in (1e-45, 1e-38, 1e38):
        packed = ops.quantize_weights_int8(torch.full((2, 3), size))
        assert reference.dequantize_weights(packed).isfinite().all()
    assert ops.quantize_weights_int8(torch.randn(2, 3).bfloat16()).scales.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "fault", "words"),
    [
        (lambda: Int8Weights(torch.zeros(3, dtype=torch.int8), torch.zeros(3, 1)), ValueError, r"\[out, in\]"),
        (lambda: Int8Weights(torch.zeros(3, 4), torch.zeros(3, 1)), TypeError, "codes must be torch.int8"),
        (lambda: Int8Weights(torch.zeros(3, 65, dtype=torch.int8), torch.zeros(3, 1)), ValueError, r"\[3, 2\]"),
        (lambda: Int8Weights(torch.zeros(3, 4, dtype=torch.int8), torch.zeros(3, 1).half()), TypeError, "float32"),
        (lambda: Int8Weights(torch.zeros(4, 3, dtype=torch.int8).T, torch.zeros(3, 1)), ValueError, "contiguous"),
        (lambda: ops.quantize_weights_int8(torch.zeros(3)), ValueError, r"\[out, in\]"),
        (lambda: ops.quantize_weights_int8(torch.zeros(0, 3)), ValueError, "not empty"),
        (lambda: ops.quantize_weights_int8(torch.zeros(2, 3, dtype=torch.int64)), TypeError, "floating point"),
        (lambda: ops.quantize_weights_int8(torch.full((2, 3), torch.nan)), ValueError, "NaN"),
    ],
)
def test_int8_weights_that_a_kernel_would_misread_are_refused(make, fault, words):
    with pytest.raises(fault, match=words):
        make()


# ------------------------------------------------------------------------------------- arguments and the backend


@pytest.mark.parametrize(
    ("arguments", "fault", "words"),
    [
        ((torch.zeros(2, 3), torch.zeros(4)), ValueError, r"weight must be \[out, in\]"),
        ((torch.zeros(2, 3), torch.zeros(4, 5)), ValueError, r"x must be \[..., 5\]"),
        ((torch.zeros(()), torch.zeros(4, 5)), ValueError, r"x must be \[..., 5\]"),
        ((torch.zeros(2, 5), torch.zeros(4, 5), torch.zeros(5)), ValueError, r"bias must be \[4\]"),
        ((torch.zeros(2, 5), torch.zeros(4, 5), torch.zeros(4, 1)), ValueError, r"bias must be \[4\]"),
        ((torch.zeros(2, 5).long(), torch.zeros(4, 5)), TypeError, "floating point"),
        ((torch.zeros(2, 5), torch.zeros(4, 5, dtype=torch.int8)), TypeError, "floating point"),
        ((torch.zeros(2, 5), torch.zeros(4, 5), torch.zeros(4).long()), TypeError, "floating point"),
        ((torch.zeros(2, 5), torch.zeros(4, 5, device="meta")), ValueError, "move one"),
        ((torch.zeros(2, 5), torch.zeros(4, 5), torch.zeros(4, device="meta")), ValueError, "move one"),
    ],
)
def test_mistakes_are_named(backend, arguments, fault, words):
    with pytest.raises(fault, match=words):
        ops.linear(*arguments)


def test_what_the_kernels_do_not_take_is_torchs_unless_they_are_forced(monkeypatch):
    monkeypatch.delenv("POLYKV_KERNELS", raising=False)
    x, weight = torch.randn(2, 5, dtype=torch.float64), torch.randn(4, 5)
    got = ops.linear(x, weight)
    assert got.dtype == torch.float64
    assert error(got, oracle(x, weight)) < 1e-15
    with ops.use_backend("triton"):
        same(ops.linear(x.float(), weight), F.linear(x.float(), weight))
    with ops.use_backend("cpu"):
        with pytest.raises(BackendError, match="float64"):
            ops.linear(x, weight)
        with pytest.raises(BackendError, match="inputs"):
            ops.linear(torch.empty(2, 0), torch.empty(3, 0))


def test_gradients_are_torchs_and_a_forced_backend_says_that_it_has_none(monkeypatch):
    monkeypatch.delenv("POLYKV_KERNELS", raising=False)
    x, weight, bias = torch.randn(3, 20), torch.randn(4, 20), torch.randn(4)
    packed = ops.quantize_weights_int8(weight)
    for which in range(3):
        tensors = [t.clone().requires_grad_(i == which) for i, t in enumerate((x, weight, bias))]
        ops.linear(*tensors).sum().backward()
        assert tensors[which].grad is not None
        with ops.use_backend("cpu"), pytest.raises(BackendError, match="gradients"):
            ops.linear(*tensors)
        with torch.no_grad():
            assert not ops.linear(*tensors).requires_grad
    x.requires_grad_()
    ops.linear(x, packed).sum().backward()
    assert error(x.grad, meant(packed).sum(dim=0).expand(3, 20)) < BOUND


@compiled
def test_the_kernels_refuse_sizes_that_cannot_be():
    library = cpu.backend._library()
    x = torch.zeros(4, 4)
    at = x.data_ptr()

    def call(rows: int = 4, dtype: int = 0, scales: int | None = None, outputs: int = 4, inputs: int = 4) -> int:
        return library.polykv_cpu_linear(at, rows, 4, at, dtype, 4, scales, 1, None, outputs, inputs, at, 1)

    for bad in ({"rows": -1}, {"dtype": 4}, {"dtype": 3}, {"scales": at}, {"outputs": -1}, {"inputs": 0}):
        assert call(**bad) != 0
    assert call(rows=0) == 0
