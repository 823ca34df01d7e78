"""Segments on disk: what a pool writes into a store, and what it must be told before it reads it back.

A stored segment names the segments it was computed over, so a store holds the tree and not only its leaves. It is found again if
it belongs to the pool's model and tokenizer (its identity, a hash chain over both and all token ids, must come out the same), and
it is read only if the model still answers to it as it did: a few of its last tokens are computed once more behind it, when it
is written and when it is read, and the logits must agree.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from polykv.errors import PolyKVError, StoreError
from polykv.models.identity import segment_identity
from polykv.models.step import Piece, run_step
from polykv.models.support import embedding_weight, head_dim, layer_windows, max_positions, num_kv_heads
from polykv.models.tails import Tail
from polykv.pool.index import as_tokens
from polykv.pool.prefix import ANYWHERE_EXACT_TOKENS
from polykv.pool.segment import EXACT, BuildReport, KVSegment, SegmentKey, Span, SpanKey
from polykv.pool.store import SegmentStore
from polykv.pool.table import Entry, Root, Table, entry_name
from polykv_kernels import DenseKV, EncodedKV
from polykv_kernels.layouts import Int8Keys, LloydMax3Values

if TYPE_CHECKING:
    from polykv.pool.pool import SharedKVPool

logger = logging.getLogger(__name__)

FORMAT = 1
PROBE_TOKENS = 4
"""Tokens that are computed once more behind a segment to see whether it still gives the logits it gave."""
PROBE_TOP = 16
_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.25}
"""How far logits may move between machines, kernels and versions; another model's are off by whole units."""


@dataclass(frozen=True)
class SaveReport:
    """What :meth:`SharedKVPool.save` did.

    Attributes:
        segments: segments written.
        num_bytes: bytes written.
        known: segments that the store had already.
        refused: reasons by segment name, for what could not be written.
    """

    segments: int = 0
    num_bytes: int = 0
    known: int = 0
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadReport:
    """What a store offers to a pool.

    Attributes:
        segments: segments that the pool can use; they are read when they are needed.
        tokens: their tokens.
        refused: reasons by segment name, for the others. They stay where they are.
    """

    segments: int = 0
    tokens: int = 0
    refused: dict[str, str] = field(default_factory=dict)


class _Probe(Protocol):
    def __call__(self, span: Span) -> dict[str, Any]: ...


class DiskTier:
    """Moves entries between a table and a store.

    Args:
        pool: whose entries.
        table: its table.
        store: where they go.
    """

    def __init__(self, pool: SharedKVPool, table: Table, store: SegmentStore) -> None:
        self._pool, self._table, self.store = pool, table, store
        self._refused: set[str] = set()  # stored, but of no use: written anew if they are computed anew

    # -------------------------------------------------------------------------------------------- writing

    def demote(self, entry: Entry) -> bool:
        """See :class:`polykv.pool.table.Tier`."""
        if self.store.read_only:
            return False
        try:
            self.write(entry)
        except Exception as error:  # whatever it is, the request that needs the room goes on
            logger.warning("segment %s is dropped, it cannot go into the store: %s", entry.name[:12], _reason(error))
            return False
        return True

    def write(self, entry: Entry) -> bool:
        """Writes an entry; False if it is there already.

        Raises:
            StoreError: it cannot be written.
        """
        segment = entry.segment
        assert segment is not None
        if entry.name in self.store:
            if entry.name not in self._refused:
                return False
            self.store.remove(entry.name)
        tensors = {"token_ids": segment.token_ids}
        for index, layer in enumerate(segment.layers):
            tensors |= {f"{index:03d}.{name}": tensor for name, tensor in layer.tensors().items()}
        self._make_room(entry)
        written = self.store.put(entry.name, tensors, self._metadata(entry, segment), tokens=segment.num_tokens)
        self._refused.discard(entry.name)
        return written

    def _make_room(self, entry: Entry) -> None:
        """Removes stored segments that nothing builds on, the least recently used first, until the entry fits."""
        if self.store.max_bytes is None:
            return
        wanted = entry.num_bytes + (1 << 16)
        if wanted > self.store.max_bytes:
            return  # nothing that could be removed helps
        while self.store.nbytes + wanted > self.store.max_bytes:
            known = {other.name for other in self._table}
            strangers = [name for name in self.store.names() if name not in known]
            if strangers:  # another process's, or of another model
                self._remove(strangers[0])
                continue
            free = [other for other in self._table if other.stored and not self._table.continued(other)]
            free = [other for other in free if other is not entry and (other.unused or other.resident)]
            if not free:
                return  # put() says that it does not fit
            victim = min(free, key=lambda other: other.last_used)
            self._remove(victim.name)
            victim.stored = False
            if not victim.resident:
                self._table.forget(victim)

    def _remove(self, name: str) -> None:
        try:
            self.store.remove(name)
        except StoreError:
            if name in self.store:
                raise  # else another process was faster

    def _metadata(self, entry: Entry, segment: KVSegment) -> dict[str, Any]:
        parents = segment.parent.chain if segment.parent is not None else ()
        return {
            "format": FORMAT,
            "kind": "anywhere" if segment.exact_tokens else "cached" if entry.cached else "context",
            "model": segment.model.name,
            "identity": segment.identity,
            "codec": segment.codec,
            "exact_tokens": segment.exact_tokens,
            "salt": segment.salt,
            "key": segment.key,
            "parent": entry_name(parents[-1].segment.key) if parents else None,
            "spans": [[entry_name(s.segment.key), s.first, s.stop, s.at] for s in parents],
            "base": None if entry.root is None else entry.root[1],
            "requires": [required.name for required in entry.requires],
            "seconds": segment.report.seconds,
            "agents": sorted(entry.agents),
            "dtype": str(segment.layers[0].dtype),
            "layers": [
                {
                    "start": layer.start,
                    "tokens": layer.num_tokens,
                    "packed": layer.keys.num_tokens if layer.keys is not None else 0,
                    "sign_seed": layer.values.sign_seed if layer.values is not None else None,
                }
                for layer in segment.layers
            ],
            "probe": self.probe(segment.whole),
        }

    # -------------------------------------------------------------------------------------------- reading

    def load(self) -> LoadReport:
        """Makes known to the table what the store holds for the pool's model. Nothing but token ids is read."""
        for entry in self._table:  # another process may have removed it, and the store may be another one
            if entry.resident:
                entry.stored = entry.stored and entry.name in self.store
        refused: dict[str, str] = {}
        found: dict[str, tuple[dict[str, Any], Tensor, int]] = {}
        for name in self.store.names():
            try:
                manifest = self.store.manifest(name)
                tensors, _ = self.store.get(name, verify=False)
                found[name] = dict(manifest.metadata), tensors["token_ids"].clone(), manifest.data_bytes
            except StoreError as error:
                refused[name] = str(error)
            except Exception as error:
                refused[name] = f"it is no segment of a pool ({type(error).__name__}: {error})"
        count = tokens = 0
        waiting = dict(found)
        progress = True
        while waiting and progress:
            progress = False
            for name in list(waiting):
                metadata, ids, num_bytes = waiting[name]
                try:
                    requires = self._required(metadata, waiting)
                    if requires is None:
                        continue
                    self._admit(name, metadata, ids, num_bytes, requires, found)
                    count, tokens = count + 1, tokens + len(ids)
                except StoreError as error:
                    refused[name] = str(error)
                except Exception as error:  # the file may hold anything
                    refused[name] = f"its manifest does not fit ({type(error).__name__}: {error})"
                del waiting[name]
                progress = True
        refused |= dict.fromkeys(waiting, "the segments that it was computed over refer to each other")
        for name, reason in refused.items():
            logger.warning("stored segment %s is not used: %s", name[:12], reason)
        return LoadReport(count, tokens, refused)

    def _required(self, metadata: dict[str, Any], waiting: dict[str, Any]) -> list[Entry] | None:
        """The entries that a stored segment needs; None while some of them have not been looked at."""
        needed = []
        by_name = {entry.name: entry for entry in self._table}
        for name in metadata["requires"]:
            if name in waiting:
                return None
            if name not in by_name:
                raise StoreError(f"a segment that it was computed over ({str(name)[:12]}) is not there, or not usable")
            needed.append(by_name[name])
        return needed

    def _admit(
        self,
        name: str,
        metadata: dict[str, Any],
        ids: Tensor,
        num_bytes: int,
        requires: list[Entry],
        found: dict[str, tuple[dict[str, Any], Tensor, int]],
    ) -> None:
        if metadata["format"] != FORMAT:
            raise StoreError(f"its format is {metadata['format']!r}; this version reads {FORMAT}")
        if ids.dtype != torch.int32 or ids.ndim != 1 or not len(ids):
            raise StoreError("its token ids are malformed")
        if int(ids.min()) < 0 or int(ids.max()) >= embedding_weight(self._pool.model).shape[0]:
            raise StoreError("its token ids are not in the model's vocabulary")
        key = _key_of(metadata["key"])
        if entry_name(key) != name:
            raise StoreError("its name is not that of its key")
        if key[2] != (
            f"{metadata['codec']}/{metadata['exact_tokens']}" if metadata["exact_tokens"] else metadata["codec"]
        ):
            raise StoreError("its codec is not that of its key")
        exact = metadata["exact_tokens"]
        if type(exact) is not int or exact not in (0, ANYWHERE_EXACT_TOKENS) or (exact and metadata["spans"]):
            raise StoreError(f"{exact!r} exact tokens are not what a segment of this version has")
        # the identity covers model, tokenizer, salt and every token id, its parents' too
        before: list[int] = []
        for parent, first, stop, _ in metadata["spans"]:
            before += found[parent][1][first:stop].tolist() if parent in found else self._ids(parent)[first:stop]
        path = [*before, *ids.tolist()]
        if segment_identity(self._pool.identity, path, metadata["salt"]) != metadata["identity"] or (
            key[1] != metadata["identity"]
        ):
            raise StoreError(
                f"it belongs to another model or tokenizer than this pool's {self._pool.identity.name!r} (it says "
                f"{metadata['model']!r}), or its token ids have been changed"
            )
        if self._table.get(key) is not None:
            entry = self._table.get(key)
            assert entry is not None
            entry.stored = True
            return
        root: Root | None = None
        skip = 0
        if metadata["base"] is not None:
            base = _span_key(metadata["base"])
            root = (metadata["salt"], base)
            skip = sum(stop - first for _, _, first, stop, _ in base)
            if not 0 <= skip <= len(before) or metadata["codec"] != EXACT or exact:
                raise StoreError("it cannot stand where it says that prompts find it")
            # a lossless context is its tokens, whatever it was cut into
            if base:
                sound = base in (key[0][: len(base)], self._lossless(before, metadata["salt"], skip))
            else:
                sound = key[0] == self._lossless(before, metadata["salt"], len(before))
            if not sound:
                raise StoreError("the context that it says it was computed over is not the one of its key")
        agents = {str(agent) for agent in metadata["agents"]}
        entry = self._table.add_stored(
            key,
            as_tokens(ids.numpy()),
            num_bytes,
            float(metadata["seconds"]),
            requires,
            root,
            as_tokens(path)[skip:],
        )
        assert entry is not None  # or it would have been found by its key
        entry.agents.update(agents)
        if metadata["exact_tokens"]:
            self._pool.prefix.know_document(entry, metadata["salt"])

    def _lossless(self, tokens: list[int], salt: str, count: int) -> SpanKey:
        """Key of the first tokens as a context that is stored exactly."""
        if not count:
            return ()
        return ((segment_identity(self._pool.identity, tokens[:count], salt), EXACT, 0, count, 0),)

    def _ids(self, name: str) -> list[int]:
        return next(entry.tokens.tolist() for entry in self._table if entry.name == name)

    def restore(self, entry: Entry) -> KVSegment | None:
        """See :class:`polykv.pool.table.Tier`. What cannot be used is logged with the reason, and its file stays."""
        try:
            return self.read(entry)
        except Exception as error:  # whatever a file holds, the prompt can still be computed
            logger.warning("stored segment %s is not used: %s", entry.name[:12], _reason(error))
            self._refused.add(entry.name)
        return None

    def read(self, entry: Entry) -> KVSegment:
        """A segment from its file, mapped into memory, checked and probed.

        Raises:
            StoreError: the file is damaged or does not belong to this model; the message says why.
        """
        tensors, manifest = self.store.get(entry.name, verify=True)
        metadata = manifest.metadata
        by_name = {required.name: required for required in entry.requires}
        parent: Span | None = None
        for name, first, stop, at in metadata["spans"]:
            before = by_name[name].segment
            assert before is not None
            parent = Span(before, first, stop, at, parent)
        device = embedding_weight(self._pool.model).device
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        ids = tensors["token_ids"].cpu()
        if ids.dtype != torch.int32 or as_tokens(ids.numpy()).tolist() != entry.tokens.tolist():
            raise StoreError("its token ids are not those that it is known by")
        start = parent.end if parent is not None else 0
        try:
            layers = self._layers(metadata, tensors, start, len(ids))
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"its tensors do not fit together ({error})") from error
        segment = KVSegment(
            metadata["identity"],
            self._pool.identity,
            metadata["codec"],
            ids,
            layers,
            BuildReport(entry.seconds, entry.seconds, 0),
            parent,
            metadata["salt"],
            metadata["exact_tokens"],
        )
        if (entry.root is not None or segment.exact_tokens) and not segment.complete:
            raise StoreError("its layers do not hold all of its tokens")
        if any(
            layer.num_exact < (layer.num_tokens if segment.codec == EXACT else min(segment.exact_tokens, len(ids)))
            for layer in layers
        ):
            raise StoreError("its layers hold fewer exact tokens than they should")
        if segment.key != entry.key:
            raise StoreError("it was computed over other segments than it says")
        self._check_probe(segment, metadata["probe"])
        return segment

    def _layers(
        self, metadata: dict[str, Any], tensors: dict[str, Tensor], start: int, tokens: int
    ) -> tuple[EncodedKV, ...]:
        config = self._pool.model.config
        dtype, heads, dim = embedding_weight(self._pool.model).dtype, num_kv_heads(config), head_dim(config)
        windows = layer_windows(config)
        if len(metadata["layers"]) != len(windows):
            raise StoreError(f"it has {len(metadata['layers'])} layers, the model has {len(windows)}")
        layers = []
        for index, (facts, window) in enumerate(zip(metadata["layers"], windows, strict=True)):
            held, packed = int(facts["tokens"]), int(facts["packed"])
            least = tokens if window is None else min(tokens, window - 1)
            if not least <= held <= tokens or int(facts["start"]) != start + tokens - held:
                raise StoreError(
                    f"layer {index} holds {held} tokens from position {facts['start']} on, not what it should"
                )

            def of(name: str, index: int = index) -> Tensor | None:
                return tensors.get(f"{index:03d}.{name}")

            exact = keys = values = None
            if (exact_keys := of("exact.keys")) is not None:
                if exact_keys.dtype != dtype:
                    raise StoreError(f"layer {index} is in {exact_keys.dtype}, the model in {dtype}")
                exact = DenseKV(exact_keys, _needed(of("exact.values")))
            if packed:
                keys = Int8Keys(_needed(of("keys.codes")), _needed(of("keys.scales")), packed)
                values = LloydMax3Values(_needed(of("values.codes")), _needed(of("values.scales")), facts["sign_seed"])
            layers.append(EncodedKV(int(facts["start"]), held, heads, dim, dtype, exact, keys, values))
        return tuple(layers)

    # -------------------------------------------------------------------------------------------- probing

    def probe(self, span: Span) -> dict[str, Any] | None:
        """What the model says after a context: the largest logits after some of its last tokens again; None without room."""
        model = self._pool.model
        count = min(PROBE_TOKENS, span.segment.num_tokens, max_positions(model.config) - span.end)
        if count < 1:
            return None
        ids = span.segment.token_ids[-count:].tolist()
        tail = Tail(model, limit=count)
        tail.reserve(count)
        logits = run_step(model, [Piece(ids, span.end, tail, span.chain)])[0].float().cpu()
        tail.release()
        top = logits.topk(min(PROBE_TOP, len(logits)))
        return {
            "tokens": ids,
            "ids": top.indices.tolist(),
            "logits": top.values.tolist(),
            "logsumexp": float(torch.logsumexp(logits, 0)),
        }

    def _check_probe(self, segment: KVSegment, stored: dict[str, Any] | None) -> None:
        model = self._pool.model
        count = min(PROBE_TOKENS, segment.num_tokens, max_positions(model.config) - segment.end)
        if stored is None and count < 1:
            return
        if stored is None or count < 1 or stored["tokens"] != segment.token_ids[-count:].tolist():
            raise StoreError("its probe is not of its own tokens")
        ids = segment.token_ids[-count:].tolist()
        tail = Tail(model, limit=len(ids))
        tail.reserve(len(ids))
        logits = run_step(model, [Piece(ids, segment.end, tail, segment.chain)])[0].float().cpu()
        tail.release()
        if len(set(stored["ids"])) != min(PROBE_TOP, len(logits)):
            raise StoreError("its probe is malformed")
        now = [*logits[stored["ids"]].tolist(), float(torch.logsumexp(logits, 0))]
        then = [*stored["logits"], stored["logsumexp"]]
        differences = [abs(a - b) for a, b in zip(now, then, strict=True)]
        off = max(differences, key=lambda x: math.inf if math.isnan(x) else x)
        limit = _TOLERANCE.get(embedding_weight(model).dtype, 0.25)
        if not off <= limit:
            raise StoreError(
                f"the model's logits after it are off by {off:.3g} (at most {limit} is allowed): other weights or a damaged "
                "segment; compute it anew"
            )


def save_entries(tier: DiskTier, entries: Iterable[Entry]) -> SaveReport:
    """Writes entries, those that others build on first."""
    written = num_bytes = known = 0
    refused: dict[str, str] = {}
    for entry in entries:
        try:
            if tier.write(entry):
                written, num_bytes = written + 1, num_bytes + tier.store.manifest(entry.name).nbytes
            else:
                known += 1
        except Exception as error:
            refused[entry.name] = _reason(error)
    return SaveReport(written, num_bytes, known, refused)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, PolyKVError) else f"{type(error).__name__}: {error}"


def _needed(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise KeyError("a tensor is missing")
    return tensor


def _span_key(value: Sequence[Any]) -> tuple[tuple[str, str, int, int, int], ...]:
    links = []
    for identity, form, first, stop, shift in value:
        if not (isinstance(identity, str) and isinstance(form, str)):
            raise StoreError("its key is malformed")
        links.append((identity, form, int(first), int(stop), int(shift)))
    return tuple(links)


def _key_of(value: Any) -> SegmentKey:
    parent, identity, form = json.loads(json.dumps(value))
    if not (isinstance(identity, str) and isinstance(form, str)):
        raise StoreError("its key is malformed")
    return _span_key(parent), identity, form
