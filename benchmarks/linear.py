"""Time of all linear layers of a decoder, as a step of the engine calls them, against torch's, in one interleaved run.

    python benchmarks/linear.py --quick                            half a minute
    python benchmarks/linear.py [--json FILE]                      two minutes
    python benchmarks/linear.py --rows 1 15 --threads 2 --systems torch ours
    POLYKV_CPU_ISA=avx2 python benchmarks/linear.py                another instruction set of the compiled kernels

Systems:

* ``torch``: ``torch.nn.functional.linear``.
* ``mkldnn``: the same weights repacked by oneDNN beforehand (a second copy of them).
* ``ours``: ``polykv_kernels.ops.linear`` on torch's own weights; ``ours-bf16`` and ``ours-int8`` on weights in bfloat16 and
  int8, at a half and a good quarter of the memory.

Every layer has weights of its own, so that a pass finds none of them in a cache, as a step does. A number is the median over
the rounds, in each of which every system runs once; the ratio is the median of the rounds' ratios to ``torch``. Where other
programs want the cores, look at the calling thread's own time (``cpu``, the least of the rounds).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polykv_kernels import cpu, ops

SHAPES: dict[str, tuple[int, list[tuple[int, int]], tuple[int, int]]] = {
    # layers, their weights [out, in], and the head's
    "smollm2-135m": (
        30,
        [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)],
        (49152, 576),
    ),
    "tiny": (2, [(64, 64), (96, 64), (64, 96)], (128, 64)),
}
SYSTEMS = ("torch", "mkldnn", "ours", "ours-bf16", "ours-int8")
ROWS = (1, 4, 15, 32, 60, 128, 512)
TOLERANCES = {"mkldnn": 1e-5, "ours": 1e-5, "ours-bf16": 1e-2, "ours-int8": 1e-2}


class WrongResult(Exception):
    """A system computed something else than torch; its times would mean nothing."""


def make_weights(shape: str) -> list[Tensor]:
    layers, each, head = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) * size[1] ** -0.5 for size in each * layers + [head]]


def prepare(system: str, weights: list[Tensor], rows: int) -> Callable[[dict[int, Tensor]], Iterator[Tensor]]:
    """A pass over all layers: from inputs by their width to every layer's output, one after another.

    Outputs are dropped at once, as in a model; kept, they would cost every system page faults of its own.
    """
    calls: list[tuple[int, Callable[[Tensor], Tensor]]] = []
    for weight in weights:
        calls.append((weight.shape[1], layer(system, weight, rows)))

    def run(inputs: dict[int, Tensor]) -> Iterator[Tensor]:
        for width, call in calls:
            yield call(inputs[width])

    return run


def layer(system: str, weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    if system == "torch":
        return lambda x: F.linear(x, weight)
    if system == "mkldnn":
        operators: Any = torch.ops.mkldnn
        packed = operators._reorder_linear_weight(weight, rows)
        return lambda x: operators._linear_pointwise(x, packed, None, "none", [], "")
    if system == "ours":
        return lambda x: ops.linear(x, weight)
    if system == "ours-bf16":
        half = weight.bfloat16()
        return lambda x: ops.linear(x, half)
    codes = ops.quantize_weights_int8(weight)
    return lambda x: ops.linear(x, codes)


def check(system: str, got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        error = float((a - b).norm() / b.norm()) if a.shape == b.shape else float("inf")
        if not error <= TOLERANCES.get(system, 0.0):
            raise WrongResult(f"{system} is off by {error:.2g}")


def measure(
    systems: list[str], weights: list[Tensor], rows: int, threads: list[int], rounds: int
) -> list[dict[str, Any]]:
    inputs = {width: torch.randn(rows, width) for width in {w.shape[1] for w in weights}}
    runs = {system: prepare(system, weights, rows) for system in systems}
    torchs = prepare("torch", weights, rows)
    for system, run in runs.items():
        check(system, run(inputs), torchs(inputs))
    seconds: dict[tuple[int, str], list[float]] = {(n, system): [] for n in threads for system in systems}
    cpu_seconds: dict[tuple[int, str], float] = dict.fromkeys(seconds, float("inf"))
    for _ in range(rounds):
        for (n, system), times in seconds.items():
            torch.set_num_threads(n)
            start, cpu_start = time.perf_counter(), time.thread_time()
            deque(runs[system](inputs), maxlen=0)
            times.append(time.perf_counter() - start)
            cpu_seconds[n, system] = min(cpu_seconds[n, system], time.thread_time() - cpu_start)
    flops = 2 * rows * sum(w.numel() for w in weights)
    found = []
    for (n, system), times in seconds.items():
        base = seconds.get((n, "torch"))
        found.append(
            {
                "rows": rows,
                "threads": n,
                "system": system,
                "ms": 1e3 * median(times),
                "min_ms": 1e3 * min(times),
                "cpu_ms": 1e3 * cpu_seconds[n, system],
                "gflops": flops / median(times) * 1e-9,
                "ratio": median(a / b for a, b in zip(base, times, strict=True)) if base else None,
            }
        )
    return found


def show(found: list[dict[str, Any]]) -> None:
    for row in found:
        ratio = f"{row['ratio']:5.2f}x torch" if row["ratio"] is not None else ""
        print(
            f"rows {row['rows']:4d}  threads {row['threads']}  {row['system']:10s} {row['ms']:8.2f} ms "
            f"(min {row['min_ms']:8.2f}, "
            f"cpu {row['cpu_ms']:8.2f})  {row['gflops']:6.1f} GFLOP/s  {ratio}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=0, help="0: as many as the rows allow")
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [1, 15, 128] if arguments.quick else arguments.rows
    torch.manual_seed(0)
    described = cpu.describe()
    print(f"{arguments.shape}, {described['isa']}, torch {torch.__version__}")
    weights = make_weights(arguments.shape)
    found: list[dict[str, Any]] = []
    threads_before = torch.get_num_threads()
    try:
        with torch.no_grad():
            for n in rows:
                rounds = arguments.rounds or (3 if arguments.quick else max(3, min(15, 240 // n)))
                found += (part := measure(arguments.systems, weights, n, arguments.threads, rounds))
                show(part)
    finally:
        torch.set_num_threads(threads_before)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
