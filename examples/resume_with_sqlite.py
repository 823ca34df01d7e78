"""A draft that a person approves, perhaps in another process: interrupt and resume with a SQLite checkpointer.

    python examples/resume_with_sqlite.py --db state.sqlite            # writes a draft and stops
    python examples/resume_with_sqlite.py --db state.sqlite --approve  # another process goes on

LangGraph runs an interrupted node again from its start. The same seed gives the same draft, so what is published is what was
approved. A shared context lives in its process: the state keeps its id, and the text makes it anew. --thread tells several
drafts in one file apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from polykv_agents import ChatPolyKV

DOCUMENT = (Path(__file__).parent / "data" / "dashwood_inheritance.txt").read_text()[:3000]


class State(TypedDict):
    context_id: str
    question: str
    published: str


def build(llm: ChatPolyKV, saver: Any) -> Any:
    """START -> draft (which waits for a decision)."""

    def draft(state: State) -> dict[str, str]:
        alive = llm.find_context(state["context_id"]) is not None
        reader = llm.with_context(state["context_id"], rebuild=DOCUMENT)
        print(f"context {reader.shared_context.id[:12]}: {'alive' if alive else 'made again from the text'}")
        text = reader.invoke(state["question"]).text.strip()
        decision = interrupt(text)
        return {"published": text if decision == "approve" else ""}

    graph = StateGraph(State)
    graph.add_node("draft", draft)
    graph.add_edge(START, "draft")
    return graph.compile(checkpointer=saver)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A draft that waits for approval")
    parser.add_argument("--db", default="state.sqlite", help="file of the checkpointer")
    parser.add_argument("--thread", default="1", help="the draft's name in that file")
    parser.add_argument("--approve", action="store_true", help="go on with a draft that waits")
    args = parser.parse_args(argv)
    llm = ChatPolyKV(model="smollm2-135m", temperature=0.8, seed=7, max_tokens=40)
    config: Any = {"configurable": {"thread_id": args.thread}}
    with SqliteSaver.from_conn_string(args.db) as saver:
        graph = build(llm, saver)
        if args.approve:
            if not graph.get_state(config).next:
                parser.error(f"no draft of thread {args.thread!r} waits in {args.db}; run without --approve first")
            result = graph.invoke(Command(resume="approve"), config)
            print(f"published: {result['published']!r}")
        else:
            with llm.share(DOCUMENT) as ctx:
                state = {"context_id": ctx.id, "question": "Who lived at Norland Park?", "published": ""}
                result = graph.invoke(state, config)
                print(f"draft: {result['__interrupt__'][0].value!r}")
                print(f"waiting for: --db {Path(args.db).name} --thread {args.thread} --approve")
    llm.close()


if __name__ == "__main__":
    main()
