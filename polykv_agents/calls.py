"""One call of a chat model before it is submitted: its keyword arguments, its prompt, and the contexts it reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage

from polykv.engine import Request, SamplingParams
from polykv.errors import ContextReleasedError, InvalidRequestError, PoolFullError, UnsupportedModelError
from polykv.pool import KVSegment, Lease
from polykv_agents.marks import Mark, find_marks, leading_system, split
from polykv_agents.rendering import Prompt
from polykv_agents.shared_context import SharedContext
from polykv_agents.tool_calls import OutputParser
from polykv_agents.tools import TOOL_KEYWORDS, Ask, ask_of
from polykv_agents.turns import Turn, message_turns

if TYPE_CHECKING:
    from polykv_agents.chat_models import ChatPolyKV

logger = logging.getLogger(__name__)

SAMPLING_KEYWORDS = (
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
)
REQUEST_KEYWORDS = ("timeout", "priority")
_CONTEXT_KEYWORDS = ("shared_context", "prompt_cache_key", "cache_control", "prompt_cache_options")
_NEUTRAL_KEYWORDS = ("model", "n", "stream_usage", "max_retries")

CALL_KEYWORDS = (*SAMPLING_KEYWORDS, *REQUEST_KEYWORDS, *TOOL_KEYWORDS, *_CONTEXT_KEYWORDS, *_NEUTRAL_KEYWORDS)
"""Keyword arguments of ``invoke``, ``stream``, ``bind``, ``bind_tools`` and their kin.

``stream_usage`` and ``max_retries`` change nothing (usage is always told, and nothing here fails by chance); ``n`` may
only be 1; of ``prompt_cache_options`` and ``cache_control`` only that they are there counts, not their times to live.
"""

MIN_MARKED_TOKENS = 32
"""Less than this before a cache mark is computed anew: keeping it would cost more than it saves."""


@dataclass
class Plan:
    """A call before it is submitted."""

    prompt: Prompt
    sampling: SamplingParams
    options: dict[str, Any]
    parser: OutputParser | None
    segment: KVSegment | None = None
    marks: list[int] = field(default_factory=list)  # ends of the contexts that cache marks ask for, in tokens
    facts: dict[str, Any] | None = None
    created: int = 0
    held: list[SharedContext | Lease] = field(default_factory=list)  # alive until the request has its lease

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *exc: object) -> None:
        for held in self.held:
            if isinstance(held, Lease):
                held.release()
        self.held.clear()

    def explain(self, reason: str) -> None:
        """Says why a context that was asked for is not used."""
        self.facts = {"tokens": 0, **(self.facts or {}), "reason": reason}
        logger.warning("a shared context was not used: %s", reason)


def check_keywords(kwargs: Mapping[str, Any]) -> None:
    """Refuses what no call takes.

    Raises:
        InvalidRequestError: unknown keyword arguments, or several answers.
    """
    unknown = sorted(set(kwargs) - set(CALL_KEYWORDS))
    if unknown:
        raise InvalidRequestError(
            f"unknown keyword argument(s) {', '.join(map(repr, unknown))}; ChatPolyKV takes {', '.join(CALL_KEYWORDS)}"
        )
    if kwargs.get("n") not in (None, 1):
        raise InvalidRequestError(
            f"n={kwargs['n']!r}: a call gives one answer; for several, batch([prompt] * {kwargs['n']!r}) with a temperature"
        )


def sampling_of(llm: ChatPolyKV, kwargs: Mapping[str, Any], stop: list[str] | None) -> SamplingParams:
    """How the answer is sampled: the call's own values before the object's.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    chosen = {name: kwargs[name] for name in SAMPLING_KEYWORDS if kwargs.get(name) is not None}
    stops = stop if stop is not None else chosen.pop("stop", llm.stop)
    chosen.pop("stop", None)
    if isinstance(stops, str):
        stops = [stops]
    defaults = {
        name: value for name in SAMPLING_KEYWORDS if name != "stop" and (value := getattr(llm, name)) is not None
    }
    values = {**defaults, **chosen}
    if values.get("logprobs") is False and "top_logprobs" not in chosen:
        values.pop("top_logprobs", None)  # logprobs=False of a call switches this object's top_logprobs off too
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = _biases(values["logit_bias"])
    return SamplingParams(**values, stop=tuple(stops or ()))


def request_options(llm: ChatPolyKV, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Timeout and priority of a call.

    Raises:
        InvalidRequestError: one is out of range.
    """
    options = {name: kwargs[name] if name in kwargs else getattr(llm, name) for name in REQUEST_KEYWORDS}
    Request((0,), **options)  # says what is wrong with them before any work is done
    return options


def context_of(llm: ChatPolyKV, kwargs: Mapping[str, Any]) -> SharedContext | None:
    """The context that a call reads: the one it names, else this object's."""
    named = kwargs.get("shared_context")
    if named is None:
        return llm.shared_context
    if not isinstance(named, str):
        raise InvalidRequestError(
            f"shared_context= of a call is the id or name of a context, got {named!r:.60}; give ctx.id, since arguments go "
            "into traces and cache keys"
        )
    if llm.shared_context is not None and named == llm.shared_context.id:
        return llm.shared_context
    return llm._contexts().get(named, llm.cache_salt)


def plan_call(
    llm: ChatPolyKV, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
) -> Plan:
    """Everything up to submission, but for building contexts."""
    check_keywords(kwargs)
    ask = ask_of(**{name: kwargs[name] for name in TOOL_KEYWORDS if name in kwargs})
    sampling = sampling_of(llm, kwargs, stop)
    options = request_options(llm, kwargs)
    context = context_of(llm, kwargs)
    shared: Sequence[Turn] = ()
    segment: KVSegment | None = None
    if context is not None:
        llm._check_context(context)
        segment, shared = context.reading()
    marks = marks_of(llm, messages, kwargs)
    prompt = render_prompt(llm, messages, shared, ask, marks[-1] if marks else None)
    grammar = ask.grammar(llm._render().format, prompt.reasoning, llm._render().special_id)
    reads = bool(ask.callable) or prompt.reasoning != "none"
    plan = Plan(
        prompt,
        sampling if grammar is None else replace(sampling, grammar=grammar),
        options,
        llm._render().format.parser(
            ask.callable,
            reasoning=prompt.reasoning,
            json_answer=ask.answer is not None and ask.answer.schema is not None,
        )
        if reads
        else None,
        held=[] if context is None else [context],
    )
    if segment is not None:
        plan.facts = {"id": segment.identity, "tokens": segment.end, "codec": segment.codec}
        if prompt.ids[: segment.end] == segment.context_ids.tolist():
            plan.segment = segment
        else:
            plan.facts["tokens"] = 0
            plan.explain(
                "the chat template rendered the shared context differently for this call (a date in it, perhaps)"
            )
    _find_named(llm, plan, kwargs)
    if segment is plan.segment or segment is None:
        _find_marked(llm, plan, messages, shared, marks)
    return plan


def render_prompt(
    llm: ChatPolyKV, messages: Sequence[BaseMessage], shared: Sequence[Turn], ask: Ask, mark: Mark | None
) -> Prompt:
    """The prompt; with a mark, what is before it counts as shared and comes first token for token."""
    before, after, glued = split(messages, mark) if mark is not None else ([], messages, False)
    return llm._render().prompt(
        message_turns(after),
        [*shared, *message_turns(before)],
        tools=ask.tools,
        choice=ask.choice,
        parallel=ask.parallel,
        section=ask.section,
        glued=glued,
    )


def marks_of(llm: ChatPolyKV, messages: Sequence[BaseMessage], kwargs: Mapping[str, Any]) -> list[Mark]:
    """Where the messages' shared beginnings end; of a call that only says so as a whole, after the leading system messages."""
    marks = find_marks(messages)
    if not marks and (kwargs.get("cache_control") or kwargs.get("prompt_cache_key")):
        key = kwargs.get("prompt_cache_key")
        implied = None if key is not None and llm.find_context(key) is not None else leading_system(messages)
        return [] if implied is None else [implied]
    return marks


def _find_named(llm: ChatPolyKV, plan: Plan, kwargs: Mapping[str, Any]) -> None:
    """A context named by ``prompt_cache_key``, whose text the messages hold themselves."""
    key = kwargs.get("prompt_cache_key")
    if key is not None and not isinstance(key, str):
        raise InvalidRequestError(f"prompt_cache_key must be a string, got {key!r:.60}")
    named = None if key is None or plan.segment is not None else llm.find_context(key)
    if named is None:
        return
    segment, _ = named.reading()
    plan.facts = {"id": segment.identity, "tokens": segment.end, "codec": segment.codec}
    if plan.prompt.ids[: segment.end] == segment.context_ids.tolist() and len(plan.prompt.ids) > segment.end:
        plan.segment = segment
        plan.held.append(named)
    else:
        plan.facts["tokens"] = 0
        plan.explain(f"the prompt does not begin with the context named {key!r}")


def _find_marked(
    llm: ChatPolyKV, plan: Plan, messages: Sequence[BaseMessage], shared: Sequence[Turn], marks: Sequence[Mark]
) -> None:
    """Where the contexts of cache marks end; what cannot be one is explained and not an error."""
    start = plan.segment.end if plan.segment is not None else 0
    for mark in marks:
        before, _, glued = split(messages, mark)
        try:
            ids = llm._render().shared_ids([*shared, *message_turns(before)], glued=glued)
        except InvalidRequestError as error:
            plan.explain(str(error))
            continue
        if plan.prompt.ids[: len(ids)] != ids or len(ids) == len(plan.prompt.ids):
            plan.explain("the chat template puts something else before what the cache mark ends")
        elif len(ids) < start + MIN_MARKED_TOKENS:
            plan.explain(
                f"the cache mark ends only {max(0, len(ids) - start)} tokens that were not shared before; at least "
                f"{MIN_MARKED_TOKENS} are kept"
            )
        else:
            plan.marks.append(len(ids))
            start = len(ids)


def build_marked(llm: ChatPolyKV, plan: Plan, *, wait: bool) -> bool:
    """Finds the contexts of the plan's marks in their order; with ``wait`` it builds what is missing.

    Returns:
        Whether all are found; without ``wait`` the others remain in the plan.
    """
    while plan.marks:
        end, parent = plan.marks[0], plan.segment
        ids = plan.prompt.ids[:end]
        own = ids[parent.end if parent is not None else 0 :]
        lease = llm.pool.lease_of(own, llm.codec, parent, plan, salt=llm.cache_salt)
        built = False
        if lease is None:
            if not wait:
                return False
            key = (f"{parent.key if parent is not None else ()}/{llm.cache_salt}/{ids}", llm.codec)

            def build(own: list[int] = own, parent: KVSegment | None = parent) -> KVSegment:
                return llm.pool.keep(llm.engine.share(own, llm.codec, parent=parent, salt=llm.cache_salt))

            try:
                segment, built = llm._contexts().build_once(key, build)
                lease = llm.pool.lease(segment, plan)
            except ContextReleasedError:
                continue  # gone again already, for want of room
            except (UnsupportedModelError, PoolFullError) as error:  # a mark is a hint: the call goes on without it
                plan.marks.clear()
                plan.explain(str(error))
                return True
        segment = lease.segment
        plan.held.append(lease)
        plan.segment = segment
        plan.created += segment.num_tokens if built else 0
        plan.facts = {**(plan.facts or {}), "id": segment.identity, "tokens": segment.end, "codec": segment.codec}
        plan.marks.pop(0)
    return True


def _biases(logit_bias: Mapping[Any, Any]) -> dict[Any, Any]:
    """Biases by token id; OpenAI's API writes the ids as strings, since JSON has no other keys."""
    biases: dict[Any, Any] = {}
    for key, bias in logit_bias.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if token_id in biases:
            raise InvalidRequestError(f"logit_bias names token {token_id} twice, as a number and as a string; keep one")
        biases[token_id] = bias
    return biases
