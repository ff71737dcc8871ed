"""NumPy, written as one would: no blocks, all scores in memory."""

import numpy as np

from benchmarks.measure.adapting import additive_mask, require_scores_fit
from benchmarks.measure.oracle import arithmetic


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
