r"""A chat model whose answers are written in advance, to test graphs without a model's whims.

It is ChatPolyKV over the real engine: prompts are rendered and prefilled, contexts shared and compressed, grammars enforced,
stop strings cut and calls parsed. Only what the (tiny, random) model would like to say is decided by a script.

.. code-block:: python

    script = Script(["Hello!", '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'])
    llm = scripted_chat_model(script)
    llm.invoke("Hi").content  # "Hello!"
    script.prompts[0]  # what the model was given, as text
    llm.close()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

from polykv.engine import Request
from polykv.engine.detokenizer import token_text
from polykv.engine.registry import register_object
from polykv.errors import InvalidRequestError
from polykv_agents.chat_models import ChatPolyKV

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Roles and contents between marks (the form is called ChatML), without tools of its own."""
POSITIONS = 65536
MARGIN = 1e4
"""Added to the logit of the token that the script wants: more than any other logit, and finite, so that a grammar rules."""


class Script:
    """What a scripted model says.

    Args:
        answers: texts, taken in the order in which calls are submitted; or a function from a call's prompt (as text) to
            its answer, which several threads may call at once.

    Attributes:
        prompts: what each call's model was given, in the order of submission. May be cleared: that starts nothing anew.

    Raises:
        InvalidRequestError: neither a list of texts nor a function.
    """

    def __init__(self, answers: Sequence[str] | Callable[[str], str]) -> None:
        if not callable(answers):
            if isinstance(answers, (str, bytes)) or not isinstance(answers, Sequence):
                raise InvalidRequestError(
                    f"a script is a list of answers, or a function from a prompt to its answer, got {answers!r:.60}"
                )
            for text in answers:
                _check_answer(text)
        self._answers = answers
        self._lock = threading.Lock()
        self._calls = 0
        self.prompts: list[str] = []

    def answer(self, prompt: str) -> str:
        """The answer to a prompt.

        Raises:
            InvalidRequestError: a list has no more answers, or the answer is not a text.
        """
        with self._lock:
            self.prompts.append(prompt)
            self._calls += 1
            number = self._calls
        if callable(self._answers):
            return _check_answer(self._answers(prompt))
        if number > len(self._answers):
            raise InvalidRequestError(
                f"the script holds {len(self._answers)} answers, and this is call {number}; add one, or give a function"
            )
        return _check_answer(self._answers[number - 1])


def _check_answer(answer: object) -> str:
    if not isinstance(answer, str):
        raise InvalidRequestError(
            f"an answer of a script is a text, got {answer!r:.60} ({type(answer).__name__}); for a call of a tool, give the "
            "text that a model would write"
        )
    try:
        answer.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"an answer of a script must be encodable as UTF-8, got {answer[error.start]!r} at position {error.start}"
        ) from None
    return answer


class ScriptProcessor(LogitsProcessor):
    """Makes one answer the most likely one.

    It goes by bytes and not by tokens: tokens that a grammar forces may cut the text differently. Once the answer has left
    the script, since a grammar forbade it, nothing is preferred any more but the end.

    Args:
        answer: the text.
        num_prompt: tokens of the prompt.
        vocabulary: bytes of each token of text.
        eos_id: ends the answer.
    """

    def __init__(self, answer: str, num_prompt: int, vocabulary: dict[int, bytes], eos_id: int) -> None:
        self._answer = answer.encode()
        self._num_prompt = num_prompt
        self._vocabulary = vocabulary
        self._ids = {piece: token_id for token_id, piece in vocabulary.items()}
        self._longest = max(map(len, self._ids))
        self._eos_id = eos_id

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Raises one logit.

        Args:
            input_ids: ``[1, T]`` of prompt and answer.
            scores: ``[1, V]``.

        Returns:
            A new tensor ``[1, V]``.
        """
        said = b"".join(self._vocabulary.get(i, b"") for i in input_ids[0, self._num_prompt :].tolist())
        wanted = self._eos_id
        if self._answer.startswith(said) and len(said) < len(self._answer):
            rest = self._answer[len(said) : len(said) + self._longest]
            wanted = next(self._ids[rest[:n]] for n in range(len(rest), 0, -1) if rest[:n] in self._ids)
        scores = scores.clone()
        scores[:, wanted] += MARGIN
        return scores


def scripted_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: each byte of UTF-8 is a token, and so are three marks.

    Args:
        chat_template: its chat template.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=marks[2], pad_token=marks[0], chat_template=chat_template
    )


def _tiny_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def scripted_chat_model(
    script: Script | Sequence[str] | Callable[[str], str], *, chat_template: str | None = None, **kwargs: Any
) -> ChatPolyKV:
    """A ChatPolyKV whose model says what a script says.

    Args:
        script: a :class:`Script`, or what one is made from. JSON in it must be spaced as ``json.dumps`` does, where a grammar
            holds the answer.
        chat_template: of the tokenizer; a plain one by default.
        **kwargs: fields of ChatPolyKV; ``max_tokens`` is 4,096 by default, since each byte is a token.

    Raises:
        InvalidRequestError: a field is out of range, or the script is neither a list of texts nor a function.
    """
    said = script if isinstance(script, Script) else Script(script)
    return make_model(said, scripted_tokenizer(CHAT_TEMPLATE if chat_template is None else chat_template), **kwargs)


def make_model(script: Script, tokenizer: PreTrainedTokenizerFast, **kwargs: Any) -> ChatPolyKV:
    """As :func:`scripted_chat_model`, with a tokenizer of :func:`scripted_tokenizer`, which several may share."""
    texts = ((token_id, token_text(tokenizer, token_id)[1]) for token_id in range(len(tokenizer)))
    special = set(tokenizer.all_special_ids)
    vocabulary = {token_id: raw for token_id, raw in texts if raw is not None and token_id not in special}

    def processors(request: Request) -> list[LogitsProcessor]:
        answer = script.answer(str(tokenizer.decode(list(request.token_ids), skip_special_tokens=False)))
        return [ScriptProcessor(answer, len(request.token_ids), vocabulary, tokenizer.eos_token_id)]

    model = _tiny_model(tokenizer)
    _, loaded = register_object(model, tokenizer)  # so that each engine of this model follows the script
    loaded.request_processors = processors
    return ChatPolyKV(model=model, tokenizer=tokenizer, **{"max_tokens": 4096, **kwargs})
