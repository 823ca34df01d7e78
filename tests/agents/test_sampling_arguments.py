"""The sampling arguments of ChatPolyKV: where they may stand, what they do, and log-probabilities in OpenAI's shape."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, AIMessageChunk, message_chunk_to_message
from tokenizers import Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from polykv.engine import Completion
from polykv.engine.detokenizer import token_text
from polykv.engine.request import Timing
from polykv.engine.sampling import Choice, SamplingParams
from polykv.errors import InvalidRequestError
from polykv_agents import ChatPolyKV
from polykv_agents.calls import SAMPLING_KEYWORDS, sampling_of
from polykv_agents.usage import logprobs_metadata, response_metadata

DOCUMENT = "The merchant owes the moneylender three thousand ducats. " * 3
QUESTION = "Who carries the risk?"
TOKENS = 12
NEW = {
    "top_k": 3,
    "min_p": 0.2,
    "repetition_penalty": 1.4,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.7,
    "logit_bias": {"40": 3, 41: -100},
    "logprobs": True,
    "top_logprobs": 2,
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def chat(model: Any = None, tokenizer: Any = None, **fields: Any) -> ChatPolyKV:
    return ChatPolyKV(
        model=model if model is not None else tiny_model("llama"),
        tokenizer=tokenizer if tokenizer is not None else tiny_tokenizer(),
        **{"codec": "exact", "max_tokens": TOKENS, "num_threads": 1, **fields},
    )


@pytest.fixture
def llm() -> Iterator[ChatPolyKV]:
    made = chat()
    yield made
    made.close()


def merged(chunks: list[Any]) -> AIMessage:
    message = message_chunk_to_message(functools.reduce(operator.add, chunks))
    assert isinstance(message, AIMessage)
    return message


# ----------------------------------------------------------------------------------- fields and call keywords


def test_every_field_of_the_parameters_is_a_keyword_and_a_field() -> None:
    # the grammar comes from tools and response_format
    assert {*SAMPLING_KEYWORDS, "grammar"} == {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(SAMPLING_KEYWORDS) <= set(ChatPolyKV.model_fields)
    assert set(NEW) < set(SAMPLING_KEYWORDS)


def test_a_call_and_the_constructor_mean_the_same(llm: ChatPolyKV) -> None:
    want = SamplingParams(
        max_tokens=TOKENS,
        top_k=3,
        min_p=0.2,
        repetition_penalty=1.4,
        presence_penalty=1.5,
        frequency_penalty=0.7,
        logit_bias={40: 3, 41: -100},
        logprobs=True,
        top_logprobs=2,
    )
    assert sampling_of(llm, dict(NEW), None) == want
    made = chat(llm.engine.model, llm.engine.tokenizer, **NEW)
    assert made.engine is llm.engine
    assert sampling_of(made, {}, None) == want
    assert sampling_of(llm, {}, None) == SamplingParams(max_tokens=TOKENS)
    made.close()


def test_a_calls_own_replace_those_of_the_object(llm: ChatPolyKV) -> None:
    made = chat(llm.engine.model, llm.engine.tokenizer, **NEW)
    off = {
        "top_k": 0,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": False,
    }
    assert sampling_of(made, off, None) == SamplingParams(max_tokens=TOKENS)
    assert sampling_of(made, dict.fromkeys(off), None) == sampling_of(made, {}, None), (
        "None means: as the object has it"
    )
    assert sampling_of(made, {"top_logprobs": 5}, None).top_logprobs == 5
    made.close()


@pytest.mark.parametrize("name", ["max_new_tokens", "functions", "best_of", "typical_p", "top_a", "logits_processor"])
def test_unknown_names_are_still_refused(llm: ChatPolyKV, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{name}'.*takes temperature.*top_k.*top_logprobs"):
        llm.invoke(QUESTION, **{name: None})
    with pytest.raises(ValueError, match=name):
        chat(llm.engine.model, llm.engine.tokenizer, **{name: 1})


BAD = [
    ({"top_k": -1}, "top_k must be an integer >= 0"),
    ({"min_p": 1.5}, "min_p must lie in"),
    ({"repetition_penalty": 0}, "repetition_penalty must be"),
    ({"presence_penalty": 3}, "presence_penalty must lie in"),
    ({"frequency_penalty": -2.5}, "frequency_penalty must lie in"),
    ({"logit_bias": {"the": 1}}, "a key must be a token id.*'the'"),
    ({"logit_bias": {"-1": 1}}, "a key must be a token id.*'-1'"),
    ({"logit_bias": {"²": 1}}, "a key must be a token id.*'²'"),
    ({"logit_bias": {5: 101}}, r"logit_bias\[5\] must lie in"),
    ({"logit_bias": {5: 1, "5": 2}}, "names token 5 twice"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20"),
    ({"top_logprobs": 2}, "set logprobs=True too"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=str)
def test_bad_values_of_a_call_and_of_the_constructor(llm: ChatPolyKV, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.invoke(QUESTION, **fields)
    with pytest.raises(InvalidRequestError, match=message):
        chat(llm.engine.model, llm.engine.tokenizer, **fields)


@pytest.mark.parametrize("wrong", [5, "x", [1, 2]])
def test_a_bias_of_a_call_that_is_no_mapping(llm: ChatPolyKV, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must map token ids to numbers"):
        llm.invoke(QUESTION, logit_bias=wrong)


def test_ids_beyond_the_vocabulary_are_refused(llm: ChatPolyKV) -> None:
    with pytest.raises(InvalidRequestError, match=r"logit_bias: token ids must lie in \[0, 320\), got 320"):
        llm.invoke(QUESTION, logit_bias={"320": 1})


def test_identifying_parameters_tell_them_apart(llm: ChatPolyKV) -> None:
    variants = [llm, *(llm.model_copy(update={name: value}) for name, value in NEW.items())]
    keys = [repr(sorted(v._identifying_params.items())) for v in variants]
    assert len(set(keys)) == len(variants)
    same = [llm.model_copy(update={"logit_bias": bias}) for bias in ({"40": 3, 41: -100}, {41: -100, 40: 3})]
    assert same[0]._identifying_params == same[1]._identifying_params
    params = variants[1]._get_ls_params(temperature=0.5)
    assert params["ls_temperature"] == 0.5


def test_langchains_answer_cache_tells_them_apart(llm: ChatPolyKV) -> None:
    cached = llm.model_copy(update={"cache": InMemoryCache()})
    plain = cached.invoke(QUESTION)
    with_logprobs = cached.model_copy(update={"logprobs": True}).invoke(QUESTION)
    assert "logprobs" not in plain.response_metadata
    assert with_logprobs.response_metadata["logprobs"]["content"]
    again = cached.model_copy(update={"logprobs": True}).invoke(QUESTION)
    assert again.response_metadata["logprobs"] == with_logprobs.response_metadata["logprobs"]


# ----------------------------------------------------------------------------------------- what they do


def test_they_change_the_answer(llm: ChatPolyKV) -> None:
    plain = llm.invoke(QUESTION, logprobs=True, max_tokens=30)
    assert llm.invoke(QUESTION, temperature=2.0, top_k=1, seed=3, max_tokens=30).content == plain.content
    assert llm.invoke(QUESTION, temperature=2.0, min_p=1.0, seed=3, max_tokens=30).content == plain.content
    for fields in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 3.0}):
        assert llm.invoke(QUESTION, max_tokens=30, **fields).content != plain.content, fields
    ids = llm.get_token_ids("e")
    forced = llm.invoke(QUESTION, logit_bias={str(ids[0]): 100}, max_tokens=5)
    assert forced.content == "eeeee"
    assert "e" not in llm.invoke(QUESTION, logit_bias=_all_with(llm, "e"), max_tokens=40).content


def _all_with(llm: ChatPolyKV, letter: str) -> dict[str, float]:
    tokenizer = llm.engine.tokenizer
    return {str(i): -100 for i in range(len(tokenizer)) if letter in tokenizer.decode([i])}


def test_the_repetition_penalty_sees_the_shared_context(llm: ChatPolyKV) -> None:
    reader = llm.with_context(llm.share(DOCUMENT))
    alone = llm.invoke([("system", f"{DOCUMENT}\n\nBe brief."), ("human", QUESTION)], repetition_penalty=1.6)
    shared = reader.invoke([("system", "Be brief."), ("human", QUESTION)], repetition_penalty=1.6)
    assert shared.usage_metadata["input_token_details"]["cache_read"] > 0
    assert shared.content == alone.content


# --------------------------------------------------------------------------------------- log-probabilities


async def test_log_probabilities_are_the_same_however_a_message_is_made(llm: ChatPolyKV) -> None:
    settings: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "temperature": 0.9, "seed": 4}
    want = llm.invoke(QUESTION, **settings).response_metadata["logprobs"]
    chunks = list(llm.stream(QUESTION, **settings))
    assert [i for i, c in enumerate(chunks) if "logprobs" in c.response_metadata] == [len(chunks) - 1]
    found = {
        "stream": merged(chunks),
        "ainvoke": await llm.ainvoke(QUESTION, **settings),
        "astream": merged([c async for c in llm.astream(QUESTION, **settings)]),
        "batch": llm.batch(["another", QUESTION], **settings)[1],
        "bind": llm.bind(**settings).invoke(QUESTION),
    }
    for way, message in found.items():
        _close(message.response_metadata["logprobs"], want, way)
    assert json.loads(json.dumps(want)) == want


def _close(got: dict[str, Any], want: dict[str, Any], way: str) -> None:
    """Equal, but for the roundings of batches of different shapes."""
    assert len(got["content"]) == len(want["content"]), way
    for mine, theirs in zip(got["content"], want["content"], strict=True):
        assert {k: v for k, v in mine.items() if "logprob" not in k} == {
            k: v for k, v in theirs.items() if "logprob" not in k
        }
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)
        assert [t["token"] for t in mine["top_logprobs"]] == [t["token"] for t in theirs["top_logprobs"]]


def test_the_shape_is_openais(llm: ChatPolyKV) -> None:
    message = llm.invoke(QUESTION, logprobs=True, top_logprobs=4)
    logprobs = message.response_metadata["logprobs"]
    assert set(logprobs) == {"content"}
    assert len(logprobs["content"]) == message.usage_metadata["output_tokens"]
    for entry in logprobs["content"]:
        assert set(entry) == {"token", "bytes", "logprob", "top_logprobs"}
        assert [set(top) for top in entry["top_logprobs"]] == [{"token", "bytes", "logprob"}] * 4
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0] <= 0, "greedy takes the most likely"
        assert sum(map(math.exp, values)) <= 1 + 1e-5
    raw = bytes(itertools.chain.from_iterable(entry["bytes"] or b"" for entry in logprobs["content"]))
    assert raw.decode(errors="replace").startswith(message.content)
    assert llm.invoke(QUESTION, logprobs=True).response_metadata["logprobs"]["content"][0]["top_logprobs"] == []
    assert "logprobs" not in llm.invoke(QUESTION).response_metadata


def test_log_probabilities_are_the_models_own(llm: ChatPolyKV) -> None:
    engine = llm.engine
    prompt = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    settings: dict[str, Any] = {"temperature": 3.0, "seed": 1, "repetition_penalty": 1.5, "top_k": 40}
    settings |= {"logprobs": True, "top_logprobs": 20}
    answer = engine.generate(prompt, sampling_of(llm, settings, None)).result(60).token_ids
    content = llm.invoke(QUESTION, **settings).response_metadata["logprobs"]["content"]
    with torch.no_grad():
        logits = engine.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    want = logits.double().log_softmax(-1)
    for entry, token_id, row in zip(content, answer, want, strict=True):
        assert entry["token"] == token_text(engine.tokenizer, token_id)[0]
        assert entry["logprob"] == pytest.approx(float(row[token_id]), abs=1e-3)
        best = [top["logprob"] for top in entry["top_logprobs"]]
        assert best == pytest.approx(row.topk(20).values.tolist(), abs=1e-3)


def completion(choices: tuple[Choice, ...] | None) -> Completion:
    return Completion("ab", (5, 6), "stop", 3, 0, 0, Timing(0.0, 0.1, 0.2), logprobs=choices)


def test_metadata_of_chosen_tokens() -> None:
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer.encode("é the", add_special_tokens=False), tokenizer.eos_token_id]
    choices = tuple(Choice(i, -0.5, ((ids[0], -0.25), (i, -0.5))) for i in ids)
    content = response_metadata(completion(choices), "m", "stop", None, tokenizer)["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in content][:2] == [b"\xc3", b"\xa9"]
    assert content[0]["token"] == "\ufffd"
    assert content[-1]["token"] == "<|im_end|>"
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "é the<|im_end|>".encode()
    assert content[1]["top_logprobs"] == [
        {"token": "\ufffd", "bytes": [0xC3], "logprob": -0.25},
        {"token": "\ufffd", "bytes": [0xA9], "logprob": -0.5},
    ]
    assert "logprobs" not in response_metadata(completion(None), "m", "stop", None, None)
    assert logprobs_metadata([], tokenizer) == {"content": []}


def test_adding_chunks_keeps_log_probabilities_as_they_are() -> None:
    tokenizer = tiny_tokenizer()
    choices = tuple(Choice(i, -float(i), ((i, -float(i)), (7, -9.0))) for i in (50, 50, 61))
    metadata = response_metadata(completion(choices), "m", "stop", None, tokenizer)
    last = AIMessageChunk(content="", response_metadata=metadata, chunk_position="last")
    text = [AIMessageChunk(content=piece) for piece in ("a", "", "b")]
    for order in ([*text, last], [text[0], last, AIMessageChunk(content="")], [last]):
        total = functools.reduce(operator.add, order)
        assert total.response_metadata["logprobs"] == metadata["logprobs"]
        assert merged(list(order)).response_metadata == metadata


# ------------------------------------------------------------------------------------- the text of one token


def test_a_token_of_a_byte_level_tokenizer_has_its_bytes() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["日本", " hey"])
    text = "the bond 🙂 é\n\t日本 hey \x00"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(token_text(tokenizer, i)[1] or b"?" for i in ids).decode() == text
    for token_id in range(len(tokenizer)):
        alone, raw = token_text(tokenizer, token_id)
        assert raw is not None
        assert raw.decode(errors="replace") == alone == tokenizer.decode([token_id])
    assert token_text(tokenizer, len(tokenizer) + 3) == ("", None)


@pytest.mark.parametrize("kind", ["strip", "metaspace"])
def test_a_token_of_a_byte_fallback_tokenizer_keeps_its_leading_space(kind: str) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    for piece in ("\u2581", "a", "\u2581the", "é", "\u2581\u2581"):
        vocabulary[piece] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        if kind == "strip"
        else [decoders.ByteFallback(), decoders.Metaspace()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    want = {
        "\u2581": (" ", b" "),
        "a": ("a", b"a"),
        "\u2581the": (" the", b" the"),
        "é": ("é", "é".encode()),
        "\u2581\u2581": ("  ", b"  "),
        "<0x0A>": ("\n", b"\n"),
        "<0xE3>": ("\ufffd", b"\xe3"),
        "</s>": ("</s>", b"</s>"),
    }
    assert {token: token_text(tokenizer, vocabulary[token]) for token in want} == want


def test_a_token_of_a_slow_tokenizer() -> None:
    tokenizer = ByT5Tokenizer()
    assert token_text(tokenizer, tokenizer.encode("a")[0]) == ("a", b"a")
    text, raw = token_text(tokenizer, tokenizer.encode("é")[0])
    assert (text, raw) in (("", None), ("", b""), ("\ufffd", None))
