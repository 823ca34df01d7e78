"""A supervisor sends each question to the agent that has the tool for it; all read one shared document.

    python examples/supervisor_with_tools.py

The supervisor's choice and the agents' calls are held to their schemas while they are written, so every route exists and
every call is valid, even from a model of 135M parameters. Whether the choice is a wise one is up to the model. (The prebuilt
supervisor of the package langgraph-supervisor works with ChatPolyKV too, but wants a model that knows when to stop.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import BaseModel, Field

from polykv_agents import ChatPolyKV

DOCUMENT = (Path(__file__).parent / "data" / "dashwood_inheritance.txt").read_text()[:6000]
QUESTIONS = ("What do 3000 and 7000 pounds make together?", "Find the sentence with the word 'uncle'.")


class Route(BaseModel):
    """Who should do it: the accountant adds numbers, the librarian finds sentences."""

    agent: Literal["accountant", "librarian"] = Field(description="the agent for the task")


def add(a: int, b: int) -> int:
    """Add two numbers of pounds."""
    return a + b


def search(word: str) -> str:
    """Find the first sentence of the chapter with a word."""
    sentences = DOCUMENT.replace("\n", " ").split(". ")
    return next((s.strip() for s in sentences if word.lower() in s.lower()), f"no sentence has {word!r}")


@wrap_model_call
def tool_first(request: Any, handler: Any) -> Any:
    """Demands a call until a tool has answered, and plain text from then on."""
    answered = request.messages and isinstance(request.messages[-1], ToolMessage)
    return handler(request.override(tool_choice="none" if answered else "any"))


def build(reader: ChatPolyKV) -> Any:
    """START -> supervisor -> one of the agents -> END."""

    def supervisor(state: MessagesState) -> Command:
        task = [SystemMessage("You lead an accountant and a librarian. Choose who does the task."), *state["messages"]]
        route = reader.with_structured_output(Route).invoke(task)
        print(f"supervisor: the {route.agent}")
        return Command(goto=route.agent)

    graph = StateGraph(MessagesState)
    graph.add_node("supervisor", supervisor, destinations=("accountant", "librarian"))
    for name, tool in (("accountant", add), ("librarian", search)):
        prompt = f"You are the {name}. Use your tool."
        graph.add_node(name, create_agent(reader, [tool], name=name, system_prompt=prompt, middleware=[tool_first]))
        graph.add_edge(name, END)
    graph.add_edge(START, "supervisor")
    return graph.compile()


def main() -> None:
    llm = ChatPolyKV(model="smollm2-135m", temperature=0, max_tokens=48, frequency_penalty=0.3)
    with llm.share(DOCUMENT) as ctx:
        team = build(llm.with_context(ctx))
        for question in QUESTIONS:
            print(f"\n{question}")
            for message in team.invoke({"messages": [HumanMessage(question)]})["messages"][1:]:
                if isinstance(message, AIMessage):
                    calls = ", ".join(f"{call['name']}({call['args']})" for call in message.tool_calls)
                    read = message.usage_metadata["input_token_details"]["cache_read"]
                    print(f"{message.name}: {calls or message.text.strip()}   [{read} tokens read from the pool]")
                else:
                    print(f"  tool: {message.text}")
        print(f"\nshared: {ctx.num_tokens} tokens in {ctx.num_bytes / 1e6:.1f} MB, one copy for all")
    llm.close()


if __name__ == "__main__":
    main()
