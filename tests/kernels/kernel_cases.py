"""The backends that can run here, and the oracle that all of them are measured against."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from helpers import relative_error
from torch import Tensor

from polykv.codecs import get_codec
from polykv_kernels import EncodedKV, cpu, ops
from polykv_kernels.cpu.loader import LibraryUnavailable

FULL = os.environ.get("POLYKV_TEST_FULL") == "1"
INF = math.inf

LAYOUTS = ("exact", "paper", "k8v3")
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
RATIOS = (1, 3, 4, 7, 8)  # query heads a KV head
ROWS = (1, 3, 15, 45, 60, 129)
TOKENS = (1, 63, 64, 65, 511, 512, 513, 1000)  # a tile is 64 tokens, the reference's chunk 512
SPLITS = (1, 3, 8)
BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-12}  # max|error| / max|reference|


# --------------------------------------------------------------------------------------------------- backends


@dataclass(frozen=True)
class Backend:
    """A backend with the instruction set that it computes with.

    Attributes:
        name: as ``ops.use_backend`` takes it.
        isa: as ``cpu.use_isa`` takes it, or None.
        best: whether it is what a user gets, and so worth the whole grid in a full run.
    """

    name: str
    isa: str | None
    best: bool

    def __str__(self) -> str:
        return self.isa or self.name

    @property
    def bounds(self) -> dict[torch.dtype, float]:
        """The dtypes it computes in, with their bounds: only the reference does float64."""
        return BOUNDS if self.name == "reference" else {torch.float32: BOUNDS[torch.float32]}

    @property
    def splits(self) -> tuple[int, ...]:
        """Numbers of parts that the tokens can be told to be divided into."""
        return SPLITS if self.name == "cpu" else ()

    @contextmanager
    def use(self) -> Iterator[None]:
        with ops.use_backend(self.name):
            if self.isa is None:
                yield
                return
            with cpu.use_isa(self.isa):
                yield


@cache
def unavailable() -> str | None:
    """Why there are no compiled CPU kernels here, or None; compiles them if that is still to be done."""
    try:
        cpu.describe()
    except LibraryUnavailable as error:
        return str(error)
    return None


@cache
def isas() -> tuple[str, ...]:
    """The instruction sets of the CPU kernels that this processor has, best first."""
    return () if unavailable() else tuple(cpu.describe()["available_isas"])


def backends(*, cpu_only: bool = False) -> list[Any]:
    """Parameters: the reference, then the CPU kernels with each instruction set, or one that says why there are none."""
    found = [] if cpu_only else [Backend("reference", None, True)]
    if (reason := unavailable()) is not None:
        return [*found, pytest.param(Backend("cpu", None, False), marks=pytest.mark.skip(reason=reason))]
    return found + [Backend("cpu", isa, not i) for i, isa in enumerate(isas())]


def over_backends(*axes: tuple[Any, ...], also: tuple[tuple[Any, ...], ...] = ()) -> list[Any]:
    """Parameters ``(backend, *point)``: in a full run the whole grid for what users get, else every pair of values."""
    parameters = []
    for backend in backends():
        marked = not isinstance(backend, Backend)
        best = not marked and backend.best
        points = whole_grid(*axes) if FULL and best else all_pairs(*axes)
        for point in [*points, *(extra for extra in also if extra not in points)]:
            if marked:
                parameters.append(pytest.param(*backend.values, *point, marks=backend.marks))
                break  # one skip says it
            parameters.append((backend, *point))
    return parameters


def whole_grid(*axes: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*axes))


def all_pairs(*axes: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Points of the grid such that every pair of values of two axes occurs."""
    points = whole_grid(*axes)
    random.Random(0).shuffle(points)
    seen: set[tuple[int, Any, int, Any]] = set()
    chosen = []
    for point in points:
        pairs = {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(point), 2)}
        if not pairs <= seen:
            seen |= pairs
            chosen.append(point)
    return chosen


# ----------------------------------------------------------------------------------------------------- oracle


def oracle(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Head by head; ``q`` ``[rows, Hq, D]``, keys and values ``[Hkv, T, D]``, ``visible`` ``[rows, T]``."""
    q, keys, values = q.double(), keys.double(), values.double()
    ratio = q.shape[1] // keys.shape[0]
    outs, lses = [], []
    for head in range(q.shape[1]):
        logits = q[:, head] @ keys[head // ratio].T * scale  # [rows, T]
        if visible is not None:
            logits[~visible] = -INF
        top = logits.amax(dim=1, keepdim=True)
        top[top == -INF] = 0.0
        weights = (logits - top).exp()
        total = weights.sum(dim=1, keepdim=True)
        outs.append(weights @ values[head // ratio] / total.clamp_min(1e-300))
        lses.append((total.log() + top)[:, 0])
    return torch.stack(outs, 1), torch.stack(lses, 1)


def ragged_oracle(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    row_counts: list[int] | tuple[int, ...],
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The causal oracle of each request, one after another."""
    wants, first = [], 0
    for k, v, count in zip(keys, values, row_counts, strict=True):
        at = torch.arange(k.shape[1] - count, k.shape[1])[:, None]
        slots = torch.arange(k.shape[1])
        visible = (slots <= at) & (slots > at - (window or 10**9))
        wants.append(oracle(q[first : first + count], k, v, scale, visible))
        first += count
    outs, lses = zip(*wants, strict=True)
    return torch.cat(outs), torch.cat(lses)


def merge_oracle(states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The definition of the merge, in float64."""
    outs, lses = (torch.stack([x.double() for x in parts]) for parts in zip(*states, strict=True))
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse.masked_fill(lse == -INF, 0.0)).exp()
    return (outs * weights[..., None]).sum(dim=0), lse


def errors(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Relative errors of out and lse; lse in units of 1 at least, since what weighs is exp(lse)."""
    (out, lse), (want_out, want_lse) = got, want
    assert out.shape == want_out.shape
    assert lse.shape == want_lse.shape
    empty = want_lse == -INF
    assert torch.equal(lse == -INF, empty)
    assert (out[empty] == 0).all()
    if empty.all():
        return 0.0, 0.0
    if want_out.any():
        out_error = relative_error(out[~empty], want_out[~empty])
    else:
        assert not out.any()
        out_error = 0.0
    lse, want_lse = lse[~empty].double(), want_lse[~empty]
    return out_error, float((lse - want_lse).abs().max() / want_lse.abs().max().clamp_min(1.0))


def assert_close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], bound: float) -> None:
    """Out and lse within the relative bound, and empty rows exactly where they should be."""
    out, lse = errors(got, want)
    assert out <= bound, f"out is off by {out:.3g}"
    assert lse <= bound, f"lse is off by {lse:.3g}"


def assert_equal(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """Bitwise, NaN included."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        assert torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


# -------------------------------------------------------------------------------------------------- segments


@lru_cache(maxsize=32)
def random_segment(layout: str, heads: int, tokens: int, head_dim: int, start: int = 0) -> EncodedKV:
    """Keys whose channels differ in size, so that their scales do, and whose logits have variance 1.

    The variance matters: at 2.75, torch's own float32 attention is off the oracle by more than 2e-6 at times.
    """
    generator = torch.Generator().manual_seed(tokens * 1000 + head_dim)
    keys, values = torch.randn(2, heads, tokens, head_dim, generator=generator)
    size = 1.0 + torch.arange(head_dim) % 5
    with ops.use_backend("reference"):  # one segment for every backend
        return segment_of(layout, keys * size / size.square().mean().sqrt(), values, start)


def segment_of(layout: str, keys: Tensor, values: Tensor, start: int = 0) -> EncodedKV:
    return get_codec(layout).encode(keys, values, torch.arange(start, start + keys.shape[1]))


def decoded(segment: EncodedKV) -> tuple[Tensor, Tensor]:
    """What a segment stands for, in float64. ``tests/codecs`` checks this against the format itself."""
    return ops.decode(segment, torch.float64)


def random_query(rows: int, heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, heads, head_dim).to(dtype)


def windows(start: int, tokens: int, rows: int) -> tuple[Tensor, int]:
    """Positions past the segment and a window that cuts it, inside a tile, at another token for every row."""
    window = tokens // 2 + 7
    return start + tokens + torch.arange(rows) * max(1, tokens // rows), window
