"""What other chat models for local weights get wrong, by behaviour.

Of the defects that are known from their trackers these are tested elsewhere: per-call limits, stops, streams of several pieces,
UTF-8, cancellation, errors in streams, batches and threads (test_chat_model.py), the order of prompts and what templates refuse
(test_rendering.py, test_rendering_tools.py), parsers (test_tool_parsers.py), hand-offs, checkpointers and node caches
(test_patterns.py), marks and reasons (test_sharing.py).
"""

from __future__ import annotations

import copy
import functools
import json
import operator
import pickle
import socket
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel, Field

from polykv.errors import InvalidRequestError, PromptTooLongError
from polykv_agents import ChatPolyKV
from polykv_agents.testing import CHAT_TEMPLATE, Script, scripted_chat_model


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def search(query: str) -> str:
    """Search the archive."""
    return query


def weather(city: str) -> str:
    """Tell the weather."""
    return city


@pytest.fixture
def make() -> Iterator[Callable[..., ChatPolyKV]]:
    made: list[ChatPolyKV] = []

    def build(script: Any, **fields: Any) -> ChatPolyKV:
        made.append(scripted_chat_model(script, **fields))
        return made[-1]

    yield build
    for llm in made:
        llm.close()


def joined(chunks: list[Any]) -> AIMessageChunk:
    return functools.reduce(operator.add, chunks)


def same(one: AIMessage, other: AIMessage) -> bool:
    """Equal but for what differs between any two calls: ids and times."""

    def calls(message: AIMessage) -> Any:
        return [(c["name"], c["args"]) for c in [*message.tool_calls, *message.invalid_tool_calls]]

    def told(message: AIMessage) -> Any:
        return message.response_metadata["finish_reason"], message.usage_metadata

    return (one.text, calls(one), told(one), one.additional_kwargs) == (
        other.text,
        calls(other),
        told(other),
        other.additional_kwargs,
    )


ANSWERS = [
    "Plain text, with <tags> and {braces}.",
    call("search", query="mkdir -p test/{a,b"),
    "Let me see.\n" + call("search", query='日本 </tool_call> "x"'),
    f"{call('search', query='a')}\n{call('weather', city='Rome')}",
    "",
]


class TestOneMessage:
    @pytest.mark.parametrize("answer", ANSWERS)
    async def test_every_way_to_call_gives_the_same(self, make: Any, answer: str) -> None:
        llm = make(lambda prompt: answer).bind_tools([search, weather])
        whole = llm.invoke("Go.")
        others = [
            joined(list(llm.stream("Go."))),
            await llm.ainvoke("Go."),
            joined([chunk async for chunk in llm.astream("Go.")]),
            llm.batch(["Go."])[0],
        ]
        assert [same(whole, other) for other in others] == [True] * 4
        assert whole.response_metadata["finish_reason"] == ("tool_calls" if "<tool_call>" in answer else "stop")
        assert len({c["id"] for c in whole.tool_calls}) == len(whole.tool_calls)

    def test_text_streams_though_tools_are_bound(self, make: Any) -> None:
        text = "A long answer that comes in pieces, a < b included."
        pieces = [c.text for c in make(lambda prompt: text).bind_tools([search]).stream("Go.") if c.text]
        assert "".join(pieces) == text and len(pieces) > len(text) / 2

    def test_text_before_a_call_streams_and_the_call_comes_whole(self, make: Any) -> None:
        llm = make(lambda prompt: f"Let me see.\n{call('search', query='a b')}").bind_tools([search])
        chunks = list(llm.stream("Go."))
        assert sum(bool(c.text) for c in chunks) > 3
        found = [c.tool_call_chunks for c in chunks if c.tool_call_chunks]
        assert len(found) == 1 and json.loads(found[0][0]["args"]) == {"query": "a b"}
        assert not any("<" in c.text for c in chunks)

    def test_an_empty_answer_is_a_message(self, make: Any) -> None:
        llm = make(lambda prompt: "")
        message = llm.invoke("Go.")
        assert (message.content, message.response_metadata["finish_reason"]) == ("", "stop")
        assert joined(list(llm.stream("Go."))).content == ""

    @pytest.mark.parametrize("version", ["v0", "v1"])
    def test_content_blocks(self, make: Any, version: str) -> None:
        llm = make(lambda prompt: f"Let me see.\n{call('search', query='a')}", output_version=version)
        for message in (llm.bind_tools([search]).invoke("Go."), joined(list(llm.bind_tools([search]).stream("Go.")))):
            kinds = [block["type"] for block in message.content_blocks]
            assert kinds == ["text", "tool_call"]


class TestCutCalls:
    @pytest.mark.parametrize("limit", range(1, 70, 4))
    def test_a_call_that_max_tokens_cuts_is_never_valid_and_its_text_is_kept(self, make: Any, limit: int) -> None:
        answer = call("search", query="a b c")
        llm = make(lambda prompt: answer, max_tokens=limit).bind_tools([search], tool_choice="any")
        for message in (llm.invoke("Go."), joined(list(llm.stream("Go.")))):
            if message.response_metadata["finish_reason"] == "length":
                assert message.tool_calls == []
                kept = message.text + "".join(str(c["args"]) for c in message.invalid_tool_calls)
                assert (
                    "".join(answer[:limit].removeprefix("<tool_call>").split())[:20] in "".join(kept.split())
                    or limit <= 12
                )
            else:
                assert [c["args"] for c in message.tool_calls] == [{"query": "a b c"}]

    def test_a_call_that_a_stop_string_cuts_is_not_valid(self, make: Any) -> None:
        llm = make(lambda prompt: call("search", query="a STOP b"))
        message = llm.bind_tools([search]).invoke("Go.", stop=["STOP"])
        assert message.tool_calls == [] and message.invalid_tool_calls[0]["name"] == "search"

    def test_an_object_that_is_cut_is_an_error(self, make: Any) -> None:
        class Answer(BaseModel):
            text: str

        for method in ("json_schema", "function_calling", "json_mode"):
            script = call("Answer", text="a long one") if method == "function_calling" else '{"text": "a long one"}'
            llm = make(lambda prompt, script=script: script, max_tokens=len(script) - 6)
            chain = llm.with_structured_output(Answer, method=method)
            with pytest.raises(ValueError, match="max_tokens"):
                chain.invoke("Go.")
            with pytest.raises(ValueError, match="max_tokens"):
                list(chain.stream("Go."))
            raw = llm.with_structured_output(Answer, method=method, include_raw=True).invoke("Go.")
            assert raw["parsed"] is None and "max_tokens" in str(raw["parsing_error"]) and raw["raw"]

    @pytest.mark.parametrize("choice", ["auto", "any"])
    @pytest.mark.parametrize(
        "broken",
        [
            '<tool_call>\n{"name": "search", "arguments": {"query": }}\n</tool_call>',
            '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>',
            "<tool_call>\nnot an object\n</tool_call>",
            "<tool_call>",
        ],
    )
    def test_a_malformed_call_never_ends_an_agent_silently(self, make: Any, broken: str, choice: str) -> None:
        """It cannot be written; what is cut meanwhile says so."""
        llm = make(lambda prompt: broken, max_tokens=150).bind_tools([search], tool_choice=choice)
        for message in (llm.invoke("Go."), joined(list(llm.stream("Go.")))):
            found = [*message.tool_calls, *message.invalid_tool_calls]
            assert [c["name"] for c in found] == ["search"]
            want = "tool_calls" if message.tool_calls else "length"
            assert message.response_metadata["finish_reason"] == want


class TestToolChoice:
    def test_any_makes_a_call_of_a_model_that_would_rather_talk(self, make: Any) -> None:
        llm = make(lambda prompt: "Hello!", temperature=1, seed=1, max_tokens=600)
        message = llm.bind_tools([Colour, Shape], tool_choice="any").invoke("Hello!")
        assert [c["name"] in ("Colour", "Shape") for c in message.tool_calls] == [True]
        message = llm.bind_tools([Colour, Shape], tool_choice="Shape").invoke("Hello!")
        assert [c["name"] for c in message.tool_calls] == ["Shape"]

    def test_auto_differs_from_any(self, make: Any) -> None:
        assert make(lambda prompt: "Hello!").bind_tools([search]).invoke("Hello!").text == "Hello!"

    def test_none_keeps_text_that_looks_like_a_call(self, make: Any) -> None:
        script = Script(lambda prompt: call("search", query="a"))
        message = make(script).bind_tools([search], tool_choice="none").invoke("Go.")
        assert message.tool_calls == [] and message.text == call("search", query="a")
        assert "Search the archive" not in script.prompts[0]

    def test_several_tools_can_all_be_called(self, make: Any) -> None:
        llm = make(lambda prompt: call("weather", city="Rome"))
        assert llm.bind_tools([search, weather], tool_choice="any").invoke("Go.").tool_calls[0]["name"] == "weather"


class Tree(BaseModel):
    """A tree, which holds trees."""

    leaf: Literal["a", "b"]
    children: list[Tree] = Field(max_length=2)


@tool
def plant(tree: Tree) -> str:
    """Plant a tree."""
    return tree.leaf


class TestRecursiveSchemas:
    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_objects_are_held_to_what_refers_to_itself(self, make: Any, method: Any) -> None:
        llm = make(lambda prompt: "no", temperature=1, max_tokens=2000)
        chain = llm.with_structured_output(Tree, method=method)
        trees = [chain.invoke("Go.", seed=seed) for seed in range(6)]
        assert all(isinstance(tree, Tree) for tree in trees) and any(tree.children for tree in trees)

    def test_tools_too(self, make: Any) -> None:
        llm = make(lambda prompt: "no", temperature=1, max_tokens=2000).bind_tools([plant], tool_choice="any")
        for seed in range(6):
            Tree.model_validate(llm.invoke("Go.", seed=seed).tool_calls[0]["args"]["tree"])

    def test_a_list_is_no_function(self, make: Any) -> None:
        schema = {"title": "L", "type": "array", "items": {"enum": ["p"]}}
        with pytest.raises(InvalidRequestError, match="of type 'array'; use method='json_schema'"):
            make([]).with_structured_output(schema, method="function_calling")


class Colour(BaseModel):
    """A colour."""

    red: bool


class Shape(BaseModel):
    """A shape."""

    round: bool


class TestThoughts:
    TEMPLATE = CHAT_TEMPLATE + "{% if false %}<think></think>{% endif %}"

    def test_thoughts_are_apart_from_the_answer_and_counted(self, make: Any) -> None:
        llm = make(lambda prompt: "<think>\nHm, 日本.\n</think>\n\nThe carrier.", chat_template=self.TEMPLATE)
        for message in (llm.invoke("Who?"), joined(list(llm.stream("Who?")))):
            assert message.text == "The carrier."
            assert message.additional_kwargs["reasoning_content"] == "Hm, 日本."
            assert [b["type"] for b in message.content_blocks] == ["reasoning", "text"]
            assert message.usage_metadata["output_token_details"]["reasoning"] == len("Hm, 日本.".encode())

    def test_thoughts_may_come_before_a_forced_call(self, make: Any) -> None:
        llm = make(lambda prompt: f"<think>\nHm.\n</think>\n\n{call('search', query='a')}", chat_template=self.TEMPLATE)
        message = llm.bind_tools([search], tool_choice="any").invoke("Who?")
        assert message.additional_kwargs["reasoning_content"] == "Hm." and len(message.tool_calls) == 1

    def test_a_template_that_opens_the_thoughts(self, make: Any) -> None:
        template = CHAT_TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%")
        llm = make(lambda prompt: "Hm.\n</think>\n\nHe.", chat_template=template)
        message = llm.invoke("Who?")
        assert (message.text, message.additional_kwargs["reasoning_content"]) == ("He.", "Hm.")
        with pytest.raises(InvalidRequestError, match="begins every answer with thoughts"):
            llm.invoke("Who?", response_format={"type": "choice", "choices": ["a"]})


class TestCountsAndLimits:
    def test_counts_are_whole_whatever_was_read_from_the_pool(self, make: Any) -> None:
        llm = make(lambda prompt: "ok")
        document = "The carrier bears the risk. " * 10
        reader = llm.with_context(llm.share(document))
        shared, plain = reader.invoke("Who?"), llm.invoke([SystemMessage(document), HumanMessage("Who?")])
        assert shared.usage_metadata["input_tokens"] == plain.usage_metadata["input_tokens"]
        assert plain.usage_metadata["input_token_details"] == {"cache_read": 0, "cache_creation": 0}
        chunks = list(reader.stream("Who?"))
        assert joined(chunks).usage_metadata == shared.usage_metadata
        assert sum(c.usage_metadata is not None for c in chunks) == 1

    def test_the_same_prompt_twice_has_the_same_counts(self, make: Any) -> None:
        llm = make(lambda prompt: "ok")
        document = {"type": "text", "text": "The carrier bears the risk. " * 10, "cache_control": {"type": "ephemeral"}}
        for messages in ([HumanMessage("q")], [SystemMessage([document]), HumanMessage("q")]):
            first, second = (llm.invoke(messages).usage_metadata for _ in range(2))
            assert first["input_tokens"] == second["input_tokens"] > 0
            for usage in (first, second):
                details = usage["input_token_details"]
                assert 0 <= details["cache_read"] + details["cache_creation"] < usage["input_tokens"]
            assert second["input_token_details"]["cache_read"] == first["input_token_details"]["cache_creation"]

    def test_a_prompt_that_is_too_long_is_an_error_with_counts_and_loses_nothing(self, make: Any) -> None:
        script = Script(lambda prompt: "ok")
        llm = make(script)
        with pytest.raises(PromptTooLongError, match="65536"):
            llm.bind_tools([search]).invoke("x" * 70_000)
        assert script.prompts == [] and llm.invoke("x").text == "ok"

    def test_tools_are_counted(self, make: Any) -> None:
        llm = make(lambda prompt: "ok")
        messages = [SystemMessage("s"), HumanMessage("q")]
        counted = llm.get_num_tokens_from_messages(messages, tools=[search, weather])
        assert counted == llm.bind_tools([search, weather]).invoke(messages).usage_metadata["input_tokens"]


class TestErrors:
    @pytest.mark.parametrize("way", ["stream", "astream"])
    async def test_one_in_the_middle_of_a_stream_reaches_its_reader_alone(self, make: Any, way: str) -> None:
        llm = make(lambda prompt: "a long answer" if "bad" in prompt else "ok")
        scripted = llm.engine.request_processors

        def failing(ids: Any, scores: Any) -> Any:
            if ids[0, -len(ending) :].tolist() == ending:
                raise RuntimeError("out of luck")
            return scores

        ending = llm.get_token_ids("a long")
        llm.engine.request_processors = lambda request: [*scripted(request), failing]
        heard: list[str] = []

        async def read() -> None:
            if way == "stream":
                for chunk in llm.stream("bad"):
                    heard.append(chunk.text)
            else:
                async for chunk in llm.astream("bad"):
                    heard.append(chunk.text)

        with pytest.raises(RuntimeError, match="out of luck"):
            await read()
        assert "".join(heard) == "a long"
        assert llm.invoke("q").text == "ok" and llm.engine.stats().running == 0

    def test_nothing_goes_over_the_network(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []

        def refuse(*args: Any, **kwargs: Any) -> Any:
            asked.append(args)
            raise OSError("no network here")

        for name in ("getaddrinfo", "create_connection"):
            monkeypatch.setattr(socket, name, refuse)
        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        llm = make(lambda prompt: call("search", query="a"))
        reader = llm.with_context(llm.share("The carrier bears the risk. " * 10))
        assert reader.bind_tools([search], tool_choice="any").invoke("q").tool_calls
        llm.get_num_tokens_from_messages([HumanMessage("q")], tools=[search])
        assert asked == []


class TestHistories:
    def test_a_history_may_end_in_a_tools_result_or_an_answer(self, make: Any) -> None:
        script = Script(lambda prompt: "ok")
        llm = make(script)
        asked = AIMessage("", tool_calls=[{"name": "search", "args": {"query": "a"}, "id": "1", "type": "tool_call"}])
        for history in (
            [HumanMessage("q"), asked, ToolMessage("found", tool_call_id="1")],
            [HumanMessage("q"), AIMessage("a")],
        ):
            assert llm.invoke(history).text == "ok"
        assert "found" in script.prompts[0] and '"query": "a"' in script.prompts[0]

    def test_a_models_own_mistake_is_shown_to_it(self, make: Any) -> None:
        script = Script([call("nothing", a=1), "ok"])
        llm = make(script)
        first = llm.invoke("q")
        wrong = AIMessage(
            "",
            invalid_tool_calls=[
                {"name": "nothing", "args": first.text, "id": "1", "error": "unknown", "type": "invalid_tool_call"}
            ],
        )
        llm.invoke([HumanMessage("q"), wrong, HumanMessage("Again.")])
        assert '"nothing"' in script.prompts[1]

    def test_messages_are_plain_data_for_a_checkpointer(self, make: Any) -> None:
        template = TestThoughts.TEMPLATE
        answer = f"<think>\nHm.\n</think>\n\n{call('search', query='a')}"
        llm = make(lambda prompt: answer, chat_template=template, logprobs=True, top_logprobs=2)
        serializer = JsonPlusSerializer(pickle_fallback=False)
        cut = llm.bind_tools([search]).invoke("Go.", max_tokens=len(answer) - 20)
        whole = [llm.bind_tools([search]).invoke("Go."), joined(list(llm.bind_tools([search]).stream("Go.")))]
        assert cut.invalid_tool_calls and all(message.tool_calls for message in whole)
        for message in (cut, *whole):
            assert serializer.loads_typed(serializer.dumps_typed(message)) == message
            fields = message.model_dump()
            assert json.loads(json.dumps(fields)) == fields  # no tensors, no tuples, no objects of ours

    def test_the_answer_cache_does_not_look_at_ids(self, make: Any) -> None:
        script = Script(["one"])
        llm = make(script, cache=InMemoryCache())
        assert llm.invoke([HumanMessage("q", id="1")]).text == llm.invoke([HumanMessage("q", id="2")]).text == "one"

    def test_the_answer_cache_knows_tools_and_forms(self, make: Any) -> None:
        script = Script(["plain", "with tools", '{"a": 1}'])
        llm = make(script, cache=InMemoryCache())
        asked = [llm, llm.bind_tools([search]), llm.bind(response_format={"type": "json_object"})]
        assert [m.invoke("q").text for m in asked for _ in range(2)] == ["plain"] * 2 + ["with tools"] * 2 + [
            '{"a": 1}'
        ] * 2


class TestObjects:
    def test_copies_and_pickles_share_the_engine(self, make: Any) -> None:
        llm = make(lambda prompt: "ok")
        reader = llm.with_context(llm.share("The carrier bears the risk. " * 10))
        twins = [
            copy.copy(llm),
            copy.deepcopy(llm),
            pickle.loads(pickle.dumps(llm)),
            llm.model_copy(),
            copy.deepcopy(reader),
        ]
        assert all(twin.engine is llm.engine for twin in twins)
        assert len(pickle.dumps(llm)) < 5_000
        assert twins[-1].shared_context is reader.shared_context

    def test_configured_copies_keep_context_and_engine(self, make: Any) -> None:
        llm = make(lambda prompt: "one two three four")
        reader = llm.with_context(llm.share("The carrier bears the risk. " * 10))
        made = reader.configurable_fields(max_tokens=ConfigurableField(id="n"))
        message = made.with_config(configurable={"n": 3}).invoke("q")
        assert message.usage_metadata["output_tokens"] == 3
        assert message.usage_metadata["input_token_details"]["cache_read"] == reader.shared_context.num_tokens

    def test_a_rate_limiter_is_asked(self, make: Any) -> None:
        class Counting(InMemoryRateLimiter):
            asked = 0

            def acquire(self, *, blocking: bool = True) -> bool:
                Counting.asked += 1
                return True

        make(["ok"], rate_limiter=Counting(requests_per_second=100)).invoke("q")
        assert Counting.asked == 1

    def test_streaming_can_be_switched_off_for_tools(self, make: Any) -> None:
        llm = make(lambda prompt: "several pieces", disable_streaming="tool_calling")
        assert len(list(llm.stream("q"))) > 1
        assert [c.text for c in llm.bind_tools([search]).stream("q")] == ["several pieces"]

    @pytest.mark.parametrize("kwargs", [{"tool": 1}, {"functions": []}, {"best_of": 2}])
    def test_unknown_arguments_are_refused_when_they_are_bound(self, make: Any, kwargs: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequestError, match=next(iter(kwargs))):
            make(["ok"]).bind_tools([search], **kwargs)
        with pytest.raises(InvalidRequestError, match=next(iter(kwargs))):
            make(["ok"]).with_structured_output(Colour, **kwargs)

    @pytest.mark.parametrize(
        ("ask", "message"),
        [
            (lambda llm: llm.with_structured_output(Colour, method="xml"), "json_schema, function_calling, json_mode"),
            (lambda llm: llm.with_structured_output(None), "needs a schema"),
            (lambda llm: llm.with_structured_output(Colour, method="json_mode", strict=True), "no strictness"),
            (
                lambda llm: llm.with_structured_output({"title": "x", "type": "array", "uniqueItems": True}),
                "uniqueItems",
            ),
            (lambda llm: llm.bind_tools([search], tool_choice="nothing"), "'search'"),
            (
                lambda llm: llm.bind_tools([search], response_format={"type": "choice", "choices": ["a"]}).invoke("q"),
                "go together",
            ),
            (lambda llm: llm.invoke("q", n=2), "n=2"),
            (lambda llm: ChatPolyKV(tool_format="morse"), "'morse'.*hermes"),
        ],
    )
    def test_bad_input_is_named(self, make: Any, ask: Callable[[ChatPolyKV], Any], message: str) -> None:
        llm = make(lambda prompt: "ok")
        with pytest.raises(InvalidRequestError, match=message):
            ask(llm)
        assert llm.invoke("q").text == "ok"


def test_an_object_that_holds_the_mark_of_a_call_is_the_answer(make: Any) -> None:
    answer = '{"text": "<tool_call> is how calls begin"}'
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"text": {"type": "string"}}}},
    }
    message = make(lambda prompt: answer).bind_tools([search], response_format=form).invoke("Go.")
    assert message.text == answer and not message.tool_calls and not message.invalid_tool_calls
