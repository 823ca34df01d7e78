"""JSON as models write it: read strictly enough to be trusted, split without being read when it is broken."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 128
"""Deepest nesting of brackets that is read; what is deeper would exhaust the stack of whoever reads it next."""

_PARTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:,]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NAME = re.compile(r'"name"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits:.40} is too large")
    return number


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite)


def parse_json(text: str) -> Any:
    """Reads one JSON value. Line breaks inside strings are accepted, since models write code that way.

    Raises:
        ValueError: not JSON, not finite, a lone surrogate, or nested deeper than ``MAX_DEPTH``. Nothing else, whatever the text.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    value = _DECODER.decode(text)
    if _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair, which is no character") from None
    return value


def is_json(text: str) -> bool:
    """Whether :func:`parse_json` reads the text."""
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _PARTS.finditer(text):
        if match.group() in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif match.group() in ("]", "}"):
            depth -= 1
    return deepest


def split_items(text: str) -> list[str]:
    """The raw texts of a list's items or an object's members. What is inside them may be broken."""
    items: list[str] = []
    depth = 0
    start = 0
    for match in _PARTS.finditer(text):
        token = match.group()
        if token in ("[", "{"):
            depth += 1
            if depth == 1:
                start = match.end()
        elif token in ("]", "}") or token == ",":
            if depth == 1:
                items.append(text[start : match.start()].strip())
                start = match.end()
            depth -= token != ","
            if depth == 0:
                break
    return [item for item in items if item]


def split_members(text: str) -> dict[str, str]:
    """The raw texts of an object's values by key; the last of equal keys wins. Members that cannot be told are left out."""
    members: dict[str, str] = {}
    for item in split_items(text):
        match = _PARTS.match(item)
        if match is None or not match.group().startswith('"'):
            continue
        rest = item[match.end() :].lstrip()
        if rest.startswith(":"):
            try:
                members[str(parse_json(match.group()))] = rest[1:].strip()
            except ValueError:
                continue
    return members


def guess_name(text: str) -> str | None:
    """The value of the first ``"name"`` in text that may be cut off or broken."""
    match = _NAME.search(text)
    try:
        return None if match is None else str(parse_json(match.group(1)))
    except ValueError:
        return None
