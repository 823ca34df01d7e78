"""The stored forms of one layer's keys and values, and of a linear layer's weights.

Notation used throughout: ``Hkv`` KV heads, ``T`` tokens, ``D`` head dim, ``n_tiles = ceil(T / 64)``.
A layout is a frozen dataclass of tensors and says nothing about how they were computed. It checks its tensors when it is
made, so that a kernel, which sees addresses only, never meets a wrong one: the axes after the heads are contiguous, the
heads may be any distance apart (a view of some tiles is a layout too).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

TILE_SIZE = 64
"""Tokens in one tile: the unit of the channel scales, and later of the kernels' inner loop."""

WEIGHT_GROUP = 64
"""Inputs of a linear layer that share a scale of :class:`Int8Weights`."""

LLOYD_MAX_3BIT: tuple[float, ...] = (-2.152, -1.344, -0.756, -0.245, 0.245, 0.756, 1.344, 2.152)
"""The eight levels that quantise N(0, 1) with the least squared error (Lloyd 1982, Max 1960), to the three decimals
at which arXiv 2604.24971 publishes them; distortion 0.0346."""


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Bytes really allocated for the tensors: each distinct storage once, whole, views or not."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def _check_tensor(x: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuses a tensor that does not have this dtype, this shape and contiguous axes after the first."""
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    _check_contiguous(x, name)


def _check_contiguous(x: Tensor, name: str) -> None:
    inner = x[0] if x.ndim > 1 and x.shape[0] else x
    if not inner.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous after its first axis, got shape {list(x.shape)} with strides {list(x.stride())}; "
            "call contiguous() on it"
        )


@dataclass(frozen=True, slots=True)
class DenseKV:
    """Keys and values as the model made them.

    Attributes:
        keys: ``[Hkv, T, D]``, the model's dtype, after RoPE.
        values: ``[Hkv, T, D]``, the model's dtype.
    """

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        if self.keys.ndim != 3:
            raise ValueError(f"dense keys must be [Hkv, T, D], got {list(self.keys.shape)}")
        if not self.keys.is_floating_point():
            raise TypeError(f"dense keys must be floating point, got {self.keys.dtype}")
        _check_contiguous(self.keys, "dense keys")
        _check_tensor(self.values, "dense values", self.keys.dtype, tuple(self.keys.shape))

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class Int8Keys:
    """Symmetric int8 keys, channel-major inside tiles of 64 tokens, so that vector lanes are tokens.

    Attributes:
        codes: ``[Hkv, n_tiles, D, 64]`` int8 in [-127, 127]; the last tile is padded with zeros.
        scales: float16 ``[Hkv, n_tiles, D]`` (one step per channel and tile), or float32 ``[1]`` (one for the
            whole tensor).
        num_tokens: tokens held, without the padding.
    """

    codes: Tensor
    scales: Tensor
    num_tokens: int

    def __post_init__(self) -> None:
        if self.codes.ndim != 4:
            raise ValueError(f"key codes must be [Hkv, n_tiles, D, {TILE_SIZE}], got {list(self.codes.shape)}")
        heads, _, head_dim, _ = self.codes.shape
        n_tiles = -(-self.num_tokens // TILE_SIZE)
        _check_tensor(self.codes, "key codes", torch.int8, (heads, n_tiles, head_dim, TILE_SIZE))
        if self.scales.ndim == 1:
            _check_tensor(self.scales, "the key scale of the tensor", torch.float32, (1,))
        else:
            _check_tensor(self.scales, "key scales", torch.float16, (heads, n_tiles, head_dim))

    @property
    def per_tensor(self) -> bool:
        """Whether a single scale serves every head, token and channel."""
        return self.scales.numel() == 1 and self.scales.ndim == 1


@dataclass(frozen=True, slots=True)
class LloydMax3Values:
    """Rotated values on the eight Lloyd-Max levels, bit-packed: eight codes in three bytes, little endian.

    ``value = signs * Hadamard(levels[codes]) * scale`` with an orthonormal (block-wise) Hadamard transform, so
    ``scale`` is the vector's norm divided by ``sqrt(D)``, possibly corrected.

    Attributes:
        codes: ``[Hkv, T, 3 * D / 8]`` uint8. Code ``i`` of a group of eight lies in bits ``3i .. 3i + 2``.
        scales: ``[Hkv, T]`` float16.
        sign_seed: seed of the random signs applied before the transform, or None for no signs. The signs depend
            on nothing but the seed and D, and are not stored.
    """

    codes: Tensor
    scales: Tensor
    sign_seed: int | None

    def __post_init__(self) -> None:
        if self.codes.ndim != 3 or self.codes.shape[2] % 3:
            raise ValueError(f"value codes must be [Hkv, T, 3 * D / 8], got {list(self.codes.shape)}")
        _check_tensor(self.codes, "value codes", torch.uint8, tuple(self.codes.shape))
        _check_tensor(self.scales, "value scales", torch.float16, tuple(self.codes.shape[:2]))

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self.codes.shape[1]


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """Symmetric int8 weights of a linear layer: ``weight = scale * code``, a scale for every 64 inputs of an output.

    Attributes:
        codes: ``[out, in]`` int8 in [-127, 127], row-major; rows may be any distance apart.
        scales: ``[out, ceil(in / 64)]`` float32.
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if self.codes.ndim != 2:
            raise ValueError(f"weight codes must be [out, in], got {list(self.codes.shape)}")
        outputs, inputs = self.codes.shape
        _check_tensor(self.codes, "weight codes", torch.int8, (outputs, inputs))
        _check_tensor(self.scales, "weight scales", torch.float32, (outputs, -(-inputs // WEIGHT_GROUP)))
        if self.codes.device != self.scales.device:
            raise ValueError(f"weight codes are on {self.codes.device}, their scales on {self.scales.device}")

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return tensor_bytes(self.codes, self.scales)


@dataclass(frozen=True, slots=True)
class EncodedKV:
    """One layer of a segment: some first tokens exact, the rest packed.

    Attributes:
        start: absolute position of the first token held.
        num_tokens: tokens held, exact and packed.
        num_kv_heads: ``Hkv``.
        head_dim: ``D``.
        dtype: dtype that ``decode`` gives back, the model's.
        exact: the first ``exact.num_tokens`` tokens, or None.
        keys: packed keys of the remaining tokens, or None when all are exact.
        values: packed values of the same tokens, or None.
        plan: a backend's own form of all this, made by it at first use.
    """

    start: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    exact: DenseKV | None
    keys: Int8Keys | None
    values: LloydMax3Values | None
    plan: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        held = self.num_exact + (self.keys.num_tokens if self.keys is not None else 0)
        if held != self.num_tokens:
            raise ValueError(f"num_tokens is {self.num_tokens}, but the tensors hold {held} tokens")
        if (self.keys is None) != (self.values is None):
            raise ValueError("keys and values must be packed together or not at all")
        if self.keys is not None and self.values is not None and self.keys.num_tokens != self.values.num_tokens:
            raise ValueError(f"{self.keys.num_tokens} keys are packed, but {self.values.num_tokens} values")
        expected = (self.num_kv_heads, self.head_dim)
        for name, heads, head_dim in self._parts():
            if (heads, head_dim) != expected:
                raise ValueError(
                    f"{name} have {heads} KV heads of {head_dim}, the segment has {expected[0]} of {expected[1]}"
                )
        devices = {tensor.device for tensor in self.tensors().values()}
        if len(devices) > 1:
            raise ValueError(f"the tensors of a segment must be on one device, got {sorted(map(str, devices))}")

    def __reduce__(self) -> tuple[Any, ...]:
        # without the plan: it holds addresses
        values = tuple(getattr(self, x.name) for x in fields(self) if x.init)
        return EncodedKV, values

    def _parts(self) -> list[tuple[str, int, int]]:
        parts: list[tuple[str, int, int]] = []
        if self.exact is not None:
            parts.append(("exact tokens", self.exact.keys.shape[0], self.exact.keys.shape[2]))
        if self.keys is not None:
            parts.append(("packed keys", self.keys.codes.shape[0], self.keys.codes.shape[2]))
        if self.values is not None:
            parts.append(("packed values", self.values.codes.shape[0], self.values.codes.shape[2] * 8 // 3))
        return parts

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self.tensors().values())).device

    @property
    def num_exact(self) -> int:
        """Tokens kept exact at the front."""
        return self.exact.num_tokens if self.exact is not None else 0

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by the name it has in a file."""
        out: dict[str, Tensor] = {}
        if self.exact is not None:
            out |= {"exact.keys": self.exact.keys, "exact.values": self.exact.values}
        if self.keys is not None:
            out |= {"keys.codes": self.keys.codes, "keys.scales": self.keys.scales}
        if self.values is not None:
            out |= {"values.codes": self.values.codes, "values.scales": self.values.scales}
        return out

    @property
    def nbytes(self) -> int:
        """Bytes allocated: codes, scales, padding and exact tokens."""
        return tensor_bytes(*self.tensors().values())

    def part(self, first: int, stop: int) -> EncodedKV:
        """Tokens ``[first, stop)`` as a layout of their own: views, no copies.

        Packed tokens can only be parted between tiles: what is left out at the front must be exact tokens, and the end must be
        among the exact tokens, at the end of a tile, or the end.

        Raises:
            ValueError: out of range, or not between tiles.
        """
        if not 0 <= first < stop <= self.num_tokens:
            raise ValueError(f"[{first}, {stop}) is no part of {self.num_tokens} tokens")
        exact, keys, values = self.exact, self.keys, self.values
        whole_tiles, rest = divmod(stop - self.num_exact, TILE_SIZE)
        if first > self.num_exact:
            raise ValueError(
                f"packed tokens cannot be read from token {first} on; the first {self.num_exact} are exact"
            )
        if stop > self.num_exact and rest and stop != self.num_tokens:
            raise ValueError(
                f"packed tokens can be read up to the end of a tile of {TILE_SIZE}, not up to token {stop}"
            )
        if exact is not None:
            last = min(stop, self.num_exact)
            exact = DenseKV(exact.keys[:, first:last], exact.values[:, first:last]) if first < last else None
        if stop <= self.num_exact:
            keys = values = None
        elif keys is not None and values is not None and stop < self.num_tokens:
            packed = stop - self.num_exact
            scales = keys.scales if keys.per_tensor else keys.scales[:, :whole_tiles]
            keys = Int8Keys(keys.codes[:, :whole_tiles], scales, packed)
            values = LloydMax3Values(values.codes[:, :packed], values.scales[:, :packed], values.sign_seed)
        return EncodedKV(
            self.start + first, stop - first, self.num_kv_heads, self.head_dim, self.dtype, exact, keys, values
        )

    @property
    def dense_fp16_nbytes(self) -> int:
        """Bytes of the same tokens as plain float16 keys and values, the yardstick of every ratio."""
        return 2 * 2 * self.num_kv_heads * self.num_tokens * self.head_dim
