"""Instructions that the compiled CPU kernels execute, counted by valgrind: a figure without noise.

    python benchmarks/instructions.py             counts, and the change against benchmarks/instructions.json
    python benchmarks/instructions.py --record    writes that file

Times on a busy machine move by tens of per cent; the number of instructions of the same program on the same input does
not. It is no time: an instruction may wait for memory, and vectors of other widths do more or less in one. Compare counts
of one instruction set and one compiler only. Valgrind knows no AVX-512, so ``avx2`` and ``portable`` are counted.

The program is ``tests/kernels/driver/kernel_driver.cpp``, compiled here with the kernels and the library's own flags and
run as ``kernel_driver bench CASE ISA``: one call of the kernel on one thread. Only what happens inside that call counts,
not how its input is made. Cases have 3 KV heads of 64, 3 query heads each, and 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from polykv_kernels.cpu.build import FLAGS, compiler_version, find_compiler

ROOT = Path(__file__).parents[1]
DRIVER = ROOT / "tests" / "kernels" / "driver" / "kernel_driver.cpp"
RECORD = Path(__file__).with_name("instructions.json")
TOKENS = 1024
ISAS = ("avx2", "portable")


@dataclass(frozen=True)
class Case:
    """What the driver is asked for.

    Attributes:
        function: the C function whose instructions count, with all that it calls.
        rows: query tokens, or 1 where tokens are encoded.
    """

    function: str
    rows: int


CASES = {
    "decode-1": Case("polykv_cpu_shared_attention", 1),
    "decode-15": Case("polykv_cpu_shared_attention", 15),
    "prefill-128": Case("polykv_cpu_shared_attention", 128),
    "encode-keys": Case("polykv_cpu_encode_keys", 1),
    "encode-values": Case("polykv_cpu_encode_values", 1),
}


def build_driver(folder: Path) -> Path:
    """Compiles the driver, which includes the kernels' source, with debug information for valgrind.

    With the library's flags but ``-shared``. Its ``-fPIC`` also keeps the C functions from being inlined into the driver:
    valgrind finds them by name.
    """
    program = folder / "kernel_driver"
    flags = [flag for flag in FLAGS if flag != "-shared"]
    command = [*find_compiler(), *flags, "-g", str(DRIVER), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the driver does not compile:\n{done.stderr}")
    return program


def count(program: Path, case: str, isa: str) -> int:
    """Instructions inside the kernel's call."""
    command = [
        "valgrind",
        "--tool=callgrind",
        f"--toggle-collect={CASES[case].function}",
        f"--callgrind-out-file={program.with_name('callgrind.out')}",
        *(str(program), "bench", case, isa),
    ]
    # symbols resolved at their first use would add the dynamic linker's work to the call
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LD_BIND_NOW": "1"})
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    instructions = int(found[1].replace(",", "")) if found else 0
    if done.returncode or not instructions:
        sys.exit(f"{' '.join(command)}\nfailed or counted nothing (status {done.returncode}):\n{done.stderr[-2000:]}")
    return instructions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--isa", nargs="+", choices=ISAS, default=ISAS)
    parser.add_argument("--record", action="store_true", help=f"write the counts to {RECORD.name}")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("skipped: valgrind is not installed (on Debian and Ubuntu: apt install valgrind)")
        return
    if not DRIVER.is_file():
        print(f"skipped: {DRIVER.relative_to(ROOT)} is not there")
        return

    before = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    counts: dict[str, int] = dict(before.get("instructions", {})) if options.record else {}
    compiler = compiler_version(find_compiler())
    print(f"{compiler}; per (row, token): instructions of one layer, all heads")
    if before and before["compiler"] != compiler:
        print(f"the recorded counts come from another compiler: {before['compiler']}")
    print("\n| case | isa | instructions | per (row, token) | change |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        program = build_driver(Path(folder))
        for case in options.cases:
            for isa in options.isa:
                instructions = counts[f"{case} {isa}"] = count(program, case, isa)
                old = before.get("instructions", {}).get(f"{case} {isa}")
                change = f"{instructions / old - 1:+.2%}" if old else "-"
                each = instructions / (CASES[case].rows * TOKENS)
                print(f"| {case} | {isa} | {instructions:,} | {each:,.1f} | {change} |", flush=True)
    if options.record:
        document = {"compiler": compiler, "instructions": counts}
        RECORD.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
