"""A segment: the compressed keys and values of a run of tokens. A span: some of them, as a reader reads them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polykv.codecs import Codec
from polykv.errors import InvalidRequestError, PromptTooLongError
from polykv.models.identity import ModelIdentity, segment_identity
from polykv.models.support import embedding_weight, head_dim, max_positions
from polykv_kernels import EncodedKV
from polykv_kernels.layouts import tensor_bytes

EXACT = "exact"
"""Name of the codec that keeps keys and values as they are."""
MAX_PARTS = 64
"""Parts of one segment whose views are kept: they are made anew otherwise, which takes a fraction of a millisecond."""


@dataclass(frozen=True)
class BuildReport:
    """What building a segment took.

    Attributes:
        seconds: wall time, prefill and encoding.
        prefill_seconds: the prefill's part.
        peak_bytes: largest sum of dense cache and encoded layers during the build.
    """

    seconds: float
    prefill_seconds: float
    peak_bytes: int


@dataclass(frozen=True, eq=False)
class KVSegment:
    """Immutable compressed KV of consecutive tokens, from position 0 or from the end of a span of another segment.

    A segment with a parent was computed over the parent's stored form, and whoever reads it reads the parent too: documents
    of one team over a handbook of all teams, for example. Each is stored once and read once a step.

    Attributes:
        identity: hex SHA-256 chain over model identity and all token ids from position 0.
        model: identity of the model whose keys and values these are.
        codec: name of the codec; not part of the identity.
        token_ids: ``[T]`` int32, without the parent's.
        layers: one :class:`EncodedKV` a layer. A sliding-window layer holds only what the window of a token after the
            segment can reach.
        report: what the build took.
        parent: what was before this segment when it was computed, or None for one that starts at position 0.
        salt: digest of whose it is; segments of different salts never serve each other's requests.
        exact_tokens: so many first tokens are kept as they are whatever the codec, so that the segment can be read from any of
            them on: it may stand anywhere.
    """

    identity: str
    model: ModelIdentity
    codec: str
    token_ids: Tensor = field(repr=False)
    layers: tuple[EncodedKV, ...] = field(repr=False)
    report: BuildReport
    parent: Span | None = field(default=None, repr=False)
    salt: str = field(default="", repr=False)
    exact_tokens: int = field(default=0, repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens held, without the parent's."""
        return int(self.token_ids.shape[0])

    @property
    def whole(self) -> Span:
        """All of it, where it was computed. Made anew each time: kept here it would keep this segment alive."""
        return Span(self, 0, self.num_tokens, self.start, self.parent)

    @cached_property
    def key(self) -> SegmentKey:
        """What it is and what it was computed over: a segment depends on how its parents are stored."""
        return segment_key(self.identity, self.codec, self.parent, self.exact_tokens)

    @cached_property
    def complete(self) -> bool:
        """Whether every layer holds every token, so that a part of it can be read alone."""
        return all(layer.num_tokens == self.num_tokens for layer in self.layers)

    @cached_property
    def start(self) -> int:
        """Absolute position of the first token."""
        return 0 if self.parent is None else self.parent.end

    @cached_property
    def end(self) -> int:
        """Absolute position after the last token: tokens of the whole context, the parents' included."""
        return self.start + self.num_tokens

    @property
    def chain(self) -> tuple[Span, ...]:
        """The spans of the whole context from position 0 on, this segment's last."""
        return self.whole.chain

    @property
    def context_ids(self) -> Tensor:
        """``[end]`` int32: ids of the whole context."""
        return self.whole.context_ids

    @cached_property
    def num_bytes(self) -> int:
        """Bytes allocated: every layer and the token ids."""
        # layers may share one storage (a request's tail that became a segment): it counts once
        return tensor_bytes(self.token_ids, *(x for layer in self.layers for x in layer.tensors().values()))

    def part(self, first: int, stop: int) -> tuple[EncodedKV, ...]:
        """The stored form of tokens ``[first, stop)``, one a layer: views, no copies.

        Raises:
            ValueError: the stored form cannot be read in part (see :meth:`EncodedKV.part`), or a sliding-window layer has
                dropped tokens.
        """
        if (first, stop) == (0, self.num_tokens):
            return self.layers
        parts = self._parts.get((first, stop))
        if parts is None:
            if not self.complete:
                raise ValueError(
                    "a segment whose sliding-window layers hold only their windows is read whole or not at all"
                )
            parts = tuple(layer.part(first, stop) for layer in self.layers)
            while len(self._parts) >= MAX_PARTS:
                self._parts.pop(next(iter(self._parts)), None)
            self._parts[first, stop] = parts
        return parts

    @cached_property
    def _parts(self) -> dict[tuple[int, int], tuple[EncodedKV, ...]]:
        return {}

    @property
    def dense_bytes(self) -> int:
        """Bytes of one private float16 cache of the same tokens, sliding layers cut to their window."""
        return sum(layer.dense_fp16_nbytes for layer in self.layers)

    @property
    def compression_ratio(self) -> float:
        """``dense_bytes / num_bytes``: allocated bytes, never arithmetic on bit widths."""
        return self.dense_bytes / self.num_bytes


SpanKey = tuple[tuple[str, str, int, int, int], ...]
"""For each span of a context: identity and codec of its segment, the part of it that is read, and how far it is moved."""

SegmentKey = tuple[SpanKey, str, str]
"""What a segment was computed over, its identity and its codec."""


def segment_key(identity: str, codec: str, parent: Span | None, exact_tokens: int = 0) -> SegmentKey:
    """Key of a segment: see :data:`SegmentKey`."""
    form = f"{codec}/{exact_tokens}" if exact_tokens else codec
    return (parent.key if parent is not None else (), identity, form)


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens of a segment at a place in a context, and what comes before them.

    A context is its last span. Spans cost nothing: they share the segment's storage. A span may leave out the segment's first
    or last tokens (a request that goes on in another way reads only what they have in common), and may stand at other
    positions than those it was computed at: then its readers' queries are rotated by the difference.

    Attributes:
        segment: whose tokens.
        first: index of the first token read, within the segment.
        stop: index after the last.
        at: absolute position of the segment's token 0 in this context.
        before: the span before this one, which ends where it starts; None for a span at position 0.
    """

    segment: KVSegment
    first: int
    stop: int
    at: int
    before: Span | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop <= self.segment.num_tokens:
            raise ValueError(f"a span [{self.first}, {self.stop}) of a segment of {self.segment.num_tokens} tokens")
        if self.start != (self.before.end if self.before is not None else 0):
            raise ValueError(
                f"a span at position {self.start} does not follow one that ends at {self.before and self.before.end}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens read, without those before."""
        return self.stop - self.first

    @property
    def start(self) -> int:
        """Absolute position of the first token read."""
        return self.at + self.first

    @property
    def end(self) -> int:
        """Absolute position after the last token read: tokens of the whole context."""
        return self.at + self.stop

    @property
    def shift(self) -> int:
        """How many positions further back than computed it stands."""
        return self.at - self.segment.start

    @property
    def model(self) -> ModelIdentity:
        """Identity of the model."""
        return self.segment.model

    @property
    def codec(self) -> str:
        """Codec of the segment."""
        return self.segment.codec

    @property
    def identity(self) -> str:
        """Identity of the segment."""
        return self.segment.identity

    @property
    def salt(self) -> str:
        """Digest of whose it is."""
        return self.segment.salt

    @cached_property
    def lossless(self) -> bool:
        """Whether the model would see the very same keys and values without the pool, up to the order of sums."""
        segment = self.segment
        own = segment.codec == EXACT and not segment.exact_tokens and not self.shift
        return (
            own
            and (segment.parent is None or segment.parent.lossless)
            and (self.before is None or self.before.lossless)
        )

    @cached_property
    def key(self) -> SpanKey:
        """Key of the context: equal keys are read alike. A lossless one is its tokens, however they are cut into segments."""
        if self.lossless:
            whole = self.stop == self.segment.num_tokens
            identity = (
                self.segment.identity
                if whole
                else segment_identity(self.segment.model, self.context_ids.tolist(), self.segment.salt)
            )
            return ((identity, EXACT, 0, self.end, 0),)
        link = (*self.segment.key[1:], self.first, self.stop, self.shift)
        return (*(self.before.key if self.before is not None else ()), link)

    @property
    def chain(self) -> tuple[Span, ...]:
        """The spans of the whole context from position 0 on, this one last."""
        return (*(self.before.chain if self.before is not None else ()), self)

    @property
    def context_ids(self) -> Tensor:
        """``[end]`` int32: ids of the whole context."""
        if self.before is None and self.num_tokens == self.segment.num_tokens:
            return self.segment.token_ids
        return torch.cat([span.segment.token_ids[span.first : span.stop] for span in self.chain])

    @property
    def layers(self) -> tuple[EncodedKV, ...]:
        """The stored form of the tokens read, one a layer, at the positions they were computed at.

        Raises:
            ValueError: the segment's stored form cannot be read in part.
        """
        return self.segment.part(self.first, self.stop)


def as_span(context: KVSegment | Span | None) -> Span | None:
    """A context given as its last segment or span."""
    return context.whole if isinstance(context, KVSegment) else context


def checked_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    """Token ids as a tuple of integers.

    Raises:
        InvalidRequestError: they are no integers, or no sequence of any.
    """
    try:
        return tuple(map(operator.index, token_ids))
    except TypeError:
        raise InvalidRequestError(
            f"token_ids must be a sequence of integers, got {token_ids!r:.60}; encode a text with the model's tokenizer first"
        ) from None


def check_context(model: PreTrainedModel, token_ids: Sequence[int], codec: Codec, parent: Span | None = None) -> None:
    """Everything that can be wrong with a context, before a prefill is spent on it.

    Raises:
        InvalidRequestError: no tokens, or ids outside the vocabulary.
        PromptTooLongError: no position is left for a question.
        UnsupportedModelError: the codec cannot store the model's head_dim.
    """
    if len(token_ids) == 0:
        raise InvalidRequestError("the context has no tokens; give a text that is not empty")
    limit = max_positions(model.config)
    total = len(token_ids) + (parent.end if parent is not None else 0)
    if total >= limit:
        raise PromptTooLongError(
            f"the context has {total} tokens, but the model has {limit} positions and needs some for the "
            f"question; shorten the context by at least {total - limit + 1} tokens"
        )
    low, high, vocabulary = min(token_ids), max(token_ids), embedding_weight(model).shape[0]
    if low < 0 or high >= vocabulary:
        raise InvalidRequestError(
            f"token ids must lie in [0, {vocabulary}), got {low if low < 0 else high}; was another tokenizer used?"
        )
    codec.check_head_dim(head_dim(model.config))
