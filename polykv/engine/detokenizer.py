"""Token ids to text, one at a time, without ever showing half a character."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from tokenizers import pre_tokenizers

WINDOW = 16
"""Tokens that are decoded together; more only while a character or a run of byte tokens is unfinished."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


def decode_ids(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of generated ids: special tokens left out, spaces as generated."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def token_text(tokenizer: Any, token_id: int) -> tuple[str, bytes | None]:
    """One token by itself.

    Args:
        tokenizer: a transformers tokenizer.
        token_id: any id.

    Returns:
        Its text, a leading space included and half a character as U+FFFD; special tokens have one too. Then its bytes, of
        which those of consecutive tokens join to characters; None where the tokenizer does not tell them.
    """
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token is None:  # an id that the model has and the tokenizer has not
        return "", None
    alone = _decode_all(tokenizer, [token_id])
    raw: bytes | None
    if _BYTE_TOKEN.fullmatch(token) and alone != token:
        raw = bytes.fromhex(token[3:5])
    else:
        raw = _byte_level(token)
    if raw is not None and raw.decode(errors="replace") == alone:
        return alone, raw
    # a decoder may drop the space that starts a text, so the second of two shows what the token adds
    twice = _decode_all(tokenizer, [token_id, token_id])
    text = twice[len(alone) :] if twice.startswith(alone) else alone
    if _REPLACEMENT in text and _REPLACEMENT not in token:
        return text, None
    return text, text.encode()


def _decode_all(tokenizer: Any, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


@cache
def _byte_of_letter() -> dict[str, int]:
    """What byte-level tokenizers write for each byte: printable ones themselves, the others in order from U+0100 on."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = [byte for byte in range(256) if byte not in own.values()]
    return {**own, **dict(zip(letters[len(own) :], others, strict=True))}


def _byte_level(token: str) -> bytes | None:
    """The bytes that a token of a byte-level tokenizer stands for, if it can be one."""
    table = _byte_of_letter()
    return bytes(table[letter] for letter in token) if all(letter in table for letter in token) else None


class Detokenizer:
    """Stateful decoding; the pieces joined equal the whole decoded at once.

    The last tokens are decoded together, some that are shown already before the new one: a decoder may treat the first
    token of a text differently (it drops a leading space), and a character may be spread over several tokens. A new
    token shows what the text has grown by. Two things are held back, since tokens to come may change them:

    - A U+FFFD at the end of the text. Half a character decodes to exactly one (Unicode 15, section 3.9, "maximal
      subparts"), so all before it is certain.
    - A run of byte tokens (``<0x0A>``, SentencePiece's byte fallback). It is decoded as one: what is a letter by itself
      becomes U+FFFD when its run is no valid UTF-8, so nothing of it is certain before a token of another kind follows.

    A token costs the same at any length of the answer; only :meth:`flush` decodes the whole.

    Special tokens are left out, but for those that are to be visible; what is before and after one of them is decoded by
    itself.

    Args:
        tokenizer: a transformers tokenizer, with a Rust backend or without.
        visible: special tokens to show.
    """

    def __init__(self, tokenizer: Any, visible: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._visible = visible
        self._begin()

    def _begin(self) -> None:
        self._ids: list[int] = []
        self._text: list[str] = []
        self._window: list[int] = []
        self._shown = ""  # what of the window's text has been returned
        self._boundary = 0  # all text of this many tokens of the window had been returned before a later token came

    def feed(self, token_id: int) -> str:
        """Takes a token and returns the text that is certain now, often none."""
        if token_id in self._visible:
            rest = self.flush()
            self._begin()
            return rest + _decode_all(self._tokenizer, [token_id])
        self._ids.append(token_id)
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # an id that the model has and the tokenizer has not
            return ""
        if _BYTE_TOKEN.fullmatch(str(token)):
            self._window.append(token_id)
            return ""
        if self._is_left_out(token_id):  # a run of byte tokens goes on across it
            return ""
        self._window.append(token_id)
        text = decode_ids(self._tokenizer, self._window)
        certain = text.removesuffix(_REPLACEMENT)
        piece = certain[len(self._shown) :] if certain.startswith(self._shown) else ""
        if piece:
            self._text.append(piece)
            self._shown = certain
        if certain != text:
            self._cut_inside(text)
        elif piece:
            self._cut_at_boundary()
        return piece

    def flush(self) -> str:
        """What is left at the end: bytes that never became a whole character show as U+FFFD."""
        rest = decode_ids(self._tokenizer, self._ids)[sum(map(len, self._text)) :]
        self._text.append(rest)
        return rest

    def _is_left_out(self, token_id: int) -> bool:
        """Whether decoding leaves a token out as special, which its kind in the tokenizer's lists does not always tell."""
        return decode_ids(self._tokenizer, [token_id]) == "" and self._tokenizer.decode([token_id]) != ""

    def _cut_at_boundary(self) -> None:
        """Drops tokens before the last boundary, after a token with which all text has been returned."""
        if len(self._window) > WINDOW and self._boundary:
            window = self._window[self._boundary :]
            shown = decode_ids(self._tokenizer, window)
            if shown:  # else what a decoder does to the start of a text would meet the next token
                self._window, self._shown = window, shown
        self._boundary = len(self._window)

    def _cut_inside(self, text: str) -> None:
        """Drops tokens while the text's end is unfinished: random bytes would never come to a boundary.

        Where the text of the others and that of the last token joined are the whole text, no character is spread over
        the place between them.
        """
        if len(self._window) <= WINDOW:
            return
        head, tail = self._window[:-1], self._window[-1:]
        before, after = decode_ids(self._tokenizer, head), decode_ids(self._tokenizer, tail)
        if after and before + after == text and self._shown.startswith(before):
            self._window, self._shown, self._boundary = tail, self._shown[len(before) :], 0
