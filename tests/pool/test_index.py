"""The radix index against a dict of every stored beginning."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers import FULL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polykv.pool.index import RadixIndex, as_tokens, common_prefix


class Value:
    """Compared by identity, as entries are."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.first: int | None = None  # where its own tokens begin in its sequence
        self.tokens: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"v{self.name}"


class Naive:
    """Whose token each stored beginning ends with, and its index among the value's."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], tuple[Value, int]] = {}

    def held(self, tokens: Sequence[int]) -> int:
        return max(n for n in range(len(tokens) + 1) if not n or tuple(tokens[:n]) in self.ends)

    def match(self, tokens: Sequence[int]) -> list[tuple[Value, int, int]]:
        parts: list[tuple[Value, int, int]] = []
        for n in range(1, self.held(tokens) + 1):
            value, index = self.ends[tuple(tokens[:n])]
            if parts and parts[-1][0] is value and parts[-1][2] == index:
                parts[-1] = (value, parts[-1][1], index + 1)
            else:
                parts.append((value, index, index + 1))
        return parts

    def insert(self, tokens: Sequence[int], value: Value, first: int) -> int:
        held = self.held(tokens)
        for n in range(held + 1, len(tokens) + 1):
            self.ends[tuple(tokens[:n])] = (value, n - 1 - first)
        return len(tokens) - held

    def of(self, value: Value) -> list[tuple[int, ...]]:
        return [tokens for tokens, (owner, _) in self.ends.items() if owner is value]

    def followed(self, value: Value) -> bool:
        return any(
            owner is not value and len(tokens) > 1 and self.ends[tokens[:-1]][0] is value
            for tokens, (owner, _) in self.ends.items()
        )

    def leads(self, value: Value) -> list[Value]:
        own = self.of(value)
        if not own:
            return []
        shortest = min(own, key=len)
        found: list[Value] = []
        for n in range(len(shortest) - 1, 0, -1):
            owner = self.ends[shortest[:n]][0]
            if not found or found[-1] is not owner:
                found.append(owner)
        return found

    def forks(self) -> int:
        """Edges of the smallest tree: a value's token that follows another of its own, where nothing else does, begins none."""
        edges = 0
        for tokens, (owner, _) in self.ends.items():
            before = self.ends.get(tokens[:-1])
            siblings = sum(len(other) == len(tokens) and other[:-1] == tokens[:-1] for other in self.ends)
            edges += before is None or before[0] is not owner or siblings > 1
        return edges


def check(index: RadixIndex[Value], naive: Naive, values: list[Value]) -> None:
    stored: dict[tuple[int, ...], tuple[Value, int]] = {}
    paths: dict[int, tuple[int, ...]] = {}
    edges = 0
    for node, depth in index.nodes():
        assert len(node.tokens)
        start = paths[id(node.parent)] if node.parent is not None else ()
        assert len(start) == depth
        if node.parent is not None:
            assert node.parent.children[int(node.tokens[0])] is node
        edges += 1
        for offset, token in enumerate(node.tokens.tolist()):
            start = (*start, token)
            stored[start] = (node.value, node.first + offset)
        paths[id(node)] = start
    assert stored == naive.ends
    assert edges == naive.forks()  # no split outlives what it was made for
    assert len(index) == len({owner for owner, _ in naive.ends.values()})
    for value in values:
        assert (value in index) == bool(naive.of(value))
        assert index.has_followers(value) == naive.followed(value)
        assert index.leads(value) == naive.leads(value)


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@settings(
    max_examples=2000 if FULL else 150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_any_order_of_insertions_and_removals_against_a_dict(data: st.DataObject) -> None:
    index: RadixIndex[Value] = RadixIndex()
    naive = Naive()
    values: list[Value] = []
    for step in range(data.draw(st.integers(1, 25), label="steps")):
        action = data.draw(st.sampled_from(("insert", "continue", "remove", "match")), label="action")
        if action == "insert" or (action == "continue" and not naive.ends):
            tokens = data.draw(sequences, label="tokens")
            first = data.draw(st.integers(0, naive.held(tokens)), label="first")
        elif action == "continue":
            begin = data.draw(st.sampled_from(sorted(naive.ends)), label="begin")
            tokens = [*begin, *data.draw(sequences, label="own")]
            first = len(begin)
        elif action == "remove" and values:
            value = data.draw(st.sampled_from(values), label="value")
            if naive.followed(value):
                with pytest.raises(ValueError, match="continue this one"):
                    index.remove(value)
            else:
                index.remove(value)
                for gone in naive.of(value):
                    del naive.ends[gone]
                values.remove(value)
            check(index, naive, values)
            continue
        else:
            tokens = data.draw(sequences | st.just([]), label="prompt")
            parts = index.match(as_tokens(tokens))
            assert parts == naive.match(tokens)
            done = 0
            for value, first, stop in parts:
                assert value.first is not None and first < stop
                assert tuple(tokens[done : done + stop - first]) == value.tokens[first:stop]
                done += stop - first
            assert done == naive.held(tokens)
            continue
        value = Value(step)
        value.first, value.tokens = first, tuple(tokens[first:])
        added = naive.insert(tokens, value, first)
        assert index.insert(as_tokens(tokens), value, first) == added
        if added:
            values.append(value)
        check(index, naive, values)
    for tokens in list(naive.ends):
        assert index.match(as_tokens(tokens)) == naive.match(tokens)
    while values:  # whoever has no followers goes; in the end nothing is left
        value = next(value for value in values if not naive.followed(value))
        index.remove(value)
        for gone in naive.of(value):
            del naive.ends[gone]
        values.remove(value)
        check(index, naive, values)
    assert not len(index) and not list(index.nodes())


def index_of(*sequences: Sequence[int]) -> tuple[RadixIndex[str], list[str]]:
    index: RadixIndex[str] = RadixIndex()
    names = [f"v{number}" for number in range(len(sequences))]
    for name, tokens in zip(names, sequences, strict=True):
        index.insert(as_tokens(tokens), name)
    return index, names


def edges(index: RadixIndex[str]) -> list[tuple[str, int, list[int]]]:
    return [(node.value, node.first, node.tokens.tolist()) for node, _ in index.nodes()]


def test_nothing_is_found_where_nothing_is_stored() -> None:
    index, _ = index_of()
    assert index.match(as_tokens([1, 2])) == [] and index.match(as_tokens([])) == []
    assert index.insert(as_tokens([]), "empty") == 0 and "empty" not in index
    assert not index.has_followers("never") and index.leads("never") == []
    index.remove("never")  # nothing of it is there
    assert len(index) == 0


def test_one_token() -> None:
    index, (one,) = index_of([7])
    assert index.match(as_tokens([7, 7])) == [(one, 0, 1)] and index.match(as_tokens([8])) == []
    index.remove(one)
    assert index.match(as_tokens([7])) == [] and list(index.nodes()) == []


def test_equal_sequences_stay_with_the_first() -> None:
    index, (one, two) = index_of([1, 2, 3], [1, 2, 3])
    assert one in index and two not in index
    index.remove(two)
    assert index.match(as_tokens([1, 2, 3])) == [(one, 0, 3)]


def test_a_value_holds_the_tokens_from_its_first_on() -> None:
    index, (one,) = index_of([1, 2, 3])
    assert index.insert(as_tokens([1, 2, 3, 4]), "all", 0) == 1  # computed from the start on, but only its last is new
    assert index.insert(as_tokens([1, 2, 5, 6]), "own", 2) == 2
    assert index.insert(as_tokens([1, 2, 3, 4, 8]), "part", 2) == 1
    assert index.match(as_tokens([1, 2, 3, 4, 8, 9])) == [(one, 0, 3), ("all", 3, 4), ("part", 2, 3)]
    assert index.match(as_tokens([1, 2, 5, 6])) == [(one, 0, 2), ("own", 0, 2)]
    assert index.leads("part") == ["all", one]


def test_what_comes_before_must_be_there() -> None:
    index, _ = index_of([1, 2])
    with pytest.raises(ValueError, match="holds 2 tokens of a sequence whose first 3"):
        index.insert(as_tokens([1, 2, 3, 4]), "late", 3)
    assert "late" not in index and len(index) == 1


def test_splits_are_undone() -> None:
    index, (one, two, three) = index_of([1, 2, 3, 4], [1, 2, 9], [1, 8])
    assert edges(index) == [(one, 0, [1]), (one, 1, [2]), (one, 2, [3, 4]), (two, 2, [9]), (three, 1, [8])]
    with pytest.raises(ValueError, match="continue this one"):
        index.remove(one)
    index.remove(two)
    assert edges(index) == [(one, 0, [1]), (one, 1, [2, 3, 4]), (three, 1, [8])]
    index.remove(three)
    assert edges(index) == [(one, 0, [1, 2, 3, 4])]
    assert index.match(as_tokens([1, 2, 3, 4])) == [(one, 0, 4)]


def test_what_is_stored_does_not_follow_its_caller() -> None:
    index: RadixIndex[str] = RadixIndex()
    tokens = as_tokens([1, 2, 3]).copy()
    index.insert(tokens, "own")
    tokens[:] = 0
    assert index.match(as_tokens([1, 2, 3])) == [("own", 0, 3)]


def test_common_prefix() -> None:
    assert common_prefix(as_tokens([]), as_tokens([1])) == 0
    assert common_prefix(as_tokens([1, 2, 3]), as_tokens([1, 2])) == 2
    assert common_prefix(as_tokens([1, 2]), as_tokens([1, 3])) == 1
    assert common_prefix(as_tokens([2]), as_tokens([1])) == 0
