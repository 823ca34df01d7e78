"""How a segment is made: prefilled in chunks into a dense tail, which is encoded and dropped layer by layer."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from polykv.codecs import Codec
from polykv.errors import PolyKVError
from polykv.models.identity import ModelIdentity, segment_identity
from polykv.models.step import Piece, run_step
from polykv.models.support import layer_windows
from polykv.models.tails import Tail
from polykv.pool.segment import BuildReport, KVSegment, Span, check_context
from polykv_kernels import EncodedKV, ops
from polykv_kernels.layouts import tensor_bytes

PREFILL_CHUNK_TOKENS = 512
"""Tokens prefilled at a time where nothing else runs."""


@contextmanager
def _no_grad() -> Iterator[None]:
    """No graph, but ordinary tensors whatever the caller's mode: inference tensors could not be read with gradients on."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class SegmentBuild:
    """A segment on its way. Somebody else runs the forwards: an engine mixes them with its requests' rows.

    First :meth:`piece` goes into a forward until :attr:`remaining` is 0, then :meth:`encode_layer` is called until
    :meth:`finish` can be.

    Args:
        model: an attached model.
        identity: its identity.
        token_ids: the context, without the parent's.
        codec: how to store it.
        parent: the span before it, whose stored form it attends to.
        salt: digest of whose it is.
        exact_tokens: keep so many first tokens as they are, whatever the codec; for segments that are read anywhere.

    Raises:
        InvalidRequestError, PromptTooLongError, UnsupportedModelError: see :func:`check_context`.
        MemoryError: the dense tail cannot be allocated.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        identity: ModelIdentity,
        token_ids: Sequence[int],
        codec: Codec,
        parent: Span | None = None,
        *,
        salt: str = "",
        exact_tokens: int = 0,
    ) -> None:
        check_context(model, token_ids, codec, parent)
        self._salt, self._exact_tokens = salt, exact_tokens
        self._started = time.perf_counter()
        self._prefilled = self._started
        self._model, self._identity, self._codec, self._parent = model, identity, codec, parent
        self._ids = [int(token) for token in token_ids]
        self._start = 0 if parent is None else parent.end
        self._windows = layer_windows(model.config)
        self._tail = Tail(model, limit=len(self._ids), by_layer=True)
        self._tail.reserve(len(self._ids))
        self._dense: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._layers: list[EncodedKV] = []
        self._peak = self._tail.nbytes

    @property
    def num_tokens(self) -> int:
        """Tokens of the segment."""
        return len(self._ids)

    @property
    def remaining(self) -> int:
        """Tokens still to be prefilled."""
        return len(self._ids) - self._tail.length if not self._layers and not self._dense else 0

    @property
    def position(self) -> int:
        """Absolute position of the next token to be prefilled."""
        return self._start + self._tail.length

    @property
    def num_layers(self) -> int:
        """Layers to encode."""
        return len(self._windows)

    @property
    def nbytes(self) -> int:
        """Bytes allocated at this moment, dense and encoded."""
        dense = sum(tensor_bytes(*layer) for layer in self._dense)
        return self._tail.nbytes + dense + sum(layer.nbytes for layer in self._layers)

    def piece(self, max_rows: int) -> Piece:
        """The next tokens, at most ``max_rows`` of them, for a forward."""
        done = self._tail.length
        return Piece(
            self._ids[done : done + max_rows],
            self._start + done,
            self._tail,
            self._parent.chain if self._parent is not None else (),
            wants_logits=False,
        )

    def encode_layer(self) -> int:
        """Encodes the next layer and drops its dense form.

        Returns:
            Layers encoded so far.

        Raises:
            PolyKVError: the model gave keys or values that cannot be stored.
        """
        if not self._dense and not self._layers:
            self._prefilled = time.perf_counter()
            self._dense = self._tail.take_layers()[::-1]
        index = len(self._layers)
        keys, values = self._dense[-1]
        # a token after the segment sees keys at positions > query - window, so window - 1 of the segment's; one that is
        # read anywhere is read in part too
        window = self._windows[index] if not self._exact_tokens else None
        first = 0 if window is None else max(0, len(self._ids) - (window - 1))
        positions = torch.arange(self._start + first, self._start + len(self._ids))
        try:
            with _no_grad():
                encoded = encode(self._codec, keys[:, first:], values[:, first:], positions, self._exact_tokens)
        except ValueError as error:
            raise PolyKVError(f"layer {index} cannot be stored with codec {self._codec.name!r}: {error}") from error
        self._layers.append(encoded)
        self._peak = max(self._peak, self.nbytes)
        self._dense.pop()
        return len(self._layers)

    def finish(self) -> KVSegment:
        """The segment, once every layer is encoded."""
        assert len(self._layers) == self.num_layers
        now = time.perf_counter()
        before = [] if self._parent is None else self._parent.context_ids.tolist()
        return KVSegment(
            segment_identity(self._identity, [*before, *self._ids], self._salt),
            self._identity,
            self._codec.name,
            torch.tensor(self._ids, dtype=torch.int32),
            tuple(self._layers),
            BuildReport(now - self._started, self._prefilled - self._started, self._peak),
            self._parent,
            self._salt,
            self._exact_tokens,
        )

    def release(self) -> None:
        """Drops everything that a build in progress holds."""
        self._tail.release()
        self._dense.clear()


def encode(codec: Codec, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, exact: int) -> EncodedKV:
    """One layer's stored form, ``[Hkv, T, D]`` each, with the first ``exact`` tokens as they are."""
    heads, tokens, head_dim = keys.shape
    if not exact:
        return codec.encode(keys, values, positions)
    rest = codec.encode(keys[:, exact:], values[:, exact:], positions[exact:]) if tokens > exact else None
    if rest is None or rest.keys is None:
        return ops.store_exact(keys, values, int(positions[0]))
    kept = exact + rest.num_exact
    first = ops.exact_tokens(keys[:, :kept], values[:, :kept])
    return EncodedKV(int(positions[0]), tokens, heads, head_dim, keys.dtype, first, rest.keys, rest.values)


def build_segment(
    model: PreTrainedModel,
    identity: ModelIdentity,
    token_ids: Sequence[int],
    codec: Codec,
    *,
    parent: Span | None = None,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
) -> Generator[tuple[str, int, int], None, KVSegment]:
    """Builds a segment alone, chunk by chunk.

    Args:
        model: an attached model.
        identity: its identity.
        token_ids: the context, without the parent's.
        codec: how to store it.
        parent: the segment before it.
        chunk_tokens: tokens a forward.

    Yields:
        ``("prefill", tokens done, tokens)`` after each chunk, then ``("encode", layers done, layers)``.

    Returns:
        The segment.

    Raises:
        InvalidRequestError, PromptTooLongError, UnsupportedModelError: see :func:`check_context`.
        PolyKVError: the model gave keys or values that cannot be stored.
    """
    build = SegmentBuild(model, identity, token_ids, codec, parent)
    try:
        while build.remaining:
            run_step(model, [build.piece(chunk_tokens)])
            yield "prefill", build.num_tokens - build.remaining, build.num_tokens
        for _ in range(build.num_layers):
            yield "encode", build.encode_layer(), build.num_layers
        return build.finish()
    finally:
        build.release()
