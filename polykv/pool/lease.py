"""Leases: who is reading which segment."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polykv.errors import ContextReleasedError

if TYPE_CHECKING:
    from polykv.pool.pool import SharedKVPool
    from polykv.pool.segment import KVSegment, Span
    from polykv.pool.table import Entry


class Lease:
    """A reader's claim on a context: while it lasts all segments of the context stay in the pool.

    Use it as a context manager. ``release`` is idempotent. A lease whose owner object has been collected is taken back
    by :meth:`SharedKVPool.sweep`.

    Args:
        pool: where the segments live.
        span: the context, given as its last span.
        entries: the pool's records of the context's segments.
        owner: the object that reads; only a weak reference is kept. None means the caller releases by hand.
    """

    def __init__(self, pool: SharedKVPool, span: Span, entries: Sequence[Entry], owner: Any | None = None) -> None:
        self.span = span
        self.entries = tuple(entries)
        self._pool = pool
        self._owner = weakref.ref(owner) if owner is not None else None
        self._released = False

    @property
    def segment(self) -> KVSegment:
        """The context's last segment."""
        return self.span.segment

    @property
    def released(self) -> bool:
        """Whether it has been given back."""
        return self._released

    @property
    def orphaned(self) -> bool:
        """Whether its owner is gone."""
        return self._owner is not None and self._owner() is None

    def check(self) -> None:
        """Raises when the lease has been given back.

        Raises:
            ContextReleasedError: it has been released.
        """
        if self._released:
            raise ContextReleasedError("this cache's lease on the pool has been released; make a new cache")

    def release(self) -> None:
        """Gives the lease back. Safe to call again, from any thread."""
        self._pool._end_lease(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
