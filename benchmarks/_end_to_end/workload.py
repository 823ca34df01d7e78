"""What every system gets to do: one document, N agents with a role and a question each, greedy answers of one length."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polykv_agents.rendering import Renderer
from polykv_agents.turns import shared_turns

DOCUMENT = Path(__file__).parents[2] / "examples" / "data" / "dashwood_inheritance.txt"
PERSONAS = (
    "lawyer",
    "banker",
    "judge",
    "teacher",
    "critic",
    "farmer",
    "doctor",
    "priest",
    "writer",
    "soldier",
    "lawyer's clerk",
    "widow",
    "painter",
    "poet",
)
QUESTIONS = (
    "Who inherits the estate, and on which terms?",
    "Why does Fanny dislike annuities?",
    "What did John promise to his father?",
    "Where do the daughters live now?",
    "Which reasons are given against the gift?",
    "Who changes his mind, and why?",
    "What would be fair to both families?",
    "Is an annuity a good idea here?",
    "Which sentence matters most in this text?",
    "How much money is there in all?",
)


class WorkloadError(ValueError):
    """The document or the agents cannot be had in the size that was asked for."""


@dataclass(frozen=True)
class Agent:
    """One agent.

    Attributes:
        role: its system message.
        question: its user message.
        prompt_ids: the whole prompt, the shared context's tokens first.
    """

    role: str
    question: str
    prompt_ids: tuple[int, ...]

    @property
    def messages(self) -> list[tuple[str, str]]:
        return [("system", self.role), ("human", self.question)]


@dataclass(frozen=True)
class Workload:
    """One context and its agents; the same token ids for every system.

    Attributes:
        document: the text that is shared; it heads the system message.
        context_ids: what all prompts start with.
        agents: the team, then some who come later; all prompts have the same number of tokens, so that batched baselines need no padding.
        new_tokens: tokens of each answer; the end-of-sequence token is banned.
        eos_ids: the tokens that are banned.
    """

    document: str
    context_ids: tuple[int, ...]
    agents: tuple[Agent, ...]
    new_tokens: int
    eos_ids: tuple[int, ...]

    @property
    def context_tokens(self) -> int:
        return len(self.context_ids)

    @property
    def later(self) -> range:
        """Indices of the agents who come later."""
        return range(len(self.agents) - LATER, len(self.agents))

    @property
    def own_tokens(self) -> int:
        """Tokens of a prompt after the shared ones."""
        return len(self.agents[0].prompt_ids) - self.context_tokens

    def messages_with_document(self, agent: Agent) -> list[tuple[str, str]]:
        """For models that share nothing: the same prompt as plain messages."""
        return [("system", f"{self.document}\n\n{agent.role}"), ("human", agent.question)]


LATER = 3
"""Agents who come later, each alone: what was computed for the team must not help them beyond the context."""


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of the generation config and the tokenizer's own."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = {*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id}
    return tuple(sorted(ids - {None}))


def make_workload(tokenizer: Any, eos: tuple[int, ...], tokens: int, agents: int, new_tokens: int) -> Workload:
    """A team and :data:`LATER` more agents. The document is cut, or repeated if it is too short, so that the shared
    context has ``tokens`` tokens or a few less.

    Raises:
        WorkloadError: there are not enough prompts of one length.
    """
    renderer = Renderer(tokenizer)
    text = DOCUMENT.read_text(encoding="utf-8")
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    while len(ids) < tokens:
        text, ids = f"{text}\n\n{text}", [*ids, *ids]
    length, shared = tokens, []
    while True:
        document = tokenizer.decode(ids[:length])
        turns = shared_turns(document)
        shared = renderer.shared_ids(turns)
        if len(shared) <= tokens:
            break
        length -= max(len(shared) - tokens, 1)
    by_length: dict[int, list[Agent]] = defaultdict(list)
    for shift in range(len(QUESTIONS)):
        for index, persona in enumerate(PERSONAS):
            role, question = f"You are a {persona}.", QUESTIONS[(index + shift) % len(QUESTIONS)]
            prompt = renderer.ids([*turns, {"role": "system", "content": role}, {"role": "user", "content": question}])
            by_length[len(prompt)].append(Agent(role, question, tuple(prompt)))
    chosen = max(by_length.values(), key=len)
    if len(chosen) < agents + LATER:
        raise WorkloadError(
            f"only {len(chosen)} prompts have the same number of tokens, {agents} agents and {LATER} later ones were asked for"
        )
    return Workload(document, tuple(shared), tuple(chosen[: agents + LATER]), new_tokens, eos)
