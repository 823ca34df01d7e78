"""Tools, histories of calls and the shared part in the template shapes of model families."""

from __future__ import annotations

import json
from typing import Any

import pytest
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
from polykv_agents.rendering import REMEMBERED, Prompt, Renderer
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
    knows = name in ("hermes", "qwen", "qwen3", "llama", "mistral", "gemma4")
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


# -------------------------------------------------------------------------- what families leave out of a conversation


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_text_beside_a_call_is_kept_where_the_template_drops_it(name: str) -> None:
    question, answer = HumanMessage("Who?"), ToolMessage("found", tool_call_id="x1")
    silent = rendered(name, [question, AIMessage("", tool_calls=[CALL]), answer]).text
    spoken = rendered(name, [question, AIMessage("Let me see.", tool_calls=[CALL]), answer]).text
    native = {"llama": "<|ipython|>", "mistral": "[TOOL_RESULTS]"}[name]
    assert native in silent and native not in spoken
    assert "Let me see." in spoken and '"query": "risk"' in spoken and "found" in spoken


def test_two_calls_at_once_are_written_as_text_where_the_template_takes_one() -> None:
    calls = [CALL, {**CALL, "id": "x2", "args": {"query": "quay"}}]
    messages = [HumanMessage("Who?"), AIMessage("", tool_calls=calls), ToolMessage("found", tool_call_id="x1")]
    for shared, own in (([], messages), (shared_turns(messages), [HumanMessage("So?")])):
        text = rendered("llama", own, shared).text
        assert text.index("risk") < text.index("quay") < text.index("found")


def test_a_result_without_its_call_is_kept_where_the_template_drops_it() -> None:
    called = [HumanMessage("Who?"), AIMessage("", tool_calls=[CALL])]
    assert "<|tool_response>found" in rendered("gemma4", [*called, ToolMessage("found", tool_call_id="x1")]).text
    assert "found" in rendered("gemma4", [*called, ToolMessage("found", tool_call_id="x9")]).text


def test_arguments_are_json_text_where_the_template_wants_that() -> None:
    text = rendered("deepseek-v3", HISTORIES["called"]).text
    assert RENDERERS["deepseek-v3"].takes_calls
    assert '<|call|>search<|sep|>{"query": "risk"}<|call end|>' in text and "<|output|>found<|output end|>" in text


@pytest.mark.parametrize("history", [[], [AIMessage("He."), HumanMessage("Why?")]])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_are_told_of_whoever_speaks_first_and_last(name: str, history: list[BaseMessage]) -> None:
    """Llama's template takes the first turn for the user's, Mistral's tells of tools with the user's last."""
    for own in ([SystemMessage("You are a lawyer."), *history], HISTORIES["called"], HISTORIES["orphan result"]):
        try:
            text = rendered(name, [*own], tools=TOOLS[1]).text
        except InvalidRequestError:
            assert name in ("mistral", "gemma") and history and own[1] is history[0]
            continue
        assert "Search the archive." in text
        assert all(part in text for part in said([*own]))


def test_a_question_that_is_asked_again_does_not_bring_the_tools_into_the_shared_part() -> None:
    """Mistral's template finds the last user turn by its text."""
    shared = shared_turns([HumanMessage(DOCUMENT), AIMessage("Yes?"), HumanMessage("Go on."), AIMessage("Yes?")])
    ids = RENDERERS["mistral"].shared_ids(shared)
    for question, native in (("Go on.", False), ("Go.", True)):
        prompt = rendered("mistral", [HumanMessage(question)], shared, tools=TOOLS[1])
        assert prompt.ids[: len(ids)] == ids
        assert "Search the archive." in prompt.text
        assert ("[AVAILABLE_TOOLS]" in prompt.text) == native


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_result_has_the_name_of_its_tool_when_the_call_was_shared(name: str) -> None:
    conversation = message_turns(HISTORIES["called"])
    before, after = message_turns(HISTORIES["called"][:2]), message_turns(HISTORIES["called"][2:])
    prompt = RENDERERS[name].prompt(after, before)
    if name == "mistral":  # the user may not speak after a call, and might, so what is shared is text
        assert "Result of search:\nfound" in prompt.text
    else:
        assert prompt == RENDERERS[name].prompt(conversation)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_after_a_call_stays_after_it(name: str) -> None:
    history = [
        HumanMessage("Who?"),
        AIMessage("", tool_calls=[CALL]),
        AIMessage("I did not look."),
        HumanMessage("Do."),
    ]
    for shared in ([], shared_turns(DOCUMENT)):
        text = rendered(name, history, shared).text
        assert text.index("search") < text.index("I did not look.") < text.index("Do.")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_mark_between_two_results_leaves_them_apart(name: str) -> None:
    def result(number: int) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": f"x{number}", "content": f"found {number}"}

    call = AIMessage("", tool_calls=[CALL, {**CALL, "id": "x2"}])
    start = [HumanMessage("Who?"), call]
    whole = message_turns([*start, HumanMessage([result(1), result(2), {"type": "text", "text": "So?"}])])
    before = message_turns([*start, HumanMessage([result(1)])])
    after = message_turns([HumanMessage([result(2), {"type": "text", "text": "So?"}])])
    renderer = RENDERERS[name]
    assert renderer.prompt(after, before, glued=True) == renderer.prompt(whole)
    ids = renderer.shared_ids(before, glued=True)
    assert renderer.prompt(whole).ids[: len(ids)] == ids


def test_the_order_of_arguments_is_part_of_what_is_shared() -> None:
    def shared(*names: str) -> list[dict[str, Any]]:
        call = {**CALL, "args": dict.fromkeys(names, "x")}
        return shared_turns(
            [HumanMessage(DOCUMENT), AIMessage("", tool_calls=[call]), ToolMessage("y", tool_call_id="x1")]
        )

    one, other = (RENDERERS["qwen"].shared_ids(shared(*names)) for names in ("ab", "ba"))
    assert one != other


def test_the_shared_beginnings_that_are_remembered_are_few() -> None:
    renderer = Renderer(scripted_tokenizer(), TEMPLATES["qwen"])
    for number in range(REMEMBERED + 5):
        renderer.shared_ids(shared_turns(f"text {number}"))
    assert len(renderer._shared) == REMEMBERED
