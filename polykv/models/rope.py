"""Stored keys at another place: the queries are turned back instead of the keys forward.

A segment holds keys after RoPE, at the positions it was prefilled at. Placed ``delta`` tokens later, its keys should be
turned by ``delta``. An attention logit depends on the difference of two rotations only,
``R(p) q · R(s + delta) k = R(p - delta) q · R(s) k``, so turning a row's queries by ``-delta`` gives the same logits, and
the stored bytes serve any number of places at once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from polykv.errors import UnsupportedModelError
from polykv.models.support import SUPPORTED_MODEL_TYPES, SUPPORTED_ROPE_TYPES, head_dim


def _rotary_module(model: PreTrainedModel) -> Any:
    """The module that computes a model's cosines and sines, with a language-model head around it or without one.

    Raises:
        UnsupportedModelError: there is none.
    """
    for owner in (model.get_decoder(), model.base_model, model):
        rotary = getattr(owner, "rotary_emb", None)
        if isinstance(rotary, nn.Module):
            return rotary
    raise UnsupportedModelError(
        f"{type(model).__name__} has no rotary position embedding (rotary_emb); its keys cannot be placed elsewhere"
    )


def _frequency_names(rotary: Any) -> list[str]:
    """Name of the buffer with the inverse frequencies of each layer: one for all, or (Gemma 3) one a layer type."""
    if isinstance(rotary.rope_type, dict):
        return [f"{kind}_inv_freq" for kind in rotary.config.layer_types]
    return ["inv_freq"] * rotary.config.num_hidden_layers


def check_shiftable(model: PreTrainedModel) -> None:
    """Refuses a model whose stored keys cannot be placed at positions other than those they were computed at.

    Raises:
        UnsupportedModelError: names the model type or RoPE type, or what is missing.
    """
    if model.config.model_type not in SUPPORTED_MODEL_TYPES:
        # others pair neighbouring dims (Cohere, GLM), and nothing in the model says so
        raise UnsupportedModelError(
            f"keys of model type {model.config.model_type!r} cannot be placed at other positions: which dims its RoPE "
            f"turns together is not known; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    rotary = _rotary_module(model)
    # what the model computes with, and not its config, which may have been edited since
    rope_type = getattr(rotary, "rope_type", None)
    for kind in sorted(map(str, rope_type.values() if isinstance(rope_type, dict) else [rope_type])):
        if kind not in SUPPORTED_ROPE_TYPES:
            raise UnsupportedModelError(
                f"keys under RoPE type {kind!r} cannot be placed at other positions (its frequencies depend on the "
                f"longest request of a batch, or it is unknown); supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
    for name in sorted(set(_frequency_names(rotary))):
        frequencies = getattr(rotary, name, None)
        if not isinstance(frequencies, Tensor) or 2 * frequencies.numel() > head_dim(model.config):
            raise UnsupportedModelError(
                f"{type(rotary).__name__} has no inverse frequencies {name!r}, or more than fit a head; its keys cannot "
                "be placed at other positions"
            )


class QueryRotation:
    """Rotations of one model's queries by offset differences. Get it by :func:`rotation_of`.

    It reads the model's own inverse frequencies at every call: ``model.to(...)`` moves them, and rounds them too.

    Args:
        model: a model, with a language-model head or without one.

    Raises:
        UnsupportedModelError: see :func:`check_shiftable`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_shiftable(model)
        # never the model itself, which this object would keep alive as a value of its own weak key
        self._rotary = _rotary_module(model)
        self._names = _frequency_names(self._rotary)

    def rotate(self, q: Tensor, offsets: Tensor, layer: int) -> Tensor:
        """Turns queries back by offsets, so that they read keys as if those stood that much later.

        Only the dims that the model's RoPE turns are changed (Phi-3 may leave some). The cosines and sines are without
        YaRN's attention scaling, which the queries and the stored keys have already.

        Args:
            q: ``[rows, Hq, D]`` after RoPE at the rows' own positions, float16, bfloat16, float32 or float64.
            offsets: ``[rows]`` int64, each row's placed start minus stored start; negative and zero too. Up to a
                million the angles are exact to 1e-6.
            layer: the layer that the queries belong to.

        Returns:
            A new tensor ``[rows, Hq, D]`` in q's dtype and on its device: q rotated by ``-offsets``.

        Raises:
            IndexError: the model has no such layer.
        """
        inv_freq = getattr(self._rotary, self._names[layer])
        # the model multiplies in float32, whose angles are off by 0.004 at 100,000; here the product is exact
        angles = offsets.to(q.device)[:, None] * inv_freq.to(q.device, torch.float64)  # [rows, rotary / 2]
        computed = torch.promote_types(q.dtype, torch.float32)
        cos, sin = (part.to(computed)[:, None] for part in (angles.cos(), angles.sin()))
        half = inv_freq.numel()
        # all supported families turn dim i with dim i + half ("rotate_half"), not with its neighbour
        first, second = q[..., :half].to(computed), q[..., half : 2 * half].to(computed)
        turned = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(q.dtype)
        return torch.cat((turned, q[..., 2 * half :]), dim=-1) if 2 * half < q.shape[-1] else turned


_rotations: weakref.WeakKeyDictionary[PreTrainedModel, QueryRotation] = weakref.WeakKeyDictionary()


def rotation_of(model: PreTrainedModel) -> QueryRotation:
    """The rotation of a model's queries, made once a model object.

    Raises:
        UnsupportedModelError: see :func:`check_shiftable`.
    """
    known = _rotations.get(model)
    # no lock: two threads may each make one, and both get the first that was stored
    return known if known is not None else _rotations.setdefault(model, QueryRotation(model))
