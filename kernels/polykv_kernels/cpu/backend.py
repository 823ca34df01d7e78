"""The C++ kernels with the signatures of :mod:`polykv_kernels.reference`.

Arguments have been checked before they come here: shapes by :mod:`polykv_kernels.ops`, stored tensors by the layouts
themselves. Nothing but addresses and sizes crosses into C.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polykv_kernels import reference
from polykv_kernels.cpu.loader import LibraryUnavailable, load
from polykv_kernels.errors import BackendError
from polykv_kernels.layouts import LLOYD_MAX_3BIT, TILE_SIZE, EncodedKV, Int8Keys, Int8Weights, LloydMax3Values
from polykv_kernels.tails import RaggedBatch

MAX_HEAD_DIM = 256

_ISA_ENVIRONMENT = "POLYKV_CPU_ISA"
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INT8 = 3
_NO_MEMORY, _BAD_ARGUMENT, _OVERFLOW = 1, 2, 3


class _Dense(Structure):
    """``PolykvDense`` of polykv_cpu.cpp."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_head_stride", c_int64),
        ("key_token_stride", c_int64),
        ("value_head_stride", c_int64),
        ("value_token_stride", c_int64),
        ("num_tokens", c_int64),
        ("dtype", c_int32),
    ]


_DENSE_RECORD = np.dtype(_Dense)


class _Packed(Structure):
    """``PolykvPacked`` of polykv_cpu.cpp."""

    _fields_ = [
        ("key_codes", c_void_p),
        ("key_scales", c_void_p),
        ("value_codes", c_void_p),
        ("value_scales", c_void_p),
        ("levels", c_void_p),
        ("signs", c_void_p),
        ("key_head_stride", c_int64),
        ("key_scale_head_stride", c_int64),
        ("value_head_stride", c_int64),
        ("value_scale_head_stride", c_int64),
        ("num_tokens", c_int64),
        ("key_scale", c_float),
        ("hadamard_block", c_int32),
    ]


# ------------------------------------------------------------------------------------------------ the library


def _declare(cdll: ctypes.CDLL) -> None:
    p, i, n, f = c_void_p, c_int32, c_int64, c_float
    signatures: dict[str, list[Any]] = {
        "shared_attention": [p, n, i, i, i, f, POINTER(_Dense), POINTER(_Packed), p, p, p, i, i],
        "ragged_attention": [p, i, i, i, f, p, p, n, n, p, p, i, i],
        "append": [p, p, n, n, n, n, i, i, i, p, p, n],
        "merge": [POINTER(p), POINTER(p), i, n, n, p, p, i],
        "encode_keys": [p, i, n, n, i, n, i, p, p, p, i],
        "encode_values": [p, i, n, n, i, n, i, p, i, p, i, p, p, i],
        "linear": [p, n, n, p, i, n, p, n, p, n, n, p, i],
        "select_isa": [c_char_p],
    }
    for name, arguments in signatures.items():
        function = getattr(cdll, f"polykv_cpu_{name}")
        function.argtypes, function.restype = arguments, c_int32
    cdll.polykv_cpu_isa.argtypes, cdll.polykv_cpu_isa.restype = [], c_char_p
    cdll.polykv_cpu_available_isa.argtypes, cdll.polykv_cpu_available_isa.restype = [c_int32], c_char_p


def _library() -> ctypes.CDLL:
    """The library, ready for use.

    Raises:
        LibraryUnavailable: there is none here.
        BackendError: ``POLYKV_CPU_ISA`` names an instruction set that this processor does not have.
    """
    global _ready
    if _ready is None:
        with _lock:
            if _ready is None:
                cdll = load().cdll
                _declare(cdll)
                wanted = os.environ.get(_ISA_ENVIRONMENT, "").strip().lower()
                if wanted:
                    _select(cdll, wanted, _ISA_ENVIRONMENT)
                _ready = cdll
    return _ready


_ready: ctypes.CDLL | None = None
_lock = threading.Lock()
_warned = False


def _isas(cdll: ctypes.CDLL) -> list[str]:
    names: list[str] = []
    while (name := cdll.polykv_cpu_available_isa(len(names))) is not None:
        names.append(name.decode())
    return names


def _select(cdll: ctypes.CDLL, name: str, origin: str) -> None:
    if cdll.polykv_cpu_select_isa(name.encode()):
        raise BackendError(
            f"{origin} names the instruction set {name!r}; this processor has {', '.join(_isas(cdll))}: choose one of these"
        )


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Computes with another instruction set that this processor has; process-wide, for tests and benchmarks.

    Raises:
        BackendError: the processor does not have it.
    """
    cdll = _library()
    before = cdll.polykv_cpu_isa().decode()
    _select(cdll, name, "use_isa")
    try:
        yield
    finally:
        _select(cdll, before, "use_isa")


def unavailable_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device, or None. Compiles them where that is still to be done.

    The first time that they turn out to be missing, this warns: everything still works then, only slower.
    """
    global _warned
    if device.type != "cpu":
        return f"the cpu backend takes tensors on the CPU, these are on {device}"
    try:
        _library()
    except LibraryUnavailable as error:
        if not _warned:
            _warned = True
            warnings.warn(
                f"PolyKV computes attention with torch, several times slower than its compiled kernels: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        return str(error)
    return None


def supports(dtype: torch.dtype, head_dim: int, *, encode: bool = False) -> str | None:
    """Why the kernels do not take a dtype or head dim, or None."""
    if dtype not in _DTYPES:
        return f"the cpu kernels take float32, float16 and bfloat16, not {dtype} (float64 is for the oracle)"
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"the cpu kernels take head dims that are multiples of 16 up to {MAX_HEAD_DIM}, not {head_dim}"
    return None


def supports_linear(x: torch.dtype, weight: torch.dtype) -> str | None:
    """Why the kernels do not take these dtypes in a linear layer, or None; int8 is that of :class:`Int8Weights`."""
    if x not in _DTYPES:
        return f"the cpu kernels take rows in float32, float16 and bfloat16, not {x} (float64 is for the oracle)"
    if weight not in _DTYPES and weight != torch.int8:
        return f"the cpu kernels take weights in float32, float16, bfloat16 and int8, not {weight}"
    return None


def describe() -> dict[str, Any]:
    """What is in use, for :func:`polykv_kernels.show_config`: path, origin and notes of the library, isa, threads."""
    cdll = _library()
    library = load()
    return {
        "path": str(library.path),
        "origin": library.origin,
        "notes": list(library.notes),
        "isa": cdll.polykv_cpu_isa().decode(),
        "available_isas": _isas(cdll),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def _check(status: int) -> None:
    if status == _NO_MEMORY:
        raise MemoryError("the cpu kernels could not allocate their working memory")
    if status:  # ops and the layouts let nothing through that could lead here
        raise RuntimeError(f"the cpu kernels refused their arguments (status {status}); this is a defect of PolyKV")


# ------------------------------------------------------------------------------------------------- attention


@lru_cache(maxsize=1)
def _levels() -> Tensor:
    return torch.tensor(LLOYD_MAX_3BIT, dtype=torch.float32)


def _signs(sign_seed: int | None, head_dim: int) -> Tensor | None:
    return None if sign_seed is None else reference.random_signs(sign_seed, head_dim)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _dense(keys: Tensor, values: Tensor) -> _Dense:
    return _Dense(
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        keys.shape[1],
        _DTYPES[keys.dtype],
    )


def _packed(keys: Int8Keys, values: LloydMax3Values, head_dim: int) -> _Packed:
    per_tensor = keys.per_tensor
    return _Packed(
        keys.codes.data_ptr(),
        None if per_tensor else keys.scales.data_ptr(),
        values.codes.data_ptr(),
        values.scales.data_ptr(),
        _levels().data_ptr(),
        _address(_signs(values.sign_seed, head_dim)),
        keys.codes.stride(0),
        0 if per_tensor else keys.scales.stride(0),
        values.codes.stride(0),
        values.scales.stride(0),
        keys.num_tokens,
        float(keys.scales) if per_tensor else 1.0,
        reference.hadamard_block(head_dim),
    )


def _readable(x: Tensor) -> Tensor:
    """Dense keys or values as the kernels read them: any of three dtypes, the last axis contiguous."""
    x = x if x.dtype in _DTYPES else x.float()
    x = x.resolve_neg() if x.is_neg() else x  # torch may hold a sign apart from the memory
    return x if x.stride(-1) == 1 else x.contiguous()


def _floats(x: Tensor) -> Tensor:
    """Contiguous float32."""
    return x.float().resolve_neg().contiguous()


def _segment_plan(encoded: EncodedKV) -> tuple[Any, Any]:
    """Pointers to the structs of a segment's exact and packed parts; None for a part that it does not have."""
    plan = encoded.plan.get("cpu")
    if plan is None:
        exact = packed = None
        held: list[Any] = []  # what the addresses point into must live as long as they do
        if encoded.exact is not None:
            keys, values = _readable(encoded.exact.keys), _readable(encoded.exact.values)
            exact = _dense(keys, values)
            held += [keys, values]
        if encoded.keys is not None and encoded.values is not None:
            packed = _packed(encoded.keys, encoded.values, encoded.head_dim)
            held += [_levels(), _signs(encoded.values.sign_seed, encoded.head_dim)]
        plan = (byref(exact) if exact is not None else None, byref(packed) if packed is not None else None, held)
        encoded.plan["cpu"] = plan
    return plan[0], plan[1]


def shared_attention(
    q: Tensor,
    encoded: EncodedKV,
    scale: float,
    *,
    q_positions: Tensor | None,
    window: int | None,
    splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.shared_attention`.

    ``splits`` is for tests: parts that the tokens are divided into, 0 to choose from the shape. Results depend on it by
    rounding only.
    """
    rows, num_heads, head_dim = q.shape
    query = _floats(q)
    out = torch.empty_like(query)
    lse = query.new_empty((rows, num_heads))
    first_visible = None
    if window is not None:
        assert q_positions is not None
        first_visible = (q_positions.long() - (window - 1 + encoded.start)).contiguous()
    exact, packed = _segment_plan(encoded)
    _check(
        _library().polykv_cpu_shared_attention(
            query.data_ptr(),
            rows,
            num_heads,
            encoded.num_kv_heads,
            head_dim,
            scale,
            exact,
            packed,
            _address(first_visible),
            out.data_ptr(),
            lse.data_ptr(),
            splits,
            torch.get_num_threads(),
        )
    )
    return out.to(q.dtype), lse


def ragged_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    row_counts: Sequence[int],
    scale: float,
    *,
    window: int | None,
    splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.ragged_attention`; ``splits`` as for :func:`shared_attention`."""
    rows, num_heads, head_dim = q.shape
    query = _floats(q)
    out = torch.empty_like(query)
    lse = query.new_empty((rows, num_heads))
    if not row_counts:
        return out.to(q.dtype), lse
    tails = [(_readable(k), _readable(v)) for k, v in zip(keys, values, strict=True)]
    count = len(tails)
    _check(
        _library().polykv_cpu_ragged_attention(
            query.data_ptr(),
            num_heads,
            tails[0][0].shape[0],
            head_dim,
            scale,
            (_Dense * count)(*(_dense(k, v) for k, v in tails)),
            (c_int64 * count)(*row_counts),
            count,
            window or 0,
            out.data_ptr(),
            lse.data_ptr(),
            splits,
            torch.get_num_threads(),
        )
    )
    return out.to(q.dtype), lse


class _TailPlan:
    """``PolykvDense[L][requests]`` and the row counts of a :class:`RaggedBatch`, ready for the C side."""

    def __init__(self, batch: RaggedBatch) -> None:
        first = batch.tails[0].keys[0]
        self.num_requests = len(batch.tails)
        self.dtype = first.dtype
        self.num_kv_heads = first.shape[0]
        structs = np.zeros((len(batch.tails[0].keys), self.num_requests), dtype=_DENSE_RECORD)
        for index, tail in enumerate(batch.tails):
            column, (head_stride, token_stride, _) = structs[:, index], tail.keys[0].stride()
            column["keys"], column["values"] = tail.addresses
            column["key_head_stride"] = column["value_head_stride"] = head_stride
            column["key_token_stride"] = column["value_token_stride"] = token_stride
        structs["num_tokens"] = np.add(batch.lengths, batch.row_counts)
        structs["dtype"] = _DTYPES[first.dtype]
        self._structs = structs  # kept: the addresses below point into them
        self._row_counts = np.array(batch.row_counts, dtype=np.int64)
        self._base, self._layer_bytes = structs.ctypes.data, structs.strides[0]
        self.row_counts: int = self._row_counts.ctypes.data

    def tails(self, layer: int) -> int:
        """Address of a layer's structs."""
        return self._base + layer * self._layer_bytes


def _tail_plan(batch: RaggedBatch) -> _TailPlan | None:
    """The batch's plan, or None for a dtype that the C side does not read."""
    if "cpu" not in batch.plan:
        known = batch.tails[0].keys[0].dtype in _DTYPES
        batch.plan["cpu"] = _TailPlan(batch) if known else None
    plan: _TailPlan | None = batch.plan["cpu"]
    return plan


def append_to_tails(batch: RaggedBatch, layer: int, keys: Tensor, values: Tensor) -> None:
    """See :func:`polykv_kernels.ops.append_to_tails`."""
    plan = _tail_plan(batch)
    if plan is None:
        batch.write(layer, keys, values)
        return
    keys, values = _readable(keys), _readable(values)
    _check(
        _library().polykv_cpu_append(
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            plan.num_kv_heads,
            keys.shape[2],
            keys.element_size(),
            plan.tails(layer),
            plan.row_counts,
            plan.num_requests,
        )
    )


def tail_attention(
    q: Tensor, batch: RaggedBatch, layer: int, scale: float, *, window: int | None
) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.tail_attention`."""
    plan = _tail_plan(batch)
    if plan is None:
        keys, values = batch.held(layer)
        return ragged_attention(q, keys, values, batch.row_counts, scale, window=window)
    rows, num_heads, head_dim = q.shape
    query = _floats(q)
    out = torch.empty_like(query)
    lse = query.new_empty((rows, num_heads))
    _check(
        _library().polykv_cpu_ragged_attention(
            query.data_ptr(),
            num_heads,
            plan.num_kv_heads,
            head_dim,
            scale,
            plan.tails(layer),
            plan.row_counts,
            plan.num_requests,
            window or 0,
            out.data_ptr(),
            lse.data_ptr(),
            0,
            torch.get_num_threads(),
        )
    )
    return out.to(q.dtype), lse


def merge_attention_states(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.merge_attention_states`."""
    if len(states) == 1:
        return states[0]
    first = states[0][0]
    head_dim = first.shape[-1]
    outs = [_floats(out) for out, _ in states]
    lses = [_floats(lse) for _, lse in states]
    merged, total = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    addresses = c_void_p * len(states)
    _check(
        _library().polykv_cpu_merge(
            addresses(*(out.data_ptr() for out in outs)),
            addresses(*(lse.data_ptr() for lse in lses)),
            len(states),
            total.numel(),
            head_dim,
            merged.data_ptr(),
            total.data_ptr(),
            torch.get_num_threads(),
        )
    )
    return merged.to(first.dtype), total


# -------------------------------------------------------------------------------------------------- encoding


def encode_keys_int8(keys: Tensor, *, per_tensor: bool) -> Int8Keys:
    """See :func:`polykv_kernels.ops.encode_keys_int8`."""
    heads, tokens, head_dim = keys.shape
    keys = _readable(keys)
    n_tiles = -(-tokens // TILE_SIZE)
    codes = torch.empty((heads, n_tiles, head_dim, TILE_SIZE), dtype=torch.int8)
    if per_tensor:
        scales = torch.empty(1, dtype=torch.float32)
    else:
        scales = torch.empty((heads, n_tiles, head_dim), dtype=torch.float16)
    status = _library().polykv_cpu_encode_keys(
        keys.data_ptr(),
        _DTYPES[keys.dtype],
        keys.stride(0),
        keys.stride(1),
        heads,
        tokens,
        head_dim,
        codes.data_ptr(),
        None if per_tensor else scales.data_ptr(),
        scales.data_ptr() if per_tensor else None,
        torch.get_num_threads(),
    )
    if status == _OVERFLOW:
        raise reference.key_too_large(keys)
    _check(status)
    return Int8Keys(codes, scales, tokens)


def encode_values_lloyd3(values: Tensor, *, sign_seed: int | None, least_squares: bool) -> LloydMax3Values:
    """See :func:`polykv_kernels.ops.encode_values_lloyd3`."""
    heads, tokens, head_dim = values.shape
    values = _readable(values)
    codes = torch.empty((heads, tokens, 3 * head_dim // 8), dtype=torch.uint8)
    scales = torch.empty((heads, tokens), dtype=torch.float16)
    signs = _signs(sign_seed, head_dim)
    status = _library().polykv_cpu_encode_values(
        values.data_ptr(),
        _DTYPES[values.dtype],
        values.stride(0),
        values.stride(1),
        heads,
        tokens,
        head_dim,
        _address(signs),
        reference.hadamard_block(head_dim),
        _levels().data_ptr(),
        int(least_squares),
        codes.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    if status == _OVERFLOW:
        raise reference.value_too_long(values)
    _check(status)
    return LloydMax3Values(codes, scales, sign_seed)


# --------------------------------------------------------------------------------------------- linear layers


def linear(x: Tensor, weight: Tensor | Int8Weights, bias: Tensor | None) -> Tensor:
    """See :func:`polykv_kernels.ops.linear`. Called for every layer of every step: hence its economy."""
    if isinstance(weight, Int8Weights):
        stored, scales, dtype = weight.codes, weight.scales, _INT8
        scale_address, scale_stride = scales.data_ptr(), scales.stride(0)
    else:
        stored = weight
        if stored.stride(1) != 1 or stored.is_neg():  # no model's layer is so
            stored = stored.resolve_neg().contiguous()
        dtype, scale_address, scale_stride = _DTYPES[stored.dtype], None, 0
    outputs, inputs = stored.shape
    rows = x if x.dtype is torch.float32 and not x.is_neg() else x.float().resolve_neg()
    if rows.is_contiguous():
        stride = inputs
    else:
        rows = rows.reshape(-1, inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        stride = rows.stride(0)
    if bias is not None and (bias.dtype is not torch.float32 or bias.stride(0) != 1 or bias.is_neg()):
        bias = _floats(bias)
    out = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32)
    status = _library().polykv_cpu_linear(
        rows.data_ptr(),
        rows.numel() // inputs,
        stride,
        stored.data_ptr(),
        dtype,
        stored.stride(0),
        scale_address,
        scale_stride,
        None if bias is None else bias.data_ptr(),
        outputs,
        inputs,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if status:
        _check(status)
    return out if x.dtype is torch.float32 else out.to(x.dtype)
