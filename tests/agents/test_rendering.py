"""Rendering: the shared context comes first, whatever the template, the tokenizer and the texts."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
from helpers import CHATML, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from polykv.errors import InvalidRequestError
from polykv_agents.rendering import Renderer
from polykv_agents.turns import SEPARATOR, merge_turns, message_text, message_turns, shared_turns

EXAMPLES = 150 if os.environ.get("POLYKV_TEST_FULL") == "1" else 15
PROPERTY = settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)

# ---------------------------------------------------------------------------------------------- templates
# As the families ship them, cut down to the order of their parts.

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
DATED_LLAMA3 = LLAMA3.replace("{{ bos_token }}", "{{ bos_token }}Today: {{ strftime_now('%d %b %Y') }}\n\n")
GEMMA_BODY = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + GEMMA_BODY
)
GEMMA_SILENT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set messages = messages[1:] %}{% endif %}" + GEMMA_BODY
)
MISTRAL = (  # v0.1: the system message belongs to the first user turn
    "{{ bos_token }}{% set ns = namespace(system='') %}"
    "{% if messages[0]['role'] == 'system' %}{% set ns.system = messages[0]['content'] + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, roles must alternate user/assistant') }}"
    "{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + (ns.system if loop.first else '') + message['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_LAST = MISTRAL.replace("loop.first", "loop.last")  # v0.3: to the last user turn
QWEN3 = (  # thoughts are left out of earlier answers
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = (  # puts a system message of its own where there is none
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}" + CHATML
)
TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")

SHARING = {  # name: (template, whether it trims contents)
    "chatml": (CHATML, False),
    "qwen": (QWEN, False),
    "llama3": (LLAMA3, True),
    "dated-llama3": (DATED_LLAMA3, True),
    "gemma": (GEMMA, True),
    "gemma-silent": (GEMMA_SILENT, True),
    "mistral": (MISTRAL, False),
    "trimming": (TRIMMING, True),
}
NOT_SHARING = {
    "clock-first": "{{ strftime_now('%H:%M:%S.%f') }}\n" + CHATML,
    "question-first": "{{ messages[-1]['content'] }}\n" + CHATML,
    "length-first": "{{ bos_token }}{{ messages | map(attribute='content') | join | length }} characters\n" + CHATML,
}

# --------------------------------------------------------------------------------------------- tokenizers

CORPUS = "the bond.\n\nthe court:\n\n\n  of 1500 men...\n\tassistant user said.\n\nYou are\n\n\n\nthe end. \n"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_of(pre_tokenizer: Any, *, with_bos_processor: bool = False) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS] * 8, trainer)
    if with_bos_processor:
        backend.post_processor = TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    # words apart from spaces; spaces and digits in runs; one that merges across everything
    "gpt2": tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=False), with_bos_processor=True),
    "llama3": tokenizer_of(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(CL100K), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        with_bos_processor=True,
    ),
    "unsplit": tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
}
RENDERERS = {
    (template, name): Renderer(tokenizer, SHARING[template][0])
    for template in SHARING
    for name, tokenizer in TOKENIZERS.items()
}


def decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def turns_of(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [turn(*pair) for pair in pairs]


# ----------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ([], ""),
        (["a", "b"], "ab"),
        ([{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c\x00🙂"}], "abc\x00🙂"),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
    ],
)
def test_text_of_a_message(content: Any, text: str) -> None:
    assert message_text(HumanMessage(content)) == text


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "'image_url'"),
        ({"type": "image", "base64": "AA==", "mime_type": "image/png"}, "'image'"),
        ({"type": "audio"}, "'audio'"),
        ({"no": "type"}, "'?'"),
        ({"type": "text"}, "'text'"),
        ({"type": "text", "text": 3}, "'text'"),
    ],
)
def test_content_that_is_not_text_is_refused_by_its_type(block: dict[str, Any], named: str) -> None:
    message = HumanMessage([{"type": "text", "text": "look"}, block])
    with pytest.raises(InvalidRequestError, match="reads text only") as caught:
        message_text(message)
    assert named in str(caught.value)
    assert "human" in str(caught.value)


@pytest.mark.parametrize(
    ("message", "role"),
    [
        (SystemMessage("x"), "system"),
        (HumanMessage("x"), "user"),
        (AIMessage("x"), "assistant"),
        (AIMessageChunk("x"), "assistant"),
    ],
)
def test_role_of_a_message(message: BaseMessage, role: str) -> None:
    assert message_turns([message]) == [turn(role, "x")]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (ChatMessage("x", role="critic"), "'critic'"),
        (RemoveMessage(id="1"), "'remove'"),
        (HumanMessage([{"type": "image", "url": "x"}]), "'image'"),
        (ToolMessage([{"type": "audio", "base64": "x"}], tool_call_id="1"), "'audio'"),
    ],
)
def test_messages_that_are_not_supported_are_refused(message: BaseMessage, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        message_turns([message])


# -------------------------------------------------------------------------------------------------- turns

ROLES = st.sampled_from(["system", "user", "assistant"])


@PROPERTY
@given(st.lists(st.tuples(ROLES, st.text(max_size=5)), max_size=8))
def test_merged_turns_alternate_and_lose_nothing(pairs: list[tuple[str, str]]) -> None:
    turns = turns_of(*pairs)
    before = [dict(t) for t in turns]
    merged = merge_turns(turns)
    assert turns == before, "the caller's turns were changed"
    roles = [t["role"] for t in merged]
    assert all(a != b for a, b in pairwise(roles))
    assert "system" not in roles[1:]
    assert SEPARATOR.join(t["content"] for t in merged) == SEPARATOR.join(content for _, content in pairs)
    assert merge_turns(merged) == merged


def test_a_late_system_message_heads_the_user_turn_after_it() -> None:
    turns = turns_of(("system", "a"), ("user", "b"), ("assistant", "c"), ("system", "d"), ("user", "e"))
    assert merge_turns(turns) == [*turns[:3], turn("user", "d\n\ne")]


@pytest.mark.parametrize(
    ("context", "turns"),
    [
        ("a text", [turn("system", "a text")]),
        (["one"], [turn("system", "one")]),
        (("one",), [turn("system", "one")]),
        (["one", "two"], [turn("system", "[Document 1]\none\n\n[Document 2]\ntwo")]),
        ([Document("one", metadata={"title": "T"})], [turn("system", "one")]),
        (
            [
                Document("one", metadata={"title": "T"}),
                Document("two", metadata={"source": "s.txt"}),
                "three",
            ],
            [turn("system", "[Document 1: T]\none\n\n[Document 2: s.txt]\ntwo\n\n[Document 3]\nthree")],
        ),
        ([SystemMessage("s"), HumanMessage("h")], [turn("system", "s"), turn("user", "h")]),
        (
            [HumanMessage("h"), HumanMessage("i"), AIMessage("a")],
            [turn("user", "h\n\ni"), turn("assistant", "a")],
        ),
    ],
)
def test_turns_of_a_shared_context(context: Any, turns: list[dict[str, str]]) -> None:
    assert shared_turns(context) == turns


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ("", "empty or white space"),
        (" \n\t\u3000", "empty or white space"),
        ([HumanMessage("")], "empty or white space"),
        ([HumanMessage([]), AIMessage(" ")], "empty or white space"),
        ([""], "empty or white space"),
        ([Document(" \n")], "empty or white space"),
        ([], "cannot share"),
        (None, "cannot share.*None"),
        (7, "cannot share.*7"),
        (b"bytes", "give strings and documents, or messages"),
        ([b"bytes"], "bytes"),
        (["a", HumanMessage("b")], "HumanMessage, str"),
        ([HumanMessage([{"type": "image_url", "image_url": "x"}])], "image_url"),
        (["", "  "], "empty or white space"),
        ([Document(""), Document("\n")], "empty or white space"),
    ],
)
def test_nothing_to_share_is_refused(context: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        shared_turns(context)


# ---------------------------------------------------------------------------------------------- templates


def test_a_system_turn_is_merged_with_the_shared_text() -> None:
    tokenizer = TOKENIZERS["gpt2"]
    turns = [turn("system", "The text."), turn("system", "You are a judge."), turn("user", "Who pays?")]
    merged = [turn("system", "The text.\n\nYou are a judge."), turn("user", "Who pays?")]
    for name in ("chatml", "qwen", "llama3", "mistral", "trimming"):
        template = SHARING[name][0]
        want = tokenizer.apply_chat_template(merged, chat_template=template, add_generation_prompt=True, tokenize=False)
        assert RENDERERS[name, "gpt2"].text(turns) == want, name


@pytest.mark.parametrize("name", ["gemma", "gemma-silent"])
def test_without_a_system_role_everything_heads_the_first_user_turn(name: str) -> None:
    turns = turns_of(("system", "The text."), ("system", "Be brief."), ("user", "Who?"), ("assistant", "He."))
    assert RENDERERS[name, "gpt2"].text([*turns, turn("user", "Why?")]) == (
        "<s><start_of_turn>user\nThe text.\n\nBe brief.\n\nWho?<end_of_turn>\n"
        "<start_of_turn>model\nHe.<end_of_turn>\n<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert RENDERERS[name, "gpt2"].text(turns[:1]) == (
        "<s><start_of_turn>user\nThe text.<end_of_turn>\n<start_of_turn>model\n"
    )


def test_neighbours_of_one_role_satisfy_a_template_that_insists_on_alternation() -> None:
    turns = turns_of(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e"))
    assert RENDERERS["mistral", "gpt2"].text(turns) == "<s>[INST] a\n\nb[/INST] c\n\nd</s>[INST] e[/INST]"


def test_turns_that_a_template_refuses_are_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"\(assistant, user\).*must alternate"):
        RENDERERS["mistral", "gpt2"].text([turn("assistant", "a"), turn("user", "b")])


def test_no_messages_and_no_template_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one"):
        RENDERERS["chatml", "gpt2"].text([])
    with pytest.raises(InvalidRequestError, match=r"no chat template.*chat_template="):
        Renderer(tiny_tokenizer(chat_template=None))


def test_a_tokenizer_with_named_templates_uses_its_default() -> None:
    tokenizer = tiny_tokenizer()
    want = Renderer(tokenizer).text([turn("user", "x")])
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools }}"}
    assert Renderer(tokenizer).text([turn("user", "x")]) == want


@pytest.mark.parametrize("name", NOT_SHARING)
def test_a_template_that_puts_something_else_first_is_refused(name: str) -> None:
    renderer = Renderer(TOKENIZERS["gpt2"], NOT_SHARING[name])
    with pytest.raises(InvalidRequestError, match=r"does not put the shared context first.*chat_template="):
        renderer.shared_ids([turn("system", "The bond of the merchant, before the court.")])


def test_an_empty_first_turn_does_not_hide_that_nothing_is_shared() -> None:
    renderer = Renderer(TOKENIZERS["gpt2"], NOT_SHARING["length-first"])
    with pytest.raises(InvalidRequestError, match="does not put the shared context first"):
        renderer.shared_ids([turn("system", ""), turn("user", "The bond of the merchant.")])


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
@pytest.mark.parametrize("template", SHARING)
def test_the_template_alone_writes_special_tokens(template: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    renderer = RENDERERS[template, name]
    turns = turns_of(("system", "The text."), ("user", "Who?"), ("assistant", "He."), ("user", "Why?"))
    ids = renderer.ids(turns)
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id, "this tokenizer would add BOS and EOS"
    assert ids.count(tokenizer.bos_token_id) == SHARING[template][0].count("bos_token")
    assert ids[-1] != tokenizer.eos_token_id
    assert decode(tokenizer, ids) == renderer.text(turns)
    if "gemma" not in template:  # there the renderer moves the system turn
        want = tokenizer.apply_chat_template(
            turns, chat_template=SHARING[template][0], add_generation_prompt=True, return_dict=False
        )
        assert ids == want


# --------------------------------------------------------------------------------------------- properties

# fmt: off
SNIPPETS = (
    "the court", "You", "s", "a", "1234", " ", "  ", "\n", "\n\n", "\n\n\n", "\t", "\r\n", "\r", ".", ".\n",
    "...", "- ", "🙂", "👩‍👩‍👧", "🇩🇪", "日本語", "ไทย", "שלום", "مرحبا", "\u202eabc\u202c", "e\u0301", "\u0301",
    "\u00e9", "ﬁ", "\u00a0", "\ufeff", "\u2028", "\ufffd", "\x00", "\x1b[0m", "{{ messages }}", "{% if x %}", "<",
    "<|im_end|>", "<s>", "</s>", "[INST]", "\\n",
)
# fmt: on
TEXTS = st.one_of(
    st.lists(st.sampled_from(SNIPPETS), max_size=8).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
HISTORIES = st.lists(st.tuples(TEXTS, TEXTS), max_size=2)


@st.composite
def continuations(draw: st.DrawFn) -> list[dict[str, str]]:
    """What an agent may say over a shared context: a role or none, a history or none, and a question."""
    role = draw(st.one_of(st.none(), TEXTS))
    turns = [turn("system", role)] if role is not None else []
    for question, answer in draw(HISTORIES):
        turns += [turn("user", question), turn("assistant", answer)]
    return [*turns, turn("user", draw(TEXTS))]


def check_prefix(renderer: Renderer, tokenizer: Any, shared: list[dict[str, str]], own: list[dict[str, str]]) -> None:
    prefix = renderer.shared_ids(shared)
    full = renderer.ids([*shared, *own])
    assert full[: len(prefix)] == prefix
    assert len(prefix) < len(full)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", SHARING)
@PROPERTY
@given(body=TEXTS, own=continuations())
def test_the_shared_ids_start_every_prompt_and_the_text_survives(
    template: str, name: str, body: str, own: list[dict[str, str]]
) -> None:
    renderer, tokenizer, trims = RENDERERS[template, name], TOKENIZERS[name], SHARING[template][1]
    document = f"This bond, between merchant and moneylender: {body}"
    shared = shared_turns(document)
    check_prefix(renderer, tokenizer, shared, own)
    text = decode(tokenizer, renderer.ids([*shared, *own]))
    assert (document.rstrip() if trims else document) in text
    # what is left to the readers is the end, not the text
    prefix = decode(tokenizer, renderer.shared_ids(shared))
    assert document.rstrip()[:-24] in prefix
    assert prefix.count("<s>") <= SHARING[template][0].count("bos_token") + document.count("<s>")


@pytest.mark.parametrize("template", SHARING)
@PROPERTY
@given(
    messages=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=2),
    system=st.one_of(st.none(), TEXTS),
    ends_with_user=st.booleans(),
    own=continuations(),
)
def test_a_shared_conversation_starts_every_prompt(
    template: str,
    messages: list[tuple[str, str]],
    system: str | None,
    ends_with_user: bool,
    own: list[dict[str, str]],
) -> None:
    shared = [turn("system", f"The rules. {system}")] if system is not None else []
    for question, answer in messages:
        shared += [turn("user", f"The question. {question}"), turn("assistant", f"The answer. {answer}")]
    if ends_with_user:
        shared += [turn("user", "One more thing.")]
    check_prefix(RENDERERS[template, "llama3"], TOKENIZERS["llama3"], shared, own)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["the bond", "it", "日", "x\n", "the bond."])
def test_a_short_text_can_be_shared(text: str, name: str) -> None:
    """Also where its last full stop is one token with the line breaks after it, as with Llama 3 and Qwen."""
    renderer = RENDERERS["chatml", name]
    check_prefix(renderer, TOKENIZERS[name], shared_turns(text), [turn("user", "Who?")])


def test_a_template_that_moves_the_system_message_to_the_last_turn_still_shares() -> None:
    """Mistral v0.3 and later: in a conversation the text comes after the history, so each call prefills it."""
    tokenizer = TOKENIZERS["gpt2"]
    renderer = Renderer(tokenizer, MISTRAL_LAST)
    own = [turn("user", "Who?"), turn("assistant", "He."), turn("user", "Why?")]
    check_prefix(renderer, tokenizer, shared_turns("This bond, between merchant and moneylender."), own)


def test_a_conversation_with_thoughts_that_the_template_leaves_out_can_be_shared() -> None:
    renderer = Renderer(TOKENIZERS["gpt2"], QWEN3)
    shared = turns_of(("user", "Who owes?"), ("assistant", "<think>\nThe bond says so.\n</think>\n\nThe merchant."))
    check_prefix(renderer, TOKENIZERS["gpt2"], shared, [turn("user", "Why?")])


@pytest.mark.parametrize(
    "text",
    [
        "emoji 👩‍👩‍👧🇩🇪🙂",
        "漢字かな交じり文、한국어",
        "עברית وعربي \u202e\u202c",
        "NUL \x00 in \x00\x00 the middle\x00",
        "trailing spaces   \n\n",
        "\r\nWindows\r\nlines\t",
        "e\u0301 and \u00e9, \u1112\u1161\u11ab",
        "{{ messages }} {% raw %} {# no #}",
    ],
)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_in_every_script_round_trip(text: str, name: str) -> None:
    renderer, tokenizer = RENDERERS["chatml", name], TOKENIZERS[name]
    turns = [*shared_turns(text), turn("user", text)]
    assert decode(tokenizer, renderer.ids(turns)) == (
        f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_half_a_surrogate_pair_is_refused_clearly() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        RENDERERS["chatml", "gpt2"].ids([turn("user", "read with surrogateescape: \udcff")])
