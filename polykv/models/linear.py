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

from polykv_kernels import BackendError, Int8Weights, cpu, ops
from polykv_kernels.layouts import WEIGHT_GROUP

__all__ = ["FastLinear", "Int8Linear", "fast_linears", "quantize_linears", "use_fast_linears"]

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
    replaced: dict[nn.Module, Int8Linear] = {}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) not in (nn.Linear, FastLinear) or child is kept:
                continue
            assert isinstance(child, nn.Linear)
            if child not in replaced:  # one layer may have several places
                replaced[child] = Int8Linear(ops.quantize_weights_int8(child.weight.detach()), child.bias)
                replaced[child].train(child.training)
            setattr(module, name, replaced[child])
    return len(replaced)
