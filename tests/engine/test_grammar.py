"""Answers held to grammars: always valid, alone and in company, with and without forced tokens taken at once."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch
from helpers import FULL, tiny_model, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv import Engine, Grammar, Request, SamplingParams
from polykv.engine.detokenizer import Detokenizer, decode_ids
from polykv.engine.grammar import compiler_for, json_rule
from polykv.errors import InvalidRequestError, UnsupportedModelError

SEEDS = 40 if FULL else 8
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "at": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2]}},
                "required": ["x"],
                "additionalProperties": False,
            },
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["at", "tags"],
        "additionalProperties": False,
    },
    "refs": {
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {"é": {"type": "boolean"}},
                "required": ["é"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {
            "one": {"$ref": "#/$defs/Point"},
            "other": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        },
        "required": ["one", "other"],
        "additionalProperties": False,
    },
    "const": {"const": "only this"},
    "empty": {"type": "object", "properties": {}, "additionalProperties": False},
    "pattern": {"type": "string", "pattern": "^[0-9]{2}-[a-c]+$", "maxLength": 8},
}


@pytest.fixture
def engine(make_engine: Callable[..., Engine], tiny_llama: Any) -> Engine:
    return make_engine(tiny_llama)


def ask(engine: Engine, grammar: Grammar | None, *, prompt: str = "the court", **sampling: Any) -> Any:
    values = {"max_tokens": 300, "temperature": 1.0, "seed": 0, **sampling}
    return engine.generate(engine.tokenizer.encode(prompt), SamplingParams(grammar=grammar, **values))


class TestAnswers:
    @pytest.mark.parametrize("name", SCHEMAS)
    def test_json_matches_its_schema(self, engine: Engine, name: str) -> None:
        grammar = Grammar.json_schema(SCHEMAS[name])
        handles = [ask(engine, grammar, seed=seed) for seed in range(SEEDS)]
        texts = [h.result(60).text for h in handles if h.result(60).finish_reason == "stop"]
        assert len(texts) > SEEDS // 2
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMAS[name])
            if "é" not in text:
                assert text == json.dumps(json.loads(text), ensure_ascii=False) or "\\" in text, (
                    "spaced as json.dumps does"
                )

    @pytest.mark.parametrize("pattern", ["[0-9]{3}-[a-f]{2,4}", "(ja|nein)( doch)?", "[^a-z]{4}", "é+日"])
    def test_text_matches_its_regex(self, engine: Engine, pattern: str) -> None:
        for completion in [ask(engine, Grammar.regex(pattern), seed=s, max_tokens=60).result(60) for s in range(SEEDS)]:
            if completion.finish_reason == "stop":
                assert re.fullmatch(pattern, completion.text, re.DOTALL)

    def test_choices(self, engine: Engine) -> None:
        options = ["yes", "no", "yes and no", 'say "no"\n', "日本"]
        grammar = Grammar.choice(options)
        texts = {ask(engine, grammar, seed=seed).result(60).text for seed in range(60)}
        assert texts <= set(options) and len(texts) > 2

    def test_greedy_takes_the_likeliest_of_what_is_allowed(self, engine: Engine) -> None:
        ids = engine.tokenizer.encode("the court")
        logits = engine.model(input_ids=torch.tensor([ids])).logits[0, -1]
        letters = {letter: engine.tokenizer.encode(letter)[0] for letter in "qxzjv"}
        want = max(letters, key=lambda letter: logits[letters[letter]].item())
        assert ask(engine, Grammar.choice(list(letters)), temperature=0).result(60).text == want

    def test_a_cut_answer_says_so(self, engine: Engine) -> None:
        completion = ask(engine, Grammar.json_schema(SCHEMAS["nested"]), max_tokens=5).result(60)
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 5)

    def test_a_complete_answer_takes_no_further_step(self, engine: Engine) -> None:
        completion = ask(engine, Grammar.choice(["a"])).result(60)
        assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("a", "stop", 1)


class TestCompany:
    def test_rows_without_a_grammar_are_as_alone(self, make_engine: Any, tiny_llama: Any) -> None:
        grammars = [None, Grammar.json_schema(SCHEMAS["nested"]), None, Grammar.choice(["yes", "no"]), None]
        engine = make_engine(tiny_llama, deterministic=True)
        handles = [ask(engine, g, seed=i, max_tokens=40) for i, g in enumerate(grammars)]
        together = [handle.result(60).token_ids for handle in handles]
        alone = [ask(engine, g, seed=i, max_tokens=40).result(60).token_ids for i, g in enumerate(grammars)]
        assert together == alone

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("name", SCHEMAS)
    def test_forced_tokens_taken_at_once_change_nothing_but_steps(
        self, make_engine: Any, tiny_llama: Any, name: str, temperature: float
    ) -> None:
        found, steps = [], []
        for fast_forward in (True, False):
            engine = make_engine(tiny_llama, fast_forward=fast_forward)
            grammar = Grammar.json_schema(SCHEMAS[name])
            handles = [ask(engine, grammar, seed=s, temperature=temperature) for s in range(4)]
            found.append([handle.result(60).token_ids for handle in handles])
            steps.append(engine.stats().steps)
            assert engine.stats().generated_tokens == sum(map(len, found[-1]))
        assert found[0] == found[1]
        assert steps[0] < steps[1] if name != "pattern" else steps[0] <= steps[1]

    def test_max_tokens_holds_among_forced_tokens(self, engine: Engine) -> None:
        for limit in range(1, 9):
            completion = ask(engine, Grammar.choice(["a long answer without any choice"]), max_tokens=limit).result(60)
            assert len(completion.token_ids) == limit and completion.finish_reason == "length"

    def test_streams_join_to_the_text(self, engine: Engine) -> None:
        handle = ask(engine, Grammar.json_schema(SCHEMAS["refs"]))
        pieces = list(handle)
        assert "".join(pieces) == handle.result(60).text and len(pieces) > 3

    def test_a_cancelled_one_frees_its_tail(self, engine: Engine) -> None:
        handle = ask(engine, Grammar.regex("[a-z]{2000}"), max_tokens=1500)
        next(iter(handle))
        handle.cancel()
        ask(engine, Grammar.choice(["yes"])).result(60)
        assert engine.stats().tail_bytes == 0


class TestWithOtherParameters:
    def test_logprobs_stay_the_models_own(self, engine: Engine) -> None:
        completion = ask(engine, Grammar.json_schema(SCHEMAS["object"]), logprobs=True, top_logprobs=2).result(60)
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        assert all(choice.logprob is not None and choice.logprob < 0 for choice in completion.logprobs)

    def test_bans_leave_the_other_choices(self, engine: Engine) -> None:
        y = engine.tokenizer.encode("yes")[0]
        texts = {
            ask(engine, Grammar.choice(["yes", "no"]), seed=s, logit_bias={y: -100}).result(60).text for s in range(9)
        }
        assert texts == {"no"}

    def test_bans_of_all_choices_fail_that_request_alone(self, engine: Engine) -> None:
        firsts = {engine.tokenizer.encode(text)[0]: -100.0 for text in ("yes", "no")}
        bad = ask(engine, Grammar.choice(["yes", "no"]), logit_bias=firsts)
        good = ask(engine, Grammar.choice(["yes", "no"]))
        with pytest.raises(InvalidRequestError, match="every token is banned"):
            bad.result(60)
        assert good.result(60).text in ("yes", "no")

    def test_stop_strings_cut_and_are_told(self, engine: Engine) -> None:
        completion = ask(engine, Grammar.choice(["one two three"]), stop=("two",)).result(60)
        assert (completion.text, completion.finish_reason, completion.stop_string) == ("one ", "stop", "two")
        assert ask(engine, Grammar.choice(["one"]), stop=("two",)).result(60).stop_string is None

    @pytest.mark.parametrize(
        "sampling",
        [
            {"top_p": 0.5},
            {"top_k": 3},
            {"min_p": 0.2},
            {"repetition_penalty": 1.5},
            {"frequency_penalty": 1.0},
            {"temperature": 0},
        ],
    )
    def test_answers_stay_valid(self, engine: Engine, sampling: dict[str, Any]) -> None:
        for seed in range(4):
            completion = ask(engine, Grammar.json_schema(SCHEMAS["nested"]), seed=seed, **sampling).result(60)
            if completion.finish_reason == "stop":
                jsonschema.validate(json.loads(completion.text), SCHEMAS["nested"])


class TestTokens:
    def test_several_end_tokens_and_a_padded_vocabulary(self, make_engine: Any) -> None:
        model = tiny_model("llama", vocab_size=400)  # more logits than tokens
        tokenizer = tiny_tokenizer()
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, 7]
        engine = make_engine(model)
        for seed in range(SEEDS):
            completion = ask(engine, Grammar.regex("[0-9]{4,6}"), seed=seed).result(60)
            body = [i for i in completion.token_ids if i not in (tokenizer.eos_token_id, 7)]
            assert re.fullmatch("[0-9]{4,6}", completion.text)
            assert max(completion.token_ids) < len(tokenizer) and completion.token_ids[: len(body)] == tuple(body)

    def test_special_tokens_are_no_text(self, engine: Engine) -> None:
        special = set(engine.tokenizer.all_special_ids)
        for seed in range(SEEDS):
            completion = ask(engine, Grammar.regex("(.|\n){20}"), seed=seed).result(60)
            assert not special & set(completion.token_ids[:-1])

    def test_visible_special_tokens_are_shown(self, engine: Engine) -> None:
        tokenizer = engine.tokenizer
        mark = next(t for t in tokenizer.all_special_tokens if t != tokenizer.eos_token)
        token_id = tokenizer.convert_tokens_to_ids(mark)
        grammar = Grammar.lark(f'start: "a" <[{token_id}]> "b"')
        for visible, want in ((frozenset({token_id}), f"a{mark}b"), (frozenset(), "ab")):
            request = Request(
                tuple(tokenizer.encode("x")), sampling=SamplingParams(grammar=grammar), visible_tokens=visible
            )
            handle = engine.submit(request)
            assert "".join(handle) == handle.result(60).text == want

    @settings(max_examples=500 if FULL else 60, deadline=None)
    @given(st.lists(st.integers(0, 300), max_size=30), st.booleans())
    def test_pieces_join_to_the_whole(self, ids: list[int], shown: bool) -> None:
        tokenizer = TOKENIZER
        ids = [i for i in ids if i < len(tokenizer)]
        visible = frozenset(tokenizer.all_special_ids) if shown else frozenset()
        detokenizer = Detokenizer(tokenizer, visible)
        text = "".join([*map(detokenizer.feed, ids), detokenizer.flush()])
        want, run = "", []
        for token_id in ids:
            if token_id in visible:
                want += decode_ids(tokenizer, run) + tokenizer.decode([token_id])
                run = []
            else:
                run.append(token_id)
        assert text == want + decode_ids(tokenizer, run)

    def test_a_tokenizer_without_a_rust_backend_is_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match="need a fast tokenizer; object"):
            compiler_for(type("object", (), {})(), 10, frozenset({1}))

    def test_a_compiler_is_made_once(self, engine: Engine) -> None:
        assert compiler_for(engine.tokenizer, 320, frozenset({2})) is compiler_for(
            engine.tokenizer, 320, frozenset({2})
        )


TOKENIZER = tiny_tokenizer()


class TestGrammars:
    def test_equal_by_text_hashable_and_plain(self) -> None:
        one, other = Grammar.choice(["a", "b"]), Grammar.choice(["a", "b"])
        assert one == other and hash(one) == hash(other) and pickle.loads(pickle.dumps(one)) == one
        params = SamplingParams(grammar=one)
        assert hash(params) == hash(SamplingParams(grammar=other)) and pickle.loads(pickle.dumps(params)) == params

    def test_a_schema_may_be_text(self) -> None:
        assert Grammar.json_schema(json.dumps(SCHEMAS["object"])) == Grammar.json_schema(SCHEMAS["object"])
        assert json_rule({"type": "null"}).startswith("%json {")

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Grammar.json_schema({"type": "what"}), "Invalid type: what"),
            (lambda: Grammar.json_schema({"not": {"type": "null"}}), "not"),
            (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
            (lambda: Grammar.json_schema({"$ref": "#/$defs/none"}), "does not exist"),
            (lambda: Grammar.json_schema({"type": "string", "pattern": "(?=a)"}), "look-around"),
            (lambda: Grammar.json_schema("{"), "no JSON"),
            (lambda: Grammar.json_schema({"enum": {1}}), "no JSON"),
            (lambda: Grammar.json_schema(3), "is a dict"),  # type: ignore[arg-type]
            (lambda: Grammar.regex("["), "cannot be used"),
            (lambda: Grammar.regex(""), "non-empty"),
            (lambda: Grammar.choice([]), "non-empty texts"),
            (lambda: Grammar.choice("abc"), "non-empty texts"),
            (lambda: Grammar.choice(["a", ""]), "non-empty texts"),
            (lambda: Grammar.lark("start: nothing"), "cannot be used"),
            (lambda: Grammar(""), "non-empty"),
            (lambda: SamplingParams(grammar="x"), "must be a Grammar"),  # type: ignore[arg-type]
        ],
    )
    def test_what_cannot_be_held_is_named(self, make: Callable[[], Any], message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            make()

    def test_an_unknown_special_token_fails_when_it_is_submitted(self, engine: Engine) -> None:
        with pytest.raises(InvalidRequestError, match="cannot be used"):
            ask(engine, Grammar.lark('start: "a" <|no_such_token|>'))
        assert ask(engine, Grammar.choice(["a"])).result(60).text == "a"

    @pytest.mark.parametrize("bad", [{1}, [1], frozenset({-1}), frozenset({"a"})])
    def test_visible_tokens_are_ids(self, bad: Any) -> None:
        with pytest.raises(InvalidRequestError, match="visible_tokens"):
            Request((1,), visible_tokens=bad)
