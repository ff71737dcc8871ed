"""Rotary embedding: the checks of its arguments, and the call."""

import functools
import math
import operator

import numpy as np

from .. import _core
from .._checks import broadcast, check_out, flag, in_order, plain_array, sum_dtype

DOUBLE = np.dtype(np.float64)
LIMIT = 2**53  # up to here float64 holds every whole number


def rotary(
    x, positions, *, base=10000.0, frequencies=None, interleaved=False, dim=None, cos=None, sin=None, out=None,
    threads=None,
):  # fmt: skip
    """Rotary position embedding: turn each pair of features by an angle proportional to the position of its row.

    Pair i of the first `dim` features is turned by the angle `position * base ** (-2 * i / dim)`::

        a, b  ->  a * cos - b * sin,  b * cos + a * sin

    so that the product of a query and a key depends on the distance between them, not on their positions.  Angles,
    cosines and sines are computed in float64.  The rotation is computed in float32 (float64 for float64), and its
    result is rounded once to the dtype of x.

    Parameters
    ----------
    x
        (..., S, D), as in `attention`: (B, H, S, D), (H, S, D) or (S, D), or with more axes before H.  Its dtype is
        float16, ml_dtypes.bfloat16, float32 or float64.
    positions
        Numbers between -2**53 and 2**53, which need not be integers::

            number      the position of the first row; the following rows count on by 1
            (S,)        the position of each row
            (B, S)      of each row of each batch: for (B, H, S, D), the axes of x without those of heads and features
            (B, H, S)   of each row of each head: the axes of x without the axis of features
            (B, H, S, dim / 2)  of each pair of each row: as many axes as x.  Models of pictures have positions in time,
                        height and width.
            None        the tables cos and sin have a row for each row

        Axes before S may be 1, so that all batches or heads share them; with an axis of pairs, any axis may.  Two axes
        for (B, H, S, D) are always (B, S).
    base
        A number above 0.
    frequencies : (dim / 2,), the angle of each pair at position 1, in place of base
    interleaved
        If False, a pair is features i and i + dim / 2 (GPT-NeoX, LLaMA); if True, features 2 i and 2 i + 1 (GPT-J).
    dim
        How many features are turned, an even number.  The others are copied.  Default: as many as there are frequencies
        or tables for, else all of them.
    cos, sin
        Tables with the factors of each pair, in place of base and frequencies.  The factors need not be of one angle:
        some models scale both.  Without positions the tables have the shape (S, dim / 2), (B, S, dim / 2) or (B, H, S,
        dim / 2).  With positions, which are then whole numbers, a table (any number, dim / 2) has a row for each
        position from 0 on.  They are rounded to the dtype that the rotation is computed in.
    out
        The array to fill and return: x itself (in place), or an array that does not overlap x.  It never overlaps
        positions or tables.
    threads
        As for `attention`.

    Returns
    -------
    An array like x, or `out`
        Calling again with the negative position of each row turns the rows back.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> sdpa.rotary(np.array([[3.0, 4.0], [3.0, 4.0]]), [0, np.pi / 2]).round(6)
    array([[ 3.,  4.],
           [-4.,  3.]])
    >>> sdpa.rotary(np.array([[3.0, 4.0]]), None, cos=np.array([[0.0]]), sin=np.array([[2.0]]))
    array([[-8.,  6.]])
    """
    x = _core.float_array("x", x)
    if cos is not None or sin is not None:
        if cos is None or sin is None:
            raise ValueError("one of cos and sin is given: it must be both or none")
        if frequencies is not None:
            raise ValueError("frequencies and the tables cos and sin are given: only one of the two may be")
        interleaved, cos, sin = flag("interleaved", interleaved), _numbers("cos", cos), _numbers("sin", sin)
        tables = _tables(cos, sin, positions, x, dim)
        if out is not None:
            _check_out(out, x, positions, cos, sin)
        return _core.rotate_by_tables(x, out, *tables, interleaved, threads)
    frequency, largest, interleaved = turns_of(x, base, interleaved, dim, frequencies)
    first, rows = _positions(positions, x, frequency)
    if out is not None:
        _check_out(out, x, positions)
    return _core.rotate(x, out, rows, first, frequency, largest, interleaved, threads)


def turns_of(x, base=10000.0, interleaved=False, dim=None, frequencies=None):
    """The frequencies of the pairs of x, the largest of them, and whether the pairs are interleaved; checked."""
    interleaved = flag("interleaved", interleaved)
    if frequencies is None:
        frequency, largest = _frequencies(_base(base), _dim(dim, x))
        return frequency, largest, interleaved
    numbers = _numbers("frequencies", frequencies)
    frequency = _as(DOUBLE, numbers)
    largest = float(np.abs(frequency).max(initial=0))
    if numbers.ndim != 1 or not largest * LIMIT < math.inf:
        raise ValueError(
            f"frequencies are {frequencies}: they must be finite, so that no angle can be infinite, and of one axis"
        )
    _dim(dim, x, len(frequency))
    return frequency, largest, interleaved


def turn(x, positions, frequency, largest, interleaved, threads):
    """The same in place, with x and all but `positions` checked.  Positions are those of rows."""
    first, rows = _positions(positions, x)
    return _core.rotate(x, x, rows, first, frequency, largest, interleaved, threads)


def _dim(given, x, pairs=None):
    """How many features are turned.  `pairs`: how many there are frequencies or tables for, or None."""
    size = x.shape[-1]
    if given is None:
        if pairs is None:
            if size % 2:
                raise ValueError(f"x has shape {x.shape}: the last axis must be even, or dim given")
            return size
        number = 2 * pairs
    else:
        try:
            number = operator.index(None if isinstance(given, (bool, np.bool_)) else given)
        except TypeError:
            raise TypeError(f"dim is {given!r}: it must be a whole number or None") from None
    if number % 2 or not 0 <= number <= size:
        raise ValueError(f"dim is {number}: it must be even, and from 0 to the {size} features of x")
    if pairs is not None and number != 2 * pairs:
        raise ValueError(f"dim is {number}, and there are frequencies or tables for {2 * pairs}: it must be that")
    return number


def _base(base):
    if type(base) is float and 0 < base < math.inf:
        return base
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
    """base ** (-2 * i / dim), rounded once where the platform has a wider type; and the largest."""
    wide = np.longdouble
    with np.errstate(all="ignore"):
        frequency = (wide(base) ** (-np.arange(0, dim, 2).astype(wide) / wide(dim or 1))).astype(np.float64)
        if not np.isfinite(frequency * LIMIT).all():
            raise ValueError(f"base is {base}: it is so close to 0 that angles could be infinite")
    frequency.flags.writeable = False
    return frequency, float(frequency.max(initial=0))


def _numbers(name, given):
    numbers = given if type(given) is np.ndarray else plain_array(name, given)
    if numbers.dtype.kind not in "iuf" and numbers.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {numbers.dtype}: it must hold numbers, whole or floating")
    return numbers


def _positions(positions, x, pairs=()):
    """(position of the first row, None), or (0, positions as float64 in C order): those of the rows, or with as many
    axes as x, of which the last two are (S, pairs).  `pairs` is something that has their length."""
    number = positions
    if type(positions) is not int:
        if positions is None:
            raise ValueError("positions is None: without the tables cos and sin it must be given")
        numbers = _numbers("positions", positions)
        if numbers.ndim:
            return 0.0, _each_position(numbers, positions, x, pairs)
        number = numbers.item()
    if not -LIMIT < number < LIMIT - x.shape[-2]:
        raise ValueError(
            f"positions is {positions}: it must be above -2**53 and, with that of the last row, below 2**53"
        )
    return float(number), None


def _each_position(numbers, given, x, pairs):
    if not _fits(numbers.shape, x.shape):
        *lead, size, _ = x.shape
        full = (*lead, size, len(pairs))
        if numbers.ndim != x.ndim or any(n not in (1, of) for n, of in zip(numbers.shape, full)):
            shapes = list(dict.fromkeys([(size,), (*lead[:-1], size), (*lead, size), full]))
            raise ValueError(
                f"positions has shape {numbers.shape} and x {x.shape}: it must be a number or have shape "
                f"{' or '.join(map(str, shapes))}, where axes before the last may be 1"
            )
        numbers = np.broadcast_to(numbers, numbers.shape[:-2] + full[-2:])
    numbers = _as(DOUBLE, numbers)
    if not _core.all_below(numbers, LIMIT):
        raise ValueError(f"positions are {given}: they must be above -2**53 and below 2**53")
    return numbers


def _fits(shape, of):
    """Whether positions of `shape` are (S,), (*batches, S) or (*batches, heads, S) for an x of shape `of`."""
    if shape[-1] != of[-2]:
        return False
    if len(shape) == 1:
        return True
    lead = of[:-2] if len(shape) == len(of) - 1 else of[: max(len(of) - 3, 0)]
    return len(shape) == len(lead) + 1 and all(n == size or n == 1 for n, size in zip(shape, lead))


def _tables(cos, sin, positions, x, dim):
    """The tables in the dtype that x is computed in, in C order, and of one shape: one that positions may have, and the
    axis of pairs."""
    if not cos.ndim:
        raise ValueError("cos has shape (): it must have an axis of pairs")
    pairs = _dim(dim, x, cos.shape[-1]) // 2
    if positions is not None:
        cos, sin = _looked_up(cos, sin, positions, x, pairs)
    if cos.shape != sin.shape or cos.ndim < 2 or not _fits(cos.shape[:-1], x.shape):
        cos, sin = _of_one_shape(cos, sin, x, pairs)
    real = sum_dtype(x.dtype)
    return _as(real, cos), _as(real, sin)


def _as(dtype, numbers):
    """`numbers` as `dtype`, in C order and aligned.  What is too large becomes infinite."""
    if numbers.itemsize > dtype.itemsize:
        with np.errstate(over="ignore"):
            return in_order(numbers, dtype)
    return in_order(numbers, dtype)


def _looked_up(cos, sin, positions, x, pairs):
    """The rows of the tables at `positions`."""
    rows, columns = x.shape[-2], np.arange(pairs)
    first, numbers = _positions(positions, x, columns)
    if numbers is None:
        whole, least, last = first.is_integer() or not rows, first, first + rows - 1
        index = slice(int(first), int(first) + rows)
    else:
        index = numbers.astype(np.int64)
        whole, least, last = (index == numbers).all(), index.min(initial=LIMIT), index.max(initial=-1)
        if index.ndim == x.ndim:
            index = index, columns
    found = []
    for name, table in ("cos", cos), ("sin", sin):
        if table.ndim != 2 or not whole:
            raise ValueError(
                f"{name} has shape {table.shape} and positions are {positions}: with positions a table must have two "
                "axes, and they must be whole numbers"
            )
        if least <= last and not 0 <= least <= last < len(table):
            raise ValueError(f"positions are {positions}: they must be from 0 to below the {len(table)} rows of {name}")
        if table.shape[1] != pairs:
            table = broadcast(name, table, (len(table), pairs))
        found.append(table[index])
    return found


def _of_one_shape(cos, sin, x, pairs):
    """The tables with as many axes as x."""
    *lead, rows, _ = x.shape
    tables = {}
    for name, table in ("cos", cos), ("sin", sin):
        if 2 < table.ndim == x.ndim - 1:
            table = table[..., None, :, :]  # the same for all heads
        broadcast(name, table, (*lead, rows, pairs))
        tables[name] = table
    shape = np.broadcast_shapes((1,) * len(lead) + (rows, pairs), *(table.shape for table in tables.values()))
    return [np.broadcast_to(table, shape) for table in tables.values()]


def _check_out(out, x, positions, cos=None, sin=None):
    positions = positions if isinstance(positions, np.ndarray) else None
    if type(out) is np.ndarray and _core.takes_rotated(out, x, positions):
        if cos is None or (_core.takes_rotated(out, x, cos) and _core.takes_rotated(out, x, sin)):
            return
    check_out(out, x.shape, x.dtype, {"positions": positions, "cos": cos, "sin": sin}, wider=False)
    if out is not x and not _same_elements(out, x) and np.shares_memory(out, x):
        raise ValueError("out overlaps x: it must be x itself, or not overlap it")


def _same_elements(a, b):
    return a.strides == b.strides and a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
