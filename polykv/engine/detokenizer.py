"""Token ids to text, one at a time, without ever showing half a character."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


def decode_ids(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of generated ids: special tokens left out, spaces as generated."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


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
        self._text = ""

    def feed(self, token_id: int) -> str:
        """Takes a token and returns the text that is certain now, often none."""
        self._ids.append(token_id)
        if self._stream is not None:
            piece = self._stream.step(self._backend, token_id) or ""
        else:
            text = decode_ids(self._tokenizer, self._ids)
            piece = "" if text.endswith("\ufffd") else text[len(self._text) :]
        self._text += piece
        return piece

    def flush(self) -> str:
        """What is left at the end: bytes that never became a whole character show as U+FFFD."""
        rest = decode_ids(self._tokenizer, self._ids)[len(self._text) :]
        self._text += rest
        return rest
