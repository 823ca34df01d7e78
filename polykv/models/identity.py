"""Who a stored key or value belongs to: the model, its tokenizer, its RoPE, and the token ids before it.

A segment is content-addressed. Its identity is a SHA-256 chain whose first link is the model's identity and whose
following links each take 64 token ids, so that two texts with a common start share their first links. Every field is
prefixed by its name and length: no two different inputs can give the same bytes. The codec is a property of the stored
object and not part of the chain.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

CHAIN_VERSION = "polykv/segment/1"
CHAIN_BLOCK = 64
"""Token ids a link of the chain."""

_SAMPLES_PER_WEIGHT = 32


def _digest(domain: str, *fields: tuple[str, bytes]) -> bytes:
    sha = hashlib.sha256(domain.encode())
    for name, value in fields:
        sha.update(f"|{name}:{len(value)}:".encode())
        sha.update(value)
    return sha.digest()


@dataclass(frozen=True)
class ModelIdentity:
    """What two processes must agree on to exchange stored keys and values.

    Attributes:
        name: where the model came from; for messages, never compared.
        model_type: ``config.model_type``.
        revision: commit of a hub download, else empty.
        weights: digest over every parameter's and buffer's name, shape, dtype and a sample of its values.
        config: canonical JSON of what else in the configuration changes keys and values (windows, norms, head counts).
        rope: canonical JSON of the RoPE parameters.
        adapter: active adapters, else empty.
        tokenizer: digest of the tokenizer, else empty when only token ids are known.
    """

    name: str = field(compare=False)
    model_type: str
    revision: str
    weights: str
    config: str
    rope: str
    adapter: str
    tokenizer: str

    def chain_root(self, salt: str = "") -> bytes:
        """First link of the chain. ``salt``, a :func:`salt_digest`, keeps one tenant's segments apart from another's."""
        return _digest(
            CHAIN_VERSION,
            ("model_type", self.model_type.encode()),
            ("revision", self.revision.encode()),
            ("weights", self.weights.encode()),
            ("config", self.config.encode()),
            ("rope", self.rope.encode()),
            ("adapter", self.adapter.encode()),
            ("tokenizer", self.tokenizer.encode()),
            ("salt", salt.encode()),
        )

    def mismatch(self, other: ModelIdentity) -> str | None:
        """Names the first field in which two identities differ, or None. An unknown tokenizer matches any."""
        for name in ("model_type", "weights", "revision", "config", "rope", "adapter"):
            if getattr(self, name) != getattr(other, name):
                return name
        if self.tokenizer and other.tokenizer and self.tokenizer != other.tokenizer:
            return "tokenizer"
        return None


def salt_digest(salt: str) -> str:
    """What stands for a tenant's salt in keys and files, which never hold the salt itself; empty for none."""
    return _digest("polykv/salt/1", ("salt", salt.encode())).hex() if salt else ""


def segment_identity(identity: ModelIdentity, token_ids: Sequence[int], salt: str = "") -> str:
    """Hex SHA-256 of the chain after all of ``token_ids``."""
    link = identity.chain_root(salt)
    for first in range(0, len(token_ids), CHAIN_BLOCK):
        block = torch.tensor(token_ids[first : first + CHAIN_BLOCK], dtype=torch.int32)
        link = _digest("polykv/block/1", ("parent", link), ("tokens", block.numpy().astype("<i4").tobytes()))
    return link.hex()


_model_digests: weakref.WeakKeyDictionary[PreTrainedModel, ModelIdentity] = weakref.WeakKeyDictionary()
_tokenizer_digests: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


_IRRELEVANT_CONFIG = (
    "architectures",
    "attention_dropout",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "rope_parameters",  # a field of its own
    "tokenizer_class",
    "torch_dtype",  # the parameters' own dtypes are in the weights' digest
    "transformers_version",
    "use_cache",
)


def _config_digest(config: dict[str, Any]) -> str:
    """Keeps what it does not know: a key too many costs a rebuild, a key too few a wrong answer."""
    kept = {
        key: value
        for key, value in config.items()
        if key not in _IRRELEVANT_CONFIG and not key.startswith("_") and not key.endswith("_token_id")
    }
    return json.dumps(kept, sort_keys=True, default=str)


def _weights_digest(model: PreTrainedModel) -> str:
    sha = hashlib.sha256()
    stored = [*model.named_parameters()]
    for (
        prefix,
        module,
    ) in model.named_modules():  # quantised weights are buffers; what is not saved follows from the config
        buffers = module.named_buffers(prefix, recurse=False)
        stored += [b for b in buffers if b[0].rpartition(".")[2] not in module._non_persistent_buffers_set]
    for name, parameter in sorted(stored, key=lambda item: item[0]):
        flat = parameter.detach().reshape(-1)
        count = min(flat.numel(), _SAMPLES_PER_WEIGHT)
        picks = torch.arange(count) * (flat.numel() - 1) // max(count - 1, 1)
        sample = flat[picks.to(flat.device)].to("cpu", torch.float64).numpy()
        sha.update(f"{name}|{tuple(parameter.shape)}|{parameter.dtype}|".encode())
        sha.update(sample.tobytes())
    return sha.hexdigest()


def tokenizer_digest(tokenizer: Any | None) -> str:
    """Digest of a tokenizer's rules and vocabulary; empty for None."""
    if tokenizer is None:
        return ""
    with _lock:
        if tokenizer not in _tokenizer_digests:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            if backend is not None:
                text = backend.to_str()
            else:
                text = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
            _tokenizer_digests[tokenizer] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return _tokenizer_digests[tokenizer]


def identity_of(model: PreTrainedModel, tokenizer: Any | None = None) -> ModelIdentity:
    """Identity of a loaded model. Computed once a model object: weights changed in place later are not seen.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, or None when only token ids are used.
    """
    with _lock:
        known = _model_digests.get(model)
        if known is None:
            config = model.config
            adapters = model.active_adapters() if getattr(model, "_hf_peft_config_loaded", False) else []
            known = ModelIdentity(
                name=str(getattr(config, "_name_or_path", "") or type(model).__name__),
                model_type=config.model_type,
                revision=str(getattr(config, "_commit_hash", None) or ""),
                weights=_weights_digest(model),
                config=_config_digest(config.to_dict()),
                rope=json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str),
                adapter=",".join(adapters),
                tokenizer="",
            )
            _model_digests[model] = known
    if tokenizer is None:
        return known
    return ModelIdentity(**{**known.__dict__, "tokenizer": tokenizer_digest(tokenizer)})
