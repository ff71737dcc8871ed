"""What models are made of, where a caller gives no other: the names of `sdpa.reference`, computed fast.

Projections, attention and caches are those of the library.  Activations, norms and rotary tables are plain NumPy for
now: when `sdpa` itself has them, this file becomes `import sdpa`.
"""

import numpy as np

from .. import attention_varlen as attention_varlen
from .. import reference
from .._cache.kv import KVCache as KVCache
from .._layer.linear import Linear as _Linear


class Linear:
    def __init__(self, weight, bias=None, *, activation=None, threads=None):
        self.linear, self.activation, self.threads = _Linear(weight, bias), activation, threads

    def __call__(self, x, *, residual=None, out=None, threads=None):
        y = self.linear(x, threads or self.threads, None if out is None else out.dtype)
        y = activated(y, self.activation)
        y = y if residual is None else y + residual
        if out is None:
            return y
        out[...] = y
        return out


class FeedForward:
    def __init__(
        self, up_weight, down_weight, *, gate_weight=None, up_bias=None, gate_bias=None, down_bias=None,
        activation="gelu", threads=None,
    ):  # fmt: skip
        first = activation if gate_weight is None else None
        self.up = Linear(up_weight, up_bias, activation=first, threads=threads)
        self.down = Linear(down_weight, down_bias, threads=threads)
        gate = None if gate_weight is None else Linear(gate_weight, gate_bias, activation=activation, threads=threads)
        self.gate = gate

    def __call__(self, x, *, residual=None, threads=None):
        inner = self.up(x) if self.gate is None else self.gate(x) * self.up(x)
        return self.down(inner, residual=residual)


def activated(x, name):
    if name != "gelu" or x.dtype == np.float64:
        return reference._dense.activated(x, name)
    z = x.astype(np.float32)
    size = np.abs(z) * np.float32(0.5**0.5)  # Abramowitz and Stegun 7.1.26: erf to 1.5e-7
    t = 1 / (1 + np.float32(0.3275911) * size)
    terms = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    sum_ = np.float32(0)
    for term in terms:
        sum_ = (sum_ + np.float32(term)) * t
    erf = np.copysign(1 - sum_ * np.exp(-size * size), z)
    return (z * (1 + erf) / 2).astype(x.dtype)


def layer_norm(x, weight=None, bias=None, *, eps=1e-5, residual=None, out=None, threads=None):
    return reference.layer_norm(x, weight, bias, eps=eps, residual=residual, out=out, dtype=x.dtype)


def rms_norm(x, weight=None, *, eps=1e-6, residual=None, out=None, threads=None):
    return reference.rms_norm(x, weight, eps=eps, residual=residual, out=out, dtype=x.dtype)


def rotary(x, positions, *, cos, sin, out=None, threads=None):
    return reference.rotary(x, positions, cos=cos, sin=sin, out=out, dtype=x.dtype)
