"""Every error of the library. Messages say what was given, what is allowed, and what to do."""

from __future__ import annotations

__all__ = [
    "ContextReleasedError",
    "EngineClosedError",
    "EngineOverloaded",
    "IncompatiblePoolError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "NonFiniteLogitsError",
    "PolyKVError",
    "PoolFullError",
    "PromptTooLongError",
    "RequestCancelledError",
    "RequestTimeoutError",
    "SharedContextMissing",
    "StoreError",
    "UnknownCodecError",
    "UnsupportedModelError",
]


class PolyKVError(Exception):
    """Base class."""


class UnknownCodecError(PolyKVError, ValueError):
    """A codec name that is not registered."""


class UnsupportedModelError(PolyKVError, ValueError):
    """A model whose architecture, layer type, RoPE type or head dim cannot be served."""


class ModelNotFoundError(PolyKVError, FileNotFoundError):
    """A model folder, file or packaged model that is not there."""


class IncompatiblePoolError(PolyKVError, ValueError):
    """A pool or segment of another model, revision or tokenizer, or inputs that do not continue it."""


class InvalidRequestError(PolyKVError, ValueError):
    """A request value out of range, or of the wrong kind."""


class PromptTooLongError(InvalidRequestError):
    """Context, prompt and answer together exceed the model's positions."""


class ContextReleasedError(PolyKVError, RuntimeError):
    """A shared context or lease that has been released."""


class SharedContextMissing(PolyKVError, LookupError):
    """A shared context is asked for by an id or name that no live handle of this process has."""


class PoolFullError(PolyKVError, MemoryError):
    """The pool's budget has no room; nothing has been evicted or lost."""


class NonFiniteLogitsError(PolyKVError, ArithmeticError):
    """The model returned NaN for a request; only that request fails."""


class EngineClosedError(PolyKVError, RuntimeError):
    """The engine has been closed, has died, or belongs to the parent process."""


class EngineOverloaded(PolyKVError, RuntimeError):
    """The engine's queue is full; nothing was queued. Ask again later, or with fewer calls at once."""


class RequestTimeoutError(PolyKVError, TimeoutError):
    """The request's own timeout is over. It has been dropped."""


class StoreError(PolyKVError, RuntimeError):
    """A store on disk, or a file in it, that cannot be used; the message says why. The rest of the store stays usable."""


class RequestCancelledError(PolyKVError):
    """The request was cancelled before it finished."""
