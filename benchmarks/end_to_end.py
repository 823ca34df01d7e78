"""A LangGraph team on one document, end to end, against what else one can install; and how our step grows.

    python benchmarks/end_to_end.py [--quick] [--json FILE] [--llama-batched-bench PATH]
    python benchmarks/end_to_end.py --growth [--plot FILE]

N agents with a role and a question each read one document of 4,000 tokens and write 64 tokens, greedily, with the
end-of-sequence token banned, so that all do the same work on the same token ids. Systems (SmolLM2-135M, float32):

* ``sequential``: `generate` calls one after the other, each with its own prefill.
* ``dynamic``, ``static``: one batched forward, each agent with a whole private DynamicCache or StaticCache; the context
  is prefilled once and copied. ``static`` is the fair baseline and the reference for the answers.
* ``static-generate``: `generate` with a warm StaticCache, for one agent.
* ``continuous``: transformers' continuous batching with block sharing.
* ``chat-huggingface``: LangChain's ChatHuggingFace in the same graph.
* ``llama.cpp-f16``, ``llama.cpp-q8_0``: the server in the `xllamacpp` wheel, by the type of its keys and values, with
  4-bit weights. ``llama.cpp-native-...``: a native build's `llama-batched-bench`, for which a path is needed.
* ``k8v3``, ``paper``, ``exact``: ours by codec. ``k8v3-int8``: with int8 weights. ``k8v3-deterministic``: the same bits in any
  company; its distance from ``k8v3`` is what that costs.

Each system runs in a process of its own, so that thread pools and memory do not mix. A machine that does other work makes
figures that mean nothing, ratios too: threads that wait for each other suffer most. Measured are: the cold build of the
context; time to first token of the first agent (from handing over the document), of a later one arriving alone (median of
three), and of the slowest when all ask at once; decode tokens a second of all agents together (one each in a median step,
while all of them decode); the peak of the resident set over what it was with loaded and touched weights, sampled every
10 ms; bytes of tensors alive while decoding (ours: pool and tails by the engine's count); and the wall time of the whole
graph from the document to the last answer. What is extrapolated is marked. A peer that is not installed is left out with
the command that installs it (`make bench-peers` installs all but the native build). The exit status is 1 if a system that
must give the reference's answers does not.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _end_to_end.measuring import Row, Task

SYSTEMS = (
    "static",
    "k8v3",
    "paper",
    "exact",
    "k8v3-int8",
    "k8v3-deterministic",
    "static-generate",
    "dynamic",
    "sequential",
    "continuous",
    "chat-huggingface",
    "llama.cpp-f16",
    "llama.cpp-q8_0",
    "llama.cpp-native-f16",
    "llama.cpp-native-q8_0",
)
QUICK = tuple(name for name in SYSTEMS if name not in ("paper", "k8v3-int8", "k8v3-deterministic", "static-generate"))
"""Systems of --quick."""
REPEATED = ("static", "k8v3", "paper", "exact", "k8v3-int8", "k8v3-deterministic", "static-generate")
"""Systems that take part in every pass; the others take minutes and run once."""


def measure(task: Task) -> Iterator[Row]:
    """The rows of a worker's task."""
    # imported here: the parent starts workers and needs none of it
    from _end_to_end import langchain_peer, llama_peers, ours, transformers_peers

    functions: dict[str, Callable[[Task], Iterator[Row]]] = {
        "static": transformers_peers.static,
        "dynamic": transformers_peers.dynamic,
        "sequential": transformers_peers.sequential,
        "static-generate": transformers_peers.static_generate,
        "continuous": transformers_peers.continuous,
        "chat-huggingface": langchain_peer.chat_huggingface,
        "llama.cpp-f16": llama_peers.server,
        "llama.cpp-q8_0": llama_peers.server,
        "llama.cpp-native-f16": llama_peers.batched_bench,
        "llama.cpp-native-q8_0": llama_peers.batched_bench,
    }
    yield from functions.get(task.system, ours.measure)(task)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME", help="default: all of those above")
    parser.add_argument("--agents", type=int, nargs="+", help="default: 1 4 15 32; with --growth 1 2 4 8 15 32 64")
    parser.add_argument("--tokens", type=int, nargs="+", help="of the context; several with --growth only")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="passes over the quicker systems; medians are reported")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="4 agents, 1,000 tokens, fewer systems: under three minutes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--llama-batched-bench", type=Path, metavar="PATH", help="a native build of llama.cpp's program"
    )
    parser.add_argument("--growth", action="store_true", help="our decode step against agents and context")
    parser.add_argument(
        "--ours", default="k8v3", metavar="NAME", help="system of --growth, and the one that the goals are about"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG of --growth")
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.systems = options.systems or (QUICK if options.quick else SYSTEMS)
    if options.agents is None and not options.growth:
        options.agents = [4] if options.quick else [1, 4, 15, 32]
    if options.tokens is None and not options.growth:
        options.tokens = [1000] if options.quick else [4000]
    for name in ("agents", "tokens"):
        if any(value < 1 for value in getattr(options, name) or []):
            parser.error(f"--{name} must be at least 1")
    if options.new_tokens < 4:
        parser.error("--new-tokens must be at least 4: a decode step is a median")
    if not options.growth and len(options.tokens) > 1:
        parser.error("several --tokens go with --growth only")
    return options


def run_worker(task: Task) -> list[Row]:
    """Measures in a process of its own; what fails there is a row that says so."""
    from _end_to_end.measuring import not_run

    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "task", Path(folder) / "rows"
        given.write_bytes(pickle.dumps(task))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(task.threads),
            "MKL_NUM_THREADS": str(task.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        if task.system.startswith("llama.cpp"):
            environment.pop("GOMP_SPINCOUNT", None)  # `make` sets it for torch; llama.cpp runs with its own defaults
        status = subprocess.run(
            [sys.executable, str(Path(__file__)), "--worker", str(given), str(out)],
            env=environment,
            stdout=subprocess.DEVNULL,
            check=False,
        ).returncode
        if status or not out.is_file():
            return not_run(task, f"its process ended with status {status}, see above")
        rows: list[Row] = pickle.loads(out.read_bytes())
        return rows


def worker(given: Path, out: Path) -> None:
    out.write_bytes(pickle.dumps(list(measure(pickle.loads(given.read_bytes())))))


def run(options: argparse.Namespace, run_task: Callable[[Task], list[Row]] = run_worker) -> int:
    """All systems, the table, the goals. Returns the exit status."""
    from _end_to_end.measuring import Task, merge_passes, say
    from _end_to_end.report import as_json, compare_answers, goals, table

    started = time.monotonic()
    passes: dict[tuple[str, int], list[Row]] = {}
    turns = [(n, s) for n in range(options.repeats) for s in options.systems if not n or s in REPEATED]
    try:
        for number, system in turns:
            say(f"{system}, pass {number + 1} of {options.repeats}")
            task = Task(
                system,
                options.model,
                tuple(sorted(set(options.agents))),
                options.tokens[0],
                options.new_tokens,
                options.threads,
                options.llama_batched_bench,
            )
            for row in run_task(task):
                passes.setdefault((row.system, row.agents), []).append(row)
                if row.decode_tokens_per_s and row.wall_s:
                    say(f"{system}: N = {row.agents}: {row.decode_tokens_per_s:.1f} tokens/s, graph {row.wall_s:.1f} s")
    except KeyboardInterrupt:
        say("interrupted: this is what there is")
    rows = [merge_passes(measured) for measured in passes.values()]
    compare_answers(rows, _decoder(options.model) if any(row.texts for row in rows) else lambda ids: "")
    context = max((row.context_tokens for row in rows), default=0)
    print(
        f"{options.model}, {context:,} shared tokens, {options.new_tokens} new tokens an agent, {options.threads} threads\n"
    )
    print(table(rows))
    print(f"\n{goals(rows, options.ours)}")
    wrong = [f"{row.system} (N = {row.agents})" for row in rows if row.correct is False]
    checked = [row for row in rows if row.correct]
    print(
        f"\nAnswers equal to the reference's up to near ties: {len(checked)} of {len(checked) + len(wrong)} rows that must be"
    )
    if wrong:
        print(f"WRONG ANSWERS: {', '.join(wrong)}")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{(time.monotonic() - started) / 60:.1f} minutes; load averages at the end: {load} (the run's own threads included)"
    )
    if options.json:
        options.json.write_text(json.dumps([as_json(row) for row in rows], indent=2))
    return 1 if wrong else 0


def _decoder(model: str) -> Callable[[list[int]], str]:
    from polykv import load_model

    _, tokenizer = load_model(model)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def run_growth(options: argparse.Namespace) -> int:
    """Our step for every combination of agents and context."""
    from _end_to_end.growth import AGENTS, TOKENS, as_rows, growth_table, measure_growth, plot_growth

    quick = ((1, 4), (512, 1024))
    agents = options.agents or (quick[0] if options.quick else AGENTS)
    tokens = options.tokens or (quick[1] if options.quick else TOKENS)
    points = measure_growth(options.model, options.ours, options.threads, agents, tokens)
    title = f"{options.model}, `{options.ours}`, {options.threads} threads"
    print(f"{title}: {growth_table(points)}")
    if options.plot:
        plot_growth(points, options.plot, title.replace("`", ""))
    if options.json:
        options.json.write_text(json.dumps(as_rows(points), indent=2))
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        worker(*options.worker)
        return 0
    return run_growth(options) if options.growth else run(options)


if __name__ == "__main__":
    sys.exit(main())
