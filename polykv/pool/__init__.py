"""Immutable compressed segments, their leases, and the pool that holds them."""

from polykv.pool.lease import Lease
from polykv.pool.pool import PoolStats, SharedKVPool
from polykv.pool.segment import BuildReport, KVSegment

__all__ = ["BuildReport", "KVSegment", "Lease", "PoolStats", "SharedKVPool"]
