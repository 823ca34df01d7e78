"""Runs the model over a batch."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from polykv.engine.scheduler import Batch
from polykv.models.step import run_step


class ModelRunner:
    """Computes a batch's rows.

    Args:
        model: an attached model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """Computes the batch's rows; their keys and values are in the tails afterwards.

        Returns:
            Logits ``[n, V]`` of the last row of each piece of work that reaches the end of what is pending, in order.

        Raises:
            IncompatiblePoolError: the model's attention implementation was changed and would ignore the tails.
        """
        return run_step(self.model, batch.pieces())
