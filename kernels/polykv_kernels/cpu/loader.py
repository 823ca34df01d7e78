"""Finding the compiled CPU kernels and loading them: given by hand, from the wheel, or compiled at the first use.

The order:

1. ``POLYKV_CPU_LIBRARY``, the path of a library. If it does not load, nothing else is tried: whoever sets it means it.
2. The library that a platform wheel carries beside the source. One that does not fit this machine is passed over.
3. One compiled earlier, or now, into ``kernels/`` of the cache folder (``POLYKV_CACHE_DIR`` or the user's). Its folder's
   name is a digest of all that it depends on, so nothing there ever has to be invalidated.

A process that dies while it compiles, or a disk that is full, leaves nothing that a later one trips over: the lock is the
operating system's, the library gets its name when it is whole, and that name is a digest, which is compared before it is
opened (opening a truncated library can kill the process, so trying is no check).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import struct
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

__all__ = ["ABI_VERSION", "Library", "LibraryUnavailable", "Origin", "load"]

logger = logging.getLogger("polykv.kernels")

ABI_VERSION = 2
"""What ``polykv_cpu_abi_version()`` must return: both change whenever a C signature does."""

LOCK_TIMEOUT = 180.0
"""Seconds to wait for another process that compiles: longer than a compiler may take."""

Origin = Literal["POLYKV_CPU_LIBRARY", "prebuilt", "compiled"]

_STEM = "polykv_cpu-"
_ENVIRONMENT: Literal["POLYKV_CPU_LIBRARY"] = "POLYKV_CPU_LIBRARY"
_REMEDY = (
    "install a C++ compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install) "
    "or a PolyKV wheel that carries the compiled library"
)


class LibraryUnavailable(Exception):
    """There are no compiled CPU kernels here; the message says why, and how to get them."""


class _UnloadableError(Exception):
    """A file that is there is not a library of ours that works here."""


@dataclass(frozen=True)
class Library:
    """The loaded library.

    Attributes:
        cdll: its functions; argument types are the caller's to declare.
        path: the file. One compiled into a temporary folder is removed as soon as it is loaded.
        origin: where it came from.
        notes: why what stands before it in the order was passed over; lines for people.
    """

    cdll: ctypes.CDLL
    path: Path
    origin: Origin
    notes: tuple[str, ...] = ()


_outcome: Library | str | None = None  # a string is the reason why there is none
_outcome_lock = threading.Lock()


def load() -> Library:
    """The library of this process. The first call finds it, and may take as long as a compiler does.

    Raises:
        LibraryUnavailable: there is none; later calls say the same without trying again.
    """
    global _outcome
    with _outcome_lock:
        if _outcome is None:
            try:
                _outcome = _find()
            except LibraryUnavailable as error:
                _outcome = str(error)
        if isinstance(_outcome, str):
            raise LibraryUnavailable(_outcome)
        return _outcome


def _renew_lock() -> None:
    global _outcome_lock
    _outcome_lock = threading.Lock()


if hasattr(
    os, "register_at_fork"
):  # a fork while another thread loads must not leave the child a lock that nobody holds
    os.register_at_fork(after_in_child=_renew_lock)


def _build() -> ModuleType:
    # Not at the top: `python -m polykv_kernels.cpu.build` imports the package first, and would then run a second copy.
    from polykv_kernels.cpu import build

    return build


def _find() -> Library:
    given = os.environ.get(_ENVIRONMENT, "")
    if given:
        try:
            return Library(_open(Path(given)), Path(given).absolute(), _ENVIRONMENT)
        except _UnloadableError as error:
            raise LibraryUnavailable(
                f"{_ENVIRONMENT} is {given!r}, which cannot be used: {error}; correct it, or unset it to let PolyKV find one"
            ) from error
    _check_platform()

    notes: list[str] = []
    prebuilt = Path(__file__).with_name(_build().PREBUILT_NAME)
    if prebuilt.exists():
        try:
            return Library(_open(prebuilt), prebuilt, "prebuilt")
        except _UnloadableError as error:
            notes.append(f"the library that came with the package ({prebuilt}) cannot be used here: {error}")
            logger.info("%s", notes[-1])
    try:
        return _compiled(notes)
    except LibraryUnavailable as error:
        raise LibraryUnavailable("; ".join([str(error), *notes])) from error


def _check_platform() -> None:
    machine = platform.machine().lower()
    if sys.platform.startswith("linux") and machine in ("x86_64", "amd64", "aarch64", "arm64") and sys.maxsize > 2**32:
        return
    if sys.platform == "darwin":
        return
    raise LibraryUnavailable(
        f"there are no compiled CPU kernels for {platform.system() or sys.platform} on {machine or 'this processor'} "
        "(there are for 64-bit Linux on x86-64 and aarch64, and for macOS); the torch reference does the work there"
    )


def _open(path: Path) -> ctypes.CDLL:
    path = path.absolute()  # a bare name would be searched for in the system's folders
    if not path.is_file():
        raise _UnloadableError(f"there is no file {path}")
    try:
        _check_whole(path)
        cdll = ctypes.CDLL(str(path))
    except OSError as error:
        raise _UnloadableError(str(error)) from error
    try:
        get_version, get_isa = cdll.polykv_cpu_abi_version, cdll.polykv_cpu_isa
    except AttributeError as error:
        raise _UnloadableError("it has not the functions of PolyKV's CPU kernels") from error
    get_version.argtypes, get_version.restype = [], ctypes.c_int32
    get_isa.argtypes, get_isa.restype = [], ctypes.c_char_p
    if (version := get_version()) != ABI_VERSION:
        raise _UnloadableError(f"it has ABI version {version}, and this PolyKV needs {ABI_VERSION}")
    return cdll


def _check_whole(path: Path) -> None:
    """Refuses a truncated ELF file: the dynamic linker maps it, and the process dies when it reads past the end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(64)
    if header[:5] != b"\x7fELF\x02":  # not a 64-bit ELF file: the linker says what it thinks of it
        return
    if len(header) < 64:
        raise _UnloadableError("it is truncated")
    (sections,) = struct.unpack_from("<Q", header, 40)  # e_shoff, e_shentsize, e_shnum: the table is the file's end
    entry, count = struct.unpack_from("<HH", header, 58)
    if sections + entry * count > size:
        raise _UnloadableError("it is truncated")


def _compiled(notes: list[str]) -> Library:
    build = _build()
    try:
        source = build.SOURCE.read_bytes()
    except OSError as error:
        raise LibraryUnavailable(
            f"the source of the CPU kernels cannot be read ({error}); reinstall polykv-agents"
        ) from error
    system = (platform.machine(), *platform.libc_ver())  # a home folder may be shared by several
    key = _short_digest(source.decode(errors="replace"), *build.FLAGS, *system)
    try:
        compiler = build.find_compiler()
    except build.CompilerNotFoundError as error:
        if (found := _compiled_earlier(key)) is not None:
            return Library(*found, "compiled", tuple(notes))
        raise LibraryUnavailable(f"{error}; for the fast path, {_REMEDY}") from error
    try:
        folder = _private_folder(f"{key}-{_short_digest(*compiler, build.compiler_version(compiler))}")
        return _from_cache(folder, compiler, notes)
    except Timeout as error:
        raise LibraryUnavailable(
            f"another process has been compiling the CPU kernels for more than {LOCK_TIMEOUT:.0f} s (it holds "
            f"{error.lock_file}); see what it does, then start again"
        ) from error
    except build.BuildError as error:
        raise LibraryUnavailable(f"the CPU kernels do not compile: {error}; mend the compiler, or {_REMEDY}") from error
    # filelock raises NotImplementedError, and platformdirs RuntimeError (its base class), where a system lacks something
    except (OSError, RuntimeError, _UnloadableError) as error:
        notes.append(f"the cache folder cannot be used ({error}), so each process compiles the CPU kernels anew")
        logger.warning("%s; set POLYKV_CACHE_DIR to a folder of your own", notes[-1])
    return _from_temporary_folder(compiler, notes)


def _short_digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cache_root() -> Path:
    override = os.environ.get("POLYKV_CACHE_DIR")
    return Path(override).expanduser().absolute() if override else user_cache_path("polykv")


def _check_private(folder: Path) -> None:
    """Refuses a folder that anybody but this user can write to: what lies there is run."""
    stat = folder.stat()
    if stat.st_uid not in (os.geteuid(), 0) or stat.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to, or can be written by, another user")


def _private_folder(name: str) -> Path:
    folder = _cache_root()
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("kernels", name):
        folder = folder / part
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder)
    return folder


def _compiled_earlier(key: str) -> tuple[ctypes.CDLL, Path] | None:
    """A library of the same source that a compiler made which is no longer to be found."""
    try:
        parent = _cache_root() / "kernels"
        _check_private(parent)
        for folder in sorted(parent.glob(f"{key}-*")):
            _check_private(folder)
            if (found := _intact(folder)) is not None:
                return found
    except (OSError, RuntimeError):  # no such folder, or none to trust
        return None
    return None


def _from_cache(folder: Path, compiler: tuple[str, ...], notes: list[str]) -> Library:
    found = _intact(folder)
    if found is None:
        with FileLock(folder / "build.lock", timeout=LOCK_TIMEOUT):
            found = _intact(folder)  # another process may have made it meanwhile
            if found is None:
                # a warning, so that it is seen without any set-up of logging: nothing else happens for some seconds
                logger.warning("compiling PolyKV's CPU kernels with %s, once: some seconds", compiler[0])
                found = _build_into(folder, compiler)
    return Library(*found, "compiled", tuple(notes))


def _build_into(folder: Path, compiler: tuple[str, ...]) -> tuple[ctypes.CDLL, Path]:
    """Compiles a library and gives it its digest as its name.

    So one rename publishes both; and one made anew is another file to the dynamic linker, which returns what it opened
    before under the same name.
    """
    build = _build()
    for left in (
        *folder.glob(".*.tmp"),
        *folder.glob(f"{_STEM}*"),
    ):  # of a process that was killed; what cannot be used
        left.unlink(missing_ok=True)
    made = build.build_library(folder / ".new.tmp", compiler=compiler)
    path = folder / f"{_STEM}{_digest(made)}{build.LIBRARY_SUFFIX}"
    os.replace(made, path)
    return _open(path), path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _intact(folder: Path) -> tuple[ctypes.CDLL, Path] | None:
    for path in folder.glob(f"{_STEM}*{_build().LIBRARY_SUFFIX}"):
        try:
            if path.stem == f"{_STEM}{_digest(path)}":
                return _open(path), path
            problem = "it is damaged"
        except (FileNotFoundError, _UnloadableError) as error:  # the first: another process replaced it
            problem = str(error)
        logger.info("%s will be compiled again: %s", path, problem)
    return None


def _from_temporary_folder(compiler: tuple[str, ...], notes: list[str]) -> Library:
    build = _build()
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="polykv-kernels-"))  # mode 0700
        path = build.build_library(folder / f"polykv_cpu{build.LIBRARY_SUFFIX}", compiler=compiler)
        return Library(_open(path), path, "compiled", tuple(notes))
    except (OSError, build.BuildError, _UnloadableError) as error:
        raise LibraryUnavailable(
            f"the CPU kernels were compiled neither into the cache folder nor into a temporary one ({error}); set "
            "POLYKV_CACHE_DIR to a folder of your own, on a disk with space from which programs may be run"
        ) from error
    finally:
        if folder is not None:  # a library that is loaded stays so without its file
            shutil.rmtree(folder, ignore_errors=True)
