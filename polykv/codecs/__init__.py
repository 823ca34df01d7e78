"""How keys and values are stored: one file a codec."""

from polykv.codecs.base import Codec
from polykv.codecs.presets import CODECS, DEFAULT_CODEC, get_codec

__all__ = ["CODECS", "DEFAULT_CODEC", "Codec", "get_codec"]
