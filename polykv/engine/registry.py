"""Engines of this process by what they serve, so that many chat-model objects share weights and batch together.

An engine ends with the last chat model that refers to it. Python may find that out anywhere, inside one of our own locks
too, so a finalizer only puts a note into a queue, and a thread of its own (the reaper) closes the engine. The thread lives
as long as there are engines.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedConfig, PreTrainedModel

from polykv.engine.engine import (
    DEFAULT_MAX_BATCH,
    DEFAULT_MAX_WAITING,
    DETERMINISTIC_PREFIX_CACHE,
    Engine,
    check_counts,
)
from polykv.engine.request import Request
from polykv.errors import EngineClosedError, InvalidRequestError, ModelNotFoundError
from polykv.models.loading import (
    ProgressCallback,
    check_device,
    check_dtype,
    check_source,
    check_weights,
    load_model,
)
from polykv.pool.budget import checked_budget
from polykv.pool.segment import EXACT

OBJECT_PREFIX = "object:"


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made from. Two chat models with equal specs share one engine.

    Attributes:
        model: a name for :func:`polykv.load_model`, or ``object:...`` for a model that was handed over loaded.
        device: see :func:`polykv.load_model`.
        dtype: see :func:`polykv.load_model`.
        revision: see :func:`polykv.load_model`.
        trust_remote_code: see :func:`polykv.load_model`.
        max_batch: requests that run at once.
        num_threads: torch threads of the engine, or None for torch's default.
        max_waiting: requests that wait.
        deterministic: see :class:`Engine`.
        weights: see :func:`polykv.load_model`.

    Raises:
        InvalidRequestError: a value is out of range or unknown.
    """

    model: str
    device: str | None = None
    dtype: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    max_batch: int = DEFAULT_MAX_BATCH
    num_threads: int | None = None
    max_waiting: int = DEFAULT_MAX_WAITING
    deterministic: bool = False
    weights: str | None = None
    prefix_cache: bool | None = None
    max_pool_bytes: float | None = None
    pool_dir: str | None = None
    prefix_codec: str = EXACT

    def __post_init__(self) -> None:
        check_counts(max_batch=self.max_batch, max_waiting=self.max_waiting, num_threads=self.num_threads)
        check_device(self.device)
        check_dtype(self.dtype)
        check_weights(self.weights)
        checked_budget(self.max_pool_bytes, torch.device("cpu"))
        if self.deterministic and self.prefix_cache:
            raise InvalidRequestError(DETERMINISTIC_PREFIX_CACHE)

    @property
    def weights_key(self) -> tuple[object, ...]:
        """What decides which weights are loaded; engines that differ only in batching share them."""
        return (self.model, self.device, self.dtype, self.revision, self.trust_remote_code, self.weights)


@dataclass(eq=False)
class LoadedModel:
    """Weights and tokenizer, kept alive by the engines that use them.

    Attributes:
        model: the weights.
        tokenizer: of the model.
        request_processors: see :class:`Engine`; every engine made from these weights gets it.
    """

    model: PreTrainedModel
    tokenizer: Any
    request_processors: Callable[[Request], Sequence[LogitsProcessor]] | None = None


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None
        self.weights: LoadedModel | None = None
        self.references = 0


_lock = threading.Lock()
_entries: dict[EngineSpec, _Entry] = {}
_weights: weakref.WeakValueDictionary[tuple[object, ...], LoadedModel] = weakref.WeakValueDictionary()
_abandoned: queue.SimpleQueue[tuple[EngineSpec, _Entry] | None] = queue.SimpleQueue()  # its put() is reentrant
_reaper: threading.Thread | None = None


def register_object(model: PreTrainedModel, tokenizer: Any) -> tuple[str, LoadedModel]:
    """Gives a loaded model a name under which this process finds it, as long as somebody keeps the result."""
    with _lock:
        for key, known in _weights.items():
            if known.model is model and known.tokenizer is tokenizer and str(key[0]).startswith(OBJECT_PREFIX):
                return str(key[0]), known
        base = getattr(model.config, "_name_or_path", "") or type(model).__name__
        # random, so that a pickle or a cached answer of another process never meets this model
        name = f"{OBJECT_PREFIX}{base}#{secrets.token_hex(4)}"
        loaded = LoadedModel(model, tokenizer)
        _weights[EngineSpec(name).weights_key] = loaded
        return name, loaded


class EngineReference:
    """One user's hold on an engine, which is made at first use and closed with its last reference.

    Copies of a chat model share one reference; copying and deep-copying never duplicate weights.

    Args:
        spec: what to serve.
        weights: keeps a model that was handed over loaded alive; None for named models.

    Raises:
        ModelNotFoundError: the model's file, folder or package is not there.
    """

    def __init__(self, spec: EngineSpec, weights: LoadedModel | None = None) -> None:
        if spec.model.startswith(OBJECT_PREFIX):
            weights = weights or _weights.get(spec.weights_key)
            if weights is None:
                raise ModelNotFoundError(
                    f"model {spec.model!r} was handed over as an object and lives in no engine of this process any more; "
                    "pass model= and tokenizer= again"
                )
        else:
            check_source(spec.model)
        self.spec = spec
        self._weights = weights
        with _lock:
            self._entry = _entries.setdefault(spec, _Entry())
            self._entry.references += 1
            _start_reaper()
        self._finalizer = weakref.finalize(self, _abandon, spec, self._entry)
        self._finalizer.atexit = False

    def engine(self, progress: ProgressCallback | None = None) -> Engine:
        """The engine, loading the model at the first call.

        Raises:
            EngineClosedError: this reference has been closed.
            ModelNotFoundError, UnsupportedModelError: see :func:`polykv.load_model` and :class:`Engine`.
        """
        if not self._finalizer.alive:
            raise EngineClosedError("this chat model has been closed; make a new one")
        entry, spec = self._entry, self.spec
        with entry.lock:
            if entry.engine is None or entry.engine.closed:
                weights = self._weights or _weights.get(spec.weights_key)
                if weights is None:
                    weights = LoadedModel(
                        *load_model(
                            spec.model,
                            device=spec.device,
                            dtype=spec.dtype,
                            revision=spec.revision,
                            trust_remote_code=spec.trust_remote_code,
                            weights=spec.weights,
                            progress=progress,
                        )
                    )
                    _weights[spec.weights_key] = weights
                entry.weights = weights
                entry.engine = Engine(
                    weights.model,
                    weights.tokenizer,
                    max_batch=spec.max_batch,
                    max_waiting=spec.max_waiting,
                    num_threads=spec.num_threads,
                    deterministic=spec.deterministic,
                    prefix_cache=spec.prefix_cache,
                    prefix_codec=spec.prefix_codec,
                    max_pool_bytes=spec.max_pool_bytes,
                )
                if spec.pool_dir is not None:
                    entry.engine.pool.open_store(spec.pool_dir)
                entry.engine.request_processors = weights.request_processors
            return entry.engine

    @property
    def config(self) -> PreTrainedConfig | None:
        """The model's configuration, if the model is in memory."""
        weights = self._weights or self._entry.weights
        return None if weights is None else weights.model.config

    @property
    def loaded(self) -> bool:
        """Whether :meth:`engine` would return at once."""
        return self._entry.engine is not None

    def close(self) -> None:
        """Gives the engine up; the last reference closes it. Idempotent."""
        if self._finalizer.detach() is not None:
            _release(self.spec, self._entry, wait=True)
            _abandoned.put(None)  # the reaper may be able to go

    def __copy__(self) -> EngineReference:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineReference:
        return self

    def __reduce__(self) -> tuple[type[EngineReference], tuple[EngineSpec]]:
        return EngineReference, (self.spec,)


def _abandon(spec: EngineSpec, entry: _Entry) -> None:
    _abandoned.put((spec, entry))


def _start_reaper() -> None:
    global _reaper
    if _reaper is None:
        _reaper = threading.Thread(target=_reap, name="polykv-reaper", daemon=True)
        _reaper.start()


def _reap() -> None:
    global _reaper
    while True:
        abandoned = _abandoned.get()
        if abandoned is not None:
            _release(*abandoned, wait=False)
        with _lock:
            if not _entries and _abandoned.empty():
                _reaper = None
                return


def _forget_parent() -> None:
    """A forked child has none of the parent's threads, and perhaps a lock that one of them held."""
    global _lock, _abandoned, _reaper
    _lock, _abandoned, _reaper = threading.Lock(), queue.SimpleQueue(), None
    _entries.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


def _release(spec: EngineSpec, entry: _Entry, *, wait: bool) -> None:
    with _lock:
        entry.references -= 1
        if entry.references:
            return
        if _entries.get(spec) is entry:
            del _entries[spec]
        engine, entry.engine, entry.weights = entry.engine, None, None
    if engine is not None:
        engine.close(wait=wait)
