"""One compile command for ``polykv_cpu.cpp``: for wheels, for the first use on a machine, and for checks with sanitizers.

The source holds the code of every instruction set and chooses at run time, so no ``-m`` flag belongs here, and
``CXXFLAGS`` is left alone: a ``-march=native`` in it would make a library that crashes on another machine.

This module imports nothing but the standard library and nothing of PolyKV: ``setup.py`` runs it from its file, where torch
may not be installed. By hand: ``python -m polykv_kernels.cpu.build --output FILE [--sanitize]``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = [
    "FLAGS",
    "LIBRARY_SUFFIX",
    "PREBUILT_NAME",
    "SANITIZE_FLAGS",
    "SOURCE",
    "BuildError",
    "CompilerNotFoundError",
    "build_library",
    "compile_command",
    "compiler_version",
    "find_compiler",
    "main",
]

SOURCE = Path(__file__).with_name("polykv_cpu.cpp")
"""The whole of the CPU kernels."""

LIBRARY_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"

PREBUILT_NAME = "_polykv_cpu_prebuilt" + LIBRARY_SUFFIX
"""What a wheel with a compiled library calls it, beside the source. No other library may bear this name."""

# No -ffast-math: it would assume away the NaN and -inf that masks and broken models make.
FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-pthread",
)
SANITIZE_FLAGS: tuple[str, ...] = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")

COMPILE_TIMEOUT = 120.0
"""Seconds after which a compiler is taken to hang."""


class BuildError(Exception):
    """The library could not be compiled; the message says why."""


class CompilerNotFoundError(BuildError):
    """There is no C++ compiler."""


def find_compiler() -> tuple[str, ...]:
    """The C++ compiler, as the first words of its command.

    ``CXX`` decides if it is set: the path of a program, spaces and all, or a command of several words (``ccache g++``).
    Otherwise it is the first of g++, clang++ and c++ on the PATH.

    Raises:
        CompilerNotFoundError: none is there, or ``CXX`` names none.
    """
    chosen = os.environ.get("CXX", "").strip()
    if not chosen:
        for name in ("g++", "clang++", "c++"):
            if (path := shutil.which(name)) is not None:
                return (path,)
        raise CompilerNotFoundError("no C++ compiler was found: none of g++, clang++ and c++ is on the PATH")
    if (path := shutil.which(chosen)) is not None:
        return (path,)
    try:
        words = shlex.split(chosen)
    except ValueError:  # an unmatched quote
        words = []
    if words and (path := shutil.which(words[0])) is not None:
        return (path, *words[1:])
    raise CompilerNotFoundError(f"CXX is {chosen!r}, which is no program that can be run; correct or unset it")


def compiler_version(compiler: Sequence[str]) -> str:
    """The first line of what the compiler says of itself, or a text that says that it did not.

    It goes into the name of a cache folder, so that a new compiler makes a new library.
    """
    try:
        done = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=10, env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no version ({type(error).__name__})"
    return (done.stdout.splitlines() or ["no version"])[0]


def compile_command(
    compiler: Sequence[str],
    source: os.PathLike[str] | str,
    output: os.PathLike[str] | str,
    extra_flags: Sequence[str] = (),
) -> list[str]:
    """The command that compiles the kernels.

    Args:
        compiler: first words of the command, from :func:`find_compiler`.
        source: the C++ file.
        output: the shared library to be written.
        extra_flags: come after the others, so that they win.
    """
    return [*compiler, *FLAGS, *extra_flags, os.fspath(source), "-o", os.fspath(output)]


def build_library(
    output: os.PathLike[str] | str,
    *,
    source: os.PathLike[str] | str = SOURCE,
    compiler: Sequence[str] | None = None,
    extra_flags: Sequence[str] = (),
    timeout: float = COMPILE_TIMEOUT,
) -> Path:
    """Compiles the kernels; the library appears under its name when it is whole, or not at all.

    Args:
        output: the shared library to be written; its folder must exist.
        source: the C++ file.
        compiler: first words of the command; found when None.
        extra_flags: further flags for the compiler.
        timeout: seconds for the compiler.

    Returns:
        The path of the library.

    Raises:
        CompilerNotFoundError: there is no compiler.
        BuildError: it failed, or took too long; the message has its first error line.
        OSError: the folder cannot be written.
    """
    output = Path(output).absolute()
    compiler = compiler or find_compiler()
    # In the same folder, since a rename is atomic within a file system only. The compiler truncates what is there.
    handle, name = tempfile.mkstemp(prefix=f".{output.stem}-", suffix=".tmp", dir=output.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        _run(compile_command(compiler, source, temporary, extra_flags), timeout)
        if not temporary.stat().st_size:
            raise BuildError(f"{compiler[0]} reported success, but wrote no library")
        temporary.chmod(0o755)  # mkstemp gives 0600, and a wheel's library is for everybody
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return output


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}  # error lines are recognised by their English


def _run(command: Sequence[str], timeout: float) -> None:
    with tempfile.TemporaryFile() as log:  # not a pipe, which a grandchild that outlives the compiler would keep open
        try:
            # its own process group, since g++ only drives the programs that do the work
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_environment()
            )
        except OSError as error:
            raise BuildError(f"{command[0]} cannot be run: {error.strerror or error}") from error
        try:
            status = process.wait(timeout)
        except BaseException as error:  # an interrupt too
            _kill_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{command[0]} did not finish in {timeout:.0f} s and was stopped") from None
            raise
        log.seek(0)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    if status:
        ended = f"with status {status}" if status > 0 else f"by signal {-status}"
        said = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it printed nothing")
        raise BuildError(f"{command[0]} ended {ended}: {said}")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the kernels to a file named on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m polykv_kernels.cpu.build", description="Compile PolyKV's CPU kernels."
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the shared library to write")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UndefinedBehaviorSanitizer")
    options = parser.parse_args(arguments)
    try:
        options.output.absolute().parent.mkdir(parents=True, exist_ok=True)
        path = build_library(options.output, extra_flags=SANITIZE_FLAGS if options.sanitize else ())
    except (BuildError, OSError) as error:
        print(f"the CPU kernels were not compiled: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
