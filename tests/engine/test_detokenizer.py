"""Joined pieces equal the whole decoded at once."""

from __future__ import annotations

from typing import Any

from helpers import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from polykv.engine.detokenizer import Detokenizer, decode_ids

TOKENIZER = tiny_tokenizer()


class SlowTokenizer:
    """A tokenizer without a Rust backend, as far as the detokenizer can see."""

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return str(TOKENIZER.decode(*args, **kwargs))


@given(ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40), slow=st.booleans())
def test_random_ids(ids: list[int], slow: bool) -> None:
    detokenizer = Detokenizer(SlowTokenizer() if slow else TOKENIZER)
    pieces = [detokenizer.feed(i) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == decode_ids(TOKENIZER, ids)


@given(text=st.text(max_size=30))
def test_no_piece_shows_half_a_character(text: str) -> None:
    text = text.replace("\ufffd", "")
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.feed(i) for i in TOKENIZER.encode(text, add_special_tokens=False)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_emoji_cjk_and_right_to_left_arrive_whole() -> None:
    text = "🙂‍↔️ 日本語 שלום é"
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.feed(i) for i in TOKENIZER.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text


def test_bytes_that_never_become_a_character_show_at_the_end() -> None:
    first_byte_of_an_emoji = TOKENIZER.encode("🙂", add_special_tokens=False)[:1]
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.feed(first_byte_of_an_emoji[0]) == ""
    assert detokenizer.flush() == "\ufffd"
