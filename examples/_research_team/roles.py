"""Who is in the team, and what each of them asks."""

from dataclasses import dataclass

# One rule for all: the model of the demo is small, and drifts when it writes long answers.
STYLE = "You give short and concrete answers about the text above."


@dataclass(frozen=True)
class Role:
    name: str
    instructions: str
    question: str


def _role(name: str, persona: str, question: str) -> Role:
    return Role(name, f"You are {persona}. {STYLE}", question)


ROLES = [
    _role("lawyer", "a lawyer", "What did John Dashwood promise to his dying father?"),
    _role("accountant", "an accountant", "How much money do the widow and her daughters have to live on?"),
    _role("risk analyst", "a risk analyst", "Why does Fanny think that an annuity is a risk?"),
    _role("psychologist", "a psychologist", "How does Fanny change her husband's mind?"),
    _role("ethicist", "an ethicist", "Does John Dashwood keep the promise that he gave to his father?"),
    _role(
        "negotiator",
        "a negotiation coach",
        "List the reasons that Fanny gives against three thousand pounds.",
    ),
    _role("historian", "a historian", "What does this story show about how women could inherit in 1811?"),
    _role("journalist", "a journalist", "Report in a few sentences what happened to the Dashwood family."),
    _role("critic", "a literary critic", "How does Jane Austen make fun of John and Fanny Dashwood?"),
    _role(
        "dramaturg", "a dramaturg", "Which moment of the talk between John and Fanny is the turning point?"
    ),
    _role("social worker", "a social worker", "What do Mrs. Dashwood and her three daughters need now?"),
    _role(
        "financial adviser", "a financial adviser", "What could Mrs. Dashwood do with ten thousand pounds?"
    ),
    _role("mediator", "a family mediator", "What agreement would be fair to both sides of the family?"),
    _role("genealogist", "a genealogist", "Who are the members of the Dashwood family?"),
    _role(
        "teacher", "a school teacher", "Explain in simple words why Fanny does not want to give the money."
    ),
]

EDITOR = Role(
    "editor",
    "You are an editor. You turn the notes of a team into one short report.",
    "Write a report of one paragraph from these notes:",
)
