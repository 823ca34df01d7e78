"""With no pool attached, a model with our attention is the model with sdpa."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import FAMILIES, VOCABULARY, greedy, random_ids, tiny_model
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from polykv import attach
from polykv.errors import UnsupportedModelError
from polykv.models.support import check_supported, layer_windows


@pytest.fixture(params=FAMILIES, ids=lambda family: f"{family[0]}-{'sliding' if family[1] else 'full'}")
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The same weights twice: plain sdpa, and attached."""
    name, window = request.param
    plain, attached = tiny_model(name, window), tiny_model(name, window)
    assert plain.config._attn_implementation == "sdpa"
    attach(attached)
    assert attached.config._attn_implementation == "polykv"
    return plain, attached


@torch.no_grad()
def test_one_shot_equals_sdpa(pair: tuple[Any, Any]) -> None:
    plain, attached = pair
    ids = torch.tensor([random_ids(70)])
    assert torch.equal(plain(ids).logits, attached(ids).logits)


@torch.no_grad()
def test_chunked_prefill_equals_sdpa(pair: tuple[Any, Any]) -> None:
    ids = torch.tensor([random_ids(70)])
    outputs = []
    for model in pair:
        cache = DynamicCache(config=model.config)
        chunks = [model(chunk, cache=cache).logits for chunk in ids.split(19, dim=1)]
        outputs.append(torch.cat(chunks, dim=1))
    assert torch.equal(*outputs)


@torch.no_grad()
def test_left_padded_batch_equals_sdpa(pair: tuple[Any, Any]) -> None:
    ids = torch.tensor([[0] * 30 + random_ids(40), random_ids(70, seed=1)])
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = [model(ids, attention_mask=mask, position_ids=positions).logits for model in pair]
    assert torch.equal(*logits)


@torch.no_grad()
def test_generation_equals_sdpa(pair: tuple[Any, Any]) -> None:
    plain, attached = pair
    prompt = random_ids(60)
    assert greedy(plain, prompt, 20) == greedy(attached, prompt, 20)


def test_attaching_twice_changes_nothing(tiny_llama: Any) -> None:
    attach(tiny_llama)
    hooks = dict(tiny_llama.model._forward_pre_hooks)
    assert len(hooks) == 1
    attach(tiny_llama)
    assert dict(tiny_llama.model._forward_pre_hooks) == hooks


def test_attaching_again_restores_a_changed_implementation(tiny_llama: Any) -> None:
    attach(tiny_llama)
    tiny_llama.set_attn_implementation("sdpa")
    attach(tiny_llama)
    assert tiny_llama.config._attn_implementation == "polykv"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copied_model_generates_with_its_own_weights(tiny_llama: Any, duplicate: Any) -> None:
    attach(tiny_llama)
    prompt = random_ids(12)
    before = greedy(tiny_llama, prompt, 8)
    other = duplicate(tiny_llama)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter))
    fresh = type(other)(other.config).eval()
    fresh.load_state_dict(other.state_dict())
    assert greedy(tiny_llama, prompt, 8) == before
    assert greedy(other, prompt, 8) == greedy(fresh, prompt, 8) != before


def test_training_gradients_flow_without_a_pool(tiny_llama: Any) -> None:
    attach(tiny_llama)
    ids = torch.tensor([random_ids(12)])
    tiny_llama(ids, labels=ids).loss.backward()
    assert tiny_llama.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_windows_are_read_from_the_config() -> None:
    assert layer_windows(tiny_model("llama").config) == (None, None, None)
    assert layer_windows(tiny_model("mistral", 24).config) == (24, 24, 24)
    assert layer_windows(tiny_model("qwen2", 24).config) == (None, 24, 24)
    assert layer_windows(tiny_model("gemma3", 24).config) == (24, None, 24)
    assert layer_windows(tiny_model("phi3").config) == (None, None, None)


def test_an_unknown_model_type_is_named() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError, match="'gpt2' is not supported; supported are llama"):
        attach(model)


def test_an_unsupported_layer_type_is_named() -> None:
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="layer 1 has layer type 'chunked_attention'"):
        check_supported(model)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_rope_type_that_depends_on_the_batch_is_named(rope_type: str) -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match=f"RoPE type '{rope_type}'"):
        check_supported(model)


def test_one_bad_rope_among_layer_types_is_named() -> None:
    model = tiny_model("gemma3", 24)
    model.config.rope_parameters["full_attention"]["rope_type"] = "longrope"
    with pytest.raises(UnsupportedModelError, match="longrope"):
        check_supported(model)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no language-model head"):
        attach(tiny_model("llama").model)


def test_the_test_vocabulary_fits(tokenizer: Any) -> None:
    assert len(tokenizer) <= VOCABULARY
