"""Keys for LangGraph's node cache that know which shared context a node reads.

LangGraph makes a node's cache key from its input alone. A node that reads a context outside its input (in a closure, in the
runtime) would get the answer of another context from the cache.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from polykv.errors import InvalidRequestError
from polykv_agents.chat_models import ChatPolyKV
from polykv_agents.shared_context import SharedContext

Context = SharedContext | ChatPolyKV | str | None


def context_key(
    context: Context | Callable[..., Context], key_func: Callable[..., str | bytes] | None = None
) -> Callable[..., bytes]:
    """A ``key_func`` for ``CachePolicy`` that adds a shared context to the key.

    .. code-block:: python

        graph.add_node("ask", ask, cache_policy=CachePolicy(key_func=context_key(reader)))

    Args:
        context: a context, a chat model that reads one, or an id; or a function of the node's input that returns one of these,
            or None. A name will not do: it may come to stand for another text. LangGraph does not show a key function the
            runtime: a node whose context comes from there needs the id in its input, or no cache.
        key_func: makes the rest of the key from the node's input; LangGraph's default if None.

    Raises:
        InvalidRequestError: it is none of these; of a function, when the key is made.
    """
    if not callable(context) or isinstance(context, ChatPolyKV):
        reference(context)

    def key(*args: Any, **kwargs: Any) -> bytes:
        held = context(*args, **kwargs) if callable(context) and not isinstance(context, ChatPolyKV) else context
        make = key_func if key_func is not None else _default_key()
        rest = make(*args, **kwargs)
        # pickle writes equal strings differently when they are one object, which they are not after a restart
        return pickle.dumps(
            (reference(held), rest.encode("utf-8", "surrogatepass") if isinstance(rest, str) else rest), protocol=5
        )

    return key


def reference(context: Any) -> tuple[str, str] | None:
    """What tells a context from others: its id and codec.

    Raises:
        InvalidRequestError: it is no context, or a string that is no id.
    """
    if isinstance(context, ChatPolyKV):
        context = context.shared_context
    if context is None:
        return None
    if isinstance(context, SharedContext):
        return context.id, context.codec
    if isinstance(context, str) and is_id(context):
        return context, ""
    raise InvalidRequestError(
        f"context_key takes a SharedContext, a ChatPolyKV, an id (64 hex digits; names may come to stand for another text) or a "
        f"function that returns one, got {context!r:.60}"
    )


def is_id(text: str) -> bool:
    """Whether a string has the form of a context's id: 64 hex digits, lower case."""
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)


def _default_key() -> Callable[..., str | bytes]:
    from langgraph.types import CachePolicy

    return CachePolicy().key_func
