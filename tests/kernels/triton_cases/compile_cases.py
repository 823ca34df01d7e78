"""Compiles kernels for GPUs that need not be there: ``python compile_cases.py`` prints one JSON line a kernel.

A process of its own: one that interprets cannot compile. ``test_triton.py`` starts it. With POLYKV_TEST_FULL=1 every
tile of the shipped table is compiled for every layout, with and without a window and for both dtypes where it could
matter. Whether a tile spills a few bytes depends on the assembler's heuristics, that is on the version of triton.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch

from polykv_kernels.triton import HEAD_DIMS
from polykv_kernels.triton import compile as triton_compile
from polykv_kernels.triton.compile import LAYOUTS, SHARED_LIMITS, TARGETS, CompiledKernel
from polykv_kernels.triton.tiles import TILES_FILE, Tile, read_table

FULL = os.environ.get("POLYKV_TEST_FULL") == "1"

SPILLING = ("sm_80", 128, "mixed", Tile(64, 4, 2), torch.bfloat16, True)
"""A tile that does spill: the check of spills must see it."""

Job = tuple[str, Callable[[], CompiledKernel], bool]
"""A name, the compilation, and whether matrix instructions are expected."""


def attention_jobs() -> Iterator[Job]:
    """Every shipped tile; in a reduced run, for each architecture the smallest tile of 64 and the largest of 128."""
    table = read_table(TILES_FILE)
    for architecture in TARGETS:
        for head_dim in HEAD_DIMS:
            tiles = table.tiles[architecture][head_dim]
            for tile in tiles:
                for layout in LAYOUTS:
                    smallest = head_dim == 64 and tile == tiles[0] and layout == "per_tensor"
                    largest = head_dim == 128 and tile == tiles[-1] and layout == "mixed" and architecture != "sm_100"
                    slow = head_dim == 64 and tile == tiles[-2] and layout == "exact" and architecture == "sm_100"
                    if not (FULL or smallest or largest or slow):
                        continue
                    name = f"attention-{architecture}-{head_dim}-{layout}-" + "-".join(map(str, tile_numbers(tile)))
                    variants = [(name, torch.bfloat16, True)]
                    if FULL:
                        variants.append((f"{name}-no-window", torch.bfloat16, False))
                        if LAYOUTS[layout]["EXACT"]:  # elsewhere the dtype matters to the first load of q alone
                            variants.append((f"{name}-float16-no-window", torch.float16, False))
                    for variant, dtype, window in variants:
                        yield (
                            variant,
                            partial(compile_attention, architecture, head_dim, layout, tile, dtype, window),
                            True,
                        )


def tile_numbers(tile: Tile) -> tuple[int, ...]:
    return tile.block_m, tile.num_warps, tile.num_stages, tile.block_n


def compile_attention(
    architecture: str, head_dim: int, layout: str, tile: Tile, dtype: torch.dtype, window: bool
) -> CompiledKernel:
    return triton_compile.compile_attention(architecture, head_dim, layout, tile, dtype=dtype, window=window)


def other_jobs() -> Iterator[Job]:
    """Encoders and merges for every architecture; in a reduced run, one head dim."""
    for architecture in TARGETS:
        for head_dim in HEAD_DIMS if FULL else (128,):
            target = f"{architecture}-{head_dim}"
            yield f"merge_splits-{target}", partial(triton_compile.compile_merge_splits, architecture, head_dim), False
            yield (
                f"encode_values-{target}",
                partial(triton_compile.compile_encode_values, architecture, head_dim),
                False,
            )
            for per_tensor in (False, True) if FULL else (False,):
                compile_keys = partial(
                    triton_compile.compile_encode_keys, architecture, head_dim, per_tensor=per_tensor
                )
                yield f"encode_keys-{target}-{'per_tensor' if per_tensor else 'per_channel'}", compile_keys, False
            for states in (2, 3, 4) if FULL else (2,):
                compile_merge = partial(triton_compile.compile_merge_states, architecture, head_dim, states)
                yield f"merge_states-{target}-{states}", compile_merge, False


def main() -> None:
    torch.set_num_threads(1)
    spilling: Job = ("spilling", partial(compile_attention, *SPILLING), True)
    for name, compile_it, matrix in (spilling, *other_jobs(), *attention_jobs()):
        started = time.perf_counter()
        try:
            kernel = compile_it()
            result = {
                "architecture": kernel.architecture,
                "registers": kernel.registers,
                "spills": kernel.spills,
                "shared": kernel.shared,
                "limit": SHARED_LIMITS[kernel.architecture],
                "matrix_expected": matrix,
                "matrix": kernel.matrix_instructions,
                "binary_bytes": len(kernel.asm["hsaco" if "hsaco" in kernel.asm else "cubin"]),
            }
        except Exception:
            result = {"failure": traceback.format_exc()}
        print(json.dumps({"name": name, "seconds": time.perf_counter() - started, **result}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
