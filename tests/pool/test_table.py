"""The table of entries against a naive model: plain dicts, linear scans, no tree."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import FULL
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polykv.errors import PoolFullError
from polykv.models.identity import ModelIdentity, segment_identity
from polykv.pool.index import as_tokens
from polykv.pool.segment import BuildReport, KVSegment, SegmentKey, Span, segment_key
from polykv.pool.table import Entry, Root, Table, entry_name
from polykv.pool.workflow import HORIZON
from polykv_kernels import DenseKV, EncodedKV
from polykv_kernels.layouts import tensor_bytes

MODEL = ModelIdentity("tiny", "llama", "", "weights", "{}", "{}", "", "")
HEAD_DIM = 16
TOKEN_BYTES = 2 * 4 * HEAD_DIM
"""Of one token's keys and values in float32."""
AGENTS = ("writer", "critic", "nobody")


def layer_of(start: int, tokens: int, slack: int) -> EncodedKV:
    """Keys and values of a layer, views of storage with room for ``slack`` more tokens."""
    keys, values = (torch.zeros(1, tokens + slack, HEAD_DIM)[:, :tokens] for _ in range(2))
    return EncodedKV(start, tokens, 1, HEAD_DIM, torch.float32, DenseKV(keys, values), None, None)


def segment_of(
    tokens: Sequence[int],
    parent: Span | None = None,
    *,
    salt: str = "",
    codec: str = "exact",
    anywhere: bool = False,
    slack: int = 0,
) -> KVSegment:
    start = parent.end if parent is not None else 0
    before = parent.context_ids.tolist() if parent is not None else []
    return KVSegment(
        segment_identity(MODEL, [*before, *tokens], salt),
        MODEL,
        codec,
        torch.tensor(list(tokens), dtype=torch.int32),
        (layer_of(start, len(tokens), slack),),
        BuildReport(1.0, 1.0, 0),
        parent,
        salt,
        len(tokens) if anywhere else 0,
    )


class FakeWorkflow:
    def __init__(self) -> None:
        self.steps: dict[str, int] = {}

    def steps_to_execution(self, agent: str) -> int:
        return self.steps.get(agent, HORIZON + 1)


class FakeTier:
    """A store in memory that refuses some segments by their names and the mood it is in."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.mood = 0
        self.lost: set[str] = set()
        self.files: dict[SegmentKey, dict[str, Any]] = {}
        self.log: list[tuple[str, SegmentKey]] = []

    def accepts(self, key: SegmentKey) -> bool:
        return self.mood == 0 or zlib.crc32(f"{entry_name(key)}{self.mood}".encode()) % 3 > 0

    def demote(self, entry: Entry) -> bool:
        segment = entry.segment
        assert segment is not None and entry.unused and entry.cached and not entry.stored
        self.log.append(("demote", entry.key))
        if not self.accepts(entry.key):
            return False
        self.lost.discard(entry.name)
        self.files[entry.key] = {
            "segment": segment,
            "requires": [required.key for required in entry.requires],
            "root": entry.root,
        }
        return True

    def restore(self, entry: Entry) -> KVSegment | None:
        self.log.append(("restore", entry.key))
        assert self.table.get(entry.key) is entry and not entry.resident
        if entry.name in self.lost:
            return None
        old: KVSegment = self.files[entry.key]["segment"]
        parent: Span | None = None
        for span in old.parent.chain if old.parent is not None else ():
            before = self.table.get(span.segment.key)
            assert before is not None and before.segment is not None  # what it was computed over is there
            parent = Span(before.segment, span.first, span.stop, span.at, parent)
        layers = (layer_of(old.start, old.num_tokens, 0),)  # it comes back without slack
        return KVSegment(
            old.identity,
            old.model,
            old.codec,
            old.token_ids.clone(),
            layers,
            old.report,
            parent,
            old.salt,
            old.exact_tokens,
        )


class NoRoomError(Exception):
    """The model says that it cannot fit."""


@dataclass
class Record:
    tokens: tuple[int, ...]
    num_bytes: int
    requires: list[SegmentKey]
    resident: bool
    cached: bool = False
    stored: bool = False
    handles: int = 0
    leases: int = 0
    root: Root | None = None
    used: int = 0
    agents: set[str] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        return self.leases > 0 or self.handles > 0


class Naive:
    """What the table should hold. Its trees are dicts: whose token each stored beginning ends with."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.records: dict[SegmentKey, Record] = {}
        self.trees: dict[Root, dict[tuple[int, ...], tuple[SegmentKey, int]]] = {}
        self.accepts: Callable[[SegmentKey], bool] | None = None
        self.lost: set[str] = set()
        self.workflow: FakeWorkflow | None = None
        self.log: list[tuple[str, SegmentKey]] = []
        self.clock = self.evictions = self.demotions = self.restores = self.refused = 0

    # what builds on what

    def needing(self, key: SegmentKey) -> list[SegmentKey]:
        return [other for other, record in self.records.items() if key in record.requires]

    def above(self, key: SegmentKey) -> set[SegmentKey]:
        """An entry and all that build on it."""
        found, more = set(), {key}
        while more:
            found |= more
            more = {other for one in more for other in self.needing(one)} - found
        return found

    def below(self, keys: Sequence[SegmentKey]) -> set[SegmentKey]:
        """All that entries require."""
        found: set[SegmentKey] = set()
        more = {other for one in keys for other in self.records[one].requires}
        while more:
            found |= more
            more = {other for one in more for other in self.records[one].requires} - found
        return found

    def dependents(self, key: SegmentKey) -> int:
        return sum(self.records[other].resident for other in self.needing(key))

    def unused(self, key: SegmentKey) -> bool:
        return not self.records[key].busy and not self.dependents(key)

    # bytes

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.records.values() if record.resident)

    def evictable(self) -> set[SegmentKey]:
        return {
            key
            for key, record in self.records.items()
            if record.resident
            and all(
                self.records[other].cached and not self.records[other].busy
                for other in self.above(key)
                if self.records[other].resident
            )
        }

    def fits(self, num_bytes: int) -> bool:
        freed = sum(self.records[key].num_bytes for key in self.evictable())
        return self.max_bytes is None or (
            self.num_bytes + num_bytes <= self.max_bytes or self.num_bytes - freed + num_bytes <= self.max_bytes
        )

    def steps(self, key: SegmentKey) -> int:
        if self.workflow is None:
            return 0
        return min([self.workflow.steps_to_execution(agent) for agent in self.records[key].agents], default=HORIZON + 1)

    def make_room(self, num_bytes: int) -> None:
        if not self.fits(num_bytes):
            self.refused += 1
            raise NoRoomError
        while self.max_bytes is not None and self.num_bytes + num_bytes > self.max_bytes:
            leaves = [key for key in self.evictable() if not self.dependents(key)]
            latest = max(self.steps(key) for key in leaves)
            self.evict(
                min((key for key in leaves if self.steps(key) == latest), key=lambda key: self.records[key].used)
            )

    def evict(self, key: SegmentKey) -> None:
        record = self.records[key]
        assert record.resident and self.unused(key)
        self.evictions += 1
        if self.accepts is not None and not record.stored:
            self.log.append(("demote", key))
        if self.accepts is not None and (record.stored or self.accepts(key)):
            if not record.stored:
                self.lost.discard(entry_name(key))
            record.stored, record.resident = True, False
            self.demotions += 1
        else:
            self.remove(self.above(key))

    def remove(self, keys: set[SegmentKey]) -> None:
        assert not any(self.records[key].busy for key in keys)
        required = self.below(list(keys)) - keys
        for key in keys:
            record = self.records.pop(key)
            if record.root is not None:
                tree = self.trees[record.root]
                for beginning in [beginning for beginning, (owner, _) in tree.items() if owner == key]:
                    del tree[beginning]
                if not tree:
                    del self.trees[record.root]
        for other in required:
            if other in self.records and not self.records[other].cached:
                self.drop_if_unused(other)

    def drop_if_unused(self, key: SegmentKey) -> None:
        """What is not cached goes with what builds on it and is not in use; what that needs stays."""
        record = self.records.get(key)
        if record is None or record.busy or not record.resident:
            return
        if record.cached:
            for other in self.below([key]):
                if other in self.records and not self.records[other].cached:
                    self.drop_if_unused(other)
            return
        gone = {one for one in self.above(key) if not any(self.records[other].busy for other in self.above(one))}
        self.remove(gone)

    def forget_cached(self) -> int:
        before = self.num_bytes
        while leaves := [
            key for key, record in self.records.items() if record.cached and not record.busy and not self.needing(key)
        ]:
            self.remove({leaves[0]})
        return before - self.num_bytes

    # use

    def touch(self, keys: Sequence[SegmentKey], agent: str | None = None) -> None:
        for key in keys:
            self.clock += 1
            self.records[key].used = self.clock
            if agent is not None:
                self.records[key].agents.add(agent)

    @contextmanager
    def holding(self, keys: Sequence[SegmentKey]) -> Iterator[None]:
        held = [self.records[key] for key in keys]
        for record in held:
            record.leases += 1
        try:
            yield
        finally:
            for record in held:
                record.leases -= 1

    # trees

    def match(self, root: Root, tokens: Sequence[int]) -> list[tuple[SegmentKey, int, int]]:
        tree = self.trees.get(root, {})
        parts: list[tuple[SegmentKey, int, int]] = []
        for n in range(1, len(tokens) + 1):
            if tuple(tokens[:n]) not in tree:
                break
            key, index = tree[tuple(tokens[:n])]
            if parts and parts[-1][0] == key:
                parts[-1] = (key, parts[-1][1], index + 1)
            else:
                parts.append((key, index, index + 1))
        return parts

    def plant(self, key: SegmentKey, root: Root, path: Sequence[int]) -> int:
        """Puts an entry into a tree, unless what comes before it is not in memory; how many tokens are new."""
        record = self.records[key]
        before = self.match(root, path)
        held = sum(stop - first for _, first, stop in before)
        if held == len(path) or (record.resident and not all(self.records[one].resident for one, _, _ in before)):
            return 0
        tree = self.trees.setdefault(root, {})
        own = len(path) - len(record.tokens)
        for n in range(held + 1, len(path) + 1):
            tree[tuple(path[:n])] = (key, n - 1 - own)
        record.root = root
        record.requires += [one for one, _, _ in reversed(before) if one not in record.requires]
        return len(path) - held

    # in and out

    def bring(self, key: SegmentKey, keep: Sequence[SegmentKey] = ()) -> bool:
        record = self.records.get(key)
        if record is not None and record.resident:
            return True
        if self.accepts is None or record is None:
            return False
        self.touch([key])
        if not self.bring_all(record.requires, keep):
            return False
        with self.holding([*keep, *record.requires]):
            if not self.fits(record.num_bytes):
                return False
            self.make_room(record.num_bytes)
            self.log.append(("restore", key))
            if entry_name(key) in self.lost:
                self.remove(self.above(key))
                return False
            num_bytes = len(record.tokens) * (TOKEN_BYTES + 4)
            if not self.fits(num_bytes):
                return False
            self.make_room(num_bytes)
        record.resident, record.num_bytes = True, num_bytes
        self.touch([key])
        self.restores += 1
        return True

    def bring_all(self, keys: Sequence[SegmentKey], keep: Sequence[SegmentKey]) -> bool:
        held = [*keep, *(key for key in keys if self.records[key].resident)]
        for key in list(keys):
            if not self.bring(key, held):
                return False
            held.append(key)
        return True

    def add(self, segment: KVSegment, root: Root | None, path: Sequence[int], cached: bool) -> None:
        key = segment.key
        requires = [span.segment.key for span in segment.parent.chain] if segment.parent is not None else []
        record = self.records.get(key)
        if record is None or not record.resident:
            held = list(requires)
            if record is not None:
                if self.bring_all(record.requires, requires):
                    held += record.requires
                elif key in self.records:
                    self.remove(self.above(key))
            held += [one for one in (record.requires if record is not None else ()) if one in self.records]
            with self.holding([one for one in held if self.records[one].resident]):
                self.make_room(segment.num_bytes)
            record = self.records.get(key)
            if record is None:
                tokens = tuple(segment.token_ids.tolist())
                record = self.records[key] = Record(tokens, 0, list(dict.fromkeys(requires)), True)
            record.resident, record.num_bytes = True, segment.num_bytes
            self.touch([key])
        record.cached = record.cached or cached
        if root is not None and record.root is None:
            self.plant(key, root, path)


moods = st.sampled_from((0, 0, 0, 1, 2))
token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=7)
salts = st.sampled_from(("", "", "other"))
numbers = st.integers(0, 1000)


class TableMachine(RuleBasedStateMachine):
    """Drives a table as the pool and its prefix cache do, and the model beside it."""

    @initialize(
        max_bytes=st.sampled_from((None, *(tokens * (TOKEN_BYTES + 4) for tokens in (8, 12, 12, 20, 20, 30)))),
        tier=st.sampled_from((True, True, False)),
        workflow=st.booleans(),
    )
    def start(self, max_bytes: int | None, tier: bool, workflow: bool) -> None:
        self.table = Table(max_bytes)
        self.naive = Naive(max_bytes)
        self.tier = FakeTier(self.table)
        self.workflow = FakeWorkflow()
        if tier:
            self.table.tier = self.tier
            self.naive.accepts, self.naive.lost = self.tier.accepts, set()
        if workflow:
            self.table.workflow = self.workflow  # type: ignore[assignment]
            self.naive.workflow = self.workflow
        self.leases: list[tuple[Span, list[Entry]]] = []
        self.handles: list[KVSegment] = []

    # ------------------------------------------------------------------- as the pool does

    def lease(self, span: Span, agent: str | None) -> None:
        entries = []
        for part in span.chain:
            entry = self.table.get(part.segment.key)
            assert entry is not None and entry.segment is part.segment
            entries.append(entry)
        entries = list(dict.fromkeys(entries))
        self.table.lease(entries)
        self.table.touch(entries, agent)
        self.leases.append((span, entries))
        for entry in entries:
            self.naive.records[entry.key].leases += 1
        self.naive.touch([entry.key for entry in entries], agent)

    def unlease(self, index: int) -> None:
        _, entries = self.leases.pop(index)
        self.table.touch(entries)
        self.table.end_lease(entries)
        keys = [entry.key for entry in entries]
        self.naive.touch(keys)
        for key in keys:
            self.naive.records[key].leases -= 1
        for key in reversed(keys):
            self.naive.drop_if_unused(key)

    def context(self, number: int) -> Span | None:
        """None, or a context that somebody reads or holds."""
        contexts = [None, *(span for span, _ in self.leases), *(segment.whole for segment in self.handles)]
        return contexts[number % len(contexts)]

    def root(self, base: Span | None, salt: str) -> tuple[Root, int]:
        plain: Root = (salt, ())
        if base is None or all(
            self.naive.records[span.segment.key].root == plain and not span.shift for span in base.chain
        ):
            return plain, 0
        return (salt, base.key), base.end

    def found(self, base: Span | None, salt: str, tokens: Sequence[int]) -> tuple[Span | None, Root, list[int]]:
        """The longest context that the table holds of a prompt; brings it back."""
        root, skip = self.root(base, salt)
        path = list(tokens[skip:])
        parts = self.table.match(root, as_tokens(path))
        expected = self.naive.match(root, path)
        assert [(entry.key, first, stop) for entry, first, stop in parts] == expected
        span, entries = self.table.spans(base if skip else None, parts)
        brought: list[SegmentKey] = []
        for key, _, _ in expected:
            if not self.naive.bring(key, brought):
                break
            brought.append(key)
        assert [entry.key for entry in entries] == brought
        assert (span.end if span is not None else 0) == skip * (skip > 0) + sum(
            stop - first for key, first, stop in expected[: len(brought)]
        )
        if span is not None:
            assert span.context_ids.tolist() == list(tokens[: span.end])
        return span, root, path

    def state(self) -> dict[str, Any]:
        table = self.table
        return {
            "entries": {entry.key: self.facts(entry) for entry in table},
            "trees": {
                root: [(node.value.key, depth) for node, depth in tree.nodes()] for root, tree in table.trees.items()
            },
            "counters": (table.num_bytes, table.evictions, table.demotions, table.restores),
            "log": list(self.tier.log),
        }

    @staticmethod
    def facts(entry: Entry) -> dict[str, Any]:
        names = [name for name in entry.__dataclass_fields__ if name not in ("tokens", "requires", "agents")]
        facts = {name: getattr(entry, name) for name in names} | {"agents": set(entry.agents)}
        return facts | {"requires": [required.key for required in entry.requires], "tokens": entry.tokens.tolist()}

    def add(self, segment: KVSegment, root: Root | None, path: Sequence[int], cached: bool) -> KVSegment | None:
        """Both take a segment in, or neither can."""
        before, known = self.state(), segment.key in self.naive.records
        try:
            entry = self.table.add(segment, root=root, path=path, cached=cached)
        except PoolFullError:
            if not known:
                assert self.state() == before
            with pytest.raises(NoRoomError):
                self.naive.add(segment, root, path, cached)
            return None
        self.naive.add(segment, root, path, cached)
        assert entry.segment is not None and self.table.get(segment.key) is entry
        return entry.segment

    # ----------------------------------------------------------------------------- rules

    @rule(
        number=numbers,
        salt=salts,
        own=token_lists,
        slack=st.integers(0, 2),
        agent=st.sampled_from((None, *AGENTS)),
        join=st.booleans(),
        read=st.sampled_from((False, False, True)),
    )
    def request(
        self, number: int, salt: str, own: list[int], slack: int, agent: str | None, join: bool, read: bool
    ) -> None:
        leases = len(self.leases)
        self.publish(number, salt, own, slack, agent, join)
        while not read and len(self.leases) > leases:
            self.unlease(leases)

    @rule(prompts=st.lists(token_lists, min_size=2, max_size=6), agent=st.sampled_from(AGENTS), slack=st.integers(0, 1))
    def requests(self, prompts: list[list[int]], agent: str, slack: int) -> None:
        for own in prompts:
            self.request(0, "", own, slack, agent, join=False, read=False)

    def publish(self, number: int, salt: str, own: list[int], slack: int, agent: str | None, join: bool) -> None:
        base = self.context(number)
        if base is not None:
            salt = base.salt
        tokens = [*(base.context_ids.tolist() if base is not None else ()), *own]
        parent, root, path = self.found(base, salt, tokens)
        matched = parent.end if parent is not None else 0
        if matched == len(tokens):
            assert parent is not None
            self.lease(parent, agent)
            return
        if matched < (base.end if base is not None else 0):
            return
        if self.naive.match(root, path) and matched < len(tokens) - len(path) + sum(
            stop - first for _, first, stop in self.naive.match(root, path)
        ):
            return  # not all of it could be brought back
        if join and parent is not None and parent is not base:
            entry = self.table.get(parent.segment.key)
            assert entry is not None
            naive = self.naive.needing(entry.key)
            assert self.table.continued(entry) == bool(naive)
            free = entry.cached and entry.unused and not naive and not entry.stored
            if free and parent.num_tokens == len(entry.tokens) and self.table.can_make_room(1000):
                segment = segment_of(tokens[parent.start :], parent.segment.parent, salt=salt, slack=slack)
                if segment.parent is None or parent.start >= len(tokens) - len(path):
                    before = [self.table.get(span.segment.key) for span in segment.chain[:-1]]
                    held = [one for one in before if one is not None]
                    with self.table.holding(held), self.naive.holding([one.key for one in held]):
                        self.table.forget(entry)
                        self.naive.remove({entry.key})
                        leased = self.add(segment, root, path, cached=True)
                    if leased is not None:
                        self.lease(leased.whole, agent)
                    else:
                        for one in held:
                            self.table.drop_if_unused(one)
                            self.naive.drop_if_unused(one.key)
                    return
        segment = segment_of(tokens[matched:], parent, salt=salt, slack=slack)
        leased = self.add(segment, root, path, cached=True)
        if leased is not None:
            self.lease(leased.whole, agent)

    @rule(
        number=numbers, salt=salts, own=st.lists(st.integers(0, 2), max_size=7), agent=st.sampled_from((None, *AGENTS))
    )
    def find(self, number: int, salt: str, own: list[int], agent: str | None) -> None:
        base = self.context(number)
        tokens = [*(base.context_ids.tolist() if base is not None else ()), *own]
        span, _, _ = self.found(base, base.salt if base is not None else salt, tokens)
        if span is not None and span.end > (base.end if base is not None else 0):
            self.lease(span, agent)

    @rule(
        number=numbers,
        salt=salts,
        own=token_lists,
        form=st.sampled_from(("exact", "exact", "lossy", "anywhere")),
        cut=st.integers(0, 3),
        slack=st.integers(0, 2),
        hold=st.booleans(),
    )
    def build(self, number: int, salt: str, own: list[int], form: str, cut: int, slack: int, hold: bool) -> None:
        parent = self.context(number) if form != "anywhere" else None
        if parent is not None:
            salt = parent.salt
            if 0 < cut < parent.num_tokens:
                parent = Span(parent.segment, parent.first, parent.stop - cut, parent.at, parent.before)
            self.lease(parent, None)
        segment = segment_of(
            own,
            parent,
            salt=salt,
            codec="exact" if form == "exact" else "k8v3",
            anywhere=form == "anywhere",
            slack=slack,
        )
        assert segment.key == segment_key(segment.identity, segment.codec, parent, segment.exact_tokens)
        entry = self.table.get(segment.key)
        built: KVSegment | None = None
        if entry is not None:
            assert self.table.bring(entry) == self.naive.bring(segment.key)
            built = entry.segment
        if built is None:
            root, path = None, []
            if form == "exact":
                root, skip = self.root(parent, salt)
                path = segment.context_ids.tolist()[skip:]
            built = self.add(segment, root, path, cached=False)
        if built is not None:
            self.handles.append(built)
            kept = self.table.get(segment.key)
            assert kept is not None
            kept.handles += 1
            self.naive.records[segment.key].handles += 1
        if parent is not None:
            self.unlease(len(self.leases) - 1)
        if built is not None and not hold:
            self.release(len(self.handles) - 1, keep=True)

    @rule(number=numbers, which=numbers, cut=st.integers(0, 2))
    def place(self, number: int, which: int, cut: int) -> None:
        """A document is read behind a context that it was not computed over."""
        documents = [entry for entry in self.table if entry.key[2].startswith("k8v3/")]
        if not documents:
            return
        entry = documents[which % len(documents)]
        before = self.context(number)
        if before is None:
            return
        with_it = [self.table.get(part.segment.key) for part in before.chain]
        keep = [one for one in with_it if one is not None]
        assert self.table.bring(entry, keep) == self.naive.bring(entry.key, [one.key for one in keep])
        if entry.segment is None or entry in keep:
            return
        first = min(cut, entry.segment.num_tokens - 1)
        self.lease(Span(entry.segment, first, entry.segment.num_tokens, before.end - first, before), None)

    @precondition(lambda self: self.leases)
    @rule(number=numbers)
    def end_lease(self, number: int) -> None:
        self.unlease(number % len(self.leases))

    @precondition(lambda self: self.leases or self.handles)
    @rule(keep=st.booleans())
    def end_all(self, keep: bool) -> None:
        while self.leases:
            self.unlease(0)
        while self.handles:
            self.release(0, keep)

    @precondition(lambda self: self.handles)
    @rule(number=numbers, keep=st.booleans())
    def release(self, number: int, keep: bool) -> None:
        segment = self.handles.pop(number % len(self.handles))
        entry = self.table.get(segment.key)
        assert entry is not None and entry.segment is segment and entry.handles > 0
        record = self.naive.records[segment.key]
        if keep:
            entry.cached = record.cached = True
        entry.handles -= 1
        record.handles -= 1
        self.table.drop_if_unused(entry)
        self.naive.drop_if_unused(segment.key)

    @rule(tokens=st.integers(1, 30), mood=moods)
    def make_room(self, tokens: int, mood: int) -> None:
        self.tier.mood = mood
        before = self.state()
        wanted = tokens * TOKEN_BYTES
        fits = self.naive.fits(wanted)
        assert self.table.can_make_room(wanted) == fits
        if fits:
            self.table.make_room(wanted)
            self.naive.make_room(wanted)
            assert self.table.max_bytes is None or self.table.num_bytes + wanted <= self.table.max_bytes
        else:
            with pytest.raises(PoolFullError):
                self.table.make_room(wanted)
            self.naive.refused += 1
            assert self.state() == before

    @rule(number=numbers, mood=moods)
    def evict(self, number: int, mood: int) -> None:
        self.tier.mood = mood
        unused = [entry for entry in self.table if entry.resident and entry.cached and entry.unused]
        if unused:
            entry = unused[number % len(unused)]
            self.table.evict(entry)
            self.naive.evict(entry.key)

    @precondition(lambda self: any(not entry.resident for entry in self.table))
    @rule(number=numbers, lose=st.sampled_from((None, None, None, 0, 1, 2)), mood=moods)
    def bring(self, number: int, lose: int | None, mood: int) -> None:
        self.tier.mood = mood
        stored = [entry for entry in self.table if not entry.resident]
        entry = stored[number % len(stored)]
        if lose is not None:  # its file, or that of something it was computed over
            name = [entry, *entry.requires][lose % (1 + len(entry.requires))].name
            self.tier.lost.add(name)
            self.naive.lost.add(name)
        assert self.table.bring(entry) == self.naive.bring(entry.key)

    @precondition(lambda self: any(not entry.resident for entry in self.table))
    @rule(number=numbers, slack=st.integers(0, 1), hold=st.booleans())
    def compute_again(self, number: int, slack: int, hold: bool) -> None:
        """What is in the store only is computed once more over the same, by somebody who did not look there."""
        stored = [entry for entry in self.table if not entry.resident]
        key = stored[number % len(stored)].key
        old: KVSegment = self.tier.files[key]["segment"]
        parent: Span | None = None
        for span in old.parent.chain if old.parent is not None else ():
            before = self.table.get(span.segment.key)
            if before is None or before.segment is None:
                return
            parent = Span(before.segment, span.first, span.stop, span.at, parent)
        if parent is not None:
            self.lease(parent, None)
        segment = KVSegment(
            old.identity,
            MODEL,
            old.codec,
            old.token_ids.clone(),
            (layer_of(old.start, old.num_tokens, slack),),
            old.report,
            parent,
            old.salt,
            old.exact_tokens,
        )
        taken = self.add(segment, None, [], cached=True)
        if parent is not None:
            self.unlease(len(self.leases) - 1)
        if taken is not None and hold and self.table.get(key) is not None:
            self.lease(taken.whole, None)

    @precondition(lambda self: any(entry.resident for entry in self.table))
    @rule(number=numbers, cached=st.booleans())
    def computed_twice(self, number: int, cached: bool) -> None:
        """Two have computed the same: the second finds it in the table when it is done."""
        resident = [entry.segment for entry in self.table if entry.segment is not None]
        segment = resident[number % len(resident)]
        again = segment_of(
            segment.token_ids.tolist(),
            segment.parent,
            salt=segment.salt,
            codec=segment.codec,
            anywhere=segment.exact_tokens > 0,
        )
        root, path = None, []
        if segment.codec == "exact":
            root, skip = self.root(segment.parent, segment.salt)
            path = segment.context_ids.tolist()[skip:]
            if sum(stop - first for _, first, stop in self.naive.match(root, path)) < len(path) - segment.num_tokens:
                root = None
        assert self.add(again, root, path, cached) is segment

    @precondition(lambda self: self.tier.files)
    @rule(forget=st.booleans())
    def load(self, forget: bool) -> None:
        """What the store still holds becomes known again."""
        if forget:
            self.forget_cached()
        for key, file in self.tier.files.items():
            segment: KVSegment = file["segment"]
            path = segment.context_ids.tolist()
            if file["root"] is not None:
                path = path[sum(stop - first for _, _, first, stop, _ in file["root"][1]) :]
            held = sum(stop - first for _, first, stop in self.naive.match(file["root"], path)) if file["root"] else 0
            if any(one not in self.naive.records for one in file["requires"]) or (
                file["root"] is not None and held < len(path) - segment.num_tokens
            ):
                continue
            known = key in self.naive.records
            requires = [one for one in map(self.table.get, file["requires"]) if one is not None]
            entry = self.table.add_stored(
                key,
                as_tokens(segment.token_ids.numpy()),
                segment.num_bytes,
                1.0,
                requires,
                file["root"],
                as_tokens(path),
            )
            if known:
                assert entry is None
                continue
            assert entry is not None
            self.naive.records[key] = Record(
                tuple(segment.token_ids.tolist()),
                segment.num_bytes,
                list(file["requires"]),
                resident=False,
                cached=True,
                stored=True,
            )
            if file["root"] is not None:
                assert self.naive.plant(key, file["root"], path) == len(path) - held
            self.naive.touch([key])

    @rule()
    def forget_cached(self) -> None:
        assert self.table.forget_cached() == self.naive.forget_cached()

    @rule(agent=st.sampled_from(AGENTS[:2]), steps=st.integers(0, HORIZON + 2))
    def goes_on(self, agent: str, steps: int) -> None:
        self.workflow.steps[agent] = steps

    @rule(number=numbers, own=st.lists(st.integers(0, 2), max_size=12))
    def look_up(self, number: int, own: list[int]) -> None:
        for root in [*self.naive.trees, ("", ())]:
            parts = self.table.match(root, as_tokens(own))
            assert [(entry.key, first, stop) for entry, first, stop in parts] == self.naive.match(root, own)

    # ------------------------------------------------------------------------- invariants

    @invariant()
    def as_the_model_says(self) -> None:
        table, naive = self.table, self.naive
        entries = {entry.key: entry for entry in table}
        assert len(table) == len(entries) and entries.keys() == naive.records.keys()
        for key, record in naive.records.items():
            entry = entries[key]
            assert table.get(key) is entry
            assert tuple(entry.tokens.tolist()) == record.tokens
            assert [required.key for required in entry.requires] == record.requires
            assert all(entries.get(required.key) is required for required in entry.requires)
            for name in ("resident", "cached", "stored", "handles", "leases", "root", "agents"):
                assert getattr(entry, name) == getattr(record, name), name
            assert entry.dependents == naive.dependents(key)
            assert entry.leases == sum(entry in leased for _, leased in self.leases)
            assert entry.handles == sum(segment.key == key for segment in self.handles)
        by_use = sorted(entries, key=lambda key: entries[key].last_used)
        assert by_use == sorted(naive.records, key=lambda key: naive.records[key].used)
        for name in ("evictions", "demotions", "restores", "refused"):
            assert getattr(table, name) == getattr(naive, name), name
        assert self.tier.log == naive.log

    @invariant()
    def bytes_are_those_allocated(self) -> None:
        resident = [entry.segment for entry in self.table if entry.segment is not None]
        tensors = [x for segment in resident for layer in segment.layers for x in layer.tensors().values()]
        held = tensor_bytes(*tensors, *(segment.token_ids for segment in resident))
        assert self.table.num_bytes == held == sum(entry.num_bytes for entry in self.table if entry.resident)
        assert self.table.num_bytes == self.naive.num_bytes
        assert self.table.max_bytes is None or held <= self.table.max_bytes
        assert self.table.evictable_bytes == sum(self.naive.records[key].num_bytes for key in self.naive.evictable())

    @invariant()
    def what_is_in_use_is_there(self) -> None:
        for entry in self.table:
            if entry.resident:
                assert all(required.resident for required in entry.requires)
            if entry.leases or entry.handles:
                assert entry.resident
            if not entry.cached:  # somebody uses it, or what builds on it
                assert any(self.naive.records[key].busy for key in self.naive.above(entry.key))
        for span in [*(span for span, _ in self.leases), *(segment.whole for segment in self.handles)]:
            for part in span.chain:
                entry = self.table.get(part.segment.key)
                assert entry is not None and entry.segment is part.segment

    @invariant()
    def trees_hold_what_the_model_says(self) -> None:
        trees: dict[Root, dict[tuple[int, ...], tuple[SegmentKey, int]]] = {}
        for root, tree in self.table.trees.items():
            assert len(tree)
            found = trees[root] = {}
            paths: dict[int, tuple[int, ...]] = {}
            for node, _ in tree.nodes():
                path = paths[id(node.parent)] if node.parent is not None else ()
                for offset, token in enumerate(node.tokens.tolist()):
                    path = (*path, token)
                    found[path] = (node.value.key, node.first + offset)
                paths[id(node)] = path
        assert trees == self.naive.trees

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        while self.leases:
            self.unlease(0)
        while self.handles:
            self.release(0, keep=False)
        self.as_the_model_says()
        self.forget_cached()
        assert not len(self.table) and not self.table.trees and not self.table.num_bytes


TestTable = TableMachine.TestCase
TestTable.settings = settings(
    max_examples=700 if FULL else 50,  # some 30 steps each
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


# ------------------------------------------------------------------- what random steps seldom meet

PLAIN: Root = ("", ())
UNIT = TOKEN_BYTES + 4


def cached(table: Table, tokens: Sequence[int], parent: Span | None = None) -> Entry:
    """As a request leaves it; one over a context that is not in the tree has a tree of its own."""
    segment = segment_of(tokens, parent)
    root = PLAIN if parent is None else ("", parent.key)
    return table.add(segment, root=root, path=tokens, cached=True)


def whole(entry: Entry) -> Span:
    assert entry.segment is not None
    return entry.segment.whole


def test_what_a_stored_entry_needs_is_not_evicted_for_another_thing_that_it_needs() -> None:
    table = Table(4 * UNIT)
    tier = table.tier = FakeTier(table)
    first = cached(table, [0])
    document = table.add(segment_of([1], codec="k8v3", anywhere=True), cached=True)
    assert document.segment is not None
    placed = Span(document.segment, 0, 1, 1, whole(first))
    over = cached(table, [2], placed)
    table.evict(over)
    table.evict(first)
    filler = cached(table, [1, 1, 1])  # the document is older than it
    tier.demote = lambda entry: False  # type: ignore[method-assign]
    assert table.bring(over) and not filler.resident
    assert first.resident and document.resident and table.num_bytes == 3 * UNIT


def test_what_is_needed_by_something_that_is_needed_is_not_counted_as_evictable() -> None:
    table = Table(4 * UNIT)
    lead = cached(table, [0])
    follower = table.add(
        segment_of([0, 1]), root=PLAIN, path=[0, 1], cached=True
    )  # computed without it, found behind it
    assert follower.requires == (lead,)
    reader = table.add(segment_of([2], whole(follower), codec="k8v3"))
    reader.handles += 1
    assert table.evictable_bytes == 0 and not table.can_make_room(UNIT)
    with pytest.raises(PoolFullError):
        table.make_room(UNIT)
    reader.handles -= 1
    table.drop_if_unused(reader)
    assert table.evictable_bytes == 3 * UNIT


def test_a_segment_behind_one_that_is_in_the_store_only_is_not_found_by_its_tokens() -> None:
    table = Table()
    table.tier = FakeTier(table)
    lead = cached(table, [0])
    table.evict(lead)
    entry = table.add(segment_of([0, 1]), root=PLAIN, path=[0, 1])
    assert entry.root is None and entry.requires == () and lead.dependents == 0
    assert table.match(PLAIN, as_tokens([0, 1])) == [(lead, 0, 1)]


def test_what_was_computed_twice_is_found_by_its_tokens_from_then_on() -> None:
    table = Table()
    longer = cached(table, [0, 1, 2])
    entry = table.add(segment_of([0, 1]), root=PLAIN, path=[0, 1])
    entry.handles += 1
    assert entry.root is None  # its tokens are another's
    table.evict(longer)
    assert table.match(PLAIN, as_tokens([0, 1])) == []
    segment = entry.segment
    assert cached(table, [0, 1]) is entry and entry.segment is segment
    assert table.match(PLAIN, as_tokens([0, 1])) == [(entry, 0, 2)] and table.num_bytes == 2 * UNIT


def test_what_is_not_cached_goes_with_the_last_reader_of_what_was_found_behind_it() -> None:
    table = Table()
    lead = table.add(segment_of([0]), root=PLAIN, path=[0])
    lead.handles += 1
    follower = table.add(segment_of([0, 1]), root=PLAIN, path=[0, 1], cached=True)
    table.lease([follower])  # which was computed without the lead
    lead.handles -= 1
    table.drop_if_unused(lead)
    assert lead.resident
    table.end_lease([follower])
    assert not len(table) and not table.trees and table.num_bytes == 0


def test_a_stored_entry_is_not_taken_in_twice() -> None:
    table = Table()
    table.tier = FakeTier(table)
    entry = cached(table, [0, 1])
    table.evict(entry)
    again = table.add_stored(entry.key, entry.tokens, entry.num_bytes, 1.0, (), PLAIN, entry.tokens)
    assert again is None and table.get(entry.key) is entry
    other = segment_of([0, 1, 2])
    behind = table.add_stored(other.key, as_tokens([0, 1, 2]), other.num_bytes, 1.0, (), PLAIN, as_tokens([0, 1, 2]))
    assert behind is not None and behind.requires == (entry,)  # its first tokens are found in the other
    assert table.match(PLAIN, as_tokens([0, 1, 2])) == [(entry, 0, 2), (behind, 2, 3)]
