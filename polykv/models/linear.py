"""Linear layers through our kernels: the exact ones where an engine asks for them, and int8 ones.

On a CPU most of a decode step is the linear layers, and torch's are slow at the few rows of such a step. :class:`FastLinear`
reads the very weights of the layer that it was, so the model keeps its memory, its parameters and their names. It computes
otherwise than torch only inside :func:`fast_linears`, which an engine holds around its forward: the same model used by hand is
bitwise what it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polykv.errors import InvalidRequestError
from polykv_kernels import BackendError, Int8Weights, cpu, ops
from polykv_kernels.layouts import WEIGHT_GROUP

__all__ = [
    "FastLinear",
    "Int8Linear",
    "NarrowLinear",
    "fast_linears",
    "narrow_linears",
    "quantize_linears",
    "use_fast_linears",
]

PORTABLE_ROWS = 6
"""Rows up to which the portable kernels (neither AVX2 nor NEON) are faster than torch; the others always are."""


class _State(threading.local):
    on = False
    always = False


_state = _State()


@contextmanager
def fast_linears(*, always: bool = False) -> Iterator[None]:
    """Lets :class:`FastLinear` layers compute with our kernels, in this thread.

    Args:
        always: at any number of rows, so that a row's result has the same bits in any company and on any number of threads.
            Otherwise the faster of torch and ours computes.
    """
    before = _state.on, _state.always
    _state.on, _state.always = True, always
    try:
        yield
    finally:
        _state.on, _state.always = before


def invariant_now() -> bool:
    """Whether this thread is inside ``fast_linears(always=True)``."""
    return _state.always


@cache
def _most_rows() -> float:
    """Rows beyond which torch is faster."""
    try:
        return PORTABLE_ROWS if cpu.describe()["isa"] == "portable" else float("inf")
    except (BackendError, RuntimeError, OSError):  # no compiled kernels: the operation is torch's anyway
        return 0


class FastLinear(nn.Linear):
    """``nn.Linear`` that can compute with our kernels; made from one by :func:`use_fast_linears`."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``; torch's own result outside of :func:`fast_linears`."""
        if _state.on:
            weight, bias = self.weight, self.bias
            if (
                x.dtype is torch.float32
                and weight.dtype is torch.float32
                and x.device.type == "cpu"
                and weight.device.type == "cpu"
                and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
                and (_state.always or x.numel() <= _most_rows() * self.in_features)
            ):
                return ops.linear(x, weight, bias)
        return F.linear(x, self.weight, self.bias)


def use_fast_linears(model: nn.Module) -> int:
    """Turns every exact ``nn.Linear`` of a model that lies on the CPU into a :class:`FastLinear`, in place.

    Only the classes change: parameters, their names, hooks and memory stay. Subclasses are left alone, whatever they do.

    Args:
        model: the model; may have been converted before.

    Returns:
        How many layers were turned.
    """
    turned = 0
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            module.__class__ = FastLinear
            turned += 1
    return turned


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, a scale for every 64 inputs of an output, and exact activations.

    Args:
        packed: the weights.
        bias: ``[out]``, or None.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, packed: Int8Weights, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.codes.shape
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._packed: Int8Weights | None = packed

    @property
    def packed(self) -> Int8Weights:
        """The weights as :func:`polykv_kernels.ops.linear` takes them."""
        packed = self._packed
        if packed is None or packed.codes is not self.codes or packed.scales is not self.scales:
            packed = self._packed = Int8Weights(self.codes, self.scales)
        return packed

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]`` in x's dtype."""
        return ops.linear(x, self.packed, self.bias)

    def extra_repr(self) -> str:
        """What ``repr`` shows between the parentheses."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"group={WEIGHT_GROUP}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != torch.float32:  # model.half() and the like mean activations
            self.scales = scales.to(self.scales.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}


class NarrowLinear(nn.Module):
    """A linear layer whose weights are kept in bfloat16, widened in registers, and whose activations are as they come.

    Args:
        weight: ``[out, in]`` bfloat16.
        bias: ``[out]``, or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]`` in x's dtype."""
        return ops.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What ``repr`` shows between the parentheses."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NarrowLinear:
        weight = self.weight
        super()._apply(fn, recurse)
        if self.weight.dtype != torch.bfloat16:  # model.float() and the like mean activations
            self.weight = weight.to(self.weight.device)
        return self


def narrow_linears(model: nn.Module) -> int:
    """Replaces every ``nn.Linear`` of a model by a :class:`NarrowLinear`, in place, if that changes no weight.

    Most checkpoints are bfloat16 and are widened to float32 for a CPU: kept narrow they take half the bytes, and half the
    memory traffic of a step, and give the same results. An embedding that shares its weights with the head keeps them.

    Args:
        model: the model.

    Returns:
        How many layers were replaced.

    Raises:
        InvalidRequestError: a weight is no bfloat16 number; nothing was replaced.
    """
    places = _places(model)
    narrow: dict[nn.Linear, NarrowLinear] = {}
    for path, _, _, child in places:
        if child not in narrow:
            weight = child.weight.detach()
            small = weight.to(torch.bfloat16)
            if not torch.equal(small.to(weight.dtype), weight):
                raise InvalidRequestError(
                    f"the weights of layer {path} are no bfloat16 numbers, so they cannot be kept in bfloat16 without loss; "
                    "leave weights out, or use weights='int8'"
                )
            narrow[child] = NarrowLinear(small, child.bias)
            narrow[child].train(child.training)
    for _, parent, name, child in places:
        setattr(parent, name, narrow[child])
    return len(narrow)


def _places(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Linear]]:
    """Where a model's linear layers are: path, parent, name in it, layer. One layer may have several places."""
    return [
        (f"{path}.{name}" if path else name, parent, name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, FastLinear) and isinstance(child, nn.Linear)
    ]


def quantize_linears(model: nn.Module, *, head: bool = True) -> int:
    """Replaces every ``nn.Linear`` of a model by an :class:`Int8Linear`, in place; the old weights are freed.

    An embedding that shares its weights with the language model's head keeps them as they are: the head gets codes of its
    own.

    Args:
        model: the model.
        head: also the language model's head (``get_output_embeddings()``).

    Returns:
        How many layers were replaced.
    """
    get_head: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    kept = get_head() if get_head is not None and not head else None
    replaced: dict[nn.Linear, Int8Linear] = {}
    for _, parent, name, child in _places(model):
        if child is kept:
            continue
        if child not in replaced:
            replaced[child] = Int8Linear(ops.quantize_weights_int8(child.weight.detach()), child.bias)
            replaced[child].train(child.training)
        setattr(parent, name, replaced[child])
    return len(replaced)
