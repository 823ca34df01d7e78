"""Memory, decode time and quality of N agents on one context, against transformers' caches, in one run.

    python benchmarks/shared_context.py [--agents 1 4 15] [--context 4096] [--json FILE]

Systems:

* ``k8v3``, ``paper``: ours, a compressed pool read by all agents in one forward.
* ``exact``: ours with an uncompressed pool. It is the strongest baseline here: one shared copy, stacked queries.
* ``DynamicCache``, ``StaticCache``: transformers, one batched forward, each agent with a whole private copy.

Every decode step is the same model forward over N tokens; systems take turns, and medians are reported. Bytes beyond
the weights are the tensors really alive between two steps. KL and top-1 compare the codecs with ``exact`` on the 256
tokens after the context.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from polykv import SharedKVPool, load_model
from polykv.engine.request import Request, RequestHandle
from polykv.engine.runner import ModelRunner
from polykv.engine.scheduler import Batch, Sequence, Work
from polykv.evaluation import compare_codec, live_tensor_bytes

DOCUMENT = Path(__file__).parents[1] / "examples" / "data" / "dashwood_inheritance.txt"
CODECS = ("k8v3", "paper", "exact")
QUESTION = " What did the family decide, and who carries the risk?"


@dataclass
class Row:
    system: str
    agents: int
    context_tokens: int
    step_s: float
    bytes_beyond_weights: int


Step = Callable[[], None]


def run(runner: ModelRunner, work: list[Work]) -> None:
    for part in work:
        part.sequence.tail.reserve(part.sequence.tail.length + part.rows)
    runner.forward(Batch(work))


def ours(model: Any, tokenizer: Any, pool: SharedKVPool, agents: int) -> Step:
    """Agents whose prompt has been prefilled; each call decodes one token of each."""
    question = tokenizer.encode(QUESTION)
    prompt = (*pool.segment.token_ids.tolist(), *question)
    runner = ModelRunner(model)
    sequences = [
        Sequence(
            RequestHandle(Request(prompt, pool.segment)),
            pool.lease(pool.segment),
            model,
            tokenizer,
            frozenset(),
        )
        for _ in range(agents)
    ]
    run(runner, [Work(s, len(s.pending)) for s in sequences])
    for sequence in sequences:
        sequence.advance(len(question))

    def step() -> None:
        for sequence in sequences:
            sequence.pending = [question[0]]
        run(runner, [Work(s, 1) for s in sequences])
        for sequence in sequences:
            sequence.advance(1)

    return step


@torch.no_grad()
def private(model: Any, tokenizer: Any, pool: SharedKVPool, agents: int, kind: str, steps: int) -> Step:
    """Agents with a whole private cache each. The copies are made from one prefill, which both kinds get for free."""
    question = tokenizer.encode(QUESTION)
    context = pool.segment.num_tokens
    cache: Any
    if kind == "DynamicCache":
        cache = DynamicCache()
    else:
        cache = StaticCache(config=model.config, max_cache_len=context + len(question) + steps + 1)
    for index, layer in enumerate(pool.segment.layers):
        assert layer.exact is not None
        copies = [x[None].expand(agents, -1, -1, -1).contiguous() for x in (layer.exact.keys, layer.exact.values)]
        cache.update(*copies, index)
    position = context

    def forward(ids: torch.Tensor) -> None:
        nonlocal position
        rows = ids.shape[1]
        positions = torch.arange(position, position + rows)[None].expand(agents, -1)
        with torch.no_grad():
            model(ids, position_ids=positions, cache=cache, logits_to_keep=1)
        position += rows

    forward(torch.tensor([question]).expand(agents, -1))
    return lambda: forward(torch.full((agents, 1), question[0]))


def measure(
    model: Any, tokenizer: Any, pools: dict[str, SharedKVPool], agents: int, rounds: int, steps: int
) -> list[Row]:
    weights = [*model.parameters(), *model.buffers()]
    pool_tensors = [t for p in pools.values() for layer in p.segment.layers for t in layer.tensors().values()]
    systems: dict[str, Step] = {}
    held: dict[str, int] = {}
    context = pools["exact"].segment.num_tokens
    for name in (*CODECS, "DynamicCache", "StaticCache"):
        before = live_tensor_bytes([*weights, *pool_tensors])
        if name in pools:
            systems[name] = ours(model, tokenizer, pools[name], agents)
        else:
            systems[name] = private(model, tokenizer, pools["exact"], agents, name, rounds * steps + 1)
        systems[name]()
        held[name] = live_tensor_bytes([*weights, *pool_tensors]) - before
        held[name] += pools[name].segment.num_bytes if name in pools else 0
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, step in systems.items():
            for _ in range(steps):
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)
    return [Row(n, agents, context, statistics.median(seconds[n]), held[n]) for n in systems]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 4, 15])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    model, tokenizer = load_model(options.model)
    ids = tokenizer.encode(DOCUMENT.read_text(encoding="utf-8"))
    if len(ids) < options.context + 64:
        parser.error(f"--context must be at most {len(ids) - 64}, the document has {len(ids)} tokens")
    context, continuation = ids[: options.context], ids[options.context : options.context + 256]
    threads = torch.get_num_threads()
    print(f"{options.model}, {model.dtype}, {threads} threads, {len(context)} context tokens\n")

    pools = {codec: SharedKVPool.from_token_ids(model, context, codec, tokenizer=tokenizer) for codec in CODECS}
    print("| codec | pool, allocated | ratio to float16 | build | KL | top-1 |")
    print("|---|---|---|---|---|---|")
    quality = compare_codec(model, context, continuation, CODECS)
    for report in quality:
        segment = pools[report.codec].segment
        print(
            f"| `{report.codec}` | {segment.num_bytes / 1e6:.1f} MB | {report.ratio:.2f}x | "
            f"{segment.report.seconds:.1f} s | {report.kl:.5f} | {report.top1_agreement:.3f} |"
        )
    rows: list[Row] = []
    print("\n| agents | system | beyond weights | of StaticCache's | step | StaticCache's / step |")
    print("|---|---|---|---|---|---|")
    for agents in options.agents:
        measured = measure(model, tokenizer, pools, agents, options.rounds, options.steps)
        rows += measured
        base = next(row for row in measured if row.system == "StaticCache")
        for row in measured:
            print(
                f"| {agents} | `{row.system}` | {row.bytes_beyond_weights / 1e6:.1f} MB | "
                f"{100 * row.bytes_beyond_weights / base.bytes_beyond_weights:.1f} % | {1e3 * row.step_s:.0f} ms | "
                f"{base.step_s / row.step_s:.2f}x |"
            )
    if options.json:
        document = {
            "quality": [asdict(q) for q in quality],
            "rows": [asdict(r) for r in rows],
            "threads": threads,
        }
        options.json.write_text(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
