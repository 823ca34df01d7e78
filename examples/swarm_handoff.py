"""Two agents of a swarm hand the conversation to each other; the document is prefilled once for both.

    python examples/swarm_handoff.py

The agents differ in role and tools. Both come after the shared document in the prompt, so a hand-off costs the newcomer only
the conversation. A small model does not hand over by itself: here the agent that is asked for the other's subject must call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph_swarm import create_handoff_tool, create_swarm

from polykv_agents import ChatPolyKV, SharedContextMiddleware

DOCUMENT = (Path(__file__).parent / "data" / "dashwood_inheritance.txt").read_text()[:6000]
SUBJECTS = {"historian": "family", "accountant": "money"}
QUESTIONS = ("Which family lived at Norland?", "And the money: who had it?", "Back to the family: who were the heirs?")


def hands_over(own: str) -> Any:
    """Demands a hand-off where the question is about the other's subject, and text elsewhere."""

    @wrap_model_call
    def choose(request: Any, handler: Any) -> Any:
        asked = next(m.text for m in reversed(request.messages) if isinstance(m, HumanMessage))
        theirs = own not in asked and any(subject in asked for subject in SUBJECTS.values())
        if theirs:
            return handler(request.override(tool_choice="any"))
        # a small model repeats what it reads last, so the newcomer sees the question last and not the hand-off
        spoken = [m for m in request.messages if not isinstance(m, ToolMessage) and not getattr(m, "tool_calls", None)]
        return handler(request.override(tool_choice="none", messages=spoken))

    return choose


def main() -> None:
    llm = ChatPolyKV(model="smollm2-135m", temperature=0, max_tokens=40, frequency_penalty=0.3)
    shared = SharedContextMiddleware(DOCUMENT)  # shared at the first call, and listed last
    agents = [
        create_agent(
            llm,
            [create_handoff_tool(agent_name=other)],
            system_prompt=f"You are a {name} and answer in one sentence.",
            middleware=[hands_over(SUBJECTS[name]), shared],
            name=name,
        )
        for name, other in (("historian", "accountant"), ("accountant", "historian"))
    ]
    swarm = create_swarm(agents, default_active_agent="historian").compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    told = 0
    for question in QUESTIONS:
        print(f"\n{question}")
        messages = swarm.invoke({"messages": [HumanMessage(question)]}, config)["messages"]
        for message in messages[told:]:
            if isinstance(message, AIMessage):
                read = message.usage_metadata["input_token_details"]["cache_read"]
                text = ", ".join(call["name"] for call in message.tool_calls) or message.text.strip()
                print(
                    f"{message.name}: {text}   [{read} of {message.usage_metadata['input_tokens']} tokens from the pool]"
                )
        told = len(messages)
    print(f"\ncontexts in the pool: {len(llm.pool.segments)}")
    llm.close()


if __name__ == "__main__":
    main()
