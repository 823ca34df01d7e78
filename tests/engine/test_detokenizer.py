"""Joined pieces equal the whole decoded at once, nothing half is shown, and nothing is kept back without need."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from polykv.engine.detokenizer import WINDOW, Detokenizer, decode_ids

TOKENIZER = tiny_tokenizer()

WRITING = [
    "🙂",
    "🙂‍↔️",
    "👩‍👩‍👧‍👦",
    "👍🏽",
    "🏳️‍🌈",
    "日本語",
    "한국어",
    "שלום",
    "مرحبا",
    "é",
    "e\u0301\u0323",
    "नमस्ते",
    "Ⅷ",
    "\u200d",
    "\ufffd",
    "\n",
    " ",
    "  ",
    " the",
    "the bond",
    "a",
    "\t",
    "\x00",
]
TEXT = st.lists(st.one_of(st.sampled_from(WRITING), st.text(max_size=4)), max_size=12).map("".join)


def with_added_tokens(tokenizer: Any) -> Any:
    """Tokens of every kind that a checkpoint may add: ordinary ones, with spaces, of other scripts, and special ones."""
    tokenizer.add_tokens(["<tool>", " hey", "日本", "\ufffd", "  ", AddedToken("zz", normalized=False, lstrip=True)])
    tokenizer.add_tokens([AddedToken("<|think|>", special=True)], special_tokens=True)
    return tokenizer


def byte_fallback_tokenizer(decoder: str = "strip") -> Any:
    """As Llama 2, Mistral 7B v0.1, Phi-3 and Gemma have it: unknown characters, newlines too, become byte tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    for piece in ("\u2581", "a", "b", "\u2581the", "s", "日", "\u2581\u2581", "é"):
        vocabulary[piece] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = {
        "strip": [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        "metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
        "no strip": [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()],
    }
    backend.decoder = decoders.Sequence(steps[decoder])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


class Plain:
    """What any tokenizer has, and no more; counts what it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decoded: list[int] = []

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        self.decoded.append(len(ids))
        return str(self._tokenizer.decode(ids, **kwargs))

    def convert_ids_to_tokens(self, token_id: int) -> Any:
        return self._tokenizer.convert_ids_to_tokens(token_id)


TOKENIZERS: dict[str, Any] = {
    "byte-level": TOKENIZER,
    "byte-level, added tokens": with_added_tokens(tiny_tokenizer()),
    "byte fallback": byte_fallback_tokenizer(),
    "byte fallback, added tokens": with_added_tokens(byte_fallback_tokenizer()),
    "byte fallback, metaspace": with_added_tokens(byte_fallback_tokenizer("metaspace")),
    "byte fallback, no strip": with_added_tokens(byte_fallback_tokenizer("no strip")),
    "slow": ByT5Tokenizer(),
    "slow, added tokens": with_added_tokens(ByT5Tokenizer()),
}
ids_of_bytes = {
    name: [i for i in range(len(t)) if len(t.convert_ids_to_tokens(i)) == 1 or "<0x" in t.convert_ids_to_tokens(i)]
    for name, t in TOKENIZERS.items()
}
NAMES = sorted(TOKENIZERS)


def token_ids(name: str) -> st.SearchStrategy[list[int]]:
    """Random ids: any, those of texts, single bytes of characters, the last (added) ones and the first (special) ones;
    one the tokenizer does not have."""
    tokenizer = TOKENIZERS[name]
    size = len(tokenizer)
    encoded = TEXT.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    one = st.one_of(
        st.integers(0, size - 1),
        st.sampled_from(ids_of_bytes[name] or [0]),
        st.integers(size - 9, size - 1),
        st.integers(0, 2),
        st.just(size + 5) if "slow" not in name else st.just(0),  # ByT5 itself refuses it
    )
    run = st.one_of(encoded, encoded.map(lambda ids: ids[:-1]), st.lists(one, max_size=6))
    return st.lists(run, max_size=6).map(lambda runs: [i for ids in runs for i in ids])


def certain_text(tokenizer: Any, ids: list[int]) -> str:
    """The slow oracle: all of the text that no further token can change, from decoding everything anew.

    A run of byte tokens is open until a token of another kind that decodes to something follows; then a U+FFFD at the
    end may be half a character.
    """
    for count in range(len(ids), -1, -1):
        token = tokenizer.convert_ids_to_tokens(ids[count - 1]) if count else ""
        if count and re.fullmatch("<0x..>", str(token)):
            continue
        if count and (token is None or token in {*SPECIAL, *tokenizer.all_special_tokens}):
            continue
        return decode_ids(tokenizer, ids[:count]).removesuffix("\ufffd")
    raise AssertionError


SPECIAL = {"<pad>", "<|im_start|>", "<|im_end|>", "<unk>", "<s>", "</s>", "<|think|>"}


def stream(tokenizer: Any, ids: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(i) for i in ids]
    return pieces, detokenizer.flush()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_joined_pieces_are_the_whole_and_come_as_soon_as_they_are_certain(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(token_ids(name))
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == decode_ids(tokenizer, ids)
    for count in range(len(ids) + 1):
        assert "".join(pieces[:count]) == certain_text(tokenizer, ids[:count])


@given(ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
@settings(deadline=None)
def test_a_tokenizer_that_is_no_more_than_its_methods(ids: list[int]) -> None:
    pieces, rest = stream(Plain(TOKENIZER), ids)
    assert (pieces, rest) == stream(TOKENIZER, ids)
    assert "".join(pieces) + rest == decode_ids(TOKENIZER, ids)


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT)
@settings(deadline=None)
def test_no_piece_shows_half_a_character(name: str, text: str) -> None:
    text = text.replace("\ufffd", "")
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == decode_ids(tokenizer, ids)
    if "fallback" not in name:
        assert not any("\ufffd" in piece for piece in pieces)


@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_the_packaged_tokenizer(real_model: Any, text: str) -> None:
    tokenizer = real_model[1]
    text = text.replace("\ufffd", "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == decode_ids(tokenizer, ids)  # its vocabulary lacks some bytes
    if decode_ids(tokenizer, ids) == text:
        assert not any("\ufffd" in piece for piece in [*pieces, rest])


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_random_ids_of_the_packaged_tokenizer(real_model: Any, data: st.DataObject) -> None:
    tokenizer = real_model[1]
    ids = data.draw(st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300)), max_size=50))
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == decode_ids(tokenizer, ids)
    for count in range(len(ids) + 1):
        assert "".join(pieces[:count]) == decode_ids(tokenizer, ids[:count]).removesuffix("\ufffd")


FALLBACK = TOKENIZERS["byte fallback"]


def test_a_newline_before_half_a_character_does_not_end_the_request() -> None:
    ids = [FALLBACK.convert_tokens_to_ids(t) for t in ("a", "<0x0A>", "<0xF0>", "a")]
    pieces, rest = stream(FALLBACK, ids)
    assert "".join(pieces) + rest == decode_ids(FALLBACK, ids)


@pytest.mark.parametrize("between", ["<s>", "<unk>", None])
def test_a_run_of_byte_tokens_goes_on_across_a_token_that_is_left_out(between: str | None) -> None:
    left_out = len(FALLBACK) + 7 if between is None else FALLBACK.convert_tokens_to_ids(between)
    ids = [FALLBACK.convert_tokens_to_ids("<0x0A>"), left_out, FALLBACK.convert_tokens_to_ids("<0xF0>")]
    pieces, rest = stream(FALLBACK, ids)
    assert pieces == ["", "", ""]
    assert rest == decode_ids(FALLBACK, ids) == "\ufffd\ufffd"


@pytest.mark.parametrize("count", range(WINDOW + 5))
def test_a_decoder_that_drops_spaces_at_the_start_drops_none_later(count: int) -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    names = [*["a"] * count, "\u2581", "\u2581the", "\u2581", "\u2581", "\u2581the", "s"]
    ids = tokenizer.convert_tokens_to_ids(names)
    pieces, rest = stream(tokenizer, ids)
    assert ("".join(pieces), rest) == (decode_ids(tokenizer, ids), "")


def test_emoji_cjk_and_right_to_left_arrive_whole() -> None:
    text = "🙂‍↔️ 日本語 שלום é"
    pieces, rest = stream(TOKENIZER, TOKENIZER.encode(text, add_special_tokens=False))
    assert ("".join(pieces), rest) == (text, "")


def test_bytes_that_never_become_a_character_show_at_the_end() -> None:
    first_byte_of_an_emoji = TOKENIZER.encode("🙂", add_special_tokens=False)[:1]
    assert stream(TOKENIZER, first_byte_of_an_emoji) == ([""], "\ufffd")


def test_all_but_the_last_of_many_stray_bytes_are_shown() -> None:
    stray = TOKENIZER.encode("é", add_special_tokens=False)[-1]
    pieces, rest = stream(TOKENIZER, [stray] * 100)
    assert pieces == ["", *["\ufffd"] * 99]
    assert rest == "\ufffd"


def repeated(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return (ids * 3000)[:3000]


ANSWERS: dict[str, Callable[[Any], list[int]]] = {
    "prose": lambda t: repeated(t, "the bond, the merchant and the court\n"),
    "emoji": lambda t: repeated(t, "🙂 日本語 the"),
    "stray bytes": lambda t: t.encode("é", add_special_tokens=False)[-1:] * 3000,
    "first bytes": lambda t: t.encode("🙂", add_special_tokens=False)[:1] * 3000,
    "special tokens": lambda t: [1] * 3000,
    "spaces": lambda t: repeated(t, " "),
}


@pytest.mark.parametrize("answer", sorted(ANSWERS))
@pytest.mark.parametrize("name", ["byte-level, added tokens", "byte fallback, added tokens"])
def test_a_token_costs_the_same_at_any_length(name: str, answer: str) -> None:
    tokenizer = Plain(TOKENIZERS[name])
    ids = ANSWERS[answer](TOKENIZERS[name])
    detokenizer = Detokenizer(tokenizer)
    for token_id in ids:
        detokenizer.feed(token_id)
    longest_run = 20  # of byte tokens
    assert max(tokenizer.decoded, default=0) <= WINDOW + longest_run
    assert sum(tokenizer.decoded) <= 3 * WINDOW * len(ids)
    tokenizer.decoded.clear()
    detokenizer.flush()
    assert tokenizer.decoded == [len(ids)]
