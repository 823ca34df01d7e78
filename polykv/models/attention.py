"""The hook into transformers: an attention implementation called ``polykv``.

With no pool attached it is ``sdpa``, mask and all. With one, ``Cache.update`` has put a :class:`LayerView` among the
keyword arguments, and the view computes the attention: over the compressed segment, over the private tail, merged by
log-sum-exp. No model code is patched. (The keyword route exists since transformers 5.24.)
"""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from polykv.errors import IncompatiblePoolError, UnsupportedModelError
from polykv.models.linear import use_fast_linears
from polykv.models.support import check_supported, embedding_weight, head_dim
from polykv_kernels import ops

ATTENTION_NAME = "polykv"
VIEW_KEY = "polykv_view"


class LayerView(Protocol):
    """One layer of a cache that reads a pool, for the length of one attention call."""

    def attend(self, query: Tensor, scale: float, mask: Tensor | None, window: int | None) -> Tensor:
        """Attention of all rows.

        Args:
            query: ``[B, Hq, rows, D]`` after RoPE.
            scale: factor on the logits.
            mask: boolean ``[B, 1, rows, pool + tail]``, or None for a single row that sees everything.
            window: the layer's sliding window in tokens, or None.

        Returns:
            ``[B, rows, Hq, D]`` in the query's dtype.
        """
        ...


def polykv_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function in transformers' signature; see the module's docstring."""
    view: LayerView | None = kwargs.pop(VIEW_KEY, None)
    if view is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedModelError("attention with a soft cap or a position bias cannot read a pool")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return view.attend(query, scale, attention_mask, kwargs.get("sliding_window")), None


AttentionInterface.register(ATTENTION_NAME, polykv_attention_forward)
# Without a mask function of the same name transformers builds no mask at all, and chunked prefill, left padding and
# sliding windows are silently wrong.
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)

_locks: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def model_lock(model: PreTrainedModel) -> threading.RLock:
    """The lock under which our own code runs a model's forward: one forward at a time uses all cores best."""
    with _guard:
        return _locks.setdefault(model, threading.RLock())


def _forget_parent() -> None:
    """A forked child has none of the parent's threads, but the locks that they held."""
    global _guard
    _guard = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


@contextmanager
def exclusively(model: PreTrainedModel) -> Iterator[None]:
    """Holds :func:`model_lock`, with all modules in evaluation mode: dropout must reach neither a pool nor an answer."""
    with model_lock(model):
        # each by itself: parts of a model may be in training, others frozen
        in_training = [module for module in model.modules() if module.training]
        for module in in_training:
            module.training = False
        try:
            yield
        finally:
            for module in in_training:
                module.training = True


def check_attached(model: PreTrainedModel) -> None:
    """Refuses a model whose attention would ignore a pool.

    Raises:
        IncompatiblePoolError: the attention implementation was changed after :func:`attach`.
    """
    current = model.config._attn_implementation
    if current != ATTENTION_NAME:
        raise IncompatiblePoolError(
            f"the model's attention implementation is {current!r}, which would ignore the pool; it must be "
            f"{ATTENTION_NAME!r} (without a pool that is sdpa). Call polykv.attach(model) again"
        )


class _ChecksInputs(Protocol):
    def check_forward(self, model: PreTrainedModel, inputs: Tensor, mask: Tensor | None) -> None: ...

    def check_generate(self, input_ids: Tensor | None, mask: Tensor | None) -> None: ...


def _pooled_cache(kwargs: dict[str, Any]) -> _ChecksInputs | None:
    caches = [kwargs[name] for name in ("cache", "past_key_values") if name in kwargs]
    pooled = [cache for cache in caches if hasattr(cache, "check_generate")]
    if pooled and len(caches) > 1:
        raise IncompatiblePoolError(
            "both cache= and past_key_values= were given; give the pool's cache as cache= alone"
        )
    return pooled[0] if pooled else None


def _check_forward(owner: PreTrainedModel, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: a wrong mask length is silently padded by transformers, so it must be caught here."""
    cache = _pooled_cache(kwargs)
    if cache is None:
        return
    inputs = args[0] if args else kwargs.get("input_ids")
    if inputs is None:
        inputs = kwargs.get("inputs_embeds")
    if isinstance(inputs, Tensor):
        check_attached(owner)
        cache.check_forward(owner, inputs, kwargs.get("attention_mask"))


_REFUSED_IN_GENERATE = {
    "assistant_model": "assisted decoding in transformers gives wrong tokens on any cache that is filled beforehand",
    "prompt_lookup_num_tokens": "assisted decoding in transformers gives wrong tokens on any cache that is filled beforehand",
    "assistant_early_exit": "assisted decoding in transformers gives wrong tokens on any cache that is filled beforehand",
    "custom_generate": "a custom loop may not know of caches that are filled beforehand",
    "position_ids": "they follow from the attention mask",
}


class _CheckedGenerate:
    """``model.generate`` of one model object, with its arguments checked against the pool first.

    ``generate`` decides by lengths alone whether it was given the document again or only the question; a wrong guess is
    silent. An object and not a closure, so that a copied or pickled model generates with its own weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self._model).generate.__get__(self._model))  # type: ignore[attr-defined]

    def __call__(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        cache = _pooled_cache(kwargs)
        if cache is not None:
            self._check_options(kwargs)
            ids = inputs if inputs is not None else kwargs.get("input_ids")
            cache.check_generate(ids, kwargs.get("attention_mask"))
        generate: Any = type(self._model).generate  # type: ignore[attr-defined]
        return generate(self._model, inputs, *args, **kwargs)

    def _check_options(self, kwargs: dict[str, Any]) -> None:
        config = kwargs.get("generation_config") or self._model.generation_config
        for name, reason in _REFUSED_IN_GENERATE.items():
            if kwargs.get(name) is not None or getattr(config, name, None) is not None:
                raise IncompatiblePoolError(f"{name} cannot be used with a pool: {reason}; leave it out")
        if kwargs.get("use_cache", getattr(config, "use_cache", None)) is False:
            raise IncompatiblePoolError("use_cache=False cannot be used with a pool, which is a cache; leave it out")


def attach(model: PreTrainedModel) -> None:
    """Makes a model able to read pools. Idempotent; ordinary use of the model stays as it was with sdpa.

    Raises:
        UnsupportedModelError: the model's family, layer types or RoPE cannot be served.
        BackendError: ``POLYKV_KERNELS`` names a backend that cannot run this model.
    """
    check_supported(model)
    # the kernels are compiled or loaded now, and not in the middle of the first answer; a missing compiler warns here
    ops.choose_backend(embedding_weight(model).device, model.dtype, head_dim(model.config))
    with _guard:
        if model.config._attn_implementation != ATTENTION_NAME:
            model.set_attn_implementation(ATTENTION_NAME)
        if isinstance(model.__dict__.get("generate"), _CheckedGenerate):
            return
        # on the inner model, which every forward goes through; partial() and not a closure, for copies' sake
        use_fast_linears(model)
        model.base_model.register_forward_pre_hook(partial(_check_forward, model), with_kwargs=True)
        model.__dict__["generate"] = _CheckedGenerate(model)


def no_mask(device: torch.device) -> Tensor:
    """A 4D mask that transformers passes through untouched and a :class:`LayerView` of the engine ignores."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
