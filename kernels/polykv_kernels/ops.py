"""The public operations and the choice of backend. Shapes, dtypes and errors are stated here once, for every backend.

A backend is a module with the functions of :mod:`polykv_kernels.reference` and the same signatures. Which one runs
follows from the device, the dtype and the head dim (:func:`choose_backend`); the environment variable
``POLYKV_KERNELS=reference|cpu|triton`` or :func:`use_backend` force one.

Linear layers (:func:`linear`) have kernels on the CPU alone; elsewhere they are torch's.

Notation: ``Hq`` query heads, ``Hkv`` KV heads (``Hq`` a multiple of ``Hkv``), ``D`` head dim, ``rows`` query
tokens of all requests stacked, ``T`` tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polykv_kernels import cpu, reference, triton
from polykv_kernels.errors import BackendError
from polykv_kernels.layouts import DenseKV, EncodedKV, Int8Keys, Int8Weights, LloydMax3Values
from polykv_kernels.tails import RaggedBatch

__all__ = [
    "BACKENDS",
    "BackendError",
    "Choice",
    "append_to_tails",
    "choose_backend",
    "decode",
    "encode_keys_int8",
    "encode_values_lloyd3",
    "exact_tokens",
    "linear",
    "masked_attention",
    "merge_attention_states",
    "quantize_weights_int8",
    "ragged_attention",
    "shared_attention",
    "store_exact",
    "tail_attention",
    "use_backend",
]

BACKENDS: dict[str, Any] = {"reference": reference, "cpu": cpu, "triton": triton}
"""Modules by the names that ``POLYKV_KERNELS`` takes."""

_ENVIRONMENT = "POLYKV_KERNELS"
_forced: list[str] = []  # the innermost use_backend() last


@dataclass(frozen=True)
class Choice:
    """Which backend runs, and why.

    Attributes:
        name: a key of :data:`BACKENDS`.
        reason: one line for people.
        forced: whether the user asked for it.
    """

    name: str
    reason: str
    forced: bool = False

    @property
    def module(self) -> Any:
        """The backend."""
        return BACKENDS[self.name]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Forces a backend in the whole process, as ``POLYKV_KERNELS`` does and before it; for tests and benchmarks.

    Raises:
        BackendError: no backend has that name.
    """
    _check_name(name, "use_backend()")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.remove(name)


def _check_name(name: str, origin: str) -> None:
    if name not in BACKENDS:
        raise BackendError(f"{origin} names the backend {name!r}; choose one of {', '.join(BACKENDS)}")


def _forced_backend() -> tuple[str, str] | None:
    if _forced:
        return _forced[-1], "use_backend()"
    name = os.environ.get(_ENVIRONMENT, "").strip().lower()
    if not name:
        return None
    _check_name(name, _ENVIRONMENT)
    return name, _ENVIRONMENT


def choose_backend(device: torch.device, dtype: torch.dtype, head_dim: int, *, encode: bool = False) -> Choice:
    """The one place where a backend is chosen.

    Args:
        device: where the tensors are.
        dtype: dtype of the queries, or of the keys and values to be encoded.
        head_dim: ``D``.
        encode: whether it is for encoding; else for attention.

    Returns:
        The choice. Without force it never fails: what no compiled backend does, the torch reference does.

    Raises:
        BackendError: a forced backend is unknown, not usable here, or does not take this dtype or head dim.
    """
    forced = _forced_backend()
    if forced is not None:
        name, origin = forced
        problem = _problem(name, device, dtype, head_dim, encode)
        if problem is not None:
            raise BackendError(f"{origin} forces the backend {name!r}, which cannot run here: {problem}")
        return Choice(name, f"forced by {origin}", forced=True)
    name = "cpu" if device.type == "cpu" else "triton"
    problem = _problem(name, device, dtype, head_dim, encode)
    if problem is None:
        return Choice(name, f"tensors on {device.type}")
    return Choice("reference", problem)


# Backends that could run, which they then can for ever; a step asks hundreds of times. What could not run is asked again: a
# compiler may have been installed meanwhile.
_usable: dict[tuple[object, ...], Any] = {}


def _problem(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, encode: bool) -> str | None:
    if name == "reference":
        return None
    module = BACKENDS[name]
    if name == "cpu" and device.type == "cpu":  # what it does not take must not make it compile itself
        problem: str | None = module.supports(dtype, head_dim, encode=encode) or module.unavailable_reason(device)
    else:
        problem = module.unavailable_reason(device) or module.supports(dtype, head_dim, encode=encode)
    return problem


def _backend(head_dim: int, *inputs: Tensor, encode: bool = False) -> Any:
    """The backend for some inputs, the first of which has the dtype that counts."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        # compiled kernels know no gradients, and would cut them off without a word
        forced = _forced_backend()
        if forced is not None and forced[0] != "reference":
            raise BackendError(
                f"{forced[1]} forces the backend {forced[0]!r}, which has no gradients, and an input requires them; "
                "compute under torch.no_grad(), or use the reference"
            )
        return reference
    key = (_forced_backend(), inputs[0].device, inputs[0].dtype, head_dim, encode)
    module = _usable.get(key)
    if module is None:
        choice = choose_backend(inputs[0].device, inputs[0].dtype, head_dim, encode=encode)
        module = choice.module
        if choice.forced or choice.name != "reference":
            _usable[key] = module
    return module


def _check_query(q: Tensor, num_kv_heads: int, head_dim: int) -> None:
    if not q.is_floating_point():
        raise TypeError(f"q must be floating point, got {q.dtype}")
    if q.shape[1] == 0 or num_kv_heads == 0:
        raise ValueError(f"there must be heads, got {q.shape[1]} query heads and {num_kv_heads} KV heads")
    if q.shape[-1] != head_dim:
        raise ValueError(f"q has head_dim {q.shape[-1]}, the keys have {head_dim}")
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads cannot share {num_kv_heads} KV heads evenly")


def _check_device(a: Tensor, a_name: str, b: Tensor, b_name: str) -> None:
    if a.device != b.device:
        raise ValueError(f"{a_name} is on {a.device}, {b_name} on {b.device}; move one of them")


def _check_window(window: int | None) -> None:
    if window is not None and not isinstance(window, int):
        raise TypeError(f"a window is a number of tokens, an int, or None; got {window!r}")
    if window is not None and window < 1:
        raise ValueError(f"a window must hold at least one token, the query's own, got {window}; None means no window")


def shared_attention(
    q: Tensor,
    segment: EncodedKV,
    scale: float,
    *,
    q_positions: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of many requests' rows over one compressed segment, which is never expanded as a whole.

    All tokens of the segment precede every row, so there is no causal mask; a sliding window masks by absolute
    position (``key > query - window``). By linearity the Hadamard rotation is undone once per row and not once
    per token.

    Args:
        q: ``[rows, Hq, D]``, after RoPE.
        segment: one layer of the pool.
        scale: factor on the logits, usually ``D ** -0.5``.
        q_positions: ``[rows]`` integer absolute positions; needed with ``window`` only.
        window: sliding window in tokens, or None.

    Returns:
        ``out`` ``[rows, Hq, D]`` in q's dtype, normalised over this segment alone, and ``lse`` ``[rows, Hq]``, the
        natural log of the sum of exponentials, float32 (float64 for float64 q). A row whose window excludes the
        whole segment has out 0 and lse -inf.

    Raises:
        ValueError: shapes or devices do not fit, there are no rows, or a window is empty or comes without positions.
        TypeError: q is not floating point, or positions are.
        BackendError: a forced backend cannot do this.
    """
    if q.ndim != 3 or q.shape[0] == 0:
        raise ValueError(f"q must be [rows, Hq, D] with at least one row, got {tuple(q.shape)}")
    _check_query(q, segment.num_kv_heads, segment.head_dim)
    if q.device != segment.device:
        raise ValueError(f"q is on {q.device}, the segment on {segment.device}; move one of them")
    _check_window(window)
    if window is not None:
        if q_positions is None or q_positions.shape != q.shape[:1]:
            raise ValueError("a sliding window needs q_positions of shape [rows]")
        if q_positions.is_floating_point():
            raise TypeError(f"q_positions must be integers, got {q_positions.dtype}")
        _check_device(q, "q", q_positions, "q_positions")
    exact = () if segment.exact is None else (segment.exact.keys, segment.exact.values)
    return _backend(segment.head_dim, q, *exact).shared_attention(
        q, segment, scale, q_positions=q_positions, window=window
    )


def masked_attention(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over dense, possibly padded keys with an explicit mask, returning the log-sum-exp too.

    Args:
        q: ``[B, Hq, rows, D]``.
        keys: ``[B, Hkv, T, D]``.
        values: ``[B, Hkv, T, D]``.
        scale: factor on the logits.
        mask: boolean, broadcastable to ``[B, Hq, rows, T]``; True takes part. None means all do.

    Returns:
        ``out`` ``[B, Hq, rows, D]`` in q's dtype and ``lse`` ``[B, Hq, rows]`` float32 (float64 for float64 q);
        fully masked rows have out 0 and lse -inf.

    Raises:
        ValueError: shapes do not fit.
        TypeError: q is not floating point, or the mask not boolean.
    """
    if q.ndim != 4 or keys.shape != values.shape or keys.shape[0] != q.shape[0]:
        raise ValueError(
            f"shapes do not fit: q {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
        )
    _check_query(q, keys.shape[1], keys.shape[3])
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, got {mask.dtype}")
    return reference.masked_attention(q, keys, values, scale, mask)


def ragged_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    row_counts: Sequence[int],
    scale: float,
    *,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of each request's rows over its own private tail, tails of any lengths together.

    The last ``row_counts[i]`` tokens of tail ``i`` are the rows of request ``i`` themselves.

    Args:
        q: ``[rows, Hq, D]``, the requests' rows one after another.
        keys: one ``[Hkv, T_i, D]`` tensor a request.
        values: one ``[Hkv, T_i, D]`` tensor a request.
        row_counts: rows of each request; they sum to ``rows``.
        scale: factor on the logits.
        window: sliding window in tokens, or None.

    Returns:
        ``out`` ``[rows, Hq, D]`` in q's dtype and ``lse`` ``[rows, Hq]`` float32 (float64 for float64 q).

    Raises:
        ValueError: shapes, counts or devices do not fit, or a window is empty.
        TypeError: q is not floating point, or a tail's keys and values are not of one floating-point dtype.
        BackendError: a forced backend cannot do this.
    """
    row_counts = [int(count) for count in row_counts]
    if q.ndim != 3 or q.shape[0] != sum(row_counts) or not len(keys) == len(values) == len(row_counts):
        raise ValueError(
            f"q has {q.shape[0]} rows for row_counts {list(row_counts)}, {len(keys)} keys, {len(values)} values"
        )
    _check_window(window)
    for k, v, count in zip(keys, values, row_counts, strict=True):
        if k.ndim != 3 or k.shape != v.shape or count < 1 or k.shape[1] < count:
            raise ValueError(
                f"a tail with keys {tuple(k.shape)} and values {tuple(v.shape)} cannot hold its own {count} rows"
            )
        if k.shape[0] != keys[0].shape[0]:
            raise ValueError(f"tails must have the same number of KV heads, got {keys[0].shape[0]} and {k.shape[0]}")
        if k.dtype != v.dtype or not k.is_floating_point():
            raise TypeError(
                f"a tail's keys and values must be of one floating-point dtype, got {k.dtype} and {v.dtype}"
            )
        _check_device(q, "q", k, "a tail's keys")
        _check_device(q, "q", v, "a tail's values")
        _check_query(q, k.shape[0], k.shape[2])
    return _backend(q.shape[-1], q, *keys, *values).ragged_attention(q, keys, values, row_counts, scale, window=window)


def _check_layer(batch: RaggedBatch, layer: int) -> None:
    num_layers = len(batch.tails[0].keys)
    if not 0 <= layer < num_layers:
        raise IndexError(f"layer must lie in [0, {num_layers}), got {layer}")


def append_to_tails(batch: RaggedBatch, layer: int, keys: Tensor, values: Tensor) -> None:
    """Writes a step's new keys and values to the ends of the requests' tails, in one layer.

    Args:
        batch: the step's tails.
        layer: which layer.
        keys: ``[rows, Hkv, D]`` after RoPE, the requests' rows one after another.
        values: ``[rows, Hkv, D]``.

    Raises:
        ValueError: shape, dtype or device are not those of the tails.
        IndexError: there is no such layer.
    """
    _check_layer(batch, layer)
    held = batch.tails[0].keys[0]
    expected = (batch.num_rows, held.shape[0], held.shape[2])
    for name, x in (("keys", keys), ("values", values)):
        if x.shape != expected or x.dtype != held.dtype or x.device != held.device:
            raise ValueError(
                f"{name} must be {list(expected)} {held.dtype} on {held.device} like the tails, got {list(x.shape)} "
                f"{x.dtype} on {x.device}"
            )
    backend = _backend(held.shape[2], held)
    if hasattr(backend, "append_to_tails"):
        backend.append_to_tails(batch, layer, keys, values)
    else:
        batch.write(layer, keys, values)


def tail_attention(
    q: Tensor, batch: RaggedBatch, layer: int, scale: float, *, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """As :func:`ragged_attention`, over the tails of a step that is planned once for all layers.

    Args:
        q: ``[rows, Hq, D]`` after RoPE, the requests' rows one after another.
        batch: the step's tails, this layer's new keys and values in them already (:func:`append_to_tails`).
        layer: which layer.
        scale: factor on the logits.
        window: sliding window in tokens, or None.

    Returns:
        ``out`` ``[rows, Hq, D]`` in q's dtype and ``lse`` ``[rows, Hq]`` float32 (float64 for float64 q).

    Raises:
        ValueError: shapes or devices do not fit, or a window is empty.
        TypeError: q is not floating point.
        IndexError: there is no such layer.
        BackendError: a forced backend cannot do this.
    """
    _check_layer(batch, layer)
    held = batch.tails[0].keys[0]
    if q.ndim != 3 or q.shape[0] != batch.num_rows:
        raise ValueError(f"q must be [{batch.num_rows}, Hq, D], the rows of the batch, got {list(q.shape)}")
    _check_query(q, held.shape[0], held.shape[2])
    _check_device(q, "q", held, "the tails")
    _check_window(window)
    backend = _backend(held.shape[2], q, held)
    if hasattr(backend, "tail_attention"):
        result: tuple[Tensor, Tensor] = backend.tail_attention(q, batch, layer, scale, window=window)
        return result
    keys, values = batch.held(layer)
    return backend.ragged_attention(q, keys, values, list(batch.row_counts), scale, window=window)


def merge_attention_states(*states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Joins partial attentions over disjoint sets of keys by their log-sum-exp.

    ``out = sum_i out_i * exp(lse_i - lse)`` with ``lse = log sum_i exp(lse_i)``, as in FlashAttention's split-KV
    and FlashInfer's cascade attention.

    Args:
        states: ``(out [..., D], lse [...])`` pairs of equal shapes; lse -inf marks an empty partial.

    Returns:
        The merged pair; out keeps its dtype.

    Raises:
        ValueError: no state, or shapes or devices differ.
        TypeError: out or lse is not floating point.
        BackendError: a forced backend cannot do this.
    """
    if not states:
        raise ValueError("merge_attention_states needs at least one (out, lse) pair")
    for state in states:
        if not (isinstance(state, tuple) and len(state) == 2 and all(isinstance(x, Tensor) for x in state)):
            raise TypeError("merge_attention_states takes (out, lse) pairs of tensors, each an argument of its own")
        out, lse = state
        if out.ndim == 0 or out.shape != states[0][0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(f"states do not fit: out {tuple(out.shape)}, lse {tuple(lse.shape)}")
        if not out.is_floating_point() or not lse.is_floating_point():
            raise TypeError(f"states must be floating point, got out {out.dtype} and lse {lse.dtype}")
        _check_device(states[0][0], "one state", out, "another")
        _check_device(out, "a state's out", lse, "its lse")
    return _backend(states[0][0].shape[-1], *(x for state in states for x in state)).merge_attention_states(states)


def encode_keys_int8(keys: Tensor, *, per_tensor: bool = False) -> Int8Keys:
    """Quantises keys to symmetric int8.

    Args:
        keys: ``[Hkv, T, D]`` floating point, after RoPE.
        per_tensor: one scale ``max|K| / 127`` for the whole tensor (arXiv 2604.24971) instead of one per channel
            and 64-token tile.

    Returns:
        The packed keys.

    Raises:
        ValueError: the shape does not fit, or a key is NaN, infinite or too large for a float16 step.
        TypeError: the keys are not floating point.
        BackendError: a forced backend cannot do this.
    """
    _check_encodable(keys, "keys")
    return _backend(keys.shape[-1], keys, encode=True).encode_keys_int8(keys, per_tensor=per_tensor)


def encode_values_lloyd3(values: Tensor, *, sign_seed: int | None, least_squares: bool = True) -> LloydMax3Values:
    """Rotates values and quantises them to the eight Lloyd-Max levels, bit-packed.

    Args:
        values: ``[Hkv, T, D]`` floating point; D a multiple of 16.
        sign_seed: seed of random signs before the transform (they stop structured vectors from clipping), or None.
        least_squares: store the scale that minimises each vector's error instead of its norm.

    Returns:
        The packed values.

    Raises:
        ValueError: D is no multiple of 16, a value is NaN or infinite, or too long for a float16 scale.
        TypeError: the values are not floating point.
        BackendError: a forced backend cannot do this.
    """
    _check_encodable(values, "values")
    reference.hadamard_block(values.shape[-1])
    return _backend(values.shape[-1], values, encode=True).encode_values_lloyd3(
        values, sign_seed=sign_seed, least_squares=least_squares
    )


def _check_encodable(x: Tensor, name: str) -> None:
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"{name} must be [Hkv, T, D] and not empty, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if not torch.isfinite(x).all():
        raise ValueError(f"{name} hold NaN or infinite numbers: the model's forward pass is broken; nothing was stored")


def store_exact(keys: Tensor, values: Tensor, start: int) -> EncodedKV:
    """Keeps every token as it is, in copies of its own.

    Args:
        keys: ``[Hkv, T, D]`` floating point, after RoPE.
        values: ``[Hkv, T, D]``.
        start: absolute position of the first token.

    Raises:
        ValueError: the shape does not fit, or an element is NaN or infinite.
        TypeError: keys or values are not floating point.
    """
    exact = exact_tokens(keys, values)
    return EncodedKV(start, keys.shape[1], keys.shape[0], keys.shape[2], keys.dtype, exact, None, None)


def exact_tokens(keys: Tensor, values: Tensor) -> DenseKV:
    """Copies of a few tokens' keys and values; arguments and errors as for :func:`store_exact`."""
    _check_encodable(keys, "keys")
    _check_encodable(values, "values")
    # clone() alone would keep the strides of a transposed view
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (keys, values)]
    return DenseKV(*copies)


def decode(segment: EncodedKV, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Expands a layer to dense keys and values: for tests and tools, never used by a reader.

    Args:
        segment: one layer of the pool.
        dtype: dtype of the result; the model's by default.

    Returns:
        keys and values, each ``[Hkv, T, D]``.
    """
    return reference.decode(segment, dtype)


def linear(x: Tensor, weight: Tensor | Int8Weights, bias: Tensor | None = None) -> Tensor:
    """A linear layer, ``y = x W^T + bias``.

    The compiled kernels read weights as they are (float32, float16, bfloat16 or int8; widened in registers) and accumulate
    in float32. With them a row's result has the same bits in any company of rows and on any number of threads. Rows in
    float16 or bfloat16 go through float32, and the result is rounded once.

    Args:
        x: ``[..., in]`` floating point.
        weight: ``[out, in]``, floating point or packed.
        bias: ``[out]`` floating point, or None.

    Returns:
        ``[..., out]`` in x's dtype.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: a tensor is not floating point.
        BackendError: a forced backend cannot do this. The Triton backend leaves linear layers to torch.
    """
    stored = weight.codes if isinstance(weight, Int8Weights) else weight
    if stored.ndim != 2:
        raise ValueError(f"weight must be [out, in], got {tuple(stored.shape)}")
    if x.ndim == 0 or x.shape[-1] != stored.shape[1]:
        raise ValueError(f"x must be [..., {stored.shape[1]}] for a weight {tuple(stored.shape)}, got {tuple(x.shape)}")
    if not x.is_floating_point() or not (stored is not weight or stored.is_floating_point()):
        raise TypeError(f"x and weight must be floating point, got {x.dtype} and {stored.dtype}")
    _check_device(x, "x", stored, "the weight")
    if bias is not None:
        if bias.ndim != 1 or bias.shape[0] != stored.shape[0]:
            raise ValueError(f"bias must be [{stored.shape[0]}], got {tuple(bias.shape)}")
        if not bias.is_floating_point():
            raise TypeError(f"bias must be floating point, got {bias.dtype}")
        _check_device(x, "x", bias, "the bias")
    out: Tensor = _linear_backend(x, stored, bias).linear(x, weight, bias)
    return out


def _linear_backend(x: Tensor, stored: Tensor, bias: Tensor | None) -> Any:
    forced = _forced_backend()
    name = "cpu" if forced is None else forced[0]
    if name != "cpu":
        return reference
    problem: str | None
    if torch.is_grad_enabled() and (
        x.requires_grad or stored.requires_grad or (bias is not None and bias.requires_grad)
    ):
        problem = "it has no gradients, and an input requires them; compute under torch.no_grad(), or use the reference"
    elif stored.shape[1] == 0:
        problem = "a linear layer without inputs has nothing to compute"
    else:
        problem = cpu.supports_linear(x.dtype, stored.dtype) or cpu.unavailable_reason(x.device)
    if problem is None:
        return cpu
    if forced is not None:
        raise BackendError(f"{forced[1]} forces the backend 'cpu', which cannot run here: {problem}")
    return reference


def quantize_weights_int8(weight: Tensor) -> Int8Weights:
    """Quantises a linear layer's weights to symmetric int8 with a scale for every 64 inputs of an output.

    Args:
        weight: ``[out, in]`` floating point.

    Returns:
        The packed weights, on the same device.

    Raises:
        ValueError: the shape does not fit, or a weight is NaN or infinite.
        TypeError: the weights are not floating point.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be [out, in] and not empty, got {tuple(weight.shape)}")
    if not weight.is_floating_point():
        raise TypeError(f"weight must be floating point, got {weight.dtype}")
    if not torch.isfinite(weight).all():
        raise ValueError("weight holds NaN or infinite numbers; nothing was quantised")
    return reference.quantize_weights_int8(weight)
