"""What the pool saves by finding prompts by itself: first tokens, restarts, evictions.

    python benchmarks/prefix_cache.py            # SmolLM2-135M
    python benchmarks/prefix_cache.py --quick    # shorter, fewer repeats

Every figure stands beside the same requests without the prefix cache, or under the other policy, in one interleaved run; times are medians.

* turns: a conversation about a document; each turn's prompt is all that was said before and a question.
* fan-out: agents that are asked at once, each with the document and a role of its own, without any mark.
* decoding: what a step of running agents costs when each reads its own earlier turns from the pool, beside a shared context, against
  keeping them in its private tail.
* restart: the first token after a document, from a pool on disk that a new engine opens, against computing it. The model is loaded.
* eviction: six agents in a ring with prompts of their own, and a budget for four of them: tokens computed anew under LRU and
  with the graph attached.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from langgraph.graph import END, START, MessagesState, StateGraph
from tqdm import tqdm

from polykv import Engine, Request, SamplingParams, load_model

DOCUMENT = Path(__file__).parents[1] / "examples" / "data" / "dashwood_inheritance.txt"
AGENTS = 6
KEPT = 4
OWN_TOKENS = 256
"""Of an agent's first prompt, where decoding is measured."""


class Bench:
    """The model, its document, and requests about it.

    Args:
        model: a name.
        context: tokens of the document.
        answer: tokens of an answer.
    """

    def __init__(self, model: str, context: int, answer: int) -> None:
        self.model, self.tokenizer = load_model(model)
        ids = self.tokenizer.encode(DOCUMENT.read_text(encoding="utf-8"))
        if len(ids) < context:
            raise SystemExit(f"--context must be at most {len(ids)}, the tokens of the document")
        self.text, self.ids = ids, ids[:context]
        self.sampling = SamplingParams(
            temperature=0, max_tokens=answer, logit_bias={self.tokenizer.eos_token_id: -100.0}
        )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def engine(self, **options: Any) -> Engine:
        return Engine(self.model, self.tokenizer, **options)

    def ask(self, engine: Engine, ids: list[int], **fields: Any) -> Any:
        return engine.submit(Request(tuple(ids), None, self.sampling, **fields)).result()


def turns(bench: Bench, count: int, *, prefix_cache: bool) -> tuple[list[float], list[int]]:
    """Seconds to the first token of each turn, and tokens computed before it."""
    engine = bench.engine(prefix_cache=prefix_cache)
    ids, seconds, computed = list(bench.ids), [], []
    for turn in range(count):
        ids += bench.encode(f"\n\nQuestion {turn}: who is spoken of?\nAnswer:")
        completion = bench.ask(engine, ids)
        seconds.append(completion.timing.ttft_s)
        computed.append(completion.prompt_tokens - completion.cached_tokens)
        ids += completion.token_ids
    engine.close()
    return seconds, computed


def fan_out(bench: Bench, agents: int, *, prefix_cache: bool) -> tuple[float, int, int]:
    """Seconds until all have answered, prompt tokens computed, and bytes of pool and tails at their largest."""
    engine = bench.engine(prefix_cache=prefix_cache)
    largest = 0

    def look(report: Any) -> None:
        nonlocal largest
        largest = max(largest, report.stats.tail_bytes + report.stats.pool_bytes)

    engine.add_step_callback(look)
    prompts = [bench.ids + bench.encode(f"\n\nYou are agent {i}. Who is spoken of?\nAnswer:") for i in range(agents)]
    started = time.perf_counter()
    for handle in [engine.submit(Request(tuple(ids), None, bench.sampling)) for ids in prompts]:
        handle.result()
    seconds = time.perf_counter() - started
    stats = engine.stats()
    engine.close()
    return seconds, stats.prefill_tokens, largest


def decoding(bench: Bench, agents: int, *, prefix_cache: bool) -> float:
    """Seconds of a step in which every agent decodes in its third turn, behind a context that all share."""
    engine = bench.engine(prefix_cache=prefix_cache)
    context = engine.share(bench.ids)
    steps: list[float] = []
    talks = [bench.encode(f"\n\nYou are agent {i}.") + bench.text[i * 64 : i * 64 + OWN_TOKENS] for i in range(agents)]
    for turn in range(3):
        steps.clear()
        remove = engine.add_step_callback(
            lambda report: (
                steps.append(report.seconds) if report.decode_rows == agents and not report.prompt_rows else None
            )
        )
        for ids in talks:
            ids += bench.encode(f"\n\nQuestion {turn}: who is spoken of?\nAnswer:")
        sampling = dataclasses.replace(bench.sampling, max_tokens=32)
        handles = [engine.submit(Request((*bench.ids, *ids), context, sampling)) for ids in talks]
        for ids, handle in zip(talks, handles, strict=True):
            ids += handle.result().token_ids
        remove()
    engine.close()
    return statistics.median(steps)


def restart(bench: Bench, folder: Path) -> tuple[float, float, float, float]:
    """Seconds to the first token cold and warm (opening the pool included), bytes on disk and in memory."""
    ids = bench.ids + bench.encode("\n\nWho is spoken of?")
    engine = bench.engine()
    started = time.perf_counter()
    cold = bench.ask(engine, ids)
    cold_s = time.perf_counter() - started - (cold.timing.total_s - cold.timing.ttft_s)
    engine.pool.save(folder)
    held = engine.pool.stats().num_bytes
    engine.close()
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    engine = bench.engine()
    started = time.perf_counter()
    engine.pool.load(folder)
    warm = bench.ask(engine, ids)
    warm_s = time.perf_counter() - started - (warm.timing.total_s - warm.timing.ttft_s)
    engine.close()
    if warm.token_ids != cold.token_ids or warm.cached_tokens != len(ids) - 1:
        raise SystemExit("the restored pool does not give the answer that it was saved with")
    return cold_s, warm_s, on_disk, held


def ring() -> Any:
    """A compiled LangGraph graph of agents that call each other in a ring until somebody says stop."""
    graph = StateGraph(MessagesState)
    for i in range(AGENTS):
        graph.add_node(f"agent{i}", lambda state: {"messages": []})
    graph.add_edge(START, "agent0")
    for i in range(AGENTS - 1):
        graph.add_edge(f"agent{i}", f"agent{i + 1}")
    graph.add_conditional_edges(f"agent{AGENTS - 1}", lambda state: "agent0", ["agent0", END])
    return graph.compile()


def evictions(bench: Bench, rounds: int, prompt_tokens: int, *, workflow: bool) -> tuple[int, int]:
    """Prompt tokens computed in all, and in the rounds after the first, where every prompt was there once."""
    probe = bench.engine()
    bench.ask(probe, bench.text[:prompt_tokens])
    one = probe.pool.stats().num_bytes
    probe.close()
    engine = bench.engine(max_pool_bytes=int(one * (KEPT + 0.5)))
    if workflow:
        engine.pool.attach_graph(ring())
    first, step = 0, 0
    for number in range(rounds):
        for i in range(AGENTS):
            step += 1
            start = i * prompt_tokens
            # each agent's own instructions, and a question that changes
            own = bench.text[start : start + prompt_tokens - 16] + bench.encode(f"\nRound {number}:")
            bench.ask(engine, own, agent=f"agent{i}", agent_step=step, agent_run="1")
        if number == 0:
            first = engine.stats().prefill_tokens
    total = engine.stats().prefill_tokens
    engine.close()
    return total, total - first


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the document")
    parser.add_argument("--agents", type=int, default=8, help="agents of the fan-out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, one repeat")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.context, options.repeats = min(options.context, 1024), 1
    torch.manual_seed(0)
    bench = Bench(options.model, options.context, 16)
    rows: list[dict[str, Any]] = []
    bar = tqdm(total=8 * options.repeats + 2, desc="prefix cache", leave=False)

    talks: dict[bool, list[list[float]]] = {True: [], False: []}
    fans: dict[bool, list[tuple[float, int, int]]] = {True: [], False: []}
    computed: dict[bool, list[int]] = {}
    steps: dict[tuple[int, bool], list[float]] = {(n, on): [] for n in (1, options.agents) for on in (False, True)}
    for _ in range(options.repeats):
        for prefix_cache in (False, True):
            seconds, computed[prefix_cache] = turns(bench, 4, prefix_cache=prefix_cache)
            talks[prefix_cache].append(seconds)
            bar.update()
            fans[prefix_cache].append(fan_out(bench, options.agents, prefix_cache=prefix_cache))
            bar.update()
            for agents in (1, options.agents):
                steps[agents, prefix_cache].append(decoding(bench, agents, prefix_cache=prefix_cache))
                bar.update()
    restarts = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            restarts.append(restart(bench, Path(folder) / "pool"))
    lru, aware = (evictions(bench, 4, 256, workflow=workflow) for workflow in (False, True))
    bar.close()

    print(f"{options.model}, {len(bench.ids)} tokens of document, medians of {options.repeats}\n")
    print("| turn | first token without (s) | with (s) | ratio | tokens computed without | with |")
    print("| --- | --- | --- | --- | --- | --- |")
    for turn in range(4):
        without, found = (statistics.median(talk[turn] for talk in talks[on]) for on in (False, True))
        print(
            f"| {turn + 1} | {without:.2f} | {found:.3f} | {without / found:.1f} | {computed[False][turn]} | "
            f"{computed[True][turn]} |"
        )
        rows.append({"part": "turns", "turn": turn + 1, "without_s": without, "with_s": found})
    (slow, many, large), (fast, few, small) = (
        tuple(statistics.median(column) for column in zip(*fans[on], strict=True)) for on in (False, True)
    )
    print(
        f"\nfan-out of {options.agents} agents, nothing marked: {slow:.1f} s and {many:.0f} prompt tokens without, {fast:.1f} s and "
        f"{few:.0f} with ({slow / fast:.1f}x); pool and tails at most {large / 1e6:.0f} MB and {small / 1e6:.0f} MB "
        f"({large / small:.1f}x)"
    )
    rows.append({"part": "fan-out", "without_s": slow, "with_s": fast, "without_bytes": large, "with_bytes": small})
    for agents in dict.fromkeys((1, options.agents)):
        private, pooled = (statistics.median(steps[agents, on]) for on in (False, True))
        print(
            f"decoding, {agents} agents in their third turn behind a shared k8v3 context: {1e3 * private:.1f} ms a step with their "
            f"turns in private tails, {1e3 * pooled:.1f} ms with them in the pool ({pooled / private:.2f}x)"
        )
        rows.append({"part": "decoding", "agents": agents, "without_s": private, "with_s": pooled})
    cold, warm, on_disk, held = (statistics.median(column) for column in zip(*restarts, strict=True))
    print(
        f"restart: first token {cold:.2f} s cold, {warm:.3f} s from disk ({100 * warm / cold:.1f} %); "
        f"{on_disk / 1e6:.1f} MB on disk for {held / 1e6:.1f} MB of pool ({100 * (on_disk / held - 1):+.2f} %)"
    )
    rows.append({"part": "restart", "cold_s": cold, "warm_s": warm, "disk_bytes": on_disk, "pool_bytes": held})
    print(
        f"eviction: {AGENTS} agents in a ring, room for {KEPT}: after the first round LRU computes {lru[1]} prompt tokens anew, "
        f"the attached graph {aware[1]} ({aware[1] / lru[1]:.2f}x)"
    )
    rows.append({"part": "eviction", "lru_tokens": lru[1], "workflow_tokens": aware[1]})
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, "context": len(bench.ids), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
