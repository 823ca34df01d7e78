"""Grammars that an answer is held to, token by token: JSON schemas, regular expressions, choices, Lark.

The masks come from llguidance (https://github.com/guidance-ai/llguidance), which walks the tokenizer's trie and an Earley
parser together.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import llguidance.hf
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from torch import Tensor

from polykv.errors import InvalidRequestError, UnsupportedModelError

COMPILED = 64
"""Grammars of a tokenizer that are kept compiled; the least recently used goes first."""
MAX_FORCED = 32
"""Forced tokens that are taken at once; more wait for the next step, so that a step stays short for its neighbours."""

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_HINT = "; simplify it, or check the answer yourself"


def literal(text: str) -> str:
    """A text to the letter, as part of a grammar; llguidance knows the letter U+007F only as an escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """A JSON schema as part of a larger grammar.

    JSON is spaced as Python's ``json.dumps`` does: with free white space small models write nothing else.

    Args:
        schema: the schema; references must be relative to it.
    """
    whole: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {"allOf": [schema]}
    return f"%json {json.dumps({**whole, 'x-guidance': _SPACING}, ensure_ascii=False)}"


_EXCERPT = re.compile(r"\n\s*\d+ \|.*", re.DOTALL)


def _short(message: str) -> str:
    """A message without the excerpt of the grammar, of which the caller wrote only a part."""
    return " ".join(_EXCERPT.sub("", message).split())[:300]


@lru_cache(maxsize=512)
def _complaint(text: str) -> str | None:
    """What is wrong with a grammar, or what it holds that would not be enforced."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(text)
    if any("no tokenizer" in message for message in messages):
        return None  # it names special tokens by their ids: the compiler, who knows the tokenizer, will tell
    if failed or messages:
        return _short((messages or ["no reason given"])[0])
    return None


@dataclass(frozen=True)
class Grammar:
    """What an answer may be. Immutable, hashable, plain text.

    Attributes:
        text: in llguidance's Lark-like language.

    Raises:
        InvalidRequestError: it is broken, or holds what could not be enforced.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise InvalidRequestError(f"a grammar is a non-empty text, got {self.text!r:.60}")
        complaint = _complaint(self.text)
        if complaint is not None:
            raise InvalidRequestError(f"the grammar cannot be used: {complaint}{_HINT}")

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A grammar in llguidance's Lark-like language, its first rule called ``start``."""
        return cls(text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool) -> Grammar:
        """JSON values of a schema.

        Args:
            schema: a JSON schema, or its text.

        Raises:
            InvalidRequestError: it is no schema, or has keywords that no grammar can express (``uniqueItems``, ``not``, ...).
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise InvalidRequestError(f"the JSON schema is no JSON: {error}") from error
        if not isinstance(schema, (Mapping, bool)):
            raise InvalidRequestError(f"a JSON schema is a dict, got {schema!r:.60}")
        try:
            text = f"start: {json_rule(schema)}"
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"the JSON schema is no JSON: {error}") from error
        complaint = _complaint(text)
        if complaint is not None:
            raise InvalidRequestError(f"no grammar can hold answers to this JSON schema: {complaint}{_HINT}")
        return cls(text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that a regular expression matches as a whole (Rust's syntax: no look-around, no back-references)."""
        if not isinstance(pattern, str) or not pattern:
            raise InvalidRequestError(f"a regular expression is a non-empty text, got {pattern!r:.60}")
        try:
            text = str(LLMatcher.grammar_from_regex(pattern))
        except ValueError as error:
            raise InvalidRequestError(f"the regular expression cannot be used: {error}") from error
        complaint = _complaint(text)
        if complaint is not None:
            raise InvalidRequestError(f"the regular expression {pattern!r:.80} cannot be used: {complaint}{_HINT}")
        return cls(text)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        """One of several texts.

        Raises:
            InvalidRequestError: there are none, or one is no text or empty.
        """
        if isinstance(options, str) or not options or not all(isinstance(o, str) and o for o in options):
            raise InvalidRequestError(f"a choice needs a list of non-empty texts, got {options!r:.80}")
        return cls("start: " + " | ".join(map(literal, options)))


class GrammarCompiler:
    """Compiles grammars for one tokenizer and model. Thread-safe.

    Args:
        tokenizer: with a Rust backend.
        vocab_size: logits of a position; models often have more than the tokenizer has tokens.
        eos_ids: ids that end an answer, and may only when the grammar is complete.

    Raises:
        UnsupportedModelError: the tokenizer has no Rust backend.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise UnsupportedModelError(
                f"grammars, and so tools and structured output, need a fast tokenizer; {type(tokenizer).__name__} has no Rust "
                "backend. Load the model with one (a tokenizer.json)"
            )
        self._tokenizer: LLTokenizer = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=sorted(i for i in eos_ids if i < vocab_size)
        )
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A fresh matcher.

        Raises:
            InvalidRequestError: the grammar does not fit this tokenizer (an unknown special token, say), or is too large.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = LLMatcher(self._tokenizer, grammar.text, log_level=0)
                if compiled.is_error():
                    raise InvalidRequestError(f"the grammar cannot be used: {_short(compiled.get_error())}{_HINT}")
                self._compiled[grammar] = compiled
                while len(self._compiled) > COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return GrammarMatcher(compiled.deep_copy(), self.vocab_size)


_compilers: weakref.WeakKeyDictionary[Any, dict[tuple[int, frozenset[int]], GrammarCompiler]] = (
    weakref.WeakKeyDictionary()
)
_compilers_lock = threading.Lock()


def compiler_for(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> GrammarCompiler:
    """The compiler of a tokenizer, made at the first use (about a second for a large vocabulary)."""
    with _compilers_lock:
        known = _compilers.setdefault(tokenizer, {})
        key = (vocab_size, eos_ids)
        if key not in known:
            known[key] = GrammarCompiler(tokenizer, vocab_size, eos_ids)
        return known[key]


class GrammarMatcher:
    """Where one answer stands in its grammar.

    Args:
        matcher: llguidance's, at the start.
        vocab_size: logits of a position.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self.vocab_size = vocab_size

    @property
    def finished(self) -> bool:
        """Whether nothing can follow but the end."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def consume(self, token_id: int) -> None:
        """Goes on by a token.

        Raises:
            InvalidRequestError: the grammar does not allow it, or cannot go on.
        """
        if not self._matcher.consume_token(token_id) or self._matcher.is_error():
            raise InvalidRequestError(
                f"the answer's grammar cannot go on after token {token_id}: {_short(self._matcher.get_error())}"
            )

    def forced(self) -> list[int]:
        """Tokens that must follow, since the grammar leaves no choice; at most 32."""
        if self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens())[:MAX_FORCED]

    def fail(self) -> None:
        """Raises if the last mask could not be computed."""
        if self._matcher.is_error():
            raise InvalidRequestError(f"the answer's grammar cannot go on: {_short(self._matcher.get_error())}")


_BITS = torch.arange(32, dtype=torch.int32)


class MaskComputer:
    """Computes the masks of a step's rows together, on threads of its own."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def masks(self, matchers: Sequence[GrammarMatcher]) -> Tensor:
        """Tokens that may come next.

        Args:
            matchers: n of them, all of one vocabulary.

        Returns:
            ``[n, V]`` bool.
        """
        if self._executor is None:
            self._executor = LLExecutor()
        vocab_size = matchers[0].vocab_size
        words = torch.zeros(len(matchers), (vocab_size + 31) // 32, dtype=torch.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher._matcher, row) for row, matcher in enumerate(matchers)],
            words.data_ptr(),
            words.shape[1] * 4,
            len(matchers),
        )
        return ((words[:, :, None] >> _BITS) & 1).bool().view(len(matchers), -1)[:, :vocab_size]


masks_of = MaskComputer().masks
