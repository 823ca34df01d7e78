"""Any conversation in any template shape: all of it is in the prompt, in its order, and the shared part comes first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from helpers import FULL
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from templates import TEMPLATES
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from polykv.errors import InvalidRequestError
from polykv_agents.rendering import Prompt, Renderer
from polykv_agents.testing import scripted_tokenizer
from polykv_agents.tool_calls import Tool
from polykv_agents.turns import Turn, message_turns, shared_turns

FUZZ = settings(max_examples=6000 if FULL else 120, deadline=None, suppress_health_check=list(HealthCheck))
DOCUMENT = "The carrier bears the risk until the goods are handed over."
RENDERERS = {name: Renderer(scripted_tokenizer(), template) for name, template in TEMPLATES.items()}
NAMES = st.sampled_from(sorted(TEMPLATES))
IDS = st.sampled_from(["", "a", "b", "call_0123456789", "🙂"])
# texts that a template might trip over, and plain ones of every script; thoughts are dropped by right, so none here
# fmt: off
SNIPPETS = (
    "", " ", "\n", "\n\n", "x", "{", '"', "\\", "{{ messages }}", "<|end|>", "[INST]", "<tool_call>", "</tool_call>",
    "🙂", "日本語", "e\u0301", "\x00", "\r\n", "call00001",
)
# fmt: on
TEXTS = st.lists(st.sampled_from(SNIPPETS), max_size=3).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=6
)
SCHEMAS = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "integer", "minimum": 0}, {"enum": ["a", None, 1]}, {}]),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.dictionaries(st.sampled_from(["x", "y z", "type", "ключ"]), inner, max_size=2).map(
            lambda properties: {"type": "object", "properties": properties, "required": list(properties)}
        ),
    ),
    max_leaves=4,
)
TOOLS = st.lists(
    st.builds(
        lambda name, text, properties: Tool(name, text, {"type": "object", "properties": properties}),
        st.sampled_from(["search", "weather", "transfer_to_bob"]),
        TEXTS,
        st.dictionaries(st.sampled_from(["query", "city", "días"]), SCHEMAS, max_size=2),
    ),
    max_size=3,
    unique_by=lambda tool: tool.name,
).map(tuple)


@st.composite
def calls(draw: st.DrawFn, words: Iterator[str]) -> list[dict[str, Any]]:
    return [
        {
            "name": draw(st.sampled_from(["search", "weather"])),
            "args": draw(st.sampled_from([{}, {"query": f"{next(words)} {draw(TEXTS)}", "n": 1}])),
            "id": draw(IDS),
            "type": "tool_call",
        }
        for _ in range(draw(st.integers(0, 2)))
    ]


@st.composite
def conversations(draw: st.DrawFn, least: int = 1, most: int = 6, words: Iterator[str] | None = None) -> list[Any]:
    """Messages of all kinds in any order; each text that is not empty begins with a word of its own."""
    words = words or (f"w{number:03d}w" for number in count())
    messages: list[BaseMessage] = []
    for _ in range(draw(st.integers(least, most))):
        text = draw(st.booleans().flatmap(lambda empty: st.just("") if empty else TEXTS.map(f"{next(words)} ".__add__)))
        kind = draw(st.sampled_from("shaat"))
        if kind == "s":
            messages.append(SystemMessage(text))
        elif kind == "h":
            messages.append(HumanMessage(text, name=draw(st.sampled_from([None, "ann"]))))
        elif kind == "a":
            messages.append(AIMessage(text, tool_calls=draw(calls(words))))
        else:
            status = draw(st.sampled_from(["success", "error"]))
            messages.append(
                ToolMessage(text, tool_call_id=draw(IDS), name=draw(st.sampled_from([None, "search"])), status=status)
            )
    return messages


@st.composite
def shared_conversations(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """What is shared and what an agent says over it."""
    words = (f"w{number:03d}w" for number in count())
    return draw(conversations(1, 4, words)), draw(conversations(1, 4, words))


def is_shown(part: str, text: str) -> bool:
    """As it is, but for spaces around it, or inside a JSON string."""
    forms = (part.strip(), json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1])
    return any(form in text for form in forms)


def check_nothing_is_lost(name: str, messages: list[BaseMessage], text: str) -> None:
    for message in messages:
        assert is_shown(message.text, text), message
        for call in getattr(message, "tool_calls", []):
            assert call["name"] in text
            assert all(is_shown(value, text) for value in call["args"].values() if isinstance(value, str)), call
    places = [text.index(message.text[:5]) for message in messages if message.text]
    if name != "gemma4":  # which puts a result beside its call
        assert places == sorted(places)
    assert all(text.count(message.text[:5]) == 1 for message in messages if message.text), "said twice"


def check_refusal(name: str, messages: list[BaseMessage], refusal: str, *first_types: str) -> None:
    """Only what the families themselves refuse: a conversation that does not begin with the user."""
    first = next((message.type for message in messages if message.type != "system"), "system")
    assert "the chat template refuses the turns" in refusal and "alternate" in refusal
    assert name in ("mistral", "gemma"), refusal
    assert first in ("ai", *first_types), refusal


@FUZZ
@given(
    name=NAMES,
    messages=conversations(),
    tools=TOOLS,
    section=st.sampled_from([None, "Answer in JSON."]),
    share=st.booleans(),
)
def test_any_conversation_renders_or_says_why_not(
    name: str, messages: list[BaseMessage], tools: tuple[Tool, ...], section: str | None, share: bool
) -> None:
    shared = shared_turns(DOCUMENT) if share else []
    renderer = RENDERERS[name]

    def render() -> Prompt:
        return renderer.prompt(message_turns(messages), shared, tools=tools, section=section)

    try:
        prompt = render()
    except InvalidRequestError as error:
        assert not share or name != "gemma", "the shared text is a user turn"
        check_refusal(name, messages, str(error))
        return
    assert prompt == render()
    assert prompt.ids == renderer._tokenizer.encode(prompt.text, add_special_tokens=False)
    if share:
        ids = renderer.shared_ids(shared)
        assert prompt.ids[: len(ids)] == ids
    check_nothing_is_lost(name, messages, prompt.text)
    assert section is None or section in prompt.text
    for tool in tools:
        assert tool.name in prompt.text
        assert all(is_shown(key, prompt.text) for key in tool.parameters["properties"])
        assert is_shown(tool.description, prompt.text)


@FUZZ
@given(name=NAMES, parts=shared_conversations(), tools=TOOLS, section=st.sampled_from([None, "Answer in JSON."]))
def test_any_shared_conversation_comes_first(
    name: str, parts: tuple[list[BaseMessage], list[BaseMessage]], tools: tuple[Tool, ...], section: str | None
) -> None:
    given_messages, own = parts
    if not any(message.text.strip() for message in given_messages):
        return
    renderer, shared = RENDERERS[name], shared_turns(given_messages)
    try:
        ids = renderer.shared_ids(shared)
        prompt = renderer.prompt(message_turns(own), shared, tools=tools, section=section)
    except InvalidRequestError as error:
        event("refused")
        # a result that nothing asked for, too, once it is shared as what it is
        check_refusal(name, [*given_messages, *own], str(error), "tool")
        return
    assert prompt.ids[: len(ids)] == ids
    assert len(prompt.ids) > len(ids)
    check_nothing_is_lost(name, own, prompt.text)
    assert all(is_shown(turn["content"], prompt.text) for turn in shared)
    assert section is None or section in prompt.text
    assert all(tool.name in prompt.text for tool in tools)


@FUZZ
@given(
    name=NAMES,
    before=TEXTS,
    after=TEXTS,
    role=st.sampled_from(["system", "user"]),
    rest=conversations(0, 3),
    tools=TOOLS,
)
def test_a_mark_inside_a_message_leaves_the_prompt_as_it_is(
    name: str, before: str, after: str, role: str, rest: list[BaseMessage], tools: tuple[Tool, ...]
) -> None:
    renderer = RENDERERS[name]
    head: Turn = {"role": role, "content": f"{DOCUMENT}{before}"}
    tail: Turn = {"role": role, "content": after}
    whole: Turn = {"role": role, "content": f"{DOCUMENT}{before}{after}"}
    turns = message_turns(rest)
    ids = renderer.shared_ids([head], glued=True)
    try:
        without = renderer.prompt([whole, *turns])
    except InvalidRequestError as error:
        check_refusal(name, [HumanMessage("x") if role == "user" else SystemMessage("x"), *rest], str(error))
        return
    marked = renderer.prompt([tail, *turns], [head], glued=True)
    assert marked == without
    assert marked.ids[: len(ids)] == ids
    told = renderer.prompt([tail, *turns], [head], glued=True, tools=tools)
    assert told.ids[: len(ids)] == ids


@FUZZ
@given(name=NAMES, messages=conversations(), tools=TOOLS, numbers=st.permutations(range(40)))
def test_ids_change_nothing(
    name: str, messages: list[BaseMessage], tools: tuple[Tool, ...], numbers: list[int]
) -> None:
    """Other ids for the same calls, as another run of the same agent has them."""
    renamed = {
        call_id: f"call-{number}"
        for call_id, number in zip(["", "a", "b", "call_0123456789", "🙂"], numbers, strict=False)
    }

    def again(message: BaseMessage) -> BaseMessage:
        if isinstance(message, ToolMessage):
            return message.model_copy(update={"tool_call_id": renamed[message.tool_call_id], "id": "m"})
        if isinstance(message, AIMessage):
            return message.model_copy(
                update={"tool_calls": [{**call, "id": renamed[call["id"]]} for call in message.tool_calls], "id": "m"}
            )
        return message.model_copy(update={"id": "m"})

    def text(messages: list[BaseMessage]) -> str:
        try:
            return RENDERERS[name].prompt_text(message_turns(messages), tools=tools)
        except InvalidRequestError as error:
            return str(error)

    assert text(messages) == text([again(message) for message in messages])


# ------------------------------------------------------------------------------------- tokens of what is shared


def _tokenizer(normalizer: Any, pre_tokenizer: Any, decoder: Any) -> Any:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    alphabet = pre_tokenizers.ByteLevel.alphabet() if isinstance(decoder, decoders.ByteLevel) else list("abcdefgh▁")
    marks = ["<unk>", "<s>", "</s>", "<|end|>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    corpus = ["the goods.\n\nthe carrier:\n\n\n  of 1500 tons...\n\tYou are said.  \n- one\n- two. It's.\n" * 3] * 8
    backend.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
TOKENIZERS = {
    "gpt2": _tokenizer(None, BYTES, decoders.ByteLevel()),
    "gpt2 with a first space": _tokenizer(None, pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
    "composed": _tokenizer(normalizers.NFC(), BYTES, decoders.ByteLevel()),
    "digits": _tokenizer(None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES]), decoders.ByteLevel()),
    "metaspace": _tokenizer(None, pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()),
    "sentencepiece": _tokenizer(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, decoders.Metaspace()
    ),
}
LONG = st.lists(
    st.sampled_from(
        [
            "the goods",
            " are",
            " ",
            "\n",
            "\n\n",
            ".",
            "1500",
            " tons",
            "  \n- ",
            "It's",
            "é",
            "e\u0301",
            "日",
            "<|end|>",
            "🙂",
        ]
    ),
    min_size=40,
    max_size=200,
).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300 if FULL else 8, deadline=None, suppress_health_check=list(HealthCheck))
@given(template=NAMES, document=LONG, glued=st.booleans())
def test_the_shared_tokens_are_those_of_whole_prompts(name: str, template: str, document: str, glued: bool) -> None:
    """The oracle encodes every probe as a whole; the renderer only their ends, where the tokenizer has words."""
    renderer = Renderer(TOKENIZERS[name], TEMPLATES[template])
    shared = shared_turns(f"{DOCUMENT} {document}")
    texts = renderer._continued(shared, glued)
    whole = [renderer._tokenizer.encode(text, add_special_tokens=False) for text in texts]
    differing = (i for i, column in enumerate(zip(*whole, strict=False)) if len(set(column)) > 1)
    same = next(differing, min(map(len, whole)))
    ids = renderer.shared_ids(shared, glued=glued)
    assert ids == whole[0][: len(ids)]
    assert same - 3 <= len(ids) <= same, "the probes with tools and a section may take a token or two"


def test_only_the_ends_are_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(TOKENIZERS["gpt2"], TEMPLATES["qwen"])
    encoded: list[int] = []
    encode = renderer._encode

    def counted(text: str) -> list[int]:
        encoded.append(len(text))
        return encode(text)

    monkeypatch.setattr(renderer, "_encode", counted)
    ids = renderer.shared_ids(shared_turns("the goods are one. " * 2000))
    assert len(ids) > 2000
    assert max(encoded) < 1000
