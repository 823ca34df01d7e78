"""What the pool finds by itself: prompts' beginnings, marked or not, and documents at any position.

A request leaves its prompt and its answer in the pool as exact segments, so that the next turn, or the next agent that is handed
the transcript, starts where it ended (decoded keys and values are reused too, as in RelayCaching, arXiv 2603.13289). What is
found is a context over segments: the longest beginning of the prompt that the pool holds, token for token.

Results do not depend on who came first: what is found without being asked for is stored exactly, computed over the same stored
tokens as without the pool, and a hit is a part of a segment, never a segment encoded again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from polykv.codecs import Codec
from polykv.codecs.exact import ExactCodec
from polykv.errors import InvalidRequestError, PoolFullError
from polykv.models.identity import salt_digest, segment_identity
from polykv.models.rope import check_shiftable
from polykv.models.tails import Tail
from polykv.pool.index import Tokens, as_tokens
from polykv.pool.lease import Lease
from polykv.pool.segment import BuildReport, KVSegment, Span
from polykv.pool.table import Entry, Root, Table
from polykv_kernels import DenseKV, EncodedKV

if TYPE_CHECKING:
    from polykv.pool.pool import SharedKVPool

ANYWHERE_EXACT_TOKENS = 32
"""First tokens of a segment that may stand anywhere which are stored as they are: a reader computes up to so many of them anew."""

_FINGERPRINT_TOKENS = 16
_MAX_SLACK = 1.125
"""A tail with more room than this for what it holds is copied when it becomes a segment, and is taken as it is otherwise."""
_JOIN_RATIO = 2
"""A segment is joined with what follows it unless it is more than twice as long: a conversation stays a few segments, and a
token is copied a few times at most."""


class PrefixCache:
    """The part of a pool that requests fill and that is searched by token ids; made by the pool.

    Args:
        pool: whose part it is.
        table: the pool's entries.
        lock: the pool's lock.

    Attributes:
        hit_tokens: prompt tokens that were found and read instead of computed.
        published: segments that requests have left.
        seconds_saved: what computing the tokens that were found had taken.
    """

    def __init__(self, pool: SharedKVPool, table: Table, lock: threading.RLock) -> None:
        self._pool, self._table, self._lock = pool, table, lock
        self._documents: dict[tuple[str, bytes], list[Entry]] = {}
        self.hit_tokens = self.published = 0
        self.seconds_saved = 0.0

    # ------------------------------------------------------------------------------------------- finding

    def find(
        self,
        token_ids: Sequence[int],
        base: Span | None = None,
        *,
        salt: str = "",
        owner: Any | None = None,
        agent: str | None = None,
    ) -> Lease | None:
        """Claims the longest stored context that these tokens begin with.

        Args:
            token_ids: a prompt, or the part of it that may be read from the pool, from position 0 on.
            base: a context that the prompt is known to begin with and that the caller has leased.
            salt: whose request it is; nothing of another salt is found.
            owner: who reads; only a weak reference is kept.
            agent: its name, for the workflow's priorities.

        Returns:
            A lease on a context longer than ``base``, or None.
        """
        known = base.end if base is not None else 0
        with self._lock:
            root, skip = self._root(base, salt_digest(salt))
            parts = self._table.match(root, as_tokens(token_ids)[skip:])
            span, _ = self._table.spans(base if skip else None, parts)
            if span is None or span.end <= known:
                return None
            lease = self._lease(span, owner, agent)
            self.hit_tokens += span.end - known
            for part in span.chain:
                new = min(part.num_tokens, part.end - known)
                if new > 0:
                    self.seconds_saved += part.segment.report.seconds * new / part.segment.num_tokens
            return lease

    def find_cell(
        self,
        token_ids: Sequence[int],
        codec: Codec,
        base: Span | None,
        *,
        salt: str = "",
        owner: Any | None = None,
        agent: str | None = None,
    ) -> Lease | None:
        """As :meth:`find`, for one cell of a prompt, whose tokens these are, behind ``base``; found whole or not at all."""
        with self._lock:
            lease = self._pool.lease_of(token_ids, codec, base, owner, salt=salt)
            if lease is not None:
                self._table.touch(lease.entries, agent)
                self.hit_tokens += len(token_ids)
                self.seconds_saved += lease.segment.report.seconds
            return lease

    def stored_tokens(self, token_ids: Sequence[int], base: Span | None = None, *, salt: str = "") -> int:
        """How many tokens of a prompt the pool holds, ``base`` included, in memory or in its store; claims nothing."""
        with self._lock:
            root, skip = self._root(base, salt_digest(salt))
            return max(skip + self._held(root, as_tokens(token_ids)[skip:]), base.end if base is not None else 0)

    def _root(self, base: Span | None, salt: str) -> tuple[Root, int]:
        """The tree that a prompt over ``base`` is found in, and how many of its tokens come before the tree."""
        plain: Root = (salt, ())
        if base is None:
            return plain, 0
        # a lossless context is its tokens: as long as the common tree holds them, prompts are found there whatever they name
        if base.lossless and self._held(plain, as_tokens(base.context_ids.numpy())) == base.end:
            return plain, 0
        return (salt, base.key), base.end

    def _lease(self, span: Span, owner: Any | None, agent: str | None) -> Lease:
        entries = [self._table.get(part.segment.key) for part in span.chain]
        lease = self._pool.lease_entries(span, [entry for entry in entries if entry is not None], owner)
        self._table.touch(lease.entries, agent)
        return lease

    # ---------------------------------------------------------------------------------------- publishing

    def admit(self, segment: KVSegment) -> Entry:
        """Takes a segment in that was built for a caller; the caller holds the lock.

        Raises:
            PoolFullError: no room can be made.
        """
        root, path = None, as_tokens(())
        if segment.codec == ExactCodec.name and segment.complete and not segment.exact_tokens:
            root, skip = self._root(segment.parent, segment.salt)
            path = as_tokens(segment.context_ids.numpy())[skip:]
            if self._held(root, path) < len(path) - segment.num_tokens:
                root = None
        entry = self._table.add(segment, root=root, path=path)
        if segment.exact_tokens:
            self.know_document(entry, segment.salt)
        return entry

    def publish(
        self,
        token_ids: Sequence[int],
        tail: Tail,
        lease: Lease | None,
        base: Span | None = None,
        *,
        salt: str = "",
        seconds: float = 0.0,
        owner: Any | None = None,
        agent: str | None = None,
    ) -> Lease | None:
        """Puts what a request has computed into the pool, and claims the context that it has become.

        Args:
            token_ids: the tokens computed so far, from position 0 on.
            tail: keys and values of the last of them; its storage becomes the segment's. If this returns a lease, the caller
                must not use the tail any more.
            lease: the claim on what came before the tail, released by the caller afterwards.
            base: the context that was named, not found; None for none.
            salt: whose request it is.
            seconds: what computing the tail took.
            owner: who reads on; None if nobody does.
            agent: its name.

        Returns:
            A lease on a context of all these tokens; None if there is no room for them, and nothing has changed.
        """
        end, start, salt = len(token_ids), len(token_ids) - tail.length, salt_digest(salt)
        with self._lock:
            root, skip = self._root(base, salt)
            path = as_tokens(token_ids)[skip:]
            parts = self._table.match(root, path)
            matched = skip + sum(stop - first for _, first, stop in parts)
            if matched < start:
                return None
            parent, entries = self._table.spans(base if skip else None, parts)
            if (parent.end if parent is not None else 0) != matched:
                return None
            if matched == end:  # somebody else has left the same tokens
                assert parent is not None
                return self._lease(parent, owner, agent)
            with self._table.holding(self._table.with_requirements(entries)):
                joined = self._joined(parent, entries, end - matched, lease)
                segment = self._segment(token_ids, tail, matched - start, parent, joined, salt, seconds)
                # while these are held: they make room by being joined, and cannot make it by eviction too
                if not self._table.can_make_room(segment.num_bytes - sum(entry.num_bytes for entry in joined)):
                    self._table.refused += 1
                    return None
            before = [self._table.get(span.segment.key) for span in segment.chain[:-1]]
            # what comes before must not go with the lease or with the entries that are joined
            with self._table.holding([entry for entry in before if entry is not None]):
                if joined and lease is not None:
                    lease.release()
                for entry in reversed(joined):
                    self._table.forget(entry)
                with contextlib.suppress(PoolFullError):
                    entry = self._table.add(segment, root=root, path=path, cached=True)
                    entry.left = entry.left or entry.segment is segment
                    self.published += 1
                    assert entry.segment is not None  # ours, or that of somebody who was sooner
                    return self._lease(entry.segment.whole, owner, agent)
            for held in reversed(before):
                if held is not None:
                    self._table.drop_if_unused(held)
            return None

    def _held(self, root: Root, path: Tokens) -> int:
        return sum(stop - first for _, first, stop in self._table.match(root, path))

    def _joined(self, parent: Span | None, entries: list[Entry], tokens: int, lease: Lease | None) -> list[Entry]:
        """The last entries of a context that nobody else uses and that are joined with the tokens after them, in order."""
        joined: list[Entry] = []
        span = parent
        for entry in reversed(entries):
            assert span is not None
            own = (
                entry in lease.entries if lease is not None else False
            ) + 1  # and the one that holds it for this call
            free = entry.left and not entry.handles and not entry.stored and entry.leases == own
            alone = entry.dependents == len(joined) and not self._table.continued(entry, joined)
            if not (free and alone and span.num_tokens == len(entry.tokens) <= _JOIN_RATIO * tokens):
                break
            joined.insert(0, entry)
            tokens += len(entry.tokens)
            span = span.before
        return joined

    def _segment(
        self,
        token_ids: Sequence[int],
        tail: Tail,
        skip: int,
        parent: Span | None,
        joined: list[Entry],
        salt: str,
        seconds: float,
    ) -> KVSegment:
        """The segment of what a tail holds after its first ``skip`` tokens, behind the tokens of ``joined``."""
        before = [entry.segment for entry in joined if entry.segment is not None]
        start = before[0].start if before else (parent.end if parent is not None else 0)
        parent = before[0].parent if before else parent
        copied = bool(skip or before) or tail.capacity > _MAX_SLACK * tail.length
        layers = []
        for index, (keys, values) in enumerate(tail.held()):
            parts = [segment.layers[index].exact for segment in before]
            if copied:
                keys = torch.cat([*(part.keys for part in parts if part is not None), keys[:, skip:]], 1)
                values = torch.cat([*(part.values for part in parts if part is not None), values[:, skip:]], 1)
            heads, tokens, head_dim = keys.shape
            layers.append(EncodedKV(start, tokens, heads, head_dim, keys.dtype, DenseKV(keys, values), None, None))
        own = torch.tensor(list(token_ids[start:]), dtype=torch.int32)
        spent = seconds * (tail.length - skip) / tail.length + sum(segment.report.seconds for segment in before)
        return KVSegment(
            segment_identity(self._pool.identity, token_ids, salt),
            self._pool.identity,
            ExactCodec.name,
            own,
            tuple(layers),
            BuildReport(spent, spent, tail.nbytes),
            parent,
            salt,
        )

    # ------------------------------------------------------------------------------------ at any position

    def check_anywhere(self, parent: Span | None) -> None:
        """Refuses a segment that cannot be read anywhere.

        Raises:
            InvalidRequestError: it has a parent.
            UnsupportedModelError: the model's RoPE cannot be shifted.
        """
        if parent is not None:
            raise InvalidRequestError(
                "a context that is read anywhere cannot follow another; share its text alone (parent=None)"
            )
        check_shiftable(self._pool.model)

    def know_document(self, entry: Entry, owner: str) -> None:
        """Makes a segment that may stand anywhere findable; ``owner`` is the digest of its salt."""
        with self._lock:
            entries = self._documents.setdefault(self._fingerprint(owner, entry.tokens), [])
            if entry not in entries:
                entries.append(entry)

    def documents(self, token_ids: Sequence[int], after: int = 0, *, salt: str = "") -> list[tuple[int, Entry]]:
        """Stored documents (``anywhere=True``) in a prompt, the longest first where several begin, without overlap.

        Args:
            token_ids: the prompt.
            after: position from which to look.
            salt: whose request it is.

        Returns:
            Position of the first token and entry of each, in order. A document at the very end of the prompt is left out: a
            token after it is needed for the answer.
        """
        tokens, salt = as_tokens(token_ids), salt_digest(salt)
        found: list[tuple[int, Entry]] = []
        with self._lock:
            self._forget_gone()
            known = {mark for (owner, mark) in self._documents if owner == salt}
            position = after
            while known and position + _FINGERPRINT_TOKENS < len(tokens):
                mark = tokens[position : position + _FINGERPRINT_TOKENS].tobytes()
                fitting = [
                    entry
                    for entry in (self._documents[salt, mark] if mark in known else ())
                    if position + len(entry.tokens) < len(tokens)
                    and (tokens[position : position + len(entry.tokens)] == entry.tokens).all()
                ]
                if fitting:
                    # of one text stored in several ways the most exact, whoever came first
                    entry = max(fitting, key=lambda entry: (len(entry.tokens), "exact" in entry.key[2], entry.key[2]))
                    found.append((position, entry))
                    position += len(entry.tokens)
                else:
                    position += 1
        return found

    def bring(self, entry: Entry) -> KVSegment | None:
        """An entry's segment, brought back from the store if need be; None if it cannot be used."""
        with self._lock:
            if self._table.get(entry.key) is not entry or not self._table.bring(entry):
                return None
            return entry.segment

    def place(
        self,
        entry: Entry,
        skip: int,
        before: Lease | Span | None,
        position: int,
        *,
        owner: Any | None = None,
        agent: str | None = None,
    ) -> Lease | None:
        """Claims the context that ends with a document's tokens from ``skip`` on, where its first stands at ``position``."""
        with self._lock:
            if self._table.get(entry.key) is not entry or not self._table.bring(entry):
                return None
            assert entry.segment is not None
            span = before.span if isinstance(before, Lease) else before
            placed = Span(entry.segment, skip, entry.segment.num_tokens, position, span)
            self.hit_tokens += placed.num_tokens
            self.seconds_saved += entry.segment.report.seconds * placed.num_tokens / entry.segment.num_tokens
            return self._lease(placed, owner, agent)

    def _forget_gone(self) -> None:
        for mark, entries in list(self._documents.items()):
            alive = [entry for entry in entries if self._table.get(entry.key) is entry]
            if alive:
                self._documents[mark] = alive
            else:
                del self._documents[mark]

    @staticmethod
    def _fingerprint(salt: str, tokens: Tokens) -> tuple[str, bytes]:
        return salt, tokens[:_FINGERPRINT_TOKENS].tobytes()
