"""What the pool holds: entries, who uses them, where they are found, and what goes when room is needed. No model, no lock."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polykv.errors import PoolFullError
from polykv.pool.index import RadixIndex, Tokens, as_tokens
from polykv.pool.segment import KVSegment, SegmentKey, Span, SpanKey
from polykv.pool.workflow import HORIZON, Workflow

logger = logging.getLogger(__name__)

Root = tuple[str, SpanKey]
"""A tree of prompts: whose they are, and the context that all of them begin with, which is not found by its tokens."""


@dataclass(eq=False)
class Entry:
    """A segment in the pool.

    Attributes:
        key: what it is.
        tokens: its own token ids.
        num_bytes: bytes that it takes in memory.
        seconds: what computing it took.
        segment: the segment while it is in memory; None while it is in the store only.
        requires: the entries whose tokens its readers read too.
        root: the tree in which prompts find it, or None.
        cached: it stays without handles until room is needed; others go with their last handle and reader.
        handles: callers of ``build`` that have not released it.
        leases: readers at this moment.
        dependents: entries in memory that require it.
        last_used: counts up; the smallest was used longest ago.
        hits: readers so far.
        agents: who has read it.
        stored: whether the store has it.
        left: whether a request has left it; nobody knows such an entry by name, so it may be joined with what follows.
    """

    key: SegmentKey
    tokens: Tokens
    num_bytes: int
    seconds: float
    segment: KVSegment | None
    requires: tuple[Entry, ...] = ()
    root: Root | None = None
    cached: bool = False
    handles: int = 0
    leases: int = 0
    dependents: int = 0
    last_used: int = 0
    hits: int = 0
    agents: set[str] = field(default_factory=set)
    stored: bool = False
    left: bool = False

    @property
    def name(self) -> str:
        """64 hex digits that name it in a store."""
        return entry_name(self.key)

    @property
    def resident(self) -> bool:
        """Whether it is in memory."""
        return self.segment is not None

    @property
    def unused(self) -> bool:
        """Whether nobody reads it, holds it, or needs it in memory."""
        return not (self.leases or self.handles or self.dependents)


def entry_name(key: SegmentKey) -> str:
    """Name of a segment in a store: SHA-256 of its key."""
    return hashlib.sha256(b"polykv/entry/1" + json.dumps(key).encode()).hexdigest()


class Tier(Protocol):
    """Where entries go that leave the memory."""

    def demote(self, entry: Entry) -> bool:
        """Keeps an entry; False if that is not possible, and it is lost."""

    def restore(self, entry: Entry) -> KVSegment | None:
        """The entry's segment, or None if it cannot be used any more."""


class Table:
    """Entries by key and by tokens, their use, and a budget of bytes. The pool's lock guards it.

    Room is made by evicting cached entries that nobody uses: first those whose agents run latest (with a workflow), then the
    least recently used. An entry that others in memory build on stays until they have gone, so the tree goes from its leaves.

    Args:
        max_bytes: bytes that all entries in memory may take together, or None.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.tier: Tier | None = None
        self.workflow: Workflow | None = None
        self.evictions = self.demotions = self.restores = self.refused = 0
        self._entries: dict[SegmentKey, Entry] = {}
        self._trees: dict[Root, RadixIndex[Entry]] = {}
        self._clock = itertools.count(1)

    # ------------------------------------------------------------------------------------------ looking up

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, key: SegmentKey) -> Entry | None:
        """The entry of a key."""
        return self._entries.get(key)

    @property
    def trees(self) -> dict[Root, RadixIndex[Entry]]:
        """The radix index of each root."""
        return dict(self._trees)

    def match(self, root: Root, tokens: Tokens) -> list[tuple[Entry, int, int]]:
        """The parts of entries, ``(entry, first, stop)``, whose tokens a prompt begins with after its root."""
        tree = self._trees.get(root)
        return tree.match(tokens) if tree is not None else []

    def spans(self, base: Span | None, parts: Sequence[tuple[Entry, int, int]]) -> tuple[Span | None, list[Entry]]:
        """The context that matched parts make, as far as it can be read; what is in the store only is brought back.

        Returns:
            The last span, ``base`` if there is none, and the entries of those after ``base``.
        """
        span = base
        entries: list[Entry] = []
        for entry, first, stop in parts:
            if not self.bring(entry, keep=entries):
                break
            segment = entry.segment
            assert segment is not None
            span = Span(segment, first, stop, (span.end if span is not None else 0) - first, span)
            entries.append(entry)
        return span, entries

    def bring(self, entry: Entry, keep: Iterable[Entry] = ()) -> bool:
        """Brings an entry back into memory if it is not there; False if that is not possible."""
        if entry.resident:
            return True
        if self.tier is None or self._entries.get(entry.key) is not entry:
            return False
        self.touch([entry])  # making room for it must not push it out of the store
        held = [*keep, *(required for required in entry.requires if required.resident)]
        for required in entry.requires:
            if not self.bring(required, held):
                return False
            held.append(required)
        with self.holding(held):
            if not self.can_make_room(entry.num_bytes):
                return False
            self.make_room(entry.num_bytes)
            if self._entries.get(entry.key) is not entry:  # it was pushed out of the store
                return False
            segment = self.tier.restore(entry)
            if segment is None:
                self._discard(entry)
                return False
            if not self.can_make_room(segment.num_bytes):
                return False
            self.make_room(segment.num_bytes)
        entry.segment, entry.num_bytes = segment, segment.num_bytes
        self._count_in(entry)
        self.restores += 1
        return True

    # --------------------------------------------------------------------------------------------- changing

    def add(
        self,
        segment: KVSegment,
        *,
        root: Root | None = None,
        path: Sequence[int] | Tokens = (),
        cached: bool = False,
    ) -> Entry:
        """Takes a segment in. An entry that is in memory already (the same was computed twice) keeps the segment it has.

        Args:
            segment: the entries of its parents must be in memory.
            root: the tree in which prompts find it, or None.
            path: tokens from the root on up to the segment's end.
            cached: keep it without handles.

        Raises:
            PoolFullError: no room can be made. Nothing has been evicted.
        """
        requires = [self._entries[span.segment.key] for span in (segment.parent.chain if segment.parent else ())]
        tokens = as_tokens(segment.token_ids.numpy())
        held = requires
        entry = self._entries.get(segment.key)
        if entry is not None and not entry.resident:  # it is in the store only, and has been computed again
            held = [*requires, *(required for required in entry.requires if required.resident)]
            for required in entry.requires:
                if not self.bring(required, held):
                    self._discard(entry)
                    break
                held.append(required)
        if entry is None or not entry.resident:
            with self.holding(held):
                self.make_room(segment.num_bytes)
            entry = self._entries.get(segment.key)  # making room may have cost it its place in the store
            if entry is None:
                needed = tuple(dict.fromkeys(requires))
                entry = Entry(segment.key, tokens, segment.num_bytes, segment.report.seconds, segment, needed)
                self._entries[entry.key] = entry
            entry.segment, entry.num_bytes = segment, segment.num_bytes
            self._count_in(entry)
        entry.cached = entry.cached or cached
        if root is not None and entry.root is None:
            self._plant(entry, root, as_tokens(path))
        return entry

    def add_stored(
        self,
        key: SegmentKey,
        tokens: Tokens,
        num_bytes: int,
        seconds: float,
        requires: Sequence[Entry],
        root: Root | None,
        path: Tokens,
    ) -> Entry | None:
        """Takes in what is in the store, without reading it; None if it is here already.

        Tokens that another entry holds too (another process left the same beginning) are found there; what is after them, here.
        """
        if key in self._entries:
            return None
        entry = Entry(key, tokens, num_bytes, seconds, None, tuple(requires), cached=True, stored=True)
        if root is not None:
            self._plant(entry, root, path)
        self._entries[key] = entry
        self.touch([entry])
        return entry

    def touch(self, entries: Iterable[Entry], agent: str | None = None) -> None:
        """Notes that entries are used now."""
        for entry in entries:
            entry.last_used = next(self._clock)
            if agent is not None:
                entry.agents.add(agent)

    def with_requirements(self, entries: Iterable[Entry]) -> list[Entry]:
        """Entries and all that their readers read too, each once."""
        return list(dict.fromkeys(itertools.chain.from_iterable((*entry.requires, entry) for entry in entries)))

    def lease(self, entries: Sequence[Entry]) -> None:
        """Counts a reader in."""
        for entry in entries:
            entry.leases += 1
            entry.hits += 1

    def end_lease(self, entries: Sequence[Entry]) -> None:
        """Counts a reader out; what was kept for it alone goes."""
        for entry in entries:
            entry.leases -= 1
            assert entry.leases >= 0
        for entry in reversed(entries):
            self.drop_if_unused(entry)

    def continued(self, entry: Entry, besides: Sequence[Entry] = ()) -> bool:
        """Whether anything builds on an entry, in memory or not, besides the entries given."""
        return any(other not in besides for other in self._needing(entry))

    def forget(self, entry: Entry) -> None:
        """Takes out an entry that nobody uses and nothing builds on, without keeping it anywhere."""
        assert entry.unused and not self._needing(entry)
        self._remove(entry)

    def holding(self, entries: Iterable[Entry]) -> _Holding:
        """A ``with`` block in which entries are not evicted."""
        return _Holding(list(entries))

    def drop_if_unused(self, entry: Entry) -> None:
        """Lets go of an entry that nobody wants any more and that is not cached, with the cached ones that build on it."""
        if entry.handles or entry.leases or not entry.resident or self._entries.get(entry.key) is not entry:
            return
        if entry.cached:
            self._drop_uncached(entry)
            return
        for other in self._needing(entry):
            if other.cached and not other.leases and not other.handles:
                self._drop_tree(other)
        if entry.unused and self._entries.get(entry.key) is entry:  # else it went with the last that built on it
            self._remove(entry)

    def forget_cached(self) -> int:
        """Drops every cached entry that nobody uses, from memory and from the trees; returns the bytes freed."""
        before = self.num_bytes
        while leaves := [entry for entry in self._entries.values() if entry.cached and entry.unused]:
            done = 0
            for entry in leaves:
                if self._entries.get(entry.key) is entry and not self._needing(entry):
                    self._remove(entry)
                    done += 1
            if not done:
                break
        return before - self.num_bytes

    # ------------------------------------------------------------------------------------------- the budget

    @property
    def evictable_bytes(self) -> int:
        """Bytes that eviction could free now: cached entries that nobody uses, and that nothing in use builds on."""
        pinned = self._pinned()
        return sum(entry.num_bytes for entry in self._entries.values() if entry.resident and entry not in pinned)

    def can_make_room(self, num_bytes: int, later_than: int | None = None) -> bool:
        """Whether so many bytes fit, after evicting if need be.

        Args:
            num_bytes: the bytes.
            later_than: evict only what the workflow needs after more steps than this.
        """
        if self.max_bytes is None or self.num_bytes + num_bytes <= self.max_bytes:
            return True
        evictable = self.evictable_bytes
        if later_than is not None:
            pinned = self._pinned()
            evictable = sum(
                entry.num_bytes
                for entry in self._entries.values()
                if entry.resident and entry not in pinned and self.steps_to_execution(entry) > later_than
            )
        return self.num_bytes - evictable + num_bytes <= self.max_bytes

    def make_room(self, num_bytes: int) -> None:
        """Evicts until so many bytes fit.

        Raises:
            PoolFullError: they cannot. Nothing has been evicted.
        """
        if not self.can_make_room(num_bytes):
            self.refused += 1
            held = self.num_bytes - self.evictable_bytes
            raise PoolFullError(
                f"{num_bytes} bytes do not fit into the pool: max_bytes is {self.max_bytes}, and {held} of them are held by "
                "contexts that have not been released and by running requests. Release contexts, wait for requests, or raise "
                "max_bytes"
            )
        while self.max_bytes is not None and self.num_bytes + num_bytes > self.max_bytes:
            self.evict(self._next_victim())

    def evict(self, entry: Entry) -> None:
        """Takes an unused entry out of memory, into the store if there is one."""
        assert entry.unused and entry.resident
        self.evictions += 1
        if self.tier is not None and (entry.stored or self.tier.demote(entry)):
            entry.stored = True
            self.demotions += 1
            self._count_out(entry)
            entry.segment = None
            return
        self._drop_tree(entry)

    def steps_to_execution(self, entry: Entry) -> int:
        """How soon the workflow needs it: the steps of the soonest of its agents."""
        if self.workflow is None:
            return 0
        return min((self.workflow.steps_to_execution(agent) for agent in entry.agents), default=HORIZON + 1)

    def _next_victim(self) -> Entry:
        leaves = (entry for entry in self._entries.values() if entry.resident and entry.cached and entry.unused)
        return min(leaves, key=lambda entry: (-self.steps_to_execution(entry), entry.last_used))

    def _pinned(self) -> set[Entry]:
        """Entries in memory that eviction cannot reach."""
        pinned: set[Entry] = set()
        for entry in self._entries.values():
            if entry.resident and (entry.leases or entry.handles or not entry.cached):
                pinned.add(entry)
                pinned.update(self._needed(entry))
        return pinned

    def _needed(self, entry: Entry) -> list[Entry]:
        """All that an entry requires, and what that requires."""
        found = dict.fromkeys(entry.requires)
        waiting = list(found)
        while waiting:
            more = [other for other in waiting.pop().requires if other not in found]
            found.update(dict.fromkeys(more))
            waiting += more
        return list(found)

    def _needing(self, entry: Entry) -> list[Entry]:
        return [other for other in self._entries.values() if entry in other.requires]

    def _count_in(self, entry: Entry) -> None:
        self.num_bytes += entry.num_bytes
        for required in entry.requires:
            required.dependents += 1
        self.touch([entry])

    def _count_out(self, entry: Entry) -> None:
        self.num_bytes -= entry.num_bytes
        for required in entry.requires:
            required.dependents -= 1
            assert required.dependents >= 0

    def _drop_tree(self, entry: Entry) -> None:
        """Removes an entry with all that build on it, the last ones first; what is in use stays, and what it builds on."""
        for other in self._needing(entry):
            if other.cached and not other.leases and not other.handles and self._entries.get(other.key) is other:
                self._drop_tree(other)
        if entry.unused and not self._needing(entry) and self._entries.get(entry.key) is entry:
            self._remove(entry)

    def _drop_uncached(self, entry: Entry) -> None:
        """Lets go of what an entry required that is not used any more, if it is not cached itself."""
        for required in self._needed(entry):
            if not required.cached:
                self.drop_if_unused(required)

    def _plant(self, entry: Entry, root: Root, path: Tokens) -> int:
        """Puts an entry into a tree; returns how many of its tokens were not there yet, 0 if it is left out."""
        tree = self._trees.get(root) or RadixIndex()
        added = tree.insert(path, entry, len(path) - len(entry.tokens))
        if not added:
            return 0
        # what comes before it in the tree is read with it, even if it was computed without (a share of the same text)
        leads = tree.leads(entry)
        if entry.resident and not all(lead.resident for lead in leads):
            tree.remove(entry)  # reading it must not depend on what is in the store only
            return 0
        more = [lead for lead in leads if lead not in entry.requires]
        entry.requires, entry.root = (*entry.requires, *more), root
        if entry.resident:
            for lead in more:
                lead.dependents += 1
        self._trees[root] = tree
        return added

    def _discard(self, entry: Entry) -> None:
        """Forgets an entry of the store that turned out unusable, with those that build on it."""
        entry.stored = False
        self._drop_tree(entry)

    def _remove(self, entry: Entry) -> None:
        if entry.root is not None:
            tree = self._trees[entry.root]
            tree.remove(entry)
            if not len(tree):
                del self._trees[entry.root]
        if entry.resident:
            self._count_out(entry)
            entry.segment = None
        del self._entries[entry.key]
        self._drop_uncached(entry)


class _Holding:
    """Counts readers in for the time of a ``with`` block."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    def __enter__(self) -> None:
        for entry in self._entries:
            entry.leases += 1

    def __exit__(self, *exc: object) -> None:
        for entry in self._entries:
            entry.leases -= 1
