"""A transformers cache that reads a pool: for plain ``model(...)`` and ``model.generate(...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from polykv.errors import IncompatiblePoolError
from polykv.models.attention import ATTENTION_NAME, VIEW_KEY
from polykv.models.identity import identity_of
from polykv.models.tail import TailLayer
from polykv_kernels import ops

if TYPE_CHECKING:
    from polykv.pool.lease import Lease
    from polykv.pool.segment import KVSegment


_HIDES_POOL = (
    "the attention mask hides tokens of the shared pool, which every reader sees whole; its part over the pool must be "
    "all ones. Use pool.inputs(question)"
)


class _PooledLayerView:
    """See :class:`polykv.models.attention.LayerView`; one batch of rows over one segment and their own tails."""

    def __init__(self, cache: PooledCache, layer_idx: int, positions: Tensor | None) -> None:
        self._cache = cache
        self._layer_idx = layer_idx
        self._positions = positions  # [B or 1, rows]

    def attend(self, query: Tensor, scale: float, mask: Tensor | None, window: int | None) -> Tensor:
        """See :meth:`LayerView.attend`."""
        cache = self._cache
        batch, num_heads, rows, head_dim = query.shape
        tail = cache.tails[self._layer_idx]
        if self._positions is not None:
            positions = self._positions.expand(batch, rows).reshape(-1)
        else:
            seen = tail.get_seq_length()
            positions = torch.arange(seen - rows, seen, device=query.device).repeat(batch)
        stacked = query.transpose(1, 2).reshape(batch * rows, num_heads, head_dim)
        parts = [
            ops.shared_attention(stacked, layers[self._layer_idx], scale, q_positions=positions, window=window)
            for layers in cache.pooled
        ]
        pool_out, pool_lse = ops.merge_attention_states(*parts)
        if mask is not None:
            if mask.dtype != torch.bool:
                mask = mask >= 0  # an additive mask: 0 takes part, a large negative number does not
            if mask.shape[-1] != tail.get_seq_length():
                raise IncompatiblePoolError(
                    f"the 4D attention mask covers {mask.shape[-1]} keys, but pool and tail hold {tail.get_seq_length()}"
                )
            # a window hides part of the pool by rights, and by position; nothing else may
            if window is None and not bool(mask[..., : tail.prefix_length].all()):
                raise IncompatiblePoolError(_HIDES_POOL)
            mask = mask[..., tail.prefix_length :]
        elif rows > 1:
            raise IncompatiblePoolError(
                f"{rows} rows reached a pool without an attention mask; was the mask function of {ATTENTION_NAME!r} replaced?"
            )
        tail_out, tail_lse = ops.masked_attention(query, *tail.held(), scale, mask)
        tail_state = (tail_out.transpose(1, 2), tail_lse.transpose(1, 2))
        pool_state = (pool_out.view(batch, rows, num_heads, head_dim), pool_lse.view(batch, rows, num_heads))
        return ops.merge_attention_states(pool_state, tail_state)[0]


class PooledCache(Cache):
    """View on a leased segment plus private tail layers; ``get_seq_length()`` counts both.

    It holds no dense copy of the segment. Make one for each call: it grows as the model generates. It works for
    batches (each row its own tail), with beams and with ``prefill_chunk_size``; assisted decoding is refused.

    Args:
        segment: the shared context.
        lease: makes the lease that this cache owns; it ends when the cache is released or collected.
    """

    def __init__(self, segment: KVSegment, lease: Callable[[PooledCache], Lease]) -> None:
        self.tails = [TailLayer(segment.end) for _ in segment.layers]
        super().__init__(layers=list(self.tails))
        self.segment = segment
        self.pooled = [span.layers for span in segment.chain]
        self._lease = lease(self)
        self._checked = False

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> tuple[Tensor, Tensor]:
        """Stores the new tokens in the private tail and hands the attention function a view of pool and tail.

        Raises:
            IncompatiblePoolError: the model is not attached, so its result would ignore the pool.
        """
        if layer_idx == 0:  # every forward is checked once, by a hook that only attached models have
            if not self._checked or kwargs is None:
                raise IncompatiblePoolError(
                    f"this model's attention implementation is not {ATTENTION_NAME!r}, so it would ignore the pool; "
                    "call polykv.attach(model) first, and use the model the pool was built with"
                )
            self._checked = False
        assert kwargs is not None
        keys, values = self.tails[layer_idx].update(key_states, value_states)
        kwargs[VIEW_KEY] = _PooledLayerView(self, layer_idx, kwargs.get("position_ids"))
        return keys, values

    def release(self) -> None:
        """Drops the private tails and gives the lease back. Idempotent."""
        for tail in self.tails:
            tail.reset()
        self._lease.release()

    @property
    def tail_nbytes(self) -> int:
        """Bytes allocated for the private tails."""
        return sum(tail.nbytes for tail in self.tails)

    def check_forward(self, model: PreTrainedModel, inputs: Tensor, mask: Tensor | None) -> None:
        """Refuses a model, inputs or a mask that do not belong to this cache; called before every forward.

        Raises:
            IncompatiblePoolError: see the message.
        """
        self._lease.check()
        reason = self.segment.model.mismatch(identity_of(model))
        if reason is not None:
            raise IncompatiblePoolError(
                f"the pool was built with {self.segment.model.name!r}, which differs from "
                f"{identity_of(model).name!r} in its {reason}; build a pool with this model"
            )
        if model.training and model.is_activation_checkpointing:
            raise IncompatiblePoolError(
                "activation checkpointing drops caches, the pool too; call model.eval() or "
                "model.activation_checkpointing_disable() first"
            )
        self._checked = True
        rows, new, seen = inputs.shape[0], inputs.shape[1], self.get_seq_length()
        held = self.tails[0].keys
        if held is not None and held.shape[0] != rows:
            raise IncompatiblePoolError(f"this cache holds {held.shape[0]} rows, got {rows}; make a new cache")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return
        if mask.shape != (rows, seen + new):
            raise IncompatiblePoolError(
                f"attention_mask is {tuple(mask.shape)} and covers {mask.shape[1]} tokens; it must cover {seen + new}, "
                f"{seen} in the cache and {new} new ones, in {rows} row(s). Use pool.inputs(question), or leave it out."
            )
        if not bool(mask[:, : self.segment.end].all()):
            raise IncompatiblePoolError(_HIDES_POOL)

    def check_generate(self, input_ids: Tensor | None, mask: Tensor | None) -> None:
        """Refuses ids that ``generate`` would slice wrongly; called at the start of ``generate``.

        Raises:
            IncompatiblePoolError: see the message.
        """
        self._lease.check()
        if input_ids is None:
            raise IncompatiblePoolError("generate with a pool needs input_ids; inputs_embeds are not supported")
        seen, given = self.get_seq_length(), input_ids.shape[1]
        if mask is not None and mask.shape[1] == seen + given and given > 0:
            return  # the question alone, with a mask over pool and question
        if seen > self.segment.end and given > 0:
            raise IncompatiblePoolError(
                f"the cache holds {seen - self.segment.end} tokens of an earlier call after the document; make a new "
                f"cache, or give the new tokens alone with a mask over {seen} + {given} tokens"
            )
        document = self.segment.context_ids.to(device=input_ids.device, dtype=input_ids.dtype)
        starts_with_document = given > seen and bool((input_ids[:, : document.shape[0]] == document).all())
        if not starts_with_document or (mask is not None and mask.shape[1] != given):
            covered = "none" if mask is None else f"one over {mask.shape[1]}"
            raise IncompatiblePoolError(
                f"input_ids have {given} tokens and the attention mask is {covered}, but the cache holds {seen}. Give the "
                f"question alone with a mask over {seen} + {given} tokens, as pool.inputs(question) does, or the "
                "document's own ids followed by the question."
            )
