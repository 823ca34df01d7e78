"""Cache marks on content blocks: where a caller says that the shared beginning of a prompt ends.

Anthropic's API writes ``"cache_control": {"type": "ephemeral"}`` on a block, OpenAI's ``"prompt_cache_breakpoint":
{"mode": "explicit"}``; both mean that everything up to the end of that block may be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from polykv.errors import InvalidRequestError

MARK_KEYS = ("cache_control", "prompt_cache_breakpoint")
MAX_MARKS = 4
"""As many as Anthropic's API takes."""


@dataclass(frozen=True, order=True)
class Mark:
    """The place after ``messages`` whole messages and ``blocks`` blocks of the next one."""

    messages: int
    blocks: int = 0


def _is_marked(block: Any) -> bool:
    if not isinstance(block, dict):
        return False
    extras = block.get("extras")
    return any(block.get(key) or (isinstance(extras, dict) and extras.get(key)) for key in MARK_KEYS)


def find_marks(messages: Sequence[BaseMessage]) -> list[Mark]:
    """Places after marked blocks, in order.

    Inside a system or human message the place is behind the marked block; elsewhere behind the message, whose parts a
    template writes in an order of its own.

    Raises:
        InvalidRequestError: there are more than four.
    """
    marks: list[Mark] = []
    for index, message in enumerate(messages):
        content = message.content if isinstance(message.content, list) else []
        for number, block in enumerate(content, start=1):
            if _is_marked(block):
                whole = number == len(content) or not isinstance(message, (SystemMessage, HumanMessage))
                mark = Mark(index + 1) if whole else Mark(index, number)
                if mark not in marks:
                    marks.append(mark)
    if len(marks) > MAX_MARKS:
        raise InvalidRequestError(
            f"{len(marks)} content blocks carry a cache mark, at most {MAX_MARKS} may; keep those after what many calls share"
        )
    return marks


def leading_system(messages: Sequence[BaseMessage]) -> Mark | None:
    """The place after the system messages that come first; None if there are none, or nothing after them."""
    count = sum(1 for _ in takewhile(lambda message: isinstance(message, SystemMessage), messages))
    return Mark(count) if 0 < count < len(messages) else None


def split(messages: Sequence[BaseMessage], mark: Mark) -> tuple[list[BaseMessage], list[BaseMessage], bool]:
    """The messages before and after a mark, and whether it lies inside a message."""
    before, after = list(messages[: mark.messages]), list(messages[mark.messages :])
    if not mark.blocks:
        return before, after, False
    head = after[0].model_copy(update={"content": after[0].content[: mark.blocks]})
    tail = after[0].model_copy(update={"content": after[0].content[mark.blocks :]})
    return [*before, head], [tail, *after[1:]], True
