"""ChatPolyKV on a tiny random model: every way to call it, sharing, wrong use, copies, and the end."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import importlib.util
import itertools
import logging
import operator
import os
import pickle
import sys
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import CHATML, assert_same_tokens, greedy, tiny_model, tiny_tokenizer
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    message_chunk_to_message,
)
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from transformers import GPT2Config, GPT2LMHeadModel

from polykv.engine import Engine, registry
from polykv.engine import engine as engine_module
from polykv.errors import (
    ContextReleasedError,
    EngineClosedError,
    IncompatiblePoolError,
    InvalidRequestError,
    ModelNotFoundError,
    NonFiniteLogitsError,
    PolyKVError,
    PromptTooLongError,
    UnknownCodecError,
    UnsupportedModelError,
)
from polykv_agents import ChatPolyKV, SharedContext, calls
from polykv_agents.calls import plan_call

DOCUMENT = "The bond: the merchant owes the moneylender three thousand ducats, and the court decides. " * 3
OTHER_DOCUMENT = "The dukes of the isle quarrel about a book of spells, and a storm settles it. " * 3
QUESTION: list[tuple[str, str]] = [("system", "You are the judge."), ("human", "Who carries the risk?")]
POSITIONS = 2048
TOKENS = 8
DEADLINE = 10.0


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other cost more than these models' arithmetic."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def chat(model: Any = None, tokenizer: Any = None, **fields: Any) -> ChatPolyKV:
    defaults: dict[str, Any] = {"codec": "exact", "max_tokens": TOKENS, "num_threads": 1}
    return ChatPolyKV(
        model=model if model is not None else tiny_model("llama"),
        tokenizer=tokenizer if tokenizer is not None else tiny_tokenizer(),
        **{**defaults, **fields},
    )


@pytest.fixture
def llm() -> Iterator[ChatPolyKV]:
    """A chat model; at the end of every test no request runs, none waits, and no lease is left."""
    made = chat()
    engine = made.engine
    yield made
    assert eventually(lambda: idle(engine)), (engine.stats(), engine.pool.stats())
    made.close()


def save_tiny(folder: Path) -> None:
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def eventually(condition: Callable[[], bool], seconds: float = DEADLINE) -> bool:
    """Polls until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


async def aeventually(condition: Callable[[], bool], seconds: float = DEADLINE) -> bool:
    """As ``eventually``, with the event loop running on."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True


def idle(engine: Engine) -> bool:
    stats = engine.stats()
    return not (stats.running or stats.waiting or stats.tail_bytes or engine.pool.stats().num_leases)


@contextmanager
def slow_steps(llm: ChatPolyKV, seconds: float) -> Iterator[None]:
    """Every forward of the model takes at least this long."""
    hook = llm.engine.model.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    try:
        yield
    finally:
        hook.remove()


def merged(chunks: list[Any]) -> AIMessage:
    message = message_chunk_to_message(functools.reduce(operator.add, chunks))
    assert isinstance(message, AIMessage)
    return message


def facts(message: AIMessage) -> tuple[Any, ...]:
    """All that must be the same however a message was made."""
    metadata = message.response_metadata
    keys = ("finish_reason", "model_name", "model_provider", "shared_context")
    return message.content, message.usage_metadata, *(metadata.get(key) for key in keys)


def text_of(message: BaseMessage) -> str:
    assert isinstance(message.content, str)
    return message.content


def rendered(tokenizer: Any, *turns: tuple[str, str]) -> list[int]:
    """The prompt's ids by transformers alone."""
    return tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=True,
        return_dict=False,
    )


def judge_ids(tokenizer: Any, document: str | None = DOCUMENT) -> list[int]:
    """The ids of ``QUESTION`` over a document."""
    head = f"{document}\n\n" if document else ""
    return rendered(tokenizer, ("system", f"{head}You are the judge."), ("user", "Who carries the risk?"))


@pytest.fixture
def submitted(llm: ChatPolyKV, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Handles of all requests that reach the engine, in order."""
    handles: list[Any] = []
    submit = llm.engine.submit

    def record(request: Any) -> Any:
        handles.append(submit(request))
        return handles[-1]

    monkeypatch.setattr(llm.engine, "submit", record)
    return handles


# ---------------------------------------------------------------------------------------- the ways to call


async def every_way(agent: ChatPolyKV, messages: Any, **kwargs: Any) -> dict[str, AIMessage]:
    return {
        "invoke": agent.invoke(messages, **kwargs),
        "stream": merged(list(agent.stream(messages, **kwargs))),
        "ainvoke": await agent.ainvoke(messages, **kwargs),
        "astream": merged([chunk async for chunk in agent.astream(messages, **kwargs)]),
        "batch": agent.batch([messages, "another question"], **kwargs)[0],
        "abatch": (await agent.abatch([messages, "another question"], **kwargs))[0],
        "bind": agent.bind(**kwargs).invoke(messages),
    }


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "top_p": 0.8, "seed": 2**40, "max_tokens": 20},
        {"stop": ["\ufffd", "e"]},
        {"max_tokens": 1},
    ],
    ids=["greedy", "sampled", "nucleus", "stopped", "one-token"],
)
async def test_every_way_of_calling_gives_the_same_message(
    llm: ChatPolyKV, agent: ChatPolyKV, shared: bool, settings: dict[str, Any]
) -> None:
    messages = await every_way(agent if shared else llm, QUESTION, **settings)
    want = facts(messages["invoke"])
    assert want[0] or settings.get("stop")
    for way, message in messages.items():
        assert facts(message) == want, way


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
def test_greedy_text_equals_that_of_transformers(
    llm: ChatPolyKV, agent: ChatPolyKV, submitted: list[Any], shared: bool
) -> None:
    """Six agents at once, prompts of different lengths, against a model that never saw our attention."""
    oracle, tokenizer = tiny_model("llama"), tiny_tokenizer()
    roles = [
        "You are the judge.",
        "Be brief.",
        "",
        "You are Portia, a doctor of law, and you plead mercy.",
        "No",
        "日本語",
    ]
    questions = ["Who carries the risk?", "Why? " * 20, "x", "What does the bond say?\n", "🙂", "\x00"]
    prompts = [
        [SystemMessage(role), HumanMessage(question)] if role else [HumanMessage(question)]
        for role, question in zip(roles, questions, strict=True)
    ]
    answers = (agent if shared else llm).batch(prompts, max_tokens=24)
    assert len(submitted) == 6
    for role, question in zip(roles, questions, strict=True):
        system = "\n\n".join(part for part in (DOCUMENT if shared else "", role) if part)
        prompt = rendered(tokenizer, *([("system", system)] if system else []), ("user", question))
        (handle,) = [h for h in submitted if list(h.request.token_ids) == prompt]
        completion = handle.result()
        want = greedy(oracle, prompt, 24)
        assert_same_tokens(oracle, prompt, completion.token_ids, want)
        if list(completion.token_ids) == want:
            decoded = tokenizer.decode(want, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert decoded in [a.content for a in answers]
    assert llm.engine.stats().peak_running > 1


def test_messages_keep_their_order(agent: ChatPolyKV, submitted: list[Any]) -> None:
    agent.invoke([("human", "One?"), ("ai", "Two."), ("system", "Late."), ("human", "Three?")], max_tokens=1)
    want = rendered(
        tiny_tokenizer(),
        ("system", DOCUMENT),
        ("user", "One?"),
        ("assistant", "Two."),
        ("user", "Late.\n\nThree?"),
    )
    assert list(submitted[0].request.token_ids) == want


def test_a_query_gets_no_second_bos() -> None:
    tokenizer = tiny_tokenizer("{{ bos_token }}" + CHATML.replace("<|im_start|>", "#"))
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    llm = chat(tokenizer=tokenizer)
    assert tokenizer.encode("x")[0] == 1
    agent = llm.with_context(llm.share(DOCUMENT))
    ids = plan_call(agent, [HumanMessage("Who?")], None, {}).prompt.ids
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert agent.invoke("Who?").usage_metadata["input_tokens"] == len(ids)
    llm.close()


def test_the_same_answer_alone_and_in_company(agent: ChatPolyKV) -> None:
    questions = [f"Question {i}: {'why ' * i}" for i in range(15)]
    alone = [agent.invoke(q).content for q in questions]
    assert len(set(alone)) > 10
    assert [m.content for m in agent.batch(questions)] == alone
    assert [m.content for m in agent.batch(questions[::-1])] == alone[::-1]


def test_sixteen_threads_at_once(agent: ChatPolyKV) -> None:
    questions = [f"Question {i}" for i in range(16)]
    alone = [agent.invoke(q).content for q in questions]
    with ThreadPoolExecutor(16) as executor:
        for _ in range(2):
            assert [m.content for m in executor.map(agent.invoke, questions)] == alone
    assert agent.pool.stats().num_leases == 0
    assert agent.engine.stats().failed == 0


# --------------------------------------------------------------------------------------------------- usage


def test_usage_counts_the_whole_prompt_and_what_came_from_the_pool(
    llm: ChatPolyKV, agent: ChatPolyKV, ctx: SharedContext
) -> None:
    prompt = len(judge_ids(tiny_tokenizer()))
    assert 0 < ctx.num_tokens < prompt
    usage = agent.invoke(QUESTION).usage_metadata
    assert usage == {
        "input_tokens": prompt,
        "output_tokens": TOKENS,
        "total_tokens": prompt + TOKENS,
        "input_token_details": {"cache_read": ctx.num_tokens, "cache_creation": 0},
    }
    alone = llm.invoke(QUESTION).usage_metadata
    assert alone["input_tokens"] == len(judge_ids(tiny_tokenizer(), None))
    assert alone["input_token_details"]["cache_read"] == 0
    prefilled = agent.engine.stats().prefill_tokens
    agent.invoke(QUESTION)
    assert agent.engine.stats().prefill_tokens - prefilled == prompt - ctx.num_tokens


def test_one_chunk_carries_usage_and_metadata(agent: ChatPolyKV) -> None:
    chunks = list(agent.stream(QUESTION))
    assert len(chunks) > 4
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
    for key in ("finish_reason", "model_name", "timing", "shared_context", "tail_bytes"):
        assert sum(key in chunk.response_metadata for chunk in chunks) == 1, key
    assert chunks[-1].chunk_position == "last"
    whole, invoked = merged(chunks), agent.invoke(QUESTION)
    assert whole.usage_metadata == invoked.usage_metadata
    assert whole.response_metadata["model_name"] == agent.model
    assert whole.response_metadata["finish_reason"] == "length"
    assert set(whole.response_metadata) == set(invoked.response_metadata)


def test_metadata_of_a_message(agent: ChatPolyKV, ctx: SharedContext) -> None:
    metadata = agent.invoke(QUESTION).response_metadata
    assert metadata["model_name"] == agent.model
    assert metadata["model_provider"] == "polykv"
    assert metadata["shared_context"] == {"id": ctx.id, "tokens": ctx.num_tokens, "codec": "exact"}
    timing = metadata["timing"]
    assert 0 <= timing["queue_s"] <= timing["ttft_s"] <= timing["total_s"]
    assert timing["tokens_per_s"] > 0
    # 3 layers, keys and values, 2 KV heads of 32, float32
    own = len(judge_ids(tiny_tokenizer())) - ctx.num_tokens + TOKENS
    assert metadata["tail_bytes"] >= (own - 1) * 3 * 2 * 2 * 32 * 4


def test_metadata_can_be_checkpointed(agent: ChatPolyKV) -> None:
    serializer = JsonPlusSerializer()
    for message in (agent.invoke(QUESTION), merged(list(agent.stream(QUESTION)))):
        assert serializer.loads_typed(serializer.dumps_typed(message)) == message

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(type(key) is str and plain(item) for key, item in value.items())
        return value is None or type(value) in (str, int, float, bool)

    message = agent.invoke(QUESTION)
    assert plain(message.response_metadata)
    assert plain(dict(message.usage_metadata))


def test_tokens_are_counted_by_the_models_own_tokenizer(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    messages = [SystemMessage("You are the judge."), HumanMessage("Who carries the risk?")]
    for chat_model in (llm, agent):
        counted = chat_model.get_num_tokens_from_messages(messages)
        assert counted == chat_model.invoke(messages).usage_metadata["input_tokens"]
    assert llm.get_token_ids("the court") == tiny_tokenizer().encode("the court", add_special_tokens=False)
    assert llm.get_num_tokens("the court") == len(llm.get_token_ids("the court"))
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    for chat_model in (llm, agent):
        counted = chat_model.get_num_tokens_from_messages(messages, tools=[tool])
        assert counted > chat_model.get_num_tokens_from_messages(messages)
        bound = chat_model.bind_tools([tool])
        assert counted == bound.invoke(messages, max_tokens=1).usage_metadata["input_tokens"]


def test_callbacks_hear_tokens_and_errors(agent: ChatPolyKV) -> None:
    class Listener(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tokens: list[str] = []
            self.errors: list[BaseException] = []
            self.ended: list[Any] = []

        def on_llm_new_token(self, token: str, **_: Any) -> None:
            self.tokens.append(token)

        def on_llm_error(self, error: BaseException, **_: Any) -> None:
            self.errors.append(error)

        def on_llm_end(self, response: Any, **_: Any) -> None:
            self.ended.append(response)

    listener = Listener()
    text = merged(list(agent.stream(QUESTION, config={"callbacks": [listener]}))).content
    assert "".join(listener.tokens) == text
    assert len(listener.ended) == 1
    with pytest.raises(InvalidRequestError):
        agent.invoke(QUESTION, config={"callbacks": [listener]}, max_tokens=0)
    assert len(listener.errors) == 1


# ------------------------------------------------------------------------------------------------- stopping


def test_finish_reason(agent: ChatPolyKV) -> None:
    assert agent.invoke(QUESTION).response_metadata["finish_reason"] == "length"
    text = text_of(agent.invoke(QUESTION))
    assert agent.invoke(QUESTION, stop=[text[3:5]]).response_metadata["finish_reason"] == "stop"
    assert agent.invoke(QUESTION, stop=["never to be seen"]).response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_end_of_sequence_token_stops(at: int) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    free = greedy(model, judge_ids(tokenizer), TOKENS)
    assert free[at] not in free[:at]
    model.generation_config.eos_token_id = [2, free[at]]
    llm = chat(model, tokenizer)
    agent = llm.with_context(llm.share(DOCUMENT))
    message = agent.invoke(QUESTION)
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.usage_metadata["output_tokens"] == at + 1
    want = free[:at] if at else []
    special = tokenizer.decode([*want, free[at]], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert message.content in (tokenizer.decode(want), special)
    assert facts(merged(list(agent.stream(QUESTION)))) == facts(message)
    llm.close()


def test_text_ends_before_a_stop_string(agent: ChatPolyKV) -> None:
    """Every string of the free text as a stop string, over token boundaries, in one piece and streamed."""
    agent = agent.model_copy(update={"max_tokens": 16})
    free = text_of(agent.invoke(QUESTION))
    stops = sorted({free[i : i + n] for i in range(len(free)) for n in (1, 2, 5) if i + n <= len(free)})
    assert len(stops) > 20
    for message, stop in zip(_each_stop(agent, stops), stops, strict=True):
        assert message.content == free[: free.index(stop)], stop
        assert message.response_metadata["finish_reason"] == "stop"
    for stop in stops[::4]:
        pieces = [chunk.content for chunk in agent.stream(QUESTION, stop=[stop])]
        assert "".join(pieces) == free[: free.index(stop)], stop


def _each_stop(agent: ChatPolyKV, stops: list[str]) -> list[AIMessage]:
    with ThreadPoolExecutor(8) as executor:
        return list(executor.map(lambda stop: agent.invoke(QUESTION, stop=[stop]), stops))


def test_the_first_of_several_stop_strings_wins(agent: ChatPolyKV) -> None:
    free = text_of(agent.invoke(QUESTION, max_tokens=16))
    stops = [free[9:], free[6:8], free[4:7]]
    assert agent.invoke(QUESTION, stop=stops, max_tokens=16).content == free[: min(free.index(stop) for stop in stops)]


def test_stop_strings_of_a_call_replace_those_of_the_model(llm: ChatPolyKV, ctx: SharedContext) -> None:
    llm = llm.model_copy(update={"max_tokens": 16})
    free = text_of(llm.with_context(ctx).invoke(QUESTION))
    early, late = free[2:4], free[7:9]
    assert free.index(early) < free.index(late)
    stopped = llm.model_copy(update={"stop": [early]}).with_context(ctx)
    assert stopped.invoke(QUESTION).content == free[: free.index(early)]
    assert stopped.invoke(QUESTION, stop=[late]).content == free[: free.index(late)]
    assert stopped.bind(stop=[late]).invoke(QUESTION).content == free[: free.index(late)]
    assert stopped.invoke(QUESTION, stop=late).content == free[: free.index(late)], "a string alone is accepted"
    assert stopped.invoke(QUESTION, stop=[]).content == free
    assert stopped.invoke(QUESTION, stop=None).content == free[: free.index(early)]
    assert merged(list(stopped.stream(QUESTION, stop=[late]))).content == free[: free.index(late)]


def test_stop_strings_at_construction() -> None:
    llm = chat()
    free = text_of(llm.invoke(QUESTION))
    stopped = chat(llm.engine.model, llm.engine.tokenizer, stop=[free[4:6]])
    assert stopped.invoke(QUESTION).content == free[: free.index(free[4:6])]
    stopped.close()
    llm.close()


def test_one_stop_string_at_construction() -> None:
    assert chat(stop="END").stop in ("END", ["END"])


# ------------------------------------------------------------------------------------------------- sampling


def test_sampling_settings_of_a_call(llm: ChatPolyKV) -> None:
    def ask(**kwargs: Any) -> str:
        return text_of(llm.invoke(QUESTION, **kwargs))

    greedy_text = ask()
    assert ask(temperature=0, seed=3) == greedy_text
    assert ask(temperature=1.0, seed=3) == ask(temperature=1.0, seed=3)
    assert len({ask(temperature=1.0, seed=seed) for seed in range(4)} | {greedy_text}) == 5
    assert len({ask(temperature=5.0) for _ in range(4)}) == 4, "without a seed every call draws anew"
    assert ask(temperature=1.0, top_p=1e-9, seed=3) == greedy_text
    assert ask(temperature=1e-6, seed=3) == greedy_text
    assert ask(temperature=5.0, seed=3) != ask(temperature=1.0, seed=3)
    assert ask(temperature=None, max_tokens=None, seed=None, top_p=None) == greedy_text
    for count in (1, 2, 7):
        message = llm.invoke(QUESTION, max_tokens=count)
        assert message.usage_metadata["output_tokens"] == count
        assert message.response_metadata["finish_reason"] == "length"


def test_sampling_settings_at_construction(llm: ChatPolyKV) -> None:
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 11, "max_tokens": 5}
    made = chat(llm.engine.model, llm.engine.tokenizer, **settings)
    assert made.engine is llm.engine
    want = llm.invoke(QUESTION, **settings)
    assert facts(made.invoke(QUESTION)) == facts(want)
    assert facts(llm.bind(**settings).invoke(QUESTION)) == facts(want)
    assert made.invoke(QUESTION, temperature=0, max_tokens=TOKENS).content == llm.invoke(QUESTION).content
    assert made.invoke(QUESTION, seed=12).content != want.content
    made.close()


def test_a_seeded_answer_does_not_depend_on_its_company(agent: ChatPolyKV) -> None:
    settings = {"temperature": 1.0, "seed": 5}
    alone = agent.invoke(QUESTION, **settings).content
    others: list[Any] = ["why " * i for i in range(1, 8)]
    assert agent.batch([*others, QUESTION, *others], **settings)[7].content == alone
    assert len({m.content for m in agent.batch([QUESTION] * 4, **settings)}) == 1


# -------------------------------------------------------------------------------------------- wrong keywords


@pytest.mark.parametrize("name", ["max_new_tokens", "tool", "response_formats", "top_p_", "functions"])
async def test_unknown_keywords_of_a_call_are_refused_by_name(agent: ChatPolyKV, name: str) -> None:
    kwargs = {name: None}

    async def consume() -> None:
        async for _ in agent.astream(QUESTION, **kwargs):
            pass

    async def ask() -> None:
        await agent.ainvoke(QUESTION, **kwargs)

    calls: list[Callable[[], Any]] = [
        lambda: agent.invoke(QUESTION, **kwargs),
        lambda: list(agent.stream(QUESTION, **kwargs)),
        lambda: agent.bind(**kwargs).invoke(QUESTION),
        lambda: agent.batch([QUESTION], **kwargs),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError, match=f"'{name}'.*temperature, top_p, max_tokens, stop, seed"):
            call()
    for task in (ask, consume):
        with pytest.raises(InvalidRequestError, match=f"'{name}'"):
            await task()


def test_several_unknown_keywords_are_all_named(agent: ChatPolyKV) -> None:
    with pytest.raises(InvalidRequestError, match="'best_of', 'functions'"):
        agent.invoke(QUESTION, functions=2, best_of=3, temperature=0)


def test_unknown_keywords_of_the_constructor_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        chat(max_new_tokens=3)
    with pytest.raises(ValueError, match="base_url"):
        ChatPolyKV(model="smollm2-135m", base_url="http://localhost")


# ------------------------------------------------------------------------------------------------ event loop


@contextmanager
def ticking() -> Iterator[list[float]]:
    """Counts how often the event loop came round."""
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    task = asyncio.get_running_loop().create_task(tick())
    try:
        yield ticks
    finally:
        task.cancel()


async def test_a_call_does_not_block_the_event_loop(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    with slow_steps(llm, 0.15):
        with ticking() as ticks:
            message = merged([chunk async for chunk in agent.astream(QUESTION, max_tokens=3)])
        assert len(ticks) > 15, "a blocked loop comes round once a token"
        with ticking() as ticks:
            assert (await agent.ainvoke(QUESTION, max_tokens=3)).content == message.content
        assert len(ticks) > 15
        with ticking() as ticks:
            assert len(await agent.abatch([QUESTION] * 3, max_tokens=3)) == 3
        assert len(ticks) > 15
        with ticking() as ticks:
            (await llm.ashare(OTHER_DOCUMENT)).release()
        assert len(ticks) > 5


async def test_loading_the_weights_does_not_block_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path)
    load_model = registry.load_model

    def slow_load(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.4)
        return load_model(*args, **kwargs)

    monkeypatch.setattr(registry, "load_model", slow_load)
    llm = ChatPolyKV(model=str(tmp_path), max_tokens=2, num_threads=1)
    with ticking() as ticks:
        first, second = await asyncio.gather(llm.ainvoke(QUESTION), llm.ainvoke(QUESTION))
    assert len(ticks) > 15
    assert first.content == second.content
    llm.close()


@pytest.mark.parametrize("way", ["batch", "abatch", "batch-in-loop", "chain", "bound"])
def test_a_batch_runs_all_at_once(llm: ChatPolyKV, agent: ChatPolyKV, way: str) -> None:
    """Threads would let cores + 4 run at once."""
    questions = [f"Question {i}" for i in range(16)]
    inputs: list[Any] = [{"question": question} for question in questions]
    chain = ChatPromptTemplate.from_messages([("human", "{question}")]) | agent

    async def inside() -> list[AIMessage]:
        return agent.batch(questions)

    with slow_steps(llm, 0.03):
        messages = {
            "batch": lambda: agent.batch(questions),
            "abatch": lambda: asyncio.run(agent.abatch(questions)),
            "batch-in-loop": lambda: asyncio.run(inside()),
            "chain": lambda: chain.batch(inputs),
            "bound": lambda: agent.bind(temperature=0).batch(questions),
        }[way]()
    assert llm.engine.stats().peak_running == 16
    assert len(messages) == 16
    for i in (0, 7, 15):
        assert messages[i].content == agent.invoke(questions[i]).content


def test_a_batch_heeds_the_limits(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    with slow_steps(llm, 0.01):
        messages = agent.batch([QUESTION] * 6, config={"max_concurrency": 2}, max_tokens=4)
    assert len({m.content for m in messages}) == 1
    assert llm.engine.stats().peak_running == 2
    narrow = chat(llm.engine.model, llm.engine.tokenizer, max_batch=3, max_tokens=4)
    with slow_steps(narrow, 0.01):
        assert {m.content for m in narrow.with_context(narrow.share(DOCUMENT)).batch([QUESTION] * 8)} == {
            messages[0].content
        }
    assert narrow.engine.stats().peak_running == 3
    narrow.close()


def test_a_batch_returns_or_raises_what_failed(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    bad = [HumanMessage([{"type": "image_url", "image_url": "x"}])]
    inputs: list[Any] = [QUESTION, bad, QUESTION]
    first, error, third = agent.batch(inputs, return_exceptions=True)
    assert isinstance(error, InvalidRequestError)
    assert first.content == third.content == agent.invoke(QUESTION).content
    with pytest.raises(InvalidRequestError, match="image_url"):
        agent.batch(inputs)
    assert agent.batch([]) == []
    assert eventually(lambda: idle(llm.engine))


# ---------------------------------------------------------------------------------------------- cancellation


async def _cancelled_task(agent: ChatPolyKV, started: Callable[[], bool]) -> None:
    task = asyncio.create_task(agent.ainvoke(QUESTION))
    assert await aeventually(started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _timed_out(agent: ChatPolyKV, started: Callable[[], bool]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(agent.ainvoke(QUESTION), 0.2)


async def _cancelled_stream(agent: ChatPolyKV, started: Callable[[], bool]) -> None:
    async def consume() -> None:
        async for _ in agent.astream(QUESTION):
            pass

    task = asyncio.create_task(consume())
    assert await aeventually(started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _closed_astream(agent: ChatPolyKV, started: Callable[[], bool]) -> None:
    stream = agent.astream(QUESTION)
    assert isinstance(stream, AsyncIterator)
    async with aclosing(stream):  # type: ignore[type-var]
        await anext(stream)
        assert started()


async def _left_astream(agent: ChatPolyKV, started: Callable[[], bool]) -> None:
    async for _ in agent.astream(QUESTION):
        assert started()
        break


async def _closed_stream(agent: ChatPolyKV, started: Callable[[], bool]) -> None:
    stream = agent.stream(QUESTION)
    next(stream)
    assert started()
    stream.close()  # type: ignore[attr-defined]


async def _left_stream(agent: ChatPolyKV, started: Callable[[], bool]) -> None:
    for _ in agent.stream(QUESTION):
        assert started()
        break


async def _cancelled_batch(agent: ChatPolyKV, started: Callable[[], bool]) -> None:
    task = asyncio.create_task(agent.abatch([QUESTION] * 5))
    assert await aeventually(started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "end",
    [
        _cancelled_task,
        _timed_out,
        _cancelled_stream,
        _closed_astream,
        _left_astream,
        _closed_stream,
        _left_stream,
        _cancelled_batch,
    ],
)
async def test_ending_a_call_early_frees_its_lease_and_its_row(
    llm: ChatPolyKV, ctx: SharedContext, end: Callable[..., Any]
) -> None:
    agent = llm.model_copy(update={"max_tokens": 1000}).with_context(ctx)
    with slow_steps(llm, 0.02):
        await end(agent, lambda: llm.pool.stats().num_leases > 0)
        assert await aeventually(lambda: idle(llm.engine), 3), "a thousand tokens would take 20 s"
    stats = llm.engine.stats()
    assert stats.cancelled >= 1
    assert stats.finished == 0
    assert llm.with_context(ctx).invoke(QUESTION).content


async def test_a_cancelled_call_that_waits_leaves_the_queue() -> None:
    llm = chat(max_batch=1)
    agent = llm.with_context(llm.share(DOCUMENT))
    want = agent.invoke(QUESTION).content
    with slow_steps(llm, 0.02):
        first = asyncio.create_task(agent.ainvoke(QUESTION))
        assert await aeventually(lambda: llm.engine.stats().running == 1)
        second = asyncio.create_task(agent.ainvoke("Why?"))
        assert await aeventually(lambda: llm.engine.stats().waiting == 1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert (await first).content == want
    assert await aeventually(lambda: idle(llm.engine))
    assert llm.engine.stats().cancelled == 1
    llm.close()


async def test_a_cancelled_neighbour_changes_nothing(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    want = agent.invoke(QUESTION).content
    with slow_steps(llm, 0.01):
        neighbours = [asyncio.create_task(agent.ainvoke(f"Question {i}", max_tokens=500)) for i in range(4)]
        task = asyncio.create_task(agent.ainvoke(QUESTION))
        assert await aeventually(lambda: llm.engine.stats().running == 5)
        for neighbour in neighbours:
            neighbour.cancel()
        assert (await task).content == want
        await asyncio.gather(*neighbours, return_exceptions=True)


# --------------------------------------------------------------------------------------------------- sharing


def test_sharing_twice_builds_once(llm: ChatPolyKV) -> None:
    first, second = llm.share(DOCUMENT), llm.share([DOCUMENT])
    assert first == second
    assert hash(first) == hash(second)
    assert first is not second
    assert len(first.id) == 64
    stats = llm.pool.stats()
    assert (stats.builds, stats.num_segments, stats.hits, stats.misses) == (1, 1, 1, 1)
    assert stats.num_bytes == first.num_bytes == second.num_bytes
    assert first.dense_bytes == first.num_tokens * 3 * 2 * 2 * 32 * 2
    assert llm.share(OTHER_DOCUMENT) != first
    assert llm.pool.stats().builds == 2


def test_a_codec_of_its_own(llm: ChatPolyKV, ctx: SharedContext) -> None:
    packed = llm.share(DOCUMENT, codec="k8v3")
    assert (packed.id, packed.codec, ctx.codec) == (ctx.id, "k8v3", "exact")
    assert packed != ctx
    assert packed.num_bytes < ctx.num_bytes
    assert llm.pool.stats().builds == 2
    message = llm.with_context(packed).invoke(QUESTION)
    assert message.response_metadata["shared_context"]["codec"] == "k8v3"
    assert message.usage_metadata["input_token_details"]["cache_read"] == ctx.num_tokens
    packed.release()
    assert llm.with_context(ctx).invoke(QUESTION).content


def test_handles_are_independent(llm: ChatPolyKV) -> None:
    first, second = llm.share(DOCUMENT), llm.share(DOCUMENT)
    one, two = llm.with_context(first), llm.with_context(second)
    want = one.invoke(QUESTION).content
    first.release()
    first.release()
    assert (first.released, second.released) == (True, False)
    assert two.invoke(QUESTION).content == want
    with pytest.raises(ContextReleasedError, match=r"has been released.*share\(\) again"):
        one.invoke(QUESTION)
    with pytest.raises(ContextReleasedError):
        llm.with_context(first)
    assert llm.pool.stats().num_segments == 1
    second.release()
    assert llm.pool.stats().num_segments == llm.pool.stats().num_bytes == 0
    third = llm.share(DOCUMENT)
    assert llm.with_context(third).invoke(QUESTION).content == want
    assert llm.pool.stats().builds == 2
    with pytest.raises(ContextReleasedError):
        one.invoke(QUESTION)


def test_a_context_manager_releases(llm: ChatPolyKV) -> None:
    with llm.share(DOCUMENT) as ctx:
        assert llm.with_context(ctx).invoke(QUESTION).content
        assert "released" not in repr(ctx)
    assert ctx.released
    assert "released" in repr(ctx)
    assert llm.pool.stats().num_segments == 0
    with pytest.raises(ZeroDivisionError), llm.share(DOCUMENT):
        raise ZeroDivisionError
    assert llm.pool.stats().num_segments == 0


async def test_a_running_call_survives_the_release_of_its_context(llm: ChatPolyKV) -> None:
    ctx = llm.share(DOCUMENT)
    agent = llm.with_context(ctx)
    want = agent.invoke(QUESTION).content
    with slow_steps(llm, 0.02):
        task = asyncio.create_task(agent.ainvoke(QUESTION))
        assert await aeventually(lambda: llm.pool.stats().num_leases == 1)
        ctx.release()
        assert llm.pool.stats().num_segments == 1
        assert (await task).content == want
    assert await aeventually(lambda: llm.pool.stats().num_segments == 0)


async def test_a_waiting_call_survives_the_release_of_its_context() -> None:
    llm = chat(max_batch=1)
    ctx = llm.share(DOCUMENT)
    agent = llm.with_context(ctx)
    want = agent.invoke(QUESTION).content
    with slow_steps(llm, 0.02):
        tasks = [asyncio.create_task(agent.ainvoke(QUESTION)) for _ in range(3)]
        assert await aeventually(lambda: llm.engine.stats().waiting == 2)
        ctx.release()
        try:
            assert [m.content for m in await asyncio.gather(*tasks)] == [want] * 3
        finally:
            await asyncio.gather(*tasks, return_exceptions=True)
            llm.close()


def test_many_threads_share_one_build(llm: ChatPolyKV) -> None:
    with ThreadPoolExecutor(8) as executor:
        contexts = list(executor.map(lambda _: llm.share(DOCUMENT), range(8)))
    assert len(set(contexts)) == 1
    assert llm.pool.stats().builds == 1
    for ctx in contexts[1:]:
        ctx.release()
    assert llm.with_context(contexts[0]).invoke(QUESTION).content
    contexts[0].release()
    assert llm.pool.stats().num_segments == 0


def test_progress_of_a_build(llm: ChatPolyKV) -> None:
    seen: list[tuple[str, int, int]] = []
    ctx = llm.share(DOCUMENT, progress=lambda *report: seen.append(report))
    assert seen[-1] == ("encode", 3, 3)
    assert ("prefill", ctx.num_tokens, ctx.num_tokens) in seen
    assert ctx.build_seconds > 0
    assert ctx.peak_build_bytes > 0


def test_a_caller_who_leaves_during_a_build_stops_it(llm: ChatPolyKV) -> None:
    def leave(*_: Any) -> None:
        raise KeyboardInterrupt

    with slow_steps(llm, 0.02):
        long = DOCUMENT * 8
        with pytest.raises(KeyboardInterrupt):
            llm.share(long, progress=leave)
        time.sleep(0.1)
    assert eventually(lambda: llm.pool.stats().num_segments == 0)
    assert llm.with_context(llm.share(long)).invoke(QUESTION).content


def test_a_caller_who_leaves_at_the_end_of_a_build_leaves_nothing_behind(llm: ChatPolyKV) -> None:
    def leave(*_: Any) -> None:
        assert eventually(lambda: llm.pool.stats().builds == 1)
        time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.share(DOCUMENT, progress=leave)
    assert eventually(lambda: llm.pool.stats().num_segments == 0, 1)


async def test_sharing_goes_on_while_others_read(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    want = agent.invoke(QUESTION).content
    with slow_steps(llm, 0.01):
        task = asyncio.create_task(agent.ainvoke(QUESTION))
        other = await llm.ashare(OTHER_DOCUMENT)
        assert (await task).content == want
    assert llm.with_context(other).invoke(QUESTION).content != want


async def test_a_cancelled_ashare_leaves_nothing_behind(llm: ChatPolyKV) -> None:
    with slow_steps(llm, 0.2):
        task = asyncio.create_task(llm.ashare(DOCUMENT))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.5)
    gc.collect()
    assert await aeventually(lambda: llm.pool.stats().num_segments == 0, 1)


async def test_an_ashare_cancelled_when_its_thread_has_just_finished_leaves_nothing_behind(llm: ChatPolyKV) -> None:
    task = asyncio.create_task(llm.ashare(DOCUMENT))
    await asyncio.sleep(0.001)
    assert eventually(lambda: llm.pool.stats().builds == 1), "the loop is blocked on purpose"
    time.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await aeventually(lambda: llm.pool.stats().num_segments == 0, 1)


def test_a_forgotten_handle_is_given_back(llm: ChatPolyKV) -> None:
    """As its docstring says: the pool frees the bytes when the last handle and the last reader have gone."""
    for number in range(3):
        llm.with_context(llm.share(f"{number} {DOCUMENT}")).invoke(QUESTION, max_tokens=1)
    gc.collect()
    assert eventually(lambda: llm.pool.stats().num_segments == 0, 1)


@pytest.mark.parametrize(
    "context",
    [
        ["One text.", "Another text."],
        [Document("One text.", metadata={"title": "T"}), Document("Another.")],
        [SystemMessage("The rules."), HumanMessage("The bond."), AIMessage("Understood.")],
        [HumanMessage(DOCUMENT)],
        "emoji 👩‍👩‍👧🙂, 日本語, עברית, \x00, e\u0301, trailing   \n\n ",
    ],
    ids=["texts", "documents", "messages", "human", "scripts"],
)
def test_everything_that_can_be_shared_is_read_from_the_pool(llm: ChatPolyKV, context: Any) -> None:
    shared = llm.share(context)
    message = llm.with_context(shared).invoke(QUESTION)
    assert message.usage_metadata["input_token_details"]["cache_read"] == shared.num_tokens > 10
    assert len(message.usage_metadata) == 4


def test_calls_without_messages_of_their_own(agent: ChatPolyKV) -> None:
    assert agent.invoke("").content
    assert agent.invoke([SystemMessage("You are the judge.")]).content


def test_leaving_the_context(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    assert agent.with_context(None).invoke(QUESTION).content == llm.invoke(QUESTION).content
    assert agent.invoke(QUESTION).content != llm.invoke(QUESTION).content
    assert llm.shared_context is None


def test_a_context_that_renders_differently_is_not_read(
    llm: ChatPolyKV, ctx: SharedContext, caplog: pytest.LogCaptureFixture
) -> None:
    """The same engine under another template: right answer, no cache, and it says why."""
    template = "Today is Monday.\n" + CHATML
    other = chat(llm.engine.model, llm.engine.tokenizer, chat_template=template).with_context(ctx)
    assert other.engine is llm.engine
    with caplog.at_level(logging.WARNING, logger="polykv_agents"):
        message = other.invoke(QUESTION)
    assert message.usage_metadata["input_token_details"]["cache_read"] == 0
    assert message.response_metadata["shared_context"]["tokens"] == 0
    assert "differently" in message.response_metadata["shared_context"]["reason"]
    assert "differently" in caplog.text
    ids = llm.engine.tokenizer.encode("Today is Monday.\n", add_special_tokens=False)
    assert message.usage_metadata["input_tokens"] == len(ids) + len(judge_ids(tiny_tokenizer()))
    oracle = tiny_model("llama")
    prompt = [*ids, *judge_ids(tiny_tokenizer())]
    assert message.content == tiny_tokenizer().decode(greedy(oracle, prompt, TOKENS), skip_special_tokens=True)


FOREIGN: dict[str, tuple[Callable[[ChatPolyKV], ChatPolyKV], str]] = {
    "model": (lambda llm: chat(tiny_model("llama", seed=1), llm.engine.tokenizer), "its weights differs"),
    "family": (lambda llm: chat(tiny_model("qwen3"), llm.engine.tokenizer), "its model_type differs"),
    "rope": (
        lambda llm: chat(
            tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            llm.engine.tokenizer,
        ),
        "its rope differs",
    ),
    "tokenizer": (lambda llm: chat(llm.engine.model, _other_tokenizer()), "its tokenizer differs"),
    "pool": (lambda llm: chat(llm.engine.model, llm.engine.tokenizer, max_batch=2), "another pool"),
}


def _other_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["merchant of"])
    return tokenizer


@pytest.mark.parametrize("which", FOREIGN)
def test_a_foreign_context_is_refused(llm: ChatPolyKV, ctx: SharedContext, agent: ChatPolyKV, which: str) -> None:
    make, reason = FOREIGN[which]
    other = make(llm)
    mine = other.with_context(other.share(DOCUMENT))
    want = agent.invoke(QUESTION).content, mine.invoke(QUESTION).content
    with pytest.raises(IncompatiblePoolError, match=rf"{reason}.*share\(\)"):
        other.with_context(ctx)
    smuggled = other.model_copy(update={"shared_context": ctx})
    with pytest.raises((IncompatiblePoolError, ContextReleasedError)):
        smuggled.invoke(QUESTION)
    assert (agent.invoke(QUESTION).content, mine.invoke(QUESTION).content) == want
    assert eventually(lambda: idle(other.engine))
    other.close()


# ------------------------------------------------------------------------------------------------- bad input

Attempt = Callable[[SimpleNamespace], Any]

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}

BAD_INPUT: dict[str, tuple[Attempt, type[Exception], list[str]]] = {
    # name: (what is done, the error, what its message tells)
    "empty context": (lambda at: at.llm.share(""), InvalidRequestError, ["empty", "give a text"]),
    "white space": (
        lambda at: at.llm.share(" \n\t\u2003"),
        InvalidRequestError,
        ["white space", "give a text"],
    ),
    "no context": (lambda at: at.llm.share([]), InvalidRequestError, ["cannot share", "texts"]),
    "context of numbers": (lambda at: at.llm.share([1, 2]), InvalidRequestError, ["int", "give strings"]),
    "image in context": (
        lambda at: at.llm.share([HumanMessage([IMAGE])]),
        InvalidRequestError,
        ["image_url", "text only"],
    ),
    "long context": (
        lambda at: at.llm.share("x " * 3000),
        PromptTooLongError,
        [str(POSITIONS), r"has \d{4} tokens", r"shorten the context by at least \d{4}"],
    ),
    "long prompt": (
        lambda at: at.agent.invoke("x " * 3000),
        PromptTooLongError,
        [str(POSITIONS), r"context \d+ \+ prompt \d{4} \+ max_tokens 8 = \d{4}", "shorten"],
    ),
    "max_tokens over the positions": (
        lambda at: at.agent.invoke(QUESTION, max_tokens=POSITIONS),
        PromptTooLongError,
        [str(POSITIONS), "max_tokens 2048", "lower max_tokens, by"],
    ),
    "streaming over the positions": (
        lambda at: list(at.agent.stream(QUESTION, max_tokens=POSITIONS)),
        PromptTooLongError,
        ["max_tokens 2048"],
    ),
    "codec of a call": (
        lambda at: at.llm.share("x", codec="zip"),
        UnknownCodecError,
        ["'zip'", "exact, k8v3, paper"],
    ),
    "codec": (lambda at: chat(codec="zip"), UnknownCodecError, ["'zip'", "exact, k8v3, paper"]),
    "head_dim": (
        lambda at: chat(tiny_model("llama", head_dim=30), codec="k8v3").share(DOCUMENT),
        UnsupportedModelError,
        ["30"],
    ),
    "model type": (lambda at: chat(_gpt2()).load(), UnsupportedModelError, ["'gpt2'", "llama, mistral"]),
    "missing GGUF": (
        lambda at: ChatPolyKV(model=str(at.folder / "missing.gguf")),
        ModelNotFoundError,
        ["missing.gguf", "give a folder"],
    ),
    "missing folder": (
        lambda at: ChatPolyKV(model=str(at.folder / "missing" / "model")),
        ModelNotFoundError,
        ["missing/model", "give a folder"],
    ),
    "folder without a model": (
        lambda at: ChatPolyKV(model=str(at.folder)),
        ModelNotFoundError,
        ["config.json", "notes.gguf"],
    ),
    "a file that is no GGUF": (
        lambda at: ChatPolyKV(model=str(at.folder / "notes.txt")),
        ModelNotFoundError,
        ["notes.txt", "give its folder or a GGUF"],
    ),
    "blank model": (lambda at: ChatPolyKV(model=" "), ModelNotFoundError, ["' '", "give a name"]),
    "unknown hub id": (
        lambda at: ChatPolyKV(model="nobody/nothing").load(),
        ModelNotFoundError,
        ["nobody/nothing", "smollm2-135m"],
    ),
    "model without tokenizer": (
        lambda at: ChatPolyKV(model=tiny_model("llama")),
        InvalidRequestError,
        ["tokenizer="],
    ),
    "tokenizer without model": (
        lambda at: ChatPolyKV(model="smollm2-135m", tokenizer=tiny_tokenizer()),
        InvalidRequestError,
        ["tokenizer=", "'smollm2-135m'"],
    ),
    "no chat template": (
        lambda at: chat(tokenizer=tiny_tokenizer(None)).invoke(QUESTION),
        InvalidRequestError,
        ["no chat template", "chat_template="],
    ),
    "image in a message": (
        lambda at: at.agent.invoke([HumanMessage([{"type": "text", "text": "x"}, IMAGE])]),
        InvalidRequestError,
        ["image_url", "text only"],
    ),
    "n": (
        lambda at: at.agent.invoke(QUESTION, n=3),
        InvalidRequestError,
        ["n=3", "one answer", r"batch\(\[prompt\] \* 3\)"],
    ),
    "unknown tool": (
        lambda at: at.agent.bind_tools([], tool_choice="search"),
        InvalidRequestError,
        ["'search'", "there are none"],
    ),
    "audio": (
        lambda at: at.agent.invoke([HumanMessage([{"type": "audio", "base64": "x"}])]),
        InvalidRequestError,
        ["'audio'", "text only"],
    ),
    "no messages": (lambda at: at.llm.invoke([]), InvalidRequestError, ["at least one"]),
    "max_tokens": (lambda at: at.agent.invoke(QUESTION, max_tokens=-1), InvalidRequestError, ["-1", ">= 1"]),
    "max_tokens 0": (lambda at: at.agent.invoke(QUESTION, max_tokens=0), InvalidRequestError, ["0", ">= 1"]),
    "max_tokens 1.5": (lambda at: at.agent.invoke(QUESTION, max_tokens=1.5), InvalidRequestError, ["1.5"]),
    "max_tokens at construction": (lambda at: chat(max_tokens=-5), InvalidRequestError, ["-5", ">= 1"]),
    "temperature": (
        lambda at: at.agent.invoke(QUESTION, temperature=-0.1),
        InvalidRequestError,
        ["-0.1", ">= 0"],
    ),
    "temperature NaN": (
        lambda at: at.agent.invoke(QUESTION, temperature=float("nan")),
        InvalidRequestError,
        ["nan", ">= 0"],
    ),
    "temperature at construction": (lambda at: chat(temperature=-1), InvalidRequestError, ["-1", ">= 0"]),
    "top_p": (lambda at: at.agent.invoke(QUESTION, top_p=1.5), InvalidRequestError, ["1.5", r"\(0, 1\]"]),
    "top_p 0": (lambda at: at.agent.invoke(QUESTION, top_p=0), InvalidRequestError, ["0", r"\(0, 1\]"]),
    "seed": (lambda at: at.agent.invoke(QUESTION, seed="x"), InvalidRequestError, ["'x'", "integer"]),
    "empty stop": (
        lambda at: at.agent.invoke(QUESTION, stop=[""]),
        InvalidRequestError,
        ["non-empty strings"],
    ),
    "stop of numbers": (
        lambda at: at.agent.invoke(QUESTION, stop=[3]),
        InvalidRequestError,
        ["non-empty", "3"],
    ),
    "template that refuses": (
        lambda at: chat(
            at.llm.engine.model, at.llm.engine.tokenizer, chat_template="{{ raise_exception('never') }}"
        ).invoke(QUESTION),
        InvalidRequestError,
        ["template", "never"],
    ),
    "context of another tokenizer": (
        lambda at: chat(at.llm.engine.model, _other_tokenizer()).with_context(at.ctx),
        IncompatiblePoolError,
        ["tokenizer", r"share\(\)"],
    ),
    "max_batch": (lambda at: chat(max_batch=0).load(), InvalidRequestError, ["max_batch", "at least 1", "0"]),
}


def _gpt2() -> Any:
    special = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=320, **special))


@pytest.mark.parametrize("which", BAD_INPUT)
def test_bad_input_is_a_clear_error_and_harms_nobody(
    llm: ChatPolyKV, ctx: SharedContext, agent: ChatPolyKV, tmp_path: Path, which: str
) -> None:
    attempt, error, tells = BAD_INPUT[which]
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "notes.gguf").write_text("x")
    want = agent.invoke(QUESTION).content
    before = llm.pool.stats()
    with slow_steps(llm, 0.002):
        neighbour = agent.stream(QUESTION)
        pieces = [next(neighbour).content]
        with pytest.raises(error) as caught:
            attempt(SimpleNamespace(llm=llm, ctx=ctx, agent=agent, folder=tmp_path))
        pieces += [chunk.content for chunk in neighbour]
    assert isinstance(caught.value, PolyKVError)
    for pattern in tells:
        assert caught.match(pattern)
    assert "".join(map(str, pieces)) == want
    assert agent.invoke(QUESTION).content == want
    after = llm.pool.stats()
    assert (after.num_segments, after.num_bytes, after.builds) == (before.num_segments, before.num_bytes, 1)
    assert after.num_leases == 0


def test_a_request_whose_logits_are_not_numbers_fails_alone(llm: ChatPolyKV, agent: ChatPolyKV) -> None:
    (poison,) = llm.get_token_ids("\x7f")

    def spoil(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs["input_ids"][0].tolist()
        if poison in ids:
            rows = kwargs["logits_to_keep"].tolist()
            output.logits[0, bisect_left(rows, ids.index(poison))] = float("nan")

    questions = ["One?", "Two\x7f?", "Three?"]
    want = [agent.invoke(q).content for q in questions]
    hook = llm.engine.model.register_forward_hook(spoil, with_kwargs=True)
    with slow_steps(llm, 0.01):
        first, error, third = agent.batch(questions, return_exceptions=True)
    hook.remove()
    assert [first.content, third.content] == [want[0], want[2]]
    assert isinstance(error, NonFiniteLogitsError)
    assert "float32" in str(error)
    assert llm.engine.stats().failed == 1
    assert [m.content for m in agent.batch(questions)] == want


@pytest.mark.parametrize(
    ("attempt", "tells"),
    [
        pytest.param(lambda _: chat(dtype="bfloat16").load(), "dtype", id="dtype"),
        pytest.param(lambda _: chat(device="meta").load(), "device", id="device"),
        pytest.param(lambda folder: ChatPolyKV(model=folder, dtype="float99").load(), "float99", id="float99"),
        pytest.param(lambda folder: ChatPolyKV(model=folder, device="tpu9").load(), "tpu9", id="tpu9"),
        pytest.param(lambda _: chat(max_batch=0), "max_batch", id="max_batch"),
        pytest.param(lambda _: chat(num_threads=0), "num_threads", id="num_threads"),
        pytest.param(lambda _: ChatPolyKV(model=""), r"''.*give a name", id="empty name"),
        pytest.param(lambda _: chat().with_context("0" * 64), "no live shared context", id="SharedContext"),
        pytest.param(
            lambda folder: ChatPolyKV(model=folder, device="cuda").load(),
            "cuda",
            id="cuda",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_wrong_construction_is_refused(tmp_path: Path, attempt: Callable[[str], Any], tells: str) -> None:
    save_tiny(tmp_path)
    with pytest.raises(PolyKVError, match=tells):
        attempt(str(tmp_path))


def test_a_path_is_a_model(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    assert ChatPolyKV(model=tmp_path, num_threads=1).invoke(QUESTION, max_tokens=2).content


# ---------------------------------------------------------------------------------------------------- copies


def weights_of(llm: ChatPolyKV) -> int:
    return id(llm.engine.model)


@pytest.mark.parametrize(
    "duplicate",
    [
        lambda agent: agent.model_copy(),
        lambda agent: agent.model_copy(deep=True),
        copy.copy,
        copy.deepcopy,
        lambda agent: agent.with_config(tags=["x"]).bound,
        lambda agent: agent.with_context(agent.shared_context),
        lambda agent: agent.with_context(None).with_context(agent.shared_context),
    ],
    ids=["model_copy", "deep", "copy", "deepcopy", "with_config", "with_context", "with_context-twice"],
)
def test_copies_share_engine_and_context(agent: ChatPolyKV, duplicate: Callable[[ChatPolyKV], ChatPolyKV]) -> None:
    want = facts(agent.invoke(QUESTION))
    twin = duplicate(agent)
    assert twin.engine is agent.engine
    assert twin.shared_context is agent.shared_context
    assert facts(twin.invoke(QUESTION)) == want
    del twin
    assert facts(agent.invoke(QUESTION)) == want


def test_configurable_fields_keep_engine_and_context(agent: ChatPolyKV, ctx: SharedContext) -> None:
    configurable = agent.configurable_fields(
        temperature=ConfigurableField(id="temperature"),
        max_tokens=ConfigurableField(id="max_tokens"),
        seed=ConfigurableField(id="seed"),
    )
    settings = {"temperature": 1.0, "seed": 3, "max_tokens": 5}
    want = agent.invoke(QUESTION, **settings)
    got = configurable.with_config(configurable=settings).invoke(QUESTION)
    assert facts(got) == facts(want)
    assert got.usage_metadata["input_token_details"]["cache_read"] == ctx.num_tokens
    streamed = configurable.stream(QUESTION, config={"configurable": settings})
    assert facts(merged(list(streamed))) == facts(want)
    batch = configurable.batch([QUESTION] * 3, config={"configurable": settings})
    assert [facts(m) for m in batch] == [facts(want)] * 3
    assert agent.pool.stats().builds == 1
    assert facts(configurable.invoke(QUESTION)) == facts(agent.invoke(QUESTION))


@pytest.mark.parametrize("field", [{"dtype": "float32"}, {"device": "cpu"}, {"revision": "main"}])
def test_configurable_fields_of_an_object_with_device_or_dtype(field: dict[str, str]) -> None:
    try:
        llm = chat(**field)
    except InvalidRequestError:
        return  # these fields say how to load a named model: refusing them is as good
    configurable = llm.configurable_fields(temperature=ConfigurableField(id="temperature"))
    assert configurable.with_config(configurable={"temperature": 0.0}).invoke(QUESTION, max_tokens=2).content


def test_configurable_template(agent: ChatPolyKV) -> None:
    configurable = agent.configurable_fields(chat_template=ConfigurableField(id="template"))
    configured = {"template": "Today is Monday.\n" + CHATML}
    message = configurable.with_config(configurable=configured).invoke(QUESTION)
    assert message.usage_metadata["input_token_details"]["cache_read"] == 0
    assert message.usage_metadata["input_tokens"] > agent.invoke(QUESTION).usage_metadata["input_tokens"]


def test_a_copy_with_another_template_uses_it(llm: ChatPolyKV) -> None:
    llm.load()
    llm.invoke(QUESTION, max_tokens=1)
    twin = llm.model_copy(update={"chat_template": "Today is Monday.\n" + CHATML})
    assert twin.get_num_tokens_from_messages([HumanMessage("x")]) > llm.get_num_tokens_from_messages(
        [HumanMessage("x")]
    )


def test_a_pickled_chat_model_finds_its_engine(llm: ChatPolyKV) -> None:
    want = llm.invoke(QUESTION)
    data = pickle.dumps(llm)
    assert len(data) < 20_000, "weights do not belong in a pickle"
    twin = pickle.loads(data)
    assert twin.engine is llm.engine
    assert facts(twin.invoke(QUESTION)) == facts(want)
    twin.close()
    assert facts(llm.invoke(QUESTION)) == facts(want)


def test_a_pickle_whose_weights_are_gone_is_refused() -> None:
    llm = chat()
    data = pickle.dumps(llm)
    llm.close()
    del llm
    gc.collect()
    with pytest.raises(ModelNotFoundError, match=r"handed over as an object.*again"):
        pickle.loads(data)


def test_a_pickle_of_a_named_model_loads_it_again(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    llm = ChatPolyKV(model=str(tmp_path), codec="exact", max_tokens=5, num_threads=1)
    want = llm.invoke(QUESTION)
    data = pickle.dumps(llm)
    llm.close()
    del llm
    gc.collect()
    twin = pickle.loads(data)
    assert facts(twin.invoke(QUESTION)) == facts(want)
    twin.close()


class Tracer:
    """Counts the copies of the object that holds it."""

    copies = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Tracer.copies += 1
        return (Tracer, ())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda llm: pickle.loads(pickle.dumps(llm))], ids=["deepcopy", "pickle"]
)
def test_copies_do_not_duplicate_the_tokenizer(llm: ChatPolyKV, duplicate: Callable[[ChatPolyKV], ChatPolyKV]) -> None:
    llm.invoke(QUESTION, max_tokens=1)
    llm.engine.tokenizer.tracer, Tracer.copies = Tracer(), 0
    copy.deepcopy(llm.engine.tokenizer)
    assert Tracer.copies == 1
    twin = duplicate(llm)
    assert twin.invoke(QUESTION, max_tokens=1).content == llm.invoke(QUESTION, max_tokens=1).content
    assert Tracer.copies == 1


def test_a_shared_context_cannot_be_pickled(agent: ChatPolyKV, ctx: SharedContext) -> None:
    for thing in (ctx, agent):
        with pytest.raises(TypeError, match=r"cannot be pickled.*share"):
            pickle.dumps(thing)
    assert copy.copy(ctx) is ctx
    assert copy.deepcopy([ctx])[0] is ctx


def test_names_of_objects_are_unique_beyond_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle of another process, or a cached answer of another day, must not meet this process's first model."""
    names = []
    for seed in (0, 1):
        spec = importlib.util.spec_from_file_location("a_process_of_its_own", registry.__file__)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        names.append(module.register_object(tiny_model("llama", seed=seed), tiny_tokenizer())[0])
    assert names[0] != names[1]


def test_equal_chat_models_share_one_engine(llm: ChatPolyKV) -> None:
    model, tokenizer = llm.engine.model, llm.engine.tokenizer
    same = chat(model, tokenizer, temperature=1.0, codec="k8v3", max_tokens=3)
    assert same.engine is llm.engine
    assert same.model == llm.model
    for other in (
        chat(model, tiny_tokenizer()),
        chat(model, tokenizer, max_batch=2),
        chat(tiny_model("llama"), tokenizer),
    ):
        assert other.engine is not llm.engine
        other.close()
    assert chat(model, tokenizer, max_batch=2).engine.model is model, "engines share weights"
    same.close()


def test_equal_named_chat_models_share_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path)
    loads: list[Any] = []
    load_model = registry.load_model

    def counted(*args: Any, **kwargs: Any) -> Any:
        loads.append(args)
        return load_model(*args, **kwargs)

    monkeypatch.setattr(registry, "load_model", counted)
    first = ChatPolyKV(model=str(tmp_path), max_tokens=3)
    second = ChatPolyKV(model=str(tmp_path), temperature=1.0)
    third = ChatPolyKV(model=str(tmp_path), max_batch=3)
    assert not loads, "weights are loaded at first use"
    with ThreadPoolExecutor(6) as executor:
        engines = list(executor.map(lambda m: m.engine, [first, second, first, second, first, second]))
    assert len(set(engines)) == 1
    assert weights_of(third) == weights_of(first)
    assert third.engine is not first.engine
    assert len(loads) == 1
    for made in (first, second, third):
        made.close()


# ------------------------------------------------------------------------------------------------------ ends


def test_the_last_close_ends_the_engine() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    first, second = chat(model, tokenizer), chat(model, tokenizer)
    engine = first.engine
    ctx = first.share(DOCUMENT)
    agent = first.with_context(ctx)
    want = second.invoke(QUESTION).content
    thread = engine._thread
    first.close()
    first.close()
    for use in (
        lambda: first.invoke(QUESTION),
        lambda: agent.invoke(QUESTION),
        lambda: first.share(DOCUMENT),
        lambda: first.pool,
        lambda: list(first.stream(QUESTION)),
        lambda: first.batch([QUESTION]),
        lambda: asyncio.run(first.ainvoke(QUESTION)),
    ):
        with pytest.raises(EngineClosedError, match=r"closed.*new one"):
            use()
    assert not engine.closed
    assert second.invoke(QUESTION).content == want
    assert second.with_context(ctx).invoke(QUESTION).content, "the pool is the engine's, not the closed object's"
    second.close()
    assert engine.closed
    assert not thread.is_alive()
    ctx.release()
    again = chat(model, tokenizer)
    assert again.engine is not engine
    assert again.invoke(QUESTION).content == want
    again.close()


def test_closing_ends_running_and_waiting_calls() -> None:
    llm = chat(max_batch=2, max_tokens=500)
    agent = llm.with_context(llm.share(DOCUMENT))
    pool, engine = llm.pool, llm.engine
    with slow_steps(llm, 0.01), ThreadPoolExecutor(4) as executor:
        calls = [executor.submit(agent.invoke, QUESTION) for _ in range(4)]
        assert eventually(lambda: (engine.stats().running, engine.stats().waiting) == (2, 2))
        llm.close()
        for call in calls:
            with pytest.raises(EngineClosedError, match="has been closed"):
                call.result(DEADLINE)
    assert pool.stats().num_leases == 0
    assert engine.stats().running == engine.stats().waiting == engine.stats().tail_bytes == 0


def test_a_forgotten_chat_model_takes_engine_and_weights_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.5)
    model = tiny_model("llama")
    llm = chat(model)
    agent = llm.with_context(llm.share(DOCUMENT))
    assert agent.invoke(QUESTION).content
    engine, weights, thread = weakref.ref(llm.engine), weakref.ref(model), llm.engine._thread
    assert thread.is_alive()
    del llm, model
    gc.collect()
    assert agent.invoke(QUESTION).content, "a copy keeps the engine"
    del agent
    gc.collect()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert eventually(lambda: gc.collect() >= 0 and engine() is None)
    assert eventually(lambda: gc.collect() >= 0 and weights() is None)


def test_an_idle_engine_rests_and_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.05)
    llm = chat()
    agent = llm.with_context(llm.share(DOCUMENT))
    want = agent.invoke(QUESTION).content
    for _ in range(3):
        assert eventually(lambda: llm.engine._thread is None), "at rest"
        assert agent.invoke(QUESTION).content == want
    llm.close()


def test_an_engine_nobody_uses_is_collected_once_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.05)
    engine = Engine(tiny_model("llama"), tiny_tokenizer(), num_threads=1)
    engine.generate([5, 6, 7]).result(DEADLINE)
    gone, thread = weakref.ref(engine), engine._thread
    del engine
    assert eventually(lambda: gc.collect() >= 0 and gone() is None)
    assert thread is None or not thread.is_alive()


def _in_thread(work: Callable[[], None], seconds: float = 2) -> bool:
    """Whether the work ends; a thread that never does is left behind."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_a_collection_inside_the_registry_does_not_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = isinstance(registry._lock, type(threading.Lock()))
    # a lock of the same kind, so that a deadlock does not outlive the test
    monkeypatch.setattr(registry, "_lock", threading.Lock() if plain else threading.RLock())
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()

    class CollectingEntry(registry._Entry):
        def __init__(self) -> None:
            gc.collect()  # as any allocation may
            super().__init__()

    gc.disable()
    try:
        forgotten = chat(model, tokenizer, max_batch=2)
        cycle: list[Any] = [forgotten]
        cycle.append(cycle)
        del forgotten, cycle
        monkeypatch.setattr(registry, "_Entry", CollectingEntry)
        assert _in_thread(lambda: chat(model, tokenizer).close())
    finally:
        gc.enable()


def test_a_collection_inside_the_engine_does_not_deadlock() -> None:
    llm = chat()
    engine = llm.engine
    llm.invoke(QUESTION, max_tokens=1)
    holder = [llm]
    del llm

    def collect() -> None:
        engine._lock.acquire()  # held while lists are made, which may collect
        holder.clear()
        gc.collect()
        with suppress(RuntimeError):
            engine._lock.release()

    try:
        assert _in_thread(collect)
    finally:
        with suppress(RuntimeError):  # lets the thread go that waits for itself
            engine._lock.release()


# ------------------------------------------------------------------------------------------------ description


def test_identifying_parameters_tell_apart_what_changes_an_answer(llm: ChatPolyKV, ctx: SharedContext) -> None:
    agent = llm.with_context(ctx)
    variants = [
        llm,
        agent,
        llm.with_context(llm.share(OTHER_DOCUMENT)),
        llm.with_context(llm.share(DOCUMENT, codec="k8v3")),
        *(
            agent.model_copy(update=update)
            for update in (
                {"temperature": 0.5},
                {"top_p": 0.5},
                {"max_tokens": 3},
                {"stop": ["x"]},
                {"seed": 1},
                {"chat_template": "x"},
            )
        ),
        chat(tiny_model("llama", seed=1)),
    ]
    keys = [repr(sorted(v._identifying_params.items())) for v in variants]
    assert len(set(keys)) == len(variants)
    assert repr(sorted(copy.deepcopy(agent)._identifying_params.items())) == keys[1]
    twin = llm.with_context(llm.share(DOCUMENT))
    assert repr(sorted(twin._identifying_params.items())) == keys[1]
    assert all(" at 0x" not in key for key in keys)
    variants[-1].close()


def test_descriptions_are_short_and_hold_no_weights(agent: ChatPolyKV) -> None:
    assert len(repr(agent)) < 500
    assert agent._llm_type == "chat-polykv"
    params = agent._get_ls_params(stop=["x"])
    assert (params["ls_model_name"], params["ls_temperature"], params["ls_max_tokens"]) == (
        agent.model,
        0.0,
        TOKENS,
    )
    assert params["ls_stop"] == ["x"]


def test_langchains_answer_cache_tells_contexts_apart(llm: ChatPolyKV) -> None:
    cached = llm.model_copy(update={"cache": InMemoryCache()})
    one = cached.with_context(cached.share(DOCUMENT))
    two = cached.with_context(cached.share(OTHER_DOCUMENT))
    answers = [one.invoke(QUESTION), two.invoke(QUESTION), cached.invoke(QUESTION)]
    assert len({a.content for a in answers}) == 3
    finished = llm.engine.stats().finished
    again = [one.invoke(QUESTION), two.invoke(QUESTION), cached.invoke(QUESTION)]
    assert [a.content for a in again] == [a.content for a in answers]
    assert llm.engine.stats().finished == finished, "answered from the cache"
    assert one.invoke(QUESTION, max_tokens=5).content != answers[0].content
    assert asyncio.run(one.ainvoke(QUESTION)).content == answers[0].content
    twin = cached.with_context(cached.share(DOCUMENT))
    finished = llm.engine.stats().finished
    assert twin.invoke(QUESTION).content == answers[0].content
    assert llm.engine.stats().finished == finished, "an equal context is the same key"


def test_chat_models_module_keeps_its_promise_about_keywords() -> None:
    assert calls.CALL_KEYWORDS[:5] == ("temperature", "top_p", "max_tokens", "stop", "seed")
    assert set(calls.SAMPLING_KEYWORDS) <= set(ChatPolyKV.model_fields)
    assert len(list(itertools.chain(BAD_INPUT))) >= 30


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_with_an_empty_registry(llm: ChatPolyKV) -> None:
    llm.load()
    child = os.fork()
    if child == 0:
        os._exit(0 if not registry._entries and registry._reaper is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert llm.invoke(QUESTION, max_tokens=1).usage_metadata is not None


def test_closing_a_reader_leaves_the_others_alone(llm: ChatPolyKV, ctx: SharedContext) -> None:
    one, other = llm.with_context(ctx), llm.with_context(ctx)
    one.close()
    with pytest.raises(EngineClosedError, match="this reader has been closed"):
        one.invoke(QUESTION)
    assert other.invoke(QUESTION, max_tokens=1).usage_metadata is not None
    assert llm.invoke(QUESTION, max_tokens=1).usage_metadata is not None


def test_fields_are_documented() -> None:
    own = set(ChatPolyKV.model_fields) - set(BaseChatModel.model_fields)
    assert {name for name in own if not ChatPolyKV.model_fields[name].description} == set()


def test_several_documents_are_told_apart(llm: ChatPolyKV) -> None:
    pages = [
        Document("One.", metadata={"source": "a.pdf", "page": 3}),
        Document(" "),
        Document("Two.", metadata={"title": "T"}),
    ]
    _, turns = llm.share(pages).reading()
    assert turns[0]["content"] == "[Document 1: a.pdf, page 3]\nOne.\n\n[Document 2: T]\nTwo."
    assert llm.share(Document("One text.")) == llm.share("One text.")
    assert llm.share([("system", "Rules."), ("human", "Read.")]) == llm.share(
        [SystemMessage("Rules."), HumanMessage("Read.")]
    )
