"""Messages as the turns that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)

from polykv.errors import InvalidRequestError

Turn = dict[str, Any]
"""``{"role": "system" | "user" | "assistant" | "tool", "content": str}`` as chat templates take it; assistant turns may have
``tool_calls``, tool turns have ``tool_call_id`` and ``name``, user turns may have a ``name``."""

SharedInput = str | Document | Sequence[str | Document] | Sequence[BaseMessage | tuple[str, str]]

SEPARATOR = "\n\n"
"""Between neighbouring messages of one role, which templates would refuse or run together."""

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
)
_CHAT_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
}

# What an assistant's content holds besides text: its calls, which the message lists too, and thoughts, which no template
# shows again.
_CALL_BLOCKS = ("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call")
_THOUGHT_BLOCKS = ("reasoning", "thinking", "redacted_thinking", "reasoning_content")


def _block_text(block: Any, message: BaseMessage) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type", "?") if isinstance(block, dict) else type(block).__name__
    if kind in ("text", "text-plain") and isinstance(block.get("text"), str):
        return str(block["text"])
    source = block.get("source") if isinstance(block, dict) else None
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return str(source.get("data", ""))
    if isinstance(message, AIMessage) and kind in (*_CALL_BLOCKS, *_THOUGHT_BLOCKS):
        return ""
    raise InvalidRequestError(
        f"a {message.type} message holds a block of type {kind!r}; this model reads text only, so give strings or "
        "blocks of type 'text'"
    )


def message_text(message: BaseMessage) -> str:
    """The text of a message.

    Raises:
        InvalidRequestError: it holds something that is not text.
    """
    return _content_text(message.content, message)


def _content_text(content: Any, message: BaseMessage) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, message) for block in content)


def _call(name: str, arguments: Any, call_id: str | None) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _assistant_turn(message: AIMessage) -> Turn:
    content = message_text(message)
    calls = [_call(call["name"], dict(call["args"]), call["id"]) for call in message.tool_calls]
    if not calls and isinstance(message.content, list):  # written by hand, in the form of Anthropic's API
        calls = [
            _call(block["name"], dict(block.get("input") or {}), block.get("id"))
            for block in message.content
            if isinstance(block, dict) and block.get("type") == "tool_use"
        ]
    # as the model wrote it, so that it sees its mistake
    broken = [call["args"] or "" for call in message.invalid_tool_calls]
    turn: Turn = {"role": "assistant", "content": SEPARATOR.join(part for part in (content, *broken) if part)}
    if calls:
        turn["tool_calls"] = calls
    return turn


def _user_turns(message: HumanMessage) -> list[Turn]:
    """A user turn; results in the form of Anthropic's API (blocks of a user's message) become tool turns."""
    blocks = message.content if isinstance(message.content, list) else [message.content]
    turns: list[Turn] = []
    texts: list[str] = []

    def flush() -> None:
        if texts or not turns:
            turn: Turn = {"role": "user", "content": "".join(texts)}
            if message.name:
                turn["name"] = message.name
            turns.append(turn)
            texts.clear()

    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            if texts:
                flush()
            content = _content_text(block.get("content"), message)
            turns.append({"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")})
        else:
            texts.append(_block_text(block, message))
    if texts or not turns:
        flush()
    return turns


def _turns_of(message: BaseMessage) -> list[Turn]:
    if isinstance(message, HumanMessage):
        return _user_turns(message)
    if isinstance(message, AIMessage):
        return [_assistant_turn(message)]
    if isinstance(message, ToolMessage):
        turn: Turn = {"role": "tool", "content": message_text(message), "tool_call_id": message.tool_call_id}
        return [{**turn, "name": message.name} if message.name else turn]
    if isinstance(message, FunctionMessage):
        return [{"role": "tool", "content": message_text(message), "name": message.name}]
    if isinstance(message, ChatMessage):
        role = _CHAT_ROLES.get(message.role.lower())
        if role is not None:
            return [{"role": role, "content": message_text(message)}]
        raise InvalidRequestError(
            f"a ChatMessage has the role {message.role!r}; this model knows {', '.join(sorted(_CHAT_ROLES))}"
        )
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return [{"role": role, "content": message_text(message)}]
    raise InvalidRequestError(
        f"messages of type {message.type!r} say nothing to a model; use system, human, ai and tool messages"
    )


def message_turns(messages: Sequence[BaseMessage]) -> list[Turn]:
    """Messages as turns.

    Raises:
        InvalidRequestError: a message type, role or block that no template has a place for.
    """
    turns = [turn for message in messages for turn in _turns_of(message)]
    names = {call["id"]: call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())}
    for turn in turns:
        if turn["role"] == "tool" and not turn.get("name"):
            turn["name"] = names.get(turn.get("tool_call_id")) or "tool"
    return turns


def merge_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Joins neighbours of one role, and moves a late system message into the user turn after it.

    Templates insist on a system turn at most once, at the start, and on alternating roles after it. Results of tools stay
    apart.
    """
    merged: list[Turn] = []
    for turn in turns:
        role = turn["role"]
        if role == "system" and merged and merged[-1]["role"] != "system":
            role = "user"
        last = merged[-1] if merged else None
        if last is None or last["role"] != role or role == "tool":
            merged.append({**turn, "role": role})
            continue
        parts = [last["content"], turn["content"]]
        if last.get("tool_calls") or turn.get("tool_calls"):  # an answer with calls alone has no text to be joined
            parts = [part for part in parts if part] or [""]
        joined: Turn = {**last, "content": SEPARATOR.join(parts)}
        if turn.get("tool_calls"):
            joined["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
        if last.get("name") != turn.get("name"):
            joined.pop("name", None)
        merged[-1] = joined
    return merged


def shared_turns(context: SharedInput) -> list[Turn]:
    """The turns of a shared context: texts and documents head the system message, messages stay what they are.

    Raises:
        InvalidRequestError: nothing, white space only, mixed kinds, or content that is not text.
    """
    if isinstance(context, (str, Document)):
        turns: list[Turn] = [{"role": "system", "content": _join_texts([context])}]
    elif not isinstance(context, Sequence) or not context:
        raise InvalidRequestError(
            f"cannot share {context!r:.80}; give a text, a document, or a list of texts, documents or messages"
        )
    elif all(isinstance(item, (BaseMessage, tuple)) for item in context):
        messages = convert_to_messages([item for item in context if isinstance(item, (BaseMessage, tuple))])
        turns = merge_turns(message_turns(messages))
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
