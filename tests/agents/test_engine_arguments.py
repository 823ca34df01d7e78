"""Timeouts, priorities, the queue's bound, deterministic answers and int8 weights, as fields and in calls."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_model
from langchain_core.messages import AIMessage

from polykv.errors import EngineOverloaded, InvalidRequestError, RequestTimeoutError
from polykv_agents import ChatPolyKV

LONG = " word" * 30


@pytest.fixture
def make(tiny_llama: Any, tokenizer: Any) -> Any:
    made: list[ChatPolyKV] = []

    def build(**fields: Any) -> ChatPolyKV:
        made.append(ChatPolyKV(model=tiny_llama, tokenizer=tokenizer, **fields))
        return made[-1]

    yield build
    for llm in made:
        llm.close()


class TestTimeout:
    @pytest.mark.parametrize("where", ["field", "call", "bind"])
    def test_ends_a_call_and_leaves_the_engine_well(self, make: Any, where: str) -> None:
        llm = make(max_tokens=1500, timeout=0.05 if where == "field" else None)
        kwargs = {"timeout": 0.05} if where == "call" else {}
        runnable = llm.bind(timeout=0.05) if where == "bind" else llm
        with pytest.raises(RequestTimeoutError, match=r"timeout of 0.05 s was over.*raise timeout"):
            runnable.invoke(LONG, **kwargs)
        assert isinstance(llm.invoke(LONG, max_tokens=2, timeout=60), AIMessage)
        stats = llm.engine.stats()
        assert (stats.running, stats.waiting, stats.tail_bytes, stats.timed_out) == (0, 0, 0, 1)

    def test_a_call_may_have_none_where_the_field_has_one(self, make: Any) -> None:
        assert isinstance(make(timeout=1e-9).invoke(LONG, max_tokens=2, timeout=None), AIMessage)

    def test_in_streams_and_batches(self, make: Any) -> None:
        llm = make(max_tokens=1500, timeout=0.05)
        with pytest.raises(RequestTimeoutError):
            list(llm.stream(LONG))
        results = llm.batch([LONG, LONG], return_exceptions=True)
        assert [type(r) for r in results] == [RequestTimeoutError] * 2

    @pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
    def test_bad_values(self, make: Any, bad: float) -> None:
        with pytest.raises(InvalidRequestError, match="timeout must be a finite number of seconds > 0"):
            make(timeout=bad)
        with pytest.raises(InvalidRequestError, match="timeout must be"):
            make().invoke("hi", timeout=bad)


def test_a_higher_priority_starts_first(make: Any) -> None:
    llm = make(max_batch=1, max_tokens=3)
    llm.load()
    order: list[str] = []
    gate, arrived = threading.Event(), threading.Event()
    forward = llm.engine._runner.forward

    def gated(batch: Any) -> Any:
        arrived.set()
        assert gate.wait(60)
        return forward(batch)

    llm.engine._runner.forward = gated

    async def ask(name: str, priority: int) -> None:
        await llm.ainvoke(LONG, priority=priority)
        order.append(name)

    async def run() -> None:
        tasks = [asyncio.create_task(ask("running", 0))]
        await asyncio.to_thread(arrived.wait, 30)
        for count, (name, priority) in enumerate([("low", -1), ("first", 0), ("second", 0), ("high", 5)], start=1):
            tasks.append(asyncio.create_task(ask(name, priority)))
            while llm.engine.stats().waiting < count:
                await asyncio.sleep(0.005)
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert order == ["running", "high", "first", "second", "low"]


def test_a_full_queue_refuses_and_says_what_to_do(make: Any) -> None:
    llm = make(max_batch=1, max_waiting=2, max_tokens=2)
    results = llm.batch([LONG] * 8, return_exceptions=True)
    refused = [r for r in results if isinstance(r, EngineOverloaded)]
    assert len(refused) == 8 - 1 - 2
    assert "max_waiting=2" in str(refused[0])
    assert sum(isinstance(r, AIMessage) for r in results) == 3
    assert isinstance(llm.invoke(LONG), AIMessage), "and takes calls again afterwards"


def test_deterministic_answers_are_bitwise_equal(make: Any) -> None:
    llm = make(deterministic=True, temperature=1.0, seed=3, max_tokens=12, logprobs=True)
    prompts = [f"{' word' * i} and then" for i in range(1, 9)]
    alone = [llm.invoke(p) for p in prompts]
    together = llm.batch(prompts)
    for one, other in zip(alone, together, strict=True):
        assert one.content == other.content
        assert one.response_metadata["logprobs"] == other.response_metadata["logprobs"]


def test_engines_differ_by_these_and_are_shared_otherwise(make: Any) -> None:
    first, same = make(max_waiting=9, timeout=1.0), make(max_waiting=9, priority=4)
    assert first.engine is same.engine
    assert make(max_waiting=10).engine is not first.engine
    assert make(max_waiting=9, deterministic=True).engine is not first.engine


def test_int8_weights_are_for_models_by_name(make: Any) -> None:
    with pytest.raises(InvalidRequestError, match="weights: these say how to load"):
        make(weights="int8")
    with pytest.raises(InvalidRequestError, match=r"unknown weights 'int3'; use 'bfloat16', 'int8'"):
        ChatPolyKV(weights="int3")


def test_bfloat16_weights_of_a_folder_change_no_bit(tokenizer: Any, tmp_path: Any) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    wide = ChatPolyKV(model=str(tmp_path), dtype="float32", deterministic=True)
    narrow = ChatPolyKV(model=str(tmp_path), dtype="float32", deterministic=True, weights="bfloat16")
    try:
        assert "NarrowLinear" in {type(m).__name__ for m in narrow.engine.model.modules()}
        settings = {"max_tokens": 12, "logprobs": True, "temperature": 1.0, "seed": 2}
        a, b = wide.invoke("one two", **settings), narrow.invoke("one two", **settings)
        assert a.content == b.content
        assert a.response_metadata["logprobs"] == b.response_metadata["logprobs"]
    finally:
        wide.close()
        narrow.close()


def test_bfloat16_weights_are_refused_where_they_would_lose_something(tokenizer: Any, tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    llm = ChatPolyKV(model=str(tmp_path), weights="bfloat16")
    with pytest.raises(InvalidRequestError, match=r"layer lm_head are no bfloat16 numbers"):
        llm.load()
    llm.close()


def test_int8_weights_of_a_folder(tokenizer: Any, tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    exact, small = ChatPolyKV(model=str(tmp_path)), ChatPolyKV(model=str(tmp_path), weights="int8")
    try:
        assert exact.engine is not small.engine
        assert exact._identifying_params != small._identifying_params
        names = {type(m).__name__ for m in small.engine.model.modules()}
        assert "Int8Linear" in names and not {"Linear", "FastLinear"} & names
        assert "Int8Linear" not in {type(m).__name__ for m in exact.engine.model.modules()}
        message = small.invoke("one two", max_tokens=4)
        assert message.usage_metadata is not None and message.usage_metadata["output_tokens"] >= 1
        ids = random_ids(80)
        segment = small.engine.share(ids)
        reason = exact.pool.identity.mismatch(segment.model)
        assert reason == "weights", "keys and values of one are not the other's"
    finally:
        exact.close()
        small.close()
