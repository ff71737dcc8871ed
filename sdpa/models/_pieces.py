"""What models are made of, where a caller gives no other: the names of `sdpa.reference`, computed fast."""

from .. import FeedForward as FeedForward
from .. import Linear as Linear
from .. import attention_varlen as attention_varlen
from .. import layer_norm as layer_norm
from .. import reference
from .. import rms_norm as rms_norm
from .._cache.kv import KVCache as KVCache


def rotary(x, positions, *, cos, sin, out=None, threads=None):
    return reference.rotary(x, positions, cos=cos, sin=sin, out=out, dtype=x.dtype)
