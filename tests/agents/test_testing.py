"""The scripted model: what it says is the script's, all else is the real stack's."""

from __future__ import annotations

import asyncio
import functools
import json
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import FULL
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

import polykv_agents.testing
from polykv.errors import InvalidRequestError
from polykv_agents import ChatPolyKV
from polykv_agents.testing import CHAT_TEMPLATE, Script, make_model, scripted_chat_model, scripted_tokenizer

DOCUMENT = "The carrier bears the risk until the goods are handed over. " * 5
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture
def make() -> Iterator[Callable[..., ChatPolyKV]]:
    made: list[ChatPolyKV] = []

    def build(script: Any, **fields: Any) -> ChatPolyKV:
        made.append(scripted_chat_model(script, **fields))
        return made[-1]

    yield build
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def echo() -> Iterator[ChatPolyKV]:
    """Answers with the question, letter for letter."""
    llm = scripted_chat_model(question_of)
    yield llm
    llm.close()


def question_of(prompt: str) -> str:
    return prompt.rpartition("<|im_start|>user\n")[2].removesuffix("<|im_end|>\n<|im_start|>assistant\n")


def joined(chunks: list[Any]) -> Any:
    return functools.reduce(operator.add, chunks)


class TestAnswers:
    @settings(max_examples=200 if FULL else 25, deadline=None)
    @given(texts=st.lists(TEXTS, min_size=1, max_size=8))
    def test_any_text_comes_back_whole_in_any_company(self, echo: ChatPolyKV, texts: list[str]) -> None:
        assert [m.content for m in echo.batch([[HumanMessage(text)] for text in texts])] == texts
        assert joined(list(echo.stream([HumanMessage(texts[0])]))).content == texts[0]

    def test_marks_in_an_answer_are_text_and_do_not_end_it(self, make: Any) -> None:
        answer = "a<|im_end|>b<|endoftext|>c"
        message = make([answer]).invoke("q")
        assert message.content == answer and message.response_metadata["finish_reason"] == "stop"
        assert message.usage_metadata["output_tokens"] == len(answer) + 1  # bytes, and the end

    @pytest.mark.parametrize(
        "fields", [{"temperature": 1.5, "seed": 1}, {"repetition_penalty": 3, "presence_penalty": 2}]
    )
    def test_sampling_settings_do_not_change_it(self, make: Any, fields: dict[str, Any]) -> None:
        assert make(["one two, one two"], **fields).invoke("q").content == "one two, one two"

    def test_a_banned_token_is_not_said(self, make: Any) -> None:
        llm = make(lambda prompt: "ab")
        (banned,) = llm.get_token_ids("b")
        content = llm.invoke("q", logit_bias={banned: -100}).content
        assert content.startswith("a") and "b" not in content

    def test_limits_and_stop_strings_cut_it(self, make: Any) -> None:
        llm = make(lambda prompt: "alpha beta gamma delta")
        cut = llm.invoke("q", max_tokens=7)
        assert (cut.content, cut.response_metadata["finish_reason"]) == ("alpha b", "length")
        assert llm.invoke("q", stop=["beta gamma"]).content == "alpha "
        assert joined(list(llm.stream("q", stop=["beta gamma"]))).content == "alpha "

    def test_a_grammar_rules_over_it(self, make: Any) -> None:
        form = {"type": "choice", "choices": ["yes", "no"]}
        wise, stubborn = make(lambda prompt: "no"), make(lambda prompt: "never")
        assert wise.invoke("q", response_format=form).content == "no"
        # both begin alike; after that the script is left
        assert stubborn.invoke("q", response_format=form).content == "no"

    def test_calls_of_tools_are_read_from_it(self, make: Any) -> None:
        def search(query: str) -> str:
            """Search the archive."""
            return query

        call = f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': {'query': 'x'}})}\n</tool_call>"
        message = make([call]).bind_tools([search], tool_choice="any").invoke("q")
        assert [(c["name"], c["args"]) for c in message.tool_calls] == [("search", {"query": "x"})]


class TestOrder:
    def test_answers_are_taken_in_order(self, make: Any) -> None:
        script = Script(["one", "two", "three"])
        llm = make(script)
        assert [llm.invoke(str(i)).content for i in range(3)] == ["one", "two", "three"]
        assert [question_of(prompt) for prompt in script.prompts] == ["0", "1", "2"]

    def test_a_list_that_is_used_up_says_so_and_may_grow(self, make: Any) -> None:
        answers = ["one"]
        llm = make(answers)
        llm.invoke("q")
        with pytest.raises(InvalidRequestError, match="holds 1 answers, and this is call 2"):
            llm.invoke("q")
        answers += ["never asked for", "three"]
        assert llm.invoke("q").content == "three"

    def test_clearing_the_prompts_starts_nothing_anew(self, make: Any) -> None:
        script = Script(["one", "two"])
        llm = make(script)
        llm.invoke("q")
        script.prompts.clear()
        assert llm.invoke("q").content == "two" and len(script.prompts) == 1

    def test_each_answer_is_given_once_to_many_threads(self, make: Any) -> None:
        answers = [f"answer {i}" for i in range(40)]
        llm = make(answers)
        with ThreadPoolExecutor(8) as threads:
            contents = list(threads.map(lambda i: llm.invoke(str(i)).content, range(40)))
        assert sorted(contents) == sorted(answers)

    def test_each_of_many_threads_and_tasks_gets_its_own(self, echo: ChatPolyKV) -> None:
        questions = [f"question {i} " + "x" * (i % 7) for i in range(48)]

        async def ask() -> list[AIMessage]:
            return await asyncio.gather(*(echo.ainvoke(q) for q in questions))

        with ThreadPoolExecutor(8) as threads:
            from_threads = [m.content for m in threads.map(echo.invoke, questions)]
        assert from_threads == questions
        assert [m.content for m in asyncio.run(ask())] == questions

    def test_a_function_that_fails_fails_its_own_call_alone(self, make: Any) -> None:
        def moody(prompt: str) -> str:
            if "bad" in prompt:
                raise KeyError("no answer for this")
            return "ok"

        llm = make(moody)
        first, error, third = llm.batch(["good", "bad", "good"], return_exceptions=True)
        assert [first.content, third.content] == ["ok", "ok"] and isinstance(error, KeyError)
        with pytest.raises(KeyError, match="no answer for this"):
            list(llm.stream("bad"))
        assert llm.engine.stats().running == 0


class TestTheRealStack:
    def test_the_script_sees_the_rendered_prompt(self, make: Any) -> None:
        script = Script(lambda prompt: "ok")
        llm = make(script)
        llm.invoke([SystemMessage("Be brief."), HumanMessage("日本?")])
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本?"}]
        want = llm.engine.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert script.prompts == [want]

    def test_the_model_runs_and_log_probabilities_are_its_own(self, make: Any) -> None:
        script = Script(["abc"])
        llm = make(script, logprobs=True)
        message = llm.invoke("q")
        said = [token["logprob"] for token in message.response_metadata["logprobs"]["content"]]
        tokenizer, model = llm.engine.tokenizer, llm.engine.model
        prompt = tokenizer.encode(script.prompts[0], add_special_tokens=False)
        answer = [*tokenizer.encode("abc", add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(dim=-1)[range(len(answer)), answer]
        assert torch.allclose(torch.tensor(said), want[: len(said)], atol=1e-4) and len(said) >= 3
        assert float(want.max()) < -3  # a random model would not have said it

    def test_contexts_are_shared_and_the_script_sees_them(self, make: Any) -> None:
        script = Script(lambda prompt: "ok")
        llm = make(script)
        reader = llm.with_context(llm.share(DOCUMENT))
        details = [m.usage_metadata["input_token_details"]["cache_read"] for m in reader.batch(["One?", "Two?"])]
        assert details == [reader.shared_context.num_tokens] * 2 and details[0] > 200
        assert all(DOCUMENT.strip() in prompt for prompt in script.prompts)

    def test_a_template_of_ones_own(self, make: Any) -> None:
        template = CHAT_TEMPLATE.replace("<|im_start|>{{ message['role'] }}", "<|im_start|>[{{ message['role'] }}]")
        script = Script(["ok"])
        assert make(script, chat_template=template).invoke("q").content == "ok"
        assert script.prompts[0].startswith("<|im_start|>[user]\nq<|im_end|>")

    def test_long_prompts_fit(self, make: Any) -> None:
        llm = make(["ok"])
        message = llm.invoke("x" * 20_000)
        assert message.content == "ok" and message.usage_metadata["input_tokens"] > 20_000
        assert llm.profile["max_input_tokens"] == 65536


class TestObjects:
    def test_models_share_nothing(self, make: Any) -> None:
        one, other = make(lambda prompt: "one"), make(lambda prompt: "other")
        assert one.engine is not other.engine and one.engine.tokenizer is not other.engine.tokenizer
        assert [one.invoke("q").content, other.invoke("q").content] == ["one", "other"]
        one.close()
        assert other.invoke("q").content == "other"

    def test_models_may_share_a_tokenizer(self) -> None:
        tokenizer = scripted_tokenizer()
        models = [make_model(Script([text]), tokenizer) for text in ("one", "other")]
        assert [llm.invoke("q").content for llm in models] == ["one", "other"]
        for llm in models:
            llm.close()

    @pytest.mark.parametrize("field", [{"max_batch": 3}, {"deterministic": True}])
    def test_every_engine_of_the_model_follows_the_script(self, make: Any, field: dict[str, Any]) -> None:
        llm = make(lambda prompt: "as written")
        other = ChatPolyKV(model=llm.model, **field)
        assert other.engine is not llm.engine and other.invoke("q").content == "as written"
        other.close()

    def test_weights_are_always_the_same_and_other_draws_are_left_alone(self, make: Any) -> None:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        models = [make(["ok"]).engine.model.state_dict() for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])

    def test_every_byte_is_a_token(self) -> None:
        tokenizer = scripted_tokenizer()
        assert len(tokenizer) == 256 + 3
        text = bytes(range(128)).decode() + "é日本😀"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text

    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("one answer", "a list of answers, or a function.*'one answer'"),
            (b"bytes", "a list of answers"),
            (None, "a list of answers, or a function.*None"),
            ({"q": "a"}, "a list of answers"),
            ([None], r"is a text, got None \(NoneType\)"),
            (["a", AIMessage("b")], r"is a text, got AIMessage.*\(AIMessage\)"),
            (["a", "b\ud800"], r"UTF-8, got '\\ud800' at position 1"),
        ],
    )
    def test_what_is_no_script_is_refused_at_once(self, script: Any, message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            scripted_chat_model(script)

    @pytest.mark.parametrize(("answer", "message"), [(None, "is a text, got None"), ("\ud800", "position 0")])
    def test_a_function_that_gives_no_text_is_an_error_of_the_call(self, make: Any, answer: Any, message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            make(lambda prompt: answer).invoke("q")

    def test_fields_of_the_chat_model_are_checked(self) -> None:
        with pytest.raises(InvalidRequestError, match="temperature"):
            scripted_chat_model(["a"], temperature=-1)

    def test_the_example_of_the_module_works(self) -> None:
        example = polykv_agents.testing.__doc__ or ""
        code = example.split(".. code-block:: python\n")[1]
        names: dict[str, Any] = {"Script": Script, "scripted_chat_model": scripted_chat_model}
        exec("\n".join(line.removeprefix("    ") for line in code.splitlines()), names)
        assert names["script"].answer("")[:12] == "<tool_call>\n"
        assert names["script"].prompts[0].startswith("<|im_start|>user\nHi<|im_end|>")
