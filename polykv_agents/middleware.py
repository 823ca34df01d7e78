"""A shared context for the agents of ``langchain.agents.create_agent``."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import ensure_config, merge_configs
from langchain_core.runnables.configurable import DynamicRunnable

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "SharedContextMiddleware needs langchain, which is not installed; run: pip install 'polykv-agents[agents]'"
    ) from error

from polykv.engine import Engine
from polykv.errors import InvalidRequestError, RequestCancelledError, SharedContextMissing
from polykv_agents.chat_models import ChatPolyKV
from polykv_agents.node_cache import is_id
from polykv_agents.shared_context import SharedContext
from polykv_agents.turns import SharedInput, shared_turns

logger = logging.getLogger(__name__)

KEPT = 16
"""Contexts made of texts that one middleware keeps for an engine; the least recently used goes first."""
MAX_NAME = 64
"""Letters up to which a string that comes with a run is an id or a name, and never a text: after a restart a name must be
missing, and not become a context of one word."""

ContextSource = SharedContext | SharedInput | Callable[[Any], Any] | None
OnUnsupported = Literal["ignore", "warn", "raise"]


@dataclass
class _Build:
    """A context that is being made; all who want it wait for one."""

    done: Future[SharedContext] = field(default_factory=Future)
    waiting: int = 0

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # a task that is cancelled must not cancel it for the others


@dataclass
class _Shelf:
    """Contexts made of texts on one engine."""

    kept: OrderedDict[str, SharedContext] = field(default_factory=OrderedDict)
    builds: dict[str, _Build] = field(default_factory=dict)


class SharedContextMiddleware(AgentMiddleware[Any, Any]):
    """Lets every model call of an agent read a shared context.

    The context comes before the agent's system prompt, tools and messages, and is no part of the agent's state: it is not
    summarised away, not checkpointed, and costs the agent no prefill. List this middleware last, so that it sees the model that
    others have chosen.

    .. code-block:: python

        agent = create_agent(llm, tools, middleware=[SharedContextMiddleware(document)])

    Args:
        context: a :class:`SharedContext`; or the id of a live one; or a text, document or list of them, which is shared at the
            first call, once for all threads and tasks, and kept as long as this object (so a new process makes it anew); or a
            function of LangGraph's runtime that returns one of these, or the name of a live context, or None: the call goes
            without this middleware (it may be a coroutine function, for agents that run asynchronously); or None: what the
            runtime's context object holds under ``attribute``. A string of up to 64 letters that comes from a function or the
            runtime is an id or a name; give a shorter text as a list.
        attribute: name of the runtime context's attribute or key.
        on_unsupported_model: what to do when the model is no ChatPolyKV, which cannot read a context: ``"ignore"``,
            ``"warn"`` or ``"raise"``.

    Raises:
        InvalidRequestError: an unknown ``on_unsupported_model``, or nothing to share; at a call: the runtime has no such
            attribute.
        SharedContextMissing: at a call: no live context has this id or name.
        ContextReleasedError, IncompatiblePoolError: at a call: the handle has been released, or belongs to another model.
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
        self._shelves: weakref.WeakKeyDictionary[Engine, _Shelf] = weakref.WeakKeyDictionary()

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> Any:
        """Names the context in the call's settings, and gives a ChatPolyKV it."""
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
        if given is None:
            return handler(request)
        # held here until the call is over: the shelf may drop it meanwhile
        context = self._live(llm, given)
        if context is None:
            context = self._made(llm, given)
        return handler(_reading(request, llm, context))

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
        if given is None:
            return await handler(request)
        await llm._aload()
        context = self._live(llm, given)
        if context is None:
            context = await self._amade(llm, given)
        return await handler(_reading(request, llm, context))

    def _chat_model(self, request: ModelRequest[Any]) -> ChatPolyKV | None:
        model = _innermost(request.model)
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
        missing = object()
        given = (
            held.get(self._attribute, missing) if isinstance(held, Mapping) else getattr(held, self._attribute, missing)
        )
        if given is missing:
            raise InvalidRequestError(
                f"SharedContextMiddleware() reads {self._attribute!r} of the run's context, and "
                f"{'the run has none' if held is None else f'the {type(held).__name__} has no such attribute or key'}; give "
                f"invoke(..., context=...) with {self._attribute}=, where None is for a call without a shared context"
            )
        return given

    def _live(self, llm: ChatPolyKV, given: Any) -> SharedContext | None:
        """The context if it is there; None for a text that must be shared first."""
        if isinstance(given, SharedContext):
            return given
        from_run = self._context is None or callable(self._context)
        if isinstance(given, str) and (from_run or is_id(given)):
            known = llm.find_context(given)
            if known is not None:
                return known
            if len(given) <= MAX_NAME:
                raise SharedContextMissing(
                    f"no live shared context has the id or name {given!r} in this process: it was released, or made in another "
                    "process. Share its text again with llm.share(text, name=...), or give the middleware the text instead "
                    f"(one of up to {MAX_NAME} letters as a list)"
                )
        return self._kept(self._shelf(llm), _key(llm, given))

    def _shelf(self, llm: ChatPolyKV) -> _Shelf:
        with self._lock:
            return self._shelves.setdefault(llm.engine, _Shelf())

    def _kept(self, shelf: _Shelf, key: str) -> SharedContext | None:
        with self._lock:
            context = shelf.kept.get(key)
            if context is None or context.released:
                return None
            shelf.kept.move_to_end(key)
            return context

    def _made(self, llm: ChatPolyKV, text: SharedInput) -> SharedContext:
        shelf, key = self._shelf(llm), _key(llm, text)
        while True:
            build, mine = self._join(shelf, key)
            try:
                if mine:
                    self._build(llm, text, shelf, key, build)
                return build.done.result()
            except RequestCancelledError:
                continue  # the one who built was interrupted
            finally:
                self._leave(build)

    async def _amade(self, llm: ChatPolyKV, text: SharedInput) -> SharedContext:
        shelf, key = self._shelf(llm), _key(llm, text)
        loop = asyncio.get_running_loop()
        while True:
            build, mine = self._join(shelf, key)
            try:
                if mine:
                    # to its end in a thread: a synchronous call that waits for it may be blocking this event loop
                    run = contextvars.copy_context().run
                    try:
                        loop.run_in_executor(None, run, self._build, llm, text, shelf, key, build)
                    except RuntimeError as error:  # the loop is being shut down
                        self._fail(shelf, key, build, error)
                return await asyncio.wrap_future(build.done)
            except RequestCancelledError:
                continue
            finally:
                self._leave(build)

    def _join(self, shelf: _Shelf, key: str) -> tuple[_Build, bool]:
        with self._lock:
            build = shelf.builds.get(key)
            mine = False
            if build is None:
                build = _Build()
                kept = shelf.kept.get(key)
                if kept is not None and not kept.released:  # another has finished since this call looked
                    build.done.set_result(kept)
                else:
                    shelf.builds[key] = build
                    mine = True
            build.waiting += 1
            return build, mine

    def _leave(self, build: _Build) -> None:
        with self._lock:
            build.waiting -= 1

    def _build(self, llm: ChatPolyKV, text: SharedInput, shelf: _Shelf, key: str, build: _Build) -> None:
        """Shares the text; the outcome is for all who wait, an interruption of this caller for itself."""

        def report(phase: str, done: int, total: int) -> None:
            if build.waiting == 0:
                raise RequestCancelledError("nobody waits for this context any more")

        try:
            context = llm.share(text, progress=report)
        except Exception as error:
            self._fail(shelf, key, build, error)
            return
        except BaseException:
            interrupted = RequestCancelledError("the call that built this context was interrupted")
            self._fail(shelf, key, build, interrupted)
            raise
        with self._lock:
            del shelf.builds[key]
            shelf.kept[key] = context
            # dropping and not releasing: a call may be about to read it
            while len(shelf.kept) > KEPT:
                shelf.kept.popitem(last=False)
        build.done.set_result(context)

    def _fail(self, shelf: _Shelf, key: str, build: _Build, error: Exception) -> None:
        with self._lock:
            del shelf.builds[key]
        build.done.set_exception(error)


def _innermost(model: Any) -> Any:
    """What bindings, retries and configurable fields are around."""
    config: RunnableConfig = ensure_config()
    while not isinstance(model, ChatPolyKV):
        if isinstance(model, RunnableBindingBase):
            config = merge_configs(model.config, config)
            model = model.bound
        elif isinstance(model, DynamicRunnable):
            model, config = model.prepare(config)
        else:
            break
    return model


def _key(llm: ChatPolyKV, text: SharedInput) -> str:
    return json.dumps([shared_turns(text), llm.codec, llm.chat_template, llm.tool_format])


def _reading(request: ModelRequest[Any], llm: ChatPolyKV, context: SharedContext) -> ModelRequest[Any]:
    reader = llm.with_context(context)  # says what is wrong with it here, where its owner is known
    # the id and not the object: settings go into traces and cache keys
    settings = {**request.model_settings, "shared_context": context.id}
    if request.model is llm:
        # an id stands for a text in any codec; the reader is for this one
        return request.override(model=reader, model_settings=settings)
    if llm.find_context(context.id) != context:
        raise InvalidRequestError(
            f"the text of context {context.id[:12]} is shared with several codecs, and a wrapped model ({type(request.model).__name__}) can "
            f"be told the id alone, not the codec ({context.codec!r}); give the agent the ChatPolyKV itself, or release the others"
        )
    return request.override(model_settings=settings)
