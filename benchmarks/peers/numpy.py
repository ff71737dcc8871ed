"""NumPy, written as one would: no blocks, all scores in memory."""

import numpy as np

from benchmarks.measure.adapting import additive_mask, require_scores_fit
from benchmarks.measure.oracle import arithmetic
from benchmarks.workloads.formulas import ArrayPieces


def numpy_peer(workload):
    """Half types are widened for the products, in every call, and the result is rounded."""
    require_scores_fit(workload)
    arrays, options = workload.draw()
    B, H, M, N, D = workload.B, workload.H, workload.M, workload.N, workload.D
    wide = arithmetic(workload.dtype)
    mask = additive_mask(workload, options)

    def call():
        query, key, value = (array.astype(wide, copy=False) for array in arrays)
        folded = query.reshape(B, workload.G, -1, D) * wide(D**-0.5)
        scores = (folded @ key.swapaxes(-1, -2)).reshape(B, H, M, N)
        if mask is not None:
            scores += mask
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        out = scores.reshape(B, workload.G, -1, N) @ value
        return (out.reshape(B, H, M, D) / total).astype(workload.dtype, copy=False)

    return call, np.asarray


def numpy_layer_peer(workload):
    """Half types are widened for the products, x in every call."""
    wide = arithmetic(workload.dtype)
    x, *weights = workload.draw()
    in_weight, in_bias, out_weight, out_bias = (weight.astype(wide) for weight in weights)
    B, M, H, D = workload.B, workload.M, workload.H, workload.D

    def call():
        heads = (x.astype(wide, copy=False) @ in_weight.T + in_bias).reshape(B, M, 3, H, D)
        query, key, value = (heads[:, :, i].swapaxes(1, 2) for i in range(3))
        scores = query * wide(D**-0.5) @ key.swapaxes(-1, -2)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = (scores @ value).swapaxes(1, 2).reshape(B, M, -1)
        return (out @ out_weight.T + out_bias).astype(workload.dtype, copy=False)

    return call, np.asarray


class NumpyPieces(ArrayPieces):
    """Of arrays in `dtype`, which half types are widened to and rounded from in each operation; weights are wide."""

    def __init__(self, dtype):
        self._dtype, self._wide = dtype, arithmetic(dtype)

    def weight(self, array):
        return self._widened(array)

    def linear(self, x, weight, bias=None, activation=None):
        y = self._widened(x) @ weight.T
        if bias is not None:
            y += bias
        return self._rounded(y if activation is None else ACTIVATIONS[activation](y))

    def add(self, x, y):
        return self._rounded(self._widened(x) + self._widened(y))

    def multiply(self, x, y):
        return self._rounded(self._widened(x) * self._widened(y))

    def layer_norm(self, x, weight, bias, eps):
        x = self._widened(x)
        x = x - x.mean(axis=-1, keepdims=True)
        return self._rounded(normed(x, weight, eps) + bias)

    def rms_norm(self, x, weight, eps):
        return self._rounded(normed(self._widened(x), weight, eps))

    def turned(self, x, cos, sin):
        cos, sin = self._widened(cos), self._widened(sin)
        first, second = np.split(self._widened(x), 2, axis=-1)
        return self._rounded(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))

    def attention(self, query, key, value, causal, lengths):
        (B, H, M, D), (G, N) = query.shape, key.shape[1:3]
        key, value = (self._widened(array)[:, :, None] for array in (key, value))
        scores = self._widened(query).reshape(B, G, -1, M, D) * self._wide(D**-0.5) @ key.swapaxes(-1, -2)
        if causal and M > 1:
            scores += np.triu(np.full((M, N), -np.inf, self._wide), N - M + 1)
        if lengths is not None:
            scores += np.where(np.arange(N) < lengths[:, None], 0, -np.inf).astype(self._wide)[:, None, None, None]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return self._rounded((scores @ value).reshape(B, H, M, -1))

    def _widened(self, array):
        return array.astype(self._wide, copy=False)

    def _rounded(self, array):
        return array.astype(self._dtype, copy=False)


def normed(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight


def gelu(x):
    """With the error function that NumPy lacks: 7.1.26 of Abramowitz and Stegun, to 1.5e-7."""
    z = np.abs(x) * x.dtype.type(0.5**0.5)
    t = 1 / (1 + z * x.dtype.type(0.3275911))
    series = np.zeros_like(t)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + x.dtype.type(factor)) * t
    tail = series * np.exp(-z * z) / 2  # of the normal distribution, beyond |x|
    return x * np.where(x < 0, tail, 1 - tail)


ACTIVATIONS = {"gelu": gelu, "silu": lambda x: x / (1 + np.exp(-x))}


def numpy_formula_peer(workload):
    pieces = NumpyPieces(workload.dtype)
    prepared = workload.prepared(pieces)
    return lambda: workload.formula(pieces, *prepared), lambda outputs: workload.comparable(*outputs)
