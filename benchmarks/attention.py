"""Time of one layer's attention over one compressed segment, against SDPA over uncompressed copies, in one run.

    python benchmarks/attention.py --quick [--json FILE]                  under a minute
    python benchmarks/attention.py [--json FILE] [--plot FILE.png]        everything, under a quarter of an hour
    python benchmarks/attention.py --shapes llama-3-8b --tokens 4096 --agents 1 15 --threads 1 --backends cpu
    python benchmarks/attention.py --prefill | --encode | --private       these sections alone
    POLYKV_CPU_ISA=avx2 python benchmarks/attention.py --quick            another instruction set of the compiled kernels

Decode is one query row of each of N agents. Systems:

* ``ours``: ``polykv_kernels.ops.shared_attention``, every backend that is usable here.
* ``stacked``: ONE uncompressed float32 copy, all agents' rows stacked, SDPA: the fair baseline. Against it stands what
  compression gains; the rest of what ``independent`` loses is gained by sharing alone.
* ``independent``: N uncompressed float32 copies in one batch, SDPA: what N private caches cost.
* ``roofline``: the larger of packed bytes / read bandwidth and flops / GEMM peak, both measured in this run.

SDPA can be called in several equivalent forms, none of which copies keys or values; each baseline runs in the form that
is fastest for that configuration, and the forms' own times are printed. Dense copies hold the decoded segment, so every
system computes the same numbers; all are compared with the reference before they are timed, in float64 where that takes
a moment, else in float32.

Systems take turns, round by round, and medians over the rounds are reported. Each cycles through enough copies of its
operands to exceed the last-level cache several times, as the layers of a real model do. Queries and outputs are small
and stay in cache. Rotary embeddings, private tails and the merge are not in these times (``--private`` measures the
last two).

Times are milliseconds a layer. CPU time is that of the whole process (``time.process_time``), on one thread the thread's
own, and moves less than wall time when other programs want the cores. On two threads it says nothing: OpenMP's workers
spin while they wait, which counts, so the scaling is by wall time.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polykv.codecs import CODECS, Codec, get_codec
from polykv_kernels import EncodedKV, ops

DOCUMENT = Path(__file__).parents[1] / "examples" / "data" / "dashwood_inheritance.txt"
TOLERANCE = 1e-5
"""Largest ``max|error| / max|reference|`` that is not taken for a wrong result. Float32 gives about 1e-6."""
PREFILL_ROWS = 128
GOAL_SHAPE, GOAL_TOKENS = "smollm2-135m", 4096


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def dense_bytes(self, tokens: int) -> int:
        """Keys and values of one layer in float32."""
        return 2 * 4 * self.num_kv_heads * tokens * self.head_dim


SHAPES = {
    "smollm2-135m": Shape(9, 3, 64, 30),
    "smollm2-1.7b": Shape(32, 32, 64, 24),
    "llama-3-8b": Shape(32, 8, 128, 32),
}


# ---------------------------------------------------------------------------------------------------- the machine


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_flags() -> str:
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    line = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    have = set(line.split())
    return " ".join(flag for flag in wanted if flag in have) or "none of " + " ".join(wanted)


def last_level_cache_bytes() -> int:
    """Size of the largest cache, or 32 MB where the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * factor)
    return max(sizes) or 32 * 2**20


def available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def backend_isa(name: str) -> str:
    """Instruction set that a backend runs with, where it says so."""
    if name == "reference":
        return f"torch {torch.backends.cpu.get_cpu_capability()}"
    describe = getattr(ops.BACKENDS[name], "describe", None)
    described = describe() if callable(describe) else None
    return str(described.get("isa", "unknown")) if isinstance(described, dict) else "unknown"


def unusable(name: str, head_dim: int = 64) -> str | None:
    """Why a backend cannot run attention and encoding here, or None."""
    try:
        with ops.use_backend(name):
            ops.choose_backend(torch.device("cpu"), torch.float32, head_dim)
            ops.choose_backend(torch.device("cpu"), torch.float32, head_dim, encode=True)
    except ops.BackendError as error:
        return str(error).rsplit("cannot run here: ", 1)[-1]
    return None


@dataclass
class Machine:
    """What one count of threads can do at most: the best that was measured so far, since others may use the cores."""

    read_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    gemm: str = ""

    def roofline(self, num_bytes: int, flops: float) -> float:
        return max(num_bytes / self.read_bytes_per_s, flops / self.flops_per_s)


def best_of(call: Callable[[], object], repeats: int) -> float:
    call()
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def measure_machines(machines: dict[int, Machine], buffer_bytes: int) -> None:
    """Read bandwidth over a buffer much larger than the caches, and the fastest cache-resident float32 product.

    torch has no loop of bare multiply-adds. Its default product may use narrower vectors than the CPU has (MKL on other
    makers' CPUs does), so oneDNN is asked as well; with the slower of the two the roofline would be no bound.
    """
    buffer = torch.ones(buffer_bytes // 4)
    passes: tuple[Callable[[], object], ...] = (
        lambda: buffer.sum(),
        lambda: buffer.amax(),
        lambda: torch.dot(buffer, buffer),
    )
    fewer = Machine()
    for threads, machine in sorted(machines.items()):
        torch.set_num_threads(threads)
        rate = buffer.nbytes / min(best_of(read, 6) for read in passes)
        # more threads can always do what fewer did
        machine.read_bytes_per_s = max(machine.read_bytes_per_s, fewer.read_bytes_per_s, rate)
        if fewer.flops_per_s > machine.flops_per_s:
            machine.flops_per_s, machine.gemm = fewer.flops_per_s, fewer.gemm
        for size in (256, 384, 512, 768):
            a, b = torch.randn(size, size), torch.randn(size, size)
            products: dict[str, Callable[[], object]] = {"mm": partial(torch.mm, a, b)}
            if torch.backends.mkldnn.is_available():
                products["oneDNN"] = partial(torch.ops.mkldnn._linear_pointwise, a, b, None, "none", [], "")
            for name, product in products.items():
                try:
                    rate = 2 * size**3 / best_of(product, 20)
                except (RuntimeError, AttributeError):  # a private op of torch: it may change or not be there
                    continue
                if rate > machine.flops_per_s:
                    machine.flops_per_s, machine.gemm = rate, f"{name} {size}"
        fewer = machine


def describe_machines(machines: dict[int, Machine]) -> str:
    return "\n".join(
        f"{threads} thread{'s' * (threads > 1)}: read {machine.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"GEMM peak {machine.flops_per_s / 1e9:.0f} GFLOP/s ({machine.gemm})"
        for threads, machine in machines.items()
    )


# ------------------------------------------------------------------------------------------------------- timing


@dataclass
class System:
    """Something that is timed: ``call(i)`` runs it on its ``i``-th copy of the operands, with ``backend`` forced."""

    call: Callable[[int], Any]
    copies: int
    backend: str | None = None
    calls_a_turn: int = 1
    _next: int = 0

    def once(self) -> Any:
        """Result on the first copy."""
        with self._backend():
            return self.call(0)

    def _backend(self) -> AbstractContextManager[None]:
        return ops.use_backend(self.backend) if self.backend is not None else nullcontext()

    def turn(self) -> tuple[float, float]:
        """Wall and CPU seconds a call. A turn goes on where the last one stopped, so that operands come back cold."""
        indices = [(self._next + i) % self.copies for i in range(self.calls_a_turn)]
        self._next = (indices[-1] + 1) % self.copies
        call = self.call
        with self._backend():
            wall, cpu = time.perf_counter(), time.process_time()
            for index in indices:
                call(index)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return wall / self.calls_a_turn, cpu / self.calls_a_turn


@dataclass(frozen=True)
class Timing:
    """Medians over the rounds, and all wall time over all CPU time: how much of it the cores did something else."""

    wall: float
    cpu: float
    crowding: float = 1.0

    def by(self, threads: int) -> float:
        """CPU time on one thread, wall time on several."""
        return self.cpu if threads == 1 else self.wall


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds until ``seconds`` are spent, but no fewer than ``least`` and no more than ``most``."""

    seconds: float
    least: int = 3
    most: int = 15
    turn_seconds: float = 0.06


def measure(systems: dict[str, System], effort: Effort) -> dict[str, Timing]:
    """Lets the systems take turns and returns each one's medians over the rounds."""
    cost = 0.0
    for system in systems.values():
        system.calls_a_turn = 1
        system.turn()  # first calls allocate
        call_seconds = max(system.turn()[0], 1e-7)
        system.calls_a_turn = max(1, min(system.copies, 30, int(effort.turn_seconds / call_seconds)))
        cost += call_seconds * system.calls_a_turn
    rounds = max(effort.least, min(effort.most, int(effort.seconds / cost)))
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    pause = 0.002 if torch.get_num_threads() > 1 else 0.0
    for _ in range(rounds):
        for name, system in systems.items():
            if pause:  # workers of the system before must not still be spinning
                time.sleep(pause)
            taken[name].append(system.turn())
    timings: dict[str, Timing] = {}
    for name, turns in taken.items():
        walls, cpus = zip(*turns, strict=True)
        timings[name] = Timing(statistics.median(walls), statistics.median(cpus), sum(walls) / sum(cpus))
    return timings


# ------------------------------------------------------------------------------------------------------ operands


def clone_layer(layer: EncodedKV) -> EncodedKV:
    """The same layer in memory of its own."""
    exact, keys, values = layer.exact, layer.keys, layer.values
    if exact is not None:
        exact = replace(exact, keys=exact.keys.clone(), values=exact.values.clone())
    if keys is not None:
        keys = replace(keys, codes=keys.codes.clone(), scales=keys.scales.clone())
    if values is not None:
        values = replace(values, codes=values.codes.clone(), scales=values.scales.clone())
    return replace(layer, exact=exact, keys=keys, values=values)


class OverBudget(Exception):
    """A configuration would need more memory than allowed."""


@dataclass
class Operands:
    """One layer, packed and dense, in as many copies as it takes to exceed the caches.

    Attributes:
        segments: copies of the packed layer.
        keys: ``[slabs, Hkv, T, D]`` float32, each slab a dense copy; agents take N slabs at a time.
        values: the same.
    """

    shape: Shape
    tokens: int
    segments: list[EncodedKV]
    keys: Tensor
    values: Tensor

    @classmethod
    def make(cls, shape: Shape, tokens: int, codec: Codec, most_agents: int, budget: int, cold: int) -> Operands:
        """Builds the copies.

        Args:
            most_agents: dense copies wanted, if they fit.
            budget: bytes that all of it may take.
            cold: bytes that each system's operands should exceed, if they fit.

        Raises:
            OverBudget: not even one copy fits.
        """
        slab = shape.dense_bytes(tokens)
        # encoding in torch holds several temporaries of the values at once: about ten times their float32 bytes
        if 6 * slab > budget:
            raise OverBudget(f"encoding {tokens} tokens takes up to {6 * slab / 1e9:.1f} GB")
        generator = torch.Generator().manual_seed(0)
        size = (shape.num_kv_heads, tokens, shape.head_dim)
        layer = codec.encode(
            torch.randn(size, generator=generator), torch.randn(size, generator=generator), torch.arange(tokens)
        )
        packed_copies = max(1, min(512, -(-cold // layer.nbytes), budget // 8 // layer.nbytes))
        left = budget - packed_copies * layer.nbytes - 2 * slab  # what is decoded lives until it is copied
        fitting = left // slab
        if fitting < 1:
            raise OverBudget(f"one dense copy of {tokens} tokens takes {slab / 1e9:.1f} GB")
        slabs = min(fitting, max(most_agents, -(-cold // slab)))
        decoded = ops.decode(layer)
        keys, values = (x.expand(slabs, -1, -1, -1).contiguous() for x in decoded)
        return cls(shape, tokens, [clone_layer(layer) for _ in range(packed_copies)], keys, values)

    def queries(self, rows: int) -> Tensor:
        """``[rows, Hq, D]``, twice as long as the keys' unit variance asks for: real attention is not flat."""
        generator = torch.Generator().manual_seed(rows)
        return 2.0 * torch.randn(rows, self.shape.num_heads, self.shape.head_dim, generator=generator)

    def ours(self, q: Tensor, backend: str) -> System:
        segments, scale, attend = self.segments, self.shape.scale, ops.shared_attention
        return System(lambda index: attend(q, segments[index], scale), len(segments), backend)


@dataclass
class Form:
    """One way to have torch compute a baseline; ``restore`` brings its output to ``[rows, Hq, D]``."""

    system: System
    restore: Callable[[Tensor], Tensor]
    sdpa: bool = True

    def output(self) -> Tensor:
        return self.restore(self.system.once())


def _sdpa(q: Tensor, kv: Sequence[tuple[Tensor, Tensor]], gqa: bool = False) -> System:
    attend = F.scaled_dot_product_attention
    if gqa:
        return System(lambda i: attend(q, *kv[i], enable_gqa=True), len(kv))
    return System(lambda i: attend(q, *kv[i]), len(kv))


def _matmul(q: Tensor, kv: Sequence[tuple[Tensor, Tensor]], scale: float) -> System:
    """Not SDPA: the textbook formula, which materialises the scores. For short queries it is often no slower."""

    def call(index: int) -> Tensor:
        keys, values = kv[index]
        return (q @ keys.transpose(-1, -2)).mul_(scale).softmax(-1) @ values

    return System(call, len(kv))


def stacked_forms(operands: Operands, q: Tensor) -> dict[str, Form]:
    """One dense copy, all rows. ``grouped`` stacks the rows of a KV head's group: ``[1, Hkv, rows * G, D]``."""
    shape, rows = operands.shape, q.shape[0]
    kv = [(k[None], v[None]) for k, v in zip(operands.keys, operands.values, strict=True)]
    per_head = (shape.num_kv_heads, rows, shape.group, shape.head_dim)
    grouped = q.view(rows, shape.num_kv_heads, shape.group, shape.head_dim).transpose(0, 1)
    grouped = grouped.reshape(1, shape.num_kv_heads, rows * shape.group, shape.head_dim)

    def ungroup(out: Tensor) -> Tensor:
        return out.reshape(per_head).transpose(0, 1).reshape(q.shape)

    forms = {"grouped": Form(_sdpa(grouped, kv), ungroup)}
    if shape.group > 1:
        forms["gqa"] = Form(
            _sdpa(q.transpose(0, 1)[None].contiguous(), kv, gqa=True), lambda out: out[0].transpose(0, 1)
        )
    forms["matmul"] = Form(_matmul(grouped, kv, shape.scale), ungroup, sdpa=False)
    return forms


def independent_forms(operands: Operands, q: Tensor) -> dict[str, Form]:
    """A dense copy for each row, in one batch. ``grouped`` takes the group's heads for rows of one head, ``expanded``
    gives the group stride 0: neither copies."""
    shape, rows = operands.shape, q.shape[0]
    heads, group, dim = shape.num_kv_heads, shape.group, shape.head_dim
    copies = operands.keys.shape[0] // rows
    kv = [(operands.keys[i * rows : (i + 1) * rows], operands.values[i * rows : (i + 1) * rows]) for i in range(copies)]

    def restore(out: Tensor) -> Tensor:
        return out.reshape(q.shape)

    grouped = q.view(rows, heads, group, dim)
    forms = {"grouped": Form(_sdpa(grouped, kv), restore)}
    if group > 1:
        wide = [
            tuple(x.reshape(rows * heads, 1, operands.tokens, dim).expand(-1, group, -1, -1) for x in pair)
            for pair in kv
        ]
        forms["gqa"] = Form(_sdpa(q[:, :, None], kv, gqa=True), restore)
        forms["expanded"] = Form(_sdpa(q.reshape(rows * heads, group, 1, dim), [(k, v) for k, v in wide]), restore)
    forms["matmul"] = Form(_matmul(grouped, kv, shape.scale), restore, sdpa=False)
    return forms


# ---------------------------------------------------------------------------------------------------- correctness


class WrongResult(Exception):
    """A system's numbers differ from the reference; its time would mean nothing."""


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).abs().max() / reference.double().abs().max())


def check(what: str, value: Tensor, reference: Tensor) -> None:
    error = relative_error(value, reference) if value.shape == reference.shape else math.inf
    if not error <= TOLERANCE:  # NaN is wrong too
        raise WrongResult(f"{what}: relative error {error:.2g} against the reference, allowed {TOLERANCE:.0e}")


def oracle(operands: Operands, q: Tensor) -> tuple[Tensor, Tensor]:
    """The reference in float64 where that takes a moment, else in float32."""
    small = operands.tokens * q.shape[0] * q.shape[1] <= 2**22
    with ops.use_backend("reference"):
        return ops.shared_attention(q.double() if small else q, operands.segments[0], operands.shape.scale)


# ------------------------------------------------------------------------------------------------------- decoding


@dataclass
class Point:
    """One configuration's times."""

    shape: str
    tokens: int
    agents: int
    threads: int
    packed_bytes: int
    ours: dict[str, Timing]
    stacked: Timing
    independent: Timing | None
    flops: float
    machine: Machine
    forms: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def roofline(self) -> float:
        return self.machine.roofline(self.packed_bytes, self.flops)

    def baseline(self, name: str) -> float | None:
        timing = self.stacked if name == "stacked" else self.independent
        return timing.by(self.threads) if timing is not None else None

    def row(self, backend: str) -> dict[str, Any]:
        ours, independent = self.ours[backend], self.independent
        return {
            "shape": self.shape,
            "tokens": self.tokens,
            "agents": self.agents,
            "threads": self.threads,
            "backend": backend,
            "ours_s": ours.wall,
            "stacked_s": self.stacked.wall,
            "independent_s": independent.wall if independent is not None else None,
            "roofline_s": self.roofline,
            "ours_cpu_s": ours.cpu,
            "stacked_cpu_s": self.stacked.cpu,
            "independent_cpu_s": independent.cpu if independent is not None else None,
            "isa": backend_isa(backend),
            "packed_bytes": self.packed_bytes,
            "forms_s": self.forms,
        }


def fastest_form(forms: dict[str, Form], want: Tensor, what: str, threads: int) -> tuple[str, dict[str, float]]:
    """Checks every form, times each a few times and names the fastest that is SDPA, with all the times."""
    for name, form in forms.items():
        check(f"{what} ({name})", form.output(), want)
    short = Effort(seconds=0.1, least=3, most=5, turn_seconds=0.01)
    times = measure({name: form.system for name, form in forms.items()}, short)
    seconds = {name: timing.by(threads) for name, timing in times.items()}
    return min((name for name in forms if forms[name].sdpa), key=seconds.__getitem__), seconds


def measure_point(
    name: str,
    operands: Operands,
    q: Tensor,
    want: tuple[Tensor, Tensor],
    threads: int,
    backends: Sequence[str],
    machine: Machine,
    effort: Effort,
) -> Point:
    """Checks one configuration against ``want`` and times it."""
    torch.set_num_threads(threads)
    shape, agents = operands.shape, q.shape[0]
    where = f"{name}, {operands.tokens} tokens, {agents} agents"
    want_out, want_lse = want
    systems: dict[str, System] = {}
    for backend in backends:
        systems[backend] = operands.ours(q, backend)
        out, lse = systems[backend].once()
        check(f"backend {backend}, {where}, out", out, want_out)
        check(f"backend {backend}, {where}, lse", lse, want_lse)
    forms, chosen = {}, {}
    candidates = {"stacked": stacked_forms(operands, q)}
    if operands.keys.shape[0] >= agents:
        candidates["independent"] = independent_forms(operands, q)
    for baseline, options in candidates.items():
        chosen[baseline], forms[baseline] = fastest_form(options, want_out, f"{baseline}, {where}", threads)
        systems[baseline] = options[chosen[baseline]].system
    timings = measure(systems, effort)
    flops = 4.0 * agents * shape.num_heads * shape.head_dim * operands.tokens
    return Point(
        name,
        operands.tokens,
        agents,
        threads,
        operands.segments[0].nbytes,
        {backend: timings[backend] for backend in backends},
        timings["stacked"],
        timings.get("independent"),
        flops,
        machine,
        forms,
    )


def ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.3f}" if seconds < 0.01 else f"{1e3 * seconds:.1f}"


def ratio(above: float | None, below: float) -> str:
    return "-" if above is None else f"{above / below:.2f}x"


DECODE_HEADER = (
    "| shape | tokens | N | threads | time | backend | ours | stacked | independent | roofline | stacked / ours "
    "| independent / ours | ours / roofline |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def print_point(point: Point) -> None:
    stacked, independent = point.baseline("stacked"), point.baseline("independent")
    for backend, timing in point.ours.items():
        ours = timing.by(point.threads)
        print(
            f"| {point.shape} | {point.tokens} | {point.agents} | {point.threads} "
            f"| {'CPU' if point.threads == 1 else 'wall'} | `{backend}` | {ms(ours)} | {ms(stacked)} "
            f"| {ms(independent)} | {ms(point.roofline)} | {ratio(stacked, ours)} | {ratio(independent, ours)} "
            f"| {ratio(ours, point.roofline)} |",
            flush=True,
        )


def print_forms(points: Iterable[Point]) -> None:
    """Which form each baseline took, for one thread."""
    print(
        "\nForms of the baselines, ms (short probes on one thread; the fastest SDPA form is the one in the table above;"
    )
    print("`matmul` is no SDPA and is not in the ratios):\n")
    names = ("grouped", "gqa", "expanded", "matmul")
    print("| shape | tokens | N | baseline | " + " | ".join(names) + " |")
    print("|---|---|---|---|" + "---|" * len(names))
    for point in points:
        if point.threads == 1:
            for baseline, seconds in point.forms.items():
                times = " | ".join(ms(seconds.get(name)) for name in names)
                print(f"| {point.shape} | {point.tokens} | {point.agents} | {baseline} | {times} |")


def backends_for(options: argparse.Namespace, name: str) -> list[str]:
    """The backends that a shape is decoded with."""
    backends = [b for b in options.backends if unusable(b, SHAPES[name].head_dim) is None]
    if options.chosen_by_default and name != GOAL_SHAPE and "cpu" in backends:
        return ["cpu"]  # the reference is several times slower, and would take most of the run
    return backends


def run_decode(options: argparse.Namespace, machines: dict[int, Machine], deadline: float) -> list[Point]:
    points: list[Point] = []
    notes: list[str] = []
    late: list[str] = []
    print(f"\n## Decode, codec {options.codec}, ms a layer\n\n{DECODE_HEADER}")
    codec = get_codec(options.codec)
    for name in options.shapes:
        shape = SHAPES[name]
        backends = backends_for(options, name)
        for tokens in options.tokens:
            if time.monotonic() > deadline:
                late.append(f"{name} {tokens}")
                continue
            measure_machines(machines, options.buffer_bytes)  # again: the first time others may have been busy
            torch.set_num_threads(max(options.threads))
            try:
                operands = Operands.make(shape, tokens, codec, max(options.agents), options.budget, options.cold)
            except OverBudget as error:
                notes.append(f"{name}, {tokens} tokens: skipped, {error}, more than --memory allows")
                continue
            for agents in options.agents:
                if time.monotonic() > deadline:
                    late.append(f"{name} {tokens} N = {agents}")
                    continue
                torch.set_num_threads(max(options.threads))
                q = operands.queries(agents)
                want = oracle(operands, q)
                if operands.keys.shape[0] < agents:
                    size = agents * shape.dense_bytes(tokens) / 1e9
                    notes.append(
                        f"{name}, {tokens} tokens, N = {agents}: independent skipped, {agents} copies take "
                        f"{size:.1f} GB of {options.budget / 1e9:.1f} GB allowed for everything"
                    )
                for threads in options.threads:
                    point = measure_point(name, operands, q, want, threads, backends, machines[threads], options.effort)
                    points.append(point)
                    print_point(point)
            del operands
            gc.collect()
    if late:
        notes.append(f"skipped, --minutes were over: {', '.join(late)}")
    if notes:
        print("\n" + "\n".join(f"- {note}" for note in notes))
    return points


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope of log y over log x: 1 means proportional."""
    lx, ly = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mx, my = statistics.fmean(lx), statistics.fmean(ly)
    return sum((a - mx) * (b - my) for a, b in zip(lx, ly, strict=True)) / sum((a - mx) ** 2 for a in lx)


def curves(points: Iterable[Point], threads: int) -> dict[str, dict[tuple[str, int, int], float]]:
    """Seconds by system, then by (shape, tokens, agents)."""
    found: dict[str, dict[tuple[str, int, int], float]] = {}
    for point in points:
        if point.threads != threads:
            continue
        key = (point.shape, point.tokens, point.agents)
        for backend, timing in point.ours.items():
            found.setdefault(f"ours, {backend}", {})[key] = timing.by(threads)
        for name in ("stacked", "independent"):
            seconds = point.baseline(name)
            if seconds is not None:
                found.setdefault(name, {})[key] = seconds
        found.setdefault("roofline", {})[key] = point.roofline
    return found


def print_growth(points: Sequence[Point], threads: int) -> None:
    systems = curves(points, threads)
    shapes = dict.fromkeys(p.shape for p in points)
    tokens, agents = sorted({p.tokens for p in points}), sorted({p.agents for p in points})
    kind = "CPU time" if threads == 1 else "wall time"
    print(f"\n## Growth of the cost, {threads} thread{'s' * (threads > 1)}, {kind}")
    if len(tokens) > 1:
        print(f"\nOver tokens ({', '.join(map(str, tokens))}): log-log slope, 1 means proportional.\n")
        print("| shape | system | " + " | ".join(f"N = {n}" for n in agents) + " |\n|---|---|" + "---|" * len(agents))
        for shape in shapes:
            for system, seconds in systems.items():
                cells = []
                for n in agents:
                    have = [(t, seconds[shape, t, n]) for t in tokens if (shape, t, n) in seconds]
                    cells.append(f"{slope(*zip(*have, strict=True)):.2f}" if len(have) > 1 else "-")
                if set(cells) != {"-"}:
                    print(f"| {shape} | {system} | " + " | ".join(cells) + " |")
    if len(agents) > 1:
        first = agents[0]
        print(f"\nOver agents: time(N) / time({first}).\n")
        print("| shape | tokens | system | " + " | ".join(f"N = {n}" for n in agents) + " |")
        print("|---|---|---|" + "---|" * len(agents))
        for shape in shapes:
            for t in tokens:
                for system, seconds in systems.items():
                    base = seconds.get((shape, t, first))
                    if base is not None:
                        cells = [ratio(seconds.get((shape, t, n)), base) for n in agents]
                        print(f"| {shape} | {t} | {system} | " + " | ".join(cells) + " |")


# ---------------------------------------------------------------------------------------- prefill, encode, private


def run_prefill(options: argparse.Namespace, machines: dict[int, Machine]) -> dict[tuple[str, int, str], float]:
    """A chunk of 128 rows of one question over the segment; returns SDPA / ours by (shape, threads, backend)."""
    found: dict[tuple[str, int, str], float] = {}
    print(f"\n## Prefill, {PREFILL_ROWS} rows over {GOAL_TOKENS} tokens, ms a layer\n")
    print("The segment precedes every row, so there is no causal mask; SDPA reads one uncompressed copy.\n")
    print(
        "| shape | threads | time | backend | ours | SDPA grouped | SDPA gqa | roofline | SDPA / ours | ours / roofline |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.shapes:
        shape = SHAPES[name]
        backends = [b for b in options.backends if unusable(b, shape.head_dim) is None]
        torch.set_num_threads(max(options.threads))
        try:
            operands = Operands.make(shape, GOAL_TOKENS, get_codec(options.codec), 1, options.budget, options.cold)
        except OverBudget as error:
            print(f"\n{name}: skipped, {error}\n")
            continue
        q = operands.queries(PREFILL_ROWS)
        want_out, want_lse = oracle(operands, q)
        flops = 4.0 * PREFILL_ROWS * shape.num_heads * shape.head_dim * GOAL_TOKENS
        for threads in options.threads:
            torch.set_num_threads(threads)
            systems = {backend: operands.ours(q, backend) for backend in backends}
            for backend, system in systems.items():
                out, lse = system.once()
                check(f"backend {backend}, {name}, prefill, out", out, want_out)
                check(f"backend {backend}, {name}, prefill, lse", lse, want_lse)
            forms = {key: form for key, form in stacked_forms(operands, q).items() if form.sdpa}
            for key, form in forms.items():
                check(f"SDPA {key}, {name}, prefill", form.output(), want_out)
            timings = measure(systems | {key: form.system for key, form in forms.items()}, options.effort)
            seconds = {key: timing.by(threads) for key, timing in timings.items()}
            sdpa = min(seconds[key] for key in forms)
            roofline = machines[threads].roofline(operands.segments[0].nbytes, flops)
            for backend in backends:
                found[name, threads, backend] = sdpa / seconds[backend]
                print(
                    f"| {name} | {threads} | {'CPU' if threads == 1 else 'wall'} | `{backend}` "
                    f"| {ms(seconds[backend])} | {ms(seconds['grouped'])} | {ms(seconds.get('gqa'))} | {ms(roofline)} "
                    f"| {ratio(sdpa, seconds[backend])} | {ratio(seconds[backend], roofline)} |",
                    flush=True,
                )
    return found


def run_encode(options: argparse.Namespace) -> dict[str, float]:
    """Encoding every layer of a real context, against the prefill that made it; returns the share by backend."""
    from transformers import DynamicCache

    from polykv import load_model
    from polykv.pool.segment import PREFILL_CHUNK_TOKENS

    torch.set_num_threads(1)
    model, tokenizer = load_model(GOAL_SHAPE)
    ids = torch.tensor(tokenizer.encode(DOCUMENT.read_text(encoding="utf-8"))[:GOAL_TOKENS])
    cache = DynamicCache()
    wall, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(ids), PREFILL_CHUNK_TOKENS):
        chunk = ids[None, first : first + PREFILL_CHUNK_TOKENS]
        positions = torch.arange(first, first + chunk.shape[1])[None]
        model(input_ids=chunk, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
    prefill = Timing(time.perf_counter() - wall, time.process_time() - cpu)
    layers: list[Any] = list(cache.layers)
    codec, positions = get_codec(options.codec), torch.arange(len(ids))

    def encode(index: int) -> EncodedKV:
        return codec.encode(layers[index].keys[0], layers[index].values[0], positions)

    systems = {backend: System(encode, len(layers), backend) for backend in options.backends}
    # An element between two levels may fall either way, so backends may differ in single codes, but not in how far
    # what they store is from what they were given.
    given = torch.stack([layers[0].keys[0], layers[0].values[0]])
    with ops.use_backend("reference"):
        want = (torch.stack(ops.decode(encode(0))) - given).square().mean(dim=(1, 2, 3))
    for backend, system in systems.items():
        error = (torch.stack(ops.decode(system.once())) - given).square().mean(dim=(1, 2, 3))
        if not torch.allclose(error, want, rtol=0.01, atol=0.0):
            raise WrongResult(f"encoding, backend {backend}: squared error {error.tolist()}, reference {want.tolist()}")
    timings = measure(systems, replace(options.effort, turn_seconds=1.0, most=5))
    print(f"\n## Encode, {GOAL_SHAPE}, {len(ids)} tokens, {len(layers)} layers, {options.codec}, one thread\n")
    print(f"Prefill of these tokens, once: {prefill.cpu:.2f} s of CPU time, {prefill.wall:.2f} s of wall time.\n")
    print("| backend | encode, CPU | encode, wall | of the prefill's CPU time |\n|---|---|---|---|")
    shares: dict[str, float] = {}
    for backend, timing in timings.items():
        shares[backend] = len(layers) * timing.cpu / prefill.cpu
        print(
            f"| `{backend}` | {len(layers) * timing.cpu:.3f} s | {len(layers) * timing.wall:.3f} s "
            f"| {shares[backend]:.1%} |"
        )
    return shares


def run_private(options: argparse.Namespace) -> None:
    """The exact part of a step: N private tails, and merging their attention with the segment's."""
    print("\n## Private tails of 64 to 256 tokens, and the merge, microseconds a layer\n")
    columns = [f"`{backend}`" for backend in options.backends]
    faster = ["reference / cpu"] if {"reference", "cpu"} <= set(options.backends) else []
    print("| op | shape | N | threads | time | " + " | ".join(columns + faster) + " |")
    print("|---|---|---|---|---|" + "---|" * len(columns + faster))
    for name in options.shapes:
        shape = SHAPES[name]
        for agents in options.agents:
            lengths = [64 + 192 * i // max(1, agents - 1) for i in range(agents)] if agents > 1 else [160]
            copies = max(1, min(64, options.cold // shape.dense_bytes(sum(lengths))))
            tails = [
                [[torch.randn(shape.num_kv_heads, n, shape.head_dim) for n in lengths] for _ in range(2)]
                for _ in range(copies)
            ]
            q = torch.randn(agents, shape.num_heads, shape.head_dim)
            states = [
                [(torch.randn_like(q), torch.randn(agents, shape.num_heads)) for _ in range(2)] for _ in range(copies)
            ]

            def ragged(index: int, *, q: Tensor = q, tails: Any = tails, shape: Shape = shape) -> Any:
                keys, values = tails[index]
                return ops.ragged_attention(q, keys, values, [1] * q.shape[0], shape.scale)

            def merge(index: int, *, states: Any = states) -> Any:
                return ops.merge_attention_states(*states[index])

            for op, function in (("ragged_attention", ragged), ("merge_attention_states", merge)):
                for threads in options.threads:
                    torch.set_num_threads(threads)
                    want = System(function, copies, "reference").once()
                    systems = {b: System(function, copies, b) for b in options.backends}
                    for backend, system in systems.items():
                        for part, got, expected in zip(("out", "lse"), system.once(), want, strict=True):
                            check(f"{op}, {part}, backend {backend}, {name}, {agents} agents", got, expected)
                    timings = measure(systems, replace(options.effort, seconds=0.3, turn_seconds=0.02))
                    seconds = [timings[b].by(threads) for b in options.backends]
                    cells = [f"{1e6 * s:.0f}" for s in seconds]
                    if faster:
                        by_name = dict(zip(options.backends, seconds, strict=True))
                        cells.append(ratio(by_name["reference"], by_name["cpu"]))
                    kind = "CPU" if threads == 1 else "wall"
                    print(f"| {op} | {name} | {agents} | {threads} | {kind} | " + " | ".join(cells) + " |", flush=True)


# --------------------------------------------------------------------------------------------------------- goals


def print_goals(
    backend: str,
    points: Sequence[Point],
    prefill: dict[tuple[str, int, str], float],
    encode: dict[str, float],
) -> None:
    """Every stated goal beside what this run measured. Missing one is a finding, not an error."""
    print(f"\n## Goals, {GOAL_SHAPE}, {GOAL_TOKENS} tokens, CPU time on one thread, backend `{backend}`\n")
    print("| what | goal | measured | |\n|---|---|---|---|")

    def line(what: str, goal: float, measured: float | None, *, at_most: bool = False) -> None:
        wanted = f"<= {goal:.0%}" if at_most else f">= {goal:g}x"
        if measured is None:
            print(f"| {what} | {wanted} | not measured | - |")
            return
        met = measured <= goal if at_most else measured >= goal
        shown = f"{measured:.1%}" if at_most else f"{measured:.2f}x"
        print(f"| {what} | {wanted} | {shown} | {'met' if met else 'not met'} |")

    def find(agents: int, threads: int) -> Point | None:
        wanted = (GOAL_SHAPE, GOAL_TOKENS, agents, threads)
        return next(
            (p for p in points if (p.shape, p.tokens, p.agents, p.threads) == wanted and backend in p.ours), None
        )

    for agents, baseline, goal in (
        (15, "independent", 10.0),
        (15, "stacked", 2.2),
        (4, "stacked", 2.5),
        (1, "stacked", 3.5),
    ):
        point = find(agents, 1)
        seconds = point.baseline(baseline) if point is not None else None
        measured = seconds / point.ours[backend].cpu if point is not None and seconds is not None else None
        line(f"decode, N = {agents}, {baseline} / ours", goal, measured)
    line(f"prefill, {PREFILL_ROWS} rows, SDPA / ours", 1.7, prefill.get((GOAL_SHAPE, 1, backend)))
    line("encode, share of the prefill", 0.05, encode.get(backend), at_most=True)

    scaling: list[str] = []
    for agents in (1, 4, 15):
        one, two = find(agents, 1), find(agents, 2)
        if one is None or two is None:
            continue
        parts = [
            f"ours {one.ours[backend].wall / two.ours[backend].wall:.2f}x",
            f"stacked {one.stacked.wall / two.stacked.wall:.2f}x",
        ]
        if one.independent is not None and two.independent is not None:
            parts.append(f"independent {one.independent.wall / two.independent.wall:.2f}x")
        scaling.append(f"- N = {agents}: " + ", ".join(parts))
    if scaling:
        print("\nFrom one thread to two, wall time (no goal; at most 2x):\n\n" + "\n".join(scaling))


def plot(path: Path, points: Sequence[Point], codec: str) -> None:
    """Time over tokens and over agents for one shape, on one thread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    threads = min(p.threads for p in points)
    shape = next(iter(p.shape for p in points))
    systems = curves([p for p in points if p.shape == shape], threads)
    agents = sorted({p.agents for p in points})
    tokens = sorted({p.tokens for p in points})
    at_agents = 15 if 15 in agents else agents[-1]
    at_tokens = GOAL_TOKENS if GOAL_TOKENS in tokens else tokens[-1]
    # Okabe & Ito's palette, and a marker of its own for each line: no line is told apart by colour alone
    styles: dict[str, dict[str, Any]] = {
        "independent": {"color": "#D55E00", "marker": "s", "label": "N uncompressed copies, SDPA"},
        "stacked": {"color": "#009E73", "marker": "^", "label": "one uncompressed copy, stacked SDPA"},
        "ours, reference": {"color": "#56B4E9", "marker": "D", "label": f"{codec}, torch reference"},
        "ours, cpu": {"color": "#0072B2", "marker": "o", "label": f"{codec}, compiled"},
        "roofline": {"color": "#000000", "linestyle": "--", "label": "roofline of the packed segment"},
    }
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for axis, label, over in ((axes[0], "tokens in the segment", "tokens"), (axes[1], "agents", "agents")):
        for name, style in styles.items():
            seconds = systems.get(name, {})
            if over == "tokens":
                line = [(t, seconds[shape, t, at_agents]) for t in tokens if (shape, t, at_agents) in seconds]
            else:
                line = [(n, seconds[shape, at_tokens, n]) for n in agents if (shape, at_tokens, n) in seconds]
            if line:
                axis.plot([x for x, _ in line], [1e3 * y for _, y in line], linewidth=2, markersize=6, **style)
        ticks = tokens if over == "tokens" else agents
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [f"{t:,}" for t in ticks])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:g}"))
        axis.set_xlabel(label)
        axis.grid(True, which="major", color="#DDDDDD")
        axis.set_axisbelow(True)
    axes[0].set_title(f"{at_agents} agents")
    axes[1].set_title(f"{at_tokens:,} tokens")
    kind = "CPU time" if threads == 1 else "wall time"
    axes[0].set_ylabel(f"{kind} a layer, ms")
    figure.suptitle(f"Decode attention, {shape} shape, {threads} thread{'s' * (threads > 1)}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------- main


def print_environment(options: argparse.Namespace, machines: dict[int, Machine]) -> None:
    print(f"CPU: {cpu_model()}, {os.cpu_count()} cores, flags: {cpu_flags()}")
    print(
        f"last-level cache: {last_level_cache_bytes() / 2**20:.0f} MB; operands cycle through {options.cold / 1e6:.0f} MB"
    )
    print(f"torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), Python {platform.python_version()}")
    for name in options.backends:
        print(f"backend {name}: {backend_isa(name)}")
    spin = os.environ.get("GOMP_SPINCOUNT", "not set (libgomp's default)")
    print(f"GOMP_SPINCOUNT: {spin}")
    if hasattr(os, "getloadavg"):
        print(f"load average at the start: {os.getloadavg()[0]:.2f}")
    print(describe_machines(machines))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the 135M shape at 1,024 and 4,096 tokens, N = 1, 4, 15")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--agents", type=int, nargs="+")
    parser.add_argument("--threads", type=int, nargs="+")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=("cpu", "reference"),
        help="default: all that are usable here; for the larger shapes the compiled one alone",
    )
    parser.add_argument("--codec", choices=CODECS, default="k8v3")
    parser.add_argument("--rounds", type=int, help="default: as many as fit, from 3 to 15")
    parser.add_argument("--memory", type=float, default=8.0, metavar="GB", help="most that operands may take")
    parser.add_argument("--minutes", type=float, default=13.0, help="no configuration is begun after that long")
    for section in ("prefill", "encode", "private"):
        parser.add_argument(f"--{section}", action="store_true", help="this section: with --quick too, else alone")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args(arguments)

    quick = options.quick
    options.shapes = options.shapes or ([GOAL_SHAPE] if quick else list(SHAPES))
    options.tokens = options.tokens or ([1024, 4096] if quick else [1024, 4096, 16384, 32768])
    options.agents = options.agents or ([1, 4, 15] if quick else [1, 4, 15, 32])
    options.threads = options.threads or [1, 2]
    if min(*options.tokens, *options.agents, *options.threads, 2) < 1:
        parser.error("--tokens, --agents and --threads must be positive")
    for name in options.backends or ():
        if reason := unusable(name):
            parser.error(f"backend {name} cannot run here: {reason}")
    options.chosen_by_default = not options.backends
    if options.chosen_by_default:
        options.backends = []
        for name in ("cpu", "reference"):
            reason = unusable(name)
            if reason is None:
                options.backends.append(name)
            else:
                print(f"backend {name} is left out: {reason}")
    options.sections = {s for s in ("prefill", "encode", "private") if getattr(options, s)}
    if quick or not options.sections:
        options.sections |= {"decode"} if quick else {"decode", "prefill", "encode", "private"}
    if (options.json or options.plot) and "decode" not in options.sections:
        parser.error("--json and --plot hold decode times; leave out the section, or add --quick")

    options.effort = Effort(seconds=1.2 if quick else 2.0)
    if options.rounds:
        options.effort = replace(options.effort, least=options.rounds, most=options.rounds)
    options.budget = int(options.memory * 1e9)
    available = available_bytes()
    if available is not None and options.budget > 0.6 * available:
        options.budget = int(0.6 * available)
        print(
            f"memory for operands: {options.budget / 1e9:.1f} GB, 60 % of what is free, instead of {options.memory:g} GB"
        )
    options.buffer_bytes = max(2**26, min(8 * last_level_cache_bytes(), options.budget // 4))
    options.cold = min(3 * last_level_cache_bytes(), options.budget // 8)
    return options


@torch.no_grad()
def main() -> None:
    started = time.monotonic()
    options = parse()
    torch.manual_seed(0)
    machines = {threads: Machine() for threads in options.threads}
    measure_machines(machines, options.buffer_bytes)
    print_environment(options, machines)
    points: list[Point] = []
    prefill: dict[tuple[str, int, str], float] = {}
    encode: dict[str, float] = {}
    try:
        if "prefill" in options.sections:
            prefill = run_prefill(options, machines)
        if "encode" in options.sections:
            encode = run_encode(options)
        if "private" in options.sections:
            run_private(options)
        if "decode" in options.sections:
            points = run_decode(options, machines, started + 60 * options.minutes)
    except WrongResult as error:
        sys.exit(f"wrong result, nothing after it was timed: {error}")
    if points:
        print(f"\nBest rates of the whole run, which all that follows is based on:\n\n{describe_machines(machines)}")
        print_forms(points)
        print_growth(points, min(options.threads))
    print_goals("cpu" if "cpu" in options.backends else options.backends[0], points, prefill, encode)
    if options.json:
        options.json.write_text(json.dumps([p.row(b) for p in points for b in p.ours], indent=2) + "\n")
    if options.plot and points:
        plot(options.plot, points, options.codec)
    crowding = [p.stacked.crowding for p in points if p.threads == 1]
    if crowding:
        print(
            f"\nOn one thread all wall time was {statistics.fmean(crowding):.2f}x of all CPU time (`stacked`). An idle "
            "machine gives 1.00x; from about 1.05x on, times on two threads say little: a part waits for a thread that waits."
        )
    load = f", load average {os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else ""
    print(f"\n{time.monotonic() - started:.0f} s in all{load}")


if __name__ == "__main__":
    main()
