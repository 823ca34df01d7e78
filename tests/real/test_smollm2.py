"""The stated properties on SmolLM2-135M-Instruct. Reduced counts by default, the full ones with `make test-full`."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import FULL, assert_same_tokens, decoded_cache, demo_document, greedy, relative_error

from polykv import Engine, SamplingParams, SharedKVPool, load_model
from polykv.engine.request import Request, RequestHandle
from polykv.engine.runner import ModelRunner
from polykv.engine.scheduler import Batch, Sequence, Work
from polykv.evaluation import compare_codec, live_tensor_bytes, resident_bytes
from polykv_agents import ChatPolyKV
from polykv_agents.calls import plan_call

ROLES = (
    ("You are a lawyer.", "Who carries the risk?"),
    (
        "You are an accountant. Answer in numbers wherever you can, and name the sums.",
        "Who inherits how much?",
    ),
    (
        "You are a historian of English country houses and of the law of property.",
        "Where does the family live, and who owns the house by law?",
    ),
    ("You write headlines for a daily newspaper in London.", "What happened?"),
    ("You are a judge. Weigh both sides, one after the other, before you decide.", "Is the promise binding?"),
    ("You are a poet and a friend of the family.", "Describe the mood in one line, without naming anybody."),
)


@pytest.fixture(scope="module")
def llm(real_model: tuple[Any, Any]) -> Iterator[ChatPolyKV]:
    model, tokenizer = real_model
    chat = ChatPolyKV(model=model, tokenizer=tokenizer, max_tokens=24)
    yield chat
    chat.close()


@pytest.fixture(scope="module")
def document(real_model: tuple[Any, Any]) -> str:
    """The demo's document, whole in the full run, else its first thousand tokens or so."""
    text = demo_document()
    return text if FULL else text[: 4 * 1000]


def messages(index: int) -> list[tuple[str, str]]:
    role, question = ROLES[index % len(ROLES)]
    return [("system", role), ("human", question)]


def test_six_agents_together_equal_generate_on_the_same_prompts(llm: ChatPolyKV, document: str) -> None:
    engine = llm.engine
    with llm.share(document, codec="exact") as context:
        agent = llm.with_context(context)
        prompts = [
            plan_call(agent, agent._convert_input(messages(i)).to_messages(), None, {}).prompt.ids for i in range(6)
        ]
        assert len({len(prompt) for prompt in prompts}) == 6
        segment, _ = context.reading()
        handles = [engine.generate(prompt, SamplingParams(max_tokens=24), segment) for prompt in prompts]
        answers = [handle.result() for handle in handles]
        texts = [message.content for message in agent.batch([messages(i) for i in range(6)])]
    for prompt, answer, text in zip(prompts, answers, texts, strict=True):
        want = greedy(engine.model, prompt, 24)
        assert_same_tokens(engine.model, prompt, answer.token_ids, want)
        if list(answer.token_ids) == want:
            assert text == engine.tokenizer.decode(want, skip_special_tokens=True)


@pytest.fixture(scope="module", params=["paper", "k8v3"])
def packed(request: pytest.FixtureRequest, real_model: tuple[Any, Any], document: str) -> tuple[SharedKVPool, Any]:
    """A packed pool of the document, and a dense cache filled with what it decodes to."""
    model, tokenizer = real_model
    pool = SharedKVPool.from_token_ids(model, tokenizer.encode(document), request.param, tokenizer=tokenizer)
    return pool, decoded_cache(pool.segment)


def run(runner: ModelRunner, work: list[Work]) -> torch.Tensor:
    for part in work:
        part.sequence.tail.reserve(part.sequence.tail.length + part.rows)
    return runner.forward(Batch(work))


@pytest.mark.parametrize("agents", [1, 4, 15])
def test_fused_logits_equal_a_dense_cache_of_the_decoded_pool(packed: tuple[SharedKVPool, Any], agents: int) -> None:
    pool, dense = packed
    model, tokenizer = pool.model, pool.tokenizer
    context = pool.segment.token_ids.tolist()
    questions = [tokenizer.encode(" and then" * (1 + i) + f" the {i}th man said") for i in range(agents)]
    assert len({len(q) for q in questions}) == agents
    follower = tokenizer.encode(" that")

    # prompts of mixed lengths in one forward, then one decode step of all of them together
    runner = ModelRunner(model)
    handles = [RequestHandle(Request((*context, *q), pool.segment)) for q in questions]
    sequences = [Sequence(h, pool.lease(pool.segment), model, tokenizer, frozenset()) for h in handles]
    batch = [Work(s, len(s.pending)) for s in sequences]
    prefill = run(runner, batch)
    for work in batch:
        work.sequence.advance(work.rows)
        work.sequence.pending = list(follower)
    decode = run(runner, [Work(s, 1) for s in sequences])

    for index, question in enumerate(questions):
        with torch.no_grad():
            own = torch.tensor([[*question, *follower]])
            oracle = model(own, cache=dense, logits_to_keep=2).logits[0]
        dense.crop(-own.shape[1])
        assert relative_error(prefill[index], oracle[0]) <= 1e-4
        assert relative_error(decode[index], oracle[1]) <= 1e-4
    for sequence in sequences:
        sequence.release()
    assert pool.num_leases == 0


def settled_bytes(weights: list[torch.Tensor]) -> int:
    """Live bytes once what other tests have left is gone: cycles, and engines whose threads give up after some seconds."""
    seen: list[int] = []
    while len(seen) < 30 and (len(seen) < 4 or len(set(seen[-4:])) > 1):
        gc.collect()
        seen.append(live_tensor_bytes(exclude=weights))
        time.sleep(1.0)
    return seen[-1]


def test_memory_of_live_agents(real_model: tuple[Any, Any]) -> None:
    """Walks every tensor alive while N agents decode over a 4k context."""
    model, tokenizer = real_model
    context = tokenizer.encode(demo_document())[:4096]
    assert len(context) == 4096
    weights = [*model.parameters(), *model.buffers()]
    idle = settled_bytes(weights)
    pool = SharedKVPool.from_token_ids(model, context, tokenizer=tokenizer)
    engine = Engine(model, tokenizer, pool=pool, prefix_cache=False)  # tails are measured, and not what becomes of them
    pool_bytes = live_tensor_bytes(exclude=weights) - idle
    assert pool_bytes == pytest.approx(pool.segment.num_bytes, rel=0.01)

    own_tokens, generated = 60, 30  # measured when every agent has at least 30 tokens
    measured: dict[int, tuple[int, int, int]] = {}
    forward = engine._runner.forward
    expected = 0

    def measuring(batch: Any) -> Any:
        if len(batch.work) == expected not in measured and all(
            len(w.sequence.generated) >= generated for w in batch.work
        ):
            tail_tokens = sum(w.sequence.tail.length for w in batch.work)
            resident = resident_bytes()
            assert resident is not None
            measured[expected] = (live_tensor_bytes(exclude=weights) - idle, tail_tokens, resident)
        return forward(batch)

    engine._runner.forward = measuring  # type: ignore[method-assign]
    prompt = context + tokenizer.encode(" word" * own_tokens)
    assert len(prompt) == len(context) + own_tokens
    params = SamplingParams(max_tokens=36)
    for expected in (1, 5, 15):
        handles = [engine.generate(prompt, params, pool.segment) for _ in range(expected)]
        assert all(len(handle.result().token_ids) == params.max_tokens for handle in handles)
    engine.close()
    assert set(measured) == {1, 5, 15}
    per_token = 2 * 30 * 3 * 64 * 4  # keys and values, layers, KV heads, head_dim, float32
    one, _, resident_one = measured[1]
    for agents, (live, tail_tokens, _) in measured.items():
        assert own_tokens + generated - 1 <= tail_tokens / agents <= 96
        assert live - pool_bytes <= 1.1 * tail_tokens * per_token, f"{agents} agents"
        if agents > 1:
            assert (live - one) / (agents - 1) <= 1.1 * tail_tokens / agents * per_token
    private_float32 = 2 * pool.segment.dense_bytes
    live, _, resident = measured[15]
    assert live <= 0.05 * 15 * private_float32
    # allocator and thread buffers blur the resident set, but fourteen private caches would be 2.6 GB
    assert resident - resident_one <= 14 * 1.1 * 96 * per_token + 150e6


def test_company_and_arrival_order_do_not_change_an_answer(llm: ChatPolyKV, document: str) -> None:
    count = 15
    asked = [[("system", ROLES[i % 6][0]), ("human", f"{ROLES[i % 6][1]} ({i})")] for i in range(count)]
    picked = range(count) if FULL else (0, 4, 14)
    with llm.share(document) as context:
        agent = llm.with_context(context)
        alone = {i: agent.invoke(asked[i]).content for i in picked}
        together = [m.content for m in agent.batch(asked)]
        backwards = [m.content for m in agent.batch(asked[::-1])][::-1]
        neighbour = agent.stream([("human", "Tell me everything.")], max_tokens=500)
        next(neighbour)
        neighbour.close()
        after = {i: agent.invoke(asked[i]).content for i in picked}
    for i in picked:
        assert alone[i] == together[i] == backwards[i] == after[i]
    assert llm.pool.num_leases == 0


def test_sixteen_threads_invoke_one_model(llm: ChatPolyKV, document: str) -> None:
    with llm.share(document) as context:
        agent = llm.with_context(context)
        want = {i: agent.invoke(messages(i)).content for i in range(6)}
        got: dict[int, Any] = {}

        def ask(index: int) -> None:
            try:
                got[index] = agent.invoke(messages(index)).content
            except Exception as error:
                got[index] = error

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {i: want[i % 6] for i in range(16)}
    assert llm.pool.num_leases == 0


def test_a_document_is_shared_once_and_read_by_all(llm: ChatPolyKV, document: str) -> None:
    before = llm.pool.stats()
    with llm.share(document) as context, llm.share(document) as again:
        assert context == again
        agent = llm.with_context(context)
        for index in range(3):
            usage = agent.invoke(messages(index), max_tokens=2).usage_metadata
            assert usage is not None
            # and of the question what the questions before it began with
            assert 0 <= usage["input_token_details"]["cache_read"] - context.num_tokens < 20
            assert 10 < usage["input_tokens"] - context.num_tokens < 60
    after = llm.pool.stats()
    assert after.builds - before.builds == 1
    assert after.hits - before.hits == 4


def test_codecs_rank_as_published(real_model: tuple[Any, Any]) -> None:
    model, tokenizer = real_model
    ids = tokenizer.encode(demo_document())
    size = 2048 if FULL else 1024
    paper, k8v3 = compare_codec(model, ids[:size], ids[size : size + 256], ["paper", "k8v3"])
    assert paper.ratio >= 2.70
    assert k8v3.ratio >= 2.70
    assert 0 < k8v3.kl < paper.kl < 0.02
    assert k8v3.top1_agreement > 0.93


def test_int8_weights_lose_little(real_model: tuple[Any, Any]) -> None:
    model, tokenizer = real_model
    small, _ = load_model("smollm2-135m", weights="int8")
    ids = torch.tensor([tokenizer.encode(demo_document())[:2000]])
    with torch.inference_mode():
        want, got = (m(ids).logits[0].log_softmax(-1) for m in (model, small))
        kl = float((want.exp() * (want - got)).sum(-1).mean())
    held, before = (sum(x.nbytes for x in {*m.parameters(), *m.buffers()}) for m in (small, model))
    print(f"int8 weights: KL {kl:.5f} nats, {held / 1e6:.0f} MB instead of {before / 1e6:.0f} MB")
    assert 1e-5 < kl <= 0.005
    assert held < before / 2
