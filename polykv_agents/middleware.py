"""A shared context for the agents of ``langchain.agents.create_agent``."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from langchain_core.runnables import RunnableBinding

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "SharedContextMiddleware needs langchain, which is not installed; run: pip install 'polykv-agents[agents]'"
    ) from error

from polykv.engine import Engine
from polykv.errors import InvalidRequestError
from polykv_agents.chat_models import ChatPolyKV
from polykv_agents.shared_context import SharedContext
from polykv_agents.turns import SharedInput, shared_turns

logger = logging.getLogger(__name__)

KEPT = 16
"""Contexts made of texts that one middleware keeps for an engine; the least recently used goes first."""

ContextSource = SharedContext | SharedInput | Callable[[Any], Any] | None
OnUnsupported = Literal["ignore", "warn", "raise"]


class SharedContextMiddleware(AgentMiddleware[Any, Any]):
    """Lets every model call of an agent read a shared context.

    The context comes before the agent's system prompt, tools and messages, and is no part of the agent's state: it is not
    summarised away, not checkpointed, and costs the agent no prefill. List this middleware last, so that it sees the model that
    others have chosen.

    .. code-block:: python

        agent = create_agent(llm, tools, middleware=[SharedContextMiddleware(document)])

    Args:
        context: a :class:`SharedContext`; or a text, document or list of them, which is shared at the first call and kept as
            long as this object (so a new process makes it anew); or a function of LangGraph's runtime that returns one of
            these, or the id or name of a live context, or None for none (it may be a coroutine function, for agents that run
            asynchronously); or None: what the runtime's context object holds under ``attribute``.
        attribute: name of the runtime context's attribute or key.
        on_unsupported_model: what to do when the model is no ChatPolyKV, which cannot read a context: ``"ignore"``,
            ``"warn"`` or ``"raise"``.

    Raises:
        InvalidRequestError: an unknown ``on_unsupported_model``, or nothing to share.
    """

    def __init__(
        self,
        context: ContextSource = None,
        *,
        attribute: str = "shared",
        on_unsupported_model: OnUnsupported = "warn",
    ) -> None:
        super().__init__()
        if on_unsupported_model not in ("ignore", "warn", "raise"):
            raise InvalidRequestError(
                f"on_unsupported_model must be 'ignore', 'warn' or 'raise', got {on_unsupported_model!r}"
            )
        if context is not None and not callable(context) and not isinstance(context, SharedContext):
            shared_turns(context)
        self._context = context
        self._attribute = attribute
        self._on_unsupported = on_unsupported_model
        self._lock = threading.Lock()
        self._kept: weakref.WeakKeyDictionary[Engine, OrderedDict[str, SharedContext]] = weakref.WeakKeyDictionary()

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> Any:
        """Names the context in the call's settings."""
        llm = self._chat_model(request)
        if llm is None:
            return handler(request)
        given = self._given(request)
        if inspect.isawaitable(given):
            if inspect.iscoroutine(given):
                given.close()
            raise InvalidRequestError(
                "the middleware's function is a coroutine function; run the agent with ainvoke or astream, or give a plain function"
            )
        return handler(_with_context(request, self._reference(llm, given)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> Any:
        """As :meth:`wrap_model_call`; a text is shared without blocking the event loop."""
        llm = self._chat_model(request)
        if llm is None:
            return await handler(request)
        given = self._given(request)
        if inspect.isawaitable(given):
            given = await given
        reference = given if given is None else await asyncio.to_thread(self._reference, llm, given)
        return await handler(_with_context(request, reference))

    def _chat_model(self, request: ModelRequest[Any]) -> ChatPolyKV | None:
        model: Any = request.model
        while isinstance(model, RunnableBinding):
            model = model.bound
        if isinstance(model, ChatPolyKV):
            return model
        if self._on_unsupported != "ignore":
            message = (
                f"SharedContextMiddleware: {type(model).__name__} is no ChatPolyKV and cannot read a shared context; the call goes "
                "without it"
            )
            if self._on_unsupported == "raise":
                raise InvalidRequestError(message)
            logger.warning("%s", message)
        return None

    def _given(self, request: ModelRequest[Any]) -> Any:
        if callable(self._context):
            return self._context(request.runtime)
        if self._context is not None:
            return self._context
        held = getattr(request.runtime, "context", None)
        return held.get(self._attribute) if isinstance(held, Mapping) else getattr(held, self._attribute, None)

    def _reference(self, llm: ChatPolyKV, given: Any) -> str | None:
        """The id of the context, which is made if it is a text."""
        if given is None:
            return None
        if isinstance(given, SharedContext):
            given.reading()  # a released one must be an error here, where its owner is known
            return given.id
        if isinstance(given, str) and callable(self._context):
            known = llm.find_context(given)
            if known is not None:
                return known.id
            if _is_id(given):
                return given  # the call says that it is missing
        elif isinstance(given, str) and self._context is None:
            return given
        return self._made(llm, given).id

    def _made(self, llm: ChatPolyKV, text: SharedInput) -> SharedContext:
        key = json.dumps([shared_turns(text), llm.codec, llm.chat_template])
        with self._lock:  # one builds, the others wait
            kept = self._kept.setdefault(llm.engine, OrderedDict())
            context = kept.get(key)
            if context is None or context.released:
                context = kept[key] = llm.share(text)
            kept.move_to_end(key)
            while len(kept) > KEPT:
                kept.popitem(last=False)
            return context


def _is_id(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)


def _with_context(request: ModelRequest[Any], reference: str | None) -> ModelRequest[Any]:
    if reference is None:
        return request
    # the id and not the object: settings go into traces and cache keys
    return request.override(model_settings={**request.model_settings, "shared_context": reference})
