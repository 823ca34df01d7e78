"""From ChatOpenAI, ChatOllama or ChatAnthropic: one line changes.

    python examples/migrating.py

    - llm = ChatOpenAI(model="gpt-4o-mini", temperature=0, max_tokens=48, api_key=...)
    - llm = ChatOllama(model="smollm2", temperature=0, num_predict=48)
    - llm = ChatAnthropic(model="claude-haiku-4-5", temperature=0, max_tokens=48)
    + llm = ChatPolyKV(model="smollm2-135m", temperature=0, max_tokens=48)

Below that line nothing knows which model it is. The marks that Anthropic's prompt caching wants (``cache_control``) are read
here too: what stands before a mark is prefilled once, compressed, and shared by all calls that begin with it. migrating.md
lists the arguments that have another name.
"""

from __future__ import annotations

from pathlib import Path

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from polykv_agents import ChatPolyKV

DOCUMENT = (Path(__file__).parent / "data" / "dashwood_inheritance.txt").read_text()[:6000]


def main() -> None:
    llm = ChatPolyKV(model="smollm2-135m", temperature=0, max_tokens=48)

    chain = ChatPromptTemplate.from_template("Name one thing that is {colour}.") | llm | StrOutputParser()
    print("chain:", chain.invoke({"colour": "blue"}).strip())
    print("stream:", *(chunk.text for chunk in llm.stream("Count to five.", max_tokens=16)), sep="|")

    def ask(role: str, question: str) -> None:
        system = SystemMessage(
            [
                {"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": f"You are a {role}."},
            ]
        )
        message = llm.invoke([system, HumanMessage(question)])
        details = message.usage_metadata["input_token_details"]
        print(f"{role}: {message.text.strip()!r}")
        print(f"  cache_creation {details['cache_creation']}, cache_read {details['cache_read']}")

    ask("historian", "Who lived at Norland Park?")
    ask("lawyer", "Who is the heir?")
    llm.close()


if __name__ == "__main__":
    main()
