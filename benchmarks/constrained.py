"""What constrained decoding costs: tokens per second, first token, masks.

    python benchmarks/constrained.py            # SmolLM2-135M, 1, 4 and 15 requests
    python benchmarks/constrained.py --quick

Every run with a grammar stands beside a run without one that makes as many tokens a request, in one interleaved session; the
figures are medians. Two grammars: a JSON schema with free strings, and a union of tools as `bind_tools` makes it. The requests
ask for the same, so that they end after the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from polykv import Engine, Grammar, SamplingParams, load_model
from polykv.engine import grammar as grammar_module
from polykv.models.support import embedding_weight
from polykv_agents.tool_calls import Tool
from polykv_agents.tool_calls.registry import get_format

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "city": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "city", "age", "languages"],
    "additionalProperties": False,
}
PROMPT = "<|im_start|>user\nDescribe a person with name, city, age and languages, as JSON.<|im_end|>\n<|im_start|>assistant\n"


def tools(count: int) -> list[Tool]:
    """Tools with the person's properties under different names."""
    return [Tool(f"store_person_{i}", "Store a person.", PERSON) for i in range(count)]


def grammars() -> dict[str, Grammar]:
    union = get_format("hermes").grammar(tools(20), "required", parallel=False)
    return {"JSON schema": Grammar.json_schema(PERSON), "20 tools": Grammar.lark(union)}


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def decode(engine: Engine, count: int, grammar: Grammar | None, max_tokens: int, *, ends: bool) -> tuple[float, int]:
    """Seconds from the last first token to the last token, and the tokens of all requests.

    Without a grammar the end of sequence is banned, so that every request makes ``max_tokens``.
    """
    banned = {} if ends else {"logit_bias": {int(engine.tokenizer.eos_token_id): -100.0}}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, grammar=grammar, **banned)  # type: ignore[arg-type]
    ids = engine.tokenizer.encode(PROMPT)
    seconds, completions = timed(
        lambda: [handle.result() for handle in [engine.generate(ids, params) for _ in range(count)]]
    )
    first = statistics.median(completion.timing.ttft_s for completion in completions)
    return seconds - first, sum(len(completion.token_ids) for completion in completions)


def first_token(engine: Engine, grammar: Grammar | None) -> float:
    params = SamplingParams(temperature=0, max_tokens=1, grammar=grammar)
    seconds, _ = timed(lambda: engine.generate(engine.tokenizer.encode(PROMPT), params).result())
    return seconds


def mask_microseconds(engine: Engine, grammar: Grammar, rows: int, repeats: int) -> float:
    """Microseconds a row of one mask, at every token of an answer."""
    vocabulary = embedding_weight(engine.model).shape[0]
    compiler = grammar_module.compiler_for(engine.tokenizer, vocabulary, engine._eos_ids)
    params = SamplingParams(temperature=0, max_tokens=400, grammar=grammar)
    answer = engine.generate(engine.tokenizer.encode(PROMPT), params).result().token_ids
    spent: list[float] = []
    for _ in range(repeats):
        matchers = [compiler.matcher(grammar) for _ in range(rows)]
        for token_id in answer:
            seconds, _ = timed(lambda matchers=matchers: grammar_module.masks_of(matchers))  # type: ignore[misc]
            spent.append(seconds / rows)
            for matcher in matchers:
                matcher.consume(token_id)
            if matchers[0].finished:
                break
    return statistics.median(spent) * 1e6


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="What constrained decoding costs")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 15])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="three repeats")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    repeats = 3 if args.quick else args.repeats
    model, tokenizer = load_model("smollm2-135m")
    report: dict[str, Any] = {"threads": torch.get_num_threads(), "rows": [], "first_token": {}, "mask_us": {}}

    vocabulary = embedding_weight(model).shape[0]
    # without the prefix cache: the same prompts come again and again
    engines = {forced: Engine(model, tokenizer, fast_forward=forced, prefix_cache=False) for forced in (True, False)}
    build, compiler = timed(lambda: grammar_module.compiler_for(tokenizer, vocabulary, engines[True]._eos_ids))
    print(f"\nSmolLM2-135M, float32, {torch.get_num_threads()} threads, medians of {repeats}")
    print(f"\ntokenizer trie, once a process: {build * 1e3:.0f} ms")
    for name, grammar in grammars().items():
        compile_s, _ = timed(lambda grammar=grammar: compiler.matcher(grammar))  # type: ignore[misc]
        again_s, _ = timed(lambda grammar=grammar: compiler.matcher(grammar))  # type: ignore[misc]
        plain, held = [], []
        for _ in range(repeats):
            plain.append(first_token(engines[True], None))
            held.append(first_token(engines[True], grammar))
        masks = {rows: mask_microseconds(engines[True], grammar, rows, 1) for rows in (1, 15)}
        report["first_token"][name] = {
            "compile_s": compile_s,
            "again_s": again_s,
            "plain_s": statistics.median(plain),
            "held_s": statistics.median(held),
        }
        report["mask_us"][name] = masks
        print(
            f"{name}: compiled in {compile_s * 1e3:.1f} ms, from then on {again_s * 1e3:.2f} ms; first token "
            f"{statistics.median(held) * 1e3:.0f} ms, without a grammar {statistics.median(plain) * 1e3:.0f} ms; mask "
            f"{masks[1]:.0f} us a row alone, {masks[15]:.0f} us a row of 15"
        )

    print("\n| requests | grammar | forced tokens | tokens/request | tok/s | without a grammar | ratio |")
    print("|---|---|---|---|---|---|---|")
    for count in args.requests:
        for name, grammar in grammars().items():
            for fast_forward in (False, True):
                held_rate, plain_rate, length = [], [], 0
                for _ in range(repeats):
                    seconds, tokens = decode(engines[fast_forward], count, grammar, 400, ends=True)
                    held_rate.append(tokens / seconds)
                    length = tokens // count
                    seconds, tokens = decode(engines[fast_forward], count, None, length, ends=False)
                    plain_rate.append(tokens / seconds)
                held_median, plain_median = statistics.median(held_rate), statistics.median(plain_rate)
                row = {
                    "requests": count,
                    "grammar": name,
                    "fast_forward": fast_forward,
                    "tokens": length,
                    "tok_s": held_median,
                    "plain_tok_s": plain_median,
                    "ratio": held_median / plain_median,
                }
                report["rows"].append(row)
                way = "together" if fast_forward else "one a step"
                print(
                    f"| {count} | {name} | {way} | {length} | {held_median:.0f} | {plain_median:.0f} | "
                    f"{row['ratio']:.2f} |"
                )
    for engine in engines.values():
        engine.close()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
