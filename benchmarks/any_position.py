"""What it costs in quality to read documents that were computed without what comes before them, and what it saves.

    python benchmarks/any_position.py            # SmolLM2-135M, 6 prompts, 6 minutes on 2 cores
    python benchmarks/any_position.py --quick    # 2 prompts, 2 minutes

Prompts: instructions, then two or three documents of two genres in varying order, then text. Reference: the prompt computed whole. For
each way of reusing the documents: the KL divergence of the next-token distributions to the reference, over 64 tokens of text that
continue the first document and 64 that continue the last, and how often the most likely token is the same. ``k`` is the number of
each document's first tokens that are computed in place (EPIC, arXiv 2410.15332). As a yardstick: the documents left out. Times are those of
the first token in the engine, interleaved, medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from polykv import Engine, Request, SamplingParams, attach, load_model
from polykv.models.step import Piece, run_step
from polykv.models.tails import Tail
from polykv.pool import KVSegment, SharedKVPool
from polykv.pool.segment import Span

ROOT = Path(__file__).parents[1]
TEXTS = {"novel": ROOT / "examples" / "data" / "dashwood_inheritance.txt", "licence": ROOT / "LICENSE"}
SKIPS = (0, 8, 16, 32)
CODECS = ("exact", "k8v3")
FOLLOWING = 64


class Prompt:
    """Instructions, documents in order, and two texts to be predicted.

    Args:
        tokenizer: of the model.
        sources: tokens of the texts.
        number: decides lengths, places and order.
    """

    def __init__(self, tokenizer: Any, sources: Sequence[list[int]], number: int) -> None:
        draw = random.Random(number)
        roles = (
            "You are a careful reader.",
            "You are a lawyer. Answer in one sentence, and quote the text that you rely on.",
        )
        self.instructions = tokenizer.encode(f"{roles[number % 2]} These are the documents.\n\n" * (1 + number % 3))
        self.documents, self.following = [], []
        for index in range(2 + number % 2):
            source = sources[(number + index) % len(sources)]
            length = draw.randrange(300, 600)
            start = draw.randrange(0, len(source) - length - FOLLOWING)
            self.documents.append(source[start : start + length])
            self.following.append(source[start + length : start + length + FOLLOWING])
        self.gap = tokenizer.encode("\n\n")
        self.continuations = [self.following[0], self.following[-1]]

    @property
    def ids(self) -> list[int]:
        """The prompt, without what is to be predicted."""
        ids = list(self.instructions)
        for document in self.documents:
            ids += [*document, *self.gap]
        return ids


def predict(model: Any, context: Span | None, before: Sequence[int], text: Sequence[int]) -> Tensor:
    """Log-probabilities ``[T, V]`` for each token of a text after a context and some tokens."""
    tail = Tail(model)
    spans = context.chain if context is not None else ()
    position = context.end if context is not None else 0
    rows, ids = [], list(before)
    for token in text:
        tail.reserve(tail.length + len(ids))
        logits = run_step(model, [Piece(ids, position, tail, spans)])
        rows.append(torch.log_softmax(logits[0].float(), 0))
        position, ids = position + len(ids), [token]
    return torch.stack(rows)


def composed(
    pool: SharedKVPool, prompt: Prompt, stored: Sequence[KVSegment], skip: int
) -> tuple[Span, list[KVSegment]]:
    """The context that the engine makes of a prompt: runs computed in place, and the documents' stored tokens between them."""
    context: Span | None = None
    run, made = list(prompt.instructions), []
    for segment in stored:
        ids = segment.token_ids.tolist()
        run += ids[:skip]
        if run:
            made.append(pool.build(run, "exact", parent=context))
            context = made[-1].whole
        at = (context.end if context is not None else 0) - skip
        context = Span(segment, skip, len(ids), at, context)
        run = list(prompt.gap)
    assert context is not None
    return context, made


def compare(model: Any, prompt: Prompt) -> dict[str, tuple[Tensor, float]]:
    """KL of each predicted token and share of equal top tokens, by way of reuse."""
    result: dict[str, tuple[Tensor, float]] = {}
    reference = [predict(model, None, prompt.ids, text) for text in prompt.continuations]

    def add(name: str, predictions: list[Tensor]) -> None:
        kl = [(ref.exp() * (ref - got)).sum(1) for ref, got in zip(reference, predictions, strict=True)]
        same = [(ref.argmax(1) == got.argmax(1)).float() for ref, got in zip(reference, predictions, strict=True)]
        result[name] = (torch.cat(kl), float(torch.cat(same).mean()))

    add("documents left out", [predict(model, None, prompt.instructions, text) for text in prompt.continuations])
    for codec in CODECS:
        pool = SharedKVPool(model)
        stored = [pool.build(document, codec, anywhere=True) for document in prompt.documents]
        for skip in SKIPS:
            context, made = composed(pool, prompt, stored, skip)
            add(f"{codec}, k = {skip}", [predict(model, context, prompt.gap, text) for text in prompt.continuations])
            for segment in reversed(made):
                pool.release(segment)
    return result


def first_token(engine: Engine, prompt: Prompt, number: int, *, reuse: str) -> tuple[float, int]:
    """Seconds to the first token and prompt tokens computed."""
    # a line of its own first, so that nothing but the documents can be found
    head = engine.tokenizer.encode(f"Request {number} ({reuse}). ")
    sampling = SamplingParams(temperature=0, max_tokens=1)
    request = Request((*head, *prompt.ids), None, sampling, reuse=reuse)  # type: ignore[arg-type]
    completion = engine.submit(request).result()
    return completion.timing.ttft_s, completion.prompt_tokens - completion.cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="2 prompts")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    count = 2 if options.quick else options.prompts
    model, tokenizer = load_model(options.model)
    attach(model)
    sources = [tokenizer.encode(path.read_text(encoding="utf-8")) for path in TEXTS.values()]
    prompts = [Prompt(tokenizer, sources, number) for number in range(count)]
    kls: dict[str, list[Tensor]] = {}
    tops: dict[str, list[float]] = {}
    for prompt in tqdm(prompts, desc="quality", leave=False):
        for name, (kl, top) in compare(model, prompt).items():
            kls.setdefault(name, []).append(kl)
            tops.setdefault(name, []).append(top)
    engine = Engine(model, tokenizer, prefix_cache=True)
    times: dict[str, list[tuple[float, int]]] = {"prefix": [], "anywhere": []}
    for prompt in prompts:
        for document in prompt.documents:
            engine.share(document, "k8v3", anywhere=True)
    for number, prompt in enumerate(tqdm(prompts * 2, desc="time", leave=False)):
        for reuse in ("prefix", "anywhere") if number % 2 else ("anywhere", "prefix"):
            seconds = first_token(engine, prompt, number, reuse=reuse)
            if number >= len(prompts):  # the first time round is for warming up
                times[reuse].append(seconds)
    engine.close()

    print(
        f"{options.model}, {count} prompts of {min(len(p.ids) for p in prompts)} to {max(len(p.ids) for p in prompts)} tokens\n"
    )
    print("| documents | mean KL (nats) | of prompts | p99 KL | same top token |")
    print("| --- | --- | --- | --- | --- |")
    print("| computed in the prompt | 0 | | 0 | 100 % |")
    rows: list[dict[str, Any]] = []
    for name, tokens in kls.items():
        means = [float(kl.mean()) for kl in tokens]
        every = torch.cat(tokens)
        row = {
            "way": name,
            "kl_mean": float(every.mean()),
            "kl_least": min(means),
            "kl_most": max(means),
            "kl_p99": float(every.quantile(0.99)),
            "top1": statistics.mean(tops[name]),
        }
        rows.append(row)
        print(
            f"| {name} | {row['kl_mean']:.4f} | {row['kl_least']:.4f} to {row['kl_most']:.4f} | {row['kl_p99']:.3f} | "
            f"{100 * float(row['top1']):.1f} % |"
        )
    whole, reused = (
        (statistics.median(s for s, _ in times[reuse]), statistics.median(n for _, n in times[reuse]))
        for reuse in times
    )
    print(
        f"\nfirst token: {whole[0]:.2f} s computed whole ({whole[1]:.0f} tokens), {reused[0]:.2f} s with the documents read "
        f"({reused[1]:.0f} tokens computed): {whole[0] / reused[0]:.1f}x sooner"
    )
    if options.json:
        facts = {"ttft_whole_s": whole[0], "ttft_anywhere_s": reused[0], "rows": rows}
        options.json.write_text(json.dumps({"model": options.model, "prompts": count, **facts}, indent=1))


if __name__ == "__main__":
    main()
