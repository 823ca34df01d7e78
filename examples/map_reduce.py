"""Map-reduce over several documents: each is shared while its questions are asked, then released.

    python examples/map_reduce.py

Every part of the text is a context of its own with three readers; the reduce step reads the answers alone. The pool holds a
document only as long as its questions run.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from polykv_agents import ChatPolyKV

TEXT = (Path(__file__).parent / "data" / "dashwood_inheritance.txt").read_text()
DOCUMENTS = {f"part {i + 1}": TEXT[3000 * i : 3000 * (i + 1)] for i in range(3)}
QUESTIONS = ("Who is named?", "What is said about money?", "What happens?")


class State(TypedDict):
    notes: Annotated[list[str], operator.add]
    summary: str


def build(llm: ChatPolyKV) -> Any:
    """START -> read (one for each document, all at once) -> reduce -> END."""

    def read(task: dict[str, str]) -> dict[str, Any]:
        with llm.share(task["text"]) as ctx:
            reader = llm.with_context(ctx)
            answers = reader.batch([[("system", "Answer in one sentence."), ("human", q)] for q in QUESTIONS])
            read_tokens = [a.usage_metadata["input_token_details"]["cache_read"] for a in answers]
            print(f"{task['name']}: {ctx.num_tokens} tokens prefilled once, read {len(answers)} times ({read_tokens})")
        return {"notes": [f"{task['name']}: {answer.text.strip()}" for answer in answers]}

    def reduce(state: State) -> dict[str, Any]:
        notes = "\n".join(sorted(state["notes"]))
        return {"summary": llm.invoke([("system", "Summarise the notes in two sentences."), ("human", notes)]).text}

    graph = StateGraph(State)
    graph.add_node("read", read)
    graph.add_node("reduce", reduce)
    tasks = [Send("read", {"name": name, "text": text}) for name, text in DOCUMENTS.items()]
    graph.add_conditional_edges(START, lambda state: tasks, ["read"])
    graph.add_edge("read", "reduce")
    graph.add_edge("reduce", END)
    return graph.compile()


def main() -> None:
    llm = ChatPolyKV(model="smollm2-135m", temperature=0, max_tokens=32, frequency_penalty=0.3)
    result = build(llm).invoke({"notes": [], "summary": ""})
    print("\nnotes:", *sorted(result["notes"]), sep="\n  ")
    print(f"\nsummary: {result['summary'].strip()}")
    print(f"\ncontexts left in the pool: {len(llm.pool.segments)}")
    llm.close()


if __name__ == "__main__":
    main()
