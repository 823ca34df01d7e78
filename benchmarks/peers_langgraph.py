"""What works in a LangGraph program with ChatPolyKV, and with ChatHuggingFace, on the same weights.

    make bench-peers
    python benchmarks/peers_langgraph.py

Each check is a small program as a tutorial would write it, and looks at what comes out, not only that nothing is raised.
ChatHuggingFace runs over HuggingFacePipeline, its way for local models, with ``return_full_text=False`` (without it an answer
begins with the whole prompt). Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import ConfigurableField
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel
from transformers import PreTrainedModel

from polykv import load_model
from polykv_agents import ChatPolyKV

TOKENS = 24


class Verdict(BaseModel):
    """Who bears the risk."""

    who: str
    certain: bool


def search(query: str) -> str:
    """Search the archive."""
    return f"found {query}"


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


class Failed(Exception):
    """What came out is not what was asked for."""


def expect(condition: Any, reason: str) -> None:
    if not condition:
        raise Failed(reason)


def answer_only(llm: BaseChatModel) -> None:
    text = llm.invoke("Say hello.").text
    expect(text.strip(), "empty")
    expect("<|im_start|>" not in text and "Say hello." not in text, "the prompt is part of the answer")


def stream_is_invoke(llm: BaseChatModel) -> None:
    pieces = [chunk.text for chunk in llm.stream("Count to five.")]
    expect(len(pieces) > 3, f"{len(pieces)} pieces")
    expect("".join(pieces) == llm.invoke("Count to five.").text, "another text")


def asynchronous(llm: BaseChatModel) -> None:
    async def main() -> tuple[str, str]:
        pieces = [chunk.text async for chunk in llm.astream("Say hello.")]
        return "".join(pieces), (await llm.ainvoke("Say hello.")).text

    streamed, whole = asyncio.run(main())
    expect(streamed == whole == llm.invoke("Say hello.").text, "another text")


def batch(llm: BaseChatModel) -> None:
    questions = [f"What is {i} plus {i}?" for i in range(4)]
    expect(
        [m.text for m in llm.batch(questions)] == [llm.invoke(q).text for q in questions], "other texts than one by one"
    )


def max_tokens(llm: BaseChatModel) -> None:
    short, long = (len(llm.invoke("Tell me a long story.", max_tokens=n).text) for n in (3, TOKENS))
    expect(short < long / 2, "max_tokens of a call is not obeyed")


def stop(llm: BaseChatModel) -> None:
    whole = llm.invoke("Tell me a long story.").text
    word = whole.split()[4]
    expect(
        llm.invoke("Tell me a long story.", stop=[word]).text == whole[: whole.index(word)],
        "not cut before the stop string",
    )


def seeds(llm: BaseChatModel) -> None:
    texts = [llm.invoke("Tell me a story.", temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
    expect(texts[0] == texts[1] != texts[2], "a seed does not decide the text")


def usage(llm: BaseChatModel) -> None:
    message = llm.invoke("Say hello.")
    expect(message.usage_metadata and message.usage_metadata["input_tokens"] > 0, "no usage_metadata")
    expect(message.response_metadata.get("model_name"), "no model_name")


def after_a_tool(llm: BaseChatModel) -> None:
    call = {"name": "search", "args": {"query": "risk"}, "id": "1", "type": "tool_call"}
    history = [HumanMessage("Who?"), AIMessage("", tool_calls=[call]), ToolMessage("the carrier", tool_call_id="1")]
    expect(llm.invoke(history).text.strip(), "empty")


def doubled(llm: BaseChatModel) -> None:
    history = [
        SystemMessage("Be brief."),
        SystemMessage("Be kind."),
        HumanMessage("Hello."),
        HumanMessage("Who are you?"),
    ]
    expect(llm.invoke(history).text.strip(), "empty")


def tool_choice(llm: BaseChatModel) -> None:
    for choice in ("any", "search"):
        calls = llm.bind_tools([search, weather], tool_choice=choice).invoke("Hello!").tool_calls
        expect(calls and (choice == "any" or calls[0]["name"] == choice), f"tool_choice={choice!r} makes no such call")


def no_call(llm: BaseChatModel) -> None:
    message = llm.bind_tools([search], tool_choice="none").invoke("Search for the risk.")
    expect(not message.tool_calls and message.text.strip(), "calls all the same")


def structured(method: str) -> Callable[[BaseChatModel], None]:
    def check(llm: BaseChatModel) -> None:
        result = llm.with_structured_output(Verdict, method=method).invoke(
            "The carrier bears the risk. Answer as JSON with who and certain."
        )
        expect(isinstance(result, Verdict), f"gives {type(result).__name__}")

    return check


def agent(llm: BaseChatModel) -> None:
    result = create_agent(llm, [], response_format=ToolStrategy(Verdict)).invoke(
        {"messages": [HumanMessage("Who bears the risk?")]}, {"recursion_limit": 8}
    )
    expect(isinstance(result.get("structured_response"), Verdict), "no object")


def fan_out(llm: BaseChatModel) -> None:
    document = "The carrier bears the risk until the goods are handed over to the buyer. " * 20
    reader: Any = llm.with_context(llm.share(document)) if isinstance(llm, ChatPolyKV) else llm
    before = [] if isinstance(llm, ChatPolyKV) else [SystemMessage(document)]
    messages = reader.batch([[*before, HumanMessage(f"Question {i}?")] for i in range(4)])
    read = [(m.usage_metadata or {}).get("input_token_details", {}).get("cache_read", 0) for m in messages]
    expect(min(read) > 200, "the document is computed for each agent")


def too_long(llm: BaseChatModel) -> None:
    try:
        llm.invoke("word " * 9000)
    except Exception as error:
        expect("8192" in str(error), f"an error without the limit: {type(error).__name__}")
        return
    raise Failed("no error")


def token_counts(llm: BaseChatModel) -> None:
    messages = [HumanMessage("日本語のテキスト")]
    counted = llm.get_num_tokens_from_messages(messages)
    told = llm.invoke(messages).usage_metadata
    expect(told is not None and told["input_tokens"] == counted, f"{counted} counted")


def configurable(llm: BaseChatModel) -> None:
    field = "max_tokens" if "max_tokens" in type(llm).model_fields else "temperature"
    made = llm.configurable_fields(**{field: ConfigurableField(id="it")})
    short = made.with_config(configurable={"it": 3}).invoke("Tell me a long story.").text  # type: ignore[attr-defined]
    expect(len(short) < len(llm.invoke("Tell me a long story.").text) / 2, "no effect")


def cancellation(llm: BaseChatModel) -> None:
    async def main() -> float:
        task = asyncio.create_task(llm.ainvoke("Tell me a very long story.", max_tokens=400))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        started = time.perf_counter()
        await llm.ainvoke("Hi.", max_tokens=1)
        return time.perf_counter() - started

    expect(asyncio.run(main()) < 2.0, "the cancelled call goes on computing")


def checkpoints(llm: BaseChatModel) -> None:
    graph = StateGraph(MessagesState)
    graph.add_node("ask", lambda state: {"messages": [llm.invoke(state["messages"])]})
    graph.add_edge(START, "ask")
    compiled = graph.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    for question in ("Hello.", "And now?"):
        compiled.invoke({"messages": [HumanMessage(question)]}, config)
    expect(len(compiled.get_state(config).values["messages"]) == 4, "messages are lost")


def answer_cache(llm: BaseChatModel) -> None:
    cached = llm.model_copy(update={"cache": InMemoryCache()})
    one = cached.invoke("Hello.")
    started = time.perf_counter()
    expect(cached.invoke("Hello.").text == one.text and time.perf_counter() - started < 0.1, "not found again")


def unknown_argument(llm: BaseChatModel) -> None:
    try:
        llm.invoke("Hello.", max_new_tokenz=3)
    except Exception as error:
        expect("max_new_tokenz" in str(error), "an error that does not name it")
        return
    raise Failed("ignored")


CHECKS: dict[str, Callable[[BaseChatModel], None]] = {
    "`invoke` returns the answer alone": answer_only,
    "`stream` gives the text of `invoke`, in pieces": stream_is_invoke,
    "`ainvoke`, `astream`": asynchronous,
    "`batch` gives what single calls give": batch,
    "`max_tokens` of a call": max_tokens,
    "`stop` of a call": stop,
    "`seed` decides the text": seeds,
    "`usage_metadata`, `model_name`": usage,
    "history that ends with a tool's result": after_a_tool,
    "two messages of one role in a row": doubled,
    '`tool_choice="any"`, a name': tool_choice,
    '`tool_choice="none"`': no_call,
    "`with_structured_output`: json_schema": structured("json_schema"),
    "`with_structured_output`: function_calling": structured("function_calling"),
    "`with_structured_output`: json_mode": structured("json_mode"),
    "`create_agent` that ends with an object": agent,
    "four agents share the prefill of a document": fan_out,
    "too long a prompt is an error with the limit": too_long,
    "token counts by the model's own tokenizer": token_counts,
    "`configurable_fields`": configurable,
    "a cancelled call stops computing": cancellation,
    "a checkpointer keeps the messages": checkpoints,
    "LangChain's answer cache": answer_cache,
    "an unknown argument is refused by name": unknown_argument,
}


def polykv(model: PreTrainedModel, tokenizer: Any) -> BaseChatModel:
    return ChatPolyKV(model=model, tokenizer=tokenizer, temperature=0, max_tokens=TOKENS * 3, frequency_penalty=0.2)


def hugging_face(model: PreTrainedModel, tokenizer: Any) -> BaseChatModel:
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    from transformers import pipeline

    made = pipeline(
        "text-generation",
        model=model,
        tokenizer=tokenizer,
        max_new_tokens=TOKENS,
        do_sample=False,
        return_full_text=False,
    )
    return ChatHuggingFace(llm=HuggingFacePipeline(pipeline=made), tokenizer=tokenizer)


def outcome(check: Callable[[BaseChatModel], None], llm: BaseChatModel) -> str:
    """Empty if the check passed, else why not, in a few words."""
    try:
        check(llm)
    except Failed as failure:
        return str(failure)
    except Exception as error:
        logging.debug(traceback.format_exc())
        return type(error).__name__
    return ""


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, str]]:
    parser = argparse.ArgumentParser(description="What works with ChatPolyKV and with ChatHuggingFace")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=("ChatPolyKV", "ChatHuggingFace"))
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    constants.HF_HUB_OFFLINE = (
        True  # the weights are here; else ChatHuggingFace asks a hub for a tokenizer to count with
    )
    logging.getLogger("transformers").setLevel(logging.ERROR)
    makers = {"ChatPolyKV": polykv, "ChatHuggingFace": hugging_face}
    results: dict[str, dict[str, str]] = {}
    for name, make in makers.items():
        if args.only and name not in args.only:
            continue
        llm = make(*load_model("smollm2-135m"))
        results[name] = {title: outcome(check, llm) for title, check in CHECKS.items()}
        if isinstance(llm, ChatPolyKV):
            llm.close()
    print("\n| | " + " | ".join(results) + " |\n|---|" + "---|" * len(results))
    for title in CHECKS:
        cells = [f"no: {result[title]}" if result[title] else "yes" for result in results.values()]
        print(f"| {title} | {' | '.join(cells)} |")
    totals = [f"**{sum(not reason for reason in result.values())} of {len(CHECKS)}**" for result in results.values()]
    print(f"| works | {' | '.join(totals)} |")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return results


if __name__ == "__main__":
    main()
