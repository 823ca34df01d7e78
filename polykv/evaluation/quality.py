"""How far a codec's pool moves a model's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from polykv.codecs import Codec
from polykv.errors import InvalidRequestError
from polykv.models.support import embedding_weight
from polykv.pool import SharedKVPool


@dataclass(frozen=True)
class QualityReport:
    """A codec against the uncompressed pool, on the same continuation.

    Attributes:
        codec: name.
        ratio: float16 bytes of the context over allocated bytes.
        kl: mean KL(uncompressed || compressed) of the next-token distributions, in nats.
        top1_agreement: share of positions where both have the same most likely token.
        perplexity: of the continuation, on the compressed pool.
        reference_perplexity: on the uncompressed one.
        positions: scored positions.
    """

    codec: str
    ratio: float
    kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float
    positions: int


@torch.no_grad()
def compare_codec(
    model: PreTrainedModel, context: Sequence[int], continuation: Sequence[int], codecs: Sequence[str | Codec]
) -> list[QualityReport]:
    """Scores a continuation teacher-forced on pools of one context.

    The continuation's own keys and values stay exact, as a reader's do. KL is the figure to steer by: a difference of
    perplexities on one window scatters by about a point whatever the codec.

    Args:
        model: a causal language model.
        context: token ids of the shared context.
        continuation: the tokens that follow; at least two.
        codecs: codecs to compare.

    Raises:
        InvalidRequestError: the continuation has fewer than two tokens.
    """
    if len(continuation) < 2:
        raise InvalidRequestError(f"the continuation needs at least 2 tokens to score, got {len(continuation)}")
    ids = torch.tensor([list(continuation)], device=embedding_weight(model).device)
    targets = ids[0, 1:]

    def score(codec: str | Codec) -> tuple[torch.Tensor, float]:
        pool = SharedKVPool.from_token_ids(model, context, codec)
        logits = model(ids, cache=pool.new_cache()).logits[0, :-1].float()
        return logits.log_softmax(-1), pool.stats().compression_ratio

    def perplexity(log_probabilities: torch.Tensor) -> float:
        return float(torch.exp(-log_probabilities.gather(1, targets[:, None]).mean()))

    reference, _ = score("exact")
    reports = []
    for codec in codecs:
        compressed, ratio = score(codec)
        kl = (reference.exp() * (reference - compressed)).sum(-1).mean()
        agreement = (reference.argmax(-1) == compressed.argmax(-1)).float().mean()
        reports.append(
            QualityReport(
                codec=codec if isinstance(codec, str) else codec.name,
                ratio=ratio,
                kl=float(kl),
                top1_agreement=float(agreement),
                perplexity=perplexity(compressed),
                reference_perplexity=perplexity(reference),
                positions=len(targets),
            )
        )
    return reports
