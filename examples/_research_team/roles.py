"""Who is in the team, and what each of them asks. The questions are about examples/data/."""

from dataclasses import dataclass

# Short answers, because the default model is small and drifts when it writes much.
STYLE = "Answer the question about the text above in one or two sentences."


@dataclass(frozen=True)
class Role:
    name: str
    instructions: str
    question: str


def _role(name: str, persona: str, question: str) -> Role:
    return Role(name, f"You are {persona}. {STYLE}", question)


ROLES = [
    _role("lawyer", "a lawyer", "Did John Dashwood promise his father any particular sum?"),
    _role("accountant", "an accountant", "How much money do the widow and her daughters have to live on?"),
    _role("risk analyst", "a risk analyst", "Why does Fanny dislike annuities?"),
    _role("ethicist", "an ethicist", "Is Fanny selfish? Give one example."),
    _role("social worker", "a social worker", "Where do Mrs. Dashwood and her daughters live now?"),
    _role("historian", "a historian", "Who inherited the Norland estate?"),
    _role("psychologist", "a psychologist", "How does Fanny change her husband's mind?"),
    _role("negotiator", "a negotiation coach", "Which reasons does Fanny give against three thousand pounds?"),
    _role("judge", "a judge", "Does John Dashwood keep the promise that he gave to his father?"),
    _role("journalist", "a journalist", "Write a headline about the Dashwood family."),
    _role("critic", "a literary critic", "How does Jane Austen make fun of John and Fanny Dashwood?"),
    _role("dramaturg", "a dramaturg", "Which moment of the talk between John and Fanny is its turning point?"),
    _role("banker", "a banker", "Is an annuity of a hundred pounds a year a good idea?"),
    _role("mediator", "a family mediator", "What agreement would be fair to both sides of the family?"),
    _role("teacher", "a school teacher", "Why does Fanny not want to give the money? Use simple words."),
]

EDITOR = Role(
    "editor",
    "You are an editor.",
    "Rewrite these notes as one short paragraph.",
)
