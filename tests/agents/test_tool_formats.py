"""Formats of tool calls: which one a model writes, how a prompt asks for calls, and grammars that allow nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import pytest
from helpers import FULL, tiny_tokenizer
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from polykv.engine.grammar import Grammar
from polykv.errors import InvalidRequestError
from polykv_agents.tool_calls import (
    FORMATS,
    Call,
    InvalidCall,
    Reasoning,
    Text,
    Tool,
    ToolChoice,
    ToolFormat,
    detect_format,
    get_format,
    template_takes_tools,
)
from polykv_agents.tool_calls.response_template import ResponseTemplateFormat, TemplateJson

WALKS = 200 if FULL else 8

SEARCH = Tool(
    "search",
    "Looks something up.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "count": {"$ref": "#/$defs/Count"},
            "unit": {"enum": ["mile", "km"]},
            "exact": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"},
            "short": {"type": "string", "minLength": 1, "maxLength": 3},
            "where": {"$ref": "#/$defs/Place"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        },
        "required": ["query"],
        "$defs": {
            "Count": {"type": "integer", "minimum": 1, "maximum": 50},
            "Place": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "near": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
                },
                "required": ["name"],
                "additionalProperties": False,
            },
        },
    },
)
NOW = Tool("now", "The time.")
EMPTY = Tool("get-weather.today", "No type, no arguments.", {"properties": {}})
TOOLS = (SEARCH, NOW, EMPTY)
ANSWER = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/Name"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"Name": {"type": "string"}},
}
REASONING: tuple[Reasoning, ...] = ("none", "optional", "open")


class ByteTokens:
    """A tokenizer of single bytes and special tokens, as llguidance takes it."""

    def __init__(self, special: Sequence[str]) -> None:
        self.eos_token_id = 256
        self.bos_token_id = None
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"\xff" + text.encode() for text in ["</s>", *special]]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, data: bytes | str) -> list[int]:
        return list(data if isinstance(data, bytes) else data.encode())


class Judge:
    """Holds texts against grammars."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.special = {text: 257 + number for number, text in enumerate(special)}
        self.tokens = ByteTokens(special)
        self.tokenizer = LLTokenizer(TokenizerWrapper(self.tokens))

    def is_special(self, mark: str) -> int | None:
        return self.special.get(mark)

    def matcher(self, grammar: str) -> LLMatcher:
        Grammar.lark(grammar)  # which refuses what would not be enforced
        matcher = LLMatcher(self.tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def ids(self, text: str, *, letters: bool = False) -> list[int]:
        ids: list[int] = []
        while text:
            mark = next((mark for mark in self.special if text.startswith(mark)), None)
            if mark is None or letters:
                ids += text[0].encode()
                text = text[1:]
            else:
                ids.append(self.special[mark])
                text = text.removeprefix(mark)
        return ids

    def accepts(self, grammar: str, text: str, *, letters: bool = False) -> bool:
        matcher = self.matcher(grammar)
        ids = self.ids(text, letters=letters)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(self, grammar: str, generator: random.Random, snippets: Sequence[str]) -> tuple[str, bool]:
        """A random answer under the masks, and whether it came to an end; now and then it writes a snippet if it may."""
        matcher = self.matcher(grammar)
        ids: list[int] = []
        while len(ids) < 600:
            bias = matcher.compute_logit_bias()
            allowed = [token for token in range(len(self.tokens.tokens)) if bias[token]]
            if not allowed:
                assert matcher.is_stopped() and not matcher.is_error(), matcher.get_error()
                return self.text(ids), True
            if self.tokens.eos_token_id in allowed:
                allowed.remove(self.tokens.eos_token_id)
                if not allowed or generator.random() < 0.3:
                    return self.text(ids), True
            written = [generator.choice(allowed)]
            if generator.random() < 0.4:
                written = self.ids(generator.choice(snippets), letters=generator.random() < 0.3)
                if matcher.validate_tokens(written) < len(written):
                    continue
            elif len(allowed) > 100:
                written = [generator.choice([token for token in allowed if 32 <= token < 127])]
            assert matcher.consume_tokens(written), matcher.get_error()
            ids += written
        return self.text(ids), False

    def text(self, ids: Sequence[int]) -> str:
        parts = [self.tokens.tokens[token] for token in ids]
        return b"".join(part[1:] if part[:1] == b"\xff" and len(part) > 1 else part for part in parts).decode(
            "utf-8", "replace"
        )


def judge_of(tool_format: ToolFormat, *, special: bool) -> Judge:
    marks = [*tool_format.marks, "<think>", "</think>", "[THINK]", "[/THINK]"] if special else []
    return Judge(list(dict.fromkeys(marks)))


BEFORE: Mapping[str, Mapping[Reasoning, str]] = {
    "mistral": {"none": "", "optional": "[THINK]hm[/THINK]", "open": "hm[/THINK]"},
    "mistral_args": {"none": "", "optional": "[THINK]hm[/THINK]", "open": "hm[/THINK]"},
    "gemma4": {"none": "", "optional": "<|channel>thought\nhm<channel|>", "open": "hm<channel|>"},
}
USUAL: Mapping[Reasoning, str] = {
    "none": "",
    "optional": "<think>\nhm\n</think>\n\n",
    "open": "hm\n</think>\n\n",
}

GOOD = (
    Call("search", {"query": "a b"}),
    Call("search", {"query": "mkdir -p test/{a,b", "count": 3, "exact": True}),
    Call("search", {"query": "x", "unit": "km", "limit": None, "code": "ab/1", "short": "abc"}),
    Call("search", {"query": "", "where": {"name": "Rome", "near": {"name": "x", "near": None}}, "tags": ["a", "b"]}),
    Call("now", {}),
    Call("get-weather.today", {}),
)
BAD = (
    Call("forget", {}),
    Call("search", {}),
    Call("search", {"query": "x", "count": "three"}),
    Call("search", {"query": "x", "count": 51}),
    Call("search", {"query": "x", "unit": "yard"}),
    Call("search", {"query": "x", "exact": 1}),
    Call("search", {"query": "x", "code": "ab/x"}),
    Call("search", {"query": "x", "short": "abcd"}),
    Call("search", {"query": "x", "where": {}}),
    Call("search", {"query": "x", "tags": ["a", "b", "c"]}),
    Call("search", {"query": "x", "other": 1}),
    Call("now", {"x": 1}),
    Call("get-weather.today", {"x": 1}),
)


def begins_with_mark(tool_format: ToolFormat) -> bool:
    return tool_format.name not in ("llama3_json", "llama_pythonic", "plain_json")


@pytest.mark.parametrize("special", [False, True], ids=["letters", "special"])
@pytest.mark.parametrize("reasoning", REASONING)
@pytest.mark.parametrize("name", FORMATS)
class TestGrammars:
    @pytest.mark.parametrize("parallel", [True, False])
    @pytest.mark.parametrize("choice", ["auto", "required"])
    def test_calls_that_match_are_allowed_and_no_others(
        self, name: str, reasoning: Reasoning, special: bool, choice: ToolChoice, parallel: bool
    ) -> None:
        tool_format, before = FORMATS[name], BEFORE.get(name, USUAL)[reasoning]
        judge = judge_of(tool_format, special=special)
        grammar = tool_format.grammar(
            TOOLS, choice, parallel=parallel, reasoning=reasoning, is_special=judge.is_special
        )
        for call in GOOD:
            assert judge.accepts(grammar, before + tool_format.write_calls([call])), call
        for call in BAD:
            assert not judge.accepts(grammar, before + tool_format.write_calls([call])), call
        assert judge.accepts(grammar, before + tool_format.write_calls(GOOD[:3])) == parallel
        assert not judge.accepts(grammar, before + tool_format.write_calls([GOOD[0], BAD[0]]))

    def test_prose_is_allowed_unless_a_call_is_required(self, name: str, reasoning: Reasoning, special: bool) -> None:
        tool_format, before = FORMATS[name], BEFORE.get(name, USUAL)[reasoning]
        judge = judge_of(tool_format, special=special)
        call = tool_format.write_calls([GOOD[0]])
        for choice in ("auto", "required"):
            grammar = tool_format.grammar(
                TOOLS,
                choice,
                parallel=True,
                reasoning=reasoning,
                is_special=judge.is_special,  # type: ignore[arg-type]
            )
            for prose in ("", "Hello.", "5 < 6 and <b>", "日本語 🙂\n\n", "Is it { or [?", " x"):
                assert judge.accepts(grammar, before + prose) == (choice == "auto"), prose
            if begins_with_mark(tool_format):
                assert judge.accepts(grammar, f"{before}Well. {call}") == (choice == "auto")
                for letters in (False, True):
                    begun = f"Well. {tool_format.marks[0] if tool_format.marks else '```tool_code'}"
                    assert not judge.accepts(grammar, before + begun, letters=letters)
                    assert not judge.accepts(grammar, f"{before}{begun}\noops", letters=letters)

    def test_with_a_schema_for_the_answer_there_are_calls_or_that_answer(
        self, name: str, reasoning: Reasoning, special: bool
    ) -> None:
        tool_format, before = FORMATS[name], BEFORE.get(name, USUAL)[reasoning]
        judge = judge_of(tool_format, special=special)
        for choice in ("auto", "required"):
            grammar = tool_format.grammar(
                TOOLS,
                choice,
                parallel=True,
                answer=ANSWER,
                reasoning=reasoning,
                is_special=judge.is_special,  # type: ignore[arg-type]
            )
            for call in GOOD:
                assert judge.accepts(grammar, before + tool_format.write_calls([call]))
            assert judge.accepts(grammar, before + tool_format.write_calls(GOOD[:2]))
            assert judge.accepts(grammar, before + '{"name": "Bob", "age": 3}') == (choice == "auto")
            for other in (
                "",
                "Hello.",
                '{"name": 3}',
                '{"name": "Bob"} ok',
                '{"age": 3}',
                "Well. " + tool_format.write_calls(GOOD[:1]),
            ):
                assert not judge.accepts(grammar, before + other), other

    def test_without_tools_the_answer_is_the_json_alone(self, name: str, reasoning: Reasoning, special: bool) -> None:
        tool_format, before = FORMATS[name], BEFORE.get(name, USUAL)[reasoning]
        judge = judge_of(tool_format, special=special)
        grammar = tool_format.grammar(
            (), "auto", parallel=True, answer=ANSWER, reasoning=reasoning, is_special=judge.is_special
        )
        assert judge.accepts(grammar, before + '{"name": "Bob"}')
        for other in ("", "Hello.", '{"name": "Bob"}\nok', tool_format.write_calls([Call("now", {})])):
            assert not judge.accepts(grammar, before + other)
        if reasoning == "open":
            assert not judge.accepts(grammar, '{"name": "Bob"}')

    def test_whatever_the_grammar_allows_is_read_as_valid_calls(
        self, name: str, reasoning: Reasoning, special: bool
    ) -> None:
        tool_format = FORMATS[name]
        judge = judge_of(tool_format, special=special)
        generator = random.Random(f"{name} {reasoning} {special}")
        written = tool_format.write_calls(GOOD)
        snippets = [
            *(mark for mark in tool_format.marks),
            *("</think>\n\n", "[/THINK]", "<channel|>", "</parameter>\n", '"', '"', "}", "]", ")", ", ", "\n```", "\n"),
            *(written[i : i + 12] for i in range(0, len(written), 7)),
        ]
        schemas = {tool.name: tool.parameters for tool in TOOLS}
        ended = 0
        for number in range(WALKS):
            choice: ToolChoice = "required" if number % 2 else "auto"
            answer = ANSWER if number % 3 == 2 else None
            grammar = tool_format.grammar(
                TOOLS, choice, parallel=number % 4 < 2, answer=answer, reasoning=reasoning, is_special=judge.is_special
            )
            text, complete = judge.walk(grammar, generator, snippets)
            ended += complete
            parser = tool_format.parser(TOOLS, reasoning=reasoning, json_answer=answer is not None)
            events = [*parser.feed(text), *parser.finish(complete=complete)]
            calls = [event for event in events if isinstance(event, Call)]
            for call in calls:
                jsonschema.validate(dict(call.arguments), dict(schemas[call.name]))
            if complete:
                assert not any(isinstance(event, InvalidCall) for event in events), (text, events)
                visible = "".join(event.text for event in events if isinstance(event, Text))
                if choice == "required":
                    assert calls and not visible, text
                if answer is not None and not calls:
                    jsonschema.validate(json.loads(visible), ANSWER)
        assert ended


@pytest.mark.parametrize("name", FORMATS)
def test_schemas_that_are_not_plain_lists_of_properties_can_be_held_to(name: str) -> None:
    judge = Judge()
    root = {
        "$ref": "#/$defs/A",
        "$defs": {"A": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    either = {"type": "object", "anyOf": [{"properties": {"x": {"type": "integer"}}, "required": ["x"]}]}
    odd = {
        "type": "object",
        "properties": {"class": {"type": "integer"}, "a b": {"type": "integer"}},
        "required": ["class"],
    }
    for parameters, good in ((root, {"x": 1}), (either, {"x": 1}), (odd, {"class": 1, "a b": 2})):
        tool = Tool("f", "", parameters)
        tool_format = FORMATS[name]
        if name == "qwen3_coder" and parameters is either:
            with pytest.raises(InvalidRequestError, match="'f'.*one by one"):
                tool_format.grammar([tool], "required", parallel=False)
            continue
        grammar = tool_format.grammar([tool], "required", parallel=False)
        text = tool_format.write_calls([Call("f", good)])
        if parameters is either and name in ("llama_pythonic", "gemma"):
            text = text.replace("f(x=1)", 'f(**{"x": 1})')
        if parameters is either and name in ("function_gemma", "gemma4"):
            text = text.replace("{x:1}", '{"x": 1}')
        if parameters is odd and name in ("llama_pythonic", "gemma"):
            text = text.replace("f(class=1", "f(class=1")
        if parameters is odd and name in ("function_gemma", "gemma4"):
            text = tool_format.write_calls([Call("f", {})]).replace("{}", '{"class": 1, "a b": 2}')
        assert judge.accepts(grammar, text), (text, grammar)
        parser = tool_format.parser([tool])
        assert [*parser.feed(text), *parser.finish(complete=True)] == [Call("f", good)]


def test_parameters_that_are_no_object_are_refused_by_name() -> None:
    for tool_format in FORMATS.values():
        with pytest.raises(InvalidRequestError, match=r"'broken'.*'string'.*object"):
            tool_format.grammar([Tool("broken", "", {"type": "string"})], "auto", parallel=True)


def test_arguments_that_no_schema_names_need_to_be_asked_for() -> None:
    judge = Judge()
    extra = FORMATS["hermes"].write_calls([Call("f", {"x": 1, "y": 2})])
    for strict, schema, allowed in (
        (None, {"properties": {"x": {}}}, False),
        (True, {"properties": {"x": {}}}, False),
        (False, {"properties": {"x": {}}}, True),
        (None, {"properties": {"x": {}}, "additionalProperties": True}, True),
    ):
        grammar = FORMATS["hermes"].grammar([Tool("f", "", schema, strict)], "required", parallel=True)
        assert judge.accepts(grammar, extra) == allowed


# ------------------------------------------------------------------------------------------------- prompts and results


@pytest.mark.parametrize("name", FORMATS)
def test_equal_tools_give_equal_instructions_that_tell_all_of_them(name: str) -> None:
    tool_format = FORMATS[name]
    text = tool_format.instructions(TOOLS, "auto", parallel=True)
    again = [Tool(tool.name, tool.description, json.loads(json.dumps(tool.parameters))) for tool in TOOLS]
    assert tool_format.instructions(again, "auto", parallel=True) == text
    for tool in TOOLS:
        assert json.dumps(tool.openai()["function"], ensure_ascii=False) in text.splitlines()
    assert tool_format.instructions(TOOLS, "required", parallel=True) != text
    assert tool_format.instructions(TOOLS, "auto", parallel=False) != text


@pytest.mark.parametrize("name", FORMATS)
def test_the_example_in_the_instructions_is_of_the_format(name: str) -> None:
    tool_format = FORMATS[name]
    example = tool_format.example()  # type: ignore[attr-defined]
    assert example in tool_format.instructions(TOOLS, "auto", parallel=True)
    for named in ("tool name", "tool_name"):
        parser = tool_format.parser([Tool(named)])
        events = [*parser.feed(example), *parser.finish(complete=True)]
        if events and isinstance(events[0], Call):
            assert "value" in events[0].arguments.values()
            return
    pytest.fail(f"{example!r} is not read as a call")


@pytest.mark.parametrize("name", FORMATS)
def test_a_result_carries_its_tool_and_content(name: str) -> None:
    text = FORMATS[name].write_result("search", 'two "lines"\nof text')
    assert "lines" in text and "of text" in text


# ------------------------------------------------------------------------------------------------------------ registry

TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{% endif %}",
    "qwen3_coder": "{% for t in tools %}{% endfor %}<tool_call>\n<function=example>\n<parameter=x>",
    "llama3_json": '{{ tools }} Respond in the format {"name": function name, "parameters": dictionary of argument name}',
    "llama_pythonic": "{{ tools }}<|python_start|>",
    "mistral": '{{ "[AVAILABLE_TOOLS]" + tools|tojson }}[TOOL_CALLS] [',
    "mistral_args": "{{ tools|tojson }}[TOOL_CALLS]{{ name }}[ARGS]",
    "gemma": "<start_of_turn>user\n{{ messages[0].content }}<end_of_turn>",
    "function_gemma": "{{ tools }}<start_function_call>call:",
    "gemma4": "{{ tools }}<|tool_call>call:",
    "phi": "<|tool|>{{ message['tools'] }}<|/tool|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_marks_in_a_chat_template_tell_the_format(name: str) -> None:
    assert detect_format(TEMPLATES[name], None) is FORMATS[name]


def test_without_marks_the_format_is_hermes() -> None:
    assert detect_format(None, None).name == "hermes"
    assert detect_format("{{ messages }}", tiny_tokenizer()).name == "hermes"


def test_a_response_template_tells_the_format_where_the_chat_template_does_not() -> None:
    tokenizer = tiny_tokenizer()
    field: dict[str, Any] = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
    tokenizer.response_template = {"start_anchor": "x", "fields": {"content": {}, "tool_calls": field}}
    assert detect_format(tokenizer.chat_template, tokenizer).name == "hermes"
    field["transform"] = {"type": "function", "function": "{content}"}
    field["open"], field["close"] = "<<", ">>"
    own = detect_format(tokenizer.chat_template, tokenizer)
    assert isinstance(own, TemplateJson)
    assert own.write_calls([Call("now", {})]) == '<<\n{"name": "now", "arguments": {}}\n>>'
    del field["open"]
    field["open_pattern"] = r"<invoke (?P<name>\w+)>"
    field["transform"] = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    other = detect_format(tokenizer.chat_template, tokenizer)
    assert isinstance(other, ResponseTemplateFormat)
    assert Judge().accepts(other.grammar(TOOLS, "auto", parallel=True), "anything")
    with pytest.raises(InvalidRequestError, match="response_template"):
        other.grammar(TOOLS, "required", parallel=True)
    with pytest.raises(InvalidRequestError, match="response_template"):
        other.instructions(TOOLS, "auto", parallel=True)
    tokenizer.response_template = {"start_anchor": "x", "fields": {"content": {}}}
    assert detect_format(tokenizer.chat_template, tokenizer).name == "hermes"


def test_an_unknown_format_is_an_error_that_names_the_known_ones() -> None:
    assert get_format("phi") is FORMATS["phi"]
    with pytest.raises(InvalidRequestError, match=r"'psi'.*hermes.*phi"):
        get_format("psi")


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        (None, False),
        ("", False),
        ("{{ messages }}", False),
        ("no tools here, {# nor tools here #}{{ messages }}", False),
        ("{{ 'tools' }}", False),
        ("{{ message.tools }}", False),
        ("{% if tools %}x{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{% for m in messages %}{% if loop.last and tools %}x{% endif %}{% endfor %}", True),
        ("{% macro f(x) %}{{ tools | tojson }}{% endmacro %}{{ f(1) }}", True),
        ("{% for m in messages %}{% break %}{% endfor %}{{ tools }}", True),
        ("{% generation %}{{ tools }}{% endgeneration %}", True),
        ("{% generation %}tools{% endgeneration %}", False),
    ],
)
def test_whether_a_template_takes_tools(template: str | None, takes: bool) -> None:
    assert template_takes_tools(template) == takes
