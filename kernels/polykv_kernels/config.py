"""What the kernels run on here, and why: for bug reports and for ``polykv doctor``."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from polykv_kernels import ops

__all__ = ["config_report", "format_config", "format_section", "show_config"]

# Those that one of the kernels, or torch, chooses its code by.
_RELEVANT_FLAGS = frozenset(
    [
        "sse4_1",
        "sse4_2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "avx_vnni",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
        "asimd",
        "asimdhp",
        "asimddp",
        "fphp",
        "i8mm",
        "bf16",
        "sve",
        "sve2",
    ]
)
_PROBES = (("cpu", torch.float32, 64), ("cuda", torch.float16, 64))
_ENVIRONMENT_PREFIXES = ("POLYKV_",)
_ENVIRONMENT = ("POLYKV_KERNELS", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "CXX")  # said even if not set, the first two


def config_report() -> dict[str, Any]:
    """What is in use here, of types that json can write.

    It asks each backend whether it can run, so the CPU kernels may be compiled by it. A backend that is broken is
    reported as such and stops nothing.

    Returns:
        ``versions``, ``platform``, ``threads``, ``backends`` (by name: ``available``, ``reason`` if not, and what the
        backend tells of itself), ``choices`` (the backend that attention on a device, dtype and head dim would take, or
        the ``error``) and ``environment`` (variables that matter, None for one that is not set).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a backend warns of is in the report
        return {
            "versions": {name: installed_version(name) for name in ("torch", "triton")}
            | {"python": sys.version.split()[0]},
            "platform": _platform(),
            "threads": _threads(),
            "backends": {name: _backend(name) for name in ops.BACKENDS},
            "choices": [_choice(*probe) for probe in _PROBES],
            "environment": _environment(),
        }


def show_config() -> None:
    """Prints :func:`config_report` for people."""
    print(format_config(config_report()))


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _platform() -> dict[str, Any]:
    model, flags = None, []
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            if name == "model name":
                model = model or value
            elif name.lower() in ("flags", "features"):  # x86, ARM
                flags = [flag for flag in value.split() if flag in _RELEVANT_FLAGS]
                break
    except OSError:
        pass  # not Linux
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "libc": " ".join(part for part in platform.libc_ver() if part) or None,
        "cpu": model or platform.processor() or None,
        "cpu_flags": flags,
    }


def _threads() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {"torch": torch.get_num_threads(), "cores": os.cpu_count(), "usable_cores": usable}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _backend(name: str) -> dict[str, Any]:
    module = ops.BACKENDS[name]
    device = torch.device("cuda" if name == "triton" else "cpu")
    found: dict[str, Any] = {}
    reason = None
    # the reference is always there and has neither function
    ask, describe = getattr(module, "unavailable_reason", None), getattr(module, "describe", None)
    try:  # whatever is broken there, this report is how people find out
        reason = ask(device) if ask is not None else None
        if describe is not None:
            found = {key: _plain(value) for key, value in describe().items()}
    except Exception as error:
        reason = reason or (
            str(error) if isinstance(error, ops.BackendError) else f"it is broken: {_first_line(error)}"
        )
    return {**found, "available": reason is None, "reason": reason}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _choice(device: str, dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    call = {"device": device, "dtype": str(dtype).removeprefix("torch."), "head_dim": head_dim}
    try:
        choice = ops.choose_backend(torch.device(device), dtype, head_dim)
    except ops.BackendError as error:
        return {**call, "error": str(error)}
    except Exception as error:
        return {**call, "error": str(error) if isinstance(error, ops.BackendError) else f"broken: {_first_line(error)}"}
    return {**call, "backend": choice.name, "reason": choice.reason, "forced": choice.forced}


def _environment() -> dict[str, str | None]:
    names = [name for name in os.environ if name.startswith(_ENVIRONMENT_PREFIXES) or name in _ENVIRONMENT]
    return {name: os.environ.get(name) for name in sorted({*names, *_ENVIRONMENT[:2]})}


def format_config(report: dict[str, Any]) -> str:
    """A report as text, a section a paragraph.

    Args:
        report: from :func:`config_report`; more sections of its kind may be in it.
    """
    where, threads = report["platform"], report["threads"]
    versions = {name: version or "not installed" for name, version in report["versions"].items()}
    usable = "" if threads["usable_cores"] is None else f", {threads['usable_cores']} of them usable"
    system = [where["system"], where["machine"], where["libc"]]
    return "\n\n".join(
        (
            format_section("Versions", versions.items()),
            format_section(
                "Machine",
                (
                    ("platform", " ".join(part for part in system if part)),
                    ("CPU", where["cpu"] or "unknown"),
                    ("CPU flags", " ".join(where["cpu_flags"]) or "unknown"),
                    ("threads", f"{threads['torch']} of torch, {threads['cores']} cores{usable}"),
                ),
            ),
            format_section("Backends", _backend_lines(report["backends"])),
            format_section("Attention would take", ((_call(c), _taken(c)) for c in report["choices"])),
            format_section(
                "Environment", ((n, "not set" if v is None else v) for n, v in report["environment"].items())
            ),
        )
    )


def format_section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A title, and below it a line for each name and text."""
    return "\n".join((title, *(f"  {name:<28} {text}" for name, text in rows)))


def _backend_lines(backends: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for name, found in backends.items():
        yield name, "available" if found["available"] else f"not available: {found['reason']}"
        for key, value in found.items():
            if key not in ("available", "reason") and value not in (None, "", []):
                yield f"  {key}", "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(choice: dict[str, Any]) -> str:
    return f"{choice['device']}, {choice['dtype']}, head_dim {choice['head_dim']}"


def _taken(choice: dict[str, Any]) -> str:
    if "error" in choice:
        return f"an error: {choice['error']}"
    return f"{choice['backend']} ({choice['reason']})"
