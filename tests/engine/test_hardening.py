"""What an adversary found: each of these once hung, lied or died."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_model
from torch import nn

from polykv import Engine, SamplingParams, SharedKVPool, attach
from polykv.engine.request import Request
from polykv.engine.sampling import NucleusLogitsWarper
from polykv.errors import InvalidRequestError, UnknownCodecError
from polykv.models.attention import exclusively

ROOT = Path(__file__).parents[2]
DOCUMENT = random_ids(60, seed=1)


def params(tokens: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=tokens)


class Weird(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_be_copied_reaches_everybody_who_waits(tiny_llama: Any, make_engine: Any) -> None:
    def fail(*args: object) -> None:
        raise Weird(1, 2)

    engine = make_engine(tiny_llama)
    hook = tiny_llama.model.layers[0].mlp.register_forward_pre_hook(fail)
    handles = [engine.submit(Request((*DOCUMENT, i), None, params(), shared_tokens=50)) for i in range(3)]
    for handle in handles:
        with pytest.raises(Weird, match="1 and 2"):
            handle.result(30)
    hook.remove()
    assert len(engine.generate(DOCUMENT, params()).result(60).token_ids) == 3


@pytest.mark.parametrize("option", ["num_threads", "max_batch", "max_waiting", "token_budget"])
@pytest.mark.parametrize("bad", [1.5, "2", True])
def test_counts_that_are_none(tiny_llama: Any, tokenizer: Any, option: str, bad: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{option} must be an integer, got"):
        Engine(tiny_llama, tokenizer, **{option: bad})  # type: ignore[arg-type]


def test_counts_without_a_sense(tiny_llama: Any, tokenizer: Any) -> None:
    with pytest.raises(InvalidRequestError, match="num_threads must be at most 4096, got 1099511627776"):
        Engine(tiny_llama, tokenizer, num_threads=2**40)
    with pytest.raises(InvalidRequestError, match="token_budget must be an integer, got None"):
        Engine(tiny_llama, tokenizer, token_budget=None)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_in_the_middle_of_a_step_can_have_an_engine_of_its_own() -> None:
    code = (
        "import sys, os, threading; sys.path.insert(0, 'tests')\n"
        "import torch; torch.set_num_threads(1)\n"
        "from helpers import *; from polykv import Engine, SamplingParams\n"
        "model, tok = tiny_model('llama'), tiny_tokenizer()\n"
        "engine = Engine(model, tok)\n"
        "forward, inside, go_on = engine._runner.forward, threading.Event(), threading.Event()\n"
        "hook = model.model.layers[0].register_forward_pre_hook(lambda *a: (inside.set(), go_on.wait(60)) and None)\n"
        "handle = engine.generate(random_ids(20), SamplingParams(max_tokens=2))\n"
        "assert inside.wait(30)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    hook.remove()\n"
        "    got = Engine(model, tok).generate(random_ids(20), SamplingParams(max_tokens=2)).result(20)\n"
        "    os._exit(0 if len(got.token_ids) == 2 else 1)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "go_on.set(); handle.result(30)\n"
        "print('child', os.waitstatus_to_exitcode(status))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "child 0", done.stderr


class TestTrainingMode:
    def test_each_module_gets_its_own_mode_back(self, make_engine: Any) -> None:
        model = tiny_model("phi3", resid_pdrop=0.5)
        engine = make_engine(model)
        model.train()
        model.model.layers[0].eval()
        before = [module.training for module in model.modules()]
        engine.generate(DOCUMENT, params()).result(60)
        engine.close()
        assert [module.training for module in model.modules()] == before

    def test_dropout_of_a_part_in_training_reaches_no_answer(self, make_engine: Any) -> None:
        model = tiny_model("phi3", resid_pdrop=0.5)
        engine = make_engine(model)
        want = engine.generate(DOCUMENT, params(8)).result(60).token_ids
        model.model.train()
        assert not model.training
        assert engine.generate(DOCUMENT, params(8)).result(60).token_ids == want

    def test_nothing_is_in_training_inside(self) -> None:
        model = tiny_model("llama").train()
        with exclusively(model):
            assert not any(module.training for module in model.modules())
        assert all(module.training for module in model.modules())


class Wrapped(nn.Module):
    """A low-rank update beside a layer, as adapters make them."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + (x @ self.a.T) @ self.b.T
        return out


def test_unknown_layers_are_not_taken_for_invariant(make_engine: Any) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj = Wrapped(layer.self_attn.q_proj)
    assert make_engine(model, deterministic=True)._runner.one_by_one


def test_an_activation_with_parameters_keeps_their_names(make_engine: Any) -> None:
    model = tiny_model("llama", hidden_act="prelu")
    names = set(model.state_dict())
    assert make_engine(model, deterministic=True)._runner.one_by_one
    assert set(model.state_dict()) == names


def test_the_nucleus_does_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    rows = [torch.randn(1, 49152) * 2 for _ in range(40)]
    threads = torch.get_num_threads()
    try:
        masses = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            masses.append([NucleusLogitsWarper(p)(None, row) for row in rows for p in (0.3, 0.6, 0.9)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*masses, strict=True))


def test_a_model_compiled_in_place_runs_as_it_is(make_engine: Any) -> None:
    model = tiny_model("llama")
    want = make_engine(model).generate(DOCUMENT, params()).result(60).token_ids
    model.compile(backend="eager")
    assert make_engine(model).generate(DOCUMENT, params()).result(60).token_ids == want


def test_one_release_too_many_takes_nothing_from_another_holder(tiny_llama: Any, make_engine: Any) -> None:
    engine = make_engine(tiny_llama)
    first = engine.share(DOCUMENT)
    engine.pool.release(first)
    second = engine.share(DOCUMENT)
    engine.pool.release(first)
    assert len(engine.generate([*DOCUMENT, 5], params(), second).result(60).token_ids) == 3


class TestCallbacks:
    def test_one_that_builds_what_the_engine_is_building(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama, token_budget=16)
        errors: list[Exception] = []

        def build(report: Any) -> None:
            if report.build_rows and not errors:
                try:
                    engine.pool.build(DOCUMENT)
                except InvalidRequestError as error:
                    errors.append(error)

        engine.add_step_callback(build)
        engine.share(DOCUMENT)
        assert "would wait for itself" in str(errors[0])

    def test_one_that_exits(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama)

        def leave(report: Any) -> None:
            raise SystemExit(3)

        engine.add_step_callback(leave)
        assert len(engine.generate(DOCUMENT, params()).result(30).token_ids) == 3

    def test_one_that_blocks_does_not_keep_the_interpreter(self) -> None:
        code = (
            "import sys, threading, time; sys.path.insert(0, 'tests')\n"
            "from helpers import *; from polykv import Engine, SamplingParams\n"
            "from polykv.engine import engine as module\n"
            "module.EXIT_SECONDS = 0.5\n"
            "engine = Engine(tiny_model('llama'), tiny_tokenizer())\n"
            "engine.add_step_callback(lambda report: threading.Event().wait())\n"
            "engine.generate(random_ids(9), SamplingParams(max_tokens=2)); time.sleep(0.5)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0


def test_a_build_that_waits_for_another_thread_steps_aside(tiny_llama: Any, make_engine: Any) -> None:
    engine = make_engine(tiny_llama)
    paused = engine.pool.build_steps(DOCUMENT)
    next(paused)
    waiting = threading.Thread(target=engine.share, args=(DOCUMENT,))
    waiting.start()
    time.sleep(0.1)
    assert engine.share(DOCUMENT[:30]).num_tokens == 30
    for _ in paused:
        pass
    waiting.join(30)
    assert not waiting.is_alive()


class TestBadArguments:
    @pytest.mark.parametrize("bad", [[1.5, 4], ["a"], [None], "abc", 5, None, [4, [5]]])
    def test_token_ids(self, tiny_llama: Any, make_engine: Any, bad: Any) -> None:
        engine = make_engine(tiny_llama)
        for call in (engine.generate, engine.share, engine.pool.build, Request):
            with pytest.raises(InvalidRequestError, match="token_ids must be a sequence of integers"):
                call(bad)

    def test_the_rest_of_a_request(self, tiny_llama: Any, make_engine: Any) -> None:
        engine = make_engine(tiny_llama)
        with pytest.raises(InvalidRequestError, match="sampling must be a SamplingParams"):
            engine.generate(DOCUMENT, {"max_tokens": 3})
        with pytest.raises(InvalidRequestError, match="segment must be a KVSegment"):
            engine.generate(DOCUMENT, None, "x")
        with pytest.raises(UnknownCodecError, match=r"unknown codec \[\]"):
            engine.submit(Request(tuple(DOCUMENT), shared_tokens=9, codec=[]))  # type: ignore[arg-type]

    @pytest.mark.parametrize("ids", [(2, 3), torch.tensor([2, 3]), [2, 3]])
    def test_end_of_sequence_ids_in_any_form(self, make_engine: Any, ids: Any) -> None:
        model = tiny_model("llama")
        model.generation_config.eos_token_id = ids
        assert {2, 3} <= make_engine(model)._eos_ids


def test_attach_leaves_the_pool_usable_alone(tiny_llama: Any) -> None:
    attach(tiny_llama)
    assert SharedKVPool.from_token_ids(tiny_llama, tuple(DOCUMENT)).segment.num_tokens == 60
