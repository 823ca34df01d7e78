"""Compiles the kernels for a named GPU without one: registers, spills, shared memory and assembly.

Triton carries its own assembler and needs neither a driver nor a device to compile. So tests can hold every shipped
tile to the limits of its architecture on any machine. Nothing here runs at run time.

    python -m polykv_kernels.triton.compile --architecture sm_90 --head-dim 128
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from polykv_kernels.triton import attention, encode, merge
from polykv_kernels.triton.tiles import TILES_FILE, Tile, read_table

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

SHARED_LIMITS = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Shared memory of one program, in bytes. The A100 has 163 KB, but the table's sm_80 serves 8.6, 8.9 and 12.x too."""

LAYOUTS: dict[str, dict[str, bool]] = {
    "mixed": {"EXACT": True, "PACKED": True, "PER_TENSOR": False},
    "per_channel": {"EXACT": False, "PACKED": True, "PER_TENSOR": False},
    "per_tensor": {"EXACT": False, "PACKED": True, "PER_TENSOR": True},
    "exact": {"EXACT": True, "PACKED": False, "PER_TENSOR": False},
}
"""Constants of the attention kernel for the forms a segment can have."""

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

MATRIX_INSTRUCTIONS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync", "v_mfma")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What the compiler made.

    Attributes:
        name: the kernel's name.
        architecture: a key of ``TARGETS``.
        registers: registers a thread (AMD: vector registers, accumulation registers included).
        spills: bytes of stack and local memory a thread on NVIDIA, spilled vector registers on AMD. 0 if all fits.
        shared: bytes of shared memory a program.
        asm: the stages by name, such as ``ptx`` and ``cubin``, or ``amdgcn`` and ``hsaco``.
    """

    name: str
    architecture: str
    registers: int
    spills: int
    shared: int
    asm: Mapping[str, Any] = field(repr=False)

    @property
    def matrix_instructions(self) -> tuple[str, ...]:
        """Kinds of matrix instructions in the assembly."""
        text = self.asm["amdgcn"] if "amdgcn" in self.asm else self.asm["ptx"]
        return tuple(name for name in MATRIX_INSTRUCTIONS if name in text)


def compile_kernel(
    kernel: Any,
    architecture: str,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    unaligned: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 2,
) -> CompiledKernel:
    """Compiles one kernel.

    Args:
        kernel: a ``triton.jit`` function.
        architecture: a key of ``TARGETS``.
        types: Triton's type of each argument that is no constant, such as ``*fp16``; ``i32`` if not given.
        constants: values of the ``tl.constexpr`` arguments.
        unaligned: integer arguments that are not multiples of 16, besides those that are never specialised on.
        num_warps: warps a program.
        num_stages: depth of the software pipeline.
    """
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    plain = {param.name for param in kernel.params if param.do_not_specialize} | set(unaligned)
    # what the launcher would find out about the arguments of an ordinary call
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name not in plain)
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=TARGETS[architecture], options=options)
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, spills = _amd_number(text, "vgpr_count"), _amd_number(text, "vgpr_spill_count")
    else:
        registers, spills = _nvidia_usage(compiled.asm["cubin"])
    return CompiledKernel(kernel.fn.__name__, architecture, registers, spills, compiled.metadata.shared, compiled.asm)


def _amd_number(text: str, name: str) -> int:
    found = re.search(rf"^\s*\.{name}:\s*(\d+)", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no .{name} in the assembly")
    return int(found.group(1))


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """``(registers, bytes of stack and local memory)``: spilled registers lie on the stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"no resource usage in {done.stdout!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def compile_attention(
    architecture: str,
    head_dim: int,
    layout: str,
    tile: Tile,
    *,
    dtype: torch.dtype = torch.bfloat16,
    window: bool = True,
) -> CompiledKernel:
    """Compiles the attention kernel; with a window by default, which costs registers.

    Args:
        architecture: a key of ``TARGETS``.
        head_dim: 64, 128 or 256.
        layout: a key of ``LAYOUTS``.
        tile: rows, warps and stages.
        dtype: dtype of queries and of exact keys and values.
        window: whether a sliding window masks.
    """
    element = f"*{_TYPES[dtype]}"
    form = LAYOUTS[layout]
    types = {
        "q_ptr": element,
        "positions_ptr": "*i64" if window else element,
        "exact_keys_ptr": element,
        "exact_values_ptr": element,
        "key_codes_ptr": "*i8",
        "key_scales_ptr": "*fp32" if form["PER_TENSOR"] else "*fp16",
        "value_codes_ptr": "*i32",
        "value_scales_ptr": "*fp16",
        "partial_ptr": "*fp32",
        "stats_ptr": "*fp32",
        "scale_log2": "fp32",
    }
    return compile_kernel(
        attention.attention_kernel,
        architecture,
        types,
        {
            "D": head_dim,
            "BM": tile.block_m,
            "BN": tile.block_n,
            "BE": attention.exact_tile_size(form["PACKED"], head_dim, dtype.itemsize),
            "WINDOW": window,
            **form,
        },
        # the number of tokens is arbitrary
        unaligned=("stride_value_codes_head", "stride_value_scales_head"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def compile_merge_splits(
    architecture: str, head_dim: int, *, dtype: torch.dtype = torch.bfloat16, signs: bool = True
) -> CompiledKernel:
    """Compiles the kernel that joins splits and undoes the rotation."""
    types = dict.fromkeys(("partial_ptr", "stats_ptr", "signs_ptr", "lse_ptr"), "*fp32")
    types["out_ptr"] = f"*{_TYPES[dtype]}"
    constants = {"D": head_dim, "LOG2_D": head_dim.bit_length() - 1, "BR": merge.MERGE_ROWS, "SIGNS": signs}
    return compile_kernel(merge.merge_splits_kernel, architecture, types, constants)


def compile_merge_states(
    architecture: str, head_dim: int, states: int, *, dtype: torch.dtype = torch.bfloat16
) -> CompiledKernel:
    """Compiles the kernel that joins states."""
    types = dict.fromkeys(("lse0_ptr", "lse1_ptr", "lse2_ptr", "lse3_ptr", "lse_ptr"), "*fp32")
    types |= dict.fromkeys(("out0_ptr", "out1_ptr", "out2_ptr", "out3_ptr", "out_ptr"), f"*{_TYPES[dtype]}")
    constants = {
        "D": head_dim,
        "BD": triton.next_power_of_2(head_dim),
        "BR": merge.MERGE_ROWS,
        "STATES": states,
    }
    return compile_kernel(merge.merge_states_kernel, architecture, types, constants)


def compile_encode_keys(
    architecture: str, head_dim: int, *, per_tensor: bool, dtype: torch.dtype = torch.bfloat16
) -> CompiledKernel:
    """Compiles the encoder of keys."""
    element = f"*{_TYPES[dtype]}"
    types = {
        "keys_ptr": element,
        "largest_ptr": element,
        "codes_ptr": "*i8",
        "scales_ptr": "*fp32" if per_tensor else "*fp16",
    }
    constants = {"D": head_dim, "BC": encode.CHANNELS, "PER_TENSOR": per_tensor}
    return compile_kernel(encode.encode_keys_kernel, architecture, types, constants)


def compile_encode_values(
    architecture: str,
    head_dim: int,
    *,
    signs: bool = True,
    least_squares: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> CompiledKernel:
    """Compiles the encoder of values."""
    types = {"values_ptr": f"*{_TYPES[dtype]}", "signs_ptr": "*fp32", "codes_ptr": "*u8", "scales_ptr": "*fp16"}
    constants = {
        "D": head_dim,
        "LOG2_D": head_dim.bit_length() - 1,
        "BT": encode.TOKENS,
        "SIGNS": signs,
        "LEAST_SQUARES": least_squares,
    }
    return compile_kernel(encode.encode_values_kernel, architecture, types, constants)


def main() -> None:
    """Prints a table of the shipped tiles of an architecture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", nargs="+", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--layout", nargs="+", choices=sorted(LAYOUTS), default=["mixed"])
    parser.add_argument("--tiles", type=Path, default=TILES_FILE, help="a tiles file (default: the shipped one)")
    options = parser.parse_args()
    table = read_table(options.tiles)
    print(
        "| architecture | head dim | layout | rows, warps, stages | registers | spills | shared | matrix instructions |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for architecture in options.architecture:
        for head_dim in options.head_dim:
            for layout in options.layout:
                for tile in table.tiles[architecture][head_dim]:
                    k = compile_attention(architecture, head_dim, layout, tile)
                    print(
                        f"| {architecture} | {head_dim} | {layout} | {tile.block_m}, {tile.num_warps}, "
                        f"{tile.num_stages} | {k.registers} | {k.spills} | {k.shared / 1024:.1f} KB | "
                        f"{', '.join(k.matrix_instructions)} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
