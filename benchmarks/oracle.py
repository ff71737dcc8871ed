"""What a workload must give: attention in float64 with plain NumPy, for some of its rows."""

import numpy as np

ROW_STEP = 61  # a prime, so that the rows fall on every place in blocks of any usual size
ERROR_FACTOR = 2.5
ERROR_ROUNDINGS = 4


def visible(workload, rows, options):
    """Boolean, broadcastable to (B, H, rows, N): which keys the rows may see; None where they see all."""
    mask = options.get("mask")
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, rows]
    if workload.window is None and not workload.causal:
        return mask
    distance = (rows + workload.N - workload.M)[:, None] - np.arange(workload.N)
    seen = distance >= 0
    if workload.window is not None:
        seen &= distance < workload.window
    return seen if mask is None else seen & mask


def attention(workload, rows, arrays, options, dtype):
    """The rows of the result, (B, H, rows, D), computed in `dtype`."""
    query, key, value = (array.astype(dtype, copy=False) for array in arrays)
    seen = visible(workload, rows, options)
    bias = options.get("bias")
    out = np.empty((workload.B, workload.H, len(rows), workload.D), dtype)
    for b in range(workload.B):
        for h in range(workload.H):
            g = h * workload.G // workload.H
            scores = query[b, h, rows] @ key[b, g].T / dtype(np.sqrt(workload.D))
            if bias is not None:
                scores += bias[min(b, len(bias) - 1), h, rows]
            if seen is not None:
                scores = np.where(seen if seen.ndim == 2 else seen[min(b, len(seen) - 1), 0], scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[b, h] = weights @ value[b, g] / weights.sum(axis=-1, keepdims=True)
    return out


def sample_rows(workload):
    return np.unique(np.append(np.arange(0, workload.M, ROW_STEP), workload.M - 1))


def check(workload, arrays, options):
    """(rows, exact result of those rows, largest error that passes).

    That is ERROR_FACTOR times NumPy's in the workload's own dtype, plus ERROR_ROUNDINGS of the terms summed.
    """
    rows = sample_rows(workload)
    exact = attention(workload, rows, arrays, options, np.float64)
    naive = attention(workload, rows, arrays, options, workload.dtype.type)
    query, key, value = arrays
    terms = attention(workload, rows, (query, key, np.abs(value)), options, workload.dtype.type)
    rounding = float(np.finfo(workload.dtype).eps * terms.max())
    return rows, exact, ERROR_FACTOR * float(np.abs(naive - exact).max()) + ERROR_ROUNDINGS * rounding
