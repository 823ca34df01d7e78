"""Triton backend: GPU kernels for attention over packed keys and values, for the merge and for encoding.

Importing this package does not import triton, which is an optional dependency: ask :func:`unavailable_reason` and
:func:`supports` first. The operations take the arguments of those in :mod:`polykv_kernels.reference` and rely on the
checks of :mod:`polykv_kernels.ops`. Private tails are attended to in torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from polykv_kernels.layouts import EncodedKV, Int8Keys, LloydMax3Values
from polykv_kernels.reference import ragged_attention

__all__ = [
    "HEAD_DIMS",
    "describe",
    "encode_keys_int8",
    "encode_values_lloyd3",
    "merge_attention_states",
    "ragged_attention",
    "shared_attention",
    "supports",
    "unavailable_reason",
]

HEAD_DIMS = (64, 128, 256)
"""Head dims with kernels; the others have the reference."""

QUERY_DTYPES = (torch.float16, torch.bfloat16)
ENCODED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unavailable_reason(device: torch.device) -> str | None:
    """Why these kernels cannot run on a device; None if they can.

    Args:
        device: where the tensors are. ``cuda`` is NVIDIA and AMD alike, as in torch.
    """
    if not _installed():
        return "triton is not installed"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "Triton compiles for GPUs only (TRITON_INTERPRET=1 interprets the kernels on a CPU, for tests)"
    if device.type != "cuda":
        return f"there are no Triton kernels for {device.type} devices"
    return _gpu_reason(device)


@lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=16)
def _gpu_reason(device: torch.device) -> str | None:
    """Asked at every operation of every layer, hence remembered."""
    if not torch.cuda.is_available():
        return "there is no GPU (torch.cuda.is_available() is false)"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton needs an NVIDIA GPU of compute capability 8.0 or newer"
    return None


def supports(dtype: torch.dtype, head_dim: int, *, encode: bool = False) -> str | None:
    """Why the kernels do not take a dtype or head dim; None if they do.

    Args:
        dtype: dtype of the queries, or of the keys and values to be encoded.
        head_dim: ``D``.
        encode: whether it is for encoding; else for attention.
    """
    if encode and dtype not in ENCODED_DTYPES:
        return f"the Triton encoders take float16, bfloat16 or float32, not {dtype}"
    if not encode and dtype not in QUERY_DTYPES:
        return f"the Triton kernels multiply in float16 and take float16 or bfloat16 queries, not {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"there are Triton kernels for head_dim {', '.join(map(str, HEAD_DIMS))}, not for {head_dim}"
    return None


def describe() -> dict[str, Any]:
    """What is in use: triton's version, the tile table and, where there is a GPU, its name and row of the table."""
    from polykv_kernels.triton import tiles

    try:
        installed = version("triton")
    except PackageNotFoundError:
        installed = None
    found: dict[str, Any] = {"version": installed, "tiles": str(tiles.tiles_file())}
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        architecture, processors = tiles.device_properties(device)
        found |= {
            "device": torch.cuda.get_device_name(device),
            "architecture": architecture,
            "multiprocessors": processors,
        }
    return found


def shared_attention(
    q: Tensor, encoded: EncodedKV, scale: float, *, q_positions: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.shared_attention`."""
    from polykv_kernels.triton import attention

    return attention.shared_attention(q, encoded, scale, q_positions=q_positions, window=window)


def merge_attention_states(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See :func:`polykv_kernels.ops.merge_attention_states`; no float64."""
    from polykv_kernels.triton import merge

    return merge.merge_attention_states(states)


def encode_keys_int8(keys: Tensor, *, per_tensor: bool) -> Int8Keys:
    """See :func:`polykv_kernels.ops.encode_keys_int8`."""
    from polykv_kernels.triton import encode

    return encode.encode_keys_int8(keys, per_tensor=per_tensor)


def encode_values_lloyd3(values: Tensor, *, sign_seed: int | None, least_squares: bool) -> LloydMax3Values:
    """See :func:`polykv_kernels.ops.encode_values_lloyd3`."""
    from polykv_kernels.triton import encode

    return encode.encode_values_lloyd3(values, sign_seed=sign_seed, least_squares=least_squares)
