"""Function calling on a sample of BFCL v4, held to the schemas and asked for in a plain prompt.

    pip install --no-deps bfcl-eval
    python benchmarks/bfcl.py

The questions, functions and accepted answers are those of the package bfcl-eval (the Berkeley Function Calling Leaderboard,
https://gorilla.cs.berkeley.edu/leaderboard.html): its categories simple_python, multiple and parallel, a fixed sample of 100.
Of the same model and questions it prints, for both ways:

- valid: emitted calls that are of an offered function and match its JSON schema, by an independent validator (jsonschema);
- exact: questions whose calls are, in any order, the expected ones by the leaderboard's rules (accepted values for each
  argument; strings without case, spaces and punctuation; numbers as numbers).

It is a report on validity; how often a model of 135M parameters is right says little about larger ones.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
from langchain_core.messages import HumanMessage, SystemMessage

from polykv.errors import InvalidRequestError
from polykv_agents import ChatPolyKV
from polykv_agents.tool_calls import Call, InvalidCall, Tool
from polykv_agents.tool_calls.registry import get_format

SHARES = {"simple_python": 40, "multiple": 30, "parallel": 30}
SEED = 5
TYPES = {"dict": "object", "float": "number", "tuple": "array", "int": "integer", "bool": "boolean", "str": "string"}
PLAIN = """You may call these functions:
{functions}

Answer with nothing but a JSON list of calls, as [{{"name": "function name", "arguments": {{"argument": "value"}}}}]."""


def data_folder() -> Path:
    """Where the installed package keeps its questions; it is found and not imported, since its imports are many."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise SystemExit("the questions come with the package bfcl-eval; run: pip install --no-deps bfcl-eval")
    return Path(spec.origin).parent / "data"


def json_schema(part: Any) -> Any:
    """BFCL's schema as a JSON schema: its types are those of Python, ``any`` is no type, and ``optional`` is no keyword."""
    if isinstance(part, list):
        return [json_schema(item) for item in part]
    if not isinstance(part, Mapping):
        return part
    result = {}
    for key, value in part.items():
        if key == "properties":
            result[key] = {name: json_schema(schema) for name, schema in value.items()}
        elif key == "type" and isinstance(value, str):
            if value != "any":
                result[key] = TYPES.get(value, value)
        elif key in ("optional", "default", "format"):
            continue
        else:
            result[key] = json_schema(value)
    return result


def sample(limit: int | None) -> list[dict[str, Any]]:
    """The fixed sample, each question with its category, tools and accepted answers."""
    chosen: list[dict[str, Any]] = []
    for category, count in SHARES.items():
        lines = (data_folder() / f"BFCL_v4_{category}.json").read_text().splitlines()
        truths = (data_folder() / "possible_answer" / f"BFCL_v4_{category}.json").read_text().splitlines()
        answers = {entry["id"]: entry["ground_truth"] for entry in map(json.loads, truths)}
        entries = [json.loads(line) for line in lines]
        for entry in random.Random(SEED).sample(entries, count)[: None if limit is None else max(1, limit // 3)]:
            tools = [
                {
                    "type": "function",
                    "function": {
                        "name": function["name"],
                        "description": function["description"],
                        "parameters": json_schema(function["parameters"]),
                    },
                }
                for function in entry["function"]
            ]
            question = entry["question"][0]
            chosen.append(
                {
                    "id": entry["id"],
                    "category": category,
                    "messages": [
                        (SystemMessage if m["role"] == "system" else HumanMessage)(m["content"]) for m in question
                    ],
                    "tools": tools,
                    "truth": answers[entry["id"]],
                }
            )
    return chosen


def is_valid(call: tuple[str, Any], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a call is of an offered function and matches its schema."""
    for tool in tools:
        if tool["function"]["name"] == call[0]:
            try:
                jsonschema.validate(call[1], tool["function"]["parameters"])
            except jsonschema.ValidationError:
                return False
            return set(call[1]) <= set(tool["function"]["parameters"].get("properties", ()))
    return False


def plain_value(value: Any) -> Any:
    """A value such that what the leaderboard takes for equal is equal."""
    if isinstance(value, str):
        return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    return value


def fits(value: Any, accepted: Sequence[Any]) -> bool:
    """Whether a value is one of the accepted ones; accepted objects hold a list of accepted values for each key."""
    for option in accepted:
        if isinstance(option, Mapping) and isinstance(value, Mapping):
            if set(value) <= set(option) and all(
                fits(value[key], options) if key in value else "" in options for key, options in option.items()
            ):
                return True
        elif plain_value(value) == plain_value(option) and isinstance(value, bool) == isinstance(option, bool):
            return True
    return False


def is_expected(call: tuple[str, Any], truth: Mapping[str, Any]) -> bool:
    """Whether a call is the expected one; ``""`` among the accepted values means that an argument may be left out."""
    (name, arguments), ((expected, accepted),) = call, truth.items()
    return (
        name == expected
        and isinstance(call[1], Mapping)
        and set(arguments) <= set(accepted)
        and all(fits(arguments[k], v) if k in arguments else "" in v for k, v in accepted.items())
    )


def is_exact(calls: Sequence[tuple[str, Any]], truths: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the calls are the expected ones, in any order."""
    left = list(truths)
    for call in calls:
        match = next((truth for truth in left if is_expected(call, truth)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def constrained(llm: ChatPolyKV, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls through ``bind_tools`` with a required call."""
    results: list[dict[str, Any]] = []
    runs = []
    for question in questions:
        try:
            bound = llm.bind_tools(
                question["tools"], tool_choice="required", parallel_tool_calls=question["category"] == "parallel"
            )
            runs.append((question, bound.kwargs))  # type: ignore[attr-defined]
        except InvalidRequestError as error:
            results.append({"id": question["id"], "calls": [], "invalid": 0, "cut": False, "refused": str(error)})

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(llm.ainvoke(question["messages"], **kwargs) for question, kwargs in runs))

    for (question, _), message in zip(runs, asyncio.run(ask_all()), strict=True):
        results.append(
            {
                "id": question["id"],
                "calls": [(call["name"], call["args"]) for call in message.tool_calls],
                "invalid": 0,
                "cut": message.response_metadata["finish_reason"] == "length",
            }
        )
    return results


def plain(llm: ChatPolyKV, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls asked for in words, and read from the text as leniently as we can."""
    prompts = []
    for question in questions:
        functions = "\n".join(json.dumps(tool["function"]) for tool in question["tools"])
        prompts.append([SystemMessage(PLAIN.format(functions=functions)), *question["messages"]])
    results = []
    for question, message in zip(questions, llm.batch(prompts), strict=True):
        tools = [Tool(t["function"]["name"], "", t["function"]["parameters"]) for t in question["tools"]]
        parser = get_format("plain_json").parser(tools)
        events = [*parser.feed(message.text.strip()), *parser.finish(complete=True)]
        results.append(
            {
                "id": question["id"],
                "calls": [(event.name, dict(event.arguments)) for event in events if isinstance(event, Call)],
                "invalid": sum(isinstance(event, InvalidCall) for event in events),
                "cut": message.response_metadata["finish_reason"] == "length",
            }
        )
    return results


def score(questions: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts for each category and for all."""
    by_id = {question["id"]: question for question in questions}
    table: dict[str, dict[str, Any]] = {}
    for category in (*SHARES, "all"):
        rows = [r for r in results if category in ("all", by_id[r["id"]]["category"])]
        calls = [(call, by_id[r["id"]]) for r in rows for call in r["calls"]]
        broken = sum(r["invalid"] for r in rows)
        table[category] = {
            "questions": len(rows),
            "calls": len(calls) + broken,
            "valid": sum(is_valid(call, question["tools"]) for call, question in calls),
            "exact": sum(is_exact(r["calls"], by_id[r["id"]]["truth"]) for r in rows),
            "no_call": sum(not r["calls"] and not r["invalid"] for r in rows),
            "cut": sum(r["cut"] for r in rows),
            "refused": [r["id"] for r in rows if "refused" in r],
        }
    return table


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Function calling on a sample of BFCL v4")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, help="about this many questions instead of 100")
    parser.add_argument("--json", type=Path, help="write questions, calls and counts to this file")
    args = parser.parse_args(argv)
    questions = sample(args.limit)
    llm = ChatPolyKV(model=args.model, temperature=0, max_tokens=args.max_tokens, weights=None)
    llm.load()
    report: dict[str, Any] = {"model": args.model, "ids": [q["id"] for q in questions], "ways": {}}
    for name, way in (("held to the schemas", constrained), ("plain prompt", plain)):
        started = time.perf_counter()
        results = way(llm, questions)
        seconds = time.perf_counter() - started
        report["ways"][name] = {"seconds": seconds, "scores": score(questions, results), "results": results}
    llm.close()
    print(f"\nBFCL v4, {len(questions)} questions, {args.model}, temperature 0, max_tokens {args.max_tokens}\n")
    print("| way | category | questions | calls | valid | exact | no call | cut | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, way_report in report["ways"].items():
        for category, row in way_report["scores"].items():
            share = f"{row['valid'] / row['calls']:.0%}" if row["calls"] else "-"
            seconds = f"{way_report['seconds']:.0f}" if category == "all" else ""
            print(
                f"| {name} | {category} | {row['questions']} | {row['calls']} | {row['valid']} ({share}) | {row['exact']} | "
                f"{row['no_call']} | {row['cut']} | {seconds} |"
            )
            if row["refused"] and category == "all":
                print(f"no grammar for: {', '.join(row['refused'])}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, default=str))
    return report


if __name__ == "__main__":
    main()
