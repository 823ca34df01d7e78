"""The command ``polykv``. ``polykv doctor`` tells what is in use on this machine, why, and what to do about it.

A sub-command is a :class:`Command` in :data:`COMMANDS`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["COMMANDS", "Command", "doctor_report", "main"]


@dataclass(frozen=True)
class Command:
    """One sub-command.

    Attributes:
        name: what is typed.
        help: one line of ``polykv --help``.
        add_arguments: declares its arguments.
        run: does it; returns the exit status.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, that of the process by default; returns the exit status."""
    from polykv import __version__

    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["pool"]:  # has sub-commands of its own
        from polykv.pool_cli import run_pool

        return run_pool(given[1:])
    parser = argparse.ArgumentParser(prog="polykv", description="One compressed KV cache, read by many LLM agents.")
    parser.add_argument("--version", action="version", version=f"polykv {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    options = parser.parse_args(given)
    status: int = options.run(options)
    return status


def doctor_report() -> dict[str, Any]:
    """What ``polykv doctor --json`` prints.

    Returns:
        The report of :func:`polykv_kernels.config.config_report`, with the versions of PolyKV and transformers, the
        packaged ``models``, the ``cache`` folder, and ``problems``: a line each, empty if all is well.
    """
    from polykv import __version__
    from polykv_kernels.config import config_report, installed_version

    report = config_report()
    report["versions"] = {
        "polykv": __version__,
        **report["versions"],
        "transformers": installed_version("transformers"),
    }
    report["models"] = _guarded(_models)
    report["cache"] = _guarded(_cache)
    report["problems"] = _problems(report)
    return report


def _guarded(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except Exception as error:  # a broken part of the installation is what this command is there to tell
        return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def _models() -> dict[str, Any]:
    from polykv.errors import ModelNotFoundError
    from polykv.models.loading import PACKAGED_MODELS, check_source

    found: dict[str, Any] = {}
    for alias in PACKAGED_MODELS:
        try:
            check_source(alias)
            found[alias] = "installed"
        except ModelNotFoundError as error:
            found[alias] = str(error)
    return found


def _cache() -> dict[str, Any]:
    from polykv.models.loading import cache_dir

    folder = cache_dir()
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += Path(parent, name).lstat().st_size
            except OSError:  # removed meanwhile
                continue
    return {"folder": str(folder), "exists": folder.is_dir(), "bytes": size}


def _problems(report: dict[str, Any]) -> list[str]:
    import torch

    problems = []
    cpu = report["backends"].get("cpu", {"available": False, "reason": "there is no such backend"})
    if not cpu["available"]:
        problems.append(f"The compiled kernels for this CPU cannot be used: {cpu['reason']}")
    problems += cpu.get("notes") or []
    # A forced backend serves one kind of device, and is of no use if no device of this machine is of that kind.
    here = [c for c in report["choices"] if c["device"] == "cpu" or torch.cuda.is_available()]
    if here and all("error" in choice for choice in here):
        remedy = " Unset POLYKV_KERNELS to let PolyKV choose." if os.environ.get("POLYKV_KERNELS") else ""
        problems.append(f"No attention call can run: {here[0]['error']}.{remedy}")
    return problems


def _print_report(report: dict[str, Any]) -> None:
    from polykv_kernels.config import format_config, format_section

    cache = report["cache"]
    size = f"{cache['bytes'] / 1e6:,.1f} MB" if cache.get("exists") else "not made yet"
    print(format_config(report))
    print()
    print(format_section("Packaged models", report["models"].items()))
    print()
    print(format_section("Cache", [("folder", cache.get("folder", "unknown")), ("size", cache.get("error", size))]))
    print()
    if report["problems"]:
        print("\n".join(("Problems", *(f"  - {problem}" for problem in report["problems"]))))
    else:
        print("All is well.")


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _doctor(options: argparse.Namespace) -> int:
    report = doctor_report()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return 1 if report["problems"] else 0


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """``main`` hands the arguments of ``polykv pool`` on before they are parsed here."""


def _pool(options: argparse.Namespace) -> int:
    from polykv.pool_cli import run_pool

    return run_pool([])


COMMANDS: tuple[Command, ...] = (
    Command("doctor", "tell what PolyKV uses on this machine, and why", _doctor_arguments, _doctor),
    Command("pool", "look at, check and clean up a folder that a pool was saved in", _no_arguments, _pool),
)


if __name__ == "__main__":
    sys.exit(main())
