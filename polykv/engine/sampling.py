"""How the next token of a request is chosen: its parameters, its sampler, and one call for a whole step."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from polykv.engine.grammar import Grammar, GrammarMatcher, masks_of
from polykv.errors import InvalidRequestError, NonFiniteLogitsError

MIN_TEMPERATURE = 1e-6
"""Lower ones draw the most likely token all the same, and float32 cannot divide by all of them."""
MAX_TEMPERATURE = 1e30
"""Higher ones draw uniformly all the same, and float32 has no larger numbers to divide by."""
MAX_TOP_LOGPROBS = 20
MAX_BIAS = 100.0
NUCLEUS_SIZES = (256, 4096)
"""Numbers of most likely tokens that are tried before the whole vocabulary is sorted for top_p."""


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Immutable and hashable.

    The logits are changed in the order of transformers: ``logit_bias``, ``repetition_penalty``, ``presence_penalty``
    and ``frequency_penalty``, temperature, ``top_k``, ``top_p``, ``min_p``. The last four only matter when tokens are
    drawn, that is, with a temperature above 0.

    Attributes:
        temperature: 0 takes the most likely token; above, tokens are drawn.
        top_p: draw from the smallest set of tokens with at least this probability (nucleus sampling, Holtzman 2020).
        max_tokens: tokens to generate at most.
        stop: the answer ends before the first of these strings.
        seed: seed of this request's own generator; None draws a fresh one.
        top_k: draw from this many most likely tokens, and those that tie with the last of them; 0 or None: from all.
        min_p: draw from tokens at least this fraction as likely as the most likely one (Nguyen 2024); 0: from all.
        repetition_penalty: above 1, tokens of the prompt and of the answer so far become less likely: a positive
            logit is divided by it and a negative one multiplied (CTRL, Keskar 2019; as transformers does).
        presence_penalty: subtracted from the logit of each token that the answer holds already, -2 to 2 (as OpenAI).
        frequency_penalty: subtracted once for each time that the answer holds the token, -2 to 2 (as OpenAI).
        logit_bias: ``{token id: -100..100}``, added to logits; -100 bans the token. Kept as sorted pairs.
        logprobs: whether each token's log-probability is wanted.
        top_logprobs: for each token, log-probabilities of this many most likely ones too, 0 to 20; needs ``logprobs``.
        grammar: what the answer must be; tokens that would leave it are never chosen. None: anything.

    Raises:
        InvalidRequestError: a value is out of range or of the wrong kind.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_k: int | None = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = ()
    logprobs: bool = False
    top_logprobs: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or self.temperature < 0:
            raise InvalidRequestError(f"temperature must be a finite number >= 0, got {self.temperature!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p must lie in (0, 1], got {self.top_p!r}")
        if not _is_integer(self.max_tokens) or self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be an integer >= 1, got {self.max_tokens!r}")
        if self.seed is not None and not _is_integer(self.seed):
            raise InvalidRequestError(f"seed must be an integer or None, got {self.seed!r}")
        if self.top_k is not None and (not _is_integer(self.top_k) or self.top_k < 0):
            raise InvalidRequestError(
                f"top_k must be an integer >= 0, got {self.top_k!r}; 0 or None draws from the whole vocabulary"
            )
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise InvalidRequestError(f"min_p must lie in [0, 1], got {self.min_p!r}; 0 switches it off")
        if not _is_number(self.repetition_penalty) or self.repetition_penalty <= 0:
            raise InvalidRequestError(
                f"repetition_penalty must be a finite number > 0, got {self.repetition_penalty!r}; 1 switches it off"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -2 <= value <= 2:
                raise InvalidRequestError(f"{name} must lie in [-2, 2], got {value!r}; 0 switches it off")
        if not isinstance(self.logprobs, bool):
            raise InvalidRequestError(
                f"logprobs must be True or False, got {self.logprobs!r}; the number of alternatives is top_logprobs"
            )
        if not _is_integer(self.top_logprobs) or not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be an integer from 0 to {MAX_TOP_LOGPROBS}, got {self.top_logprobs!r}"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(f"top_logprobs is {self.top_logprobs} but logprobs is off; set logprobs=True too")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequestError(
                f"grammar must be a Grammar, got {self.grammar!r:.60}; make one with Grammar.json_schema(...), regex or choice"
            )
        object.__setattr__(self, "stop", self._checked_stop())
        object.__setattr__(self, "top_k", self.top_k or 0)
        object.__setattr__(self, "logit_bias", self._checked_bias())

    def _checked_stop(self) -> tuple[str, ...]:
        stops: object = self.stop
        if isinstance(stops, Iterable) and not isinstance(stops, (str, bytes)):
            stops = tuple(stops)
            if all(isinstance(s, str) and s for s in stops):
                return stops
        raise InvalidRequestError(f"stop must be a sequence of non-empty strings, got {self.stop!r}")

    def _checked_bias(self) -> tuple[tuple[int, float], ...]:
        try:
            biases = dict(() if self.logit_bias is None else self.logit_bias)
        except (TypeError, ValueError):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, as {{42: -100}}, got {self.logit_bias!r:.80}"
            ) from None
        for token_id, bias in biases.items():
            if not _is_integer(token_id) or token_id < 0:
                raise InvalidRequestError(
                    f"logit_bias: a key must be a token id, an integer >= 0, got {token_id!r}; "
                    "the tokenizer's convert_tokens_to_ids() gives the id of a token"
                )
            if not _is_number(bias) or not -MAX_BIAS <= bias <= MAX_BIAS:
                raise InvalidRequestError(
                    f"logit_bias[{token_id}] must lie in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {bias!r}"
                )
        return tuple(sorted((token_id, float(bias)) for token_id, bias in biases.items()))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks what depends on the model: whether the ids of ``logit_bias`` exist and leave something to choose.

        Args:
            vocab_size: number of logits of a position.

        Raises:
            InvalidRequestError: an id is not below ``vocab_size``, or every token is banned.
        """
        biases = dict(self.logit_bias or ())
        unknown = [token_id for token_id in biases if token_id >= vocab_size]
        if unknown:
            raise InvalidRequestError(
                f"logit_bias: token ids must lie in [0, {vocab_size}), got {', '.join(map(str, unknown[:5]))}"
                f"{', ...' if len(unknown) > 5 else ''}; take ids of this model's own tokenizer"
            )
        if sum(bias <= -MAX_BIAS for bias in biases.values()) >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias bans all {vocab_size} tokens, so none can be chosen; leave out those that may come"
            )


@dataclass(frozen=True)
class Choice:
    """A chosen token.

    Log-probabilities are of the model's own distribution: the log-softmax of its logits before bias, penalties,
    temperature and truncation (vLLM's default too). So they compare answers that were sampled in different ways; a
    banned token keeps the probability that the model gave it.

    Attributes:
        token_id: its id.
        logprob: its natural log-probability; None if not asked for.
        top_logprobs: ``(token id, log-probability)`` of the most likely tokens, best first, of equal ones the lower id
            first; as many as asked for. The chosen token is among them only if it is that likely.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class OccurrencePenaltyLogitsProcessor(LogitsProcessor):
    """Presence and frequency penalties as OpenAI's API defines them; transformers has none.

    ``logit[t] - count[t] * frequency - (count[t] > 0) * presence``, with counts over the answer alone. The penalties of
    all tokens are kept and one of them is renewed a step, so a step costs the same at any length.

    Args:
        presence: subtracted once a token has occurred.
        frequency: subtracted for each occurrence.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency
        self._counts: dict[int, int] = {}
        self._penalties: Tensor | None = None

    def observe(self, token_id: int) -> None:
        """Counts a token of the answer."""
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self._penalties is not None:
            self._penalties[token_id] = count * self._frequency + self._presence

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Subtracts the penalties.

        Args:
            input_ids: not read; what has been observed counts.
            scores: ``[1, V]`` float32.

        Returns:
            A new tensor ``[1, V]``.
        """
        if self._penalties is None:
            self._penalties = torch.zeros(scores.shape[-1])
            for token_id, count in self._counts.items():
                self._penalties[token_id] = count * self._frequency + self._presence
        return scores - self._penalties


class NucleusLogitsWarper(TopPLogitsWarper):
    """transformers' top-p without sorting the whole vocabulary, which takes longer than all the rest of a draw.

    Sorting from the top, token i stays if the tokens before it have less than ``top_p`` together. Where some hundreds
    of most likely tokens already have ``top_p``, every token that stays is one of them.
    """

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Sets the logits outside the nucleus to -inf.

        Args:
            input_ids: not read.
            scores: ``[1, V]`` float32.

        Returns:
            A new tensor ``[1, V]``.
        """
        # not logsumexp: over one long row its sum is taken in as many parts as there are threads
        logprobs = scores.log_softmax(dim=-1)
        for size in NUCLEUS_SIZES:
            if size >= scores.shape[-1]:
                break
            top = scores.topk(size)
            mass = logprobs.gather(1, top.indices).exp().cumsum(dim=-1, dtype=torch.float64)
            if mass[0, -1] >= self.top_p:
                kept = 1 + int((mass < self.top_p).sum())
                outside = torch.full_like(scores, self.filter_value)
                return outside.scatter(1, top.indices[:, :kept], top.values[:, :kept])
        return super().__call__(input_ids, scores)


class _Ids:
    """Token ids in a buffer that doubles when it is full, so that adding one rarely copies the others."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._count = len(ids)
        self._buffer = torch.empty(max(64, 2 * len(ids)), dtype=torch.long)
        if ids:
            self._buffer[: len(ids)] = torch.tensor(ids, dtype=torch.long)

    def append(self, token_id: int) -> None:
        if self._count == len(self._buffer):
            self._buffer = torch.cat([self._buffer, torch.empty_like(self._buffer)])
        self._buffer[self._count] = token_id
        self._count += 1

    def view(self) -> Tensor:
        """``[1, count]`` int64, no copy."""
        return self._buffer[None, : self._count]


class Sampler:
    """Chooses the tokens of one request.

    It owns the request's random generator and the ids that penalties look at, so its choices depend on nothing but
    the parameters, the prompt and the logits.

    Args:
        params: how to choose.
        prompt_ids: the whole prompt, a shared context included.
        processors: further processors of this request (a grammar's mask, say), called with ids ``[1, T]`` of prompt
            and answer and scores ``[1, V]`` after bias and penalties and before the temperature, where ``generate``
            puts its ``logits_processor``.
        matcher: of the parameters' grammar.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        processors: Sequence[LogitsProcessor] = (),
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self._params = params
        self.matcher = matcher
        # each with the ids that it reads, or None
        self._processors: list[tuple[LogitsProcessor, _Ids | None]] = []
        self._warpers: list[LogitsProcessor] = []
        self._generator: torch.Generator | None = None
        self._seen: set[int] = set()
        self._seen_ids: _Ids | None = None
        self._all_ids: _Ids | None = None
        self._occurrences: OccurrencePenaltyLogitsProcessor | None = None
        biases = dict(params.logit_bias or ())
        if biases:
            bias: list[list[list[int] | float]] = [
                [[token_id], -math.inf if b <= -MAX_BIAS else b] for token_id, b in biases.items()
            ]
            self._processors.append((SequenceBiasLogitsProcessor(bias), None))
        if params.repetition_penalty != 1:
            # It writes one and the same value wherever an id stands, so each id once gives the same as the whole text.
            self._seen = set(prompt_ids)
            self._seen_ids = _Ids(sorted(self._seen))
            repetition = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
            self._processors.append((repetition, self._seen_ids))
        if params.presence_penalty or params.frequency_penalty:
            self._occurrences = OccurrencePenaltyLogitsProcessor(params.presence_penalty, params.frequency_penalty)
            self._processors.append((self._occurrences, None))
        if processors:
            self._all_ids = _Ids(prompt_ids)
            self._processors += [(processor, self._all_ids) for processor in processors]
        if params.temperature > 0:
            if params.temperature != 1:
                temperature = min(max(float(params.temperature), MIN_TEMPERATURE), MAX_TEMPERATURE)
                self._warpers.append(TemperatureLogitsWarper(temperature))
            if params.top_k:
                self._warpers.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1:
                self._warpers.append(NucleusLogitsWarper(params.top_p))
            if params.min_p > 0:
                self._warpers.append(MinPLogitsWarper(params.min_p))
            seed = params.seed if params.seed is not None else secrets.randbits(63)
            self._generator = torch.Generator().manual_seed(seed % 2**63)

    @property
    def is_plain(self) -> bool:
        """Whether the token is the largest logit's, of those that a grammar allows, and nothing else is asked for."""
        return self._generator is None and not self._processors and not self._params.logprobs

    @property
    def finished(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self.matcher is not None and self.matcher.finished

    def forced(self) -> list[int]:
        """Tokens that must follow, since the grammar leaves no choice; each is to be passed to :meth:`take`."""
        if self.matcher is None or self._params.logprobs:  # nobody computes the logits of a forced token's place
            return []
        return self.matcher.forced()

    def take(self, token_id: int) -> None:
        """Counts a forced token as part of the answer, as if it had been drawn.

        Raises:
            InvalidRequestError: the grammar does not allow it.
        """
        if self._generator is not None:  # a draw among one uses up a number too
            torch.rand((), generator=self._generator, dtype=torch.float64)
        self._observe(token_id)

    def sample(self, logits: Tensor, mask: Tensor | None = None) -> Choice:
        """Chooses a token, and counts it as part of the answer.

        Args:
            logits: ``[V]`` of the last position.
            mask: ``[V]`` bool, the tokens that the grammar allows; computed if it is None and there is a grammar.

        Raises:
            NonFiniteLogitsError: a logit is NaN or infinite, before or after the processors.
            InvalidRequestError: the processors leave no token.
        """
        # a copy: sums are then taken over memory of one alignment, whatever else is in the batch
        raw = logits.detach().to("cpu", torch.float32, copy=True)[None]
        _check_finite(raw)
        row = raw
        for processor, ids in self._processors:
            row = processor(None if ids is None else ids.view(), row)
        if self.matcher is not None:
            row = row.masked_fill(~self._mask(mask), -math.inf)
        best = int(row.argmax())  # NaN counts as the largest, and of equal ones the first is taken
        largest = float(row[0, best])
        if not math.isfinite(largest):
            self._fail(largest)
        token_id = best if self._generator is None else self._draw(*self._truncate(row - largest), self._generator)
        self._observe(token_id)
        if not self._params.logprobs:
            return Choice(token_id)
        logprobs = raw[0].log_softmax(dim=-1)
        top = _largest(raw[0], self._params.top_logprobs)
        return Choice(
            token_id,
            float(logprobs[token_id]),
            tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True)),
        )

    def _truncate(self, row: Tensor) -> tuple[Tensor, Tensor | None]:
        """Temperature and truncation.

        Args:
            row: scores ``[1, V]``, the largest of them 0, so that no small temperature overflows.

        Returns:
            Scores ``[1, M]`` of the tokens to draw from (-inf: none), and their ids ``[M]``; None: all of them.
        """
        ids: Tensor | None = None
        for warper in self._warpers:
            row = warper(None, row)
            if isinstance(warper, (TopKLogitsWarper, TopPLogitsWarper)):
                # a vocabulary has tens of thousands of tokens and few of them are left
                kept = (row[0] > -math.inf).nonzero()[:, 0]
                row = row[:, kept]
                ids = kept if ids is None else ids[kept]
        return row, ids

    def _draw(self, row: Tensor, ids: Tensor | None, generator: torch.Generator) -> int:
        # Inverse of the distribution function: one random number a token whatever the vocabulary, and the first index
        # whose sum exceeds it has a probability above 0.
        sums = row[0].softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        point = torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]
        index = int(torch.searchsorted(sums, point, right=True))
        return index if ids is None else int(ids[index])

    def _mask(self, mask: Tensor | None) -> Tensor:
        assert self.matcher is not None
        if mask is None:
            mask = masks_of([self.matcher])[0]
        self.matcher.fail()
        return mask

    def choose_plain(self, scores: Tensor, mask: Tensor) -> int:
        """The most likely token that a grammar allows, counted as part of the answer.

        Args:
            scores: ``[V]``, finite.
            mask: ``[V]`` bool.

        Raises:
            InvalidRequestError: the grammar allows none.
        """
        row = scores.masked_fill(~self._mask(mask), -math.inf)
        best = int(row.argmax())
        if row[best] == -math.inf:
            self._fail(-math.inf)
        self._observe(best)
        return best

    def _observe(self, token_id: int) -> None:
        if self.matcher is not None:
            self.matcher.consume(token_id)
        if self._seen_ids is not None and token_id not in self._seen:
            self._seen.add(token_id)
            self._seen_ids.append(token_id)
        if self._occurrences is not None:
            self._occurrences.observe(token_id)
        if self._all_ids is not None:
            self._all_ids.append(token_id)

    def _fail(self, largest: float) -> None:
        if largest == -math.inf:
            raise InvalidRequestError(
                "every token is banned, so none can be chosen: logit_bias, the request's processors and its grammar together "
                "must leave at least one; take some bans back"
            )
        raise NonFiniteLogitsError(
            f"the request's processors turned finite logits into {largest}, so no token can be chosen; "
            f"bring repetition_penalty={self._params.repetition_penalty!r} nearer to 1, or look at the processors"
        )


def sample_batch(samplers: Sequence[Sampler], logits: Tensor) -> list[Choice | Exception]:
    """The choices of one step.

    Greedy rows without processors are one pass over all logits; the others go one by one. What a row gets is the same,
    bit for bit, in any company: of the joint pass only the position of a maximum is used, which no rounding touches.

    Args:
        samplers: n of them, each with its own generator and ids.
        logits: ``[n, V]``, a row for each.

    Returns:
        For each row its choice, or the exception that choosing raised; the other rows are chosen all the same.

    Raises:
        ValueError: the numbers of samplers and rows differ.
    """
    if logits.dim() != 2 or len(samplers) != len(logits):
        raise ValueError(f"{len(samplers)} samplers need logits [{len(samplers)}, V], got {list(logits.shape)}")
    logits = logits.detach()
    plain = [sampler.is_plain for sampler in samplers]
    best = [-1] * len(samplers)
    if any(plain):
        scores = logits.float()  # the CPU finds maxima of half-precision numbers several times slower
        # a sum is finite only if every term is, so a row with a finite sum needs no second look
        best = torch.where(torch.isfinite(scores.sum(dim=-1)), scores.argmax(dim=-1), -1).tolist()
    if not all(plain):
        logits = logits.cpu()  # once, not a transfer for each row
    constrained = [index for index, sampler in enumerate(samplers) if sampler.matcher is not None]
    masks = dict(zip(constrained, _masks([samplers[index] for index in constrained]), strict=True))
    choices: list[Choice | Exception] = []
    for index, sampler in enumerate(samplers):
        mask = masks.get(index)
        try:
            if not plain[index] or best[index] < 0:
                choices.append(sampler.sample(logits[index], mask))
            elif mask is None:
                choices.append(Choice(best[index]))
            else:
                choices.append(Choice(sampler.choose_plain(scores[index].cpu(), mask)))
        except Exception as error:  # whatever a processor raises is that request's alone
            choices.append(error)
    return choices


def _masks(samplers: Sequence[Sampler]) -> Sequence[Tensor]:
    """The masks of grammars, for each vocabulary together (a step has one)."""
    matchers = [sampler.matcher for sampler in samplers if sampler.matcher is not None]
    return list(masks_of(matchers)) if matchers else []


def _check_finite(row: Tensor) -> None:
    # one reduction first instead of a mask over the vocabulary; a sum of large finite numbers may overflow, though
    if not torch.isfinite(row.sum()) and not torch.isfinite(row).all():
        raise NonFiniteLogitsError(
            "the model returned NaN or infinite logits for this request, so no token can be chosen; check the "
            "weights and dtype (float16 overflows in some models: use float32 or bfloat16)"
        )


def _largest(row: Tensor, count: int) -> Tensor:
    """Ids ``[min(count, V)]`` of the largest entries of ``[V]``, best first, of equal ones the lower id first."""
    count = min(count, len(row))
    if count == 0:
        return torch.empty(0, dtype=torch.long)
    # topk leaves open which of several equal entries it takes
    candidates = (row >= row.topk(count).values[-1]).nonzero()[:, 0]
    order = row[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:count]]
