"""A handle on a context that has been prefilled and compressed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from polykv.errors import ContextReleasedError
from polykv.pool import KVSegment, SharedKVPool
from polykv_agents.turns import Turn


class SharedContext:
    """What :meth:`ChatPolyKV.share` returns: immutable, hashable, cheap to pass around.

    Use it as a context manager or call :meth:`release` (a handle that is forgotten is given back too); the pool frees the bytes when the last handle and the last
    reader have gone. It lives in one process: keep it in a closure or in LangGraph's runtime context, not in graph state.
    """

    def __init__(self, pool: SharedKVPool, segment: KVSegment, turns: Sequence[Turn], name: str | None = None) -> None:
        self._pool = pool
        self._segment = segment
        self._turns = tuple(turns)
        self._name = name
        self._give_back = weakref.finalize(self, pool.forget, segment)
        self._give_back.atexit = False

    @property
    def id(self) -> str:
        """SHA-256 over the model's identity and the token ids, 64 hex digits; equal texts have equal ids."""
        return self._segment.identity

    @property
    def name(self) -> str | None:
        """The name given to :meth:`ChatPolyKV.share`."""
        return self._name

    @property
    def salt(self) -> str:
        """Digest of the ``cache_salt`` it was shared under; empty for none."""
        return self._segment.salt

    @property
    def num_tokens(self) -> int:
        """Tokens that every reader takes from the pool."""
        return self._segment.num_tokens

    @property
    def end(self) -> int:
        """Position after its last token; more than ``num_tokens`` only where it was built on another context."""
        return self._segment.end

    @property
    def num_bytes(self) -> int:
        """Bytes allocated in the pool."""
        return self._segment.num_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of one private float16 cache of the same tokens."""
        return self._segment.dense_bytes

    @property
    def compression_ratio(self) -> float:
        """``dense_bytes / num_bytes``."""
        return self._segment.compression_ratio

    @property
    def codec(self) -> str:
        """Name of the codec."""
        return self._segment.codec

    @property
    def build_seconds(self) -> float:
        """Wall time of prefill and compression."""
        return self._segment.report.seconds

    @property
    def peak_build_bytes(self) -> int:
        """Largest sum of dense cache and compressed layers during the build."""
        return self._segment.report.peak_bytes

    @property
    def released(self) -> bool:
        """Whether this handle has been given back."""
        return not self._give_back.alive

    def release(self) -> None:
        """Gives this handle back. Idempotent; requests that are running finish."""
        if self._give_back.detach() is not None:
            self._pool.release(self._segment)

    def reading(self) -> tuple[KVSegment, tuple[Turn, ...]]:
        """Segment and turns, for a reader.

        Raises:
            ContextReleasedError: the handle has been released.
        """
        if self.released:
            raise ContextReleasedError(
                f"the shared context {self.id[:12]} has been released; call share() again for a new handle"
            )
        return self._segment, self._turns

    def __enter__(self) -> SharedContext:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedContext) and (self.id, self.codec) == (other.id, other.codec)

    def __hash__(self) -> int:
        return hash((self.id, self.codec))

    def __repr__(self) -> str:
        state = ", released" if self.released else ""
        return f"SharedContext({self.id[:12]}, {self.num_tokens} tokens, codec={self.codec!r}{state})"

    def __copy__(self) -> SharedContext:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedContext:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a SharedContext lives in its process and cannot be pickled or checkpointed; keep its id in the state, and share "
            "the text again where it is needed"
        )
