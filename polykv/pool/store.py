"""A folder of immutable stored segments: safe against crashes, damage, other processes and malicious files.

It knows tensors and JSON, nothing of pools and models. A segment is two files, named by 64 hex digits:

* ``segments/<name>.safetensors``: the tensors, written first;
* ``segments/<name>.json``: the manifest with sizes, SHA-256 and CRCs. What has no manifest is not there.

Both are written under another name, flushed to the disk and renamed, so a crash leaves old files or new ones and nothing between.
Writers take turns by a lock; readers take none, since a file never changes once it has its name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polykv.errors import StoreError

FORMAT = "polykv-store"
VERSION = 1
MAX_MANIFEST_BYTES = 4 << 20
MAX_HEADER_BYTES = 16 << 20
_NAME = re.compile(r"[0-9a-f]{64}")
_ANY_TEMPORARY = ".tmp"
_TEMPORARY = ".tmp-"
_MAX_AXES = 16
_MAX_DEPTH = 100  # of metadata; far below where Python's own limit makes it depend on the caller's stack
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Manifest:
    """What a store says about a segment.

    Attributes:
        name: 64 hex digits.
        tokens: tokens of the segment.
        data_bytes: size of the tensors' file.
        data_sha256: its SHA-256, hex.
        tensors: dtype, shape and CRC-32 of each tensor.
        metadata: the writer's own JSON.
        created: seconds since 1970.
        nbytes: bytes on disk, the manifest included.
    """

    name: str
    tokens: int
    data_bytes: int
    data_sha256: str
    tensors: dict[str, dict[str, Any]]
    metadata: dict[str, Any]
    created: float
    nbytes: int


@dataclass(frozen=True)
class GcReport:
    """What :meth:`SegmentStore.gc` did.

    Attributes:
        removed_files: files removed.
        freed_bytes: their bytes.
        refused: reasons by name, for damaged segments that were left.
    """

    removed_files: int
    freed_bytes: int
    refused: dict[str, str]


class SegmentStore:
    """Stored segments in a folder.

    Args:
        path: the folder.
        max_bytes: bytes that all segments may take together on disk, or None.
        read_only: refuse to write.
        create: make the folder if it is not there.
        lock_timeout: seconds to wait for another writer.

    Raises:
        StoreError: the folder is not there, is no store, is of a newer version, or cannot be made.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_bytes: int | None = None,
        read_only: bool = False,
        create: bool = True,
        lock_timeout: float = 60,
    ) -> None:
        self.path = Path(path)
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._segments = self.path / "segments"
        self._lock_timeout = lock_timeout
        with _said(f"{self.path} cannot be used"):
            if self.path.exists() and not self.path.is_dir():
                raise StoreError(f"{self.path} is a file; give the folder of a store")
            if not (self.path / "store.json").exists():
                if read_only or not create:
                    raise StoreError(
                        f"{self.path} is no store: it has no store.json; give a folder that a pool was saved in"
                    )
                if self.path.is_dir() and any(self.path.iterdir()) and not self._segments.is_dir():
                    raise StoreError(
                        f"{self.path} holds other files and is no store; give an empty folder or a new one"
                    )
                self._create()
        self._check_version()
        if self._segments.is_symlink():
            raise StoreError(f"{self._segments} is a symbolic link; a store keeps its segments in a folder of its own")

    def _create(self) -> None:
        with _said(f"the store {self.path} cannot be made"):
            self._segments.mkdir(parents=True, exist_ok=True)
            with self._writing():
                if not (self.path / "store.json").exists():
                    text = json.dumps({"format": FORMAT, "version": VERSION})
                    _write_atomically(self.path / "store.json", text.encode())

    def _check_version(self) -> None:
        try:
            head = json.loads(_read_small(self.path / "store.json"))
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"{self.path / 'store.json'} cannot be read: {error}") from error
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise StoreError(f"{self.path} is not a store of this library (store.json says {_plain(head)})")
        if not _is_version(head.get("version")):
            raise StoreError(
                f"the store {self.path} has version {head.get('version')!r}, this library reads {VERSION}; use the library that wrote "
                "it, or another folder"
            )

    # -------------------------------------------------------------------------------------------- writing

    def put(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], *, tokens: int) -> bool:
        """Stores a segment.

        Args:
            name: 64 hex digits.
            tensors: what to keep; views are written as what they show.
            metadata: JSON.
            tokens: tokens of the segment.

        Returns:
            False if a sound one of that name is there already; a damaged one is replaced.

        Raises:
            StoreError: no room, no permission, a read-only store, or the disk's error. Nothing of the store has changed.
        """
        self._check_writable()
        data, manifest = self._paths(name)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with self._writing(), _said(f"segment {name[:12]} cannot be written into {self.path}"):
            if manifest.exists():
                try:
                    self.get(name)
                    return False
                except StoreError:
                    self._unlink(manifest, data)
            if self.max_bytes is not None and self.nbytes + size > self.max_bytes:
                raise StoreError(
                    f"{size} bytes do not fit into the store {self.path}: it holds {self.nbytes} of max_bytes {self.max_bytes}; "
                    "remove segments (polykv pool rm) or raise max_bytes"
                )
            free = shutil.disk_usage(self.path).free
            if free < size * 1.1 + (1 << 20):
                raise StoreError(f"{size} bytes do not fit on the disk of {self.path}: {free} are free; make room")
            temporary = self._temporary()
            try:
                # one copy of each: views of one storage are written as tensors of their own
                held = {
                    key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                    for key, tensor in tensors.items()
                }
                if "__metadata__" in held:
                    raise ValueError("'__metadata__' is no name for a tensor: safetensors keeps it for itself")
                save_file(held, str(temporary))
                facts = {
                    key: {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "crc32": _crc(tensor)}
                    for key, tensor in held.items()
                }
                del held
                _flush(temporary)
                digest = _sha256(temporary)
                content = {
                    "version": VERSION,
                    "name": name,
                    "tokens": tokens,
                    "data_bytes": temporary.stat().st_size,
                    "data_sha256": digest,
                    "tensors": facts,
                    "metadata": dict(metadata),
                    "created": time.time(),
                }
                content = json.loads(json.dumps(content, allow_nan=False))
                if _too_deep(content):
                    raise ValueError(f"its metadata are nested deeper than {_MAX_DEPTH} levels")
                text = json.dumps({**content, "checksum": _checksum(content)}).encode()
                if len(text) > MAX_MANIFEST_BYTES:
                    raise StoreError(f"the manifest has {len(text)} bytes; at most {MAX_MANIFEST_BYTES} are allowed")
                os.replace(temporary, data)
                _flush_folder(self._segments)
                _write_atomically(manifest, text)
            except BaseException:
                self._unlink(temporary, manifest, data)  # there was none of that name, or a damaged one
                raise
        return True

    def remove(self, name: str) -> int:
        """Removes a segment and returns the bytes freed. Whoever has mapped it may go on reading it (not on Windows).

        Raises:
            StoreError: it is not there, or cannot be removed.
        """
        self._check_writable()
        data, manifest = self._paths(name)
        with self._writing(), _said(f"segment {name[:12]} cannot be removed from {self.path}"):
            if not manifest.exists() and not data.exists():
                raise StoreError(f"there is no segment {name[:12]} in {self.path}")
            return self._unlink(manifest, data)

    def gc(self, *, delete_corrupt: bool = False) -> GcReport:
        """Removes what interrupted writers have left, and half segments.

        Args:
            delete_corrupt: remove damaged segments too.

        Raises:
            StoreError: the store cannot be written.
        """
        self._check_writable()
        removed = freed = 0
        refused: dict[str, str] = {}
        with self._writing(), _said(f"{self.path} cannot be cleaned up"):
            # no other writer is at work, so nobody is behind a temporary file
            files = [path for path in self._segments.iterdir() if not path.is_dir()]
            files += [path for path in self.path.glob(f"{_ANY_TEMPORARY}*") if not path.is_dir()]
            for path in files:
                stem, suffix = path.name.partition(".")[::2]
                whole = _NAME.fullmatch(stem) is not None and suffix in ("safetensors", "json")
                partner = self._segments / f"{stem}.{'json' if suffix == 'safetensors' else 'safetensors'}"
                # safetensors makes temporary files of its own
                if path.name.startswith(_ANY_TEMPORARY) or (whole and not partner.exists()):
                    freed += self._unlink(path)
                    removed += 1
            for name, reason in self.verify().items():
                if reason is None:
                    continue
                folders = [path.name for path in self._paths(name) if path.is_dir() and not path.is_symlink()]
                if folders:  # no writer made it, and what is in it is not ours: the rest is cleaned up without it
                    refused[name] = f"{reason}; remove the folder {folders[0]} by hand"
                elif delete_corrupt:
                    freed += self._unlink(*reversed(self._paths(name)))
                    removed += 2
                else:
                    refused[name] = reason
        return GcReport(removed, freed, refused)

    # -------------------------------------------------------------------------------------------- reading

    def names(self) -> list[str]:
        """Names that have a manifest, the oldest first.

        Raises:
            StoreError: the folder cannot be read.
        """
        try:
            paths = [path for path in self._segments.glob("*.json") if _NAME.fullmatch(path.stem)]
        except OSError as error:
            raise StoreError(f"{self._segments} cannot be read: {error}") from error
        found = []
        for path in paths:
            with contextlib.suppress(OSError):  # one was removed meanwhile
                found.append((path.lstat().st_mtime_ns, path.stem))
        return [name for _, name in sorted(found)]

    def manifest(self, name: str) -> Manifest:
        """A segment's manifest, checked; the tensors' file is checked for its size alone.

        Raises:
            StoreError: it is not there, damaged, of a newer version, or does not fit its file.
        """
        data, path = self._paths(name)
        for file in (path, data):
            with contextlib.suppress(OSError):
                if not stat.S_ISREG(file.lstat().st_mode):
                    raise StoreError(f"segment {name[:12]} is a symbolic link or no file; a store holds plain files")
        try:
            text = _read_small(path)
            content = json.loads(text)
        except FileNotFoundError:
            raise StoreError(f"there is no segment {name[:12]} in {self.path}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"the manifest of {name[:12]} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise StoreError(f"the manifest of {name[:12]} is no JSON object")
        if not _is_version(content.get("version")):
            raise StoreError(
                f"segment {name[:12]} has version {content.get('version')!r}, this library reads {VERSION}; compute it anew"
            )
        checksum = content.pop("checksum", None)
        try:
            sound = not _too_deep(content) and checksum == _checksum(content)
        except (ValueError, RecursionError):
            sound = False
        if not sound:
            raise StoreError(
                f"the manifest of {name[:12]} is damaged: its checksum does not fit, or it is nested too deeply"
            )
        wanted = {"name": str, "tokens": int, "data_bytes": int, "data_sha256": str, "tensors": dict, "metadata": dict}
        for key, kind in wanted.items():
            if not isinstance(content.get(key), kind):
                raise StoreError(f"the manifest of {name[:12]} has no sound {key!r}")
        if isinstance(content["tokens"], bool) or content["tokens"] < 0:
            raise StoreError(f"the manifest of {name[:12]} has no sound 'tokens'")
        if content["name"] != name:
            raise StoreError(f"the manifest of {name[:12]} is another segment's ({content['name'][:12]!r})")
        try:
            size = data.stat().st_size
        except OSError as error:
            raise StoreError(f"the tensors of {name[:12]} are not there: {error}") from error
        if size != content["data_bytes"]:
            raise StoreError(
                f"the tensors of {name[:12]} have {size} bytes, not {content['data_bytes']}: the file was cut or changed"
            )
        fields = {key: content[key] for key in wanted}
        try:
            created = float(content["created"])
        except (KeyError, TypeError, ValueError, OverflowError):
            created = 0.0
        return Manifest(**fields, created=created, nbytes=size + len(text))

    def get(self, name: str, *, verify: bool = True) -> tuple[dict[str, Tensor], Manifest]:
        """A segment's tensors on the CPU, mapped into memory and not copied. They must not be written to.

        The file is mapped once; each tensor has a storage of its own within it, and the mapping lasts as long as any of
        them. Removing the file meanwhile harms none of them (not on Windows).

        Args:
            name: 64 hex digits.
            verify: compare the SHA-256 of the whole file.

        Raises:
            StoreError: it is not there, damaged, malformed, or was removed or replaced while it was read.
        """
        data, _ = self._paths(name)
        # a writer removes the manifest before the data and makes it after: with one data file all along, what is
        # checked, hashed and mapped by its path is that file, and the manifest is its own
        before = _file_id(data)
        error: Exception | None = None
        try:
            manifest = self.manifest(name)
            self._check_header(data, manifest)
            if verify and _sha256(data) != manifest.data_sha256:
                raise StoreError(f"the tensors of {name[:12]} are damaged: {self._damage(data, manifest)}")
            tensors = load_file(str(data))
        except Exception as caught:
            error = caught
        if before != _file_id(data):  # also the reason of an error: two files do not fit each other
            raise StoreError(f"segment {name[:12]} was removed or replaced while it was read; read it again") from error
        if isinstance(error, StoreError):
            raise error
        if error is not None:
            raise StoreError(f"the tensors of {name[:12]} cannot be read: {type(error).__name__}: {error}") from error
        return tensors, manifest

    def verify(self, name: str | None = None) -> dict[str, str | None]:
        """Reads segments whole; the reason why one cannot be used, or None.

        Args:
            name: one segment; all by default.
        """
        reasons: dict[str, str | None] = {}
        for each in [name] if name is not None else self.names():
            try:
                self.get(each)
                reasons[each] = None
            except StoreError as error:
                reasons[each] = str(error)
        return reasons

    @property
    def nbytes(self) -> int:
        """Bytes on disk of all segments."""
        total = 0
        with contextlib.suppress(FileNotFoundError):
            for path in self._segments.iterdir():
                with contextlib.suppress(OSError):
                    total += path.lstat().st_size
        return total

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return False
        return all(path.exists() for path in self._paths(name))

    # --------------------------------------------------------------------------------------------- inside

    def _paths(self, name: str) -> tuple[Path, Path]:
        # checked before it touches a path: no name leads out of the folder
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise StoreError(f"a segment's name is 64 hex digits, got {str(name)[:80]!r}")
        return self._segments / f"{name}.safetensors", self._segments / f"{name}.json"

    def _temporary(self) -> Path:
        return self._segments / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError(f"the store {self.path} was opened read-only")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        if not self._segments.is_dir():  # the lock would make an empty folder where the store was
            raise StoreError(f"{self.path} cannot be written: its folder {self._segments.name} is gone")
        if (self.path / ".lock").is_symlink():  # older filelocks follow it, and empty the file behind it
            raise StoreError(f"the store {self.path} cannot be locked for writing: .lock is a symbolic link; remove it")
        lock = filelock.FileLock(self.path / ".lock", timeout=self._lock_timeout)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise StoreError(
                f"another process has been writing into {self.path} for {self._lock_timeout} s; try again later"
            ) from None
        except (OSError, NotImplementedError) as error:
            raise StoreError(f"the store {self.path} cannot be locked for writing: {error}") from error
        try:
            yield
        finally:
            lock.release()

    @staticmethod
    def _unlink(*paths: Path) -> int:
        freed = 0
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                size = path.lstat().st_size
                path.unlink()
                freed += size
        return freed

    def _check_header(self, data: Path, manifest: Manifest) -> None:
        """Whether the file's own header says the same as the manifest, and no tensor lies outside the file or on another."""
        header, start = _header(data)
        facts = {key: value for key, value in header.items() if key != "__metadata__"}
        if facts.keys() != manifest.tensors.keys():
            raise StoreError(f"the tensors of {manifest.name[:12]} are not those of its manifest")
        ranges = []
        for key, value in facts.items():
            wanted = manifest.tensors[key]
            dtype = _DTYPES.get(value["dtype"])
            shape, (first, stop) = value["shape"], value["data_offsets"]
            if dtype is None or value["dtype"] != wanted.get("dtype") or shape != wanted.get("shape"):
                raise StoreError(f"tensor {key!r} of {manifest.name[:12]} is not what its manifest says")
            if len(shape) > _MAX_AXES or not all(isinstance(n, int) and n >= 0 for n in (*shape, first, stop)):
                raise StoreError(f"tensor {key!r} of {manifest.name[:12]} has no sound shape")
            size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
            if stop - first != size or start + stop > manifest.data_bytes:
                raise StoreError(f"tensor {key!r} of {manifest.name[:12]} does not lie within its file")
            ranges.append((first, stop))
        ranges.sort()
        if any(left[1] > right[0] for left, right in itertools.pairwise(ranges)):
            raise StoreError(f"tensors of {manifest.name[:12]} overlap in their file")

    def _damage(self, data: Path, manifest: Manifest) -> str:
        """Which tensors of a damaged file have changed."""
        try:
            changed = [
                key for key, tensor in load_file(str(data)).items() if _crc(tensor) != manifest.tensors[key]["crc32"]
            ]
        except Exception as error:
            return f"its SHA-256 does not fit, and it cannot be read ({type(error).__name__})"
        return f"its SHA-256 does not fit; changed: {', '.join(map(_plain, changed[:4])) or 'the header'}"


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    """Turns the system's errors into ours."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        reason = "the disk is full" if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise StoreError(f"{what}: {reason}") from error


def _plain(text: object) -> str:
    """What a file says, short and fit for a message on a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:80])


def _is_version(value: object) -> bool:
    return type(value) is int and value == VERSION  # True and 1.0 are equal to 1 too


def _too_deep(value: object) -> bool:
    """Whether lists and objects are nested deeper than allowed; without recursion, which is what it guards."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _file_id(path: Path) -> tuple[int, ...] | None:
    """What tells a file from the next of its name; None without one."""
    try:
        facts = path.lstat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _read_small(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block
        raise OSError(f"{path.name} is no plain file")
    with path.open("rb") as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    return text


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header and where its data begin.

    Raises:
        StoreError: it is malformed.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key comes twice")
        return dict(pairs)

    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length), object_pairs_hook=unique)
        for key, value in header.items():
            if key != "__metadata__" and not (
                isinstance(value["dtype"], str) and isinstance(value["shape"], list) and len(value["data_offsets"]) == 2
            ):
                raise ValueError(f"tensor {key!r} is not described")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path.name[:12]} has a malformed header: {error}") from error
    return header, 8 + length


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(path: Path) -> None:
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.parent / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _flush_folder(path.parent)
