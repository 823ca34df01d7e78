"""Stop strings: cut exactly, never leaked, whatever the pieces."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
from helpers import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv.engine.detokenizer import Detokenizer, decode_ids
from polykv.engine.stops import StopMatcher

TEXT = st.one_of(
    st.text(alphabet="ab", max_size=25), st.text(alphabet="ab<>| é日\ufffd", max_size=40), st.text(max_size=20)
)
STOPS = st.lists(
    st.one_of(
        st.text(alphabet="ab", min_size=1, max_size=6), st.text(alphabet="ab<>|\ufffd日", min_size=1, max_size=5)
    ),
    max_size=4,
)
TOKENIZER = tiny_tokenizer()


def cut(text: str, stops: list[str]) -> str:
    """The slow oracle: everything before the stop string that is complete first, of several the longest."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def held_back(text: str, stops: list[str]) -> str:
    """The slow oracle: the longest end of a text that a stop string begins with, and is longer than."""
    for start in range(len(text) + 1):
        if any(stop.startswith(text[start:]) and stop != text[start:] for stop in stops):
            return text[start:]
    return ""


def pieces_of(text: str, breaks: list[int]) -> list[str]:
    bounds = sorted([0, len(text), *(b % (len(text) + 1) for b in breaks)])  # equal ones make empty pieces
    return [text[a:b] for a, b in pairwise(bounds)]


@given(text=TEXT, stops=STOPS, breaks=st.lists(st.integers(0, 40), max_size=12))
@settings(max_examples=300, deadline=None)
def test_any_chunking_gives_the_exact_cut(text: str, stops: list[str], breaks: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = fed = ""
    for piece in pieces_of(text, breaks):
        was_stopped = matcher.stopped
        new = matcher.feed(piece)
        assert not (was_stopped and new)
        shown += new
        fed += piece
        assert cut(text, stops).startswith(shown)
        if not matcher.stopped:
            assert shown + held_back(fed, stops) == fed
    assert matcher.stopped == (cut(text, stops) != text)
    shown += matcher.flush()
    assert shown == cut(text, stops)
    assert matcher.flush() == ""


def test_every_short_text_and_pair_of_stops() -> None:
    words = ["".join(letters) for length in (1, 2, 3) for letters in product("ab", repeat=length)]
    texts = ["".join(letters) for letters in product("ab", repeat=6)]
    for stops in [[a] for a in words] + [list(pair) for pair in combinations(words, 2)]:
        for text in texts:
            matcher = StopMatcher(stops)
            shown = "".join(matcher.feed(letter) for letter in text) + matcher.flush()
            assert shown == cut(text, stops), (text, stops)


@given(
    ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=25),
    text=TEXT,
    stops=STOPS,
    at=st.integers(0, 60),
    length=st.integers(1, 6),
)
@settings(max_examples=300, deadline=None)
def test_over_tokens_and_the_end_of_an_answer(
    ids: list[int], text: str, stops: list[str], at: int, length: int
) -> None:
    ids = [*ids, *TOKENIZER.encode(text, add_special_tokens=False)]
    whole = decode_ids(TOKENIZER, ids)
    if whole:
        stops = [*stops, whole[at % len(whole) :][:length]]  # one that does come, at the very end too
    detokenizer, matcher, shown = Detokenizer(TOKENIZER), StopMatcher(stops), ""
    for token_id in ids:
        shown += matcher.feed(detokenizer.feed(token_id))
        assert cut(whole, stops).startswith(shown)
    shown += matcher.feed(detokenizer.flush()) + matcher.flush()
    assert shown == cut(whole, stops)
    assert matcher.stopped == (cut(whole, stops) != whole)


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("aaab!", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("xxabcabd", ["abd", "bca"], "xxa"),
        ("say END now", ["END now", "END"], "say "),
        ("say END now", ["END now", "D n"], "say EN"),
        ("one\n\ntwo", ["\n\n", "\n"], "one"),
        ("abc", ["c", "bc", "abc"], ""),
        ("half \ufffd!", ["\ufffd"], "half "),
        ("STOP", ["STOP"], ""),
        ("STO", ["STOP"], "STO"),
        ("e\u0301!", ["\u0301"], "e"),
    ],
)
def test_stops_that_overlap_and_contain_each_other(text: str, stops: list[str], want: str) -> None:
    for size in (1, 2, 3, len(text)):
        matcher = StopMatcher(stops)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert "".join(matcher.feed(piece) for piece in pieces) + matcher.flush() == want
        assert cut(text, stops) == want


def test_a_stop_of_half_a_character_at_the_end_of_an_answer() -> None:
    ids = [*TOKENIZER.encode("half ", add_special_tokens=False), *TOKENIZER.encode("🙂", add_special_tokens=False)[:2]]
    detokenizer, matcher = Detokenizer(TOKENIZER), StopMatcher([" \ufffd"])
    shown = "".join(matcher.feed(detokenizer.feed(i)) for i in ids)
    assert (shown, matcher.stopped) == ("half", False)
    assert matcher.feed(detokenizer.flush()) == ""
    assert matcher.stopped
    assert matcher.flush() == ""


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


def test_without_stops_everything_passes() -> None:
    matcher = StopMatcher([])
    assert [matcher.feed(p) for p in ("a", "", "b")] == ["a", "", "b"]
    assert (matcher.stopped, matcher.flush()) == (False, "")
