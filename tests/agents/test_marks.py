"""Where cache marks on content blocks end the shared beginning."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from polykv.errors import InvalidRequestError
from polykv_agents.marks import Mark, find_marks, leading_system, split

ANTHROPIC = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
OPENAI = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize("mark", [ANTHROPIC, OPENAI, {"extras": ANTHROPIC}])
def test_both_kinds_of_mark_are_found(mark: dict[str, Any]) -> None:
    messages = [SystemMessage([block("role")]), HumanMessage([block("document", **mark), block("question")])]
    assert find_marks(messages) == [Mark(1, 1)]


def test_a_mark_on_the_last_block_is_behind_the_message() -> None:
    assert find_marks([SystemMessage([block("a"), block("b", **ANTHROPIC)]), HumanMessage("c")]) == [Mark(1)]


def test_marks_of_other_messages_are_behind_them() -> None:
    messages = [
        HumanMessage("q"),
        AIMessage([block("a", **ANTHROPIC), block("b")]),
        ToolMessage([block("r", **OPENAI), block("s")], tool_call_id="1"),
    ]
    assert find_marks(messages) == [Mark(2), Mark(3)]


def test_there_are_at_most_four() -> None:
    messages = [HumanMessage([block(str(i), **ANTHROPIC) for i in range(5)])]
    with pytest.raises(InvalidRequestError, match="5 content blocks carry a cache mark, at most 4 may"):
        find_marks(messages)


def test_splitting_keeps_every_block_in_order() -> None:
    messages = [SystemMessage("s"), HumanMessage([block("a"), block("b", **ANTHROPIC), block("c")], id="7")]
    before, after, glued = split(messages, Mark(1, 2))
    assert glued
    assert [m.content for m in before] == ["s", [block("a"), block("b", **ANTHROPIC)]]
    assert [m.content for m in after] == [[block("c")]]
    assert messages[1].content == [block("a"), block("b", **ANTHROPIC), block("c")]
    assert split(messages, Mark(1)) == ([messages[0]], [messages[1]], False)


def test_leading_system_messages() -> None:
    system, human = SystemMessage("s"), HumanMessage("h")
    assert leading_system([system, system, human]) == Mark(2)
    assert leading_system([human, system]) is None
    assert leading_system([system]) is None
