"""Tools, histories of calls and the shared part in the template shapes of eight families."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers import FULL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from templates import TEMPLATES

from polykv.errors import InvalidRequestError
from polykv_agents.rendering import Prompt, Renderer
from polykv_agents.testing import scripted_tokenizer
from polykv_agents.tool_calls import Tool
from polykv_agents.turns import message_turns, shared_turns

DOCUMENT = "The carrier bears the risk until the goods are handed over."
RENDERERS = {name: Renderer(scripted_tokenizer(), template) for name, template in TEMPLATES.items()}
CALL = {"name": "search", "args": {"query": "risk"}, "id": "x1", "type": "tool_call"}


def tool(name: str, description: str = "d", **properties: Any) -> Tool:
    return Tool(name, description, {"type": "object", "properties": properties, "required": list(properties)})


SEARCH = tool("search", "Search the archive.", query={"type": "string"})
TOOLS: list[tuple[Tool, ...]] = [
    (),
    (SEARCH,),
    (tool("weather", "Tell the weather.", city={"type": "string"}, days={"type": "integer"}), SEARCH),
    (tool("now"),),
]
HISTORIES: dict[str, list[BaseMessage]] = {
    "question": [HumanMessage("Who?")],
    "role": [SystemMessage("You are a lawyer."), HumanMessage("Who?")],
    "conversation": [HumanMessage("Who?"), AIMessage("The carrier."), HumanMessage("Why?")],
    "called": [HumanMessage("Who?"), AIMessage("", tool_calls=[CALL]), ToolMessage("found", tool_call_id="x1")],
    "after a call": [
        SystemMessage("You are a lawyer."),
        HumanMessage("Who?"),
        AIMessage("Let me see.", tool_calls=[CALL, {**CALL, "id": "x2", "args": {"query": "quay"}}]),
        ToolMessage("found", tool_call_id="x1"),
        ToolMessage("lost", tool_call_id="x2", status="error"),
        AIMessage("It is the carrier."),
        HumanMessage("Thanks."),
    ],
    "orphan call": [HumanMessage("Who?"), AIMessage("", tool_calls=[CALL]), HumanMessage("Never mind.")],
    "orphan result": [HumanMessage("Who?"), ToolMessage("found", tool_call_id="x9", name="search")],
    "doubled": [HumanMessage("a1"), HumanMessage("a2"), AIMessage("b1"), AIMessage("b2"), HumanMessage("c")],
    "late system": [HumanMessage("Who?"), SystemMessage("Be brief."), AIMessage("He."), SystemMessage("Be long.")],
    "names": [HumanMessage("Who?", name="ann"), AIMessage("He.", name="lawyer"), HumanMessage("Why?", name="bob")],
    "blocks": [
        HumanMessage([{"type": "text", "text": "Who"}, "?"]),
        AIMessage([{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "He."}]),
        HumanMessage("Why?"),
    ],
    "anthropic results": [
        HumanMessage("Who?"),
        AIMessage([{"type": "tool_use", "id": "t", "name": "search", "input": {"query": "risk"}}]),
        HumanMessage(
            [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "found"}]},
                {"type": "text", "text": "And?"},
            ]
        ),
    ],
    "broken call": [
        HumanMessage("Who?"),
        AIMessage(
            "",
            invalid_tool_calls=[
                {"name": "search", "args": '{"query', "id": "1", "error": "cut", "type": "invalid_tool_call"}
            ],
        ),
        HumanMessage("Again."),
    ],
    "function": [HumanMessage("Who?"), FunctionMessage("found", name="search"), ChatMessage("Go on.", role="user")],
    "empty": [HumanMessage("")],
    "empty answer": [HumanMessage("Who?"), AIMessage(""), HumanMessage("Well?")],
    "ends with an answer": [HumanMessage("Who?"), AIMessage("The carrier is")],
}


def said(messages: list[BaseMessage]) -> list[str]:
    """Everything a history says that a prompt must show."""
    parts: list[str] = []
    for message in messages:
        parts += [message.text] if message.text else []
        for call in getattr(message, "tool_calls", []):
            parts += [call["name"], *map(str, call["args"].values())]
        parts += [call["args"] for call in getattr(message, "invalid_tool_calls", [])]
    return parts


def rendered(name: str, own: list[BaseMessage], shared: Any = (), **options: Any) -> Prompt:
    return RENDERERS[name].prompt(message_turns(own), shared, **options)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_shared_part_is_the_same_for_every_agent_and_nothing_is_lost(name: str, history: str) -> None:
    shared = shared_turns(DOCUMENT)
    ids = RENDERERS[name].shared_ids(shared)
    assert len(ids) >= len(DOCUMENT)
    for tools in TOOLS:
        for section in (None, "Answer in JSON."):
            prompt = rendered(name, HISTORIES[history], shared, tools=tools, section=section)
            assert prompt.ids[: len(ids)] == ids
            assert len(prompt.ids) > len(ids)
            for part in [*said(HISTORIES[history]), *(t.name for t in tools), *([section] if section else [])]:
                assert part.strip() in prompt.text or json.dumps(part)[1:-1] in prompt.text, part


@pytest.mark.parametrize(
    "context",
    [
        [SystemMessage("You are a team."), HumanMessage(DOCUMENT)],
        [HumanMessage(DOCUMENT)],
        [HumanMessage(DOCUMENT), AIMessage("I have read it."), HumanMessage("Good, remember it.")],
        [
            HumanMessage(DOCUMENT),
            AIMessage("", tool_calls=[CALL]),
            ToolMessage("found", tool_call_id="x1"),
            AIMessage("Found."),
        ],
    ],
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_shared_too(name: str, context: list[BaseMessage]) -> None:
    shared = shared_turns(context)
    ids = RENDERERS[name].shared_ids(shared)
    for history in ("question", "role", "conversation", "called", "after a call"):
        for tools in TOOLS:
            prompt = rendered(name, HISTORIES[history], shared, tools=tools, section="Be brief.")
            assert prompt.ids[: len(ids)] == ids, (history, tools)
            assert all(part in prompt.text for part in said(HISTORIES[history]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_with_tools_of_its_own_is_used_where_nothing_is_shared(name: str) -> None:
    renderer = RENDERERS[name]
    knows = name in ("hermes", "qwen", "llama", "mistral")
    assert renderer.takes_tools == knows
    text = rendered(name, HISTORIES["role"], tools=TOOLS[1]).text
    assert ("You can call these tools" in text) != knows
    assert text.count('"search"') >= 1 and "Search the archive." in text


def test_hermes_puts_tools_after_the_shared_text() -> None:
    text = rendered("hermes", HISTORIES["role"], shared_turns(DOCUMENT), tools=TOOLS[1]).text
    assert text.index(DOCUMENT) < text.index("You are a lawyer.") < text.index("Search the archive.")
    text = rendered("hermes", HISTORIES["role"], tools=TOOLS[1]).text
    assert text.index("Search the archive.") < text.index("You are a lawyer."), "the template's own order"


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_of_calls_and_messages_change_nothing(name: str) -> None:
    def history(one: str, other: str) -> list[BaseMessage]:
        return [
            HumanMessage("Who?", id=one),
            AIMessage("", id=other, tool_calls=[{**CALL, "id": one}, {**CALL, "id": other}]),
            ToolMessage("found", tool_call_id=one, id=other),
            ToolMessage("lost", tool_call_id=other),
        ]

    assert rendered(name, history("a", "b")) == rendered(name, history("call_1234567890", "0"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_inside_a_message_leave_the_prompt_as_it_is(name: str) -> None:
    whole = message_turns([HumanMessage(f"{DOCUMENT} Who?")])
    before, after = message_turns([HumanMessage(DOCUMENT)]), message_turns([HumanMessage(" Who?")])
    renderer = RENDERERS[name]
    ids = renderer.shared_ids(before, glued=True)
    assert renderer.prompt(whole).ids == renderer.prompt(after, before, glued=True).ids
    for tools in TOOLS:
        prompt = renderer.prompt(after, before, glued=True, tools=tools)
        assert prompt.ids[: len(ids)] == ids and "Who?" in prompt.text


def test_thoughts() -> None:
    assert rendered("deepseek", HISTORIES["question"]).reasoning == "open"
    assert rendered("qwen", HISTORIES["question"]).reasoning == "none"
    thinking = TEMPLATES["qwen"] + "{% if false %}<think>{% endif %}"
    assert Renderer(scripted_tokenizer(), thinking).prompt(message_turns([HumanMessage("x")])).reasoning == "optional"


def test_special_tokens_of_a_format_are_shown() -> None:
    tokenizer = scripted_tokenizer(TEMPLATES["mistral"])
    assert Renderer(tokenizer).visible_ids() == frozenset()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    renderer = Renderer(tokenizer)
    assert renderer.format.name == "mistral"
    assert renderer.visible_ids() == {tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")}


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NAMES = st.sampled_from(["search", "weather", "now"])
CALLS = st.lists(
    st.builds(
        lambda name, value, i: {"name": name, "args": {"query": value}, "id": i, "type": "tool_call"}, NAMES, TEXT, TEXT
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.one_of(
        st.builds(SystemMessage, TEXT),
        st.builds(HumanMessage, TEXT, name=st.sampled_from([None, "ann"])),
        st.builds(lambda text, calls: AIMessage(text, tool_calls=calls), TEXT, CALLS),
        st.builds(lambda text, i: ToolMessage(text, tool_call_id=i), TEXT, TEXT),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=2000 if FULL else 60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    messages=MESSAGES,
    tools=st.sampled_from(TOOLS),
    section=st.sampled_from([None, "Answer in JSON."]),
    share=st.booleans(),
)
def test_any_conversation_renders_or_says_why_not(
    name: str, messages: list[BaseMessage], tools: tuple[Tool, ...], section: str | None, share: bool
) -> None:
    shared = shared_turns(DOCUMENT) if share else []
    refusal = ""
    try:
        prompt = rendered(name, messages, shared, tools=tools, section=section)
    except InvalidRequestError as error:
        refusal = str(error)
    if refusal:
        # only what the families themselves refuse: a conversation that does not begin with the user
        first = next((m.type for m in messages if m.type != "system"), "system")
        assert "the chat template refuses the turns" in refusal
        assert name in ("mistral", "gemma") and first != "human", refusal
        return
    assert prompt == rendered(name, messages, shared, tools=tools, section=section)
    if share:
        ids = RENDERERS[name].shared_ids(shared)
        assert prompt.ids[: len(ids)] == ids
    for part in said(messages):
        assert (
            part.strip() in prompt.text
            or json.dumps(part)[1:-1] in prompt.text
            or json.dumps(part, ensure_ascii=False)[1:-1] in prompt.text
        )
