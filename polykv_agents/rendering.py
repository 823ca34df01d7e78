"""Turns to token ids, the shared context first.

Prefix sharing is decided by the order of the prompt: with a role in the system message and the document in the user
turn, agents share three tokens; with tools before the document, twenty. So a shared text goes to the head of the system
message, whatever follows it, and tools go through the chat template only where that keeps the shared part first.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from os.path import commonprefix
from threading import Lock
from typing import Any

import jinja2

from polykv.errors import InvalidRequestError
from polykv_agents.tool_calls import Call, Reasoning, Tool, ToolChoice, ToolFormat
from polykv_agents.tool_calls.registry import detect_format, template_takes_tools
from polykv_agents.tool_calls.streaming import THOUGHT_MARKS
from polykv_agents.turns import SEPARATOR, Turn, merge_turns

REMEMBERED = 64
"""Shared beginnings whose token ids are remembered: finding them renders some dozens of prompts."""

# What may follow a shared context: kinds of characters that tokenizers treat differently.
_PROBES = ("You", "the", "s", "1", " x", "\n", "\n\n", "-", ".", '"', "é", "日", "🙂", "<", "  ")
_PROBE_TOOL = Tool(
    "polykv_probe_tool",
    "polykv-probe-description",
    {"type": "object", "properties": {"polykv_probe_key": {"type": "string"}}},
)
_REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, IndexError)


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
        self._system_role = self._takes_system_role()
        self.takes_tools = template_takes_tools(self._tool_template) and self._shows_tools()
        self.takes_calls = self._shows_calls()
        self.reasons = any(opening in self._template for opening, _ in self.format.thoughts)
        self._tools_after: dict[tuple[str, ...], bool] = {}
        self._shared: OrderedDict[tuple[str, bool], list[int]] = OrderedDict()
        self._lock = Lock()

    # ------------------------------------------------------------------------------------- what the template can

    def _named_tool_template(self, chat_template: str | None) -> str:
        try:
            return str(self._tokenizer.get_chat_template(chat_template, tools=[_PROBE_TOOL.openai()]))
        except ValueError:
            return str(self._template)

    def _takes_system_role(self) -> bool:
        """Whether a system turn stays first. Templates refuse it or drop it (Gemma), or move it to the last turn (Mistral)."""
        probe, first = "polykv-system-probe", "polykv-user-probe"
        dialogue = [("system", probe), ("user", first), ("assistant", "x"), ("user", "y")]
        try:
            text = self._apply([{"role": role, "content": content} for role, content in dialogue])
        except _REFUSALS:
            return False
        return -1 < text.find(probe) < text.find(first)

    def _shows_tools(self) -> bool:
        try:
            text = self._native([{"role": "user", "content": "x"}], [_PROBE_TOOL])
        except _REFUSALS:
            return False
        return _PROBE_TOOL.name in text and "polykv_probe_key" in text

    def _shows_calls(self) -> bool:
        """Whether a call's name and arguments and a tool's result all appear, with tools in the prompt and without."""
        call = {"name": _PROBE_TOOL.name, "arguments": {"polykv_probe_key": "polykv-probe-value"}}
        turns: list[Turn] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "a", "function": call}]},
            {"role": "tool", "content": "polykv-probe-result", "tool_call_id": "a", "name": _PROBE_TOOL.name},
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
        if roles not in self._tools_after:
            self._tools_after[roles] = self._probe_tools_after(roles)
        return self._tools_after[roles]

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
        merged = merge_turns(turns)
        if merged and merged[0]["role"] == "system" and not self._system_role:
            merged = merge_turns([{"role": "user", "content": merged[0]["content"]}, *merged[1:]])
        return merged

    def _native(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> str:
        return self._apply(_renumbered(turns), tools)

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
        tells = bool(tools) and self._keeps_tools_after(shared)
        # what a template refuses of the call's own turns must not change how the shared ones are shown
        ways = [(tells, True), (tells, False), (False, False)] if self.takes_calls else [(tells, False), (False, False)]
        refusal: Exception | None = None
        for native_tools, native_calls in dict.fromkeys(ways):
            parts = [] if native_tools or not tools else [self.format.instructions(tools, choice, parallel=parallel)]
            extra = SEPARATOR.join([*parts, *([section] if section else [])])
            turns = _arranged(
                own if native_calls else self._spelled(own),
                shared if self.takes_calls else self._spelled(shared),
                extra,
                glued,
            )
            if not turns:
                raise InvalidRequestError("there are no messages; give at least one")
            try:
                prepared = self._folded(turns)
                return self._native(prepared, tools if native_tools else ())
            except _REFUSALS as error:
                refusal = refusal or error
        roles = ", ".join(turn["role"] for turn in self._folded([*shared, *own]))
        raise InvalidRequestError(f"the chat template refuses the turns ({roles}): {refusal}") from refusal

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
            glued: ``own`` begins in the middle of the last shared turn: nothing is put between, but for what a section has
                to say there.

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
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text holds {text[error.start]!r}, half a surrogate pair and no character; was a file read with "
                "errors='surrogateescape'? Read it with its right encoding, or with errors='replace'"
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
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
        key = (json.dumps(list(turns), sort_keys=True, default=str), glued)
        with self._lock:
            known = self._shared.get(key)
            if known is not None:
                self._shared.move_to_end(key)
                return list(known)
        ids = self._common_ids(turns, glued)
        with self._lock:
            self._shared[key] = ids
            while len(self._shared) > REMEMBERED:
                self._shared.popitem(last=False)
        return list(ids)

    def _common_ids(self, turns: Sequence[Turn], glued: bool) -> list[int]:
        user: Turn = {"role": "user", "content": "x"}
        roles = (turns[-1]["role"],) if glued and turns else ("system", "user")
        own: list[list[Turn]] = [
            [{"role": role, "content": probe}, *([] if role == "user" else [user])]
            for probe in _PROBES
            for role in roles
        ]
        texts = [self.prompt_text(continuation, turns, glued=glued) for continuation in own]
        if not glued and turns and turns[-1]["role"] != "assistant":
            # what was given may be answered, by the model now or in the conversation; not every template allows it
            answers: list[list[Turn]] = [[{"role": "assistant", "content": probe}, user] for probe in _PROBES[:2]]
            for continuation in ([], *answers) if turns[-1]["role"] != "system" else answers:
                with suppress(InvalidRequestError):
                    texts.append(self.prompt_text(continuation, turns))
        for tools, section in (((_PROBE_TOOL,), None), ((), "x")):
            for continuation in own[:2]:
                texts.append(self.prompt_text(continuation, turns, tools=tools, section=section, glued=glued))
        common = commonprefix(texts)  # noqa: RUF071  (letter by letter is what is wanted)
        shared = [column[0] for column in takewhile(_all_equal, zip(*map(self._encode, texts), strict=False))]
        # templates may leave out parts of an answer (its thoughts), but never of what was asked or given
        given = [turn["content"].strip() for turn in turns if turn["role"] in ("system", "user")]
        if not shared or any(content not in common for content in given):
            raise InvalidRequestError(
                "this chat template does not put the shared context first, so nothing can be shared; pass another one as "
                "chat_template=..."
            )
        return shared

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


def _arranged(own: Sequence[Turn], shared: Sequence[Turn], extra: str, glued: bool) -> list[Turn]:
    """All turns in their order, with a further text at the end of the system message.

    Where the shared turns go past the system message, the text is a late system turn, which becomes part of the next
    user turn.
    """
    own, shared = list(own), list(shared)
    late = any(turn["role"] != "system" for turn in shared)
    added: list[Turn] = [{"role": "system", "content": extra}] if extra else []
    if glued and shared and own and own[0]["role"] == shared[-1]["role"] and not (late and extra):
        shared[-1] = {**shared[-1], "content": shared[-1]["content"] + own[0]["content"]}
        own = own[1:]
    if not late:
        leading = len(list(takewhile(lambda turn: turn["role"] == "system", own)))
        return [*shared, *own[:leading], *added, *own[leading:]]
    users = [i for i, turn in enumerate(own) if turn["role"] == "user"]
    at = users[0] if users else len(own)
    return [*shared, *own[:at], *added, *own[at:]]


def _renumbered(turns: Sequence[Turn]) -> list[Turn]:
    """Ids of calls by their order: a random id must not make a prompt differ, and some templates demand nine letters."""
    numbers: dict[str | None, str] = {}
    result: list[Turn] = []
    count = 0
    for turn in turns:
        turn = dict(turn)
        if turn.get("tool_calls"):
            calls = []
            for call in turn["tool_calls"]:
                count += 1
                numbers[call["id"]] = f"call{count:05d}"
                calls.append({**call, "id": numbers[call["id"]]})
            turn["tool_calls"] = calls
        if turn["role"] == "tool":
            turn["tool_call_id"] = numbers.get(turn.get("tool_call_id"), "call00000")
        result.append(turn)
    return result


def _all_equal(column: tuple[int, ...]) -> bool:
    return len(set(column)) == 1
