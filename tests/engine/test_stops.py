"""Stop strings: cut exactly, never leaked, whatever the pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from polykv.engine.stops import StopMatcher

TEXT = st.text(alphabet="ab<>| é日", max_size=40)
STOPS = st.lists(st.text(alphabet="ab<>|", min_size=1, max_size=5), max_size=3)


def cut(text: str, stops: list[str]) -> str:
    """The oracle: everything before the stop string that is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def pieces_of(text: str, breaks: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(b % (len(text) + 1) for b in breaks)})
    return [text[a:b] for a, b in pairwise(bounds)]


@given(text=TEXT, stops=STOPS, breaks=st.lists(st.integers(0, 40), max_size=12))
def test_any_chunking_gives_the_exact_cut(text: str, stops: list[str], breaks: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces_of(text, breaks):
        if matcher.stopped:
            break
        shown += matcher.feed(piece)
        assert not any(stop in shown for stop in stops)
    if not matcher.stopped:
        shown += matcher.flush()
    assert shown == cut(text, stops)


@given(text=TEXT, stops=STOPS)
def test_only_what_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(c) for c in text)
    if not matcher.stopped:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_over_several_pieces_never_leaks() -> None:
    matcher = StopMatcher(["beta gamma"])
    assert [matcher.feed(p) for p in ("alpha ", "be", "ta", " gam", "ma", " delta")] == [
        "alpha ",
        "",
        "",
        "",
        "",
        "",
    ]
    assert matcher.stopped


def test_a_false_start_is_given_back() -> None:
    matcher = StopMatcher(["beta gamma"])
    assert matcher.feed("alpha beta g") == "alpha "
    assert matcher.feed("o") == "beta go"
    assert matcher.flush() == ""
