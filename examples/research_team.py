"""A team of LangGraph agents that reads one document through one compressed KV cache.

    python examples/research_team.py --agents 8 --codec k8v3

`llm.share` prefills the document once and compresses its keys and values. Every chat model bound to it with
`llm.with_context` reads that one copy and keeps only its own few tokens for itself. The rest is ordinary
LangGraph: analysts with their own roles and questions, all at once, then an editor who reads their answers.
"""

import operator
import sys
from typing import Annotated, Any, TypedDict

from _research_team.display import Display, open_display
from _research_team.measure import Measurements, Stopwatch
from _research_team.options import Options, fail, parse_options
from _research_team.plot import save_figure
from _research_team.roles import EDITOR, ROLES, Role
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from polykv.errors import PolyKVError
from polykv_agents import ChatPolyKV

REPORT_TOKENS = 128


class Team(TypedDict, total=False):
    roles: list[Role]
    answers: Annotated[dict[str, AIMessage], operator.or_]  # the analysts write at the same time: joined
    report: AIMessage


def build_graph(llm: ChatPolyKV, reader: ChatPolyKV) -> Any:
    """START -> one analyst for each role, all at once -> editor -> END."""

    def fan_out(team: Team) -> list[Send]:
        return [Send("analyst", role) for role in team["roles"]]

    def analyst(role: Role) -> Team:
        # The document is already there, in front of these messages.
        return {"answers": {role.name: ask(reader, role, role.question)}}

    def editor(team: Team) -> Team:
        # The report is made of the answers alone, so `llm` will do: it is not bound to the document.
        notes = "\n".join(f"- {answer.text}" for answer in team["answers"].values())
        return {"report": ask(llm.bind(max_tokens=REPORT_TOKENS), EDITOR, f"{EDITOR.question}\n\n{notes}")}

    graph = StateGraph(Team)
    graph.add_node("analyst", analyst)
    graph.add_node("editor", editor)
    graph.add_conditional_edges(START, fan_out, ["analyst"])
    graph.add_edge("analyst", "editor")
    graph.add_edge("editor", END)
    return graph.compile()


def ask(model: Runnable, role: Role, question: str) -> AIMessage:
    """One call; the metadata tells the live display whose tokens it sees."""
    messages = [("system", role.instructions), ("human", question)]
    return model.invoke(messages, config={"metadata": {"agent": role.name}})


def run_graph(graph: Any, roles: list[Role], watch: Stopwatch, display: Display) -> Team:
    """As graph.invoke(team), but tokens go to the display while the agents write them."""
    team: Team = {"roles": roles}
    names = [role.name for role in roles]
    watch.start(names)
    with display.writing([*names, EDITOR.name]):
        # Every analyst in flight at once; the stream itself waits in one more thread of the same pool.
        config = {"max_concurrency": len(roles) + 1}
        for mode, event in graph.stream(team, config, stream_mode=["messages", "values"]):
            if mode == "messages":
                chunk, metadata = event
                watch.token(metadata["agent"], chunk)
                display.token(metadata["agent"], chunk)
            else:
                team = event
                if team.get("answers") and "report" not in team:
                    watch.start([EDITOR.name])
    return team


def run(options: Options, display: Display) -> None:
    roles = ROLES[: options.agents]
    llm = ChatPolyKV(model=options.model, codec=options.codec, temperature=0, max_tokens=options.max_tokens)
    try:
        display.note(f"Loading {options.model}")
        with display.progress() as progress:
            llm.load(progress=progress)
            watch = Stopwatch()
            context = llm.share(options.text, progress=progress)
            watch.mark_built()
        display.note(f"{options.document.name}: {context.num_tokens:,} tokens, readers: {len(roles)}")
        with context:
            team = run_graph(build_graph(llm, llm.with_context(context)), roles, watch, display)
            results = Measurements.collect(llm, context, watch, team["answers"])
    finally:
        llm.close()
    for role in roles:
        display.answer(role, team["answers"][role.name])
    display.answer(EDITOR, team["report"])
    display.table("This run", results.rows())
    save_figure(results, options.out)
    display.note(f"Figure: {options.out}")


def main() -> int:
    try:
        run(parse_options(max_agents=len(ROLES)), open_display())
    except PolyKVError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
