"""Documents that are read at any position, against transformers with keys put in place by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import WINDOW, random_ids, tiny_model
from transformers import DynamicCache

from polykv import Engine
from polykv.engine import Request, SamplingParams
from polykv.errors import InvalidRequestError, RequestCancelledError, UnsupportedModelError
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


THREE = random_ids(70, seed=23)
HEAD, QUESTION = random_ids(40, seed=31), random_ids(7, seed=4)
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL = {**DEFAULT, "partial_rotary_factor": 0.5}


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def check_idle(engine: Engine) -> None:
    until(lambda: engine.stats().running == engine.stats().waiting == 0)
    assert (engine.pool.num_leases, engine.stats().tail_bytes) == (0, 0)


def rope_model(family: str, window: int | None, rope: dict[str, Any]) -> Any:
    parameters: dict[str, Any] = rope
    if family == "gemma3":  # the type under test on full attention, another base on sliding attention
        parameters = {"full_attention": {**rope, "rope_theta": 1e6}, "sliding_attention": DEFAULT}
    return tiny_model(family, window, rope_parameters=parameters)


# transformers refuses Phi-3 with any type but default and longrope
ROPE_CASES = [
    (f, w, rope) for f, w in (("mistral", WINDOW), ("qwen3", None), ("gemma3", WINDOW)) for rope in (DEFAULT, *ROPES)
]
ROPE_CASES += [("phi3", window, PARTIAL) for window in (None, WINDOW)]


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
        for fields, message in (
            ({"reuse": "all"}, "reuse"),
            ({"recompute": 33}, "recompute"),
            ({"recompute": -1}, "recompute"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                Request((1, 2), None, params(), **fields)
        model = tiny_model("llama")
        other = make_engine(model, prefix_cache=True)
        model.model.rotary_emb.rope_type = "dynamic"
        with pytest.raises(UnsupportedModelError, match="dynamic"):
            other.share(ONE, "exact", anywhere=True)


class TestFurtherAgainstTransformers:
    @pytest.mark.parametrize(
        ("family", "window", "rope"),
        ROPE_CASES,
        ids=[
            f"{f}-{'sliding' if w else 'full'}-{'partial' if r is PARTIAL else r['rope_type']}"
            for f, w, r in ROPE_CASES
        ],
    )
    def test_rope_types_of_families(
        self, make_engine: Any, family: str, window: int | None, rope: dict[str, Any]
    ) -> None:
        model = rope_model(family, window, rope)
        engine = make_engine(model, prefix_cache=True)
        engine.share(ONE, "exact", anywhere=True)
        for skip, length in ((0, 1), (0, 300), (5, 70)):
            preamble = random_ids(length, seed=length)
            completion = ask(engine, [*preamble, *ONE, *QUESTION], skip).result(60)
            assert completion.cached_tokens >= len(ONE) - skip
            check(completion, by_hand(model, [(preamble, None), (ONE, skip), (QUESTION, None)]))

    @pytest.mark.parametrize("skip", [0, 8])
    def test_the_whole_answer(self, family_model: Any, make_engine: Any, skip: int) -> None:
        """Not the first token alone: what is decoded reads the document where it stands."""
        engine = make_engine(family_model, prefix_cache=True)
        engine.share(ONE, "exact", anywhere=True)
        prompt = [*HEAD, *ONE, *QUESTION]
        completion = ask(engine, prompt, skip).result(60)
        for step, choice in enumerate(completion.logprobs):
            said = [*QUESTION, *completion.token_ids[:step]]
            expected = by_hand(family_model, [(HEAD, None), (ONE, skip), (said, None)])
            assert abs(choice.logprob - float(expected[choice.token_id])) < 2e-4

    @pytest.mark.parametrize("order", ["123", "321", "213", "31", "123123"])
    @pytest.mark.parametrize("budget", [7, 512])
    def test_three_documents(self, tiny_llama: Any, make_engine: Any, order: str, budget: int) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=budget)
        documents = {"1": ONE, "2": TWO, "3": THREE}
        for document in documents.values():
            engine.share(document, "exact", anywhere=True)
        parts: list[Any] = [(HEAD, None)]
        for number, which in enumerate(order):
            parts.append((documents[which], 6))
            if number % 2:  # every second pair stands directly next to each other
                parts.append((random_ids(3, seed=60 + number), None))
        parts.append((QUESTION, None))
        prompt = [token for ids, _ in parts for token in ids]
        completion = ask(engine, prompt, 6).result(60)
        check(completion, by_hand(tiny_llama, parts))
        read = sum(len(documents[which]) - 6 for which in order)
        assert completion.cached_tokens == read
        stats = engine.stats()
        assert stats.prefill_tokens == len(prompt) - read and stats.prefill_saved_tokens == read
        check_idle(engine)

    def test_more_recomputed_than_the_document_has(self, tiny_llama: Any, make_engine: Any) -> None:
        """All but its last token are computed."""
        engine = make_engine(tiny_llama, prefix_cache=True)
        short = ONE[:20]
        engine.share(short, "k8v3", anywhere=True)
        completion = ask(engine, [*HEAD, *short, *QUESTION], 32).result(60)
        assert completion.cached_tokens == 1
        check(completion, by_hand(tiny_llama, [(HEAD, None), (short, 19), (QUESTION, None)]))

    @pytest.mark.parametrize("codec", ["k8v3", "paper"])
    def test_readers_of_different_parts_of_a_packed_document_in_one_batch(
        self, tiny_llama: Any, make_engine: Any, codec: str
    ) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        segment = engine.share(ONE, codec, anywhere=True)
        asked = [(length, skip) for length in (3, 33, 90) for skip in (0, 1, 16, 31, 32)]
        prompts = [[*random_ids(length, seed=100 * length + skip), *ONE, *QUESTION] for length, skip in asked]
        handles = [ask(engine, prompt, skip) for prompt, (_, skip) in zip(prompts, asked, strict=True)]
        for (length, skip), prompt, handle in zip(asked, prompts, handles, strict=True):
            expected = by_hand(tiny_llama, [(prompt[:length], None), (ONE, skip), (QUESTION, None)], segment)
            check(handle.result(60), expected)
        assert engine.stats().peak_running > 1
        check_idle(engine)

    @pytest.mark.parametrize("codec", ["exact", "k8v3", "paper"])
    def test_under_a_named_context_of_any_codec(self, tiny_llama: Any, make_engine: Any, codec: str) -> None:
        engine, plain = make_engine(tiny_llama, prefix_cache=True), make_engine(tiny_llama)
        head = random_ids(128, seed=9)
        context, other = engine.share(head, codec), plain.share(head, codec)
        engine.share(ONE, "exact", anywhere=True)
        # the very last document of a prompt is not used: so this is what the context alone gives
        whole = Request((*head, *ONE), context, params(), reuse="anywhere", recompute=4)
        want = plain.submit(Request((*head, *ONE), other, params())).result(60)
        assert engine.submit(whole).result(60).token_ids == want.token_ids
        request = Request((*head, 4, 5, *ONE, 6), context, params(), reuse="anywhere", recompute=4)
        first = engine.submit(request).result(60)
        assert first.cached_tokens == len(head) + len(ONE) - 4
        before = engine.stats().prefill_tokens
        assert engine.submit(request).result(60).token_ids == first.token_ids
        assert engine.stats().prefill_tokens == before + 1
        check_idle(engine)

    def test_a_context_that_is_named_by_its_length(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        engine.share(ONE, "exact", anywhere=True)
        completion = ask(engine, [*HEAD, *ONE, *QUESTION], 4, shared_tokens=len(HEAD), codec="exact").result(60)
        check(completion, by_hand(tiny_llama, [(HEAD, None), (ONE, 4), (QUESTION, None)]))
        check_idle(engine)

    def test_after_a_found_prefix(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        engine.share(ONE, "exact", anywhere=True)
        ask(engine, [*HEAD, 9, 9, 9], reuse="prefix").result(60)
        before = engine.stats().prefill_tokens
        completion = ask(engine, [*HEAD, *ONE, *QUESTION], 4).result(60)
        check(completion, by_hand(tiny_llama, [(HEAD, None), (ONE, 4), (QUESTION, None)]))
        assert completion.cached_tokens == len(HEAD) + len(ONE) - 4
        assert engine.stats().prefill_tokens == before + 4 + len(QUESTION)

    def test_a_beginning_of_the_document_that_was_found_does_not_hide_it(
        self, tiny_llama: Any, make_engine: Any
    ) -> None:
        """A lossless request has left all of the document in place: the first tokens of it are read there."""
        engine = make_engine(tiny_llama, prefix_cache=True)
        engine.share(ONE, "exact", anywhere=True)
        prompt = [*HEAD, *ONE, *QUESTION]
        lossless = ask(engine, prompt, reuse="prefix").result(60)
        before = engine.stats().prefill_tokens
        completion = ask(engine, prompt, 4).result(60)
        assert engine.stats().prefill_tokens - before <= len(QUESTION)
        plain = make_engine(tiny_llama)
        assert lossless.token_ids == ask(plain, prompt, reuse="prefix").result(60).token_ids
        assert completion.cached_tokens >= len(HEAD) + len(ONE)


class TestApart:
    """What is approximate never gets where it was not asked for."""

    def test_prefix_requests_never_use_documents(self, family_model: Any, make_engine: Any) -> None:
        engine, plain = make_engine(family_model, prefix_cache=True), make_engine(family_model)
        for document in (ONE, TWO):
            engine.share(document, "exact", anywhere=True)
        for prompt in ([*HEAD, *ONE, *QUESTION], [*ONE, *TWO, *QUESTION], [*TWO, *HEAD, *TWO, 5]):
            ours, theirs = (ask(e, prompt, reuse="prefix").result(60) for e in (engine, plain))
            assert ours.cached_tokens == 0 and ours.token_ids == theirs.token_ids
            for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert abs(mine.logprob - other.logprob) < 1e-4
            engine.pool.clear()

    def test_without_documents_anywhere_is_prefix(self, tiny_llama: Any, make_engine: Any) -> None:
        engine, plain = make_engine(tiny_llama, prefix_cache=True), make_engine(tiny_llama)
        engine.share(ONE, "exact", anywhere=True)
        broken = [*HEAD, *ONE[:70], 3 if ONE[70] != 3 else 4, *ONE[71:], *QUESTION]
        want = ask(plain, broken, reuse="prefix").result(60)
        first, second = (ask(engine, broken, 8).result(60) for _ in range(2))
        assert first.token_ids == second.token_ids == want.token_ids
        assert (first.cached_tokens, second.cached_tokens) == (0, len(broken) - 1)
        # what it has left is lossless, and serves everybody
        assert ask(engine, broken, reuse="prefix").result(60).cached_tokens == len(broken) - 1

    @pytest.mark.parametrize("skip", [0, 8])
    def test_lossless_turns_after_approximate_ones(self, tiny_llama: Any, make_engine: Any, skip: int) -> None:
        engine, plain = make_engine(tiny_llama, prefix_cache=True), make_engine(tiny_llama)
        for document in (ONE, TWO):
            engine.share(document, "exact", anywhere=True)
        prompt = [*HEAD, *ONE, 5, *TWO, *QUESTION]
        said = ask(engine, prompt, skip).result(60).token_ids
        turn = [*prompt, *said, 9, 8]
        ours, theirs = (ask(e, turn, reuse="prefix").result(60) for e in (engine, plain))
        assert ours.cached_tokens == len(HEAD) + skip
        assert ours.token_ids == theirs.token_ids
        assert abs(ours.logprobs[0].logprob - theirs.logprobs[0].logprob) < 1e-4
        # and the next approximate turn goes on where the last one ended
        again = ask(engine, turn, skip).result(60)
        assert again.cached_tokens >= len(prompt) + len(said) - 1
        check_idle(engine)

    def test_each_recompute_has_its_own(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        engine.share(ONE, "exact", anywhere=True)
        prompt = [*HEAD, *ONE, *QUESTION]
        for skip in (0, 32, 7, 32, 0):
            check(
                ask(engine, prompt, skip).result(60), by_hand(tiny_llama, [(HEAD, None), (ONE, skip), (QUESTION, None)])
            )

    def test_salts(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        engine.share(ONE, "exact", anywhere=True, salt="a")
        prompt = [*HEAD, *ONE, *QUESTION]
        assert ask(engine, prompt, 4, salt="a").result(60).cached_tokens == len(ONE) - 4
        for salt in ("", "b"):
            assert ask(engine, prompt, 4, salt=salt).result(60).cached_tokens == 0

    def test_lossless_and_approximate_at_once(self, tiny_llama: Any, make_engine: Any) -> None:
        engine, plain = make_engine(tiny_llama, prefix_cache=True, token_budget=32), make_engine(tiny_llama)
        engine.share(ONE, "exact", anywhere=True)
        prompt = [*HEAD, *random_ids(80, seed=8), *ONE, *QUESTION]
        start = len(prompt) - len(ONE) - len(QUESTION)
        want = ask(plain, prompt, reuse="prefix").result(60)
        expected = by_hand(tiny_llama, [(prompt[:start], None), (ONE, 4), (QUESTION, None)])
        handles = [ask(engine, prompt, 4, reuse=reuse) for reuse in ("anywhere", "prefix", "anywhere", "prefix")]
        for index, handle in enumerate(handles):
            completion = handle.result(60)
            if index % 2:
                assert completion.token_ids == want.token_ids
                assert abs(completion.logprobs[0].logprob - want.logprobs[0].logprob) < 1e-4
            else:
                check(completion, expected)
        check_idle(engine)


class TestMishaps:
    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
    def test_cancelled_on_the_way(self, tiny_llama: Any, make_engine: Any, steps: int) -> None:
        """Before, in front of, in and behind documents."""
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=16)
        for document in (ONE, TWO):
            engine.share(document, "exact", anywhere=True)
        seen = 0
        handles: list[Any] = []

        def count(report: Any) -> None:
            nonlocal seen
            if report.prompt_rows or report.decode_rows:
                seen += 1
                if seen == steps and handles:
                    handles[0].cancel()

        remove = engine.add_step_callback(count)
        handles.append(ask(engine, [*HEAD, *ONE, *random_ids(20, seed=1), *TWO, *QUESTION], 8))
        if not steps:
            handles[0].cancel()
        with pytest.raises(RequestCancelledError):
            handles[0].result(60)
        remove()
        check_idle(engine)
        completion = ask(engine, [*HEAD, *ONE, *QUESTION], 8).result(60)
        check(completion, by_hand(tiny_llama, [(HEAD, None), (ONE, 8), (QUESTION, None)]))
        check_idle(engine)

    def test_released_between_two_of_its_places(self, tiny_llama: Any, make_engine: Any) -> None:
        """The request has claimed what it found: it reads it, and then it goes."""
        engine = make_engine(tiny_llama, prefix_cache=True, token_budget=16)
        segment = engine.share(ONE, "exact", anywhere=True)
        released = threading.Event()

        def release(report: Any) -> None:
            if report.stats.prefill_tokens > len(HEAD) + 4 and not released.is_set():
                engine.pool.release(segment)
                released.set()

        engine.add_step_callback(release)
        gap = random_ids(30, seed=2)
        completion = ask(engine, [*HEAD, *ONE, *gap, *ONE, *QUESTION], 4).result(60)
        assert released.is_set()
        expected = by_hand(tiny_llama, [(HEAD, None), (ONE, 4), (gap, None), (ONE, 4), (QUESTION, None)])
        check(completion, expected)
        check_idle(engine)
        engine.pool.clear()
        assert engine.pool.segments == () and engine.pool.stats().num_bytes == 0
        assert ask(engine, [*HEAD, *ONE, *QUESTION], 4).result(60).cached_tokens == 0

    def test_released_while_waiting(self, tiny_llama: Any, make_engine: Any) -> None:
        engine, plain = make_engine(tiny_llama, prefix_cache=True, max_batch=1), make_engine(tiny_llama)
        segment = engine.share(ONE, "exact", anywhere=True)
        prompt = [*HEAD, *ONE, *QUESTION]
        want = ask(plain, prompt, reuse="prefix").result(60).token_ids
        busy = engine.generate(HEAD, SamplingParams(max_tokens=400))
        next(iter(busy))
        handle = ask(engine, prompt, 4)
        engine.pool.release(segment)
        busy.cancel()
        completion = handle.result(60)
        assert completion.token_ids == want and completion.cached_tokens <= len(HEAD)
        check_idle(engine)

    @pytest.mark.parametrize("room", [0, 20_000, 80_000, 200_000, 10**6])
    def test_any_budget_gives_a_right_answer(self, tiny_llama: Any, make_engine: Any, room: int) -> None:
        """What has no room is computed: each document is read or computed, nothing else."""
        held = sum(make_engine(tiny_llama).share(document, "exact", anywhere=True).num_bytes for document in (ONE, TWO))
        engine = make_engine(tiny_llama, prefix_cache=True, max_pool_bytes=held + room)
        for document in (ONE, TWO):
            engine.share(document, "exact", anywhere=True)
        gap = random_ids(30, seed=2)
        prompt = [*HEAD, *ONE, *gap, *TWO, *QUESTION]
        expected = [
            by_hand(tiny_llama, [(HEAD, None), (ONE, one), (gap, None), (TWO, two), (QUESTION, None)])
            for one in (4, None)
            for two in (4, None)
        ]
        completion = ask(engine, prompt, 4).result(60)
        choice = completion.logprobs[0]
        assert min(abs(choice.logprob - float(want[choice.token_id])) for want in expected) < 2e-4
        assert engine.pool.stats().num_bytes <= held + room
        check_idle(engine)

    @pytest.mark.parametrize("found", [False, True], ids=["running", "starting"])
    @pytest.mark.parametrize("name", ["documents", "place"])
    def test_a_failure_in_the_pool_costs_time_alone(
        self, tiny_llama: Any, make_engine: Any, monkeypatch: Any, name: str, found: bool
    ) -> None:
        """Whether the document is reached when the request starts, behind what was found, or while it runs."""
        engine, plain = make_engine(tiny_llama, prefix_cache=True), make_engine(tiny_llama)
        engine.share(ONE, "exact", anywhere=True)
        prompt = [*HEAD, *ONE, *QUESTION]
        if found:
            ask(engine, [*prompt[: len(HEAD) + 4], 9, 9], reuse="prefix").result(60)

        def fail(*args: Any, **fields: Any) -> Any:
            raise RuntimeError("no")

        want = ask(plain, prompt, reuse="prefix").result(60).token_ids
        monkeypatch.setattr(engine.pool.prefix, name, fail)
        handle = ask(engine, prompt, 4)
        assert handle.result(60).token_ids == want
        check_idle(engine)  # the handle is alive: nothing of it may be left to sweep

    def test_what_the_models_rope_cannot(self, tokenizer: Any, make_engine: Any) -> None:
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        with pytest.raises(UnsupportedModelError, match="dynamic"):
            Engine(tiny_model("llama", rope_parameters=rope), tokenizer)

    def test_wrong_values_are_named(self) -> None:
        for fields, message in (
            ({"recompute": 1.5}, "recompute must be an integer, got 1.5"),
            ({"recompute": True}, "recompute must be an integer, got True"),
            ({"recompute": None}, "recompute must be an integer, got None"),
            ({"recompute": 33}, r"recompute must lie in \[0, 32\], got 33"),
            ({"reuse": None}, "reuse must be 'prefix' or 'anywhere', got None"),
            ({"reuse": "Anywhere"}, "got 'Anywhere'"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                Request((1, 2), None, params(), **fields)


class TestMany:
    def test_agents_of_unlike_preambles_over_three_documents(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        segments = [engine.share(document, "k8v3", anywhere=True) for document in (ONE, TWO, THREE)]
        orders = [(ONE, TWO), (TWO, ONE), (THREE,), (ONE, THREE, TWO), (TWO, TWO), (THREE, ONE)]
        prompts = []
        for number, order in enumerate(orders):
            prompt = random_ids(3 + 17 * number, seed=70 + number)
            for document in order:
                prompt += [*document, 7]
            prompts.append([*prompt, *QUESTION])
        alone = []
        for prompt in prompts:
            alone.append(ask(engine, prompt, 8).result(60))
            engine.pool.clear()
        handles = [ask(engine, prompt, 8) for prompt in prompts]
        for handle, want in zip(handles, alone, strict=True):
            got = handle.result(60)
            assert got.cached_tokens == want.cached_tokens
            for ours, theirs in zip(got.logprobs[:1], want.logprobs[:1], strict=True):
                assert abs(ours.logprob - theirs.logprob) < 2e-4
        assert engine.stats().peak_running > 1
        stats = engine.pool.stats()
        assert stats.context_bytes == sum(segment.num_bytes for segment in segments) and stats.num_segments == 3
        check_idle(engine)

    @pytest.mark.parametrize("codec", ["exact", "k8v3"])
    def test_however_prompts_are_left(self, tiny_llama: Any, make_engine: Any, codec: str) -> None:
        """With another codec than exact a prompt is cut into cells: not through a document that is read."""
        engine = make_engine(tiny_llama, prefix_cache=True, prefix_codec=codec)
        document = random_ids(300, seed=41)
        engine.share(document, "k8v3", anywhere=True)
        completion = ask(engine, [*HEAD, *document, *QUESTION], 8).result(60)
        assert completion.cached_tokens == len(document) - 8
        check_idle(engine)

    def test_documents_of_few_tokens(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, prefix_cache=True)
        for length in (1, 15, 16, 17):
            document = random_ids(length, seed=200 + length)
            engine.share(document, "exact", anywhere=True)
            cached = ask(engine, [*random_ids(5, seed=length), *document, *QUESTION], 0).result(60).cached_tokens
            assert cached == (length if length >= 16 else 0)  # so many tokens are looked for at once

    def test_overlapping_documents(self, tiny_llama: Any, make_engine: Any) -> None:
        """The first one is taken, and of what it overlaps only what comes after it."""
        engine = make_engine(tiny_llama, prefix_cache=True)
        whole = [*ONE, *TWO]
        for first, stop in ((0, 100), (60, 200), (120, 220)):
            engine.share(whole[first:stop], "exact", anywhere=True)
        completion = ask(engine, [*HEAD, *whole, *QUESTION], 0).result(60)
        parts = [(HEAD, None), (whole[:100], 0), (whole[100:120], None), (whole[120:220], 0), (whole[220:], None)]
        check(completion, by_hand(tiny_llama, [*parts, (QUESTION, None)]))
        assert completion.cached_tokens == 200
