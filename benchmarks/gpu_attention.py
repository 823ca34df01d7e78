"""Time of one layer's attention over a packed segment on a GPU, against SDPA over uncompressed copies, in one run.

    python benchmarks/gpu_attention.py --quick [--json FILE]           one shape, about a minute
    python benchmarks/gpu_attention.py [--json FILE]                   all shapes, decode and prefill
    python benchmarks/gpu_attention.py --shapes llama-3-8b --tokens 32768 --agents 1 15 60 --only decode
    POLYKV_TRITON_TILES=tiles.json python benchmarks/gpu_attention.py  tiles from polykv_kernels.triton.autotune

Decode is one query row of each of N agents, prefill one request's chunk of 512 rows. Systems:

* ``ours``: ``polykv_kernels.ops.shared_attention`` over the segment that the ``k8v3`` codec makes, Triton kernels.
* ``stacked``: ONE bfloat16 copy, all rows stacked as the rows of its KV heads, SDPA: the fair baseline. Against it
  stands what compression gains; the rest of what ``independent`` loses is gained by sharing alone.
* ``independent``: N bfloat16 copies in one batch, SDPA with grouped heads: what N private caches cost. Decode only, and
  only if the copies fit.

SDPA runs with every implementation that PyTorch has and that takes the call (FlashAttention, cuDNN, memory-efficient),
and the ``flash_attn`` package's split-KV decode if it is installed; each baseline is the fastest of them, and its name
is printed.

First, results: ours against the float64 reference, the baselines (which hold the decoded segment) against ours. A
wrong one ends the run. Then times: each system cycles through copies of its operands that exceed the L2 cache several
times, as the layers of a model do, in one CUDA graph, so that Python is not in the time; systems take turns, and
medians over the rounds of CUDA events are reported. ``eager`` is a call without a graph, launches included. Bandwidth
is the bytes of keys and values that a system has to read over its time, next to a device-to-device copy (bytes read
and written over time) measured in the same run. Private tails, the merge with them and rotary embeddings are not in
these times.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polykv.codecs import get_codec
from polykv_kernels import EncodedKV, ops, reference
from polykv_kernels import triton as backend

OURS_BOUND = 1e-3 + 2.0**-8
"""``max|error| / max|reference|`` of our bfloat16 output: the kernel's bound and the output's rounding."""
DENSE_BOUND = 3e-2
"""The baselines' keys, values and weights are rounded to bfloat16."""
PREFILL_ROWS = 512
SDPA_KINDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def dense_bytes(self, tokens: int) -> int:
        """Keys and values of one layer in bfloat16."""
        return 2 * 2 * self.num_kv_heads * tokens * self.head_dim


SHAPES = {
    "smollm2-1.7b": Shape(32, 32, 64),
    "llama-3-8b": Shape(32, 8, 128),
    "gemma-3-4b": Shape(8, 4, 256),
}


@dataclass(frozen=True)
class Row:
    phase: str
    shape: str
    tokens: int
    agents: int
    system: str
    variant: str
    bytes_read: int
    graph_us: float
    eager_us: float
    bandwidth_gbs: float
    of_copy: float


@dataclass(frozen=True)
class System:
    """``calls[i]()`` runs on the ``i``-th copy of the operands."""

    name: str
    variant: str
    calls: Sequence[Callable[[], Any]]
    bytes_read: int


# -------------------------------------------------------------------------------------------------------- timing


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def timed(call: Callable[[], Any], count: int) -> float:
    """Microseconds of one of ``count`` parts of a call."""
    start, end = events()
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / count


def capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles and allocates what the capture must not
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def run_all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def measure(systems: Sequence[System], rounds: int) -> dict[str, tuple[float, float]]:
    """``(graph, eager)`` median microseconds of each system; they take turns."""
    graphs: list[tuple[System, torch.cuda.CUDAGraph]] = []
    for system in systems:
        try:
            graphs.append((system, capture(system.calls)))
        except RuntimeError as error:
            print(f"  {system.name} {system.variant}: left out, no CUDA graph of it: {str(error).splitlines()[0]}")
    taken: list[tuple[list[float], list[float]]] = [([], []) for _ in graphs]
    for index in range(rounds + 2):
        for (system, graph), (replayed, eager) in zip(graphs, taken, strict=True):
            in_graph = timed(graph.replay, len(system.calls))
            without = timed(partial(run_all, system.calls), len(system.calls))
            if index >= 2:  # clocks and caches have settled
                replayed.append(in_graph)
                eager.append(without)
    return {
        system.name + system.variant: (statistics.median(replayed), statistics.median(eager))
        for (system, _), (replayed, eager) in zip(graphs, taken, strict=True)
    }


def copy_bandwidth(rounds: int) -> float:
    """GB/s, read and written, of a device-to-device copy much larger than any cache."""
    size = min(2**30, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    microseconds = [timed(lambda: target.copy_(source), 1) for _ in range(rounds + 3)][3:]
    return 2 * size / statistics.median(microseconds) / 1e3


def cache_bytes() -> int:
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)) or 64 * 2**20


# ------------------------------------------------------------------------------------------------------ systems


def make_segment(shape: Shape, tokens: int) -> EncodedKV:
    keys, values = torch.randn((2, shape.num_kv_heads, tokens, shape.head_dim), device="cuda", dtype=torch.bfloat16)
    return get_codec("k8v3").encode(keys, values, torch.arange(tokens))


def our_calls(segments: Sequence[EncodedKV], q: Tensor, scale: float) -> list[Callable[[], Any]]:
    return [partial(ops.shared_attention, q, segment, scale) for segment in segments]


def sdpa_variants(
    q: Tensor, keys: Tensor, values: Tensor, scale: float
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Implementations that take ``q`` ``[B, Hq, rows, D]`` with keys and values ``[B, Hkv, T, D]``."""
    grouped = q.shape[1] != keys.shape[1]
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}

    def sdpa(kind: SDPBackend, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)

    found |= {name: partial(sdpa, kind) for name, kind in SDPA_KINDS.items()}
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

        rows = q.transpose(1, 2)  # [B, rows, Hq, D]

        def split_kv(k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = flash_attn_with_kvcache(rows, k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale)
            return out.transpose(1, 2)

        found["flash_attn split-KV"] = split_kv
    usable = {}
    for name, call in found.items():
        try:
            call(keys, values)
            torch.cuda.synchronize()
        except (RuntimeError, ValueError, TypeError):  # it does not take this device, dtype, head dim or grouping
            continue
        usable[name] = call
    return usable


def relative_error(value: Tensor, want: Tensor) -> float:
    return float((value.double() - want.double()).abs().max() / want.double().abs().max())


def require(what: str, error: float, bound: float) -> None:
    if not error <= bound:
        sys.exit(f"wrong result: {what} is off by {error:.3g}, allowed is {bound:.3g}; nothing was timed")
    print(f"  {what}: error {error:.2e}")


def fits(num_bytes: int) -> bool:
    return num_bytes < 0.7 * torch.cuda.mem_get_info()[0]


def compare(
    phase: str, name: str, shape: Shape, tokens: int, agents: int, rounds: int, copy_gbs: float, copies_limit: int
) -> list[Row]:
    """All systems on one configuration; results first."""
    torch.manual_seed(0)
    decode = phase == "decode"
    rows = agents if decode else PREFILL_ROWS
    print(f"\n{phase}, {name}, {tokens} tokens, {agents} agents")
    cold = 4 * cache_bytes()
    segment = make_segment(shape, tokens)
    segments = [segment]
    while len(segments) * segment.nbytes < cold and len(segments) < copies_limit:
        segments.append(make_segment(shape, tokens))
    q = torch.randn((rows, shape.num_heads, shape.head_dim), device="cuda", dtype=torch.bfloat16)

    out, _ = ops.shared_attention(q, segment, shape.scale)
    want, _ = reference.shared_attention(q.double(), segment, shape.scale, q_positions=None, window=None)
    require("ours against the float64 reference", relative_error(out, want), OURS_BOUND)
    systems = [System("ours", "", our_calls(segments, q, shape.scale), segment.nbytes)]

    dense = shape.dense_bytes(tokens)
    count = max(1, min(copies_limit, -(-cold // dense)))
    decoded_k, decoded_v = ops.decode(segment, torch.bfloat16)
    if fits(count * dense):
        pairs = [(decoded_k[None].clone(), decoded_v[None].clone()) for _ in range(count)]
        # rows of one KV head become plain rows: [1, Hkv, rows * group, D]
        stacked = q.view(rows, shape.num_kv_heads, shape.group, shape.head_dim).permute(1, 0, 2, 3)
        stacked = stacked.reshape(1, shape.num_kv_heads, rows * shape.group, shape.head_dim)
        for variant, call in sdpa_variants(stacked, *pairs[0], shape.scale).items():
            got = call(*pairs[0]).reshape(shape.num_kv_heads, rows, shape.group, shape.head_dim)
            got = got.permute(1, 0, 2, 3).reshape(rows, shape.num_heads, shape.head_dim)
            require(f"stacked ({variant}) against ours", relative_error(got, out), DENSE_BOUND)
            calls = [partial(call, *pair) for pair in pairs]
            systems.append(System("stacked", variant, calls, dense))
    if decode:
        count = max(1, min(copies_limit, -(-cold // (agents * dense))))
        if fits(count * agents * dense):
            spread_k, spread_v = (x[None].expand(agents, -1, -1, -1) for x in (decoded_k, decoded_v))
            pairs = [(spread_k.contiguous(), spread_v.contiguous()) for _ in range(count)]
            batched = q[:, :, None]  # [N, Hq, 1, D]
            for variant, call in sdpa_variants(batched, *pairs[0], shape.scale).items():
                got = call(*pairs[0])[:, :, 0]
                require(f"independent ({variant}) against ours", relative_error(got, out), DENSE_BOUND)
                calls = [partial(call, *pair) for pair in pairs]
                systems.append(System("independent", variant, calls, agents * dense))
        else:
            print(f"  independent: {agents} copies do not fit")

    times = measure(systems, rounds)
    measured = []
    for system in systems:
        if system.name + system.variant not in times:
            continue
        graph_us, eager_us = times[system.name + system.variant]
        bandwidth = system.bytes_read / graph_us / 1e3
        measured.append(
            Row(
                *(phase, name, tokens, agents, system.name, system.variant, system.bytes_read),
                *(graph_us, eager_us, bandwidth, bandwidth / copy_gbs),
            )
        )
    ours = next((row.graph_us for row in measured if row.system == "ours"), None)
    if ours is None:
        sys.exit("ours could not be captured in a CUDA graph")
    print("\n  | system | fastest as | bytes read | graph | eager | bandwidth | of a copy | system / ours |")
    print("  |---|---|---|---|---|---|---|---|")
    for kind in ("ours", "stacked", "independent"):
        found = [row for row in measured if row.system == kind]
        if not found:
            continue
        row = min(found, key=lambda r: r.graph_us)
        print(
            f"  | {kind} | {row.variant or 'Triton'} | {row.bytes_read / 1e6:.1f} MB | {row.graph_us:.1f} us | "
            f"{row.eager_us:.1f} us | {row.bandwidth_gbs:.0f} GB/s | {100 * row.of_copy:.0f} % | "
            f"{row.graph_us / ours:.2f}x |"
        )
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 4, 15, 60])
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--copies", type=int, default=64, help="most copies of the operands that are cycled")
    parser.add_argument("--quick", action="store_true", help="llama-3-8b, 8192 tokens, 1 and 15 agents, 10 rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA or ROCm GPU: torch.cuda.is_available() is false\n")
    reason = backend.unavailable_reason(torch.device("cuda"))
    if reason is not None:
        parser.exit(2, f"this benchmark needs the Triton backend: {reason} (pip install triton)\n")
    if options.quick:
        options.shapes, options.tokens, options.agents, options.rounds = ["llama-3-8b"], [8192], [1, 15], 10

    device = backend.describe()
    copy_gbs = copy_bandwidth(options.rounds)
    print(
        f"{device['device']} ({device['architecture']} tiles), torch {torch.__version__}, triton {device['version']}; "
        f"device-to-device copy {copy_gbs:.0f} GB/s"
    )
    rows: list[Row] = []
    with torch.no_grad(), ops.use_backend("triton"):
        for name in options.shapes:
            for tokens in options.tokens:
                arguments = (name, SHAPES[name], tokens)
                limits = (options.rounds, copy_gbs, options.copies)
                if options.only != "prefill":
                    for agents in options.agents:
                        rows += compare("decode", *arguments, agents, *limits)
                if options.only != "decode":
                    rows += compare("prefill", *arguments, 1, *limits)
                torch.cuda.empty_cache()
    if options.json:
        document = {
            "device": device,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "copy_gbs": copy_gbs,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
