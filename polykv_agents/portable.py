"""The token ids that a text has wherever it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_AROUND = (("\n\n", "\n\n"), ("\n", "\n"), (" ", " "), (">", "<"), ('"', '"'), (".\n", "."), ("]\n", "\n["), ("x", "x"))
"""What may come before and after a text: the tokenizer may join the text's first and last letters with it."""


def _shared_run(tokens: Sequence[int], within: Sequence[int]) -> tuple[int, int]:
    """The longest run ``[first, stop)`` of ``tokens`` around their middle that ``within`` holds too."""
    middle = len(tokens) // 2
    best = (middle, middle)
    for place, token in enumerate(within):
        if token != tokens[middle]:
            continue
        first, stop = middle, middle + 1
        while first and place - (middle - first) > 0 and tokens[first - 1] == within[place - (middle - first) - 1]:
            first -= 1
        while (
            stop < len(tokens) and place + stop - middle < len(within) and tokens[stop] == within[place + stop - middle]
        ):
            stop += 1
        if stop - first > best[1] - best[0]:
            best = (first, stop)
    return best


def portable_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that it has in whatever surroundings: those at its edges that depend on these are left out.

    Args:
        tokenizer: a Hugging Face tokenizer.
        text: a document.

    Returns:
        The ids; empty if nothing of the text is the same everywhere.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if not tokens:
        return []
    first, stop = 0, len(tokens)
    for before, after in _AROUND:
        run = _shared_run(tokens, tokenizer.encode(before + text + after, add_special_tokens=False))
        first, stop = max(first, run[0]), min(stop, run[1])
    return list(tokens[first:stop])
