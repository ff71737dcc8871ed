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
    """The rows of the result, (B, H, rows, D), computed in `dtype`, as floats that NumPy calculates with."""
    query, key, value = arrays
    seen, bias = visible(workload, rows, options), options.get("bias")
    out = np.empty((workload.B, workload.H, len(rows), workload.D), arithmetic(dtype))
    for b in range(workload.B):
        for h in range(workload.H):
            g = h * workload.G // workload.H
            out[b, h] = head(
                query[b, h, rows],
                key[b, g],
                value[b, g],
                dtype,
                bias=None if bias is None else bias[min(b, len(bias) - 1), h, rows],
                seen=seen if seen is None or seen.ndim == 2 else seen[min(b, len(seen) - 1), 0],
            )
    return out


def head(query, key, value, dtype, *, bias=None, softcap=None, seen=None):
    """One head, computed in `dtype`: (M, D), (N, D), (N, E) give (M, E); seen and bias broadcast to (M, N).

    In a half type scores, probabilities and the result are rounded to it, and sums are taken in float32.
    """
    wide = arithmetic(dtype)
    query, key, value = (array.astype(wide, copy=False) for array in (query, key, value))
    scores = rounded(query @ key.T / np.sqrt(wide(query.shape[-1])), dtype)
    if softcap is not None:
        scores = rounded(wide(softcap) * np.tanh(scores / wide(softcap)), dtype)
    if bias is not None:
        scores = rounded(scores + bias.astype(wide, copy=False), dtype)
    if seen is not None:
        scores = np.where(seen, scores, wide(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return rounded(rounded(weights / weights.sum(axis=-1, keepdims=True), dtype) @ value, dtype)


def arithmetic(dtype):
    """The type in which NumPy calculates for `dtype`: for half types float32."""
    return np.float32 if np.dtype(dtype).itemsize == 2 else np.dtype(dtype).type


def rounded(array, dtype):
    """The values of `array` after they have been stored in `dtype`."""
    return array.astype(dtype, copy=False).astype(arithmetic(dtype), copy=False)


def sample_rows(workload):
    return np.unique(np.append(np.arange(0, workload.M, ROW_STEP), workload.M - 1))


def check(workload, arrays, options):
    """(rows, exact result of those rows, largest error that passes).

    That is ERROR_FACTOR times NumPy's in the workload's own dtype, plus ERROR_ROUNDINGS of the terms summed, in the
    type of the sums.  A half type has no more than that: its own roundings are many, and all in NumPy's error.
    """
    rows = sample_rows(workload)
    exact = attention(workload, rows, arrays, options, np.float64)
    naive = attention(workload, rows, arrays, options, workload.dtype)
    query, key, value = arrays
    terms = attention(workload, rows, (query, key, np.abs(value)), options, workload.dtype)
    rounding = float(np.finfo(terms.dtype).eps * terms.max())
    return rows, exact, ERROR_FACTOR * float(np.abs(naive - exact).max()) + ERROR_ROUNDINGS * rounding
