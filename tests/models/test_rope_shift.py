"""Queries turned back by an offset read stored keys as if those stood that much later."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import FAMILIES, WINDOW, random_ids, relative_error, tiny_model
from torch import Tensor
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from polykv.errors import UnsupportedModelError
from polykv.models.rope import QueryRotation, check_shiftable, rotation_of

THETA = 10000.0
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": THETA},
    "linear": {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 8.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": THETA,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}
# transformers refuses Phi-3 with any type but default and longrope; its own variant is the partial rotation
PARTIAL = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}
# (family, window, RoPE)
CASES = [(family, window, kind) for family, window in FAMILIES if family != "phi3" for kind in ROPES]
CASES += [("phi3", window, kind) for window in (None, WINDOW) for kind in ("default", "partial")]
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 32, 3


def rope_model(family: str, window: int | None, kind: str) -> Any:
    parameters: dict[str, Any] = dict(PARTIAL if kind == "partial" else ROPES[kind])
    if family == "gemma3":  # the type under test on full attention, another base on sliding attention
        parameters = {
            "full_attention": {**parameters, "rope_theta": 100 * THETA},
            "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
        }
    return tiny_model(family, window, rope_parameters=parameters)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{'sliding' if case[1] else 'full'}-{case[2]}")
def model(request: pytest.FixtureRequest) -> Any:
    return rope_model(*request.param)


def frequencies(model: Any, layer: int) -> Tensor:
    """The model's inverse frequencies of a layer."""
    rotary = model.model.rotary_emb
    if model.config.model_type == "gemma3_text":
        sliding = model.config.layer_types[layer] == "sliding_attention"
        return rotary.sliding_attention_inv_freq if sliding else rotary.full_attention_inv_freq
    return rotary.inv_freq


def turned(x: Tensor, offsets: Tensor, inv_freq: Tensor) -> Tensor:
    """Oracle, in complex float64: ``x [rows, H, D]`` moved by ``offsets [rows]`` to later positions."""
    x, half = x.double(), inv_freq.numel()
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    angles = torch.outer(offsets.double(), inv_freq.double())
    pairs = pairs * torch.exp(1j * angles)[:, None]
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """``[Hq, rows, keys]`` in float64 of ``q [rows, Hq, D]`` and ``k [keys, Hkv, D]``."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("rhd,khd->hrk", q.double(), k)


_seen: dict[int, tuple[Tensor, Tensor]] = {}


def _spying_attention(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    _seen[module.layer_idx] = (query[0].transpose(0, 1), key[0].transpose(0, 1))
    return sdpa_attention_forward(module, query, key, *args, **kwargs)


@pytest.fixture
def _spy() -> Iterator[None]:
    AttentionInterface.register("rope_spy", _spying_attention)
    AttentionMaskInterface.register("rope_spy", sdpa_mask)
    yield
    del AttentionInterface._global_mapping["rope_spy"]
    del AttentionMaskInterface._global_mapping["rope_spy"]


@torch.no_grad()
def states(model: Any, ids: list[int], start: int) -> list[tuple[Tensor, Tensor]]:
    """``(q [T, Hq, D], k [T, Hkv, D])`` after RoPE of each layer, of tokens at ``start..``, from a plain forward."""
    model.set_attn_implementation("rope_spy")
    _seen.clear()
    model(torch.tensor([ids]), position_ids=torch.arange(start, start + len(ids))[None], use_cache=False)
    assert sorted(_seen) == list(range(LAYERS))
    return [_seen[layer] for layer in range(LAYERS)]


# --- against the oracle


@pytest.mark.parametrize("layer", range(LAYERS))
def test_equals_the_oracle(model: Any, layer: int) -> None:
    # small and large, both signs, zero, and several alike: every row by its own offset
    offsets = torch.tensor([0, 1, -1, 37, -37, 37, 2047, -2047, 100_000, -100_000, 1_000_000, -1_000_000])
    q = torch.randn(len(offsets), HEADS, HEAD_DIM)
    before = q.clone()
    got = rotation_of(model).rotate(q, offsets, layer)
    assert got.dtype == q.dtype and got.shape == q.shape
    assert torch.equal(q, before) and got.data_ptr() != q.data_ptr()
    want = turned(q, -offsets, frequencies(model, layer))
    # each row by itself: a large offset is as exact as a small one
    for row, offset in enumerate(offsets.tolist()):
        assert relative_error(got[row], want[row]) < 1e-6, offset
    assert torch.equal(got[0], q[0])


def test_only_the_rotary_dims_are_turned() -> None:
    model = rope_model("phi3", None, "partial")
    assert frequencies(model, 0).numel() == HEAD_DIM // 4
    q = torch.randn(5, HEADS, HEAD_DIM)
    got = rotation_of(model).rotate(q, torch.tensor([1, -5, 700, 100_000, 3]), 0)
    rotary = HEAD_DIM // 2
    assert torch.equal(got[..., rotary:], q[..., rotary:])
    assert bool((got[..., :rotary] != q[..., :rotary]).all())


def test_each_layer_type_has_its_own_frequencies() -> None:
    model = rope_model("gemma3", WINDOW, "linear")
    assert model.config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    q, offsets = torch.randn(3, HEADS, HEAD_DIM), torch.tensor([10, -20, 30])
    first, second, third = (rotation_of(model).rotate(q, offsets, layer) for layer in range(LAYERS))
    assert torch.equal(first, third)
    assert relative_error(first, second) > 0.1


def test_lengths_stay_under_yarn() -> None:
    """The queries have its attention scaling already; a second time would sharpen the attention."""
    model = rope_model("llama", None, "yarn")
    assert model.model.rotary_emb.attention_scaling > 1.2
    q = torch.randn(4, HEADS, HEAD_DIM)
    got = rotation_of(model).rotate(q, torch.tensor([5, -9, 1000, 100_000]), 0)
    assert relative_error(got.norm(dim=-1), q.norm(dim=-1)) < 1e-6


def test_there_and_back() -> None:
    model = rope_model("qwen3", None, "default")
    q, offsets = torch.randn(3, HEADS, HEAD_DIM), torch.tensor([100_000, -3, 999_999])
    rotation = rotation_of(model)
    assert relative_error(rotation.rotate(rotation.rotate(q, offsets, 1), -offsets, 1), q) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float16, 2**-10), (torch.bfloat16, 2**-7), (torch.float64, 1e-12)],
    ids=["float16", "bfloat16", "float64"],
)
def test_other_dtypes(dtype: torch.dtype, bound: float) -> None:
    """One rounding, of the result: half precision is turned in float32, float64 stays what it is."""
    for family, kind in (("llama", "default"), ("phi3", "partial")):
        model = rope_model(family, None, kind)
        q, offsets = torch.randn(4, HEADS, HEAD_DIM).to(dtype), torch.tensor([0, 100_000, -7, 512])
        got = rotation_of(model).rotate(q, offsets, 0)
        assert got.dtype == dtype
        assert relative_error(got, turned(q, -offsets, frequencies(model, 0))) < bound


def test_strided_queries_and_none_at_all(tiny_llama: Any) -> None:
    rotation = rotation_of(tiny_llama)
    q, offsets = torch.randn(HEADS, 6, HEAD_DIM), torch.tensor([1, -2, 0, 40, 5, 6])
    strided = q.transpose(0, 1)
    assert torch.equal(rotation.rotate(strided, offsets, 0), rotation.rotate(strided.contiguous(), offsets, 0))
    assert rotation.rotate(strided[:0], offsets[:0], 0).shape == (0, HEADS, HEAD_DIM)


def test_rounded_frequencies_are_followed(tiny_llama: Any) -> None:
    """``model.bfloat16()`` rounds the frequencies that the model computes its keys with."""
    rotation = rotation_of(tiny_llama)
    q, offsets = torch.randn(2, HEADS, HEAD_DIM), torch.tensor([300, -1000])
    before = rotation.rotate(q, offsets, 0)
    tiny_llama.bfloat16()
    assert frequencies(tiny_llama, 0).dtype == torch.bfloat16
    after = rotation_of(tiny_llama).rotate(q, offsets, 0)
    assert relative_error(after, before) > 0.01
    assert relative_error(after, turned(q, -offsets, frequencies(tiny_llama, 0))) < 1e-6


# --- inside the model


@pytest.mark.usefixtures("_spy")
@pytest.mark.parametrize(
    ("delta", "bound"),
    # the model's own angles are rounded to float32, so that its keys at a large position are off by up to
    # position * 2^-24, here 1.2e-4: that, and not the rotation, is the second bound
    [(23, 1e-5), (1900, 2e-4)],
    ids=["near", "far"],
)
def test_scores_are_those_of_the_shifted_text(model: Any, delta: int, bound: float) -> None:
    """Against keys that the model itself computed at the shifted positions. Deeper layers too: attention looks at
    differences of positions only, so all of a text's states move as one."""
    text, question = random_ids(50), random_ids(9, seed=1)
    stored = states(model, text, 0)
    placed = states(model, text + question, delta)
    offsets = torch.full((len(question),), delta)
    for layer in range(LAYERS):
        q, k = placed[layer][0][len(text) :], placed[layer][1][: len(text)]
        assert q.shape == (len(question), HEADS, HEAD_DIM) and k.shape == (len(text), KV_HEADS, HEAD_DIM)
        want = scores(q, k)
        got = scores(rotation_of(model).rotate(q, offsets, layer), stored[layer][1])
        # in deeper layers also what the layers below made of the rounding
        assert relative_error(got, want) < (bound if layer == 0 else 10 * bound), layer
        # and the shift is no trifle: without it the scores are others
        assert relative_error(scores(q, stored[layer][1]), want) > 0.01


@pytest.mark.usefixtures("_spy")
@pytest.mark.parametrize("delta", [-40, 0, 61, 100_000])
def test_scores_are_those_of_turned_keys(model: Any, delta: int) -> None:
    """Every layer's real queries and keys, the keys turned forward by the oracle: exact at any distance."""
    text, question = random_ids(50), random_ids(9, seed=1)
    stored = states(model, text, 40)
    asked = states(model, question, 40 + len(text) + max(delta, 0))
    for layer in range(LAYERS):
        q, k = asked[layer][0], stored[layer][1]
        moved = turned(k, torch.full((len(text),), delta), frequencies(model, layer))
        got = scores(rotation_of(model).rotate(q, torch.full((len(question),), delta), layer), k)
        assert relative_error(got, scores(q, moved)) < 1e-6, layer


@pytest.mark.usefixtures("_spy")
def test_rows_of_several_readers(model: Any) -> None:
    """One segment read at several places in one call: before its stored position, at it and after it."""
    text = random_ids(30)
    start = 64
    stored = states(model, text, start)[0][1]
    deltas = [-64, 0, 17, -5]
    questions = [random_ids(3, seed=seed) for seed in range(len(deltas))]
    rows, want = [], []
    for delta, question in zip(deltas, questions, strict=True):
        q, k = states(model, text + question, start + delta)[0]
        rows.append(q[len(text) :])
        want.append(scores(rows[-1], k[: len(text)]))
    offsets = torch.tensor(deltas).repeat_interleave(3)
    got = scores(rotation_of(model).rotate(torch.cat(rows), offsets, 0), stored)
    assert relative_error(got, torch.cat(want, dim=1)) < 1e-5


# --- what is refused, and how long it is kept


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("llama", {"rope_type": "dynamic", "rope_theta": THETA, "factor": 2.0}),
        (
            "gemma3",
            {
                "full_attention": {"rope_type": "dynamic", "rope_theta": THETA, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
            },
        ),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "rope_theta": THETA,
                "short_factor": [1.0] * 16,
                "long_factor": [2.0] * 16,
                "original_max_position_embeddings": 1024,
            },
        ),
    ],
    ids=["dynamic", "dynamic-one-layer-type", "longrope"],
)
def test_frequencies_that_change_are_refused(family: str, parameters: dict[str, Any], request: Any) -> None:
    model = tiny_model(family, WINDOW if family == "gemma3" else None, rope_parameters=parameters)
    kind = request.node.callspec.id.split("-")[0]
    for refuse in (check_shiftable, rotation_of, QueryRotation):
        with pytest.raises(UnsupportedModelError, match=f"RoPE type '{kind}'"):
            refuse(model)


def test_phi3_takes_yarn_for_longrope() -> None:
    """transformers renames it, so that it is refused by the name under which it computes."""
    parameters = {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 1024,
    }
    with pytest.raises(UnsupportedModelError, match="'longrope'"):
        check_shiftable(tiny_model("phi3", rope_parameters=parameters))


def test_other_model_types_are_refused(tiny_llama: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="'gpt2'"):
        check_shiftable(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32)))
    rotary = tiny_llama.model.rotary_emb
    del tiny_llama.model.rotary_emb
    with pytest.raises(UnsupportedModelError, match="no rotary position embedding"):
        check_shiftable(tiny_llama)
    tiny_llama.model.rotary_emb = rotary
    check_shiftable(tiny_llama)
    del rotary.inv_freq
    with pytest.raises(UnsupportedModelError, match="'inv_freq'"):
        check_shiftable(tiny_llama)


def test_a_layer_that_is_not_there(tiny_llama: Any) -> None:
    with pytest.raises(IndexError):
        rotation_of(tiny_llama).rotate(torch.randn(1, HEADS, HEAD_DIM), torch.tensor([1]), LAYERS)


def test_without_a_head_too(family_model: Any) -> None:
    q, offsets = torch.randn(2, HEADS, HEAD_DIM), torch.tensor([5, -6])
    for layer in range(LAYERS):
        inner = rotation_of(family_model.model).rotate(q, offsets, layer)
        assert torch.equal(inner, rotation_of(family_model).rotate(q, offsets, layer))


def test_made_once_and_freed_with_its_model() -> None:
    model = tiny_model("llama")
    rotation = rotation_of(model)
    assert rotation_of(model) is rotation
    assert rotation_of(tiny_model("llama")) is not rotation
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
