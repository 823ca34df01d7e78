"""One forward for every running request: rows flattened to ``[1, total]``, no padding."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from polykv.engine.scheduler import Work
from polykv.models.attention import VIEW_KEY, check_attached, exclusively, no_mask
from polykv.models.support import embedding_weight
from polykv.pool.segment import KVSegment
from polykv_kernels import ops


class _BatchLayerView:
    """See :class:`polykv.models.attention.LayerView`; all requests of a step, each segment read once."""

    def __init__(self, cache: _BatchCache, layer_idx: int) -> None:
        self._cache = cache
        self._layer_idx = layer_idx

    def attend(self, query: Tensor, scale: float, mask: Tensor | None, window: int | None) -> Tensor:
        """See :meth:`LayerView.attend`."""
        cache, layer = self._cache, self._layer_idx
        q = query[0].transpose(0, 1).contiguous()  # [total, Hq, D]
        held = [work.sequence.tails[layer].held() for work in cache.batch]
        keys, values = [k[0] for k, _ in held], [v[0] for _, v in held]
        out, lse = ops.ragged_attention(q, keys, values, cache.row_counts, scale, window=window)
        for segment, rows in cache.readers:
            # each segment is one pass for all of its readers; rows of other requests are left out
            picked = slice(None) if rows is None else rows
            partial = ops.shared_attention(
                q[picked], segment.layers[layer], scale, q_positions=cache.positions[picked], window=window
            )
            out[picked], lse[picked] = ops.merge_attention_states((out[picked], lse[picked]), partial)
        return out[None]


class _BatchCache(Cache):
    """The cache of one step: hands each request's new keys and values to its own tail."""

    def __init__(self, batch: Seq[Work], positions: Tensor) -> None:
        super().__init__(layers=[])
        self.batch = batch
        self.positions = positions  # [total]
        self.row_counts = [work.rows for work in batch]
        self.readers = self._group_readers()

    def _group_readers(self) -> list[tuple[KVSegment, Tensor | None]]:
        """Rows of each segment's readers; None stands for all rows, which need no gathering."""
        rows_of: dict[int, list[int]] = {}
        segments: dict[int, KVSegment] = {}
        first = 0
        for work in self.batch:
            lease = work.sequence.lease
            if lease is not None:
                segments[id(lease.segment)] = lease.segment
                rows_of.setdefault(id(lease.segment), []).extend(range(first, first + work.rows))
            first += work.rows
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
        first = 0
        for work in self.batch:
            rows = slice(first, first + work.rows)
            work.sequence.tails[layer_idx].update(key_states[:, :, rows], value_states[:, :, rows])
            first += work.rows
        kwargs[VIEW_KEY] = _BatchLayerView(self, layer_idx)
        return key_states, value_states


class ModelRunner:
    """Runs a model over a batch of work.

    Args:
        model: an attached model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = embedding_weight(model).device

    def forward(self, batch: Seq[Work]) -> Tensor:
        """Computes the batch's rows; their keys and values go into the tails.

        Returns:
            Logits ``[n, V]`` of the last row of each piece of work, in order.

        Raises:
            IncompatiblePoolError: the model's attention implementation was changed and would ignore the view.
        """
        ids: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for work in batch:
            sequence = work.sequence
            ids.extend(sequence.pending[: work.rows])
            positions.extend(range(sequence.position, sequence.position + work.rows))
            last_rows.append(len(ids) - 1)
        row_positions = torch.tensor(positions, device=self.device)
        check_attached(self.model)
        with exclusively(self.model), torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([ids], device=self.device),
                position_ids=row_positions[None],
                attention_mask=no_mask(self.device),
                cache=_BatchCache(batch, row_positions),
                use_cache=True,
                logits_to_keep=torch.tensor(last_rows, device=self.device),
            )
        logits: Tensor = output.logits[0]
        return logits
