"""The shared contexts of one engine: found by id or name, and built from cache marks once for all callers."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from polykv.engine import Engine
from polykv.errors import RequestCancelledError, SharedContextMissing
from polykv_agents.shared_context import SharedContext

MAX_MARKED = 16
"""Contexts that are kept because a mark asked for them; the least recently used goes first. Explicit ones do not count."""

Key = tuple[str, str]
"""Identity and codec; of a mark's context the identities of all segments it is read with, joined by slashes."""


class Contexts:
    """Live contexts of an engine. Thread-safe.

    Handles that users hold are only remembered, so that they still go with their last user; contexts of marks have no
    holder but this.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # several handles of one text are equal, and each may be released by itself
        self._known: list[weakref.ref[SharedContext]] = []
        self._named: weakref.WeakValueDictionary[str, SharedContext] = weakref.WeakValueDictionary()
        self._marked: OrderedDict[Key, SharedContext] = OrderedDict()
        self._building: dict[Key, Future[SharedContext]] = {}

    def remember(self, context: SharedContext, name: str | None = None) -> None:
        """Makes a handle known by its id, and by a name; the newest of a name counts."""
        with self._lock:
            self._known = [held for held in self._known if (other := held()) is not None and not other.released]
            self._known.append(weakref.ref(context))
            if name is not None:
                self._named[name] = context

    def find(self, reference: str) -> SharedContext | None:
        """The live context of a name or id; None if there is none."""
        with self._lock:
            named = self._named.get(reference)
            if named is not None and not named.released:
                return named
            for held in reversed(self._known):
                context = held()
                if context is not None and context.id == reference and not context.released:
                    return context
            return None

    def get(self, reference: str) -> SharedContext:
        """As :meth:`find`.

        Raises:
            SharedContextMissing: there is none.
        """
        context = self.find(reference)
        if context is None:
            raise SharedContextMissing(
                f"no live shared context has the id or name {reference[:64]!r} in this process: it was released, or made in "
                "another process. Share its text again: llm.share(text), or llm.with_context(id, rebuild=text)"
            )
        return context

    def marked(self, key: Key) -> SharedContext | None:
        """A context of a mark that is there already."""
        with self._lock:
            context = self._marked.get(key)
            if context is None or context.released:
                return None
            self._marked.move_to_end(key)
            return context

    def build_marked(self, key: Key, build: Callable[[], SharedContext]) -> tuple[SharedContext, bool]:
        """Builds a context of a mark, or waits for another thread that does.

        Returns:
            The context, and whether this call built it.
        """
        while True:
            context = self.marked(key)
            if context is not None:
                return context, False
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
            context = build()
        except BaseException as error:
            with self._lock:
                del self._building[key]
            interrupted = RequestCancelledError("the call that built this context was interrupted")
            future.set_exception(error if isinstance(error, Exception) else interrupted)
            raise
        with self._lock:
            self._marked[key] = context
            # dropping the reference and not releasing: a call that holds it may be about to read it
            while len(self._marked) > MAX_MARKED:
                self._marked.popitem(last=False)
            del self._building[key]
        future.set_result(context)
        return context, True

    def clear_marked(self) -> int:
        """Forgets the contexts of marks; what nobody reads is freed. Returns how many there were."""
        with self._lock:
            count = len(self._marked)
            self._marked.clear()
            return count


_registries: weakref.WeakKeyDictionary[Engine, Contexts] = weakref.WeakKeyDictionary()
_registries_lock = threading.Lock()


def contexts_of(engine: Engine) -> Contexts:
    """The engine's contexts."""
    with _registries_lock:
        return _registries.setdefault(engine, Contexts())
