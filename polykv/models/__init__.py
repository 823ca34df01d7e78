"""Loading models, telling them apart, and the hook that lets their attention read a pool."""

from polykv.models.attention import attach
from polykv.models.cache import PooledCache
from polykv.models.identity import ModelIdentity, identity_of
from polykv.models.loading import load_model

__all__ = ["ModelIdentity", "PooledCache", "attach", "identity_of", "load_model"]
