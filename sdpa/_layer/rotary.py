"""Rotary embedding: the checks of its arguments, and the call."""

import contextlib
import functools
import math
import operator

import numpy as np

from .. import _core
from .._checks import check_out, flag, plain_array

LIMIT = 2**53  # up to here float64 holds every whole number


def rotary(x, positions, *, base=10000.0, interleaved=False, dim=None, out=None, threads=None):
    """Rotary position embedding: turn each pair of features by an angle proportional to the position of its row.

    Pair i of the first `dim` features is turned by the angle `position * base ** (-2 * i / dim)`:

        a, b  ->  a * cos - b * sin,  b * cos + a * sin

    so that the product of a query and a key depends on the distance between them, not on their positions.  Angles,
    cosines and sines are computed in float64.  The rotation is computed in float32 (float64 for float64), and its
    result is rounded once to the dtype of x.

    Parameters
    ----------
    x : (..., S, D), as in `attention`: (B, H, S, D), (H, S, D) or (S, D), or with more axes before H.  Its dtype is
        float16, ml_dtypes.bfloat16, float32 or float64.
    positions : numbers between -2**53 and 2**53, which need not be integers.

            number      the position of the first row; the following rows count on by 1
            (S,)        the position of each row
            (B, S)      of each row of each batch: for (B, H, S, D), the axes of x without those of heads and features
            (B, H, S)   of each row of each head: the axes of x without the axis of features

        In the last two, axes before S may be 1, so that all batches or heads share them.  Two axes for (B, H, S, D) are
        always (B, S).
    base : a number above 0.
    interleaved : if False, a pair is features i and i + dim / 2 (GPT-NeoX, LLaMA); if True, features 2 i and 2 i + 1
        (GPT-J).
    dim : how many features are turned, an even number.  The others are copied.  Default: all of them.
    out : the array to fill and return: x itself (in place), or an array that does not overlap x.
    threads : as for `attention`.

    Returns
    -------
    An array like x, or `out`.  Calling again with the negative position of each row turns the rows back.

    >>> import numpy as np, sdpa
    >>> sdpa.rotary(np.array([[3.0, 4.0], [3.0, 4.0]]), [0, np.pi / 2]).round(6)
    array([[ 3.,  4.],
           [-4.,  3.]])
    """
    x = _core.float_array("x", x)
    frequency, interleaved = turns_of(x, base, interleaved, dim)
    first, rows = _positions(positions, x)
    if out is not None:
        _check_out(out, x, positions)
    return _core.rotate(x, out, rows, first, frequency, interleaved, threads)


def turns_of(x, base=10000.0, interleaved=False, dim=None):
    """The frequencies of the pairs of x, and whether these are interleaved; checked."""
    interleaved = flag("interleaved", interleaved)
    return _frequencies(_base(base), _dim(dim, x)), interleaved


def turn(x, positions, frequency, interleaved, threads):
    """The same in place, with x and all but `positions` checked."""
    first, rows = _positions(positions, x)
    return _core.rotate(x, x, rows, first, frequency, interleaved, threads)


def _dim(dim, x):
    size = x.shape[-1]
    if dim is None:
        if size % 2:
            raise ValueError(f"x has shape {x.shape}: the last axis must be even, or dim given")
        return size
    try:
        number = operator.index(None if isinstance(dim, (bool, np.bool_)) else dim)
    except TypeError:
        raise TypeError(f"dim is {dim!r}: it must be a whole number or None") from None
    if number % 2 or not 0 <= number <= size:
        raise ValueError(f"dim is {dim}: it must be even, and from 0 to the {size} features of x")
    return number


def _base(base):
    try:
        number = float(None if isinstance(base, (str, bytes, bool, np.bool_)) else base)
    except (TypeError, ValueError):
        raise TypeError(f"base is {base!r}: it must be a number") from None
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"base is {base}: it must be above 0 and finite")
    return number


@functools.lru_cache(16)
def _frequencies(base, dim):
    """base ** (-2 * i / dim), rounded once where the platform has a wider type."""
    wide = np.longdouble
    with np.errstate(all="ignore"):
        frequency = (wide(base) ** (-np.arange(0, dim, 2).astype(wide) / wide(dim or 1))).astype(np.float64)
        if not np.isfinite(frequency * LIMIT).all():
            raise ValueError(f"base is {base}: it is so close to 0 that angles could be infinite")
    frequency.flags.writeable = False
    return frequency


def _positions(positions, x):
    """(position of the first row, None), or (0, positions as float64 in C order)."""
    if type(positions) is int:
        return _first(positions, positions, x)
    numbers = plain_array("positions", positions)
    if numbers.dtype.kind not in "iuf" and numbers.dtype.name != "bfloat16":
        raise TypeError(f"positions has dtype {numbers.dtype}: it must hold numbers, whole or floating")
    if numbers.ndim == 0:
        return _first(numbers.item(), positions, x)
    if not _fits(numbers.shape, x.shape):
        *lead, size, _ = x.shape
        shapes = list(dict.fromkeys([(size,), (*lead[:-1], size), (*lead, size)]))
        raise ValueError(
            f"positions has shape {numbers.shape} and x {x.shape}: it must be a number or have shape "
            f"{' or '.join(map(str, shapes))}, where axes before the last may be 1"
        )
    with np.errstate(over="ignore") if numbers.itemsize > 8 else contextlib.nullcontext():
        numbers = np.ascontiguousarray(numbers, np.float64)
    if not _core.all_below(numbers, LIMIT):
        raise ValueError(f"positions are {positions}: they must be above -2**53 and below 2**53")
    return 0.0, numbers


def _first(number, given, x):
    if not -LIMIT < number < LIMIT - x.shape[-2]:
        raise ValueError(f"positions is {given}: it must be above -2**53 and, with that of the last row, below 2**53")
    return float(number), None


def _fits(shape, of):
    """Whether positions of `shape` are (S,), (*batches, S) or (*batches, heads, S) for an x of shape `of`."""
    if shape[-1] != of[-2]:
        return False
    if len(shape) == 1:
        return True
    lead = of[:-2] if len(shape) == len(of) - 1 else of[: max(len(of) - 3, 0)]
    return len(shape) == len(lead) + 1 and all(n == size or n == 1 for n, size in zip(shape, lead))


def _check_out(out, x, positions):
    positions = positions if isinstance(positions, np.ndarray) else None
    if type(out) is np.ndarray and _core.takes_rotated(out, x, positions):
        return
    check_out(out, x.shape, x.dtype, {"positions": positions}, wider=False)
    if out is not x and not _same_elements(out, x) and np.shares_memory(out, x):
        raise ValueError("out overlaps x: it must be x itself, or not overlap it")


def _same_elements(a, b):
    return a.strides == b.strides and a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
