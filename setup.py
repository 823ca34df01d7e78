"""What pyproject.toml cannot say: a wheel with the CPU kernels compiled, when ``POLYKV_BUILD_NATIVE=1`` asks for one.

Without it the wheel is pure (``py3-none-any``): it carries the C++ source, which is compiled at the first use. With it the
wheel carries the library too. That is loaded by ctypes and knows nothing of Python, so the tag is ``py3-none-<platform>``
and one wheel serves every Python; ``auditwheel repair`` names the systems that it runs on.
"""

import importlib.util
import os
import tempfile
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_py import build_py

CPU = Path("kernels", "polykv_kernels", "cpu")
NATIVE = os.environ.get("POLYKV_BUILD_NATIVE", "") not in ("", "0")

# Removed when the program ends. A build/ in the source folder would hand what this build compiled or copied to the next.
BUILD_FOLDER = tempfile.TemporaryDirectory(prefix="polykv-build-")


def build_module() -> ModuleType:
    """``polykv_kernels.cpu.build`` from its file: importing the package needs torch, which a build has not got."""
    spec = importlib.util.spec_from_file_location(
        "polykv_cpu_build", Path(__file__).resolve().parent / CPU / "build.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FreshBuild(build):
    """Builds in a folder of its own."""

    def initialize_options(self) -> None:
        """Sets the default of --build-base."""
        super().initialize_options()
        self.build_base = BUILD_FOLDER.name


class BuildWithLibrary(build_py):
    """Adds the compiled library to the package's files; an editable install runs from the source and has none."""

    def run(self) -> None:
        """Copies the modules, then compiles."""
        super().run()
        if NATIVE and not self.editable_mode:
            module = build_module()
            output = Path(self.build_lib, "polykv_kernels", "cpu", module.PREBUILT_NAME)
            print(module.build_library(output))


class PlatformWheel(bdist_wheel):
    """Tags a wheel that holds a library by its platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3, no Python ABI, this platform."""
        python, abi, system = super().get_tag()
        return ("py3", "none", system) if NATIVE else (python, abi, system)


class PlatformDistribution(Distribution):
    """Goes where platform-specific packages are installed if it holds a library."""

    def has_ext_modules(self) -> bool:
        """Whether the platform matters."""
        return NATIVE or super().has_ext_modules()


setup(
    distclass=PlatformDistribution,
    cmdclass={"build": FreshBuild, "build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
)
