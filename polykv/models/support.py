"""What a model must be for its attention to read a pool, checked before anything is computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from polykv.errors import UnsupportedModelError

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3")
"""Families tested against transformers, full and sliding attention each where they have it."""

SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""``dynamic`` and ``longrope`` take their frequencies from the longest position of the batch, so that one request
would change another's rotation."""


def layer_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens, None where the layer attends to everything."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:  # Mistral, Phi-3: one window for all layers; Llama: none at all
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def head_dim(config: PreTrainedConfig) -> int:
    """Elements of one key or value vector."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def num_kv_heads(config: PreTrainedConfig) -> int:
    """KV heads of one layer."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def embedding_weight(model: PreTrainedModel) -> Tensor:
    """The input embedding ``[V, hidden]``: its device is where ids must go, its rows are the vocabulary."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def max_positions(config: PreTrainedConfig) -> int:
    """Positions the model was made for: context, prompt and answer together."""
    return int(config.max_position_embeddings)


def _rope_types(parameters: dict[str, Any] | None) -> set[str]:
    """RoPE types in a config's ``rope_parameters``: one dict, or (Gemma 3) one a layer type."""
    if not parameters:
        return {"default"}
    if "rope_type" in parameters:
        return {parameters["rope_type"]}
    return {str(p.get("rope_type", "default")) for p in parameters.values() if isinstance(p, dict)} or {"default"}


def check_supported(model: PreTrainedModel) -> None:
    """Refuses a model whose attention cannot read a pool.

    Raises:
        UnsupportedModelError: names the model type, layer type, RoPE type or option that is not supported.
    """
    config = model.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        hint = " Load its text part (Gemma3ForCausalLM)." if config.model_type == "gemma3" else ""
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not supported; supported are "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}.{hint}"
        )
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in SUPPORTED_LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer {index} has layer type {kind!r}; supported are {', '.join(SUPPORTED_LAYER_TYPES)}"
            )
    for rope_type in sorted(_rope_types(getattr(config, "rope_parameters", None))):
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise UnsupportedModelError(
                f"RoPE type {rope_type!r} is not supported (its frequencies depend on the longest request of a batch, "
                f"or it is unknown); supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
    for option in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, option, None):
            raise UnsupportedModelError(f"config option {option}={getattr(config, option)!r} is not supported")
    narrow = [window for window in layer_windows(config) if window is not None and window < 2]
    if narrow:
        raise UnsupportedModelError(f"a sliding window of {narrow[0]} lets no token see another; it must be at least 2")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError("the model is on device 'meta' and has no weights; load it onto a real device")
    if not hasattr(model, "generate"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM"
        )
