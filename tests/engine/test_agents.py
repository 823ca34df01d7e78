"""The names of the reference package: compress, create_agents, Agent."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import assert_same_tokens, greedy, tiny_model, tiny_tokenizer

from polykv import compress, create_agents
from polykv.errors import IncompatiblePoolError, InvalidRequestError

DOCUMENT = "The merchant owes the moneylender three thousand ducats. " * 4


def test_agents_continue_document_and_query(tiny_llama: Any, tokenizer: Any) -> None:
    pool = compress(tiny_llama, tokenizer, DOCUMENT, codec="exact")
    agents = create_agents(pool, tiny_llama, tokenizer, n=3)
    assert [agent.name for agent in agents] == ["agent-0", "agent-1", "agent-2"]
    prompt = tokenizer.encode(DOCUMENT) + tokenizer.encode("Who?", add_special_tokens=False)
    want = greedy(tiny_llama, prompt, 12)
    for agent in agents:
        text = agent.generate("Who?", max_tokens=12)
        assert_same_tokens(tiny_llama, prompt, tokenizer.encode(text, add_special_tokens=False)[:1], want[:1])
        assert text == tokenizer.decode(want, skip_special_tokens=True)
    assert pool.num_leases == 0


def test_the_query_gets_no_bos(tiny_llama: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    pool = compress(tiny_llama, tokenizer, DOCUMENT)
    assert pool.segment.token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in pool.inputs("Who?")["input_ids"]


def test_agents_of_one_pool_share_an_engine_and_agents_of_other_objects_do_not(tokenizer: Any) -> None:
    model, same_weights = tiny_model("llama"), tiny_model("llama")
    pool = compress(model, tokenizer, DOCUMENT)
    (first,), (second,) = create_agents(pool, model, tokenizer, 1), create_agents(pool, model, tokenizer, 1)
    assert first._engine is second._engine
    (other,) = create_agents(pool, same_weights, tokenizer, 1)
    assert other._engine is not first._engine
    assert other.generate("Who?", 6) == first.generate("Who?", 6)


@pytest.mark.parametrize("stop", ["e", ("e",), ["zz", "e"]])
def test_one_stop_string_or_several(tiny_llama: Any, tokenizer: Any, stop: Any) -> None:
    pool = compress(tiny_llama, tokenizer, DOCUMENT)
    (agent,) = create_agents(pool, tiny_llama, tokenizer, 1)
    whole = agent.generate("Who?", 60)
    if isinstance(stop, str):
        stop = whole[5:8]
        assert agent.generate("Who?", 60, stop=stop) == whole[: whole.index(stop)]
    else:
        assert "e" not in agent.generate("Who?", 60, stop=stop)


def test_sampling_arguments_are_passed_on(tiny_llama: Any, tokenizer: Any) -> None:
    pool = compress(tiny_llama, tokenizer, DOCUMENT)
    (agent,) = create_agents(pool, tiny_llama, tokenizer, 1)
    drawn = [agent.generate("Who?", 12, temperature=1.0, top_p=0.9, seed=seed) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


def test_bad_input(tiny_llama: Any, tokenizer: Any) -> None:
    pool = compress(tiny_llama, tokenizer, DOCUMENT)
    with pytest.raises(InvalidRequestError, match="at least 1, got 0"):
        create_agents(pool, tiny_llama, tokenizer, n=0)
    for wrong in (None, "gpt2"):
        with pytest.raises(InvalidRequestError, match="transformers tokenizer"):
            create_agents(pool, tiny_llama, wrong, n=1)
    with pytest.raises(IncompatiblePoolError, match="weights"):
        create_agents(pool, tiny_model("llama", seed=5), tokenizer, n=1)
    (agent,) = create_agents(pool, tiny_llama, tokenizer, n=1)
    for query, message in (("", "no tokens"), (["a", "b"], "must be a string, got list")):
        with pytest.raises(InvalidRequestError, match=message):
            agent.generate(query)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        agent.generate("Who?", max_tokens=0)
    assert agent.generate("Who?", max_tokens=2)
    assert pool.num_leases == 0
