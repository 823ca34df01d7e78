"""Turns to token ids, the shared context first.

Prefix sharing is decided by the order of the prompt: with a role in the system message and the document in the user
turn, agents share three tokens; with tools before the document, twenty. So a shared text goes to the head of the system
message, whatever follows it, and tools go through the chat template only where that keeps the shared part first.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from os.path import commonprefix
from threading import Lock
from typing import Any, TypeVar

import jinja2

from polykv.errors import InvalidRequestError
from polykv_agents.tool_calls import Call, Reasoning, Tool, ToolChoice, ToolFormat
from polykv_agents.tool_calls.base import dumps
from polykv_agents.tool_calls.registry import detect_format, template_takes_tools
from polykv_agents.tool_calls.streaming import THOUGHT_MARKS
from polykv_agents.turns import SEPARATOR, Turn, merge_turns

REMEMBERED = 64
"""Shared beginnings whose token ids are remembered: finding them renders some dozens of prompts."""
REMEMBERED_SHAPES = 256
"""Kinds of conversations of which it is remembered whether the template shows all of them."""

# What may follow a shared context: kinds of characters that tokenizers treat differently.
_PROBES = ("You", "the", "s", "1", " x", "\n", "\n\n", "-", ".", '"', "é", "日", "🙂", "<", "  ")
_NO_CALL = "call00000"
_LOOK_AHEAD = 128
"""Characters after a word that may decide where it ends; the patterns of tokenizers look at one or two."""
_PROBE_TOOL = Tool(
    "polykv_probe_tool",
    "polykv-probe-description",
    {"type": "object", "properties": {"polykv_probe_key": {"type": "string"}}},
)
_PROBE_USER: Turn = {"role": "user", "content": "x"}
_REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, IndexError)

_Value = TypeVar("_Value")


class _Memory:
    """The values that were asked for last. Thread-safe; two threads may make one value at the same time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                known: _Value = self._values[key]
                return known
        value = make()
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return value


@dataclass(frozen=True)
class Prompt:
    """A rendered call.

    Attributes:
        ids: token ids.
        text: the same as text.
        reasoning: whether the answer may or must begin with thoughts.
    """

    ids: list[int]
    text: str
    reasoning: Reasoning = "none"


class Renderer:
    """A tokenizer's chat template. Thread-safe.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        chat_template: used instead of the tokenizer's own.
        tool_format: how the model writes tool calls; found from the template by default.

    Attributes:
        format: how the model writes tool calls.
        takes_tools: whether the template says something of tools itself.
        takes_calls: whether it shows calls and results of a conversation.
        reasons: whether the model's answers may begin with thoughts.

    Raises:
        InvalidRequestError: there is no chat template.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None, tool_format: ToolFormat | None = None) -> None:
        self._tokenizer = tokenizer
        try:
            self._template = tokenizer.get_chat_template(chat_template)
        except ValueError as error:
            raise InvalidRequestError(
                "the tokenizer has no chat template; pass chat_template=..., or use an instruction-tuned model"
            ) from error
        self._tool_template = self._named_tool_template(chat_template)
        added = tokenizer.added_tokens_decoder
        self._special = {token.content: int(token_id) for token_id, token in added.items() if token.special}
        self.format = tool_format or detect_format(self._tool_template, tokenizer)
        self._argument_texts = False
        self._system_role = self._takes_system_role()
        self.takes_tools = template_takes_tools(self._tool_template) and self._shows_tools()
        self.takes_calls = self._shows_calls()
        if not self.takes_calls:  # DeepSeek V3 wants the arguments as JSON text, as OpenAI's API gives them
            self._argument_texts = True
            self.takes_calls = self._shows_calls()
        self.reasons = any(opening in self._template for opening, _ in self.format.thoughts)
        self._tools_after = _Memory(REMEMBERED_SHAPES)
        self._shown = _Memory(REMEMBERED_SHAPES)
        self._beginnings = _Memory(REMEMBERED)
        self._shared = _Memory(REMEMBERED)

    # ------------------------------------------------------------------------------------- what the template can

    def _named_tool_template(self, chat_template: str | None) -> str:
        try:
            return str(self._tokenizer.get_chat_template(chat_template, tools=[_PROBE_TOOL.openai()]))
        except ValueError:
            return str(self._template)

    def _takes_system_role(self) -> bool:
        """Whether a system turn stays first: templates refuse it, drop it (Gemma) or move it to the end (Mistral)."""
        probe, first = "polykv-system-probe", "polykv-user-probe"
        dialogue = [("system", probe), ("user", first), ("assistant", "x"), ("user", "y")]
        try:
            text = self._apply([{"role": role, "content": content} for role, content in dialogue])
        except _REFUSALS:
            return False
        return -1 < text.find(probe) < text.find(first)

    def _shows_tools(self) -> bool:
        try:
            text = self._native([_PROBE_USER], [_PROBE_TOOL])
        except _REFUSALS:
            return False
        return _PROBE_TOOL.name in text and "polykv_probe_key" in text

    def _shows_calls(self) -> bool:
        """Whether a call's name and arguments and a tool's result all appear, with tools in the prompt and without."""
        call = {"name": _PROBE_TOOL.name, "arguments": {"polykv_probe_key": "polykv-probe-value"}}
        turns: list[Turn] = [
            _PROBE_USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "id": "call00001", "function": call}],
            },
            {"role": "tool", "content": "polykv-probe-result", "tool_call_id": "call00001", "name": _PROBE_TOOL.name},
        ]
        wanted = (_PROBE_TOOL.name, "polykv_probe_key", "polykv-probe-value", "polykv-probe-result")
        for tools in ([_PROBE_TOOL], []) if self.takes_tools else ([],):
            try:
                text = self._native(turns, tools)
            except _REFUSALS:
                return False
            # the tools' own section names the tool and its key, too
            if not all(text.count(part) > (bool(tools) and part in wanted[:2]) for part in wanted):
                return False
        return True

    def special_id(self, mark: str) -> int | None:
        """The id of a text that is one special token of the tokenizer; None if it is not."""
        return self._special.get(mark)

    def visible_ids(self) -> frozenset[int]:
        """Special tokens that an answer must show, since calls and thoughts are told by them."""
        pairs = (*THOUGHT_MARKS, *self.format.thoughts)
        marks = [*self.format.marks, *(mark for pair in pairs for mark in pair)]
        found = {token_id for mark in marks if (token_id := self.special_id(mark)) is not None}
        return frozenset(found)

    def _keeps_tools_after(self, shared: Sequence[Turn]) -> bool:
        """Whether tools leave the beginning of a prompt as it is, for shared turns of these roles."""
        if not self.takes_tools:
            return False
        roles = tuple(turn["role"] for turn in merge_turns(shared))
        if not roles:
            return True
        return self._tools_after.get(roles, lambda: self._probe_tools_after(roles))

    def _probe_tools_after(self, roles: Sequence[str]) -> bool:
        last = f"polykv-shared-{len(roles) - 1}"
        shared: list[Turn] = [{"role": role, "content": f"polykv-shared-{i}"} for i, role in enumerate(roles)]
        user, role = {"role": "user", "content": "polykv-user"}, {"role": "system", "content": "polykv-role"}
        answer = {"role": "assistant", "content": "polykv-answer"}
        for own in ([user], [role, user], [user, answer, user]):
            turns = [*shared, *own]
            try:
                plain, told = (self._native(self._folded(turns), tools) for tools in ([], [_PROBE_TOOL]))
            except _REFUSALS:
                return False
            end = plain.find(last) + len(last)
            if last not in plain or plain[:end] != told[:end]:
                return False
        return True

    def _shows(self, turns: Sequence[Turn], tools: bool) -> bool:
        """Whether the template shows all that these turns say, and the tools.

        Families drop the text beside a call, a result whose call is missing, or the tools where no user has spoken.
        Told from a conversation of the same shape, in which every text is another word.
        """
        if not tools and not _has_calls(turns):
            return True  # there is no other way to show them
        shape = _shape(turns)
        return self._shown.get((shape, tools), lambda: self._probe_shape(shape, tools))

    def _probe_shape(self, shape: tuple[_Shape, ...], tools: bool) -> bool:
        turns, words = _words(shape)
        try:
            text = self._native(turns, [_PROBE_TOOL] if tools else [])
        except _REFUSALS:
            return False
        told = (_PROBE_TOOL.name, "polykv_probe_key") if tools else ()
        return all(word in text for word in (*words, *told))

    def _shows_shared(self, shared: Sequence[Turn]) -> bool:
        """Whether calls of the shared turns are shown as the template does; whatever follows must not change that."""
        return self.takes_calls and self._shows(self._folded([*shared, _PROBE_USER]), False)

    # ---------------------------------------------------------------------------------------------- turns to text

    def _apply(self, turns: list[Turn], tools: Sequence[Tool] = ()) -> str:
        text = self._tokenizer.apply_chat_template(
            turns,
            chat_template=self._tool_template if tools else self._template,
            tools=[tool.openai() for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        return str(text)

    def _folded(self, turns: Sequence[Turn]) -> list[Turn]:
        """Turns that alternate, without a system turn where the template has no place for one."""
        merged = _merged(turns)
        if merged and merged[0]["role"] == "system" and not self._system_role:
            merged = _merged([{"role": "user", "content": merged[0]["content"]}, *merged[1:]])
        return merged

    def _native(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> str:
        return self._apply(_with_argument_texts(turns) if self._argument_texts else list(turns), tools)

    def _spelled(self, turns: Sequence[Turn]) -> list[Turn]:
        """Calls and results as text, for templates that have no place for them."""
        spelled: list[Turn] = []
        for turn in turns:
            if turn["role"] == "tool":
                content = self.format.write_result(turn.get("name") or "tool", turn["content"])
                spelled.append({"role": "user", "content": content})
                continue
            calls = [Call(c["function"]["name"], c["function"]["arguments"]) for c in turn.get("tool_calls", ())]
            plain = {key: value for key, value in turn.items() if key != "tool_calls"}
            if calls:
                written = self.format.write_calls(calls)
                plain["content"] = SEPARATOR.join(part for part in (turn["content"], written) if part)
            spelled.append(plain)
        return spelled

    def _text(
        self,
        own: Sequence[Turn],
        shared: Sequence[Turn],
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel: bool,
        section: str | None,
        glued: bool,
    ) -> str:
        if not own and not shared:
            raise InvalidRequestError("there are no messages; give at least one")
        matched = _matched([*shared, *own])
        shared, own = matched[: len(shared)], matched[len(shared) :]
        cut = glued and bool(shared) and bool(own) and _can_be_cut(shared[-1]) and own[0]["role"] == shared[-1]["role"]
        tells = bool(tools) and self._keeps_tools_after(shared)
        shows_shared = self._shows_shared(shared)
        # what a template refuses of the call's own turns must not change how the shared ones are shown
        ways = [(tells, True), (False, True)] if shows_shared else []
        ways += [(tells, False), (False, False)]
        refusal: Exception | None = None
        for native_tools, native_calls in dict.fromkeys(ways):
            parts = [] if native_tools or not tools else [self.format.instructions(tools, choice, parallel=parallel)]
            extra = SEPARATOR.join([*parts, *([section] if section else [])])
            turns = _arranged(
                own if native_calls else self._spelled(own),
                shared if shows_shared else self._spelled(shared),
                extra,
                cut,
            )
            prepared = self._folded(turns)
            try:
                text = self._native(prepared, tools if native_tools else ())
            except _REFUSALS as error:
                refusal = refusal or error
                continue
            if not self._shows(prepared, native_tools):
                continue
            # Mistral's template finds the last user turn by its text, and tells of the tools at each of that text
            if native_tools and shared and not text.startswith(self._beginning(shared, glued)):
                continue
            return text
        roles = ", ".join(turn["role"] for turn in self._folded([*shared, *own]))
        reason = refusal or "it leaves out some of what they say"
        raise InvalidRequestError(f"the chat template refuses the turns ({roles}): {reason}") from refusal

    def text(self, turns: Sequence[Turn]) -> str:
        """The prompt as text, ready for the assistant's answer.

        Raises:
            InvalidRequestError: no turns, or the template refuses them.
        """
        return self._text(turns, (), (), "auto", True, None, False)

    def ids(self, turns: Sequence[Turn]) -> list[int]:
        """The prompt as token ids. The template writes the special tokens, so none are added, no second BOS either.

        Raises:
            InvalidRequestError: see :meth:`text`; or half a surrogate pair, which is no character.
        """
        return self._encode(self.text(turns))

    def prompt(
        self,
        own: Sequence[Turn],
        shared: Sequence[Turn] = (),
        *,
        tools: Sequence[Tool] = (),
        choice: ToolChoice = "auto",
        parallel: bool = True,
        section: str | None = None,
        glued: bool = False,
    ) -> Prompt:
        """The prompt of a call, the shared turns first, token for token the same whatever else it holds.

        Tools go through the template where that leaves the shared turns first; else, and where the template knows none,
        a section of the tool format tells of them, after the shared turns and the role. Calls and results of the
        conversation are shown as the template shows them, or as text where it does not, or refuses them.

        Args:
            own: the call's turns.
            shared: turns before them.
            tools: the model is told of.
            choice: whether it must call one.
            parallel: whether it may call several.
            section: further text about the answer, after the tools.
            glued: ``own`` begins in the middle of the last shared turn: nothing is put between, but for what a section
                has to say there.

        Raises:
            InvalidRequestError: no turns, or the template refuses them.
        """
        text = self._text(own, shared, tools, choice, parallel, section, glued)
        return Prompt(self._encode(text), text, self._reasoning(text))

    def _reasoning(self, text: str) -> Reasoning:
        tail = text.rstrip()
        if any(tail.endswith(opening) for opening, _ in self.format.thoughts):
            return "open"
        return "optional" if self.reasons else "none"

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(_checked(text), add_special_tokens=False)
        return ids

    # -------------------------------------------------------------------------------------------- what is shared

    def shared_ids(self, turns: Sequence[Turn], *, glued: bool = False) -> list[int]:
        """The token ids that every prompt over these shared turns starts with.

        Tokenizers merge across the end of a text, so the context's own tokens are not always a prefix of a longer
        prompt's. The common prefix over prompts that go on in every way is: it ends at a boundary that no continuation
        moves.

        Args:
            turns: the shared ones.
            glued: prompts go on in the middle of the last one.

        Raises:
            InvalidRequestError: the template puts something different first in every prompt.
        """
        ids = self._shared.get((_fingerprint(turns), glued), lambda: self._common_ids(turns, glued))
        return list(ids)

    def _beginning(self, shared: Sequence[Turn], glued: bool) -> str:
        """What every prompt over these turns begins with, as text."""

        def find() -> str:
            return commonprefix(self._continued(shared, glued))  # noqa: RUF071  (letter by letter is what is wanted)

        return self._beginnings.get((_fingerprint(shared), glued), find)

    def _continued(self, turns: Sequence[Turn], glued: bool) -> list[str]:
        """Prompts over shared turns that go on in every way."""
        glued = glued and bool(turns) and _can_be_cut(turns[-1])
        roles = (turns[-1]["role"],) if glued else ("system", "user")
        texts = [
            self.prompt_text(
                [{"role": role, "content": probe}, *([] if role == "user" else [_PROBE_USER])], turns, glued=glued
            )
            for probe in _PROBES
            for role in roles
        ]
        more: list[list[Turn]] = []
        if glued:  # it may also end there, and then some templates trim it
            more = [[{"role": roles[0], "content": probe}] for probe in ("", "\n\n")]
        elif turns:
            # it may be answered, by the model now or in the conversation, or be followed by results
            more = [] if turns[-1]["role"] == "system" else [[]]
            turns = _matched(turns)
            call_ids = [_NO_CALL, *_unanswered(turns)]
            more += [[{"role": "assistant", "content": probe}, _PROBE_USER] for probe in _PROBES[:2]]
            more += [
                [{"role": "tool", "content": probe, "tool_call_id": call_id}, _PROBE_USER]
                for call_id in call_ids
                for probe in _PROBES[:2]
            ]
            call = {"type": "function", "id": "a", "function": {"name": _PROBE_TOOL.name, "arguments": {}}}
            more.append([{"role": "assistant", "content": "", "tool_calls": [call]}, _PROBE_USER])
        for continuation in more:
            with suppress(InvalidRequestError):  # not every template allows it
                texts.append(self.prompt_text(continuation, turns, glued=glued))
        return list(dict.fromkeys(texts))

    def _common_ids(self, turns: Sequence[Turn], glued: bool) -> list[int]:
        texts = self._continued(turns, glued)
        role = turns[-1]["role"] if glued and turns and _can_be_cut(turns[-1]) else "user"
        continuation: list[Turn] = [{"role": role, "content": "You"}, *([] if role == "user" else [_PROBE_USER])]
        for tools, section in (((_PROBE_TOOL,), None), ((), "x")):
            texts.append(self.prompt_text(continuation, turns, tools=tools, section=section, glued=glued))
        common = commonprefix(texts)  # noqa: RUF071  (letter by letter is what is wanted)
        head, start = self._settled(texts[0], len(common.rstrip()) - _LOOK_AHEAD)
        tails = [self._encode(text[start:]) for text in texts]
        shared = [*head, *(column[0] for column in takewhile(_all_equal, zip(*tails, strict=False)))]
        # templates may leave out parts of an answer (its thoughts), but never of what was asked or given
        given = [turn["content"].strip() for turn in turns if turn["role"] in ("system", "user")]
        if not shared or any(content not in common for content in given):
            raise InvalidRequestError(
                "this chat template does not put the shared context first, so nothing can be shared; pass another one "
                "as chat_template=..."
            )
        return shared

    def _settled(self, text: str, limit: int) -> tuple[list[int], int]:
        """The tokens up to some place before ``limit`` that stay whatever comes after it, and that place.

        No token reaches across two words of the tokenizer, and the next few characters tell where a word ends. So only
        what comes after such a place needs to be encoded anew; nothing is settled for a tokenizer without words.
        """
        if limit <= 0 or not getattr(self._tokenizer, "is_fast", False):
            return [], 0
        encoding = self._tokenizer(_checked(text), add_special_tokens=False, verbose=False)
        ids: list[int] = encoding["input_ids"]
        words = encoding.word_ids(0)
        for at in range(len(ids) - 1, 0, -1):
            span = encoding.token_to_chars(0, at)
            if span is None or span.start > limit or None in (words[at - 1], words[at]) or words[at - 1] == words[at]:
                continue
            # not so where a tokenizer treats the start of a text in its own way
            return (ids[:at], span.start) if self._encode(text[span.start :]) == ids[at:] else ([], 0)
        return [], 0

    def prompt_text(
        self,
        own: Sequence[Turn],
        shared: Sequence[Turn] = (),
        *,
        tools: Sequence[Tool] = (),
        section: str | None = None,
        glued: bool = False,
    ) -> str:
        """As :meth:`prompt`, the text alone."""
        return self._text(own, shared, tools, "auto", True, section, glued)


def _arranged(own: Sequence[Turn], shared: Sequence[Turn], extra: str, cut: bool) -> list[Turn]:
    """All turns in their order, with a further text at the end of the system message.

    Where the shared turns go past the system message, the text is a late system turn, which becomes part of the next
    user turn. ``cut`` says that the first own turn goes on with the last shared one.
    """
    own, shared = list(own), list(shared)
    late = any(turn["role"] != "system" for turn in shared)
    added: list[Turn] = [{"role": "system", "content": extra}] if extra else []
    if cut and not (late and extra):
        shared[-1] = {**shared[-1], "content": shared[-1]["content"] + own[0]["content"]}
        own = own[1:]
    if not late:
        leading = len(list(takewhile(lambda turn: turn["role"] == "system", own)))
        return [*shared, *own[:leading], *added, *own[leading:]]
    users = [i for i, turn in enumerate(own) if turn["role"] == "user"]
    at = users[0] if users else len(own)
    return [*shared, *own[:at], *added, *own[at:]]


def _matched(turns: Sequence[Turn]) -> list[Turn]:
    """Calls numbered in their order, and each result with the number and name of the call that it answers.

    A random id must not make a prompt differ, and some templates demand nine letters. A call takes one result, before
    the user speaks again; other results have the number zero. Where ids come again, the latest answer's calls count.
    """
    waiting: dict[str | None, list[str]] = {}
    names: dict[str | None, str] = {}
    result: list[Turn] = []
    count = 0
    for turn in turns:
        turn = dict(turn)
        if turn["role"] in ("system", "user"):
            waiting.clear()
        if turn.get("tool_calls"):
            waiting.update((call["id"], []) for call in turn["tool_calls"])
            names.update((call["id"], call["function"]["name"]) for call in turn["tool_calls"])
            calls = []
            for call in turn["tool_calls"]:
                count += 1
                calls.append({**call, "id": f"call{count:05d}"})
                waiting[call["id"]].append(calls[-1]["id"])
            turn["tool_calls"] = calls
        if turn["role"] == "tool":
            call_id = turn.get("tool_call_id")
            turn["tool_call_id"] = waiting[call_id].pop(0) if waiting.get(call_id) else _NO_CALL
            if turn.get("name") in (None, "", "tool"):
                turn["name"] = names.get(call_id, "tool")
        result.append(turn)
    return result


def _unanswered(turns: Sequence[Turn]) -> list[str]:
    """Calls, as :func:`_matched` numbers them, that may yet have a result."""
    waiting: list[str] = []
    for turn in turns:
        if turn["role"] in ("system", "user"):
            waiting.clear()
        waiting += [call["id"] for call in turn.get("tool_calls", ())]
        if turn["role"] == "tool" and turn["tool_call_id"] in waiting:
            waiting.remove(turn["tool_call_id"])
    return waiting


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text holds {text[error.start]!r}, half a surrogate pair and no character; was a file read with "
            "errors='surrogateescape'? Read it with its right encoding, or with errors='replace'"
        ) from error
    return text


def _can_be_cut(turn: Turn) -> bool:
    """Whether a mark may lie inside: results of tools stay apart, and what a template writes of answers is its own."""
    return turn["role"] in ("system", "user")


def _has_calls(turns: Sequence[Turn]) -> bool:
    return any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    """As :func:`merge_turns`, but an answer that follows calls stays apart: joined, its text would come before them."""
    parts: list[list[Turn]] = [[]]
    for turn in turns:
        if turn["role"] == "assistant" and parts[-1] and parts[-1][-1].get("tool_calls"):
            parts.append([])
        parts[-1].append(turn)
    return [turn for part in parts for turn in merge_turns(part)]


def _with_argument_texts(turns: Sequence[Turn]) -> list[Turn]:
    result = []
    for turn in turns:
        if turn.get("tool_calls"):
            calls = [
                {**call, "function": {**call["function"], "arguments": dumps(call["function"]["arguments"])}}
                for call in turn["tool_calls"]
            ]
            turn = {**turn, "tool_calls": calls}
        result.append(turn)
    return result


_Shape = tuple[str, bool, tuple[tuple[str, bool], ...], str | None, bool]
"""Of a turn: role, whether it has text, its calls (id, whether it has arguments), the call it answers, whether it has
a name."""


def _shape(turns: Sequence[Turn]) -> tuple[_Shape, ...]:
    return tuple(
        (
            turn["role"],
            bool(turn["content"].strip()),
            tuple((call["id"], bool(call["function"]["arguments"])) for call in turn.get("tool_calls", ())),
            turn.get("tool_call_id"),
            bool(turn.get("name")),
        )
        for turn in turns
    )


def _words(shape: Sequence[_Shape]) -> tuple[list[Turn], list[str]]:
    """A conversation of this shape in which every text, tool, argument and value is another word, and these words."""
    turns: list[Turn] = []
    words: list[str] = []
    names: dict[str | None, str] = {}

    def word() -> str:
        words.append(f"polykv{len(words)}probe")
        return words[-1]

    for role, has_text, calls, answered, has_name in shape:
        turn: Turn = {"role": role, "content": word() if has_text else ""}
        if calls:
            turn["tool_calls"] = []
            for call_id, has_arguments in calls:
                names[call_id] = word()
                function = {"name": names[call_id], "arguments": {word(): word()} if has_arguments else {}}
                turn["tool_calls"].append({"type": "function", "id": call_id, "function": function})
        if answered is not None:
            turn["tool_call_id"] = answered
        if has_name:
            turn["name"] = names.get(answered, "tool") if role == "tool" else "somebody"
        turns.append(turn)
    return turns, words


def _fingerprint(turns: Sequence[Turn]) -> str:
    # the order of a call's arguments is seen by templates, so keys are not sorted
    return hashlib.sha256(json.dumps(list(turns), default=repr).encode()).hexdigest()


def _all_equal(column: tuple[int, ...]) -> bool:
    return len(set(column)) == 1
