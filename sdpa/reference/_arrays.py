"""Arrays in and out of the oracle: dtypes, shapes, and where results go."""

import numpy as np


def cast(array, dtype):
    """`array` in `dtype` (None: float64)."""
    with np.errstate(invalid="ignore", over="ignore"):
        return array.astype(np.float64 if dtype is None else dtype, copy=False)


def arithmetic(dtype):
    """The dtype in which to compute results of `dtype`: float32 if that has 16 bits, else `dtype` itself."""
    dtype = np.dtype(np.float64 if dtype is None else dtype)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def rounded(array, dtype):
    """`array` rounded to `dtype`, and ready to compute with."""
    return cast(cast(array, dtype), arithmetic(dtype))


def to_float(name, array, dtype, axes=1):
    """`array`, which must hold floats, rounded to `dtype`, with at least `axes` axes."""
    array = np.asarray(array)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {array.dtype}: it must be of a float type")
    if axes == 4 and array.ndim < 2:
        raise ValueError(f"{name} has shape {array.shape}: it must have two axes or more")
    return rounded(array, dtype).reshape((1,) * (axes - array.ndim) + array.shape)


def fit(name, array, shape):
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} has shape {np.shape(array)}: it must broadcast to {shape}") from None


def per_batch(name, integers, leading):
    integers = np.asarray(integers)
    if integers.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {integers.dtype}: it must be an integer, or one per batch")
    return fit(name, integers.astype(np.int64), leading)[..., None, None, None]


def per_head(name, numbers, heads, dtype):
    return fit(name, rounded(np.asarray(numbers), dtype), heads)[..., None, None]


def deliver(result, dtype, out, *inputs):
    """`result` in `dtype`; or `out`, if given, filled with the unrounded result."""
    if out is None:
        return cast(result, dtype)
    if out.shape != result.shape:
        raise ValueError(f"out has shape {out.shape}: it must have that of the result, {result.shape}")
    if any(np.shares_memory(out, np.asarray(x)) for x in inputs if x is not None):
        raise ValueError("out overlaps an input: inputs are never written")
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = result
    return out


# Rotary embedding.
