"""Layers that can compute with our kernels: torch's own bits unless they are asked, and then the same numbers."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import random_ids, tiny_model
from torch import nn

from polykv.models.linear import FastLinear, Int8Linear, fast_linears, quantize_linears, use_fast_linears
from polykv_kernels import ops

FAMILIES = ("llama", "qwen2", "gemma3")  # qwen2 has biases


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The same weights twice: stock layers, and ours."""
    window = 24 if request.param == "gemma3" else None
    plain, turned = tiny_model(request.param, window), tiny_model(request.param, window)
    linears = sum(type(module) is nn.Linear for module in plain.modules())
    assert use_fast_linears(turned) == linears > 20
    assert use_fast_linears(turned) == 0
    return plain, turned


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of our operation."""
    seen: list[int] = []
    linear = ops.linear

    def counted(x: Any, weight: Any, bias: Any = None) -> Any:
        seen.append(x.numel() // x.shape[-1])
        return linear(x, weight, bias)

    monkeypatch.setattr(ops, "linear", counted)
    return seen


@torch.no_grad()
def test_outside_of_the_context_a_turned_model_is_bitwise_the_stock_one(
    pair: tuple[Any, Any], calls: list[int]
) -> None:
    plain, turned = pair
    ids = torch.tensor([random_ids(40)])
    assert torch.equal(plain(ids).logits, turned(ids).logits)
    with fast_linears():
        pass
    assert torch.equal(plain(ids).logits, turned(ids).logits)
    assert not calls


@torch.no_grad()
@pytest.mark.parametrize("always", [False, True])
def test_inside_the_logits_are_those_of_the_stock_model(pair: tuple[Any, Any], calls: list[int], always: bool) -> None:
    plain, turned = pair
    for rows in (1, 2, 40):
        ids = torch.tensor([random_ids(rows)])
        want = plain(ids).logits
        with fast_linears(always=always):
            got = turned(ids).logits
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert calls or not always


@torch.no_grad()
def test_always_gives_a_row_the_same_bits_in_any_company(calls: list[int]) -> None:
    layer = FastLinear(200, 90)
    x = torch.randn(130, 200)
    with fast_linears(always=True):
        whole = layer(x)
        for row in (0, 64, 129):
            assert torch.equal(layer(x[row : row + 1]), whole[row : row + 1])
    assert calls == [130, 1, 1, 1]


@torch.no_grad()
def test_contexts_nest_end_with_errors_and_belong_to_their_thread(calls: list[int]) -> None:
    layer, x = FastLinear(8, 8), torch.randn(300, 8)
    with fast_linears(always=True):
        with fast_linears():
            layer(x[:1])
        before = len(calls)
        layer(x)
        assert len(calls) == before + 1
        thread = threading.Thread(target=lambda: layer(x))
        thread.start()
        thread.join()
        assert len(calls) == before + 1
    with pytest.raises(KeyError), fast_linears(always=True):
        raise KeyError
    layer(x)
    assert len(calls) == before + 1


def test_gradients_are_torchs_inside_too(pair: tuple[Any, Any], calls: list[int]) -> None:
    ids = torch.tensor([random_ids(12)])
    gradients = []
    for model in pair:
        with fast_linears(always=True):
            model(ids).logits.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert not calls
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_other_dtypes_are_torchs_inside_too(calls: list[int]) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        layer, x = FastLinear(16, 8, dtype=dtype), torch.randn(3, 16, dtype=dtype)
        with fast_linears(always=True):
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert not calls


def test_only_exact_linears_are_turned_and_state_hooks_and_parameters_stay() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4, device="meta"))
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    state, parameters = model.state_dict(), list(model.parameters())
    assert use_fast_linears(model) == 1
    assert [type(m) for m in model] == [FastLinear, Own, nn.Embedding, nn.Linear]
    assert model.state_dict().keys() == state.keys()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(model[0], nn.Linear)
    model[0](torch.zeros(1, 4))
    assert seen == [1]


@torch.no_grad()
def test_copies_and_pickles_of_a_turned_model_are_turned_and_equal(pair: tuple[Any, Any]) -> None:
    plain, turned = pair
    ids = torch.tensor([random_ids(9)])
    want = plain(ids).logits
    saved = io.BytesIO()
    torch.save(turned, saved)
    saved.seek(0)
    for model in (copy.deepcopy(turned), pickle.loads(pickle.dumps(turned)), torch.load(saved, weights_only=False)):
        assert any(type(module) is FastLinear for module in model.modules())
        assert torch.equal(model(ids).logits, want)
    assert plain.state_dict().keys() == turned.state_dict().keys()
    plain.load_state_dict(turned.state_dict())


# ------------------------------------------------------------------------------------------------ int8 layers


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_model_computes_what_its_codes_stand_for(family: str) -> None:
    model = tiny_model(family, 24 if family == "gemma3" else None)
    meant = copy.deepcopy(model)
    linears = [module for module in meant.modules() if type(module) is nn.Linear]
    for module in linears:
        packed = ops.quantize_weights_int8(module.weight)
        weights = packed.codes * packed.scales.repeat_interleave(64, dim=1)[:, : module.in_features]
        module.weight = nn.Parameter(weights)  # of its own, also where it was tied
    embedding = model.get_input_embeddings().weight
    assert quantize_linears(model) == len(linears)
    assert quantize_linears(model) == 0
    assert model.get_input_embeddings().weight is embedding
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    for rows in (1, 40):
        ids = torch.tensor([random_ids(rows)])
        want = meant(ids).logits
        assert (model(ids).logits - want).abs().max() <= 1e-5 * want.abs().max()


def test_the_head_can_be_left_out_and_weights_are_freed() -> None:
    model = tiny_model("llama")
    head = model.get_output_embeddings()
    before = sum(p.nbytes for p in model.parameters())
    quantize_linears(model, head=False)
    assert model.get_output_embeddings() is head
    assert not any(p.requires_grad and "proj" in name for name, p in model.named_parameters())
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert held < 0.6 * before


@torch.no_grad()
def test_int8_layers_are_saved_copied_moved_and_cast() -> None:
    linear = nn.Linear(130, 7)
    layer = Int8Linear(ops.quantize_weights_int8(linear.weight), linear.bias)
    x = torch.randn(3, 130)
    want = layer(x)
    assert (want - linear(x)).norm() < 0.01 * want.norm()
    assert layer.state_dict().keys() == {"codes", "scales", "bias"}
    assert "group=64" in repr(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), want)
        other.codes.zero_()
        assert torch.equal(other(x), layer.bias.expand(3, 7))
        assert torch.equal(layer(x), want)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), want)
    half = copy.deepcopy(layer).half()
    assert half.scales.dtype == torch.float32 and half.codes.dtype == torch.int8
    assert half(x.half()).dtype == torch.float16
    assert (half(x.half()).float() - want).norm() < 0.01 * want.norm()
    assert layer.to("meta").packed.codes.device.type == "meta"


def test_gradients_go_through_an_int8_layer() -> None:
    linear = nn.Linear(70, 5, bias=False)
    layer = Int8Linear(ops.quantize_weights_int8(linear.weight))
    x = torch.randn(2, 70, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and (x.grad - linear.weight.sum(dim=0)).norm() < 0.01 * x.grad.norm()


def test_one_layer_in_two_places_stays_one() -> None:
    layer = nn.Linear(4, 4)
    model = nn.ModuleList([layer, nn.Sequential(layer, nn.Linear(4, 4))])
    assert quantize_linears(model) == 2
    assert model[0] is model[1][0]
