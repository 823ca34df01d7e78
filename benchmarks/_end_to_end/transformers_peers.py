"""transformers: sequential `generate`, batched DynamicCache and StaticCache, continuous batching.

The batched caches get what a competent user would give them: the context is prefilled once, in one row, its keys and
values are copied to every agent's row, and the questions and all further tokens are one forward for all agents. The
loop around the model is by hand, which is faster than `generate`.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from _end_to_end.measuring import PeakMemory, Row, Task, TokenTimes, not_run, run_graph, say
from _end_to_end.workload import Workload, eos_ids, make_workload
from polykv import load_model
from polykv.evaluation import live_tensor_bytes

SEQUENTIAL_AGENTS = 2
"""Agents that the sequential system really runs; the others take the same time again."""
FEW_STEPS = 8
"""Steps that are really run with many agents where each copies all keys and values once more."""
MANY_AGENTS = 8
PAGE = 32
"""Tokens of a page of continuous batching: prefixes are shared in whole pages, so the default of 256 shares less."""
BATCH_TOKENS = 512
"""Rows of one of its forwards, as in our engine; its attention mask has as many rows as that."""


class Timed(BaseStreamer):
    """A streamer that notes the time of each token, after the prompt, which `generate` hands over first."""

    def __init__(self, times: TokenTimes, agent: int) -> None:
        self._times, self._agent, self._prompt_seen = times, agent, False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._times.token(self._agent)
        self._prompt_seen = True

    def end(self) -> None:
        pass


class Loaded:
    """A model with its workload, warmed up."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        self.model: Any
        self.model, self.tokenizer = load_model(task.model)
        self.workload: Workload = make_workload(
            self.tokenizer, eos_ids(self.model, self.tokenizer), task.tokens, max(task.agents), task.new_tokens
        )
        with torch.inference_mode():
            self.model(torch.tensor([self.workload.context_ids[:8]]), logits_to_keep=1)
        self.memory = PeakMemory()
        self.weights = [*self.model.parameters(), *self.model.buffers()]


def sequential(task: Task) -> Iterator[Row]:
    """One `generate` after the other, each with its own prefill and cache."""
    loaded = Loaded(task)
    workload, times = loaded.workload, TokenTimes()
    run = min(SEQUENTIAL_AGENTS, max(task.agents))
    answers, ends = [], []
    say(f"sequential: {run} agents one after the other")

    def ask(index: int) -> None:
        times.ask(index)
        answers.append(_generate(loaded, index, streamer=Timed(times, index)))
        ends.append(time.perf_counter())

    with loaded.memory.watch():
        started = time.perf_counter()
        run_graph(lambda: None, ask, run, max_concurrency=1)
    seconds = (ends[-1] - started) / run
    ttft = [times.ttft(index) for index in range(run)]
    gaps = [b - a for t in times.times.values() for a, b in itertools.pairwise(t)]
    for agents in task.agents:
        row = Row("sequential", agents, workload.context_tokens, first_ttft_s=ttft[0], next_ttft_s=ttft[-1])
        row.cold_s = ttft[0]
        row.decode_tokens_per_s = 1 / statistics.median(gaps)
        row.peak_extra_bytes = loaded.memory.extra
        row.wall_s = seconds * agents
        row.slowest_ttft_s = seconds * (agents - 1) + ttft[-1]
        row.extrapolated = ["slowest_ttft_s", "wall_s"] if agents > run else []
        row.note = f"{run} agents run" if agents > run else ""
        row.answers = answers[:agents]
        yield row


def _generate(loaded: Loaded, index: int, **options: Any) -> list[int]:
    """`generate` with as many tokens as everybody, greedily."""
    workload = loaded.workload
    prompt = torch.tensor([workload.agents[index].prompt_ids])
    out = loaded.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=workload.new_tokens,
        max_new_tokens=workload.new_tokens,
        pad_token_id=workload.eos_ids[0],
        **options,
    )
    answer: list[int] = out[0, prompt.shape[1] :].tolist()
    return answer


class Batch:
    """Agents that decode in lockstep over a cache with a row for each."""

    def __init__(self, loaded: Loaded, cache: Any, agents: int, times: TokenTimes) -> None:
        self._loaded, self._cache, self._times = loaded, cache, times
        self._agents = agents
        self._position = loaded.workload.context_tokens
        self.answers: list[list[int]] = [[] for _ in range(agents)]
        self.margins: list[list[float]] = [[] for _ in range(agents)]
        context = self._position
        self._ids = torch.tensor([agent.prompt_ids[context:] for agent in loaded.workload.agents[:agents]])

    @torch.inference_mode()
    def step(self) -> None:
        rows = self._ids.shape[1]
        positions = torch.arange(self._position, self._position + rows)[None].expand(self._agents, -1)
        out = self._loaded.model(self._ids, position_ids=positions, cache=self._cache, logits_to_keep=1)
        logits = out.logits[:, -1]
        logits[:, list(self._loaded.workload.eos_ids)] = -torch.inf
        best = logits.topk(2, dim=-1)
        self._ids = best.indices[:, :1]
        self._position += rows
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        for agent, (token, margin) in enumerate(zip(self._ids[:, 0].tolist(), margins, strict=True)):
            self.answers[agent].append(token)
            self.margins[agent].append(margin)
            self._times.token(agent)


@torch.no_grad()
def _prefill(loaded: Loaded) -> DynamicCache:
    cache = DynamicCache(config=loaded.model.config)
    loaded.model(torch.tensor([loaded.workload.context_ids]), cache=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def _grown(loaded: Loaded, context: DynamicCache, agents: int) -> DynamicCache:
    """A DynamicCache with the context in every row, as transformers' guide to prefix caching makes it."""
    cache = copy.deepcopy(context)
    cache.batch_repeat_interleave(agents)
    return cache


@torch.no_grad()
def _preallocated(loaded: Loaded, context: DynamicCache, agents: int) -> StaticCache:
    """A StaticCache with the context in every row and just enough room for the rest."""
    workload = loaded.workload
    room = workload.context_tokens + workload.own_tokens + workload.new_tokens
    cache = StaticCache(config=loaded.model.config, max_cache_len=room)
    for index, layer in enumerate(context.layers):
        cache.update(*(x.expand(agents, -1, -1, -1) for x in (layer.keys, layer.values)), index)
    return cache


def dynamic(task: Task) -> Iterator[Row]:
    """Batched DynamicCache: each step copies the whole cache to append to it."""
    yield from _batched(task, _grown, FEW_STEPS)


def static(task: Task) -> Iterator[Row]:
    """Batched StaticCache, the fair baseline: preallocated, written in place."""
    yield from _batched(task, _preallocated, None)


def _batched(task: Task, make: Callable[[Loaded, DynamicCache, int], Any], few_steps: int | None) -> Iterator[Row]:
    loaded = Loaded(task)
    workload = loaded.workload
    for agents in task.agents:
        say(f"{task.system}: {agents} agents")
        steps = workload.new_tokens
        if few_steps is not None and agents >= MANY_AGENTS:
            steps = min(steps, few_steps + 1)
        row = Row(task.system, agents, workload.context_tokens)
        times, held = TokenTimes(), []
        context: list[DynamicCache] = []
        started = 0.0

        def read(row: Row = row, context: list[DynamicCache] = context) -> None:
            nonlocal started
            started = time.perf_counter()
            context.append(_prefill(loaded))
            row.cold_s = time.perf_counter() - started

        def ask_all(
            _: int,
            agents: int = agents,
            steps: int = steps,
            times: TokenTimes = times,
            context: list[DynamicCache] = context,
            held: list[Batch] = held,
        ) -> None:
            # one node for all: transformers gathers no calls from several nodes
            for agent in range(agents):
                times.ask(agent)
            held.append(Batch(loaded, make(loaded, context[0], agents), agents, times))
            for _ in range(steps):
                held[0].step()

        with loaded.memory.watch():
            row.wall_s = run_graph(read, ask_all, 1)
        row.peak_extra_bytes = loaded.memory.extra
        # without the row that the others were copied from: only later agents need it
        originals = [x for layer in context[0].layers for x in (layer.keys, layer.values)]
        row.live_bytes = live_tensor_bytes([*loaded.weights, *originals])
        del originals
        row.first_ttft_s = times.first - started
        row.slowest_ttft_s = times.slowest_ttft
        row.decode_tokens_per_s = times.decode_rate()
        row.answers, row.margins = held[0].answers, held[0].margins
        _extrapolate(row, steps, workload.new_tokens)
        held.clear()
        row.next_ttft_s = statistics.median(_alone(loaded, make, context[0]) for _ in workload.later)
        yield row


def _extrapolate(row: Row, steps: int, new_tokens: int) -> None:
    """Adds the steps that were not run to the graph's time."""
    if steps < new_tokens and row.decode_tokens_per_s and row.wall_s is not None:
        row.wall_s += (new_tokens - steps) * row.agents / row.decode_tokens_per_s
        row.extrapolated = ["wall_s"]
        row.note = "; ".join(
            filter(None, [row.note, f"{steps - 1} decode steps run with {MANY_AGENTS} or more agents"])
        )


def _alone(loaded: Loaded, make: Callable[[Loaded, DynamicCache, int], Any], context: DynamicCache) -> float:
    started = time.perf_counter()
    Batch(loaded, make(loaded, context, 1), 1, _one_agent()).step()
    return time.perf_counter() - started


def _one_agent() -> TokenTimes:
    times = TokenTimes()
    times.ask(0)
    return times


def static_generate(task: Task) -> Iterator[Row]:
    """`generate` for one agent with a StaticCache that already holds the context: the usual way of one warm agent."""
    loaded = Loaded(task)
    started = time.perf_counter()
    context = _prefill(loaded)
    cold = time.perf_counter() - started
    times = TokenTimes()
    for agents in task.agents:
        if agents > 1:
            yield Row(task.system, agents, note="not run: for one agent only")
            continue
        say("static-generate: 1 agent")
        row = Row(task.system, 1, loaded.workload.context_tokens, cold_s=cold)
        times.ask(0)
        with loaded.memory.watch():
            row.answers = [_generate(loaded, 0, streamer=Timed(times, 0), cache=_preallocated(loaded, context, 1))]
        row.wall_s = cold + time.perf_counter() - times.started[0]
        row.first_ttft_s, row.next_ttft_s = cold + times.ttft(0), times.ttft(0)
        row.slowest_ttft_s = times.ttft(0)
        row.decode_tokens_per_s = times.decode_rate()
        row.peak_extra_bytes = loaded.memory.extra
        row.note = "without the graph"
        yield row


def continuous(task: Task) -> Iterator[Row]:
    """transformers' continuous batching with block sharing; the context is a request of its own, asked first."""
    try:
        from transformers import ContinuousBatchingConfig, GenerationConfig
    except ImportError as error:
        yield from not_run(task, f"this transformers has no continuous batching ({error})")
        return
    loaded = Loaded(task)
    workload = loaded.workload
    generation = GenerationConfig(max_new_tokens=workload.new_tokens, do_sample=False, eos_token_id=-1)
    for agents in task.agents:
        say(f"{task.system}: {agents} agents")
        # Shared pages are stored once but count for each reader in the limit of what a forward reads, which is the
        # cache's size: a smaller one would let a few requests decode at a time. What is never written costs no memory.
        request = workload.context_tokens + workload.own_tokens + workload.new_tokens
        pages = (agents + 1) * (2 + request // PAGE)
        config = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=pages, max_batch_tokens=max(BATCH_TOKENS, agents), allow_block_sharing=True
        )
        row = Row(task.system, agents, workload.context_tokens)
        try:
            with loaded.memory.watch():
                _run_continuous(loaded, generation, config, agents, row)
        except Exception as error:  # a peer that fails is a finding, with its own words
            yield Row(task.system, agents, note=f"not run: {type(error).__name__}: {error}"[:300])
            continue
        row.peak_extra_bytes = loaded.memory.extra
        yield row


def _run_continuous(loaded: Loaded, generation: Any, config: Any, agents: int, row: Row) -> None:
    workload, times = loaded.workload, TokenTimes()
    # every step gathers each request's keys and values anew, and masks every row against those of all requests
    steps = min(workload.new_tokens, FEW_STEPS + 1) if agents >= MANY_AGENTS else workload.new_tokens
    started = 0.0
    with loaded.model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:

        def finish(prompts: dict[str, tuple[int, ...]], new_tokens: int) -> dict[str, Any]:
            for name, prompt in prompts.items():
                manager.add_request(list(prompt), request_id=name, max_new_tokens=new_tokens, record_timestamps=True)
            results: dict[str, Any] = {}
            while len(results) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    results[result.request_id] = result
                elif result is None and not manager.is_running():
                    raise RuntimeError("its thread ended")
            return results

        def read() -> None:
            nonlocal started
            started = time.perf_counter()
            finish({"context": workload.context_ids}, 1)
            row.cold_s = time.perf_counter() - started

        def ask_all(_: int) -> None:
            now = time.perf_counter()
            prompts = {str(index): workload.agents[index].prompt_ids for index in range(agents)}
            results = finish(prompts, steps)
            for index in range(agents):
                result = results[str(index)]
                times.started[index], times.times[index] = now, list(result.timestamps)
                row.answers.append(list(result.generated_tokens))

        row.wall_s = run_graph(read, ask_all, 1)
        row.first_ttft_s, row.slowest_ttft_s = times.first - started, times.slowest_ttft
        row.decode_tokens_per_s = times.decode_rate()
        alone = []
        for index in workload.later:
            begun = time.perf_counter()
            finish({str(index): workload.agents[index].prompt_ids}, 1)
            alone.append(time.perf_counter() - begun)
        row.next_ttft_s = statistics.median(alone)
        row.note = f"pages of {PAGE} tokens, at most {config.max_batch_tokens} rows a forward"
        _extrapolate(row, steps, workload.new_tokens)
