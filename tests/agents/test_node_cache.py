"""Keys of LangGraph's node cache that know the shared context."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import pytest
from helpers import FULL
from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.cache.memory import InMemoryCache
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import CachePolicy

from polykv.errors import InvalidRequestError
from polykv_agents import ChatPolyKV, context_key
from polykv_agents.testing import scripted_chat_model

DOCUMENT = "The carrier bears the risk until the goods are handed over to the buyer at the quay. " * 3
ONE, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def llm() -> Iterator[ChatPolyKV]:
    made = scripted_chat_model(lambda prompt: re.findall(r"This is (\w+)\.", prompt)[0])
    yield made
    made.close()


class Asked(TypedDict):
    context: str
    answer: str


def graph(ask: Callable[[Asked], Any], key: Callable[..., Any]) -> Any:
    built = StateGraph(Asked)
    built.add_node("ask", ask, cache_policy=CachePolicy(key_func=key))
    built.add_edge(START, "ask")
    return built.compile(cache=InMemoryCache())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_context_that_the_input_names(llm: ChatPolyKV, asynchronous: bool) -> None:
    contexts = [llm.share(f"This is {name}. {DOCUMENT}") for name in ("first", "second")]

    def ask(state: Asked) -> dict[str, Any]:
        return {"answer": llm.invoke("Which?", shared_context=state["context"]).content}

    # a key of the question alone, as one writes it whose input also holds what changes no answer
    compiled = graph(ask, context_key(lambda state: state["context"], lambda state: "Which?"))

    def run(identity: str) -> str:
        state: Any = {"context": identity, "answer": ""}
        result = asyncio.run(compiled.ainvoke(state)) if asynchronous else compiled.invoke(state)
        return str(result["answer"])

    assert [run(ctx.id) for ctx in (*contexts, *contexts)] == ["first", "second"] * 2
    assert llm.engine.stats().finished == 2


def test_tasks_of_the_functional_interface(llm: ChatPolyKV) -> None:
    cache: InMemoryCache[Any] = InMemoryCache()

    def flow(reader: ChatPolyKV) -> Any:
        @task(cache_policy=CachePolicy(key_func=context_key(reader)))
        def ask(question: str, *, style: str) -> str:
            return str(reader.invoke(f"{question} {style}").content)

        @entrypoint(cache=cache)
        def run(question: str) -> str:
            return str(ask(question, style="Briefly.").result())

        return run

    readers = [llm.with_context(llm.share(f"This is {name}. {DOCUMENT}")) for name in ("first", "second")]
    assert [flow(reader).invoke("Which?") for reader in (*readers, *readers)] == ["first", "second"] * 2
    assert llm.engine.stats().finished == 2


def test_a_handle_and_its_readers_are_one_key(llm: ChatPolyKV) -> None:
    ctx = llm.share(DOCUMENT)
    assert context_key(ctx)(1) == context_key(llm.with_context(ctx))(1) == context_key(lambda value: ctx)(1)
    assert context_key(llm)(1) == context_key(None)(1) != context_key(ctx)(1)
    assert context_key(ctx)(1) != context_key(llm.share(DOCUMENT, codec="exact"))(1), "a codec may change an answer"


def test_a_name_is_no_key_since_it_may_come_to_stand_for_another_text(llm: ChatPolyKV) -> None:
    llm.share(DOCUMENT, name="contract")
    with pytest.raises(InvalidRequestError, match="names may come to stand for another text.*'contract'"):
        context_key("contract")


@pytest.mark.parametrize("bad", [3, "", "a" * 63, "A" * 64, ["a" * 64]])
def test_what_is_no_context_is_named(bad: Any) -> None:
    with pytest.raises(InvalidRequestError, match="context_key takes"):
        context_key(bad)
    made = context_key(lambda value: bad)
    with pytest.raises(InvalidRequestError, match="context_key takes"):
        made(1)


inputs = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=5000 if FULL else 200, deadline=None)
@given(
    st.sampled_from([None, ONE, OTHER]),
    st.sampled_from([None, ONE, OTHER]),
    inputs,
    inputs,
    st.booleans(),
    st.booleans(),
)
def test_keys_are_equal_where_context_and_input_are(
    one: str | None, other: str | None, left: Any, right: Any, same: bool, own: bool
) -> None:
    right = json.loads(json.dumps(left)) if same else right  # equal, and another object, as after a restart

    def text(value: Any) -> str:
        return json.dumps(value, sort_keys=True)

    if own:
        want = (one, text(left)) == (other, text(right))
        assert (context_key(one, text)(left) == context_key(other, text)(right)) == want
    else:
        default = CachePolicy().key_func
        want = one == other and default(left) == default(right)
        assert (context_key(one)(left) == context_key(other)(right)) == want


def test_a_key_function_may_return_the_id_itself() -> None:
    key = context_key(lambda value: value["context"], lambda value: value["again"])
    twin = "".join(["a"] * 64)
    assert twin is not ONE
    assert key({"context": ONE, "again": ONE}) == key({"context": ONE, "again": twin}), "one object or two equal ones"
    assert context_key(ONE, lambda value: "\ud800")(1) != context_key(ONE, lambda value: "x")(1)
