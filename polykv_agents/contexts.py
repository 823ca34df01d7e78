"""The shared contexts of one engine: found by id or name, and built from cache marks once for all callers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from polykv.engine import Engine
from polykv.errors import RequestCancelledError, SharedContextMissing
from polykv.models.identity import salt_digest
from polykv.pool import KVSegment
from polykv_agents.shared_context import SharedContext

Key = tuple[str, str]
"""Identity and codec; of a mark's context the identities of all segments it is read with, joined by slashes."""


class Contexts:
    """Live contexts of an engine. Thread-safe.

    Handles that users hold are only remembered, so that they still go with their last user; contexts of marks are the pool's, which
    keeps them until it needs room.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # several handles of one text are equal, and each may be released by itself
        self._known: list[weakref.ref[SharedContext]] = []
        self._named: weakref.WeakValueDictionary[tuple[str, str], SharedContext] = weakref.WeakValueDictionary()
        self._building: dict[Key, Future[KVSegment]] = {}

    def remember(self, context: SharedContext, name: str | None = None) -> None:
        """Makes a handle known by its id, and by a name; the newest of a name counts."""
        with self._lock:
            self._known = [held for held in self._known if (other := held()) is not None and not other.released]
            self._known.append(weakref.ref(context))
            if name is not None:
                self._named[context.salt, name] = context

    def find(self, reference: str, salt: str = "") -> SharedContext | None:
        """The live context of a name or id, shared under the same salt; None if there is none."""
        owner = salt_digest(salt)
        with self._lock:
            named = self._named.get((owner, reference))
            if named is not None and not named.released:
                return named
            for held in reversed(self._known):
                context = held()
                if context is not None and (context.id, context.salt) == (reference, owner) and not context.released:
                    return context
            return None

    def get(self, reference: str, salt: str = "") -> SharedContext:
        """As :meth:`find`.

        Raises:
            SharedContextMissing: there is none.
        """
        context = self.find(reference, salt)
        if context is None:
            raise SharedContextMissing(
                f"no live shared context has the id or name {reference[:64]!r} in this process: it was released, or made in "
                "another process. Share its text again: llm.share(text), or llm.with_context(id, rebuild=text)"
            )
        return context

    def build_once(self, key: Key, build: Callable[[], KVSegment]) -> tuple[KVSegment, bool]:
        """Builds a context of a mark, or waits for another thread that does.

        Returns:
            The context, and whether this call built it.
        """
        while True:
            with self._lock:
                future = self._building.get(key)
                if future is None:
                    future = self._building[key] = Future()
                    break
            try:
                return future.result(), False
            except RequestCancelledError:
                continue  # the one who built was interrupted: another builds
        try:
            segment = build()
        except BaseException as error:
            with self._lock:
                del self._building[key]
            interrupted = RequestCancelledError("the call that built this context was interrupted")
            future.set_exception(error if isinstance(error, Exception) else interrupted)
            raise
        with self._lock:
            del self._building[key]
        future.set_result(segment)
        return segment, True


_registries: weakref.WeakKeyDictionary[Engine, Contexts] = weakref.WeakKeyDictionary()
_registries_lock = threading.Lock()


def contexts_of(engine: Engine) -> Contexts:
    """The engine's contexts."""
    with _registries_lock:
        return _registries.setdefault(engine, Contexts())
