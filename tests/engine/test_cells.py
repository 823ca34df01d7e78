"""Prompts that are left with a lossy codec: cells of 256 tokens, the same whoever came first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers import WINDOW, random_ids, tiny_model

from polykv.engine import Request, SamplingParams
from polykv.engine.engine import CELL_TOKENS
from polykv.errors import UnknownCodecError, UnsupportedModelError

LONG = random_ids(700, seed=31)
PROMPTS = ((*LONG, 5, 6, 7), (*LONG[:600], *random_ids(60, seed=32)), (*LONG[:300], *random_ids(300, seed=33)))
CELLS = [len(prompt) // CELL_TOKENS * CELL_TOKENS for prompt in PROMPTS]
SHARED = {(0, 1): 600, (0, 2): 300, (1, 2): 300}


def ask(engine: Any, prompt: Any, max_tokens: int = 6, **fields: Any) -> Any:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=True)
    return engine.submit(Request(tuple(prompt), None, sampling, **fields))


def check_same(got: Any, want: Any) -> None:
    assert got.token_ids == want.token_ids
    assert [c.logprob for c in got.logprobs] == pytest.approx([c.logprob for c in want.logprobs], abs=1e-4)


@pytest.mark.parametrize("codec", ["k8v3", "paper"])
@pytest.mark.parametrize(("family", "window"), [("llama", None), ("gemma3", WINDOW)])
def test_answers_do_not_depend_on_who_came_first(make_engine: Any, family: str, window: int | None, codec: str) -> None:
    model = tiny_model(family, window)
    alone = []
    for prompt in PROMPTS:
        alone.append(ask(make_engine(model, prefix_cache=True, prefix_codec=codec), prompt).result(60))
    for order in itertools.permutations(range(3)):
        engine = make_engine(model, prefix_cache=True, prefix_codec=codec)
        seen: list[int] = []
        for index in order:
            completion = ask(engine, PROMPTS[index]).result(60)
            check_same(completion, alone[index])
            # whole cells of what both begin with; and where all of an earlier prompt's cells are shared, what came after them
            shared = max([SHARED[min(a, index), max(a, index)] for a in seen], default=0)
            assert shared // CELL_TOKENS * CELL_TOKENS <= completion.cached_tokens <= shared
            seen.append(index)
        assert engine.pool.num_leases == 0
    engine = make_engine(model, prefix_cache=True, prefix_codec=codec)
    for completion, want in zip([h.result(60) for h in [ask(engine, p) for p in PROMPTS]], alone, strict=True):
        check_same(completion, want)
    stats = engine.stats()
    assert stats.build_tokens == 3 * CELL_TOKENS  # the first two prompts' cells, and the third one's second, once each


def test_it_takes_less_and_the_rest_stays_exact(tiny_llama: Any, make_engine: Any) -> None:
    packed, exact = (make_engine(tiny_llama, prefix_cache=True, prefix_codec=codec) for codec in ("k8v3", "exact"))
    for engine in (packed, exact):
        first = ask(engine, PROMPTS[0]).result(60)
        again = ask(engine, PROMPTS[0]).result(60)
        assert (first.cached_tokens, again.cached_tokens) == (0, len(PROMPTS[0]) - 1)
        assert again.token_ids == first.token_ids
    assert packed.pool.stats().num_bytes < 0.55 * exact.pool.stats().num_bytes
    kinds = {(entry.key[2], len(entry.tokens)) for entry in packed.pool._table}
    assert ("k8v3", CELL_TOKENS) in kinds and any(codec == "exact" for codec, _ in kinds)


def test_a_short_prompt_has_no_cell(tiny_llama: Any, make_engine: Any) -> None:
    engine, plain = make_engine(tiny_llama, prefix_cache=True, prefix_codec="k8v3"), make_engine(tiny_llama)
    for length in (10, CELL_TOKENS):
        assert ask(engine, LONG[:length]).result(60).token_ids == ask(plain, LONG[:length]).result(60).token_ids
    assert engine.stats().build_tokens == 0
    ask(engine, LONG[: CELL_TOKENS + 1]).result(60)
    assert engine.stats().build_tokens == CELL_TOKENS


def test_without_room_the_prompt_is_computed(tiny_llama: Any, make_engine: Any) -> None:
    engine = make_engine(tiny_llama, prefix_cache=True, prefix_codec="k8v3", max_pool_bytes=10_000)
    plain = make_engine(tiny_llama)
    completion = ask(engine, PROMPTS[0]).result(60)
    assert completion.cached_tokens == 0
    assert completion.token_ids == ask(plain, PROMPTS[0]).result(60).token_ids
    assert engine.pool.stats().num_bytes <= 10_000 and engine.pool.num_leases == 0


def test_cancelled_while_a_cell_is_built(tiny_llama: Any, make_engine: Any) -> None:
    engine = make_engine(tiny_llama, prefix_cache=True, prefix_codec="k8v3", token_budget=16)
    handles = [ask(engine, PROMPTS[0]) for _ in range(3)]
    handles[0].cancel()
    first, second = (handle.result(60) for handle in handles[1:])
    assert first.token_ids == second.token_ids and engine.pool.num_leases == 0
    assert ask(engine, PROMPTS[0], salt="other").result(60).cached_tokens == 0


def test_bad_codecs(tiny_llama: Any, tokenizer: Any, make_engine: Any) -> None:
    with pytest.raises(UnknownCodecError):
        make_engine(tiny_llama, prefix_cache=True, prefix_codec="zip")
    with pytest.raises(UnsupportedModelError, match="head_dim"):
        make_engine(tiny_model("llama", head_dim=12, hidden_size=48), prefix_cache=True, prefix_codec="k8v3")
