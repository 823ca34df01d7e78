"""PolyKV: ChatPolyKV in the graph; token times and ids are taken where the engine hands them over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from _end_to_end.measuring import PeakMemory, Row, Task, TokenTimes, run_graph, say
from _end_to_end.workload import Workload, eos_ids, make_workload
from polykv.engine.request import RequestHandle
from polykv_agents import ChatPolyKV
from polykv_agents.calls import CALL_KEYWORDS

BAN = -100.0
"""Added to the logits of end-of-sequence tokens, so that all answers have the same length."""


class Recorder:
    """Times and ids of the tokens of an agent's request, which is known by its prompt."""

    def __init__(self, workload: Workload) -> None:
        self._agent = {agent.prompt_ids: index for index, agent in enumerate(workload.agents)}
        self.reset()

    def reset(self) -> None:
        self.times = TokenTimes()
        self.answers: dict[int, list[int]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wraps the engine's end of a request: a thread that waits for each token would take time from the engine."""
        push, finish = RequestHandle.push, RequestHandle.finish

        def timed_push(handle: RequestHandle, *args: Any) -> None:
            agent = self._agent[handle.request.token_ids]
            # the last flush brings no token
            if len(self.times.times[agent]) < handle.request.sampling.max_tokens:
                self.times.token(agent)
            push(handle, *args)

        def kept_finish(handle: RequestHandle, completion: Any, *args: Any) -> None:
            self.answers[self._agent[handle.request.token_ids]] = list(completion.token_ids)
            finish(handle, completion, *args)

        RequestHandle.push, RequestHandle.finish = timed_push, kept_finish  # type: ignore[method-assign]
        try:
            yield
        finally:
            RequestHandle.push, RequestHandle.finish = push, finish  # type: ignore[method-assign]


def without_eos(llm: ChatPolyKV, workload: Workload) -> dict[str, Any]:
    """Keyword arguments of a call that never ends early."""
    if "logit_bias" in CALL_KEYWORDS:
        return {"logit_bias": dict.fromkeys(workload.eos_ids, BAN)}
    llm.engine._eos_ids = frozenset()  # the token may be chosen then, but ends nothing
    return {}


def chat_model(system: str, *, model: str, max_tokens: int, threads: int, max_batch: int) -> ChatPolyKV:
    """A chat model by the name of a system: a codec, alone or with a form of the weights (``k8v3-int8``) or
    ``k8v3-deterministic``."""
    codec, _, option = system.partition("-")
    options: dict[str, Any] = {}
    if option == "deterministic":
        options["deterministic"] = True
    elif option:
        options["weights"] = option
    return ChatPolyKV(
        model=model,
        codec=codec,
        temperature=0,
        max_tokens=max_tokens,
        num_threads=threads,
        max_batch=max_batch,
        prefix_cache=False,  # each run asks anew what the one before has asked
        **options,
    )


def measure(task: Task) -> Iterator[Row]:
    """``k8v3``, ``paper``, ``exact``: a codec; see :func:`chat_model`."""
    llm = chat_model(
        task.system,
        model=task.model,
        max_tokens=task.new_tokens,
        threads=task.threads,
        max_batch=max(task.agents),
    )
    try:
        llm.load()
        engine = llm.engine
        workload = make_workload(
            engine.tokenizer, eos_ids(engine.model, engine.tokenizer), task.tokens, max(task.agents), task.new_tokens
        )
        call = without_eos(llm, workload)
        with llm.share("Hello") as hello:  # touches every weight, compiles and packs what is compiled and packed once
            llm.with_context(hello).invoke("Hello", max_tokens=2)
        memory, recorder = PeakMemory(), Recorder(workload)
        for agents in task.agents:
            say(f"{task.system}: {agents} agents")
            yield one_row(task, llm, workload, agents, call, memory, recorder)
    finally:
        llm.close()


def one_row(
    task: Task,
    llm: ChatPolyKV,
    workload: Workload,
    agents: int,
    call: dict[str, Any],
    memory: PeakMemory,
    recorder: Recorder,
) -> Row:
    row = Row(task.system, agents, workload.context_tokens)
    readers: list[ChatPolyKV] = []
    started = 0.0
    recorder.reset()

    def read() -> None:
        nonlocal started
        started = time.perf_counter()
        readers.append(llm.with_context(llm.share(workload.document)))
        row.cold_s = time.perf_counter() - started

    def ask(index: int, **more: Any) -> None:
        recorder.times.ask(index)
        readers[0].invoke(workload.agents[index].messages, **call, **more)

    with recorder.recording():
        with memory.watch():
            row.wall_s = run_graph(read, ask, agents, max_concurrency=agents + 1)
        row.peak_extra_bytes = memory.extra
        row.first_ttft_s = recorder.times.first - started
        row.slowest_ttft_s = recorder.times.slowest_ttft
        row.decode_tokens_per_s = recorder.times.decode_rate()
        row.answers = [recorder.answers[index] for index in range(agents)]
        context = readers[0].shared_context
        assert context is not None
        if context.num_tokens != workload.context_tokens:
            raise RuntimeError(f"the pool holds {context.num_tokens} tokens, not {workload.context_tokens}")
        row.live_bytes = context.num_bytes + llm.engine.stats().peak_tail_bytes
        alone = []
        for index in workload.later:
            ask(index, max_tokens=1)
            alone.append(recorder.times.ttft(index))
        row.next_ttft_s = statistics.median(alone)
    context.release()
    deadline = time.monotonic() + 5
    while llm.pool.segments and time.monotonic() < deadline:  # the engine ends its leases after it has answered
        time.sleep(0.01)
    if llm.pool.segments:
        raise RuntimeError("the context is still in the pool: the next build would not be cold")
    return row
