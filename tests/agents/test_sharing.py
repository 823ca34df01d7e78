"""Contexts that calls name by id, name or mark, and what answers say of them."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers import tiny_model, tiny_tokenizer
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from polykv.errors import ContextReleasedError, IncompatiblePoolError, InvalidRequestError, SharedContextMissing
from polykv_agents import ChatPolyKV, SharedContext
from polykv_agents.contexts import contexts_of

DOCUMENT = "The carrier bears the risk until the goods are handed over. " * 6
MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def llm(tiny_llama: Any) -> Iterator[ChatPolyKV]:
    made = ChatPolyKV(model=tiny_llama, tokenizer=tiny_tokenizer(), max_tokens=4, codec="exact")
    yield made
    made.close()


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def marked(question: str = "Who?", *, role: str = "", document: str = DOCUMENT, **more: Any) -> list[BaseMessage]:
    mark = more or MARK
    return [SystemMessage([block(document, **mark), *([block(role)] if role else [])]), HumanMessage(question)]


def details(message: Any) -> tuple[int, int]:
    found = message.usage_metadata["input_token_details"]
    return found["cache_read"], found["cache_creation"]


class TestMarks:
    def test_the_first_call_creates_and_later_ones_read(self, llm: ChatPolyKV) -> None:
        first = llm.invoke(marked(role="You are a lawyer."))
        second = llm.invoke(marked("And who else?", role="You are a judge."))
        read, created = details(first)
        assert created > len(llm.get_token_ids(DOCUMENT)) * 0.9 and read == 0
        assert details(second) == (created, 0)
        assert first.usage_metadata["input_tokens"] > created
        facts = second.response_metadata["shared_context"]
        assert facts["tokens"] == created and "reason" not in facts and len(facts["id"]) == 64

    @pytest.mark.parametrize("mark", [MARK, {"prompt_cache_breakpoint": {"mode": "explicit"}}])
    def test_marks_change_no_answer(self, llm: ChatPolyKV, mark: dict[str, Any]) -> None:
        plain = [SystemMessage([block(DOCUMENT), block("Be brief.")]), HumanMessage([block("Who"), block(" pays?")])]
        with_marks = [
            SystemMessage([block(DOCUMENT, **mark), block("Be brief.")]),
            HumanMessage([block("Who", **mark), block(" pays?")]),
        ]
        assert llm.invoke(plain).content == llm.invoke(with_marks).content
        one, other = llm.invoke(plain), llm.invoke(with_marks)
        assert one.content == other.content
        assert one.usage_metadata["input_tokens"] == other.usage_metadata["input_tokens"]

    def test_two_marks_are_two_segments_in_a_chain(self, llm: ChatPolyKV) -> None:
        def ask(first: str) -> AIMessage:
            history = "Let us read the second clause together, slowly and with care. "
            return llm.invoke(
                [SystemMessage([block(DOCUMENT, **MARK)]), HumanMessage([block(history + first, **MARK)])]
            )

        _, created = details(ask("a"))
        again, none = details(ask("a"))
        assert (again, none) == (created, 0)
        read, more = details(ask("b"))
        assert 0 < read < created and more > 0
        assert llm.pool.stats().cached_segments == 3

    def test_cold_marks_of_many_threads_and_tasks_are_built_once(self, llm: ChatPolyKV) -> None:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda i: llm.invoke(marked(f"{i}?")), range(16)))

        async def ask() -> list[Any]:
            other = DOCUMENT.upper()
            return await asyncio.gather(*(llm.ainvoke(marked(f"{i}?", document=other)) for i in range(32)))

        for group in (answers, asyncio.run(ask())):
            created = [details(message)[1] for message in group]
            assert sum(count > 0 for count in created) == 1
            assert {sum(details(message)) for message in group} == {max(created)}
        assert llm.pool.stats().cached_segments == 2
        assert llm.pool.num_leases == 0

    def test_streams_say_the_same(self, llm: ChatPolyKV) -> None:
        llm.invoke(marked())
        whole = llm.invoke(marked())
        chunks = list(llm.stream(marked()))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
        assert details(next(c for c in chunks if c.usage_metadata)) == details(whole)

    def test_least_recently_used_contexts_of_marks_go_first(self, tiny_llama: Any) -> None:
        llm = ChatPolyKV(model=tiny_llama, tokenizer=tiny_tokenizer(), codec="k8v3", max_pool_bytes=450_000)
        for number in range(8):
            llm.invoke(marked(document=f"{number} {DOCUMENT}"), max_tokens=1)
        stats = llm.pool.stats()
        assert stats.evictions > 0 and stats.num_bytes <= 450_000
        assert details(llm.invoke(marked(document=f"7 {DOCUMENT}"), max_tokens=1))[1] == 0
        assert details(llm.invoke(marked(document=f"0 {DOCUMENT}"), max_tokens=1))[1] > 0
        llm.pool.clear()
        assert llm.pool.stats().num_bytes == 0
        llm.close()

    def test_a_short_beginning_is_computed_anew_and_the_answer_says_why(
        self, llm: ChatPolyKV, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            message = llm.invoke(marked(document="Short."))
        assert details(message) == (0, 0)
        assert "at least 32 are kept" in message.response_metadata["shared_context"]["reason"]
        assert "at least 32 are kept" in caplog.text
        assert message.content == llm.invoke([SystemMessage("Short."), HumanMessage("Who?")]).content

    def test_a_codec_that_cannot_store_the_model_is_a_reason_and_no_error(self, tokenizer: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=320,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            head_dim=12,
        )
        llm = ChatPolyKV(model=LlamaForCausalLM(config).eval(), tokenizer=tokenizer, codec="k8v3", max_tokens=3)
        message = llm.invoke(marked())
        assert details(message) == (0, 0) and "12" in message.response_metadata["shared_context"]["reason"]
        llm.close()

    def test_an_interrupted_builder_leaves_the_work_to_another(self, llm: ChatPolyKV) -> None:
        contexts, begun, let_go = contexts_of(llm.engine), threading.Event(), threading.Event()
        built = llm.share(DOCUMENT)

        def interrupted() -> SharedContext:
            begun.set()
            assert let_go.wait(30)
            raise KeyboardInterrupt

        def first() -> None:
            with pytest.raises(KeyboardInterrupt):
                contexts.build_once(("k", "exact"), interrupted)

        with ThreadPoolExecutor(2) as threads:
            one = threads.submit(first)
            assert begun.wait(30)
            other = threads.submit(contexts.build_once, ("k", "exact"), lambda: built)
            let_go.set()
            one.result(30)
            assert other.result(30) == (built, True)

    def test_a_mark_after_a_shared_context_goes_on_from_it(self, llm: ChatPolyKV) -> None:
        ctx = llm.share(DOCUMENT)
        reader = llm.with_context(ctx)
        messages = [HumanMessage([block("These are the facts of the case, as told. " * 3, **MARK), block("Who?")])]
        read, created = details(reader.invoke(messages))
        assert read == ctx.num_tokens and created > MIN
        assert details(reader.invoke(messages)) == (read + created, 0)
        plain = [HumanMessage([block("These are the facts of the case, as told. " * 3), block("Who?")])]
        assert reader.invoke(messages).content == reader.invoke(plain).content

    def test_tools_and_answer_forms_do_not_end_the_sharing(self, llm: ChatPolyKV) -> None:
        tool = {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        }
        _, created = details(llm.invoke(marked()))
        assert details(llm.bind_tools([tool]).invoke(marked("a"))) == (created, 0)
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "properties": {}}}}
        assert details(llm.invoke(marked("b"), response_format=form)) == (created, 0)

    def test_a_mark_for_the_whole_call_is_the_leading_system_message(self, llm: ChatPolyKV) -> None:
        messages = [SystemMessage(DOCUMENT), HumanMessage("Who?")]
        _, created = details(llm.invoke(messages, cache_control={"type": "ephemeral"}))
        assert created > 0
        assert details(llm.invoke([SystemMessage(DOCUMENT), HumanMessage("What?")], prompt_cache_key="k")) == (
            created,
            0,
        )
        assert details(llm.invoke(messages)) == (0, 0)


MIN = 32


class TestNamesAndIds:
    def test_a_call_names_its_context_by_id_or_name(self, llm: ChatPolyKV) -> None:
        ctx = llm.share(DOCUMENT, name="contract")
        want = llm.with_context(ctx).invoke("Who?")
        for reference in (ctx.id, "contract"):
            message = llm.invoke("Who?", shared_context=reference)
            assert (message.content, details(message)) == (want.content, (ctx.num_tokens, 0))
            assert llm.find_context(reference) is ctx
        assert ctx.name == "contract"

    def test_a_calls_own_context_wins(self, llm: ChatPolyKV) -> None:
        one, other = llm.share(DOCUMENT), llm.share(DOCUMENT.upper())
        message = llm.with_context(one).invoke("Who?", shared_context=other.id)
        assert message.content == llm.with_context(other).invoke("Who?").content
        assert message.response_metadata["shared_context"]["id"] == other.id

    def test_an_unknown_context_is_missing_and_the_remedy_named(self, llm: ChatPolyKV) -> None:
        for ask in (lambda: llm.invoke("Who?", shared_context="gone"), lambda: llm.with_context("gone")):
            with pytest.raises(SharedContextMissing, match=r"'gone'.*llm.with_context\(id, rebuild=text\)"):
                ask()
        with pytest.raises(InvalidRequestError, match=r"give ctx\.id"):
            llm.invoke("Who?", shared_context=llm.share(DOCUMENT))

    def test_ids_outlive_a_restart_where_the_text_is_at_hand(self, tiny_llama: Any) -> None:
        llm = ChatPolyKV(model=tiny_llama, tokenizer=tiny_tokenizer(), max_tokens=4)
        identity = llm.share(DOCUMENT).id
        answer = llm.with_context(llm.share(DOCUMENT)).invoke("Who?").content
        llm.close()
        later = ChatPolyKV(model=tiny_llama, tokenizer=tiny_tokenizer(), max_tokens=4)
        with pytest.raises(SharedContextMissing, match=identity):
            later.invoke("Who?", shared_context=identity)
        reader = later.with_context(identity, rebuild=DOCUMENT)
        assert reader.invoke("Who?").content == answer
        assert later.with_context(identity).shared_context == reader.shared_context
        with pytest.raises(IncompatiblePoolError, match="share it as a new context"):
            later.with_context("0" * 64, rebuild=DOCUMENT)
        later.close()

    def test_a_name_that_is_not_live_is_rebuilt_under_it(self, llm: ChatPolyKV) -> None:
        reader = llm.with_context("contract", rebuild=DOCUMENT)
        assert llm.find_context("contract") is reader.shared_context

    def test_handles_are_remembered_and_not_held(self, llm: ChatPolyKV) -> None:
        ctx = llm.share(DOCUMENT, name="contract")
        identity = ctx.id
        del ctx
        gc.collect()
        assert llm.find_context(identity) is None and llm.find_context("contract") is None

    def test_one_of_several_handles_of_a_text_may_go(self, llm: ChatPolyKV) -> None:
        ctx = llm.share(DOCUMENT)
        with llm.share(DOCUMENT) as other:
            assert other.id == ctx.id
        assert llm.find_context(ctx.id) is ctx
        assert details(llm.invoke("Who?", shared_context=ctx.id)) == (ctx.num_tokens, 0)

    def test_a_released_context_is_not_found(self, llm: ChatPolyKV) -> None:
        ctx = llm.share(DOCUMENT, name="contract")
        reader = llm.with_context(ctx)
        ctx.release()
        assert llm.find_context("contract") is None
        with pytest.raises(ContextReleasedError):
            reader.invoke("Who?")

    def test_a_cache_key_finds_the_context_of_that_name_in_the_messages(self, llm: ChatPolyKV) -> None:
        ctx = llm.share(DOCUMENT, name="contract")
        messages = [SystemMessage(DOCUMENT), HumanMessage("Who?")]
        message = llm.invoke(messages, prompt_cache_key="contract")
        assert details(message) == (ctx.num_tokens, 0)
        assert message.content == llm.invoke(messages).content
        stray = llm.invoke([SystemMessage("Else."), HumanMessage("Who?")], prompt_cache_key="contract")
        assert details(stray) == (0, 0)
        assert "does not begin with the context named 'contract'" in stray.response_metadata["shared_context"]["reason"]

    def test_the_newest_context_of_a_name_counts(self, llm: ChatPolyKV) -> None:
        one = llm.share(DOCUMENT, name="n")
        other = llm.share(DOCUMENT.upper(), name="n")
        assert llm.find_context("n") is other and llm.find_context(one.id) is one


def test_a_context_takes_positions_from_the_profile(llm: ChatPolyKV) -> None:
    assert llm.profile is not None and llm.profile["max_input_tokens"] == 2048
    ctx = llm.share(DOCUMENT)
    reader = llm.with_context(ctx)
    assert reader.profile is not None and reader.profile["max_input_tokens"] == 2048 - ctx.num_tokens
    assert reader.with_context(None).profile == llm.profile
    assert SharedContext is type(ctx)


def test_another_model_can_serve_a_call(llm: ChatPolyKV) -> None:
    other = ChatPolyKV(model=tiny_model("qwen2"), tokenizer=tiny_tokenizer(), max_tokens=4)
    message = llm.invoke("Who?", model=other.model)
    assert message.content == other.invoke("Who?").content
    assert message.response_metadata["model_name"] == other.model
    assert llm.invoke("Who?", model=llm.model).response_metadata["model_name"] == llm.model
    longer = llm.model_copy(update={"max_tokens": 6})
    assert longer.invoke("Who?", model=other.model).usage_metadata["output_tokens"] == 6
    with pytest.raises(IncompatiblePoolError, match="cannot read the shared context"):
        llm.with_context(llm.share(DOCUMENT)).invoke("Who?", model=other.model)
    other.close()
