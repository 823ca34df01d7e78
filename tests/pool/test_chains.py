"""Segments after segments: a child is computed over its parent's stored form, and its readers read both."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from helpers import WINDOW, assert_same_tokens, greedy, random_ids, relative_error, tiny_model
from torch import Tensor
from transformers import DynamicCache

from polykv import Engine, SamplingParams, SharedKVPool
from polykv.engine import Request
from polykv.errors import (
    ContextReleasedError,
    IncompatiblePoolError,
    InvalidRequestError,
    PromptTooLongError,
    UnknownCodecError,
)
from polykv.pool import KVSegment
from polykv_kernels import ops

PARENT, CHILD, GRANDCHILD = random_ids(90, seed=1), random_ids(60, seed=2), random_ids(40, seed=3)
QUESTIONS = [random_ids(count, seed=20 + count) for count in (1, 7, 30, 4)]
SIZES = [(90, 60), (7, 60), (60, 7), (7, 5), (WINDOW - 1, WINDOW), (WINDOW, 1), (1, WINDOW + 1)]
"""Tokens of parent and child: longer and shorter than the window, and at its edges."""


@pytest.fixture
def engine(tiny_llama: Any, make_engine: Any) -> Engine:
    made: Engine = make_engine(tiny_llama)
    return made


def params(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def decoded_chain(segment: KVSegment) -> DynamicCache:
    """A dense cache of what a whole chain decodes to; what a sliding layer no longer holds is zeros, masked out."""
    cache = DynamicCache()
    for index in range(len(segment.layers)):
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for link in segment.chain:
            layer = link.layers[index]
            k, v = ops.decode(layer)
            padding = (0, 0, link.num_tokens - k.shape[1], 0)
            keys.append(torch.nn.functional.pad(k, padding))
            values.append(torch.nn.functional.pad(v, padding))
        cache.update(torch.cat(keys, 1)[None], torch.cat(values, 1)[None], index)
    return cache


class TestEqualsTransformers:
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_readers_of_parent_child_and_none_in_one_batch(
        self, family_model: Any, make_engine: Any, sizes: tuple[int, int]
    ) -> None:
        engine = make_engine(family_model)
        parent_ids, child_ids = PARENT[: sizes[0]], CHILD[: sizes[1]]
        parent = engine.share(parent_ids, "exact")
        child = engine.share(child_ids, "exact", parent=parent)
        assert (child.start, child.end, child.num_tokens) == (sizes[0], sum(sizes), sizes[1])
        forward, submitted = engine._runner.forward, threading.Event()
        engine._runner.forward = lambda batch: submitted.wait(60) and forward(batch)
        cases = []
        for segment, context in ((parent, parent_ids), (child, parent_ids + child_ids), (None, [])):
            for question in QUESTIONS[:3]:
                cases.append((context + question, engine.generate(context + question, params(), segment)))
        submitted.set()
        for prompt, handle in cases:
            want = greedy(family_model, prompt, 12)
            assert_same_tokens(family_model, prompt, handle.result(60).token_ids, want)
        assert engine.stats().peak_running == len(cases)

    def test_three_levels_however_they_are_built(self, family_model: Any, make_engine: Any) -> None:
        engine = make_engine(family_model)
        pool = engine.pool
        parent = pool.build(PARENT, "exact")
        child = engine.share(CHILD, "exact", parent=parent)
        prompt = [*PARENT, *CHILD, *GRANDCHILD, *QUESTIONS[2]]
        sharing = Request(
            tuple(prompt),
            child,
            params(),
            shared_tokens=len(prompt) - len(QUESTIONS[2]),
            codec="exact",
        )
        handle = engine.submit(sharing)
        completion = handle.result(60)
        want = greedy(family_model, prompt, 12)
        assert_same_tokens(family_model, prompt, completion.token_ids, want)
        assert completion.cached_tokens == len(prompt) - len(QUESTIONS[2])
        assert pool.stats().builds == 3
        assert pool.stats().num_segments == 2, "the third went with its reader"
        last = pool.build(GRANDCHILD, "exact", parent=child)
        assert [link.num_tokens for link in last.chain] == [90, 60, 40]
        assert last.context_ids.tolist() == [*PARENT, *CHILD, *GRANDCHILD]
        assert_same_tokens(family_model, prompt, engine.generate(prompt, params(), last).result(60).token_ids, want)

    @torch.no_grad()
    def test_exact_logits_equal_the_uncached_models(self, family_model: Any) -> None:
        pool = SharedKVPool(family_model)
        parent = pool.build(PARENT, "exact")
        child = pool.build(CHILD, "exact", parent=parent)
        for question in QUESTIONS:
            ours = family_model(torch.tensor([question]), cache=pool.new_cache(child)).logits[0]
            want = family_model(torch.tensor([[*PARENT, *CHILD, *question]])).logits[0, -len(question) :]
            assert relative_error(ours, want) <= 1e-5

    def test_generate_of_transformers_on_a_child(self, family_model: Any, tokenizer: Any) -> None:
        pool = SharedKVPool(family_model, tokenizer)
        child = pool.build(CHILD, "exact", parent=pool.build(PARENT, "exact"))
        texts = ["the court", "the bond and the merchant, the court"]
        inputs = pool.inputs(texts, child)
        out = family_model.generate(**inputs, cache=pool.new_cache(child), max_new_tokens=12, do_sample=False)
        for row, text in enumerate(texts):
            prompt = [*PARENT, *CHILD, *tokenizer.encode(text, add_special_tokens=False)]
            want = greedy(family_model, prompt, 12)
            got = out[row, inputs["input_ids"].shape[1] :].tolist()[: len(want)]
            assert_same_tokens(family_model, prompt, got, want)
        whole = torch.tensor([[*PARENT, *CHILD, *QUESTIONS[1]]])
        out = family_model.generate(
            whole,
            attention_mask=torch.ones_like(whole),
            cache=pool.new_cache(child),
            max_new_tokens=12,
            do_sample=False,
        )
        prompt = whole[0].tolist()
        assert_same_tokens(family_model, prompt, out[0, len(prompt) :].tolist(), greedy(family_model, prompt, 12))


@torch.no_grad()
@pytest.mark.parametrize(
    "codecs", [("k8v3", "k8v3"), ("exact", "paper"), ("paper", "exact"), ("k8v3", "exact")], ids=str
)
def test_a_reader_sees_what_the_chain_decodes_to_whatever_its_codecs(
    family_model: Any, codecs: tuple[str, str]
) -> None:
    pool = SharedKVPool(family_model)
    parent = pool.build(PARENT, codecs[0])
    child = pool.build(CHILD, codecs[1], parent=parent)
    ours = family_model(torch.tensor([QUESTIONS[1]]), cache=pool.new_cache(child)).logits[0]
    want = family_model(torch.tensor([QUESTIONS[1]]), cache=decoded_chain(child)).logits[0]
    assert relative_error(ours, want) <= 1e-4
    exact = family_model(torch.tensor([[*PARENT, *CHILD, *QUESTIONS[1]]])).logits[0, -len(QUESTIONS[1]) :]
    assert relative_error(ours, exact) > 1e-4, "a codec was really used"


@torch.no_grad()
def test_a_child_is_computed_over_its_parents_stored_form(family_model: Any) -> None:
    """An exact child of a packed parent holds the keys that the model computes over the decoded parent."""
    pool = SharedKVPool(family_model)
    parent = pool.build(PARENT, "paper")
    child = pool.build(CHILD, "exact", parent=parent)
    cache = decoded_chain(parent)
    family_model(torch.tensor([CHILD]), cache=cache)
    for index, layer in enumerate(child.layers):
        keys, values = ops.decode(layer)
        held = keys.shape[1]
        assert relative_error(keys, cache.layers[index].keys[0, :, -held:]) <= 1e-4
        assert relative_error(values, cache.layers[index].values[0, :, -held:]) <= 1e-4


def test_codecs_of_a_parent_make_different_children(tiny_llama: Any) -> None:
    """A child of another codec's parent is another segment: its keys were computed over other ones."""
    pool = SharedKVPool(tiny_llama)
    over_exact = pool.build(CHILD, "exact", parent=pool.build(PARENT, "exact"))
    over_paper = pool.build(CHILD, "exact", parent=pool.build(PARENT, "paper"))
    assert over_exact is not over_paper
    assert pool.build(CHILD, "exact", parent=over_exact.parent) is over_exact
    whole = pool.build([*PARENT, *CHILD], "exact")
    assert whole is not over_exact
    assert whole.identity == over_exact.identity == over_paper.identity, "the same text"


def test_a_child_and_a_root_of_the_same_tokens_are_different(tiny_llama: Any) -> None:
    pool = SharedKVPool(tiny_llama)
    parent = pool.build(PARENT, "exact")
    child, root = pool.build(CHILD, "exact", parent=parent), pool.build(CHILD, "exact")
    assert child is not root
    assert child.identity != root.identity
    assert not torch.equal(child.layers[0].exact.keys, root.layers[0].exact.keys)


def test_a_window_that_the_child_fills_needs_nothing_of_the_parent(make_engine: Any) -> None:
    """With every layer sliding, what is before the window changes no answer; and the layers hold the window only."""
    model = tiny_model("mistral", WINDOW, num_hidden_layers=1)
    engine = make_engine(model)
    child = engine.share(CHILD, "exact", parent=engine.share(PARENT, "exact"))
    assert [layer.num_tokens for link in child.chain for layer in link.layers] == [WINDOW - 1] * 2
    got = engine.generate([*PARENT, *CHILD, *QUESTIONS[1]], params(), child).result(60)
    prompt = [*PARENT, *CHILD, *QUESTIONS[1]]
    assert_same_tokens(model, prompt, got.token_ids, greedy(model, prompt, 12))


class TestLifetime:
    @pytest.mark.parametrize("where", ["pool", "engine"])
    def test_a_child_keeps_its_parent_whose_handle_has_gone(self, engine: Engine, where: str) -> None:
        pool = engine.pool
        share = engine.share if where == "engine" else pool.build
        parent = share(PARENT, "exact")
        child = share(CHILD, "exact", parent=parent)
        pool.release(parent)
        assert set(pool.segments) == {parent, child}
        prompt = [*PARENT, *CHILD, 5]
        got = engine.generate(prompt, params(), child).result(60).token_ids
        assert_same_tokens(engine.model, prompt, got, greedy(engine.model, prompt, 12))
        pool.release(child)
        assert pool.segments == ()
        assert pool.num_leases == 0
        with pytest.raises(ContextReleasedError):
            engine.generate(prompt, params(), child)
        with pytest.raises(ContextReleasedError):
            share(CHILD, "exact", parent=parent)

    def test_a_reader_of_the_last_link_keeps_all_of_them(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        chain = [pool.build(PARENT)]
        for ids in (CHILD, GRANDCHILD):
            chain.append(pool.build(ids, parent=chain[-1]))
        cache = pool.new_cache(chain[-1])
        for segment in chain:
            pool.release(segment)
        assert set(pool.segments) == set(chain)
        cache.release()
        assert pool.segments == ()

    def test_links_that_are_forgotten_go_too(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        parent = pool.build(PARENT)
        child = pool.build(CHILD, parent=parent)
        cache = pool.new_cache(child)
        pool.forget(parent)
        pool.forget(child)
        assert pool.stats().num_segments == 2
        del cache
        gc.collect()
        assert (pool.num_leases, pool.stats().num_segments) == (0, 0)

    def test_siblings_hold_their_parent_once_each(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        parent = pool.build(PARENT)
        children = [pool.build(random_ids(20, seed=seed), parent=parent) for seed in range(5)]
        assert [pool.build(random_ids(20, seed=seed), parent=parent) for seed in range(5)] == children
        pool.release(parent)
        assert pool.num_leases == 0  # what is built on it keeps it, and is no reader
        for child in children * 2:
            assert parent in pool.segments
            pool.release(child)
        assert pool.segments == ()

    def test_a_child_whose_build_fails_or_stops_leaves_its_parent_free(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        parent = pool.build(PARENT)

        def interrupt(*event: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pool.build(CHILD, parent=parent, progress=interrupt)
        with torch.no_grad():
            tiny_llama.model.embed_tokens.weight[7] = torch.nan
        with pytest.raises(Exception, match="cannot be stored"):
            pool.build([7, 8], parent=parent)
        assert pool.num_leases == 0
        pool.release(parent)
        assert pool.segments == ()

    def test_a_request_that_makes_a_child_gives_everything_back(self, engine: Engine) -> None:
        parent = engine.share(PARENT)
        prompt = (*PARENT, *CHILD, *QUESTIONS[1])
        request = Request(prompt, parent, params(), shared_tokens=150)
        handle = engine.submit(request)
        engine.pool.release(parent)
        assert handle.result(60).cached_tokens == 150
        assert (engine.pool.segments, engine.pool.num_leases) == ((), 0)


class TestRefused:
    def test_a_prompt_that_does_not_start_with_the_whole_chain(self, engine: Engine) -> None:
        child = engine.share(CHILD, parent=engine.share(PARENT))
        for prompt in ([*CHILD, *PARENT, 5], [*PARENT, 5], [*CHILD, 5], [*PARENT, *CHILD[:-1], 3, 5]):
            with pytest.raises(IncompatiblePoolError, match="does not start with the 150 tokens of the shared context"):
                engine.generate(prompt, params(), child)
        with pytest.raises(InvalidRequestError, match="no tokens of its own"):
            engine.generate([*PARENT, *CHILD], params(), child)

    @torch.no_grad()
    def test_generate_with_the_childs_tokens_alone(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        child = pool.build(CHILD, parent=pool.build(PARENT))
        ids = torch.tensor([[*CHILD, *QUESTIONS[1]]])
        with pytest.raises(IncompatiblePoolError, match="the cache holds 150"):
            tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), cache=pool.new_cache(child))

    @pytest.mark.parametrize("shared", [90, 50, 157, 200])
    def test_shared_tokens_that_end_before_the_segment_or_leave_no_question(self, engine: Engine, shared: int) -> None:
        parent = engine.share(PARENT)
        with pytest.raises(
            InvalidRequestError,
            match=rf"between the segment's end \(90\) and the prompt's \(157 tokens\), got {shared}",
        ):
            Request((*PARENT, *CHILD, *QUESTIONS[1]), parent, params(), shared_tokens=shared)

    @pytest.mark.parametrize("where", ["pool", "engine", "request"])
    def test_what_is_wrong_with_a_child(self, engine: Engine, where: str) -> None:
        parent = engine.share(PARENT)
        share: Any = engine.share if where == "engine" else engine.pool.build
        if where == "request":

            def share(ids: list[int], codec: str | None = None, *, parent: KVSegment) -> None:
                prompt = (*parent.context_ids.tolist(), *ids, 5)
                engine.submit(Request(prompt, parent, params(1), shared_tokens=len(prompt) - 1, codec=codec))

        with pytest.raises(InvalidRequestError, match="320"):
            share([5, 320], parent=parent)
        with pytest.raises(PromptTooLongError, match="2048 tokens, but the model has 2048 positions"):
            share([5] * (2048 - 90), parent=parent)
        with pytest.raises(UnknownCodecError):
            share(CHILD, "zip", parent=parent)
        if where != "request":
            with pytest.raises(InvalidRequestError, match="no tokens"):
                share([], parent=parent)
        foreign = SharedKVPool(engine.model, engine.tokenizer).build(PARENT)
        with pytest.raises(ContextReleasedError):
            share(CHILD, parent=foreign)
        assert (engine.pool.num_leases, engine.pool.stats().num_segments) == (0, 1)
        assert engine.stats().building == engine.stats().waiting == 0
