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
from helpers import FULL, TIE_MARGIN, assert_same_tokens, greedy, tiny_model, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv import Engine, Grammar, Request, SamplingParams
from polykv.engine.detokenizer import Detokenizer, decode_ids
from polykv.engine.grammar import COMPILED, GrammarMatcher, compiler_for, json_rule, masks_of
from polykv.errors import InvalidRequestError, RequestCancelledError, UnsupportedModelError

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
    "bounds": {
        "type": "array",
        "items": {"type": "integer", "minimum": -7, "maximum": 12},
        "minItems": 2,
        "maxItems": 4,
    },
    "union": {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 9}, {"enum": ["x", None, "日本"]}]},
    "const": {"const": "only this"},
    "empty": {"type": "object", "properties": {}, "additionalProperties": False},
    "pattern": {"type": "string", "pattern": "^[0-9]{2}-[a-c]+$", "maxLength": 8},
}

CHARACTERS = st.characters(exclude_categories=["Cs"])


@pytest.fixture
def engine(make_engine: Callable[..., Engine], tiny_llama: Any) -> Engine:
    return make_engine(tiny_llama)


def start(grammar: Grammar) -> GrammarMatcher:
    """At the start of a grammar, without a model."""
    return compiler_for(TOKENIZER, len(TOKENIZER), frozenset({TOKENIZER.eos_token_id})).matcher(grammar)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer: its tokens may come, and then the end."""
    matcher = start(grammar)
    for token_id in TOKENIZER.encode(text):
        if not masks_of([matcher])[0, token_id]:
            return False
        matcher.consume(token_id)
    return matcher.finished or bool(masks_of([matcher])[0, TOKENIZER.eos_token_id])


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
            outside = re.sub(r'"(\\.|[^"\\])*"', '""', text)
            assert not re.search(r"[\s,:]", re.sub(r"[,:] (?=\S)", "", outside)), "spaced as json.dumps does"

    @pytest.mark.parametrize("pattern", ["[0-9]{3}-[a-f]{2,4}", "(ja|nein)( doch)?", "[^a-z]{4}", "é{1,3}日", "a.c"])
    def test_text_matches_its_regex(self, engine: Engine, pattern: str) -> None:
        handles = [ask(engine, Grammar.regex(pattern), seed=s, max_tokens=60) for s in range(SEEDS)]
        for completion in [handle.result(60) for handle in handles]:
            assert completion.finish_reason == "stop", "the longest is shorter than max_tokens"
            assert re.fullmatch(pattern, completion.text)

    def test_optional_properties_come_and_stay_away(self, engine: Engine) -> None:
        grammar = Grammar.json_schema(SCHEMAS["object"])
        handles = [ask(engine, grammar, seed=seed) for seed in range(40)]
        done = [h.result(60).text for h in handles if h.result(60).finish_reason == "stop"]
        assert {"age" in json.loads(text) for text in done} == {True, False}

    def test_a_schema_that_refers_to_itself(self, engine: Engine) -> None:
        schema: dict[str, Any] = {
            "$defs": {
                "Node": {
                    "type": "object",
                    "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}]}},
                    "required": ["next"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/Node",
        }
        grammar = Grammar.json_schema(schema)
        handles = [ask(engine, grammar, seed=seed) for seed in range(SEEDS)]
        done = [h.result(60).text for h in handles if h.result(60).finish_reason == "stop"]
        assert done
        for text in done:
            jsonschema.validate(json.loads(text), schema)
        assert accepts(grammar, '{"next": {"next": {"next": null}}}') and not accepts(grammar, '{"next": {}}')

    def test_choices(self, engine: Engine) -> None:
        options = ["yes", "no", "yes and no", 'say "no"\n', "日本"]
        grammar = Grammar.choice(options)
        handles = [ask(engine, grammar, seed=seed) for seed in range(60)]
        texts = {handle.result(60).text for handle in handles}
        assert texts <= set(options) and len(texts) > 2
        assert all(accepts(grammar, option) for option in options) and not accepts(grammar, "yes and")

    def test_greedy_takes_the_likeliest_of_what_is_allowed(self, engine: Engine) -> None:
        ids = engine.tokenizer.encode("the court")
        logits = engine.model(input_ids=torch.tensor([ids])).logits[0, -1]
        letters = {letter: engine.tokenizer.encode(letter)[0] for letter in "qxzjv"}
        want = max(letters, key=lambda letter: logits[letters[letter]].item())
        assert ask(engine, Grammar.choice(list(letters)), temperature=0).result(60).text == want

    def test_a_cut_answer_says_so(self, engine: Engine) -> None:
        completion = ask(engine, Grammar.json_schema(SCHEMAS["nested"]), max_tokens=5).result(60)
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 5)

    def test_an_answer_that_just_fits_is_whole(self, engine: Engine) -> None:
        text = "the court and the bond"
        whole = ask(engine, Grammar.choice([text])).result(60)
        count = len(whole.token_ids)
        for limit, reason in ((count, "stop"), (count - 1, "length")):
            completion = ask(engine, Grammar.choice([text]), max_tokens=limit).result(60)
            assert completion.finish_reason == reason and completion.token_ids == whole.token_ids[:limit]

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

    def test_greedy_rows_beside_grammars_are_those_of_generate(self, engine: Engine) -> None:
        """The oracle is transformers, which knows of no grammars."""
        prompts = ["the court", "the bond and the merchant", "user"]
        free = [ask(engine, None, prompt=prompt, temperature=0, max_tokens=24) for prompt in prompts]
        held = [ask(engine, Grammar.json_schema(SCHEMAS["nested"]), seed=seed, max_tokens=24) for seed in range(4)]
        for prompt, handle in zip(prompts, free, strict=True):
            ids = engine.tokenizer.encode(prompt)
            assert_same_tokens(engine.model, ids, handle.result(60).token_ids, greedy(engine.model, ids, 24))
        assert engine.stats().peak_running == len(free) + len(held)
        assert all(handle.result(60).token_ids for handle in held)

    def test_a_greedy_row_takes_the_likeliest_allowed_token_at_every_step(self, engine: Engine) -> None:
        grammar, ids = Grammar.regex("[a-z]{3} [0-9]{3}"), engine.tokenizer.encode("the court")
        handles = [ask(engine, grammar, temperature=0), *(ask(engine, grammar, seed=seed) for seed in range(3))]
        found = handles[0].result(60).token_ids
        matcher = compiler_for(engine.tokenizer, 320, frozenset({engine.tokenizer.eos_token_id})).matcher(grammar)
        logits = engine.model(input_ids=torch.tensor([[*ids, *found]])).logits[0, len(ids) - 1 :]
        for token_id, row in zip(found, logits, strict=False):
            allowed = row.masked_fill(~masks_of([matcher])[0], -torch.inf)
            assert allowed[token_id] >= allowed.max() - TIE_MARGIN
            matcher.consume(token_id)

    def test_drawn_rows_of_one_seed_are_equal(self, engine: Engine) -> None:
        grammar = Grammar.json_schema(SCHEMAS["object"])
        handles = [ask(engine, grammar, seed=7) for _ in range(3)] + [ask(engine, grammar, seed=8)]
        one, *others, different = [handle.result(60).token_ids for handle in handles]
        assert others == [one, one] and different != one

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
        if name in ("pattern", "bounds", "union"):  # little or nothing of these is forced
            assert steps[0] <= steps[1]
        else:
            assert steps[0] < steps[1]

    @pytest.mark.parametrize(
        "sampling",
        [
            {"repetition_penalty": 1.5},
            {"presence_penalty": 1.0, "frequency_penalty": 1.0},
            {"top_p": 0.6, "top_k": 20},
            {"stop": ("tags",)},
            {"logprobs": True},
        ],
    )
    def test_forced_tokens_count_for_whatever_else_is_asked(
        self, make_engine: Any, tiny_llama: Any, sampling: dict[str, Any]
    ) -> None:
        grammar, found = Grammar.json_schema(SCHEMAS["nested"]), []
        for fast_forward in (True, False):
            engine = make_engine(tiny_llama, fast_forward=fast_forward)
            completions = [ask(engine, grammar, seed=s, **sampling) for s in range(4)]
            found.append([(c.text, c.token_ids, c.stop_string) for c in (h.result(60) for h in completions)])
        assert found[0] == found[1]

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
        assert engine.stats().tail_bytes > 0
        (sequence,) = engine._scheduler.running  # the engine's sum leaves out what no longer runs, freed or not
        handle.cancel()
        with pytest.raises(RequestCancelledError):
            handle.result(60)
        assert (engine.stats().tail_bytes, engine.stats().cancelled, engine.stats().running) == (0, 1, 0)
        assert sequence.tail.nbytes == 0
        assert ask(engine, Grammar.choice(["yes"])).result(60).text == "yes"


class TestWithOtherParameters:
    def test_logprobs_stay_the_models_own(self, engine: Engine) -> None:
        completion = ask(engine, Grammar.json_schema(SCHEMAS["object"]), logprobs=True, top_logprobs=2).result(60)
        assert completion.logprobs is not None
        assert [choice.token_id for choice in completion.logprobs] == list(completion.token_ids)
        ids = engine.tokenizer.encode("the court")
        with torch.no_grad():
            logits = engine.model(input_ids=torch.tensor([[*ids, *completion.token_ids]])).logits[0, len(ids) - 1 : -1]
        want = logits.log_softmax(dim=-1)
        top = want.topk(2).values
        for index, choice in enumerate(completion.logprobs):
            assert choice.logprob == pytest.approx(float(want[index, choice.token_id]), abs=1e-3)
            assert [value for _, value in choice.top_logprobs] == pytest.approx(top[index].tolist(), abs=1e-3)
        allowed = {choice.token_id for choice in completion.logprobs}
        assert any(choice.top_logprobs[0][0] not in allowed for choice in completion.logprobs), "not of the mask"

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
            {"presence_penalty": 2.0},
            {"frequency_penalty": 1.0},
            {"temperature": 0},
            {"temperature": 50},
            {"logprobs": True, "top_p": 0.5, "top_k": 4, "presence_penalty": 1.0},
        ],
    )
    def test_answers_stay_valid(self, engine: Engine, sampling: dict[str, Any]) -> None:
        grammar = Grammar.json_schema(SCHEMAS["nested"])
        handles = [ask(engine, grammar, **{"seed": seed, **sampling}) for seed in range(SEEDS)]
        for completion in [handle.result(60) for handle in handles]:
            assert completion.finish_reason == "stop", "the schema has no endless answer"
            jsonschema.validate(json.loads(completion.text), SCHEMAS["nested"])


class TestTokens:
    def test_several_end_tokens_and_a_padded_vocabulary(self, make_engine: Any) -> None:
        model = tiny_model("llama", vocab_size=400)  # more logits than tokens
        ends = (TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("%"))
        model.generation_config.eos_token_id = list(ends)
        engine = make_engine(model)
        padding = dict.fromkeys(range(len(TOKENIZER), 400), 100.0)
        for bias in ({}, padding):
            handles = [ask(engine, Grammar.regex("[0-9]{4,6}"), seed=s, logit_bias=bias) for s in range(SEEDS)]
            for completion in [handle.result(60) for handle in handles]:
                body = [i for i in completion.token_ids if i not in ends]
                assert re.fullmatch("[0-9]{4,6}", completion.text) and completion.finish_reason == "stop"
                assert max(completion.token_ids) < len(TOKENIZER) and completion.token_ids[: len(body)] == tuple(body)

    def test_padding_is_never_chosen_where_all_text_is_allowed(self, make_engine: Any) -> None:
        engine = make_engine(tiny_model("llama", vocab_size=400))
        padding = dict.fromkeys(range(len(TOKENIZER), 400), 100.0)
        free = ask(engine, None, logit_bias=padding, max_tokens=8).result(60)
        assert min(free.token_ids) >= len(TOKENIZER), "the bias does draw them where no grammar is"
        held = ask(engine, Grammar.regex("(.|\n){20}"), logit_bias=padding).result(60)
        assert max(held.token_ids) < len(TOKENIZER) and len(held.text) == 20

    @pytest.mark.parametrize("which", [0, 1])
    def test_an_end_comes_only_when_the_answer_is_whole(self, make_engine: Any, which: int) -> None:
        model = tiny_model("llama")
        ends = (TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("%"))
        model.generation_config.eos_token_id = list(ends)
        engine = make_engine(model)
        wanted = ask(engine, Grammar.regex("[0-9]{4,6}"), logit_bias={ends[which]: 100}).result(60)
        assert re.fullmatch("[0-9]{4}", wanted.text) and wanted.token_ids[-1] == ends[which]
        unwanted = ask(engine, Grammar.regex("[0-9]{4,6}"), logit_bias=dict.fromkeys(ends, -100)).result(60)
        assert re.fullmatch("[0-9]{6}", unwanted.text) and not set(ends) & set(unwanted.token_ids)
        assert (wanted.finish_reason, unwanted.finish_reason) == ("stop", "stop")

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


class TestMatchers:
    @pytest.mark.parametrize("name", SCHEMAS)
    def test_a_mask_is_what_can_be_consumed(self, name: str) -> None:
        """Along a random answer, each token is tried on a matcher of its own."""
        grammar, taken = Grammar.json_schema(SCHEMAS[name]), list[int]()
        generator = torch.Generator().manual_seed(1)
        for _ in range(12 if FULL else 4):
            matcher = start(grammar)
            for token_id in taken:
                matcher.consume(token_id)
            if matcher.finished:
                break
            mask = masks_of([matcher])[0]
            assert mask.any()
            for token_id in range(len(TOKENIZER)):
                trial = start(grammar)
                for before in taken:
                    trial.consume(before)
                if mask[token_id]:
                    trial.consume(token_id)
                else:
                    with pytest.raises(InvalidRequestError, match="cannot go on"):
                        trial.consume(token_id)
            allowed = mask.nonzero()[:, 0]
            pick = int(allowed[torch.randint(len(allowed), (), generator=generator)])
            if pick == TOKENIZER.eos_token_id:
                break
            taken.append(pick)

    def test_masks_of_many_are_those_of_each(self) -> None:
        grammars = [*(Grammar.json_schema(schema) for schema in SCHEMAS.values()), Grammar.regex("[a-z]+")]
        together = masks_of([start(grammar) for grammar in grammars])
        assert together.shape == (len(grammars), len(TOKENIZER)) and together.dtype == torch.bool
        for row, grammar in zip(together, grammars, strict=True):
            assert torch.equal(row, masks_of([start(grammar)])[0])
        assert len({tuple(row.tolist()) for row in together}) > 3

    def test_matchers_of_one_grammar_go_their_own_ways(self) -> None:
        grammar = Grammar.choice(["ab", "cd"])
        one, other = start(grammar), start(grammar)
        (a,) = TOKENIZER.encode("a")
        one.consume(a)
        assert masks_of([other])[0, a] and not masks_of([one])[0, a]

    @settings(max_examples=300 if FULL else 40, deadline=None)
    @given(
        st.fixed_dictionaries(
            {"name": st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=5)},
            optional={"age": st.integers(0, 120)},
        )
    )
    def test_every_value_of_a_schema_can_be_written(self, value: dict[str, Any]) -> None:
        grammar = Grammar.json_schema(SCHEMAS["object"])
        value = {key: value[key] for key in SCHEMAS["object"]["properties"] if key in value}  # the schema's order
        assert accepts(grammar, json.dumps(value, ensure_ascii=False))
        assert not accepts(grammar, json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        assert not accepts(grammar, json.dumps(value, ensure_ascii=False, indent=1))

    @settings(max_examples=500 if FULL else 60, deadline=None)
    @given(st.integers(-30, 30) | st.integers())
    def test_bounds_of_integers_are_exact(self, number: int) -> None:
        grammar = Grammar.json_schema({"type": "integer", "minimum": -7, "maximum": 12})
        assert accepts(grammar, str(number)) == (-7 <= number <= 12)

    @settings(max_examples=500 if FULL else 60, deadline=None)
    @given(st.text("abc-é1", max_size=8))
    def test_a_regex_is_python_s(self, text: str) -> None:
        pattern = "(a|bc)*-?[1é]{0,2}"
        assert accepts(Grammar.regex(pattern), text) == (re.fullmatch(pattern, text) is not None)

    @settings(max_examples=200 if FULL else 30, deadline=None)
    @given(st.lists(st.text(CHARACTERS, min_size=1, max_size=6), min_size=1, max_size=5))
    def test_a_choice_takes_any_characters(self, options: list[str]) -> None:
        grammar = Grammar.choice(options)
        assert all(accepts(grammar, option) for option in options)
        assert not accepts(grammar, max(options, key=len) + "!")

    def test_a_choice_takes_the_delete_character(self) -> None:
        assert accepts(Grammar.choice(["a\x7fb"]), "a\x7fb")

    def test_grammars_beyond_those_kept_are_compiled_again(self) -> None:
        grammars = [Grammar.choice([f"answer {number}"]) for number in range(COMPILED + 5)]
        for _ in range(2):
            for number, grammar in enumerate(grammars):
                assert accepts(grammar, f"answer {number}")
        compiler = compiler_for(TOKENIZER, len(TOKENIZER), frozenset({TOKENIZER.eos_token_id}))
        assert len(compiler._compiled) == COMPILED

    def test_forced_tokens_are_what_must_follow(self) -> None:
        matcher = start(Grammar.choice(["the bond", "the court"]))
        forced = matcher.forced()
        assert "the bond".startswith(TOKENIZER.decode(forced)) and "the court".startswith(TOKENIZER.decode(forced))
        for token_id in forced:
            assert masks_of([matcher])[0, token_id]
            matcher.consume(token_id)
        assert masks_of([matcher])[0].sum() > 1 and matcher.forced() == []


class TestGrammars:
    def test_equal_by_text_hashable_and_plain(self) -> None:
        one, other = Grammar.choice(["a", "b"]), Grammar.choice(["a", "b"])
        assert one == other and hash(one) == hash(other) and pickle.loads(pickle.dumps(one)) == one
        params = SamplingParams(grammar=one)
        assert hash(params) == hash(SamplingParams(grammar=other)) and pickle.loads(pickle.dumps(params)) == params

    def test_a_schema_may_be_text(self) -> None:
        assert Grammar.json_schema(json.dumps(SCHEMAS["object"])) == Grammar.json_schema(SCHEMAS["object"])
        assert json_rule({"type": "null"}).startswith("%json {")

    def test_a_rule_of_json_is_part_of_a_larger_grammar(self) -> None:
        rule = json_rule({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2})
        grammar = Grammar.lark(f'start: "<" json ">"\njson: {rule}')
        assert accepts(grammar, "<[1, 2]>")
        assert not any(accepts(grammar, text) for text in ("<[1,2]>", "<[1,  2]>", "< [1, 2]>", "<[1 ,2]>", "[1, 2]"))
        assert accepts(Grammar.lark(f"start: {json_rule(True)}"), '{"a": [1, {"b": null}]}')
        assert not accepts(Grammar.lark(f"start: {json_rule(True)}"), '{"a" : 1}')

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
            (lambda: Grammar(" \n"), "non-empty"),
            (lambda: Grammar(3), "non-empty text, got 3"),  # type: ignore[arg-type]
            (lambda: SamplingParams(grammar=3), "must be a Grammar, got 3"),  # type: ignore[arg-type]
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
