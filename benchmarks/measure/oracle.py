"""What a workload must give: attention in float64 with plain NumPy, for some of its rows.

Gradients are those of `sdpa.reference`.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from sdpa import reference

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


def sample_rows(length):
    return np.unique(np.append(np.arange(0, length, ROW_STEP), length - 1))


class Expected(NamedTuple):
    """Of one array that a workload gives: some rows, the last one among them, and the largest error that passes."""

    rows: np.ndarray
    exact: np.ndarray
    allowed: float


def check_attention(workload, arrays, options):
    """What is expected of the result.

    The error that passes is ERROR_FACTOR times NumPy's in the workload's own dtype, plus ERROR_ROUNDINGS of the terms
    summed, in the type of the sums.  A half type has no more than that: its own roundings are many, and all in NumPy's
    error.
    """
    rows = sample_rows(workload.M)
    exact = attention(workload, rows, arrays, options, np.float64)
    naive = attention(workload, rows, arrays, options, workload.dtype)
    query, key, value = arrays
    terms = attention(workload, rows, (query, key, np.abs(value)), options, workload.dtype)
    return [Expected(rows, exact, allowed(exact, naive, terms.max()))]


def check_gradients(workload, arrays, options):
    """What is expected of the result, and of the gradients of query, key and value.

    Their sums grow with the length, so one rounding of the largest to its own dtype is added: few are that large, and
    NumPy's may be rounded luckily.
    """
    exact, naive = (gradients(workload, arrays, options, dtype) for dtype in (np.float64, workload.dtype))
    rounding = float(ml_dtypes.finfo(workload.dtype).eps) / 2
    largest = largest_terms(workload, arrays, options)
    checks = []
    for x, of_numpy, terms in zip(exact, naive, largest, strict=True):
        rows = sample_rows(x.shape[2])
        checks.append(Expected(rows, x[:, :, rows], allowed(x, of_numpy, terms) + rounding * np.abs(x).max()))
    return checks


def check_layer(workload, arrays):
    exact, naive = (layer(workload, arrays, dtype) for dtype in (np.float64, workload.dtype))
    rows = sample_rows(workload.M)
    # The terms of the last product are as large as the result, by the weights that Layer.draw draws.
    return [Expected(rows, exact[:, rows], allowed(exact, naive, np.abs(exact).max()))]


def layer(workload, arrays, dtype):
    """The result (B, M, W) of a layer, computed in `dtype`."""
    x, in_weight, in_bias, out_weight, out_bias = (rounded(array, dtype) for array in arrays)
    B, M, D = workload.B, workload.M, workload.D
    heads = rounded(x @ in_weight.T + in_bias, dtype).reshape(B, M, -1, D)
    query, key, value = np.split(heads, [workload.H, workload.H + workload.G], axis=2)
    out = np.empty((B, M, workload.H, D), arithmetic(dtype))
    for b in range(B):
        for h in range(workload.H):
            g = h * workload.G // workload.H
            out[b, :, h] = head(query[b, :, h], key[b, :, g], value[b, :, g], dtype)
    return rounded(out.reshape(B, M, -1) @ out_weight.T + out_bias, dtype)


def allowed(exact, naive, terms):
    """The error that passes, where the terms that are summed make up to `terms`."""
    return ERROR_FACTOR * largest_error(naive, exact) + ERROR_ROUNDINGS * float(np.finfo(naive.dtype).eps * terms)


def largest_error(given, exact):
    return float(np.abs(given.astype(np.float64) - exact).max())


def groups(workload, arrays):
    """(where the query heads of a group are, where its key head is, the parts of the arrays there): for attention that
    keeps all of its scores in memory."""
    query, key, value = arrays
    size = workload.H // workload.G
    for b in range(workload.B):
        for g in range(workload.G):
            heads, own = (b, slice(g * size, (g + 1) * size)), (b, slice(g, g + 1))
            yield heads, own, (query[heads], key[own], value[own])


def gradients(workload, arrays, options, dtype):
    """The result and the gradients of query, key and value, computed in `dtype`."""
    query, key, value = arrays
    gradient = workload.draw_gradient()
    given = [np.empty(array.shape, arithmetic(dtype)) for array in (query, query, key, value)]
    for heads, own, inputs in groups(workload, arrays):
        out, lse = reference.attention(*inputs, **options, return_lse=True, dtype=dtype)
        found = reference.attention_backward(gradient[heads], *inputs, out, lse, **options, dtype=dtype)
        for array, where, part in zip(given, (heads, heads, own, own), (out, *found[:3]), strict=True):
            array[where] = part
    return given


def largest_terms(workload, arrays, options):
    """For each of the same four, the largest sum of the sizes of its terms."""
    gradient = workload.draw_gradient()
    largest = np.zeros(4)
    for heads, _, inputs in groups(workload, arrays):
        weight = reference.attention_weights(*inputs[:2], **options)
        grad, query, key, value = (np.abs(array.astype(np.float64)) for array in (gradient[heads], *inputs))
        grad_weight = grad @ value.swapaxes(-1, -2)
        grad_score = weight * (grad_weight + (weight * grad_weight).sum(axis=-1, keepdims=True)) * workload.D**-0.5
        turned = grad_score.swapaxes(-1, -2) @ query, weight.swapaxes(-1, -2) @ grad
        terms = weight @ value, grad_score @ key, *(array.sum(axis=0) for array in turned)
        largest = np.maximum(largest, [array.max() for array in terms])
    return largest


def judge(outputs, checks):
    """(error, the error that passes) of the array of `outputs` that comes nearest to failing or fails most."""
    judged = []
    for output, (rows, exact, limit) in zip(outputs, checks, strict=True):
        got = np.asarray(output)
        if got.shape != (*exact.shape[:-2], rows[-1] + 1, exact.shape[-1]):
            raise ValueError(f"result of shape {got.shape}")
        judged.append((largest_error(got[..., rows, :], exact), float(limit)))
    return max(judged, key=lambda pair: np.nan_to_num(pair[0] / pair[1], nan=np.inf))


def save(path, checks):
    names = {f"{name}{index}": array for index, one in enumerate(checks) for name, array in one._asdict().items()}
    np.savez(path, count=len(checks), **names)


def load(path):
    with np.load(path) as file:
        return [Expected(*(file[f"{name}{i}"] for name in Expected._fields)) for i in range(file["count"])]
