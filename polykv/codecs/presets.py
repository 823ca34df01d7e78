"""The codecs by name."""

from __future__ import annotations

from polykv.codecs.base import Codec
from polykv.codecs.exact import ExactCodec
from polykv.codecs.k8v3 import K8V3Codec
from polykv.codecs.paper import PaperCodec
from polykv.errors import UnknownCodecError

CODECS: dict[str, Codec] = {codec.name: codec for codec in (ExactCodec(), PaperCodec(), K8V3Codec())}
DEFAULT_CODEC = K8V3Codec.name


def get_codec(codec: str | Codec) -> Codec:
    """Looks a codec up by name; a codec object is returned as it is.

    Raises:
        UnknownCodecError: no codec has that name.
    """
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str) or codec not in CODECS:
        raise UnknownCodecError(f"unknown codec {codec!r}; choose one of {', '.join(sorted(CODECS))}")
    return CODECS[codec]
