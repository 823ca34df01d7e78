"""deterministic=True: the same bits in any company, in any chunks, on any number of threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_model

from polykv import Engine, SamplingParams
from polykv.engine.request import Request
from polykv.models.invariant import InvariantActivation, why_not_invariant
from polykv.models.linear import fast_linears
from polykv_kernels import ops

DOCUMENT = random_ids(300, seed=1)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=5, logprobs=True, top_logprobs=3)


@pytest.fixture
def make_deterministic(make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    return functools.partial(make_engine, deterministic=True)


def outcome(completion: Any) -> tuple[Any, ...]:
    return completion.token_ids, tuple((c.logprob, c.top_logprobs) for c in completion.logprobs)


def check_company(engine: Engine, codec: str) -> None:
    segment = engine.share(DOCUMENT, codec)
    prompts = [(DOCUMENT if i % 3 else []) + random_ids(1 + 13 * i, seed=20 + i) for i in range(9)]
    requests = [Request(tuple(p), segment if i % 3 else None, SAMPLED) for i, p in enumerate(prompts)]
    alone = [outcome(engine.submit(r).result(60)) for r in requests]
    together = [engine.submit(r) for r in requests]
    assert [outcome(h.result(60)) for h in together] == alone
    backwards = [engine.submit(r) for r in reversed(requests)]
    assert [outcome(h.result(60)) for h in backwards][::-1] == alone
    assert engine.stats().peak_running > 1


@pytest.mark.parametrize("codec", ["exact", "k8v3"])
def test_company_does_not_change_a_bit(family_model: Any, make_deterministic: Any, codec: str) -> None:
    engine = make_deterministic(family_model)
    assert not engine._runner.one_by_one, why_not_invariant(family_model)
    check_company(engine, codec)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_do_threads_and_chunks(tiny_llama: Any, make_deterministic: Any, threads: int) -> None:
    prompt = Request(tuple(random_ids(700, seed=3)), None, SAMPLED)
    want = outcome(make_deterministic(tiny_llama).submit(prompt).result(60))
    for budget in (512, 64, 7):
        engine = make_deterministic(tiny_llama, token_budget=budget, num_threads=threads)
        assert outcome(engine.submit(prompt).result(60)) == want


def test_a_context_is_stored_alike_whatever_runs_beside_its_build(tiny_llama: Any, make_deterministic: Any) -> None:
    quiet, busy = make_deterministic(tiny_llama), make_deterministic(tiny_llama)
    want = quiet.share(random_ids(900, seed=7), "k8v3")
    noise = [busy.generate(random_ids(30 + i), SamplingParams(max_tokens=200)) for i in range(3)]
    next(iter(noise[0]))
    got = busy.share(random_ids(900, seed=7), "k8v3")
    for handle in noise:
        handle.cancel()
    assert busy.stats().steps > 4, "the build took no turns"
    for a, b in zip(want.layers, got.layers, strict=True):
        assert all(torch.equal(x, b.tensors()[name]) for name, x in a.tensors().items())


def test_a_width_that_fills_no_vectors(make_deterministic: Any) -> None:
    model = tiny_model("llama", intermediate_size=37)
    check_company(make_deterministic(model), "exact")


def test_int8_weights_too(make_deterministic: Any) -> None:
    from polykv.models.linear import quantize_linears

    model = tiny_model("llama")
    quantize_linears(model)
    engine = make_deterministic(model)
    assert not engine._runner.one_by_one
    check_company(engine, "k8v3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_invariant_kernels_every_request_has_its_own_forward(
    make_deterministic: Any, caplog: Any, dtype: torch.dtype
) -> None:
    model = tiny_model("llama").to(dtype)
    with ops.use_backend("reference"):
        engine = make_deterministic(model, token_budget=16)
        assert engine._runner.one_by_one
        assert "a forward of its own" in caplog.text
        check_company(engine, "exact")


def test_the_activation_is_the_models_own_outside_of_such_an_engine(tiny_llama: Any, make_deterministic: Any) -> None:
    make_deterministic(tiny_llama)
    wrapped = [m for m in tiny_llama.modules() if isinstance(m, InvariantActivation)]
    assert len(wrapped) == 3
    make_deterministic(tiny_llama)
    assert len([m for m in tiny_llama.modules() if isinstance(m, InvariantActivation)]) == 3
    x = torch.randn(11, 96)
    assert torch.equal(wrapped[0](x), wrapped[0].activation(x))
    with fast_linears(always=True):
        whole = wrapped[0](x)
        assert torch.allclose(whole, wrapped[0].activation(x), atol=1e-6)
        assert all(torch.equal(wrapped[0](x[i : i + 1]), whole[i : i + 1]) for i in range(11))
