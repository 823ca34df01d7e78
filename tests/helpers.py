"""Shared by the tests: tiny models, the equality that paths with different batch shapes can promise, oracles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from polykv.pool import KVSegment

FULL = os.environ.get("POLYKV_TEST_FULL") == "1"
"""Whether the stated counts are run (``make test-full``) or reduced ones."""

WINDOW = 24
FAMILIES: tuple[tuple[str, int | None], ...] = (
    ("llama", None),
    ("mistral", None),
    ("mistral", WINDOW),
    ("qwen2", None),
    ("qwen2", WINDOW),
    ("qwen3", None),
    ("qwen3", WINDOW),
    ("gemma3", WINDOW),
    ("phi3", None),
    ("phi3", WINDOW),
)
VOCABULARY = 320
TIE_MARGIN = 1e-3

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model(family: str, window: int | None = None, *, seed: int = 0, **overrides: Any) -> Any:
    """A random model with 3 layers, 4 query heads and 2 KV heads of 32, 2,048 positions. Weights larger than usual, so
    that its attention is far from uniform and its greedy text does not loop on one token."""
    torch.manual_seed(seed)
    base: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    qwen = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 1}
    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**base))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**base, sliding_window=window))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**base, **qwen))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**base, **qwen))
    elif family == "gemma3":
        layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Gemma3TextConfig(**base, sliding_window=window, layer_types=layer_types, query_pre_attn_scalar=32)
        model = Gemma3ForCausalLM(config)
    elif family == "phi3":
        model = Phi3ForCausalLM(Phi3Config(**base, sliding_window=window))
    else:
        raise AssertionError(family)
    return model.eval()


def tiny_tokenizer(chat_template: str | None = CHATML) -> Any:
    """A byte-level BPE tokenizer: every text round-trips, special tokens as in ChatML."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the bond, the merchant and the court\n\nassistant system user"] * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=specials[0], bos_token=specials[1], eos_token=specials[2]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def random_ids(count: int, *, seed: int = 0, low: int = 3, high: int = VOCABULARY) -> list[int]:
    """Random ordinary token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (count,), generator=generator).tolist()


def demo_document() -> str:
    """The public-domain document that the example ships."""
    (path,) = sorted((Path(__file__).parents[1] / "examples" / "data").glob("*.txt"))
    return path.read_text(encoding="utf-8")


def greedy(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """``transformers.generate`` with its own cache: the oracle for generated tokens."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        cache=DynamicCache(),
    )
    return out[0, ids.shape[1] :].tolist()


def relative_error(value: Tensor, reference: Tensor) -> float:
    """``max|error| / max|reference|``, the measure of every numeric bound."""
    return float((value.double() - reference.double()).abs().max() / reference.double().abs().max())


def assert_same_tokens(model: Any, prompt: Sequence[int], got: Sequence[int], want: Sequence[int]) -> None:
    """Equal tokens until a step at which the oracle's two best logits are closer than 1e-3.

    Batches of different shapes reduce in different orders, so a tie may fall either way; nothing else may differ.
    """
    if list(got) == list(want):
        return
    step = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *want[:step]]])
        top = model(ids, logits_to_keep=1).logits[0, -1].topk(2).values
    margin = float(top[0] - top[1])
    assert margin < TIE_MARGIN, (
        f"step {step}: got {got[step : step + 3]}, want {want[step : step + 3]}, margin {margin:.4g}"
    )


def decoded_cache(segment: KVSegment) -> DynamicCache:
    """A dense cache filled with what a segment decodes to: the oracle for attention on the packed form.

    Sliding layers hold only their window, so the tokens before it are zeros; the window masks them out.
    """
    from polykv_kernels import ops

    cache = DynamicCache()
    for index, layer in enumerate(segment.layers):
        keys, values = ops.decode(layer)
        padding = (0, 0, layer.start, 0)
        cache.update(
            torch.nn.functional.pad(keys, padding)[None],
            torch.nn.functional.pad(values, padding)[None],
            index,
        )
    return cache
