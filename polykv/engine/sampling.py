"""Choosing the next token of one request."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from polykv.engine.request import SamplingParams
from polykv.errors import NonFiniteLogitsError

MIN_TEMPERATURE = 1e-6
"""Lower ones draw the most likely token all the same, and float32 cannot divide by all of them."""


class Sampler:
    """Owns one request's random generator, so that its draws do not depend on what else runs.

    Args:
        params: temperature, top_p and seed.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._warpers: list[LogitsProcessor] = []
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            self._warpers.append(TemperatureLogitsWarper(max(float(params.temperature), MIN_TEMPERATURE)))
            if params.top_p < 1:
                self._warpers.append(TopPLogitsWarper(params.top_p))
            seed = params.seed if params.seed is not None else secrets.randbits(63)
            self._generator = torch.Generator().manual_seed(seed % 2**63)

    def sample(self, logits: Tensor) -> int:
        """Picks a token.

        Args:
            logits: ``[V]`` of the last position.

        Raises:
            NonFiniteLogitsError: a logit is NaN or infinite.
        """
        # one reduction instead of a mask over the vocabulary: any NaN or infinity makes the sum non-finite
        if not torch.isfinite(logits.float().sum()):
            raise NonFiniteLogitsError(
                "the model returned NaN or infinite logits for this request, so no token can be chosen; check the "
                "weights and dtype (float16 overflows in some models: use float32 or bfloat16)"
            )
        if self._generator is None:
            return int(logits.argmax())
        row = logits.detach().to("cpu", torch.float32)[None]
        row = row - row.max()  # so that no division by a small temperature overflows to infinity
        for warper in self._warpers:
            row = warper(None, row)  # these two read no ids
        return int(torch.multinomial(row.softmax(dim=-1), 1, generator=self._generator))
