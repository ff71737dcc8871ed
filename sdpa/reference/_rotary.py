"""Rotary position embedding."""

import operator

import numpy as np

from ._arrays import cast, deliver, fit, to_float


def rotary(
    x, positions, *, base=10000.0, frequencies=None, interleaved=False, dim=None, cos=None, sin=None, out=None,
    threads=None, dtype=None,
):  # fmt: skip
    """Turn each pair of features of x (..., S, D) by its own angle times the position of the row.

    Parameters
    ----------
    positions
        The position of the first row, from which the others count on; or an array (S,), (B, S) or (B, H, S) with the
        position of each row; or an array (B, H, S, dim / 2), with as many axes as x, with the position of each pair:
        models of pictures have positions in time, height and width.  None: the tables have a row for each row.
    frequencies : (dim / 2,), the angles for position 1
        Default: base ** (-2 i / dim).
    interleaved
        If True, pair i is features (2 i, 2 i + 1) instead of (i, i + dim / 2).
    dim
        How many features are turned, an even number; the others are copied.  Default: as many as there are frequencies
        or tables for, else all.
    cos, sin
        Tables with the factors of each pair, in place of base and frequencies.  The factors need not be of one angle:
        some models scale both.  Without positions the tables have the shape (S, dim / 2), (B, S, dim / 2) or (B, H, S,
        dim / 2).  With positions, which are then whole numbers, a table (any number, dim / 2) has a row for each
        position from 0 on.

    Examples
    --------
    >>> import numpy as np
    >>> rotary(np.array([[3.0, 4.0]]), np.pi / 2).round(6)
    array([[-4.,  3.]])
    >>> rotary(np.array([[3.0, 4.0]]), 1, frequencies=[np.pi]).round(6)
    array([[-3., -4.]])
    >>> rotary(np.array([[3.0, 4.0]]), None, cos=np.array([[0.0]]), sin=np.array([[2.0]]))
    array([[-8.,  6.]])
    """
    given, x = x, to_float("x", x, dtype)
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}: it must have two axes or more")
    if (cos is None) != (sin is None):
        raise ValueError("one of cos and sin is given: it must be both or none")
    if frequencies is not None and cos is not None:
        raise ValueError("frequencies and the tables cos and sin are given: only one of the two may be")
    if cos is None and positions is None:
        raise ValueError("positions is None: without the tables cos and sin it must be given")
    precise = np.promote_types(np.float64, x.dtype)  # of angles: float64 at least
    name, own = ("frequencies", frequencies) if cos is None else ("cos", cos)
    if own is not None and not np.ndim(own):
        raise ValueError(f"{name} has shape (): it must have an axis of pairs")
    dim = _dim(dim, x.shape[-1], None if own is None else 2 * np.shape(own)[-1])
    if cos is None:
        if frequencies is None:
            if not 0 < base < np.inf:
                raise ValueError(f"base is {base}: it must be positive and finite")
            frequencies = precise.type(base) ** -(np.arange(0, dim, 2).astype(precise) / max(dim, 1))
        frequencies = numbers("frequencies", frequencies).astype(precise)
        if frequencies.ndim != 1 or not np.isfinite(frequencies).all():
            raise ValueError(f"frequencies are {frequencies}: they must be finite, of one axis")
        angle = places(positions, x.shape, dim // 2, precise) * frequencies
        cos, sin = np.cos(angle), np.sin(angle)
    else:
        cos, sin = (table(name, array, positions, x.shape, dim // 2) for name, array in (("cos", cos), ("sin", sin)))
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    first, second = np.arange(dim).reshape(-1, 2).T if interleaved else np.arange(dim).reshape(2, -1)
    a, b = x[..., first], x[..., second]
    result = x.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        result[..., first] = a * cos - b * sin
        result[..., second] = b * cos + a * sin
    return deliver(cast(result, dtype), dtype, out, positions, *([] if out is given else [given]))


def _dim(given, size, of_pairs):
    """How many features are turned.  of_pairs: the number that frequencies or tables are for, or None."""
    dim = (size if of_pairs is None else of_pairs) if given is None else operator.index(given)
    if dim % 2 or not 0 <= dim <= size:
        raise ValueError(f"dim is {dim}: it must be even, and from 0 to the {size} features of x")
    if of_pairs not in (None, dim):
        raise ValueError(f"dim is {dim}, and there are frequencies or tables for {of_pairs}: it must be that")
    return dim


def numbers(name, given):
    array = np.asarray(given)
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {array.dtype}: it must hold numbers")
    return array


def table(name, array, positions, shape, pairs):
    """The cos or sin of the rows of an array of `shape`, as an array that broadcasts to (*shape[:-1], pairs)."""
    array = numbers(name, array)
    *lead, rows, _ = shape
    if positions is not None:
        positions = places(positions, shape, pairs, np.float64)
        if array.ndim != 2 or (positions != np.floor(positions)).any():
            raise ValueError(
                f"{name} has shape {array.shape} and positions are {positions}: with positions a table must have two "
                "axes, and they must be whole numbers"
            )
        if positions.size and not 0 <= positions.min() <= positions.max() < len(array):
            raise ValueError(f"positions are {positions}: they must be from 0 to below the {len(array)} rows of {name}")
        array = fit(name, array, (len(array), pairs))[positions.astype(np.int64), np.arange(pairs)]
    elif 2 < array.ndim == len(lead) + 1:
        array = array[..., None, :, :]  # the same for all heads
    return fit(name, array, (*lead, rows, pairs))


def places(positions, shape, pairs, dtype):
    """The positions in an array of `shape`, as an array that broadcasts to (*shape[:-1], pairs)."""
    *lead, rows, _ = shape
    positions = numbers("positions", positions).astype(dtype)
    if not np.isfinite(positions).all():
        raise ValueError(f"positions are {positions}: they must be finite")
    if positions.ndim == 0:
        return (positions + np.arange(rows))[..., None]
    axes = positions.ndim
    if axes == len(shape):
        return fit("positions", positions, (*lead, rows, pairs))
    if axes not in (1, len(lead), len(lead) + 1) or positions.shape[-1] != rows:
        raise ValueError(
            f"positions has shape {positions.shape}: for x {shape} it must be (), (S,), (B, S), (B, H, S), or "
            "(B, H, S, dim / 2)"
        )
    if 1 < axes == len(lead):
        positions = positions[..., None, :]  # the same for all heads
    return fit("positions", positions, (*lead, rows))[..., None]
