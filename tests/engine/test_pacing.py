"""Long prompts ride on the steps of others: no stream pauses for longer than three of its steps, and nobody starves."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import FULL, random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv import Engine, SamplingParams
from polykv.engine import Request
from polykv.engine import engine as engine_module
from polykv.engine.pacing import MIN_ROWS, Pacer, share_rows
from polykv.engine.scheduler import Sequence

searched = settings(max_examples=2000 if FULL else 200, deadline=None, derandomize=not FULL, database=None)

LONG = 7000
STREAMS = 4

# ------------------------------------------------------------------------------------------------ dividing rows


def one_row_at_a_time(wanted: list[int], budget: int) -> list[int]:
    """The definition: each row goes to the one that has fewest of those that want more, the earliest of several."""
    shares = [0] * len(wanted)
    for _ in range(budget):
        hungry = [i for i, want in enumerate(wanted) if shares[i] < want]
        if not hungry:
            break
        shares[min(hungry, key=lambda i: (shares[i], i))] += 1
    return shares


wishes = st.lists(st.integers(0, 40), max_size=9)


@searched
@given(wishes, st.integers(-2, 200))
def test_rows_are_all_given_away_and_nobody_gets_more_than_it_wants(wanted: list[int], budget: int) -> None:
    shares = share_rows(wanted, budget)
    assert sum(shares) == max(0, min(budget, sum(wanted)))
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))


@searched
@given(wishes, st.integers(0, 200))
def test_shares_are_max_min_fair(wanted: list[int], budget: int) -> None:
    """As a multiset; who gets the odd rows is another test's matter."""
    shares, slow = share_rows(wanted, budget), one_row_at_a_time(wanted, budget)
    assert sorted(shares) == sorted(slow)
    for (share, want), other in itertools.product(zip(shares, wanted, strict=True), shares):
        assert share == want or other <= share + 1, "somebody went short while another had two rows more"


@searched
@given(wishes, st.integers(0, 200))
def test_of_equal_wishes_the_earlier_ones_get_the_odd_rows(wanted: list[int], budget: int) -> None:
    shares = share_rows(wanted, budget)
    for i, j in itertools.combinations(range(len(wanted)), 2):
        assert wanted[i] != wanted[j] or shares[i] >= shares[j]


@pytest.mark.parametrize("place", [0, 15, 31])
def test_a_short_wish_is_met_while_there_are_more_wishes_than_rows(place: int) -> None:
    """31 long prompts and 8 rows a step: a prompt of 5 tokens waits for as long as its fair share takes, and no longer."""
    wanted = [1000] * 31
    wanted.insert(place, 5)
    for _ in range(5 * 32 // MIN_ROWS):
        wanted = [want - share for want, share in zip(wanted, share_rows(wanted, MIN_ROWS), strict=True)]
    assert wanted[place] == 0


# ------------------------------------------------------------------------------------------------------ the pacer


def test_a_pacer_that_knows_nothing_gives_the_budget() -> None:
    assert Pacer(512).prompt_rows(0) == 512
    assert Pacer(512).prompt_rows(3) == 509
    assert Pacer(2).prompt_rows(3) == 1, "a prompt must end some day"


def test_a_decode_step_is_measured_before_a_prompt_rides_on_one() -> None:
    pacer = Pacer(512)
    pacer.observe(0, 100, 1.0)
    assert pacer.prompt_rows(4) == 0
    pacer.observe(4, 0, 0.1)
    assert pacer.prompt_rows(4) > 0
    assert pacer.prompt_rows(8) == 0, "twice as many answers: how long their steps take is not known"
    assert pacer.prompt_rows(1) == 0
    assert pacer.prompt_rows(5) > 0


@searched
@given(
    st.floats(1e-4, 1e3),
    st.floats(1e-5, 1.0),
    st.integers(1, 32),
    st.integers(1, 600),
    st.integers(40, 1024),
)
def test_a_step_with_prompt_rows_takes_at_most_three_decode_steps(
    base: float, share: float, decoding: int, first: int, budget: int
) -> None:
    """A row costs a share of what a step costs by itself. The fixed lot of 8 rows must fit, which is not the pacer's choice."""
    row = base * share
    decode = base + row * decoding
    pacer = Pacer(budget)
    pacer.observe(0, min(first, budget), base + row * min(first, budget))
    for _ in range(30):
        rows = pacer.prompt_rows(decoding)
        seconds = decode + row * rows
        assert rows <= max(MIN_ROWS, budget - decoding)
        assert seconds <= 3 * decode * (1 + 1e-9) or rows == MIN_ROWS
        pacer.observe(decoding, rows, seconds)
    assert rows >= min(MIN_ROWS, budget), "a prompt must end some day"


@searched
@given(st.floats(1e-3, 0.05), st.integers(1, 16))
def test_most_of_the_time_that_may_be_used_is_used(share: float, decoding: int) -> None:
    """Steps with a cost of their own make rows look dear at first only: a prompt then gets a step's time at least."""
    pacer, decode = Pacer(4096), 1 + share * decoding
    pacer.observe(0, 5, 1 + share * 5)
    for _ in range(40):
        rows = pacer.prompt_rows(decoding)
        pacer.observe(decoding, rows, decode + share * rows)
    assert share * rows >= min(1.0 * decode, share * (4096 - decoding))


def test_dearer_rows_are_noticed_within_a_few_steps() -> None:
    """A prompt's rows grow dearer with its depth, by a little each step."""
    pacer, decode = Pacer(4096), 1.0
    pacer.observe(0, 100, 1.0)
    row, worst = 0.01, 0.0
    for _ in range(300):
        rows = pacer.prompt_rows(2)
        seconds = decode + row * rows
        worst = max(worst, seconds)
        pacer.observe(2, rows, seconds)
        row *= 1.01
    assert worst <= 3.0
    assert row > 0.15


# ------------------------------------------------------------------------- the engine on a clock of our own making


@dataclass(frozen=True)
class Cost:
    """Seconds of a forward: ``step + row * rows + pair * (row, token) pairs that attention looks at``."""

    step: float
    row: float
    pair: float = 0.0

    def of(self, pieces: list[Any]) -> float:
        rows = sum(len(piece.token_ids) for piece in pieces)
        pairs = sum(len(piece.token_ids) * (piece.position + len(piece.token_ids)) for piece in pieces)
        return (self.step + self.row * rows + self.pair * pairs) if pieces else 0.0


@dataclass
class Clock:
    """What ``time`` is to the engine; each forward moves it by its cost."""

    engine: Engine
    cost: Cost
    now: float = 0.0
    steps: int = 0
    last_prompt: int = 0
    decode_only: float = 0.0
    tokens: dict[int, list[tuple[int, float, float]]] = field(default_factory=dict)
    """For each request's arrival: step, time, and seconds that the step would have taken without prompts."""

    def install(self, monkeypatch: Any) -> None:
        fake = SimpleNamespace(perf_counter=lambda: self.now, monotonic=time.monotonic, sleep=time.sleep)
        monkeypatch.setattr(engine_module, "time", fake)
        forward, accept = self.engine._runner.forward, Sequence.accept

        def timed(batch: Any) -> Any:
            self.steps += 1
            if batch.prompt_rows:
                self.last_prompt = self.steps
            self.decode_only = self.cost.of([w.piece() for w in batch.work if w.decodes])
            self.now += self.cost.of(batch.pieces())
            return forward(batch)

        def recording(sequence: Sequence, choice: Any) -> Any:
            self.tokens.setdefault(id(sequence.handle), []).append((self.steps, self.now, self.decode_only))
            return accept(sequence, choice)

        monkeypatch.setattr(self.engine._runner, "forward", timed)
        monkeypatch.setattr(Sequence, "accept", recording)

    def pauses(self, handle: Any) -> list[float]:
        """The time between two tokens, in steps of decoding alone."""
        seen = self.tokens[id(handle)]
        return [(b[1] - a[1]) / b[2] for a, b in itertools.pairwise(seen)]


@pytest.fixture
def engine(tokenizer: Any) -> Iterator[Engine]:
    model = tiny_model(
        "llama",
        max_position_embeddings=8192,
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    engine = Engine(model, tokenizer)
    engine._eos_ids = frozenset()
    yield engine
    engine.close()


def endless(engine: Engine, count: int = STREAMS) -> list[Any]:
    """Streams that are decoding by now."""
    params = SamplingParams(max_tokens=8000)
    handles = [engine.submit(Request(tuple(random_ids(5, seed=i)), None, params)) for i in range(count)]
    for handle in handles:
        next(iter(handle))
    return handles


COSTS = [
    Cost(10.0, 1.0),
    Cost(10.0, 0.05),
    Cost(1.0, 0.2, 1e-5),
    Cost(5.0, 0.1, 1e-4),
    Cost(0.02, 0.004),
]


def arrive(engine: Engine, what: str) -> None:
    """A long text arrives and is computed to its end."""
    ids = random_ids(LONG, seed=99)
    one = SamplingParams(max_tokens=1)
    if what == "prompt":
        engine.submit(Request(tuple(ids), None, one)).result(120)
    elif what == "two prompts":
        handles = [engine.submit(Request((seed, *ids[: LONG // 2]), None, one)) for seed in (5, 6)]
        for handle in handles:
            handle.result(120)
    elif what == "share":
        engine.share(ids, "exact")
    else:
        engine.submit(Request((*ids, 5), None, one, shared_tokens=LONG)).result(120)


@pytest.mark.parametrize("what", ["prompt", "two prompts", "share", "shared_tokens"])
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_no_stream_pauses_for_more_than_three_of_its_steps(
    engine: Engine, monkeypatch: Any, cost: Cost, what: str
) -> None:
    clock = Clock(engine, cost)
    clock.install(monkeypatch)
    streams = endless(engine)
    before = clock.steps
    arrive(engine, what)
    assert clock.steps - before > LONG / 512, "it took part in many steps"
    for handle in streams:
        assert not handle.done
        pauses = clock.pauses(handle)
        assert len(pauses) >= clock.steps - before - 1, "a stream gets a token in every step"
        assert max(pauses) <= 3.0
    assert max(clock.pauses(streams[0])) > 1.5, "and the prompt did ride on their steps"


def test_a_question_over_a_long_context_does_not_stop_the_streams_either(engine: Engine, monkeypatch: Any) -> None:
    segment = engine.share(random_ids(LONG, seed=99), "exact")
    clock = Clock(
        engine, Cost(10.0, 0.1, 1e-4)
    )  # at 7,000 tokens, a row's attention takes seven times what the rest of it does
    clock.install(monkeypatch)
    streams = endless(engine)
    ids = (*segment.token_ids.tolist(), *random_ids(400))
    engine.submit(Request(ids, segment, SamplingParams(max_tokens=1))).result(60)
    assert max(pause for handle in streams for pause in clock.pauses(handle)) <= 3.0


@pytest.mark.parametrize("streams", [0, STREAMS])
@pytest.mark.parametrize("what", ["prompt", "share", "shared_tokens"])
def test_a_short_prompt_does_not_wait_for_the_long_one(
    engine: Engine, monkeypatch: Any, what: str, streams: int
) -> None:
    clock = Clock(engine, COSTS[1])
    clock.install(monkeypatch)
    running = endless(engine, streams)
    long = threading.Thread(target=arrive, args=(engine, what))
    long.start()
    deadline = time.monotonic() + 30
    while not (engine.stats().prefill_tokens > 5 * streams or engine.stats().build_tokens):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    at = clock.steps
    short = engine.submit(Request(tuple(random_ids(6)), None, SamplingParams(max_tokens=2)))
    short.result(60)
    first = clock.tokens[id(short)][0][0]
    assert first - at <= 4, "its few rows go with the first step that takes prompts"
    long.join(120)
    assert not long.is_alive()
    assert clock.last_prompt > first + 2, "the long one was still at it"
    assert all(not handle.done for handle in running)
