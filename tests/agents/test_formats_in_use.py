"""Every tool-call format through the whole stack: prompt, grammar, parser, and the history of the next turn."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage

from polykv_agents.testing import Script, scripted_chat_model
from polykv_agents.tool_calls import FORMATS, Call

ARGUMENTS = {"query": '日本 "x" {y}'}


def search(query: str) -> str:
    """Search the archive."""
    return query


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_and_the_turn_after_it(name: str) -> None:
    written = FORMATS[name].write_calls([Call("search", ARGUMENTS)])
    script = Script(lambda prompt: written)
    llm = scripted_chat_model(script, tool_format=name)
    for choice in ("any", "search", "auto"):
        message = llm.bind_tools([search], tool_choice=choice).invoke("Go.")
        assert [(c["name"], c["args"]) for c in message.tool_calls] == [("search", ARGUMENTS)]
        assert message.response_metadata["finish_reason"] == "tool_calls"
    history = [HumanMessage("Go."), message, ToolMessage("found it", tool_call_id=message.tool_calls[0]["id"])]
    assert llm.bind_tools([search]).invoke(history).tool_calls[0]["args"] == ARGUMENTS
    assert written in script.prompts[-1] and "found it" in script.prompts[-1]
    llm.close()


def test_many_calls_with_tools_at_once() -> None:
    written = FORMATS["hermes"].write_calls([Call("search", ARGUMENTS)])
    llm = scripted_chat_model(lambda prompt: written)
    bound = llm.bind_tools([search])

    async def main() -> list[Any]:
        return await asyncio.gather(*(bound.ainvoke(f"{i}") for i in range(64)))

    with ThreadPoolExecutor(16) as threads:
        messages = [*asyncio.run(main()), *threads.map(lambda i: bound.invoke(str(i)), range(64))]
    assert [m.tool_calls[0]["args"] for m in messages] == [ARGUMENTS] * 128
    stream = bound.stream("closed early")
    next(stream)
    stream.close()
    assert bound.invoke("after").tool_calls
    assert llm.engine.stats().running == 0 and llm.engine.stats().tail_bytes == 0
    llm.close()
