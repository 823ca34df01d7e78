"""No reader ever holds a dense layer: every operation of a reader's step is watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from polykv import Engine, SamplingParams, SharedKVPool
from polykv.evaluation import live_tensor_bytes

CONTEXT = 2000
DENSE_LAYER = 2 * CONTEXT * 32  # KV heads x tokens x head_dim, the elements of one dense key tensor


class LargestFloat(TorchDispatchMode):
    """Records the largest floating-point tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("codec", ["paper", "k8v3"])
def test_no_step_of_a_reader_makes_a_dense_layer(tiny_llama: Any, tokenizer: Any, codec: str) -> None:
    engine = Engine(tiny_llama, tokenizer)
    context = random_ids(CONTEXT)
    segment = engine.share(context, codec)
    watch = LargestFloat()
    forward = engine._runner.forward

    def watched(batch: Any) -> Any:
        with watch:
            return forward(batch)

    engine._runner.forward = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=6)
    handles = [engine.generate(context + random_ids(4 + i, seed=i), params, segment) for i in range(4)]
    for handle in handles:
        handle.result(60)
    engine.close()
    assert 0 < watch.elements < DENSE_LAYER / 2


@pytest.mark.parametrize("codec", ["paper", "k8v3"])
def test_plain_generate_makes_no_dense_layer_either(tiny_llama: Any, codec: str) -> None:
    pool = SharedKVPool.from_token_ids(tiny_llama, random_ids(CONTEXT), codec=codec)
    ids = torch.tensor([random_ids(5)])
    with LargestFloat() as watch, torch.no_grad():
        tiny_llama(ids, cache=pool.new_cache())
    assert 0 < watch.elements < DENSE_LAYER / 2


def test_the_watch_sees_a_dense_layer(tiny_llama: Any) -> None:
    from polykv_kernels import ops

    segment = SharedKVPool.from_token_ids(tiny_llama, random_ids(CONTEXT)).segment
    with LargestFloat() as watch:
        ops.decode(segment.layers[0])
    assert watch.elements >= DENSE_LAYER


def test_the_walk_finds_every_tensor_once() -> None:
    before = live_tensor_bytes()
    kept = torch.zeros(1000, dtype=torch.float32)
    views = [kept[10:], kept.view(10, 100)]
    assert live_tensor_bytes() - before == 4000
    assert live_tensor_bytes(exclude=[kept]) - before == 0
    del kept, views
    assert live_tensor_bytes() == before


def test_a_build_never_makes_a_square_of_the_context() -> None:
    tokens = 6000
    model = tiny_model("llama", max_position_embeddings=8192)
    with LargestFloat() as watch:
        pool = SharedKVPool.from_token_ids(model, random_ids(tokens))
    assert pool.segment.num_tokens == tokens
    heads, chunk = 4, 512
    assert watch.elements <= heads * chunk * tokens  # one chunk's scores at most
