"""Objects out of a shared document, by each of the three methods.

    python examples/structured_extraction.py

The answer is held to the schema while it is written, so it always parses. A small model fills it in as well as it can.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from pydantic import BaseModel, Field

from polykv_agents import ChatPolyKV
from polykv_agents.structured_output import Method

DOCUMENT = (Path(__file__).parent / "data" / "dashwood_inheritance.txt").read_text()[:1500]


class Estate(BaseModel):
    """An estate and its family."""

    family_name: str = Field(max_length=40)
    house_name: str = Field(max_length=40)
    county: str = Field(max_length=40)


def main() -> None:
    llm = ChatPolyKV(model="smollm2-135m", temperature=0, max_tokens=120, frequency_penalty=0.2)
    with llm.share(DOCUMENT) as ctx:
        reader = llm.with_context(ctx)
        for method in get_args(Method):
            question = "Which estate is described? Answer as JSON with family_name, house_name, county."
            result = reader.with_structured_output(Estate, method=method, include_raw=True).invoke(question)
            read = result["raw"].usage_metadata["input_token_details"]["cache_read"]
            print(f"{method}: {result['parsed']!r}   [{read} tokens read from the pool]")
        choice = reader.invoke(
            "Is the chapter about a family or about a ship?",
            response_format={"type": "choice", "choices": ["a family", "a ship"]},
        )
        print(f"choice: {choice.text}")
    llm.close()


if __name__ == "__main__":
    main()
