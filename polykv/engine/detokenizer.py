"""Token ids to text, one at a time, without ever showing half a character."""

from __future__ import annotations

import re
from typing import Any

from tokenizers.decoders import DecodeStream


def decode_ids(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of generated ids: special tokens left out, spaces as generated."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Detokenizer:
    """Stateful decoding; the pieces joined equal the whole decoded at once.

    Args:
        tokenizer: a transformers tokenizer. Those with a Rust backend use its ``DecodeStream``; for others each new
            token decodes the answer so far, and a piece that ends in half a character waits.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=True) if self._backend is not None else None
        self._ids: list[int] = []
        self._waiting: list[int] = []
        self._text = ""

    def feed(self, token_id: int) -> str:
        """Takes a token and returns the text that is certain now, often none."""
        self._ids.append(token_id)
        self._waiting.append(token_id)
        # A run of byte tokens is decoded as one: a byte that is a letter by itself becomes U+FFFD when its run is not valid
        # UTF-8, so nothing of the run is certain before a token of another kind follows.
        if _BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token_id))):
            return ""
        if self._stream is not None:
            piece = self._stream.step(self._backend, self._waiting) or ""
        else:
            text = decode_ids(self._tokenizer, self._ids)
            piece = "" if text.endswith("\ufffd") else text[len(self._text) :]
        self._waiting = []
        self._text += piece
        return piece

    def flush(self) -> str:
        """What is left at the end: bytes that never became a whole character show as U+FFFD."""
        rest = decode_ids(self._tokenizer, self._ids)[len(self._text) :]
        self._text += rest
        return rest
