"""The C++ kernels without Python: under sanitizers, and for another processor under an emulator.

``driver/kernel_driver.cpp`` computes cases from a file, each array of which has an allocation of its own, so that
AddressSanitizer sees a read past any of them; the results are compared here with the float64 oracle.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from kernel_cases import (
    BOUNDS,
    FULL,
    HEAD_DIMS,
    RATIOS,
    all_pairs,
    assert_close,
    decoded,
    merge_oracle,
    oracle,
    ragged_oracle,
    random_segment,
    whole_grid,
    windows,
)
from torch import Tensor

from polykv_kernels import EncodedKV, ops, reference
from polykv_kernels.cpu import build
from polykv_kernels.layouts import LLOYD_MAX_3BIT

DRIVER = Path(__file__).parent / "driver" / "kernel_driver.cpp"
FLAGS = [flag for flag in build.FLAGS if flag not in ("-fPIC", "-shared", "-fvisibility=hidden")]
# Memory that is used before it is written reads as NaN, which no result hides.
ADDRESS_OPTIONS = "max_malloc_fill_size=268435456:malloc_fill_byte=255"
THREAD_FLAGS = ("-fsanitize=thread", "-g", "-O1")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BOUND = BOUNDS[torch.float32]
SHARED, RAGGED, MERGE, ENCODE_KEYS, ENCODE_VALUES, LINEAR = range(6)
SIGN_SEED = 7


# ------------------------------------------------------------------------------------------------------ cases


@dataclass
class Case:
    """One call: what the driver reads, and what its results are compared with.

    Attributes:
        parameters: integers, the first of which says the operation.
        arrays: tensors; None is an array without elements.
        outputs: arrays that it writes.
        check: raises AssertionError for outputs, given as bytes, that are wrong.
    """

    parameters: list[int]
    arrays: list[Tensor | None]
    check: Callable[[list[bytes]], None]
    outputs: int = field(default=2)

    def bytes(self) -> list[bytes]:
        parameters = struct.pack(f"<{len(self.parameters)}q", *self.parameters)
        return [parameters, *(b"" if x is None else raw(x) for x in self.arrays)]


def raw(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def tensor(data: bytes, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def attention_check(rows: int, heads: int, head_dim: int, want: tuple[Tensor, Tensor]) -> Callable[..., None]:
    def check(outputs: list[bytes]) -> None:
        out = tensor(outputs[0], torch.float32, rows, heads, head_dim)
        assert_close((out, tensor(outputs[1], torch.float32, rows, heads)), want, BOUND)

    return check


def shared_case(
    segment: EncodedKV, rows: int, ratio: int, *, splits: int = 0, window: bool = False, threads: int = 1
) -> Case:
    heads, head_dim = segment.num_kv_heads, segment.head_dim
    q = torch.randn(rows, heads * ratio, head_dim)
    scale = head_dim**-0.5
    first = visible = None
    if window:
        positions, size = windows(segment.start, segment.num_tokens, rows)
        first = positions - (size - 1 + segment.start)
        visible = torch.arange(segment.num_tokens) >= first[:, None]
    exact, keys, values = segment.exact, segment.keys, segment.values
    per_tensor = keys is not None and keys.per_tensor
    signs = None
    if values is not None and values.sign_seed is not None:
        signs = reference.random_signs(values.sign_seed, head_dim)
    arrays = [
        q,
        torch.tensor([scale, keys.scales.item() if per_tensor else 1.0]),
        None if exact is None else exact.keys,
        None if exact is None else exact.values,
        None if keys is None else keys.codes,
        None if keys is None or per_tensor else keys.scales,
        None if values is None else values.codes,
        None if values is None else values.scales,
        torch.tensor(LLOYD_MAX_3BIT),
        signs,
        first,
    ]
    dtype = DTYPES[exact.keys.dtype] if exact is not None else 0
    packed = 0 if keys is None else keys.num_tokens
    block = reference.hadamard_block(head_dim)
    sizes = [rows, heads * ratio, heads, head_dim, segment.num_exact, dtype, packed, block, splits, threads]
    want = oracle(q, *decoded(segment), scale, visible)
    return Case([SHARED, *sizes], arrays, attention_check(rows, heads * ratio, head_dim, want))


def ragged_case(
    head_dim: int, ratio: int, counts: list[int], more: list[int], dtype: torch.dtype, window: int, **options: int
) -> Case:
    heads = 2
    lengths = [count + extra for count, extra in zip(counts, more, strict=True)]
    keys, values = ([torch.randn(heads, n, head_dim).to(dtype) for n in lengths] for _ in range(2))
    q = torch.randn(sum(counts), heads * ratio, head_dim)
    scale = head_dim**-0.5
    sizes = [sum(counts), heads * ratio, heads, head_dim, len(counts), window, DTYPES[dtype]]
    integers = [torch.tensor(numbers, dtype=torch.int64) for numbers in (counts, lengths)]
    tails = [x for pair in zip(keys, values, strict=True) for x in pair]
    want = ragged_oracle(q, keys, values, counts, scale, window or None)
    return Case(
        [RAGGED, *sizes, options.get("splits", 0), options.get("threads", 1)],
        [q, torch.tensor([scale]), *integers, *tails],
        attention_check(sum(counts), heads * ratio, head_dim, want),
    )


def merge_case(rows: int, head_dim: int, count: int, threads: int = 1) -> Case:
    states = [(torch.randn(rows, 1, head_dim), torch.randn(rows, 1) * 5) for _ in range(count)]
    for i, (_, lse) in enumerate(states):
        lse[i % rows] = -torch.inf
    flat = [x for state in states for x in state]
    check = attention_check(rows, 1, head_dim, merge_oracle(states))
    return Case([MERGE, count, rows, head_dim, threads], flat, check)


def encode_keys_case(
    heads: int, tokens: int, head_dim: int, dtype: torch.dtype, per_tensor: bool, threads: int = 1
) -> Case:
    keys = (torch.randn(heads, tokens, head_dim) * torch.exp(torch.randn(head_dim))).to(dtype)
    keys[..., 3] = 0.0
    want = reference.encode_keys_int8(keys, per_tensor=per_tensor)

    def check(outputs: list[bytes]) -> None:
        assert outputs == [raw(want.codes), raw(want.scales)]

    sizes = [heads, tokens, head_dim, DTYPES[dtype], int(per_tensor), threads]
    return Case([ENCODE_KEYS, *sizes], [keys], check)


def encode_values_case(
    heads: int, tokens: int, head_dim: int, dtype: torch.dtype, signed: bool, threads: int = 1
) -> Case:
    """Codes of the reference but for some on a threshold; ``test_cpu_backend.py`` looks at these closely."""
    values = torch.randn(heads, tokens, head_dim).to(dtype)
    seed = SIGN_SEED if signed else None
    want = reference.encode_values_lloyd3(values, sign_seed=seed, least_squares=signed)

    def check(outputs: list[bytes]) -> None:
        codes = tensor(outputs[0], torch.uint8, heads, tokens, 3 * head_dim // 8)
        scales = tensor(outputs[1], torch.int16, heads, tokens)
        same = (codes == want.codes).all(dim=-1)
        steps = (reference.unpack_3bit(codes).int() - reference.unpack_3bit(want.codes).int()).abs()
        assert steps.max() <= 1
        assert (steps > 0).sum() <= 1 + values.numel() // 10_000
        assert ((scales.int() - want.scales.view(torch.int16)).abs()[same] <= 1).all()

    block = reference.hadamard_block(head_dim)
    sizes = [heads, tokens, head_dim, DTYPES[dtype], block, int(signed), threads]
    signs = reference.random_signs(seed, head_dim) if signed else None
    return Case([ENCODE_VALUES, *sizes], [values, signs, torch.tensor(LLOYD_MAX_3BIT)], check)


def linear_case(rows: int, outputs: int, inputs: int, kind: torch.dtype, bias: bool, threads: int = 1) -> Case:
    x, weight, added = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs) * bias
    scales = None
    if kind == torch.int8:
        packed = reference.quantize_weights_int8(weight)
        stored, scales, meant = packed.codes, packed.scales, reference.dequantize_weights(packed)
    else:
        stored = meant = weight.to(kind)
    want = x.double() @ meant.double().T + added

    def check(outputs_: list[bytes]) -> None:
        got = tensor(outputs_[0], torch.float32, rows, outputs)
        assert (got - want).norm() <= BOUND * (want.norm() + (x.norm(dim=1, keepdim=True) * meant.norm(dim=1)).norm())

    dtype = 3 if kind == torch.int8 else DTYPES[kind]
    sizes = [rows, outputs, inputs, dtype, threads]
    return Case([LINEAR, *sizes], [x, stored, scales, added if bias else None], check, outputs=1)


def half(segment: EncodedKV, dtype: torch.dtype) -> EncodedKV:
    """A segment whose tokens are exact, in half precision."""
    return ops.store_exact(segment.exact.keys.to(dtype), segment.exact.values.to(dtype), segment.start)


@cache
def grid() -> tuple[Case, ...]:
    """Every operation. A full run takes every pair of sizes, rows up to 129 and up to 1,000 tokens."""
    torch.manual_seed(0)
    cases: list[Case] = []
    # Rising head dims first: each needs more working memory, so that its first case meets memory that was never written.
    for i, head_dim in enumerate(range(16, 257, 16) if FULL else (16, 48, 80, 112, 256)):
        short, longer = (random_segment(("paper", "k8v3")[i % 2], 1, n, head_dim, 5) for n in (3, 67))
        cases.append(
            (
                lambda d, s: shared_case(s, 1, 1),
                lambda d, s: shared_case(s, 31, 1),
                lambda d, s: ragged_case(d, 1, [1, 2], [2, 0], torch.bfloat16, 0),
                lambda d, s: encode_values_case(1, 3, d, torch.float32, True),
                lambda d, s: encode_keys_case(1, 3, d, torch.float32, False),
            )[i % 5](head_dim, short)
        )
        for segment in (longer, random_segment("exact", 1, 67, head_dim)):
            cases += [shared_case(segment, 7, 2), shared_case(segment, 31, 1, window=True)]
    rows = (1, 3, 15, 45, 60, 129) if FULL else (1, 4, 33)
    tokens = (1, 63, 64, 65, 1000) if FULL else (1, 65, 130)
    points = all_pairs(HEAD_DIMS, RATIOS, rows, tokens)
    for i, (head_dim, ratio, n, length) in enumerate(points if FULL else points[::3]):
        heads = 1 if ratio > 4 else 2
        for layout in ("exact", "paper", "k8v3") if FULL else (("exact", "paper", "k8v3", "k8v3")[i % 4],):
            segment = random_segment(layout, heads, length, head_dim, 100 * (i % 2))
            for window in (False, True):
                cases.append(shared_case(segment, n, ratio, splits=(0, 1, 3, 8)[i % 4], window=window))
    for n in (*range(1, 15), 95, 96, 97, 193) if FULL else (5, 7, 12, 13, 97):
        cases.append(shared_case(random_segment("k8v3", 1, 70, 48), n, 1))
    for dtype in (torch.float16, torch.bfloat16):
        exact = half(random_segment("exact", 2, 130, 48), dtype)
        cases += [shared_case(exact, n, 3) for n in (1, 20)]
    for dtype, head_dim, window in whole_grid(tuple(DTYPES), (16, 64, 80) if FULL else (48,), (0, 1, 40)):
        cases.append(ragged_case(head_dim, 3, [1, 7, 1, 40], [0, 0, 129, 64], dtype, window, splits=window % 3))
    for n, head_dim, count in whole_grid((1, 65), (16, 80), (1, 2, 5)):
        cases.append(merge_case(n, head_dim, count))
    shapes = ((1, 1, 16), (2, 63, 48), (1, 65, 96), (2, 130, 256)) if FULL else ((1, 1, 16), (2, 65, 48))
    for shape, dtype, flag in itertools.product(shapes, DTYPES, (False, True)):
        cases.append(encode_keys_case(*shape, dtype, flag))
        cases.append(encode_values_case(*shape, dtype, flag))
    sizes = ((1, 1, 1), (3, 5, 63), (6, 4, 64), (7, 9, 65), (13, 6, 1030), (140, 37, 1100))
    for i, ((n, outputs, inputs), kind) in enumerate(itertools.product(sizes, (*DTYPES, torch.int8))):
        cases.append(linear_case(n, outputs, inputs, kind, bool(i % 2)))
    for n in range(1, 20) if FULL else (2, 4, 5, 8):
        cases.append(linear_case(n, 11, 37, torch.int8 if n % 2 else torch.float32, True))
    return tuple(cases)


@cache
def shared_work() -> tuple[Case, ...]:
    """Calls with so much work that four threads share it, each several times."""
    torch.manual_seed(0)
    cases = [
        shared_case(random_segment("k8v3", 2, 1000, 64), 15, 3, threads=4),
        shared_case(random_segment("k8v3", 2, 1000, 64), 129, 3, threads=4, window=True),
        shared_case(random_segment("exact", 2, 1000, 64), 45, 3, threads=4, splits=8),
        ragged_case(64, 3, [60, 1, 1, 5], [600, 90, 300, 0], torch.float32, 0, threads=4),
        merge_case(4096, 128, 4, threads=4),
        encode_keys_case(2, 2100, 128, torch.float32, False, threads=4),
        encode_values_case(2, 520, 128, torch.bfloat16, True, threads=4),
        linear_case(15, 500, 576, torch.float32, True, threads=4),
        linear_case(520, 70, 640, torch.int8, False, threads=4),
    ]
    return tuple(cases * (5 if FULL else 2))


# --------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    """The driver, compiled in one way, and how to run it."""

    command: tuple[str, ...]
    folder: Path

    def _run(self, *arguments: str) -> str:
        # a sanitizer's report ends the program with a status of its own
        env = {**os.environ, "ASAN_OPTIONS": ADDRESS_OPTIONS}
        done = subprocess.run([*self.command, *arguments], capture_output=True, text=True, timeout=500, env=env)
        assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-6000:]}"
        assert not done.stderr, done.stderr[-6000:]
        return done.stdout

    def isas(self) -> list[str]:
        return self._run("isas").split()

    def check(self, cases: tuple[Case, ...], isa: str) -> None:
        """Computes the cases and compares every result."""
        given, results = self.folder / "cases", self.folder / "results"
        with given.open("wb") as file:
            for array in itertools.chain.from_iterable(case.bytes() for case in cases):
                file.write(struct.pack("<q", len(array)) + array)
        self._run("run", str(given), str(results), isa)
        data = memoryview(results.read_bytes())
        for case in cases:
            outputs = []
            for _ in range(case.outputs):
                (size,) = struct.unpack_from("<q", data)
                outputs.append(bytes(data[8 : 8 + size]))
                data = data[8 + size :]
            try:
                case.check(outputs)
            except AssertionError as error:
                raise AssertionError(f"{isa}, case {case.parameters}: {error}") from error
        assert not data, "the driver wrote more than was asked"


def compiled(
    folder: Path, compiler: tuple[str, ...], flags: tuple[str, ...], emulator: tuple[str, ...] = ()
) -> Program:
    """Compiles the driver, or skips the test when the compiler cannot make or the machine not run such programs."""
    probe = folder / "probe.cpp"
    probe.write_text("#include <vector>\nint main() { return std::vector<int>(3).size() == 3 ? 0 : 1; }\n")
    made = subprocess.run(
        [*compiler, *FLAGS, *flags, str(probe), "-o", str(folder / "probe")], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"{compiler[0]} makes no program with {' '.join(flags)}: {first_line(made.stderr)}")
    ran = subprocess.run([*emulator, str(folder / "probe")], capture_output=True, text=True)
    if ran.returncode:
        pytest.skip(f"a program made with {' '.join(flags)} does not run here: {first_line(ran.stderr)}")
    path = folder / "driver"
    made = subprocess.run(
        [*compiler, *FLAGS, *flags, str(DRIVER), "-o", str(path)], capture_output=True, text=True, timeout=400
    )
    assert made.returncode == 0, made.stderr[-6000:]
    return Program((*emulator, str(path)), folder)


def first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "it said nothing")


def native_compiler() -> tuple[str, ...]:
    try:
        return build.find_compiler()
    except build.CompilerNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def address_sanitized(tmp_path_factory: pytest.TempPathFactory) -> Program:
    quick = () if FULL else ("-O0",)  # a third of the time to compile, and it is most of a short run
    return compiled(tmp_path_factory.mktemp("address"), native_compiler(), (*build.SANITIZE_FLAGS, *quick))


@pytest.fixture(scope="module")
def thread_sanitized(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return compiled(tmp_path_factory.mktemp("thread"), native_compiler(), THREAD_FLAGS)


@pytest.fixture(scope="module")
def for_aarch64(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Static, so that the emulator needs no libraries of that machine."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if compiler is None:
        pytest.skip("there is no aarch64-linux-gnu-g++ (Debian, Ubuntu: apt install g++-aarch64-linux-gnu)")
    if emulator is None:
        pytest.skip("there is no qemu-aarch64-static (Debian, Ubuntu: apt install qemu-user-static)")
    return compiled(tmp_path_factory.mktemp("aarch64"), (compiler,), ("-static",), (emulator,))


# ------------------------------------------------------------------------------------------------------ tests


@pytest.mark.slow
@pytest.mark.sanitize
def test_every_operation_is_right_and_clean_under_the_address_and_undefined_behaviour_sanitizers(address_sanitized):
    names = address_sanitized.isas()
    assert names[-1] == "portable"
    for isa in names:
        address_sanitized.check(grid(), isa)


@pytest.mark.slow
@pytest.mark.sanitize
def test_threads_are_clean_under_the_address_sanitizer(address_sanitized):
    address_sanitized.check(shared_work(), address_sanitized.isas()[0])


@pytest.mark.slow
@pytest.mark.sanitize
@pytest.mark.skipif(not FULL, reason="the thread sanitizer's build is made in a full run only (make sanitize)")
def test_threads_share_their_work_without_a_data_race(thread_sanitized):
    for isa in thread_sanitized.isas():
        thread_sanitized.check(shared_work(), isa)


@pytest.mark.slow
@pytest.mark.neon
def test_every_operation_is_right_on_an_emulated_aarch64_processor(for_aarch64):
    names = for_aarch64.isas()
    assert names == ["neon", "portable"]
    for isa in names:
        for_aarch64.check(grid(), isa)


@pytest.mark.slow
@pytest.mark.neon
def test_threads_share_their_work_on_an_emulated_aarch64_processor(for_aarch64):
    for_aarch64.check(shared_work()[: 9 if FULL else 3], "neon")


def test_the_comparison_sees_a_wrong_result(tmp_path):
    """Each kind of case refuses zeros, and results of another case."""
    torch.manual_seed(0)
    cases = [
        shared_case(random_segment("k8v3", 1, 65, 32), 2, 2),
        ragged_case(32, 2, [1, 2], [3, 4], torch.float32, 0),
        merge_case(3, 32, 2),
        encode_keys_case(1, 3, 32, torch.float32, False),
        encode_values_case(1, 3, 32, torch.float32, True),
        linear_case(2, 3, 5, torch.float32, False),
    ]
    for case in cases:
        sizes = {
            SHARED: (512, 16),
            RAGGED: (1536, 48),
            MERGE: (384, 12),
            ENCODE_KEYS: (2048, 64),
            ENCODE_VALUES: (36, 6),
            LINEAR: (24,),
        }
        with pytest.raises(AssertionError):
            case.check([b"\0" * size for size in sizes[case.parameters[0]]])
