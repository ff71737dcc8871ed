"""Rotary position embedding."""

import operator

import numpy as np

from ._arrays import cast, deliver, fit, to_float


def rotary(x, positions, *, base=10000.0, interleaved=False, dim=None, out=None, threads=None, dtype=None):
    """Turn each pair of features of x (..., S, D) by its own angle times the position of the row.

    positions : the position of the first row, from which the others count on; or an array (S,), (B, S) or (B, H, S)
        with the position of each row.
    interleaved : if True, pair i is features (2 i, 2 i + 1) instead of (i, i + dim / 2).
    dim : how many features are turned, an even number; the others are copied.

    >>> import numpy as np
    >>> rotary(np.array([[3.0, 4.0]]), np.pi / 2).round(6)
    array([[-4.,  3.]])
    """
    given, x = x, to_float("x", x, dtype)
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}: it must have two axes or more")
    dim = x.shape[-1] if dim is None else operator.index(dim)
    if dim % 2 or not 0 <= dim <= x.shape[-1]:
        raise ValueError(f"dim is {dim}: it must be even, and from 0 to the {x.shape[-1]} features of x")
    if not 0 < base < np.inf:
        raise ValueError(f"base is {base}: it must be positive and finite")
    precise = np.promote_types(np.float64, x.dtype)  # of angles: float64 at least
    exponent = np.arange(0, dim, 2).astype(precise) / max(dim, 1)
    angle = places(positions, x.shape, precise)[..., None] * precise.type(base) ** -exponent
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    first, second = np.arange(dim).reshape(-1, 2).T if interleaved else np.arange(dim).reshape(2, -1)
    a, b = x[..., first], x[..., second]
    result = x.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        result[..., first] = a * cos - b * sin
        result[..., second] = b * cos + a * sin
    return deliver(cast(result, dtype), dtype, out, positions, *([] if out is given else [given]))


def places(positions, shape, dtype):
    """The positions of the rows of an array of `shape`, as an array that broadcasts to shape[:-1]."""
    *lead, rows, _ = shape
    positions = np.asarray(positions)
    if positions.dtype.kind not in "iuf" and positions.dtype.name != "bfloat16":
        raise TypeError(f"positions has dtype {positions.dtype}: it must hold numbers")
    positions = positions.astype(dtype)
    if not np.isfinite(positions).all():
        raise ValueError(f"positions are {positions}: they must be finite")
    if positions.ndim == 0:
        return positions + np.arange(rows)
    axes = positions.ndim
    if axes not in (1, len(lead), len(lead) + 1) or positions.shape[-1] != rows:
        raise ValueError(
            f"positions has shape {positions.shape}: for x {shape} it must be (), (S,), (B, S) or (B, H, S)"
        )
    if 1 < axes == len(lead):
        positions = positions[..., None, :]  # the same for all heads
    return fit("positions", positions, (*lead, rows))
