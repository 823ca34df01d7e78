"""Agreement of the answers, the table, and the goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from _end_to_end.measuring import Row

TIE = 1e-3
"""Paths with other batch shapes may choose another token where the best two logits are closer than this."""
REFERENCE = "static"
EXACT = ("sequential", "dynamic", "static", "static-generate", "exact")
"""Systems with the reference's weights, an uncompressed cache and the same banned tokens: they must agree with it."""


def compare_answers(rows: Sequence[Row], decode: Callable[[list[int]], str]) -> None:
    """Sets agreement and correctness of each row against the reference with the most agents.

    Args:
        rows: all of a pass.
        decode: token ids to text, for systems that give text only.
    """
    references = [row for row in rows if row.system == REFERENCE and row.answers]
    if not references:
        return
    reference = max(references, key=lambda row: row.agents)
    texts = [decode(answer) for answer in reference.answers]
    for row in rows:
        if row.texts:
            shares = [_common(a, b) / max(len(b), 1) for a, b in zip(row.texts, texts, strict=False)]
        else:
            shares, wrong = [], False
            for index, (answer, wanted) in enumerate(zip(row.answers, reference.answers, strict=False)):
                wanted = wanted[: len(answer)]
                same = _common(answer, wanted)
                shares.append(same / max(len(wanted), 1))
                wrong |= same < len(wanted) and reference.margins[index][same] >= TIE
            if row.system in EXACT and shares:
                row.correct = not wrong
        row.agreement = sum(shares) / len(shares) if shares else None


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def as_json(row: Row) -> dict[str, object]:
    """A row without the answers themselves."""
    left_out = ("answers", "texts", "margins")
    return {key: value for key, value in asdict(row).items() if key not in left_out}


def _seconds(row: Row, key: str) -> str:
    value = getattr(row, key)
    if value is None:
        return "-"
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return text + ("*" if key in row.extrapolated else "")


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.0f}"


HEADER = (
    "agents",
    "system",
    "cold build s",
    "first token s",
    "later, alone s",
    "slowest of all s",
    "decode tok/s",
    "x static",
    "peak MB",
    "live MB",
    "graph s",
    "agrees",
)


def table(rows: Sequence[Row]) -> str:
    """Markdown, aligned, systems of one number of agents together."""
    lines = [list(HEADER)]
    missing = []
    for agents in sorted({row.agents for row in rows}):
        here = [row for row in rows if row.agents == agents]
        base = next((r.decode_tokens_per_s for r in here if r.system == REFERENCE), None)
        for row in here:
            if not row.measured:
                missing.append(row)
                continue
            rate = row.decode_tokens_per_s
            agrees = "-" if row.agreement is None else f"{100 * row.agreement:.0f} %"
            lines.append(
                [
                    str(agents),
                    row.system,
                    *(_seconds(row, key) for key in ("cold_s", "first_ttft_s", "next_ttft_s", "slowest_ttft_s")),
                    "-" if rate is None else f"{rate:.1f}",
                    f"{rate / base:.2f}" if rate and base else "-",
                    _megabytes(row.peak_extra_bytes),
                    _megabytes(row.live_bytes),
                    _seconds(row, "wall_s"),
                    agrees if row.correct is not False else f"{agrees} WRONG",
                ]
            )
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    out = []
    for number, line in enumerate(lines):
        cells = [
            text.ljust(width) if column == 1 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        out.append(f"| {' | '.join(cells)} |")
        if number == 0:
            out.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    notes = {f"{row.system}: {row.note}" for row in rows if row.measured and row.note}
    absent: dict[str, list[str]] = {}
    for row in missing:
        absent.setdefault(f"{row.system}: {row.note}", []).append(str(row.agents))
    out += ["", "* extrapolated (from fewer agents or steps, as noted)"]
    out += [f"  {note}" for note in sorted(notes)]
    out += [f"  {note} (N = {', '.join(agents)})" for note, agents in absent.items()]
    return "\n".join(out)


@dataclass(frozen=True)
class Goal:
    """One goal: a ratio and its bound; without a bound it is only reported."""

    text: str
    value: float | None
    bound: float | None
    at_least: bool = True

    def line(self) -> str:
        bound = "-" if self.bound is None else f"{'>=' if self.at_least else '<='} {self.bound:g}"
        if self.value is None:
            return f"| {self.text} | {bound} | - | not measured |"
        if self.bound is None:
            return f"| {self.text} | {bound} | {self.value:.3g} | |"
        met = self.value >= self.bound if self.at_least else self.value <= self.bound
        return f"| {self.text} | {bound} | {self.value:.3g} | {'met' if met else 'NOT MET'} |"


def goals(rows: Sequence[Row], codec: str = "k8v3", wanted_agents: int = 15) -> str:
    """What was asked for, with this run's figures beside it; at the number of agents nearest to the wanted one."""
    counts = sorted({row.agents for row in rows})
    many = min(counts, key=lambda count: (abs(count - wanted_agents), -count))

    def get(system: str, key: str, agents: int = many) -> float | None:
        found = [r for r in rows if r.system == system and r.agents == agents]
        value: float | None = getattr(found[0], key) if found else None
        return value

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a is not None and b else None

    def best_of(key: str, systems: Sequence[str], choose: Callable[[list[float]], float], agents: int) -> float | None:
        values = [value for system in systems if (value := get(system, key, agents)) is not None]
        return choose(values) if values else None

    native = ("llama.cpp-native-f16", "llama.cpp-native-q8_0")
    wheel = ("llama.cpp-f16", "llama.cpp-q8_0")
    rate = get(codec, "decode_tokens_per_s")

    def decode_goal(systems: Sequence[str], what: str, bound: float | None) -> Goal:
        return Goal(
            f"N = {many}: decode against {what}",
            ratio(rate, best_of("decode_tokens_per_s", systems, max, many)),
            bound,
        )

    stated = [
        decode_goal(["sequential"], "sequential generate", 8),
        decode_goal(["dynamic"], "batched DynamicCache", 8),
        decode_goal([REFERENCE], "batched StaticCache", 2.5),
        decode_goal(native, "llama.cpp, native, the better of f16 and q8_0", 2),
        decode_goal(native, "the same, stretch", 3),
        decode_goal(wheel, "llama.cpp, wheel", None),
    ]
    for name, systems in (("native", native), ("wheel", wheel)):
        stated.append(
            Goal(
                f"cold build: llama.cpp {name} / ours",
                ratio(best_of("cold_s", systems, min, many), get(codec, "cold_s")),
                1.5,
            )
        )
        stated.append(
            Goal(
                f"N = {many}: graph, ours / llama.cpp {name}",
                ratio(get(codec, "wall_s"), best_of("wall_s", systems, min, many)),
                0.5,
                at_least=False,
            )
        )
    cold = get(codec, "first_ttft_s", counts[0])
    stated += [
        Goal("first token of a later agent alone / cold", ratio(get(codec, "next_ttft_s"), cold), 0.1, at_least=False),
        Goal(
            f"first token of the slowest of {many} / cold",
            ratio(get(codec, "slowest_ttft_s"), cold),
            0.3,
            at_least=False,
        ),
        Goal(
            f"N = {many}: live bytes beyond weights / StaticCache's",
            ratio(get(codec, "live_bytes"), get(REFERENCE, "live_bytes")),
            0.1,
            at_least=False,
        ),
        Goal(
            f"N = {many}: peak resident bytes beyond weights / StaticCache's",
            ratio(get(codec, "peak_extra_bytes"), get(REFERENCE, "peak_extra_bytes")),
            0.1,
            at_least=False,
        ),
    ]
    if 1 in counts:
        alone = get(codec, "decode_tokens_per_s", 1)
        stated.append(
            Goal(
                "N = 1: decode against generate with a warm StaticCache",
                ratio(alone, get("static-generate", "decode_tokens_per_s", 1)),
                1,
            )
        )
        for name, systems in (("native", native), ("wheel", wheel)):
            stated.append(
                Goal(
                    f"N = 1: decode against llama.cpp {name}",
                    ratio(alone, best_of("decode_tokens_per_s", systems, max, 1)),
                    None,
                )
            )
    lines = [f"| goal, for `{codec}` | bound | here | |", "|---|---|---|---|"]
    return "\n".join([*lines, *(goal.line() for goal in stated)])
