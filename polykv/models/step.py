"""One forward of rows that belong to different requests: flattened, without padding, each segment read once for all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from polykv.models.attention import VIEW_KEY, check_attached, exclusively, no_mask
from polykv.models.linear import fast_linears
from polykv.models.support import embedding_weight
from polykv.models.tails import Tail
from polykv_kernels import RaggedBatch, ops

if TYPE_CHECKING:
    from polykv.pool.segment import KVSegment


@dataclass(frozen=True, eq=False)
class Piece:
    """A request's part in a forward: some tokens that follow what its segments and its tail hold.

    Attributes:
        token_ids: the tokens.
        position: absolute position of the first of them.
        tail: where their keys and values go; room for them must be reserved.
        segments: the shared context, the segments' chain from position 0 on; empty for none.
        wants_logits: whether the logits of the last token are needed.
    """

    token_ids: Sequence[int]
    position: int
    tail: Tail
    segments: tuple[KVSegment, ...] = ()
    wants_logits: bool = True


class _StepLayerView:
    """See :class:`polykv.models.attention.LayerView`; all requests of a step, each segment read once."""

    def __init__(self, cache: _StepCache, layer_idx: int) -> None:
        self._cache = cache
        self._layer_idx = layer_idx

    def attend(self, query: Tensor, scale: float, mask: Tensor | None, window: int | None) -> Tensor:
        """See :meth:`LayerView.attend`."""
        cache, layer = self._cache, self._layer_idx
        q = query[0].transpose(0, 1).contiguous()  # [total, Hq, D]
        state = ops.tail_attention(q, cache.tails, layer, scale, window=window)
        for segment, rows in cache.readers:
            # each segment is one pass for all of its readers; rows of other requests are left out
            if rows is None:
                partial = ops.shared_attention(
                    q, segment.layers[layer], scale, q_positions=cache.positions, window=window
                )
                state = ops.merge_attention_states(state, partial)
            else:
                partial = ops.shared_attention(
                    q[rows], segment.layers[layer], scale, q_positions=cache.positions[rows], window=window
                )
                out, lse = state
                out[rows], lse[rows] = ops.merge_attention_states((out[rows], lse[rows]), partial)
        return state[0][None]


class _StepCache(Cache):
    """The cache of one step: hands each request's new keys and values to its own tail."""

    def __init__(self, pieces: Sequence[Piece], positions: Tensor) -> None:
        super().__init__(layers=[])
        self.positions = positions  # [total]
        self.tails = RaggedBatch(
            [piece.tail.room for piece in pieces],
            [piece.tail.length for piece in pieces],
            [len(piece.token_ids) for piece in pieces],
        )
        self.readers = self._group_readers(pieces)

    def _group_readers(self, pieces: Sequence[Piece]) -> list[tuple[KVSegment, Tensor | None]]:
        """Rows of each segment's readers; None stands for all rows, which need no gathering."""
        rows_of: dict[int, list[int]] = {}
        segments: dict[int, KVSegment] = {}
        first = 0
        for piece in pieces:
            end = first + len(piece.token_ids)
            for segment in piece.segments:
                segments[id(segment)] = segment
                rows_of.setdefault(id(segment), []).extend(range(first, end))
            first = end
        device = self.positions.device
        return [
            (segments[key], None if len(rows) == first else torch.tensor(rows, device=device))
            for key, rows in rows_of.items()
        ]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> tuple[Tensor, Tensor]:
        """Appends ``[1, Hkv, total, D]`` to the tails and hands the attention function its view."""
        assert kwargs is not None, "the model does not pass its keyword arguments through Cache.update"
        ops.append_to_tails(self.tails, layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        kwargs[VIEW_KEY] = _StepLayerView(self, layer_idx)
        return key_states, value_states


def run_step(model: PreTrainedModel, pieces: Sequence[Piece], *, invariant: bool = False) -> Tensor:
    """Computes the pieces' tokens in one forward; their keys and values are committed to the tails if it succeeds.

    Args:
        model: an attached model.
        pieces: at least one, of different tails.
        invariant: use our own linear layers at any number of rows, whose results do not depend on how many there are.

    Returns:
        Logits ``[n, V]`` of the last token of each piece that wants them, in order.

    Raises:
        IncompatiblePoolError: the model's attention implementation was changed and would ignore the tails.
    """
    device = embedding_weight(model).device
    ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    for piece in pieces:
        ids.extend(piece.token_ids)
        positions.extend(range(piece.position, piece.position + len(piece.token_ids)))
        if piece.wants_logits:
            wanted.append(len(ids) - 1)
    check_attached(model)
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    # a model compiled in place runs as it is written here: the cache and our operations are not for a tracer
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with exclusively(model), torch.inference_mode(), fast_linears(always=invariant), eager:
        row_positions = torch.tensor(positions, device=device)
        output = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=row_positions[None],
            attention_mask=no_mask(device),
            cache=_StepCache(pieces, row_positions),
            use_cache=True,
            # transformers takes 0 for "all": without any wanted row the last one is computed and dropped
            logits_to_keep=torch.tensor(wanted or [len(ids) - 1], device=device),
        )
    for piece in pieces:
        piece.tail.commit(len(piece.token_ids))
    logits: Tensor = output.logits[0]
    return logits[: len(wanted)]
