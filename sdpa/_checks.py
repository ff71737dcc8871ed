"""Checks of single arguments, for all functions.  The checks of a whole call are in _core/inputs.pxi.

Messages name the argument, the value given and the rule.  Only small arrays are copied: offsets, lengths,
sinks, slopes.
"""

import contextlib
import math
import operator

import numpy as np

# Names of the dtypes that the kernels compute with, narrow before wide.  NumPy has no bfloat16 of its own.  The package
# ml_dtypes brings it, which is never imported: the dtype is recognised by its name.
FLOATS = ("float16", "bfloat16", "float32", "float64")
NUMBERS = frozenset(np.dtype(name).num for name in FLOATS if name != "bfloat16")
INT64 = np.iinfo(np.int64)
MOST_AXES = 32  # of an array: NumPy 1 has no more, and NumPy 2, which has 64, broadcasts no more than these


def choice(names):
    """Names in a sentence: "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}"


def plain_array(name, array):
    if type(array) is np.ndarray:
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, and what it hides would count: give its data")
    try:
        return np.asarray(array)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} must be an array, or what NumPy makes one of: {error}") from None


def overlaps_itself(array):
    """Whether elements overlap.  They do not if each stride steps over everything that the smaller strides reach."""
    reach = array.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def is_float(dtype):
    """Whether the kernels compute with this dtype."""
    if dtype.num in NUMBERS:
        return dtype.isnative
    if dtype.name != "bfloat16":
        return False
    from ._core import know_bfloat16  # which imports this module

    know_bfloat16(dtype)
    return dtype.isnative


def float_dtype(given, *others):
    """The dtype that is meant, one that can be computed with or one of the others."""
    rule = f"it must be {choice((*others, *FLOATS))}, in native byte order"
    try:
        dtype = np.dtype(_bfloat16() if isinstance(given, str) and given == "bfloat16" else given)
    except TypeError:
        raise TypeError(f"dtype is {given!r}: {rule}") from None
    if given is None or (dtype not in others and not is_float(dtype)):
        raise TypeError(f"dtype is {given!r}: {rule}")
    return dtype


def _bfloat16():
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise ImportError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
    return bfloat16


@contextlib.contextmanager
def needs(module, *packages):
    """While what `module` needs is imported: an error that names both if one of the packages is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        message = f"{module} needs {error.name}: pip install {error.name}"
        raise ModuleNotFoundError(message, name=error.name) from None


def sum_dtype(dtype):
    """The dtype of sums, softmax and lse for a query of `dtype`: the same, but no narrower than float32."""
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


def may_attend(dtype, cache_dtype):
    """Whether queries of `dtype` may attend to a cache: to one of their dtype, or of a narrower one."""
    return dtype == cache_dtype or dtype.itemsize > cache_dtype.itemsize


def check_widths(query, key, value):
    """Raises if key or value (None: absent) has a wider dtype than query, or if bfloat16 meets float16."""
    inputs = {"query": query, "key": key, "value": value}
    for name in ("key", "value"):
        array = inputs[name]
        if array is not None and array.itemsize > query.itemsize:
            raise TypeError(f"{name} has dtype {array.dtype}: it must not be wider than query, {query.dtype}")
    dtypes = {name: array.dtype.name for name, array in inputs.items() if array is not None}
    if {"float16", "bfloat16"} <= set(dtypes.values()):
        given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"{given}: float16 and bfloat16 must not meet in one call")


def mask_array(name, given):
    mask = plain_array(name, given)
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} has dtype {mask.dtype}: it must be boolean; numbers to add are given as bias")
    return mask


def bias_array(name, given):
    bias = plain_array(name, given)
    if bias.dtype == np.bool_:
        raise TypeError(f"{name} has dtype bool: it must be floating; who may attend is given as mask")
    return float_array(name, bias, fewest_axes=0)


def float_array(name, array, fewest_axes=2):
    array = plain_array(name, array)
    if not is_float(array.dtype):
        raise TypeError(f"{name} has dtype {array.dtype}: it must be {choice(FLOATS)}, in native byte order")
    if array.ndim < fewest_axes:
        raise ValueError(f"{name} has shape {array.shape}: it must have at least two axes")
    if array.ndim > MOST_AXES:
        raise ValueError(f"{name} has {array.ndim} axes: it must have at most {MOST_AXES}")
    return array


def flag(name, given):
    if given is not True and given is not False and not isinstance(given, np.bool_):
        raise TypeError(f"{name} is {given!r}: it must be True or False")
    return bool(given)


def may_hold(dtype, result):
    """Whether an array of `dtype` takes results of dtype `result`: the same, or a wider one, which is not rounded."""
    return dtype == result or (is_float(dtype) and dtype.itemsize > result.itemsize)


def check_out(out, shape, dtype, inputs, wider=True):
    """Raises unless `out` can take a result of `shape` and `dtype` without touching the inputs (name: array)."""
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out is of type {type(out).__name__}: it must be an array")
    if out.shape != shape or not (may_hold(out.dtype, dtype) if wider else out.dtype == dtype):
        given, rule = f"shape {out.shape} and dtype {out.dtype}", f"{dtype}{', or a wider one' if wider else ''}"
        raise ValueError(f"out has {given}: the result has {shape} and {rule}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if out.size and overlaps_itself(out):
        raise ValueError(f"out has strides {out.strides}: its elements must not overlap one another")
    for name, array in inputs.items():
        if array is not None and np.shares_memory(out, array):
            raise ValueError(f"out overlaps {name}: inputs are never written")


def broadcast(name, array, shape):
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} has shape {array.shape}: it must broadcast to {shape}") from None


def window_and_causal(window, causal):
    """(left, right), None for no bound.  `causal` is right = 0."""
    causal = flag("causal", causal)
    left, right = (None, None) if window is None else sides(window)
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def sides(window):
    rule = "it must be (left, right), each a whole number or None"
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window is {window!r}: {rule}")
    if len(window) != 2:
        raise ValueError(f"window is {window!r}: {rule}")
    try:
        if any(isinstance(side, (bool, np.bool_)) for side in window):
            raise TypeError
        return [None if side is None else operator.index(side) for side in window]
    except TypeError:
        raise TypeError(f"window is {window!r}: {rule}") from None


def whole_number(name, given, least=1, bounded=True):
    """`given` as an int, checked; `bounded`: it is a size."""
    try:
        if isinstance(given, (bool, np.bool_)):
            raise TypeError
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name} is {given!r}: it must be a whole number") from None
    if number < least or (bounded and number >= 2**40):
        raise ValueError(f"{name} is {given}: it must be {least} or more{', and below 2**40' if bounded else ''}")
    return number


def in_order(numbers, dtype):
    """`numbers` as `dtype`, in C order and aligned: C reads them as an array."""
    numbers = np.ascontiguousarray(numbers, dtype)
    return numbers if numbers.flags.aligned else numbers.copy()


def whole_numbers(name, given, lead):
    """`given`, broadcast to one number for each batch, as int64."""
    numbers = plain_array(name, given)
    if numbers.dtype == object and all(isinstance(number, int) for number in numbers.flat):
        raise ValueError(f"{name} is {given}: it must fit into 64 bits with a sign")
    if numbers.dtype.kind not in "iu" and numbers.size:
        raise TypeError(f"{name} has dtype {numbers.dtype}: it must be a whole number, or one for each batch")
    if numbers.dtype == np.uint64 and (numbers > INT64.max).any():
        raise ValueError(f"{name} is {given}: it must fit into 64 bits with a sign")
    return np.ascontiguousarray(broadcast(name, numbers.astype(np.int64), lead)).reshape(-1)


def lengths_of(kv_lengths, lead, kv_len):
    """`kv_lengths` as int64, each from 0 to `kv_len`, which is a number, or one for each batch."""
    lengths = whole_numbers("kv_lengths", kv_lengths, lead)
    if ((lengths < 0) | (lengths > kv_len)).any():
        raise ValueError(f"kv_lengths are {kv_lengths}: they must be from 0 to the {kv_len} keys there are")
    return lengths


def per_head(name, given, lead, heads):
    numbers = plain_array(name, given)
    if numbers.dtype.kind not in "fiu" and numbers.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {numbers.dtype}: it must hold numbers, one for each head")
    whole = broadcast(name, numbers.astype(np.float64), (*lead, heads))
    return np.ascontiguousarray(whole).reshape(math.prod(lead), heads)


def number(name, given):
    try:
        if isinstance(given, (str, bytes, bool, np.bool_)):
            raise TypeError
        x = float(given)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {given!r}: it must be a number or None") from None
    except OverflowError:
        raise ValueError(f"{name} is {given}: it must be finite") from None
    if not math.isfinite(x):
        raise ValueError(f"{name} is {x}: it must be finite")
    return x


def epsilon(name, given):
    """What is added to a mean of squares."""
    try:
        eps = float(None if isinstance(given, (str, bytes, bool, np.bool_)) else given)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {given!r}: it must be a number") from None
    if not 0 <= eps < math.inf:
        raise ValueError(f"{name} is {given}: it must be 0 or more, and finite")
    return eps


def starts(name, given, rows_name, rows):
    """Cumulative lengths, as int64."""
    numbers = plain_array(name, given)
    if numbers.ndim != 1 or not numbers.size:
        raise ValueError(f"{name} has shape {numbers.shape}: it must have one axis, and one more number than sequences")
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {numbers.dtype}: it must hold whole numbers")
    if numbers[0] != 0 or numbers[-1] != rows or (numbers[1:] < numbers[:-1]).any():
        raise ValueError(f"{name} is {given}: it must go from 0, never falling, to the {rows} rows of {rows_name}")
    return in_order(numbers, np.int64)


def packed_rows(name, given):
    array = float_array(name, given)
    if array.ndim != 3:
        raise ValueError(f"{name} has shape {array.shape}: it must have three axes, (tokens, heads, size)")
    return array


def one_sequence(name, given):
    array = float_array(name, given)
    if array.ndim != 3:
        raise ValueError(
            f"{name} has shape {array.shape}: for one sequence it must have three axes, (heads, tokens, size)"
        )
    return array


def rows_of(name, given, rows_name, rows, sequences, one):
    """Where the rows of each sequence begin, and the end.  By default each of the `sequences` has one row."""
    if one and given is not None:
        raise ValueError(f"{name} is {given}: with one sequence, all of {rows_name} is its own")
    if one:
        return np.array([0, rows], np.int64)
    if given is None:
        if rows != sequences:
            raise ValueError(
                f"{rows_name} has {rows} rows for {sequences} sequences: without {name} each must have one"
            )
        return np.arange(sequences + 1, dtype=np.int64)
    numbers = starts(name, given, rows_name, rows)
    if len(numbers) != sequences + 1:
        raise ValueError(f"{name} has {len(numbers)} numbers for {sequences} sequences: it must have one more")
    return numbers
