"""``polykv pool``: what a store on disk holds."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polykv.errors import StoreError
from polykv.pool.store import Manifest, SegmentStore

pool_app = typer.Typer(
    name="pool",
    help="Look at, check and clean up a folder that a pool was saved in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)]
SHORT = 12


def run_pool(arguments: Sequence[str]) -> int:
    """Runs ``polykv pool ARGUMENTS``; returns the exit status. Errors of a store are one line and status 1."""
    command = typer.main.get_command(pool_app)
    try:
        result = command.main(list(arguments), prog_name="polykv pool", standalone_mode=False)
    except StoreError as error:
        typer.echo(f"polykv pool: {error}", err=True)
        return 1
    except typer.Exit as stop:
        return int(stop.exit_code)
    except Exception as error:
        show = getattr(error, "show", None)  # click's own errors: usage, an aborted question
        if show is None and type(error).__name__ != "Abort":
            raise
        if show is not None:
            show()
        return int(getattr(error, "exit_code", 1))
    return result if isinstance(result, int) else 0


def _open(folder: Path, *, read_only: bool = True) -> SegmentStore:
    return SegmentStore(folder, read_only=read_only, create=False)


def _find(store: SegmentStore, prefix: str) -> str:
    """The one name that begins so.

    Raises:
        StoreError: there is none, or several.
    """
    found = [name for name in store.names() if name.startswith(prefix)]
    if len(found) != 1:
        what = "no segment's name begins" if not found else f"{len(found)} segments' names begin"
        raise StoreError(f"{what} with {prefix!r} in {store.path}; `polykv pool ls` lists them")
    return found[0]


def _row(manifest: Manifest) -> dict[str, Any]:
    facts = manifest.metadata
    return {
        "name": manifest.name,
        "tokens": manifest.tokens,
        "bytes": manifest.nbytes,
        **{key: _said(facts.get(key)) for key in ("kind", "codec", "model", "parent")},
        "created": manifest.created,
    }


def _said(value: Any) -> str:
    """What a file says, fit for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(value)) if value else "-"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _age(created: float) -> str:
    if created < 0:  # no writer's clock: the file is forged
        return "-"
    seconds = max(0.0, time.time() - created)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@pool_app.command()
def ls(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """List the segments, the oldest first."""
    store = _open(folder)
    rows, refused = [], {}
    for name in store.names():
        try:
            rows.append(_row(store.manifest(name)))
        except StoreError as error:
            refused[name] = str(error)
    if as_json:
        typer.echo(json.dumps({"segments": rows, "refused": refused}, indent=1))
        return 0
    head = ("name", "tokens", "bytes", "kind", "codec", "parent", "age", "model")
    lines = [head] + [
        (
            row["name"][:SHORT],
            str(row["tokens"]),
            _size(row["bytes"]),
            row["kind"],
            row["codec"],
            row["parent"][:SHORT],
            _age(row["created"]),
            Path(row["model"]).name,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    typer.echo(f"{len(rows)} segment(s), {_size(store.nbytes)}")
    for name, reason in refused.items():
        typer.echo(f"{name[:SHORT]}: {reason}", err=True)
    return 0


@pool_app.command()
def show(folder: Folder, name: Annotated[str, typer.Argument(help="The beginning of a name.")]) -> int:
    """Show a segment's manifest."""
    store = _open(folder)
    manifest = store.manifest(_find(store, name))
    facts = dict(manifest.metadata)
    layers = facts.pop("layers", None)
    typer.echo(
        json.dumps(
            {
                **_row(manifest),
                "data_sha256": manifest.data_sha256,
                "tensors": len(manifest.tensors),
                "layers": len(layers) if isinstance(layers, list) else 0,
                "metadata": facts,
            },
            indent=1,
        )
    )
    return 0


@pool_app.command()
def rm(
    folder: Folder,
    names: Annotated[list[str] | None, typer.Argument(help="Beginnings of names.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all segments.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Remove segments. What builds on a removed segment cannot be used any more."""
    store = _open(folder, read_only=False)
    if not names and not everything:
        raise StoreError("say which segments: names, or --all")
    chosen = store.names() if everything else [_find(store, name) for name in names or ()]
    chosen = list(dict.fromkeys(chosen))  # two beginnings may be of one name
    if not yes:
        typer.confirm(f"Remove {len(chosen)} segment(s) from {folder}?", abort=True)
    freed = sum(store.remove(name) for name in chosen)
    typer.echo(f"removed {len(chosen)} segment(s), {_size(freed)}")
    return 0


@pool_app.command()
def verify(folder: Folder) -> int:
    """Read every segment whole and compare its checksums. Status 1 if one is damaged."""
    reasons = _open(folder).verify()
    for name, reason in reasons.items():
        typer.echo(f"{name[:SHORT]}  {'ok' if reason is None else reason}")
    damaged = sum(reason is not None for reason in reasons.values())
    typer.echo(f"{len(reasons)} segment(s), {damaged} damaged")
    return 1 if damaged else 0


@pool_app.command()
def gc(
    folder: Folder,
    delete_corrupt: Annotated[bool, typer.Option("--delete-corrupt", help="Remove damaged segments too.")] = False,
) -> int:
    """Remove what interrupted writers have left."""
    report = _open(folder, read_only=False).gc(delete_corrupt=delete_corrupt)
    typer.echo(f"removed {report.removed_files} file(s), {_size(report.freed_bytes)}")
    for name, reason in report.refused.items():
        typer.echo(f"{name[:SHORT]}: {reason}; --delete-corrupt removes it", err=True)
    return 0
