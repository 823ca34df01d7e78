"""A supervisor sends each question to the agent that has the tool for it; all read one shared document.

    python examples/supervisor_with_tools.py

The team is langgraph-supervisor's own. A large model knows by itself when to hand over and when to stop; for one of 135M
parameters the rules are written down, and constrained decoding keeps them: first a call, then one sentence. So every
hand-off and every call is valid. Whether the choice is a wise one is up to the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable, RunnableBranch
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph_supervisor import create_handoff_tool, create_supervisor

from polykv_agents import ChatPolyKV

DOCUMENT = (Path(__file__).parent / "data" / "dashwood_inheritance.txt").read_text()[:6000]
QUESTIONS = ("Calculate 3000 plus 7000.", "Find the sentence with the word 'uncle'.")
SENTENCE = {"type": "regex", "pattern": r"[A-Z][A-Za-z0-9 ,;'\n]{10,140}\."}


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"{a} plus {b} is {a + b}"


def search(word: str) -> str:
    """Find the first sentence of the document with a word."""
    sentences = DOCUMENT.replace("\n", " ").split(". ")
    return next((s.strip() for s in sentences if word.lower() in s.lower()), f"no sentence has {word!r}")


@wrap_model_call
def tool_first(request: Any, handler: Any) -> Any:
    """Demands a call of an agent's own tool, and then a sentence."""
    if answered_by({tool.name for tool in request.tools}, request.messages):
        return handler(request.override(tool_choice="none", model_settings={"response_format": SENTENCE}))
    return handler(request.override(tool_choice="any"))


def answered_by(tools: set[str], messages: list[BaseMessage]) -> bool:
    """Whether one of the tools has answered since the user's last message."""
    last = max(i for i, message in enumerate(messages) if isinstance(message, HumanMessage))
    return any(isinstance(message, ToolMessage) and message.name in tools for message in messages[last:])


def rules(reader: ChatPolyKV, hand_offs: list[Any]) -> Runnable:
    """A model that hands over until an agent has been asked, and then reports."""
    names = {tool.name for tool in hand_offs}
    report = reader.bind(tool_choice="none", response_format=SENTENCE)
    chosen = RunnableBranch((lambda messages: answered_by(names, messages), report), reader.bind(tool_choice="any"))
    return chosen.bind(tools=[convert_to_openai_tool(tool) for tool in hand_offs])


def build(reader: ChatPolyKV) -> Any:
    """The supervisor, who hands over to one of the agents and hears from it."""
    agents = [
        create_agent(reader, [tool], name=name, system_prompt=f"You are the {name}.", middleware=[tool_first])
        for name, tool in (("accountant", add), ("librarian", search))
    ]
    hand_offs = [
        create_handoff_tool(agent_name="accountant", name="calculate", description="Calculate with numbers"),
        create_handoff_tool(agent_name="librarian", name="find_word", description="Find a word in the text"),
    ]
    return create_supervisor(
        agents,
        model=rules(reader, hand_offs),
        tools=hand_offs,
        prompt="Choose the right tool.",
        output_mode="full_history",
        add_handoff_back_messages=False,
    ).compile()


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
                    print(f"{message.name}: {calls or message.text}   [{read} tokens read from the pool]")
                else:
                    print(f"  {message.name}: {message.text[:100]}")
        print(f"\nshared: {ctx.num_tokens} tokens in {ctx.num_bytes / 1e6:.1f} MB, one copy for all")
    llm.close()


if __name__ == "__main__":
    main()
