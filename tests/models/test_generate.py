"""Plain transformers on a pool: ``model(...)`` and ``model.generate(...)`` with ``pool.new_cache()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same_tokens, decoded_cache, greedy, random_ids, relative_error, tiny_model
from transformers import GenerationConfig

from polykv import SharedKVPool
from polykv.errors import ContextReleasedError, IncompatiblePoolError, InvalidRequestError, PromptTooLongError

DOCUMENT = random_ids(150, seed=1)
QUESTION = random_ids(9, seed=2)
SHORT = random_ids(4, seed=3)


def question_inputs(pool: SharedKVPool, *questions: list[int]) -> dict[str, torch.Tensor]:
    longest = max(map(len, questions))
    ids = torch.tensor([[0] * (longest - len(q)) + q for q in questions])
    mask = torch.ones(len(questions), pool.segment.num_tokens + longest, dtype=torch.long)
    for row, question in enumerate(questions):
        mask[row, pool.segment.num_tokens : pool.segment.num_tokens + longest - len(question)] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def test_exact_logits_equal_the_uncached_model(family_model: Any) -> None:
    pool = SharedKVPool.from_token_ids(family_model, DOCUMENT, codec="exact")
    ours = family_model(torch.tensor([QUESTION]), cache=pool.new_cache()).logits[0]
    oracle = family_model(torch.tensor([DOCUMENT + QUESTION])).logits[0, -len(QUESTION) :]
    assert relative_error(ours, oracle) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("codec", ["paper", "k8v3"])
def test_packed_logits_equal_a_dense_cache_of_the_decoded_pool(family_model: Any, codec: str) -> None:
    pool = SharedKVPool.from_token_ids(family_model, DOCUMENT, codec=codec)
    ours = family_model(torch.tensor([QUESTION]), cache=pool.new_cache()).logits[0]
    oracle = family_model(torch.tensor([QUESTION]), cache=decoded_cache(pool.segment)).logits[0]
    assert relative_error(ours, oracle) <= 1e-4
    exact = family_model(torch.tensor([DOCUMENT + QUESTION])).logits[0, -len(QUESTION) :]
    assert relative_error(ours, exact) > 1e-4  # the packed pool is really what was read


@pytest.mark.parametrize("style", ["question with mask", "document and question"])
def test_generate_equals_transformers(family_model: Any, style: str) -> None:
    pool = SharedKVPool.from_token_ids(family_model, DOCUMENT, codec="exact")
    if style == "question with mask":
        inputs = question_inputs(pool, QUESTION)
    else:
        inputs = {"input_ids": torch.tensor([DOCUMENT + QUESTION])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    out = family_model.generate(**inputs, cache=pool.new_cache(), max_new_tokens=24, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :].tolist()
    prompt = DOCUMENT + QUESTION
    assert_same_tokens(family_model, prompt, new, greedy(family_model, prompt, 24))


def test_a_left_padded_batch_equals_single_runs(family_model: Any) -> None:
    pool = SharedKVPool.from_token_ids(family_model, DOCUMENT, codec="exact")
    inputs = question_inputs(pool, QUESTION, SHORT)
    out = family_model.generate(**inputs, cache=pool.new_cache(), max_new_tokens=20, do_sample=False)
    for row, question in enumerate((QUESTION, SHORT)):
        prompt = DOCUMENT + question
        want = greedy(family_model, prompt, 20)
        got = out[row, inputs["input_ids"].shape[1] :].tolist()[: len(want)]
        assert_same_tokens(family_model, prompt, got, want)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prefill_chunk_size": 4}, {"num_beams": 2, "num_return_sequences": 2}],
    ids=["beams", "prefill_chunk_size", "several beams"],
)
def test_generation_modes_work_as_without_a_pool(tiny_llama: Any, options: dict[str, Any]) -> None:
    pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT, codec="exact")
    ids = torch.tensor([DOCUMENT + QUESTION])
    want = tiny_llama.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=16,
        do_sample=False,
        **{k: v for k, v in options.items() if k != "prefill_chunk_size"},
    )[:, len(DOCUMENT) :]
    got = tiny_llama.generate(
        **question_inputs(pool, QUESTION),
        cache=pool.new_cache(),
        max_new_tokens=16,
        do_sample=False,
        **options,
    )
    assert got.tolist() == want.tolist()


def test_assisted_decoding_is_refused(tiny_llama: Any) -> None:
    # transformers 5.24 gives wrong tokens here with its own DynamicCache too, once that is filled beforehand
    pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT, codec="exact")
    inputs = question_inputs(pool, QUESTION)
    with pytest.raises(IncompatiblePoolError, match="assistant_model cannot be used with a pool"):
        tiny_llama.generate(**inputs, cache=pool.new_cache(), assistant_model=tiny_model("llama", seed=7))
    with pytest.raises(IncompatiblePoolError, match="prompt_lookup_num_tokens cannot be used"):
        tiny_llama.generate(**inputs, cache=pool.new_cache(), prompt_lookup_num_tokens=3)


def test_sampling_with_a_seed_equals_transformers(tiny_llama: Any) -> None:
    pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT, codec="exact")
    ids = torch.tensor([DOCUMENT + QUESTION])
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_p": 0.9}
    torch.manual_seed(3)
    want = tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(DOCUMENT) :]
    torch.manual_seed(3)
    got = tiny_llama.generate(**question_inputs(pool, QUESTION), cache=pool.new_cache(), **options)[0]
    assert got.tolist() == want.tolist()


def test_no_gradient_mode_is_needed(tiny_llama: Any) -> None:
    pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT)
    with torch.enable_grad():
        logits = tiny_llama(torch.tensor([QUESTION]), cache=pool.new_cache()).logits
    assert torch.isfinite(logits).all()


def test_pool_inputs_have_the_right_lengths(tiny_llama: Any, tokenizer: Any) -> None:
    pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT, codec="exact", tokenizer=tokenizer)
    inputs = pool.inputs("Who carries the risk?")
    assert inputs["attention_mask"].shape[1] == len(DOCUMENT) + inputs["input_ids"].shape[1]
    out = tiny_llama.generate(**inputs, cache=pool.new_cache(), max_new_tokens=8, do_sample=False)
    question = tokenizer.encode("Who carries the risk?", add_special_tokens=False)
    assert inputs["input_ids"][0].tolist() == question
    want = greedy(tiny_llama, DOCUMENT + question, 8)
    assert_same_tokens(tiny_llama, DOCUMENT + question, out[0, len(question) :].tolist(), want)


def test_pool_inputs_of_a_batch_are_padded_between_document_and_question(tiny_llama: Any, tokenizer: Any) -> None:
    pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT, codec="exact", tokenizer=tokenizer)
    texts = ["Who carries the risk?", "Why?"]
    inputs = pool.inputs(texts)
    out = tiny_llama.generate(**inputs, cache=pool.new_cache(), max_new_tokens=8, do_sample=False)
    for row, text in enumerate(texts):
        prompt = DOCUMENT + tokenizer.encode(text, add_special_tokens=False)
        want = greedy(tiny_llama, prompt, 8)
        got = out[row, inputs["input_ids"].shape[1] :].tolist()[: len(want)]
        assert_same_tokens(tiny_llama, prompt, got, want)


class TestWrongInputsAreRefused:
    @pytest.fixture
    def pool(self, tiny_llama: Any) -> SharedKVPool:
        return SharedKVPool.from_token_ids(tiny_llama, random_ids(6, seed=1), codec="exact")

    def test_a_question_with_only_its_own_mask_while_the_document_is_short(self, pool: SharedKVPool) -> None:
        # transformers alone would take it for document + question and drop its first six tokens
        ids = torch.tensor([QUESTION])
        with pytest.raises(IncompatiblePoolError, match=r"9 tokens .* cache holds 6.*6 \+ 9 tokens"):
            pool.model.generate(ids, attention_mask=torch.ones_like(ids), cache=pool.new_cache())

    def test_a_question_without_a_mask(self, pool: SharedKVPool) -> None:
        with pytest.raises(IncompatiblePoolError, match="mask is none"):
            pool.model.generate(torch.tensor([QUESTION]), cache=pool.new_cache())

    @pytest.mark.parametrize("length", [5, 14, 16])
    def test_a_mask_of_the_wrong_length(self, pool: SharedKVPool, length: int) -> None:
        mask = torch.ones(1, length, dtype=torch.long)
        with pytest.raises(IncompatiblePoolError, match=f"one over {length}"):
            pool.model.generate(torch.tensor([QUESTION]), attention_mask=mask, cache=pool.new_cache())

    def test_a_mask_of_the_wrong_length_in_a_plain_forward(self, pool: SharedKVPool) -> None:
        ids = torch.tensor([QUESTION])
        with pytest.raises(IncompatiblePoolError, match="covers 9 tokens; it must cover 15"):
            pool.model(ids, attention_mask=torch.ones_like(ids), cache=pool.new_cache())

    def test_another_document(self, pool: SharedKVPool) -> None:
        ids = torch.tensor([random_ids(6, seed=5) + QUESTION])
        with pytest.raises(IncompatiblePoolError, match="document's own ids"):
            pool.model.generate(ids, attention_mask=torch.ones_like(ids), cache=pool.new_cache())

    def test_the_document_alone(self, pool: SharedKVPool) -> None:
        ids = pool.segment.token_ids.long()[None]
        with pytest.raises(IncompatiblePoolError):
            pool.model.generate(ids, attention_mask=torch.ones_like(ids), cache=pool.new_cache())

    def test_embeddings(self, pool: SharedKVPool) -> None:
        embeds = pool.model.get_input_embeddings()(torch.tensor([QUESTION]))
        with pytest.raises(IncompatiblePoolError, match="inputs_embeds"):
            pool.model.generate(inputs_embeds=embeds, cache=pool.new_cache())

    def test_another_models_pool(self, pool: SharedKVPool) -> None:
        from polykv import attach

        other = tiny_model("llama", seed=9)
        attach(other)
        with pytest.raises(IncompatiblePoolError, match="differs from .* in its weights"):
            other(torch.tensor([QUESTION]), cache=pool.new_cache())

    @pytest.mark.parametrize("tokens", [1, 9])
    @pytest.mark.parametrize("shape", [{}, {"num_key_value_heads": 4}], ids=["same shape", "another shape"])
    def test_a_model_that_was_never_attached_cannot_ignore_the_pool(
        self, pool: SharedKVPool, tokens: int, shape: dict[str, int]
    ) -> None:
        with pytest.raises(IncompatiblePoolError, match=r"not 'polykv'.*attach\(model\)"):
            tiny_model("llama", **shape)(torch.tensor([QUESTION[:tokens]]), cache=pool.new_cache())

    @pytest.mark.parametrize("dimensions", [2, 4])
    def test_a_mask_that_hides_part_of_the_pool(self, pool: SharedKVPool, dimensions: int) -> None:
        mask = question_inputs(pool, QUESTION)["attention_mask"]
        mask[:, 2:4] = 0
        if dimensions == 4:
            mask = mask.bool()[:, None, None, :].expand(1, 1, 9, 15) & torch.ones(9, 15, dtype=torch.bool).tril(6)
        with pytest.raises(IncompatiblePoolError, match="hides tokens of the shared pool"):
            pool.model(torch.tensor([QUESTION]), attention_mask=mask, cache=pool.new_cache())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"use_cache": False}, "use_cache=False"),
            ({"position_ids": torch.arange(9)[None]}, "position_ids"),
            ({"past_key_values": None}, "both cache= and past_key_values="),
            ({"generation_config": GenerationConfig(prompt_lookup_num_tokens=3)}, "prompt_lookup_num_tokens"),
            ({"generation_config": GenerationConfig(use_cache=False)}, "use_cache=False"),
        ],
        ids=["no cache", "positions", "two caches", "lookup in the config", "no cache in the config"],
    )
    def test_options_that_would_go_wrong_silently(
        self, pool: SharedKVPool, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(IncompatiblePoolError, match=message):
            pool.model.generate(**question_inputs(pool, QUESTION), cache=pool.new_cache(), **options)

    def test_the_pool_as_old_past_key_values_beside_an_empty_cache(self, pool: SharedKVPool) -> None:
        with pytest.raises(IncompatiblePoolError, match="both cache= and past_key_values="):
            pool.model.generate(**question_inputs(pool, QUESTION), cache=None, past_key_values=pool.new_cache())

    def test_the_document_again_on_a_cache_that_has_answered(self, pool: SharedKVPool) -> None:
        cache = pool.new_cache()
        pool.model.generate(**question_inputs(pool, QUESTION), cache=cache, max_new_tokens=3)
        ids = torch.tensor([[*pool.segment.token_ids.tolist(), *random_ids(30, seed=8)]])
        with pytest.raises(IncompatiblePoolError, match="of an earlier call.*new cache"):
            pool.model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache)

    def test_another_number_of_rows(self, pool: SharedKVPool) -> None:
        cache = pool.new_cache()
        with torch.no_grad():
            pool.model(torch.tensor([QUESTION, QUESTION]), cache=cache)
        with pytest.raises(IncompatiblePoolError, match="holds 2 rows, got 1"):
            pool.model(torch.tensor([QUESTION]), cache=cache)

    def test_the_inner_model_is_checked_too(self, pool: SharedKVPool) -> None:
        ids = torch.tensor([QUESTION])
        with pytest.raises(IncompatiblePoolError, match="covers 9 tokens; it must cover 15"):
            pool.model.model(ids, attention_mask=torch.ones_like(ids), cache=pool.new_cache())

    def test_activation_checkpointing(self, pool: SharedKVPool) -> None:
        pool.model.activation_checkpointing_enable()
        pool.model.train()
        with pytest.raises(IncompatiblePoolError, match="activation checkpointing"):
            pool.model(torch.tensor([QUESTION[:1]]), cache=pool.new_cache())

    def test_a_changed_attention_implementation(self, pool: SharedKVPool) -> None:
        pool.model.set_attn_implementation("sdpa")
        with pytest.raises(IncompatiblePoolError, match=r"is 'sdpa', which would ignore the pool.*attach"):
            pool.model(torch.tensor([QUESTION[:1]]), cache=pool.new_cache())

    def test_an_empty_question(self, pool: SharedKVPool, tokenizer: Any) -> None:
        pool.tokenizer = tokenizer
        with pytest.raises(InvalidRequestError, match="no tokens"):
            pool.inputs("")
        with pytest.raises(InvalidRequestError, match="at least one"):
            pool.inputs([])

    def test_a_question_that_is_too_long(self, pool: SharedKVPool, tokenizer: Any) -> None:
        pool.tokenizer = tokenizer
        with pytest.raises(PromptTooLongError, match="2048 positions"):
            pool.inputs("word " * 2000)

    def test_a_released_cache(self, pool: SharedKVPool) -> None:
        cache = pool.new_cache()
        cache.release()
        cache.release()
        with pytest.raises(ContextReleasedError):
            pool.model(torch.tensor([QUESTION]), cache=cache)
        assert pool.num_leases == 0

    def test_cropping_into_the_pool(self, pool: SharedKVPool) -> None:
        cache = pool.new_cache()
        with torch.no_grad():
            pool.model(torch.tensor([QUESTION]), cache=cache)
        with pytest.raises(ValueError, match="shared pool cannot be removed"):
            cache.crop(-10)
        cache.crop(-9)
        assert cache.get_seq_length() == 6

    def test_after_every_refusal_the_pool_still_serves(self, pool: SharedKVPool) -> None:
        self.test_a_mask_of_the_wrong_length(pool, 5)
        prompt = pool.segment.token_ids.tolist() + QUESTION
        out = pool.model.generate(
            **question_inputs(pool, QUESTION), cache=pool.new_cache(), max_new_tokens=5, do_sample=False
        )
        assert_same_tokens(pool.model, prompt, out[0, 9:].tolist(), greedy(pool.model, prompt, 5))


def test_a_cache_that_is_collected_returns_its_lease(tiny_llama: Any) -> None:
    pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT)
    cache = pool.new_cache()
    assert pool.num_leases == 1
    del cache
    assert pool.num_leases == 0
