"""Messages to token ids, the shared context first.

Prefix sharing is decided by the order of the prompt: with a role in the system message and the document in the user
turn, agents share three tokens. So a shared text goes to the head of the system message, whatever follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from os.path import commonprefix
from typing import Any

import jinja2
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, convert_to_messages

from polykv.errors import InvalidRequestError

Turn = dict[str, str]
"""``{"role": ..., "content": ...}`` as chat templates take it."""

SharedInput = str | Document | Sequence[str | Document] | Sequence[BaseMessage | tuple[str, str]]

SEPARATOR = "\n\n"
"""Between neighbouring messages of one role, which templates would refuse or run together."""

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
)

# What may follow a shared context: kinds of characters that tokenizers treat differently.
_PROBES = ("You", "the", "s", "1", " x", "\n", "\n\n", "-", ".", '"', "é", "日", "🙂", "<", "  ")


def message_text(message: BaseMessage) -> str:
    """The text of a message.

    Raises:
        InvalidRequestError: it holds something that is not text.
    """
    if isinstance(message.content, str):
        return message.content
    parts: list[str] = []
    for block in message.content:
        if isinstance(block, str):
            parts.append(block)
        elif isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
            parts.append(block["text"])
        else:
            kind = block.get("type", "?") if isinstance(block, dict) else type(block).__name__
            raise InvalidRequestError(
                f"a {message.type} message holds a block of type {kind!r}; this model reads text only, so give strings or "
                "blocks of type 'text'"
            )
    return "".join(parts)


def message_turn(message: BaseMessage) -> Turn:
    """One message as a turn.

    Raises:
        InvalidRequestError: a message type or tool call that is not supported.
    """
    for kind, role in _ROLES:
        if isinstance(message, kind):
            if isinstance(message, AIMessage) and (message.tool_calls or message.invalid_tool_calls):
                raise InvalidRequestError("tool calls in the history are not supported yet")
            return {"role": role, "content": message_text(message)}
    raise InvalidRequestError(
        f"messages of type {message.type!r} are not supported yet; use system, human and ai messages"
    )


def merge_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Joins neighbours of one role, and moves a late system message into the user turn after it.

    Templates insist on a system turn at most once, at the start, and on alternating roles after it.
    """
    merged: list[Turn] = []
    for turn in turns:
        role = turn["role"]
        if role == "system" and merged and merged[-1]["role"] != "system":
            role = "user"
        if merged and merged[-1]["role"] == role:
            merged[-1] = {"role": role, "content": merged[-1]["content"] + SEPARATOR + turn["content"]}
        else:
            merged.append({"role": role, "content": turn["content"]})
    return merged


def shared_turns(context: SharedInput) -> list[Turn]:
    """The turns of a shared context: texts and documents head the system message, messages stay what they are.

    Raises:
        InvalidRequestError: nothing, white space only, mixed kinds, or content that is not text.
    """
    if isinstance(context, (str, Document)):
        turns = [{"role": "system", "content": _join_texts([context])}]
    elif not isinstance(context, Sequence) or not context:
        raise InvalidRequestError(
            f"cannot share {context!r:.80}; give a text, a document, or a list of texts, documents or messages"
        )
    elif all(isinstance(item, (BaseMessage, tuple)) for item in context):
        messages = convert_to_messages([item for item in context if isinstance(item, (BaseMessage, tuple))])
        turns = merge_turns([message_turn(message) for message in messages])
    elif all(isinstance(item, (str, Document)) for item in context):
        turns = [{"role": "system", "content": _join_texts([i for i in context if isinstance(i, (str, Document))])}]
    else:
        kinds = sorted({type(item).__name__ for item in context})
        raise InvalidRequestError(f"cannot share a list of {', '.join(kinds)}; give strings and documents, or messages")
    if not any(turn["content"].strip() for turn in turns):
        raise InvalidRequestError("the shared context is empty or white space only; give a text")
    return turns


def _join_texts(items: Sequence[str | Document]) -> str:
    documents = [item if isinstance(item, Document) else Document(item) for item in items]
    filled = [document for document in documents if document.page_content.strip()]
    if len(documents) == 1 or not filled:
        return "".join(document.page_content for document in documents)
    parts = []
    for number, document in enumerate(filled, start=1):
        facts = [document.metadata.get("title") or document.metadata.get("source")]
        if document.metadata.get("page") is not None:
            facts.append(f"page {document.metadata['page']}")
        label = ", ".join(str(fact) for fact in facts if fact)
        parts.append(f"[Document {number}{f': {label}' if label else ''}]\n{document.page_content}")
    return SEPARATOR.join(parts)


class Renderer:
    """A tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        chat_template: used instead of the tokenizer's own.

    Raises:
        InvalidRequestError: there is no chat template.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        try:
            self._template = tokenizer.get_chat_template(chat_template)
        except ValueError as error:
            raise InvalidRequestError(
                "the tokenizer has no chat template; pass chat_template=..., or use an instruction-tuned model"
            ) from error
        self._system_role = self._takes_system_role()

    def _takes_system_role(self) -> bool:
        """Whether a system turn stays first. Templates refuse it or drop it (Gemma), or move it to the last turn (Mistral)."""
        probe, first = "polykv-system-probe", "polykv-user-probe"
        dialogue = [("system", probe), ("user", first), ("assistant", "x"), ("user", "y")]
        try:
            text = self._apply([{"role": role, "content": content} for role, content in dialogue])
        except (jinja2.TemplateError, ValueError):
            return False
        return -1 < text.find(probe) < text.find(first)

    def _apply(self, turns: list[Turn]) -> str:
        text = self._tokenizer.apply_chat_template(
            turns, chat_template=self._template, add_generation_prompt=True, tokenize=False
        )
        return str(text)

    def text(self, turns: Sequence[Turn]) -> str:
        """The prompt as text, ready for the assistant's answer.

        Raises:
            InvalidRequestError: no turns, or the template refuses them.
        """
        prepared = merge_turns(turns)
        if not prepared:
            raise InvalidRequestError("there are no messages; give at least one")
        if prepared[0]["role"] == "system" and not self._system_role:
            prepared = merge_turns([{"role": "user", "content": prepared[0]["content"]}, *prepared[1:]])
        try:
            return self._apply(prepared)
        except jinja2.TemplateError as error:
            roles = ", ".join(turn["role"] for turn in prepared)
            raise InvalidRequestError(f"the chat template refuses the turns ({roles}): {error}") from error

    def ids(self, turns: Sequence[Turn]) -> list[int]:
        """The prompt as token ids. The template writes the special tokens, so none are added, no second BOS either.

        Raises:
            InvalidRequestError: see :meth:`text`; or half a surrogate pair, which is no character.
        """
        return self._encode(self.text(turns))

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text holds {text[error.start]!r}, half a surrogate pair and no character; was a file read with "
                "errors='surrogateescape'? Read it with its right encoding, or with errors='replace'"
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def shared_ids(self, turns: Sequence[Turn]) -> list[int]:
        """The token ids that every prompt over these shared turns starts with.

        Tokenizers merge across the end of a text, so the context's own tokens are not always a prefix of a longer
        prompt's. The common prefix over prompts that go on in every way is: it ends at a boundary that no continuation
        moves.

        Raises:
            InvalidRequestError: the template puts something different first in every prompt.
        """
        continuations: list[list[Turn]] = [
            [
                {"role": role, "content": probe},
                *([] if role == "user" else [{"role": "user", "content": "x"}]),
            ]
            for probe in _PROBES
            for role in ("system", "user")
        ]
        texts = [self.text([*turns, *continuation]) for continuation in continuations]
        common = commonprefix(texts)  # noqa: RUF071  (letter by letter is what is wanted)
        shared = [column[0] for column in takewhile(_all_equal, zip(*map(self._encode, texts), strict=False))]
        # templates may leave out parts of an answer (its thoughts), but never of what was asked or given
        given = [turn["content"].strip() for turn in turns if turn["role"] != "assistant"]
        if not shared or any(content not in common for content in given):
            raise InvalidRequestError(
                "this chat template does not put the shared context first, so nothing can be shared; pass another one as "
                "chat_template=..."
            )
        return shared


def _all_equal(column: tuple[int, ...]) -> bool:
    return len(set(column)) == 1
