"""Tokens as transformers chooses them, distributions as they are defined, and no row that depends on another."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import VOCABULARY, random_ids
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from polykv.engine import sampling
from polykv.engine.sampling import Choice, NucleusLogitsWarper, Sampler, SamplingParams, sample_batch
from polykv.errors import InvalidRequestError, NonFiniteLogitsError

LOGITS = st.lists(st.integers(-60, 60).map(lambda i: i / 4), min_size=2, max_size=30)


def some_logits(rows: int, vocabulary: int = 300, *, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def ids_of(choices: list[Choice | Exception]) -> list[int]:
    assert all(isinstance(choice, Choice) for choice in choices), choices
    return [choice.token_id for choice in choices]  # type: ignore[union-attr]


class Penalties(LogitsProcessor):
    """The oracle for presence and frequency, from OpenAI's formula."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        counts = torch.bincount(input_ids[0, self.prompt_length :], minlength=scores.shape[1])
        return scores - counts * self.frequency - (counts > 0) * self.presence


# ------------------------------------------------------------------------------------- the oracle: generate


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"logit_bias": {7: 4.5, 100: -100, 260: -3}},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"frequency_penalty": -1.5},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.7,
            "logit_bias": {5: 6, 9: 2.5, 11: -100},
        },
    ],
    ids=lambda fields: "+".join(fields) or "plain",
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_greedy_tokens_are_those_of_generate(tiny_llama: Any, fields: dict[str, Any], seed: int) -> None:
    prompt = random_ids(40, seed=seed)
    bias = fields.get("logit_bias", {})
    options: dict[str, Any] = {}
    if bias:
        options["sequence_bias"] = [[[i], -math.inf if b == -100 else float(b)] for i, b in bias.items()]
    if "repetition_penalty" in fields:
        options["repetition_penalty"] = fields["repetition_penalty"]
    penalties = Penalties(len(prompt), fields.get("presence_penalty", 0), fields.get("frequency_penalty", 0))
    ids = torch.tensor([prompt])
    out = tiny_llama.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=40,
        eos_token_id=None,
        do_sample=False,
        logits_processor=LogitsProcessorList([penalties]),
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    # its own logits, so that no rounding of another path can tell the two apart
    sampler = Sampler(SamplingParams(**fields), prompt)
    got = [sampler.sample(logits[0]).token_id for logits in out.logits]
    assert got == out.sequences[0, len(prompt) :].tolist()
    if bias:
        assert not set(got) & {i for i, b in bias.items() if b == -100}


@given(
    prompt=st.lists(st.integers(0, 40), max_size=30),
    answer=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    penalty=st.floats(0.5, 2).filter(lambda penalty: penalty != 1),
)
@settings(deadline=None)
def test_each_id_once_gives_the_same_penalty_as_the_whole_text(
    prompt: list[int], answer: list[int], penalty: float
) -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=penalty), prompt)
    for token_id in answer:
        sampler._observe(token_id)
    ((processor, ids),) = sampler._processors
    assert ids is not None
    scores = some_logits(1, 41)
    whole = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), scores)
    assert torch.equal(processor(ids.view(), scores), whole)
    assert sorted(ids.view()[0].tolist()) == sorted({*prompt, *answer})


def test_a_long_prompt_is_not_copied_at_every_step() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=1.1), range(8000), processors=[LogitsProcessorList()])
    buffers = set()
    for token_id in range(8000, 8500):
        sampler._observe(token_id)
        for ids in (sampler._seen_ids, sampler._all_ids):
            assert ids is not None
            buffers.add(ids.view().data_ptr())
    assert len(buffers) == 2
    grown = Sampler(SamplingParams(repetition_penalty=1.1), [])
    for token_id in range(1000):
        grown._observe(token_id)
    assert grown._seen_ids is not None
    assert grown._seen_ids.view().tolist() == [list(range(1000))]


# ------------------------------------------------------------------------------ the oracle: the definitions


def defined_distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Probabilities of the tokens that may be drawn, in Python's float64, step by step from the definitions.

    Gives up (hypothesis ``assume``) where a bound is so near that single precision may fall on its other side.
    """
    near = 1e-5
    scores = {i: x + dict(params.logit_bias).get(i, 0.0) for i, x in enumerate(logits)}  # type: ignore[arg-type]
    scores = {i: x for i, x in scores.items() if dict(params.logit_bias).get(i) != -100}  # type: ignore[arg-type]
    best = max(scores.values())
    scores = {i: (x - best) / params.temperature for i, x in scores.items()}
    if params.top_k and params.top_k < len(scores):
        bound = sorted(scores.values(), reverse=True)[params.top_k - 1]
        scores = {i: x for i, x in scores.items() if x >= bound}
    weights = {i: math.exp(x) for i, x in scores.items()}
    if params.top_p < 1:
        order = sorted(weights, key=lambda i: -weights[i])
        total, before, kept = sum(weights.values()), 0.0, []
        for i in order:
            assume(abs(before - params.top_p) > near)
            if before >= params.top_p:
                assume(weights[i] < weights[kept[-1]])  # which of two equal ones is left open
                break
            kept.append(i)
            before += weights[i] / total
        weights = {i: weights[i] for i in kept}
    if params.min_p:
        bound = max(weights.values()) * params.min_p
        assume(all(abs(w - bound) > near * bound or bound == w for w in weights.values()))
        weights = {i: w for i, w in weights.items() if w >= bound}
    total = sum(weights.values())
    return {i: w / total for i, w in weights.items()}


@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 0.1, 0.5, 0.9, 0.99]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    bans=st.sets(st.integers(0, 29), max_size=3),
    sizes=st.sampled_from([(), (1,), (2, 6), (3, 20)]),
)
@settings(deadline=None)
def test_the_distribution_is_the_defined_one(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    bans: set[int],
    sizes: tuple[int, ...],
) -> None:
    bias = {i: -100.0 if i % 2 else 3.25 for i in bans if i < len(logits)}
    assume(sum(b == -100 for b in bias.values()) < len(logits))
    params = SamplingParams(temperature, top_p, top_k=top_k, min_p=min_p, logit_bias=bias, seed=0)
    want = defined_distribution(logits, params)
    sampler = Sampler(params, [])
    row = torch.tensor([logits])
    for processor, _ in sampler._processors:
        row = processor(None, row)
    with mock.patch.object(sampling, "NUCLEUS_SIZES", sizes):
        scores, ids = sampler._truncate(row - row.max())
        drawn = {sampler.sample(torch.tensor(logits)).token_id for _ in range(20)}
    names = range(len(logits)) if ids is None else ids.tolist()
    got = dict(zip(names, scores[0].softmax(-1).tolist(), strict=True))
    tiny = 1e-30  # where float32 has few digits left
    assert {i for i, p in got.items() if p > tiny} == {i for i, p in want.items() if p > tiny}
    for i, p in want.items():
        assert got[i] == pytest.approx(p, rel=1e-4, abs=1e-7)
    assert drawn <= set(want)


@given(seed=st.integers(0, 10_000), top_p=st.floats(0.01, 0.999), scale=st.sampled_from([0.5, 3.0, 10.0]))
@settings(deadline=None)
def test_the_quick_nucleus_is_that_of_transformers(seed: int, top_p: float, scale: float) -> None:
    scores = torch.randn(1, 1500, generator=torch.Generator().manual_seed(seed)) * scale
    mass = scores.double().softmax(-1).sort(descending=True).values.cumsum(-1)
    assume(bool(((mass - top_p).abs() > 1e-6).all()))
    assert torch.equal(NucleusLogitsWarper(top_p)(None, scores), TopPLogitsWarper(top_p)(None, scores))  # type: ignore[arg-type]


def test_draws_come_as_often_as_they_should() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05, 0.0]
    logits = torch.tensor([math.log(p) if p else -1e4 for p in probabilities])
    for fields in ({}, {"top_k": 4}, {"top_p": 0.999}, {"min_p": 1e-3}):
        sampler = Sampler(SamplingParams(temperature=1, seed=5, **fields), [])  # type: ignore[arg-type]
        counts = Counter(sampler.sample(logits).token_id for _ in range(4000))
        for token_id, p in enumerate(probabilities):
            deviation = math.sqrt(p * (1 - p) / 4000)
            assert abs(counts[token_id] / 4000 - p) <= 5 * deviation


def test_truncation_does_not_change_which_token_a_seed_draws_among_those_left() -> None:
    logits = some_logits(1)[0]
    logits[5:] = -1e4  # nothing but the first five can come
    plain, cut = (
        Sampler(SamplingParams(temperature=2, seed=3, top_k=k, top_p=p), []) for k, p in ((0, 1.0), (50, 0.999999))
    )
    assert [plain.sample(logits) for _ in range(50)] == [cut.sample(logits) for _ in range(50)]


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-6, 1.0, 1e20, 1e38, 1e300, 5])
def test_extreme_temperatures_draw_and_never_a_banned_token(temperature: float) -> None:
    logits = torch.tensor([0.5, 3e4, -3e4, 1.0])
    sampler = Sampler(SamplingParams(temperature=temperature, logit_bias={1: -100}, seed=1), [])
    drawn = {sampler.sample(logits).token_id for _ in range(100)}
    assert 1 not in drawn
    if temperature < 1e-3:
        assert drawn == {3}
    elif temperature > 1e6:
        assert drawn == {0, 2, 3}


def test_min_p_of_one_and_top_k_of_one_leave_the_best_tokens() -> None:
    logits = torch.tensor([1.0, 4.0, 2.0, 4.0])
    for fields in ({"top_k": 1}, {"min_p": 1.0}):
        sampler = Sampler(SamplingParams(temperature=3, seed=0, **fields), [])  # type: ignore[arg-type]
        assert {sampler.sample(logits).token_id for _ in range(60)} == {1, 3}


def test_penalties_follow_the_answer_and_not_the_prompt() -> None:
    logits = torch.tensor([3.0, 2.75, 0.0])
    sampler = Sampler(SamplingParams(presence_penalty=0.5), [0, 0, 0])
    assert [sampler.sample(logits).token_id for _ in range(4)] == [0, 1, 0, 0]
    sampler = Sampler(SamplingParams(frequency_penalty=0.5), [0])
    assert [sampler.sample(logits).token_id for _ in range(5)] == [0, 1, 0, 1, 0]
    sampler = Sampler(SamplingParams(repetition_penalty=2), [0])
    assert [sampler.sample(logits).token_id for _ in range(3)] == [1, 0, 0]


# --------------------------------------------------------------------------------------------- independence


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.3, seed=11),
    SamplingParams(logprobs=True, top_logprobs=4),
    SamplingParams(temperature=0.8, top_p=0.9, seed=12, logprobs=True),
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(temperature=0.8, top_k=9, min_p=0.02, seed=13, presence_penalty=1, frequency_penalty=0.2),
    SamplingParams(logit_bias={3: 5, 4: -100}),
]


@pytest.mark.parametrize("vocabulary", [300, 1021])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_chooses_the_same_alone_and_in_company(vocabulary: int, dtype: torch.dtype) -> None:
    steps = [some_logits(len(PARAMS), vocabulary, seed=i).to(dtype) for i in range(12)]
    together = [Sampler(params, range(20)) for params in PARAMS]
    got = [sample_batch(together, logits) for logits in steps]
    for row, params in enumerate(PARAMS):
        for way in ("sample", "batch", "reversed"):
            alone = Sampler(params, range(20))
            others = [Sampler(p, range(5)) for p in reversed(PARAMS)]
            for step, logits in enumerate(steps):
                if way == "sample":
                    choice: Any = alone.sample(logits[row])
                elif way == "batch":
                    (choice,) = sample_batch([alone], logits[row : row + 1])
                else:
                    choice = sample_batch([*others, alone], torch.cat([logits.flip(0), logits[row : row + 1]]))[-1]
                assert choice == got[step][row], (params, way, step)


def test_a_fresh_seed_each_time_and_a_given_one_again() -> None:
    logits = some_logits(1)[0] / 3

    def draws(seed: int | None) -> tuple[int, ...]:
        sampler = Sampler(SamplingParams(temperature=1, seed=seed), [])
        return tuple(sampler.sample(logits).token_id for _ in range(12))

    assert draws(7) == draws(7)
    assert len({draws(seed) for seed in (0, 1, -1, 2**31, 10**30)}) == 5
    assert len({draws(None) for _ in range(5)}) == 5


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    state = torch.get_rng_state()
    sampler = Sampler(SamplingParams(temperature=1, seed=7), [])
    for _ in range(5):
        sampler.sample(some_logits(1)[0])
    assert torch.equal(torch.get_rng_state(), state)


class Broken(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        raise KeyError("grammar")


class Spoiled(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores * math.nan


class Nothing(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return torch.full_like(scores, -math.inf)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1, seed=3)])
def test_a_row_that_fails_leaves_the_others_alone(params: SamplingParams) -> None:
    logits = some_logits(9)
    spoilt = logits.clone()
    spoilt[1, 17] = math.nan
    spoilt[3, 0] = math.inf
    spoilt[5, 299] = -math.inf
    extra: dict[int, list[LogitsProcessor]] = {6: [Broken()], 7: [Spoiled()], 8: [Nothing()]}
    samplers = [Sampler(params, [1, 2], extra.get(i, ())) for i in range(9)]
    got = sample_batch(samplers, spoilt)
    for index, kind in (
        (1, NonFiniteLogitsError),
        (3, NonFiniteLogitsError),
        (5, NonFiniteLogitsError),
        (6, KeyError),
        (7, NonFiniteLogitsError),
        (8, InvalidRequestError),
    ):
        assert isinstance(got[index], kind), (index, got[index])
    assert "every token is banned" in str(got[8])
    assert "processors" in str(got[7])
    for index in (0, 2, 4):
        assert got[index] == Sampler(params, [1, 2]).sample(logits[index])


def test_every_token_banned_by_two_together() -> None:
    class OnlyFive(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            mask = torch.full_like(scores, -math.inf)
            mask[0, 5] = 0
            return scores + mask

    logits = some_logits(1)[0]
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature)
        assert Sampler(params, [], [OnlyFive()]).sample(logits).token_id == 5
        with pytest.raises(InvalidRequestError, match="every token is banned"):
            Sampler(dataclasses.replace(params, logit_bias={5: -100}), [], [OnlyFive()]).sample(logits)


def test_penalties_that_overflow_are_named() -> None:
    with pytest.raises(NonFiniteLogitsError, match=r"repetition_penalty=1e-300 nearer to 1"):
        Sampler(SamplingParams(repetition_penalty=1e-300), range(300)).sample(some_logits(1)[0])


def test_large_finite_logits_are_no_error() -> None:
    logits = torch.full((3, 100), 3e38)
    logits[1, 7] = 3.3e38
    for temperature in (0.0, 1e-6, 1.0):
        params = SamplingParams(temperature=temperature, seed=0)
        assert ids_of(sample_batch([Sampler(params, []) for _ in range(3)], logits))[1] == 7


def test_processors_see_prompt_and_answer_before_the_temperature() -> None:
    seen: list[tuple[list[int], Tensor]] = []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            assert input_ids.dtype == torch.long
            seen.append((input_ids[0].tolist(), scores.clone()))
            return scores

    logits = some_logits(4)
    params = SamplingParams(temperature=0.5, seed=1, top_k=3, logit_bias={2: 1.5})
    sampler = Sampler(params, [9, 9, 8], [Watch()])
    answer = [sampler.sample(row).token_id for row in logits]
    assert [ids for ids, _ in seen] == [[9, 9, 8, *answer[:i]] for i in range(4)]
    biased = logits.clone()
    biased[:, 2] += 1.5
    assert torch.equal(torch.cat([scores for _, scores in seen]), biased)
    plain = Sampler(params, [9, 9, 8])
    assert answer == [plain.sample(row).token_id for row in logits]


def test_of_equal_logits_the_first_is_taken() -> None:
    logits = torch.zeros(5, 400)
    logits[1, [250, 399]] = 2.0
    logits[2, [3, 4, 5]] = 1.0
    logits[3] = -7.5
    for fields in ({}, {"logprobs": True}, {"repetition_penalty": 1.5}):
        samplers = [Sampler(SamplingParams(**fields), []) for _ in range(5)]  # type: ignore[arg-type]
        assert ids_of(sample_batch(samplers, logits)) == [0, 250, 3, 0, 0]


def test_as_many_samplers_as_rows() -> None:
    samplers = [Sampler(SamplingParams(), []) for _ in range(2)]
    for logits in (some_logits(3), some_logits(1), some_logits(2)[0]):
        with pytest.raises(ValueError, match=r"2 samplers need logits \[2, V\]"):
            sample_batch(samplers, logits)
    assert sample_batch([], torch.zeros(0, 10)) == []


def test_logits_are_not_changed() -> None:
    logits = some_logits(len(PARAMS))
    before = logits.clone()
    sample_batch([Sampler(params, range(9)) for params in PARAMS], logits)
    assert torch.equal(logits, before)


def test_plain_rows_are_chosen_in_one_pass() -> None:
    samplers = [Sampler(SamplingParams(), []) for _ in range(4)]
    with mock.patch.object(Sampler, "sample", side_effect=AssertionError):
        assert ids_of(sample_batch(samplers, some_logits(4))) == some_logits(4).argmax(-1).tolist()


# ------------------------------------------------------------------------------------------ log-probabilities


@given(logits=LOGITS, count=st.integers(0, 20), temperature=st.sampled_from([0, 0.5]), bias=st.booleans())
@settings(deadline=None)
def test_log_probabilities_are_the_models_own(logits: list[float], count: int, temperature: float, bias: bool) -> None:
    params = SamplingParams(
        temperature,
        seed=1,
        logprobs=True,
        top_logprobs=count,
        top_k=2,
        repetition_penalty=1.5,
        logit_bias={0: -100, 1: 20} if bias else None,
    )
    choice = Sampler(params, [1]).sample(torch.tensor(logits))
    want = torch.tensor(logits, dtype=torch.float64).log_softmax(-1).tolist()
    assert choice.logprob == pytest.approx(want[choice.token_id], rel=1e-5, abs=1e-5)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    assert [i for i, _ in choice.top_logprobs] == order
    for i, logprob in choice.top_logprobs:
        assert logprob == pytest.approx(want[i], rel=1e-5, abs=1e-5)
        if i == choice.token_id:
            assert logprob == choice.logprob


def test_ties_among_the_most_likely_go_by_id() -> None:
    logits = torch.zeros(5000)
    logits[[4000, 17, 3000]] = 1.0
    choice = Sampler(SamplingParams(logprobs=True, top_logprobs=6), []).sample(logits)
    assert [i for i, _ in choice.top_logprobs] == [17, 3000, 4000, 0, 1, 2]
    assert all(type(i) is int and type(x) is float for i, x in choice.top_logprobs)


def test_no_log_probabilities_unless_asked_for() -> None:
    assert Sampler(SamplingParams(), []).sample(some_logits(1)[0]) == Choice(int(some_logits(1)[0].argmax()))


# ------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"temperature": v}, "temperature must be a finite number >= 0")
            for v in (-0.1, math.nan, math.inf, "1", True)
        ),
        *(({"top_p": v}, r"top_p must lie in \(0, 1\]") for v in (0, 1.01, -1, None, "x")),
        *(({"max_tokens": v}, "max_tokens must be an integer >= 1") for v in (0, 2.0, None, True)),
        *(({"seed": v}, "seed must be an integer or None") for v in (1.0, "1", True)),
        *(({"stop": v}, "stop must be a sequence of non-empty strings") for v in ("ab", b"ab", None, 3, [""], [1])),
        *(({"top_k": v}, "top_k must be an integer >= 0.*0 or None") for v in (-1, 1.5, "5", True)),
        *(({"min_p": v}, r"min_p must lie in \[0, 1\]") for v in (-0.1, 1.1, math.nan, None)),
        *(
            ({"repetition_penalty": v}, "repetition_penalty must be a finite number > 0")
            for v in (0, -1, math.inf, None)
        ),
        *(({"presence_penalty": v}, r"presence_penalty must lie in \[-2, 2\]") for v in (2.1, -3, math.nan, None)),
        *(({"frequency_penalty": v}, r"frequency_penalty must lie in \[-2, 2\]") for v in (2.1, -3, "1", True)),
        *(({"logprobs": v}, "logprobs must be True or False") for v in (1, 5, None, "yes")),
        *(({"logprobs": True, "top_logprobs": v}, "integer from 0 to 20") for v in (-1, 21, 2.0, None, True)),
        ({"top_logprobs": 3}, "set logprobs=True too"),
        *(({"logit_bias": {5: v}}, r"logit_bias\[5\] must lie in \[-100, 100\]") for v in (-101, 100.5, math.nan, "1")),
        *(({"logit_bias": {k: 1}}, "a key must be a token id, an integer >= 0") for k in (-1, "5", 2.0, True, None)),
        *(({"logit_bias": v}, "must map token ids to numbers") for v in (5, 0, "ab", [1, 2], [(1, 2, 3)], True)),
    ],
)
def test_values_out_of_range(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": None},
        {"top_k": 10**9},
        {"min_p": 1},
        {"repetition_penalty": 1e-3},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": None},
        {"logit_bias": {0: 100, 1: -100}},
        {"logprobs": True, "top_logprobs": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_values_at_the_limits(fields: dict[str, Any], temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature, **fields), [3])
    for row in some_logits(3):
        assert 0 <= sampler.sample(row).token_id < 300


def test_parameters_are_frozen_and_hashable() -> None:
    params = [
        SamplingParams(top_k=None, logit_bias=bias, stop=stop)
        for bias in ({7: -100, 3: 5}, {3: 5.0, 7: -100.0}, [(7, -100), (3, 5)], ((3, 5), (7, -100)))
        for stop in (("a", "b"), ["a", "b"])
    ]
    assert len(set(params)) == 1
    assert params[0].logit_bias == ((3, 5.0), (7, -100.0))
    assert params[0].top_k == 0
    assert dataclasses.replace(params[0], temperature=1).logit_bias == params[0].logit_bias
    assert SamplingParams(logit_bias={}) == SamplingParams(logit_bias=None) == SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params[0].top_k = 5  # type: ignore[misc]


def test_the_order_of_the_first_parameters_is_kept() -> None:
    assert SamplingParams(0.5, 0.9, 7, ("x",), 3) == SamplingParams(
        temperature=0.5, top_p=0.9, max_tokens=7, stop=("x",), seed=3
    )


def test_ids_beyond_the_vocabulary() -> None:
    params = SamplingParams(logit_bias={319: 1, 320: 2, 5000: 3})
    with pytest.raises(InvalidRequestError, match=r"must lie in \[0, 320\), got 320, 5000; take ids of this model"):
        params.check_vocabulary(VOCABULARY)
    params.check_vocabulary(5001)
    SamplingParams().check_vocabulary(1)
    with pytest.raises(InvalidRequestError, match=r"got 5, 6, 7, 8, 9, \.\.\."):
        SamplingParams(logit_bias=dict.fromkeys(range(20), 1)).check_vocabulary(5)


def test_a_ban_of_every_token() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(10), -100))
    params.check_vocabulary(11)
    with pytest.raises(InvalidRequestError, match="bans all 10 tokens"):
        params.check_vocabulary(10)


def test_a_bias_of_minus_100_bans_whatever_the_logit() -> None:
    logits = torch.zeros(10)
    logits[4] = 5000.0
    make: Callable[[float], Sampler] = lambda b: Sampler(SamplingParams(logit_bias={4: b}), [])  # noqa: E731
    assert make(-99.9).sample(logits).token_id == 4
    assert make(-100).sample(logits).token_id == 0
