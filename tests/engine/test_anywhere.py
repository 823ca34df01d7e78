"""Documents that are read at any position, against transformers with keys put in place by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_model
from transformers import DynamicCache

from polykv import Engine
from polykv.engine import Request, SamplingParams
from polykv.errors import InvalidRequestError, UnsupportedModelError
from polykv.models.rope import rotation_of
from polykv.pool import KVSegment
from polykv_kernels import ops

ONE = random_ids(150, seed=21)
TWO = random_ids(90, seed=22)
ROPES = [
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 10000.0,
    },
]


def params(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=True, top_logprobs=5)


def ask(engine: Engine, ids: Sequence[int], recompute: int = 0, **fields: Any) -> Any:
    fields = {"reuse": "anywhere", **fields}
    return engine.submit(Request(tuple(ids), None, params(), recompute=recompute, **fields))


def forward(model: Any, ids: Sequence[int], position: int, cache: DynamicCache) -> torch.Tensor:
    with torch.no_grad():
        positions = torch.arange(position, position + len(ids))[None]
        logits: torch.Tensor = model(torch.tensor([list(ids)]), position_ids=positions, cache=cache).logits[0, -1]
    return logits


def by_hand(
    model: Any, parts: Sequence[tuple[Sequence[int], int | None]], stored: KVSegment | None = None
) -> torch.Tensor:
    """Log-probabilities after parts ``(ids, None)``, which are computed over all before them, and ``(document, skip)``, whose keys
    and values from ``skip`` on come from the document alone, at positions that it has here."""
    cache, position, logits = DynamicCache(), 0, torch.zeros(())
    for ids, skip in parts:
        if skip is None:
            logits = forward(model, ids, position, cache)
        else:
            alone = DynamicCache()
            forward(model, ids, position, alone)
            if skip:
                forward(model, ids[:skip], position, cache)
            for index, layer in enumerate(alone.layers):
                keys, values = layer.keys, layer.values
                if stored is not None:  # what the codec made of them
                    decoded = [x.float() for x in ops.decode(stored.layers[index])]
                    offsets = torch.full((len(ids),), -position)
                    turned = rotation_of(model).rotate(decoded[0].transpose(0, 1), offsets, index)
                    keys, values = turned.transpose(0, 1)[None], decoded[1][None]
                cache.update(keys[:, :, skip:], values[:, :, skip:], index)
        position += len(ids)
    return torch.log_softmax(logits.float(), 0)


def check(completion: Any, expected: torch.Tensor, tolerance: float = 2e-4) -> None:
    """The first token's log-probabilities are those that were computed by hand."""
    choice = completion.logprobs[0]
    assert abs(choice.logprob - float(expected[choice.token_id])) < tolerance
    for token, logprob in choice.top_logprobs:
        assert abs(logprob - float(expected[token])) < tolerance
    assert float(expected.max() - expected[choice.token_id]) < 1e-3


class TestAgainstTransformers:
    @pytest.mark.parametrize("skip", [0, 5, 32])
    def test_every_family(self, family_model: Any, make_engine: Any, skip: int) -> None:
        engine = make_engine(family_model, prefix_cache=True)
        engine.share(ONE, "exact", anywhere=True)
        question = random_ids(7, seed=4)
        for length in (1, 40, 130):
            preamble = random_ids(length, seed=length)
            completion = ask(engine, [*preamble, *ONE, *question], skip).result(60)
            assert completion.cached_tokens >= len(ONE) - skip
            check(completion, by_hand(family_model, [(preamble, None), (ONE, skip), (question, None)]))

    @pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
    def test_every_rope(self, make_engine: Any, rope: dict[str, Any]) -> None:
        model = tiny_model("llama", rope_parameters=rope)
        engine = make_engine(model, prefix_cache=True)
        engine.share(ONE, "exact", anywhere=True)
        preamble, question = random_ids(70, seed=1), random_ids(7, seed=4)
        check(
            ask(engine, [*preamble, *ONE, *question], 3).result(60),
            by_hand(model, [(preamble, None), (ONE, 3), (question, None)]),
        )

    @pytest.mark.parametrize("order", ["12", "21", "121", "2", "11"])
    def test_documents_in_any_order(self, tiny_llama: Any, make_engine: Any, order: str) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        for document in (ONE, TWO):
            engine.share(document, "exact", anywhere=True)
        parts: list[tuple[Sequence[int], int | None]] = [(random_ids(9, seed=1), None)]
        for number, which in enumerate(order):
            parts += [(ONE if which == "1" else TWO, 4), (random_ids(number, seed=50 + number) or [7], None)]
        prompt = [token for ids, _ in parts for token in ids]
        completion = ask(engine, prompt, 4).result(60)
        check(completion, by_hand(tiny_llama, parts))
        documents = sum(len(ids) - 4 for ids, skip in parts if skip is not None)
        assert completion.cached_tokens == documents
        before = engine.stats().prefill_tokens
        again = ask(engine, prompt, 4).result(60)
        assert again.token_ids == completion.token_ids and again.cached_tokens == len(prompt) - 1
        assert engine.stats().prefill_tokens == before + 1
        assert engine.pool.num_leases == 0

    def test_documents_next_to_each_other(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        for document in (ONE, TWO):
            engine.share(document, "exact", anywhere=True)
        for skip in (0, 8):
            prompt = [5, *ONE, *TWO, 6, 7]
            expected = by_hand(tiny_llama, [([5], None), (ONE, skip), (TWO, skip), ([6, 7], None)])
            check(ask(engine, prompt, skip).result(60), expected)

    @pytest.mark.parametrize("codec", ["k8v3", "paper"])
    def test_packed_documents(self, tiny_llama: Any, make_engine: Any, codec: str) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        segment = engine.share(ONE, codec, anywhere=True)
        assert segment.num_bytes < 0.6 * (2 * segment.dense_bytes)
        preamble, question = random_ids(33, seed=3), random_ids(7, seed=4)
        for skip in (0, 16):
            expected = by_hand(tiny_llama, [(preamble, None), (ONE, skip), (question, None)], segment)
            check(ask(engine, [*preamble, *ONE, *question], skip).result(60), expected)


class TestRules:
    def test_agents_with_preambles_of_their_own_read_one_copy(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        segment = engine.share(ONE, "exact", anywhere=True)
        prompts = [[*random_ids(length, seed=length), *ONE, 8, 9] for length in (3, 17, 64, 90)]
        alone = []
        for prompt in prompts:
            single = make_engine(tiny_llama, prefix_cache=True)
            single.share(ONE, "exact", anywhere=True)
            alone.append(ask(single, prompt, 2).result(60).token_ids)
        together = [handle.result(60) for handle in [ask(engine, prompt, 2) for prompt in prompts]]
        assert [completion.token_ids for completion in together] == alone
        assert engine.pool.stats().context_bytes == segment.num_bytes and len(engine.pool.segments) == 1

    def test_lossless_requests_read_none_of_it(self, tiny_llama: Any, make_engine: Any) -> None:
        engine, plain = make_engine(tiny_llama, prefix_cache=True), make_engine(tiny_llama)
        engine.share(ONE, "exact", anywhere=True)
        prompt = [*random_ids(20, seed=3), *ONE, *random_ids(9, seed=5)]
        ask(engine, prompt, 0).result(60)
        lossless = ask(engine, prompt, reuse="prefix").result(60)
        assert lossless.cached_tokens == 20  # what was computed before the document, and nothing behind it
        expected = ask(plain, prompt, reuse="prefix").result(60)
        assert lossless.token_ids == expected.token_ids
        assert abs(lossless.logprobs[0].logprob - expected.logprobs[0].logprob) < 1e-4

    def test_at_the_very_beginning_it_is_lossless_and_at_the_very_end_it_is_not_used(
        self, tiny_llama: Any, make_engine: Any
    ) -> None:
        engine, plain = make_engine(tiny_llama, prefix_cache=True), make_engine(tiny_llama)
        engine.share(ONE, "exact", anywhere=True)
        for prompt, cached in (([*ONE, 5, 6], len(ONE)), ([5, 6, *ONE], 0)):
            found = ask(engine, prompt, 32).result(60)
            assert found.cached_tokens == cached
            assert found.token_ids == ask(plain, prompt, reuse="prefix").result(60).token_ids

    def test_the_longest_of_documents_that_begin_alike(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        for document in (ONE[:60], ONE, ONE[:100]):
            engine.share(document, "exact", anywhere=True)
        for length, read in ((150, 150), (120, 100), (99, 60), (40, 0)):
            assert ask(engine, [3, *ONE[:length], 4, 4], 0).result(60).cached_tokens >= read
            assert ask(engine, [length, 9, *ONE[:length], 4, 4], 0).result(60).cached_tokens == read

    def test_under_a_named_context(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        head = random_ids(64, seed=9)
        context = engine.share(head, "exact")
        engine.share(ONE, "exact", anywhere=True)
        prompt = [*head, 4, 5, *ONE, 6]
        request = Request(tuple(prompt), context, params(), reuse="anywhere", recompute=8)
        completion = engine.submit(request).result(60)
        check(completion, by_hand(tiny_llama, [([*head, 4, 5], None), (ONE, 8), ([6], None)]))
        assert completion.cached_tokens == len(head) + len(ONE) - 8

    def test_without_room_the_document_is_computed(self, tiny_llama: Any, make_engine: Any) -> None:
        plain = make_engine(tiny_llama)
        probe = make_engine(tiny_llama)
        held = probe.share(ONE, "exact", anywhere=True).num_bytes
        engine = make_engine(tiny_llama, prefix_cache=True, max_pool_bytes=held + 2000)
        engine.share(ONE, "exact", anywhere=True)
        prompt = [*random_ids(40, seed=1), *ONE, 6, 7]
        completion = ask(engine, prompt, 4).result(60)
        assert completion.token_ids == ask(plain, prompt, reuse="prefix").result(60).token_ids
        assert engine.pool.stats().num_bytes <= held + 2000 and engine.pool.num_leases == 0

    def test_a_document_that_is_released_meanwhile(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=16)
        segment = engine.share(ONE, "exact", anywhere=True)
        prompt = [*random_ids(60, seed=1), *ONE, 6, 7]
        expected = by_hand(tiny_llama, [(prompt[:60], None), (ONE, 4), ([6, 7], None)])
        handle = ask(engine, prompt, 4)
        engine.pool.release(segment)
        completion = handle.result(60)
        if completion.cached_tokens:
            check(completion, expected)
        handle = ask(engine, prompt, 4)
        handle.cancel()
        assert engine.pool.segments == ()

    def test_what_is_refused(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        context = engine.share(TWO, "exact")
        with pytest.raises(InvalidRequestError, match="cannot follow another"):
            engine.share(ONE, "exact", parent=context, anywhere=True)
        for fields, message in (({"reuse": "all"}, "reuse"), ({"recompute": 33}, "recompute"), ({"recompute": -1}, "recompute")):
            with pytest.raises(InvalidRequestError, match=message):
                Request((1, 2), None, params(), **fields)
        model = tiny_model("llama")
        other = make_engine(model, prefix_cache=True)
        model.model.rotary_emb.rope_type = "dynamic"
        with pytest.raises(UnsupportedModelError, match="dynamic"):
            other.share(ONE, "exact", anywhere=True)
