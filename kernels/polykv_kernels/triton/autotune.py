"""Finds tiles for the GPU of this machine and writes them as a tiles file. Offline: nothing is tuned at run time.

    python -m polykv_kernels.triton.autotune --output tiles.json [--head-dim 64 128 256] [--quick]
    POLYKV_TRITON_TILES=tiles.json python ...      uses the result

For every head dim and number of rows, each candidate's output is compared with that of the shipped tile, and the
median time over interleaved rounds decides. The split rule is chosen by decode alone, with the tiles that won. A
candidate that does not fit the GPU, or is wrong, is dropped with a message.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from polykv_kernels.layouts import DenseKV, EncodedKV
from polykv_kernels.triton import attention, encode
from polykv_kernels.triton.tiles import SplitRule, Tile, TileTable, device_properties, read_table, tiles_file

BLOCK_M = (16, 32, 64, 128)
KV_HEADS, GROUP = 8, 4
TOLERANCE = 1e-3


def candidates(block_m: int, quick: bool) -> list[Tile]:
    """Tiles of a row count to try."""
    warps, stages = ((4, 8), (2, 3)) if quick else ((2, 4, 8), (1, 2, 3, 4))
    return [Tile(block_m, w, s, n) for n, w, s in itertools.product((64, 32), warps, stages)]


def make_segment(tokens: int, head_dim: int, device: torch.device) -> EncodedKV:
    """A segment as the default codec makes it: one exact token, then packed ones."""
    keys, values = torch.randn((2, KV_HEADS, tokens, head_dim), device=device, dtype=torch.bfloat16)
    exact = DenseKV(keys[:, :1].contiguous(), values[:, :1].contiguous())
    packed_keys = encode.encode_keys_int8(keys[:, 1:], per_tensor=False)
    packed_values = encode.encode_values_lloyd3(values[:, 1:], sign_seed=1, least_squares=True)
    return EncodedKV(0, tokens, KV_HEADS, head_dim, torch.bfloat16, exact, packed_keys, packed_values)


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A call as a graph: launched one by one, kernels of a few microseconds would be timed at Python's speed."""
    call()  # compiles what the capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def time_tiles(
    segments: Sequence[EncodedKV], q: Tensor, choices: Sequence[tuple[Tile, int | None]], rounds: int
) -> list[float | None]:
    """Median milliseconds of each choice of tile and splits; None for one that fails or is wrong.

    Segments are cycled, so that they come from memory and not from the cache.
    """
    scale = q.shape[-1] ** -0.5
    want, _ = attention.attend(q, segments[0], scale, out_dtype=torch.float32)
    graphs: list[torch.cuda.CUDAGraph | None] = []
    for tile, splits in choices:

        def run(tile: Tile = tile, splits: int | None = splits) -> None:
            for segment in segments:
                attention.attend(q, segment, scale, tile=tile, splits=splits)

        graph = None
        try:
            out, _ = attention.attend(q, segments[0], scale, tile=tile, splits=splits, out_dtype=torch.float32)
            error = float((out - want).abs().max() / want.abs().max())
            if error <= TOLERANCE:
                graph = captured(run)
            else:
                print(f"  dropped {tile}: differs from the present tile by {error:.2g}", file=sys.stderr)
        except Exception as problem:  # triton has a class of its own for each way not to fit
            print(f"  dropped {tile}: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in choices]
    for _ in range(rounds):
        for graph, taken in zip(graphs, times, strict=True):
            if graph is not None:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                taken.append(start.elapsed_time(end) / len(segments))
    return [statistics.median(taken) if taken else None for taken in times]


def tune(head_dims: Sequence[int], tokens: int, rounds: int, quick: bool) -> TileTable:
    """The present table with the row of this GPU replaced."""
    device = torch.device("cuda", torch.cuda.current_device())
    architecture, processors = device_properties(device)
    table = read_table(tiles_file())
    bytes_each = tokens * KV_HEADS * max(head_dims) * 11 // 8
    copies = max(2, min(16, 2 * 2**27 // bytes_each))  # more than the largest cache of today
    tiles = dict(table.tiles[architecture])
    for head_dim in head_dims:
        segments = [make_segment(tokens, head_dim, device) for _ in range(copies)]
        best: list[Tile] = []
        per_row = None
        for block_m in BLOCK_M:
            q = torch.randn((block_m // GROUP, KV_HEADS * GROUP, head_dim), device=device, dtype=torch.bfloat16)
            choices = candidates(block_m, quick)
            times = time_tiles(segments, q, [(tile, None) for tile in choices], rounds)
            measured = [(t, tile) for t, tile in zip(times, choices, strict=True) if t is not None]
            if not measured:
                continue
            milliseconds, tile = min(measured, key=lambda pair: pair[0])
            print(f"head dim {head_dim}: {tile}, {milliseconds * 1e3:.0f} us", file=sys.stderr)
            # a larger block must be faster a row than the smaller one, or its rows are better cut in two
            if per_row is None or milliseconds / block_m < per_row:
                best.append(tile)
                per_row = milliseconds / block_m
        if best:
            tiles[head_dim] = tuple(best)
    splits = tune_splits(table.splits[architecture], tiles, head_dims[0], tokens, processors, rounds, device)
    return replace(table, tiles={**table.tiles, architecture: tiles}, splits={**table.splits, architecture: splits})


def tune_splits(
    present: SplitRule,
    tiles: dict[int, tuple[Tile, ...]],
    head_dim: int,
    tokens: int,
    processors: int,
    rounds: int,
    device: torch.device,
) -> SplitRule:
    """The number of programs a processor that decodes fastest."""
    segments = [make_segment(tokens, head_dim, device) for _ in range(8)]
    tile = tiles[head_dim][0]
    q = torch.randn((tile.block_m // GROUP, KV_HEADS * GROUP, head_dim), device=device, dtype=torch.bfloat16)
    rules = [SplitRule(n, present.min_tiles) for n in (1, 2, 3, 4, 6, 8)]
    counts = [rule.splits(-(-tokens // 64), KV_HEADS, processors) for rule in rules]
    times = time_tiles(segments, q, [(tile, count) for count in counts], rounds)
    measured = [(t, rule) for t, rule in zip(times, rules, strict=True) if t is not None]
    return min(measured, key=lambda pair: pair[0])[1] if measured else present


def main() -> None:
    """Tunes and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256], choices=[64, 128, 256])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="fewer candidates")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "tuning needs a GPU: torch.cuda.is_available() is false\n")
    table = tune(options.head_dim, options.tokens, options.rounds, options.quick)
    options.output.write_text(json.dumps(table.to_json(), indent=2) + "\n", encoding="utf-8")
    print(f"wrote {options.output}; set POLYKV_TRITON_TILES={options.output} to use it", file=sys.stderr)


if __name__ == "__main__":
    main()
