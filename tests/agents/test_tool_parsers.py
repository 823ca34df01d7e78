"""Parsers of tool calls: what models write, in whatever pieces it arrives, whole, broken or cut off."""

from __future__ import annotations

import json
import random
import string
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from helpers import FULL
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polykv_agents.tool_calls import FORMATS, Call, Event, InvalidCall, Reasoning, Text, Thought, Tool, ToolFormat
from polykv_agents.tool_calls.json_text import MAX_DEPTH, parse_json
from polykv_agents.tool_calls.reading import CallReader
from polykv_agents.tool_calls.response_template import from_response_template
from polykv_agents.tool_calls.streaming import CallParser, Source, Wait

searched = settings(max_examples=2000 if FULL else 120, deadline=None, derandomize=not FULL, database=None)
MALFORMED = 10_000 if FULL else 2_500

TOOLS = (
    Tool(
        "search",
        "Looks something up.",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "count": {"type": "integer"},
                "exact": {"type": "boolean"},
                "filters": {"type": "object"},
                "tags": {"type": "array"},
                "score": {"type": "number"},
                "nothing": {"type": "null"},
            },
            "required": ["query"],
        },
    ),
    Tool("now"),
    Tool("run-it.now", "A name with a hyphen and a dot.", {"properties": {"command": {"type": "string"}}}),
)
NAMES = [tool.name for tool in TOOLS]

TEMPLATE_FORMATS = {
    "template-json": from_response_template(
        {
            "start_anchor": "<assistant>",
            "fields": {
                "content": {"content": "text"},
                "tool_calls": {
                    "open": "<<call>>",
                    "close": "<</call>>",
                    "repeats": True,
                    "content": "json",
                    "transform": {"type": "function", "function": "{content}"},
                },
            },
        }
    ),
    "template-tags": from_response_template(
        {
            "start_anchor": "<assistant>",
            "fields": {
                "content": {"content": "text"},
                "tool_calls": {
                    "open_pattern": r"<invoke name=(?P<name>[\w.-]+)>",
                    "close": "</invoke>",
                    "repeats": True,
                    "content": "json",
                    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
                },
            },
        }
    ),
}
ALL: dict[str, ToolFormat] = {**FORMATS, **TEMPLATE_FORMATS}
OURS = {name: tool_format for name, tool_format in ALL.items() if name != "template-tags"}  # that can write calls

hermes = FORMATS["hermes"]


def merged(events: Sequence[Event]) -> list[Event]:
    """Neighbouring texts and thoughts joined."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            result[-1] = Thought(last.text + event.text)
        else:
            result.append(event)
    return result


def parse(
    tool_format: ToolFormat,
    pieces: str | Sequence[str],
    *,
    tools: Sequence[Tool] = TOOLS,
    complete: bool = True,
    reasoning: Reasoning = "none",
) -> list[Event]:
    parser = tool_format.parser(tools, reasoning=reasoning)
    events: list[Event] = []
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        events += parser.feed(piece)
    return merged(events + parser.finish(complete=complete))


def letters(text: str) -> list[str]:
    return list(text)


def calls_of(events: Sequence[Event]) -> list[Call]:
    return [event for event in events if isinstance(event, Call)]


# ---------------------------------------------------------------------------------------------- whole, in any pieces

plain_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
scalars = st.one_of(
    plain_text,
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(plain_text, inner, max_size=3)),
    max_leaves=6,
)
ANY_KEYS = st.dictionaries(plain_text, values, max_size=4)
TYPED: dict[str, Any] = {
    "query": plain_text,
    "count": st.integers(-(2**70), 2**70),
    "exact": st.booleans(),
    "filters": st.dictionaries(plain_text, values, max_size=3),
    "tags": st.lists(values, max_size=3),
    "score": st.floats(allow_nan=False, allow_infinity=False),
    "nothing": st.none(),
}
TYPED_ARGUMENTS = st.fixed_dictionaries({}, optional=TYPED)
AWKWARD = (
    "mkdir -p test/{a,b",
    "say </tool_call> and <tool_call>",
    "a\nb\r\n\tc",
    'it\'s "quoted" \\d \\',
    "]}>)",
    '[TOOL_CALLS][ARGS] ``` ```tool_code functools[ <escape> <|"|> <tool_call|> <|/tool_call|> <end_function_call>',
    "日本語 🙂",
    "",
    " ",
    "'''",
    '"""',
    "[/THINK]</think>",
)


@st.composite
def call_lists(draw: st.DrawFn, arguments: Any = TYPED_ARGUMENTS) -> list[Call]:
    calls = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(["search", "now"]))
        given_arguments = draw(arguments) if name == "search" else {}
        if "query" in given_arguments and draw(st.booleans()):
            given_arguments["query"] = draw(st.sampled_from(AWKWARD))
        calls.append(Call(name, given_arguments))
    return calls


def representable(tool_format: ToolFormat, calls: Sequence[Call]) -> bool:
    """Values between tags have no escapes: a string that looks like the rest of the call cannot be written."""
    return tool_format.name != "qwen3_coder" or not any(
        "</parameter>" in json.dumps(dict(call.arguments)) for call in calls
    )


@pytest.mark.parametrize("name", OURS)
@searched
@given(calls=call_lists(), data=st.data())
def test_what_a_format_writes_it_reads_back(name: str, calls: list[Call], data: st.DataObject) -> None:
    tool_format = OURS[name]
    assume(representable(tool_format, calls))
    text = tool_format.write_calls(calls)
    assert parse(tool_format, text) == calls
    assert parse(tool_format, letters(text)) == calls


@pytest.mark.parametrize("name", [name for name in OURS if name != "qwen3_coder"])
@searched
@given(calls=call_lists(ANY_KEYS))
def test_arguments_may_have_any_names(name: str, calls: list[Call]) -> None:
    assert parse(OURS[name], OURS[name].write_calls(calls)) == calls


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("value", AWKWARD)
def test_braces_quotes_and_marks_inside_strings_do_not_confuse(name: str, value: str) -> None:
    calls = [Call("search", {"query": value, "count": 1}), Call("now", {}), Call("run-it.now", {"command": value})]
    text = OURS[name].write_calls(calls)
    assert parse(OURS[name], text) == calls
    assert parse(OURS[name], letters(text)) == calls


def pieces_of(name: str) -> tuple[str, ...]:
    """Fragments from which answers of a format are put together: its marks, their beginnings, JSON, quotes, words."""
    whole = (
        OURS[name].write_calls([Call("search", {"query": "a b", "count": 1})])
        if name in OURS
        else ('<invoke name=search>{"query": "a b"}</invoke>')
    )
    two = OURS[name].write_calls([Call("now", {}), Call("search", {"query": "}"})]) if name in OURS else whole * 2
    marks = ALL[name].marks
    return (
        whole,
        two,
        *marks,
        *(mark[: len(mark) // 2] for mark in marks),
        *(mark[1:] for mark in marks),
        whole[: len(whole) // 2],
        whole[len(whole) // 2 :],
        *"{}[]()\"'\\,;:=`<>",
        " ",
        "\n",
        "\n\n",
        "```",
        "```json\n",
        "functools[",
        "<function=search>",
        "<parameter=query>",
        "</parameter>",
        "</function>",
        '{"name": "now"}',
        '{"name": "search", "arguments": {"query": ',
        '{"name": "Bob", "age": 3}',
        "[now()]",
        "[search(query=",
        "call:now{}",
        "now[ARGS]{}",
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "word",
        "é",
        "🙂",
        "1",
    )


@pytest.mark.parametrize("name", ALL)
@searched
@given(data=st.data())
def test_any_pieces_give_the_same_events(name: str, data: st.DataObject) -> None:
    tool_format = ALL[name]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces_of(name)), max_size=12)))
    reasoning: Reasoning = data.draw(st.sampled_from(["none", "optional", "open"]))
    complete = data.draw(st.booleans())
    tools = data.draw(st.sampled_from([TOOLS, TOOLS[:1], ()]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(tool_format, text, tools=tools, complete=complete, reasoning=reasoning)
    assert parse(tool_format, pieces, tools=tools, complete=complete, reasoning=reasoning) == whole
    assert parse(tool_format, letters(text), tools=tools, complete=complete, reasoning=reasoning) == whole


@pytest.mark.parametrize("name", ALL)
@searched
@given(text=plain_text, space=st.sampled_from(["", " ", "\n", "\n\n \t"]))
def test_an_answer_without_calls_comes_out_exactly_as_it_is(name: str, text: str, space: str) -> None:
    answer = space + text + space
    for tools in (TOOLS, ()):
        assert parse(ALL[name], answer, tools=tools) == ([Text(answer)] if answer else [])
        assert parse(ALL[name], letters(answer), tools=tools) == ([Text(answer)] if answer else [])


@pytest.mark.parametrize("name", ALL)
def test_without_tools_text_passes_at_once(name: str) -> None:
    parser = ALL[name].parser(())
    for piece in ("  <tool_", "call>[TOOL", "_CALLS] \n", '{"name": "now"', "\n\n"):
        assert parser.feed(piece) == [Text(piece)]
    assert parser.finish(complete=True) == []


@pytest.mark.parametrize("name", ALL)
def test_text_streams_until_a_call_may_open(name: str) -> None:
    parser = ALL[name].parser(TOOLS)
    assert parser.feed("A joke:") == [Text("A joke:")]
    assert merged(parser.feed(" why not?")) == [Text(" why not?")]


@pytest.mark.parametrize("name", [name for name in OURS if OURS[name].parser(TOOLS).feed("x ")])
def test_text_comes_before_a_call_and_white_space_belongs_to_neither(name: str) -> None:
    tool_format = OURS[name]
    call = Call("search", {"query": "x"})
    for space in ("", " ", "\n\n"):
        text = f"Let me look.{space or ' '}{tool_format.write_calls([call])}{space}"
        if not calls_of(parse(tool_format, text)):
            assert not getattr(tool_format, "openings", ()) or tool_format.name in ("llama3_json", "llama_pythonic")
            continue  # calls of this format begin the answer
        for pieces in (text, letters(text)):
            assert parse(tool_format, pieces) == [Text("Let me look."), call]


# ------------------------------------------------------------------------------------------------- what models write


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>', [Call("now", {})]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [Call("now", {})]),
        ("hermes", '<tool_call>{"name": "search", "parameters": {"query": "x"}}', [Call("search", {"query": "x"})]),
        (
            "hermes",
            '<tool_call>\n{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}\n</tool_call>',
            [Call("search", {"query": "x"})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "now"}\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            [Call("now", {}), Call("now", {})],
        ),
        ("hermes", '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call>', [Call("now", {}), Call("now", {})]),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "now"}}</tool_call>', [Call("now", {})]),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"query": "a\nb"}}</tool_call>',
            [Call("search", {"query": "a\nb"})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"query": "a", "query": "b"}}</tool_call>',
            [Call("search", {"query": "b"})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"query": "</tool_call>"}}',
            [Call("search", {"query": "</tool_call>"})],
        ),
        (
            "qwen3_coder",
            "<function=search>\n<parameter=query>\n5\n</parameter>\n<parameter=count>\n5\n</parameter>\n</function>",
            [Call("search", {"query": "5", "count": 5})],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=search>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=query>\n<parameter>\n"
            "</parameter>.\n</parameter>\n</function>\n</tool_call>",
            [Call("search", {"exact": True, "query": "<parameter>\n</parameter>."})],
        ),
        ("qwen3_coder", '<tool_call>{"name": "now"}</tool_call>', [Call("now", {})]),
        ("llama3_json", '{"name": "now", "parameters": {}}', [Call("now", {})]),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', [Call("now", {})]),
        ("llama3_json", '{"name": "now"}\n{"name": "now"}', [Call("now", {}), Call("now", {})]),
        ("llama3_json", '{"name": "now"} ; {"name": "now"}', [Call("now", {}), Call("now", {})]),
        ("llama3_json", '[{"name": "now"}, {"name": "now"}]', [Call("now", {}), Call("now", {})]),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', [Call("now", {})]),
        (
            "llama_pythonic",
            "[now(), search(query='it\\'s', count=-1)]",
            [Call("now", {}), Call("search", {"query": "it's", "count": -1})],
        ),
        (
            "llama_pythonic",
            '[search(query="\\d+\n", tags=(1, None))]',
            [Call("search", {"query": "\\d+\n", "tags": [1, None]})],
        ),
        ("llama_pythonic", "[search(query=r'\\d', exact=true)]", [Call("search", {"query": "\\d", "exact": True})]),
        ("llama_pythonic", "<|python_start|>[now()]<|python_end|>", [Call("now", {})]),
        ("llama_pythonic", '[search(query="\\ud83d\\ude42")]', [Call("search", {"query": "🙂"})]),
        ("llama_pythonic", "[run-it.now(command='ls')]", [Call("run-it.now", {"command": "ls"})]),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', [Call("now", {})]),
        ("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {}}', [Call("now", {})]),
        (
            "mistral",
            "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}",
            [Call("now", {}), Call("now", {})],
        ),
        ("mistral_args", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]', [Call("now", {})]),
        ("gemma", '```tool_code\nprint(search(query="x"))\n```', [Call("search", {"query": "x"})]),
        ("gemma", "```tool_code\n[now(), now()]\n```", [Call("now", {}), Call("now", {})]),
        ("gemma", "```tool_code\nsearch(query='''a\n```\nb''')\n```", [Call("search", {"query": "a\n```\nb"})]),
        (
            "function_gemma",
            "<start_function_call>call:search{query:Paris,count:2,tags:[<escape>a<escape>]}<end_function_call>",
            [Call("search", {"query": "Paris", "count": 2, "tags": ["a"]})],
        ),
        (
            "gemma4",
            '<|tool_call>call:search{query:<|"|>x<|"|>,filters:{a:{b:true}}}<tool_call|>',
            [Call("search", {"query": "x", "filters": {"a": {"b": True}}})],
        ),
        ("gemma4", '<|tool_call>call:search{"query": "x"}<tool_call|>', [Call("search", {"query": "x"})]),
        ("phi", 'functools[{"name": "now", "arguments": {}}]', [Call("now", {})]),
        ("phi", '<|tool_call|>{"name": "now"}<|/tool_call|>', [Call("now", {})]),
        ("plain_json", '```json\n{"name": "now", "arguments": {}}\n```', [Call("now", {})]),
        ("plain_json", '```\n[{"name": "now"}]\n```\n', [Call("now", {})]),
        ("plain_json", '{"name": "now"}\n{"name": "now"}', [Call("now", {}), Call("now", {})]),
        ("template-tags", '<invoke name=search>{"query": "x"}</invoke>', [Call("search", {"query": "x"})]),
    ],
)
def test_forms_that_models_really_write_are_accepted(name: str, text: str, calls: list[Call]) -> None:
    assert parse(ALL[name], text) == calls
    assert parse(ALL[name], letters(text)) == calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Models write <tool_call> before a call."),
        ("hermes", "Such as <tool_calls> and <tool_"),
        ("hermes", "<tool_call><tool_call>"),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"name": "Bob", "age"'),
        ("llama3_json", 'Like {"name": "now"}'),
        ("llama_pythonic", "[1] says so"),
        ("llama_pythonic", "[Bob](http://example.org) knows"),
        ("llama_pythonic", "[sum(1, 2)]"),
        ("plain_json", '{"name": "now"} is how to ask'),
        ("plain_json", '```python\nprint({"name": "now"})\n```'),
        ("plain_json", '[{"name": "Bob"}]'),
        ("gemma", "```tool_codes\nx\n```"),
        ("phi", "functools[0] is the first"),
        ("mistral", "[TOOL_CALLS] is a token"),
        ("gemma4", "<|tool_call>no<tool_call|>"),
        ("qwen3_coder", "Write <function=name and so on"),
        ("template-tags", "Write <invoke name"),
    ],
)
def test_text_that_only_looks_like_a_call_is_given_back_as_text(name: str, text: str) -> None:
    for answer in (text, text + "\n", " " + text):
        assert parse(ALL[name], answer) == [Text(answer)]
        assert parse(ALL[name], letters(answer)) == [Text(answer)]


@pytest.mark.parametrize("name", FORMATS)
def test_marks_in_the_strings_of_a_json_answer_open_no_call(name: str) -> None:
    tool_format = FORMATS[name]
    call = tool_format.write_calls([Call("now", {})])
    answer = json.dumps({"name": "now", "note": call, "marks": tool_format.marks}, ensure_ascii=False)
    for pieces in (answer, letters(answer), letters(f"\n{answer}\n")):
        parser = tool_format.parser(TOOLS, json_answer=True)
        events = [event for piece in pieces for event in parser.feed(piece)]
        assert merged(events + parser.finish(complete=True)) == [Text("".join(pieces))]
    parser = tool_format.parser(TOOLS, json_answer=True)
    assert [*parser.feed(call), *parser.finish(complete=True)] == [Call("now", {})]


@pytest.mark.parametrize("name", ["llama3_json", "plain_json"])
def test_a_json_answer_with_the_name_of_a_tool_is_no_call(name: str) -> None:
    for json_answer, events in ((False, [Call("now", {})]), (True, [Text('{"name": "now"}')])):
        parser = FORMATS[name].parser(TOOLS, json_answer=json_answer)
        assert [*parser.feed('{"name": "now"}'), *parser.finish(complete=True)] == events


# ------------------------------------------------------------------------------------------------- calls that are none


@pytest.mark.parametrize("name", OURS)
def test_a_call_of_a_tool_that_was_not_offered_is_invalid_and_names_the_tools(name: str) -> None:
    text = OURS[name].write_calls([Call("forget", {"query": "x"}), Call("now", {})])
    first, second = parse(OURS[name], text)
    assert isinstance(first, InvalidCall) and first.name == "forget"
    assert "query" in first.arguments and "x" in first.arguments
    assert all(tool in first.error for tool in NAMES)
    assert second == Call("now", {})


@pytest.mark.parametrize("arguments", ["[1]", "3", '"text"', "null", "true", '"[1]"'])
@pytest.mark.parametrize("name", ["hermes", "phi", "mistral", "llama3_json", "plain_json"])
def test_arguments_that_are_no_object_are_invalid(name: str, arguments: str) -> None:
    tool_format = FORMATS[name]
    text = tool_format.write_calls([Call("search", {})]).replace("{}", arguments)
    (event,) = parse(tool_format, text)
    assert isinstance(event, InvalidCall)
    assert (event.name, event.arguments) == ("search", arguments)


@pytest.mark.parametrize(
    ("name", "text", "raw"),
    [
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": }}</tool_call>', '{"query": }'),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": NaN}}</tool_call>', '{"query": NaN}'),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"score": 1e999}}</tool_call>', '{"score": 1e999}'),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>',
            '{"query": "\\ud800"}',
        ),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "x"}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "now"}}</tool_call>', '{"name": "now"}}'),
        ("hermes", "<tool_call>\nsearch(query='x')\n</tool_call>", "search(query='x')"),
        ("hermes", "<tool_call>[]</tool_call>", "[]"),
        ("hermes", '<tool_call>[{"name": "now"}, 3]</tool_call>', '[{"name": "now"}, 3]'),
        ("llama3_json", '{"name": "search", "parameters": {"query": }}', '{"query": }'),
        ("llama3_json", "<|python_tag|>print(1)", "print(1)"),
        ("llama_pythonic", '[search("x")]', '("x")'),
        ("llama_pythonic", "[search(query=open('f'))]", "(query=open('f'))"),
        ("llama_pythonic", "[search(query=1 + 1)]", "(query=1 + 1)"),
        ("llama_pythonic", "[search(query=b'x')]", "(query=b'x')"),
        ("hermes", '<tool_call>{"name": "search", "argument": {"query": "x"}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "search", "query": "x"}</tool_call>', '{"name": "search", "query": "x"}'),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": }}]', None),
        ("gemma", "```tool_code\nimport os\n```", "import os"),
        ("function_gemma", "<start_function_call>call:search{query}<end_function_call>", "{query}"),
        ("gemma4", '<|tool_call>call:search{query:<|"|>x}<tool_call|>', '{query:<|"|>x}'),
        ("qwen3_coder", "<function=search>x</function>", "<function=search>x</function>"),
        ("phi", '<|tool_call|>[{"name": "now"]<|/tool_call|>', '[{"name": "now"]'),
        ("template-tags", "<invoke name=now>{oops}</invoke>", "{oops}"),
    ],
)
def test_a_broken_call_is_an_invalid_call_with_its_raw_text(name: str, text: str, raw: str | None) -> None:
    for pieces in (text, letters(text)):
        (event,) = parse(ALL[name], pieces)
        assert isinstance(event, InvalidCall)
        assert event.error
        if raw is not None:
            assert event.arguments == raw


def test_a_string_that_never_ends_does_not_hide_the_calls_after_it() -> None:
    text = '<tool_call>{"name": "search", "arguments": {"query": "x}}</tool_call>\nwait <tool_call>{"name": "now"}</tool_call>'
    invalid, wait, call = parse(hermes, letters(text))
    assert isinstance(invalid, InvalidCall) and invalid.name == "search"
    assert (wait, call) == (Text("wait"), Call("now", {}))


@pytest.mark.parametrize("name", OURS)
def test_a_call_that_is_cut_off_anywhere_is_never_valid(name: str) -> None:
    tool_format = OURS[name]
    text = tool_format.write_calls([Call("search", {"query": "a b", "filters": {"x": [1]}, "count": 12})])
    for end in range(len(text)):
        for pieces in (text[:end], letters(text[:end])):
            events = parse(tool_format, pieces, complete=False)
            assert not calls_of(events)
            # before anything tells that this is a call, it is text
            assert len(events) == 1 or end == 0


@pytest.mark.parametrize("name", OURS)
def test_of_several_calls_those_before_the_cut_are_valid(name: str) -> None:
    tool_format = OURS[name]
    calls = [Call("now", {}), Call("search", {"query": "a b"}), Call("search", {"query": "c"})]
    text = tool_format.write_calls(calls)
    for end in range(len(text)):
        found = calls_of(parse(tool_format, text[:end], complete=False))
        assert found == calls[: len(found)] and len(found) < 3


@pytest.mark.parametrize("name", ["llama3_json", "llama_pythonic", "mistral", "mistral_args", "plain_json"])
def test_without_an_end_mark_only_the_end_of_the_answer_finishes_a_call(name: str) -> None:
    text = FORMATS[name].write_calls([Call("search", {"query": "x"})])
    assert parse(FORMATS[name], text, complete=True) == [Call("search", {"query": "x"})]
    (event,) = parse(FORMATS[name], text, complete=False)
    assert isinstance(event, InvalidCall) and event.name == "search"


def test_a_missing_end_mark_counts_only_if_the_model_ended_the_answer() -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}'
    assert parse(hermes, text, complete=True) == [Call("search", {"query": "x"})]
    (event,) = parse(hermes, text, complete=False)
    assert event == InvalidCall("search", text.removeprefix("<tool_call>\n"), "the answer ended before the call did")


@pytest.mark.parametrize("bracket", ["[", '{"a":', "(", "-", "[{"])
@pytest.mark.parametrize("name", ALL)
def test_very_deep_nesting_is_an_invalid_call(name: str, bracket: str) -> None:
    closing = {"[": "]", '{"a":': "}", "(": ")", "-": "", "[{": "}]"}[bracket]
    deep = bracket * 10_000 + "1" + closing * 10_000
    tool_format = ALL[name]
    if name == "template-tags":
        text = f"<invoke name=search>{deep}</invoke>"
    else:
        text = tool_format.write_calls([Call("search", {"filters": 12345})]).replace("12345", deep)
    for answer in (text, text[: len(text) // 2]):
        for complete in (True, False):
            events = parse(tool_format, answer, complete=complete)
            # where a word needs no quotes, brackets that mean nothing are one
            if name != "qwen3_coder" and not (name in ("function_gemma", "gemma4") and bracket in "(-"):
                assert not calls_of(events)
            assert events


def test_json_is_read_down_to_a_fixed_depth() -> None:
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(ValueError, match=str(MAX_DEPTH)):
        parse_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    assert parse_json(json.dumps("[" * 1000)) == "[" * 1000


# --------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("reasoning", "answer", "events"),
    [
        ("optional", "<think>\nhm\n</think>\n\nyes", [Thought("hm"), Text("yes")]),
        ("optional", "<think>\n\n</think>\n\nyes", [Text("yes")]),
        ("optional", "\n<think>hm</think>yes\n", [Thought("hm"), Text("yes\n")]),
        ("optional", " yes <think>hm</think>", [Text(" yes <think>hm</think>")]),
        ("optional", "<think>hm\n\n", [Thought("hm\n\n")]),
        ("optional", "<thin", [Text("<thin")]),
        ("optional", "", []),
        ("open", "hm\n\nso\n</think>\n\nyes ", [Thought("hm\n\nso"), Text("yes ")]),
        ("open", "<think>\nhm</think>yes", [Thought("hm"), Text("yes")]),
        ("open", "hm", [Thought("hm")]),
        ("open", "</think>\n\nyes", [Text("yes")]),
        ("open", 'hm <tool_call>{"name": "now"}</tool_call>', [Thought('hm <tool_call>{"name": "now"}</tool_call>')]),
        ("optional", '<think>hm</think>\n\n<tool_call>{"name": "now"}</tool_call>', [Thought("hm"), Call("now", {})]),
        ("none", "<think>hm</think>yes", [Text("<think>hm</think>yes")]),
    ],
)
def test_thoughts_are_told_from_the_answer(reasoning: Reasoning, answer: str, events: list[Event]) -> None:
    assert parse(hermes, answer, reasoning=reasoning) == events
    assert parse(hermes, letters(answer), reasoning=reasoning) == events
    if not any(isinstance(event, Call) for event in events):
        assert parse(hermes, letters(answer), reasoning=reasoning, tools=()) == events


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("hermes", "<think>\nhm\n</think>\n\n"),
        ("mistral", "[THINK]hm[/THINK]"),
        ("mistral", "<think>hm</think>"),
        ("gemma4", "<|channel>thought\nhm<channel|>"),
    ],
)
def test_families_mark_thoughts_in_their_own_ways(name: str, block: str) -> None:
    call = Call("search", {"query": "x"})
    text = block + FORMATS[name].write_calls([call])
    assert parse(FORMATS[name], letters(text), reasoning="optional") == [Thought("hm"), call]


def test_thoughts_stream() -> None:
    parser = hermes.parser(TOOLS, reasoning="open")
    assert parser.feed("I wonder") == [Thought("I wonder")]
    assert parser.feed(" why") == [Thought(" why")]


# ------------------------------------------------------------------------------------------------------ speed, fuzzing


@pytest.mark.parametrize("name", ALL)
def test_a_long_answer_in_single_letters_takes_no_time(name: str) -> None:
    body = "x \"y' \\ {[ </ " * 2500
    if name == "template-tags":
        text = f"<invoke name=search>{json.dumps({'query': body})}</invoke>"
    else:
        text = ALL[name].write_calls([Call("search", {"query": body})])
    answers = [text, "word " * 7000, "<" * 35_000, "{" * 35_000, "\n" * 35_000, text[:-20]]
    for answer in answers:
        assert len(answer) > 30_000
        started = time.process_time()
        parse(ALL[name], letters(answer), complete=False)
        assert time.process_time() - started < 5
    assert calls_of(parse(ALL[name], letters(text))) == [Call("search", {"query": body})]


def mutated(text: str, generator: random.Random) -> str:
    """Cuts, insertions, deletions, duplications and swaps."""
    for _ in range(generator.randint(1, 3)):
        a, b = sorted(generator.randrange(len(text) + 1) for _ in range(2))
        kind = generator.randrange(6)
        if kind == 0:
            text = text[:a]
        elif kind == 1:
            text = text[:a] + generator.choice("{}[]\"\\<>,:;=()`'\n |x") + text[a:]
        elif kind == 2:
            text = text[:a] + text[a + generator.randint(1, 4) :]
        elif kind == 3:
            text = text[:b] + text[a:b] + text[b:]
        elif kind == 4:
            text = text[:a] + text[b:]
        else:
            text = text[b:] + text[a:b] + text[:a]
    return text


def without_space(text: str) -> str:
    return "".join(text.split())


def tiled(name: str, text: str, complete: bool) -> tuple[list[str], list[tuple[str, Sequence[Event]]]]:
    """The answer as texts and stretches read as calls, in order, and those stretches with their events."""
    tool_format = FORMATS[name]
    reader = CallReader(TOOLS, tool_format.keys)  # type: ignore[attr-defined]
    regions: list[tuple[str, Sequence[Event]]] = []

    def read(source: Source) -> Wait[Sequence[Event] | None]:
        start = source.pos
        events = yield from tool_format.read(source, reader)  # type: ignore[attr-defined]
        if events is not None:
            assert events
            regions.append((source.text[start : source.pos], events))
        return events

    openings, first = tool_format.openings, tool_format.first  # type: ignore[attr-defined]
    parser = CallParser(read, openings, first, "none")
    events = [*parser.feed(text), *parser.finish(complete=complete)]
    starts = {id(found[0]): region for region, found in regions}
    others = {id(event) for _, found in regions for event in found[1:]}
    tiles = []
    for event in events:
        if id(event) in starts:
            tiles.append(starts[id(event)])
        elif id(event) not in others:
            assert isinstance(event, Text)
            tiles.append(event.text)
    return tiles, regions


@pytest.mark.parametrize("name", FORMATS)
def test_malformed_answers_raise_nothing_and_lose_no_text(name: str) -> None:
    generator = random.Random(name)
    tool_format = FORMATS[name]
    for number in range(MALFORMED // len(FORMATS) + 1):
        calls = [
            Call(
                "search", {"query": "".join(generator.choices(string.ascii_letters + " {}<>'", k=8)), "count": number}
            ),
            Call("now", {}),
            Call("forget", {"query": "me"}),
        ]
        generator.shuffle(calls)
        prose = generator.choice(["", "Well. ", "\n"]) if getattr(tool_format, "openings", ()) else ""
        text = mutated(prose + tool_format.write_calls(calls[: generator.randint(1, 3)]), generator)
        complete = generator.random() < 0.5
        tiles, regions = tiled(name, text, complete)
        # Texts and calls cover the answer, in order, but for white space.
        assert without_space("".join(tiles)) == without_space(text), text
        for region, events in regions:
            for event in events:
                if isinstance(event, Call):
                    # The words of a call are in its text: nothing was made up.
                    assert event.name in region
                    assert all(str(value) in region for value in event.arguments.values() if isinstance(value, int))
                else:
                    assert isinstance(event, InvalidCall)
                    assert event.arguments in region, text
            if len(events) == 1 and isinstance(events[0], InvalidCall) and "\\" not in region:
                # The raw text, the name, marks and the keys around them are all there is.
                marks = (*tool_format.marks, "```tool_code", "functools", "<function=", "call:", "print")
                known = [events[0].arguments, events[0].name or "", "name", "arguments", "parameters"]
                known += [mark * region.count(mark) for mark in marks]
                lost = Counter(filter(str.isalnum, region)) - Counter("".join(known))
                assert not lost, (text, region, events, lost)
        assert parse(tool_format, letters(text), complete=complete) == parse(tool_format, text, complete=complete)


@pytest.mark.parametrize("name", TEMPLATE_FORMATS)
def test_malformed_answers_of_response_templates_raise_nothing(name: str) -> None:
    generator = random.Random(name)
    tool_format = TEMPLATE_FORMATS[name]
    for number in range(MALFORMED // 10):
        written = f'<invoke name=search>{{"query": "w{number}"}}</invoke>'
        if name in OURS:
            written = tool_format.write_calls([Call("search", {"query": f"w{number}"})])
        text = mutated(f"Well. {written} So.", generator)
        events = parse(tool_format, text, complete=generator.random() < 0.5)
        kept = "".join(
            event.text
            if isinstance(event, (Text, Thought))
            else event.arguments
            if isinstance(event, InvalidCall)
            else json.dumps(dict(event.arguments))
            for event in events
        )
        for word in ("Well.", "So.", f"w{number}"):
            assert kept.count(word) >= min(text.count(word), 1), (text, events)


# ------------------------------------------------------------------------------------------- known defects of others


def test_a_malformed_call_is_reported_and_the_text_around_it_stays() -> None:
    text = 'One moment.\n<tool_call>{"name": "search", "arguments": {"query": oops}}</tool_call>\nThere.'
    before, invalid, after = parse(hermes, letters(text))
    assert (before, after) == (Text("One moment."), Text("There."))
    assert isinstance(invalid, InvalidCall)
    assert (invalid.name, invalid.arguments) == ("search", '{"query": oops}')


def test_a_tool_without_arguments_is_called_with_none() -> None:
    for name, tool_format in OURS.items():
        assert parse(tool_format, letters(tool_format.write_calls([Call("now", {})]))) == [Call("now", {})], name


def test_emoji_and_east_asian_text_come_out_once_and_whole() -> None:
    answer = "🙂 日本語 " + hermes.write_calls([Call("search", {"query": "日本語 🙂"})])
    assert parse(hermes, letters(answer)) == [Text("🙂 日本語"), Call("search", {"query": "日本語 🙂"})]


def test_several_letters_at_once_give_what_single_letters_give() -> None:
    answer = "Look: " + hermes.write_calls([Call("search", {"query": "mkdir -p test/{a,b"}), Call("now", {})])
    want = [Text("Look:"), Call("search", {"query": "mkdir -p test/{a,b"}), Call("now", {})]
    for size in range(1, 40):
        assert parse(hermes, [answer[i : i + size] for i in range(0, len(answer), size)]) == want
