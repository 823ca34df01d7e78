"""The command line: every mistake ends with one line on stderr and exit code 2."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from polykv.codecs import DEFAULT_CODEC, get_codec
from polykv.errors import UnknownCodecError

DEFAULT_DOCUMENT = Path(__file__).resolve().parent.parent / "data" / "dashwood_inheritance.txt"


@dataclass(frozen=True)
class Options:
    agents: int
    model: str
    document: Path
    text: str
    codec: str
    max_tokens: int
    out: Path


def fail(message: str) -> NoReturn:
    """Ends the program with one line, whatever the message looks like."""
    print(f"research_team: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def parse_options(max_agents: int) -> Options:
    parser = _Parser(description="A LangGraph team reads one document through one compressed KV cache.")
    parser.add_argument("--agents", type=int, default=6, metavar="N", help=f"1 to {max_agents} (default: 6)")
    parser.add_argument("--model", default="smollm2-135m", metavar="ID|DIR|FILE.gguf", help="default: smollm2-135m")
    parser.add_argument("--document", type=Path, default=DEFAULT_DOCUMENT, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--codec", default=DEFAULT_CODEC, metavar="NAME", help=f"default: {DEFAULT_CODEC}")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="per answer (default: 64)")
    parser.add_argument("--out", type=Path, default=Path("polykv_demo.png"), metavar="FILE.png")
    values = parser.parse_args()
    if not 1 <= values.agents <= max_agents:
        fail(f"--agents {values.agents}: choose 1 to {max_agents}, the number of roles")
    if values.max_tokens < 1:
        fail(f"--max-tokens {values.max_tokens}: an answer needs at least 1 token")
    _check_codec(values.codec)
    _check_out(values.out)
    return Options(text=_read(values.document), **vars(values))


def _check_codec(name: str) -> None:
    try:
        get_codec(name)
    except UnknownCodecError as error:
        fail(f"--codec: {error}")


def _check_out(path: Path) -> None:
    if path.suffix.lower() != ".png":
        fail(f"--out {path}: the figure is a PNG, give a name that ends in .png")
    if not path.parent.is_dir():
        fail(f"--out {path}: there is no folder {path.parent}")
    if path.is_dir():
        fail(f"--out {path}: that is a folder")


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        fail(f"--document {path}: there is no such file")
    except UnicodeDecodeError:
        fail(f"--document {path}: not UTF-8 text; convert it first")
    except OSError as error:
        fail(f"--document {path}: {error.strerror}")
    if not text.strip():
        fail(f"--document {path}: the file is empty")
    return text
