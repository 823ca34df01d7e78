"""Runs the model over a batch."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polykv.engine.scheduler import Batch
from polykv.models.invariant import use_invariant_activations, why_not_invariant
from polykv.models.step import run_step

logger = logging.getLogger(__name__)


class ModelRunner:
    """Computes a batch's rows.

    Args:
        model: an attached model.
        deterministic: give a request's rows the same bits whatever else is in the batch. Where kernels allow it all rows
            still share a forward; elsewhere each request gets one of its own.

    Attributes:
        one_by_one: whether each request gets a forward of its own.
    """

    def __init__(self, model: PreTrainedModel, *, deterministic: bool = False) -> None:
        self.model = model
        self.deterministic = deterministic
        self.one_by_one = False
        if deterministic:
            use_invariant_activations(model)
            reason = why_not_invariant(model)
            if reason is not None:
                self.one_by_one = True
                logger.warning(
                    "deterministic=True runs every request in a forward of its own, which is slower with many: %s",
                    reason,
                )

    def forward(self, batch: Batch) -> Tensor:
        """Computes the batch's rows; their keys and values are in the tails afterwards.

        Returns:
            Logits ``[n, V]`` of the last row of each piece of work that reaches the end of what is pending, in order.

        Raises:
            IncompatiblePoolError: the model's attention implementation was changed and would ignore the tails.
        """
        pieces = batch.pieces()
        if self.one_by_one:
            return torch.cat([run_step(self.model, [piece], invariant=True) for piece in pieces])
        return run_step(self.model, pieces, invariant=self.deterministic)
