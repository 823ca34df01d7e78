"""How many bytes a pool may take, and how many a context will."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from polykv.codecs import Codec
from polykv.errors import InvalidRequestError
from polykv.models.support import embedding_weight, head_dim, layer_windows, num_kv_heads

SHARE_OF_FREE_MEMORY = 0.5
_SAMPLE_TOKENS = 256


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now; in a container, within its limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(free, 0)


def checked_budget(max_bytes: float | None, device: torch.device) -> int | None:
    """A pool's budget: half of the free memory if None; None for ``math.inf``, no budget.

    Raises:
        InvalidRequestError: it is no positive number.
    """
    if max_bytes is None:
        return int(free_memory(device) * SHARE_OF_FREE_MEMORY)
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, (int, float)) or not max_bytes > 0:
        raise InvalidRequestError(
            f"max_bytes must be a positive number of bytes, got {max_bytes!r}; None takes half of the free memory, math.inf "
            "sets no limit"
        )
    return None if max_bytes == math.inf else int(max_bytes)


def segment_bytes(model: PreTrainedModel, codec: Codec, tokens: int) -> int:
    """About how many bytes a segment will take, from what the codec makes of a sample."""
    config = model.config
    shape = (num_kv_heads(config), _SAMPLE_TOKENS, head_dim(config))
    weight = embedding_weight(model)
    sample = torch.ones(shape, dtype=weight.dtype, device=weight.device)
    encoded = codec.encode(sample, sample, torch.arange(1, _SAMPLE_TOKENS + 1))
    held = sum(tokens if window is None else min(tokens, window - 1) for window in layer_windows(config))
    return held * encoded.nbytes // _SAMPLE_TOKENS
