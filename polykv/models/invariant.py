"""Batch invariance: the same bits for a request's tokens in any company, on any number of threads.

Three things in a forward depend on its shape. Attention over the pool and the tails does not, in our CPU kernels. Linear layers
do in torch, ours do not (:func:`polykv.models.linear.fast_linears`). Activations do in torch: what does not fill a vector, or
lies at the border between two threads, goes through other code. The rest of the supported models (norms, rotary embedding,
sums and products) is computed row by row and rounds alike in vectors and in single numbers. (He et al., "Defeating
nondeterminism in LLM inference", 2025, name the same causes on GPUs.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from polykv.models.linear import FastLinear, Int8Linear, NarrowLinear, invariant_now
from polykv.models.support import embedding_weight, head_dim
from polykv_kernels import ops

SERIAL_ELEMENTS = 32768
"""torch computes fewer than these in one thread (``at::internal::GRAIN_SIZE``)."""
VECTOR_ELEMENTS = 64
"""A multiple of what torch's vector loops take at a time, on every instruction set."""

_ACTIVATIONS: tuple[Any, ...] = tuple({entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()})


class InvariantActivation(nn.Module):
    """An activation whose results do not depend on how many rows there are, where an engine asks for that.

    Args:
        activation: the model's own, elementwise.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """``[..., n]`` to ``[..., n]``."""
        if not invariant_now():
            own: Tensor = self.activation(x)
            return own
        rows = x.reshape(-1, x.shape[-1])
        # whole vectors in one thread; a width that leaves a rest goes row by row, so that the rest is always the same
        block = SERIAL_ELEMENTS // x.shape[-1] if x.shape[-1] % VECTOR_ELEMENTS == 0 else 1
        parts = [self.activation(part.contiguous()) for part in rows.split(max(block, 1))]
        return torch.cat(parts).view(x.shape)


def use_invariant_activations(model: nn.Module) -> None:
    """Wraps every activation module of a model, in place. Idempotent; without effect outside of deterministic engines."""
    for module in list(model.modules()):
        if isinstance(module, InvariantActivation):
            continue
        for name, child in list(module.named_children()):
            # one with parameters keeps its place: their names must not change
            if isinstance(child, _ACTIVATIONS) and not any(True for _ in child.parameters()):
                setattr(module, name, InvariantActivation(child))


def why_not_invariant(model: PreTrainedModel) -> str | None:
    """What makes a model's results depend on the batch in spite of all this, or None."""
    weight = embedding_weight(model)
    backend = ops.choose_backend(weight.device, weight.dtype, head_dim(model.config))
    if backend.name != "cpu":
        return f"attention runs on the {backend.name} backend"
    if weight.dtype != torch.float32:
        return f"the weights are {weight.dtype}"
    for name, module in model.named_modules():
        kind = type(module)
        if not kind.__module__.startswith(("torch.nn.", "transformers.", "polykv.")):
            return f"layer {name} is a {kind.__name__}, which is unknown"
        owns = any(True for _ in module.parameters(recurse=False)) or hasattr(module, "in_features")
        known = kind in (FastLinear, Int8Linear, NarrowLinear, nn.Embedding)
        # a subclass of Embedding scales, Gemma's; norms are computed row by row
        if owns and not (known or isinstance(module, nn.Embedding) or kind.__name__.endswith("RMSNorm")):
            return f"layer {name} is a {kind.__name__}"
        width = getattr(module, "intermediate_size", 0)
        if isinstance(width, int) and width >= SERIAL_ELEMENTS:
            return f"layer {name} is {width} wide"
    return None
