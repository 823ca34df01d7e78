"""One forward of rows that belong to different requests: flattened, without padding, each segment read once for all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from polykv.models.attention import VIEW_KEY, check_attached, exclusively, no_mask
from polykv.models.linear import fast_linears
from polykv.models.rope import rotation_of
from polykv.models.support import embedding_weight
from polykv.models.tails import Tail
from polykv_kernels import EncodedKV, RaggedBatch, ops

if TYPE_CHECKING:
    from polykv.pool.segment import KVSegment, Span


@dataclass(frozen=True, eq=False)
class Piece:
    """A request's part in a forward: some tokens that follow what its segments and its tail hold.

    Attributes:
        token_ids: the tokens.
        position: absolute position of the first of them.
        tail: where their keys and values go; room for them must be reserved.
        spans: the shared context, its spans from position 0 on; empty for none.
        wants_logits: whether the logits of the last token are needed.
    """

    token_ids: Sequence[int]
    position: int
    tail: Tail
    spans: tuple[Span, ...] = ()
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
        for reading in cache.readings:
            # each stored token is read in one pass for all of its readers; rows of other requests are left out
            rows, positions = reading.rows, cache.positions
            queries = q if rows is None else q[rows]
            positions = positions if rows is None else positions[rows]
            if reading.shifts is not None:
                queries = cache.rotation.rotate(queries, reading.shifts, layer)
                positions = positions - reading.shifts
            partial = ops.shared_attention(queries, reading.layers[layer], scale, q_positions=positions, window=window)
            if rows is None:
                state = ops.merge_attention_states(state, partial)
            else:
                out, lse = state
                out[rows], lse[rows] = ops.merge_attention_states((out[rows], lse[rows]), partial)
        return state[0][None]


@dataclass(frozen=True, eq=False)
class Reading:
    """One pass over stored tokens for all rows that read them.

    Attributes:
        layers: the tokens, one layout a layer.
        rows: ``[n]`` int64, which rows of the step; None for all, which need no gathering.
        shifts: ``[n]`` int64, how many positions later than computed each row reads them; None where all are 0.
    """

    layers: tuple[EncodedKV, ...]
    rows: Tensor | None
    shifts: Tensor | None


def plan_readings(pieces: Sequence[Piece], device: torch.device) -> list[Reading]:
    """The passes of a step. Readers of different parts of a segment share those that they have in common.

    A segment that cannot be parted is read once for each part that is asked for.
    """
    total = sum(len(piece.token_ids) for piece in pieces)
    readers: dict[tuple[int, int], list[tuple[Span, range]]] = {}
    first = 0
    for piece in pieces:
        rows = range(first, first + len(piece.token_ids))
        times: Counter[int] = Counter()
        for span in piece.spans:
            # a document that stands in a prompt twice is read twice by the same rows: in two passes
            readers.setdefault((id(span.segment), times[id(span.segment)]), []).append((span, rows))
            times[id(span.segment)] += 1
        first = rows.stop
    readings = []
    for spans in readers.values():
        for layers, reading in _parts(spans):
            rows_of = [row for _, rows in reading for row in rows]
            shifts = [span.shift for span, rows in reading for _ in rows]
            readings.append(
                Reading(
                    layers,
                    None if len(rows_of) == total else torch.tensor(rows_of, device=device),
                    torch.tensor(shifts, device=device) if any(shifts) else None,
                )
            )
    return readings


def _parts(readers: list[tuple[Span, range]]) -> Iterator[tuple[tuple[EncodedKV, ...], list[tuple[Span, range]]]]:
    """Parts of one segment, and who reads each."""
    segment: KVSegment = readers[0][0].segment
    asked = sorted({(span.first, span.stop) for span, _ in readers})
    cuts = sorted({cut for part in asked for cut in part})
    parts = list(itertools.pairwise(cuts)) if len(asked) > 1 else asked
    try:
        layers = {part: segment.part(*part) for part in parts}
    except ValueError:
        for part in asked:
            yield segment.part(*part), [(s, rows) for s, rows in readers if (s.first, s.stop) == part]
        return
    for first, stop in parts:
        reading = [(span, rows) for span, rows in readers if span.first <= first and stop <= span.stop]
        if reading:
            yield layers[first, stop], reading


class _StepCache(Cache):
    """The cache of one step: hands each request's new keys and values to its own tail."""

    def __init__(self, model: PreTrainedModel, pieces: Sequence[Piece], positions: Tensor) -> None:
        super().__init__(layers=[])
        self.positions = positions  # [total]
        self.tails = RaggedBatch(
            [piece.tail.room for piece in pieces],
            [piece.tail.length for piece in pieces],
            [len(piece.token_ids) for piece in pieces],
        )
        self.readings = plan_readings(pieces, positions.device)
        if any(reading.shifts is not None for reading in self.readings):
            self.rotation = rotation_of(model)

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
            cache=_StepCache(model, pieces, row_positions),
            use_cache=True,
            # transformers takes 0 for "all": without any wanted row the last one is computed and dropped
            logits_to_keep=torch.tensor(wanted or [len(ids) - 1], device=device),
        )
    for piece in pieces:
        piece.tail.commit(len(piece.token_ids))
    logits: Tensor = output.logits[0]
    return logits[: len(wanted)]
