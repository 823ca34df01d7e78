"""Joined pieces equal the whole decoded at once."""

from __future__ import annotations

from typing import Any

from helpers import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from polykv.engine.detokenizer import Detokenizer, decode_ids

TOKENIZER = tiny_tokenizer()


class SlowTokenizer:
    """A tokenizer without a Rust backend, as far as the detokenizer can see."""

    def __init__(self, tokenizer: Any = TOKENIZER) -> None:
        self._tokenizer = tokenizer

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return str(self._tokenizer.decode(*args, **kwargs))

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(token_id))


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


def byte_fallback_tokenizer() -> Any:
    """As Llama 2, Mistral 7B v0.1, Phi-3 and Gemma have it: unknown characters, newlines too, become byte tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    for piece in ("\u2581", "a", "b", "\u2581the", "s"):
        vocabulary[piece] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


FALLBACK = byte_fallback_tokenizer()


@given(
    ids=st.lists(
        st.one_of(st.integers(259, 263), st.sampled_from([13, 0xF0 + 3, 0x9F + 3, 0x99 + 3, 0x82 + 3])), max_size=25
    ),
    slow=st.booleans(),
)
def test_random_ids_of_a_byte_fallback_tokenizer(ids: list[int], slow: bool) -> None:
    detokenizer = Detokenizer(SlowTokenizer(FALLBACK) if slow else FALLBACK)
    pieces = [detokenizer.feed(i) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == decode_ids(FALLBACK, ids)


def test_a_newline_before_half_a_character_does_not_end_the_request() -> None:
    detokenizer = Detokenizer(FALLBACK)
    ids = [FALLBACK.convert_tokens_to_ids(t) for t in ("a", "<0x0A>", "<0xF0>", "a")]
    assert "".join(detokenizer.feed(i) for i in ids) + detokenizer.flush() == decode_ids(FALLBACK, ids)


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
