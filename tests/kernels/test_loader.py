"""Finding, compiling and loading the CPU library: whatever dies, lacks or lies, the outcome is a library or a reason.

Each case runs in processes of its own, on a copy of the two modules beside a tiny source, without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from polykv_kernels.cpu import build
from polykv_kernels.cpu.loader import ABI_VERSION

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="there are no compiled kernels for Windows"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

SOURCE = """
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int polykv_cpu_abi_version() { return %s; }
EXPORT const char* polykv_cpu_isa() { return "stub"; }
"""
LOAD = """
import json
from polykv_kernels.cpu import build, loader
{before}
try:
    found = loader.load()
    assert loader.load() is found
    result = dict(origin=found.origin, path=str(found.path), notes=found.notes, isa=found.cdll.polykv_cpu_isa().decode())
except loader.LibraryUnavailable as error:
    result = dict(unavailable=str(error))
{after}
print(json.dumps(result))
"""
# Notes its runs, and sleeps in the first of them while the file `hang` is there.
COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "counting compiler 1.0"; exit 0;; esac
echo $$ >> "{folder}/runs"
if mv "{folder}/hang" "{folder}/hung" 2>/dev/null; then exec sleep 300; fi
exec g++ "$@"
"""


# What a person is told who has not set up logging.
EXPECTED = ("compiling PolyKV's CPU kernels with ", "the cache folder cannot be used (")


class Machine:
    """A package, a compiler, a cache folder and an environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cpu = folder / "site" / "polykv_kernels" / "cpu"
        self.cpu.mkdir(parents=True)
        for package in (self.cpu, self.cpu.parent):
            (package / "__init__.py").touch()
        for name in ("build.py", "loader.py"):
            shutil.copy(build.SOURCE.with_name(name), self.cpu)
        self.source(SOURCE % ABI_VERSION)
        (folder / "tmp").mkdir()
        compiler = folder / "compiler"
        compiler.write_text(COMPILER.format(folder=folder))
        compiler.chmod(0o755)
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(folder / "site"),
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "POLYKV_CACHE_DIR": str(folder / "cache"),
            "CXX": str(compiler),
        }

    def source(self, text: str) -> None:
        (self.cpu / "polykv_cpu.cpp").write_text(text)

    def make_library(self, path: Path, abi: int = ABI_VERSION) -> Path:
        source = self.folder / "other.cpp"
        source.write_text(SOURCE % abi)
        return build.build_library(path, source=source, compiler=["g++"])

    def start(self, before: str = "", after: str = "", **environment: str) -> subprocess.Popen[str]:
        code = LOAD.format(before=before, after=after)
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def load(self, *, before: str = "", after: str = "", **environment: str) -> dict[str, Any]:
        return result(self.start(before, after, **environment))

    @property
    def runs(self) -> list[int]:
        runs = self.folder / "runs"
        return [int(line) for line in runs.read_text().split()] if runs.exists() else []

    def cached(self) -> Path:
        (path,) = (self.folder / "cache" / "kernels").glob("*/polykv_cpu*" + build.LIBRARY_SUFFIX)
        return path

    def left_over(self) -> list[Path]:
        return [*self.folder.glob("cache/kernels/*/.*.tmp"), *(self.folder / "tmp").iterdir()]


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert [line for line in err.splitlines() if not line.startswith(EXPECTED)] == []
    return json.loads(out)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        # a zombie has ended, whoever may collect it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
    return subprocess.run(["ps", "-p", str(pid)], capture_output=True).returncode == 0


@pytest.fixture
def machine(tmp_path: Path) -> Any:
    made = Machine(tmp_path)
    yield made
    for pid in made.runs:  # a compiler that outlived the process that a test killed
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_the_first_process_compiles_and_the_next_one_finds_it(machine: Machine) -> None:
    first, second = machine.load(), machine.load()
    assert first == second
    assert (first["origin"], first["isa"], first["notes"]) == ("compiled", "stub", [])
    assert Path(first["path"]) == machine.cached()
    assert len(machine.runs) == 1
    assert machine.left_over() == []
    for folder in (machine.cached().parent, machine.cached().parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_processes_that_start_together_compile_once(machine: Machine) -> None:
    processes = [machine.start() for _ in range(4)]
    assert [result(process)["origin"] for process in processes] == ["compiled"] * 4
    assert len(machine.runs) == 1


def test_threads_share_one_library(machine: Machine) -> None:
    before = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    assert len(set(map(id, pool.map(lambda _: loader.load(), range(8))))) == 1
"""
    assert machine.load(before=before, POLYKV_CACHE_DIR=str(machine.folder / "compiler"))["origin"] == "compiled"
    assert len(machine.runs) == 1


def test_a_process_forked_while_a_thread_loads_can_load(machine: Machine) -> None:
    before = """
import os, signal
loader._outcome_lock.acquire()  # as the thread that loads does
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if loader.load() else 1)
assert os.waitpid(child, 0)[1] == 0
loader._outcome_lock.release()
"""
    assert machine.load(before=before)["origin"] == "compiled"


def test_who_waits_for_a_process_that_is_killed_takes_over(machine: Machine) -> None:
    (machine.folder / "hang").touch()
    killed = machine.start()
    wait_until(lambda: (machine.folder / "hung").exists())
    impatient = machine.load(before="loader.LOCK_TIMEOUT = 0.2")
    assert "another process has been compiling" in impatient["unavailable"]
    waiting = machine.start()
    time.sleep(0.5)
    assert waiting.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert result(waiting)["origin"] == "compiled"
    assert len(machine.runs) == 2
    assert machine.left_over() == []


def test_a_compiler_that_hangs_is_stopped_with_all_that_it_started(machine: Machine, tmp_path: Path) -> None:
    script = tmp_path / "hanging"
    script.write_text(f'#!/bin/sh\nsleep 300 &\necho $! >> "{tmp_path}/runs"\nwait\n')
    script.chmod(0o755)
    with pytest.raises(build.BuildError, match="did not finish in 1 s and was stopped"):
        build.build_library(
            tmp_path / "out.so", source=machine.cpu / "polykv_cpu.cpp", compiler=[str(script)], timeout=0.6
        )
    (pid,) = machine.runs
    wait_until(lambda: not alive(pid))
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("damage", ["empty", "truncated", "text", "text-named-by-its-digest", "other-abi"])
def test_a_damaged_library_is_compiled_again(machine: Machine, damage: str) -> None:
    machine.load()
    path = machine.cached()
    whole = path.read_bytes()
    if damage == "other-abi":
        machine.make_library(path, abi=7)
    else:
        path.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2]}.get(damage, b"no library"))
    if damage in ("text-named-by-its-digest", "other-abi"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        path.rename(path.with_name(f"polykv_cpu-{digest}{path.suffix}"))
    for _ in range(2):
        found = machine.load()
        assert (found["origin"], found["notes"], found["isa"]) == ("compiled", [], "stub")
    assert len(machine.runs) == 2
    assert machine.cached().read_bytes() == whole


def test_another_source_makes_another_library(machine: Machine) -> None:
    machine.load()
    machine.source((SOURCE % ABI_VERSION).replace("stub", "new"))
    assert machine.load()["isa"] == "new"
    assert len(list((machine.folder / "cache" / "kernels").iterdir())) == 2


def test_without_a_compiler_the_reason_says_what_to_install(machine: Machine) -> None:
    del machine.environment["CXX"]
    reason = machine.load(PATH=str(machine.folder / "tmp"))["unavailable"]
    assert "no C++ compiler" in reason
    assert "apt install g++" in reason
    assert "wheel" in reason


def test_a_compiler_that_fails_is_quoted_and_not_asked_twice(machine: Machine) -> None:
    machine.source("void f() {}\n#error no luck today\n")
    after = "try: loader.load()\nexcept loader.LibraryUnavailable as error: assert str(error) == result['unavailable']"
    reason = machine.load(after=after)["unavailable"]
    assert "do not compile" in reason
    assert "error: #error no luck today" in reason
    assert len(machine.runs) == 1
    assert machine.left_over() == []


@pytest.mark.parametrize("cause", ["unwritable", "open-to-others"])
def test_a_cache_folder_that_will_not_do_is_passed_over(machine: Machine, cause: str) -> None:
    cache = machine.folder / "cache"
    if cause == "unwritable":
        cache.write_text("a file, so that even root cannot make a folder in it")
    else:
        (cache / "kernels").mkdir(parents=True)
        (cache / "kernels").chmod(0o777)
    found = machine.load()
    assert found["origin"] == "compiled"
    assert "cache folder cannot be used" in found["notes"][0]
    assert cause == "unwritable" or "another user" in found["notes"][0]
    assert not Path(found["path"]).is_relative_to(cache)
    assert machine.left_over() == []


def test_with_no_folder_to_write_to_there_is_a_reason(machine: Machine) -> None:
    (machine.folder / "cache").touch()
    before = "def refuse(**_): raise PermissionError('read-only')\nloader.tempfile.mkdtemp = refuse"
    reason = machine.load(before=before)["unavailable"]
    assert "neither into the cache folder nor into a temporary one (read-only)" in reason
    assert "POLYKV_CACHE_DIR" in reason


def test_a_prebuilt_library_needs_no_compiler(machine: Machine) -> None:
    path = machine.make_library(machine.cpu / build.PREBUILT_NAME)
    found = machine.load(CXX="/nowhere/g++")
    assert (found["origin"], found["path"], found["notes"]) == ("prebuilt", str(path), [])


@pytest.mark.parametrize("fault", ["other-abi", "another-machine", "not-ours"])
def test_a_prebuilt_library_that_does_not_fit_is_passed_over(machine: Machine, fault: str) -> None:
    path = machine.cpu / build.PREBUILT_NAME
    if fault == "other-abi":
        machine.make_library(path, abi=ABI_VERSION + 1)
    elif fault == "another-machine":
        content = bytearray(machine.make_library(path).read_bytes())
        content[18:20] = b"\xf3\x00"  # e_machine of ELF: RISC-V
        path.write_bytes(content)
    else:
        source = machine.folder / "foreign.cpp"
        source.write_text('extern "C" __attribute__((visibility("default"))) int something() { return 0; }')
        build.build_library(path, source=source, compiler=["g++"])
    found = machine.load()
    assert found["origin"] == "compiled"
    assert str(path) in found["notes"][0]
    reason = machine.load(CXX="/nowhere/g++", POLYKV_CACHE_DIR=str(machine.folder / "empty"))["unavailable"]
    assert "CXX is '/nowhere/g++'" in reason
    assert found["notes"][0] in reason
    if fault == "other-abi":
        assert f"ABI version {ABI_VERSION + 1}, and this PolyKV needs {ABI_VERSION}" in reason


def test_a_compiler_may_have_spaces_in_its_path_or_be_a_command(machine: Machine) -> None:
    folder = machine.folder / "my tools"
    folder.mkdir()
    spaced = shutil.copy(machine.folder / "compiler", folder / "c plus plus")
    assert machine.load(CXX=str(spaced))["origin"] == "compiled"
    assert machine.load(CXX=f"env {machine.folder / 'compiler'} -DSOME='a b'")["origin"] == "compiled"
    assert len(machine.runs) == 2


@pytest.mark.parametrize("kind", ["missing", "text", "other-abi"])
def test_a_library_given_by_hand_is_used_or_refused(machine: Machine, kind: str) -> None:
    path = machine.folder / "given.so"
    if kind == "text":
        path.write_text("no library")
    elif kind == "other-abi":
        machine.make_library(path, abi=ABI_VERSION + 1)
    reason = machine.load(POLYKV_CPU_LIBRARY=str(path))["unavailable"]
    assert f"POLYKV_CPU_LIBRARY is '{path}', which cannot be used" in reason
    assert machine.runs == []
    machine.make_library(path)
    found = machine.load(POLYKV_CPU_LIBRARY=str(path))
    assert (found["origin"], found["path"]) == ("POLYKV_CPU_LIBRARY", str(path))
    assert machine.runs == []


def test_windows_is_told_what_runs_there(machine: Machine) -> None:
    before = "loader.sys.platform = 'win32'; loader.platform.system = lambda: 'Windows'"
    reason = machine.load(before=before)["unavailable"]
    assert "no compiled CPU kernels for Windows" in reason
    assert "torch reference" in reason
    assert machine.runs == []


def test_the_build_runs_as_a_program(machine: Machine) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-m", "polykv_kernels.cpu.build", *arguments]
        return subprocess.run(command, env=machine.environment, capture_output=True, text=True, timeout=60)

    (machine.cpu / "__init__.py").write_text("from polykv_kernels.cpu import loader\n")
    output = machine.folder / "new" / "kernels.so"
    done = run("--output", str(output))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(output), "")
    assert output.stat().st_mode & 0o777 == 0o755
    machine.source("#error broken\n")
    done = run("--output", str(output), "--sanitize")
    assert done.returncode == 1
    assert "error: #error broken" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_serves_every_machine_and_keeps_nan() -> None:
    command = build.compile_command(["c++"], "in.cpp", "out.so", ["-Dlast"])
    assert command[0] == "c++"
    assert command[-4:] == ["-Dlast", "in.cpp", "-o", "out.so"]
    assert not [flag for flag in command if flag.startswith("-m") or "fast-math" in flag or "finite" in flag]


def test_a_library_is_found_again_when_its_compiler_is_gone(machine: Machine) -> None:
    first = machine.load()
    for environment in ({"CXX": str(machine.folder / "gone")}, {"CXX": "", "PATH": ""}):
        assert machine.load(**environment) == first
    assert len(machine.runs) == 1
    machine.source(SOURCE % ABI_VERSION + "// changed")
    assert "unavailable" in machine.load(CXX="", PATH="")


@pytest.mark.parametrize("left", [0, 1, 63, 64, 1000, -1])
def test_a_truncated_library_is_refused_and_does_not_kill_the_process(machine: Machine, left: int) -> None:
    """The dynamic linker maps a file without looking at its size, and the process would die of a bus error."""
    path = machine.make_library(machine.folder / "own.so")
    content = path.read_bytes()
    path.write_bytes(content[:left])
    found = machine.load(POLYKV_CPU_LIBRARY=str(path))
    assert str(path) in found["unavailable"]


def test_a_tilde_in_the_cache_folder_is_the_home_folder(machine: Machine) -> None:
    found = machine.load(POLYKV_CACHE_DIR="~/elsewhere")
    assert Path(found["path"]).is_relative_to(machine.folder / "elsewhere")
