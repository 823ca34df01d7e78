"""Bytes that are really there: tensors alive, and the process's resident set."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


def live_tensor_bytes(exclude: Iterable[Tensor] = ()) -> int:
    """Bytes of every tensor alive in the process, each storage once.

    It walks the garbage collector's objects, so a tensor counts whoever holds it, our code or not. Run it when no
    forward is in progress: temporaries count too.

    Args:
        exclude: tensors left out, usually a model's parameters and buffers.

    Returns:
        Bytes allocated.
    """
    gc.collect()
    left_out = {tensor.untyped_storage().data_ptr() for tensor in exclude}
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        # type() and not isinstance(): the latter wakes lazy proxies of other libraries
        if not issubclass(type(candidate), Tensor):
            continue
        if candidate.layout != torch.strided or candidate.device.type == "meta":
            continue
        storage = candidate.untyped_storage()
        if storage.data_ptr() not in left_out:
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident_bytes() -> int | None:
    """Resident set size of this process, or None where the system does not tell (it does on Linux)."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    for line in status.read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return None
